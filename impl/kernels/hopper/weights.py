"""Scores become weights: the online softmax or an activation, masked at edges; in Gluon.

Source of the online softmax: arXiv 2409.15373.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jagbench.impl.kernels.activations import (
    FAST_GELU,
    FAST_GELU_BF16,
    FAST_SILU,
    SOFTMAX,
    activate,
)

_SQRT_2_OVER_PI: gl.constexpr = gl.constexpr(0.7978845608028654)
_SQRT_2_OVER_PI_BF16: gl.constexpr = gl.constexpr(0.796875)
_CUBIC: gl.constexpr = gl.constexpr(0.044715)


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _weigh(s, scale, ACTIVATION: gl.constexpr):
    """act(scale s). The fast forms are those of `activations`, the scale folded into constants."""
    if ACTIVATION == FAST_SILU:
        half = s * (0.5 * scale)
        p = half * _tanh(half) + half
    elif (ACTIVATION == FAST_GELU) | (ACTIVATION == FAST_GELU_BF16):
        SLOPE: gl.constexpr = _SQRT_2_OVER_PI if ACTIVATION == FAST_GELU else _SQRT_2_OVER_PI_BF16
        linear = SLOPE * scale
        cubic = linear * (_CUBIC * scale * scale)
        half = s * (0.5 * scale)
        p = half * _tanh(s * (s * s * cubic + linear)) + half
    else:
        p = activate(s * scale, ACTIVATION)
    return p


@gluon.jit
def _hide(
    x, FILL: gl.constexpr, q_row, column, k_length, shift, call,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """x with FILL for the keys, from `column` on, that the rows from q_row on do not see."""
    SL: gl.constexpr = x.type.layout
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, SL))[None, :]
    rows = (q_row + shift - column) + gl.arange(0, x.shape[0], gl.SliceLayout(1, SL))
    if HAS_RIGHT:
        seen = columns < gl.minimum(rows + (call.right + 1), k_length - column)[:, None]
    else:
        seen = columns < k_length - column
    if HAS_LEFT:
        seen = seen & (columns >= (rows - call.left)[:, None])
    return gl.where(seen, x, FILL)


@gluon.jit
def first_weights(
    s, q_row, column, k_length, shift, call, ACTIVATION: gl.constexpr,
    SCALE_FIRST: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Weights, running maximum (in units of log 2) and running sum of an item's first key tile."""
    if ACTIVATION == SOFTMAX:
        factor = call.scale
        if SCALE_FIRST:
            s = s * call.scale
            factor = 1.0
        s = _hide(s, float("-inf"), q_row, column, k_length, shift, call, HAS_LEFT, HAS_RIGHT)
        m = gl.max(s, 1) * factor
        # A row that has seen no key keeps -inf, which must not be subtracted from itself.
        base = gl.where(m == float("-inf"), 0.0, m)
        p = gl.exp2(s * factor - base[:, None])
        l = gl.sum(p, 1)
    else:
        p = _weigh(s, call.scale, ACTIVATION)
        if HAS_LEFT or HAS_RIGHT:
            p = _hide(p, 0.0, q_row, column, k_length, shift, call, HAS_LEFT, HAS_RIGHT)
        m = gl.full([s.shape[0]], 0.0, gl.float32, gl.SliceLayout(1, s.type.layout))
        l = m
    return p, m, l


@gluon.jit
def next_weights(
    s, m, l, q_row, column, k_length, shift, call, ACTIVATION: gl.constexpr,
    SCALE_FIRST: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Weights, running maximum and sum after a further key tile, and the factor for old sums."""
    WINDOW: gl.constexpr = HAS_LEFT or HAS_RIGHT
    fade = m
    partial = column < 0
    if HAS_RIGHT:
        partial = column + s.shape[1] > q_row + shift + call.right + 1
    if HAS_LEFT:
        partial = partial | (column < q_row + shift + (s.shape[0] - 1) - call.left)
    if ACTIVATION == SOFTMAX:
        factor = call.scale
        if SCALE_FIRST:
            s = s * call.scale
            factor = 1.0
        if WINDOW:
            if partial:
                s = _hide(
                    s, float("-inf"), q_row, column, k_length, shift, call,
                    HAS_LEFT, HAS_RIGHT,
                )  # fmt: skip
        m_new = gl.maximum(m, gl.max(s, 1) * factor)
        base = m_new
        if WINDOW:
            base = gl.where(m_new == float("-inf"), 0.0, m_new)
        fade = gl.exp2(m - base)
        p = gl.exp2(s * factor - base[:, None])
        l = l * fade + gl.sum(p, 1)
        m = m_new
    else:
        p = _weigh(s, call.scale, ACTIVATION)
        if WINDOW:
            if partial:
                p = _hide(p, 0.0, q_row, column, k_length, shift, call, HAS_LEFT, HAS_RIGHT)
    return p, m, l, fade
