"""Every planted fault of mx_norm, and the test that must catch it."""

from __future__ import annotations

from wrong.fault import Fault
from wrong.fault import on_workloads as _on

FORWARD = "test_forward.py::test_outputs_are_within_budget"
OPERATOR = "mx_norm"
PAIR = "the_fused_pair_has_the_codes_of_the_norm_and_then_the_quantisation"
EPS = "eps_is_added_to_the_mean_square_under_the_root"
WEIGHT = "the_weight_of_the_norm_counts_for_the_scale"
STOCHASTIC = "rms-1x32-e5m2-floor-k64-stochastic-dense"
ALONE = "every_sequence_is_normed_and_quantised_as_if_alone"


def _of(target: str, test: str, parameter: str = "") -> Fault:
    """A fault caught by a test of the operator's own file."""
    return Fault(target, OPERATOR, f"test_mx_norm.py::test_{test}", parameter=parameter)


def _workload(target: str, *names: str) -> tuple[Fault, ...]:
    """A fault that the bytes of workloads show."""
    return _on(target, FORWARD, *(f"{OPERATOR}-{name}" for name in names))


OF_THE_PAIR: tuple[Fault, ...] = (
    _of("norm_quantisers:rounds_before_it_quantises", PAIR, "1x32-rms"),
    *_workload("norm_quantisers:rounds_before_it_quantises", "layer-32x32-smoke"),
    *_workload("norm_quantisers:rounds_the_weight", STOCHASTIC),
    _of("norm_quantisers:weighs_after_it_has_quantised", WEIGHT, "1x32"),
    _of("norm_quantisers:quantises_unit_rows", WEIGHT, "1x32"),
    _of("norm_quantisers:quantises_unit_rows", "rows_of_zeros_have_the_codes_of_the_bias",
        "32x32-layer"),
    *_workload("norm_quantisers:approximates_the_root", "rms-1x32-smoke"),
    _of("norm_quantisers:takes_scales_of_the_raw_row", "the_size_of_a_row_reaches_no_scale", "rms"),
    *_workload("norm_quantisers:takes_scales_of_the_raw_row", "layer-32x32-smoke"),
    _of("norm_quantisers:fills_short_blocks_with_the_bias", "a_bias_does_not_fill_short_blocks",
        "32x32"),
)  # fmt: skip

OF_THE_NORM: tuple[Fault, ...] = (
    _of("norms:ignores_eps", EPS, "32x32"),
    _of("norms:adds_eps_outside_the_root", EPS, "32x32"),
    _of("norms:never_centres", "a_constant_added_to_a_row_does_not_change_its_layer_norm"),
    *_workload("norms:divides_by_one_feature_less", "layer-32x32-smoke"),
    *_workload("norms:divides_by_the_padded_features", "rms-1x32-e4m3-rceil-k72-uniform"),
    *_workload("norms:keeps_statistics_in_half", "rms-1x32-smoke"),
    *_workload("norms:centres_with_a_rounded_mean", "layer-32x32-larger-offset"),
)

OF_THE_CODES: tuple[Fault, ...] = (
    *_workload("quantisers:takes_floor_for_rceil", "layer-32x32-smoke"),
    *_workload("quantisers:scale_off_by_one", "rms-1x32-smoke"),
    *_workload("quantisers:straddles_rows", "rms-1x32-e4m3-rceil-k72-uniform"),
    _of("quantisers:straddles_sequences", ALONE, "32x32-rms"),
    _of("quantisers:packs_scales_side_by_side", ALONE, "32x32-rms"),
    *_workload("quantisers:truncates", "rms-1x32-smoke"),
    *_workload("quantisers:ignores_the_seed", STOCHASTIC),
    *_workload("quantisers:swallows_nan", "rms-32x32-not-numbers"),
    *_workload("quantisers:leaves_padding_unwritten", "layer-32x32-padding-past-the-last-offset"),
)

#: All of them.
NORM_QUANTISER_FAULTS: tuple[Fault, ...] = (*OF_THE_PAIR, *OF_THE_NORM, *OF_THE_CODES)
