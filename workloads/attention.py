"""Recipe of inputs for operators of queries, keys and values: jagged_attention and gdpa."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from jagbench.bias import BucketedBias, log_time_bias
from jagbench.inputs import Inputs
from jagbench.pairs import Align, Window, check_beyond_the_window, visible_pairs
from jagbench.workload import later
from jagbench.workloads import counter
from jagbench.workloads.lengths import LengthLaw
from jagbench.workloads.values import Normal, QKNormalised, ValueLaw, draw_values

BiasKind = Literal["none", "dense", "log_time"]
BiasHeads = Literal["heads", "one"]
OffsetsType = Literal["int32", "int64"]

_OFFSETS_TYPES = {"int32": torch.int32, "int64": torch.int64}
_BIAS_LAW = Normal(0.5)
#: Operators whose inputs this recipe draws.
OPERATOR_NAMES = ("gdpa", "jagged_attention")
#: Values of a recipe that names no law.
DEFAULT_VALUES = QKNormalised()
#: Gaps between the events of a history: 2^0 to 2^15 seconds, log-uniform.
_GAP_EXPONENTS = 16


@dataclass(frozen=True)
class AttentionRecipe:
    """Draws the inputs of one attention-like operator.

    operator: "jagged_attention" or "gdpa".
    batch: sequences.
    heads, kv_heads: kv_heads divides heads; None means as many.
    qk_dim, v_dim: head_dim of q and k, and of v and the output; None means the same.
    q_lengths: law of the query lengths; None with `dense_rows`.
    k_lengths: law of the key lengths; None means those of the queries.
    dense_rows: rows of one dense query shared by every sequence (pooling by learned seeds).
    values: law of q, k, v and the upstream gradient.
    causal, align, window, prefix, last_full: which query sees which key (`jagbench.pairs`).
    scale, bias, bias_heads, buckets: of jagged_attention.
    activation, pre_scale, post_scale: of gdpa.
    q_padding, k_padding: rows past the last offset. They are drawn like any other.
    """

    operator: str
    batch: int
    heads: int
    qk_dim: int
    q_lengths: LengthLaw | None = None
    k_lengths: LengthLaw | None = None
    dense_rows: int | None = None
    kv_heads: int | None = None
    v_dim: int | None = None
    values: ValueLaw = DEFAULT_VALUES
    causal: bool = False
    align: Align = "end"
    window: Window | None = None
    scale: float | None = None
    bias: BiasKind = "none"
    bias_heads: BiasHeads = "heads"
    buckets: int = 16
    activation: str | tuple[str, ...] | None = None
    pre_scale: float | None = None
    post_scale: float | None = None
    q_padding: int = 0
    k_padding: int = 0
    offsets_type: OffsetsType = "int64"
    prefix: int = later(0)
    last_full: int = later(0)

    def __post_init__(self) -> None:
        if self.operator not in OPERATOR_NAMES:
            raise ValueError(f"operator must be one of {OPERATOR_NAMES}, got {self.operator!r}")
        if (self.dense_rows is None) == (self.q_lengths is None):
            raise ValueError(
                "exactly one of q_lengths and dense_rows must be set, got "
                f"q_lengths={self.q_lengths}, dense_rows={self.dense_rows}"
            )
        if self.dense_rows is not None and (self.k_lengths is None or self.q_padding):
            raise ValueError(
                "a dense query needs k_lengths and takes no padding, got "
                f"k_lengths={self.k_lengths}, q_padding={self.q_padding}"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} kv_heads do not divide {self.heads} heads")
        check_beyond_the_window(self.prefix, self.last_full)
        self._check_options()

    def _check_options(self) -> None:
        names = ("activation", "pre_scale", "post_scale")
        given = [n for n in names if getattr(self, n) is not None]
        if self.operator == "gdpa":
            if self.activation is None:
                raise ValueError("gdpa needs an activation, got None")
            if self.scale is not None or self.bias != "none":
                raise ValueError(f"gdpa takes no scale={self.scale} and no bias={self.bias!r}")
            if isinstance(self.activation, tuple) and len(self.activation) != self.heads:
                raise ValueError(f"{len(self.activation)} activations for {self.heads} heads")
        elif given:
            raise ValueError(f"{self.operator} takes no {given}")

    @property
    def num_kv_heads(self) -> int:
        """Heads of k and v."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def value_dim(self) -> int:
        """head_dim of v and of the output."""
        return self.qk_dim if self.v_dim is None else self.v_dim

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options of the call, only those that are set."""
        optional = ("window", "scale", "activation", "pre_scale", "post_scale")
        options = {n: getattr(self, n) for n in optional if getattr(self, n) is not None}
        if self.causal:
            options["causal"] = True
        if self.align != "end":
            options["align"] = self.align
        options |= {n: getattr(self, n) for n in ("prefix", "last_full") if getattr(self, n)}
        return options

    def lengths(self, seed: int) -> dict[str, list[int]]:
        """Drawn lengths by offsets argument; no "q_offsets" where the query is dense."""
        drawn: dict[str, list[int]] = {}
        if self.q_lengths is not None:
            drawn["q_offsets"] = self.q_lengths.draw(self.batch, counter.stream(seed, "q_lengths"))
        if self.k_lengths is not None:
            drawn["k_offsets"] = self.k_lengths.draw(self.batch, counter.stream(seed, "k_lengths"))
        else:
            drawn["k_offsets"] = list(drawn["q_offsets"])
        return drawn

    def statistics(self, seed: int) -> dict[str, float]:
        """Realised statistics: tokens, pairs, visible and padded pairs, fill, max over mean.

        `*_fill` is mean over max, `*_max_over_mean` its inverse; both 0 where there is no token.
        """
        drawn = self.lengths(seed)
        k = drawn["k_offsets"]
        q = drawn.get("q_offsets", [self.dense_rows or 0] * self.batch)
        visible = visible_pairs(
            torch.tensor(q, dtype=torch.int64),
            torch.tensor(k, dtype=torch.int64),
            causal=self.causal,
            align=self.align,
            window=self.window,
            prefix=self.prefix,
            last_full=self.last_full,
        )
        return jagged_statistics(q, k, int(visible.sum()))

    def draw(self, seed: int, dtype: torch.dtype, device: torch.device, upstream: bool) -> Inputs:
        """Inputs of a seed on a device; the same bytes on every machine."""
        from jagbench.reference import OPERATORS

        drawn = self.lengths(seed)
        k_offsets = self._offsets(drawn["k_offsets"], device)
        q_offsets = self._offsets(drawn["q_offsets"], device) if "q_offsets" in drawn else None
        k_rows = sum(drawn["k_offsets"]) + self.k_padding
        q_rows = self.dense_rows or 0
        if q_offsets is not None:
            q_rows = sum(drawn["q_offsets"]) + self.q_padding

        def values(role: str, rows: int, heads: int, dim: int) -> Tensor:
            return draw_values(self.values, role, (rows, heads, dim), seed, dtype, device)

        arguments: dict[str, Any] = {
            "q": values("q", q_rows, self.heads, self.qk_dim),
            "k": values("k", k_rows, self.num_kv_heads, self.qk_dim),
            "v": values("v", k_rows, self.num_kv_heads, self.value_dim),
            "q_offsets": q_offsets,
            "k_offsets": k_offsets,
        }
        if self.bias != "none":
            arguments["bias"] = self._bias(seed, drawn, dtype, device)
        out_rows = q_rows if q_offsets is not None else self.batch * q_rows
        gradient = values("upstream", out_rows, self.heads, self.value_dim) if upstream else None
        if gradient is not None and q_offsets is None:
            gradient = gradient.view(self.batch, q_rows, self.heads, self.value_dim)
        return Inputs(OPERATORS[self.operator], arguments, self.options, gradient)

    def _offsets(self, lengths: list[int], device: torch.device) -> Tensor:
        return offsets_of(lengths, self.offsets_type, device)

    def _bias(
        self, seed: int, drawn: Mapping[str, list[int]], dtype: torch.dtype, device: torch.device
    ) -> Tensor | BucketedBias:
        columns = self.heads if self.bias_heads == "heads" else 1
        k = drawn["k_offsets"]
        q = drawn.get("q_offsets", [self.dense_rows or 0] * self.batch)
        if self.bias == "dense":
            pairs = sum(m * n for m, n in zip(q, k, strict=True))
            shape = (pairs, 1, columns)
            return draw_values(_BIAS_LAW, "bias", shape, seed, dtype, device)[:, 0]
        shape = (self.buckets, 1, columns)
        table = draw_values(_BIAS_LAW, "bias.table", shape, seed, dtype, device)[:, 0]
        q_offsets, k_offsets = self._offsets(q, device), self._offsets(k, device)
        k_times = event_times(counter.stream(seed, "k_times"), k_offsets)
        # A self-attention's queries are the same events as its keys.
        q_times = k_times
        if self.k_lengths is not None:
            q_times = event_times(counter.stream(seed, "q_times"), q_offsets)
        return log_time_bias(table, q_times, k_times, q_offsets, k_offsets)


def jagged_statistics(q: list[int], k: list[int], visible_pairs: int) -> dict[str, float]:
    """Statistics of a batch of these query and key lengths, of which so many pairs are visible."""
    batch = len(q)
    return {
        "sequences": batch,
        "q_tokens": sum(q),
        "k_tokens": sum(k),
        "pairs": sum(m * n for m, n in zip(q, k, strict=True)),
        "visible_pairs": visible_pairs,
        "padded_pairs": batch * max(q, default=0) * max(k, default=0),
        "q_fill": _ratio(sum(q), batch * max(q, default=0)),
        "k_fill": _ratio(sum(k), batch * max(k, default=0)),
        "q_max_over_mean": _ratio(batch * max(q, default=0), sum(q)),
        "k_max_over_mean": _ratio(batch * max(k, default=0), sum(k)),
        "empty_sequences": sum(m == 0 or n == 0 for m, n in zip(q, k, strict=True)),
    }


def offsets_of(lengths: list[int], kind: OffsetsType, device: torch.device) -> Tensor:
    """Offsets `[batch + 1]` of lengths."""
    sums = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return sums.to(device=device, dtype=_OFFSETS_TYPES[kind])


def event_times(key: int, offsets: Tensor) -> Tensor:
    """Event times in seconds before each sequence's last event, int64 `[total]`, rising."""
    bounds = offsets.long()
    total = int(bounds[-1])
    exponents = counter.lanes_tensor(key, 0, total, offsets.device) % _GAP_EXPONENTS
    clock = torch.bitwise_left_shift(torch.ones_like(exponents), exponents).cumsum(0)
    last = clock[(bounds[1:] - 1).clamp(min=0)] if total else clock.new_zeros(bounds.numel() - 1)
    return clock - last.repeat_interleave(bounds.diff())


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 0.0
