"""The random Hadamard transform that spreads outliers before quantisation, and leaves products.

Groups of 16, 32 or 64 numbers along a dim are multiplied by D H: random signs, then Sylvester's
matrix over sqrt(size). With the same signs on both operands along the contracted dim,
(X D H)(H^T D Y) = X Y. Sources: arXiv 2502.20586 (MXFP4 training) and arXiv 2509.25149 (NVFP4),
which use it for the operands of the weight gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jagbench.mx import HADAMARD_SIZES, Stream, check_hadamard, check_seed
from jagbench.reference import arguments
from jagbench.reference.autocast import outside_autocast
from jagbench.reference.draws import draws


def hadamard_matrix(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Sylvester's matrix over sqrt(size), `[size, size]`: symmetric and orthogonal.

    Raises ValueError for a size that is not 16, 32 or 64.
    """
    check_hadamard(size)
    if size is None:
        raise ValueError(f"the size of a Hadamard matrix must be one of {HADAMARD_SIZES}, got None")
    index = torch.arange(size)
    # Entry (i, j) is -1 to the power of the number of ones in i & j.
    common = index[:, None] & index
    odd = torch.zeros_like(common)
    for bit in range(size.bit_length()):
        odd = odd ^ ((common >> bit) & 1)
    return (1 - 2 * odd).to(dtype) / math.sqrt(size)


def random_signs(size: int, seed: int) -> Tensor:
    """1 or -1 for every position of a group, float64 `[size]`: the top bits of a stream's draws."""
    check_seed(seed)
    bits = draws(seed, torch.zeros((), dtype=torch.int64), size, Stream.SIGNS)
    return (1 - 2 * (bits >> 31)).to(torch.float64)


@outside_autocast
def random_hadamard(
    x: Tensor, *, size: int = 32, seed: int, dim: int = -1, inverse: bool = False
) -> Tensor:
    """Turn every group of `size` numbers along a dim of x by the random Hadamard transform.

    x: float64, float32, float16 or bfloat16; computed in float32 at least and rounded once.
    size: 16, 32 or 64; the dim must be a multiple of it.
    seed: of the signs, the same in every group, for either operand of a product.
    inverse: undo it.

    Returns a tensor like x. Raises ValueError for arguments that do not fit, with their numbers.
    """
    matrix = hadamard_matrix(size)
    if x.dtype not in arguments.DTYPES:
        raise ValueError(f"x must have one of the dtypes {arguments.DTYPES}, got {x.dtype}")
    if x.dim() == 0 or x.shape[dim] % size:
        raise ValueError(f"dim {dim} of x {tuple(x.shape)} must be a multiple of {size}")
    wide = torch.promote_types(x.dtype, torch.float32)
    turn = (random_signs(size, seed)[:, None] * matrix).to(x.device, wide)
    turn = turn.T if inverse else turn
    moved = x.movedim(dim, -1)
    groups = moved.to(wide).reshape(*moved.shape[:-1], moved.shape[-1] // size, size)
    return (groups @ turn).reshape(moved.shape).movedim(-1, dim).to(x.dtype)
