"""Our MXFP8 attention and GDPA: the truth's results, from the truth's codes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from mx_bits import DEVICE, every_elem_dtype, wide_range
from mx_oracles import MODES, normal
from oracles import offsets_of
from torch import Tensor

from jagbench.bias import BucketedBias
from jagbench.impl.kernels.activations import SOFTMAX
from jagbench.impl.kernels.arguments import geometry_of
from jagbench.impl.kernels.mask import Mask
from jagbench.impl.kernels.mx_attention import mx_attention
from jagbench.impl.kernels.mx_attention_launch import (
    ForwardCall,
    element_constants,
    launch_forward,
)
from jagbench.impl.kernels.mx_attention_operands import (
    decode_recipe,
    encode_recipe,
    quantised_inputs,
)
from jagbench.impl.kernels.mx_attention_tiles import block_scales, held, random_tile
from jagbench.impl.kernels.mx_gdpa import mx_gdpa
from jagbench.impl.kernels.mx_launch import words
from jagbench.mx import ALONG_COLUMNS, SQUARE, AttentionRecipe, Stream
from jagbench.reference.draws import draws
from jagbench.reference.mx_attention import mx_attention as true_attention
from jagbench.reference.mx_blocks import Blocks, rounded
from jagbench.reference.mx_gdpa import mx_gdpa as true_gdpa

RECIPE = AttentionRecipe(seed=2**40 + 7)
GELU = {"activation": "gelu"}
#: Rows that may differ: where float32 sums in another order move a weight past a midpoint.
FEW = 3


def wide_rows(x: Tensor, spread: int) -> Tensor:
    """x with every row times a power of two: its own of five, 2 spread binades apart."""
    rows = torch.arange(x[..., 0].numel()).view(x.shape[:-1])
    return x * torch.exp2(spread * (rows * 7 % 5 - 3.0))[..., None]


def call(
    q_lengths: list[int] | int,
    k_lengths: list[int],
    *,
    heads: int = 1,
    kv_heads: int = 1,
    d: int = 32,
    dv: int = 32,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments, with three rows of padding that hold NaN, and dO; a number of queries is dense."""
    dense = isinstance(q_lengths, int)
    rows, keys = q_lengths if dense else sum(q_lengths), sum(k_lengths)
    # Weights, values and gradients whose rows differ by more than the range of an element type:
    # else it rounds alike whatever the scale, and whichever way the blocks lie.
    tensors = [
        4 * normal(rows, heads, d, seed=1),
        normal(keys, kv_heads, d, seed=2),
        wide_rows(normal(keys, kv_heads, dv, seed=3), 6),
    ]
    padding = [0 if dense else 3, 3, 3]
    q, k, v = (
        torch.cat([t.float(), torch.full((more, *t.shape[1:]), math.nan)]).to(dtype)
        for t, more in zip(tensors, padding, strict=True)
    )
    out = (len(k_lengths), rows) if dense else (rows + 3,)
    grad = wide_rows(normal(*out, heads, dv, seed=4), 4).to(dtype)
    found = {"q": q, "k": k, "v": v, "q_offsets": None if dense else offsets_of(q_lengths)}
    return found | {"k_offsets": offsets_of(k_lengths)}, grad


def results(
    operator: Any, arguments: dict[str, Any], grad: Tensor, device: str, **options: Any
) -> dict[str, Tensor]:
    """Outputs and gradients of everything that is a float tensor."""
    given = {name: t if t is None else t.to(device) for name, t in arguments.items()}
    bias = options.pop("bias", None)
    leaves = {name: given[name].clone().requires_grad_() for name in ("q", "k", "v")}
    if isinstance(bias, BucketedBias):
        leaves["bias"] = bias.table.to(device).requires_grad_()
        options["bias"] = BucketedBias(leaves["bias"], bias.bucket_ids.to(device))
    elif bias is not None:
        options["bias"] = leaves["bias"] = bias.clone().to(device).requires_grad_()
    found = operator(**{**given, **leaves, **options})
    outputs = {"out": found} if isinstance(found, Tensor) else {"out": found[0], "lse": found[1]}
    grads = [grad.to(device), normal(*grad.shape[:-1], seed=5).float().to(device)]
    gradients = torch.autograd.grad(
        list(outputs.values()), list(leaves.values()), grads[: len(outputs)],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    outputs |= {f"d{name}": t for name, t in zip(leaves, gradients, strict=True)}
    return {name: t.detach().cpu() for name, t in outputs.items()}


def assert_like_the_truth(
    arguments: dict[str, Any], grad: Tensor, recipe: AttentionRecipe = RECIPE, **options: Any
) -> None:
    """Every row equal to a few last places, but for FEW of them."""
    gdpa = "activation" in options
    ours, truth = (mx_gdpa, true_gdpa) if gdpa else (mx_attention, true_attention)
    options |= {"recipe": recipe} | ({} if gdpa else {"return_lse": True})
    found = results(ours, arguments, grad, DEVICE, **options)
    wanted = results(truth, arguments, grad, "cpu", **options)
    last_place = torch.finfo(arguments["q"].dtype).eps
    for name, theirs in wanted.items():
        one = found[name]
        assert one.dtype == theirs.dtype, name
        assert one.shape == theirs.shape, name
        assert_few_rows_differ(name, one.double(), theirs.double(), 8 * last_place)


def assert_few_rows_differ(name: str, found: Tensor, wanted: Tensor, share: float) -> None:
    found, wanted = (t.reshape(-1, t.shape[-1] if name != "lse" else 1) for t in (found, wanted))
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    error = torch.where(same, 0.0, found - wanted).norm(dim=1)
    size = wanted.nan_to_num(0, 0, 0).norm(dim=1)
    usual = size.pow(2).mean().sqrt()
    # A gradient of a bias is one difference; sums of many are as good as their terms.
    least = usual if name == "dbias" else usual / 1000
    wrong = (~(error <= share * (size + least))).nonzero()
    assert len(wrong) <= FEW, f"{name}: {len(wrong)} of {len(found)} rows differ, {error.max()}"


# -- quantisation in registers ---------------------------------------------------------------------


@triton.jit
def _held_kernel(
    x, out, low, high, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr,
    STREAM: tl.constexpr, ACROSS: tl.constexpr, LIMIT: tl.constexpr, SATURATES: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS_OF: tl.constexpr, CARRY: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, ROWS)
    place = r[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tile = tl.load(x + place)
    random = None
    if STREAM is not None:
        random = random_tile(r.to(tl.int64), 0, low, high, STREAM, COLUMNS, ACROSS)
    if ACROSS:
        tile = tl.trans(tile)
    scale = block_scales(tile, CARRY, TOP, BR, 32, False)
    tile = held(tile, scale, random, LIMIT, SATURATES, MANTISSA, BIAS_OF)
    if ACROSS:
        tile = tl.trans(tile)
    tl.store(out + place, tile)


@every_elem_dtype
@pytest.mark.parametrize("mode", MODES)
def test_what_registers_hold_is_what_the_codes_of_the_truth_stand_for(elem_dtype, mode):
    """To nearest along rows, by chance in squares both ways round; NaN, infinities, subnormals."""
    x = torch.cat([wide_range(96, 64, spread=4), wide_range(32, 64, spread=40)])
    x[3, 5], x[70, 40], x[75, 33] = math.nan, math.inf, -0.0
    x[64:96, :32] *= 2.0**-130
    x[0, :32], x[1, :32] = 0.0, 448.0
    constants = element_constants(elem_dtype, mode)
    del constants["WIDTH"]
    for block, stream, across in (
        (ALONG_COLUMNS, None, False), (SQUARE, Stream.GRADIENT_OF_SCORES, False),
        (SQUARE, Stream.GRADIENT_OF_SCORES, True),
    ):  # fmt: skip
        out = torch.empty_like(x, device=DEVICE)
        _held_kernel[(1,)](
            x.to(DEVICE), out, *words(RECIPE.seed), ROWS=128, COLUMNS=64, BR=block[0],
            STREAM=None if stream is None else int(stream), ACROSS=across, **constants,
        )  # fmt: skip
        random = None if stream is None else draws(RECIPE.seed, torch.arange(128), 64, stream)
        wanted = rounded(x, Blocks(elem_dtype, block, mode), random)
        torch.testing.assert_close(out.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


# -- results ---------------------------------------------------------------------------------------


def test_lengths_about_a_block_have_the_results_of_the_truth():
    """Also: no keys, no queries, heads in groups, head dims of no whole block, NaN in padding."""
    arguments, grad = call([1, 31, 0, 2], [33, 5, 7, 0], heads=2, d=40, dv=16)
    assert_like_the_truth(arguments, grad)
    arguments, grad = call([32, 3], [31, 64], heads=2, d=16, dv=40)
    assert_like_the_truth(arguments, grad, causal=True, activation=["silu", "relu_squared"])


@pytest.mark.parametrize(
    "recipe",
    [
        AttentionRecipe(value_block=SQUARE, gradient_rounding="nearest"),
        AttentionRecipe("e5m2", "e5m2", "floor", row_sum="quantized"),
        AttentionRecipe("e2m1", "e4m3", "even"),
        AttentionRecipe("e4m3", "e2m1", "ceil", weight_scale="fixed", seed=2**62 + 5),
    ],
    ids=["squares to nearest", "e5m2 floor quantised sum", "e2m1 even", "fixed scale ceil"],
)
def test_every_switch_of_a_recipe_has_the_results_of_the_truth(recipe):
    arguments, grad = call([40], [70])
    assert decode_recipe(encode_recipe(recipe)) == recipe
    assert_like_the_truth(arguments, grad, recipe)


@pytest.mark.parametrize(
    ("sizes", "mask"),
    [
        ((70, 90), {"window": (20, 5)}),
        ((90, 70), {"window": (30, None), "causal": True, "prefix": 10, "last_full": 9}),
        ((70, 130), {"window": (8, 3), "prefix": 5}),
        ((70, 100), {"window": (8, 0), "causal": True, "last_full": 9, **GELU}),
        ((70, 40), {"causal": True, "align": "start", **GELU}),
    ],
    ids=["window", "last queries", "prefix", "causal last queries, gdpa", "start, gdpa"],
)
def test_every_mask_has_the_results_of_the_truth(sizes, mask):
    arguments, grad = call([sizes[0]], [sizes[1]])
    assert_like_the_truth(arguments, grad, **mask)


def test_biases_have_the_results_and_gradients_of_the_truth():
    arguments, grad = call([33], [40], heads=2)
    pairs = 33 * 40
    bias = normal(pairs, 2, seed=9).float()
    bias[5], bias[41:43] = -math.inf, 30.0
    bias[80:120] = -math.inf  # all of a row
    assert_like_the_truth(arguments, grad, bias=bias)
    table = BucketedBias(normal(3, 1, seed=9).float(), torch.arange(pairs) % 3)
    arguments, grad = call([33], [40])
    assert_like_the_truth(arguments, grad, bias=table, causal=True)


def test_a_dense_query_has_the_results_of_the_truth():
    arguments, grad = call(40, [33, 0, 5])
    assert_like_the_truth(arguments, grad)
    arguments, grad = call(3, [5, 33])
    assert_like_the_truth(arguments, grad, **GELU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bit_types_have_the_results_of_the_truth(dtype):
    arguments, grad = call([33], [65], dtype=dtype)
    assert_like_the_truth(arguments, grad)


def test_an_odd_number_of_key_blocks_has_the_results_of_the_truth():
    arguments, _ = call([3], [1152])
    out = mx_attention(**{n: t.to(DEVICE) for n, t in arguments.items()}, recipe=RECIPE).cpu()
    assert_few_rows_differ("out", out, true_attention(**arguments, recipe=RECIPE), 1e-6)


@pytest.mark.parametrize("size", [1e-20, 1e4], ids=["one weight for all", "one key for a row"])
def test_scores_at_both_extremes_have_the_results_of_the_truth(size):
    arguments, grad = call([40], [70])
    arguments["q"] *= size
    assert_like_the_truth(arguments, grad)


def test_nothing_and_little_have_the_results_of_the_truth():
    for lengths in (([], []), ([0], [5]), ([5], [0])):
        arguments, grad = call(*lengths)
        assert_like_the_truth(arguments, grad)


def test_tokens_of_no_pair_may_hold_anything():
    """Whole squares of them: a token has a share in the scale of the square it is in."""
    arguments, grad = call([64], [32])
    arguments["q"][:32], grad[:32] = math.nan, math.inf
    assert_like_the_truth(arguments, grad, causal=True)
    # The gradient of such a row has no share even in the square it is in.
    arguments, grad = call([50], [20])
    grad[:30] = math.inf
    assert_like_the_truth(arguments, grad, causal=True)
    assert_like_the_truth(arguments, grad, causal=True, **GELU)
    arguments, grad = call([20], [64])
    arguments["k"][32:], arguments["v"][32:] = math.nan, math.inf
    assert_like_the_truth(arguments, grad, causal=True, align="start")
    assert_like_the_truth(arguments, grad, causal=True, align="start", **GELU)


def test_values_dequantised_before_the_kernel_give_what_codes_give():
    """Bit for bit: either way a product multiplies the same numbers in the same order."""
    arguments, _ = call([40, 3], [70, 5])
    q, k, v, q_offsets, k_offsets = (t.to(DEVICE) for t in arguments.values())
    geometry = geometry_of(q, k, v, q_offsets, k_offsets)
    operands = quantised_inputs(q, k, v, q_offsets, k_offsets, geometry, RECIPE)
    forward = ForwardCall(geometry, Mask(-1, -1, True), RECIPE, SOFTMAX.value, 0.2)
    codes, values = (
        launch_forward(*operands, q_offsets, k_offsets, q.dtype, forward, operands=way)
        for way in ("codes", "values")
    )
    assert torch.equal(codes[0], values[0])
    assert torch.equal(codes[1], values[1])


def test_gradients_have_the_same_bits_on_repeats_and_another_seed_other_ones():
    arguments, grad = call([5], [9])
    options = {"recipe": RECIPE, "deterministic": True}
    first, second = (results(mx_attention, arguments, grad, DEVICE, **options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = results(mx_attention, arguments, grad, DEVICE, recipe=AttentionRecipe(seed=1))
    assert torch.equal(first["out"], other["out"])
    assert not torch.equal(first["dq"], other["dq"])


def test_without_gradients_nothing_is_kept():
    arguments, _ = call([5], [7])
    given = {name: t.to(DEVICE) for name, t in arguments.items()}
    assert not mx_gdpa(**given, recipe=RECIPE, **GELU).requires_grad
    given["v"].requires_grad_()
    assert mx_gdpa(**given, recipe=RECIPE, **GELU).requires_grad


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem", "words"),
    [
        ({"recipe": "mxfp8"}, ValueError, "AttentionRecipe, got str"),
        ({"q": torch.zeros(6, 1, 160), "k": torch.zeros(6, 1, 160)}, NotImplementedError, "160"),
        ({"k_offsets": torch.tensor([0, 9])}, ValueError, "9, but there are 6 rows"),
        ({"v": torch.zeros(6, 1, 32).half()}, ValueError, "float16"),
        ({"window": (-1, 2)}, ValueError, "-1"),
    ],
    ids=["recipe", "head dim", "offsets", "dtype", "window"],
)
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(change, problem, words):
    arguments = {name: torch.zeros(6, 1, 32) for name in ("q", "k", "v")}
    arguments |= {"q_offsets": offsets_of([6]), "k_offsets": offsets_of([6]), "recipe": RECIPE}
    arguments |= change
    arguments = {n: t.to(DEVICE) if isinstance(t, Tensor) else t for n, t in arguments.items()}
    with pytest.raises(problem, match=f"mx_attention: .*{words}"):
        mx_attention(**arguments)
    with pytest.raises(problem, match=f"mx_gdpa: .*{words}"):
        mx_gdpa(**arguments, **GELU)


def test_gdpa_refuses_a_fixed_scale_of_its_weights_and_a_row_sum_it_does_not_form():
    arguments, _ = call([5], [7])
    with pytest.raises(ValueError, match="'fixed'"):
        mx_gdpa(**arguments, recipe=AttentionRecipe(weight_scale="fixed"), **GELU)
    with pytest.raises(ValueError, match="row_sum 'quantized'"):
        mx_gdpa(**arguments, recipe=AttentionRecipe(row_sum="quantized"), **GELU)
