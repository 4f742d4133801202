"""What our kernels of a norm with a linear layer promise beyond the operator's contract."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from jagbench.accuracy import difference, judge
from jagbench.execution import run
from jagbench.impl import norm_linear, pin
from jagbench.impl.kernels import norm_linear_launch
from jagbench.impl.kernels.norm_linear_launch import (
    NormTiles,
    fitting,
    gradient_tiles,
    pin_norm_tiles,
)
from jagbench.impl.kernels.tuning import Schedule, TileConfig, take_used
from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORMS = pytest.mark.parametrize("norm", ["rms", "layer"])


def example(
    norm: str = "layer", rows: int = 75, total: int = 71, features: int = 48, width: int = 40,
    dtype: torch.dtype = torch.float32, affine: bool = True, eps: float = 1e-5,
) -> Inputs:  # fmt: skip
    """A call with padding rows, with every parameter the norm takes if affine."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    arguments: dict[str, Any] = {
        "x": draw(rows, features), "weight": draw(width, features),
        "offsets": torch.tensor([0, 30, 30, total], device=DEVICE),
    }  # fmt: skip
    if affine:
        arguments |= {"bias": draw(width), "norm_weight": draw(features)}
    if affine and norm == "layer":
        arguments["norm_bias"] = draw(features)
    return Inputs(
        OPERATORS["norm_linear"], arguments, {"norm": norm, "eps": eps}, draw(rows, width)
    )


def outcome_of(inputs: Inputs) -> dict[str, Tensor]:
    return dict(run(norm_linear, inputs, backward=True))


def assert_right(inputs: Inputs) -> None:
    found = [f"{a.name}: {a.problem}" for a in judge(inputs, outcome_of(inputs)) if not a.ok]
    assert not found, "; ".join(found)


@pytest.fixture(autouse=True)
def unpinned():
    yield
    pin({})


# -- cancellation ----------------------------------------------------------------------------------


def lazy_layer_norm(inputs: Inputs) -> Tensor:
    """The form that was not taken: the product of raw rows, mean times column sums taken off."""
    t, eps = inputs.tensors(), inputs.options["eps"]
    x, weight = t["x"].float(), t["weight"].float()
    mean = x.mean(1, keepdim=True)
    factor = torch.rsqrt((x - mean).square().mean(1, keepdim=True) + eps)
    return (factor * (x @ weight.T - mean * weight.sum(1))).to(t["x"].dtype)


def errors_of(inputs: Inputs) -> tuple[float, float]:
    """Error of our output, and of the lazy form's, over that of a naive run."""
    truth = run(inputs.operator.reference, inputs.to(torch.float64))["out"]
    naive = run(inputs.operator.reference, inputs)["out"]
    ours = run(norm_linear, inputs)["out"]
    found = (float(difference(x, truth).norm()) for x in (naive, ours, lazy_layer_norm(inputs)))
    least, first, second = found
    least = max(least, float(truth.norm()) * torch.finfo(inputs.dtype).eps / 4, 1e-30)
    return first / least, second / least


def test_rows_far_from_zero_lose_nothing_that_a_lazy_layer_norm_loses():
    """float32 rows 1000 deviations from 0, against the error of a naive run."""
    inputs = example(rows=71, affine=False, features=512)
    inputs = inputs.replace(x=inputs.tensors()["x"] + 1000)
    ours, lazy = errors_of(inputs)
    assert ours < 0.1
    assert lazy > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_one_value_come_out_zero_where_a_lazy_layer_norm_leaves_noise(dtype):
    """1 / sqrt(eps) enlarges what rounding left; the right answer is exactly 0."""
    inputs = example(rows=71, affine=False, dtype=dtype)
    column = torch.linspace(-100, 100, 71, device=DEVICE, dtype=dtype)[:, None]
    inputs = inputs.replace(x=column.expand(-1, 48).contiguous())
    assert (run(norm_linear, inputs)["out"] == 0).all()
    assert float(lazy_layer_norm(inputs).float().abs().max()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("outlier", [30.0, 1000.0])
def test_an_outlier_in_the_first_feature_spoils_no_variance(dtype, outlier):
    """16-bit types take the variance about it: it is at most sqrt(features) deviations away."""
    inputs = example(rows=71, affine=False, dtype=dtype, features=200)
    x = inputs.tensors()["x"].clone()
    x[:, 0] = outlier
    assert_right(inputs.replace(x=x))


# -- forms -----------------------------------------------------------------------------------------


@NORMS
@pytest.mark.parametrize("features", [16, 64, 65, 130])
def test_gradients_of_rows_are_right_in_one_kernel_and_in_two(norm, features):
    """Up to 64 features the interpreter's tiles hold whole rows."""
    take_used()
    assert_right(example(norm, features=features))
    whole = "norm_input_gradient" in take_used()
    assert whole == (features <= 64)


@NORMS
def test_tiles_change_no_more_than_the_last_bits(norm):
    inputs = example(norm, features=200, width=130)
    expected = outcome_of(inputs)
    tiles = "32x128x32 warps 4 stages 2 persistent"
    pin({"norm_linear_rms": tiles, "norm_linear_layer": tiles, "norm_product": tiles,
         "norm_input_gradient": "32x256x16 warps 4 stages 2",
         "norm_weight_gradient": "128x32x16 warps 4 stages 2"})  # fmt: skip
    take_used()
    found = outcome_of(inputs)
    used = take_used()
    assert used["norm_weight_gradient"] == "128x32x16 warps 4 stages 2"
    assert used["norm_input_gradient"].startswith("32x256x16")
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4)


@NORMS
def test_many_rows_are_summed_in_runs_whose_order_never_changes(norm):
    """Gradients of parameters over several runs of rows, twice."""
    inputs = example(norm, rows=2100, total=2083, features=32, width=16, dtype=torch.float16)
    assert_right(inputs)
    first, second = outcome_of(inputs), outcome_of(inputs)
    assert all(torch.equal(second[n], first[n]) for n in first)


@NORMS
def test_nan_behind_the_last_offset_is_never_read(norm):
    inputs = example(norm)
    clean = outcome_of(inputs)
    assert inputs.upstream is not None
    for tensor in (inputs.tensors()["x"], inputs.upstream):
        tensor[71:] = float("nan")
    found = outcome_of(inputs)
    assert all(torch.equal(found[n], clean[n]) for n in clean)


@NORMS
def test_strided_rows_and_weights_give_the_bits_of_contiguous_ones(norm):
    inputs = example(norm)
    t = inputs.tensors()
    assert inputs.upstream is not None
    expected = outcome_of(inputs)
    strided = dataclasses.replace(
        inputs.replace(x=t["x"].repeat(1, 2)[:, 48:], weight=t["weight"].T.contiguous().T),
        upstream=inputs.upstream.T.contiguous().T,
    )
    for name, tensor in outcome_of(strided).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "norm_weight", "norm_bias"])
def test_a_single_gradient_has_the_bits_of_all_together(wanted):
    inputs = example()
    leaf = inputs.tensors()[wanted].clone().requires_grad_()
    out = inputs.replace(**{wanted: leaf}).call(norm_linear)
    (found,) = torch.autograd.grad(out, leaf, inputs.upstream)
    assert torch.equal(found, outcome_of(inputs)[f"grad {wanted}"])


def test_a_norm_weight_in_float32_beside_half_precision_has_its_gradient_in_float32():
    inputs = example(dtype=torch.float16)
    wide = {n: inputs.tensors()[n].float() for n in ("norm_weight", "norm_bias")}
    found = outcome_of(inputs.replace(**wide))
    assert found["grad norm_weight"].dtype == found["grad norm_bias"].dtype == torch.float32
    assert_right(inputs.replace(**wide))


# -- torch -----------------------------------------------------------------------------------------


def test_the_flop_counter_counts_what_the_formula_counts():
    inputs = example()
    with FlopCounterMode(display=False) as counter:
        outcome_of(inputs)
    assert counter.get_total_flops() == 3 * inputs.operator.flops(inputs)
    dense = inputs.replace(offsets=None)
    with FlopCounterMode(display=False) as counter:
        dense.call(norm_linear)
    assert counter.get_total_flops() == dense.operator.flops(dense)


@NORMS
def test_the_custom_op_keeps_torch_s_rules(norm):
    t = example(norm).tensors()
    names = ("x", "weight", "offsets", "bias", "norm_weight", "norm_bias")
    given = {n: t[n].clone() for n in names if n in t}
    leaves = [
        given[n].requires_grad_() if n in given and n != "offsets" else given.get(n) for n in names
    ]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.jagbench.norm_linear_forward.default,
        (*leaves, norm == "layer", 1e-5, False),
        test_utils=checks,
    )


# -- refusals and tiles ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {**t, "x": t["x"].double(), "weight": t["weight"].double()}, "float64"),
        (
            lambda t: {**t, "schedule": "hopper"},
            "schedule 'hopper': .* 16-bit types, got torch.float32",
        ),
        (
            lambda t: {**t, "x": torch.zeros(3, 16_385), "weight": torch.zeros(2, 16_385)},
            "16384 features",
        ),
    ],
    ids=["float64", "hopper", "wide"],
)
def test_what_no_kernel_does_is_said_to_be_unsupported(change, words):
    t = example(affine=False).arguments
    offsets = torch.tensor([0, 3], device=DEVICE)
    with pytest.raises(NotImplementedError, match=words):
        norm_linear(**change({**t, "offsets": offsets}), norm="rms", eps=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"eps": None}, "eps must be at least 0, got None"),
        ({"eps": "small"}, "eps must be at least 0, got 'small'"),
        ({"norm_bias": 3}, "no norm_bias, got one of int"),
    ],
)
def test_what_is_no_number_or_no_tensor_is_refused(change, words):
    t = {**example(affine=False).arguments, "norm": "rms", "eps": 1e-6}
    with pytest.raises(ValueError, match=f"norm_linear: .*{words}"):
        norm_linear(**{**t, **change})


def test_a_schedule_of_more_than_a_tier_is_refused():
    t = example(affine=False).arguments
    for plan in (Schedule("v1"), Schedule(forward=TileConfig(64, 64, 4, 1))):
        with pytest.raises(NotImplementedError, match=r"norm_linear: .* a tier alone"):
            norm_linear(**t, norm="rms", eps=1e-6, schedule=plan)
    norm_linear(**t, norm="rms", eps=1e-6, schedule=Schedule(tier="portable"))


def test_tiles_are_read_as_they_are_written():
    for tiles in (NormTiles(128, 256, 64, 8, 3), NormTiles(64, 64, 16, 4, 2, True, True)):
        assert NormTiles.parse(str(tiles)) == tiles
    for text in ("128x256 warps 8 stages 3", "100x256x64 warps 8 stages 3", "1x2x3"):
        with pytest.raises(ValueError, match=r"128x256x64|rows must be"):
            NormTiles.parse(text)
    with pytest.raises(ValueError, match=r"'norm_everything'.*norm_product"):
        pin_norm_tiles({"norm_everything": "128x256x64 warps 8 stages 3"})


@pytest.mark.parametrize(
    ("total", "features", "width", "rows"),
    [(1 << 18, 512, 512, 128), (1 << 18, 4096, 4096, 128), (1000, 512, 512, 64)],
)
def test_runs_of_rows_fill_a_device_that_tiles_of_a_gradient_do_not(total, features, width, rows):
    """A weight gradient of 512 x 512 has 16 tiles, but thousands of steps to share."""
    table = norm_linear_launch.table_tiles("norm_weight_gradient", torch.bfloat16)
    found = gradient_tiles(table, total, features, width, 2, 227 << 10, 132)
    assert (found.rows, found.columns) == (rows, 128)


def test_tiles_fit_the_product_the_device_and_its_memory():
    table = norm_linear_launch._TABLE["norm_linear_rms"]
    hopper, ampere = 227 << 10, 163 << 10
    assert fitting(table, 1 << 18, 512, 512, 2, hopper, 132) == table
    assert fitting(table, 1 << 18, 64, 512, 2, hopper, 132).columns == 64
    assert fitting(table, 1 << 18, 130, 512, 2, hopper, 132).columns == 128
    assert fitting(table, 1 << 18, 512, 512, 2, ampere, 132).columns == 128
    assert fitting(table, 1000, 512, 512, 2, hopper, 132).rows == 64
    narrow = dataclasses.replace(table, num_stages=8)
    assert fitting(narrow, 1 << 18, 512, 512, 2, hopper, 132).num_stages == 4
