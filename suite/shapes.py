"""Hand-made calls: for properties whose smallest input is one certain shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.mx import AttentionRecipe
from jagbench.reference import OPERATORS
from jagbench.reference.rotary import position_table
from jagbench.spec import SHARED, Operator

#: Values for keywords an operator has no default for.
#: A recipe rounds to nearest: no result then hangs on the numbers of the rows.
REQUIRED = {
    "activation": "silu",
    "norm": "rms",
    "eps": 1e-6,
    "recipe": AttentionRecipe(gradient_rounding="nearest"),
}


def attention(
    operator: Operator | str,
    q_lengths: Sequence[int],
    k_lengths: Sequence[int] | None = None,
    *,
    heads: int = 2,
    kv_heads: int | None = None,
    dim: int = 32,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **options: Any,
) -> Inputs:
    """A call of an operator of jagged values on standard normal numbers.

    k_lengths: those of the queries if None, and for an operator whose arguments share one offsets.
    heads, dim: of q, or of the one argument x. A rotary table that an operator cannot do without
    turns whole heads by position. Beside a weight `[v_dim, dim]` x has dim features and no heads.
    Options the operator does not have are refused.
    """
    record = OPERATORS[operator] if isinstance(operator, str) else operator
    k_lengths = q_lengths if k_lengths is None or not has_keys(record) else k_lengths
    generator = torch.Generator().manual_seed(seed)
    columns = heads if kv_heads is None else kv_heads
    v_dim = dim if v_dim is None else v_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    lengths = {"k_offsets": k_lengths, "k": k_lengths, "v": k_lengths}
    sizes: dict[str, tuple[int, ...]] = {
        "q": (heads, dim), "x": (heads, dim), "k": (columns, dim), "v": (columns, v_dim),
    }  # fmt: skip
    arguments: dict[str, Any] = {}
    names = required_arguments(record)
    if "weight" in names:
        sizes["x"] = (dim,)
    for name in names:
        rows = lengths.get(name, q_lengths)
        if name in record.offsets_arguments:
            arguments[name] = offsets(rows, device)
        elif name == "table":
            arguments[name] = rotary_table(max(q_lengths, default=0), dim, dtype, device)
        elif name == "weight":
            arguments[name] = draw(v_dim, dim)
        else:
            arguments[name] = draw(sum(rows), *sizes[name])
    known = record.signature.parameters
    if unknown := set(options) - set(known):
        raise ValueError(f"{record.name} has no options {sorted(unknown)}")
    required = {n: v for n, v in REQUIRED.items() if n in known}
    width = (v_dim,) if "weight" in names else (heads, v_dim if "v" in arguments else dim)
    upstream = draw(sum(q_lengths), *width) if record.differentiable else None
    return Inputs(record, arguments, {**required, **options}, upstream)


def has_keys(operator: Operator) -> bool:
    """Whether an operator's keys may be of other lengths than its queries."""
    return "k_offsets" in operator.offsets_arguments


def required_arguments(operator: Operator) -> list[str]:
    """Names of the positional arguments."""
    parameters = operator.signature.parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def rotary_table(
    positions: int, dim: int, dtype: torch.dtype, device: torch.device | str, first: int = 0
) -> Tensor:
    """A rotary table by position `[positions, dim]` from position `first` on, float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    return position_table(first + positions, dim)[first:].to(device=device, dtype=wide)


def offsets(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """int64 offsets `[batch + 1]` of lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device)


def tiled(inputs: Inputs, times: int) -> Inputs:
    """The batch repeated `times` times (no padding, no bias)."""

    def repeat(name: str, tensor: Tensor) -> Tensor:
        if name in inputs.operator.offsets_arguments:
            lengths = tensor.diff().repeat(times)
            return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        if inputs.layout_of(name if name != "upstream" else _first(inputs)) == SHARED:
            return tensor
        return tensor.repeat(times, *[1] * (tensor.dim() - 1))

    return inputs.map(repeat)


def _first(inputs: Inputs) -> str:
    """The first argument of the call."""
    return next(iter(inputs.arguments))
