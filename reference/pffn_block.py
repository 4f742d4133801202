"""The PFFN block with its norms: LayerNorm, GDPA with a residual, RMSNorm with a second residual.

Source: facebookresearch/ads_model_kernel_library ("FlashNormAttention"): ln = LayerNorm(q),
o = GDPA(ln, K, V) + ln, out = RMSNorm(o) + q, the norms over the features of all heads together
and without parameters of their own; Kunlun, arXiv 2602.10016, for the PFFN itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.reference import arguments
from jagbench.reference.gdpa import GDPA, gdpa, gdpa_bytes, gdpa_flops
from jagbench.reference.norm import layer_norm, rms_norm
from jagbench.spec import Operator


def pffn_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    activation: str | Sequence[str],
    eps: float,
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    deterministic: bool = False,
) -> Tensor:
    """RMSNorm(GDPA(ln, k, v) + ln) + q with ln = LayerNorm(q), written from the definition.

    q `[total_q, heads, d]`; k and v `[total_k, kv_heads, d]`: the keys and values are the weights
    of a feed-forward network that every sequence has for itself. Offsets and options as of `gdpa`,
    without masks. float64, float32, float16 and bfloat16; in the last two every step rounds to
    that dtype.

    eps: of both norms, at least 0; no default, because public code has 1e-5 and 1e-6.

    Returns a tensor like q; rows past the last offset are 0. A query without keys gives
    RMSNorm(ln) + q. Raises ValueError for arguments that do not fit, with their numbers.
    """
    ln, total = _entered(q, k, v, q_offsets, eps)
    attended = gdpa(
        ln, k, v, q_offsets, k_offsets, activation=activation, pre_scale=pre_scale,
        post_scale=post_scale, max_q_len=max_q_len, max_k_len=max_k_len,
        deterministic=deterministic,
    )  # fmt: skip
    inner = (attended + ln)[:total]
    normed = rms_norm(inner.flatten(1), eps=eps).view_as(inner)
    return torch.cat([normed + q[:total], torch.zeros_like(q[total:])])


def uncancelled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    activation: str | Sequence[str],
    eps: float,
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    deterministic: bool = False,
) -> Tensor:
    """The same output; gradients as if the rows' statistics were constants: terms that cancel."""
    ln, total = _entered(q, k, v, q_offsets, eps)
    scale = ln.detach()  # LayerNorm's own gradient, without what it projects out.
    rows = q.flatten(1)
    deviation = rows.detach().var(1, correction=0, keepdim=True)
    flow = (rows - rows.detach()) * torch.rsqrt(deviation + eps)
    ln = scale + flow.view_as(q)
    attended = gdpa(
        ln, k, v, q_offsets, k_offsets, activation=activation, pre_scale=pre_scale,
        post_scale=post_scale, max_q_len=max_q_len, max_k_len=max_k_len,
        deterministic=deterministic,
    )  # fmt: skip
    inner = (attended + ln)[:total]
    size = inner.detach().flatten(1).square().mean(1)
    normed = inner * torch.rsqrt(size + eps)[:, None, None]
    return torch.cat([normed + q[:total], torch.zeros_like(q[total:])])


def _entered(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, eps: float) -> tuple[Tensor, int]:
    """LayerNorm of every row before the last offset (0 behind it), and their number."""
    arguments.check_values(q, k, v)
    arguments.check_eps(eps)
    if q.shape[2] != v.shape[2]:
        raise ValueError(f"q has head_dim {q.shape[2]} and v has {v.shape[2]}: both are added")
    if q_offsets is None:
        raise ValueError(f"q {tuple(q.shape)} needs q_offsets: no dense query passes through")
    total = sum(arguments.sequence_lengths("q", q_offsets, q.shape[0], None))
    normed = layer_norm(q[:total].flatten(1), eps=eps).view(total, *q.shape[1:])
    return torch.cat([normed, torch.zeros_like(q[total:])]), total


def pffn_block_flops(inputs: Inputs) -> int:
    """FLOP of one forward pass: those of GDPA; the norms and residuals count 0."""
    return gdpa_flops(inputs)


def pffn_block_bytes(inputs: Inputs) -> int:
    """Least bytes of one forward pass: q, k and v read once, the output written once."""
    return gdpa_bytes(inputs)


PFFN_BLOCK = Operator(
    name="pffn_block",
    reference=pffn_block,
    layout=GDPA.layout,
    output_layout=GDPA.output_layout,
    differentiable=GDPA.differentiable,
    flops=pffn_block_flops,
    bytes_moved=pffn_block_bytes,
    approximation=GDPA.approximation,
    uncancelled=uncancelled,
    residual=True,
    paper="facebookresearch/ads_model_kernel_library; Kunlun, arXiv 2602.10016",
)
