"""Every planted fault of mx_projection, and the test that must catch it."""

from __future__ import annotations

from wrong.fault import Fault
from wrong.fault import on_workloads as _on

FORWARD = "test_forward.py::test_outputs_are_within_budget"
OPERATOR = "mx_projection"
UNROUNDED = "sums_are_not_rounded_before_they_are_quantised"
ALONE = "every_sequence_is_projected_and_quantised_as_if_alone"


def _of(target: str, test: str, parameter: str = "") -> Fault:
    """A fault caught by a test of the operator's own file."""
    return Fault(target, OPERATOR, f"test_mx_projection.py::test_{test}", parameter=parameter)


def _workload(target: str, *names: str) -> tuple[Fault, ...]:
    """A fault that the bytes of workloads show."""
    return _on(target, FORWARD, *(f"{OPERATOR}-{name}" for name in names))


PROJECTION_FAULTS: tuple[Fault, ...] = (
    _of("projections:rounds_the_result_before_it_quantises", UNROUNDED, "1x32"),
    *_workload("projections:rounds_the_result_before_it_quantises", "32x32-smoke"),
    *_workload("projections:rounds_the_product_before_the_bias", "32x32-smoke"),
    *_workload("projections:forgets_the_bias", "32x32-smoke"),
    *_workload("projections:adds_in_half_precision", "1x32-smoke"),
    _of("projections:multiplies_in_bfloat16", "behind_the_identity_are_the_codes_of_x", "1x32"),
    *_workload("projections:drops_the_last_features", "1x32-e4m3-rceil-k33-n72"),
    _of("projections:interleaves_heads", "heads_are_columns_of_the_result_side_by_side", "1x32"),
    _of("norm_quantisers:fills_short_blocks_with_the_bias", ALONE, "32x32"),
    _of("quantisers:straddles_sequences", ALONE, "32x32"),
    *_workload("quantisers:leaves_padding_unwritten", "32x32-padding-past-the-last-offset"),
    *_workload("quantisers:takes_floor_for_rceil", "32x32-smoke"),
    *_workload("quantisers:truncates", "1x32-smoke"),
)
