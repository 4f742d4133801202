"""Our optimised implementation: one among equals, reached by the suite through `--impl` only."""

from jagbench.impl.kernels.gdpa import gdpa
from jagbench.impl.kernels.jagged_attention import jagged_attention
from jagbench.version import __version__

__all__ = ["__version__", "gdpa", "jagged_attention"]
