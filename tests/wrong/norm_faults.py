"""Every planted fault of norm_linear, and the test that must catch it."""

from __future__ import annotations

from wrong.fault import Fault
from wrong.fault import on_workloads as _on

FORWARD = "test_forward.py::test_outputs_are_within_budget"
BACKWARD = "test_backward.py::test_every_gradient_is_within_budget"
PADDING = "test_edges.py::test_rows_past_the_last_offset_come_back_zero"
REFUSED = "test_signature.py::test_an_unknown_value_of_an_option_raises_value_error"
NORM = "norm_linear"


def _of(target: str, test: str, parameter: str = "", **others: str) -> Fault:
    """A fault caught by a test of the operator's own file."""
    caught_by = f"test_norm_linear.py::test_{test}"
    return Fault(f"norms:{target}", NORM, caught_by, parameter=parameter, **others)


STATISTICS: tuple[Fault, ...] = (
    _of("adds_eps_outside_the_root", "eps_is_added_to_the_mean_square_under_the_root"),
    *_on("norms:adds_eps_outside_the_root", FORWARD, "norm_linear-rms-k64-n64-large-eps"),
    _of("ignores_eps", "eps_is_added_to_the_mean_square_under_the_root"),
    _of("ignores_eps", "a_row_of_zeros_gives_the_bias_and_finite_gradients", "rms"),
    _of("takes_the_variance_of_squares", "rows_far_from_zero_keep_their_variance"),
    *_on("norms:takes_the_variance_of_squares", FORWARD, "norm_linear-layer-larger-offset"),
    _of(
        "takes_the_variance_about_zero",
        "the_variance_is_that_of_all_features_about_their_mean",
    ),
    *_on("norms:takes_the_variance_about_zero", FORWARD, "norm_linear-layer-large-offset"),
    _of("divides_by_one_feature_less", "the_variance_is_that_of_all_features_about_their_mean"),
    _of(
        "divides_by_one_feature_less", "with_the_identity_as_weight_the_rows_have_unit_size", "rms"
    ),
    *_on(
        "norms:divides_by_the_padded_features",
        FORWARD,
        "norm_linear-rms-k72-n40",
        "norm_linear-layer-k57-n19",
    ),
    _of("never_centres", "the_variance_is_that_of_all_features_about_their_mean"),
    _of("never_centres", "a_constant_added_to_a_row_does_not_change_its_layer_norm", "16.0"),
    *_on("norms:keeps_statistics_in_half", FORWARD, "norm_linear-rms-k16-n16"),
    *_on("norms:centres_with_a_rounded_mean", FORWARD, "norm_linear-layer-large-offset"),
)

PRODUCT: tuple[Fault, ...] = (
    _of("forgets_the_row_scale", "with_the_identity_as_weight_the_rows_have_unit_size", "rms"),
    *_on("norms:forgets_the_row_scale", FORWARD, "norm_linear-rms-k16-n16"),
    _of("scales_the_bias_too", "it_is_the_norm_and_then_the_linear_layer", "rms"),
    *_on("norms:scales_the_bias_too", FORWARD, "norm_linear-rms-k32-n64-bias"),
    _of("ignores_the_norm_weight", "the_weight_of_the_norm_moves_into_that_of_the_layer", "rms"),
    _of("ignores_the_norm_bias", "the_bias_of_the_norm_is_a_bias_of_the_layer"),
    *_on("norms:ignores_the_norm_bias", FORWARD, "norm_linear-layer-k100-n36-norm-bias-alone"),
    *_on("norms:weighs_outputs_for_features", FORWARD, "norm_linear-rms-k64-n32-affine"),
    *_on("norms:rounds_rows_to_bfloat16", FORWARD, "norm_linear-rms-k16-n16"),
    _of(
        "rounds_rows_to_bfloat16",
        "a_fused_norm_is_no_further_from_the_truth_than_a_separate_one",
        "rms",
    ),
)

GRADIENTS: tuple[Fault, ...] = (
    _of(
        "drops_the_term_along_the_row",
        "the_gradient_of_a_row_stands_at_right_angles_to_it",
        "rms",
    ),
    *_on("norms:drops_the_term_along_the_row", BACKWARD, "norm_linear-rms-k16-n16"),
    _of(
        "drops_the_mean_of_the_gradient",
        "the_gradient_of_a_row_stands_at_right_angles_to_it",
        "layer",
    ),
    *_on("norms:drops_the_mean_of_the_gradient", BACKWARD, "norm_linear-layer-k32-n32"),
    _of("forgets_the_row_scale_in_dx", "a_factor_of_all_features_changes_nothing", "rms-16.0"),
    *_on("norms:projects_out_the_weighted_row", BACKWARD, "norm_linear-rms-k64-n32-affine"),
    _of(
        "weight_gradient_without_the_row_scale",
        "the_gradient_of_the_weight_is_taken_of_normalised_rows",
        "rms",
    ),
    *_on("norms:weight_gradient_without_the_row_scale", BACKWARD, "norm_linear-rms-k16-n16"),
    *_on(
        "norms:weight_gradient_without_the_norm_weight",
        BACKWARD,
        "norm_linear-rms-k64-n32-affine",
        "norm_linear-layer-k100-n36-norm-bias-alone",
    ),
    *_on("norms:norm_weight_gradient_of_raw_rows", BACKWARD, "norm_linear-rms-k64-n32-affine"),
    _of("norm_bias_has_no_gradient", "it_is_the_norm_and_then_the_linear_layer", "layer"),
    *_on("norms:adds_weight_gradients_in_half", BACKWARD, "norm_linear-rms-k16-n16"),
)

CONTRACT: tuple[Fault, ...] = (
    *_on("norms:counts_padding_rows", PADDING, "norm_linear-rms-more-padding-than-rows"),
    *_on("norms:counts_padding_rows", BACKWARD, "norm_linear-rms-more-padding-than-rows"),
    Fault("norms:accepts_anything", NORM, REFUSED, parameter="norm_linear-norm_bias-beside-rms",
          error="Failed"),
)  # fmt: skip

#: All of them.
NORM_FAULTS: tuple[Fault, ...] = (*STATISTICS, *PRODUCT, *GRADIENTS, *CONTRACT)
