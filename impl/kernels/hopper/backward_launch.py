"""Launch of the Hopper backward: descriptors, buffers, and the passes around the kernel."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.attention_backward import STATISTICS_PAD
from jagbench.impl.kernels.attention_launch import BackwardCall, multiprocessors, query_tiles
from jagbench.impl.kernels.hopper.descriptors import jagged_descriptor
from jagbench.impl.kernels.hopper.support import SHORT_KEYS, keys_are_short
from jagbench.impl.kernels.hopper.work import WorkList, build_work_list, folds
from jagbench.impl.kernels.interpreter import round_to
from jagbench.impl.kernels.mask import Mask
from jagbench.impl.kernels.relaunch import relaunch, traits
from jagbench.impl.kernels.schedule import TileList
from jagbench.impl.kernels.tiles import other_rows, sequence_rows
from jagbench.impl.kernels.tuning import note_used

#: Keys of an item.
KEYS = 128
# 3 x 128 threads: 64512 registers, dealt anew as 240, 240 and 24 a thread.
_REGISTERS = 168
#: Most key tiles in a chain (`chain_of`): 1 for none.
CHAINED = 4
# Fewest chains that go round.
_CHAINS = 1024
#: Row and column of dQ, of 64 x 64, that each bit of an offset in the staging buffer adds (xor):
#: what a thread holds of a row (columns 1 and 8), its place among four (2 and 4), then, turned by
#: the row's parity so that two rows never meet in a bank, 16.
SHARE_BASES = (
    (0, 1), (0, 8), (0, 2), (0, 4), (0, 16), (1, 16), (2, 0), (4, 0), (8, 0), (16, 0), (32, 0),
    (0, 32),
)  # fmt: skip
# Rows of dQ a program of `pass_over_queries` takes, as `query_tiles` has, and elements at a time.
_ROWS, _BLOCK = STATISTICS_PAD.value, 2048


def launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    call: BackwardCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. All are made, whatever `call.needs`.

    q, k, v, d_out `[out_rows, heads, dim]`: laid out for TMA (`support.tma_layout`). What `call`
    asks for must pass `support.unsupported`. The order in which dQ is added up is not fixed; dK and
    dV are bit-equal on repeats.
    """
    g = call.geometry
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    if g.total_k == 0 or g.out_rows == 0:
        return torch.zeros_like(q), dk.zero_(), dv.zero_()
    short = keys_are_short(g)
    keys = SHORT_KEYS if short else KEYS * chain_of(g, call.mask, call.activation)
    items = build_work_list(
        k_offsets, q_offsets, g.total_k, keys,
        other_rows=g.total_q if g.shared_q else None,
    )  # fmt: skip
    launch = _launch_short if short else _launch
    if q_offsets is None:
        # One share of dQ a sequence, summed afterwards.
        shares = torch.zeros(g.out_rows, g.heads, g.qk_dim, dtype=torch.float32, device=q.device)
        launch(q, k, v, d_out, dk, dv, shares, shares, items, call)
        return _sum_of_shares(shares.view(g.batch, *q.shape), call).to(q.dtype), dk, dv
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shares = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    tiles = call.query_tiles or query_tiles(q_offsets, k_offsets, g)
    pass_over_queries(shares, dq, q_offsets, k_offsets, tiles, call, finish=False, keys=keys)
    launch(q, k, v, d_out, dk, dv, shares, dq, items, call)
    pass_over_queries(shares, dq, q_offsets, k_offsets, tiles, call, finish=True, keys=keys)
    return dq, dk, dv


def _sum_of_shares(shares: Tensor, call: BackwardCall) -> Tensor:
    """dQ in float32 from one share a sequence `[batch, rows, heads, dim]`, see `share_column`."""
    rows, heads, dim = shares.shape[1:]
    row = torch.arange(rows, device=shares.device)[:, None]
    column = torch.arange(dim, device=shares.device)
    order = share_column.fn(row, column)
    return shares.sum(0).gather(2, order[:, None].expand(rows, heads, dim)) * call.grad_scale


def chain_of(g: Geometry, mask: Mask, activation: int) -> int:
    """Key tiles that one program walks one after the other, so that dQ needs no pass of its own.

    Only where sequences are short enough for their Q, dO and dQ to stay in the L2 meanwhile, and
    many enough to go round. At head dim 128 an activation's A' leaves no registers for the ends of
    a chain: it spills, and is slower than with the passes.
    """
    if activation != SOFTMAX.value and g.qk_dim == 128:
        return 1
    # Lengths uniform on [1, 512] have a mean of 256.5: up to 5/8 of a chain's keys count as short.
    short = g.mean_k <= KEYS * CHAINED * 5 // 8 and g.batch * g.kv_heads >= _CHAINS
    return CHAINED if short and not mask.bounded and not g.shared_q else 1


def pairs_apart(mask: Mask) -> bool:
    """Whether the pairs of a head lie side by side where items are dealt in pairs (`work.folds`).

    Under a window bounded on both sides pairs do not weigh the same; next to each other they come
    out more even than with all heads of a pair between them. For the others it is one.
    """
    return mask.left >= 0 and mask.right >= 0


def slope_is_wide(call: BackwardCall) -> bool:
    """Whether A' waits for dA in float32 (`backward_parts.weights_of`): right and fast either way.

    An activation's A' is a tensor of its own: at head dim 128 its registers are dearer than the
    conversions. Softmax has none.
    """
    return call.activation == SOFTMAX.value or call.geometry.qk_dim == 64


def _statistics(call: BackwardCall, stand_in: Tensor) -> tuple[Tensor, int]:
    """Row statistics and their rows, or another pointer where there are none."""
    if call.statistics is None:
        return stand_in, 0
    return call.statistics, call.statistics.shape[2]


def _launch(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, dk: Tensor, dv: Tensor, shares: Tensor,
    dq: Tensor, items: WorkList, call: BackwardCall,
) -> None:  # fmt: skip
    """One launch of the kernel; `shares` is added to, `dq` written where one key tile sees all."""
    g, dim = call.geometry, call.geometry.qk_dim
    halves = 2 if dim == 64 else 1
    share = dim * halves // 2
    statistics, statistics_rows = _statistics(call, shares)
    wide, chain = slope_is_wide(call), chain_of(g, call.mask, call.activation)
    entries = items.upper * g.kv_heads
    programs = min(entries, multiprocessors(q))
    folded = folds(call.mask, entries, programs)
    used = f"{64 * halves}x{KEYS} chain {chain}" + " wide" * wide + " folded" * folded
    note_used("hopper_backward", used)
    # In the order of the kernel's parameters.
    constants = (
        halves, halves, dim, call.activation, *call.mask.constants.values(), g.shared_q,
        g.group > 1, wide, chain, folded, folded and pairs_apart(call.mask),
    )  # fmt: skip
    relaunch(
        # What the form hangs on beyond this is the same in every call: pointers are allocations,
        # rows of statistics a multiple of 16.
        _kernel(), programs, q.device,
        (q.dtype, constants),
        *(jagged_descriptor(t, 64 * halves, dim) for t in (q, d_out)),
        *(jagged_descriptor(t, KEYS, dim) for t in (k, v)),
        *(jagged_descriptor(t, KEYS // 2, dim) for t in (dk, dv)),
        *(jagged_descriptor(t, 64, share) for t in (shares, dq)),
        statistics, items.items, items.count, g.kv_heads, g.group, g.total_q,
        statistics_rows, call.mask.left, call.mask.right,
        float(call.score_scale), float(call.grad_scale), float(call.value_scale),
        *constants, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip


def _launch_short(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, dk: Tensor, dv: Tensor, shares: Tensor,
    dq: Tensor, items: WorkList, call: BackwardCall,
) -> None:  # fmt: skip
    """As `_launch`, for items of 64 keys; two workers a program."""
    g, dim = call.geometry, call.geometry.qk_dim
    statistics, statistics_rows = _statistics(call, shares)
    entries = items.upper * g.kv_heads
    programs = min(entries, multiprocessors(q))
    folded = folds(call.mask, entries, 2 * programs)
    note_used("hopper_backward", f"64x{SHORT_KEYS} two workers" + " folded" * folded)
    constants = (
        dim, call.activation, *call.mask.constants.values(), g.group > 1,
        folded, folded and pairs_apart(call.mask), call.own_keys == SHORT_KEYS,
    )  # fmt: skip
    relaunch(
        _short_kernel(), programs, q.device,
        (q.dtype, constants),
        *(jagged_descriptor(t, SHORT_KEYS, dim) for t in (q, d_out, k, v, dk, dv)),
        jagged_descriptor(shares, SHORT_KEYS, 64), jagged_descriptor(dq, SHORT_KEYS, dim),
        statistics, items.items, items.count, g.kv_heads, g.group, statistics_rows,
        call.mask.left, call.mask.right,
        float(call.score_scale), float(call.grad_scale), float(call.value_scale),
        *constants, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip


# Gluon is imported here, not above: it may be missing (`support`).
@cache
def _kernel() -> Any:
    from jagbench.impl.kernels.hopper.backward import backward_kernel

    return backward_kernel


@cache
def _short_kernel() -> Any:
    from jagbench.impl.kernels.hopper.backward_short import backward_short_kernel

    return backward_short_kernel


def pass_over_queries(
    shares: Tensor,
    dq: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    tiles: TileList,
    call: BackwardCall,
    *,
    finish: bool,
    keys: int = KEYS,
) -> None:
    """What the rows of dQ need before the kernel and, with `finish`, after it, by sequence.

    More than `keys` keys: several items add to `shares`, float32 as dq, which start as zeros and
    end in dq, scaled: 18 bytes an element and 8 for each further item (zero 4, add 8, read 4,
    write 2), were nothing kept in the caches. Fewer: the only item writes dq, 2 bytes; under a
    mask it may skip rows, which are zeroed first. No keys, and rows behind the last offset: zeros.
    tiles: of 128 rows of q.
    """
    width = dq.shape[1] * dq.shape[2]
    masked = call.mask.bounded
    with torch.cuda.device_of(dq):
        relaunch(
            _queries_kernel, tiles.upper, dq.device,
            (*traits(shares, dq, q_offsets, k_offsets), width, keys, finish, masked),
            shares, dq, q_offsets, k_offsets, tiles.sequence, tiles.block,
            call.geometry.batch, dq.shape[0], call.grad_scale,
            width, keys, finish, masked, _ROWS, _BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit
def share_column(row, column):
    """Where the buffer of shares holds a column of dQ, in a given row of a sequence.

    The columns of 64 are permuted as `SHARE_BASES` has them, seen through the swizzle
    of 128 bytes with which the TMA unit reads shared memory. For integers and tensors of torch too
    (`share_column.fn`).
    """
    part = (column >> 1 & 3) | ((column >> 4 ^ row) & 1) << 2
    inside = (column & 32) | (part ^ row & 7) << 2 | (column >> 3 & 1) << 1 | column & 1
    return column - (column & 63) + inside


@triton.jit(do_not_specialize=["batch", "total_q"])
def _queries_kernel(
    shares, dq, q_offsets, k_offsets, tile_sequence, tile_block, batch, total_q, scale,
    WIDTH: tl.constexpr, KEYS: tl.constexpr, FINISH: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`pass_over_queries`, ROWS rows of `[total_q, WIDTH]` a program."""
    sequence = tl.load(tile_sequence + tl.program_id(0))
    if sequence >= 0:
        start, length = sequence_rows(q_offsets, sequence, batch, total_q)
        _, keys = other_rows(k_offsets, sequence, batch, 0, False)
        first = tl.load(tile_block + tl.program_id(0)) * ROWS
        size = tl.minimum(length - first, ROWS) * WIDTH
        target = dq + (start + first) * WIDTH
        source = shares + (start + first) * WIDTH
        shared = keys > KEYS
        touched = shared
        if FINISH:
            touched = shared | (keys == 0)
        elif MASKED:
            touched = keys > 0
        for at in range(0, tl.where(touched, size, 0), BLOCK):
            index = at + tl.arange(0, BLOCK)
            inside = index < size
            if FINISH:
                row = index // WIDTH
                place = row * WIDTH + share_column(first + row, index % WIDTH)
                place = tl.max_contiguous(tl.multiple_of(place, 2), 2)
                value = tl.load(source + place, mask=inside & shared, other=0.0) * scale
                tl.store(target + index, round_to(value, dq.dtype.element_ty), mask=inside)
            else:
                zeros = tl.zeros([BLOCK], tl.float32)
                tl.store(source + index, zeros, mask=inside & shared)
                if MASKED:
                    narrow = zeros.to(dq.dtype.element_ty)
                    tl.store(target + index, narrow, mask=inside & (keys <= KEYS))
