"""Padded scaled_dot_product_attention: every sequence padded to the longest, one back end allowed.

    --impl=jagbench.peers.padded_sdpa:flash      or :cudnn, :math

Padding and masks are made inside the call; `prepare` makes them beforehand. Keys past the end of a
sequence are never seen, as an unmasked padded call would see them. What that costs:

- nothing where all key lengths are equal, and under a causal mask where every sequence has as many
  queries as keys (a padded key then lies after every real query);
- flash takes no mask: q gets one column more and padded keys a huge number of the other sign in
  it, so that their weight is exactly 0. The head_dim grows to the next multiple of 8;
- cudnn gets an additive mask, of one row of keys or, with a window or a bias, of every pair;
- math the same as booleans, or as the bias with -inf.

flash does causal masks between unequal lengths by putting both sides at the end of a square, and
no other windows.
"""

from __future__ import annotations

import math as _math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from jagbench.peers.adapter import Peer, Plan, Planner, pad_columns, peer
from jagbench.peers.arguments import HALF, Call, refuse, refuse_unordered_sums
from jagbench.peers.padding import Pad, Side, Unpad

__version__ = torch.__version__

#: How keys are hidden: not at all, by SDPA's causal flag, by a column, by keys, or pair by pair.
Masking = Literal["none", "causal flag", "column", "keys", "pairs"]
#: Both factors of the score of a padded key under flash.
_HUGE = {torch.float16: 60000.0, torch.bfloat16: 2.0**60, torch.float32: 2.0**60}
#: Least size of that score: exp of its negative is 0 beside any real score.
_ENOUGH = 1e5


def _flash(call: Call) -> Plan:
    refuse(call.return_lse, "scaled_dot_product_attention returns no log-sum-exp")
    refuse(call.bias is not None, "flash SDPA takes no mask, so no bias")
    gpu = call.q.device.type == "cuda"
    refuse(gpu and call.q.dtype not in HALF, f"flash SDPA does not take {call.q.dtype}")
    refuse(call.bounded and not call.causal_only, "flash SDPA takes no mask, so no window")
    refuse_unordered_sums(call, "flash SDPA")
    masking: Masking = "none" if call.k_lengths.equal else "column"
    if call.causal_only and call.same_lengths:
        return _plan(call, SDPBackend.FLASH_ATTENTION, "causal flag")
    if masking == "column" or call.bounded:
        size = _HUGE.get(call.q.dtype, 1.0) ** 2 * abs(call.scale)
        refuse(size < _ENOUGH, f"flash SDPA cannot hide padded keys under scale {call.scale}")
        masking = "column"
    return _plan(call, SDPBackend.FLASH_ATTENTION, masking)


def _cudnn(call: Call) -> Plan:
    refuse(call.return_lse, "scaled_dot_product_attention returns no log-sum-exp")
    refuse(call.q.device.type != "cuda", f"cuDNN does not run on {call.q.device.type}")
    refuse(call.q.dtype not in HALF, f"cuDNN SDPA does not take {call.q.dtype}")
    learnt = call.bias is not None and call.bias.requires_grad and torch.is_grad_enabled()
    refuse(learnt, "cuDNN SDPA gives its mask no gradient, so a bias has none")
    refuse_unordered_sums(call, "cuDNN SDPA")
    return _plan(call, SDPBackend.CUDNN_ATTENTION, _masking(call))


def _math_plan(call: Call) -> Plan:
    refuse(call.return_lse, "scaled_dot_product_attention returns no log-sum-exp")
    return _plan(call, SDPBackend.MATH, _masking(call))


def _masking(call: Call) -> Masking:
    if call.bias is not None:
        return "pairs"
    if not call.bounded:
        return "none" if call.k_lengths.equal else "keys"
    return "causal flag" if call.causal_only and call.same_lengths else "pairs"


@dataclass(frozen=True)
class _Layout:
    """Packed to `[batch, heads, longest, width]` and back."""

    call: Call
    q_side: Side | None
    k_side: Side
    width: int
    v_width: int
    column: bool

    def pack(self, name: str, x: Tensor) -> Tensor:
        """q, k, v, or the upstream gradient as "out"."""
        width = self.v_width if name in ("v", "out") else self.width
        side = self.q_side if name in ("q", "out") else self.k_side
        if side is None:  # a dense query: one for the batch, or as many outputs
            return self._dense(name, x, width)
        mark = self._mark(name)
        padded = Pad.apply(x, side.slots, side.batch * side.longest, width, mark)  # type: ignore[no-untyped-call]
        return padded.view(side.batch, side.longest, *padded.shape[1:]).transpose(1, 2)  # type: ignore[no-any-return]

    def _mark(self, name: str) -> tuple[float, float] | None:
        if not self.column or name in ("v", "out"):
            return None
        huge = _HUGE[self.call.q.dtype]
        return (huge, huge) if name == "q" else (0.0, -_math.copysign(huge, self.call.scale))

    def _dense(self, name: str, x: Tensor, width: int) -> Tensor:
        rows = self.call.rows
        x = x.reshape(-1, rows, *x.shape[1:])
        mark = self._mark(name)
        if mark is not None:
            x = torch.cat([x, x.new_full((*x.shape[:-1], 1), mark[0])], -1)
        return pad_columns(x, width).transpose(1, 2)

    def unpack(self, name: str, x: Tensor) -> Tensor:
        """out, or a gradient."""
        argument = name.removeprefix("grad ")
        dim = (self.call.v if argument in ("v", "out") else self.call.q).shape[2]
        side = self.q_side if argument in ("q", "out") else self.k_side
        x = x.transpose(1, 2).flatten(0, 1)[..., :dim]
        return x if side is None else Unpad.apply(x, side.slots)  # type: ignore[no-untyped-call]


def _plan(call: Call, backend: SDPBackend, masking: Masking) -> Plan:
    longest_q, longest_k = max(call.q_lengths.longest, 1), max(call.k_lengths.longest, 1)
    at_end = masking == "column" and call.bounded and call.align == "end"
    square = masking == "column" and call.bounded
    if square or masking == "causal flag":
        longest_q = longest_k = max(longest_q, longest_k)
    refuse(square and call.q_offsets is None, "flash SDPA: a dense query is not put in a square")
    d, dv = call.q.shape[2], call.v.shape[2]
    width, v_width = d + (masking == "column"), dv
    if backend != SDPBackend.MATH:
        width, v_width = -(-width // 8) * 8, -(-dv // 8) * 8
    if backend == SDPBackend.FLASH_ATTENTION:
        width = v_width = max(width, v_width)
    q_side = None
    if call.q_offsets is not None:
        q_side = Side.of(call.q_lengths, call.q_offsets, longest_q, at_end)
    layout = _Layout(
        call, q_side, Side.of(call.k_lengths, call.k_offsets, longest_k, at_end), width, v_width,
        masking == "column",
    )  # fmt: skip
    dense = call.q_offsets is None
    causal = masking == "causal flag" or square
    mask = _mask(call, backend, masking, call.rows if dense else longest_q, longest_k)
    blind = _blind(call, masking, mask) if backend == SDPBackend.CUDNN_ATTENTION else None
    kernel = _kernel(call, backend, mask, blind, causal)
    notes = {"backend": backend.name, "masking": masking, "head_dim": str(width)}
    return Plan(kernel, layout.pack, layout.unpack, notes)


def _kernel(
    call: Call, backend: SDPBackend, mask: Tensor | None, blind: Tensor | None, causal: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[0] != k.shape[0]:
            q = q.expand(k.shape[0], -1, -1, -1)
        try:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal, scale=call.scale,
                    enable_gqa=call.grouped,
                )  # fmt: skip
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise NotImplementedError(
                    f"{backend.name} has no kernel for {q.dtype} {tuple(q.shape)} x "
                    f"{tuple(k.shape)} on {q.device.type}, mask {mask is not None}"
                ) from error
            raise
        return out if blind is None else out.masked_fill(blind, 0.0)

    return kernel


def _mask(
    call: Call, backend: SDPBackend, masking: Masking, longest_q: int, longest_k: int
) -> Tensor | None:
    """Mask for `[batch, heads, longest_q, longest_k]`, by broadcasting; None for none."""
    if masking not in ("keys", "pairs") or call.empty:
        return None
    counts = call.k_offsets.diff()
    key = torch.arange(longest_k, device=counts.device)
    seen = (key < counts[:, None])[:, None, None, :]
    if masking == "pairs":
        seen = seen & _rows_and_window(call, longest_q, key, counts)
    if call.bias is not None:
        heads = call.bias.shape[1]
        real = seen.expand(-1, -1, longest_q, -1)[:, 0]
        if call.bounded:
            real = (key < counts[:, None])[:, None, :] & _real_rows(call, longest_q)
        flat = call.bias.new_zeros(*real.shape, heads)
        added = flat.index_put((real,), call.bias).permute(0, 3, 1, 2)
        hidden = -_math.inf if backend == SDPBackend.MATH else _hidden(call)
        return torch.where(seen, added, hidden).clamp(min=hidden).to(call.q.dtype)
    if backend == SDPBackend.MATH:
        return seen
    zero = torch.zeros((), dtype=call.q.dtype, device=counts.device)
    return torch.where(seen, zero, _hidden(call)).expand(-1, -1, longest_q, -1)


def _hidden(call: Call) -> float:
    """What cuDNN gets for -inf: finite, so that a row without a key is no NaN."""
    return -torch.finfo(call.q.dtype).max / 2


def _blind(call: Call, masking: Masking, mask: Tensor | None) -> Tensor | None:
    """Rows cuDNN averages over hidden keys, bool `[batch, heads or 1, longest_q, 1]`.

    Where whole keys are hidden such a row averages padded values, which are 0 as they should be.
    """
    if masking != "pairs" or mask is None or mask.dtype == torch.bool:
        return None
    return mask.amax(-1, keepdim=True) <= _hidden(call)


def _real_rows(call: Call, longest_q: int) -> Tensor:
    """Which padded queries are real, bool `[batch or 1, longest_q, 1]`."""
    device = call.k_offsets.device
    if call.q_offsets is None:
        return torch.ones(1, longest_q, 1, dtype=torch.bool, device=device)
    query = torch.arange(longest_q, device=device)
    return (query < call.q_offsets.diff()[:, None])[..., None]


def _rows_and_window(call: Call, longest_q: int, key: Tensor, counts: Tensor) -> Tensor:
    """Real queries and the keys their window shows, bool `[batch, 1, longest_q, longest_k]`."""
    query = torch.arange(longest_q, device=key.device)
    rows = call.rows if call.q_offsets is None else call.q_offsets.diff()
    shift = counts - rows if call.align == "end" else torch.zeros_like(counts)
    place = (query + shift[:, None])[:, :, None]
    seen = _real_rows(call, longest_q).expand(counts.numel(), -1, key.numel())
    if call.left is not None:
        seen = seen & (key >= place - call.left)
    if call.right is not None:
        seen = seen & (key <= place + call.right)
    return seen[:, None]


class PaddedSdpa(Peer):
    """A back end as an implementation; a class of this module, whose source its results name."""


def _peer(planner: Planner) -> PaddedSdpa:
    made = peer(planner, __version__)
    return PaddedSdpa(made.jagged_attention, made.prepare, made.configuration, made.__version__)


flash = _peer(_flash)
cudnn = _peer(_cudnn)
math = _peer(_math_plan)
