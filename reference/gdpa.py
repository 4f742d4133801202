"""Generalised dot-product attention: O = post_scale act(pre_scale Q K^T) V within each sequence.

Sources: "Generalized Dot-Product Attention: Tackling Real-World Challenges in GPU Training Kernels"
(PyTorch blog, 2026) and Kunlun, arXiv 2602.10016.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.pairs import Align, Window
from jagbench.reference import activations, arguments, costs
from jagbench.spec import Operator


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    activation: str | Sequence[str],
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    causal: bool = False,
    align: Align = "end",
    window: Window | None = None,
    prefix: int = 0,
    last_full: int = 0,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Attention without a normaliser, written from the equation: no softmax, no row maximum.

    q `[total_q, heads, d]`; k `[total_k, kv_heads, d]`; v `[total_k, kv_heads, dv]`; offsets
    `[batch + 1]`. Query head h reads key head h // (heads / kv_heads). With `q_offsets=None`, q
    `[rows, heads, d]` is one dense query shared by every sequence. float64, float32, float16 and
    bfloat16; in the last two every step rounds to that dtype, which is the naive run that sets the
    error budget (the activation rounds once, as torch's own elementwise functions do).

    activation: a name of `jagbench.reference.activations`, or one name a head.
    pre_scale, post_scale: factors inside and outside the activation.
    causal, align, window, prefix, last_full: which keys a query sees (`jagbench.pairs`); all others
        add exactly 0 to the output and to every gradient, whatever the activation of 0 is. The
        first `prefix` tokens of a sequence are seen by every query and see every key; the last
        `last_full` queries are bound by causality alone, by no window.
    max_q_len, max_k_len: not needed; a value below the longest sequence is refused.
    deterministic: always kept.

    Returns out `[total_q, heads, dv]` (`[batch, rows, heads, dv]` for a dense query); rows past the
    last offset are 0. Raises ValueError for arguments that do not fit, with their numbers.
    """
    arguments.check_values(q, k, v)
    mask = arguments.Mask(causal, align, window, prefix, last_full)
    names = activations.by_head(activation, q.shape[1])
    q_lengths, k_lengths = arguments.both_lengths(q, k, q_offsets, k_offsets, max_q_len, max_k_len)
    total_q, total_k = sum(q_lengths), sum(k_lengths)
    dense = q_offsets is None
    queries = [q] * len(k_lengths) if dense else torch.split(q[:total_q], q_lengths)
    keys, values = torch.split(k[:total_k], k_lengths), torch.split(v[:total_k], k_lengths)

    outs = [arguments.no_rows(q, k, v, dense=dense)]
    for i, (m, n) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        seen = arguments.visible(m, n, mask, q.device)
        out = _attend(queries[i], keys[i], values[i], seen, names, pre_scale) * post_scale
        outs.append(out[None] if dense else out)
    if not dense:
        outs.append(q.new_zeros(q.shape[0] - total_q, q.shape[1], v.shape[-1]))
    return torch.cat(outs)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, names: Sequence[str], pre_scale: float
) -> Tensor:
    """Out `[m, heads, dv]` of one sequence, before post_scale; seen bool `[m, n]`."""
    group = q.shape[1] // k.shape[1]
    q = arguments.drop(q, seen.any(1)).transpose(0, 1)
    k = arguments.drop(k, seen.any(0)).transpose(0, 1).repeat_interleave(group, 0)
    v = arguments.drop(v, seen.any(0)).transpose(0, 1).repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2)) * pre_scale  # [heads, m, n]
    scores = torch.where(seen, scores, 0.0)
    # Mask again after the activation: act(0) need not be 0, and act'(0) is 1/2 for GELU.
    weights = torch.where(seen, _activate(names, scores), 0.0)
    return (weights @ v).transpose(0, 1)


def _activate(names: Sequence[str], scores: Tensor) -> Tensor:
    """Every head of scores `[heads, m, n]` under its own activation, in float32 at least."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if len(set(names)) == 1:
        return activations.activation(names[0])(wide).to(scores.dtype)
    heads = [activations.activation(name)(x) for name, x in zip(names, wide, strict=True)]
    return torch.stack(heads).to(scores.dtype)


def gdpa_flops(inputs: Inputs) -> int:
    """FLOP of one forward pass over visible pairs: 2 heads (d + dv) a pair; activations count 0."""
    return costs.forward_flops(inputs)


def gdpa_bytes(inputs: Inputs) -> int:
    """Least bytes of one forward pass: every input read once, every output written once."""
    return costs.forward_bytes(inputs)


def _approximation(inputs: Inputs) -> float:
    """Error that a GPU's tanh may bring into one weight, where an activation is meant to use it."""
    if inputs.device.type == "cpu":
        return 0.0
    names = inputs.options["activation"]
    chosen = {names} if isinstance(names, str) else set(names)
    return activations.HARDWARE_TANH_ERROR / 2 if chosen & activations.HARDWARE_TANH else 0.0


GDPA = Operator(
    name="gdpa",
    reference=gdpa,
    layout={"q": "q_offsets", "k": "k_offsets", "v": "k_offsets"},
    output_layout={"out": "q_offsets"},
    differentiable=("q", "k", "v"),
    flops=gdpa_flops,
    bytes_moved=gdpa_bytes,
    approximation=_approximation,
    paper="PyTorch blog 2026, Generalized Dot-Product Attention; Kunlun, arXiv 2602.10016",
)
