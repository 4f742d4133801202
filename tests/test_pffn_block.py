"""The PFFN block: its truth against torch's layers, and what our kernels promise beyond it."""

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import jagbench.reference
from jagbench.accuracy import judge
from jagbench.execution import run
from jagbench.impl import pffn_block
from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS, gdpa
from jagbench.reference.pffn_block import pffn_block_bytes, pffn_block_flops, uncancelled
from jagbench.suite import changes, shapes
from jagbench.workloads import CATALOGUE, PffnRecipe
from jagbench.workloads.attention import AttentionRecipe
from jagbench.workloads.lengths import Explicit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = OPERATORS["pffn_block"].reference


def example(dtype=torch.float32, heads=3, dim=16, **options) -> Inputs:
    options = {"activation": "gelu", "pre_scale": 0.3, "eps": 1e-4, **options}
    return shapes.attention(
        "pffn_block", [20, 0, 9], [7, 4, 31], heads=heads, kv_heads=1, dim=dim, dtype=dtype,
        device=DEVICE, **options,
    )  # fmt: skip


def assert_right(inputs: Inputs) -> None:
    found = judge(inputs, run(pffn_block, inputs, backward=True))
    assert not [f"{a.name}: {a.problem}" for a in found if not a.ok]


# -- the truth -------------------------------------------------------------------------------------


def test_the_operator_is_offered_under_its_name():
    assert jagbench.reference.pffn_block is REFERENCE


def test_it_is_made_of_the_norms_of_torch_and_gdpa():
    inputs = example(torch.float64)
    t = inputs.tensors()
    rows = t["q"].flatten(1)
    ln = functional.layer_norm(rows, (48,), eps=1e-4).view_as(t["q"])
    offsets = t["q_offsets"], t["k_offsets"]
    inner = gdpa(ln, t["k"], t["v"], *offsets, activation="gelu", pre_scale=0.3) + ln
    wanted = functional.rms_norm(inner.flatten(1), (48,), eps=1e-4).view_as(ln) + t["q"]
    torch.testing.assert_close(inputs.call(REFERENCE), wanted)


def test_gradients_are_those_of_finite_differences():
    inputs = example(torch.float64, heads=1, dim=4)
    leaves = [inputs.tensors()[n].requires_grad_() for n in "qkv"]

    def function(*given):
        return inputs.replace(**dict(zip("qkv", given, strict=True))).call(REFERENCE)

    torch.autograd.gradcheck(function, leaves)


def test_uncancelled_gradients_belong_to_the_same_output():
    inputs = example(torch.float64)
    given, terms = (run(f, inputs, backward=True) for f in (REFERENCE, uncancelled))
    torch.testing.assert_close(terms["out"], given["out"])
    assert terms["grad q"].norm() > given["grad q"].norm()


def test_flops_and_bytes_are_those_of_gdpa():
    inputs = example()
    assert pffn_block_flops(inputs) == 4 * 3 * 16 * (20 * 7 + 9 * 31)
    rows = 2 * 29 * 48 + 2 * 42 * 16
    assert pffn_block_bytes(inputs) == 4 * rows + 8 * 8


def test_arguments_that_do_not_fit_are_refused_with_their_numbers():
    inputs = example()
    for function in (REFERENCE, pffn_block):
        for change, words in (
            ({"v": inputs.tensors()["v"][..., :8]}, r"head_dim 16 .* 8"),
            ({"q_offsets": None}, r"\(29, 3, 16\) needs q_offsets"),
            ({"q_offsets": None, "q": None}, "q must be a tensor.* got NoneType"),
        ):
            with pytest.raises(ValueError, match=words):
                inputs.replace(**change).call(function)
        for eps in (-1, None, "small"):
            with pytest.raises(ValueError, match=f"eps must be at least 0, got {eps!r}"):
                inputs.with_options(eps=eps).call(function)


def test_a_recipe_that_cannot_be_is_refused():
    def attention(**others):
        return AttentionRecipe("gdpa", 1, 2, 16, Explicit((3,)), activation="relu", **others)

    PffnRecipe(attention())
    with pytest.raises(ValueError, match="head_dim 16 of q must be that of v, 8"):
        PffnRecipe(attention(v_dim=8))
    with pytest.raises(ValueError, match="no mask"):
        PffnRecipe(attention(causal=True))


def test_the_published_shape_is_offered():
    recipe = CATALOGUE["pffn_block-l2000-fill0.5-kv128"].recipe
    assert (recipe.batch, recipe.heads, recipe.qk_dim) == (768, 4, 128)
    assert set(recipe.lengths(1)["k_offsets"]) == {128}


# -- our kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 20), (3, 16), (5, 48)])
def test_features_of_any_number_are_right(heads, dim, dtype):
    assert_right(example(dtype, heads, dim))


@pytest.mark.parametrize("offset", [100.0, 4096.0])
def test_queries_far_from_zero_keep_their_variance(offset):
    inputs = example()
    inputs = changes.floats(inputs, lambda x: (x * 256).round() / 256 + offset, names=("q",))
    assert_right(inputs)


def test_nan_behind_the_last_offset_is_never_read():
    inputs = changes.with_padding(example(), 4, float("nan"))
    found = run(pffn_block, inputs, backward=True)
    clean = run(pffn_block, changes.with_padding(example(), 4, 0.0), backward=True)
    assert all(torch.equal(found[n], clean[n]) for n in clean)
    assert (found["out"][-4:] == 0).all()


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_a_single_gradient_has_the_bits_of_all_together(wanted):
    inputs = example()
    leaf = inputs.tensors()[wanted].clone().requires_grad_()
    out = inputs.replace(**{wanted: leaf}).call(pffn_block)
    (found,) = torch.autograd.grad(out, leaf, inputs.upstream)
    assert torch.equal(found, run(pffn_block, inputs, backward=True)[f"grad {wanted}"])


def test_the_flop_counter_counts_what_the_formula_counts():
    inputs = example()
    with FlopCounterMode(display=False) as counter:
        run(pffn_block, inputs, backward=True)
    forward = pffn_block_flops(inputs)
    assert counter.get_total_flops() == forward + forward * 5 // 2


def test_the_custom_op_keeps_torch_s_rules():
    t = example().tensors()
    leaves = [t[n].clone().requires_grad_() for n in "qkv"]
    schedule = [0] * 15
    arguments = (*leaves, t["q_offsets"], t["k_offsets"], [1], 0.3, 1.0, 1e-4, -1, schedule)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.jagbench.pffn_block_forward.default, arguments, test_utils=checks
    )


def test_more_features_than_a_program_holds_are_refused():
    inputs = example(heads=33, dim=256)
    with pytest.raises(NotImplementedError, match="8192 features a row, got 33 x 256"):
        inputs.call(pffn_block)
