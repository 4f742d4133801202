"""Wrong masks: who sees whom, and what fills a masked cell."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from wrong.activations import activate
from wrong.call import Call, Tile
from wrong.right import RIGHT
from wrong.steps import Bounds, bounds, mask, per_head, weigh

#: Keys of one tile in the faults below.
TILE = 16


def _full(call: Call, m: int, n: int) -> Tensor:
    return torch.ones(m, n, dtype=torch.bool, device=call.q.device)


def _causal_only(call: Call, m: int, n: int) -> Tensor:
    return mask(replace(call, window=None), m, n)


def _not_causal(call: Call, m: int, n: int) -> Tensor:
    return mask(replace(call, causal=False), m, n)


def _from_the_start(call: Call, m: int, n: int) -> Tensor:
    return mask(replace(call, align="start"), m, n)


def _from_the_end(call: Call, m: int, n: int) -> Tensor:
    return mask(replace(call, align="end"), m, n)


def _symmetric(call: Call, m: int, n: int) -> Tensor:
    if call.window is None:
        return mask(call, m, n)
    return mask(replace(call, window=(call.window[0], call.window[0])), m, n)


#: `window` is accepted and never used.
ignores_window = replace(RIGHT, mask=_causal_only)
#: `causal` is accepted and never used.
ignores_causal = replace(RIGHT, mask=_not_causal)
#: `align` is ignored: always the first query beside the first key.
always_aligns_at_the_start = replace(RIGHT, mask=_from_the_start)
#: `align` is ignored: always the last query beside the last key.
always_aligns_at_the_end = replace(RIGHT, mask=_from_the_end)
#: The window reaches as far to the right as to the left.
symmetric_window = replace(RIGHT, mask=_symmetric)
#: The backward recomputes the scores without any mask (a public sliding-window kernel).
backward_without_mask = replace(RIGHT, backward_mask=_full)


def _one_more(call: Call, m: int, n: int) -> Tensor:
    if call.causal:
        left = None if call.window is None else call.window[0]
        return mask(replace(call, causal=False, window=(left, 1)), m, n)
    if call.window is None:
        return mask(call, m, n)
    left, right = (None if side is None else side + 1 for side in call.window)
    return mask(replace(call, window=(left, right)), m, n)


#: Every mask lets one key too many through.
off_by_one = replace(RIGHT, mask=_one_more)


# -- beyond the window -----------------------------------------------------------------------------


def _no_prefix(call: Call, m: int, n: int) -> Tensor:
    return mask(replace(call, prefix=0), m, n)


def _no_last(call: Call, m: int, n: int) -> Tensor:
    return mask(replace(call, last_full=0), m, n)


def _last_one_short(call: Call, m: int, n: int) -> Tensor:
    return mask(replace(call, last_full=max(0, call.last_full - 1)), m, n)


def _last_of_keys(call: Call, m: int, n: int) -> Tensor:
    seen = mask(replace(call, last_full=0), m, n)
    return seen | (torch.arange(n, device=seen.device) >= n - call.last_full)


def _prefix_within_causality(call: Call, m: int, n: int) -> Tensor:
    seen = mask(call, m, n)
    if call.causal:
        seen &= mask(replace(call, window=None, prefix=0), m, n)
    return seen


def _prefix_seen_only(call: Call, m: int, n: int) -> Tensor:
    plain = mask(replace(call, prefix=0), m, n)
    return plain | (torch.arange(n, device=plain.device) < call.prefix)


def _prefix_sees_only(call: Call, m: int, n: int) -> Tensor:
    seen = mask(replace(call, prefix=0), m, n)
    at = torch.arange(m, device=seen.device) + (n - m if call.align == "end" else 0)
    return seen | ((at >= 0) & (at < call.prefix))[:, None]


def _prefix_rows_from_the_start(call: Call, m: int, n: int) -> Tensor:
    seen = _prefix_seen_only(call, m, n)
    return seen | (torch.arange(m, device=seen.device) < call.prefix)[:, None]


def _last_into_the_future(call: Call, m: int, n: int) -> Tensor:
    return mask(call, m, n) | (torch.arange(m, device=call.q.device) >= m - call.last_full)[:, None]


def _in_the_buffer(call: Call, where: Bounds) -> Call:
    return replace(call, prefix=max(0, call.prefix - where[2]))


#: `prefix` is accepted and never used.
ignores_prefix = replace(RIGHT, mask=_no_prefix)
#: The context is counted from the start of the packed buffer: later sequences have none.
prefix_of_the_packed_buffer = replace(RIGHT, place=_in_the_buffer)
#: `last_full` is accepted and never used.
ignores_last_full = replace(RIGHT, mask=_no_last)
#: The first of the last queries is bound by the window.
last_is_off_by_one = replace(RIGHT, mask=_last_one_short)
#: The last keys are seen by all, instead of the last queries seeing all.
last_keys_instead_of_last_queries = replace(RIGHT, mask=_last_of_keys)
#: Causality hides keys from a context's queries, and a context from queries before it.
prefix_is_masked_by_causality = replace(RIGHT, mask=_prefix_within_causality)
#: The context is seen by all, and sees its window alone.
prefix_sees_its_window_only = replace(RIGHT, mask=_prefix_seen_only)
#: The context sees all, and is seen within windows alone (a public HSTU kernel).
prefix_is_seen_in_windows_only = replace(RIGHT, mask=_prefix_sees_only)
#: Queries of the context are counted in rows, whatever their place among the keys.
prefix_counts_query_rows = replace(RIGHT, mask=_prefix_rows_from_the_start)
#: The last queries see keys after them under `causal` too.
last_queries_see_the_future = replace(RIGHT, mask=_last_into_the_future)
#: The backward recomputes the scores under the plain window.
backward_forgets_what_lies_beyond = replace(
    RIGHT, backward_mask=lambda call, m, n: mask(replace(call, prefix=0, last_full=0), m, n)
)


def _truthy_window(call: Call, m: int, n: int) -> Tensor:
    if call.window is None:
        return mask(call, m, n)
    left, right = (side or None for side in call.window)
    return mask(replace(call, window=(left, right)), m, n)


#: A window side of 0 is taken for unbounded.
takes_zero_for_unbounded = replace(RIGHT, mask=_truthy_window)


def _wrapped_window(call: Call, m: int, n: int) -> Tensor:
    right = None if call.window is None else call.window[1]
    if right is None or m - 1 + right < 2**31:
        return mask(call, m, n)
    seen = mask(call, m, n)
    seen[max(0, 2**31 - right) :] = False
    return seen


#: A query's position plus the window wraps at 2^31: those queries see nothing.
wraps_the_window_at_32_bits = replace(RIGHT, mask=_wrapped_window)


def _without_tail(call: Call, m: int, n: int) -> Tensor:
    seen = mask(call, m, n)
    if n > TILE:
        seen[:, n - n % TILE :] = False
    return seen


#: The last, incomplete tile of keys is dropped.
drops_the_last_tile = replace(RIGHT, mask=_without_tail)


def _without_last_rows(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name == "out" and call.q_offsets is not None:
        for q0, q1, _, _ in bounds(call):
            if q1 - q0 > TILE:
                tensor[q1 - (q1 - q0) % TILE : q1] = 0.0
    return tensor


#: The last, incomplete tile of queries is never computed.
drops_the_last_query_tile = replace(RIGHT, finish=_without_last_rows)


def _next_key_too(call: Call) -> list[Bounds]:
    last = int(call.k_offsets[-1])
    return [(q0, q1, k0, min(k1 + 1, last) if k1 > k0 else k1) for q0, q1, k0, k1 in bounds(call)]


#: Every sequence also sees the first key of the next one.
leaks_into_the_next_sequence = replace(RIGHT, bounds=_next_key_too)


def _whole_tiles(call: Call) -> list[Bounds]:
    rows = call.k.shape[0]
    return [
        (q0, q1, k0, min(rows, k0 + (k1 - k0 + TILE - 1) // TILE * TILE))
        for q0, q1, k0, k1 in bounds(call)
    ]


#: Whole tiles of keys are walked without a length mask (a public Blackwell kernel).
walks_whole_tiles = replace(RIGHT, bounds=_whole_tiles)


def _swapped(call: Call) -> list[Bounds]:
    if call.q_offsets is None:
        return bounds(call)
    most_q, most_k = call.q.shape[0], call.k.shape[0]
    return [
        (min(k0, most_q), min(k1, most_q), min(q0, most_k), min(q1, most_k))
        for q0, q1, k0, k1 in bounds(call)
    ]


#: Query rows are cut by the key offsets and the reverse.
swaps_the_offsets = replace(RIGHT, bounds=_swapped)


def _even(call: Call) -> list[Bounds]:
    ends = bounds(call)
    if not ends:
        return ends
    each_k = ends[-1][3] // len(ends)
    if call.q_offsets is None:
        return [(q0, q1, s * each_k, s * each_k + each_k) for s, (q0, q1, _, _) in enumerate(ends)]
    each_q = ends[-1][1] // len(ends)
    return [
        (s * each_q, s * each_q + each_q, s * each_k, s * each_k + each_k) for s in range(len(ends))
    ]


#: The batch is cut into equal parts: right only where all lengths are equal.
right_for_equal_lengths_only = replace(RIGHT, bounds=_even)


def _infinite_fill(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    if call.softmax:
        return weigh(call, tile)
    hidden = tile.scores.masked_fill(~tile.mask, -math.inf)
    weights = call.post * per_head(call, activate, hidden)
    return weights, weights.new_zeros(weights.shape[:2])


#: gdpa fills masked scores with -inf before the activation: GELU of -inf is NaN.
fills_with_infinity_before_the_activation = replace(RIGHT, weigh=_infinite_fill)


def _zero_fill_slope(call: Call, tile: Tile, weights: Tensor, flow: Tensor) -> Tensor:
    if call.softmax:
        return RIGHT.slope(call, tile, weights, flow)
    hidden = replace(
        tile, scores=tile.scores.masked_fill(~tile.mask, 0.0), mask=torch.ones_like(tile.mask)
    )
    return RIGHT.slope(call, hidden, weights, flow)


#: Masked scores are 0 before the activation, and the backward takes act'(0) for them.
zero_fill_without_a_backward_mask = replace(RIGHT, slope=_zero_fill_slope)


def _subtracted(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    if not call.softmax or tile.scores.shape[-1] == 0:
        return weigh(call, tile)
    n = tile.scores.shape[-1]
    zeroed = tile.scores.masked_fill(~tile.mask, 0.0)
    beyond = -n % (8 * TILE)
    peak = zeroed.amax(-1, keepdim=True).clamp(min=0.0)
    raised = torch.exp(zeroed - peak)
    pads = beyond + (~tile.mask).sum(-1, keepdim=True)
    total = raised.sum(-1, keepdim=True) + beyond * torch.exp(-peak) - pads * torch.exp(-peak)
    weights = torch.where(tile.mask, raised / total, 0.0)
    return weights, (peak + total.log())[..., 0].masked_fill(~tile.mask.any(-1), -math.inf)


#: Padded keys score 0 and are subtracted from the row sum with no guard: nothing is left of the
#: sum where the valid scores are strongly negative (spec 3.3).
subtracts_without_guard = replace(RIGHT, weigh=_subtracted)


def _nan_rows(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    weights, lse = weigh(call, tile)
    if not call.softmax:
        return weights, lse
    return weights.masked_fill(~tile.mask.any(-1)[:, None], math.nan), lse


def _nan_mix(weights: Tensor, v: Tensor) -> Tensor:
    # A softmax over no key at all is 0 / 0.
    return weights @ v if v.shape[1] else torch.full_like(weights @ v, math.nan)


def _unguarded(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    weights, lse = weigh(call, tile)
    # An online softmax whose first tile of keys holds -inf alone takes -inf from -inf.
    blind = (tile.scores[..., :TILE] == -math.inf).all(-1, keepdim=True)
    return weights.masked_fill(blind, math.nan) if tile.scores.numel() else weights, lse


#: The maximum of a tile that the bias hides whole is taken as it is.
nan_where_the_bias_hides_a_tile = replace(RIGHT, weigh=_unguarded)

#: A row that sees no key is NaN.
nan_where_nothing_is_visible = replace(RIGHT, weigh=_nan_rows, mix=_nan_mix)
#: gdpa forgets rows whose sequence has no key; their output is what the allocator left.
nan_on_empty_keys = replace(RIGHT, mix=_nan_mix)
