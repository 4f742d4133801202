"""Identities of the operators, each against a truth that the identity gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.execution import Outcome
from jagbench.inputs import Inputs, concatenate
from jagbench.spec import SHARED, Operator
from jagbench.suite import changes, shapes
from jagbench.suite.candidate import Candidate, option_names, scales_queries
from jagbench.suite.cases import Case
from jagbench.suite.identities import broken, naive_of, truth_of

Tensors = Mapping[str, Tensor]

#: Windows of either kind, narrow and one-sided.
WINDOWS: list[dict[str, Any]] = [
    {"window": (3, 5)},
    {"window": (None, 1)},
    {"causal": True, "window": (4, None)},
]


def _draw(candidate: Candidate, operator: Operator | str, *lengths: Any, **options: Any) -> Inputs:
    """A small call on the session's device and dtype; grouped heads unless told otherwise."""
    settings = candidate.settings
    options = {"heads": 4, "kv_heads": 2, **options}
    lengths = lengths or ([13, 5, 20],)
    return candidate.every_output(
        shapes.attention(
            operator, *lengths, dtype=settings.main_dtype, device=settings.device, **options
        )
    )


def _holds(candidate: Candidate, inputs: Inputs, truth: Tensors) -> None:
    """The implementation on `inputs` gives `truth`."""
    __tracebackhide__ = True
    _agrees(inputs, candidate.run(inputs, backward=True), truth)


def _agrees(inputs: Inputs, outcome: Outcome, truth: Tensors) -> None:
    __tracebackhide__ = True
    # A log-sum-exp that the implementation does not have was not asked for.
    given = {name: tensor for name, tensor in truth.items() if name in outcome}
    found = broken(inputs, outcome, given, naive_of(inputs))
    if found:
        pytest.fail("the identity does not hold: " + "; ".join(found), pytrace=False)


def _by_sequence(inputs: Inputs) -> list[tuple[Tensor, ...]]:
    """q, k, v, upstream of every sequence, float64, `[heads, rows, dim]`, key heads repeated."""
    wide = inputs.to(torch.float64)
    t = wide.tensors()
    assert wide.upstream is not None
    group = t["q"].shape[1] // t["k"].shape[1]
    pieces = []
    for s in range(inputs.num_sequences):
        (q0, q1), (k0, k1) = (changes.bounds(inputs, f"{n}_offsets", s) for n in "qk")
        parts = [t["q"][q0:q1], t["k"][k0:k1], t["v"][k0:k1], wide.upstream[q0:q1]]
        parts[1:3] = [x.repeat_interleave(group, 1) for x in parts[1:3]]
        pieces.append(tuple(x.transpose(0, 1) for x in parts))
    return pieces


def _packed(pieces: list[Tensor], group: int = 1) -> Tensor:
    """`[rows, heads, dim]` of `[heads, rows, dim]` by sequence; groups of heads are summed."""
    rows = torch.cat(pieces, 1).transpose(0, 1)
    return rows.reshape(rows.shape[0], -1, group, rows.shape[2]).sum(2)


@pytest.mark.operator("gdpa")
def test_identity_activation_is_an_associative_product(candidate: Candidate) -> None:
    """With no activation O = post pre Q (K^T V): no score is formed, so no tiling can matter."""
    lengths = ([17, 0, 40, 3], [9, 4, 70, 1])
    scales = {"pre_scale": 0.375, "post_scale": 0.6}
    inputs = _draw(candidate, "gdpa", *lengths, activation="identity", **scales)
    factor = 0.375 * 0.6
    parts = [
        (factor * q @ (k.mT @ v), factor * g @ (k.mT @ v).mT, factor * v @ (g.mT @ q),
         factor * k @ (q.mT @ g))
        for q, k, v, g in _by_sequence(inputs)
    ]  # fmt: skip
    out, dq, dk, dv = (list(x) for x in zip(*parts, strict=True))
    truth = {
        "out": _packed(out),
        "grad q": _packed(dq),
        "grad k": _packed(dk, 2),
        "grad v": _packed(dv, 2),
    }
    _holds(candidate, inputs, truth)


@pytest.mark.operator("gdpa")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_hstu_is_gdpa_with_post_scale_one_over_n(candidate: Candidate, causal: bool) -> None:
    """HSTU: silu(alpha Q K^T) / N V, N the longest length, the mask after the activation."""
    lengths, alpha = [30, 7, 22], 1 / math.sqrt(32)
    inputs = _draw(
        candidate, "gdpa", lengths, activation="silu", pre_scale=alpha, post_scale=1 / 30,
        causal=causal,
    )  # fmt: skip
    pieces = []
    for q, k, v, _ in _by_sequence(inputs):
        weights = torch.nn.functional.silu(alpha * (q @ k.mT)) / 30
        pieces.append((weights.tril() if causal else weights) @ v)
    _holds(candidate, inputs, {"out": _packed(pieces)})


@pytest.mark.operator("gdpa")
def test_duplicated_keys_double_gdpa(candidate: Candidate) -> None:
    """Every key and value twice doubles the output; softmax in its place would not move."""
    inputs = _draw(candidate, "gdpa", [20, 9], [31, 12], activation="gelu", pre_scale=0.2)
    twice, truth = changes.duplicate_keys(inputs), truth_of(inputs)
    expected = {"out": 2 * truth["out"], "grad q": 2 * truth["grad q"]}
    expected |= {n: truth[n].repeat_interleave(2, 0) for n in ("grad k", "grad v")}
    _holds(candidate, twice, expected)


@pytest.mark.operator("jagged_attention")
def test_duplicated_keys_leave_softmax_alone(candidate: Candidate) -> None:
    """Every key and value twice leaves the output alone, adds ln 2 to the log-sum-exp."""
    inputs = _draw(candidate, "jagged_attention", [20, 9], [31, 12])
    twice, truth = changes.duplicate_keys(inputs), truth_of(inputs)
    expected = {n: truth[n] for n in ("out", "grad q")}
    if "lse" in truth:
        expected["lse"] = truth["lse"] + math.log(2)
    expected |= {n: truth[n].repeat_interleave(2, 0) / 2 for n in ("grad k", "grad v")}
    _holds(candidate, twice, expected)


def _cut(inputs: Inputs, outcome: Tensors, sequences: list[int]) -> dict[str, Tensor]:
    """Rows of some sequences of every output and gradient that has rows of its own."""
    cut = {}
    for name, tensor in outcome.items():
        argument = name.removeprefix("grad ")
        if name in inputs.operator.output_layout or inputs.layout_of(argument) != SHARED:
            cut[name] = inputs.cut_output(argument, tensor, sequences)
    return cut


@pytest.mark.differentiable
@pytest.mark.cases(limit=2)
def test_order_of_sequences_does_not_matter(candidate: Candidate, case: Case) -> None:
    """The batch backwards gives the results backwards."""
    inputs = candidate.every_output(case.inputs(candidate.settings.device))
    order = list(reversed(range(inputs.num_sequences)))
    _holds(candidate, inputs.select(order), _cut(inputs, truth_of(inputs), order))


@pytest.mark.differentiable
@pytest.mark.cases(limit=2)
def test_a_batch_equals_its_two_halves(candidate: Candidate, case: Case) -> None:
    """Split, the two halves give what the whole gives; merged again, the whole gives it too."""
    inputs = candidate.every_output(case.inputs(candidate.settings.device))
    middle, count = inputs.num_sequences // 2, inputs.num_sequences
    halves = [inputs.select(range(middle)), inputs.select(range(middle, count))]
    whole = truth_of(inputs)
    _holds(candidate, halves[0], _cut(inputs, whole, list(range(middle))))
    _holds(candidate, halves[1], _cut(inputs, whole, list(range(middle, count))))
    _holds(candidate, concatenate(halves), _cut(inputs, whole, list(range(count))))


@pytest.mark.operators_with("window")
@pytest.mark.parametrize("window", [(70, 70), (None, 69), (1000, None), (2**31 - 1, 2**31 - 1)])
def test_a_window_as_long_as_the_sequence_is_no_window(
    candidate: Candidate, operator: Operator, window: tuple[int | None, int | None]
) -> None:
    """A window that reaches both ends of every sequence hides nothing."""
    inputs = _draw(candidate, operator, [70, 5, 33], [70, 9, 16])
    _holds(candidate, inputs.with_options(window=window), truth_of(inputs))


@pytest.mark.operators_with("window", "prefix", "last_full")
@pytest.mark.parametrize("mask", WINDOWS, ids=str)
def test_no_prefix_and_no_last_queries_leave_the_window_alone(
    candidate: Candidate, operator: Operator, mask: dict[str, Any]
) -> None:
    """prefix = 0 and last_full = 0 are the plain window."""
    inputs = _draw(candidate, operator, [40, 5, 9], [23, 30, 9])
    plain = inputs.with_options(**mask)
    _holds(candidate, plain.with_options(prefix=0, last_full=0), truth_of(plain))


@pytest.mark.operators_with("window", "prefix", "last_full")
def test_nothing_lies_beyond_a_window_as_long_as_the_sequence(
    candidate: Candidate, operator: Operator
) -> None:
    """Where a window hides nothing, prefix and last queries show nothing."""
    inputs = _draw(candidate, operator, [70, 5, 33], [70, 9, 16])
    options = {"window": (70, 70), "prefix": 3, "last_full": 6}
    _holds(candidate, inputs.with_options(**options), truth_of(inputs))


@pytest.mark.operators_with("window", "prefix", "last_full")
@pytest.mark.parametrize("mask", [*WINDOWS, {"causal": True}], ids=str)
@pytest.mark.parametrize("align", ["start", "end"])
def test_a_prefix_as_long_as_the_sequence_is_no_mask(
    candidate: Candidate, operator: Operator, mask: dict[str, Any], align: str
) -> None:
    """All keys belong to the context: every query sees them, causal or not."""
    inputs = _draw(candidate, operator, [40, 5, 33], [33, 9, 33])
    options = {**mask, "align": align, "prefix": 33}
    _holds(candidate, inputs.with_options(**options), truth_of(inputs))


@pytest.mark.operators_with("window", "prefix", "last_full")
@pytest.mark.parametrize("mask", WINDOWS, ids=str)
@pytest.mark.parametrize("align", ["start", "end"])
def test_last_queries_as_many_as_the_sequence_has_are_no_window(
    candidate: Candidate, operator: Operator, mask: dict[str, Any], align: str
) -> None:
    """Every query is among the last: no window is left, causality is."""
    inputs = _draw(candidate, operator, [40, 5, 33], [33, 9, 33], align=align)
    causal = mask.get("causal", False)
    options = {**mask, "last_full": 40}
    _holds(candidate, inputs.with_options(**options), truth_of(inputs.with_options(causal=causal)))


@pytest.mark.operators_with("window", "prefix", "last_full")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_last_queries_have_the_rows_of_attention_without_a_window(
    candidate: Candidate, operator: Operator, causal: bool
) -> None:
    """The last 4 rows of every sequence are those without a window, the others those with it."""
    lengths = [21, 3, 33]
    inputs = _draw(candidate, operator, lengths, causal=causal)
    local = inputs.with_options(window=(3, 2))
    free, bound = truth_of(inputs)["out"], truth_of(local)["out"]
    ends = torch.tensor(lengths).cumsum(0)
    last = torch.cat(
        [torch.arange(max(e - 4, e - n), e) for e, n in zip(ends, lengths, strict=True)]
    )
    truth = bound.clone()
    truth[last] = free[last]
    _holds(candidate, local.with_options(last_full=4), {"out": truth})


@pytest.mark.operators_with("window", "causal", "align")
def test_causal_is_a_window_without_a_right_side(candidate: Candidate, operator: Operator) -> None:
    """causal = window (None, 0), under either alignment."""
    inputs = _draw(candidate, operator, [40, 5], [23, 30])
    for align in ("start", "end"):
        causal = inputs.with_options(causal=True, align=align)
        window = inputs.with_options(window=(None, 0), align=align)
        _holds(candidate, window, truth_of(causal))
        _holds(candidate, causal, truth_of(window))


@pytest.mark.operators_with("window", "align")
def test_alignments_agree_where_lengths_are_equal(candidate: Candidate, operator: Operator) -> None:
    """With as many keys as queries, aligning the starts aligns the ends."""
    inputs = _draw(candidate, operator, [40, 5], window=(6, 2))
    _holds(
        candidate, inputs.with_options(align="start"), truth_of(inputs.with_options(align="end"))
    )


@pytest.mark.operators_with("k_offsets")
def test_order_of_keys_does_not_matter(candidate: Candidate, operator: Operator) -> None:
    """Without a mask, keys in another order give the same output: no position is special."""
    inputs = _draw(candidate, operator, [20, 9], [131, 12])
    other = changes.permute_keys(inputs, torch.Generator().manual_seed(3))
    truth = truth_of(inputs)
    _holds(candidate, other, {n: truth[n] for n in truth if n not in ("grad k", "grad v")})


@pytest.mark.operators_with("activation")
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu_squared"])
def test_order_of_keys_does_not_matter_under_any_activation(
    candidate: Candidate, operator: Operator, activation: str
) -> None:
    """Every key is activated by the same function, wherever it stands in its tile."""
    inputs = _draw(candidate, operator, [5], [70], activation=activation, pre_scale=0.5)
    other = changes.permute_keys(inputs, torch.Generator().manual_seed(3))
    truth = truth_of(inputs)
    _holds(candidate, other, {n: truth[n] for n in ("out", "grad q")})


@pytest.mark.differentiable
@pytest.mark.cases(limit=2)
def test_gradients_are_linear_in_the_upstream_gradient(candidate: Candidate, case: Case) -> None:
    """Gradients of two parts of the upstream gradient add up to those of the whole."""
    inputs = case.inputs(candidate.settings.device)
    assert inputs.upstream is not None
    rows = torch.arange(inputs.upstream.shape[0], device=inputs.device) % 3 == 0
    mask = rows.reshape(-1, *[1] * (inputs.upstream.dim() - 1))
    first = changes.floats(inputs, lambda x: torch.where(mask, x, 0), names=("upstream",))
    rest = changes.floats(inputs, lambda x: torch.where(mask, 0, x), names=("upstream",))
    truth = {n: t for n, t in truth_of(inputs).items() if n.startswith("grad ")}
    parts = [candidate.run(part, backward=True) for part in (first, rest)]
    naive = [naive_of(part) for part in (first, rest)]
    total, slip = ({n: a[n] + b[n] for n in truth} for a, b in (parts, naive))
    found = broken(inputs, total, truth, slip)
    assert not found, f"parts of the upstream gradient do not add up: {found}"


@pytest.mark.combinations(where=scales_queries)
@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_scale_moves_freely_between_query_and_option(
    candidate: Candidate, operator: Operator, factor: float
) -> None:
    """A factor (a power of two: exact) on the queries is the same factor in the scale."""
    name = next(n for n in ("scale", "pre_scale") if n in option_names(operator))
    inputs = _draw(candidate, operator, [20, 9], [31, 12], **{name: 0.11})
    louder = changes.floats(inputs, lambda x: x * factor, names=("q",))
    truth = truth_of(inputs)
    truth["grad q"] = truth["grad q"] / factor
    _holds(candidate, louder.with_options(**{name: 0.11 / factor}), truth)


@pytest.mark.operators_with("bias", "return_lse")
def test_a_constant_bias_shifts_only_the_log_sum_exp(
    candidate: Candidate, operator: Operator
) -> None:
    """Softmax does not see a constant; its gradient sums to 0 over every row."""
    inputs = _draw(candidate, operator, [20, 9], [31, 12], heads=2)
    pairs = inputs.pair_bounds()[-1]
    bias = torch.full((pairs, 1), 3.0, device=inputs.device, dtype=inputs.dtype)
    shifted = Inputs(operator, {**inputs.arguments, "bias": bias}, inputs.options, inputs.upstream)
    truth = truth_of(inputs)
    if "lse" in truth:
        truth["lse"] = truth["lse"] + 3
    _holds(candidate, shifted, truth)


@pytest.mark.operators_with("activation", residual=False)
def test_one_activation_per_head_is_each_activation_on_its_head(
    candidate: Candidate, operator: Operator
) -> None:
    """A list of activations gives every head what one name for all gives it."""
    names = ("relu", "silu", "gelu", "identity")
    inputs = _draw(candidate, operator, [20, 9], [31, 12], pre_scale=0.2, kv_heads=4)
    alone = [truth_of(inputs.with_options(activation=name)) for name in names]
    heads = {n: [x[n][:, h] for h, x in enumerate(alone)] for n in alone[0]}
    truth = {n: torch.stack(pieces, 1) for n, pieces in heads.items()}
    _holds(candidate, inputs.with_options(activation=names), truth)


@pytest.mark.operators_with("q", "k", "v")
def test_grouped_heads_are_repeated_keys(candidate: Candidate, operator: Operator) -> None:
    """Keys of two heads for six queries' heads: as if repeated, their gradients summed."""
    inputs = _draw(candidate, operator, [20, 9], [31, 12], heads=6, kv_heads=2)
    repeated = changes.floats(inputs, lambda x: x.repeat_interleave(3, 1), names=("k", "v"))
    truth = truth_of(repeated)
    for name in ("grad k", "grad v"):
        rows, _, dim = truth[name].shape
        truth[name] = truth[name].reshape(rows, 2, 3, dim).sum(2)
    _holds(candidate, inputs, truth)


@pytest.mark.operators_with("q_offsets", residual=False)
def test_a_dense_query_is_the_same_query_in_every_sequence(
    candidate: Candidate, operator: Operator
) -> None:
    """q_offsets = None: one output a sequence, the gradient of the query summed over the batch."""
    inputs = _draw(candidate, operator, [7, 7, 7], [31, 0, 12])
    t = inputs.tensors()
    assert inputs.upstream is not None
    dense = inputs.replace(q=t["q"][:7].clone(), q_offsets=None)
    dense = changes.floats(dense, lambda x: x.reshape(3, 7, *x.shape[1:]), names=("upstream",))
    truth = truth_of(inputs.replace(q=t["q"][:7].repeat(3, 1, 1)))
    for name in truth:
        if not name.startswith("grad "):
            truth[name] = truth[name].reshape(3, 7, *truth[name].shape[1:])
    truth["grad q"] = truth["grad q"].reshape(3, 7, *t["q"].shape[1:]).sum(0)
    _holds(candidate, dense, truth)


@pytest.mark.operators_with("q", "k", "v", residual=False)
def test_twice_the_values_are_twice_the_output(candidate: Candidate, operator: Operator) -> None:
    """The output is linear in the values."""
    inputs = _draw(candidate, operator, [20, 9], [31, 12])
    truth = truth_of(inputs)
    names = [n for n in truth if n in ("out", "grad q", "grad k")]
    expected = {n: 2 * truth[n] for n in names} | {"grad v": truth["grad v"]}
    _holds(candidate, changes.floats(inputs, lambda x: 2 * x, names=("v",)), expected)
