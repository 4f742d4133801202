"""What every kernel is compiled to ahead of time, with the tiles its table gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jagbench.ahead_of_time import ARCHITECTURES, SHARED_LIMITS, CompileCase
from jagbench.impl.kernels.activations import ACTIVATION_IDS, PER_HEAD, SOFTMAX, activation_set
from jagbench.impl.kernels.block_compile_cases import BLOCK_CASES
from jagbench.impl.kernels.hopper.forward_launch import (
    GROUP_ROWS,
    GROUPS,
    HAND,
    MAX_REGISTERS,
    forward_tiles,
)
from jagbench.impl.kernels.hopper.mx_product_compile_cases import CASES as MX_HOPPER_CASES
from jagbench.impl.kernels.mx_attention_compile_cases import CASES as MX_ATTENTION_CASES
from jagbench.impl.kernels.mx_compile_cases import CASES as MX_CASES
from jagbench.impl.kernels.mx_matmul_compile_cases import CASES as MX_PRODUCT_CASES
from jagbench.impl.kernels.mx_norm_compile_cases import CASES as MX_NORM_CASES
from jagbench.impl.kernels.mx_projection_compile_cases import CASES as MX_PROJECTION_CASES
from jagbench.impl.kernels.norm_compile_cases import NORM_CASES
from jagbench.impl.kernels.tiles import LAST, LAST_CAUSAL, PREFIX
from jagbench.impl.kernels.tuning import Kernel, TileConfig, padded, table_config

_PACKAGE = "jagbench.impl.kernels"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FAST_GELU = ACTIVATION_IDS["fast_gelu"]

_GDPA_ROW: dict[Kernel, Kernel] = {
    "query_gradient": "gdpa_query_gradient",
    "key_value_gradient": "gdpa_key_value_gradient",
}

#: Kernels whose registers are full of accumulators: they park some loop invariants (addresses,
#: bounds) in local memory before the loop and only read them in it. Tiles without a spill were
#: measured and are slower (dK/dV: 9 % and more on an H200). Bytes of stack a thread that these and,
#: at window edges, the others may take.
_PARKING: tuple[Kernel, ...] = (
    "key_value_gradient", "gdpa_key_value_gradient", "gdpa_short", "gdpa_short2",
)  # fmt: skip
_PARKED, _FEW = 256, 16
#: The same where both sides of a window are masked, with the bounds of three to five loops to keep:
#: the most is taken on sm_120, whose tiles are as large and whose accumulators are registers.
_PARKED_AT_EDGES, _FEW_AT_EDGES = 512, 64

_STRIDES = ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")
_OFFSETS = ("q_offsets", "k_offsets")
_WINDOW: dict[str, Any] = {"HAS_LEFT": True, "HAS_RIGHT": True, "ALIGN_END": True}
_BEYOND_NAMES = ("BEYOND", "prefix", "last_full")
_COUNTS = dict.fromkeys(("batch", "total_q", "total_k", "left", "right", "heads", "group"), "i32")


def _pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}")


def _tensors(dtype: str, tiles: tuple[str, ...]) -> dict[str, str]:
    """Run-time arguments that every attention kernel has."""
    return {
        **_pointers(dtype, "q", "k", "v"),
        **_pointers("i32", *_OFFSETS, *tiles),
        **_COUNTS,
        **dict.fromkeys(_STRIDES, "i32"),
    }


def _sizes(dim: int, config: TileConfig) -> dict[str, Any]:
    return {
        "D": dim, "DV": dim, "BLOCK_D": padded(dim), "BLOCK_DV": padded(dim),
        "BLOCK_Q": config.block_q, "BLOCK_K": config.block_k,
        "HAS_LEFT": False, "HAS_RIGHT": False, "ALIGN_END": False, "SHARED_Q": False,
        "BEYOND": 0, "prefix": None, "last_full": None,
    }  # fmt: skip


def _case(
    name: str,
    kernel: str,
    table: Kernel,
    dtype: str,
    dim: int,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    mask: bool = True,
    architectures: tuple[int, ...] = ARCHITECTURES,
) -> CompileCase:
    """A case with the table's tiles. fp32 products run on the plain ALUs, and may spill."""
    room = min(SHARED_LIMITS[arch] for arch in architectures)
    config = table_config(table, _DTYPES[dtype], dim, dim, room)
    sizes = _sizes(dim, config)
    if not mask:
        sizes = {k: v for k, v in sizes.items() if k not in _WINDOW and k not in _BEYOND_NAMES}
    merged = {**sizes, **constants}
    if merged.get("BEYOND"):
        signature = {**signature, "prefix": "i32", "last_full": "i32"}
        merged = {k: v for k, v in merged.items() if k not in ("prefix", "last_full")}
    live = {key: kind for key, kind in signature.items() if key not in merged}
    aligned = tuple(k for k, kind in live.items() if kind.startswith("*") or k in _STRIDES)
    ieee = dtype == "fp32"
    options: dict[str, Any] = {"matrix_opcode": dict.fromkeys((80, 90, 100, 120))} if ieee else {}
    return CompileCase(
        name=name,
        kernel=f"{_PACKAGE}.{kernel}",
        signature=live,
        constexprs=merged,
        aligned=aligned,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        dtype=dtype,
        may_spill=ieee or dim > 128,
        spill_limit=_spill_limit(table, merged),
        architectures=architectures,
        **options,
    )


def _spill_limit(table: Kernel, constants: Mapping[str, Any]) -> int:
    """Bytes of stack a thread may take."""
    if table in _PARKING:
        return _PARKED_AT_EDGES if constants.get("HAS_LEFT") else _PARKED
    return _FEW_AT_EDGES if constants.get("BEYOND") else _FEW


def _softmax_forward(
    dtype: str,
    dim: int,
    masking: int,
    tag: str,
    architectures: tuple[int, ...] = ARCHITECTURES,
    **extra: Any,
) -> CompileCase:
    signature = {
        **_tensors(dtype, ("tile_sequence", "tile_block", "tile_count")),
        **_pointers(dtype, "out"), **_pointers("fp32", "lse"), **_pointers("i32", "redo"),
        "scale_log2": "fp32", "out_rows": "i32",
    }  # fmt: skip
    constants = {
        "k_desc": None, "v_desc": None, "bias": None, "bucket_ids": None, "pair_offsets": None,
        "bias_row": 0, "bias_head": 0, "BIAS": 0,
        "MASKING": masking, "DESCRIPTORS": False, "DEAL": 0,
        **extra,
    }  # fmt: skip
    return _case(
        f"jagged_attention_forward-{tag}-{dtype}-d{dim}",
        "jagged_attention_forward:jagged_attention_forward_kernel",
        "softmax", dtype, dim, signature, constants,
        architectures=architectures,
    )  # fmt: skip


def _softmax_short_keys(dtype: str, dim: int) -> CompileCase:
    signature = {
        **_tensors(dtype, ("chunk_sequence", "chunk_index", "redo")), **_pointers(dtype, "out"),
        **_pointers("fp32", "lse"), "scale_log2": "fp32", "out_rows": "i32",
    }  # fmt: skip
    for name in ("left", "right"):
        del signature[name]
    constants = {"CHUNK": 8, "NUM_STAGES": 3}
    return _case(
        f"jagged_attention_short_keys-{dtype}-d{dim}",
        "jagged_attention_forward:jagged_attention_short_keys_kernel",
        "softmax_short", dtype, dim, signature, constants, mask=False,
    )  # fmt: skip


def _gdpa_forward(dtype: str, dim: int, activation: int, tag: str, **extra: Any) -> CompileCase:
    signature = {
        **_tensors(dtype, ("tile_sequence", "tile_block", "tile_count")),
        **_pointers(dtype, "out"), **_pointers("i32", "activation_ids"),
        "pre_scale": "fp32", "post_scale": "fp32",
    }  # fmt: skip
    constants = {
        "ACTIVATION": activation, "ACTIVATION_SET": 0,
        "PERSISTENT": False, **({"activation_ids": None} if activation != PER_HEAD.value else {}),
        **extra,
    }  # fmt: skip
    return _case(
        f"gdpa_forward-{tag}-{dtype}-d{dim}", "gdpa_forward:gdpa_forward_kernel",
        "gdpa", dtype, dim, signature, constants,
    )  # fmt: skip


def _gdpa_short_keys(dtype: str, dim: int, key_tiles: int) -> CompileCase:
    signature = {
        **_tensors(dtype, ("chunk_sequence", "chunk_index")), **_pointers(dtype, "out"),
        "pre_scale": "fp32", "post_scale": "fp32",
    }  # fmt: skip
    constants = {
        "ACTIVATION": _FAST_GELU, "ACTIVATION_SET": 0,
        "activation_ids": None, "KEY_TILES": key_tiles, "CHUNK": 8, "NUM_STAGES": 2,
    }  # fmt: skip
    return _case(
        f"gdpa_short_keys-{key_tiles}_tiles-{dtype}-d{dim}", "gdpa_forward:gdpa_short_keys_kernel",
        "gdpa_short" if key_tiles == 1 else "gdpa_short2", dtype, dim, signature, constants,
    )  # fmt: skip


def _gradient(
    kernel: Kernel, dtype: str, dim: int, activation: int, tag: str, **extra: Any
) -> CompileCase:
    outputs = ("dk", "dv") if kernel == "key_value_gradient" else ()
    signature = {
        **_tensors(dtype, ("tile_sequence", "tile_block")),
        **_pointers(dtype, "d_out", "dq", *outputs), **_pointers("fp32", "statistics"),
        "statistics_rows": "i32", "score_scale": "fp32", "grad_scale": "fp32",
        "d_row": "i32", "d_head": "i32",
    }  # fmt: skip
    constants = {
        "bias": None, "bucket_ids": None, "activation_ids": None, "pair_offsets": None,
        "bias_row": 0, "bias_head": 0, "BIAS": 0, "ACTIVATION": activation,
        "ACTIVATION_SET": 0, **extra,
    }  # fmt: skip
    if kernel == "key_value_gradient":
        signature |= {"value_scale": "fp32", "kv_heads": "i32"}
        del signature["heads"], signature["group"]
        constants |= {"GROUP": 1, "ATOMIC_DQ": extra.get("ATOMIC_DQ", False)}
    else:
        constants |= {
            "d_bias": None, "BUCKETS": 1, "BUCKET_BLOCK": 16, "BIAS_GRADIENT": False,
        }  # fmt: skip
    return _case(
        f"{kernel}-{tag}-{dtype}-d{dim}", f"attention_backward:{kernel}_kernel",
        kernel if activation == SOFTMAX.value else _GDPA_ROW[kernel],
        dtype, dim, signature, constants,
    )  # fmt: skip


def _work_list(offsets: str) -> CompileCase:
    """The list of the persistent kernels. No matrix product; the same for every element type."""
    signature = {
        **_pointers(offsets, "row_offsets", "other_offsets"), **_pointers("i32", "items", "count"),
        **dict.fromkeys(("batch", "total_rows", "other_rows", "upper"), "i32"),
    }  # fmt: skip
    return CompileCase(
        name=f"work_list-{offsets}",
        kernel=f"{_PACKAGE}.hopper.work:_work_list_kernel",
        signature=signature,
        constexprs={
            "BLOCK_ROWS": 128, "OWN_STATISTICS": False, "GROUP": 8, "SCAN": 1024, "WIDTH": 64,
        },
        aligned=("row_offsets", "other_offsets", "items", "count"),
        num_warps=8,
        dtype=offsets,
        architectures=(90,),
        matrix_opcode={90: None},
    )  # fmt: skip


def _hopper_forward(
    dtype: str, dim: int, activation: int, tag: str, short: bool = False, **extra: Any
) -> CompileCase:
    """No spill is allowed: the warpgroups hold two accumulators that must stay where they are."""
    tiles = forward_tiles(dim, short)
    queries, keys = (
        f"tensordesc<{dtype}[1, 1, {rows}, {dim}]>" for rows in (GROUP_ROWS, tiles.block_k)
    )
    counts = ("heads", "group", "batch", "out_rows", "left", "right")
    return CompileCase(
        name=f"hopper_forward-{tag}-{dtype}-d{dim}",
        kernel=f"{_PACKAGE}.hopper.forward:attention_forward_kernel",
        signature={
            "q_desc": queries, "k_desc": keys, "v_desc": keys, "o_desc": queries,
            "lse": "*fp32", **_pointers("i32", "work", "count"), **dict.fromkeys(counts, "i32"),
            "scale": "fp32", "out_scale": "fp32",
        },
        constexprs={
            "GROUPS": GROUPS, "KEY_STAGES": tiles.key_stages, "QUERY_STAGES": tiles.query_stages,
            "ACTIVATION": activation, "HAS_LEFT": False, "HAS_RIGHT": False, "ALIGN_END": False,
            "SCALE_FIRST": False, "HEADS_APART": tiles.heads_apart, "PING_PONG": tiles.ping_pong,
            "RESIDENT": tiles.resident, "FOLDED": tiles.folded, **extra,
        },
        aligned=("lse", "work", "count"),
        num_warps=4,
        dtype=dtype,
        architectures=(90,),
        opcodes=("UTMALDG", "UTMASTG", "USETMAXREG"),
        max_registers=MAX_REGISTERS,
    )  # fmt: skip


def _hopper_backward(dtype: str, dim: int, activation: int, tag: str, **extra: Any) -> CompileCase:
    """Items of 128 keys. What is spilled lies outside the loop, or is one scalar or two."""
    halves = 2 if dim == 64 else 1
    share = dim * halves // 2
    shared = extra.get("SHARED_Q", False)
    queries, keys, half = (
        f"tensordesc<{dtype}[1, 1, {rows}, {dim}]>" for rows in (64 * halves, 128, 64)
    )
    return _backward_case(
        f"hopper_backward-{tag}-{dtype}-d{dim}", "backward:backward_kernel",
        (queries, keys, half, f"tensordesc<fp32[1, 1, 64, {share}]>",
         f"tensordesc<{'fp32' if shared else dtype}[1, 1, 64, {share}]>"),
        {"total_q": "i32"},
        {"HALVES": halves, "V_STAGES": halves, "D": dim, "ACTIVATION": activation,
         "SHARED_Q": False, "WIDE": True, "CHAIN": 1, **extra},
    )  # fmt: skip


def _hopper_backward_short(
    dtype: str, dim: int, activation: int, tag: str, **extra: Any
) -> CompileCase:
    """Items of 64 keys."""
    rows = f"tensordesc<{dtype}[1, 1, 64, {dim}]>"
    return _backward_case(
        f"hopper_backward_short-{tag}-{dtype}-d{dim}", "backward_short:backward_short_kernel",
        (rows, rows, rows, "tensordesc<fp32[1, 1, 64, 64]>", rows), {},
        {"D": dim, "ACTIVATION": activation, "OWN_DELTA": activation == SOFTMAX.value, **extra},
    )  # fmt: skip


def _backward_case(
    name: str,
    kernel: str,
    descriptors: tuple[str, str, str, str, str],
    counts: Mapping[str, str],
    constants: Mapping[str, Any],
) -> CompileCase:
    """descriptors: of q and d_out, of k and v, of dk and dv, of the float32 shares, of dq."""
    queries, keys, half, shares, dq = descriptors
    return CompileCase(
        name=name,
        kernel=f"{_PACKAGE}.hopper.{kernel}",
        signature={
            "q_desc": queries, "d_out_desc": queries, "k_desc": keys, "v_desc": keys,
            "dk_desc": half, "dv_desc": half, "shares_desc": shares, "dq_desc": dq,
            "statistics": "*fp32", **_pointers("i32", "items", "count"),
            **dict.fromkeys(("kv_heads", "group", "statistics_rows", "left", "right"), "i32"),
            **dict.fromkeys(("score_scale", "grad_scale", "value_scale"), "fp32"), **counts,
        },
        constexprs={
            "HAS_LEFT": False, "HAS_RIGHT": False, "ALIGN_END": False, "GROUPED": False,
            "FOLDED": False, "HEADS_APART": False, **constants,
        },
        aligned=("statistics", "items", "count", "statistics_rows"),
        num_warps=4,
        dtype=queries.split("<")[1].split("[")[0],
        architectures=(90,),
        opcodes=("UTMALDG", "UTMASTG", "UTMAREDG", "USETMAXREG"),
        max_registers=MAX_REGISTERS,
        spill_limit=_PARKED,
    )  # fmt: skip


_CAUSAL: dict[str, Any] = {"HAS_RIGHT": True, "ALIGN_END": True}
_FOLDED: dict[str, Any] = {**_CAUSAL, "FOLDED": True}
_FOLDED_WINDOW: dict[str, Any] = {**_WINDOW, "FOLDED": True, "HEADS_APART": True}
_SUBTRACT, _EDGES, _EVERY = 2, 1, 0
#: A window with a prefix and last queries; the same, causal.
_BOTH: dict[str, Any] = {**_WINDOW, "BEYOND": PREFIX.value | LAST.value}
_BOTH_CAUSAL: dict[str, Any] = {**_WINDOW, "BEYOND": _BOTH["BEYOND"] | LAST_CAUSAL.value}

CASES: tuple[CompileCase, ...] = (
    _softmax_forward("bf16", 128, _EVERY, "v1"),
    _softmax_forward("bf16", 128, _SUBTRACT, "v2"),
    _softmax_forward("fp16", 64, _SUBTRACT, "v2"),
    _softmax_forward("bf16", 256, _SUBTRACT, "v2", (90, 100)),
    _softmax_forward("bf16", 256, _SUBTRACT, "v2_small_shared", (80, 120)),
    _softmax_forward("fp32", 64, _SUBTRACT, "v2"),
    _softmax_forward("bf16", 128, _SUBTRACT, "v3_persistent", DEAL=1),
    _softmax_forward("bf16", 128, _EDGES, "redo", DEAL=2),
    _softmax_short_keys("bf16", 128),
    _softmax_forward("bf16", 128, _EDGES, "causal", **_CAUSAL),
    _softmax_forward("bf16", 128, _EDGES, "window", **_WINDOW),
    _softmax_forward("bf16", 128, _EDGES, "prefix_last", **_BOTH),
    _softmax_forward("bf16", 128, _EDGES, "prefix_last_causal", **_BOTH_CAUSAL),
    _gdpa_forward("bf16", 128, _FAST_GELU, "fast_gelu"),
    _gdpa_forward("bf16", 64, ACTIVATION_IDS["gelu"], "gelu"),
    _gdpa_forward(
        "bf16", 128, PER_HEAD.value, "per_head", ACTIVATION_SET=activation_set(("silu", "relu"))
    ),
    _gdpa_forward("bf16", 128, _FAST_GELU, "window", **_WINDOW),
    _gdpa_forward("bf16", 128, _FAST_GELU, "prefix_last_causal", **_BOTH_CAUSAL),
    _gdpa_short_keys("bf16", 128, 1),
    _gdpa_short_keys("bf16", 128, 2),
    _gradient("key_value_gradient", "bf16", 128, SOFTMAX.value, "softmax"),
    _gradient("key_value_gradient", "bf16", 128, SOFTMAX.value, "causal", **_CAUSAL),
    _gradient("key_value_gradient", "bf16", 128, SOFTMAX.value, "window", **_WINDOW),
    _gradient("key_value_gradient", "bf16", 128, SOFTMAX.value, "prefix_last", **_BOTH),
    _gradient("key_value_gradient", "bf16", 64, _FAST_GELU, "fast_gelu"),
    _gradient("key_value_gradient", "bf16", 128, _FAST_GELU, "fast_gelu"),
    _gradient("query_gradient", "bf16", 128, SOFTMAX.value, "softmax"),
    _gradient("query_gradient", "bf16", 128, SOFTMAX.value, "window", **_WINDOW),
    _gradient("query_gradient", "bf16", 128, SOFTMAX.value, "prefix_last_causal", **_BOTH_CAUSAL),
    _gradient("query_gradient", "bf16", 64, SOFTMAX.value, "softmax"),
    _gradient("query_gradient", "bf16", 128, _FAST_GELU, "fast_gelu"),
    _gradient("query_gradient", "fp32", 64, SOFTMAX.value, "softmax"),
    _work_list("i32"),
    _work_list("i64"),
    _hopper_forward("bf16", 128, SOFTMAX.value, "softmax"),
    _hopper_forward("fp16", 128, SOFTMAX.value, "softmax"),
    _hopper_forward("bf16", 64, SOFTMAX.value, "softmax"),
    _hopper_forward("bf16", 128, SOFTMAX.value, "short_keys", short=True),
    _hopper_forward("bf16", 64, SOFTMAX.value, "short_keys", short=True),
    _hopper_forward("bf16", 128, SOFTMAX.value, "heads_adjacent", HEADS_APART=False),
    _hopper_forward("bf16", 128, SOFTMAX.value, "resident", RESIDENT=HAND),
    _hopper_forward("bf16", 128, SOFTMAX.value, "resident_short_keys", short=True, RESIDENT=HAND),
    _hopper_forward("bf16", 64, _FAST_GELU, "fast_gelu_resident", RESIDENT=HAND),
    _hopper_forward("bf16", 128, SOFTMAX.value, "scale_first", SCALE_FIRST=True),
    _hopper_forward("bf16", 128, SOFTMAX.value, "causal", **_CAUSAL),
    _hopper_forward("bf16", 128, SOFTMAX.value, "window", **_WINDOW),
    _hopper_forward("bf16", 128, _FAST_GELU, "fast_gelu_window", **_WINDOW),
    _hopper_forward("bf16", 128, SOFTMAX.value, "folded", **_FOLDED),
    _hopper_forward("bf16", 128, SOFTMAX.value, "folded_adjacent", **_FOLDED, HEADS_APART=False),
    _hopper_forward("bf16", 64, SOFTMAX.value, "folded_short_keys", short=True, **_FOLDED),
    _hopper_forward("bf16", 128, _FAST_GELU, "fast_gelu_folded_window", **_FOLDED_WINDOW),
    _hopper_forward("bf16", 128, _FAST_GELU, "fast_gelu_short_keys", short=True),
    *(
        _hopper_forward("bf16", 128, ACTIVATION_IDS[name], name)
        for name in ("fast_gelu", "fast_silu", "gelu", "silu", "gelu_taylor10", "relu")
    ),
    _hopper_backward("bf16", 128, SOFTMAX.value, "softmax"),
    _hopper_backward("bf16", 64, SOFTMAX.value, "softmax"),
    _hopper_backward("bf16", 128, SOFTMAX.value, "chain", CHAIN=4),
    _hopper_backward("bf16", 64, SOFTMAX.value, "chain", CHAIN=4),
    _hopper_backward("fp16", 128, SOFTMAX.value, "window_grouped", **_WINDOW, GROUPED=True),
    _hopper_backward("bf16", 128, SOFTMAX.value, "causal", **_CAUSAL),
    _hopper_backward("bf16", 128, SOFTMAX.value, "folded", **_FOLDED),
    _hopper_backward("bf16", 64, SOFTMAX.value, "folded", **_FOLDED),
    _hopper_backward("bf16", 128, SOFTMAX.value, "folded_window", **_FOLDED_WINDOW, GROUPED=True),
    _hopper_backward("bf16", 128, _FAST_GELU, "fast_gelu_folded", **_FOLDED, WIDE=False),
    _hopper_backward("bf16", 128, SOFTMAX.value, "shared_q", SHARED_Q=True),
    _hopper_backward("bf16", 128, _FAST_GELU, "fast_gelu", WIDE=False),
    _hopper_backward("bf16", 128, _FAST_GELU, "fast_gelu_chain", WIDE=False, CHAIN=4),
    _hopper_backward("bf16", 64, ACTIVATION_IDS["gelu"], "gelu"),
    _hopper_backward_short("bf16", 128, SOFTMAX.value, "softmax"),
    _hopper_backward_short("bf16", 64, SOFTMAX.value, "softmax"),
    _hopper_backward_short("fp16", 128, SOFTMAX.value, "window_grouped", **_WINDOW, GROUPED=True),
    _hopper_backward_short("bf16", 128, SOFTMAX.value, "folded", **_FOLDED),
    _hopper_backward_short("bf16", 128, SOFTMAX.value, "folded_window", **_FOLDED_WINDOW),
    _hopper_backward_short("bf16", 128, _FAST_GELU, "fast_gelu"),
    *BLOCK_CASES,
    *NORM_CASES,
    *MX_CASES,
    *MX_PRODUCT_CASES,
    *MX_ATTENTION_CASES,
    *MX_NORM_CASES,
    *MX_PROJECTION_CASES,
    *MX_HOPPER_CASES,
)
