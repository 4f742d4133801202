"""torch.compile of plain torch: block attention and rotary as one would write them, compiled.

The reference walks sequences in Python, one graph a batch of lengths; this is the same mathematics
without the loop. Packed rows are copied to `[blocks, block_size, heads, d]`, tails padded with rows
that are masked, and attended to by two batched products around a softmax; inductor fuses what lies
between the products, the rotation included. Rounds to the inputs' dtype where the reference does.

Padding, scores and weights lie in memory: where they cannot (more than the device has), the call is
refused with the numbers. Compiled for each shape anew. No jagged_attention: its scores of whole
sequences would not fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from jagbench.implementation import Prepared
from jagbench.inputs import Inputs
from jagbench.peers.adapter import nothing, padded, upstream_of
from jagbench.peers.arguments import refuse
from jagbench.peers.compiling import limited
from jagbench.peers.packed import BlockCall, check_blocks, check_rotary, turned
from jagbench.peers.padding import Pad, Side, Unpad
from jagbench.rotary import TokenTable

__version__ = torch.__version__

PEER = "torch.compile"

#: `Turn` as plain values: angles, rows, interleaved, sign.
Angles = tuple[Tensor, Tensor | None, bool, float]


def block_attention(
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
) -> Tensor:
    """Softmax attention within blocks, as `jagbench.reference` defines it.

    Raises ValueError for malformed arguments, NotImplementedError for what memory cannot hold.
    """
    blocks = check_blocks(
        q, k, v, offsets, block_size=block_size, scale=scale, rotary=rotary,
        rotate_values=rotate_values, qk_norm_eps=qk_norm_eps,
    )  # fmt: skip
    call = blocks.call
    if call.empty:
        return nothing(call)  # type: ignore[return-value]
    return padded(call, _kernel(blocks)(call.q, call.k, call.v))


def rotary(
    x: Tensor,
    offsets: Tensor,
    table: Tensor | TokenTable,
    *,
    interleaved: bool = True,
    inverse: bool = False,
) -> Tensor:
    """Every pair turned by its angle, as `jagbench.reference` defines it."""
    rows, turn = check_rotary(x, offsets, table, interleaved=interleaved, inverse=inverse)
    return _with_padding(turn(rows), x.shape[0])


def prepare(operator: str, inputs: Inputs) -> Prepared | None:
    """The call with places and masks of the blocks, or the positions of a rotation, found."""
    given = inputs.map(lambda _, tensor: tensor.detach())
    if operator == "rotary":
        return _prepared_rotary(given)
    if operator != "block_attention":
        return None
    blocks = given.call(check_blocks)
    call = blocks.call
    if call.empty:
        raise NotImplementedError("a call without pairs has nothing to prepare")
    tensors = {n: getattr(call, n) for n in "qkv"}
    upstream = upstream_of(call, inputs)
    return Prepared(tensors, _kernel(blocks), upstream, lambda _, x: _with_padding(x, call.rows))


def configuration(operator: str, inputs: Inputs) -> Mapping[str, str]:
    """The library's version and how it compiles."""
    return {"library": __version__, "dynamic": "False"}


def needed_bytes(blocks: BlockCall) -> int:
    """Bytes of what lies in memory of a forward and its backward at once.

    Padded q, k (of every query head), v, output, and gradients of all four; scores, weights and
    their two gradients, of which softmax keeps one in fp32.
    """
    call, size = blocks.call, blocks.block_size
    rows, heads = call.batch * size, call.q.shape[1]
    element = call.q.element_size()
    tensors = 2 * rows * heads * 2 * (call.q.shape[2] + call.v.shape[2]) * element
    return tensors + rows * heads * size * (3 * element + 4)


def _prepared_rotary(given: Inputs) -> Prepared:
    rows, turn = given.call(check_rotary)
    total = given.tensors()["x"].shape[0]
    upstream = torch.zeros_like(rows) if given.upstream is None else given.upstream[: len(rows)]
    return Prepared({"x": rows}, lambda x: turn(x), upstream, lambda _, x: _with_padding(x, total))


def _with_padding(x: Tensor, rows: int) -> Tensor:
    """With the rows past the last offset, which are 0."""
    gap = rows - x.shape[0]
    return torch.cat([x, x.new_zeros(gap, *x.shape[1:])]) if gap else x


def _kernel(blocks: BlockCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The compiled call on packed rows."""
    call, size = blocks.call, blocks.block_size
    if call.q.is_cuda:
        needed = needed_bytes(blocks)
        has = torch.cuda.get_device_properties(call.q.device).total_memory
        refuse(needed > has, f"{PEER}: padded blocks need {needed:,} bytes, the device has {has:,}")
    lengths = call.k_offsets.diff()
    slots = Side.of(call.k_lengths, call.k_offsets, size, at_end=False).slots
    keys = torch.arange(size, device=lengths.device) < lengths[:, None]
    turn = blocks.turn
    angles = None if turn is None else (turn.angles, turn.rows, turn.interleaved, turn.sign)

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled()(q, k, v, slots, keys, angles, blocks.turn_values, call.scale)

    return kernel


@functools.cache
def compiled() -> Callable[..., Tensor]:
    """`attend` through torch.compile, once a process."""
    return limited(attend)


def attend(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, angles: Angles | None,
    turn_values: bool, scale: float,
) -> Tensor:  # fmt: skip
    """Block attention of packed rows `[total, heads, d]`, in plain torch.

    slots: place of each row among those of all blocks, int64 `[total]`; keys: which rows of a block
    are real, bool `[blocks, size]`; angles: arguments of `turned` behind x, None to turn nothing.
    """
    if angles is not None:
        q, k = turned(q, *angles), turned(k, *angles)
        v = turned(v, *angles) if turn_values else v
    group = q.shape[1] // k.shape[1]
    q, k, v = (_blocks(x, slots, keys) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(2, 3)) * scale  # [blocks, heads, size, size]
    scores = scores.masked_fill(~keys[:, None, None, :], float("-inf"))
    out = torch.softmax(scores, -1) @ v
    rows: Tensor = Unpad.apply(out.transpose(1, 2).flatten(0, 1), slots)  # type: ignore[no-untyped-call]
    return rows


def _blocks(x: Tensor, slots: Tensor, keys: Tensor) -> Tensor:
    """Packed rows as `[blocks, heads, size, d]`, tails filled up with zeros."""
    filled = Pad.apply(x, slots, keys.numel(), x.shape[2], None)  # type: ignore[no-untyped-call]
    return filled.view(*keys.shape, *x.shape[1:]).transpose(1, 2)  # type: ignore[no-any-return]
