"""Gluon's names that differ between Triton versions, or that it lacks."""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# Renamed in Triton 3.8.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to global memory by TMA; the order of additions is not fixed.

    Triton 3.6 and 3.7 have it in the builder, without a Gluon name.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)
