"""A right norm that quantises, by float64 arithmetic; its steps may be exchanged.

Statistics and normed rows are those of `norming`, codes those of `quantising`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wrong.norming import Layer
from wrong.quantising import Job


def check(layer: Layer) -> None:
    """Raise ValueError, with the numbers, for what does not fit the norm."""
    if layer.norm not in ("rms", "layer") or not layer.eps >= 0:
        raise ValueError(f"norm {layer.norm!r} with eps {layer.eps}")
    if layer.norm == "rms" and layer.norm_bias is not None:
        raise ValueError(f"no norm_bias {tuple(layer.norm_bias.shape)} under RMSNorm")
    for value in (layer.norm_weight, layer.norm_bias):
        if value is not None and value.shape != layer.x.shape[-1:]:
            raise ValueError(f"a parameter {tuple(value.shape)}, want {tuple(layer.x.shape[-1:])}")
        if value is not None and not value.is_floating_point():
            raise ValueError(f"a parameter of {value.dtype}, 16 or 32 bits of a float are wanted")


def affine(layer: Layer, unit: Tensor) -> Tensor:
    """The norm's own parameters."""
    return unit * layer.of("norm_weight", 1.0) + layer.of("norm_bias", 0.0)


class NormQuantiser:
    """The operator; the steps are those of the class that inherits it."""

    def mx_norm(
        self,
        x: Tensor,
        offsets: Tensor | None = None,
        *,
        norm: str,
        eps: float,
        norm_weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
        elem_dtype: str = "e4m3",
        block: tuple[int, int] = (1, 32),
        scale_mode: str = "rceil",
        rounding: str = "nearest",
        seed: int | None = None,
    ) -> Any:
        """Codes and scales of the normed rows of x."""
        steps: Any = self
        layer = Layer(norm, eps, x, x, None, norm_weight, norm_bias)
        steps.check_quantize(x, offsets, Job(elem_dtype, block, scale_mode, seed), rounding)
        check(layer)
        rows = x.detach().double().reshape(-1, x.shape[-1])
        given = (None if t is None else t.detach().double() for t in (norm_weight, norm_bias))
        wide = Layer(norm, eps, rows, rows, None, *given)
        unit = steps.normalise(wide, rows, steps.measure(wide, rows))
        normed = steps.hand_over(wide, unit).view(x.shape)
        return steps.mx_quantize(
            normed, offsets, elem_dtype=elem_dtype, block=block, scale_mode=scale_mode,
            rounding=rounding, seed=seed,
        )  # fmt: skip
