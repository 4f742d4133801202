"""Recipes are values; layers under one compute what it says, and the model else stays."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from mx_oracles import normal, snr
from torch import Tensor, nn
from torch.nn import functional

from jagbench.impl.precision import (
    RECIPES,
    Functions,
    LinearPrecision,
    Recipe,
    RecipeLinear,
    TensorwisePrecision,
    apply,
    recipe_named,
    revert,
    role_of,
    seed_of,
    set_step,
)
from jagbench.mx import AttentionRecipe, LinearRecipe
from jagbench.reference.mx import mx_dequantize, mx_quantize
from jagbench.reference.mx_attention import mx_attention
from jagbench.reference.mx_gdpa import mx_gdpa
from jagbench.reference.mx_matmul import mx_linear

TRUTH = Functions(mx_linear, mx_attention, mx_gdpa, mx_quantize, mx_dequantize)


class Attention(nn.Module):
    attention_precision = None

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3))
        self.attention = Attention()
        self.norm = nn.LayerNorm(32)
        self.over_arch = nn.Linear(32, 32)
        self.ctr_head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.ctr_head(self.over_arch(self.norm(self.attention(x))))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def run(layer: nn.Module, seed: int = 0) -> tuple[Tensor, ...]:
    """Output and gradients of x and the weight."""
    x = normal(40, 32, seed=seed).float().requires_grad_()
    out = layer(x)
    grads = torch.autograd.grad(out, (x, layer.weight), normal(*out.shape, seed=7).float())
    return out.detach(), *grads


def under(precision: LinearPrecision | TensorwisePrecision) -> nn.Linear:
    torch.manual_seed(1)
    layer = nn.Linear(32, 48)
    apply(layer, Recipe("own", precision), functions=TRUTH)
    return layer


# -- recipes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_comes_back_from_its_json(name):
    recipe = recipe_named(name)
    assert recipe.name == name
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert json.loads(recipe.to_json())["version"] == 1


def test_no_two_names_but_one_stand_for_the_same_precision():
    """`mxfp8_wgrad_bf16` says aloud what is the default today."""
    said = [replace(r, name="same").to_json() for r in RECIPES.values()]
    assert len(set(said)) == len(said) - 1
    assert replace(RECIPES["mxfp8_wgrad_bf16"], name="mxfp8") == RECIPES["mxfp8"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"version": None}, "version None"),
        ({"colour": 1}, "colour"),
        ({"linear": {"kind": "fp7"}}, "fp7"),
        ({"linear": 3}, "got 3"),
        ({"keep": "head"}, "keep must be a list"),
        ({"keep_roles": ["tail"]}, "tail"),
        ({"name": ""}, "not empty"),
    ],
)
def test_what_is_no_stored_recipe_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict({**RECIPES["mxfp8"].to_dict(), **change})


def test_values_that_no_layer_can_have_are_refused():
    with pytest.raises(ValueError, match=r"mxfp8_floor.*got 'mxfp9'"):
        recipe_named("mxfp9")
    with pytest.raises(ValueError, match="no product"):
        LinearPrecision(forward=False, input_gradient=False)
    with pytest.raises(ValueError, match=r"'e5m2' is not exact in .* 'e4m3'"):
        LinearPrecision(activation_elem_dtype="e5m2")
    with pytest.raises(ValueError, match="both 'e5m2'"):
        TensorwisePrecision("e5m2", "e5m2")


# -- the model -------------------------------------------------------------------------------------


def test_the_layers_of_a_recipe_and_the_reasons_of_the_others_are_told():
    applied = apply(model(), "mxfp8", functions=TRUTH)
    assert applied.linear == ("blocks.0.0", "blocks.1.0", "attention.proj")
    assert applied.attention == ("attention",)
    kept = dict(applied.kept)
    assert kept["blocks.2.0"] == "role last_block"
    assert kept["ctr_head"] == "role head"
    assert kept["over_arch"] == "role over_arch"
    assert "LayerNorm" in kept["norm"]
    assert "Embedding" in kept["embedding"]
    assert "ctr_head: kept, role head" in str(applied)


def test_state_dict_hooks_and_parameters_stay_and_a_model_can_be_taken_back():
    changed, called = model(), []
    before, plain = {k: id(v) for k, v in changed.state_dict(keep_vars=True).items()}, model()
    changed.blocks[0][0].register_forward_hook(lambda *_: called.append(1))
    x = normal(40, 32).float()
    wanted = plain(x)
    first = apply(changed, "mxfp8", functions=TRUTH)
    again = apply(changed, "mxfp8", functions=TRUTH)
    assert first == again
    assert {k: id(v) for k, v in changed.state_dict(keep_vars=True).items()} == before
    out = changed(x)
    assert called == [1]
    assert not torch.equal(out, wanted)
    assert snr(out, wanted) > 15
    assert set(revert(changed)) == {*first.linear, *first.attention}
    assert torch.equal(changed(x), wanted)
    assert not any(isinstance(m, RecipeLinear) for m in changed.modules())
    assert changed.attention.attention_precision is None
    assert "precision" not in vars(changed.blocks[0][0])


def test_the_recipe_bf16_undoes_another():
    changed = model()
    apply(changed, "mxfp8", functions=TRUTH)
    applied = apply(changed, "bf16")
    assert not applied.linear
    x = normal(4, 32).float()
    assert torch.equal(changed(x), model()(x))


def test_patterns_choose_and_those_that_match_nothing_are_refused_before_any_change():
    changed = model()
    base = RECIPES["mxfp8"]
    chosen = replace(base, name="own", only=("blocks.*",), keep=("blocks.1.*",), attention=None)
    assert apply(changed, chosen, functions=TRUTH).linear == ("blocks.0.0",)
    for kind in ("keep", "only"):
        wrong = replace(base, name="own", **{kind: ("tower.*",)})
        with pytest.raises(ValueError, match=rf"{kind} 'tower\.\*' matches none of 9 layers"):
            apply(changed, wrong, functions=TRUTH)
    assert isinstance(changed.blocks[0][0], RecipeLinear)
    with pytest.raises(ValueError, match=r"no layer of 1 would run .*role head"):
        apply(nn.ModuleDict({"head": nn.Linear(32, 32)}), "mxfp8")


def test_the_negative_control_keeps_no_linear_layer():
    applied = apply(model(), "mxfp8_everything", functions=TRUTH)
    assert {"ctr_head", "over_arch", "blocks.2.0"} <= set(applied.linear)


def test_declared_roles_come_before_names_and_the_innermost_wins():
    changed = model()
    changed.blocks.precision_role = "over_arch"
    changed.ctr_head.precision_role = "block"
    assert role_of(changed, "blocks.0.0") == "over_arch"
    assert role_of(changed, "blocks.2.0") == "last_block"
    assert role_of(changed, "ctr_head") == "block"
    changed.ctr_head.precision_role = "tail"
    with pytest.raises(ValueError, match=r"ctr_head .*'tail'"):
        role_of(changed, "ctr_head")


def test_layers_whose_weights_others_read_and_layers_of_two_names_stay():
    mha = nn.ModuleDict({"a": nn.MultiheadAttention(32, 2), "b": nn.Linear(32, 32)})
    assert apply(mha, "mxfp8", functions=TRUTH).linear == ("b",)
    tied = nn.Linear(32, 32)
    both = nn.ModuleDict({"a": tied, "head": tied, "b": nn.Linear(32, 32)})
    assert apply(both, "mxfp8", functions=TRUTH).linear == ("b",)


def test_a_layer_wrapped_since_is_not_taken_back():
    changed = model()
    apply(changed, "mxfp8", functions=TRUTH)
    layer = changed.blocks[0][0]
    layer.__class__ = type("Sharded", (RecipeLinear,), {})
    with pytest.raises(ValueError, match=r"blocks\.0\.0: a Sharded now"):
        revert(changed)
    assert isinstance(changed.blocks[1][0], RecipeLinear)


# -- products --------------------------------------------------------------------------------------


def test_a_layer_is_the_operator_under_its_recipe_and_seed():
    layer = under(LinearPrecision(LinearRecipe(weight_gradient="mx", seed=5)))
    set_step(layer, 3, rank=2)
    found = run(layer)
    recipe = LinearRecipe(weight_gradient="mx", seed=seed_of(5, "", 3, 2))
    x, weight = normal(40, 32).float().requires_grad_(), layer.weight
    out = mx_linear(x, weight, layer.bias, recipe=recipe)
    grads = torch.autograd.grad(out, (x, weight), normal(*out.shape, seed=7).float())
    for a, b in zip(found, (out, *grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("weight_gradient", ["bf16", "mx"])
def test_each_product_is_quantised_if_and_only_if_it_is_named(forward, backward, weight_gradient):
    named = (forward, backward, weight_gradient == "mx")
    if not any(named):
        return
    recipe = LinearRecipe(weight_gradient=weight_gradient)
    found = run(under(LinearPrecision(recipe, forward, backward)))
    full = run(under(LinearPrecision(replace(recipe, weight_gradient="mx"))))
    layer = under(LinearPrecision())
    revert(layer)
    for ours, quantised, plain, is_named in zip(found, full, run(layer), named, strict=True):
        wanted = quantised if is_named else plain
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
        assert snr(quantised, plain) < 40


def test_activations_in_mxfp4_that_round_past_the_largest_float16_stay_finite():
    layer = under(LinearPrecision(LinearRecipe(), activation_elem_dtype="e2m1")).half()
    x = torch.zeros(32, 32, dtype=torch.float16)
    x[0, 0] = 6.2e4
    with torch.no_grad():
        layer.weight.fill_(0.25)
        layer.bias.zero_()
        found = layer(x)
    assert torch.equal(found[0], torch.full_like(found[0], 2**14))


def test_activations_in_mxfp4_are_what_the_forward_and_the_weight_gradient_read():
    layer = under(LinearPrecision(activation_elem_dtype="e2m1"))
    out, dx, dw = run(layer)
    x = normal(40, 32).float()
    coarse = mx_dequantize(*mx_quantize(x, elem_dtype="e2m1"), elem_dtype="e2m1")
    weight = mx_dequantize(*mx_quantize(layer.weight, block=(32, 32)), block=(32, 32))
    torch.testing.assert_close(out, functional.linear(coarse, weight, layer.bias))
    torch.testing.assert_close(dw, normal(40, 48, seed=7).float().T @ coarse)
    assert torch.equal(dx, run(under(LinearPrecision()))[1])


def test_tensorwise_products_are_those_of_the_scaled_codes():
    layer = under(TensorwisePrecision())
    found = run(layer)

    def rounded(x: Tensor, dtype: torch.dtype, largest: float) -> Tensor:
        scale = x.abs().max() / largest
        return (x / scale).to(dtype).float() * scale

    x = rounded(normal(40, 32).float(), torch.float8_e4m3fn, 448)
    weight = rounded(layer.weight.detach(), torch.float8_e4m3fn, 448)
    grad = rounded(normal(40, 48, seed=7).float(), torch.float8_e5m2, 57344)
    wanted = (functional.linear(x, weight, layer.bias), grad @ weight, grad.T @ x)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    zeros = layer(torch.zeros(3, 32))
    assert torch.equal(zeros, layer.bias.expand(3, -1))
    kept = apply(nn.ModuleDict({"a": nn.Linear(32, 24), "b": layer}), "fp8_tensorwise").kept
    assert kept == (("a", "weight (24, 32): an FP8 product needs multiples of 16"),)


def test_autocast_chooses_the_dtype_as_for_a_linear_layer():
    layer = under(LinearPrecision())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(normal(4, 32).float()).dtype == torch.bfloat16


# -- seeds -----------------------------------------------------------------------------------------


def test_seeds_differ_by_layer_step_rank_and_recipe_and_are_fixed_for_ever():
    seeds = {
        seed_of(s, layer, step, rank)
        for s in (0, 1) for layer in ("a", "b") for step in range(3) for rank in (0, 1)
    }  # fmt: skip
    assert len(seeds) == 24
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(0, "blocks.0", 7, 0) == 1567228029317857777


def test_the_same_step_has_the_same_bits_and_another_has_others():
    layer = under(LinearPrecision())
    gradients = []
    for step in (0, 1, 0):
        set_step(layer, step)
        gradients.append(run(layer)[1])
    assert torch.equal(gradients[0], gradients[2])
    assert not torch.equal(gradients[0], gradients[1])
    with pytest.raises(ValueError, match="got -1 and 0"):
        set_step(layer, -1)
    for step in (2.5, True, "3"):
        with pytest.raises(ValueError, match="whole numbers, got"):
            set_step(layer, step)  # type: ignore[arg-type]
    revert(layer)
    with pytest.raises(ValueError, match="under a recipe"):
        set_step(nn.Linear(2, 2), 0)


def test_an_attention_finds_its_recipe_and_a_copy_of_a_model_has_a_step_of_its_own():
    changed = model()
    apply(changed, replace(RECIPES["mxfp8"], attention=AttentionRecipe(seed=4)), functions=TRUTH)
    twin = copy.deepcopy(changed)
    set_step(changed, 5)
    found = changed.attention.attention_precision
    assert found.functions.attention is mx_attention
    assert found.recipe() == AttentionRecipe(seed=seed_of(4, "attention", 5, 0))
    assert twin.attention.attention_precision.recipe().seed == seed_of(4, "attention", 0, 0)
