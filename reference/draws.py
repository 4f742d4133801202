"""Random numbers by position: Philox-4x32-10, the same bits on every machine and in every order.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four words of 32 bits for every counter of four words; int64 tensors, key two words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of factor x; the product wraps around 2^64, its bits are still right."""
    wide = x * factor
    return (wide >> 32) & _WORD, wide & _WORD


def draws(seed: int, rows: Tensor, columns: int, stream: int) -> Tensor:
    """A number of 32 random bits for every column of every row, int64 `[..., columns]`.

    rows int64 `[...]`, at least 0. Column c of row r has word c % 4 of the counter
    (c // 4, r mod 2^32, r // 2^32, stream) under the key (seed mod 2^32, seed // 2^32): its bits
    depend on nothing else, and a kernel gets four columns from one evaluation.
    """
    quads = torch.arange((columns + 3) // 4, device=rows.device)
    row = rows[..., None] + torch.zeros_like(quads)
    counter = (quads + torch.zeros_like(row), row & _WORD, row >> 32, torch.full_like(row, stream))
    words = torch.stack(philox(counter, (seed & _WORD, seed >> 32)), -1)
    return words.flatten(-2)[..., :columns]
