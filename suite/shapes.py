"""Hand-made calls: for properties whose smallest input is one certain shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS
from jagbench.spec import Operator

#: Values for keywords an operator has no default for.
REQUIRED = {"activation": "silu"}


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
    """A call of an operator of q, k, v and offsets on standard normal values.

    k_lengths: those of the queries if None. Options the operator does not have are refused.
    """
    record = OPERATORS[operator] if isinstance(operator, str) else operator
    k_lengths = q_lengths if k_lengths is None else k_lengths
    generator = torch.Generator().manual_seed(seed)
    columns = heads if kv_heads is None else kv_heads
    v_dim = dim if v_dim is None else v_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    arguments = {
        "q": draw(sum(q_lengths), heads, dim),
        "k": draw(sum(k_lengths), columns, dim),
        "v": draw(sum(k_lengths), columns, v_dim),
        "q_offsets": offsets(q_lengths, device),
        "k_offsets": offsets(k_lengths, device),
    }
    known = record.signature.parameters
    if unknown := set(options) - set(known):
        raise ValueError(f"{record.name} has no options {sorted(unknown)}")
    required = {n: v for n, v in REQUIRED.items() if n in known}
    upstream = draw(sum(q_lengths), heads, v_dim)
    return Inputs(record, arguments, {**required, **options}, upstream)


def offsets(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """int64 offsets `[batch + 1]` of lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device)


def tiled(inputs: Inputs, times: int) -> Inputs:
    """The batch repeated `times` times (no padding, no bias)."""

    def repeat(name: str, tensor: Tensor) -> Tensor:
        if name in inputs.operator.offsets_arguments:
            lengths = tensor.diff().repeat(times)
            return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return tensor.repeat(times, *[1] * (tensor.dim() - 1))

    return inputs.map(repeat)
