"""A right implementation of every operator, made of exchangeable steps.

One loop over sequences with explicit backward formulas (spec 3.4 and 4.1), independent of the
reference. Work is done in float32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from jagbench.bias import BucketedBias
from jagbench.reference import mx_attention, mx_gdpa, mx_linear, mx_matmul
from wrong import norm_quantising, norming, projecting, quantising, sandwich, turns
from wrong import steps as step
from wrong.call import Call, Tile, Window, check
from wrong.steps import Bounds


@dataclass(frozen=True)
class Steps(quantising.Quantiser, norm_quantising.NormQuantiser, projecting.Projector):
    """The steps of an implementation; its methods are the operators.

    finish: last touch to an output or gradient, by name. upstream: first look at the gradient of
    `out`. before, after: run about the forward. backward_mask: mask of the backward, if another.
    """

    __version__: ClassVar[str] = "planted"

    check: Callable[[Call], None] = check
    bounds: Callable[[Call], list[Bounds]] = step.bounds
    read: Callable[[Tensor, int, int], Tensor] = step.read
    repeat: Callable[[Tensor, int], Tensor] = step.repeat
    place: Callable[[Call, Bounds], Call] = step.stay
    mask: Callable[[Call, int, int], Tensor] = step.mask
    backward_mask: Callable[[Call, int, int], Tensor] | None = None
    score: Callable[[Call, Tensor, Tensor], Tensor] = step.score
    add_bias: Callable[[Call, Tensor, int], Tensor] = step.add_bias
    weigh: Callable[[Call, Tile], tuple[Tensor, Tensor]] = step.weigh
    mix: Callable[[Tensor, Tensor], Tensor] = step.mix
    slope: Callable[[Call, Tile, Tensor, Tensor], Tensor] = step.slope
    reduce_group: Callable[[Tensor, int], Tensor] = step.reduce_group
    combine: Callable[[Tensor, slice, Tensor], None] = step.combine
    allocate: Callable[[Sequence[int], Tensor, torch.dtype], Tensor] = step.allocate
    allocate_gradient: Callable[[Sequence[int], Tensor, torch.dtype], Tensor] = step.allocate
    before: Callable[[Call], None] = step.no_action
    after: Callable[[Call], None] = step.no_action
    finish: Callable[[Call, str, Tensor], Tensor] = step.keep
    upstream: Callable[[Call, str, Tensor], Tensor] = step.keep
    check_packed: Callable[[Tensor, Tensor, turns.Table | None], None] = turns.check_packed
    cut: Callable[[Sequence[int], int], list[int]] = turns.cut
    angles: Callable[[turns.Table, Sequence[int]], Tensor] = turns.angles
    turn: Callable[[Tensor, turns.Rotation], Tensor] = turns.turn
    turn_back: Callable[[Tensor, turns.Rotation], Tensor] = turns.turn_back
    enter: Callable[[Tensor, float], Tensor] = sandwich.enter
    attend_to: Callable[[Tensor, Tensor], Tensor] = sandwich.attend_to
    leave: Callable[[Tensor, Tensor, Tensor, float], Tensor] = sandwich.leave
    norm_heads: Callable[[str, Tensor, float], Tensor] = sandwich.norm_heads
    check_norm: Callable[[norming.Layer, Tensor | None], int] = norming.check
    measure: Callable[[norming.Layer, Tensor], norming.Statistics] = norming.measure
    normalise: Callable[[norming.Layer, Tensor, norming.Statistics], Tensor] = norming.normalise
    project: Callable[[norming.Layer, Tensor], Tensor] = norming.project
    through_norm: Callable[[norming.Layer, Tensor, Tensor, norming.Statistics], Tensor] = (
        norming.through_norm
    )
    parameter_gradients: Callable[[norming.Layer, Tensor, Tensor, Tensor], dict[str, Tensor]] = (
        norming.parameter_gradients
    )
    check_quantize: Callable[[Any, Tensor | None, quantising.Job, str], None] = quantising.check
    reach: Callable[[quantising.Job, list[int], int], tuple[int, int]] = quantising.reach
    scale_row: Callable[[quantising.Job, list[int], int], int] = quantising.scale_row
    largest: Callable[[quantising.Job, Tensor], Tensor] = quantising.largest
    scale_of_blocks: Callable[[quantising.Job, Tensor], Tensor] = quantising.scale
    number: Callable[[Tensor, list[int]], Tensor] = quantising.number
    draw: Callable[[int, Tensor, int], Tensor] = quantising.draw
    round_places: Callable[[Tensor, Tensor | None], Tensor] = quantising.nearest
    saturate: Callable[[quantising.Job, Tensor], Tensor] = quantising.saturate
    encode: Callable[[quantising.Job, Tensor], Tensor] = quantising.encode
    dequantise: Callable[[quantising.Job, Tensor, Tensor], Tensor] = quantising.dequantise
    hand_over: Callable[[norming.Layer, Tensor], Tensor] = norm_quantising.affine
    project_rows: Callable[[Tensor, Tensor, Tensor | None], Tensor] = projecting.product
    view_heads: Callable[[Tensor, int], Tensor] = projecting.by_heads
    mx_linear: Callable[..., Tensor] = mx_linear
    mx_matmul: Callable[..., Tensor] = mx_matmul
    mx_attention: Callable[..., Any] = mx_attention
    mx_gdpa: Callable[..., Tensor] = mx_gdpa

    def jagged_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor | None,
        k_offsets: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        align: str = "end",
        window: Window | None = None,
        prefix: int = 0,
        last_full: int = 0,
        bias: Tensor | BucketedBias | None = None,
        max_q_len: int | None = None,
        max_k_len: int | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """softmax(scale q k^T + bias) v by sequence; `out` or `(out, lse)`."""
        table, ids = (
            (bias.table, bias.bucket_ids) if isinstance(bias, BucketedBias) else (bias, None)
        )
        call = Call(
            softmax=True,
            q=q,
            k=k,
            v=v,
            q_offsets=q_offsets,
            k_offsets=k_offsets,
            pre=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
            causal=causal,
            align=align,
            window=window,
            prefix=prefix,
            last_full=last_full,
            bias=table,
            bucket_ids=ids,
            max_q_len=max_q_len,
            max_k_len=max_k_len,
            deterministic=deterministic,
        )
        out, lse = self._call(call)
        return (out, lse) if return_lse else out

    def gdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor | None,
        k_offsets: Tensor,
        *,
        activation: str | Sequence[str],
        pre_scale: float = 1.0,
        post_scale: float = 1.0,
        causal: bool = False,
        align: str = "end",
        window: Window | None = None,
        prefix: int = 0,
        last_full: int = 0,
        max_q_len: int | None = None,
        max_k_len: int | None = None,
        deterministic: bool = False,
    ) -> Any:
        """post_scale act(pre_scale q k^T) v by sequence."""
        one = isinstance(activation, str)
        call = Call(
            softmax=False,
            q=q,
            k=k,
            v=v,
            q_offsets=q_offsets,
            k_offsets=k_offsets,
            pre=pre_scale,
            post=post_scale,
            activations=(str(activation),) * q.shape[1] if one else tuple(activation),
            causal=causal,
            align=align,
            window=window,
            prefix=prefix,
            last_full=last_full,
            max_q_len=max_q_len,
            max_k_len=max_k_len,
            deterministic=deterministic,
        )
        return self._call(call)[0]

    def block_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        *,
        block_size: int = 64,
        scale: float | None = None,
        rotary: turns.Table | None = None,
        rotate_values: bool = True,
        qk_norm_eps: float | None = None,
    ) -> Any:
        """Attention over sequences that are cut at their blocks, after a norm and a rotation."""
        if qk_norm_eps is not None and not qk_norm_eps >= 0:
            raise ValueError(f"qk_norm_eps {qk_norm_eps}")
        if block_size < 1:
            raise ValueError(f"block_size {block_size}")
        turned = {"q": True, "k": True, "v": rotate_values}
        given = {"q": q, "k": k, "v": v}
        for name, x in given.items():
            if x.shape[0] != q.shape[0] or x.dtype != q.dtype:
                raise ValueError(f"{name}: {x.shape[0]} rows of {x.dtype}, q {q.shape[0]}")
            self.check_packed(x, offsets, rotary if turned[name] else None)
        bounds, wide = offsets.tolist(), torch.promote_types(q.dtype, torch.float32)
        values = {name: x.to(wide) for name, x in given.items()}
        if qk_norm_eps is not None:
            for name, x in values.items():
                used = sandwich.in_use(x, offsets)
                values[name] = self.norm_heads(name, used, qk_norm_eps)
        if rotary is not None:
            angles = self.angles(rotary, bounds)
            for name in [n for n in values if turned[n]]:
                by = turns.Rotation(angles, True, 1, bounds[-1], name)
                values[name] = self._turned(values[name], by)
        ends = torch.tensor(self.cut(bounds, block_size), device=q.device)
        pre = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        call = Call(softmax=True, **values, q_offsets=ends, k_offsets=ends, pre=pre)
        return self._call(call)[0].to(q.dtype)

    def rotary(
        self,
        x: Tensor,
        offsets: Tensor,
        table: turns.Table,
        *,
        interleaved: bool = True,
        inverse: bool = False,
    ) -> Any:
        """Every pair of x turned by its row's angle."""
        self.check_packed(x, offsets, table)
        bounds = offsets.tolist()
        by = turns.Rotation(
            self.angles(table, bounds), interleaved, -1 if inverse else 1, bounds[-1], "x"
        )
        return self._turned(x.to(torch.promote_types(x.dtype, torch.float32)), by).to(x.dtype)

    def norm_linear(
        self,
        x: Tensor,
        weight: Tensor,
        offsets: Tensor | None,
        *,
        norm: str,
        eps: float,
        bias: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
    ) -> Any:
        """norm(x) weight^T + bias of every row before the last offset."""
        layer = norming.Layer(norm, eps, x, weight, bias, norm_weight, norm_bias)
        total = self.check_norm(layer, offsets)
        return norming.NormLinear.apply(  # type: ignore[no-untyped-call]
            self, layer, total, x, weight, bias, norm_weight, norm_bias
        )

    def pffn_block(
        self, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *,
        eps: float, **options: Any,
    ) -> Any:  # fmt: skip
        """A norm, gdpa with a residual, a norm with a residual."""
        sandwich.check(q, k, v, q_offsets, eps)
        kind = torch.promote_types(q.dtype, torch.float32)
        wide, keys, values = (x.to(kind) for x in (sandwich.in_use(q, q_offsets), k, v))
        inside = self.enter(wide, eps)
        attended = self.gdpa(self.attend_to(wide, inside), keys, values, q_offsets, k_offsets,
                             **options)  # fmt: skip
        out = self.leave(attended, inside, wide, eps)
        return sandwich.in_use(out, q_offsets).to(q.dtype)

    def _turned(self, x: Tensor, by: turns.Rotation) -> Tensor:
        turned: Tensor = turns.Turned.apply(  # type: ignore[no-untyped-call]
            self.turn, self.turn_back, by, x
        )
        return turned

    def _call(self, call: Call) -> tuple[Tensor, Tensor]:
        self.check(call)
        self.before(call)
        out, lse = _Attention.apply(  # type: ignore[no-untyped-call]
            self, call, call.q, call.k, call.v, call.bias
        )
        self.after(call)
        return out, lse


def _tile(steps: Steps, call: Call, sequence: int, where: Bounds, backward: bool) -> Tile:
    q0, q1, k0, k1 = where
    repeats = call.q.shape[1] // call.k.shape[1]
    q = steps.read(call.q, q0, q1)
    k = steps.repeat(steps.read(call.k, k0, k1), repeats)
    v = steps.repeat(steps.read(call.v, k0, k1), repeats)
    make = steps.backward_mask if backward and steps.backward_mask is not None else steps.mask
    seen = make(steps.place(call, where), q1 - q0, k1 - k0)
    # Rows that take part in no visible pair are dropped: 0 times NaN would be NaN.
    q = q.masked_fill(~seen.any(1)[:, None], 0.0)
    k, v = (x.masked_fill(~seen.any(0)[:, None], 0.0) for x in (k, v))
    first_pair = call.pair_starts[sequence] if call.bias is not None else 0
    scores = steps.add_bias(call, steps.score(call, q, k), first_pair)
    return Tile(q, k, v, scores, seen)


class _Attention(torch.autograd.Function):
    """Both operators; scores are recomputed in the backward."""

    @staticmethod
    def forward(
        ctx: Any, steps: Steps, call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.steps, ctx.call = steps, call
        dense = call.q_offsets is None
        rows = (call.batch, call.q.shape[0]) if dense else (call.q.shape[0],)
        heads = call.q.shape[1]
        out = steps.allocate((*rows, heads, call.v.shape[2]), call.q, call.q.dtype)
        exact = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        lse = torch.zeros((*rows, heads), dtype=exact, device=call.q.device)
        for sequence, where in enumerate(steps.bounds(call)):
            tile = _tile(steps, call, sequence, where, backward=False)
            weights, part = steps.weigh(call, tile)
            at: Any = sequence if dense else slice(where[0], where[1])
            out[at] = steps.mix(weights, tile.v).transpose(0, 1).to(out.dtype)
            lse[at] = part.transpose(0, 1).to(lse.dtype)
        lse = steps.finish(call, "lse", lse)
        ctx.mark_non_differentiable(lse)
        return steps.finish(call, "out", out), lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        steps, call = ctx.steps, ctx.call
        return (None, None, *_backward(steps, call, steps.upstream(call, "upstream", gradients[0])))


def _backward(steps: Steps, call: Call, upstream: Tensor) -> tuple[Tensor | None, ...]:
    wide = torch.promote_types(call.q.dtype, torch.float32)
    dq, dk, dv = (steps.allocate_gradient(t.shape, t, wide) for t in (call.q, call.k, call.v))
    dbias = None if call.bias is None else torch.zeros_like(call.bias, dtype=wide)
    kv_heads = call.k.shape[1]
    for sequence, where in enumerate(steps.bounds(call)):
        q0, q1, k0, k1 = where
        tile = _tile(steps, call, sequence, where, backward=True)
        weights, _ = steps.weigh(call, tile)
        dense = call.q_offsets is None
        dout = upstream[sequence] if dense else upstream[q0:q1]
        dout = dout.to(wide).transpose(0, 1).clone(memory_format=torch.contiguous_format)
        dscores = steps.slope(call, tile, weights, dout @ tile.v.mT)
        part = call.pre * (dscores @ tile.k).transpose(0, 1)
        if dense:
            steps.combine(dq, slice(q0, q1), part)
        else:
            dq[q0:q1] = part
        dk[k0:k1] = steps.reduce_group(call.pre * (dscores.mT @ tile.q), kv_heads)
        dv[k0:k1] = steps.reduce_group(weights.mT @ dout, kv_heads)
        if dbias is not None:
            _spread_bias(call, dbias, dscores, call.pair_starts[sequence])
    done = (
        steps.finish(call, "grad q", dq.to(call.q.dtype)),
        steps.finish(call, "grad k", dk.to(call.k.dtype)),
        steps.finish(call, "grad v", dv.to(call.v.dtype)),
    )
    if dbias is None or call.bias is None:
        return (*done, None)
    return (*done, steps.finish(call, "grad bias", dbias.to(call.bias.dtype)))


def _spread_bias(call: Call, dbias: Tensor, dscores: Tensor, first_pair: int) -> None:
    """Add the gradient of this sequence's scores to that of the bias or of its table."""
    heads, m, n = dscores.shape
    flat = dscores.permute(1, 2, 0).reshape(m * n, heads)
    if dbias.shape[1] == 1:
        flat = flat.sum(1, keepdim=True)
    rows = slice(first_pair, first_pair + m * n)
    if call.bucket_ids is None:
        dbias[rows] += flat
    else:
        dbias.index_add_(0, call.bucket_ids[rows].long(), flat)


#: The right implementation.
RIGHT = Steps()
