"""Faults that public kernels of this kind have shipped: the smallest input that showed each.

The source of a fault is named by repository and number of its issue or pull request. Where a CPU
would take minutes over the smallest input, it runs a smaller one of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.execution import Outcome
from jagbench.inputs import Inputs
from jagbench.spec import Operator
from jagbench.suite import changes, shapes, zeros
from jagbench.suite.candidate import Candidate, differing, repeatable

Check = Callable[[Inputs, Outcome], None]

ACTIVATIONS = (
    "identity",
    "gelu",
    "gelu_tanh",
    "fast_gelu",
    "fast_gelu_bf16",
    "silu",
    "fast_silu",
    "relu",
    "leaky_relu",
    "relu_squared",
    "hardswish",
    "gelu_taylor6",
    "gelu_taylor10",
)


def _draw(candidate: Candidate, operator: Operator | str, *lengths: Any, **options: Any) -> Inputs:
    settings = candidate.settings
    options.setdefault("dtype", settings.main_dtype)
    return candidate.every_output(
        shapes.attention(operator, *lengths, device=settings.device, **options)
    )


def _on_gpu(candidate: Candidate) -> bool:
    return candidate.settings.device.type == "cuda"


def _assert_zero(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        assert (tensor == 0).all(), f"{name} must be exactly 0, holds {float(tensor.abs().max())}"


# Empty sequences


@pytest.mark.operators_with("k_offsets", "causal")
@pytest.mark.parametrize(("causal", "kv_heads"), [(False, 2), (True, 1)], ids=["mha", "causal-gqa"])
def test_a_sequence_without_queries_gives_its_keys_gradient_zero(
    candidate: Candidate, operator: Operator, causal: bool, kv_heads: int, check: Check
) -> None:
    """dK and dV were NaN for a sequence that owns no query tile (flash-attention 2421)."""
    inputs = _draw(candidate, operator, [0, 64], [64, 64], dim=64, kv_heads=kv_heads, causal=causal)
    outcome = candidate.run(inputs, backward=True)
    _assert_zero(dk=outcome["grad k"][:64], dv=outcome["grad v"][:64])
    check(inputs, outcome)


@pytest.mark.operators_with("k_offsets", residual=False)
def test_no_keys_and_no_queries_at_head_dim_256_terminate(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """The forward hung on a key length of 0, the backward faulted (flash-attention 2568)."""
    inputs = _draw(candidate, operator, [0, 5], [7, 0], dim=256)
    outcome = candidate.run(inputs, backward=True)
    _assert_zero(**{name.replace(" ", "_"): t for name, t in outcome.items() if name != "lse"})
    check(inputs, outcome)


@pytest.mark.operators_with("k_offsets", "causal", "max_q_len")
@pytest.mark.parametrize("longest", [1, 2])
def test_single_queries_among_empty_sequences(
    candidate: Candidate, operator: Operator, longest: int, check: Check
) -> None:
    """A decode path took the number of queries for that of sequences (flash-attention 1537)."""
    inputs = _draw(
        candidate, operator, [1, 0, 1], [3, 0, 5],
        heads=9, kv_heads=3, dim=64, causal=True, max_q_len=longest,
    )  # fmt: skip
    check(inputs, candidate.run(inputs, backward=True))


# Masks


@pytest.mark.operators_with("k_offsets", "causal", "align")
@pytest.mark.parametrize(
    ("lengths", "align", "visible"),
    [
        ((5, 2), "end", ["", "", "", "0", "01"]),
        ((2, 5), "end", ["0123", "01234"]),
        ((5, 2), "start", ["0", "01", "01", "01", "01"]),
        ((2, 5), "start", ["0", "01"]),
    ],
    ids=["5x2-end", "2x5-end", "5x2-start", "2x5-start"],
)
def test_causal_sees_the_keys_its_alignment_names(
    candidate: Candidate, operator: Operator, lengths: tuple[int, int], align: str,
    visible: Sequence[str],
) -> None:  # fmt: skip
    """Two conventions for unequal lengths (flash-attention 1778, pytorch 108108)."""
    queries, keys = lengths
    inputs = _draw(
        candidate, operator, [queries], [keys], heads=1, dim=16, causal=True, align=align
    )
    values = torch.eye(keys, 16, device=inputs.device, dtype=inputs.dtype)[:, None]
    outcome = candidate.run(inputs.replace(v=values), backward=True)
    seen = ["".join(str(k) for k in range(keys) if row[0, k] != 0) for row in outcome["out"]]
    assert seen == list(visible), "keys that each query sees"
    blind = [i for i, keys_seen in enumerate(visible) if not keys_seen]
    _assert_zero(out=outcome["out"][blind], dq=outcome["grad q"][blind])
    if "lse" in outcome:
        assert (outcome["lse"][blind] == -math.inf).all()


@pytest.mark.operators_with("k_offsets", "causal")
def test_far_more_queries_than_keys_give_finite_gradients(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """dq was NaN on rows with no visible key (flash-attention 443)."""
    inputs = _draw(
        candidate, operator, [76, 34, 146], [1, 1, 1], heads=1, causal=True, dtype=torch.float16
    )
    inputs = changes.floats(inputs, lambda x: 3 * x, names=("q", "k", "v"))
    inputs = changes.floats(inputs, torch.ones_like, names=("upstream",))
    outcome = candidate.run(inputs, backward=True)
    blind = torch.ones(256, dtype=torch.bool)
    blind[[75, 109, 255]] = False
    _assert_zero(dq=outcome["grad q"][blind.to(inputs.device)])
    check(inputs, outcome)


@pytest.mark.operators_with("k_offsets", "causal")
def test_a_blind_row_leaves_shared_projection_gradients_alone(
    candidate: Candidate, operator: Operator
) -> None:
    """One fully masked row made every parameter gradient NaN (pytorch 41508)."""
    inputs = _draw(candidate, operator, [4, 4], [2, 4], heads=1, dim=16, causal=True)
    t, function = inputs.tensors(), candidate.settings.implementation.get(operator.name)

    def weight_gradient(upstream: Tensor) -> Tensor:
        weight = torch.eye(16, device=inputs.device, dtype=inputs.dtype).requires_grad_()
        projected = {n: t[n] @ weight for n in ("q", "k", "v")}
        out = inputs.replace(**projected).call(function)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out, weight, upstream)[0]

    assert inputs.upstream is not None
    without = inputs.upstream.clone()
    without[:2] = 0  # the two rows of the first sequence that see no key
    whole, rest = weight_gradient(inputs.upstream), weight_gradient(without)
    assert torch.isfinite(whole).all()
    assert torch.equal(whole, rest), "a row that sees nothing has a share in the gradient"


@pytest.mark.operators_with("k_offsets", "causal", "window")
def test_backward_hides_the_keys_that_forward_hides(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """The backward of a sliding window ran without any mask (MSLK 263)."""
    inputs = _draw(candidate, operator, [16], dim=16, causal=True, window=(4, None))
    only_last = changes.floats(
        inputs, lambda x: torch.cat([torch.zeros_like(x[:-1]), x[-1:]]), names=("upstream",)
    )
    outcome = candidate.run(only_last, backward=True)
    _assert_zero(dk=outcome["grad k"][:11], dv=outcome["grad v"][:11], dq=outcome["grad q"][:15])
    check(only_last, outcome)
    check(inputs, candidate.run(inputs, backward=True))


@pytest.mark.operator("gdpa")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_silu_attention_with_causal_on_and_off(
    candidate: Candidate, causal: bool, check: Check
) -> None:
    """A flag value that the kernel accepted and nobody tested (generative-recommenders 173)."""
    lengths = [120, 37, 20, 71] if _on_gpu(candidate) else [60, 17, 20, 35]
    inputs = _draw(
        candidate, "gdpa", lengths, heads=1, dim=16, causal=causal, pre_scale=0.25, post_scale=0.01
    )
    check(inputs, candidate.run(inputs, backward=True))


# Padding and unwritten memory


def test_buffers_longer_than_the_last_offset_have_zero_gradients(
    candidate: Candidate,
    operator: Operator,
    check: Check,
    nan_memory: Callable[[Inputs], AbstractContextManager[None]],
) -> None:
    """Gradient rows past the end were never written (flash-attention 2324, pytorch 176793)."""
    lengths, heads = ([144, 288, 512], 16) if _on_gpu(candidate) else ([14, 28, 51], 2)
    inputs = changes.with_padding(_draw(candidate, operator, lengths, heads=heads, dim=64), 2, 1.0)
    with nan_memory(inputs):
        outcome = candidate.run(inputs, backward=True)
    found = zeros.of_padding(inputs, outcome)
    assert not found, "; ".join(found)
    check(inputs, outcome)


@pytest.mark.parametrize("lengths", [[128, 128], [0, 128]], ids=["both-full", "first-empty"])
def test_offsets_are_not_read_past_their_end(
    candidate: Candidate, operator: Operator, lengths: list[int], check: Check
) -> None:
    """Surplus tiles read one offset too many (flash-attention 2763, 2862)."""
    inputs = _draw(candidate, operator, lengths, heads=1)
    names = operator.offsets_arguments
    longer = inputs.map(lambda n, t: changes.behind(t) if n in names else t)
    check(inputs, candidate.run_in_place(longer, backward=True))


def test_the_fill_of_a_masked_tail_does_not_matter(
    candidate: Candidate, operator: Operator
) -> None:
    """Lanes loaded without a fill leaked into the result in fp16 (triton 737)."""
    inputs = repeatable(_draw(candidate, operator, [3, 37], dtype=torch.float16))
    runs = [
        candidate.run(changes.with_padding(inputs, 61, fill), backward=True)
        for fill in (math.nan, 0.0, math.inf)
    ]
    assert all(torch.isfinite(t).all() for t in runs[0].values())
    assert not differing(runs[0], runs[1])
    assert not differing(runs[0], runs[2])


# Strides, offsets, head dimensions


@pytest.mark.differentiable
@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_an_upstream_gradient_that_is_not_contiguous(
    candidate: Candidate, operator: Operator, layout: str, check: Check
) -> None:
    """The backward read it as if it were (flash-attention 355)."""
    inputs = _draw(candidate, operator, [32, 32], heads=4, kv_heads=1, dim=128, dtype=torch.float16)
    change: Callable[[Tensor], Tensor] = getattr(changes, layout)
    odd = changes.floats(inputs, change, names=("upstream",))
    check(odd.map(lambda _, t: t.contiguous()), candidate.run_in_place(odd, backward=True))


@pytest.mark.operators_with("q_offsets", "k_offsets")
@pytest.mark.parametrize("name", ["q_offsets", "k_offsets"])
def test_offsets_with_an_entry_missing_are_refused(
    candidate: Candidate, operator: Operator, name: str
) -> None:
    """The remainder of an integer division was dropped, and memory faulted later (FBGEMM 6318)."""
    inputs = _draw(candidate, operator, [4] * 8)
    with pytest.raises(ValueError):
        candidate.run(inputs.replace(**{name: inputs.tensors()[name][:-1]}))


@pytest.mark.parametrize("dim", [64, 72, 80, 96, 104])
def test_head_dims_between_tile_sizes(
    candidate: Candidate, operator: Operator, dim: int, check: Check
) -> None:
    """dq was wrong where two roundings of the head dim differ (flash-attention 2896)."""
    lengths, heads = ([512], 8) if _on_gpu(candidate) else ([70], 1)
    inputs = _draw(candidate, operator, lengths, heads=heads, dim=dim)
    check(inputs, candidate.run(inputs, backward=True))


# Determinism, and what came before


def test_the_deterministic_flag_holds_for_30_runs(candidate: Candidate, operator: Operator) -> None:
    """dq changed between runs although the flag was set (flash-attention 2244, 414)."""
    lengths, runs = ([700, 1, 333], 30) if _on_gpu(candidate) else ([70, 1, 33], 3)
    inputs = repeatable(_draw(candidate, operator, lengths, dim=64, heads=2))
    first = candidate.run(inputs, backward=True)
    for _ in range(runs - 1):
        assert not differing(first, candidate.run(inputs, backward=True))


def test_a_result_does_not_depend_on_the_shapes_before_it(
    candidate: Candidate, operator: Operator
) -> None:
    """One configuration, tuned for the first shape, served all shapes (pytorch 164124)."""
    inputs = repeatable(_draw(candidate, operator, [19, 3], dim=48))
    first = candidate.run(inputs, backward=True)
    for lengths, dim in (([90], 48), ([5, 5, 5], 16)):
        candidate.run(_draw(candidate, operator, lengths, dim=dim), backward=True)
    assert not differing(first, candidate.run(inputs, backward=True))


# Activations, bias, upstream gradients


def _scores(candidate: Candidate, activation: str, scores: Sequence[float]) -> Inputs:
    """One query and one key a sequence, each of the given score, values and upstream 1."""
    ones = [1] * len(scores)
    inputs = _draw(candidate, "gdpa", ones, heads=1, dim=16, activation=activation)
    unit = torch.zeros_like(inputs.tensors()["k"])
    unit[..., 0] = 1
    column = torch.tensor(scores, device=inputs.device, dtype=inputs.dtype)[:, None, None]
    inputs = inputs.replace(q=unit * column, k=unit, v=torch.ones_like(unit))
    return changes.floats(inputs, torch.ones_like, names=("upstream",))


@pytest.mark.operator("gdpa")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_at_known_scores(
    candidate: Candidate, activation: str, check: Check
) -> None:
    """A scale applied twice halved SiLU (facebookexperimental/triton 2300)."""
    # A polynomial may leave its range for a whole call: one call a score.
    far = [0.0, 1.0, -1.0, 20.0, -20.0]
    groups = [[score] for score in far] if "taylor" in activation else [far]
    for scores in groups:
        inputs = _scores(candidate, activation, scores)
        check(inputs, candidate.run(inputs))
        # At 0 the derivative of the ReLUs is a convention, of which nothing is promised.
        if 0.0 not in scores or len(scores) > 1:
            smooth = _scores(candidate, activation, [score for score in scores if score])
            check(smooth, candidate.run(smooth, backward=True))


@pytest.mark.operator("gdpa")
def test_silu_of_one_is_0_731059(candidate: Candidate) -> None:
    """The right value, typed in; the fault gave 0.311230 (facebookexperimental/triton 2300)."""
    out = candidate.run(_scores(candidate, "silu", [1.0]))["out"]
    unit = torch.finfo(out.dtype).eps
    assert abs(float(out[0, 0, 0]) - 0.7310585786300049) <= 2 * unit


@pytest.mark.operators_with("bias", "k_offsets")
@pytest.mark.parametrize("heads", [2, 1], ids=["every-head", "one-for-all-heads"])
def test_only_the_bias_needs_a_gradient(
    candidate: Candidate, operator: Operator, heads: int, check: Check
) -> None:
    """The log-sum-exp was saved only if q, k or v needed a gradient (pytorch 148476)."""
    inputs = _draw(candidate, operator, [9, 12], [14, 5])
    generator = torch.Generator().manual_seed(5)
    bias = torch.randn(inputs.pair_bounds()[-1], heads, generator=generator)
    bias = bias.to(inputs.device, inputs.dtype)
    call = Inputs(operator, {**inputs.arguments, "bias": bias}, inputs.options, inputs.upstream)
    live = call.map(lambda n, t: t.clone().requires_grad_() if n == "bias" else t)
    result = live.call(candidate.settings.implementation.get(operator.name))
    out = result[0] if isinstance(result, tuple) else result
    (gradient,) = torch.autograd.grad(out, live.tensors()["bias"], inputs.upstream)
    check(call, {"out": out.detach(), "grad bias": gradient})


@pytest.mark.differentiable
def test_row_weights_scale_the_gradient_of_their_rows(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """The upstream vector was ignored where it was not all ones (Liger-Kernel 968)."""
    inputs = _draw(candidate, operator, [8, 5], heads=2)
    weights = torch.tensor([0, 1, 2, 0.5, 0, 4, 1, 0, 3, 0, 0, 1, 8.0]).to(inputs.device)
    weighted = changes.floats(
        inputs,
        lambda x: (x * weights.reshape(-1, *[1] * (x.dim() - 1))).to(x.dtype),
        names=("upstream",),
    )
    outcome = candidate.run(weighted, backward=True)
    first = changes.packed(inputs)[0]
    _assert_zero(**{f"d{first}": outcome[f"grad {first}"][weights == 0]})
    check(weighted, outcome)
