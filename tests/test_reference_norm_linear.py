"""The truth of a norm with a linear layer behind it, against torch's own layers and by hand."""

import pytest
import torch
from counted import Counted
from torch.nn import functional

import jagbench.reference
from jagbench.execution import run
from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS, norm_linear
from jagbench.reference.norm_linear import norm_linear_bytes, norm_linear_flops, uncancelled
from jagbench.workloads import CATALOGUE, select
from jagbench.workloads.lengths import Explicit
from jagbench.workloads.normed import NormLinearRecipe
from jagbench.workloads.values import ConstantRows, LargeOffset, RowsOfZeros

NORMS = pytest.mark.parametrize("norm", ["rms", "layer"])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def call(norm, *, rows=11, total=9, features=6, width=4, affine=True):
    """A call with padding rows and every parameter that the norm takes."""
    arguments = {
        "x": normal(rows, features), "weight": normal(width, features, seed=1),
        "offsets": torch.tensor([0, 4, 4, total]),
    }  # fmt: skip
    if affine:
        arguments |= {"bias": normal(width, seed=2), "norm_weight": normal(features, seed=3)}
        if norm == "layer":
            arguments["norm_bias"] = normal(features, seed=4)
    options = {"norm": norm, "eps": 1e-3}
    return Inputs(OPERATORS["norm_linear"], arguments, options, normal(rows, width, seed=5))


def test_the_operator_is_offered_under_its_name():
    assert jagbench.reference.norm_linear is OPERATORS["norm_linear"].reference


@NORMS
@pytest.mark.parametrize("affine", [True, False])
def test_it_is_the_norm_of_torch_and_then_its_linear_layer(norm, affine):
    inputs = call(norm, affine=affine)
    t = inputs.tensors()
    rows = t["x"][:9]
    if norm == "rms":
        normed = functional.rms_norm(rows, (6,), t.get("norm_weight"), 1e-3)
    else:
        normed = functional.layer_norm(rows, (6,), t.get("norm_weight"), t.get("norm_bias"), 1e-3)
    out = inputs.call(norm_linear)
    torch.testing.assert_close(out[:9], functional.linear(normed, t["weight"], t.get("bias")))
    assert (out[9:] == 0).all()


@NORMS
def test_gradients_are_those_of_finite_differences(norm):
    inputs = call(norm, rows=5, total=5)
    names = [n for n in inputs.operator.differentiable if n in inputs.tensors()]

    def function(*leaves):
        return inputs.replace(**dict(zip(names, leaves, strict=True))).call(norm_linear)

    leaves = [inputs.tensors()[n].requires_grad_() for n in names]
    torch.autograd.gradcheck(function, leaves)


@NORMS
def test_gradients_of_padding_rows_are_zero_and_padding_is_not_read(norm):
    inputs = call(norm)
    clean = run(norm_linear, inputs, backward=True)
    inputs.tensors()["x"][9:] = float("nan")
    spoilt = run(norm_linear, inputs, backward=True)
    assert (clean["grad x"][9:] == 0).all()
    assert all(torch.equal(spoilt[n], clean[n]) for n in clean)


@NORMS
def test_a_dense_batch_is_one_without_padding(norm):
    inputs = call(norm, rows=9)
    dense = inputs.replace(offsets=None)
    assert torch.equal(dense.call(norm_linear), inputs.call(norm_linear))
    assert norm_linear_flops(dense) == norm_linear_flops(inputs)
    assert norm_linear_bytes(dense) == norm_linear_bytes(inputs) - 4 * 8


@NORMS
def test_uncancelled_gradients_have_the_same_output_and_no_smaller_terms(norm):
    inputs = call(norm, rows=9)
    given, terms = (run(f, inputs, backward=True) for f in (norm_linear, uncancelled))
    torch.testing.assert_close(terms["out"], given["out"])
    for name in ("grad weight", "grad bias", "grad norm_weight"):
        torch.testing.assert_close(terms[name], given[name])
    assert terms["grad x"].norm() > given["grad x"].norm()


def test_half_precision_rounds_the_normalised_row_once():
    inputs = call("rms", affine=False).to(torch.float16)
    t = inputs.tensors()
    rows = t["x"][:9].float()
    normed = (rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + 1e-3)).half()
    assert torch.equal(inputs.call(norm_linear)[:9], functional.linear(normed, t["weight"]))


def test_flops_are_two_for_each_feature_output_and_row_that_is_no_padding():
    inputs = call("rms", affine=False)
    assert norm_linear_flops(inputs) == 2 * 9 * 6 * 4
    x, weight = normal(9, 6).tolist(), normal(4, 6).tolist()
    Counted.count = 0
    for row in x:
        for column in weight:
            total = Counted(0.0)
            for a, b in zip(row, column, strict=True):
                total = total + Counted(a) * b
    assert norm_linear_flops(inputs) == Counted.count


def test_bytes_are_every_argument_and_the_output_once_without_padding():
    inputs = call("layer")
    moved = 9 * 6 + 4 * 6 + 4 + 6 + 6 + 9 * 4 + 4
    assert norm_linear_bytes(inputs) == 8 * moved


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        (
            {"x": normal(11, 2, 3)},
            {},
            r"x must be a tensor \[rows, features >= 1\], got \(11, 2, 3",
        ),
        ({"weight": normal(4, 5)}, {}, r"weight \(4, 5\) does not fit x \(11, 6\)"),
        ({"weight": normal(4, 6).float()}, {}, "weight must be of .*float64.*, got torch.float32"),
        ({"bias": normal(5)}, {}, r"bias must be \[4\], got \(5,\)"),
        ({"norm_weight": normal(6).half()}, {}, "norm_weight must be of .* got torch.float16"),
        ({"norm_bias": normal(6)}, {}, r"no norm_bias, got one of \(6,\)"),
        ({"offsets": torch.tensor([0, 12])}, {}, "end at 12, past the 11 rows"),
        ({}, {"norm": "batch"}, "norm must be one of .*, got 'batch'"),
        ({}, {"eps": -1.0}, "eps must be at least 0, got -1.0"),
        ({}, {"eps": float("nan")}, "eps must be at least 0, got nan"),
        ({}, {"eps": None}, "eps must be at least 0, got None"),
        ({"norm_bias": 3}, {}, "no norm_bias, got one of int"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(changes, options, words):
    inputs = call("rms", affine=False).with_options(**options)
    inputs = Inputs(inputs.operator, {**inputs.arguments, **changes}, inputs.options)
    with pytest.raises(ValueError, match=words):
        inputs.call(norm_linear)


# -- workloads -------------------------------------------------------------------------------------


def test_every_norm_parameter_and_awkward_width_occurs_in_a_smoke_workload():
    made = [w.recipe for w in select(operator="norm_linear", purpose="smoke")]
    for norm in ("rms", "layer"):
        of_norm = [r for r in made if r.norm == norm]
        assert {True, False} == {r.bias for r in of_norm}
        assert {"none", "values", "float32"} == {r.norm_weight for r in of_norm}
        assert any(r.features % 16 for r in of_norm)
        assert any(r.features > 512 for r in of_norm)
    assert {"none", "values", "float32"} == {r.norm_bias for r in made}
    assert {"int32", "int64"} == {r.offsets_type for r in made}


def test_published_shapes_have_their_rows_and_features():
    for name, rows in (("norm_linear-rms-m262144-k512-n512", 262_144),
                       ("norm_linear-layer-m65536-k1024-n256", 65_536)):  # fmt: skip
        assert CATALOGUE[name].statistics["q_tokens"] == rows


def drawn(values, dtype=torch.float32):
    recipe = NormLinearRecipe(2, 64, 8, Explicit((40, 60)), values=values)
    return recipe.draw(3, dtype, torch.device("cpu"), upstream=False).tensors()["x"]


def test_rows_with_an_offset_keep_unit_variance_about_means_far_from_zero():
    x = drawn(LargeOffset(64)).double()
    assert float(x.mean(1).abs().max()) > 50
    assert float(x.var(1).mean()) == pytest.approx(1.0, abs=0.1)


def test_constant_rows_are_exact_in_every_dtype_and_differ_from_each_other():
    x = drawn(ConstantRows())
    assert (x == x[:, :1]).all()
    assert len(x[:, 0].unique()) > 50
    assert torch.equal(drawn(ConstantRows(), torch.bfloat16).float(), x)


def test_a_share_of_the_rows_is_zero_throughout():
    empty = (drawn(RowsOfZeros()) == 0).all(1)
    assert 0.1 < float(empty.double().mean()) < 0.4


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (lambda: NormLinearRecipe(1, 0, 4, Explicit((1,))), "got 0 and 4"),
        (lambda: NormLinearRecipe(1, 4, 4, Explicit((1,)), norm_bias="values"), "got 'values'"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(recipe, words):
    with pytest.raises(ValueError, match=words):
        recipe()
