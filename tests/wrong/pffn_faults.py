"""Every planted fault of pffn_block, and the test that must catch it."""

from __future__ import annotations

from wrong.fault import Fault
from wrong.fault import on_workloads as _on

FORWARD = "test_forward.py::test_outputs_are_within_budget"
BACKWARD = "test_backward.py::test_every_gradient_is_within_budget"
GELU, GQA = "pffn_block-d16-gelu", "pffn_block-d32-silu-gqa"


def _of(target: str, test: str, parameter: str = "") -> Fault:
    """A fault caught by a test of the operator's own file."""
    file = "test_pffn_block.py"
    return Fault(f"blocks_of_pffn:{target}", "pffn_block", f"{file}::test_{test}",
                 parameter=parameter)  # fmt: skip


OUTPUTS: tuple[Fault, ...] = tuple(
    fault
    for target in (
        "enters_by_head", "never_centres", "attends_to_raw_queries", "forgets_the_inner_residual",
        "adds_raw_queries_inside", "forgets_the_outer_residual",
        "adds_normalised_queries_outside", "normalises_after_both_residuals", "leaves_by_head",
        "centres_twice",
    )
    for fault in _on(f"blocks_of_pffn:{target}", FORWARD, GELU, GQA)
)  # fmt: skip
GRADIENTS: tuple[Fault, ...] = tuple(
    fault
    for target in (
        "inner_residual_has_no_gradient", "outer_residual_has_no_gradient",
        "second_norm_has_no_backward",
    )
    for fault in _on(f"blocks_of_pffn:{target}", BACKWARD, GELU, GQA)
)  # fmt: skip
PROPERTIES: tuple[Fault, ...] = (
    _of("enters_by_head", "it_is_a_gdpa_between_the_norms_of_torch"),
    _of("leaves_by_head", "beside_its_residual_every_row_has_unit_size_over_all_heads"),
    _of(
        "attends_to_raw_queries",
        "beside_its_residual_a_factor_of_the_queries_changes_nothing",
        "8.0",
    ),
    _of(
        "adds_raw_queries_inside",
        "beside_its_residual_a_factor_of_the_queries_changes_nothing",
        "0.25",
    ),
    _of("forgets_the_inner_residual", "a_query_without_keys_is_normalised_all_the_same"),
    _of(
        "second_norm_has_no_backward",
        "an_upstream_gradient_along_the_normalised_row_passes_the_residual_alone",
    ),
    *_on("blocks_of_pffn:second_norm_has_no_eps", FORWARD, "pffn_block-d32-large-eps"),
)

#: All of them.
PFFN_FAULTS: tuple[Fault, ...] = (*OUTPUTS, *GRADIENTS, *PROPERTIES)
