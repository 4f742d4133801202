"""SQNR of attention and GDPA on quantised operands: the weights P, outputs and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sqnr_bench import Bench, Row, cosine, decibels
from torch import Tensor

from jagbench.mx import ALONG_COLUMNS, SQUARE, AttentionRecipe
from jagbench.reference import gdpa, jagged_attention
from jagbench.reference.mx_jagged import quantized_weights

#: Queries and head_dim where P is judged; heads and tokens of the whole operators.
QUERIES, DIM = 128, 64
HEADS, TOKENS = 1, 512
NEAREST = AttentionRecipe(gradient_rounding="nearest")
FIXED = AttentionRecipe(weight_scale="fixed", gradient_rounding="nearest")
RECIPES = {
    "default": AttentionRecipe(),
    "gradients to nearest": NEAREST,
    "fixed scale of P": AttentionRecipe(weight_scale="fixed"),
    "values in squares": AttentionRecipe(value_block=SQUARE),
    "sum of quantised P": AttentionRecipe(row_sum="quantized"),
    "floor": AttentionRecipe(scale_mode="floor"),
    "e5m2 gradients": AttentionRecipe(gradient_elem_dtype="e5m2"),
    "e2m1": AttentionRecipe("e2m1", "e2m1"),
}


def weight_scale(bench: Bench) -> Iterator[Row]:
    """P under a scale a block and under 2^-8, by keys; and the output of attention under each."""
    for keys in (64, 512, 4096):
        q, k, v, offsets = _arguments(bench, QUERIES, keys, 1, DIM)
        scores = (q[:, 0].double() @ k[:, 0].double().T) / math.sqrt(DIM)
        p = torch.exp(scores - scores.amax(1, keepdim=True))[None]
        truth = jagged_attention(q.double(), k.double(), v.double(), *offsets)
        for name, recipe in (("block", NEAREST), ("fixed", FIXED)):
            out = bench.get("mx_attention")(q, k, v, *offsets, recipe=recipe)
            yield Row(
                {"keys": keys, "weight_scale": name},
                {
                    "weights_db": decibels(quantized_weights(p, ALONG_COLUMNS, recipe), p),
                    "out_db": decibels(out, truth),
                },
            )


def attention(bench: Bench) -> Iterator[Row]:
    """mx_attention under its default recipe by shape and mask, and by recipe."""
    for tokens, dim, causal in (
        (TOKENS, 64, 0), (TOKENS, 64, 1), (TOKENS, 128, 0), (TOKENS, 128, 1), (1152, 64, 0),
        (1152, 64, 1),
    ):  # fmt: skip
        case = {"recipe": "default", "tokens": tokens, "dim": dim, "causal": causal}
        yield Row({**case}, _attend(bench, RECIPES["default"], tokens, dim, bool(causal)))
    for name, recipe in RECIPES.items():
        if name != "default":
            case = {"recipe": name, "tokens": TOKENS, "dim": 64, "causal": 0}
            yield Row({**case}, _attend(bench, recipe, TOKENS, 64, False))


def gdpa_silu(bench: Bench) -> Iterator[Row]:
    """mx_gdpa with SiLU of scores scaled by 1 / sqrt(head_dim)."""
    for name in ("default", "gradients to nearest", "e5m2 gradients", "floor", "e2m1"):
        for causal in (0, 1) if name == "default" else (0,):
            q, k, v, offsets = _arguments(bench, TOKENS, TOKENS, HEADS, 64)
            options: dict[str, Any] = {
                "activation": "silu", "pre_scale": 1 / math.sqrt(64), "causal": bool(causal),
            }  # fmt: skip
            values = _compare(bench, "mx_gdpa", gdpa, (q, k, v), offsets, options, RECIPES[name])
            case = {"recipe": name, "tokens": TOKENS, "dim": 64, "causal": causal}
            yield Row({**case}, values)


def _arguments(
    bench: Bench, queries: int, keys: int, heads: int, dim: int
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    q = bench.draw("normal", "q", queries, heads, dim)
    k, v = (bench.draw("normal", role, keys, heads, dim) for role in "kv")
    offsets = tuple(torch.tensor([0, n], device=bench.device) for n in (queries, keys))
    return q, k, v, (offsets[0], offsets[1])


def _attend(
    bench: Bench, recipe: AttentionRecipe, tokens: int, dim: int, causal: bool
) -> dict[str, float]:
    q, k, v, offsets = _arguments(bench, tokens, tokens, HEADS, dim)
    options = {"causal": causal}
    return _compare(bench, "mx_attention", jagged_attention, (q, k, v), offsets, options, recipe)


def _compare(
    bench: Bench,
    operator: str,
    plain: Callable[..., Any],
    tensors: tuple[Tensor, ...],
    offsets: tuple[Tensor, Tensor],
    options: dict[str, Any],
    recipe: AttentionRecipe,
) -> dict[str, float]:
    """SQNR and cosine of output and gradients against the plain operator in float64."""
    upstream = bench.draw("normal", "upstream", *tensors[0].shape)
    call = bench.get(operator)
    found = _gradients(lambda *t: call(*t, *offsets, recipe=recipe, **options), tensors, upstream)
    wide = tuple(t.double() for t in tensors)
    truth = _gradients(lambda *t: plain(*t, *offsets, **options), wide, upstream.double())
    values = {}
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, truth, strict=True):
        values |= {f"{name}_db": decibels(a, b), f"{name}_cosine": cosine(a, b)}
    return values


def _gradients(
    call: Callable[..., Tensor], tensors: tuple[Tensor, ...], upstream: Tensor
) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


ATTENTION_MEASURES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "weight_scale": weight_scale,
    "attention": attention,
    "gdpa": gdpa_silu,
}
