"""Every planted fault of block attention and rotary, and the test that must catch it."""

from __future__ import annotations

from wrong.fault import Fault
from wrong.fault import on_workloads as _on

FORWARD = "test_forward.py::test_outputs_are_within_budget"
BACKWARD = "test_backward.py::test_every_gradient_is_within_budget"
MALFORMED = "test_signature.py::test_malformed_input_raises_value_error"
REFUSED = "test_signature.py::test_an_unknown_value_of_an_option_raises_value_error"
NEIGHBOUR = "test_isolation.py::test_nan_in_one_sequence_leaves_the_others_bit_unchanged"
BLOCK, ROTARY = "block_attention", "rotary"


def _of(target: str, operator: str, test: str, parameter: str = "") -> Fault:
    """A fault caught by a test of the operator's own file."""
    file = "test_blocks.py" if operator == BLOCK else "test_rotary.py"
    return Fault(f"blocks:{target}", operator, f"{file}::test_{test}", parameter=parameter)


CUTS: tuple[Fault, ...] = (
    _of(
        "blocks_of_the_packed_buffer",
        BLOCK,
        "blocks_are_counted_from_the_start_of_each_sequence",
        "1",
    ),
    *_on(
        "blocks:blocks_of_the_packed_buffer",
        FORWARD,
        "block_attention-starts-off-the-blocks-of-the-buffer",
    ),
    _of("ignores_block_size", BLOCK, "a_block_is_a_sequence_of_its_own", "16"),
    *_on("blocks:ignores_block_size", FORWARD, "block_attention-d80-block16"),
    *_on(
        "blocks:attends_to_the_whole_sequence", FORWARD, "block_attention-lengths-about-two-blocks"
    ),
    _of(
        "attends_to_the_whole_sequence",
        BLOCK,
        "a_block_has_no_share_in_the_gradients_of_another",
        "plain",
    ),
    _of(
        "attends_to_the_whole_sequence",
        BLOCK,
        "nan_in_one_block_leaves_the_others_of_its_sequence_alone",
    ),
    _of("blocks_are_doubled", BLOCK, "a_block_is_a_sequence_of_its_own", "None"),
    _of(
        "tail_sees_the_next_sequence",
        BLOCK,
        "sequences_no_longer_than_a_block_see_themselves_whole",
    ),
    _of(
        "tail_sees_the_next_sequence", BLOCK, "a_tail_of_any_length_is_a_block_of_its_own", "plain"
    ),
    *_on(
        "blocks:tail_sees_the_next_sequence", NEIGHBOUR, "block_attention-tails-about-tiles-of-16"
    ),
    _of("tail_is_filled_with_zeros", BLOCK, "a_tail_of_any_length_is_a_block_of_its_own", "rotary"),
    *_on("blocks:tail_is_filled_with_zeros", FORWARD, "block_attention-strongly-negative-scores"),
)

ROTATIONS: tuple[Fault, ...] = (
    _of("turns_the_wrong_way", ROTARY, "sines_come_first_and_pairs_are_turned_counter_clockwise"),
    _of("turns_the_wrong_way", BLOCK, "a_fused_rotation_is_the_rotation_before_attention", "None"),
    *_on("blocks:turns_the_wrong_way", FORWARD, "rotary-d16", "block_attention-d64-rotary"),
    _of(
        "swaps_sines_and_cosines", ROTARY, "sines_come_first_and_pairs_are_turned_counter_clockwise"
    ),
    *_on("blocks:swaps_sines_and_cosines", FORWARD, "rotary-d16", "block_attention-d64-rotary"),
    _of("pairs_the_other_elements", ROTARY, "pairs_are_neighbours_or_halves_apart"),
    *_on(
        "blocks:pairs_the_other_elements",
        FORWARD,
        "rotary-d64-half-split",
        "block_attention-d64-rotary",
    ),
    _of(
        "counts_positions_in_the_buffer",
        ROTARY,
        "positions_are_counted_from_the_start_of_each_sequence",
        "1",
    ),
    _of(
        "counts_positions_in_the_buffer",
        BLOCK,
        "blocks_are_counted_from_the_start_of_each_sequence",
        "32",
    ),
    _of("counts_positions_from_one", ROTARY, "an_angle_of_zero_changes_no_bit"),
    *_on("blocks:counts_positions_from_one", FORWARD, "block_attention-d64-rotary"),
    _of(
        "takes_tokens_for_positions",
        BLOCK,
        "a_table_by_token_of_positions_is_the_table_by_position",
    ),
    *_on(
        "blocks:takes_tokens_for_positions",
        FORWARD,
        "rotary-d128-log-time",
        "block_attention-d64-log-time-rotary",
    ),
    _of("keeps_the_table_in_bfloat16", ROTARY, "norms_are_kept", "32-interleaved"),
    _of(
        "loses_what_is_not_turned",
        ROTARY,
        "elements_beyond_the_table_pass_through_unchanged",
        "interleaved",
    ),
    *_on("blocks:loses_what_is_not_turned", FORWARD, "block_attention-d72-partial-rotary"),
    _of("ignores_inverse", ROTARY, "the_inverse_undoes_a_rotation", "32-interleaved"),
    *_on("blocks:ignores_inverse", FORWARD, "rotary-d64-inverse"),
    _of("never_turns_values", BLOCK, "a_fused_rotation_is_the_rotation_before_attention", "None"),
    *_on("blocks:never_turns_values", FORWARD, "block_attention-d64-rotary"),
    _of("always_turns_values", BLOCK, "a_fused_rotation_is_the_rotation_before_attention", "False"),
    *_on("blocks:always_turns_values", FORWARD, "block_attention-d128-rotary-keys-only"),
    _of(
        "value_gradient_is_not_turned_back",
        BLOCK,
        "a_fused_rotation_is_the_rotation_before_attention",
        "None",
    ),
    *_on("blocks:value_gradient_is_not_turned_back", BACKWARD, "block_attention-d64-rotary"),
    _of(
        "turns_gradients_forward",
        ROTARY,
        "the_gradient_is_the_upstream_gradient_turned_back",
        "interleaved",
    ),
    *_on("blocks:turns_gradients_forward", BACKWARD, "rotary-d16", "block_attention-d64-rotary"),
    _of(
        "turns_in_half", BLOCK, "a_fused_rotation_is_no_further_from_the_truth_than_a_separate_one"
    ),
    _of(
        "forgets_the_gradient_of_the_table",
        BLOCK,
        "a_gradient_of_the_table_is_right_or_refused",
        "by-position",
    ),
    Fault(
        "blocks:accepts_malformed_tables",
        BLOCK,
        REFUSED,
        parameter="block_attention-rotary-shorter-than-a-sequence",
        error="RuntimeError",
    ),
    Fault(
        "blocks:accepts_malformed_tables",
        ROTARY,
        MALFORMED,
        parameter="rotary-table-by-token-of-too-few",
        error="RuntimeError",
    ),
)

_FUSED = "a_fused_norm_of_heads_is_the_norm_before_attention"
QK_NORMS: tuple[Fault, ...] = (
    _of("ignores_qk_norm", BLOCK, _FUSED, "plain"),
    *_on("blocks:ignores_qk_norm", FORWARD, "block_attention-d96-qk-norm-heavy-tailed"),
    _of(
        "normalises_heads_together",
        BLOCK,
        "under_a_norm_of_heads_a_factor_of_a_head_changes_nothing",
        "q",
    ),
    *_on("blocks:normalises_heads_together", FORWARD, "block_attention-d64-qk-norm"),
    _of("normalises_values_too", BLOCK, _FUSED, "rotary"),
    *_on("blocks:normalises_values_too", FORWARD, "block_attention-d64-qk-norm"),
    _of(
        "normalises_queries_alone",
        BLOCK,
        "under_a_norm_of_heads_a_factor_of_a_head_changes_nothing",
        "k",
    ),
    *_on("blocks:gives_heads_unit_length", FORWARD, "block_attention-d64-qk-norm"),
    _of(
        "qk_norm_has_no_backward",
        BLOCK,
        "under_a_norm_of_heads_gradients_stand_at_right_angles_to_heads",
    ),
    *_on("blocks:qk_norm_has_no_backward", BACKWARD, "block_attention-d32-qk-norm-gqa-rotary"),
    *_on(
        "blocks:qk_norm_adds_eps_outside",
        FORWARD,
        "block_attention-d32-qk-norm-large-eps-scaled",
    ),
)

#: All of them.
BLOCK_FAULTS: tuple[Fault, ...] = (*CUTS, *ROTATIONS, *QK_NORMS)
