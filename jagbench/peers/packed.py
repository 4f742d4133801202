"""Arguments of the operators on one packed buffer (block attention, rotary), checked for a peer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jagbench.peers.arguments import DTYPES, Call, Lengths, autocast, check_values, lengths_of
from jagbench.peers.compiling import limited
from jagbench.rotary import TokenTable


@dataclass(frozen=True)
class Turn:
    """A rotation of packed rows.

    angles: `[positions or total, rotary_dim]`, sines first; rows: the row of `angles` of each
    packed row, int64 `[total]`, or None where they are the same; interleaved: pair i is elements
    (2 i, 2 i + 1), else (i, i + rotary_dim / 2); sign: -1 turns back.
    """

    angles: Tensor
    rows: Tensor | None
    interleaved: bool = True
    sign: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """X `[total, heads, d]`, turned in fp32 and rounded once; a graph of its own."""
        return compiled_turn()(x, self.angles, self.rows, self.interleaved, self.sign)


@functools.cache
def compiled_turn() -> Callable[..., Tensor]:
    """`turned` through torch.compile, once a process: one kernel forward, and one backward."""
    return limited(turned)


def turned(
    x: Tensor, angles: Tensor, rows: Tensor | None, interleaved: bool, sign: float
) -> Tensor:
    """(a, b) becomes (a cos - b sin, a sin + b cos), in plain torch."""
    dim = angles.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    table = (angles if rows is None else angles[rows])[: x.shape[0], None].to(wide)
    sin, cos = table.chunk(2, -1)
    sin = sin * sign
    part = x[..., :dim].to(wide)
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    out = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([out.to(x.dtype), x[..., dim:]], -1)


@dataclass(frozen=True)
class BlockCall:
    """One checked call of block_attention.

    call: softmax attention over the offsets cut at the blocks, of values not yet turned.
    turn: None turns nothing. turn_values: whether v is turned too. block_size: rows of a block.
    """

    call: Call
    turn: Turn | None
    turn_values: bool
    block_size: int

    def rotated(self, name: str, x: Tensor) -> Tensor:
        """q, k or v as attention takes them."""
        if self.turn is None or (name == "v" and not self.turn_values):
            return x
        return self.turn(x)


def check_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Tensor | TokenTable | None = None,
    rotate_values: bool = True,
    qk_norm_eps: float | None = None,
) -> BlockCall:
    """Check the arguments of `block_attention`; ValueError with the numbers where they clash.

    Raises NotImplementedError for QK-norm, which no peer has.
    """
    if qk_norm_eps is not None:
        if not qk_norm_eps >= 0:
            raise ValueError(f"qk_norm_eps must be at least 0 or None, got {qk_norm_eps}")
        raise NotImplementedError(f"q and k are not normalised here (qk_norm_eps={qk_norm_eps})")
    q, k, v = autocast(q, k, v)
    check_values(q, k, v)
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size must be an int of at least 1, got {block_size!r}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows and k has {k.shape[0]}: they share the offsets")
    lengths = lengths_of("q", offsets, q, None)
    turn = None
    if rotary is not None:
        turn = turn_of("rotary", rotary, offsets, lengths, q, *([v] if rotate_values else []))
    cut, blocks = cut_at_blocks(offsets.contiguous(), lengths, block_size)
    call = Call(
        q=q[: lengths.total], k=k[: lengths.total], v=v[: lengths.total],
        q_offsets=cut, k_offsets=cut, q_lengths=blocks, k_lengths=blocks, rows=q.shape[0],
        scale=1 / math.sqrt(q.shape[2]) if scale is None else float(scale),
        left=None, right=None, align="end", bias=None, deterministic=False, return_lse=False,
    )  # fmt: skip
    return BlockCall(call, turn, rotate_values, block_size)


def cut_at_blocks(offsets: Tensor, lengths: Lengths, block: int) -> tuple[Tensor, Lengths]:
    """Offsets of every block, int32 `[blocks + 1]`, counted from each sequence's start; lengths."""
    counts = (lengths.host + block - 1) // block
    total = int(counts.sum())
    host = torch.full((total,), block)
    ends = counts.cumsum(0)[lengths.host > 0] - 1
    full = lengths.host[lengths.host > 0]
    host[ends] = full - (counts[lengths.host > 0] - 1) * block
    described = Lengths(host, lengths.total, int(host.max()) if total else 0,
                        int(host.min()) if total else 0)  # fmt: skip
    counts = (offsets.diff() + block - 1) // block
    sequence = torch.repeat_interleave(
        torch.arange(counts.numel(), device=offsets.device), counts, output_size=total
    )
    place = torch.arange(total, device=offsets.device) - (counts.cumsum(0) - counts)[sequence]
    starts = offsets[:-1][sequence] + place * block
    return torch.cat([starts, offsets[-1:]]).int(), described


def turn_of(
    name: str, table: Tensor | TokenTable, offsets: Tensor, lengths: Lengths, x: Tensor,
    *others: Tensor, interleaved: bool = True, inverse: bool = False,
) -> Turn:  # fmt: skip
    """The rotation a table asks for; ValueError with the numbers where it does not fit.

    NotImplementedError for a table that wants a gradient.
    """
    by_token = isinstance(table, TokenTable)
    angles = table.rows if isinstance(table, TokenTable) else table
    if not isinstance(angles, Tensor) or angles.dim() != 2:
        found = tuple(angles.shape) if isinstance(angles, Tensor) else type(angles).__name__
        raise ValueError(f"{name} must be a tensor of 2 dims, got {found}")
    if angles.dtype not in (x.dtype, torch.float32) or angles.device != x.device:
        raise ValueError(
            f"{name} must be {x.dtype} or float32 on {x.device}, got {angles.dtype} on "
            f"{angles.device}"
        )
    width, dim = angles.shape[1], min(t.shape[2] for t in (x, *others))
    if width < 2 or width % 2 or width > dim:
        raise ValueError(
            f"{name} must have an even number of columns from 2 to the head_dim {dim}, got {width}"
        )
    needed = x.shape[0] if by_token else lengths.longest
    if angles.shape[0] < needed or (by_token and angles.shape[0] > needed):
        what = "tokens" if by_token else "positions of the longest sequence"
        raise ValueError(f"{name} has {angles.shape[0]} rows for {needed} {what}")
    if angles.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"a peer computes no gradient of {name}")
    rows = None if by_token else _positions(offsets, lengths)
    return Turn(angles, rows, interleaved, -1.0 if inverse else 1.0)


def _positions(offsets: Tensor, lengths: Lengths) -> Tensor:
    """Position of each packed row in its sequence, int64 `[total]`."""
    first = torch.repeat_interleave(offsets[:-1].long(), offsets.diff(), output_size=lengths.total)
    return torch.arange(lengths.total, device=offsets.device) - first


def check_rotary(
    x: Tensor,
    offsets: Tensor,
    table: Tensor | TokenTable,
    *,
    interleaved: bool = True,
    inverse: bool = False,
) -> tuple[Tensor, Turn]:
    """X `[total, heads, d]` without padding rows, and how it is turned; as `check_blocks`."""
    if not isinstance(x, Tensor) or x.dim() != 3 or 0 in x.shape[1:]:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be [rows, heads, head_dim], got {shape}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be one of {len(DTYPES)} float dtypes, got {x.dtype}")
    lengths = lengths_of("x", offsets, x, None)
    turn = turn_of("table", table, offsets, lengths, x, interleaved=interleaved, inverse=inverse)
    return x[: lengths.total], turn


def with_values(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """The call on other values of the same shapes."""
    return replace(call, q=q, k=k, v=v)
