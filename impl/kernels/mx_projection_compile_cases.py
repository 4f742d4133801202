"""What the linear layer that quantises its result is compiled to ahead of time."""

from __future__ import annotations

from jagbench.ahead_of_time import CompileCase
from jagbench.impl.kernels.mx_launch import Format
from jagbench.impl.kernels.mx_projection_launch import projection_constants, projection_tiles
from jagbench.mx import ALONG_COLUMNS, SQUARE

_MODULE = "jagbench.impl.kernels.mx_projection_kernels"
_MANY = 1 << 20


def _projection(
    form: Format, architectures: tuple[int, ...], offsets: str | None = None, bias: bool = False
) -> CompileCase:
    """512 features to 512 columns, bf16; codes by cvt where the architecture has it."""
    tiles = projection_tiles(form, 2, _MANY, 512, 512, interpreted=False)
    counts = ("rows", "end", "columns", "features", "scale_rows", "batch", "steps",
              "column_tiles", "x_row", "weight_row", "scales_row")  # fmt: skip
    tag = "dense" if offsets is None else "jagged"
    convert = min(architectures) >= 90
    return CompileCase(
        name=f"mx_projection-{form.block[0]}x{form.block[1]}-{tag}{'-bits' * (not convert)}-bf16",
        kernel=f"{_MODULE}:mx_projection_kernel",
        signature={
            "x": "*bf16", "weight": "*bf16", "codes": "*u8", "scales": "*u8",
            **({"bias": "*fp32"} if bias else {}),
            **({} if offsets is None else {"offsets": offsets}),
            **dict.fromkeys(counts, "i32"),
        },
        constexprs={
            **({} if bias else {"bias": None}), **({"offsets": None} if offsets is None else {}),
            **projection_constants(form), "CONVERT": convert, "EVEN": True,
            "ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth,
        },
        aligned=("x", "weight", "codes", "scales", "columns", "features", "x_row", "weight_row",
                 *(["bias"] if bias else [])),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        dtype="bf16",
        architectures=architectures,
        opcodes=("F2FP",) if convert else (),
    )  # fmt: skip


CASES: tuple[CompileCase, ...] = (
    _projection(Format("e4m3", ALONG_COLUMNS), (90, 100, 120)),
    _projection(Format("e4m3", ALONG_COLUMNS), (80,)),
    _projection(Format("e4m3", SQUARE), (90, 100, 120), "*i64", bias=True),
)
