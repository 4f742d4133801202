"""The norms and residuals about a GDPA, row by row: what stands before it, what behind, and back.

A program holds whole rows (the features of all heads together), so statistics are made anew from
the row wherever they are needed and none are stored. LayerNorm is centred twice, which makes its
mean exact in float32 however far a row lies from 0.
"""

import triton
import triton.language as tl

from jagbench.impl.kernels.interpreter import round_to, to_float

#: Arguments for whose values no kernel is compiled anew.
PFFN_COUNTS = ["batch", "total"]


@triton.jit
def _layer_norm(x, inside, eps, FEATURES: tl.constexpr):
    """Normalised rows and their factors; x is 0 outside."""
    x = tl.where(inside, x - (tl.sum(x, 1) / FEATURES)[:, None], 0.0)
    x = tl.where(inside, x - (tl.sum(x, 1) / FEATURES)[:, None], 0.0)
    factor = _inverse_root(tl.sum(x * x, 1) / FEATURES, eps)
    return x * factor[:, None], factor


@triton.jit
def _inverse_root(square, eps):
    """1 / sqrt(square + eps), and 1 where that would be 1 / 0 (rows of no one's)."""
    whole = square + eps
    return 1.0 / tl.sqrt(tl.where(whole == 0.0, 1.0, whole))


@triton.jit
def _through(gradient, unit, factor, inside, CENTRED: tl.constexpr, FEATURES: tl.constexpr):
    """Gradient of rows from that of their normalised form."""
    along = tl.sum(gradient * unit, 1) / FEATURES
    inner = gradient - unit * along[:, None]
    if CENTRED:
        inner -= (tl.sum(gradient, 1) / FEATURES)[:, None]
    return tl.where(inside, inner * factor[:, None], 0.0)


@triton.jit
def _rows(offsets, batch, total, FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """First row, offsets inside a contiguous tile, what is read, and what is written."""
    count = tl.load(offsets + batch).to(tl.int32)
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    own = (columns < FEATURES)[None, :]
    at = tl.arange(0, ROWS)[:, None] * FEATURES + columns[None, :]
    return first.to(tl.int64), at, (rows < count)[:, None] & own, (rows < total)[:, None] & own


@triton.jit
def _load(base, first, at, inside, stride):
    return to_float(tl.load(base + first * stride + at, mask=inside, other=0.0))


@triton.jit(do_not_specialize=PFFN_COUNTS)
def pffn_enter_kernel(
    q, ln, offsets, batch, total,
    eps, FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ln = LayerNorm(q), rounded once; both contiguous `[total, FEATURES]`, padding rows 0."""
    first, at, inside, written = _rows(offsets, batch, total, FEATURES, ROWS, BLOCK)
    unit, _ = _layer_norm(_load(q, first, at, inside, FEATURES), inside, eps, FEATURES)
    tl.store(ln + first * FEATURES + at, round_to(unit, ln.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=PFFN_COUNTS)
def pffn_leave_kernel(
    attended, q, out, offsets, batch, total,
    eps, FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = RMSNorm(attended + LayerNorm(q)) + q, fp32 between and rounded once."""
    first, at, inside, written = _rows(offsets, batch, total, FEATURES, ROWS, BLOCK)
    rows = _load(q, first, at, inside, FEATURES)
    unit, _ = _layer_norm(rows, inside, eps, FEATURES)
    inner = unit + _load(attended, first, at, inside, FEATURES)
    factor = _inverse_root(tl.sum(inner * inner, 1) / FEATURES, eps)
    found = tl.where(inside, inner * factor[:, None] + rows, 0.0)
    tl.store(out + first * FEATURES + at, round_to(found, out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=PFFN_COUNTS)
def pffn_inner_gradient_kernel(
    d_out, attended, q, d_inner, offsets, batch, total,
    eps, FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of attended + LayerNorm(q), which both have in full."""
    first, at, inside, written = _rows(offsets, batch, total, FEATURES, ROWS, BLOCK)
    unit, _ = _layer_norm(_load(q, first, at, inside, FEATURES), inside, eps, FEATURES)
    inner = unit + _load(attended, first, at, inside, FEATURES)
    factor = _inverse_root(tl.sum(inner * inner, 1) / FEATURES, eps)
    upstream = _load(d_out, first, at, inside, FEATURES)
    found = _through(upstream, inner * factor[:, None], factor, inside, False, FEATURES)
    tl.store(
        d_inner + first * FEATURES + at, round_to(found, d_inner.dtype.element_ty), mask=written
    )


@triton.jit(do_not_specialize=PFFN_COUNTS)
def pffn_query_gradient_kernel(
    d_out, attended, q, d_ln, dq, offsets, batch, total,
    eps, FEATURES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dq: what comes back through LayerNorm, from the attention (d_ln) and its residual, and d_out.

    The residual's part is made anew in fp32, so that dq is rounded once.
    """
    first, at, inside, written = _rows(offsets, batch, total, FEATURES, ROWS, BLOCK)
    unit, q_factor = _layer_norm(_load(q, first, at, inside, FEATURES), inside, eps, FEATURES)
    inner = unit + _load(attended, first, at, inside, FEATURES)
    factor = _inverse_root(tl.sum(inner * inner, 1) / FEATURES, eps)
    upstream = _load(d_out, first, at, inside, FEATURES)
    flow = _through(upstream, inner * factor[:, None], factor, inside, False, FEATURES)
    flow += _load(d_ln, first, at, inside, FEATURES)
    found = upstream + _through(flow, unit, q_factor, inside, True, FEATURES)
    tl.store(dq + first * FEATURES + at, round_to(found, dq.dtype.element_ty), mask=written)
