"""What device code must do differently when Triton's interpreter runs it on a CPU.

The interpreter keeps bf16 blocks as raw 16-bit integers (arithmetic on them is garbage) and casts
fp32 to bf16 by truncation, and bf16 subnormals to wrong fp32 values. Device code here computes in
fp32 only, through `to_float`, `dot` and `round_to` wherever a block may have 16 bits. Compiled code
pays nothing: `INTERPRET` is constexpr.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Whether Triton's interpreter runs the kernels: Triton's own knob, as it decides the same when a
#: kernel is decorated. Fixed when this module is imported.
INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))

#: A default of a device function must be constexpr itself: triton 3.6 does not wrap it.
_IEEE = tl.constexpr("ieee")


@triton.jit
def to_float(x):
    """A block of any float dtype as fp32, exactly."""
    if INTERPRET:
        if x.dtype == tl.bfloat16:
            bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            x = bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def dot(a, b, acc=None, PRECISION: tl.constexpr = _IEEE):
    """`acc + a @ b` in fp32, of two blocks of one dtype (fp32, fp16 or bf16).

    PRECISION is `tl.dot`'s input_precision and matters for fp32 blocks only: "ieee" multiplies
    them in full ("tf32", "tf32x3" use the tensor cores); the interpreter always does.
    """
    if INTERPRET:
        a = to_float(a)
        b = to_float(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """An fp32 block as DTYPE (fp32, fp16 or bf16), rounded to nearest, ties to even."""
    if INTERPRET:
        if tl.bfloat16 == DTYPE:
            # Adding half a bf16 ulp (less one, unless the kept part is odd) rounds to even.
            bits = x.to(tl.uint32, bitcast=True)
            upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            upper = tl.where(x != x, 0x7FC0, upper).to(tl.uint16)
            x = upper.to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)
