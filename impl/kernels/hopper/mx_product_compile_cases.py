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
    dtype: str,
    squares: tuple[bool, bool],
    words: bool = True,
    tiling: Tiling | None = None,
    spill_limit: int = 0,
) -> CompileCase:
    """squares: whether A and B have square blocks. words: whether scales are read in words."""
    tiling = tiling or tiling_of(_DTYPES[dtype], squares[1])
    blocks = "-".join("32x32" if square else "1x32" for square in squares)
    tag = f"{64 * tiling.groups}x{128 * tiling.halves}{'' if words else '-bytes'}"
    return CompileCase(
        name=f"hopper_mx_product-{blocks}-{tag}-{dtype}",
        kernel="jagbench.impl.kernels.hopper.mx_product:mx_product_kernel",
        signature={
            "a_desc": f"tensordesc<fp8e4nv[{ROWS}, {DEPTH}]>",
            "b_desc": f"tensordesc<fp8e4nv[{COLUMNS}, {DEPTH}]>",
            "out_desc": f"tensordesc<{dtype}[{ROWS}, {STORED}]>",
            "a_scales": "*u8", "b_scales": "*u8",
            **dict.fromkeys(("rows", "columns", "depth", "row_tiles", "column_tiles"), "i32"),
        },
        constexprs={
            "GROUPS": tiling.groups, "HALVES": tiling.halves, "STAGES": tiling.stages,
            "OVERLAP": tiling.overlap, "A_SQUARE": squares[0], "B_SQUARE": squares[1],
            "WORDS": words,
        },
        aligned=("a_scales", "b_scales"),
        num_warps=4,
        dtype=dtype,
        architectures=(90,),
        matrix_opcode={90: "QGMMA"},
        opcodes=("UTMALDG", "UTMASTG", "USETMAXREG"),
        max_registers=tiling.registers,
        spill_limit=spill_limit,
    )  # fmt: skip


CASES: tuple[CompileCase, ...] = (
    _product("bf16", (False, True), spill_limit=_SCALARS),
    _product("fp32", (True, True), words=False, spill_limit=_BYTES),
    _product("bf16", (False, False)),
    _product("fp16", (True, False), words=False, spill_limit=_BYTES),
)
