"""Calls of peers, and dense stand-ins for libraries that do not run on a CPU."""

import torch

from jagbench import workloads
from jagbench.accuracy import judge
from jagbench.execution import run
from jagbench.peers import adapter
from jagbench.reference import jagged_attention as truth
from jagbench.suite import shapes


def problems(peer, inputs):
    """What is wrong with a peer's outputs and gradients, in words."""
    outcome = run(peer.jagged_attention, inputs.clone(), backward=inputs.upstream is not None)
    return [f"{each.name}: {each.problem}" for each in judge(inputs, outcome) if not each.ok]


def smoke(name, dtype=torch.float32):
    """Inputs of a workload."""
    return workloads.select(name=name)[0].inputs("cpu", dtype)


def call_of(q_lengths, k_lengths=None, **options):
    return adapter._described(shapes.attention("jagged_attention", q_lengths, k_lengths, **options))


def dense(q, k, v, q_offsets, k_offsets, scale, window, return_lse):
    sides = tuple(None if side is None or side < 0 else side for side in window)
    return truth(q, k, v, q_offsets, k_offsets, scale=scale, window=sides, return_lse=return_lse)


def fake_varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                window_size=(-1, -1), enable_gqa=False):  # fmt: skip
    assert q.shape[2] % 8 == 0
    assert q.shape[2] == v.shape[2]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa or q.shape[1] == k.shape[1]
    assert (max_q, max_k) >= (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    out, lse = dense(q, k, v, cu_seq_q, cu_seq_k, scale, window_size, True)
    return (out, lse.t().masked_fill(lse.t() == -torch.inf, torch.inf)) if return_aux.lse else out


def fake_old_varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None,
                    scale=None):  # fmt: skip
    window = (None, 0) if is_causal else (None, None)
    out, lse = dense(q, k, v, cu_seq_q, cu_seq_k, scale, window, True)
    return (out, lse.t()) if return_aux.lse else out


def fake_fa4(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
             causal, window_size, deterministic, return_lse):  # fmt: skip
    assert q.dtype in (torch.float16, torch.bfloat16), "inputs must be float16 or bfloat16"
    assert q.shape[2] <= 256, "head_dim 264 is not supported on SM90"
    window = (None, 0) if causal else window_size
    out, lse = dense(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window, True)
    return out, lse.t() if return_lse else None


def fake_fbgemm(q, k, v, offsets, max_seq_len, allow_tf32=True):
    assert not allow_tf32
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return (truth(q, k, v, offsets, offsets, scale=1.0) / max_seq_len).transpose(0, 1).contiguous()


def fake_fla(q, k, v, *, scale, window_size, cu_seqlens):
    assert cu_seqlens.dtype == torch.int64
    assert (cu_seqlens.diff() > 0).all(), "an empty sequence shifts the list of tiles"
    window = None if window_size is None else (window_size - 1, None)
    out = truth(q[0], k[0], v[0], cu_seqlens, cu_seqlens, scale=scale, causal=True, window=window)
    return out[None]


def fake_flex(q, k, v, *, block_mask, scale, enable_gqa, return_lse):
    rows, keys = (torch.arange(x.shape[2]) for x in (q, k))
    zero = torch.zeros((), dtype=torch.int64)
    seen = block_mask.mask_mod(zero, zero, rows[:, None], keys[None, :])
    group = q.shape[1] // k.shape[1]
    assert enable_gqa == (group > 1)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    some = seen.any(1)[:, None]
    weights = torch.where(some, torch.softmax(torch.where(some, scores, 0.0), -1), 0.0)
    lse = torch.logsumexp(scores.float(), -1)
    return (weights @ v, lse) if return_lse else weights @ v
