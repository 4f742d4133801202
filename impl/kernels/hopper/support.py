"""Which calls the Hopper tier takes: one function, and what follows from its answer."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jagbench.impl.kernels.activations import PER_HEAD
from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.interpreter import INTERPRET
from jagbench.impl.kernels.tuning import Tier

if TYPE_CHECKING:
    from jagbench.impl.kernels.mask import Mask

_CAPABILITY = (9, 0)
_TYPES = (torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128)
#: Packed tensors have fewer rows: a position plus a bound of the window (2^29 at most) must fit
#: 31 bits, and so must a row's place in a jagged TMA descriptor, 2^30 and less from its end.
_MOST_ROWS = 1 << 29
#: Most (head, padded row) entries of lse and delta, and most tiles, each counted in int32.
_MOST_ENTRIES = (1 << 31) - 1
#: Rows of padding that `attention_launch.row_statistics` may add a sequence, and a tile's fewest.
_STATISTICS_PADDING, _FEWEST_ROWS = 256, 64
#: Keys of an item of the backward where sequences have no more on average (`backward_short`).
SHORT_KEYS = 64


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    geometry: Geometry,
    mask: Mask,
    bias_kind: int,
    activations: Sequence[int],
    deterministic: bool,
) -> str | None:
    """Why a call cannot take this tier, or None. Shapes, types and the device decide; no values.

    mask: any window will do. bias_kind: `Bias.kind`. activations: ids, one or one per head;
    `SOFTMAX` is one too, `PER_HEAD` stands for several. deterministic: gradients must have the same
    bits on repeats (a forward's output always has). Strides and alignment do not count: what TMA
    cannot address is copied (`tma_layout`).
    """
    g = geometry
    if (problem := device_problem(q.device)) is not None:
        return problem
    if q.dtype not in _TYPES:
        return f"the tensor cores are fed 16-bit types, got {q.dtype}"
    if g.qk_dim != g.v_dim or g.qk_dim not in _HEAD_DIMS:
        return f"head dims of q, k and v must all be 64 or 128, got {g.qk_dim} and {g.v_dim}"
    if mask.beyond:
        return (
            "its windows show no prefix and no last queries beside them, got prefix "
            f"{mask.prefix} and last_full {mask.last_full}"
        )
    if bias_kind:
        return "no kernel of this tier adds a bias"
    if len(activations) != 1 or activations[0] == PER_HEAD.value:
        return "all heads must have one activation"
    if deterministic:
        return "the backward adds dQ in no fixed order, so its bits may differ between repeats"
    rows = max(g.total_q, g.total_k, g.out_rows)
    if rows >= _MOST_ROWS:
        return f"{rows} rows, the limit is {_MOST_ROWS - 1}"
    entries = g.heads * (g.out_rows + _STATISTICS_PADDING * (g.batch + 2))
    tiles = g.heads * (rows // _FEWEST_ROWS + 2 * (g.batch + 1))
    if max(entries, tiles) > _MOST_ENTRIES:
        return f"{entries} row statistics or {tiles} tiles exceed the limit of {_MOST_ENTRIES}"
    return None


@cache
def device_problem(device: torch.device) -> str | None:
    """Why no call on this device can take the tier, or None."""
    if INTERPRET.value:
        return "Triton's interpreter does not run Gluon"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, got tensors on {device}"
    found = torch.cuda.get_device_capability(device)
    if found != _CAPABILITY:
        return f"needs compute capability 9.0, {device} has {found[0]}.{found[1]}"
    if not _gluon_exists():
        return "this Triton has no Gluon for Hopper"
    return None


def _gluon_exists() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is not None
    except ModuleNotFoundError:
        return False


def takes_hopper(
    operator: str,
    tier: Tier,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    geometry: Geometry,
    mask: Mask,
    bias_kind: int,
    activations: Sequence[int],
    *,
    deterministic: bool = False,
) -> bool:
    """Whether a pass of this tier runs on the Hopper kernels.

    Raises NotImplementedError with the reason where the tier is "hopper" and cannot be had.
    """
    if tier == "portable":
        return False
    reason = unsupported(q, k, v, geometry, mask, bias_kind, activations, deterministic)
    if reason is not None and tier == "hopper":
        raise NotImplementedError(f"{operator}: schedule 'hopper': {reason}")
    return reason is None


def keys_are_short(g: Geometry) -> bool:
    """Whether items of 64 keys are worth it: told by the mean; a wrong guess costs time only."""
    return not g.shared_q and g.mean_k <= SHORT_KEYS


def tma_layout(tensor: Tensor) -> Tensor:
    """`[rows, heads, dim]` itself if TMA can address it, else a contiguous copy.

    TMA takes any row stride that is a multiple of 16 bytes, from a 16-byte boundary, if the heads
    of a row lie side by side.
    """
    rows, heads, dim = tensor.shape
    row, head, element = tensor.stride()
    side_by_side = element == 1 and (head == dim or heads == 1) and row >= heads * dim
    aligned = row * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
    if side_by_side and aligned:
        return tensor
    # Not contiguous(): to torch a single row is that whatever its stride, and so is an odd address.
    return torch.empty(rows, heads, dim, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
