"""Arguments of the operators on one packed buffer (block attention, rotary), checked."""

from __future__ import annotations

import torch
from torch import Tensor

from jagbench.impl.kernels.arguments import (
    LARGEST_ROW_STRIDE,
    check_arguments,
    check_offsets,
    check_offsets_tensor,
    tensor_arguments,
)
from jagbench.rotary import TokenTable


def check_packed_offsets(operator: str, name: str, values: Tensor, offsets: Tensor) -> None:
    """Type, shape, dtype and device of the offsets of `values`; raises ValueError."""
    for called, value in ((name, values), ("offsets", offsets)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{operator}: {called} must be a tensor, got {type(value).__name__}")
    check_offsets_tensor(operator, "offsets", offsets)
    if offsets.device != values.device:
        raise ValueError(f"{operator}: offsets is on {offsets.device}, {name} on {values.device}")


def packed_arguments(
    operator: str, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and offsets as custom ops take them, checked but for the offsets' values."""
    check_packed_offsets(operator, "q", q, offsets)
    q, k, v, _, offsets = tensor_arguments(operator, q, k, v, None, offsets)
    check_arguments(operator, q, k, v, offsets, offsets)
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"{operator}: q has {q.shape[0]} rows and k has {k.shape[0]}: they share the offsets"
        )
    return q, k, v, offsets


def table_argument(
    operator: str, name: str, table: Tensor | TokenTable, x: Tensor, *others: Tensor
) -> tuple[Tensor, bool]:
    """Rows of a rotary table that turns x and others, and whether they are by token.

    Raises ValueError with the numbers for what does not fit, but for the rows that a table by
    position needs (`check_values_of_offsets`); NotImplementedError if its gradient is wanted.
    """
    by_token = isinstance(table, TokenTable)
    rows = table.rows if isinstance(table, TokenTable) else table
    if not isinstance(rows, Tensor) or rows.dim() != 2:
        found = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"{operator}: {name} must be a tensor of 2 dims, got {found}")
    if rows.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{operator}: {name} must be {x.dtype} or float32, got {rows.dtype}")
    if rows.device != x.device:
        raise ValueError(f"{operator}: {name} is on {rows.device}, the values on {x.device}")
    width, dim = rows.shape[1], min(t.shape[2] for t in (x, *others))
    if width < 2 or width % 2 or width > dim:
        raise ValueError(
            f"{operator}: {name} must have an even number of columns from 2 to the head_dim "
            f"{dim}, got {width}"
        )
    if by_token and rows.shape[0] != x.shape[0]:
        raise ValueError(f"{operator}: {name} has {rows.shape[0]} rows for {x.shape[0]} tokens")
    if rows.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{operator}: no kernel computes the gradient of {name}")
    return rows, by_token


def check_values_of_offsets(
    operator: str, offsets: Tensor, total: int, table: Tensor | None, by_token: bool
) -> None:
    """Values of the offsets, and that a table by position is as long as the longest sequence.

    Not while a CUDA graph is captured: the capture's warm-up run has looked at them.
    """
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    longest = check_offsets(operator, "offsets", offsets, total)
    if table is not None and not by_token and table.shape[0] < longest:
        raise ValueError(
            f"{operator}: the table has {table.shape[0]} positions, and the longest sequence has "
            f"{longest}"
        )


def table_layout(table: Tensor) -> Tensor:
    """The table itself if kernels can address it, else a contiguous copy."""
    fits = table.stride(1) == 1 and table.stride(0) < LARGEST_ROW_STRIDE
    return table if fits else table.contiguous()
