"""FLOP and bytes of the attention-like operators, from lengths, mask and sizes alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.pairs import attention_flops, visible_pairs
from jagbench.spec import PAIRS, SHARED


def forward_flops(inputs: Inputs) -> int:
    """FLOP of one forward pass: 2 (head_dim of q + head_dim of v) a head and visible pair."""
    k_lengths = inputs.lengths("k_offsets")
    assert k_lengths is not None
    q, v = _q_and_v(inputs)
    q_lengths = inputs.lengths("q_offsets")
    if q_lengths is None:
        q_lengths = torch.full_like(k_lengths, q.shape[0])
    mask = {
        name: inputs.options[name]
        for name in ("causal", "align", "window", "prefix", "last_full")
        if name in inputs.options
    }
    pairs = int(visible_pairs(q_lengths, k_lengths, **mask).sum())
    return attention_flops(pairs, q.shape[1], q.shape[2], v.shape[2])


def forward_bytes(inputs: Inputs) -> int:
    """Least bytes of one forward pass: each input read once, each output written once.

    Rows past the last offset count nowhere. A bias counts whole, masked pairs included.
    """
    moved = read_once(inputs)
    q, v = _q_and_v(inputs)
    dense = inputs.arguments["q_offsets"] is None
    rows = q.shape[0] * inputs.num_sequences if dense else rows_of(inputs, "q_offsets")
    moved += rows * q.shape[1] * v.shape[2] * q.element_size()
    if inputs.options.get("return_lse"):
        moved += rows * q.shape[1] * (8 if q.dtype == torch.float64 else 4)
    return moved


def read_once(inputs: Inputs, used: Mapping[str, int] | None = None) -> int:
    """Bytes of every argument read once; rows past the last offset are not.

    used: rows read of arguments that are not read whole.
    """
    moved, used = 0, used or {}
    for name, tensor in inputs.tensors().items():
        layout = SHARED if name in inputs.operator.offsets_arguments else inputs.layout_of(name)
        rows = tensor.shape[0] if layout in (SHARED, PAIRS) else rows_of(inputs, layout)
        rows = used.get(name, rows)
        moved += rows * tensor[:1].numel() * tensor.element_size() if tensor.shape[0] else 0
    return moved


def rows_of(inputs: Inputs, layout: str) -> int:
    """Rows up to the last offset."""
    offsets = inputs.offsets(layout)
    assert offsets is not None
    return int(offsets[-1])


def longest(inputs: Inputs, layout: str) -> int:
    """Length of the longest sequence."""
    lengths = inputs.lengths(layout)
    assert lengths is not None
    return int(lengths.max()) if lengths.numel() else 0


def _q_and_v(inputs: Inputs) -> tuple[Tensor, Tensor]:
    tensors = inputs.tensors()
    return tensors["q"], tensors["v"]
