"""Names of arguments, shapes of results, and what is refused with which error."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.execution import named_outputs
from jagbench.inputs import Inputs
from jagbench.rotary import TokenTable
from jagbench.spec import Operator
from jagbench.suite import shapes
from jagbench.suite.candidate import Candidate, differing, further_outputs, option_names
from jagbench.suite.cases import Case

Check = Callable[[Inputs, Any], None]


def base(operator: Operator, candidate: Candidate, **options: Any) -> Inputs:
    """A small ordinary call, to be spoilt."""
    settings = candidate.settings
    return shapes.attention(
        operator,
        [5, 3, 9],
        [7, 4, 6],
        heads=4,
        kv_heads=2,
        dtype=settings.main_dtype,
        device=settings.device,
        **options,
    )


@pytest.mark.cases(limit=2)
def test_every_argument_is_accepted_by_its_pinned_name(candidate: Candidate, case: Case) -> None:
    """Arguments given by keyword mean what they mean by position."""
    inputs = case.inputs(candidate.settings.device)
    function = candidate.settings.implementation.get(case.operator.name)
    named = named_outputs(inputs, function(**inputs.clone().arguments, **inputs.options))
    expected = candidate.run(inputs)
    assert not differing(expected, {name: value.detach() for name, value in named.items()})


@pytest.mark.cases(limit=2)
def test_options_at_their_defaults_change_nothing(candidate: Candidate, case: Case) -> None:
    """Every option of the pinned signature is known, and its default is the pinned one."""
    inputs = case.inputs(candidate.settings.device)
    defaults = {
        name: parameter.default
        for name, parameter in case.operator.signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty and name not in inputs.arguments
    }
    spelt = candidate.run(inputs.with_options(**{**defaults, **inputs.options}))
    assert not differing(candidate.run(inputs), spelt)


@pytest.mark.cases(limit=3)
def test_outputs_have_the_pinned_shapes_and_dtypes(candidate: Candidate, case: Case) -> None:
    """`out` has the rows of the queries and the head_dim of the values; gradients fit arguments."""
    inputs = case.inputs(candidate.settings.device)
    inputs = inputs.with_options(**further_outputs(case.operator))
    outcome = candidate.run(inputs, backward=True)
    assert set(case.operator.output_layout) <= set(outcome), "an output is missing"
    assert all(value.device == inputs.device for value in outcome.values())
    if case.operator.codes is not None:
        for name, shape in case.operator.codes.shapes(inputs).items():
            assert (tuple(outcome[name].shape), outcome[name].dtype) == (shape, torch.uint8), name
        return
    assert inputs.upstream is not None
    assert outcome["out"].shape == inputs.upstream.shape
    assert outcome["out"].dtype == inputs.dtype
    for name in set(case.operator.output_layout) - {"out"}:
        assert outcome[name].shape == inputs.upstream.shape[:-1], name
        wide = torch.promote_types(inputs.dtype, torch.float32)
        assert outcome[name].dtype == wide, name
    for name, tensor in inputs.tensors().items():
        gradient = outcome.get(f"grad {name}")
        if gradient is not None:
            assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype), name


def _set(inputs: Inputs, name: str, *values: int) -> Inputs:
    offsets = inputs.tensors()[name]
    return inputs.replace(**{name: torch.tensor(values, dtype=torch.int64, device=offsets.device)})


def _values(
    name: str, change: Callable[[torch.Tensor], torch.Tensor | TokenTable]
) -> Callable[[Inputs], Inputs]:
    return lambda inputs: inputs.replace(**{name: change(inputs.tensors()[name])})


def _other_dtype(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x.double()


def _elsewhere(x: Tensor) -> Tensor:
    return x.cpu() if x.device.type != "cpu" else x.to("meta")


Changes = dict[str, Callable[[Inputs], Inputs]]

#: Queries of `base` have lengths 5, 3, 9 and 17 rows; keys 7, 4, 6 and 17 rows.
OF_TWO_OFFSETS: Changes = {
    "q-offsets-start-above-0": lambda i: _set(i, "q_offsets", 1, 5, 8, 17),
    "k-offsets-start-above-0": lambda i: _set(i, "k_offsets", 2, 7, 11, 17),
    "q-offsets-decrease": lambda i: _set(i, "q_offsets", 0, 9, 5, 17),
    "k-offsets-decrease": lambda i: _set(i, "k_offsets", 0, 11, 7, 17),
    "q-offsets-negative": lambda i: _set(i, "q_offsets", 0, -5, 8, 17),
    "q-offsets-end-past-the-rows": lambda i: _set(i, "q_offsets", 0, 5, 8, 18),
    "k-offsets-end-past-the-rows": lambda i: _set(i, "k_offsets", 0, 7, 11, 40),
    "offsets-of-different-batches": lambda i: _set(i, "k_offsets", 0, 7, 17),
    "offsets-without-an-entry": lambda i: _set(i, "k_offsets"),
    "offsets-of-float": _values("k_offsets", lambda x: x.float()),
    "offsets-of-two-dims": _values("q_offsets", lambda x: x[None]),
}
OF_ONE_OFFSETS: Changes = {
    "shared-offsets-start-above-0": lambda i: _set(i, "offsets", 1, 5, 8, 17),
    "shared-offsets-decrease": lambda i: _set(i, "offsets", 0, 9, 5, 17),
    "shared-offsets-negative": lambda i: _set(i, "offsets", 0, -5, 8, 17),
    "shared-offsets-end-past-the-rows": lambda i: _set(i, "offsets", 0, 5, 8, 18),
    "shared-offsets-without-an-entry": lambda i: _set(i, "offsets"),
    "shared-offsets-of-float": _values("offsets", lambda x: x.float()),
    "shared-offsets-of-two-dims": _values("offsets", lambda x: x[None]),
}
OF_Q_K_V: Changes = {
    "q-of-another-dtype": _values("q", _other_dtype),
    "k-of-another-dtype": _values("k", _other_dtype),
    "v-of-another-dtype": _values("v", _other_dtype),
    "values-of-integers": lambda i: i.replace(**{n: i.tensors()[n].int() for n in "qkv"}),
    "k-on-another-device": _values("k", _elsewhere),
    "v-on-another-device": _values("v", _elsewhere),
    "q-of-two-dims": _values("q", lambda x: x.flatten(1)),
    "v-of-four-dims": _values("v", lambda x: x[None]),
    "kv-heads-that-do-not-divide": lambda i: i.replace(
        **{n: i.tensors()[n].repeat(1, 2, 1)[:, :3] for n in "kv"}
    ),
    "more-kv-heads-than-heads": lambda i: i.replace(
        **{n: i.tensors()[n].repeat(1, 4, 1) for n in "kv"}
    ),
    "v-of-other-heads-than-k": _values("v", lambda x: x.repeat(1, 2, 1)),
    "k-of-another-head-dim": _values("k", lambda x: x[..., :16]),
    "fewer-values-than-keys": _values("v", lambda x: x[:12]),
}
OF_ONE_OFFSETS_FOR_KEYS: Changes = {
    "fewer-keys-than-queries": lambda i: i.replace(**{n: i.tensors()[n][:12] for n in "kv"}),
    "more-keys-than-queries": lambda i: i.replace(
        **{n: torch.cat([i.tensors()[n]] * 2) for n in "kv"}
    ),
}
OF_A_BLOCK: Changes = {
    "values-of-another-head-dim": _values("v", lambda x: x[..., :16]),
    "a-dense-query": lambda i: i.replace(q=i.tensors()["q"][:5], q_offsets=None),
}
OF_X: Changes = {
    "x-of-integers": _values("x", lambda x: x.int()),
    "x-of-two-dims": _values("x", lambda x: x.flatten(1)),
    "x-on-another-device": _values("x", _elsewhere),
    "table-of-an-odd-width": _values("table", lambda x: x[:, :31]),
    "table-wider-than-a-head": _values("table", lambda x: x.repeat(1, 2)),
    "table-shorter-than-a-sequence": _values("table", lambda x: x[:8]),
    "table-of-integers": _values("table", lambda x: x.int()),
    "table-of-three-dims": _values("table", lambda x: x[None]),
    "table-by-token-of-too-few": _values("table", lambda x: TokenTable(x.repeat(2, 1)[:16])),
}
OF_X_AND_WEIGHT: Changes = {
    "x-of-three-dims": _values("x", lambda x: x[None]),
    "rows-of-integers": _values("x", lambda x: x.int()),
    "rows-on-another-device": _values("x", _elsewhere),
    "weight-of-another-dtype": _values("weight", _other_dtype),
    "weight-of-other-features": _values("weight", lambda x: x[:, :31]),
    "weight-of-one-dim": _values("weight", lambda x: x[0]),
    "weight-without-rows": _values("weight", lambda x: x[:0]),
    "weight-on-another-device": _values("weight", _elsewhere),
}
OF_X_TO_QUANTIZE: Changes = {
    "numbers-of-integers": _values("x", lambda x: x.int()),
    "numbers-on-another-device": _values("x", _elsewhere),
    "numbers-of-one-dim": _values("x", lambda x: x.flatten(1)[:, 0]),
}

#: Arguments an operator must have -> what can be wrong with them.
FAULTS: tuple[tuple[frozenset[str], Changes], ...] = (
    (frozenset({"q_offsets", "k_offsets"}), OF_TWO_OFFSETS),
    (frozenset({"offsets"}), OF_ONE_OFFSETS),
    (frozenset({"q", "k", "v"}), OF_Q_K_V),
    (frozenset({"k", "offsets"}), OF_ONE_OFFSETS_FOR_KEYS),
    (frozenset({"q", "v", "activation", "eps"}), OF_A_BLOCK),
    (frozenset({"x", "table"}), OF_X),
    (frozenset({"x", "weight"}), OF_X_AND_WEIGHT),
    (frozenset({"x", "offsets", "elem_dtype"}), OF_X_TO_QUANTIZE),
)
MALFORMED: Changes = {name: change for _, group in FAULTS for name, change in group.items()}


def _can_be(operator: Operator, fault: str) -> bool:
    """Whether an operator has the arguments that a fault is in."""
    known = operator.signature.parameters.keys()
    return any(fault in group and needed <= known for needed, group in FAULTS)


#: Option -> values it must refuse, with options it needs beside it.
REFUSED: dict[str, dict[str, Any]] = {
    "window": {"negative": (-1, 3), "negative-right": (2, -2), "fraction": (1.5, 2)},
    "align": {"unknown": "middle"},
    "prefix": {"negative": -1, "fraction": 2.5},
    "last_full": {"negative": -3, "fraction": 1.5},
    "activation": {
        "unknown": "softsign",
        "too-few": ("relu",) * 3,
        "too-many": ("relu",) * 5,
        "unknown-among-known": ("relu", "relu", "softsign", "relu"),
    },
    "bias": {
        "one-row-short": lambda rows: torch.zeros(rows - 1, 4),
        "one-row-long": lambda rows: torch.zeros(rows + 1, 1),
        "of-other-heads": lambda rows: torch.zeros(rows, 3),
        "of-integers": lambda rows: torch.zeros(rows, 4, dtype=torch.int32),
    },
    "block_size": {"zero": 0, "negative": -64},
    "qk_norm_eps": {"negative": -1e-6},
    "norm": {"unknown": "batch"},
    "eps": {"negative": -1e-6, "not-a-number": float("nan")},
    "norm_weight": {
        "of-other-features": lambda rows: torch.zeros(31),
        "of-two-dims": lambda rows: torch.zeros(1, 32),
        "of-integers": lambda rows: torch.zeros(32, dtype=torch.int32),
    },
    "norm_bias": {"beside-rms": lambda rows: torch.zeros(32)},
    "rotary": {
        "of-an-odd-width": lambda rows: torch.zeros(rows, 31),
        "wider-than-a-head": lambda rows: torch.zeros(rows, 34),
        "without-columns": lambda rows: torch.zeros(rows, 0),
        "shorter-than-a-sequence": lambda rows: torch.zeros(8, 32),
        "of-three-dims": lambda rows: torch.zeros(1, rows, 32),
        "of-integers": lambda rows: torch.zeros(rows, 32, dtype=torch.int32),
    },
    "elem_dtype": {"unknown": "e3m4"},
    "block": {"of-16": (1, 16), "of-one-number": 32, "larger": (64, 64)},
    "scale_mode": {"unknown": "round"},
    "rounding": {"unknown": "up", "stochastic-without-a-seed": "stochastic"},
    "seed": {"beside-nearest": 3},
}


def _has_option(operator: Operator, option: str, fault: str) -> bool:
    return option in option_names(operator)


@pytest.mark.combinations(where=_can_be)
@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_input_raises_value_error(
    candidate: Candidate, operator: Operator, fault: str
) -> None:
    """Refused with a ValueError that names numbers; never another type, never accepted."""
    inputs = MALFORMED[fault](base(operator, candidate))
    with pytest.raises(ValueError) as caught:
        candidate.run(inputs)
    message = str(caught.value)
    # Devices have names; everything else that can be wrong has a number.
    told = any(c.isdigit() for c in message) or ("device" in fault and message.strip())
    assert told, f"the ValueError names no number: {message!r}"


@pytest.mark.combinations(where=_has_option)
@pytest.mark.parametrize(
    ("option", "fault"), [pytest.param(o, f, id=f"{o}-{f}") for o in REFUSED for f in REFUSED[o]]
)
def test_an_unknown_value_of_an_option_raises_value_error(
    candidate: Candidate, operator: Operator, option: str, fault: str
) -> None:
    """An option is honoured or refused: nothing falls back to something else."""
    inputs = base(operator, candidate)
    value = REFUSED[option][fault]
    if callable(value):
        made = value(inputs.pair_bounds()[-1])
        value = made.to(inputs.device, inputs.dtype if made.is_floating_point() else made.dtype)
    candidate.run(inputs)  # what follows is refused for the option alone
    with pytest.raises(ValueError):
        candidate.run(inputs.with_options(**{option: value}))


@pytest.mark.operators_with("max_q_len", "max_k_len")
@pytest.mark.parametrize("length", ["max_q_len", "max_k_len"])
def test_a_maximum_length_that_is_too_small_raises_or_is_not_needed(
    candidate: Candidate, operator: Operator, length: str, check: Check
) -> None:
    """A maximum below the longest sequence never leaves rows unwritten."""
    inputs = base(operator, candidate)
    try:
        outcome = candidate.run(inputs.with_options(**{length: 4}), backward=True)
    except ValueError as error:
        assert "4" in str(error), f"the error does not name the number: {error}"
        return
    check(inputs, outcome)


@pytest.mark.operators_with("max_q_len", "max_k_len")
@pytest.mark.parametrize("longest", ["exact", "generous"])
def test_a_maximum_length_that_is_large_enough_changes_nothing(
    candidate: Candidate, operator: Operator, longest: str, check: Check
) -> None:
    """A given maximum is a hint: the result is right whether it is exact or far too large."""
    slack = 0 if longest == "exact" else 1000
    inputs = base(operator, candidate, max_q_len=9 + slack, max_k_len=7 + slack)
    check(inputs, candidate.run(inputs, backward=True))
