"""Every planted fault, and the test of the suite that must catch it."""

from __future__ import annotations

from wrong.block_faults import BLOCK_FAULTS
from wrong.fault import Fault
from wrong.fault import on_workloads as _on
from wrong.mx_faults import MX_FAULTS
from wrong.norm_faults import NORM_FAULTS
from wrong.norm_quantiser_faults import NORM_QUANTISER_FAULTS
from wrong.pffn_faults import PFFN_FAULTS
from wrong.product_faults import PRODUCT_FAULTS
from wrong.projection_faults import PROJECTION_FAULTS

FORWARD = "test_forward.py::test_outputs_are_within_budget"
BACKWARD = "test_backward.py::test_every_gradient_is_within_budget"
SHAPES = "test_signature.py::test_outputs_have_the_pinned_shapes_and_dtypes"
MALFORMED = "test_signature.py::test_malformed_input_raises_value_error"
PADDING = "test_edges.py::test_rows_past_the_last_offset_come_back_zero"
BLIND = "test_edges.py::test_rows_that_see_no_key_give_zero"
NEIGHBOUR = "test_isolation.py::test_nan_in_one_sequence_leaves_the_others_bit_unchanged"
BEHIND = "test_isolation.py::test_nan_past_the_last_offset_changes_nothing"
UNCHANGED = "test_isolation.py::test_inputs_are_unchanged_bit_for_bit"
SHARED = "test_isolation.py::test_outputs_share_no_memory_with_inputs_or_earlier_outputs"
COLUMN = "test_isolation.py::test_offsets_that_are_not_contiguous_say_the_same"
FOLLOWED = "test_isolation.py::test_offsets_changed_in_place_are_followed"
HIDDEN = "test_edges.py::test_a_bias_of_minus_infinity_hides_its_pairs"
WIDER = "test_edges.py::test_a_bias_may_be_wider_than_the_queries"
LONGEST = "test_signature.py::test_a_maximum_length_that_is_too_small_raises_or_is_not_needed"
REPEATS = "test_determinism.py::test_deterministic_gradients_are_bit_equal_over_repeats"
JAGGED, GDPA = "jagged_attention", "gdpa"

VALUES: tuple[Fault, ...] = (
    *_on("values:zeros", FORWARD, "gdpa-d16-causal", "jagged_attention-d16-causal"),
    *_on("values:zeros", BACKWARD, "gdpa-d16-causal"),
    *_on("values:ignores_scale", FORWARD, "jagged_attention-d64-scaled"),
    *_on("values:ignores_pre_scale", FORWARD, "gdpa-d64-scaled"),
    *_on("values:ignores_post_scale", FORWARD, "gdpa-d64-scaled"),
    *_on("values:scales_after_the_activation", FORWARD, "gdpa-d64-scaled"),
    Fault(
        "values:scales_after_the_activation",
        GDPA,
        "test_identities.py::test_scale_moves_freely_between_query_and_option",
        parameter="gdpa-4.0",
    ),
    *_on("values:ignores_activation", FORWARD, "gdpa-d32-gqa-window"),
    *_on("values:turns_every_activation_into_gelu", FORWARD, "gdpa-d192-v128-gqa"),
    Fault(
        "values:turns_every_activation_into_gelu",
        GDPA,
        "test_identities.py::test_identity_activation_is_an_associative_product",
    ),
    *_on("values:twice_gelu", FORWARD, "gdpa-d64-scaled"),
    Fault("values:halves_silu_twice", GDPA, "test_known_faults.py::test_silu_of_one_is_0_731059"),
    Fault(
        "values:taylor_without_guard",
        GDPA,
        "test_known_faults.py::test_every_activation_at_known_scores",
        parameter="gelu_taylor6",
    ),
    *_on("values:approximates_every_fourth_key", FORWARD, "gdpa-d96-heavy-tailed"),
    Fault(
        "values:approximates_every_fourth_key",
        GDPA,
        "test_identities.py::test_order_of_keys_does_not_matter_under_any_activation",
        parameter="gdpa-gelu",
    ),
    *_on("values:first_activation_for_every_head", FORWARD, "gdpa-activation-per-head"),
    *_on("values:softmax_in_place_of_gdpa", FORWARD, "gdpa-d64-mqa-cross"),
    Fault(
        "values:softmax_in_place_of_gdpa",
        GDPA,
        "test_identities.py::test_duplicated_keys_double_gdpa",
    ),
    *_on("values:divides_by_the_longest_sequence", FORWARD, "gdpa-d64-mqa-cross"),
    *_on(
        "values:ignores_bias",
        FORWARD,
        "jagged_attention-dense-bias",
        "jagged_attention-log-time-bias-causal",
    ),
    Fault("values:reads_the_bias_as_queries", JAGGED, WIDER, parameter=JAGGED),
    *_on("values:scales_the_bias_too", FORWARD, "jagged_attention-dense-bias"),
    *(
        Fault(
            "values:accumulates_in_half",
            operator,
            "test_limits.py::test_the_last_of_many_keys_counts_in_full",
            parameter=operator,
        )
        for operator in (JAGGED, GDPA)
    ),
    *_on("values:reads_another_key_head", FORWARD, "gdpa-d32-gqa-window"),
    Fault(
        "values:reads_another_key_head",
        JAGGED,
        "test_identities.py::test_grouped_heads_are_repeated_keys",
    ),
    *_on("values:takes_values_for_as_wide_as_keys", FORWARD, "gdpa-d32-v64-right-window-cross"),
    *(
        Fault(
            "values:takes_scale_zero_for_none",
            operator,
            "test_limits.py::test_a_scale_of_zero_is_a_scale",
        )
        for operator in (JAGGED, GDPA)
    ),
    Fault(
        "values:softmax_without_row_maximum",
        JAGGED,
        "test_limits.py::test_scores_beyond_the_range_of_exp_are_ordinary_scores",
    ),
    *_on("values:lse_in_log2", FORWARD, "jagged_attention-d16-causal"),
    *_on("values:lse_without_scale", FORWARD, "jagged_attention-d16-causal"),
    *_on("values:lse_in_the_input_dtype", SHAPES, "jagged_attention-d16-causal", dtype="float16"),
)

MASKS: tuple[Fault, ...] = (
    *_on("masks:ignores_window", FORWARD, "gdpa-d32-gqa-window"),
    *_on("masks:ignores_window", FORWARD, "jagged_attention-d32-gqa-window"),
    *_on("masks:ignores_causal", FORWARD, "jagged_attention-d16-causal"),
    *_on("masks:always_aligns_at_the_start", FORWARD, "gdpa-d104-causal-end-cross"),
    Fault(
        "masks:always_aligns_at_the_end",
        JAGGED,
        "test_known_faults.py::test_causal_sees_the_keys_its_alignment_names",
        parameter="jagged_attention-2x5-start",
    ),
    *_on("masks:symmetric_window", FORWARD, "jagged_attention-d128-asymmetric-window"),
    Fault(
        "masks:backward_without_mask",
        GDPA,
        "test_known_faults.py::test_backward_hides_the_keys_that_forward_hides",
    ),
    *_on("masks:backward_without_mask", BACKWARD, "jagged_attention-d32-gqa-window"),
    *_on("masks:ignores_prefix", FORWARD, "gdpa-d32-window-prefix"),
    *_on("masks:ignores_last_full", FORWARD, "jagged_attention-d64-causal-window-last"),
    *_on(
        "masks:prefix_of_the_packed_buffer",
        FORWARD,
        "gdpa-d32-window-prefix",
        "jagged_attention-d32-window-prefix",
    ),
    *_on("masks:last_is_off_by_one", FORWARD, "gdpa-d64-causal-window-last"),
    Fault(
        "masks:last_is_off_by_one",
        JAGGED,
        "test_identities.py::test_the_last_queries_have_the_rows_of_attention_without_a_window",
        parameter="jagged_attention-full",
    ),
    *_on(
        "masks:last_keys_instead_of_last_queries",
        FORWARD,
        "jagged_attention-d32-window-prefix-last-cross",
    ),
    *_on(
        "masks:prefix_is_masked_by_causality",
        FORWARD,
        "gdpa-d64-causal-window-prefix-last-gqa",
        "jagged_attention-d16-causal-prefix-cross",
    ),
    *_on("masks:prefix_sees_its_window_only", FORWARD, "jagged_attention-d32-window-prefix"),
    *_on("masks:prefix_is_seen_in_windows_only", FORWARD, "gdpa-d32-window-prefix"),
    *_on(
        "masks:prefix_counts_query_rows",
        FORWARD,
        "jagged_attention-d32-window-prefix-last-cross",
    ),
    *_on("masks:last_queries_see_the_future", FORWARD, "jagged_attention-d64-causal-window-last"),
    Fault(
        "masks:last_queries_see_the_future",
        GDPA,
        "test_identities.py::test_last_queries_as_many_as_the_sequence_has_are_no_window",
        parameter="gdpa-end-{'causal': True, 'window': (4, None)}",
    ),
    *_on(
        "masks:backward_forgets_what_lies_beyond",
        BACKWARD,
        "gdpa-d64-causal-window-prefix-last-gqa",
        "jagged_attention-d64-causal-window-prefix-last-gqa",
    ),
    *_on("masks:off_by_one", FORWARD, "gdpa-d16-causal", "jagged_attention-d32-gqa-window"),
    *(
        Fault(
            "masks:takes_zero_for_unbounded",
            operator,
            "test_limits.py::test_a_window_side_of_zero_is_a_bound",
        )
        for operator in (JAGGED, GDPA)
    ),
    Fault(
        "masks:wraps_the_window_at_32_bits",
        GDPA,
        "test_identities.py::test_a_window_as_long_as_the_sequence_is_no_window",
        parameter="gdpa-window3",
    ),
    *_on("masks:drops_the_last_tile", FORWARD, "gdpa-lengths-about-tiles-of-16-and-32"),
    *_on(
        "masks:drops_the_last_query_tile",
        FORWARD,
        "jagged_attention-lengths-about-tiles-of-16-and-32",
    ),
    *_on("masks:leaks_into_the_next_sequence", FORWARD, "gdpa-middle-sequences-empty"),
    *_on("masks:leaks_into_the_next_sequence", NEIGHBOUR, "jagged_attention-d16-causal"),
    *_on("masks:walks_whole_tiles", FORWARD, "gdpa-lengths-about-tiles-of-16-and-32"),
    *_on(
        "masks:swaps_the_offsets",
        FORWARD,
        "gdpa-more-keys-than-queries",
        "jagged_attention-more-queries-than-keys",
    ),
    *_on(
        "masks:right_for_equal_lengths_only",
        FORWARD,
        "gdpa-self-fill0.5-jagged-smoke",
        "jagged_attention-d16-causal",
    ),
    *_on(
        "masks:fills_with_infinity_before_the_activation",
        FORWARD,
        "gdpa-d128-asymmetric-window",
    ),
    *_on("masks:zero_fill_without_a_backward_mask", BACKWARD, "gdpa-d128-asymmetric-window"),
    *_on("masks:subtracts_without_guard", FORWARD, "jagged_attention-strongly-negative-scores"),
    Fault(
        "masks:nan_where_nothing_is_visible", JAGGED, BLIND, parameter="jagged_attention-by-causal"
    ),
    Fault("masks:nan_where_the_bias_hides_a_tile", JAGGED, HIDDEN, parameter=JAGGED),
    Fault("masks:nan_on_empty_keys", GDPA, BLIND, parameter="gdpa-by-no-keys"),
    Fault("masks:nan_on_empty_keys", JAGGED, BLIND, parameter="jagged_attention-by-no-keys"),
)

MEMORY: tuple[Fault, ...] = (
    *_on("memory:nan_in_padding_leaks", BEHIND, "gdpa-d16-causal", "jagged_attention-d16-causal"),
    *_on("memory:nan_in_upstream_padding_leaks", BEHIND, "jagged_attention-d16-causal"),
    *_on("memory:nan_in_the_next_sequence_leaks", NEIGHBOUR, "gdpa-d16-causal"),
    *_on("memory:leaves_padding_rows_unwritten", PADDING, "gdpa-d16-causal"),
    *_on("memory:leaves_gradient_padding_unwritten", PADDING, "jagged_attention-d16-causal"),
    Fault(
        "memory:leaves_gradient_padding_unwritten",
        GDPA,
        "test_known_faults.py::test_buffers_longer_than_the_last_offset_have_zero_gradients",
    ),
    *_on(
        "memory:leaves_recycled_memory",
        "test_isolation.py::test_recycled_memory_full_of_nan_changes_nothing",
        "jagged_attention-d16-causal",
    ),
    *_on("memory:lse_of_padding_is_infinite", PADDING, "jagged_attention-d16-causal"),
    Fault("memory:leaves_rows_without_keys_unwritten", GDPA, BLIND, parameter="gdpa-by-no-keys"),
    Fault("memory:trusts_max_q_len", GDPA, LONGEST, parameter="gdpa-max_q_len"),
    Fault("memory:trusts_max_k_len", JAGGED, LONGEST, parameter="jagged_attention-max_k_len"),
    *_on("memory:writes_its_input", UNCHANGED, "gdpa-d64-scaled", "jagged_attention-d64-scaled"),
    *_on("memory:writes_its_input_and_restores_it", UNCHANGED, "gdpa-d64-scaled"),
    *_on("memory:mutates_the_offsets", UNCHANGED, "jagged_attention-d16-causal"),
    *_on("memory:writes_the_output_over_the_query", UNCHANGED, "gdpa-d16-causal"),
    *_on("memory:reads_offsets_as_contiguous", COLUMN, "gdpa-d16-causal"),
    *_on("memory:reads_offsets_as_contiguous", COLUMN, "jagged_attention-d16-causal"),
    Fault("memory:keeps_the_plan_of_its_first_call", GDPA, FOLLOWED, parameter="gdpa"),
    Fault("memory:keeps_the_plan_of_its_first_call", JAGGED, FOLLOWED, parameter=JAGGED),
    *_on("memory:returns_a_cached_buffer", SHARED, "jagged_attention-d16-causal"),
    *_on("memory:writes_after_it_returned", FORWARD, "gdpa-d16-causal"),
    Fault(
        "memory:leaves_work_on_a_side_stream",
        GDPA,
        "test_isolation.py::test_work_on_a_side_stream_is_ordered",
        needs_gpu="a CPU has one stream",
    ),
    Fault(
        "memory:wraps_offsets_at_32_bits",
        GDPA,
        "test_limits.py::test_rows_that_start_past_2_to_the_31_elements",
        parameter="gdpa-k",
    ),
    Fault(
        "memory:wraps_upstream_offsets_at_32_bits",
        JAGGED,
        "test_limits.py::test_rows_that_start_past_2_to_the_31_elements",
        parameter="jagged_attention-upstream",
    ),
    *_on(
        "memory:reads_upstream_as_contiguous",
        "test_isolation.py::test_strided_upstream_gradients_give_the_same_gradients",
        "gdpa-d16-causal",
    ),
    *_on(
        "memory:reads_inputs_as_contiguous",
        "test_isolation.py::test_strided_inputs_give_the_same_result",
        "jagged_attention-d16-causal",
    ),
    *_on(
        "memory:reads_behind_the_offsets",
        "test_isolation.py::test_what_follows_the_offsets_in_memory_is_not_read",
        "gdpa-d16-causal",
    ),
    Fault(
        "memory:stops_at_65535_sequences",
        GDPA,
        "test_limits.py::test_more_than_65535_sequences",
        parameter="gdpa-65536",
        needs_gpu="65,536 sequences take minutes on a CPU",
    ),
    Fault(
        "memory:keeps_lengths_in_16_bits",
        JAGGED,
        "test_limits.py::test_the_last_of_many_keys_counts_in_full",
        parameter="jagged_attention",
    ),
)

GRADIENTS: tuple[Fault, ...] = (
    *_on("gradients:gradient_of_another_activation", BACKWARD, "gdpa-d64-scaled"),
    *_on("gradients:clips_the_derivative", BACKWARD, "gdpa-d96-heavy-tailed"),
    *_on("gradients:ignores_the_upstream_gradient", BACKWARD, "gdpa-d16-causal"),
    *_on(
        "gradients:ignores_the_upstream_gradient",
        "test_identities.py::test_gradients_are_linear_in_the_upstream_gradient",
        "jagged_attention-d16-causal",
    ),
    *_on(
        "gradients:dense_query_gradient_not_summed",
        BACKWARD,
        "gdpa-dense-query-gqa",
        "jagged_attention-dense-query-gqa",
    ),
    *_on("gradients:group_gradient_not_summed", BACKWARD, "jagged_attention-d32-gqa-window"),
    *_on("gradients:group_gradient_of_other_heads", BACKWARD, "gdpa-d32-gqa-window"),
    *_on("gradients:softmax_gradient_without_row_term", BACKWARD, "jagged_attention-d16-causal"),
    Fault(
        "gradients:nan_gradient_where_nothing_is_visible",
        JAGGED,
        "test_known_faults.py::test_far_more_queries_than_keys_give_finite_gradients",
    ),
    Fault(
        "gradients:nan_gradient_of_keys_without_queries",
        GDPA,
        "test_known_faults.py::test_a_sequence_without_queries_gives_its_keys_gradient_zero",
    ),
    *_on(
        "gradients:key_gradient_needs_the_query",
        "test_backward.py::test_a_gradient_does_not_depend_on_which_others_are_wanted",
        "gdpa-d16-causal",
    ),
    *_on("gradients:dq_lacks_its_last_columns", BACKWARD, "gdpa-d72-causal-start-cross"),
    Fault(
        "gradients:dq_lacks_its_last_columns",
        JAGGED,
        "test_known_faults.py::test_head_dims_between_tile_sizes",
        parameter="jagged_attention-104",
    ),
    *_on("gradients:dv_is_doubled", BACKWARD, "jagged_attention-d16-causal"),
    *_on("gradients:bias_gradient_is_zero", BACKWARD, "jagged_attention-log-time-bias-causal"),
    Fault(
        "gradients:bias_gradient_needs_the_others",
        JAGGED,
        "test_known_faults.py::test_only_the_bias_needs_a_gradient",
    ),
)

CONTRACT: tuple[Fault, ...] = (
    Fault(
        "contract:checks_nothing",
        GDPA,
        MALFORMED,
        parameter="gdpa-k-of-another-dtype",
        error="RuntimeError",
    ),
    *(
        Fault("contract:accepts_malformed_offsets", JAGGED, MALFORMED, parameter=f"{JAGGED}-{p}")
        for p in ("q-offsets-start-above-0", "k-offsets-start-above-0")
    ),
    Fault(
        "contract:unknown_activation_becomes_gelu",
        GDPA,
        "test_signature.py::test_an_unknown_value_of_an_option_raises_value_error",
        parameter="gdpa-activation-unknown",
    ),
    Fault(
        "contract:raises_type_error_when_malformed",
        GDPA,
        MALFORMED,
        parameter="gdpa-q-offsets-decrease",
        error="TypeError",
    ),
    Fault(
        "contract:raises_without_the_numbers",
        JAGGED,
        MALFORMED,
        parameter=f"{JAGGED}-q-offsets-end-past-the-rows",
    ),
    *(
        Fault(
            "contract:raises_runtime_error_when_unsupported",
            operator,
            FORWARD,
            f"{operator}-d32-gqa-window",
            error="RuntimeError",
        )
        for operator in (JAGGED, GDPA)
    ),
    *_on("contract:returns_the_wrong_dtype", SHAPES, "gdpa-d16-causal", dtype="float16"),
    *_on("contract:lse_is_transposed", SHAPES, "jagged_attention-d16-causal"),
    *_on(
        "contract:outputs_are_not_repeatable",
        "test_determinism.py::test_outputs_are_bit_equal_over_repeats",
        "gdpa-d16-causal",
    ),
    *_on("contract:ignores_the_deterministic_flag", REPEATS, "jagged_attention-d16-causal"),
    *_on("contract:dv_is_not_repeatable", REPEATS, "gdpa-d16-causal"),
    *_on(
        "contract:differs_with_int32_offsets",
        "test_edges.py::test_either_width_of_offsets_gives_the_same_bits",
        "gdpa-d16-causal",
    ),
    *_on(
        "contract:wrong_without_gradients",
        "test_forward.py::test_outputs_do_not_depend_on_whether_gradients_are_wanted",
        "jagged_attention-d16-causal",
    ),
    Fault(
        "contract:renames_an_argument",
        JAGGED,
        "test_signature.py::test_options_at_their_defaults_change_nothing",
        "jagged_attention-d16-causal",
        error="TypeError",
    ),
    Fault(
        "contract:is_not_differentiable",
        GDPA,
        BACKWARD,
        "gdpa-d16-causal",
        error="RuntimeError",
    ),
)

#: All of them.
FAULTS: tuple[Fault, ...] = (
    *VALUES,
    *MASKS,
    *MEMORY,
    *GRADIENTS,
    *CONTRACT,
    *BLOCK_FAULTS,
    *NORM_FAULTS,
    *PFFN_FAULTS,
    *MX_FAULTS,
    *NORM_QUANTISER_FAULTS,
    *PROJECTION_FAULTS,
    *PRODUCT_FAULTS,
)
