"""MXFP8 attention and GDPA on jagged batches and at the extremes of scores and biases."""

import math

import pytest
import torch
from mx_attention_oracle import call, results, softmax_head
from mx_oracles import normal, quantized, snr
from oracles import offsets_of

from jagbench.bias import BucketedBias
from jagbench.mx import AttentionRecipe
from jagbench.reference import jagged_attention
from jagbench.reference.mx_attention import mx_attention
from jagbench.reference.mx_gdpa import mx_gdpa

NEAREST = AttentionRecipe(gradient_rounding="nearest")


# -- jagged ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", [mx_attention, mx_gdpa])
def test_a_sequence_does_not_depend_on_its_neighbours(operator):
    q, k, v, grad, q_offsets, k_offsets = call()
    options = {"recipe": NEAREST}
    if operator is mx_gdpa:
        options["activation"] = "silu"
    whole = results(operator, q, k, v, grad, q_offsets, k_offsets, **options)
    louder = [t.clone() for t in (q, k, v, grad)]
    for t, end in zip(louder, (40, 35, 35, 40), strict=True):
        t[:end] *= 1000
    moved = results(operator, *louder, q_offsets, k_offsets, **options)
    for own, once, end in zip(moved, whole, (40, 40, 35, 35), strict=True):
        assert torch.equal(own[end:], once[end:])
    alone = results(
        operator,
        q[40:73],
        k[42:112],
        v[42:112],
        grad[40:73],
        offsets_of([33]),
        offsets_of([70]),
        **options,
    )
    for own, once, rows in zip(
        alone, whole, ((40, 73), (40, 73), (42, 112), (42, 112)), strict=True
    ):
        assert torch.equal(own, once[slice(*rows)])


@pytest.mark.parametrize("operator", [mx_attention, mx_gdpa])
def test_rows_past_the_last_offset_are_zero_and_never_read(operator):
    *tensors, q_offsets, k_offsets = call()
    options = {"recipe": AttentionRecipe()}
    if operator is mx_gdpa:
        options["activation"] = "gelu"
    clean = results(operator, *tensors, q_offsets, k_offsets, **options)
    padded = [torch.cat([t, torch.full_like(t[:3], math.nan)]) for t in tensors]
    found = results(operator, *padded, q_offsets, k_offsets, **options)
    for own, once in zip(found, clean, strict=True):
        assert torch.equal(own[:-3], once)
        assert (own[-3:] == 0).all()


@pytest.mark.parametrize("operator", [mx_attention, mx_gdpa])
@pytest.mark.parametrize("lengths", [([], []), ([0], [0]), ([0, 5], [4, 0]), ([3, 0], [0, 7])])
def test_empty_sequences_and_batches_give_zeros(operator, lengths):
    inputs = call(*lengths)
    options = {"recipe": AttentionRecipe()}
    if operator is mx_gdpa:
        options["activation"] = "gelu"
    for value in results(operator, *inputs, **options):
        assert (value == 0).all()
    if operator is mx_attention:
        out, lse = mx_attention(*inputs[:3], *inputs[4:], return_lse=True, **options)
        assert out.shape == inputs[3].shape
        assert lse.shape == out.shape[:2]
        assert (lse == -math.inf).all()


def test_a_dense_query_is_the_same_query_in_every_sequence():
    q, k, v, grad, _, k_offsets = call([5], [35, 0, 7])
    grads = normal(3, *grad.shape, seed=9)
    dense = results(mx_attention, q, k, v, grads, None, k_offsets, recipe=AttentionRecipe())
    assert dense[0].shape == grads.shape
    repeated = (q.repeat(3, 1, 1), k, v, grads.flatten(0, 1), offsets_of([5, 5, 5]), k_offsets)
    packed = results(mx_attention, *repeated, recipe=AttentionRecipe())
    assert torch.equal(dense[0].flatten(0, 1), packed[0])
    torch.testing.assert_close(dense[1], packed[1].view(3, 5, 2, -1).sum(0))
    assert torch.equal(dense[2], packed[2])
    empty = results(mx_attention, q, k[:0], v[:0], grads[:0], None, offsets_of([]), recipe=NEAREST)
    assert empty[0].shape == (0, *grad.shape)
    assert (empty[1] == 0).all()


def test_grouped_heads_are_repeated_keys():
    q, k, v, grad, q_offsets, k_offsets = call(heads=4, kv_heads=2)
    grouped = results(mx_attention, q, k, v, grad, q_offsets, k_offsets, recipe=NEAREST)
    wide = [t.repeat_interleave(2, 1) for t in (k, v)]
    apart = results(mx_attention, q, *wide, grad, q_offsets, k_offsets, recipe=NEAREST)
    assert torch.equal(grouped[0], apart[0])
    for i in (2, 3):
        torch.testing.assert_close(grouped[i], apart[i].unflatten(1, (2, 2)).sum(2))


# -- extremes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [-1e5, -1000.0, -88.0, 88.0, 1000.0, 1e5])
@pytest.mark.parametrize("weight_scale", ["block", "fixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_at_both_extremes_are_ordinary_scores(dtype, weight_scale, score):
    # Every score is `score`, but for one key in each row, which has half of it.
    ends = offsets_of([64])
    k = torch.ones(64, 1, 32, dtype=dtype)
    k[40] = 0.5
    q = torch.ones(64, 1, 32, dtype=dtype)
    v, grad = (normal(64, 1, 32, seed=i, dtype=dtype) for i in range(2))
    recipe = AttentionRecipe(weight_scale=weight_scale, gradient_rounding="nearest")
    options = {"scale": score / 32}
    found = results(mx_attention, q, k, v, grad, ends, ends, recipe=recipe, **options)
    doubled = [t.double() for t in (q, k, v, grad)]
    wanted = results(jagged_attention, *doubled, ends, ends, **options)
    assert all(value.isfinite().all() for value in found)
    assert snr(found[0], wanted[0]) > 23
    assert snr(found[3], wanted[3]) > 23
    if score < 0:
        torch.testing.assert_close(
            found[0][0, 0].double(), quantized(v[:, 0], "e4m3", (32, 1))[40].to(dtype).double(),
            rtol=1e-2, atol=1e-2,
        )  # fmt: skip


def test_a_bias_of_minus_infinity_hides_its_pairs_and_a_row_of_it_is_empty():
    q, k, v, grad, q_offsets, k_offsets = call([4], [40], heads=1)
    bias = torch.zeros(160, 1, dtype=torch.float64)
    bias[:40] = -math.inf
    bias[40:60] = -math.inf
    found = results(mx_attention, q, k, v, grad, q_offsets, k_offsets, recipe=NEAREST, bias=bias)
    assert all(value.isfinite().all() for value in found)
    assert (found[0][0] == 0).all()
    assert (found[1][0] == 0).all()
    seen = torch.ones(4, 40, dtype=torch.bool)
    seen[0] = False
    seen[1, :20] = False
    own = (q[:, 0], k[:, 0], v[:, 0], grad[:, 0], seen, NEAREST, 1 / math.sqrt(40))
    for value, true in zip(found, softmax_head(*own), strict=False):
        torch.testing.assert_close(value[:, 0], true, rtol=1e-9, atol=1e-9)


def test_the_gradient_of_a_bias_is_ds_before_its_quantisation():
    q, k, v, grad, q_offsets, k_offsets = call([33], [35], heads=2)
    table_ = normal(4, 1, seed=7).requires_grad_()
    ids = torch.arange(33 * 35, dtype=torch.int32) % 4
    bias = BucketedBias(table_, ids)
    out = mx_attention(q, k, v, q_offsets, k_offsets, recipe=AttentionRecipe(), bias=bias)
    (found,) = torch.autograd.grad(out, table_, grad)
    dense = table_.detach()[ids.long()].view(33, 35)
    seen = torch.ones(33, 35, dtype=torch.bool)
    wanted = torch.zeros(4, 1, dtype=torch.float64)
    for h in range(2):
        own = (q[:, h], k[:, 0], v[:, 0], grad[:, h], seen, NEAREST, 1 / math.sqrt(40), dense)
        gh_free = softmax_head(*own)
        torch.testing.assert_close(out[:, h], gh_free[0])
        wanted.index_add_(0, ids.long(), gh_free[4].flatten()[:, None])
    # dO is rounded stochastically in one and to nearest in the other.
    assert (found - wanted).norm() < 0.2 * gh_free[4].norm()
    nearest = mx_attention(q, k, v, q_offsets, k_offsets, recipe=NEAREST, bias=bias)
    (found,) = torch.autograd.grad(nearest, table_, grad)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", [mx_attention, mx_gdpa])
def test_narrow_dtypes_give_their_own_dtype_near_the_truth(operator, dtype):
    tensors = [t.to(dtype) for t in call()[:4]]
    ends = call()[4:]
    options = {"recipe": NEAREST}
    if operator is mx_gdpa:
        options.update(activation="gelu", pre_scale=0.2)
    found = results(operator, *tensors, *ends, **options)
    wanted = results(operator, *[t.double() for t in tensors], *ends, **options)
    for own, true in zip(found, wanted, strict=True):
        assert own.dtype == dtype
        assert snr(own, true) > 35
