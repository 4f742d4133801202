"""Our optimised implementation: one among equals, reached by the suite through `--impl` only."""

from jagbench.impl.choices import configuration, describe, pin
from jagbench.impl.kernels.block_attention import block_attention
from jagbench.impl.kernels.gdpa import gdpa
from jagbench.impl.kernels.jagged_attention import jagged_attention
from jagbench.impl.kernels.mx import mx_dequantize, mx_quantize
from jagbench.impl.kernels.mx_attention import mx_attention
from jagbench.impl.kernels.mx_gdpa import mx_gdpa
from jagbench.impl.kernels.mx_linear import mx_linear
from jagbench.impl.kernels.mx_matmul import mx_matmul
from jagbench.impl.kernels.mx_norm import mx_layer_norm, mx_norm, mx_norm_gradient, mx_rms_norm
from jagbench.impl.kernels.mx_projection import mx_projection
from jagbench.impl.kernels.norm_linear import norm_linear
from jagbench.impl.kernels.pffn_block import pffn_block
from jagbench.impl.kernels.rotary import rotary
from jagbench.version import __version__

__all__ = [
    "__version__",
    "block_attention",
    "configuration",
    "describe",
    "gdpa",
    "jagged_attention",
    "mx_attention",
    "mx_dequantize",
    "mx_gdpa",
    "mx_layer_norm",
    "mx_linear",
    "mx_matmul",
    "mx_norm",
    "mx_norm_gradient",
    "mx_projection",
    "mx_quantize",
    "mx_rms_norm",
    "norm_linear",
    "pffn_block",
    "pin",
    "rotary",
]
