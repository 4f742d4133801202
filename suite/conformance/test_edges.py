"""Exact values where there is nothing to compute: padding, empty sequences, blind rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.spec import Operator
from jagbench.suite import changes, shapes, zeros
from jagbench.suite.candidate import (
    Candidate,
    differing,
    option_names,
    repeatable,
)
from jagbench.suite.cases import Case, is_adversarial

Check = Callable[[Inputs, Any], None]


@pytest.mark.quantised
@pytest.mark.cases(limit=3)
def test_rows_past_the_last_offset_come_back_zero(
    candidate: Candidate, case: Case, check: Check
) -> None:
    """Outputs and gradients are exactly 0 on padding rows, and right before them."""
    plain = candidate.every_output(case.inputs(candidate.settings.device))
    inputs = changes.with_padding(plain, 3, 1.5)
    outcome = candidate.run(inputs, backward=True)
    found = zeros.of_padding(inputs, outcome)
    assert not found, "; ".join(found)
    check(inputs, outcome)


@pytest.mark.cases(every=True, where=is_adversarial)
def test_rows_that_take_part_in_nothing_are_exactly_zero(candidate: Candidate, case: Case) -> None:
    """Padding, queries that see no key, keys that no query sees: output and gradient 0."""
    found = candidate.verdict(case).strays
    assert not found, "; ".join(found)


@pytest.mark.quantised
@pytest.mark.operators_with("causal", "window", "k_offsets")
@pytest.mark.parametrize("hidden", ["by-causal", "by-window", "by-no-keys"])
def test_rows_that_see_no_key_give_zero(
    candidate: Candidate, operator: Operator, hidden: str, check: Check
) -> None:
    """Some rows of a sequence see nothing, others do: 0 and -inf there, the truth elsewhere."""
    masks: dict[str, dict[str, Any]] = {
        "by-causal": {"causal": True},
        "by-window": {"window": (1, 0)},
        "by-no-keys": {},
    }
    settings = candidate.settings
    inputs = candidate.every_output(
        shapes.attention(
            operator,
            [40, 6, 70],
            [3, 6, 0],
            dtype=settings.main_dtype,
            device=settings.device,
            **masks[hidden],
        )
    )
    outcome = candidate.run(inputs, backward=True)
    assert not zeros.takes_part(inputs)["q_offsets"].all()
    found = zeros.strays(inputs, outcome)
    assert not found, "; ".join(found)
    check(inputs, outcome)


@pytest.mark.cases(limit=2)
def test_either_width_of_offsets_gives_the_same_bits(candidate: Candidate, case: Case) -> None:
    """int32 and int64 offsets say the same."""
    inputs = repeatable(case.inputs(candidate.settings.device))
    names = case.operator.offsets_arguments

    def of(dtype: torch.dtype) -> Inputs:
        return inputs.map(lambda n, t: t.to(dtype) if n in names else t)

    narrow, wide = of(torch.int32), of(torch.int64)
    assert not differing(candidate.run(narrow, backward=True), candidate.run(wide, backward=True))


@pytest.mark.parametrize("padding", [0, 3])
def test_a_batch_without_sequences_gives_empty_outputs_and_zero_gradients(
    candidate: Candidate, operator: Operator, padding: int
) -> None:
    """offsets = [0]: legal, with or without padding rows."""
    settings = candidate.settings
    inputs = shapes.attention(operator, [], dtype=settings.main_dtype, device=settings.device)
    inputs = changes.with_padding(inputs, padding, 1.0)
    outcome = candidate.run(inputs, backward=True)
    rows = next(iter(outcome.values())).shape[0]
    assert rows == padding
    found = zeros.of_padding(inputs, outcome)
    assert not found, "; ".join(found)


@pytest.mark.operators_with("bias", "k_offsets")
@pytest.mark.parametrize("heads", [1, 2])
def test_an_empty_sequence_has_no_share_of_the_bias(
    candidate: Candidate, operator: Operator, heads: int, check: Check
) -> None:
    """The packed bias skips sequences without queries or without keys."""
    assert "bias" in option_names(operator)
    settings = candidate.settings
    inputs = shapes.attention(
        operator, [5, 0, 8, 3], [6, 4, 0, 9], dtype=settings.main_dtype, device=settings.device
    )
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(inputs.pair_bounds()[-1], heads, generator=generator)
    inputs = _with_bias(inputs, bias.to(inputs.device, inputs.dtype))
    check(inputs, candidate.run(inputs, backward=True))


@pytest.mark.operators_with("bias", "k_offsets")
def test_a_bias_of_minus_infinity_hides_its_pairs(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """Single pairs, more than a tile of keys, whole rows: as if the mask hid them."""
    settings = candidate.settings
    inputs = shapes.attention(
        operator, [24, 3], [260, 9], dtype=settings.main_dtype, device=settings.device
    )
    bias = torch.zeros(inputs.pair_bounds()[-1], 2)
    first = bias[: 24 * 260].view(24, 260, 2)
    first[:8, :200] = -math.inf
    first[8:16, ::3] = -math.inf
    first[16:20] = -math.inf
    inputs = _with_bias(inputs, bias.to(inputs.device, inputs.dtype))
    outcome = candidate.run(inputs, backward=True)
    assert not outcome["out"][16:20].any(), "a row whose pairs are all hidden must be exactly 0"
    check(inputs, outcome)


@pytest.mark.operators_with("bias", "k_offsets")
def test_a_bias_may_be_wider_than_the_queries(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """A float32 bias beside half precision counts in full, and its gradient is float32."""
    inputs = shapes.attention(
        operator, [5, 8], [6, 9], dtype=torch.float16, device=candidate.settings.device
    )
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(inputs.pair_bounds()[-1], 2, generator=generator)
    inputs = _with_bias(inputs, bias.to(inputs.device))
    outcome = candidate.run(inputs, backward=True)
    assert outcome["grad bias"].dtype == torch.float32
    check(inputs, outcome)


def _with_bias(inputs: Inputs, bias: Tensor) -> Inputs:
    return Inputs(
        inputs.operator, {**inputs.arguments, "bias": bias}, inputs.options, inputs.upstream
    )
