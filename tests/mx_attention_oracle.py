"""Second oracle of MXFP8 attention and GDPA: single heads, quantised by search. No `reference/`
code but the activations and the parser of windows.
"""

from __future__ import annotations

import math

import torch
from mx_oracles import nearest_codes, normal, quantized, table
from oracles import offsets_of

from jagbench.mx import ALONG_ROWS, SQUARE
from jagbench.pairs import visible_range
from jagbench.reference.activations import activation as function
from jagbench.reference.activations import derivative

LENGTHS = ([40, 0, 33, 5], [35, 7, 70, 0])


def call(q_lengths=LENGTHS[0], k_lengths=LENGTHS[1], heads=2, kv_heads=1, d=40, dv=36, seed=0):
    """q, k, v, dO, and both offsets."""
    rows, keys = sum(q_lengths), sum(k_lengths)
    shapes = ((rows, heads, d), (keys, kv_heads, d), (keys, kv_heads, dv), (rows, heads, dv))
    tensors = [normal(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    return (*tensors, offsets_of(q_lengths), offsets_of(k_lengths))


def results(operator, q, k, v, grad, q_offsets, k_offsets, **options):
    """Out, dq, dk, dv."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = operator(*leaves, q_offsets, k_offsets, **options)
    # A batch without sequences never touches its keys.
    grads = torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def seen_of(m, n, causal=False, window=None, align="end"):
    left, right = visible_range(causal, window)
    shift = n - m if align == "end" else 0
    rows = []
    for i in range(m):
        p = i + shift
        rows.append(
            [
                (left is None or j >= p - left) and (right is None or j <= p + right)
                for j in range(n)
            ]
        )
    return torch.tensor(rows, dtype=torch.bool).view(m, n)


def weights_of(p, block, recipe):
    if recipe.weight_scale == "fixed":
        return table(recipe.elem_dtype)[nearest_codes(p * 256, recipe.elem_dtype).long()] / 256
    return quantized(p, recipe.elem_dtype, block, recipe.scale_mode)


def one_head(q, k, v, grad, seen, recipe, weigh):
    """Out, dq, dk, dv of one head of one sequence; weigh(X) is (P, of dP: dX, factor, row sums)."""
    form, mode = recipe.elem_dtype, recipe.scale_mode
    other = (1, 32) if recipe.value_block == ALONG_ROWS else SQUARE
    qh, kh = quantized(q, form, SQUARE, mode), quantized(k, form, SQUARE, mode)
    vh, vt = quantized(v, form, recipe.value_block, mode), quantized(v, form, other, mode)
    grad = torch.where(seen.any(1)[:, None], grad, 0.0)
    gh = quantized(grad, recipe.gradient_elem_dtype, SQUARE, mode)
    return weigh(qh, kh, vh, gh, gh @ vt.T)


def softmax_head(q, k, v, grad, seen, recipe, scale, bias=0.0):
    def weigh(qh, kh, vh, gh, dp):
        s = torch.where(seen, scale * qh @ kh.T + bias, -math.inf)
        lines = []
        for row in s:
            top = max([x for x in row.tolist() if x > -math.inf], default=0.0)
            lines.append(torch.exp(row - top))
        p = torch.stack(lines)
        held = weights_of(p, (1, 32), recipe)
        total = (held if recipe.row_sum == "quantized" else p).sum(1, keepdim=True)
        safe = torch.where(total > 0, total, 1.0)
        out = held @ vh / safe
        p = p / safe
        ds = p * (dp - (grad * out).sum(1, keepdim=True))
        dsh = quantized(ds, recipe.gradient_elem_dtype, SQUARE, recipe.scale_mode)
        dv = weights_of(p, (32, 1), recipe).T @ gh
        return out, scale * dsh @ kh, scale * dsh.T @ qh, dv, ds

    return one_head(q, k, v, grad, seen, recipe, weigh)


def gdpa_head(q, k, v, grad, seen, recipe, name, pre, post):
    def weigh(qh, kh, vh, gh, dp):
        x = torch.where(seen, pre * qh @ kh.T, 0.0)
        p = torch.where(seen, function(name)(x), 0.0)
        dx = torch.where(seen, derivative(name)(x) * dp, 0.0)
        dxh = quantized(dx, recipe.gradient_elem_dtype, SQUARE, recipe.scale_mode)
        out = post * weights_of(p, (1, 32), recipe) @ vh
        dv = post * weights_of(p, (32, 1), recipe).T @ gh
        return out, pre * post * dxh @ kh, pre * post * dxh.T @ qh, dv

    return one_head(q, k, v, grad, seen, recipe, weigh)


def all_heads(head, q, k, v, grad, q_offsets, k_offsets, mask):
    """Sum over sequences and heads of what one head gives."""
    out, dq, dk, dv = (torch.zeros_like(t) for t in (grad, q, k, v))
    starts, keys = q_offsets.tolist(), k_offsets.tolist()
    group = q.shape[1] // k.shape[1]
    for a, b, c, d in zip(starts[:-1], starts[1:], keys[:-1], keys[1:], strict=True):
        if a == b or c == d:
            continue
        seen = seen_of(b - a, d - c, **mask)
        for h in range(q.shape[1]):
            g = h // group
            own = head(q[a:b, h], k[c:d, g], v[c:d, g], grad[a:b, h], seen)
            out[a:b, h], dq[a:b, h] = own[0], own[1]
            dk[c:d, g] += own[2]
            dv[c:d, g] += own[3]
    return out, dq, dk, dv
