"""Which calls the Hopper kernels take."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.interpreter import INTERPRET

_DTYPES = (torch.bfloat16, torch.float16)
_DIMS = (64, 128)
#: Rows of a tensor: positions plus a window's bound (at most 2^29) then stay within int32, and rows
#: below a descriptor's 2^30.
_MOST_ROWS = 1 << 29
#: (tile, head) items of a launch, tiles of at least 64 rows.
_MOST_ITEMS = 1 << 30


def unsupported(
    q: Tensor, geometry: Geometry, *, biased: bool = False, activations: int = 1
) -> str | None:
    """Why the Hopper kernels cannot compute a call, in words; None if they can.

    biased: whether scores have a bias; activations: how many different ones the heads have.
    """
    g = geometry
    if INTERPRET.value:
        return "Triton's interpreter cannot run Gluon"
    if not _has_gluon():
        return "this Triton has no Gluon"
    if not q.is_cuda or _capability(q.device.index or 0) != (9, 0):
        return f"needs compute capability 9.0, tensors are on {q.device}"
    if q.dtype not in _DTYPES:
        return f"needs bfloat16 or float16, got {q.dtype}"
    if g.qk_dim != g.v_dim or g.qk_dim not in _DIMS:
        return f"needs head dims of 64 or 128, equal for q and v, got {g.qk_dim} and {g.v_dim}"
    if biased:
        return "a bias is not supported"
    if activations != 1:
        return f"needs one activation for all heads, got {activations}"
    if max(g.total_q, g.total_k, g.out_rows) >= _MOST_ROWS:
        return f"{max(g.total_q, g.total_k, g.out_rows)} rows are too many, limit {_MOST_ROWS}"
    items = g.heads * (max(g.out_rows, g.total_k) // 64 + 2 * g.batch + 1)
    if items >= _MOST_ITEMS:
        return f"{items} tiles are too many, limit {_MOST_ITEMS}"
    return None


@cache
def _has_gluon() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is not None
    except ModuleNotFoundError:
        return False


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
