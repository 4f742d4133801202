"""What the block attention and rotary kernels are compiled to ahead of time."""

from __future__ import annotations

from typing import Any

import torch

from jagbench.ahead_of_time import ARCHITECTURES, MATRIX_OPCODES, SHARED_LIMITS, CompileCase
from jagbench.impl.kernels.block_attention_launch import fitting_tiles, kernel_name
from jagbench.impl.kernels.hopper.block_gradient_launch import (
    BLOCK_ROWS,
    HEAD_DIM,
    MAX_REGISTERS,
)
from jagbench.impl.kernels.rotary import tile_rows
from jagbench.impl.kernels.tuning import padded, table_config

_PACKAGE = "jagbench.impl.kernels"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_TILES = {"offsets": "*i32", "tile_sequence": "*i32", "tile_block": "*i32", "tile_count": "*i32"}
# Bytes of stack a thread: gradients park what was loaded early while registers hold accumulators.
_PARKED, _FEW = 256, 48
_NO_PRODUCT: dict[int, str | None] = dict.fromkeys(ARCHITECTURES)

_KERNELS = {False: "block_forward_kernel", True: "block_gradient_kernel"}


def _signature(dtype: str, gradient: bool, turned: bool) -> tuple[dict[str, str], tuple[str, ...]]:
    """Run-time arguments and their types; those that a launch finds divisible by 16."""
    tensors = ("q", "k", "v", *(("d_out", "dq", "dk", "dv") if gradient else ("out",)))
    names = ("q", "k", "v", *(("d",) if gradient else ()))
    strides = [f"{name}_{of}" for name in names for of in ("row", "head")]
    pointers = {**dict.fromkeys(tensors, f"*{dtype}"), **_TILES}
    if turned:
        pointers["table"] = "*fp32"
        strides.append("table_row")
    counts = ("batch", "total", "run", "block_size", "kv_heads")
    scales = ("eps", "scale_log2", *(("scale",) if gradient else ()))
    signature = {
        **pointers, **dict.fromkeys((*counts, *strides), "i32"), **dict.fromkeys(scales, "fp32"),
    }  # fmt: skip
    return signature, (*pointers, *strides)


def _block(
    gradient: bool,
    dtype: str,
    dim: int,
    tag: str,
    rotary_dim: int = 0,
    block_size: int = 64,
    group: int = 1,
    qk_norm: bool = False,
    architectures: tuple[int, ...] = ARCHITECTURES,
) -> CompileCase:
    """A case with the tiles that the smallest of the architectures takes."""
    limit = min(SHARED_LIMITS[arch] for arch in architectures)
    size = _DTYPES[dtype].itemsize
    kernel = kernel_name(gradient, rotary_dim > 0)
    table = table_config(kernel, _DTYPES[dtype], dim, dim, limit)
    tiles = fitting_tiles(kernel, table, size, dim, dim, block_size, limit, rotary_dim, qk_norm)
    name = "block_attention_" + ("backward" if gradient else "forward")
    signature, aligned = _signature(dtype, gradient, rotary_dim > 0)
    constants: dict[str, Any] = {
        **({} if rotary_dim else {"table": None, "table_row": 0}),
        "GROUP": group, "D": dim, "DV": dim, "BLOCK_D": padded(dim), "BLOCK_DV": padded(dim),
        "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k,
        "ROTARY_DIM": rotary_dim, "VALUE_ROTARY_DIM": rotary_dim, "BY_TOKEN": False,
        "QK_NORM": qk_norm, **({"QUERY": True, "KEY_VALUE": True} if gradient else {}),
    }  # fmt: skip
    return CompileCase(
        name=f"{name}-{tag}-{dtype}-d{dim}",
        kernel=f"{_PACKAGE}.block_attention_kernels:{_KERNELS[gradient]}",
        signature=signature,
        constexprs=constants,
        aligned=aligned,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        dtype=dtype,
        architectures=architectures,
        # fp32 products run on the plain ALUs, unrolled.
        may_spill=dtype == "fp32" or dim > 128,
        spill_limit=_PARKED if gradient else 2 * _FEW if qk_norm else _FEW,
        matrix_opcode=_NO_PRODUCT if dtype == "fp32" else MATRIX_OPCODES,
    )  # fmt: skip


def _rotary(dtype: str, dim: int, rotary_dim: int, tag: str, **constants: Any) -> CompileCase:
    """The operator alone: no matrix product."""
    strides = dict.fromkeys(("x_row", "x_head", "table_row"), "i32")
    signature = {
        "x": f"*{dtype}", "out": f"*{dtype}", "table": "*fp32", **_TILES,
        **dict.fromkeys(("batch", "total", "heads"), "i32"), "sign": "fp32", **strides,
    }  # fmt: skip
    return CompileCase(
        name=f"rotary-{tag}-{dtype}-d{dim}",
        kernel=f"{_PACKAGE}.rotation:rotary_kernel",
        signature=signature,
        constexprs={
            "D": dim, "BLOCK_D": padded(dim), "ROWS": tile_rows(dim), "ROTARY_DIM": rotary_dim,
            "INTERLEAVED": True, "BY_TOKEN": False, **constants,
        },
        aligned=tuple(n for n, kind in signature.items() if kind[0] == "*" or n in strides),
        dtype=dtype,
        matrix_opcode=_NO_PRODUCT,
    )  # fmt: skip


def _hopper_gradient(dtype: str, tag: str, table: str = "fp32", **constants: bool) -> CompileCase:
    """Sines and cosines stay in registers beside two accumulators; scalars may be parked."""
    rows = f"tensordesc<{dtype}[1, 1, {BLOCK_ROWS}, {HEAD_DIM}]>"
    tensors = ("q", "k", "v", "d_out", "dq", "dk", "dv")
    return CompileCase(
        name=f"hopper_block_gradient-{tag}-{dtype}-d{HEAD_DIM}",
        kernel=f"{_PACKAGE}.hopper.block_gradient:block_gradient_kernel",
        signature={
            **{f"{name}_desc": rows for name in tensors},
            "items": "*i32", "count": "*i32", "heads": "i32", "table": f"*{table}",
            "table_row": "i32", "score_scale": "fp32", "grad_scale": "fp32",
        },
        constexprs={"D": HEAD_DIM, "BY_TOKEN": False, "TURN_VALUES": True, **constants},
        aligned=("items", "count", "table"),
        num_warps=4,
        dtype=dtype,
        architectures=(90,),
        opcodes=("UTMALDG", "UTMASTG", "USETMAXREG"),
        max_registers=MAX_REGISTERS,
        spill_limit=_FEW,
    )  # fmt: skip


_LARGE, _SMALL = (90, 100), (80, 120)
_FORWARD, _BACKWARD = False, True

BLOCK_CASES: tuple[CompileCase, ...] = (
    _block(_FORWARD, "bf16", 128, "plain", architectures=_LARGE),
    _block(_FORWARD, "bf16", 128, "plain_small_shared", architectures=_SMALL),
    _block(_FORWARD, "bf16", 128, "rotary", rotary_dim=128, architectures=_LARGE),
    _block(_FORWARD, "bf16", 128, "rotary_small_shared", 128, architectures=_SMALL),
    _block(_FORWARD, "fp16", 64, "partial_rotary_gqa", rotary_dim=32, group=4),
    _block(_FORWARD, "bf16", 256, "plain", architectures=_LARGE),
    _block(_FORWARD, "bf16", 256, "plain_small_shared", architectures=_SMALL),
    _block(_FORWARD, "bf16", 128, "blocks_of_128", block_size=128),
    _block(_FORWARD, "fp32", 64, "rotary", rotary_dim=64),
    _block(_BACKWARD, "bf16", 128, "plain", architectures=_LARGE),
    _block(_BACKWARD, "bf16", 128, "plain_small_shared", architectures=_SMALL),
    _block(_BACKWARD, "bf16", 128, "rotary", rotary_dim=128, architectures=_LARGE),
    _block(_BACKWARD, "bf16", 128, "rotary_small_shared", 128, architectures=_SMALL),
    _block(_BACKWARD, "bf16", 64, "rotary", rotary_dim=64),
    _block(_BACKWARD, "fp16", 64, "partial_rotary_gqa", rotary_dim=32, group=4),
    _block(_BACKWARD, "bf16", 256, "plain", architectures=_LARGE),
    _block(_BACKWARD, "bf16", 128, "blocks_of_128", block_size=128, architectures=_LARGE),
    _block(_BACKWARD, "fp32", 64, "rotary", rotary_dim=64),
    _hopper_gradient("bf16", "rotary"),
    _hopper_gradient("fp16", "rotary_half_table", table="fp16"),
    _hopper_gradient("bf16", "rotary_by_token", BY_TOKEN=True),
    _hopper_gradient("bf16", "rotary_keys_only", TURN_VALUES=False),
    _block(_FORWARD, "bf16", 128, "qk_norm_rotary", rotary_dim=128, qk_norm=True),
    _block(_BACKWARD, "bf16", 128, "qk_norm", qk_norm=True, architectures=_LARGE),
    _block(_BACKWARD, "bf16", 64, "qk_norm_rotary", rotary_dim=64, qk_norm=True),
    _rotary("bf16", 128, 128, "interleaved"),
    _rotary("bf16", 128, 64, "half_split_partial", INTERLEAVED=False),
)
