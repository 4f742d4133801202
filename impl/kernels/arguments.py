"""Arguments of the jagged operators, checked: what kernels may rely on."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import torch
from torch import Tensor

from jagbench.pairs import check_window_sides

#: Largest row stride, in elements, whose offsets inside a tile of 256 rows still fit 32 bits.
LARGEST_ROW_STRIDE = 1 << 23

_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)

# Offsets already found well-formed: id -> (the tensor, version that was looked at, last offset,
# longest sequence). A tensor is looked at once, because looking at device memory stops the stream;
# one changed in place, once more. An id is given anew when its tensor is gone, hence the reference.
_checked_offsets: dict[int, tuple[weakref.ref[Tensor], int, int, int]] = {}


@dataclass(frozen=True)
class Geometry:
    """Sizes of one call.

    batch: sequences. total_q, total_k: rows of q and k, padding rows included; with `shared_q` q is
    one dense block of total_q rows for every sequence. out_rows: rows of the output.
    """

    batch: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    total_q: int
    total_k: int
    shared_q: bool

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def mean_q(self) -> float:
        """Query rows a sequence on average, padding included: what the host knows of lengths."""
        return float(self.total_q) if self.shared_q else self.total_q / max(1, self.batch)

    @property
    def mean_k(self) -> float:
        """Key rows a sequence on average, padding included."""
        return self.total_k / max(1, self.batch)

    @property
    def out_rows(self) -> int:
        """Rows of the output over the whole batch."""
        return self.batch * self.total_q if self.shared_q else self.total_q

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output: `[total_q, heads, v_dim]`, with a batch in front if q is shared."""
        rows = (self.batch, self.total_q) if self.shared_q else (self.total_q,)
        return (*rows, self.heads, self.v_dim)


def geometry_of(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor
) -> Geometry:
    """Sizes of a call whose arguments have been checked."""
    total_q, heads, qk_dim = q.shape
    total_k, kv_heads, v_dim = v.shape
    batch, shared = k_offsets.shape[0] - 1, q_offsets is None
    return _geometry(batch, heads, kv_heads, qk_dim, v_dim, total_q, total_k, shared)


# Making one costs more than finding it again.
_geometry = lru_cache(maxsize=1024)(Geometry)


def empty_output(
    q: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor
) -> tuple[Tensor, int]:
    """The output, not filled, and its rows: for fake tensors, whose sizes may be symbols."""
    rows = [q.shape[0]] if q_offsets is not None else [k_offsets.shape[0] - 1, q.shape[0]]
    return q.new_empty(*rows, q.shape[1], v.shape[2]), math.prod(rows)


def check_arguments(
    operator: str, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor
) -> Geometry:
    """Shapes, dtypes and devices of q, k, v and offsets; raises ValueError with the numbers.

    In every call: the questions are asked together, and the words found only for a wrong answer.
    """
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 3:
        _refuse_shapes(operator, q=q, k=k, v=v)
    dtype, device = q.dtype, q.device
    if not dtype == k.dtype == v.dtype or dtype not in _FLOAT_TYPES:
        _refuse_dtypes(operator, q, k, v)
    same = device == k.device == v.device == k_offsets.device
    if not same or (q_offsets is not None and q_offsets.device != device):
        _refuse_devices(operator, q, k=k, v=v, q_offsets=q_offsets, k_offsets=k_offsets)
    total_q, heads, qk_dim = q_shape
    total_k, kv_heads, v_dim = v_shape
    if k_shape[0] != total_k or k_shape[1] != kv_heads:
        raise ValueError(
            f"{operator}: k and v must have the same rows and heads, got {tuple(k_shape[:2])} and "
            f"{tuple(v_shape[:2])}"
        )
    if qk_dim != k_shape[2]:
        raise ValueError(
            f"{operator}: q and k must have one head_dim, got {qk_dim} and {k_shape[2]}"
        )
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(f"{operator}: {kv_heads} key heads do not divide {heads} query heads")
    if not 1 <= qk_dim <= 256 or not 1 <= v_dim <= 256:
        raise NotImplementedError(
            f"{operator}: head dims 1 to 256 are supported, got {qk_dim} and {v_dim}"
        )
    batch = _check_batch(operator, q_offsets, k_offsets)
    return Geometry(batch, heads, kv_heads, qk_dim, v_dim, total_q, total_k, q_offsets is None)


def _refuse_shapes(operator: str, **tensors: Tensor) -> NoReturn:
    name, shape = next((n, tuple(t.shape)) for n, t in tensors.items() if t.dim() != 3)
    raise ValueError(f"{operator}: {name} must be [rows, heads, head_dim], got shape {shape}")


def _refuse_dtypes(operator: str, q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    if q.dtype == k.dtype == v.dtype == torch.float64:
        raise NotImplementedError(f"{operator}: no kernel computes float64")
    raise ValueError(
        f"{operator}: q, k, v must share one dtype out of float32, float16, bfloat16, got "
        f"{q.dtype}, {k.dtype}, {v.dtype}"
    )


def _refuse_devices(operator: str, q: Tensor, **others: Tensor | None) -> NoReturn:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{operator}: {name} is on {tensor.device}, q on {q.device}")
    raise AssertionError("every tensor is on one device")


def _check_batch(operator: str, q_offsets: Tensor | None, k_offsets: Tensor) -> int:
    check_offsets_tensor(operator, "k_offsets", k_offsets)
    batch = k_offsets.shape[0] - 1
    if q_offsets is not None and q_offsets is not k_offsets:
        check_offsets_tensor(operator, "q_offsets", q_offsets)
        if q_offsets.shape[0] - 1 != batch:
            raise ValueError(
                f"{operator}: q_offsets are for {q_offsets.shape[0] - 1} sequences, k_offsets for "
                f"{batch}"
            )
    return batch


def check_offsets_tensor(operator: str, name: str, offsets: Tensor) -> None:
    """Shape and dtype of an offsets tensor; raises ValueError."""
    shape, dtype = offsets.shape, offsets.dtype
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"{operator}: {name} must be [batch + 1], got shape {tuple(shape)}")
    if dtype != torch.int32 and dtype != torch.int64:
        raise ValueError(f"{operator}: {name} must be int32 or int64, got {dtype}")


def check_both_offsets(
    operator: str, geometry: Geometry, q_offsets: Tensor | None, k_offsets: Tensor
) -> None:
    """Values of the offsets of a call; see `check_offsets`.

    Not while a CUDA graph is captured: the capture's warm-up run has looked at them.
    """
    if k_offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if q_offsets is not None:
        check_offsets(operator, "q_offsets", q_offsets, geometry.total_q)
    check_offsets(operator, "k_offsets", k_offsets, geometry.total_k)


def check_offsets(operator: str, name: str, offsets: Tensor, total: int) -> int:
    """Values of an offsets tensor: from 0, non-decreasing, at most `total`; else ValueError.

    Returns the length of the longest sequence, 0 if there is none. Reads device memory, so the
    stream is waited for, once per tensor object and version.
    """
    state = version(offsets)
    found = _checked_offsets.get(id(offsets))
    if found is not None and found[1] == state and found[0]() is offsets:
        last, longest = found[2:]
    else:
        last, longest = _look_at(operator, name, offsets)
        if state is not None:
            key = id(offsets)
            gone = weakref.ref(offsets, lambda _: _checked_offsets.pop(key, None))
            _checked_offsets[key] = gone, state, last, longest
    if last > total:
        raise ValueError(f"{operator}: {name} end at {last}, but there are {total} rows")
    return longest


def _look_at(operator: str, name: str, offsets: Tensor) -> tuple[int, int]:
    """The last offset and the longest length; ValueError if they do not start at 0 or decrease."""
    host = offsets.cpu()  # the one wait
    first = int(host[0])
    if first != 0:
        raise ValueError(f"{operator}: {name} must start at 0, got {first}")
    lengths = host.diff()
    falls = (lengths < 0).nonzero()
    if falls.numel():
        at = int(falls[0])
        raise ValueError(
            f"{operator}: {name} must not decrease, but entry {at} is {int(host[at])} and entry "
            f"{at + 1} is {int(host[at + 1])}"
        )
    return int(host[-1]), int(lengths.max()) if lengths.numel() else 0


def version(tensor: Tensor) -> int | None:
    """Changes in place so far; None where torch does not count them (tensors of inference mode)."""
    return None if tensor.is_inference() else tensor._version


def window_bounds(operator: str, causal: bool, window: object) -> tuple[int, int]:
    """`(left, right)` with -1 for unbounded; causal sets right to 0."""
    if window is None:
        left: int | None = None
        right: int | None = None
    else:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ValueError(f"{operator}: window must be (left, right), got {window!r}")
        left, right = window
    try:
        check_window_sides(left, right)
    except ValueError as problem:
        raise ValueError(f"{operator}: {problem}") from None
    if causal:
        right = 0
    # A bound past int32 sees everything; clipped so that position arithmetic cannot wrap.
    clip = 1 << 29
    return (
        -1 if left is None or left >= clip else left,
        -1 if right is None or right >= clip else right,
    )


def is_eps(value: object) -> bool:
    """Whether a value is a number of at least 0, which what a norm adds under its root must be."""
    try:
        return bool(value >= 0)  # type: ignore[operator]
    except TypeError:
        return False


def check_align(operator: str, align: str) -> bool:
    """Whether the last query lies beside the last key ("end"); ValueError for unknown names."""
    if align not in ("start", "end"):
        raise ValueError(f"{operator}: align must be 'start' or 'end', got {align!r}")
    return align == "end"


def kernel_layout(tensor: Tensor) -> Tensor:
    """The tensor itself if kernels can address it, else a contiguous copy.

    Kernels take any row and head stride (expanded and interleaved tensors included) so long as a
    head's elements lie side by side and the rows of a tile stay within 32-bit offsets.
    """
    fits = tensor.stride(2) == 1 or tensor.shape[2] == 1
    return tensor if fits and tensor.stride(0) < LARGEST_ROW_STRIDE else tensor.contiguous()


def tensor_arguments(
    operator: str, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The arguments as custom ops take them; ValueError for one that is no tensor.

    q, k, v in the autocast dtype where autocast is on (float64 is left alone, as torch does);
    offsets contiguous, because kernels count through them.
    """
    given = {"q": q, "k": k, "v": v, "q_offsets": q_offsets, "k_offsets": k_offsets}
    for name, value in given.items():
        if not isinstance(value, Tensor) and (value is not None or name != "q_offsets"):
            raise ValueError(f"{operator}: {name} must be a tensor, got {type(value).__name__}")
    device = q.device.type
    # The meta device has no autocast, and torch refuses to be asked.
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (t.to(dtype) if t.dtype in _FLOAT_TYPES else t for t in (q, k, v))
    return q, k, v, None if q_offsets is None else q_offsets.contiguous(), k_offsets.contiguous()
