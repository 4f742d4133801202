"""A linear layer behind a norm: what a norm keeps, removes and never depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from jagbench.execution import Outcome
from jagbench.inputs import Inputs
from jagbench.reference.norm import layer_norm, rms_norm
from jagbench.suite import changes, shapes
from jagbench.suite.candidate import Candidate, differing
from jagbench.suite.identities import broken, naive_of, truth_of

Check = Callable[[Inputs, Outcome], None]

pytestmark = pytest.mark.operator("norm_linear")

NORMS = pytest.mark.parametrize("norm", ["rms", "layer"])
FEATURES = 32


def _draw(
    candidate: Candidate, *lengths: int, dtype: torch.dtype | None = None, **options: Any
) -> Inputs:
    """A call of 32 features on the session's device, in its dtype unless told otherwise."""
    settings = candidate.settings
    options = {"v_dim": 24, "dim": FEATURES, **options}
    return shapes.attention(
        "norm_linear",
        lengths,
        dtype=dtype or settings.main_dtype,
        device=settings.device,
        **options,
    )


def _with(inputs: Inputs, **parameters: Tensor) -> Inputs:
    """The call with parameters of the norm or of the layer."""
    arguments = {**inputs.arguments, **parameters}
    return Inputs(inputs.operator, arguments, inputs.options, inputs.upstream)


def _parameters(inputs: Inputs, *names: str) -> Inputs:
    """The call with norm_weight, norm_bias or bias drawn."""
    generator = torch.Generator().manual_seed(7)
    t = inputs.tensors()
    sizes = {"norm_weight": FEATURES, "norm_bias": FEATURES, "bias": t["weight"].shape[0]}
    drawn = {n: torch.randn(sizes[n], generator=generator) for n in names}
    return _with(inputs, **{n: x.to(inputs.device, inputs.dtype) for n, x in drawn.items()})


def _holds(candidate: Candidate, inputs: Inputs, truth: Mapping[str, Tensor]) -> None:
    """The implementation on `inputs` gives `truth`."""
    __tracebackhide__ = True
    found = broken(inputs, candidate.run(inputs, backward=True), truth, naive_of(inputs))
    if found:
        pytest.fail("the identity does not hold: " + "; ".join(found), pytrace=False)


def _of_known_row(candidate: Candidate, x: list[float], **options: Any) -> list[float]:
    """The norm alone of one row: the weight is the identity."""
    settings = candidate.settings
    inputs = shapes.attention("norm_linear", [1], dim=len(x), device=settings.device, **options)
    row = torch.tensor([x], device=settings.device)
    unit = torch.eye(len(x), device=settings.device)
    out = candidate.run(inputs.replace(x=row, weight=unit))["out"]
    return [round(value, 5) for value in out[0].tolist()]


# Values typed in


def test_eps_is_added_to_the_mean_square_under_the_root(candidate: Candidate) -> None:
    """(3, 4) has the mean square 12.5: with eps 12.5 it is divided by 5."""
    assert _of_known_row(candidate, [3.0, 4.0], norm="rms", eps=12.5) == [0.6, 0.8]


def test_the_variance_is_that_of_all_features_about_their_mean(candidate: Candidate) -> None:
    """(1, 3) has mean 2 and variance 1, not 2: with eps 3 the centred row is halved."""
    assert _of_known_row(candidate, [1.0, 3.0], norm="layer", eps=3.0) == [-0.5, 0.5]


@NORMS
def test_a_row_of_zeros_gives_the_bias_and_finite_gradients(
    candidate: Candidate, norm: str, check: Check
) -> None:
    """Only eps is under the root there: 0 times 1 / sqrt(eps) is 0."""
    inputs = _parameters(_draw(candidate, 9, norm=norm, eps=1e-6), "bias")
    t = inputs.tensors()
    inputs = inputs.replace(x=torch.where(torch.arange(9, device=t["x"].device)[:, None] % 3 > 0,
                                          t["x"], 0.0))  # fmt: skip
    outcome = candidate.run(inputs, backward=True)
    assert torch.equal(outcome["out"][::3], t["bias"].expand(3, -1))
    check(inputs, outcome)


# What does not change a norm


@pytest.mark.parametrize("factor", [16.0, 0.125])
@NORMS
def test_a_factor_of_all_features_changes_nothing(
    candidate: Candidate, norm: str, factor: float
) -> None:
    """norm(c x) under eps c^2 is norm(x) under eps; the gradient of x is divided by c."""
    inputs = _parameters(_draw(candidate, 20, 9, norm=norm, eps=2.0**-10), "norm_weight")
    truth = truth_of(inputs)
    truth["grad x"] = truth["grad x"] / factor
    other = changes.floats(inputs, lambda x: x * factor, names=("x",))
    _holds(candidate, other.with_options(eps=2.0**-10 * factor**2), truth)


@pytest.mark.parametrize("shift", [16.0, -8.0])
def test_a_constant_added_to_a_row_does_not_change_its_layer_norm(
    candidate: Candidate, shift: float
) -> None:
    """LayerNorm sees differences of features only; the numbers are exact in every dtype."""
    inputs = _parameters(_draw(candidate, 20, 9, norm="layer", eps=1e-5), "norm_weight")
    inputs = changes.floats(inputs, lambda x: (x * 4).round().clamp(-15, 15) / 4, names=("x",))
    rows = torch.arange(29, device=inputs.device)[:, None] % 2
    other = changes.floats(inputs, lambda x: x + rows.to(x.dtype) * shift, names=("x",))
    _holds(candidate, other, truth_of(inputs))


def test_rows_far_from_zero_keep_their_variance(candidate: Candidate, check: Check) -> None:
    """mean(x^2) - mean(x)^2 has no correct digit in float32 where the mean is 4096 deviations."""
    inputs = _draw(candidate, 20, 9, norm="layer", eps=1e-5)
    # Multiples of 2^-10 up to 4096 are exact in float32; half precision gets its own share.
    offset = 4096.0 if inputs.dtype in (torch.float32, torch.float64) else 8.0
    inputs = changes.floats(inputs, lambda x: (x * 1024).round() / 1024 + offset, names=("x",))
    check(inputs, candidate.run(inputs, backward=True))


# The norm and the layer


@NORMS
def test_with_the_identity_as_weight_the_rows_have_unit_size(
    candidate: Candidate, norm: str
) -> None:
    """The mean square of every row is 1, and under LayerNorm its mean is 0."""
    inputs = _draw(candidate, 20, 9, norm=norm, eps=0.0, v_dim=FEATURES)
    unit = torch.eye(FEATURES, device=inputs.device, dtype=inputs.dtype)
    out = candidate.run(inputs.replace(weight=unit))["out"].double()
    eps = torch.finfo(inputs.dtype).eps
    assert float((out.square().mean(1) - 1).abs().max()) <= 4 * eps
    if norm == "layer":
        assert float(out.mean(1).abs().max()) <= 4 * eps


@NORMS
def test_it_is_the_norm_and_then_the_linear_layer(candidate: Candidate, norm: str) -> None:
    """Against torch's own layers in float64, with every parameter there is."""
    names = ["bias", "norm_weight"] + (["norm_bias"] if norm == "layer" else [])
    inputs = _parameters(_draw(candidate, 20, 0, 9, norm=norm, eps=1e-3), *names)
    wide = inputs.to(torch.float64).map(
        lambda _, t: t.requires_grad_() if t.is_floating_point() else t
    )
    t, shape = wide.tensors(), (FEATURES,)
    if norm == "rms":
        normed = functional.rms_norm(t["x"], shape, t["norm_weight"], 1e-3)
    else:
        normed = functional.layer_norm(t["x"], shape, t["norm_weight"], t["norm_bias"], 1e-3)
    out = functional.linear(normed, t["weight"], t["bias"])
    leaves = ("x", "weight", *names)
    gradients = torch.autograd.grad(out, [t[n] for n in leaves], wide.upstream)
    truth = {"out": out.detach()}
    truth |= {f"grad {n}": g for n, g in zip(leaves, gradients, strict=True)}
    _holds(candidate, inputs, truth)


@NORMS
def test_the_weight_of_the_norm_moves_into_that_of_the_layer(
    candidate: Candidate, norm: str
) -> None:
    """A factor (a power of two: exact) of a feature is the same factor of a column of weights."""
    inputs = _draw(candidate, 20, 9, norm=norm, eps=1e-5)
    powers = 2.0 ** (torch.arange(FEATURES, device=inputs.device) % 5 - 2)
    powers = powers.to(inputs.dtype)
    folded = changes.floats(inputs, lambda x: x * powers, names=("weight",))
    truth = {n: x for n, x in truth_of(folded).items() if n in ("out", "grad x")}
    _holds(candidate, _with(inputs, norm_weight=powers), truth)


def test_the_bias_of_the_norm_is_a_bias_of_the_layer(candidate: Candidate) -> None:
    """W (x + b) is W x + W b: the gradients of x do not see b."""
    inputs = _parameters(_draw(candidate, 20, 9, norm="layer", eps=1e-5), "norm_bias")
    plain = Inputs(
        inputs.operator,
        {n: x for n, x in inputs.arguments.items() if n != "norm_bias"},
        inputs.options,
        inputs.upstream,
    )
    t, truth = inputs.to(torch.float64).tensors(), truth_of(plain)
    shifted = truth["out"] + t["weight"] @ t["norm_bias"]
    _holds(candidate, inputs, {"out": shifted, "grad x": truth["grad x"]})


# Gradients


@NORMS
def test_the_gradient_of_a_row_stands_at_right_angles_to_it(
    candidate: Candidate, norm: str
) -> None:
    """A longer row is the same row to a norm, and a shifted one to LayerNorm: no gradient there."""
    inputs = _draw(candidate, 20, 9, norm=norm, eps=0.0)
    gradient = candidate.run(inputs, backward=True)["grad x"].double()
    x = inputs.tensors()["x"].double()
    allowed = 8 * torch.finfo(inputs.dtype).eps
    share = (gradient * x).sum(1).abs() / (gradient.norm(dim=1) * x.norm(dim=1))
    assert float(share.max()) <= allowed, f"{float(share.max()):.3g} of a gradient is along its row"
    if norm == "layer":
        share = gradient.sum(1).abs() / (gradient.norm(dim=1) * FEATURES**0.5)
        assert float(share.max()) <= allowed, f"gradients of a row sum to {float(share.max()):.3g}"


@NORMS
def test_the_gradient_of_the_weight_is_taken_of_normalised_rows(
    candidate: Candidate, norm: str
) -> None:
    """Rows a thousand times as long have no larger share in it."""
    inputs = _draw(candidate, 20, 9, norm=norm, eps=0.0)
    rows = torch.arange(29, device=inputs.device)[:, None] % 3
    powers = torch.tensor([1.0, 2.0**6, 2.0**-6], device=inputs.device, dtype=inputs.dtype)
    louder = changes.floats(inputs, lambda x: x * powers[rows], names=("x",))
    truth = {n: x for n, x in truth_of(inputs).items() if n != "grad x"}
    _holds(candidate, louder, truth)


@NORMS
def test_a_fused_norm_is_no_further_from_the_truth_than_a_separate_one(
    candidate: Candidate, norm: str
) -> None:
    """In float16: the chain rounds the normalised row, the product, and each gradient."""
    inputs = _draw(candidate, 70, 40, norm=norm, eps=1e-5, dtype=torch.float16, v_dim=FEATURES)
    truth = truth_of(inputs)
    outcome = candidate.run(inputs, backward=True)
    live = inputs.map(lambda _, t: t.clone().requires_grad_() if t.is_floating_point() else t)
    t = live.tensors()
    normed = (rms_norm if norm == "rms" else layer_norm)(t["x"], eps=1e-5)
    out = functional.linear(normed, t["weight"])
    gradients = torch.autograd.grad(out, (t["x"], t["weight"]), inputs.upstream)
    chain = {"out": out.detach(), "grad x": gradients[0], "grad weight": gradients[1]}
    for name, rounded in chain.items():
        ours = float((outcome[name].double() - truth[name]).norm())
        theirs = float((rounded.double() - truth[name]).norm())
        assert ours <= 1.25 * theirs, f"{name}: error {ours:.3g}, of the chain {theirs:.3g}"


# Layout


@NORMS
def test_a_dense_batch_needs_no_offsets(candidate: Candidate, norm: str) -> None:
    """offsets = None: every row counts, as under offsets that end at the last row."""
    inputs = _draw(candidate, 20, 9, norm=norm, eps=1e-5)
    expected = {"out": candidate.run(inputs)["out"]}
    outcome = {"out": candidate.run(inputs.replace(offsets=None))["out"]}
    assert not differing(expected, outcome)


@NORMS
def test_rows_do_not_depend_on_those_beside_them(candidate: Candidate, norm: str) -> None:
    """NaN in one row reaches no other row's output or gradient, within its sequence either."""
    inputs = _draw(candidate, 20, 9, norm=norm, eps=1e-5)
    clean = candidate.run(inputs, backward=True)
    spoilt = inputs.clone()
    spoilt.tensors()["x"][5] = float("nan")
    outcome = candidate.run(spoilt, backward=True)
    rest = torch.arange(29, device=inputs.device) != 5
    for name in ("out", "grad x"):
        assert torch.equal(outcome[name][rest], clean[name][rest]), name
