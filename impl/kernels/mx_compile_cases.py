"""What the MX kernels are compiled to ahead of time."""

from __future__ import annotations

from typing import Any

from jagbench.ahead_of_time import ARCHITECTURES, CompileCase
from jagbench.impl.kernels.mx_launch import ELEMENTS, Format, MxTiles, mx_tiles
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE, Block, ElemDtype

_MODULE = "jagbench.impl.kernels.mx_kernels"
_NO_PRODUCT: dict[int, str | None] = dict.fromkeys(ARCHITECTURES)
_MANY = 1 << 20
#: 16 bytes a thread at once, in and out.
_WIDE = ("LDG.E.128", "STG.E.128")
_CONVERTS, _OLD = (90, 100, 120), (80,)
#: Where what differs by layout alone is compiled.
_FEW = (90, 120)


def _counts(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def _tiles(
    block: Block, columns: int, hadamard: int | None = None, random: bool = False
) -> MxTiles:
    return mx_tiles(block, _MANY, columns, hadamard, random, interpreted=False)


def _quantize(
    dtype: str,
    form: Format,
    tag: str,
    offsets: str | None = None,
    convert: bool = True,
    **others: Any,
) -> CompileCase:
    """A quantisation of 1024 columns; convert: by cvt, for the architectures that have it."""
    tiles = _tiles(form.block, 1024, form.hadamard, form.seed is not None)
    nearest = form.seed is None and form.elem_dtype != "e2m1"
    convert = convert and nearest
    signature = {
        "x": f"*{dtype}", "codes": "*u8", "scales": "*u8",
        **({} if offsets is None else {"offsets": offsets}),
        **_counts("rows", "end", "columns", "scale_rows", "batch", "row_tiles", "column_tiles",
                  "x_matrix", "x_row", "codes_matrix", "codes_row", "scales_matrix", "scales_row",
                  "draw_matrix", "draw_row", "seed_low", "seed_high", "turn_low", "turn_high"),
    }  # fmt: skip
    constants = {
        **({"offsets": None} if offsets is None else {}), **form.constants, "CONVERT": convert,
        "ROWS": tiles.rows, "COLUMNS": tiles.columns,
    }  # fmt: skip
    architectures: tuple[int, ...] = (
        ARCHITECTURES if not nearest else _CONVERTS if convert else _OLD
    )
    if offsets is not None or form.swizzled or form.hadamard or form.elem_dtype != "e4m3":
        architectures = tuple(arch for arch in architectures if arch in _FEW)
    return CompileCase(
        name=f"mx_quantize-{tag}-{form.elem_dtype}{'-bits' * (nearest and not convert)}-{dtype}",
        kernel=f"{_MODULE}:mx_quantize_kernel",
        signature=signature,
        constexprs=constants,
        aligned=("x", "codes", "scales", "columns", "x_matrix", "x_row", "codes_matrix",
                 "codes_row"),
        num_warps=tiles.num_warps,
        dtype=dtype,
        architectures=architectures,
        matrix_opcode=_NO_PRODUCT,
        **{"opcodes": (*_WIDE, "F2FP") if convert else _WIDE, **others},
    )  # fmt: skip


def _dequantize(
    dtype: str, elem_dtype: ElemDtype, block: Block, offsets: str | None = None
) -> CompileCase:
    tiles = _tiles(block, 1024)
    signature = {
        "codes": "*u8", "scales": "*u8", "out": f"*{dtype}",
        **({} if offsets is None else {"offsets": offsets}),
        **_counts("rows", "columns", "batch", "row_tiles", "column_tiles", "codes_matrix",
                  "codes_row", "scales_matrix", "scales_row", "out_matrix", "out_row"),
    }  # fmt: skip
    constants = {
        **({"offsets": None} if offsets is None else {}), "BR": block[0], "BC": block[1],
        **ELEMENTS[elem_dtype].constants, "HAS_INFINITY": elem_dtype == "e5m2",
        "ROWS": tiles.rows, "COLUMNS": tiles.columns,
    }  # fmt: skip
    return CompileCase(
        name=f"mx_dequantize-{block[0]}x{block[1]}-{elem_dtype}-{dtype}",
        kernel=f"{_MODULE}:mx_dequantize_kernel",
        signature=signature,
        constexprs=constants,
        aligned=("codes", "scales", "out", "columns", "codes_matrix", "codes_row", "out_matrix",
                 "out_row"),
        num_warps=tiles.num_warps,
        dtype=dtype,
        matrix_opcode=_NO_PRODUCT,
        opcodes=_WIDE,
    )  # fmt: skip


_ROW, _COLUMN, _BOTH = ALONG_COLUMNS, ALONG_ROWS, SQUARE

CASES: tuple[CompileCase, ...] = (
    *(
        _quantize("bf16", Format("e4m3", block), f"{block[0]}x{block[1]}", convert=convert)
        for block in (_ROW, _COLUMN, _BOTH)
        for convert in (True, False)
    ),
    _quantize("bf16", Format("e5m2", _ROW), "1x32"),
    _quantize("fp32", Format("e4m3", _ROW), "1x32"),
    _quantize("fp32", Format("e4m3", _BOTH), "32x32"),
    _quantize("fp16", Format("e4m3", _ROW, "floor"), "floor"),
    _quantize("bf16", Format("e2m1", _ROW, "even"), "even"),
    _quantize("bf16", Format("e4m3", _ROW, seed=1), "stochastic-1x32"),
    _quantize("bf16", Format("e4m3", _BOTH, seed=1), "stochastic-32x32"),
    _quantize("bf16", Format("e5m2", _COLUMN, seed=1), "stochastic-32x1"),
    _quantize("bf16", Format("e4m3", _ROW), "jagged-1x32", "*i64"),
    _quantize("bf16", Format("e4m3", _COLUMN), "jagged-32x1", "*i32"),
    _quantize("bf16", Format("e4m3", _BOTH), "jagged-32x32", "*i32"),
    _quantize("bf16", Format("e4m3", _ROW, swizzled=True), "swizzled-1x32"),
    _quantize("bf16", Format("e4m3", _COLUMN, swizzled=True), "swizzled-32x1"),
    _quantize("bf16", Format("e4m3", _BOTH, swizzled=True), "swizzled-32x32"),
    _quantize("bf16", Format("e4m3", _ROW, hadamard=16), "hadamard16-1x32"),
    _quantize("bf16", Format("e4m3", _COLUMN, hadamard=32), "hadamard32-32x1"),
    _quantize("bf16", Format("e4m3", _COLUMN, seed=1, hadamard=32), "hadamard32-stochastic-32x1"),
    _quantize("bf16", Format("e4m3", _COLUMN, hadamard=64), "hadamard64-32x1"),
    _dequantize("bf16", "e4m3", _ROW),
    _dequantize("fp32", "e5m2", _COLUMN),
    _dequantize("bf16", "e4m3", _BOTH),
    _dequantize("fp16", "e2m1", _ROW),
)
