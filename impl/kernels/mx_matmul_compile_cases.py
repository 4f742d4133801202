"""What the kernels of MX products are compiled to ahead of time."""

from __future__ import annotations

from typing import Any

from jagbench.ahead_of_time import ARCHITECTURES, MATRIX_OPCODES, CompileCase
from jagbench.impl.kernels.mx_launch import Format, mx_tiles
from jagbench.impl.kernels.mx_matmul_launch import TABLE, Codes
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE, Block, ElemDtype

_MODULE = "jagbench.impl.kernels.mx_matmul_kernels"
_MANY = 1 << 20
#: SASS opcode of the block-scaled matrix instruction.
_SCALED = {100: "UTCQMMA", 120: "QMMA"}
_NATIVE = {100: TABLE[10], 120: TABLE[12]}
_SIZES = ("rows", "columns", "depth")
_COUNTS = ("run", "row_tiles", "column_tiles", "runs", "out_batch", "out_run")
_STRIDES = tuple(f"{t}_batch" for t in ("a", "as", "b", "bs"))
#: Strides that are 1: of operands whose depth is contiguous, and of such whose rows are.
_BY_ROWS = ("a_depth", "as_depth", "b_depth", "bs_depth")
_BY_DEPTH = ("a_row", "as_row", "b_column", "bs_column")


def _operand(side: str, elem_dtype: ElemDtype, block: Block) -> dict[str, Any]:
    none: Any = None
    return Codes(none, none, elem_dtype, block).constants(side)


def _product(
    tag: str, architecture: int, a: ElemDtype, b: ElemDtype, by_rows: bool, out: str = "bf16"
) -> CompileCase:
    """A product of a in blocks along the depth and b in squares, or both along the depth."""
    native = architecture in _SCALED
    tiles = _NATIVE[architecture] if native else TABLE[0]
    unit, other = (_BY_ROWS, _BY_DEPTH) if by_rows else (_BY_DEPTH, _BY_ROWS)
    signature = {
        **dict.fromkeys(("a", "a_scales", "b", "b_scales"), "*u8"), "out": f"*{out}",
        **dict.fromkeys((*_SIZES, *_COUNTS, *_STRIDES, *other), "i32"),
    }  # fmt: skip
    constants = {
        "bias": None, **dict.fromkeys(unit, 1),
        **_operand("A", a, ALONG_COLUMNS), **_operand("B", b, SQUARE if by_rows else ALONG_COLUMNS),
        "NATIVE": native, "CAST": architecture >= 90, "EVEN": True,
        "FAR": False,
        "ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth,
    }  # fmt: skip
    wide = ("a_row", "b_column") if by_rows else ("a_depth", "b_depth")
    pointers = ("a", "a_scales", "b", "b_scales", "out")
    return CompileCase(
        name=f"mx_product-{tag}-{a}-{b}-{out}-sm{architecture}",
        kernel=f"{_MODULE}:mx_product_kernel",
        signature=signature,
        constexprs=constants,
        aligned=(*pointers, *_SIZES, "a_batch", "b_batch", *wide),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        dtype=out,
        architectures=(architecture,),
        matrix_opcode=_SCALED if native else MATRIX_OPCODES,
        opcodes=("LDGSTS",),
        ptx=("block_scale",) if native else (),
        # Two of the scalars before the loop, on 10.0 (triton 3.6.0).
        spill_limit=16,
    )  # fmt: skip


def _round(tag: str, form: Format, convert: bool, summed: bool = False) -> CompileCase:
    """x bf16 of 512 columns, quantised and dequantised; convert: by cvt, where there is one."""
    tiles = mx_tiles(form.block, _MANY, 512, form.hadamard, form.seed is not None, False)
    counts = ("used", "rows", "columns", "column_tiles", "x_row", "seed_low", "seed_high",
              "turn_low", "turn_high")  # fmt: skip
    constants = {key: value for key, value in form.constants.items() if key != "SWIZZLED"}
    return CompileCase(
        name=f"mx_round-{tag}-{form.elem_dtype}{'-bits' * (not convert)}-bf16",
        kernel=f"{_MODULE}:mx_round_kernel",
        signature={
            "x": "*bf16", "out": "*bf16", **({"sums": "*fp32"} if summed else {}),
            **dict.fromkeys(counts, "i32"),
        },
        constexprs={
            **constants, **({} if summed else {"sums": None}), "STEPS": 16 if summed else 1,
            "CONVERT": convert and form.seed is None, "CAST": convert,
            "HAS_INFINITY": form.elem_dtype == "e5m2", "ROWS": tiles.rows, "COLUMNS": tiles.columns,
        },
        aligned=("x", "out", "columns", "x_row"),
        num_warps=tiles.num_warps,
        architectures=(90,) if convert else (80,),
        matrix_opcode=dict.fromkeys(ARCHITECTURES),
        opcodes=("LDG.E.128", "STG.E.128"),
    )  # fmt: skip


CASES: tuple[CompileCase, ...] = (
    *(_product("by_rows", arch, "e4m3", "e4m3", True) for arch in ARCHITECTURES),
    *(_product("by_depth", arch, "e4m3", "e4m3", False, "fp32") for arch in (90, 100, 120)),
    *(_product("mixed", arch, "e5m2", "e2m1", True) for arch in (100, 120)),
    _round("1x32", Format("e4m3", ALONG_COLUMNS), True),
    _round("1x32", Format("e4m3", ALONG_COLUMNS), False),
    _round("stochastic-1x32", Format("e4m3", ALONG_COLUMNS, seed=1), True, summed=True),
    _round("hadamard32-32x1", Format("e4m3", ALONG_ROWS, seed=1, hadamard=32), True),
)
