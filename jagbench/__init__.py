"""jagbench: conformance suite and benchmark for jagged kernels of ads ranking models.

`jagbench` itself is the harness and knows no operator. `jagbench.reference` holds the truth,
`jagbench.workloads` the named inputs, `jagbench.suite` the tests, `jagbench.impl` our own kernels,
which the suite reaches only when it is told to (`--impl`).
"""

from jagbench.version import __version__

__all__ = ["__version__"]
