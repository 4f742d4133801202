"""Tile sizes: one table, one rule of validity, and the way to pin another choice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from jagbench.impl.kernels.interpreter import INTERPRET

Variant = Literal["auto", "v1", "v2", "v3"]
BackwardForm = Literal["auto", "split", "atomic"]
Tier = Literal["auto", "portable", "hopper"]
_VARIANTS: tuple[Variant, ...] = ("auto", "v1", "v2", "v3")
_FORMS: tuple[BackwardForm, ...] = ("auto", "split", "atomic")
_TIERS: tuple[Tier, ...] = ("auto", "portable", "hopper")


@dataclass(frozen=True)
class TileConfig:
    """Tile of one kernel: query rows, key rows, warps a program, software pipeline stages."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_k} warps {self.num_warps} stages {self.num_stages}"

    @staticmethod
    def parse(text: str) -> TileConfig:
        """Inverse of `str`. Raises ValueError for anything else."""
        found = re.fullmatch(r"(\d+)x(\d+) warps (\d+) stages (\d+)", text.strip())
        if found is None:
            raise ValueError(f"tiles are written '128x64 warps 8 stages 3', got {text!r}")
        return TileConfig(*(int(number) for number in found.groups()))

    def __post_init__(self) -> None:
        for name, size in (("block_q", self.block_q), ("block_k", self.block_k)):
            if size not in (16, 32, 64, 128, 256):
                raise ValueError(f"{name} must be a power of two from 16 to 256, got {size}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps}")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be from 1 to 8, got {self.num_stages}")


@dataclass(frozen=True)
class Schedule:
    """How an operator is computed; never what.

    variant: generation of the portable forward kernel. "auto" is v3 where sequences are long and
        tensor descriptors can be had, else v2. gdpa has one generation and takes v3 as
        "persistent". A generation that is named keeps the whole call portable.
    backward: "split" (dQ and dK/dV apart, bit-equal on repeats) or "atomic" (dQ by atomics), both
        portable; "auto" is the tier's: split, or on Hopper one kernel that adds dQ in no fixed
        order.
    forward, query_gradient, key_value_gradient: tiles of the three portable kernels; None takes the
        table. A pass whose tiles are given is portable.
    tier: "portable" (Triton, any device), "hopper" (Gluon; NotImplementedError for a call it cannot
        take), or "auto", hopper for every call it can take (`hopper.support.unsupported`).
    """

    variant: Variant = "auto"
    backward: BackwardForm = "auto"
    forward: TileConfig | None = None
    query_gradient: TileConfig | None = None
    key_value_gradient: TileConfig | None = None
    tier: Tier = "auto"

    def __post_init__(self) -> None:
        if self.variant not in _VARIANTS:
            raise ValueError(f"variant must be one of {_VARIANTS}, got {self.variant!r}")
        if self.backward not in _FORMS:
            raise ValueError(f"backward must be one of {_FORMS}, got {self.backward!r}")
        if self.tier not in _TIERS:
            raise ValueError(f"tier must be one of {_TIERS}, got {self.tier!r}")
        if self.tier == "hopper" and self.forward_tier == "portable":
            raise ValueError(
                f"tier 'hopper' contradicts the portable variant {self.variant!r} or its tiles"
            )

    @property
    def forward_tier(self) -> Tier:
        """Tier of the forward pass."""
        named = self.variant != "auto" or self.forward is not None
        return "portable" if named else self.tier

    @property
    def backward_tier(self) -> Tier:
        """Tier of the backward pass."""
        tiles = self.query_gradient is not None or self.key_value_gradient is not None
        named = self.variant != "auto" or self.backward != "auto" or tiles
        return "portable" if named else self.tier

    def encode(self, *, repeatable: bool = False) -> list[int]:
        """As integers, the form in which a custom op takes it.

        repeatable: with the backward that gives the same bits every time.
        """
        form: BackwardForm = "split" if repeatable else self.backward
        code = [_VARIANTS.index(self.variant), _FORMS.index(form), _TIERS.index(self.tier)]
        for config in (self.forward, self.query_gradient, self.key_value_gradient):
            code += [0, 0, 0, 0] if config is None else list(astuple(config))
        return code

    @staticmethod
    def decode(code: Sequence[int]) -> Schedule:
        """Inverse of `encode`."""
        return _decode(tuple(code))


# Cached, as the table's tiles are below: both are asked for in every call.
@cache
def _decode(code: tuple[int, ...]) -> Schedule:
    forward, query, key_value = (
        TileConfig(*code[i : i + 4]) if code[i] else None for i in range(3, len(code), 4)
    )
    variant, form, tier = _VARIANTS[code[0]], _FORMS[code[1]], _TIERS[code[2]]
    return Schedule(variant, form, forward, query, key_value, tier)


_OF_TIER: dict[str, Schedule] = {tier: Schedule(tier=tier) for tier in _TIERS}


def as_schedule(operator: str, schedule: Schedule | Tier) -> Schedule:
    """A schedule, given as one or by the name of its tier; ValueError for anything else."""
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str) or schedule not in _OF_TIER:
        raise ValueError(
            f"{operator}: schedule must be a Schedule or one of {_TIERS}, got {schedule!r}"
        )
    return _OF_TIER[schedule]


def tier_alone(
    operator: str, schedule: Schedule | Tier, forms: Sequence[BackwardForm] = ("auto",)
) -> Schedule:
    """`as_schedule` for an operator that has no variants and takes no tiles of pairs.

    forms: of the backward, those it has. Raises NotImplementedError for a schedule that names more.
    """
    plan = as_schedule(operator, schedule)
    named = (plan.variant, plan.forward, plan.query_gradient, plan.key_value_gradient)
    if named != ("auto", None, None, None) or plan.backward not in forms:
        raise NotImplementedError(f"{operator}: its schedule is a tier alone, got {plan}")
    return plan


#: Kernels that have a row in the table. `softmax_tma` is v3 with descriptors; `_short` keep keys
#: on chip (`_short2`: two tiles of them); `_long` and `_few` are for long key sides and few query
#: rows; `block` ones have as many keys as a block, whatever the row says, and as many stages as
#: fit beside the angles of a `_rotary` one.
Kernel = Literal[
    "softmax", "softmax_tma", "softmax_short", "gdpa", "gdpa_short", "gdpa_short2",
    "query_gradient", "query_gradient_few", "gdpa_query_gradient",
    "key_value_gradient", "key_value_gradient_long", "gdpa_key_value_gradient",
    "block", "block_rotary", "block_gradient", "block_rotary_gradient",
]  # fmt: skip

# (kernel, width): width is the padded head dim (64, 128 or 256). 16-bit types. Chosen from
# benchmarks/sweep_tiles.py on an H200 (triton 3.6.0); other devices run the same tiles.
_TABLE: dict[tuple[Kernel, int], TileConfig] = {
    ("softmax", 64): TileConfig(128, 64, 8, 3),
    ("softmax", 128): TileConfig(64, 32, 4, 3),
    ("softmax", 256): TileConfig(128, 64, 8, 2),
    ("softmax_tma", 64): TileConfig(128, 64, 8, 3),
    ("softmax_tma", 128): TileConfig(128, 64, 8, 3),
    ("softmax_tma", 256): TileConfig(128, 32, 8, 3),
    ("softmax_short", 64): TileConfig(64, 64, 4, 3),
    ("softmax_short", 128): TileConfig(64, 64, 4, 3),
    ("gdpa", 64): TileConfig(64, 64, 4, 3),
    ("gdpa", 128): TileConfig(64, 32, 4, 3),
    ("gdpa", 256): TileConfig(128, 32, 8, 3),
    ("gdpa_short", 64): TileConfig(64, 64, 4, 3),
    ("gdpa_short", 128): TileConfig(64, 64, 4, 3),
    ("gdpa_short2", 64): TileConfig(64, 64, 4, 2),
    ("gdpa_short2", 128): TileConfig(64, 64, 4, 2),
    ("query_gradient", 64): TileConfig(128, 64, 8, 3),
    ("query_gradient", 128): TileConfig(128, 32, 8, 3),
    ("query_gradient", 256): TileConfig(128, 32, 8, 3),
    ("query_gradient_few", 64): TileConfig(64, 32, 4, 3),
    ("query_gradient_few", 128): TileConfig(64, 32, 4, 3),
    ("query_gradient_few", 256): TileConfig(64, 32, 4, 3),
    ("gdpa_query_gradient", 64): TileConfig(64, 32, 4, 3),
    ("gdpa_query_gradient", 128): TileConfig(128, 32, 8, 3),
    ("gdpa_query_gradient", 256): TileConfig(128, 32, 8, 3),
    ("key_value_gradient", 64): TileConfig(32, 64, 4, 2),
    ("key_value_gradient", 128): TileConfig(32, 64, 4, 3),
    ("key_value_gradient", 256): TileConfig(64, 64, 8, 2),
    ("key_value_gradient_long", 64): TileConfig(32, 64, 4, 2),
    ("key_value_gradient_long", 128): TileConfig(64, 128, 8, 3),
    ("key_value_gradient_long", 256): TileConfig(64, 64, 8, 2),
    ("gdpa_key_value_gradient", 64): TileConfig(32, 64, 4, 3),
    ("gdpa_key_value_gradient", 128): TileConfig(32, 64, 4, 3),
    ("gdpa_key_value_gradient", 256): TileConfig(64, 64, 8, 2),
    # results/nvidia-h200/variants/block-tiles-*.txt, head dim 128; others by analogy.
    ("block", 64): TileConfig(64, 64, 4, 2),
    ("block", 128): TileConfig(64, 64, 4, 2),
    ("block", 256): TileConfig(64, 64, 8, 1),
    ("block_rotary", 64): TileConfig(64, 64, 4, 2),
    ("block_rotary", 128): TileConfig(64, 64, 4, 1),
    ("block_rotary", 256): TileConfig(64, 64, 8, 1),
    ("block_gradient", 64): TileConfig(64, 64, 4, 2),
    ("block_gradient", 128): TileConfig(64, 64, 4, 3),
    ("block_gradient", 256): TileConfig(64, 64, 8, 1),
    ("block_rotary_gradient", 64): TileConfig(64, 64, 4, 2),
    ("block_rotary_gradient", 128): TileConfig(64, 64, 8, 2),
    ("block_rotary_gradient", 256): TileConfig(64, 64, 8, 1),
}


#: Tiles of the kernels launched since `take_used`; tiles pinned in place of the table's.
_used: dict[str, object] = {}
_pinned: dict[tuple[Kernel, int], TileConfig] = {}


def take_used() -> dict[str, str]:
    """Kernel -> tiles of the launches since the last call of this.

    Kernels of the Hopper tier are called "hopper_...", all others are portable.
    """
    found = {kernel: str(tiles) for kernel, tiles in sorted(_used.items())}
    _used.clear()
    return found


def note_used(kernel: str, tiles: object) -> None:
    """Remember a launch for `take_used`: a launch of the Hopper tier, which chooses by itself.

    tiles: what `str` makes words of, when asked.
    """
    _used[kernel] = tiles


def note_tier(kernel: str) -> None:
    """Remember that a kernel ran, if its launch has not said with which tiles."""
    _used.setdefault(kernel, "tiles not told")


def pin_tiles(choices: Mapping[str, str]) -> None:
    """Use other tiles than the table's from now on, in this process; an empty mapping undoes it.

    Of the portable kernels: the Hopper tier has no table, and takes no notice.

    choices: "kernel/width" -> tiles, as "query_gradient/128": "128x32 warps 8 stages 3"; width is
        the padded head dim (64, 128 or 256). Raises ValueError for a kernel or width not in the
        table, and changes nothing then.
    """
    found = {}
    for name, text in choices.items():
        kernel, _, width = name.partition("/")
        key = next((k for k in _TABLE if (k[0], str(k[1])) == (kernel, width)), None)
        if key is None:
            known = ", ".join(f"{k}/{w}" for k, w in _TABLE)
            raise ValueError(f"no tiles are called {name!r}; there are {known}")
        found[key] = TileConfig.parse(text)
    _pinned.clear()
    _pinned.update(found)
    table_config.cache_clear()


def padded(dim: int) -> int:
    """Width of the block that holds a head: the next power of two, at least 16 (a matrix step)."""
    return max(16, 1 << (dim - 1).bit_length())


def tile_config(
    kernel: Kernel,
    like: Tensor,
    qk_dim: int,
    v_dim: int,
    pinned: TileConfig | None,
) -> TileConfig:
    """The pinned tiles if there are any, else the table's, cut to the shared memory of the device.

    pinned: of this call; they come before those of `pin_tiles`, which the interpreter takes too.
    like: a tensor of the call; its dtype and device count.
    """
    tiles = pinned or _pinned.get((kernel, _width(qk_dim, v_dim)))
    if tiles is None and INTERPRET.value:
        # Cost goes with the number of block operations: few and large.
        tiles = TileConfig(64, 64, 4, 1)
    if tiles is None:
        limit = shared_memory(like.device.index or 0)
        tiles = table_config(kernel, like.dtype, qk_dim, v_dim, limit)
    _used[kernel] = tiles
    return tiles


def _width(qk_dim: int, v_dim: int) -> int:
    """The table's width for head dims."""
    return max(64, padded(qk_dim), padded(v_dim))


@cache
def table_config(
    kernel: Kernel, dtype: torch.dtype, qk_dim: int, v_dim: int, shared_limit: int
) -> TileConfig:
    """The table's tiles, cut until they fit `shared_limit` bytes of shared memory."""
    width = _width(qk_dim, v_dim)
    if (chosen := _pinned.get((kernel, width))) is not None:
        return chosen
    if dtype == torch.float32:
        # IEEE products run on the plain ALUs, unrolled: small tiles, or registers spill.
        return TileConfig(32, 32, 4, 2) if width <= 128 else TileConfig(16, 32, 4, 1)
    if kernel.startswith("block"):
        return _TABLE[kernel, width]  # cut by `block_attention_launch.fitting_tiles`
    # The short-key kernels are not used beyond width 128; their callers ask before they look.
    tiles = _TABLE[kernel, min(width, 128) if "_short" in kernel else width]
    while _shared_bytes(kernel, tiles, width) > shared_limit:
        tiles = _smaller(kernel, tiles)
    return tiles


def _by_keys(kernel: Kernel) -> bool:
    """Whether a kernel stays with a tile of keys and walks queries."""
    return "key_value" in kernel


def _shared_bytes(kernel: Kernel, tiles: TileConfig, width: int) -> int:
    """Shared memory of a 16-bit kernel: the tile it stays with, and each stage of what it walks.

    Forward kernels stay with Q, the others with two tensors (Q and dO, or K and V); all walk two.
    Compiled kernels use this or less (tests/test_ahead_of_time.py holds them to the limit).
    """
    stay, walk = tiles.block_q, tiles.block_k
    if _by_keys(kernel):
        stay, walk = walk, stay
    tensors = 2 if "gradient" in kernel else 1
    return 2 * width * (tensors * stay + 2 * tiles.num_stages * walk)


def _smaller(kernel: Kernel, tiles: TileConfig) -> TileConfig:
    """The next smaller tiles: stages down to 2 first, then fewer rows, then one stage."""
    if tiles.num_stages > 2:
        return replace(tiles, num_stages=tiles.num_stages - 1)
    if _by_keys(kernel) and tiles.block_k > 32:
        return replace(tiles, block_k=tiles.block_k // 2)
    if not _by_keys(kernel) and tiles.block_q > 64:
        return replace(tiles, block_q=tiles.block_q // 2)
    if tiles.block_q > 32:
        return replace(tiles, block_q=tiles.block_q // 2)
    if tiles.num_stages > 1:
        return replace(tiles, num_stages=1)
    raise ValueError(f"no tiles of {kernel} fit this device's shared memory (last tried {tiles})")


@cache
def shared_memory(device: int) -> int:
    """Bytes of shared memory that a program may use on a GPU."""
    # torch's stub lacks the field.
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
