import importlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    ACTIVATION_NAMES,
    MASKS,
    Case,
    assert_same,
    call_of,
    cases,
    gdpa_oracle,
    offsets_of,
    quick,
)
from refusals import BAD, GOOD

import jagbench.reference
from jagbench.execution import run
from jagbench.reference import OPERATORS, gdpa, jagged_attention

FORMS = {
    "self": Case([4, 0, 3], [4, 0, 3], kv_heads=2, qk_dim=2, v_dim=2),
    "cross": Case([5, 1, 2], [2, 3, 0], group=2, qk_dim=2, v_dim=3),
    "pma": Case(None, [5, 1, 0], rows=2, group=2, qk_dim=2, v_dim=2),
    "pffn": Case([3, 0, 2], [4, 4, 4], qk_dim=2, v_dim=2, padding=(2, 0)),
}


def test_the_package_offers_the_function_and_not_the_module():
    importlib.import_module("jagbench.reference.gdpa")
    assert jagbench.reference.gdpa is OPERATORS["gdpa"].reference


@quick
@given(cases(), st.data())
def test_reference_and_oracle_agree_in_outputs_and_gradients(case, data):
    name = st.sampled_from(ACTIVATION_NAMES)
    activation = data.draw(name | st.lists(name, min_size=case.heads, max_size=case.heads))
    scales = data.draw(st.sampled_from([(1.0, 1.0), (0.3, 2.0), (-1.5, 0.125)]))
    inputs = call_of(case, "gdpa", activation=activation, pre_scale=scales[0], post_scale=scales[1])
    assert_same(run(gdpa, inputs, backward=True), gdpa_oracle(inputs))


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_reference_and_oracle_agree_on_every_use_and_activation(form, activation):
    for mask in MASKS:
        inputs = call_of(FORMS[form], "gdpa", activation=activation, pre_scale=0.7, **mask)
        assert_same(run(gdpa, inputs, backward=True), gdpa_oracle(inputs))


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_numerical_differentiation(form, activation):
    inputs = call_of(FORMS[form], "gdpa", activation=activation, causal=True, post_scale=0.5)
    # NaN padding cannot be differentiated numerically.
    leaves = [torch.nan_to_num(inputs.arguments[n]).requires_grad_() for n in "qkv"]

    def out(q, k, v):
        return inputs.replace(q=q, k=k, v=v).call(gdpa)

    assert torch.autograd.gradcheck(out, leaves)


# -- values ----------------------------------------------------------------------------------------


def one_pair(score, activation, **options):
    """Output for one query and one key whose product is `score`, with value 1."""
    q = torch.tensor([[[score]]], dtype=torch.float64)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    ends = offsets_of([1])
    return gdpa(q, one, one, ends, ends, activation=activation, **options).item()


def test_silu_at_score_one_is_0_731059():
    assert one_pair(1.0, "silu") == pytest.approx(0.731059, abs=5e-7)
    assert one_pair(1.0, "fast_silu") == pytest.approx(0.731059, abs=5e-7)


def test_pre_scale_acts_inside_and_post_scale_outside_the_activation():
    value = 1 / (1 + math.exp(-1.5))
    assert one_pair(3.0, "silu", pre_scale=0.5, post_scale=4.0) == pytest.approx(4 * 1.5 * value)


def test_masked_pairs_add_nothing_although_the_slope_at_zero_is_not_zero():
    inputs = call_of(Case([3], [5], causal=True, align="start"), "gdpa", activation="gelu")
    found = run(gdpa, inputs, backward=True)
    for name in ("grad k", "grad v"):
        assert (found[name][3:] == 0).all()
        assert (found[name][:3] != 0).any()


# -- identities ------------------------------------------------------------------------------------


def test_identity_is_an_associative_product():
    case = Case([5, 0, 7], [3, 4, 6], v_dim=3)
    inputs = call_of(case, "gdpa", activation="identity", pre_scale=0.3, post_scale=2.0)
    q, k, v = (inputs.arguments[n][:, 0] for n in "qkv")
    wanted = [0.6 * (q[a:b] @ (k[c:d].T @ v[c:d])) for a, b, c, d in ((0, 5, 0, 3), (5, 12, 7, 13))]
    torch.testing.assert_close(inputs.call(gdpa)[:, 0], torch.cat(wanted))


@pytest.mark.parametrize("activation", ["gelu", "relu_squared", "hardswish"])
def test_duplicating_every_key_doubles_gdpa_and_leaves_softmax_alone(activation):
    once = call_of(Case([5], [4]), "gdpa", activation=activation)
    twice = once.replace(
        k=once.arguments["k"].repeat(2, 1, 1),
        v=once.arguments["v"].repeat(2, 1, 1),
        k_offsets=offsets_of([8]),
    )
    torch.testing.assert_close(twice.call(gdpa), 2 * once.call(gdpa))
    softmax = [jagged_attention(*x.arguments.values()) for x in (once, twice)]
    torch.testing.assert_close(*softmax)


def test_hstu_is_silu_with_post_scale_one_over_the_length():
    inputs = call_of(Case([6], [6], causal=True), "gdpa", activation="silu", pre_scale=0.25)
    q, k, v = (inputs.arguments[n][:, 0] for n in "qkv")
    weights = torch.nn.functional.silu(0.25 * q @ k.T) / 6
    out = inputs.with_options(post_scale=1 / 6).call(gdpa)
    torch.testing.assert_close(out[:, 0], weights.tril() @ v)


def test_one_activation_a_head_is_each_head_alone():
    names = ["gelu", "relu", "identity", "silu"]
    inputs = call_of(Case([4, 3], [5, 2], kv_heads=2, group=2), "gdpa", activation=names)
    out = inputs.call(gdpa)
    for head, name in enumerate(names):
        alone = inputs.with_options(activation=name).call(gdpa)
        torch.testing.assert_close(out[:, head], alone[:, head])
        assert not torch.equal(alone, out)


# -- empty and padded ------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [False, True])
def test_an_empty_batch_gives_empty_output_and_zero_gradients(dense):
    inputs = call_of(Case(None if dense else [], []), "gdpa", activation="gelu")
    found = run(gdpa, inputs, backward=True)
    assert found["out"].shape == ((0, 3, 1, 4) if dense else (0, 1, 4))
    assert (found["grad q"] == 0).all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_empty_batch_has_a_gradient_of_each_tensor_alone(name):
    inputs = call_of(Case([], [], padding=(2, 2)), "gdpa", activation="gelu")
    value = inputs.arguments[name].zero_().requires_grad_()
    (gradient,) = torch.autograd.grad(inputs.call(gdpa).sum(), value)
    assert torch.equal(gradient, torch.zeros_like(value))


def test_rows_past_the_last_offset_are_zero_and_never_read():
    inputs = call_of(Case([14, 3], [14, 3], padding=(2, 1)), "gdpa", activation="gelu")
    for value in run(gdpa, inputs, backward=True).values():
        assert (value[17:] == 0).all()
        assert value.isfinite().all()


def test_nan_in_a_key_or_query_that_takes_part_in_no_pair_never_leaks():
    inputs = call_of(Case([5], [2], causal=True), "gdpa", activation="gelu_taylor6")
    inputs.arguments["q"][:3] = math.nan
    flipped = call_of(Case([2], [5], causal=True, align="start"), "gdpa", activation="silu")
    flipped.arguments["k"][2:] = math.nan
    flipped.arguments["v"][2:] = math.nan
    for poisoned in (inputs, flipped):
        found = run(gdpa, poisoned, backward=True)
        assert all(value.isfinite().all() for value in found.values())


# -- refusals --------------------------------------------------------------------------------------

BAD_ACTIVATIONS = {
    "unknown": ("swish", "'swish'"),
    "count": (["relu", "gelu"], "2 activations are named for 4 heads"),
    "unknown in a list": (["relu", "gelu", "relu", "GELU"], "'GELU'"),
}


@pytest.mark.parametrize("name", BAD_ACTIVATIONS)
def test_activations_that_do_not_fit_are_refused(name):
    activation, message = BAD_ACTIVATIONS[name]
    with pytest.raises(ValueError, match=message):
        gdpa(**GOOD, activation=activation)


@pytest.mark.parametrize(
    "name", [name for name, (changes, _) in BAD.items() if "bias" not in changes]
)
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        gdpa(**{**GOOD, **changes}, activation="gelu")
