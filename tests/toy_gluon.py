"""Gluon kernels, good and bad, that try the ahead-of-time harness; imported where they compile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_load = tma.async_copy_global_to_shared


@gluon.jit
def repeated_product(a_desc, out, count, TOUCHED: gl.constexpr):
    """Sum of products of a tile with itself; TOUCHED uses the accumulator while it is in flight."""
    SIZE: gl.constexpr = a_desc.block_shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    tile = gl.allocate_shared_memory(a_desc.dtype, [SIZE, SIZE], a_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, SIZE * SIZE * 2)
    _load(a_desc, [0, 0], full, tile)
    mbarrier.wait(full, 0)
    total = gl.zeros([SIZE, SIZE], gl.float32, layout)
    for _ in range(0, count):
        total = warpgroup_mma(tile, tile, total, is_async=True)
        total = warpgroup_mma_wait(1 if TOUCHED else 0, deps=(total,))
        if TOUCHED:
            total = total * 2.0
    total = warpgroup_mma_wait(0, deps=(total,))
    rows = gl.arange(0, SIZE, gl.SliceLayout(1, layout))
    columns = gl.arange(0, SIZE, gl.SliceLayout(0, layout))
    gl.store(out + rows[:, None] * SIZE + columns[None, :], total)
