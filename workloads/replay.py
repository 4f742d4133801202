"""Replay: a user's own sequence lengths as a workload.

Read from a text file (one length a line, `#` comments), a column of a CSV or Parquet file, or a
one-dimensional `.npy`. The digest depends on the lengths and options, not on where they were read.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jagbench.mx import SQUARE
from jagbench.workload import Recipe, Workload
from jagbench.workloads.attention import OPERATOR_NAMES, AttentionRecipe
from jagbench.workloads.lengths import Explicit
from jagbench.workloads.mx_norm import MxNormRecipe
from jagbench.workloads.mx_projection import MxProjectionRecipe
from jagbench.workloads.mx_quantize import QuantizeRecipe
from jagbench.workloads.normed import NormLinearRecipe
from jagbench.workloads.packed import BY_POSITION, BlockRecipe, RotaryRecipe
from jagbench.workloads.pffn import PffnRecipe

#: What a workload specification on a command line begins with.
PREFIX = "replay:"


def replay(
    path: str | Path,
    column: str | None = None,
    *,
    operator: str = "jagged_attention",
    k_column: str | None = None,
    heads: int = 4,
    kv_heads: int | None = None,
    qk_dim: int = 128,
    causal: bool = False,
    activation: str = "fast_gelu",
    seed: int = 2026,
) -> Workload:
    """A workload on the lengths in a file, one sequence a row.

    path: a text file, or `.csv`, `.parquet`, `.npy` by its suffix.
    column: column of a CSV or Parquet file; may be left out where there is only one.
    k_column: column of the key lengths; without it they are those of the queries.
    heads, kv_heads, qk_dim, causal: as of `AttentionRecipe`. activation: of gdpa and
        pffn_block (which takes no causal) only. Operators
        with one offsets argument take no k_column nor causal; a rotary table is by position, and
        norm_linear maps heads x qk_dim features to as many under RMSNorm, mx_quantize has as many
        columns in squares.
    Raises ValueError naming the file, the place and the value that is no length, and ImportError
    where a Parquet file is given and pyarrow is missing.
    """
    path = Path(path)
    q = read_lengths(path, column)
    k = None if k_column is None else read_lengths(path, k_column)
    recipe: Recipe
    if operator == "pffn_block":
        if causal:
            raise ValueError(f"{operator} takes no causal={causal}")
        recipe = PffnRecipe(_of_pairs("gdpa", q, k, heads, kv_heads, qk_dim, False, activation))
    elif operator in OPERATOR_NAMES:
        recipe = _of_pairs(operator, q, k, heads, kv_heads, qk_dim, causal, activation)
    else:
        if k is not None or causal:
            raise ValueError(f"{operator} takes no k_column={k_column!r} and no causal={causal}")
        recipe = _packed(operator, q, heads, kv_heads, qk_dim)
    columns = [c for c in (column, k_column) if c is not None]
    name = "-".join((operator, "replay", path.stem, *columns))
    return Workload(
        name,
        operator,
        recipe,
        seed,
        purposes=frozenset({"conformance", "full"}),
        tags=frozenset({"replay"}),
        source=path.name,
        differentiable=operator not in ("mx_quantize", "mx_norm", "mx_projection"),
    )


def _of_pairs(
    operator: str,
    q: list[int],
    k: list[int] | None,
    heads: int,
    kv_heads: int | None,
    qk_dim: int,
    causal: bool,
    activation: str,
) -> AttentionRecipe:
    gdpa = operator == "gdpa"
    return AttentionRecipe(
        operator=operator,
        batch=len(q),
        heads=heads,
        qk_dim=qk_dim,
        q_lengths=Explicit(tuple(q)),
        k_lengths=None if k is None else Explicit(tuple(k)),
        kv_heads=kv_heads,
        causal=causal,
        activation=activation if gdpa else None,
        pre_scale=1 / math.sqrt(qk_dim) if gdpa else None,
    )


def _packed(
    operator: str, lengths: list[int], heads: int, kv_heads: int | None, qk_dim: int
) -> Recipe:
    law = Explicit(tuple(lengths))
    if operator == "block_attention":
        return BlockRecipe(len(lengths), heads, qk_dim, law, kv_heads=kv_heads, table=BY_POSITION)
    if operator == "rotary":
        return RotaryRecipe(len(lengths), heads, qk_dim, law)
    if operator == "norm_linear":
        width = heads * qk_dim
        return NormLinearRecipe(len(lengths), width, width, law)
    if operator == "mx_norm":
        return MxNormRecipe(len(lengths), heads * qk_dim, law)
    if operator == "mx_projection":
        return MxProjectionRecipe(
            len(lengths), heads * qk_dim, heads * qk_dim, law, "none", heads, block=SQUARE
        )
    if operator == "mx_quantize":
        return QuantizeRecipe(len(lengths), heads * qk_dim, law, block=SQUARE)
    packed = ("block_attention", "rotary", "norm_linear", "pffn_block", "mx_quantize", "mx_norm",
              "mx_projection")  # fmt: skip
    known = (*OPERATOR_NAMES, *packed)
    raise ValueError(f"operator must be one of {known}, got {operator!r}")


def workload_from_text(specification: str, operator: str = "jagged_attention") -> Workload:
    """The workload of `replay:PATH` or `replay:PATH:COLUMN`, as given on a command line."""
    if not specification.startswith(PREFIX):
        raise ValueError(f"expected replay:PATH or replay:PATH:COLUMN, got {specification!r}")
    rest = specification.removeprefix(PREFIX)
    path, colon, column = rest.rpartition(":")
    if not colon or Path(rest).exists():
        return replay(rest, operator=operator)
    return replay(path, column, operator=operator)


def read_lengths(path: Path, column: str | None = None) -> list[int]:
    """Lengths in a file; errors as of `replay`."""
    readers: dict[str, Callable[[Path, str | None], list[int]]] = {
        ".csv": _read_csv,
        ".parquet": _read_parquet,
        ".npy": _read_npy,
    }
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    lengths = readers.get(path.suffix.lower(), _read_text)(path, column)
    if not lengths:
        raise ValueError(f"{path}: holds no lengths")
    return lengths


def _read_text(path: Path, column: str | None) -> list[int]:
    _no_column(path, column)
    lines = path.read_text().splitlines()
    stripped = ((i, line.partition("#")[0].strip()) for i, line in enumerate(lines, start=1))
    return [_length(text, f"{path}, line {i}") for i, text in stripped if text]


def _read_csv(path: Path, column: str | None) -> list[int]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        chosen = _choose(path, list(reader.fieldnames or ()), column)
        return [
            _length(row[chosen], f"{path}, line {reader.line_num}, column {chosen!r}")
            for row in reader
        ]


def _read_parquet(path: Path, column: str | None) -> list[int]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"{path}: Parquet needs pyarrow, which is missing: pip install 'jagbench[parquet]'"
        ) from error
    names = pyarrow.parquet.read_schema(path).names
    chosen = _choose(path, list(names), column)
    values = pyarrow.parquet.read_table(path, columns=[chosen]).column(0).to_pylist()
    return [
        _length(value, f"{path}, row {i}, column {chosen!r}")
        for i, value in enumerate(values, start=1)
    ]


def _read_npy(path: Path, column: str | None) -> list[int]:
    _no_column(path, column)
    array = np.load(path, allow_pickle=False)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: expected integers of shape [sequences], got {array.dtype} of shape "
            f"{list(array.shape)}"
        )
    return [_length(value, f"{path}, element {i}") for i, value in enumerate(array.tolist())]


def _no_column(path: Path, column: str | None) -> None:
    if column is not None:
        raise ValueError(f"{path}: this kind of file has no columns, but {column!r} was asked for")


def _choose(path: Path, names: list[str], column: str | None) -> str:
    """The column asked for, or the only one."""
    if column is None and len(names) == 1:
        return names[0]
    if column is None or column not in names:
        asked = "no column was named" if column is None else f"there is no column {column!r}"
        raise ValueError(f"{path}: {asked}; its columns are {names}")
    return column


def _length(value: Any, place: str) -> int:
    """A length of 0 or more from text or an integer; other types are not guessed at."""
    whole = re.fullmatch(r"\s*-?[0-9]+\s*", value) if isinstance(value, str) else None
    if whole is None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{place}: {value!r} is no length")
    length = int(value)
    if length < 0:
        raise ValueError(f"{place}: length {length} is negative")
    return length
