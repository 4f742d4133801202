"""Activations of GDPA on fp32 blocks, with the derivative of the forward that is computed.

Value and derivative share their one transcendental. SFU operations an element: 2 (exp2 and a
reciprocal) for gelu_tanh, silu and the Taylor forms' fallback; 1 (the hardware tanh) for the fast
forms; erf and exp2 for gelu; none for the rest. The fast forms use NVIDIA's tanh.approx.f32, whose
relative error is at most 2^-10.987 (CUDA C++ Programming Guide), so act(x) is within 2^-11.987 |x|;
elsewhere, and in the interpreter, they compute the same functions in full fp32. Finite for every
|x| up to 1e18. The other forms are within a few fp32 roundings of max(1, |x|), and so are their
derivatives (of max(1, |act'(x)|)).

Definitions: `jagbench.reference.activations`, whose constants are repeated here on purpose.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jagbench.impl.kernels.interpreter import INTERPRET

#: Whether the fast forms use NVIDIA's tanh. Not asked of a device: ahead-of-time builds have none.
HARDWARE_TANH = tl.constexpr(
    not INTERPRET.value
    and torch.version.hip is None
    and getattr(torch.version, "xpu", None) is None
)

IDENTITY = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
FAST_GELU = tl.constexpr(3)
LEAKY_RELU = tl.constexpr(4)
RELU = tl.constexpr(5)
FAST_GELU_BF16 = tl.constexpr(6)
SILU = tl.constexpr(7)
FAST_SILU = tl.constexpr(8)
HARDSWISH = tl.constexpr(9)
RELU_SQUARED = tl.constexpr(10)
GELU_TAYLOR6 = tl.constexpr(11)
GELU_TAYLOR10 = tl.constexpr(12)

#: Ids that are no single activation: softmax (backward kernels), and one id a head from a table.
SOFTMAX = tl.constexpr(-1)
PER_HEAD = tl.constexpr(-2)

#: Name of an activation -> its id in device code.
ACTIVATION_IDS: dict[str, int] = {
    "identity": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "fast_gelu": 3,
    "leaky_relu": 4,
    "relu": 5,
    "fast_gelu_bf16": 6,
    "silu": 7,
    "fast_silu": 8,
    "hardswish": 9,
    "relu_squared": 10,
    "gelu_taylor6": 11,
    "gelu_taylor10": 12,
}

ALL_ACTIVATIONS = tl.constexpr((1 << len(ACTIVATION_IDS)) - 1)
_COUNT = tl.constexpr(len(ACTIVATION_IDS))

_NO = tl.constexpr(False)
_NAN = tl.constexpr(tl.PropagateNan.ALL)

_LOG2E = tl.constexpr(1.4426950408889634)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_SQRT_2_OVER_PI_BF16 = tl.constexpr(0.796875)
_CUBIC = tl.constexpr(0.044715)
_LEAKY_SLOPE = tl.constexpr(0.01)

_C2 = tl.constexpr(0.39894228)
_C4 = tl.constexpr(-0.06649038)
_C6 = tl.constexpr(0.00997356)
_C8 = tl.constexpr(-0.00118733)
_C10 = tl.constexpr(0.00011718)
_TAYLOR6_BOUND = tl.constexpr(1.25)
_TAYLOR10_BOUND = tl.constexpr(1.25)


def activation_set(names: tuple[str, ...]) -> int:
    """Bit set of activations, for AMONG of the dynamic forms: only these are compiled in."""
    return sum({1 << ACTIVATION_IDS[name] for name in names})


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x); 0 or 1 where the exponential overflows or vanishes, never inf / inf."""
    return 1.0 / (1.0 + tl.exp2(x * -_LOG2E))


@triton.jit
def _fast_sigmoid(x):
    """Sigmoid by one hardware tanh, (1 + tanh(x / 2)) / 2, where there is one."""
    if HARDWARE_TANH:
        half = 0.5 * x
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1
        )
        gate = 0.5 * tanh + 0.5
    else:
        gate = _sigmoid(x)
    return gate


@triton.jit
def _tanh_gelu(x, SCALE: tl.constexpr, FAST: tl.constexpr):
    """(y, gate): x (1 + tanh u) / 2 = x sigmoid(2u), u = SCALE (x + 0.044715 x^3)."""
    inner = x * (2.0 * SCALE + (2.0 * SCALE * _CUBIC) * (x * x))
    gate = _fast_sigmoid(inner) if FAST else _sigmoid(inner)
    return x * gate, gate


@triton.jit
def _tanh_gelu_and_derivative(x, SCALE: tl.constexpr, FAST: tl.constexpr):
    y, gate = _tanh_gelu(x, SCALE, FAST)
    slope = 2.0 * SCALE + (6.0 * SCALE * _CUBIC) * (x * x)
    return y, gate + y * (1.0 - gate) * slope


@triton.jit
def _taylor(x, DEGREE: tl.constexpr):
    """Maclaurin polynomial of x Phi(x): x / 2 + sum over even n <= DEGREE of c_n x^n."""
    x2 = x * x
    if DEGREE == 6:
        even = _C2 + x2 * (_C4 + x2 * _C6)
    else:
        even = _C2 + x2 * (_C4 + x2 * (_C6 + x2 * (_C8 + x2 * _C10)))
    return x * (0.5 + x * even)


@triton.jit
def _taylor_derivative(x, DEGREE: tl.constexpr):
    x2 = x * x
    if DEGREE == 6:
        odd = 2.0 * _C2 + x2 * (4.0 * _C4 + x2 * (6.0 * _C6))
    else:
        tail = 6.0 * _C6 + x2 * (8.0 * _C8 + x2 * (10.0 * _C10))
        odd = 2.0 * _C2 + x2 * (4.0 * _C4 + x2 * tail)
    return 0.5 + x * odd


@triton.jit
def _guarded_taylor(x, DEGREE: tl.constexpr, BOUND: tl.constexpr, BRANCH: tl.constexpr):
    """The polynomial where |x| <= BOUND, elsewhere (NaN too) the tanh form; (y, derivative)."""
    y = _taylor(x, DEGREE)
    dy = _taylor_derivative(x, DEGREE)
    near = tl.abs(x) <= BOUND
    beyond = True
    if BRANCH:
        beyond = tl.min(near.to(tl.int32)) == 0
    if beyond:
        far, far_slope = _tanh_gelu_and_derivative(x, _SQRT_2_OVER_PI, False)
        y = tl.where(near, y, far)
        dy = tl.where(near, dy, far_slope)
    return y, dy


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, BRANCH: tl.constexpr = _NO):
    """act(x) of an fp32 block; ACTIVATION is one of the ids above.

    BRANCH: a block whose scores are all in range skips the Taylor forms' fallback; same result.
    """
    tl.static_assert(ACTIVATION >= 0 and ACTIVATION < _COUNT, "unknown activation id")
    y = x
    if ACTIVATION == GELU:
        y = x * (0.5 + 0.5 * tl.erf(x * _SQRT_HALF))
    elif ACTIVATION == GELU_TANH:
        y, _ = _tanh_gelu(x, _SQRT_2_OVER_PI, False)
    elif ACTIVATION == FAST_GELU:
        y, _ = _tanh_gelu(x, _SQRT_2_OVER_PI, True)
    elif ACTIVATION == FAST_GELU_BF16:
        y, _ = _tanh_gelu(x, _SQRT_2_OVER_PI_BF16, True)
    elif ACTIVATION == LEAKY_RELU:
        y = tl.where(x > 0, x, _LEAKY_SLOPE * x)
    elif ACTIVATION == RELU:
        y = tl.maximum(x, 0.0, propagate_nan=_NAN)
    elif ACTIVATION == RELU_SQUARED:
        positive = tl.maximum(x, 0.0, propagate_nan=_NAN)
        y = positive * positive
    elif ACTIVATION == SILU:
        y = x * _sigmoid(x)
    elif ACTIVATION == FAST_SILU:
        y = x * _fast_sigmoid(x)
    elif ACTIVATION == HARDSWISH:
        y = x * tl.clamp(x * (1.0 / 6.0) + 0.5, 0.0, 1.0)
    elif ACTIVATION == GELU_TAYLOR6:
        y, _ = _guarded_taylor(x, 6, _TAYLOR6_BOUND, BRANCH)
    elif ACTIVATION == GELU_TAYLOR10:
        y, _ = _guarded_taylor(x, 10, _TAYLOR10_BOUND, BRANCH)
    return y


@triton.jit
def activate_and_derivative(x, ACTIVATION: tl.constexpr, BRANCH: tl.constexpr = _NO):
    """(act(x), act'(x)) of an fp32 block; at a kink the derivative is torch's. BRANCH as above."""
    tl.static_assert(ACTIVATION >= 0 and ACTIVATION < _COUNT, "unknown activation id")
    y = x
    dy = tl.where(x == x, 1.0, 1.0)  # ones in the layout of x, which Gluon must know
    if ACTIVATION == GELU:
        cdf = 0.5 + 0.5 * tl.erf(x * _SQRT_HALF)
        y = x * cdf
        dy = cdf + x * (_INV_SQRT_2PI * tl.exp2(x * x * (-0.5 * _LOG2E)))
    elif ACTIVATION == GELU_TANH:
        y, dy = _tanh_gelu_and_derivative(x, _SQRT_2_OVER_PI, False)
    elif ACTIVATION == FAST_GELU:
        y, dy = _tanh_gelu_and_derivative(x, _SQRT_2_OVER_PI, True)
    elif ACTIVATION == FAST_GELU_BF16:
        y, dy = _tanh_gelu_and_derivative(x, _SQRT_2_OVER_PI_BF16, True)
    elif ACTIVATION == LEAKY_RELU:
        y = tl.where(x > 0, x, _LEAKY_SLOPE * x)
        dy = tl.where(x > 0, 1.0, _LEAKY_SLOPE)
    elif ACTIVATION == RELU:
        y = tl.maximum(x, 0.0, propagate_nan=_NAN)
        dy = tl.where(x <= 0, 0.0, 1.0)
    elif ACTIVATION == RELU_SQUARED:
        positive = tl.maximum(x, 0.0, propagate_nan=_NAN)
        y = positive * positive
        dy = 2.0 * positive
    elif ACTIVATION == SILU:
        gate = _sigmoid(x)
        y = x * gate
        dy = gate + y * (1.0 - gate)
    elif ACTIVATION == FAST_SILU:
        gate = _fast_sigmoid(x)
        y = x * gate
        dy = gate + y * (1.0 - gate)
    elif ACTIVATION == HARDSWISH:
        y = x * tl.clamp(x * (1.0 / 6.0) + 0.5, 0.0, 1.0)
        dy = tl.where(x <= -3.0, 0.0, tl.where(x < 3.0, x * (1.0 / 3.0) + 0.5, 1.0))
    elif ACTIVATION == GELU_TAYLOR6:
        y, dy = _guarded_taylor(x, 6, _TAYLOR6_BOUND, BRANCH)
    elif ACTIVATION == GELU_TAYLOR10:
        y, dy = _guarded_taylor(x, 10, _TAYLOR10_BOUND, BRANCH)
    return y, dy


@triton.jit
def activate_dynamic(x, activation_id, AMONG: tl.constexpr = ALL_ACTIVATIONS):
    """act(x) for a run-time scalar id: one uniform branch; AMONG (a bit set) bounds the code."""
    y = x
    for candidate in tl.static_range(1, _COUNT):
        if (AMONG >> candidate) & 1:
            if activation_id == candidate:
                y = activate(x, candidate)
    return y


@triton.jit
def activate_and_derivative_dynamic(x, activation_id, AMONG: tl.constexpr = ALL_ACTIVATIONS):
    """(act(x), act'(x)) for a run-time scalar id; an id outside AMONG is taken as identity."""
    y = x
    dy = tl.where(x == x, 1.0, 1.0)  # ones in the layout of x, which Gluon must know
    for candidate in tl.static_range(1, _COUNT):
        if (AMONG >> candidate) & 1:
            if activation_id == candidate:
                y, dy = activate_and_derivative(x, candidate)
    return y, dy
