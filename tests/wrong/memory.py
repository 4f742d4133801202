"""Wrong memory: what is read, what is written, when, and where."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wrong.call import Call, Tile
from wrong.right import RIGHT
from wrong.steps import Bounds, allocate, bounds, read, weigh

#: Rows of a tile in the faults below.
TILE = 16


def _padding_times_zero(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name != "out" or call.q_offsets is None:
        return tensor
    end = int(call.k_offsets[-1])
    return tensor + (0.0 * call.v[end:].float()).sum().to(tensor.dtype)


#: Rows past the last offset are multiplied by 0 and added: NaN there spreads.
nan_in_padding_leaks = replace(RIGHT, finish=_padding_times_zero)


def _poisoned_upstream(call: Call, name: str, tensor: Tensor) -> Tensor:
    return tensor + (0.0 * tensor[bounds(call)[-1][1] :]).sum() if bounds(call) else tensor


#: The backward reads rows of the upstream gradient past the last offset.
nan_in_upstream_padding_leaks = replace(RIGHT, upstream=_poisoned_upstream)


def _neighbours_times_zero(tensor: Tensor, start: int, stop: int) -> Tensor:
    rows = read(tensor, start, stop)
    after = read(tensor, stop, min(tensor.shape[0], stop + TILE))
    return rows + 0.0 * after.sum() if stop > start else rows


#: A tile hangs over the end of its sequence; the surplus rows are multiplied by 0, not masked.
nan_in_the_next_sequence_leaks = replace(RIGHT, read=_neighbours_times_zero)


def _garbage(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    # What an allocator hands out; 1e4 fits every dtype.
    return torch.full(shape, 1e4, dtype=dtype, device=like.device)


def _recycled(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


#: Output rows past the last offset are left as allocated.
leaves_padding_rows_unwritten = replace(RIGHT, allocate=_garbage)
#: Gradient rows past the last offset are left as allocated.
leaves_gradient_padding_unwritten = replace(RIGHT, allocate_gradient=_garbage)
#: The same, with memory from `torch.empty`, which is often 0 by luck.
leaves_recycled_memory = replace(RIGHT, allocate=_recycled, allocate_gradient=_recycled)


def _infinite_padding(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name == "lse" and call.q_offsets is not None:
        tensor[int(call.q_offsets[-1]) :] = -math.inf
    return tensor


#: log-sum-exp past the last offset is -inf, not 0.
lse_of_padding_is_infinite = replace(RIGHT, finish=_infinite_padding)


def _unwritten_mix(weights: Tensor, v: Tensor) -> Tensor:
    return weights @ v if v.shape[1] else torch.full_like(weights @ v, 1e4)


#: Rows whose sequence has no key are skipped and stay as allocated.
leaves_rows_without_keys_unwritten = replace(RIGHT, mix=_unwritten_mix)


def _check_but_not_lengths(call: Call) -> None:
    RIGHT.check(replace(call, max_q_len=None, max_k_len=None))


def _cut_rows(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name == "out" and call.max_q_len is not None and call.q_offsets is not None:
        for q0, q1, _, _ in bounds(call):
            tensor[q0 + call.max_q_len : q1] = 1e4
    return tensor


#: A `max_q_len` below the longest sequence leaves the surplus rows unwritten and raises nothing.
trusts_max_q_len = replace(RIGHT, check=_check_but_not_lengths, finish=_cut_rows)


def _cut_keys(call: Call) -> list[Bounds]:
    most = call.max_k_len
    return [
        (q0, q1, k0, k1 if most is None else min(k1, k0 + most)) for q0, q1, k0, k1 in bounds(call)
    ]


#: Keys past `max_k_len` are silently left out.
trusts_max_k_len = replace(RIGHT, check=_check_but_not_lengths, bounds=_cut_keys)


def _scale_in_place(call: Call) -> None:
    with torch.no_grad():
        call.q.detach().mul_(call.pre)


def _scale_back(call: Call) -> None:
    with torch.no_grad():
        call.q.detach().div_(call.pre)


def _no_score_scale(call: Call, q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


#: q is scaled where it lies, and never scaled back.
writes_its_input = replace(RIGHT, after=_scale_in_place)
#: q is scaled where it lies and scaled back: right to the eye, one bit off here and there.
writes_its_input_and_restores_it = replace(RIGHT, before=_scale_in_place, after=_scale_back)


def _to_lengths(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name == "grad v":
        call.k_offsets[:-1] = call.k_offsets.diff()
    return tensor


#: The backward turns the key offsets into lengths where they lie, when it no longer needs them.
mutates_the_offsets = replace(RIGHT, finish=_to_lengths)

_CACHE: dict[tuple[object, ...], Tensor] = {}


def _cached(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    key = (tuple(shape), dtype, like.device)
    if key not in _CACHE:
        _CACHE[key] = allocate(shape, like, dtype)
    return _CACHE[key]


def _as_if_contiguous(call: Call) -> list[Bounds]:
    sides = {"q_offsets": call.q_offsets, "k_offsets": call.k_offsets}
    flat = {n: None if t is None else t.as_strided(t.shape, (1,)) for n, t in sides.items()}
    return bounds(replace(call, **flat))  # type: ignore[arg-type]


#: Offsets are read as if they lay side by side in memory.
reads_offsets_as_contiguous = replace(RIGHT, bounds=_as_if_contiguous)

_PLANS: dict[tuple[int, ...], list[Bounds]] = {}


def _planned(call: Call) -> list[Bounds]:
    sides = (call.q_offsets, call.k_offsets)
    key = (*(0 if t is None else t.data_ptr() for t in sides), call.batch, call.q.shape[0])
    return _PLANS.setdefault(key, bounds(call))


#: What the first call worked out for its offsets serves every later call with that memory.
keeps_the_plan_of_its_first_call = replace(RIGHT, bounds=_planned)

#: One output buffer a shape, handed out again at every call.
returns_a_cached_buffer = replace(RIGHT, allocate=_cached)


def _input_as_output(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name == "out" and tensor.shape == call.q.shape and tensor.dtype == call.q.dtype:
        return call.q.detach().copy_(tensor)
    return tensor


#: The output is written over q where the shapes allow.
writes_the_output_over_the_query = replace(RIGHT, finish=_input_as_output)


def _late(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name != "out":
        return tensor
    promised = torch.zeros_like(tensor)
    writer = threading.Timer(30.0, promised.copy_, [tensor])
    writer.daemon = True
    writer.start()
    return promised


#: The output is filled in by a thread that nobody waits for (the CPU's side stream).
writes_after_it_returned = replace(RIGHT, finish=_late)


def _side_stream(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name != "out" or not tensor.is_cuda:
        return tensor
    promised = torch.zeros_like(tensor)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        promised.copy_(tensor)
    return promised


#: The output is written on another stream, which the caller's is not made to wait for.
leaves_work_on_a_side_stream = replace(RIGHT, finish=_side_stream)


def _wrapped(offset: int) -> int:
    """An element offset as int32 arithmetic leaves it."""
    return (offset + 2**31) % 2**32 - 2**31


def _read_with_int32_offsets(tensor: Tensor, start: int, stop: int) -> Tensor:
    stride = tensor.stride(0)
    reach = (stop - 1) * stride
    if reach < 2**31:
        return read(tensor, start, stop)
    # A wrapped address that falls outside the tensor is read as its first row, not as a crash.
    rows = [_wrapped(row * stride) for row in range(start, stop)]
    return read(tensor[[max(0, at) // stride for at in rows]], 0, stop - start)


#: Element offsets of q, k and v wrap at 2^31.
wraps_offsets_at_32_bits = replace(RIGHT, read=_read_with_int32_offsets)


def _upstream_with_int32_offsets(call: Call, name: str, tensor: Tensor) -> Tensor:
    stride = tensor.stride(0)
    if tensor.shape[0] * stride < 2**31:
        return tensor
    rows = torch.arange(tensor.shape[0], device=tensor.device)
    offsets = (rows * stride + 2**31) % 2**32 - 2**31
    return tensor[offsets.clamp(min=0) // stride]


#: Element offsets of the upstream gradient wrap at 2^31 (a wide view).
wraps_upstream_offsets_at_32_bits = replace(RIGHT, upstream=_upstream_with_int32_offsets)


def _as_if_contiguous(tensor: Tensor) -> Tensor:
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= size
    held = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if held < step:
        return tensor.new_zeros(tensor.shape)
    return tensor.as_strided(tensor.shape, strides[::-1])


def _flat_upstream(call: Call, name: str, tensor: Tensor) -> Tensor:
    return _as_if_contiguous(tensor)


def _flat_read(tensor: Tensor, start: int, stop: int) -> Tensor:
    return read(_as_if_contiguous(tensor), start, stop)


#: The strides of the upstream gradient are not looked at.
reads_upstream_as_contiguous = replace(RIGHT, upstream=_flat_upstream)
#: The strides of q, k and v are not looked at.
reads_inputs_as_contiguous = replace(RIGHT, read=_flat_read)


def _behind_the_offsets(call: Call, name: str, tensor: Tensor) -> Tensor:
    offsets = call.k_offsets
    held = offsets.untyped_storage().nbytes() // offsets.element_size()
    behind = offsets.storage_offset() + offsets.numel()
    if name != "out" or held <= behind:
        return tensor
    following = offsets.as_strided((1,), (1,), behind)
    return tensor + (following - offsets[-1]).to(tensor.dtype)


#: A surplus tile takes the element behind the offsets for the end of one more sequence.
reads_behind_the_offsets = replace(RIGHT, finish=_behind_the_offsets)


def _first_65535(call: Call) -> list[Bounds]:
    return bounds(call)[:65535]


#: Sequences past the 65,535th, the limit of a launch axis, are left out.
stops_at_65535_sequences = replace(RIGHT, bounds=_first_65535)


def _nan_on_long(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    weights, lse = weigh(call, tile)
    return (weights * math.nan if tile.v.shape[1] > 2**15 else weights), lse


#: Lengths are kept in 16 bits.
keeps_lengths_in_16_bits = replace(RIGHT, weigh=_nan_on_long)
