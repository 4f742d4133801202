"""SQNR of quantised tensors: scale modes, blocks, element types, roundings, the fused norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
from sqnr_bench import Bench, Row, decibels
from torch import Tensor

from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE, Block, ElemDtype, ScaleMode
from jagbench.reference import mx_dequantize
from jagbench.reference.mx_blocks import spread
from jagbench.reference.mx_formats import decode, decode_scales, encode, format_of
from jagbench.reference.mx_norm import mx_rms_norm
from jagbench.reference.norm import rms_norm

ROWS, COLUMNS = 512, 1024
DATA = ("normal", "outlier channels", "Student t, 3", "log-normal, 3")
#: Rows, columns and draws of the measurement of roundings.
SMALL, DRAWS = (128, 256), 64
#: Tokens, features and eps of the norm.
NORM, EPS = (512, 1024), 1e-6


def _quantised(bench: Bench, x: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Values, codes and scales; what a code means is the reference's to say."""
    codes, scales = bench.get("mx_quantize")(x, **options)
    form = {n: options[n] for n in ("elem_dtype", "block") if n in options}
    return mx_dequantize(codes, scales, dtype=torch.float64, **form), codes, scales


def scale_mode(bench: Bench) -> Iterator[Row]:
    """E4M3 in blocks of 1 x 32 under every rule of the scale.

    saturated: share of elements beyond the largest number under their scale; zeroed: share of
    those that are not 0 and become 0.
    """
    for data in DATA:
        x = bench.draw(data, "x", ROWS, COLUMNS)
        for mode in get_args(ScaleMode):
            found, _, scales = _quantised(bench, x, scale_mode=mode)
            wide = spread(decode_scales(scales), ALONG_COLUMNS, ROWS, COLUMNS)
            beyond = x.double().abs() > format_of("e4m3").largest * wide
            yield Row(
                {"data": data, "scale_mode": mode},
                {
                    "sqnr_db": decibels(found, x),
                    "saturated": float(beyond.double().mean()),
                    "zeroed": float(((found == 0) & (x != 0)).double().mean()),
                },
            )


def block(bench: Bench) -> Iterator[Row]:
    """E4M3, RCEIL in the three blocks, and FP8 with one scale (max / 448, float) a tensor."""
    blocks: dict[str, Block] = {"1x32": ALONG_COLUMNS, "32x1": ALONG_ROWS, "32x32": SQUARE}
    for data in DATA:
        x = bench.draw(data, "x", ROWS, COLUMNS)
        found = {n: _quantised(bench, x, block=shape)[0] for n, shape in blocks.items()}
        scale = x.double().abs().max() / format_of("e4m3").largest
        found["tensor"] = decode(encode(x.double() / scale, "e4m3"), "e4m3") * scale
        for name, value in found.items():
            yield Row(
                {"data": data, "block": name},
                {
                    "sqnr_db": decibels(value, x),
                    "zeroed": float(((value == 0) & (x != 0)).double().mean()),
                },
            )


def elem_dtype(bench: Bench) -> Iterator[Row]:
    """RCEIL in blocks of 1 x 32 by element type."""
    for data in DATA:
        x = bench.draw(data, "x", ROWS, COLUMNS)
        for name in get_args(ElemDtype):
            value = _quantised(bench, x, elem_dtype=name)[0]
            yield Row(
                {"data": data, "elem_dtype": name},
                {
                    "sqnr_db": decibels(value, x),
                    "zeroed": float(((value == 0) & (x != 0)).double().mean()),
                },
            )


def rounding(bench: Bench) -> Iterator[Row]:
    """E4M3 to nearest and stochastically: one draw, and the mean of 64.

    bias: sum of (mean - x) sign(x) over sum of |x|; bias_of_small: the same of the elements that
    rounding to nearest makes 0.
    """
    for data in ("normal", "log-normal, 3"):
        x = bench.draw(data, "x", *SMALL)
        wide = x.double()
        nearest = _quantised(bench, x)[0]
        small = (nearest == 0) & (wide != 0)
        draws = [
            _quantised(bench, x, rounding="stochastic", seed=DRAWS * bench.seed + i)[0]
            for i in range(DRAWS)
        ]
        for name, one, mean in (
            ("nearest", nearest, nearest),
            ("stochastic", draws[0], torch.stack(draws).mean(0)),
        ):
            lost = (mean - wide) * wide.sign()
            values = {
                "sqnr_db": decibels(one, x),
                "sqnr_of_mean_db": decibels(mean, x),
                "bias": float(lost.sum() / wide.abs().sum()),
            }
            if bool(small.any()):
                values["bias_of_small"] = float(lost[small].sum() / wide[small].abs().sum())
            yield Row({"data": data, "rounding": name}, values)


def norm(bench: Bench) -> Iterator[Row]:
    """RMSNorm and quantisation: fused (float32 goes to MX), and rounded to bfloat16 between."""
    fused = getattr(bench.implementation.namespace, "mx_rms_norm", None)
    if bench.implementation.name == "jagbench.reference":
        fused = mx_rms_norm
    if fused is None:
        raise NotImplementedError(f"{bench.implementation.name} has no mx_rms_norm")
    for data in ("normal", "outlier channels"):
        x = bench.draw(data, "x", *NORM)
        weight = (1 + bench.draw("normal", "weight", 1, NORM[1])[0] / 4).to(bench.dtype)
        truth = rms_norm(x.double(), weight.double(), eps=EPS)
        for shape, at in (("1x32", ALONG_COLUMNS), ("32x32", SQUARE)):
            codes, scales = fused(x, weight, eps=EPS, block=at)
            once = mx_dequantize(codes, scales, block=at, dtype=torch.float64)
            twice = _quantised(bench, truth.to(torch.bfloat16), block=at)[0]
            for name, value in (("float32", once), ("bfloat16", twice)):
                case = {"data": data, "block": shape, "between": name}
                yield Row({**case}, {"sqnr_db": decibels(value, truth)})


VALUE_MEASURES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "scale_mode": scale_mode,
    "block": block,
    "elem_dtype": elem_dtype,
    "rounding": rounding,
    "norm": norm,
}
