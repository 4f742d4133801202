"""The linear layer of quantised products: how near it is to the unquantised one, what it keeps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.execution import Outcome
from jagbench.inputs import Inputs
from jagbench.mx import ALONG_COLUMNS, LinearRecipe
from jagbench.reference import OPERATORS
from jagbench.suite.candidate import Candidate, changed, differing

Check = Callable[[Inputs, Outcome], None]

pytestmark = pytest.mark.operator("mx_linear")

#: dB against the product that is not quantised (torchao's tests of its MXFP8 linear layer).
GATES = {"out": 27.0, "grad x": 25.0, "grad weight": 24.0}
WITH_BIAS, UNQUANTISED_WEIGHT_GRADIENT, BIAS_GRADIENT = 26.0, 34.0, 40.0
ROUNDED = LinearRecipe(weight_gradient="mx", gradient_rounding="nearest")
DRAWN = LinearRecipe(weight_gradient="mx", seed=11)


def _call(
    candidate: Candidate,
    recipe: LinearRecipe,
    rows: int = 256,
    *,
    bias: bool = False,
    outliers: float = 1.0,
) -> Inputs:
    """160 features to 96; some rows are larger by `outliers`."""
    settings = candidate.settings
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, weight, upstream = draw(rows, 160), draw(96, 160) / math.sqrt(160), draw(rows, 96)
    loud = torch.where(torch.arange(rows)[:, None] % 29 == 3, outliers, 1.0)
    arguments: dict[str, Any] = {"x": x * loud, "weight": weight}
    if bias:
        arguments["bias"] = draw(96)
    return Inputs(OPERATORS["mx_linear"], arguments, {"recipe": recipe}, upstream * loud).to(
        settings.main_dtype, settings.device
    )


def _exact(inputs: Inputs) -> dict[str, Tensor]:
    """Output and gradients of the layer that quantises nothing, float64."""
    wide = inputs.to(torch.float64)
    t, upstream = wide.tensors(), wide.upstream
    assert upstream is not None
    found = {
        "out": t["x"] @ t["weight"].T + t.get("bias", 0.0),
        "grad x": upstream @ t["weight"],
        "grad weight": upstream.T @ t["x"],
    }
    return found | ({"grad bias": upstream.sum(0)} if "bias" in t else {})


def _decibels(value: Tensor, exact: Tensor) -> float:
    noise = float((value.double() - exact).square().sum())
    return 10 * math.log10(float(exact.square().sum()) / noise) if noise else math.inf


def _noise(outcome: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: _decibels(outcome[name], exact[name]) for name in exact}


@pytest.mark.parametrize("outliers", [1.0, 64.0], ids=["gaussian", "outliers"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_every_tensor_is_as_near_to_the_unquantised_layer_as_mxfp8_is(
    candidate: Candidate, bias: bool, outliers: float
) -> None:
    """27 dB forward (26 with a bias), 25 for dX, 24 for dW: gates of public MXFP8 training."""
    inputs = _call(candidate, ROUNDED, bias=bias, outliers=outliers)
    found = _noise(candidate.run(inputs, backward=True), _exact(inputs))
    gates = {**GATES, "out": WITH_BIAS if bias else GATES["out"]}
    gates |= {"grad bias": BIAS_GRADIENT} if bias else {}
    low = {n: f"{found[n]:.1f} dB, want {gate}" for n, gate in gates.items() if found[n] < gate}
    assert not low


def test_a_weight_gradient_in_bf16_is_not_quantised(candidate: Candidate) -> None:
    """34 dB, where quantised operands give at most 32."""
    inputs = _call(candidate, LinearRecipe())
    found = _noise(candidate.run(inputs, backward=True), _exact(inputs))
    assert found["grad weight"] >= UNQUANTISED_WEIGHT_GRADIENT, found


def test_products_said_to_be_quantised_are(candidate: Candidate) -> None:
    """MXFP8 of normals leaves 28 dB: more than 40 is another, unquantised product."""
    inputs = _call(candidate, ROUNDED)
    found = _noise(candidate.run(inputs, backward=True), _exact(inputs))
    assert max(found.values()) < 40.0, found


def test_the_transform_helps_where_there_are_outliers(candidate: Candidate) -> None:
    """In few tokens, 64 times larger, in E2M1: dW is at least 1 dB nearer behind a transform."""
    four = dataclasses.replace(ROUNDED, elem_dtype="e2m1", gradient_elem_dtype="e2m1")
    found = {}
    for size in (None, 32):
        recipe = dataclasses.replace(four, hadamard=size)
        inputs = _call(candidate, recipe, outliers=8.0)
        # Outliers of single elements, not of whole tokens: these are what a transform spreads.
        t = inputs.tensors()
        inputs = inputs.replace(x=_spiked(t["x"]))
        outcome = candidate.run(inputs, backward=True)
        found[size] = _decibels(outcome["grad weight"], _exact(inputs)["grad weight"])
    assert found[32] >= found[None] + 1.0, found


def _spiked(x: Tensor) -> Tensor:
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    return torch.where(index % 37 == 5, 16 * x, x)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_the_transform_of_both_operands_leaves_their_product(
    candidate: Candidate, size: int
) -> None:
    """(X H)(H^T Y) = X Y: dW behind a transform is as near to the exact one as without."""
    for recipe in (ROUNDED, DRAWN):
        turned = dataclasses.replace(recipe, hadamard=size)
        inputs = _call(candidate, turned)
        found = _noise(candidate.run(inputs, backward=True), _exact(inputs))
        assert found["grad weight"] >= 22.0, found


@pytest.mark.parametrize("recipe", [LinearRecipe(), DRAWN], ids=["default", "wgrad-mx"])
def test_powers_of_two_pass_through_every_product(
    candidate: Candidate, recipe: LinearRecipe
) -> None:
    """Scales of blocks take them: the codes are the same, and so is every bit behind the point."""
    inputs = _call(candidate, recipe)
    plain = candidate.run(inputs, backward=True)
    t = inputs.tensors()
    assert inputs.upstream is not None
    other = dataclasses.replace(
        inputs.replace(x=t["x"] * 8, weight=t["weight"] / 4), upstream=inputs.upstream / 2
    )
    outcome = candidate.run(other, backward=True)
    factors = {"out": 2.0, "grad x": 0.125, "grad weight": 4.0}
    assert not differing({n: plain[n] * f for n, f in factors.items()}, outcome)


@pytest.mark.parametrize(
    "recipe",
    [DRAWN, dataclasses.replace(DRAWN, hadamard=None, weight_block=ALONG_COLUMNS)],
    ids=["hadamard", "rows"],
)
def test_another_seed_gives_other_gradients_and_the_same_seed_the_same(
    candidate: Candidate, recipe: LinearRecipe, check: Check
) -> None:
    """The seed decides the random bits of dY and nothing of the output."""
    inputs = _call(candidate, recipe, 70)
    first = candidate.run(inputs, backward=True)
    assert not differing(first, candidate.run(inputs, backward=True))
    other = inputs.with_options(recipe=dataclasses.replace(recipe, seed=12))
    second = candidate.run(other, backward=True)
    check(other, second)
    changed_names = {text.partition(" ")[2].partition(" ")[0] for text in differing(first, second)}
    assert changed_names == {"x", "weight"}


def test_stochastic_gradients_are_unbiased(candidate: Candidate) -> None:
    """The mean of dX over 16 seeds is 3 times nearer than one: always down would not be."""
    inputs = _call(candidate, LinearRecipe(), 32)
    weight = torch.eye(160, device=inputs.device, dtype=inputs.dtype)[:96]
    inputs = inputs.replace(weight=weight)
    exact = _exact(inputs)["grad x"]
    runs = [
        candidate.run(inputs.with_options(recipe=LinearRecipe(seed=s)), backward=True)["grad x"]
        for s in range(16)
    ]
    one = float((runs[0].double() - exact).norm())
    mean = float((torch.stack(runs).double().mean(0) - exact).norm())
    assert mean <= one / 3, f"one seed is off by {one:.3g}, the mean of 16 by {mean:.3g}"


def test_leading_dims_are_rows_and_strides_do_not_matter(candidate: Candidate) -> None:
    """x `[2, 5, 7, features]` is 70 rows; so is a transposed one, and neither is written to."""
    inputs = _call(candidate, DRAWN, 70, bias=True)
    flat = candidate.run(inputs, backward=True)
    t = inputs.tensors()
    assert inputs.upstream is not None
    deep = dataclasses.replace(
        inputs.replace(x=t["x"].T.contiguous().T.view(2, 5, 7, 160)),
        upstream=inputs.upstream.view(2, 5, 7, 96),
    )
    given = deep.map(lambda _, x: x)
    held = deep.clone()
    outcome = dict(candidate.run_in_place(given, backward=True))
    assert not changed(held, given)
    assert outcome["out"].shape == (2, 5, 7, 96)
    outcome |= {"out": outcome["out"].view(70, 96), "grad x": outcome["grad x"].view(70, 160)}
    assert not differing(flat, outcome)


def test_autocast_leaves_every_bit(candidate: Candidate) -> None:
    """Of arguments in the low precision: sums are float32, and the transform is."""
    inputs = _call(candidate, DRAWN, 70, bias=True).to(torch.bfloat16)
    plain = candidate.run(inputs, backward=True)
    with torch.autocast(candidate.settings.device.type, dtype=torch.bfloat16):
        outcome = candidate.run(inputs, backward=True)
    assert not differing(plain, outcome)


def _with(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    return lambda inputs: inputs.replace(**{name: change(inputs.tensors()[name])})


MALFORMED: dict[str, Callable[[Inputs], Inputs]] = {
    "weight-of-other-features": _with("weight", lambda x: x[:, :33]),
    "weight-of-one-dim": _with("weight", lambda x: x[0]),
    "bias-of-other-features": _with("bias", lambda x: x[:5]),
    "x-of-integers": _with("x", lambda x: x.int()),
    "weight-of-another-dtype": _with("weight", lambda x: x.double()),
    "a-recipe-of-attention": lambda i: i.with_options(recipe=None),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_arguments_raise_value_error(candidate: Candidate, fault: str) -> None:
    """Refused, never taken for something else."""
    inputs = _call(candidate, LinearRecipe(), 9, bias=True)
    with pytest.raises(ValueError):
        candidate.run(MALFORMED[fault](inputs))
