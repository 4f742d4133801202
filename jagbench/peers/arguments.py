"""What a caller passed, checked and described for an adapter: the part all peers share.

Offsets are looked at on the host once per tensor object and version, as `jagbench.impl` does: a
call on offsets seen before waits for the device no more.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from jagbench.bias import BucketedBias
from jagbench.pairs import Align, Window, check_beyond_the_window, visible_range

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)
_BUCKET_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Lengths:
    """Lengths of the sequences of one side, on the host: int64 `[batch]`."""

    host: Tensor
    total: int
    longest: int
    shortest: int

    @property
    def equal(self) -> bool:
        """Whether all sequences are as long as each other."""
        return self.longest == self.shortest


# Lengths of offsets already looked at: (version of the tensor, rows it was checked against) first.
_seen: MutableMapping[Tensor, tuple[object, Lengths]] = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Call:
    """One checked call.

    q `[total_q, heads, d]`, k `[total_k, kv_heads, d]`, v `[total_k, kv_heads, dv]`: rows past the
        last offset are cut off, so that their gradient is 0.
    q_offsets: None for one dense query of every sequence, as q_lengths then say.
    rows: rows of the output, those past the last offset included.
    left, right: bounds of the visible keys (`jagbench.pairs`); None where they bind nothing.
    bias: of every pair, `[pairs, heads or 1]`, buckets looked up; None if there is none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor | None
    k_offsets: Tensor
    q_lengths: Lengths
    k_lengths: Lengths
    rows: int
    scale: float
    left: int | None
    right: int | None
    align: Align
    bias: Tensor | None
    deterministic: bool
    return_lse: bool

    @property
    def batch(self) -> int:
        """Sequences."""
        return int(self.k_offsets.numel()) - 1

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.q.shape[1] != self.k.shape[1]

    @property
    def same_lengths(self) -> bool:
        """Whether every sequence has as many queries as keys, so that both alignments agree."""
        return torch.equal(self.q_lengths.host, self.k_lengths.host)

    @property
    def bounded(self) -> bool:
        """Whether a window or causality hides any pair."""
        return self.left is not None or self.right is not None

    @property
    def causal_only(self) -> bool:
        """Whether keys after the query are hidden, and no others."""
        return self.left is None and self.right == 0

    @property
    def empty(self) -> bool:
        """Whether there is no pair to compute: most libraries refuse such a call."""
        return 0 in (self.batch, self.q_lengths.total, self.k_lengths.total)

    @property
    def wants_gradient(self) -> bool:
        """Whether autograd will ask for a gradient of this call."""
        given = [self.q, self.k, self.v, *([] if self.bias is None else [self.bias])]
        return torch.is_grad_enabled() and any(t.requires_grad for t in given)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    scale: float | None,
    causal: bool,
    align: Align,
    window: Window | None,
    prefix: int,
    last_full: int,
    bias: Tensor | BucketedBias | None,
    max_q_len: int | None,
    max_k_len: int | None,
    deterministic: bool,
    return_lse: bool,
) -> Call:
    """Check the arguments of `jagged_attention`; ValueError with the numbers where they clash."""
    q, k, v = autocast(q, k, v)
    check_values(q, k, v)
    if align not in get_args(Align):
        raise ValueError(f"align must be one of {get_args(Align)}, got {align!r}")
    if window is not None and (not isinstance(window, Sequence) or len(window) != 2):
        raise ValueError(f"window must be (left, right), got {window!r}")
    left, right = visible_range(causal, window)
    check_beyond_the_window(prefix, last_full)
    k_lengths = lengths_of("k", k_offsets, k, max_k_len)
    if q_offsets is None:
        count, rows = k_lengths.host.numel(), q.shape[0]
        q_lengths = _describe(torch.full((count,), rows))
        _check_longest("q", rows, max_q_len)
    else:
        q_lengths = lengths_of("q", q_offsets, q, max_q_len)
    if q_lengths.host.numel() != k_lengths.host.numel():
        raise ValueError(
            f"q_offsets hold {q_lengths.host.numel()} sequences and k_offsets "
            f"{k_lengths.host.numel()}"
        )
    _refuse_beyond_the_window(left, right, causal, prefix, last_full)
    # A side that reaches past every key binds nothing, and most libraries are faster without it.
    reach = q_lengths.longest + k_lengths.longest
    return Call(
        q=q if q_offsets is None else q[: q_lengths.total],
        k=k[: k_lengths.total],
        v=v[: k_lengths.total],
        q_offsets=None if q_offsets is None else q_offsets.contiguous(),
        k_offsets=k_offsets.contiguous(),
        q_lengths=q_lengths,
        k_lengths=k_lengths,
        rows=q.shape[0],
        scale=1 / math.sqrt(q.shape[2]) if scale is None else float(scale),
        left=None if left is None or left >= reach else left,
        right=None if right is None or right >= reach else right,
        align=align,
        bias=None if bias is None else _dense_bias(bias, q, q_lengths.host @ k_lengths.host),
        deterministic=deterministic,
        return_lse=return_lse,
    )


def _refuse_beyond_the_window(
    left: int | None, right: int | None, causal: bool, prefix: int, last_full: int
) -> None:
    """No adapter translates a prefix or last queries that show more than the window does."""
    bounded = left is not None or right is not None
    refuse(bounded and prefix > 0, f"no contextual prefix (asked for {prefix}) beside a mask")
    windowed = left is not None or (bounded and not causal)
    refuse(windowed and last_full > 0, f"no last queries ({last_full}) that see past a window")


def library(module: str, package: str, wanted: str) -> Any:
    """Import a peer's module; NotImplementedError naming the package if that cannot be done."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise NotImplementedError(
            f"needs {package} {wanted}, which cannot be imported here: {error}"
        ) from error


def version_of(package: str) -> str:
    """Version of an installed distribution, or "absent"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def refuse(condition: bool, reason: str) -> None:
    """NotImplementedError with a reason, where a condition holds."""
    if condition:
        raise NotImplementedError(reason)


def refuse_loose_end(call: Call, peer: str) -> None:
    """Refuse a bounded call aligned at the start, for a peer that aligns last query and last key.

    Where every sequence has as many queries as keys the two are one.
    """
    refuse(
        call.bounded and call.align == "start" and not call.same_lengths,
        f"{peer} aligns causal masks and windows at the end where lengths differ",
    )


def refuse_unordered_sums(call: Call, peer: str) -> None:
    """Refuse `deterministic=True` with gradients, for a backward that adds dQ by atomics.

    torch's own kernels have an ordered form, taken while torch's deterministic mode is on.
    """
    promised = torch.are_deterministic_algorithms_enabled()
    refuse(
        call.deterministic and call.wants_gradient and not promised,
        f"{peer} has deterministic gradients only under torch.use_deterministic_algorithms(True)",
    )


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values in autocast's dtype where it is on, as torch's own attention takes them."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor of 3 dims, got {type(x).__name__}")
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    narrow = (*HALF, torch.float32)
    return tuple(t.to(dtype) if t.dtype in narrow else t for t in (q, k, v))  # type: ignore[return-value]


def check_values(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes, dtypes and devices of q, k and v; ValueError with the numbers."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or 0 in x.shape[1:]:
            raise ValueError(f"{name} must be [rows, heads, head_dim], got {tuple(x.shape)}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ValueError(
            f"q, k and v must share one of {len(DTYPES)} float dtypes, got {q.dtype}, {k.dtype}, "
            f"{v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on different devices: {q.device}, {k.device}, {v.device}")
    if k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "k and v must agree in rows and heads, q and k in head_dim, and k's heads divide q's, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )


def _lengths_on_the_host(
    name: str, offsets: Tensor, values: Tensor, longest: int | None
) -> Lengths:
    """Lengths under an offsets tensor `[batch + 1]`, with one wait for the device."""
    if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.numel() == 0:
        shape = tuple(offsets.shape) if isinstance(offsets, Tensor) else type(offsets).__name__
        raise ValueError(
            f"{name}_offsets must be a tensor of [batch + 1 >= 1] entries, got {shape}"
        )
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}_offsets must be int32 or int64, got {offsets.dtype}")
    if offsets.device != values.device:
        raise ValueError(f"{name}_offsets are on {offsets.device}, {name} is on {values.device}")
    version = None if offsets.is_inference() else offsets._version
    state, (before, found) = (version, values.shape[0]), _seen.get(offsets, (None, None))
    if found is None or version is None or before != state:
        found = _look(name, offsets, values.shape[0])
        _seen[offsets] = state, found
    _check_longest(name, found.longest, longest)
    return found


# A compiled caller breaks its graph here rather than trace a look at the device.
lengths_of: Callable[..., Lengths] = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _lengths_on_the_host
)


def _look(name: str, offsets: Tensor, rows: int) -> Lengths:
    host = offsets.cpu().long()
    lengths = host.diff()
    if int(host[0]) != 0:
        raise ValueError(f"{name}_offsets must start at 0, got {int(host[0])}")
    found = _describe(lengths)
    if found.shortest < 0:
        at = int(lengths.argmin())
        raise ValueError(
            f"{name}_offsets decrease at index {at + 1}: {int(host[at])} to {int(host[at + 1])}"
        )
    if found.total > rows:
        raise ValueError(f"{name}_offsets end at {found.total}, past the {rows} rows of {name}")
    return found


def _describe(lengths: Tensor) -> Lengths:
    if not lengths.numel():
        return Lengths(lengths, 0, 0, 0)
    return Lengths(lengths, int(lengths.sum()), int(lengths.max()), int(lengths.min()))


def _check_longest(name: str, found: int, longest: int | None) -> None:
    if longest is not None and longest < found:
        raise ValueError(
            f"max_{name}_len is {longest}, and the longest {name} sequence has {found}"
        )


def _dense_bias(bias: Tensor | BucketedBias, q: Tensor, count: Tensor) -> Tensor:
    """Bias of every pair, `[pairs, heads or 1]`; count: how many there are, on the host."""
    pairs = int(count)
    values = bias.table if isinstance(bias, BucketedBias) else bias
    if not isinstance(values, Tensor) or values.dim() != 2:
        raise ValueError(f"bias must be a tensor of 2 dims or a BucketedBias, got {type(values)}")
    shape, wide = tuple(values.shape), values.is_floating_point()
    if shape[1] not in (1, q.shape[1]) or not wide or values.device != q.device:
        raise ValueError(
            f"bias must be floating [rows, {q.shape[1]} heads or 1] on {q.device}, got "
            f"{values.dtype} {shape} on {values.device}"
        )
    if not isinstance(bias, BucketedBias):
        if shape[0] != pairs:
            raise ValueError(f"bias has {shape[0]} rows for {pairs} query-key pairs")
        return values
    ids = bias.bucket_ids
    if tuple(ids.shape) != (pairs,) or ids.dtype not in _BUCKET_DTYPES or ids.device != q.device:
        raise ValueError(
            f"bucket_ids must be integers [{pairs}] on {q.device}, got {ids.dtype} "
            f"{tuple(ids.shape)} on {ids.device}"
        )
    if pairs and not 0 <= int(ids.min()) <= int(ids.max()) < shape[0]:
        raise ValueError(
            f"bucket_ids lie in [{int(ids.min())}, {int(ids.max())}], and the table has "
            f"{shape[0]} buckets"
        )
    return values[ids.long()]
