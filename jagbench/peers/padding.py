"""Packed rows to rows padded to one length, and back: copies, and so are their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagbench.peers.arguments import Lengths


@dataclass(frozen=True)
class Side:
    """Padding of one side: `slots[i]` is the row of packed row i in `[batch * longest]`."""

    slots: Tensor
    batch: int
    longest: int

    @staticmethod
    def of(lengths: Lengths, offsets: Tensor, longest: int, at_end: bool) -> Side:
        """Slots under offsets `[batch + 1]`, sequences at the start or at the end of their rows."""
        counts, batch = offsets.diff().long(), lengths.host.numel()
        first = torch.arange(batch, device=offsets.device) * longest - offsets[:-1]
        first = first + (longest - counts if at_end else 0)
        rows = torch.repeat_interleave(first, counts, output_size=lengths.total)
        return Side(rows + torch.arange(lengths.total, device=offsets.device), batch, longest)


class Pad(torch.autograd.Function):
    """Packed `[total, heads, d]` to zero-padded `[rows, heads, width]`, row i at slots[i]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        slots: Tensor,
        rows: int,
        width: int,
        column: tuple[float, float] | None,
    ) -> Tensor:
        """column: of width x.shape[2], what real and what padded rows hold in it."""
        ctx.save_for_backward(slots)
        ctx.columns = x.shape[2]
        padded = x.new_zeros(rows, x.shape[1], width)
        padded[..., : x.shape[2]].index_copy_(0, slots, x)
        if column is not None:
            real, padding = column
            padded[..., x.shape[2]] = padding
            padded[..., x.shape[2]].index_fill_(0, slots, real)
        return padded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Rows of the packed gradient."""
        (slots,) = ctx.saved_tensors
        gradient = gradients[0][..., : ctx.columns].index_select(0, slots)
        return gradient, None, None, None, None


class Unpad(torch.autograd.Function):
    """The way back: `[rows, heads, d]` to `[total, heads, d]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor) -> Tensor:
        """Rows at the slots."""
        ctx.save_for_backward(slots)
        ctx.rows = x.shape[0]
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The padded gradient."""
        gradient = gradients[0]
        (slots,) = ctx.saved_tensors
        padded = gradient.new_zeros(ctx.rows, *gradient.shape[1:])
        return padded.index_copy_(0, slots, gradient), None
