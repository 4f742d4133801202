"""Adapters of libraries that do not run on a CPU: dense stand-ins see what these would be given."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from peer_stand_ins import (
    call_of,
    fake_fa4,
    fake_fbgemm,
    fake_fla,
    fake_flex,
    fake_old_varlen,
    fake_varlen,
    problems,
    smoke,
)
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask

from jagbench.accuracy import judge
from jagbench.execution import run
from jagbench.peers import (
    arguments,
    fbgemm_jfa,
    flash_attention_4,
    flash_linear_attention,
    flex_attention,
    varlen_attn,
)
from jagbench.reference import jagged_attention as truth
from jagbench.suite import shapes


@pytest.fixture
def fakes(monkeypatch):
    """The dense stand-ins in place of the libraries."""
    known = {
        "flash_attn.cute": SimpleNamespace(flash_attn_varlen_func=fake_fa4),
        "fbgemm_gpu.sll.triton": SimpleNamespace(multi_head_jagged_flash_attention=fake_fbgemm),
        "fla.ops.attn": SimpleNamespace(parallel_attn=fake_fla),
    }
    for module in (flash_attention_4, fbgemm_jfa, flash_linear_attention):
        monkeypatch.setattr(module, "library", lambda name, *_: known[name])
    monkeypatch.setattr(varlen, "varlen_attn", fake_varlen)
    monkeypatch.setattr(flex_attention, "compiled", lambda: fake_flex)
    real = arguments.refuse
    monkeypatch.setattr(flex_attention, "refuse", lambda c, r: real(c and "CPU" not in r, r))
    return monkeypatch


CALLS = {
    "self-with-an-empty-sequence": ([4, 0, 9], None, {}),
    "cross": ([4, 7, 0, 3], [6, 0, 5, 3], {"dim": 20, "v_dim": 12}),
    "causal": ([4, 0, 9], None, {"causal": True, "align": "start", "heads": 4, "kv_heads": 2}),
    "causal-cross": ([4, 7], [6, 3], {"causal": True}),
    "window": ([8, 3], None, {"window": (2, 0)}),
    "two-sided-window-cross": ([8, 3], [4, 6], {"window": (2, 1), "scale": 0.5}),
}
#: What each library cannot do.
UNSUPPORTED = {
    fbgemm_jfa: {"cross", "causal", "causal-cross", "window", "two-sided-window-cross"},
    flash_linear_attention: {"self-with-an-empty-sequence", "cross", "causal-cross"}
    | {"two-sided-window-cross"},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "module",
    [varlen_attn, flash_attention_4, flex_attention, fbgemm_jfa, flash_linear_attention],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_arguments_are_converted_both_ways(fakes, module, call):
    q_lengths, k_lengths, options = CALLS[call]
    dtype = torch.float32 if module is flex_attention else torch.float16
    inputs = shapes.attention("jagged_attention", q_lengths, k_lengths, dtype=dtype, **options)
    if call in UNSUPPORTED.get(module, ()):
        with pytest.raises(NotImplementedError):
            run(module.jagged_attention, inputs)
        return
    assert not problems(module, inputs)
    prepared = module.prepare("jagged_attention", inputs)
    found = prepared.unpack("out", prepared.call(**prepared.tensors))
    assert torch.equal(found, run(module.jagged_attention, inputs)["out"])


@pytest.mark.parametrize("module", [varlen_attn, flash_attention_4, flex_attention])
def test_the_log_sum_exp_is_of_every_row_and_minus_infinite_for_a_blind_one(fakes, module):
    inputs = shapes.attention("jagged_attention", [3, 2], [4, 0], dtype=torch.float16)
    inputs = inputs.with_options(return_lse=True)
    outcome = run(module.jagged_attention, inputs)
    assert outcome["lse"].shape == (5, 2)
    assert outcome["lse"].dtype == torch.float32
    assert (outcome["lse"][3:] == -torch.inf).all()
    assert all(verdict.ok for verdict in judge(inputs, outcome))


@pytest.mark.parametrize("module", [varlen_attn, flash_attention_4, flex_attention])
def test_a_dense_query_is_repeated_and_its_gradient_summed(fakes, module):
    inputs = smoke("jagged_attention-broadcast-q-smoke", torch.float16)
    assert not problems(module, inputs)
    prepared = module.prepare("jagged_attention", inputs)
    leaves = {n: t.detach().requires_grad_() for n, t in prepared.tensors.items()}
    out = prepared.call(**leaves)
    gradient = torch.autograd.grad(out, leaves["q"], prepared.upstream)[0]
    whole = run(module.jagged_attention, inputs, backward=True)
    found = prepared.unpack("grad q", gradient)
    torch.testing.assert_close(found, whole["grad q"], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("module", [varlen_attn, flash_attention_4])
def test_alignment_at_the_start_is_refused_between_unequal_lengths(fakes, module):
    inputs = shapes.attention(
        "jagged_attention", [3, 5], [4, 5], dtype=torch.float16, causal=True, align="start"
    )
    with pytest.raises(NotImplementedError, match="at the end"):
        run(module.jagged_attention, inputs)


def test_an_older_varlen_attn_is_called_by_its_own_names(fakes):
    fakes.setattr(varlen, "varlen_attn", fake_old_varlen)
    inputs = shapes.attention("jagged_attention", [3, 5], dtype=torch.float16)
    assert not problems(varlen_attn, inputs.with_options(causal=True))
    with pytest.raises(NotImplementedError, match="no window"):
        run(varlen_attn.jagged_attention, inputs.with_options(window=(1, 1)))


def test_what_flash_attention_4_asserts_is_unsupported(fakes):
    inputs = shapes.attention("jagged_attention", [3, 5], dim=264, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="264 is not supported on SM90"):
        run(flash_attention_4.jagged_attention, inputs)


def test_gradients_summed_by_atomics_are_not_called_deterministic(fakes):
    inputs = shapes.attention("jagged_attention", [3, 5], dtype=torch.float16, deterministic=True)
    run(varlen_attn.jagged_attention, inputs)
    with pytest.raises(NotImplementedError, match="use_deterministic_algorithms"):
        run(varlen_attn.jagged_attention, inputs, backward=True)


# -- block masks of FlexAttention


def blocks(mask, side):
    counts, indices = getattr(mask, f"{side}_num_blocks"), getattr(mask, f"{side}_indices")
    rows = zip(indices[0, 0].tolist(), counts[0, 0].tolist(), strict=True)
    return [set(row[:count]) for row, count in rows]


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "align": "start"}, {"window": (5, 9)}],
    ids=str,
)
@pytest.mark.parametrize(
    "lengths", [([100, 3, 0, 64, 17, 16],) * 2, ([50, 9, 0, 33], [48, 70, 5, 0])], ids=str
)
def test_block_masks_hold_the_blocks_that_torch_finds_pair_by_pair(monkeypatch, options, lengths):
    monkeypatch.setattr(flex_attention, "BLOCK", 16)
    call = call_of(*lengths, **options)
    ours = flex_attention.block_mask(call)
    rows, keys = call.q_lengths.total, call.k_lengths.total
    torchs = create_block_mask(ours.mask_mod, 1, 1, rows, keys, device="cpu", BLOCK_SIZE=16)
    for side in ("kv", "q"):
        full, partial = blocks(ours, f"full_{side}"), blocks(ours, side)
        assert full == blocks(torchs, f"full_{side}")
        assert not any(a & b for a, b in zip(full, partial, strict=True))
        assert all(a >= b for a, b in zip(partial, blocks(torchs, side), strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (3, 1), "align": "start"}], ids=str
)
def test_the_range_of_keys_is_what_the_reference_sees(options):
    q_lengths, k_lengths = [5, 2, 0, 7], [3, 4, 6, 7]
    low, high = flex_attention.key_ranges(call_of(q_lengths, k_lengths, **options))
    keys = torch.arange(sum(k_lengths))
    seen = (keys >= low[:, None]) & (keys < high[:, None])
    assert torch.equal(seen, visible_by_reference(q_lengths, k_lengths, **options))


def visible_by_reference(q_lengths, k_lengths, **options) -> Tensor:
    """Which key each query sees, read off the weights of values that are unit vectors."""
    inputs = shapes.attention(
        "jagged_attention", q_lengths, k_lengths, heads=1, v_dim=sum(k_lengths), **options
    )
    unit = torch.eye(sum(k_lengths))[:, None, :]
    inputs = dataclasses.replace(inputs, upstream=None).replace(v=unit)
    return run(truth, inputs)["out"][:, 0] > 0
