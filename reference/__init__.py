"""The truth: every operator as a short loop over sequences, in any float dtype.

An implementation like any other (`--impl=jagbench.reference`). Attributes named after an operator
are the functions; the modules of the same names are imported from by their full path
(`from jagbench.reference.gdpa import GDPA`).
"""

from collections.abc import Mapping

from jagbench.reference.block_attention import BLOCK_ATTENTION, block_attention
from jagbench.reference.gdpa import GDPA, gdpa
from jagbench.reference.jagged_attention import JAGGED_ATTENTION, jagged_attention
from jagbench.reference.mx import mx_dequantize, mx_quantize
from jagbench.reference.mx_attention import mx_attention
from jagbench.reference.mx_gdpa import mx_gdpa
from jagbench.reference.mx_matmul import mx_linear, mx_matmul
from jagbench.reference.mx_norm import mx_norm
from jagbench.reference.mx_norm_operator import MX_NORM
from jagbench.reference.mx_operator import MX_QUANTIZE
from jagbench.reference.mx_products import MX_ATTENTION, MX_GDPA, MX_LINEAR, MX_MATMUL
from jagbench.reference.mx_projection import mx_projection
from jagbench.reference.mx_projection_operator import MX_PROJECTION
from jagbench.reference.norm_linear import NORM_LINEAR, norm_linear
from jagbench.reference.pffn_block import PFFN_BLOCK, pffn_block
from jagbench.reference.rotary import ROTARY, rotary
from jagbench.spec import Operator

#: Every operator by name.
OPERATORS: Mapping[str, Operator] = {
    operator.name: operator
    for operator in (
        JAGGED_ATTENTION,
        GDPA,
        BLOCK_ATTENTION,
        ROTARY,
        NORM_LINEAR,
        PFFN_BLOCK,
        MX_QUANTIZE,
        MX_NORM,
        MX_PROJECTION,
        MX_LINEAR,
        MX_ATTENTION,
        MX_GDPA,
        MX_MATMUL,
    )
}

__all__ = [
    "OPERATORS",
    "block_attention",
    "gdpa",
    "jagged_attention",
    "mx_attention",
    "mx_dequantize",
    "mx_gdpa",
    "mx_linear",
    "mx_matmul",
    "mx_norm",
    "mx_projection",
    "mx_quantize",
    "norm_linear",
    "pffn_block",
    "rotary",
]
