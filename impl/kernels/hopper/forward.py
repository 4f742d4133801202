"""Jagged attention and GDPA, forward, for Hopper: one persistent, warp-specialised kernel in Gluon.

Roles: one producer warp issues TMA loads into rings of shared-memory stages; GROUPS consumer
warpgroups hold 64 query rows each and run wgmma with an online softmax, or an activation in its
place. The items dealt to a program are one stream of steps without seams: while the last values of
one query tile are multiplied, the first scores of the next are in flight already, so a short
sequence costs no refill of the pipeline. Key tiles run from last to first: without a window only an
item's first step, the straight-line one, is ever masked.

RESIDENT: where a sequence's keys fit the ring, a program is dealt runs of its query tiles, and keys
and values are loaded for the first of a run alone (`_stays` says why that is safe).

Jagged edges cost no branch. TMA sees tensors as 4-D views whose row bound can be moved to any
sequence's end (`descriptors.jagged_descriptor`), so rows outside of it are read as zero and
dropped on a store. Zero keys give score 0, and every activation is 0 at 0: GDPA needs no mask.

Source of the scheme: FlashAttention-3 (arXiv 2407.08608); of the online softmax, arXiv 2409.15373.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.hopper.gluon import (
    FIELDS,
    at_row,
    tma_load,
    tma_store,
    turn_give,
    turn_wait,
)
from jagbench.impl.kernels.hopper.weights import first_weights, next_weights
from jagbench.impl.kernels.hopper.work import dealt_entry, folded_tile


class _Tensors(NamedTuple):
    """Descriptors, or rings of shared-memory stages `[stages, 1, 1, rows, d]`."""

    q: Any
    k: Any
    v: Any
    o: Any


class _Barriers(NamedTuple):
    """Barriers of the rings, one a stage: filled by TMA, emptied by the consumers."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class _Item(NamedTuple):
    """One query tile of one head: the fields of `work.WorkList` that a forward reads, and head."""

    q_start: Any
    q_length: Any
    q_row: Any
    k_start: Any
    k_length: Any
    out_start: Any
    sequence: Any
    head: Any


class _Call(NamedTuple):
    """Run-time arguments of the kernel beyond its descriptors."""

    lse: Any
    work: Any
    count: Any
    heads: Any
    group: Any
    batch: Any
    out_rows: Any
    left: Any
    right: Any
    scale: Any
    out_scale: Any


@gluon.jit
def _load_rows(desc, start, length, row, column, full, buffer):
    """TMA load of rows [row, row + block) of one sequence; rows past its end arrive as zeros."""
    tma_load(desc, at_row(start + length, length, row, column), full, buffer)


@gluon.jit
def _divide(x, y):
    """x // y of numbers >= 0: without signs a division is half as long."""
    return (x.to(gl.uint32) // y.to(gl.uint32)).to(gl.int32)


@gluon.jit
def _load_stage(desc, start, length, row, column, step, full, empty, ring):
    """Load a tile of keys or values into the stage of a step, once its last user has let go."""
    NK: gl.constexpr = ring.shape[0]
    BN: gl.constexpr = ring.shape[3]
    D: gl.constexpr = ring.shape[4]
    slot = step % NK
    mbarrier.wait(empty.index(slot), ((step // NK) & 1) ^ 1)
    mbarrier.expect(full.index(slot), BN * D * 2)
    _load_rows(desc, start, length, row, column, full.index(slot), ring.index(slot))


@gluon.constexpr_function
def _hand(resident, folded):
    """Entries of the list that a program is dealt together."""
    return resident or (2 if folded else 1)


@gluon.jit
def _rounds(call, used, HAND: gl.constexpr):
    """Items dealt to every program, the empty ones past the end of the list included."""
    return gl.cdiv(gl.cdiv(used * call.heads, HAND), gl.num_programs(0)) * HAND


@gluon.jit
def _fetch(call, used, r, HAND: gl.constexpr):
    """Start loading the item this program is dealt in round r; `_decode` makes it an item.

    Nothing here waits for a load. Past the end of the list it is the empty item: no rows, no keys.
    """
    entry = dealt_entry(r, gl.program_id(0), gl.num_programs(0), HAND)
    tile = gl.minimum(_divide(entry, call.heads), used)
    fields = call.work + tile.to(gl.int64) * FIELDS
    return _Item(
        gl.load(fields),
        gl.load(fields + 1),
        gl.load(fields + 2),
        gl.load(fields + 3),
        gl.load(fields + 4),
        gl.load(fields + 5),
        gl.load(fields + 6),
        gl.minimum(entry - tile * call.heads, call.heads - 1),
    )


@gluon.jit
def _decode(item, call, ROWS: gl.constexpr, HEADS_APART: gl.constexpr, FOLDED: gl.constexpr):
    """A fetched item with its own query row and head.

    As fetched, the heads of a tile are side by side. HEADS_APART: all tiles of a (sequence, head)
    are, so that programs at work at a time share its keys in L2. FOLDED: in pairs (`folded_tile`).
    """
    if FOLDED:
        tiles = gl.maximum(gl.cdiv(item.q_length, ROWS), 1)
        place = (item.q_row // ROWS) * call.heads + item.head
        head, block = folded_tile(place, call.heads, tiles, HEADS_APART)
        item = _Item(
            item.q_start, item.q_length, block * ROWS, item.k_start, item.k_length,
            item.out_start, item.sequence, head,
        )  # fmt: skip
    elif HEADS_APART:
        tiles = gl.maximum(gl.cdiv(item.q_length, ROWS), 1)
        place = (item.q_row // ROWS) * call.heads + item.head
        head = _divide(place, tiles)
        item = _Item(
            item.q_start, item.q_length, (place - head * tiles) * ROWS, item.k_start,
            item.k_length, item.out_start, item.sequence, head,
        )  # fmt: skip
    return item


@gluon.jit
def _stays(item, n, r, ROWS: gl.constexpr, NK: gl.constexpr, RESIDENT: gl.constexpr):
    """Whether round r + 1 finds its keys in the ring: the same (sequence, head), in n <= NK tiles.

    The item itself tells: its neighbour in the list comes next, but at the end of a hand.

    Why the barriers hold. Let positions p .. p + n - 1 of the rings belong to a run of items. The
    producer fills them for the first item; a consumer arrives at `empty` of each once, with the
    last item. So phases advance by one a position as without runs, and `full` of position x cannot
    complete again before both consumers have let go of x, which each does behind all its waits for
    x: a waiter is never two phases behind, and to wait for x once more passes at once. No
    deadlock: every load waits for a stage whose last reader needs only loads issued before it. With
    runs that takes the values of an item to be loaded before anything of the next: the keys of the
    next run wait for the end of this one, which needs its last values. Across items a hand's last
    entry never stays, so the empty item behind the last round loads its keys, which are waited for.
    """
    fits = (n <= NK) & (item.q_row + ROWS < item.q_length)
    return fits & ((r + 1) % RESIDENT != 0)


@gluon.jit
def _release(bar, stays, RESIDENT: gl.constexpr):
    """Hand a stage back to the producer, unless the next item finds its keys there."""
    if RESIDENT:
        mbarrier.arrive(bar, count=1, pred=stays == 0)
    else:
        mbarrier.arrive(bar, count=1)


@gluon.jit
def _key_tiles(
    item, call,
    ROWS: gl.constexpr, BN: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ALIGN_END: gl.constexpr,
):  # fmt: skip
    """First key tile that some row of a query tile sees, their number (at least 1), and the shift.

    Row p sees key c iff p + shift - left <= c <= p + shift + right.
    """
    begin = 0
    end = gl.cdiv(item.k_length, BN)
    shift = 0
    if ALIGN_END:
        shift = item.k_length - item.q_length
    if HAS_LEFT:
        begin = gl.minimum(gl.maximum(item.q_row + shift - call.left, 0), item.k_length) // BN
    if HAS_RIGHT:
        stop = gl.minimum(
            gl.minimum(item.q_row + ROWS, item.q_length) + shift + call.right, item.k_length
        )
        end = gl.cdiv(gl.maximum(stop, 0), BN)
    return begin, gl.maximum(end - begin, 1), shift


@gluon.jit
def _start_scores(q_s, k_s, q_slot, k_slot, SL: gl.constexpr):
    """Start S = Q K^T; returns the accumulator in flight."""
    HM: gl.constexpr = q_s.shape[3]
    BN: gl.constexpr = k_s.shape[3]
    D: gl.constexpr = k_s.shape[4]
    queries = q_s.index(q_slot).reshape([HM, D])
    keys = k_s.index(k_slot).reshape([BN, D]).permute((1, 0))
    nothing = gl.zeros([HM, BN], gl.float32, SL)
    return warpgroup_mma(queries, keys, nothing, use_acc=False, is_async=True)


@gluon.jit
def _start_values(p, v_s, v_slot, o):
    """Start O += P V; returns the accumulator in flight."""
    BN: gl.constexpr = v_s.shape[3]
    D: gl.constexpr = v_s.shape[4]
    return warpgroup_mma(p, v_s.index(v_slot).reshape([BN, D]), o, is_async=True)


@gluon.jit
def _finish(
    o, m, l, W: gl.constexpr, descs, stages, call, item,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Normalise and store a tile of the output, and of lse `[heads, out_rows]` (units of log 2)."""
    HM: gl.constexpr = stages.o.shape[3]
    D: gl.constexpr = stages.o.shape[4]
    RO: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    row = item.q_row + W * HM
    if ACTIVATION == SOFTMAX:
        o = o * gl.convert_layout(gl.where(l == 0.0, 0.0, 1.0 / l), RO)[:, None]
        # A row that sees nothing has -inf; one past the last offset is padding, and 0.
        nothing = gl.where(item.sequence < call.batch, float("-inf"), 0.0)
        value = gl.where(l == 0.0, nothing, m + gl.log2(l))
        offsets = gl.arange(0, HM, l.type.layout)
        target = call.lse + (item.head.to(gl.int64) * call.out_rows + item.out_start + row)
        gl.store(target + offsets, value, mask=offsets < item.q_length - row)
    else:
        o = o * call.out_scale
    tma.store_wait(0)  # the staging buffer's previous store has been read
    stages.o.index(W).reshape([HM, D]).store(o.to(stages.o.dtype))
    fence_async_shared()
    place = at_row(item.out_start + item.q_length, item.q_length, row, item.head * D)
    tma_store(descs.o, place, stages.o.index(W))


# ---- roles ---------------------------------------------------------------------------------------


@gluon.jit
def _producer(
    descs, stages, bars, call, GROUPS: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ALIGN_END: gl.constexpr,
    SCALE_FIRST: gl.constexpr, HEADS_APART: gl.constexpr, PING_PONG: gl.constexpr,
    RESIDENT: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """Issue every load in the order of its use: Q, K0, K1, V0, K2, V1, ... across items."""
    HM: gl.constexpr = stages.q.shape[3]
    BN: gl.constexpr = stages.k.shape[3]
    D: gl.constexpr = stages.k.shape[4]
    NK: gl.constexpr = stages.k.shape[0]
    NQ: gl.constexpr = stages.q.shape[0] // GROUPS
    HAND: gl.constexpr = _hand(RESIDENT, FOLDED)
    used = gl.load(call.count)
    rounds = _rounds(call, used, HAND)
    step = 0
    kept = step > 0
    v_start = 0
    v_length = 0
    v_row = 0
    v_column = 0
    ahead = _fetch(call, used, 0, HAND)
    for r in range(0, rounds + 1):
        item = _decode(ahead, call, GROUPS * HM, HEADS_APART, FOLDED)
        ahead = _fetch(call, used, r + 1, HAND)
        begin, n, _ = _key_tiles(item, call, GROUPS * HM, BN, HAS_LEFT, HAS_RIGHT, ALIGN_END)
        # Rows without any key are read as zero: they may be padding, and hold anything.
        q_length = gl.where(item.k_length > 0, item.q_length, 0)
        for w in gl.static_range(GROUPS):
            slot = (r % NQ) * GROUPS + w
            mbarrier.wait(bars.q_empty.index(slot), ((r // NQ) & 1) ^ 1)
            mbarrier.expect(bars.q_full.index(slot), HM * D * 2)
            _load_rows(
                descs.q, item.q_start, q_length, item.q_row + w * HM, item.head * D,
                bars.q_full.index(slot), stages.q.index(slot),
            )  # fmt: skip
        column = _divide(item.head, call.group) * D
        loads = n
        if RESIDENT:
            loads = gl.where(kept, 0, n)
            kept = _stays(item, n, r, GROUPS * HM, NK, RESIDENT)
        for i in range(0, loads):
            row = (begin + n - 1 - i) * BN
            _load_stage(
                descs.k, item.k_start, item.k_length, row, column, step,
                bars.k_full, bars.k_empty, stages.k,
            )  # fmt: skip
            lagging = step > 0
            if RESIDENT:
                lagging = i > 0
            if lagging:  # values lag one step behind keys
                _load_stage(
                    descs.v, v_start, v_length, v_row, v_column, step - 1,
                    bars.v_full, bars.v_empty, stages.v,
                )  # fmt: skip
            v_start = item.k_start
            v_length = item.k_length
            v_row = row
            v_column = column
            step += 1
        if RESIDENT:
            # The next keys wait for the end of a run that needs these values (`_stays`). Those of
            # the empty item behind the last round nobody asks for.
            if (loads > 0) & (r < rounds):
                _load_stage(
                    descs.v, v_start, v_length, v_row, v_column, step - 1,
                    bars.v_full, bars.v_empty, stages.v,
                )  # fmt: skip


@gluon.jit
def _consumer(
    W: gl.constexpr, descs, stages, bars, call, GROUPS: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ALIGN_END: gl.constexpr,
    SCALE_FIRST: gl.constexpr, HEADS_APART: gl.constexpr, PING_PONG: gl.constexpr,
    RESIDENT: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: rows [64 W, 64 (W + 1)) of every query tile dealt to this program."""
    HM: gl.constexpr = stages.q.shape[3]
    BN: gl.constexpr = stages.k.shape[3]
    D: gl.constexpr = stages.k.shape[4]
    NK: gl.constexpr = stages.k.shape[0]
    NQ: gl.constexpr = stages.q.shape[0] // GROUPS
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    HAND: gl.constexpr = _hand(RESIDENT, FOLDED)
    used = gl.load(call.count)
    rounds = _rounds(call, used, HAND)
    item = _decode(_fetch(call, used, 0, HAND), call, GROUPS * HM, HEADS_APART, FOLDED)
    begin, n, shift = _key_tiles(item, call, GROUPS * HM, BN, HAS_LEFT, HAS_RIGHT, ALIGN_END)
    stays = n < 0
    if RESIDENT:
        stays = _stays(item, n, 0, GROUPS * HM, NK, RESIDENT)
    if PING_PONG:
        if W == GROUPS - 1:
            turn_give(0)
    mbarrier.wait(bars.q_full.index(W), 0)
    mbarrier.wait(bars.k_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(_start_scores(stages.q, stages.k, W, 0, SL),))
    _release(bars.k_empty.index(0), stays, RESIDENT)
    weights, m, l = first_weights(
        s, item.q_row + W * HM, (begin + n - 1) * BN, item.k_length, shift, call,
        ACTIVATION, SCALE_FIRST, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    p = gl.convert_layout(weights.to(stages.k.dtype), PL)
    o = gl.zeros([HM, D], gl.float32, OL)
    first = 0  # key tiles of all earlier items: the ring position of this item's first one
    for r in range(0, rounds):
        ahead = _fetch(call, used, r + 1, HAND)  # not looked at before the seam
        q_slot = (r % NQ) * GROUPS + W
        # A warpgroup without rows keeps the rings turning, but multiplies nothing more.
        busy = gl.where(item.q_row + W * HM < item.q_length, n, 1)
        for i in range(1, busy):
            ks = first + i
            vs = ks - 1
            mbarrier.wait(bars.k_full.index(ks % NK), (ks // NK) & 1)
            if PING_PONG:
                turn_wait(W)
            s_flying = _start_scores(stages.q, stages.k, q_slot, ks % NK, SL)
            mbarrier.wait(bars.v_full.index(vs % NK), (vs // NK) & 1)
            o_flying = _start_values(p, stages.v, vs % NK, o)
            if PING_PONG:
                turn_give((W + 1) % GROUPS)
            s = warpgroup_mma_wait(1, deps=(s_flying,))
            _release(bars.k_empty.index(ks % NK), stays, RESIDENT)
            weights, m, l, fade = next_weights(
                s, m, l, item.q_row + W * HM, (begin + n - 1 - i) * BN, item.k_length, shift, call,
                ACTIVATION, SCALE_FIRST, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            o, p = warpgroup_mma_wait(0, deps=(o_flying, p))
            _release(bars.v_empty.index(vs % NK), stays, RESIDENT)
            if ACTIVATION == SOFTMAX:
                o = o * gl.convert_layout(fade, gl.SliceLayout(1, OL))[:, None]
            p = gl.convert_layout(weights.to(stages.k.dtype), PL)
        for i in range(busy, n):
            ks = first + i
            vs = ks - 1
            mbarrier.wait(bars.k_full.index(ks % NK), (ks // NK) & 1)
            if PING_PONG:
                turn_wait(W)
                turn_give((W + 1) % GROUPS)
            _release(bars.k_empty.index(ks % NK), stays, RESIDENT)
            mbarrier.wait(bars.v_full.index(vs % NK), (vs // NK) & 1)
            _release(bars.v_empty.index(vs % NK), stays, RESIDENT)

        # Seam: the last values of this item and the first scores of the next go out together.
        # Adding n is also what keeps it alive: Triton 3.6 and 3.7 replace a carried value whose
        # only use is an inner loop's bound by its initial value.
        vs = first + n - 1
        if RESIDENT:
            first += gl.where(stays, 0, n)
        else:
            first += n
        q_slot2 = ((r + 1) % NQ) * GROUPS + W
        mbarrier.wait(bars.q_full.index(q_slot2), ((r + 1) // NQ) & 1)
        mbarrier.wait(bars.k_full.index(first % NK), (first // NK) & 1)
        if PING_PONG:
            turn_wait(W)
        s_flying = _start_scores(stages.q, stages.k, q_slot2, first % NK, SL)
        mbarrier.wait(bars.v_full.index(vs % NK), (vs // NK) & 1)
        o_flying = _start_values(p, stages.v, vs % NK, o)
        if PING_PONG:
            turn_give((W + 1) % GROUPS)
        # Divisions by numbers just loaded, behind the products.
        item2 = _decode(ahead, call, GROUPS * HM, HEADS_APART, FOLDED)
        begin2, n2, shift2 = _key_tiles(
            item2, call, GROUPS * HM, BN, HAS_LEFT, HAS_RIGHT, ALIGN_END
        )
        stays2 = stays
        if RESIDENT:
            stays2 = _stays(item2, n2, r + 1, GROUPS * HM, NK, RESIDENT)
        s = warpgroup_mma_wait(1, deps=(s_flying,))
        _release(bars.k_empty.index(first % NK), stays2, RESIDENT)
        mbarrier.arrive(bars.q_empty.index(q_slot), count=1)
        weights, m2, l2 = first_weights(
            s, item2.q_row + W * HM, (begin2 + n2 - 1) * BN, item2.k_length, shift2, call,
            ACTIVATION, SCALE_FIRST, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        o, p = warpgroup_mma_wait(0, deps=(o_flying, p))
        _release(bars.v_empty.index(vs % NK), stays, RESIDENT)
        _finish(o, m, l, W, descs, stages, call, item, ACTIVATION)
        p = gl.convert_layout(weights.to(stages.k.dtype), PL)
        o = gl.zeros([HM, D], gl.float32, OL)
        m, l = m2, l2
        begin, n, shift, item, stays = begin2, n2, shift2, item2, stays2
    tma.store_wait(0)
    if PING_PONG:
        if W == 0:
            turn_wait(0)  # take up the last turn given


@gluon.jit(
    do_not_specialize=["heads", "group", "batch", "out_rows", "left", "right", "scale", "out_scale"]
)
def attention_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, work, count,
    heads, group, batch, out_rows, left, right, scale, out_scale,
    GROUPS: gl.constexpr, KEY_STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ALIGN_END: gl.constexpr, SCALE_FIRST: gl.constexpr, HEADS_APART: gl.constexpr,
    PING_PONG: gl.constexpr, RESIDENT: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """Forward over a work list (`work.build_work_list`) of tiles of 64 * GROUPS query rows.

    q_desc, k_desc, v_desc, o_desc: `jagged_descriptor` of 64 query rows and BN keys. lse: float32
    `[heads, out_rows]`, units of log 2; unused without softmax. scale: factor of Q K^T before exp2
    or the activation; out_scale: of the output, without softmax. SCALE_FIRST: scale may be <= 0.
    RESIDENT: entries of the list dealt together, a power of 2, with their keys kept between them
    (HEADS_APART, no window); 0: one entry at a time. FOLDED: a tile from the back of a sequence is
    dealt together with one from its front (`work.folded_tile`), for masks.
    """
    gl.static_assert(RESIDENT == 0 or (HEADS_APART and not (FOLDED or HAS_LEFT or HAS_RIGHT)))
    DTYPE: gl.constexpr = k_desc.dtype
    HM: gl.constexpr = q_desc.block_shape[2]
    BN: gl.constexpr = k_desc.block_shape[2]
    D: gl.constexpr = k_desc.block_shape[3]
    Q_SLOTS: gl.constexpr = GROUPS * QUERY_STAGES
    q_s = gl.allocate_shared_memory(DTYPE, [Q_SLOTS, 1, 1, HM, D], q_desc.layout)
    o_s = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, HM, D], o_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [KEY_STAGES, 1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [KEY_STAGES, 1, 1, BN, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(KEY_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)  # one arrival from each consumer
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()  # the TMA unit must see initialised barriers
    descs = _Tensors(q_desc, k_desc, v_desc, o_desc)
    stages = _Tensors(q_s, k_s, v_s, o_s)
    bars = _Barriers(q_full, q_empty, k_full, k_empty, v_full, v_empty)
    call = _Call(
        lse, work, count, heads, group, batch, out_rows, left, right, scale, out_scale
    )  # fmt: skip
    # maxnreg 168 at launch gives 3 x 128 threads 64512 registers: 2 x 240 + 24 a thread once
    # redistributed. Constants are written out: in a tuple variable they would stop being such.
    gl.warp_specialize([
        (_consumer, (0, descs, stages, bars, call, GROUPS, ACTIVATION, HAS_LEFT, HAS_RIGHT,
                     ALIGN_END, SCALE_FIRST, HEADS_APART, PING_PONG, RESIDENT, FOLDED)),
        (_consumer, (1, descs, stages, bars, call, GROUPS, ACTIVATION, HAS_LEFT, HAS_RIGHT,
                     ALIGN_END, SCALE_FIRST, HEADS_APART, PING_PONG, RESIDENT, FOLDED)),
        (_producer, (descs, stages, bars, call, GROUPS, ACTIVATION, HAS_LEFT, HAS_RIGHT,
                     ALIGN_END, SCALE_FIRST, HEADS_APART, PING_PONG, RESIDENT, FOLDED)),
    ], [4, 1], [240, 24])  # fmt: skip
