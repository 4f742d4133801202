"""torch's own norm and linear layer, one after the other, and both under torch.compile.

`--impl=jagbench.peers.torch_norm_linear` is eager: `rms_norm` or `layer_norm`, then `linear`, as a
training script calls them; `:compiled_chain` is the same function through torch.compile, for each
shape anew. Where preparation is left out of the time, the rows before the last offset are taken
beforehand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from jagbench.implementation import Prepared
from jagbench.inputs import Inputs

__version__ = torch.__version__

#: Shapes compiled in one process before that is an error.
RECOMPILATIONS = 4096

Layer = Callable[..., Tensor]


def chain(
    x: Tensor,
    weight: Tensor,
    norm: str,
    eps: float,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> Tensor:
    """The norm of rows x `[rows, features]`, rounded to x's dtype, and the linear layer."""
    features = x.shape[-1:]
    # torch's kernels want parameters of one dtype; float32 ones of half precision rows are rare.
    scale, shift = (None if t is None else t.to(x.dtype) for t in (norm_weight, norm_bias))
    if norm == "rms":
        normed = functional.rms_norm(x, features, scale, eps)
    else:
        normed = functional.layer_norm(x, features, scale, shift, eps)
    return functional.linear(normed, weight, bias)


@functools.cache
def compiled() -> Layer:
    """`chain` through torch.compile; beyond its limit of shapes that raises, never runs eagerly."""
    function: Layer = torch.compile(chain, dynamic=False, fullgraph=True)

    def limited(*tensors: Any, **options: Any) -> Tensor:
        settings: Any = torch._dynamo.config
        with settings.patch(
            recompile_limit=RECOMPILATIONS,
            accumulated_recompile_limit=RECOMPILATIONS,
            fail_on_recompile_limit_hit=True,
        ):
            return function(*tensors, **options)

    return limited


def eager() -> Layer:
    """`chain` as it is."""
    return chain


@dataclass(frozen=True)
class Peer:
    """An implementation of norm_linear; layer: gives the function that is called."""

    layer: Callable[[], Layer]
    notes: str
    __version__: str = torch.__version__

    def norm_linear(
        self,
        x: Tensor,
        weight: Tensor,
        offsets: Tensor | None,
        *,
        norm: str,
        eps: float,
        bias: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
    ) -> Tensor:
        """norm(x) weight^T + bias of the rows before the last offset; other rows are 0.

        Raises ValueError, with the numbers, for arguments that do not fit.
        """
        parameters = {"bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
        total = _rows(x, weight, offsets, norm, eps, parameters)
        out = self.layer()(x[:total], weight, norm, eps, bias, norm_weight, norm_bias)
        gap = x.shape[0] - total
        return torch.cat([out, out.new_zeros(gap, out.shape[1])]) if gap else out

    def prepare(self, operator: str, inputs: Inputs) -> Prepared | None:
        """The call on the rows before the last offset; None for other operators."""
        if operator != "norm_linear":
            return None
        t, layer = inputs.tensors(), self.layer()
        total = inputs.call(_rows_of)
        options = inputs.options
        upstream = inputs.upstream
        if upstream is None:
            upstream = t["x"].new_zeros(t["x"].shape[0], t["weight"].shape[0])

        def call(**tensors: Tensor) -> Tensor:
            return layer(norm=options["norm"], eps=options["eps"], **tensors)

        def unpack(name: str, tensor: Tensor) -> Tensor:
            gap = t["x"].shape[0] - total
            if name not in ("out", "grad x") or not gap:
                return tensor
            return torch.cat([tensor, tensor.new_zeros(gap, tensor.shape[1])])

        kept = {n: x[:total] if n == "x" else x for n, x in t.items() if n != "offsets"}
        return Prepared(kept, call, upstream[:total], unpack)

    def configuration(self, operator: str, inputs: Inputs) -> Mapping[str, str]:
        """How the chain is run."""
        return {"library": self.__version__, "mode": self.notes}


def _rows_of(x: Tensor, weight: Tensor, offsets: Tensor | None, **options: Any) -> int:
    """`_rows` of a call as `Inputs` makes it."""
    norm, eps = options.pop("norm"), options.pop("eps")
    return _rows(x, weight, offsets, norm, eps, options)


def _rows(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    norm: str,
    eps: float,
    parameters: Mapping[str, Tensor | None],
) -> int:
    """Rows before the last offset; ValueError for what does not fit."""
    if norm not in ("rms", "layer") or not eps >= 0:
        raise ValueError(f"norm must be 'rms' or 'layer' and eps at least 0, got {norm!r}, {eps}")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or not weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if not x.is_floating_point() or weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(f"x is {x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}")
    if norm == "rms" and parameters.get("norm_bias") is not None:
        raise ValueError(f"RMSNorm of {x.shape[1]} features has no norm_bias")
    for name, value in parameters.items():
        width = weight.shape[0] if name == "bias" else x.shape[1]
        if value is not None and (value.shape != (width,) or not value.is_floating_point()):
            raise ValueError(f"{name} must be [{width}], got {value.dtype} {tuple(value.shape)}")
    if offsets is None:
        return x.shape[0]
    if offsets.dim() != 1 or offsets.numel() == 0 or offsets.is_floating_point():
        raise ValueError(f"offsets must be [batch + 1] integers, got {tuple(offsets.shape)}")
    if offsets.device != x.device:
        raise ValueError(f"offsets are on {offsets.device}, x on {x.device}")
    ends = offsets.tolist()
    if ends[0] != 0 or ends != sorted(ends) or ends[-1] > x.shape[0]:
        raise ValueError(f"offsets from {ends[0]} to {ends[-1]} do not fit {x.shape[0]} rows")
    return int(ends[-1])


_EAGER = Peer(eager, "eager")
norm_linear = _EAGER.norm_linear
prepare = _EAGER.prepare
configuration = _EAGER.configuration
#: The same through torch.compile (`--impl=jagbench.peers.torch_norm_linear:compiled_chain`).
compiled_chain = Peer(compiled, "torch.compile")
