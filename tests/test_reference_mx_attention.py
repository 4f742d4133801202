"""MXFP8 jagged attention and GDPA: forward and backward against a loop over single heads."""

import math

import pytest
import torch
from mx_attention_oracle import all_heads, call, gdpa_head, results, softmax_head
from mx_oracles import normal, quantized, snr
from oracles import MASKS, offsets_of
from refusals import BAD, GOOD

from jagbench.mx import SQUARE, AttentionRecipe
from jagbench.reference import gdpa, jagged_attention
from jagbench.reference.mx_attention import mx_attention
from jagbench.reference.mx_gdpa import mx_gdpa

NEAREST = AttentionRecipe(gradient_rounding="nearest")


def assert_close(found, wanted):
    for name, own, true in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        torch.testing.assert_close(
            own, true, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )


RECIPES = {
    "default": NEAREST,
    "fixed": AttentionRecipe(weight_scale="fixed", gradient_rounding="nearest"),
    "square v": AttentionRecipe(value_block=SQUARE, gradient_rounding="nearest"),
    "quantised sum": AttentionRecipe(row_sum="quantized", gradient_rounding="nearest"),
    "e5m2, floor": AttentionRecipe(
        gradient_elem_dtype="e5m2", scale_mode="floor", gradient_rounding="nearest"
    ),
    "e2m1": AttentionRecipe(
        elem_dtype="e2m1", gradient_elem_dtype="e2m1", gradient_rounding="nearest"
    ),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_attention_is_that_of_its_quantised_operands(recipe):
    inputs = call()
    found = results(mx_attention, *inputs, recipe=recipe, scale=0.3)
    wanted = all_heads(lambda *own: softmax_head(*own, recipe, 0.3), *inputs, {})
    assert_close(found, wanted)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_attention_hides_what_its_mask_hides(mask):
    inputs = call()
    found = results(mx_attention, *inputs, recipe=NEAREST, **mask)
    scale = 1 / math.sqrt(40)
    wanted = all_heads(lambda *own: softmax_head(*own, NEAREST, scale), *inputs, mask)
    assert_close(found, wanted)


@pytest.mark.parametrize("name", ["identity", "gelu", "silu", "relu_squared"])
@pytest.mark.parametrize("recipe", ["default", "square v", "e5m2, floor"])
def test_gdpa_is_that_of_its_quantised_operands(recipe, name):
    inputs, recipe = call(), RECIPES[recipe]
    options = {"activation": name, "pre_scale": 0.3, "post_scale": 0.125, "causal": True}
    found = results(mx_gdpa, *inputs, recipe=recipe, **options)
    wanted = all_heads(
        lambda *own: gdpa_head(*own, recipe, name, 0.3, 0.125), *inputs, {"causal": True}
    )
    assert_close(found, wanted)


def test_gdpa_takes_an_activation_for_each_head():
    inputs = call()
    both = mx_gdpa(*inputs[:3], *inputs[4:], activation=["gelu", "relu"], recipe=NEAREST)
    for head, name in enumerate(("gelu", "relu")):
        alone = mx_gdpa(*inputs[:3], *inputs[4:], activation=name, recipe=NEAREST)
        assert torch.equal(both[:, head], alone[:, head])


# -- exact cases -----------------------------------------------------------------------------------


def whole_numbers(*shape, most, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).double()


@pytest.mark.parametrize(
    "recipe", [AttentionRecipe(), NEAREST, AttentionRecipe(value_block=SQUARE)]
)
def test_gdpa_of_representable_numbers_is_exact(recipe):
    # |P|, |dS| <= 8 and all else <= 2: four bits hold every whole number up to 16.
    q, k, v, grad = (
        whole_numbers(75, 2, 8, most=1, seed=0),
        whole_numbers(80, 1, 8, most=1, seed=1),
        whole_numbers(80, 1, 4, most=2, seed=2),
        whole_numbers(75, 2, 4, most=1, seed=3),
    )
    inputs = (q, k, v, grad, offsets_of([40, 35]), offsets_of([33, 47]))
    options = {"activation": "identity", "causal": True, "post_scale": 0.25}
    found = results(mx_gdpa, *inputs, recipe=recipe, **options)
    for own, true in zip(found, results(gdpa, *inputs, **options), strict=True):
        assert torch.equal(own, true)


@pytest.mark.parametrize("weight_scale", ["block", "fixed"])
def test_equal_scores_give_the_mean_of_the_quantised_values(weight_scale):
    q, k, v, _, _, _ = call([3], [64], heads=1)
    recipe = AttentionRecipe(weight_scale=weight_scale)
    out = mx_attention(0 * q, k, v, offsets_of([3]), offsets_of([64]), recipe=recipe)
    wanted = quantized(v[:, 0], "e4m3", (32, 1)).mean(0)
    torch.testing.assert_close(out[:, 0], wanted.expand(3, -1))


def test_lse_is_that_of_attention_on_quantised_queries_and_keys():
    q, k, v, _, q_offsets, k_offsets = call([40], [70], heads=1)
    q.requires_grad_()
    _, lse = mx_attention(q, k, v, q_offsets, k_offsets, recipe=NEAREST, return_lse=True)
    qh, kh = (quantized(t.detach()[:, 0], "e4m3", SQUARE)[:, None] for t in (q, k))
    qh.requires_grad_()
    true = jagged_attention(qh, kh, v, q_offsets, k_offsets, return_lse=True)[1]
    torch.testing.assert_close(lse, true)
    # Its gradient is P K^ scale, with P in place of dS in squares.
    (found,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
    (wanted,) = torch.autograd.grad(true.sum(), qh)
    assert snr(found, wanted) > 25


@pytest.mark.parametrize("operator", [mx_attention, mx_gdpa])
def test_powers_of_two_pass_through_bit_for_bit(operator):
    q, k, v, grad, q_offsets, k_offsets = call()
    options = {"recipe": AttentionRecipe(seed=3)}
    if operator is mx_gdpa:
        options["activation"] = "gelu"
    plain = results(operator, q, k, v, grad, q_offsets, k_offsets, **options)
    louder = results(operator, q, k, 4 * v, grad / 2, q_offsets, k_offsets, **options)
    for own, once, factor in zip(louder, plain, (4, 2, 2, 0.5), strict=True):
        assert torch.equal(own, factor * once)


# -- quality ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1024, 1152])
@pytest.mark.parametrize(
    ("d", "causal", "most"),
    [(64, False, 0.04), (128, False, 0.08), (64, True, 0.10), (128, True, 0.11)],
)
def test_errors_are_within_the_published_gates_at_even_and_odd_numbers_of_key_blocks(
    length, d, causal, most
):
    shape = (length, 1, d)
    tensors = [0.5 * normal(*shape, seed=i, dtype=torch.float32) for i in range(4)]
    ends = offsets_of([length])
    options = {"scale": 0.5, "causal": causal}
    found = results(mx_attention, *tensors, ends, ends, recipe=AttentionRecipe(), **options)
    doubled = [t.double() for t in tensors]
    wanted = results(jagged_attention, *doubled, ends, ends, **options)
    assert (found[0] - wanted[0]).abs().max() < most
    assert snr(found[0], wanted[0]) > 23
    for own, true in zip(found[1:], wanted[1:], strict=True):
        cosine = torch.nn.functional.cosine_similarity(own.double().flatten(), true.flatten(), 0)
        assert cosine >= 0.98
        assert snr(own, true) > 20


def test_a_scale_a_block_and_the_fixed_scale_are_of_one_quality():
    inputs = call([256], [512], d=64, dv=64)
    true = results(jagged_attention, *inputs)
    quality = {
        scale: [
            snr(own, wanted)
            for own, wanted in zip(
                results(mx_attention, *inputs, recipe=RECIPES[scale]), true, strict=True
            )
        ]
        for scale in ("default", "fixed")
    }
    for block, fixed in zip(*quality.values(), strict=True):
        assert abs(block - fixed) < 0.7


def test_gdpa_is_within_the_published_gates_of_fp8():
    q, k, v, grad, q_offsets, k_offsets = call([300, 200], [300, 200], d=64, dv=64)
    options = {"activation": "gelu", "pre_scale": 1 / 8, "post_scale": 1 / 16}
    recipe = AttentionRecipe()
    found = results(mx_gdpa, q, k, v, grad, q_offsets, k_offsets, recipe=recipe, **options)
    wanted = results(gdpa, q, k, v, grad, q_offsets, k_offsets, **options)
    for own, true, most in zip(found, wanted, (0.01, 0.15, 0.15, 0.15), strict=True):
        outside = (own - true).abs() > 0.2 + 0.1 * true.abs()
        assert outside.double().mean() < most
        assert snr(own, true) > 22


# -- stochastic rounding of gradients --------------------------------------------------------------


def test_seeds_move_gradients_and_not_outputs_and_their_mean_is_unbiased():
    inputs = call([40], [35], heads=1)
    many = [
        results(mx_attention, *inputs, recipe=AttentionRecipe(seed=seed)) for seed in range(128)
    ]
    again = results(mx_attention, *inputs, recipe=AttentionRecipe(seed=5))
    assert all(torch.equal(a, b) for a, b in zip(again, many[5], strict=True))
    assert torch.equal(many[0][0], many[1][0])
    q, k, v, grad, _, _ = (t if i > 3 else t[:, 0] for i, t in enumerate(inputs))
    s = quantized(q, "e4m3", SQUARE) @ quantized(k, "e4m3", SQUARE).T / math.sqrt(40)
    p = torch.softmax(s, 1)
    held = quantized(p, "e4m3", (32, 1))
    out = many[0][0][:, 0]
    ds = p * (grad @ quantized(v, "e4m3", (1, 32)).T - (grad * out).sum(1, keepdim=True))
    unrounded = (
        ds @ quantized(k, "e4m3", SQUARE) / math.sqrt(40),
        ds.T @ quantized(q, "e4m3", SQUARE) / math.sqrt(40),
        held.T @ grad,
    )
    nearest = results(mx_attention, *inputs, recipe=NEAREST)
    for i, true in enumerate(unrounded, start=1):
        mean = torch.stack([one[i][:, 0] for one in many]).mean(0)
        # 10 log10(128) is 21 dB.
        assert snr(mean, true) - snr(many[0][i][:, 0], true) > 17
        assert snr(mean, true) - snr(nearest[i][:, 0], true) > 14


def test_every_head_sequence_and_query_has_draws_of_its_own():
    q, k, v, grad, _, _ = call([32], [32], heads=1)
    same = [torch.cat([t, t]).repeat(1, 2, 1) for t in (q, k, v, grad)]
    ends = offsets_of([32, 32])
    for recipe, equal in ((AttentionRecipe(), False), (NEAREST, True)):
        dq = results(mx_attention, *same, ends, ends, recipe=recipe)[1]
        for other in (dq[:32, 1], dq[32:, 0], dq[32:, 1]):
            assert torch.equal(dq[:32, 0], other) == equal


@pytest.mark.parametrize("operator", [mx_attention, mx_gdpa])
def test_the_gradient_of_a_query_without_keys_has_no_part_in_its_square(operator):
    q, k, v, grad, q_offsets, k_offsets = call([40], [25])
    options = {"recipe": AttentionRecipe("e2m1", "e2m1"), "causal": True}
    options |= {"activation": "silu"} if operator is mx_gdpa else {}
    found = []
    for value in (0.0, 1e6, math.inf, math.nan):
        grad[:15] = value
        found.append(results(operator, q, k, v, grad, q_offsets, k_offsets, **options))
    for one in found:
        assert all(torch.equal(a, b) for a, b in zip(found[0], one, strict=True))
        assert all(bool(torch.isfinite(t).all()) for t in one)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        mx_attention(**{**GOOD, **changes}, recipe=NEAREST)
    if "bias" not in changes:
        with pytest.raises(ValueError, match=message):
            mx_gdpa(**{**GOOD, **changes}, activation="gelu", recipe=NEAREST)


def test_recipes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="AttentionRecipe, got dict"):
        mx_attention(**GOOD, recipe={})
    with pytest.raises(ValueError, match="AttentionRecipe, got NoneType"):
        mx_gdpa(**GOOD, activation="gelu", recipe=None)
    with pytest.raises(ValueError, match="no bound, got 'fixed'"):
        mx_gdpa(**GOOD, activation="gelu", recipe=RECIPES["fixed"])
    with pytest.raises(ValueError, match=r"no row sum .*got row_sum 'quantized'"):
        mx_gdpa(**GOOD, activation="gelu", recipe=AttentionRecipe(row_sum="quantized"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"elem_dtype": "fp8"}, "'fp8'"),
        ({"gradient_elem_dtype": "e8m0"}, "'e8m0'"),
        ({"scale_mode": "up"}, "'up'"),
        ({"value_block": (1, 32)}, r"got \(1, 32\)"),
        ({"weight_scale": "row"}, "'row'"),
        ({"weight_scale": "fixed", "elem_dtype": "e2m1"}, "e2m1's 6"),
        ({"row_sum": "both"}, "'both'"),
        ({"gradient_rounding": "down"}, "'down'"),
        ({"seed": -1}, "got -1"),
    ],
)
def test_recipes_that_are_none_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        AttentionRecipe(**changes)
