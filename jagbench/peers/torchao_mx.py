"""torchao's MX casts (torchao.prototype.mx_formats), torch's own library of quantisation.

`--impl=jagbench.peers.torchao_mx` is `to_mx` as its users call it eagerly; `:compiled` the same
through torch.compile, as its documentation advises; `:kernels` the Triton kernels of its MXFP8
training, `triton_to_mxfp8_dim0` and `triton_to_mxfp8_dim1`. All have blocks of (1, 32) and (32, 1)
of whole blocks, round to nearest, and know no sequences: of jagged rows in blocks (1, 32) those
before the last offset are quantised. `to_mx` takes blocks of rows from the transpose, a copy that
is part of the call. Where its scales differ from the definition, it is found to be wrong
(`reference/mx_blocks.py` says where).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.mx import (
    ALONG_COLUMNS,
    BLOCK_SIZE,
    SQUARE,
    Block,
    ElemDtype,
    Rounding,
    ScaleMode,
    check_block,
    check_elem_dtype,
    check_rounding,
    check_scale_mode,
)
from jagbench.peers.arguments import library, refuse, version_of

PACKAGE, WANTED = "torchao", ">= 0.18"
PEER = "torchao"
__version__ = version_of(PACKAGE)

#: Codes and scales of a matrix of rows in blocks along the columns, or of columns along the rows.
Cast = Callable[[Tensor, ElemDtype, Block, ScaleMode], tuple[Tensor, Tensor]]
#: torch's name of an element type; E2M1 comes two to a byte.
_TYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn_x2"}
#: What `triton_to_mxfp8_dim1` wants rows and columns to be a multiple of.
_TILE = 128


def by_to_mx(compiled: bool) -> Cast:
    """The cast by `to_mx`."""

    def cast(
        x: Tensor, elem_dtype: ElemDtype, block: Block, mode: ScaleMode
    ) -> tuple[Tensor, Tensor]:
        refuse(
            x.dtype not in (torch.float32, torch.bfloat16),
            f"{PEER}'s to_mx takes float32 and bfloat16, not {x.dtype}",
        )
        across = x if block == ALONG_COLUMNS else x.mT
        _whole_blocks(across.shape[-1])
        modes = library("torchao.prototype.mx_formats.config", PACKAGE, WANTED)
        kind = getattr(torch, _TYPES[elem_dtype])
        rule = modes.ScaleCalculationMode[mode.upper()]
        scales, codes = _to_mx(compiled)(across.contiguous(), kind, BLOCK_SIZE, rule)
        codes = _one_a_byte(codes) if elem_dtype == "e2m1" else codes.view(torch.uint8)
        scales = scales.view(torch.uint8)
        return (codes, scales) if block == ALONG_COLUMNS else (codes.mT, scales.mT)

    return cast


def on_a_gpu(
    x: Tensor, elem_dtype: ElemDtype, block: Block, mode: ScaleMode
) -> tuple[Tensor, Tensor]:
    """The cast by the Triton kernels, which fail on a CPU without saying why."""
    refuse(x.device.type == "cpu", f"{PEER}'s Triton kernels need a GPU")
    return by_kernels(x, elem_dtype, block, mode)


def by_kernels(
    x: Tensor, elem_dtype: ElemDtype, block: Block, mode: ScaleMode
) -> tuple[Tensor, Tensor]:
    """The cast by the Triton kernels of MXFP8 training."""
    kernels = library("torchao.prototype.mx_formats.kernels", PACKAGE, WANTED)
    refuse(x.dtype != torch.bfloat16, f"{PEER}'s Triton kernels take bfloat16, not {x.dtype}")
    refuse(elem_dtype != "e4m3", f"{PEER}'s Triton kernels give e4m3, not {elem_dtype}")
    refuse(mode not in ("rceil", "floor"), f"{PEER}'s Triton kernels have no scale_mode {mode!r}")
    if block == ALONG_COLUMNS:
        _whole_blocks(x.shape[-1])
        codes, scales = kernels.triton_to_mxfp8_dim0(x.contiguous(), BLOCK_SIZE, mode)
        return codes.view(torch.uint8), scales.view(torch.uint8)
    refuse(
        x.dim() != 2 or x.shape[0] % _TILE != 0 or x.shape[1] % _TILE != 0,
        f"{PEER}'s triton_to_mxfp8_dim1 takes one matrix of multiples of {_TILE}, got "
        f"{tuple(x.shape)}",
    )
    codes, scales = kernels.triton_to_mxfp8_dim1(x.contiguous(), BLOCK_SIZE, mode)
    return codes.view(torch.uint8), scales.view(torch.uint8).mT


@dataclass(frozen=True)
class Peer:
    """An implementation of mx_quantize. cast: what is called. notes: what that is."""

    cast: Cast
    notes: str
    __version__: str = __version__

    def mx_quantize(
        self,
        x: Tensor,
        offsets: Tensor | None = None,
        *,
        elem_dtype: ElemDtype = "e4m3",
        block: Block = ALONG_COLUMNS,
        scale_mode: ScaleMode = "rceil",
        rounding: Rounding = "nearest",
        seed: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Codes and scales of x, as `jagbench.reference` defines them.

        Raises ValueError for malformed arguments, NotImplementedError for what torchao lacks.
        """
        check_elem_dtype(elem_dtype)
        check_block(block)
        check_scale_mode(scale_mode)
        check_rounding(rounding, seed)
        total = _rows(x, offsets, block)
        library("torchao", PACKAGE, WANTED)
        refuse(rounding != "nearest", f"{PEER} rounds to nearest only")
        refuse(block == SQUARE, f"{PEER} has no blocks of {SQUARE}")
        refuse(
            offsets is not None and block != ALONG_COLUMNS,
            f"{PEER} knows no sequences, at whose ends blocks of {block} would end",
        )
        if not x.numel():
            return _nothing(x, block)
        codes, scales = self.cast(x.detach()[:total], elem_dtype, block, scale_mode)
        return _padded(codes, x.shape[0] - total), _padded(scales, x.shape[0] - total)

    def configuration(self, operator: str, inputs: Inputs) -> Mapping[str, str]:
        """What is called."""
        return {"library": self.__version__, "cast": self.notes}


@functools.cache
def _to_mx(compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    function = library("torchao.prototype.mx_formats.mx_tensor", PACKAGE, WANTED).to_mx
    return torch.compile(function, fullgraph=True) if compiled else function


def _whole_blocks(columns: int) -> None:
    refuse(columns % BLOCK_SIZE != 0, f"{PEER} takes whole blocks of {BLOCK_SIZE}, got {columns}")


def _one_a_byte(packed: Tensor) -> Tensor:
    """E2M1 codes of two to a byte, the first in the low four bits."""
    pairs = packed.view(torch.uint8)
    return torch.stack([pairs & 0xF, pairs >> 4], -1).flatten(-2)


def _padded(x: Tensor, rows: int) -> Tensor:
    """With rows of 0 behind."""
    return torch.cat([x, x.new_zeros(rows, *x.shape[1:])]) if rows else x


def _nothing(x: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Codes and scales of a tensor without elements."""
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    sizes = list(x.shape)
    sizes[-1] = -(-sizes[-1] // block[1])
    if block[0] > 1:
        sizes[-2] = -(-sizes[-2] // block[0])
    return codes, codes.new_zeros(sizes)


def _rows(x: Any, offsets: Tensor | None, block: Block) -> int:
    """Rows before the last offset (all without offsets); ValueError for what does not fit."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(
            f"x must be a float tensor, got {getattr(x, 'dtype', type(x))} for {block}"
        )
    if x.dim() < (1 if offsets is None and block[0] == 1 else 2):
        raise ValueError(f"x {tuple(x.shape)} has too few dims for blocks {block}")
    if offsets is None:
        return x.shape[0]
    if offsets.dim() != 1 or offsets.numel() == 0 or offsets.is_floating_point():
        raise ValueError(
            f"offsets must be [batch + 1] integers, got {offsets.dtype} {tuple(offsets.shape)}"
        )
    if offsets.device != x.device:
        raise ValueError(f"offsets are on {offsets.device}, x on {x.device}")
    ends = offsets.tolist()
    if ends[0] != 0 or ends != sorted(ends) or ends[-1] > x.shape[0]:
        raise ValueError(f"offsets from {ends[0]} to {ends[-1]} do not fit {x.shape[0]} rows")
    return int(ends[-1])


_EAGER = Peer(by_to_mx(compiled=False), "to_mx")
mx_quantize = _EAGER.mx_quantize
configuration = _EAGER.configuration
#: `to_mx` through torch.compile (`--impl=jagbench.peers.torchao_mx:compiled`).
compiled = Peer(by_to_mx(compiled=True), "to_mx, torch.compile")
#: The Triton kernels (`--impl=jagbench.peers.torchao_mx:kernels`).
kernels = Peer(on_a_gpu, "triton_to_mxfp8_dim0, triton_to_mxfp8_dim1")
