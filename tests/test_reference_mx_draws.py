"""Which random bits go where in the gradients of the MX layer, attention and GDPA.

A kernel that takes the same bits gives the same codes, so this is part of the truth.
"""

import math

import pytest
import torch
from mx_attention_oracle import call, results
from mx_oracles import normal, quantized, scale_code

from jagbench.mx import SQUARE, AttentionRecipe, LinearRecipe, Stream
from jagbench.reference.draws import draws
from jagbench.reference.hadamard import random_hadamard
from jagbench.reference.mx_attention import mx_attention
from jagbench.reference.mx_formats import decode, encode
from jagbench.reference.mx_gdpa import mx_gdpa
from jagbench.reference.mx_matmul import mx_linear

SEED = 2**33 + 5


def stochastic(x, block, rows, stream):
    """What x `[rows, columns]` becomes under the draws of its rows in a stream."""
    scales = torch.zeros(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            own = (slice(i, i + block[0]), slice(j, j + block[1]))
            scales[own] = 2.0 ** (scale_code(x[own].abs().max().item(), "e4m3", "rceil") - 127)
    return (
        decode(encode(x / scales, "e4m3", draws(SEED, rows, x.shape[1], stream)), "e4m3") * scales
    )


@pytest.mark.parametrize("hadamard", [None, 32])
def test_both_uses_of_the_gradient_of_a_layer_have_draws_of_their_own(hadamard):
    x, weight, grad = normal(40, 33, seed=1), normal(35, 33, seed=2), normal(40, 35, seed=3)
    recipe = LinearRecipe(weight_gradient="mx", hadamard=hadamard, seed=SEED)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    dx, dw = torch.autograd.grad(mx_linear(*leaves, recipe=recipe), leaves, grad)
    x, weight = x.detach(), weight.detach()
    own = stochastic(grad, (1, 32), torch.arange(40), Stream.GRADIENT_FOR_INPUT)
    torch.testing.assert_close(dx, own @ quantized(weight, "e4m3", SQUARE))
    left, right = (torch.cat([t, t.new_zeros(24, t.shape[1])]) for t in (grad, x))
    if hadamard:
        left, right = (random_hadamard(t, seed=SEED, dim=0) for t in (left, right))
    own = stochastic(left, (32, 1), torch.arange(64), Stream.GRADIENT_FOR_WEIGHT)
    torch.testing.assert_close(dw, own.T @ quantized(right, "e4m3", (32, 1)))


@pytest.mark.parametrize("operator", [mx_attention, mx_gdpa])
def test_gradients_of_output_and_scores_have_draws_by_query_head_and_stream(operator):
    inputs = q, k, v, grad, _, _ = call([3, 40], [5, 35])
    options = {"recipe": AttentionRecipe(seed=SEED)}
    if operator is mx_gdpa:
        options.update(activation="identity", pre_scale=1 / math.sqrt(40))
    out, dq, dk, dv = results(operator, *inputs, **options)
    true_dk, true_dv = torch.zeros(35, 40).double(), torch.zeros(35, 36).double()
    for head in range(2):
        # The second sequence: queries 3 to 43, keys 5 to 40. A row is a query's place in the batch
        # times the number of heads, plus the head; a column of dS counts keys from the sequence's
        # start.
        rows = torch.arange(3, 43) * 2 + head
        qh, kh = quantized(q[3:, head], "e4m3", SQUARE), quantized(k[5:, 0], "e4m3", SQUARE)
        vt = quantized(v[5:, 0], "e4m3", (1, 32))
        gh = stochastic(grad[3:, head], SQUARE, rows, Stream.GRADIENT_OF_OUTPUT)
        scores = qh @ kh.T / math.sqrt(40)
        if operator is mx_attention:
            p = torch.softmax(scores, 1)
            ds = p * (gh @ vt.T - (grad[3:, head] * out[3:, head]).sum(1, keepdim=True))
        else:
            p, ds = scores, gh @ vt.T
        dsh = stochastic(ds, SQUARE, rows, Stream.GRADIENT_OF_SCORES)
        torch.testing.assert_close(dq[3:, head], dsh @ kh / math.sqrt(40))
        true_dk += dsh.T @ qh / math.sqrt(40)
        true_dv += quantized(p, "e4m3", (32, 1)).T @ gh
    torch.testing.assert_close(dk[5:, 0], true_dk)
    torch.testing.assert_close(dv[5:, 0], true_dv)
