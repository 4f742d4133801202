"""The adversarial set: small inputs on which kernels of this kind have been wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jagbench.workload import Workload
from jagbench.workloads.attention import AttentionRecipe
from jagbench.workloads.lengths import Explicit, LengthLaw, OneGiant, UniformFill
from jagbench.workloads.values import StronglyNegativeScores

_SMOKE = frozenset({"smoke", "conformance", "full"})
_DEVICE = frozenset({"conformance", "full"})
_FULL = frozenset({"full"})

#: Sequences past the 65,535 that a y or z grid axis can hold.
MANY_SEQUENCES = 65_600


def adversarial(operator: str) -> Iterator[Workload]:
    """The set for one operator."""
    for name, recipe, purposes in (*_edges(), *_tiles(), *_offsets(), *_asymmetric(), *_scale()):
        change: dict[str, object] = {"operator": operator}
        if operator == "gdpa":
            # Most activations vanish on strongly negative scores: nothing would be left to compare.
            negative = isinstance(recipe.values, StronglyNegativeScores)
            activation = "leaky_relu" if negative else "gelu_tanh"
            change |= {"activation": activation, "pre_scale": 1 / math.sqrt(recipe.qk_dim)}
        tags = {"adversarial"} | ({"causal"} if recipe.causal else set())
        yield Workload(
            f"{operator}-{name}",
            operator,
            dataclasses.replace(recipe, **change),  # type: ignore[arg-type]
            purposes=purposes,
            tags=frozenset(tags),
        )


_Case = tuple[str, AttentionRecipe, frozenset[str]]


def _of(q: tuple[int, ...], k: tuple[int, ...] | None = None, heads: int = 2) -> AttentionRecipe:
    """Self-attention on explicit lengths, or cross-attention where `k` is given."""
    keys: LengthLaw | None = None if k is None else Explicit(k)
    return AttentionRecipe("jagged_attention", len(q), heads, 32, Explicit(q), keys)


def _edges() -> Iterator[_Case]:
    yield "empty-batch", _of(()), _SMOKE
    yield "all-sequences-empty", _of((0, 0, 0)), _SMOKE
    yield "first-sequence-empty", _of((0, 21, 40)), _SMOKE
    yield "middle-sequences-empty", _of((33, 0, 0, 18)), _SMOKE
    yield "last-sequence-empty", _of((21, 40, 0)), _SMOKE
    yield "single-token-sequences", _of((1, 1, 2, 1)), _SMOKE
    yield "keys-all-empty", _of((5, 17, 1), (0, 0, 0)), _SMOKE
    yield "queries-all-empty", _of((0, 0), (9, 30)), _SMOKE
    yield "some-keys-and-some-queries-empty", _of((5, 0, 33, 8), (0, 12, 20, 0)), _SMOKE


def _tiles() -> Iterator[_Case]:
    yield "lengths-about-tiles-of-16-and-32", _of((15, 16, 17, 31, 32, 33)), _SMOKE
    yield "lengths-about-tiles-of-64", _of((63, 64, 65)), _SMOKE
    yield "lengths-about-tiles-of-128", _of((127, 128, 129), (65, 63, 64), heads=1), _SMOKE
    both = (127, 128, 129, 255, 256, 257)
    yield "lengths-about-tiles-of-128-and-256", _of(both), _DEVICE
    yield "keys-about-tiles-of-128", _of((17, 64, 1), (127, 128, 129), heads=1), _SMOKE
    # 9 tiles of 128: an odd number of key blocks.
    yield "length-1152", _of((1152, 1, 1151, 1153)), _DEVICE
    beyond = dataclasses.replace(_of((1, 63, 64, 65, 100)), window=(16, 16))
    beyond = dataclasses.replace(beyond, prefix=64, last_full=64)
    yield "prefix-and-last-of-a-tile", beyond, _SMOKE
    beyond = dataclasses.replace(beyond, causal=True, prefix=33, last_full=31)
    yield "causal-prefix-and-last-off-the-tiles", beyond, _SMOKE
    causal = dataclasses.replace(_of((63, 64, 65, 1)), causal=True)
    yield "causal-lengths-about-tiles-of-64", causal, _SMOKE


def _offsets() -> Iterator[_Case]:
    base = _of((13, 0, 37, 20))
    yield "int32-offsets", dataclasses.replace(base, offsets_type="int32"), _SMOKE
    padded = dataclasses.replace(base, q_padding=5, k_padding=7)
    yield "padding-past-the-last-offset", padded, _SMOKE
    padded = dataclasses.replace(_of((0, 0)), q_padding=3, k_padding=2, offsets_type="int32")
    yield "nothing-but-padding", padded, _SMOKE
    padded = dataclasses.replace(_of(()), q_padding=3, k_padding=2)
    yield "empty-batch-with-padding", padded, _SMOKE


def _asymmetric() -> Iterator[_Case]:
    yield "more-queries-than-keys", _of((70, 33, 64), (9, 1, 20)), _SMOKE
    yield "more-keys-than-queries", _of((9, 1, 20), (70, 33, 64)), _SMOKE
    fewer = dataclasses.replace(_of((70, 20, 5), (9, 20, 0)), causal=True)
    yield "causal-rows-that-see-nothing", fewer, _SMOKE
    # Far fewer keys than queries and a narrow window: whole rows and whole tiles are blind.
    start = dataclasses.replace(_of((90, 33), (10, 40)), align="start", window=(3, 2))
    yield "window-rows-that-see-nothing", start, _SMOKE
    # More queries than keys: the first queries lie before the sequence, and see its context alone.
    before = dataclasses.replace(_of((70, 20, 5), (9, 20, 0)), causal=True, window=(2, None))
    yield "prefix-before-the-first-key", dataclasses.replace(before, prefix=3), _SMOKE
    late = dataclasses.replace(before, align="start", last_full=15)
    yield "last-queries-behind-the-last-key", late, _SMOKE
    unseen = dataclasses.replace(_of((4, 30), (60, 90)), causal=True, align="start")
    yield "causal-keys-that-nobody-sees", unseen, _SMOKE


def _scale() -> Iterator[_Case]:
    small = AttentionRecipe("jagged_attention", 14, 1, 32, OneGiant(100, 4))
    yield "small-giant-among-tiny", small, _SMOKE
    large = dataclasses.replace(small, batch=500, heads=4, qk_dim=64, q_lengths=OneGiant(3000, 5))
    yield "giant-among-tiny", large, _DEVICE
    negative = dataclasses.replace(_of((1, 33, 97)), values=StronglyNegativeScores())
    yield "strongly-negative-scores", negative, _SMOKE
    law = UniformFill(0.5, 300)
    negative = dataclasses.replace(negative, batch=16, heads=4, qk_dim=128, q_lengths=law)
    yield "strongly-negative-scores-at-length", negative, _DEVICE
    many = AttentionRecipe("jagged_attention", MANY_SEQUENCES, 2, 32, UniformFill(0.625, 4))
    yield "more-than-65535-sequences", many, _FULL
