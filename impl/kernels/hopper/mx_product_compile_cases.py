"""What the Hopper MX product is compiled to ahead of time."""

from __future__ import annotations

from jagbench.ahead_of_time import CompileCase
from jagbench.impl.kernels.hopper.mx_product_launch import (
    COLUMNS,
    DEPTH,
    REGISTERS,
    ROWS,
    STAGES,
    STORED,
    TILE,
)

#: Bytes of stack a thread: scalars of a tile.
_SCALARS = 32


def _product(dtype: str, b_square: bool) -> CompileCase:
    """b_square: whether B has square blocks."""
    return CompileCase(
        name=f"hopper_mx_product-{'32x32' if b_square else '1x32'}-{TILE}x{COLUMNS}-{dtype}",
        kernel="jagbench.impl.kernels.hopper.mx_product:mx_product_kernel",
        signature={
            "a_desc": f"tensordesc<fp8e4nv[{ROWS}, {DEPTH}]>",
            "b_desc": f"tensordesc<fp8e4nv[{COLUMNS}, {DEPTH}]>",
            "out_desc": f"tensordesc<{dtype}[{ROWS}, {STORED}]>",
            "a_scales": "*fp32", "b_scales": "*fp32",
            **dict.fromkeys(("steps", "row_tiles", "column_tiles"), "i32"),
        },
        constexprs={"STAGES": STAGES, "B_SQUARE": b_square},
        aligned=("a_scales", "b_scales"),
        num_warps=4,
        dtype=dtype,
        architectures=(90,),
        matrix_opcode={90: "QGMMA"},
        opcodes=("UTMALDG", "UTMASTG", "USETMAXREG", "LDGSTS"),
        max_registers=REGISTERS,
        spill_limit=_SCALARS,
    )  # fmt: skip


CASES: tuple[CompileCase, ...] = (_product("bf16", True), _product("fp32", False))
