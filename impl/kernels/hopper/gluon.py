"""What every kernel of the tier is written with.

Names that differ between Triton versions or that Gluon lacks, and places in jagged views.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Renamed in Triton 3.8.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

#: Bound of the row axis in a jagged view (`descriptors`), and the int32 fields of a work item
#: (`work.WorkList`).
FAR = gl.constexpr(1 << 30)
FIELDS = gl.constexpr(8)

#: First of the named barriers of `turn_wait` and `turn_give`; Triton uses the lower ids.
FIRST_BARRIER = 10


@gluon.jit
def at_row(length_end, length, row, column):
    """Coordinates of a row of a sequence that ends at row `length_end` of the tensor."""
    return [FAR, length_end, FAR - length + row, column]


@gluon.constexpr_function
def _barrier(verb, group):
    """A barrier instruction for two warpgroups: one waits, one hands over. $0, $1 are unused."""
    return f"bar.{verb} {FIRST_BARRIER + group}, 256; mov.b32 $0, $1;"


@gluon.jit
def _at_barrier(ASM: gl.constexpr):
    # One element a thread, so that every thread runs the instruction once.
    x = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def turn_wait(GROUP: gl.constexpr):
    """Wait until warpgroup GROUP is handed the tensor cores."""
    _at_barrier(_barrier("sync", GROUP))


@gluon.jit
def turn_give(GROUP: gl.constexpr):
    """Hand the tensor cores to warpgroup GROUP."""
    _at_barrier(_barrier("arrive", GROUP))


@gluon.jit
def arrive_behind(bar, x):
    """Arrive when x `[n]`, fp32, formed from what a warp loaded from a buffer, is in registers.

    A load from shared memory is under way for a while, nothing but a use of its values waits for
    it, and the TMA unit that fills the buffer again keeps no order with it. So the arrival hangs on
    the values: they would have to be a NaN that no operation makes.
    """
    bits = gl.max(x, axis=0).to(gl.int32, bitcast=True)
    mbarrier.arrive(bar, count=1, pred=bits != 0x7FA12345)


@builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to global memory by TMA; the order of additions is not fixed.

    Triton 3.6 and 3.7 have it in the builder, without a Gluon name.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)


@gluon.jit
def bulk_writes_wait():
    """Wait until what this warpgroup's threads had the TMA unit write lies in global memory.

    `tma.store_wait` waits until shared memory has been read, no more.
    """
    _at_barrier("cp.async.bulk.wait_group 0; mov.b32 $0, $1;")
