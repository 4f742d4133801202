"""Every planted fault of products of quantised operands, and the test that must catch it."""

from __future__ import annotations

from wrong.fault import Fault
from wrong.fault import on_workloads as _on

FORWARD = "test_forward.py::test_outputs_are_within_budget"
BACKWARD = "test_backward.py::test_every_gradient_is_within_budget"
LINEAR = "test_mx_linear.py::test_"


def _of(target: str, test: str, parameter: str = "") -> Fault:
    return Fault(f"products:{target}", "mx_linear", LINEAR + test, parameter=parameter)


def _workload(target: str, test: str, *names: str) -> tuple[Fault, ...]:
    return _on(f"products:{target}", test, *names)


def _exact(target: str, operator: str, test: str, elem: str = "e4m3") -> Fault:
    caught_by = f"test_mx_representable.py::test_{test}"
    return Fault(f"products:{target}", operator, caught_by, parameter=elem)


def _generic(target: str, test: str, operator: str, parameter: str = "") -> Fault:
    return Fault(f"products:{target}", operator, test, parameter=parameter or operator)


def _matmul(target: str, test: str, parameter: str = "") -> Fault:
    caught_by = f"test_mx_matmul.py::test_{test}"
    return Fault(f"products:{target}", "mx_matmul", caught_by, parameter=parameter)


def _both(name: str) -> tuple[str, str]:
    return f"mx_attention-{name}", f"mx_gdpa-{name}"


OWN_KEY = "each_query_to_its_own_key_is_exact"
NOTHING = (
    "test_mx_attention.py::test_the_gradient_of_a_query_without_keys_has_no_part_in_its_square"
)
GDPA = "test_mx_attention.py::test_gdpa_is_as_near_to_the_plain_operator_as_mxfp8_is"
AUTOCAST = "test_autocast_and_compile.py::test_autocast_keeps_low_precision_results"

PRODUCT_FAULTS: tuple[Fault, ...] = (
    *_workload("takes_floor_for_rceil_in_products", FORWARD, "mx_linear-default-smoke"),
    *_workload("scales_products_off_by_one", FORWARD, "mx_linear-default-k72-n40"),
    *_workload("scales_by_tensor", FORWARD, "mx_linear-e2m1-k72-n40"),
    *_workload("transforms_one_operand", BACKWARD, "mx_linear-wgrad-mx-k72-n40"),
    _of("transforms_one_operand", "the_transform_of_both_operands_leaves_their_product", "32"),
    *_workload("rounds_gradients_to_nearest", BACKWARD, "mx_linear-default-smoke"),
    *_workload("rounds_gradients_to_nearest", BACKWARD, "mx_attention-default"),
    *_workload("rounds_gradients_one_way", BACKWARD, "mx_linear-default-smoke"),
    _of("rounds_gradients_one_way", "stochastic_gradients_are_unbiased"),
    *_workload("rounds_gradients_the_other_way", BACKWARD, "mx_linear-default-smoke"),
    *_workload("ignores_the_seed_of_gradients", BACKWARD, "mx_linear-wgrad-mx-k72-n40"),
    _of(
        "ignores_the_seed_of_gradients",
        "another_seed_gives_other_gradients_and_the_same_seed_the_same",
        "hadamard",
    ),
    *_workload("quantises_the_weight_gradient", BACKWARD, "mx_linear-default-smoke"),
    _of("quantises_the_weight_gradient", "a_weight_gradient_in_bf16_is_not_quantised"),
    *_workload("passes_off_a_plain_product", FORWARD, "mx_linear-default-smoke"),
    _of("passes_off_a_plain_product", "products_said_to_be_quantised_are"),
    *_workload("scales_values_along_head_dim", FORWARD, "mx_attention-e2m1"),
    *_workload("quantises_weights_after_division", FORWARD, "mx_attention-default"),
    *_workload("sums_quantised_weights", FORWARD, "mx_attention-nearest"),
    *_workload("passes_off_plain_attention", FORWARD, "mx_attention-default"),
    *_workload("passes_off_plain_attention", BACKWARD, "mx_attention-default"),
    *_workload("cuts_gradients_by_the_buffer", BACKWARD, "mx_attention-e2m1"),
    _generic("passes_off_plain_gdpa", GDPA, "mx_gdpa", "full"),
    _exact(
        "takes_scales_one_higher", "mx_linear", "a_linear_layer_of_representable_inputs_is_exact"
    ),
    _exact(
        "takes_scales_one_higher",
        "mx_linear",
        "a_quantised_weight_gradient_of_representable_inputs_is_exact",
        "e5m2",
    ),
    _exact("takes_attention_scales_one_higher", "mx_attention", f"attention_of_{OWN_KEY}"),
    _exact("takes_attention_scales_one_higher", "mx_gdpa", f"gdpa_of_{OWN_KEY}"),
    _generic("scales_by_gradients_of_nothing", NOTHING, "mx_attention", "mx_attention-inf"),
    _generic("scales_by_gradients_of_nothing", NOTHING, "mx_gdpa", "mx_gdpa-large"),
    _generic("multiplies_in_autocast", AUTOCAST, "mx_attention"),
    _of("multiplies_in_autocast", "autocast_leaves_every_bit"),
    *_workload("ignores_the_prefix_of_products", FORWARD, *_both("start-prefix-last")),
    *_workload("ignores_the_last_queries_of_products", FORWARD, *_both("start-prefix-last")),
    *_workload("ignores_the_alignment_of_products", FORWARD, *_both("start-prefix-last")),
    *_workload("takes_silu_for_any_activation", FORWARD, "mx_gdpa-start-prefix-last"),
    *_workload("ignores_the_post_scale_of_products", FORWARD, "mx_gdpa-start-prefix-last"),
    *_workload("takes_rceil_for_even_in_products", FORWARD, *_both("start-prefix-last")),
    *_workload("takes_rceil_for_even_in_products", FORWARD, "mx_linear-even-k72-n40"),
    *_workload("takes_e4m3_for_e5m2_in_products", FORWARD, *_both("dense-query")),
    *_workload("takes_e4m3_for_e5m2_in_products", FORWARD, "mx_linear-everything-k72-n40"),
    *_workload("halves_the_seed_of_products", BACKWARD, *_both("dense-query")),
    *_workload("repeats_the_bits_of_a_dense_query", BACKWARD, *_both("dense-query")),
    _matmul("reads_scale_code_0_as_zero", "scale_code_0_is_the_lowest_power_of_two_and_not_zero"),
    _matmul(
        "reads_no_code_as_nan", "a_code_that_is_no_number_is_none_in_its_row_alone", "e4m3-nan"
    ),
    _matmul(
        "reads_no_code_as_nan", "a_code_that_is_no_number_is_none_in_its_row_alone", "e5m2-infinity"
    ),
    _matmul("multiplies_the_first_matrices", "every_matrix_of_a_batch_is_multiplied"),
    *_workload("ignores_the_scales_of_b", FORWARD, "mx_matmul-1x32-smoke"),
)
