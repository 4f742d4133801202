"""What the Hopper MX product is compiled to ahead of time."""

from __future__ import annotations

import torch

from jagbench.ahead_of_time import CompileCase
from jagbench.impl.kernels.hopper.mx_product_launch import (
    COLUMNS,
    DEPTH,
    ROWS,
    STORED,
    Tiling,
    tiling_of,
)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Bytes of stack a thread: scalars of a tile and one or two of a stage where 160 registers hold 128
#: sums; what the producer has of scales that it reads byte by byte.
_SCALARS, _BYTES = 64, 128


def _product(
    dtype: str, b_square: bool, tiling: Tiling | None = None, spill_limit: int = 0
) -> CompileCase:
    """b_square: whether B has square blocks."""
    tiling = tiling or tiling_of(_DTYPES[dtype], b_square)
    blocks = "32x32" if b_square else "1x32"
    return CompileCase(
        name=f"hopper_mx_product-{blocks}-{tiling.rows}x{COLUMNS}-{dtype}",
        kernel="jagbench.impl.kernels.hopper.mx_product:mx_product_kernel",
        signature={
            "a_desc": f"tensordesc<fp8e4nv[{ROWS}, {DEPTH}]>",
            "b_desc": f"tensordesc<fp8e4nv[{COLUMNS}, {DEPTH}]>",
            "out_desc": f"tensordesc<{dtype}[{ROWS}, {STORED}]>",
            "a_scales": "*fp32", "b_scales": "*fp32",
            **dict.fromkeys(("steps", "row_tiles", "column_tiles"), "i32"),
        },
        constexprs={
            "GROUPS": tiling.groups, "STAGES": tiling.stages, "PARTS": tiling.parts,
            "B_SQUARE": b_square,
        },
        aligned=("a_scales", "b_scales"),
        num_warps=4,
        dtype=dtype,
        architectures=(90,),
        matrix_opcode={90: "QGMMA"},
        opcodes=("UTMALDG", "UTMASTG", "USETMAXREG", "LDGSTS"),
        max_registers=tiling.registers,
        spill_limit=spill_limit,
    )  # fmt: skip


CASES: tuple[CompileCase, ...] = (
    _product("bf16", True, spill_limit=_SCALARS),
    _product("bf16", False),
)
