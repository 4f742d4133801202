"""What the kernels of a norm that quantises are compiled to ahead of time."""

from __future__ import annotations

from jagbench.ahead_of_time import ARCHITECTURES, CompileCase
from jagbench.impl.kernels.mx_launch import Format
from jagbench.impl.kernels.mx_norm_launch import gradient_tiles, mx_norm_tiles, norm_constants
from jagbench.mx import ALONG_COLUMNS, SQUARE

_MODULE = "jagbench.impl.kernels.mx_norm_kernels"
_NO_PRODUCT: dict[int, str | None] = dict.fromkeys(ARCHITECTURES)
_MANY = 1 << 20
_WIDE = ("LDG.E.128", "STG.E.128")
_CONVERTS, _OLD = (90, 100, 120), (80,)


def _counts(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def _norm(
    dtype: str,
    norm: str,
    form: Format,
    features: int,
    tag: str = "",
    offsets: str | None = None,
    convert: bool = True,
    affine: bool = True,
) -> CompileCase:
    """A norm of `features`; convert: by cvt, for the architectures that have it."""
    tiles = mx_norm_tiles(form.block, _MANY, features, form.swizzled, interpreted=False)
    nearest = form.seed is None and form.elem_dtype != "e2m1"
    convert = convert and nearest
    present = {"weight": affine, "bias": affine and norm == "layer", "mean_out": norm == "layer"}
    signature = {
        "x": f"*{dtype}", "codes": "*u8", "scales": "*u8", "rstd_out": "*fp32", "eps": "fp32",
        **{name: "*fp32" for name, given in present.items() if given},
        **({} if offsets is None else {"offsets": offsets}),
        **_counts("rows", "end", "columns", "scale_rows", "batch", "row_tiles", "x_matrix",
                  "x_row", "codes_matrix", "codes_row", "scales_matrix", "scales_row",
                  "draw_matrix", "draw_row", "seed_low", "seed_high"),
    }  # fmt: skip
    constants = {
        **{name: None for name, given in present.items() if not given},
        **({"offsets": None} if offsets is None else {}), **norm_constants(form),
        "CENTRED": norm == "layer", "CONVERT": convert, "WHOLE": tiles.columns >= features,
        "FULL": features % tiles.columns == 0, "ROWS": tiles.rows, "COLUMNS": tiles.columns,
    }  # fmt: skip
    block = f"{form.block[0]}x{form.block[1]}"
    bits = "-bits" * (nearest and not convert)
    return CompileCase(
        name=f"mx_{norm}_norm-{block}-{features}{tag}-{form.elem_dtype}{bits}-{dtype}",
        kernel=f"{_MODULE}:mx_norm_kernel",
        signature=signature,
        constexprs=constants,
        aligned=("x", "codes", "scales", "columns", "x_matrix", "x_row", "codes_matrix",
                 "codes_row", *(name for name, given in present.items() if given)),
        num_warps=tiles.num_warps,
        dtype=dtype,
        architectures=ARCHITECTURES if not nearest else _CONVERTS if convert else _OLD,
        matrix_opcode=_NO_PRODUCT,
        opcodes=("LDG.E.128", "F2FP") if convert else ("LDG.E.128",),
    )  # fmt: skip


def _gradient(dtype: str, norm: str, features: int, offsets: str | None = None) -> CompileCase:
    tiles = gradient_tiles(_MANY, features, interpreted=False)
    layer = norm == "layer"
    return CompileCase(
        name=f"mx_norm_gradient-{norm}-{features}-{dtype}",
        kernel=f"{_MODULE}:mx_norm_gradient_kernel",
        signature={
            "d_out": f"*{dtype}", "x": f"*{dtype}", "dx": f"*{dtype}", "weight": "*fp32",
            "rstd": "*fp32", "d_weight": "*fp32",
            **({"mean": "*fp32", "d_bias": "*fp32"} if layer else {}),
            **({} if offsets is None else {"offsets": offsets}),
            **_counts("rows", "middle", "batch", "columns"),
        },
        constexprs={
            **({} if layer else {"mean": None, "d_bias": None}),
            **({"offsets": None} if offsets is None else {}), "JAGGED": offsets is not None,
            "ROWS": tiles.rows, "COLUMNS": tiles.columns,
        },
        aligned=("d_out", "x", "dx", "weight", "d_weight", "columns"),
        num_warps=tiles.num_warps,
        dtype=dtype,
        matrix_opcode=_NO_PRODUCT,
        opcodes=_WIDE,
    )  # fmt: skip


_ROW, _BOTH = ALONG_COLUMNS, SQUARE

CASES: tuple[CompileCase, ...] = (
    *(
        _norm("bf16", "rms", Format("e4m3", block), 512, convert=convert)
        for block in (_ROW, _BOTH)
        for convert in (True, False)
    ),
    _norm("fp32", "layer", Format("e5m2", _ROW), 4096),
    _norm("bf16", "rms", Format("e4m3", _ROW, seed=1), 512, "-stochastic", affine=False),
    # Rows read twice, sequences, and the scales that tensor cores read.
    _norm("bf16", "layer", Format("e4m3", _BOTH, swizzled=True), 1024, "-jagged", "*i32"),
    _gradient("bf16", "layer", 1024, "*i64"),
)
