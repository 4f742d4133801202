"""What the kernels of MXFP8 attention and GDPA are compiled to ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jagbench.ahead_of_time import ARCHITECTURES, MATRIX_OPCODES, CompileCase
from jagbench.impl.kernels.activations import ACTIVATION_IDS, SOFTMAX
from jagbench.impl.kernels.mx_attention_launch import (
    Operands,
    Pass,
    forward_constants,
    gradient_constants,
    head_block,
    table_tiles,
)
from jagbench.impl.kernels.tuning import TileConfig
from jagbench.mx import SQUARE, AttentionRecipe

_PACKAGE = "jagbench.impl.kernels"
_GELU = ACTIVATION_IDS["gelu_tanh"]
_COUNTS = (
    *("batch", "total_q", "total_k", "left", "right", "prefix", "last_full"),
    *("bias_row", "bias_head"),
)
_WINDOW: dict[str, Any] = {"HAS_LEFT": True, "HAS_RIGHT": True, "ALIGN_END": True}
_DEFAULT = AttentionRecipe()
#: Native block-scaled products: tcgen05.mma of 8-bit types, and mma.sync with block_scale.
_NATIVE: Mapping[int, str | None] = {80: None, 90: None, 100: "UTCQMMA", 120: "QMMA"}
#: Bytes of stack a thread that loop invariants may be parked in at window edges, and elsewhere.
_AT_EDGES, _PARKED = 512, 64


def _operands(names: tuple[str, ...], operands: Operands) -> dict[str, str]:
    """Pointers of tensors and scales; values in bf16 stand in for the scales they do not have."""
    kind = "*bf16" if operands == "values" else "*u8"
    return {name: kind for tensor in names for name in (tensor, _scales(tensor))}


def _scales(tensor: str) -> str:
    return "d_scales" if tensor == "d_out" else f"{tensor}_scales"


def _case(
    which: Pass, kernel: str, tag: str, signature: Mapping[str, str],
    constants: Mapping[str, Any], dim: int, config: TileConfig | None,
    architectures: tuple[int, ...], **options: Any,
) -> CompileCase:  # fmt: skip
    """A case of int32 offsets, without a bias, with the tiles of its first architecture."""
    tiles = config or table_tiles(which, dim, dim, architectures[0] // 10)
    sizes = {
        "D": dim, "DV": dim, "BLOCK_D": head_block(dim), "BLOCK_DV": head_block(dim),
        "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k, "HAS_LEFT": False, "HAS_RIGHT": False,
        "ALIGN_END": False, "BEYOND": 0, "SHARED_Q": False, "BIAS": 0, "ACTIVATION_SET": 0,
        "bias": None, "bucket_ids": None, "activation_ids": None, "pair_offsets": None, **constants,
    }  # fmt: skip
    pointers = dict.fromkeys(("q_offsets", "k_offsets", "tile_sequence", "tile_block"), "*i32")
    whole = {**signature, **pointers, **dict.fromkeys(_COUNTS, "i32")}
    if not sizes["BEYOND"]:
        sizes |= {"prefix": None, "last_full": None}
    live = {name: kind for name, kind in whole.items() if name not in sizes}
    edges = sizes["HAS_LEFT"] or sizes["HAS_RIGHT"]
    return CompileCase(
        name=f"mx_{which}-{tag}-d{dim}",
        kernel=f"{_PACKAGE}.{kernel}",
        signature=live,
        constexprs=sizes,
        aligned=tuple(name for name, kind in live.items() if kind.startswith("*")),
        architectures=architectures,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        spill_limit=_AT_EDGES if edges else _PARKED,
        **options,
    )


def forward_case(
    tag: str, operands: Operands, recipe: AttentionRecipe = _DEFAULT, dim: int = 128,
    activation: int = SOFTMAX.value, config: TileConfig | None = None, dtype: str = "bf16",
    architectures: tuple[int, ...] | None = None, **others: Any,
) -> CompileCase:  # fmt: skip
    """A forward pass; others: constants."""
    signature = {
        **_operands(("q", "k", "v"), operands), "out": f"*{dtype}", "lse": "*fp32",
        **dict.fromkeys(("heads", "group", "out_rows"), "i32"),
        **dict.fromkeys(("score_scale", "out_scale"), "fp32"),
    }  # fmt: skip
    constants = {"ACTIVATION": activation, **forward_constants(recipe, operands), **others}
    native = operands == "native"
    return _case(
        "forward", "mx_attention_kernels:mx_attention_forward_kernel", f"{tag}-{operands}-{dtype}",
        signature, constants, dim, config,
        architectures or ((100, 120) if native else ARCHITECTURES), dtype=dtype,
        matrix_opcode=_NATIVE if native else MATRIX_OPCODES,
    )  # fmt: skip


def gradient_case(
    which: Pass, tag: str, recipe: AttentionRecipe = _DEFAULT, dim: int = 128,
    activation: int = SOFTMAX.value, config: TileConfig | None = None, dtype: str = "bf16",
    operands: Operands = "values", architectures: tuple[int, ...] = ARCHITECTURES, **others: Any,
) -> CompileCase:  # fmt: skip
    """A pass of the backward; others: constants."""
    key_value = which == "key_value_gradient"
    gradients = ("dk", "dv") if key_value else ("dq",)
    signature = {
        **_operands(("q", "k", "v", "d_out"), operands), "statistics": "*fp32",
        **dict.fromkeys(gradients, f"*{dtype}"),
        **dict.fromkeys(("statistics_rows", "seed_low", "seed_high"), "i32"),
        **dict.fromkeys(("score_scale", "grad_scale"), "fp32"),
        **({"value_scale": "fp32", "kv_heads": "i32"} if key_value else
           {"heads": "i32", "group": "i32"}),
    }  # fmt: skip
    extra: dict[str, Any] = {"GROUP": 1}
    if not key_value:
        extra = {"d_bias": None, "BUCKETS": 1, "BUCKET_BLOCK": 16, "BIAS_GRADIENT": False}
    constants = {
        **extra, "ACTIVATION": activation, **gradient_constants(recipe, operands, key_value),
        **others,
    }  # fmt: skip
    return _case(
        which, f"mx_attention_gradients:mx_{which}_kernel", f"{tag}-{operands}-{dtype}",
        signature, constants, dim, config, architectures, dtype=dtype,
    )  # fmt: skip


_OTHER = AttentionRecipe("e5m2", "e5m2", "floor", SQUARE, row_sum="quantized")
_NEAREST = AttentionRecipe(gradient_rounding="nearest", value_block=SQUARE)
_GRADIENTS: tuple[Pass, ...] = ("query_gradient", "key_value_gradient")

# Not every case for every architecture: each takes seconds.
CASES: tuple[CompileCase, ...] = (
    forward_case("softmax", "values", architectures=(80, 90)),
    forward_case("softmax", "codes", architectures=(90,)),
    forward_case("softmax", "native"),
    forward_case("gelu_tanh", "native", _OTHER, 64, _GELU, architectures=(100,)),
    forward_case("window", "values", dtype="fp16", architectures=(90,), **_WINDOW),
    *(gradient_case(which, "softmax", architectures=(90,)) for which in _GRADIENTS),
    *(gradient_case(which, "workstation", architectures=(120,)) for which in _GRADIENTS),
    *(gradient_case(which, "nearest", _NEAREST, 64, architectures=(100,)) for which in _GRADIENTS),
)
