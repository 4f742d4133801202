"""Every planted fault of mx_quantize, and the test that must catch it."""

from __future__ import annotations

from wrong.fault import Fault
from wrong.fault import on_workloads as _on

FORWARD = "test_forward.py::test_outputs_are_within_budget"
UNCHANGED = "test_isolation.py::test_inputs_are_unchanged_bit_for_bit"
REFUSED = "test_signature.py::test_an_unknown_value_of_an_option_raises_value_error"
SCALES = "scales_of_known_largest_magnitudes"
CODES = "codes_of_known_numbers"
OPERATOR = "mx_quantize"


def _of(target: str, test: str, parameter: str = "") -> Fault:
    """A fault caught by a test of the operator's own file."""
    caught_by = f"test_mx_quantize.py::test_{test}"
    return Fault(f"quantisers:{target}", OPERATOR, caught_by, parameter=parameter)


def _rounding(target: str, test: str, parameter: str = "") -> Fault:
    """A fault caught by a test of stochastic rounding."""
    caught_by = f"test_mx_rounding.py::test_{test}"
    return Fault(f"quantisers:{target}", OPERATOR, caught_by, parameter=parameter)


def _workload(target: str, *names: str) -> tuple[Fault, ...]:
    """A fault that the bytes of workloads show."""
    return _on(f"quantisers:{target}", FORWARD, *(f"{OPERATOR}-{name}" for name in names))


OF_SCALES: tuple[Fault, ...] = (
    _of("takes_floor_for_rceil", SCALES, "rceil-e4m3-1x32"),
    _of("takes_floor_for_rceil", "under_rceil_every_element_is_within_half_a_step", "e4m3-32x32"),
    *_workload("takes_floor_for_rceil", "1x32-smoke", "32x32-boundary-maxima-e4m3-rceil"),
    _of("takes_rceil_for_floor", SCALES, "floor-e4m3-32x32"),
    _of("takes_rceil_for_floor", "values_that_were_quantised_come_back", "floor-e4m3-1x32"),
    _of("takes_floor_for_even", SCALES, "even-e5m2-32x1"),
    *_workload("takes_floor_for_even", "1x32-boundary-maxima-e2m1-even"),
    _of("scale_off_by_one", SCALES, "ceil-e5m2-1x32"),
    *_workload("scale_off_by_one", "32x1-smoke"),
    _of("takes_a_logarithm", SCALES, "rceil-e4m3-1x32"),
    *_workload("takes_a_logarithm", "1x32-boundary-maxima-e4m3-rceil"),
    _of("casts_scales_with_torch", SCALES, "rceil-e4m3-32x32"),
    *_workload("casts_scales_with_torch", "1x32-e4m3-rceil-k96-uniform"),
    _of("gives_zeros_the_scale_one", SCALES, "rceil-e4m3-1x32"),
    *_workload("gives_zeros_the_scale_one", "1x32-not-numbers-e4m3-rceil"),
    _of("one_scale_for_all", "a_block_shares_its_scale_with_no_other", "1x32"),
    *_workload("one_scale_for_all", "32x32-e4m3-rceil-k96-zero-inflated"),
    _of("swallows_nan", "a_block_with_what_is_no_number_has_the_scale_nan", "nan-32x32"),
    *_workload("swallows_nan", "32x1-not-numbers-e4m3-rceil"),
    _of("takes_infinity_for_a_number", "a_block_with_what_is_no_number_has_the_scale_nan",
        "-inf-1x32"),
)  # fmt: skip

OF_BLOCKS: tuple[Fault, ...] = (
    _of("straddles_rows", "a_block_shares_its_scale_with_no_other", "1x32"),
    *_workload("straddles_rows", "1x32-e5m2-floor-k72-dense"),
    _of("straddles_sequences", "every_sequence_is_quantised_as_if_alone", "32x1"),
    *_workload("straddles_sequences", "32x32-lengths-about-blocks"),
    _of("packs_scales_side_by_side", "every_sequence_is_quantised_as_if_alone", "32x32"),
    *_workload("packs_scales_side_by_side", "32x32-first-and-last-sequence-empty"),
    *_workload(
        "leaves_padding_unwritten",
        "1x32-padding-past-the-last-offset",
        "32x32-nothing-but-padding",
        "32x32-lengths-about-two-blocks",
    ),
    _of(
        "requantises_for_squares",
        "squares_of_the_transpose_are_the_transpose_of_the_squares",
    ),
    *_workload("requantises_for_squares", "32x32-lengths-about-two-blocks"),
)

OF_ROUNDING: tuple[Fault, ...] = (
    _of("truncates", CODES, "e4m3-1x32"),
    _of("truncates", "under_rceil_every_element_is_within_half_a_step", "e2m1-1x32"),
    *_workload("truncates", "1x32-smoke"),
    _of("rounds_ties_away", CODES, "e2m1-32x32"),
    _rounding("stochastic_goes_down", "stochastic_rounding_is_unbiased", "e4m3-1x32"),
    *_workload("stochastic_goes_down", "32x32-e4m3-floor-k64-stochastic-gaussian"),
    _rounding("stochastic_goes_up", "stochastic_rounding_is_unbiased", "e2m1-32x1"),
    _rounding("stochastic_is_nearest", "stochastic_rounding_is_unbiased", "e5m2-32x32"),
    _rounding("stochastic_is_nearest", "a_seed_decides_every_bit", "1x32"),
    _rounding("tosses_a_coin", "stochastic_rounding_is_unbiased", "e4m3-32x1"),
    _rounding("draws_eight_bits", "stochastic_rounding_sees_a_thousandth_of_a_step"),
    _rounding("dithers_over_two_steps", "stochastic_rounding_stays_between_the_neighbours",
              "e4m3-1x32"),
    _rounding("dithers_over_two_steps", "stochastic_rounding_keeps_what_is_representable", "1x32"),
    _rounding("ignores_the_seed", "a_seed_decides_every_bit", "32x32"),
    *_workload("ignores_the_seed", "1x32-e4m3-ceil-k31-stochastic-zipf"),
    _rounding("halves_the_seed", "a_seed_decides_every_bit", "32x1"),
    *_workload("halves_the_seed", "32x1-e5m2-even-k64-stochastic-dense"),
    _rounding("draws_from_the_global_generator", "a_seed_decides_every_bit", "1x32"),
    _rounding("repeats_the_bits_of_a_row", "every_element_draws_bits_of_its_own"),
    _rounding("counts_rows_from_each_sequence", "every_element_draws_bits_of_its_own"),
    *_workload("counts_rows_from_each_sequence", "32x1-e2m1-rceil-k24-stochastic-bimodal"),
)  # fmt: skip

OF_ELEMENTS: tuple[Fault, ...] = (
    _of("saturates_to_nan", "what_floor_cannot_hold_saturates", "e4m3-nearest-1x32"),
    _of("saturates_to_nan", "what_floor_cannot_hold_saturates", "e5m2-stochastic-32x32"),
    *_workload("saturates_to_nan", "1x32-boundary-maxima-e4m3-floor"),
    _of("flushes_subnormals", CODES, "e5m2-1x32"),
    *_workload("flushes_subnormals", "1x32-boundary-maxima-e4m3-rceil"),
    _of("loses_the_sign_of_zero", CODES, "e4m3-32x1"),
)

CONTRACT: tuple[Fault, ...] = (
    _of("reads_scales_of_no_block", "scales_that_belong_to_no_block_are_never_read", "32x32"),
    Fault("quantisers:accepts_any_quantisation", OPERATOR, REFUSED,
          parameter="mx_quantize-seed-beside-nearest", error="Failed"),
    *_on("quantisers:scales_x_in_place", UNCHANGED, "mx_quantize-1x32-smoke"),
)  # fmt: skip

#: All of them.
MX_FAULTS: tuple[Fault, ...] = (*OF_SCALES, *OF_BLOCKS, *OF_ROUNDING, *OF_ELEMENTS, *CONTRACT)
