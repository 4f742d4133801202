import math

import pytest
import torch
from counted import Counted
from torch.nn import functional

from jagbench.execution import run
from jagbench.inputs import Inputs
from jagbench.reference.norm import LAYER_NORM, RMS_NORM, layer_norm, qk_norm, rms_norm

NORMS = pytest.mark.parametrize("operator", [RMS_NORM, LAYER_NORM], ids=lambda o: o.name)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def call_of(operator, x, **parameters):
    arguments = {"x": x, **parameters}
    return Inputs(operator, arguments, {"eps": 1e-5}, normal(*x.shape, seed=7).to(x.dtype))


# -- values ----------------------------------------------------------------------------------------


def test_the_norms_are_those_of_torch():
    x, weight, bias = normal(5, 3, 8), normal(8, seed=1), normal(8, seed=2)
    for w in (None, weight):
        wanted = functional.rms_norm(x, (8,), w, eps=1e-3)
        torch.testing.assert_close(rms_norm(x, w, eps=1e-3), wanted)
        for b in (None, bias):
            wanted = functional.layer_norm(x, (8,), w, b, eps=1e-3)
            torch.testing.assert_close(layer_norm(x, w, b, eps=1e-3), wanted)


def test_rms_norm_of_a_known_row():
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    rms = math.sqrt(12.5)
    assert rms_norm(x, eps=0.0).flatten().tolist() == pytest.approx([3 / rms, 4 / rms])


def test_layer_norm_has_mean_zero_and_mean_square_one():
    found = layer_norm(5 + 3 * normal(4, 64), eps=0.0)
    torch.testing.assert_close(found.mean(-1), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(found.square().mean(-1), torch.ones(4, dtype=torch.float64))


def test_eps_bounds_a_row_of_zeros_and_has_no_default():
    for norm in (rms_norm, layer_norm):
        assert (norm(torch.zeros(2, 4), eps=1e-6) == 0).all()
        with pytest.raises(TypeError, match="eps"):
            norm(torch.zeros(2, 4))


def test_qk_norm_bounds_every_score_by_the_head_dim():
    q, k = qk_norm(9 * normal(6, 4, 16), normal(5, 2, 16, seed=1), eps=0.0)
    for x in (q, k):
        torch.testing.assert_close(x.square().mean(-1), torch.ones(x.shape[:2]).double())
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1))
    assert scores.abs().max() <= 16
    assert torch.equal(qk_norm(q, q, eps=0.5)[1], rms_norm(q, eps=0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@NORMS
def test_statistics_are_wide_and_the_result_is_rounded_once(operator, dtype):
    x = (300 * normal(7, 96)).to(dtype)  # the sum of squares overflows float16
    found = operator.reference(x, eps=1e-5)
    exact = operator.reference(x.double(), eps=1e-5)
    assert found.dtype == dtype
    assert ((found - exact).abs() <= 0.51 * torch.finfo(dtype).eps * 2 * exact.abs() + 1e-6).all()


# -- identities ------------------------------------------------------------------------------------


def test_a_lazy_pre_norm_scales_the_rows_of_the_product():
    x, weight = normal(6, 8), normal(8, 5, seed=1)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(rms_norm(x, eps=1e-6) @ weight, scale * (x @ weight))


def test_a_factor_of_a_row_leaves_its_norm_alone():
    x = normal(6, 8)
    for norm in (rms_norm, layer_norm):
        torch.testing.assert_close(norm(64 * x, eps=0.0), norm(x, eps=0.0))
    torch.testing.assert_close(layer_norm(x + 3, eps=0.0), layer_norm(x, eps=0.0))


# -- gradients, costs, refusals --------------------------------------------------------------------


@NORMS
def test_gradients_are_those_of_numerical_differentiation(operator):
    parameters = [normal(4, seed=s).requires_grad_() for s in range(len(operator.layout) - 1)]
    x = normal(3, 2, 4, seed=9).requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: operator.reference(*a, eps=1e-3), (x, *parameters))
    found = run(operator.reference, call_of(operator, x.detach()), backward=True)
    assert found["grad x"].shape == x.shape


def rms_norm_of(row):
    """RMSNorm of a list of numbers, one at a time; what is done once a row is done uncounted."""
    squares = Counted(0.0)
    for x in row:
        squares = squares + x * x
    scale = (float(squares) / len(row)) ** -0.5
    return [x * scale for x in row]


def layer_norm_of(row):
    total = Counted(0.0)
    for x in row:
        total = total + x
    mean = float(total) / len(row)
    return rms_norm_of([x - mean for x in row])


@NORMS
def test_flops_are_those_counted_number_by_number(operator):
    x, weight = normal(6, 8), normal(8, seed=1)
    by_hand = {"rms_norm": rms_norm_of, "layer_norm": layer_norm_of}[operator.name]
    Counted.count = 0
    plain = [by_hand([Counted(v) for v in row]) for row in x.tolist()]
    torch.testing.assert_close(torch.tensor(plain).double(), operator.reference(x, eps=0.0))
    assert operator.flops(call_of(operator, x)) == Counted.count
    _ = [[v * w for v, w in zip(row, weight.tolist(), strict=True)] for row in plain]
    assert operator.flops(call_of(operator, x, weight=weight)) == Counted.count
    if operator is LAYER_NORM:
        both = call_of(operator, x, weight=weight, bias=weight)
        assert operator.flops(both) == Counted.count + x.numel()


@NORMS
def test_bytes_read_everything_once_and_write_the_result(operator):
    x, weight = normal(6, 8).half(), normal(8).float()
    assert operator.bytes_moved(call_of(operator, x, weight=weight)) == 2 * 2 * 48 + 4 * 8


BAD = {
    "integers": ({"x": torch.ones(2, 4).int()}, "int32"),
    "no features": ({"x": torch.ones(2, 0)}, r"\(2, 0\)"),
    "no tensor": ({"x": [1.0]}, "list"),
    "eps": ({"eps": -1e-6}, "at least 0, got -1e-06"),
    "eps of a word": ({"eps": "1e-6"}, "at least 0, got '1e-6'"),
    "weight shape": ({"weight": torch.ones(5)}, r"\[4\], got \(5,\)"),
    "weight dtype": ({"weight": torch.ones(4).double()}, "float64"),
    "weight device": ({"weight": torch.ones(4, device="meta")}, "meta"),
}


@NORMS
@pytest.mark.parametrize("name", BAD)
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(operator, name):
    changes, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        operator.reference(**{"x": torch.ones(2, 4), "eps": 1e-5, **changes})


def test_heads_of_another_size_are_refused():
    with pytest.raises(ValueError, match="q has head_dim 4 and k has 8"):
        qk_norm(torch.ones(2, 1, 4), torch.ones(2, 1, 8), eps=0.0)
