"""Block attention: who sees whom, and what a rotary embedding fused into it must not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.accuracy import difference
from jagbench.execution import Outcome
from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS, rotary
from jagbench.reference.norm import qk_norm
from jagbench.rotary import TokenTable
from jagbench.suite import changes, shapes
from jagbench.suite.candidate import Candidate
from jagbench.suite.identities import broken, naive_of, truth_of

Check = Callable[[Inputs, Outcome], None]

pytestmark = pytest.mark.operator("block_attention")


def _draw(candidate: Candidate, lengths: Sequence[int], **options: Any) -> Inputs:
    settings = candidate.settings
    options = {"heads": 4, "kv_heads": 2, "dtype": settings.main_dtype, **options}
    return shapes.attention("block_attention", lengths, device=settings.device, **options)


def _with_table(inputs: Inputs, table: Tensor | TokenTable) -> Inputs:
    arguments = {**inputs.arguments, "rotary": table}
    return Inputs(inputs.operator, arguments, inputs.options, inputs.upstream)


def _turned(inputs: Inputs, first: int = 0) -> Inputs:
    """The call with a table that turns whole heads by position, counted from `first`."""
    lengths = inputs.lengths("offsets")
    assert lengths is not None
    dim = inputs.tensors()["q"].shape[2]
    table = shapes.rotary_table(int(lengths.max()), dim, inputs.dtype, inputs.device, first)
    return _with_table(inputs, table)


def _holds(candidate: Candidate, inputs: Inputs, truth: Mapping[str, Tensor]) -> None:
    """The implementation on `inputs` gives `truth`."""
    __tracebackhide__ = True
    found = broken(inputs, candidate.run(inputs, backward=True), truth, naive_of(inputs))
    if found:
        pytest.fail("the identity does not hold: " + "; ".join(found), pytrace=False)


def _as_attention(inputs: Inputs, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Truth of jagged attention on the same rows, cut into sequences of these lengths."""
    t, ends = inputs.tensors(), shapes.offsets(lengths, inputs.device)
    arguments = {**{n: t[n] for n in "qkv"}, "q_offsets": ends, "k_offsets": ends}
    whole = Inputs(OPERATORS["jagged_attention"], arguments, {}, inputs.upstream)
    return truth_of(whole)


# Who sees whom


def test_sequences_no_longer_than_a_block_see_themselves_whole(candidate: Candidate) -> None:
    """Up to 64 tokens, attention in blocks of 64 is attention over the whole sequence."""
    lengths = [64, 1, 0, 63, 17, 33]
    inputs = _draw(candidate, lengths)
    _holds(candidate, inputs, _as_attention(inputs, lengths))


@pytest.mark.parametrize("block_size", [None, 16, 64, 128])
def test_a_block_is_a_sequence_of_its_own(candidate: Candidate, block_size: int | None) -> None:
    """Attention in blocks is attention over sequences cut at their blocks; 64 is the default."""
    lengths, size = [150, 7, 64, 65], block_size or 64
    inputs = _draw(candidate, lengths)
    if block_size is not None:
        inputs = inputs.with_options(block_size=block_size)
    cut = [min(size, n - start) for n in lengths for start in range(0, n, size)]
    _holds(candidate, inputs, _as_attention(inputs, cut))


@pytest.mark.parametrize("table", [False, True], ids=["plain", "rotary"])
def test_a_tail_of_any_length_is_a_block_of_its_own(
    candidate: Candidate, table: bool, check: Check
) -> None:
    """Tails of 1 to 63 rows, alone in their sequence and behind a whole block."""
    lengths = [*range(1, 64), 65, 95, 96, 97, 127]
    inputs = _draw(candidate, lengths, heads=1, kv_heads=1, dim=16)
    inputs = _turned(inputs) if table else inputs
    check(inputs, candidate.run(inputs, backward=True))


@pytest.mark.parametrize("before", [1, 32, 63, 65])
def test_blocks_are_counted_from_the_start_of_each_sequence(
    candidate: Candidate, before: int
) -> None:
    """What a sequence gives does not hang on where in the buffer it starts."""
    inputs = _turned(_draw(candidate, [before, 130]))
    alone = inputs.select([1])
    outcome = candidate.run(inputs, backward=True)
    rows = {n: inputs.cut_output(n.removeprefix("grad "), x, [1]) for n, x in outcome.items()}
    found = broken(alone, rows, truth_of(alone), naive_of(alone))
    assert not found, f"{before} rows before a sequence change it: {'; '.join(found)}"


def test_order_of_keys_in_a_block_does_not_matter(candidate: Candidate) -> None:
    """Without a rotary table no position of a block is special."""
    inputs = _draw(candidate, [64 + 20])
    generator = torch.Generator().manual_seed(3)
    order = [torch.randperm(n, generator=generator) for n in (64, 20)]
    index = torch.cat([order[0], 64 + order[1]]).to(inputs.device)
    other = changes.floats(inputs, lambda x: x[index], names=("k", "v"))
    truth = truth_of(inputs)
    truth |= {n: truth[n][index] for n in ("grad k", "grad v")}
    _holds(candidate, other, truth)


@pytest.mark.parametrize("table", [False, True], ids=["plain", "rotary"])
def test_a_block_has_no_share_in_the_gradients_of_another(
    candidate: Candidate, table: bool
) -> None:
    """An upstream gradient on one block alone leaves exactly 0 everywhere else."""
    inputs = _draw(candidate, [150, 40])
    inputs = _turned(inputs) if table else inputs
    rows = torch.arange(190, device=inputs.device)
    inside = (rows >= 64) & (rows < 128)
    only = changes.floats(
        inputs, lambda x: torch.where(inside[:, None, None], x, 0.0), names=("upstream",)
    )
    outcome = candidate.run(only, backward=True)
    for name in ("grad q", "grad k", "grad v"):
        assert (outcome[name][~inside] == 0).all(), f"{name} leaves its block"
        assert (outcome[name][inside] != 0).any(), name


def test_nan_in_one_block_leaves_the_others_of_its_sequence_alone(candidate: Candidate) -> None:
    """The rows of a block are read into no other, nor are those of a tail's neighbours."""
    inputs = _turned(_draw(candidate, [64 + 5, 64]))
    clean = candidate.run(inputs, backward=True)
    for block in (slice(0, 64), slice(64, 69), slice(69, 133)):
        spoilt = inputs.clone()
        assert spoilt.upstream is not None
        for tensor in (*(spoilt.tensors()[n] for n in "qkv"), spoilt.upstream):
            tensor[block] = float("nan")
        outcome = candidate.run(spoilt, backward=True)
        for name, tensor in outcome.items():
            kept = torch.ones(133, dtype=torch.bool)
            kept[block] = False
            rows = kept.to(tensor.device)
            assert torch.equal(tensor[rows], clean[name][rows]), f"{name} changed by {block}"


# QK-norm


def _heads_apart(inputs: Inputs, eps: float) -> tuple[Inputs, dict[str, Tensor]]:
    """The call on q and k that were normalised before, and the float64 leaves they came from."""
    wide = inputs.to(torch.float64)
    leaves = {n: wide.tensors()[n].requires_grad_() for n in "qkv"}
    q, k = qk_norm(leaves["q"], leaves["k"], eps=eps)
    return wide.replace(q=q, k=k, v=leaves["v"]), leaves


@pytest.mark.parametrize("table", [False, True], ids=["plain", "rotary"])
def test_a_fused_norm_of_heads_is_the_norm_before_attention(
    candidate: Candidate, table: bool
) -> None:
    """Each head of q and of k by itself, before it is turned; values are left alone."""
    inputs = _draw(candidate, [70, 0, 33])
    inputs = _turned(inputs) if table else inputs
    apart, leaves = _heads_apart(inputs, 1e-3)
    out = apart.call(inputs.operator.reference)
    gradients = torch.autograd.grad(out, list(leaves.values()), apart.upstream)
    truth = {"out": out.detach()}
    truth |= {f"grad {n}": g for n, g in zip(leaves, gradients, strict=True)}
    _holds(candidate, inputs.with_options(qk_norm_eps=1e-3), truth)


@pytest.mark.parametrize("name", ["q", "k"])
def test_under_a_norm_of_heads_a_factor_of_a_head_changes_nothing(
    candidate: Candidate, name: str
) -> None:
    """Every head has its own factor (a power of two: exact); gradients are divided by it."""
    inputs = _turned(_draw(candidate, [70, 33])).with_options(qk_norm_eps=0.0)
    heads = inputs.tensors()[name].shape[1]
    powers = 2.0 ** (torch.arange(heads, device=inputs.device) - 2)[:, None]
    louder = changes.floats(inputs, lambda x: (x * powers).to(x.dtype), names=(name,))
    truth = truth_of(inputs)
    truth[f"grad {name}"] = truth[f"grad {name}"] / powers
    _holds(candidate, louder, truth)


def test_under_a_norm_of_heads_gradients_stand_at_right_angles_to_heads(
    candidate: Candidate,
) -> None:
    """A longer head is the same head to a norm: no gradient there."""
    inputs = _turned(_draw(candidate, [70, 33])).with_options(qk_norm_eps=0.0)
    outcome = candidate.run(inputs, backward=True)
    for name in "qk":
        x, gradient = inputs.tensors()[name].double(), outcome[f"grad {name}"].double()
        size = gradient.norm(dim=2) * x.norm(dim=2)
        share = ((gradient * x).sum(2).abs() / size.clamp(min=1e-30)).max()
        assert float(share) <= 64 * torch.finfo(inputs.dtype).eps, f"{name}: {float(share):.3g}"


# Rotary embedding


def test_a_shift_of_all_positions_changes_nothing_but_turned_values(candidate: Candidate) -> None:
    """Scores see differences of positions: a table from position 50 on gives the same output."""
    inputs = _draw(candidate, [90, 33]).with_options(rotate_values=False)
    later = _turned(inputs, first=50)
    truth = truth_of(_turned(inputs))
    _holds(candidate, later, truth)


@pytest.mark.parametrize("rotate_values", [None, True, False])
def test_a_fused_rotation_is_the_rotation_before_attention(
    candidate: Candidate, rotate_values: bool | None
) -> None:
    """q, k and (unless told otherwise) v are turned; gradients are turned back."""
    plain = _draw(candidate, [90, 33])
    inputs = _turned(plain)
    if rotate_values is not None:
        inputs = inputs.with_options(rotate_values=rotate_values)
    names = "qk" if rotate_values is False else "qkv"
    wide = inputs.to(torch.float64).arguments
    turned = {n: rotary(wide[n], wide["offsets"], wide["rotary"]) for n in names}
    truth = truth_of(plain.to(torch.float64).replace(**turned))
    for name in names:
        gradient = truth[f"grad {name}"]
        truth[f"grad {name}"] = rotary(gradient, wide["offsets"], wide["rotary"], inverse=True)
    _holds(candidate, inputs, truth)


def test_a_table_by_token_of_positions_is_the_table_by_position(candidate: Candidate) -> None:
    """One row a token: the same angles, given the other way."""
    inputs = _turned(_draw(candidate, [33, 0, 90]))
    table = inputs.arguments["rotary"]
    by_token = _with_table(inputs, TokenTable(torch.cat([table[:33], table[:90]])))
    _holds(candidate, by_token, truth_of(inputs))


def test_a_fused_rotation_is_no_further_from_the_truth_than_a_separate_one(
    candidate: Candidate,
) -> None:
    """In low precision, gradients are rounded once after they are turned back, not before too.

    The chain: arguments turned and rounded, the implementation's own attention, its gradients
    turned back in float32 and rounded again.
    """
    low = torch.float16 if candidate.settings.device.type == "cpu" else torch.bfloat16
    plain = _draw(candidate, [200, 64, 33, 120], dtype=low)
    inputs = _turned(plain)
    offsets, table = inputs.arguments["offsets"], inputs.arguments["rotary"]
    turned = {n: rotary(inputs.tensors()[n], offsets, table) for n in "qkv"}
    chain = dict(candidate.run(plain.replace(**turned), backward=True))
    fused, truth = candidate.run(inputs, backward=True), truth_of(inputs)
    for name in ("grad q", "grad k", "grad v"):
        chain[name] = rotary(chain[name], offsets, table, inverse=True)
    for name in truth:
        ours, theirs = (float(difference(x[name], truth[name]).norm()) for x in (fused, chain))
        # Two tilings of the same sums differ by a share of their rounding.
        assert ours <= 1.02 * theirs, f"{name}: error {ours:.3e} fused, {theirs:.3e} separate"


@pytest.mark.parametrize("by_token", [False, True], ids=["by-position", "by-token"])
def test_a_gradient_of_the_table_is_right_or_refused(candidate: Candidate, by_token: bool) -> None:
    """Angles may be learnt: a table that wants a gradient never silently goes without."""
    inputs = _turned(_draw(candidate, [70, 9]))
    rows = inputs.arguments["rotary"]
    rows = torch.cat([rows[:70], rows[:9]]) if by_token else rows
    function = candidate.settings.implementation.get("block_attention")

    def gradient(of: Callable[..., Any], dtype: torch.dtype) -> Tensor:
        leaf = (rows if dtype == inputs.dtype else rows.to(dtype)).clone().requires_grad_()
        call = _with_table(inputs.to(dtype), TokenTable(leaf) if by_token else leaf)
        # A layer learns its projections beside its angles.
        call = call.map(lambda n, t: t.clone().requires_grad_() if n == "q" else t)
        (found,) = torch.autograd.grad(call.call(of), leaf, call.upstream, allow_unused=True)
        assert found is not None, "the table's gradient is missing"
        return found.double()

    candidate.run(_with_table(inputs, TokenTable(rows) if by_token else rows))
    try:
        found = gradient(function, inputs.dtype)
    except (NotImplementedError, ValueError):
        return
    truth = gradient(inputs.operator.reference, torch.float64)
    error = float((found - truth).norm() / truth.norm())
    assert error <= 16 * torch.finfo(inputs.dtype).eps, f"off by {error:.3g}"
