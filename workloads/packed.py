"""Recipes of inputs for operators with one offsets argument: block_attention and rotary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.reference.block_attention import visible_pairs
from jagbench.reference.rotary import angle_table, log_time_table, position_table
from jagbench.rotary import TokenTable
from jagbench.workloads import counter
from jagbench.workloads.attention import OffsetsType, event_times, jagged_statistics, offsets_of
from jagbench.workloads.lengths import LengthLaw
from jagbench.workloads.values import Normal, ValueLaw, draw_values

TableKind = Literal["none", "position", "log_time"]
TableType = Literal["float32", "values"]

DEFAULT_VALUES = Normal()
#: Seconds at which the log-time coordinate is log 2: an hour.
TIME_SCALE = 3600.0
#: Tables are rounded to multiples of its inverse, where maths libraries agree.
TABLE_UNIT = 1 << 20


@dataclass(frozen=True)
class Table:
    """A rotary table to be drawn.

    kind: "position", or "log_time" for one by token from drawn event times; "none" for no table.
    dim: elements of a head that are turned; None means all of q's and k's head_dim.
    positions: rows of a table by position; None means those of the longest sequence.
    dtype: "float32" in every call, or the dtype of the values.
    """

    kind: TableKind = "none"
    dim: int | None = None
    positions: int | None = None
    dtype: TableType = "float32"


NO_TABLE = Table()
BY_POSITION = Table("position")


@dataclass(frozen=True)
class BlockRecipe:
    """Draws the inputs of block_attention.

    batch: sequences. heads, kv_heads: kv_heads divides heads; None means as many.
    qk_dim, v_dim: head_dim of q and k, and of v and the output; None means the same.
    sequence_lengths: law of the lengths. values: law of q, k, v and the upstream gradient.
    block_size, scale, rotate_values: options of the call; None leaves the option out.
    table: rotary table. padding: rows past the last offset, drawn like any other.
    """

    batch: int
    heads: int
    qk_dim: int
    sequence_lengths: LengthLaw
    kv_heads: int | None = None
    v_dim: int | None = None
    values: ValueLaw = DEFAULT_VALUES
    block_size: int | None = None
    scale: float | None = None
    table: Table = NO_TABLE
    rotate_values: bool | None = None
    padding: int = 0
    offsets_type: OffsetsType = "int64"

    def __post_init__(self) -> None:
        if self.heads % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} kv_heads do not divide {self.heads} heads")
        turned = self.qk_dim if self.table.dim is None else self.table.dim
        least = min(self.qk_dim, self.value_dim if self.rotate_values is not False else self.qk_dim)
        if self.table.kind != "none" and (turned > least or turned % 2):
            raise ValueError(f"a table of {turned} columns does not fit heads of {least}")

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
        names = ("block_size", "scale", "rotate_values")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}

    def lengths(self, seed: int) -> dict[str, list[int]]:
        """Drawn lengths by offsets argument."""
        key = counter.stream(seed, "q_lengths")
        return {"offsets": self.sequence_lengths.draw(self.batch, key)}

    def statistics(self, seed: int) -> dict[str, float]:
        """Realised statistics, named as those of `AttentionRecipe`; pairs are those of rows."""
        drawn = self.lengths(seed)["offsets"]
        size = 64 if self.block_size is None else self.block_size
        pairs = int(visible_pairs(torch.tensor(drawn, dtype=torch.int64), size).sum())
        return jagged_statistics(drawn, drawn, pairs)

    def draw(self, seed: int, dtype: torch.dtype, device: torch.device, upstream: bool) -> Inputs:
        """Inputs of a seed on a device; the same bytes on every machine."""
        from jagbench.reference import OPERATORS

        drawn = self.lengths(seed)["offsets"]
        offsets = offsets_of(drawn, self.offsets_type, device)
        rows = sum(drawn) + self.padding

        def values(role: str, heads: int, dim: int) -> Tensor:
            return draw_values(self.values, role, (rows, heads, dim), seed, dtype, device)

        arguments: dict[str, Any] = {
            "q": values("q", self.heads, self.qk_dim),
            "k": values("k", self.num_kv_heads, self.qk_dim),
            "v": values("v", self.num_kv_heads, self.value_dim),
            "offsets": offsets,
        }
        if self.table.kind != "none":
            arguments["rotary"] = draw_table(
                self.table, self.qk_dim, seed, drawn, self.padding, dtype, device
            )
        gradient = values("upstream", self.heads, self.value_dim) if upstream else None
        return Inputs(OPERATORS["block_attention"], arguments, self.options, gradient)


@dataclass(frozen=True)
class NormedBlockRecipe(BlockRecipe):
    """A `BlockRecipe` whose queries and keys go through QK-norm; qk_norm_eps: its eps.

    A class of its own: another field of `BlockRecipe` would change the digest of every workload.
    """

    qk_norm_eps: float = 1e-6

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options of the call, only those that are set."""
        return {**super().options, "qk_norm_eps": self.qk_norm_eps}


@dataclass(frozen=True)
class RotaryRecipe:
    """Draws the inputs of rotary; fields as of `BlockRecipe`, with a table of one kind or other.

    interleaved, inverse: options of the call; None leaves the option out.
    """

    batch: int
    heads: int
    qk_dim: int
    sequence_lengths: LengthLaw
    values: ValueLaw = DEFAULT_VALUES
    table: Table = BY_POSITION
    interleaved: bool | None = None
    inverse: bool | None = None
    padding: int = 0
    offsets_type: OffsetsType = "int64"

    def __post_init__(self) -> None:
        turned = self.qk_dim if self.table.dim is None else self.table.dim
        if self.table.kind == "none" or turned > self.qk_dim or turned % 2:
            raise ValueError(f"{self.table} does not fit heads of {self.qk_dim}")

    @property
    def num_kv_heads(self) -> int:
        """Heads of the values."""
        return self.heads

    @property
    def value_dim(self) -> int:
        """head_dim of the output."""
        return self.qk_dim

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options of the call, only those that are set."""
        names = ("interleaved", "inverse")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}

    def lengths(self, seed: int) -> dict[str, list[int]]:
        """Drawn lengths by offsets argument."""
        key = counter.stream(seed, "q_lengths")
        return {"offsets": self.sequence_lengths.draw(self.batch, key)}

    def statistics(self, seed: int) -> dict[str, float]:
        """Realised statistics, named as those of `AttentionRecipe`; no row sees another."""
        drawn = self.lengths(seed)["offsets"]
        return jagged_statistics(drawn, drawn, sum(drawn))

    def draw(self, seed: int, dtype: torch.dtype, device: torch.device, upstream: bool) -> Inputs:
        """Inputs of a seed on a device; the same bytes on every machine."""
        from jagbench.reference import OPERATORS

        drawn = self.lengths(seed)["offsets"]
        shape = (sum(drawn) + self.padding, self.heads, self.qk_dim)
        arguments = {
            "x": draw_values(self.values, "q", shape, seed, dtype, device),
            "offsets": offsets_of(drawn, self.offsets_type, device),
            "table": draw_table(self.table, self.qk_dim, seed, drawn, self.padding, dtype, device),
        }
        gradient = None
        if upstream:
            gradient = draw_values(self.values, "upstream", shape, seed, dtype, device)
        return Inputs(OPERATORS["rotary"], arguments, self.options, gradient)


def draw_table(
    table: Table,
    qk_dim: int,
    seed: int,
    lengths: list[int],
    padding: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | TokenTable:
    """The table for sequences of these lengths; padding rows have the angle 0.

    Computed on the CPU in float64 and rounded to multiples of 1 / `TABLE_UNIT`, so that it has the
    same bytes on every machine.
    """
    columns = qk_dim if table.dim is None else table.dim
    target = torch.float32 if table.dtype == "float32" else dtype

    def rounded(exact: Tensor) -> Tensor:
        return ((exact * TABLE_UNIT).round() / TABLE_UNIT).to(device=device, dtype=target)

    if table.kind == "position":
        positions = max(lengths, default=0) if table.positions is None else table.positions
        return rounded(position_table(positions, columns))
    offsets = offsets_of(lengths, "int64", torch.device("cpu"))
    ages = -event_times(counter.stream(seed, "times"), offsets)
    rows = log_time_table(ages, columns, time_scale=TIME_SCALE).rows
    return TokenTable(rounded(torch.cat([rows, angle_table(torch.zeros(padding), columns)])))
