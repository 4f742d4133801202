import collections
import dataclasses
import hashlib
import itertools
import json

import pytest
import torch

from jagbench.bias import BucketedBias
from jagbench.execution import run
from jagbench.reference import OPERATORS
from jagbench.reference.activations import ACTIVATIONS
from jagbench.rotary import TokenTable
from jagbench.workload import PURPOSES
from jagbench.workloads import CATALOGUE, AttentionRecipe, BlockRecipe, RotaryRecipe, select
from jagbench.workloads.attention import OPERATOR_NAMES
from jagbench.workloads.lengths import Explicit, Fixed, UniformFill
from jagbench.workloads.mx_norm import MxNormRecipe
from jagbench.workloads.mx_projection import MxProjectionRecipe
from jagbench.workloads.mx_quantize import QuantizeRecipe
from jagbench.workloads.mx_recipes import LinearInputs, MatmulInputs
from jagbench.workloads.normed import NormLinearRecipe
from jagbench.workloads.packed import Table
from jagbench.workloads.values import QKNormalised, UniformUnit

SMOKE = select(purpose="smoke")
by_name = pytest.mark.parametrize("workload", SMOKE, ids=lambda w: w.name)

PRESETS = {
    "gdpa_self", "gdpa_cross_kv256", "pffn_example", "gdpa_cute_asym", "gdpa_tuning",
    "tb_gdpa_default", "tb_pma", "tlx_gdpa", "pffn_norm_block", "gdpa_fp8", "jfa_broadcast_q",
    "tlx_cross", "block_attn", "block_attn_rotary", "hstu_bench", "hstu_ragged_tb", "kunlun_real",
    "interformer_internal", "block_attn_long", "norm_linear",
}  # fmt: skip


def recipe(**changes):
    given = {"operator": "jagged_attention", "batch": 3, "heads": 2, "qk_dim": 16}
    return AttentionRecipe(**{**given, "q_lengths": UniformFill(0.5, 20), **changes})


def blocks(**changes):
    given = {"batch": 3, "heads": 2, "qk_dim": 16, "sequence_lengths": Explicit((5, 0, 7))}
    return BlockRecipe(**{**given, **changes})


def turns(**changes):
    given = {"batch": 3, "heads": 2, "qk_dim": 16, "sequence_lengths": Explicit((5, 0, 7))}
    return RotaryRecipe(**{**given, **changes})


def draw(made, dtype=torch.float32):
    return made.draw(1, dtype, torch.device("cpu"), True)


def fingerprint(inputs):
    """Hash of the bytes of every tensor, the upstream gradient included; all NaN are alike.

    A conversion to half precision gives a NaN other bits on a GPU.
    """
    total = hashlib.sha256()
    upstream = {} if inputs.upstream is None else {"upstream": inputs.upstream}
    for name, tensor in {**inputs.tensors(), **upstream}.items():
        total.update(name.encode())
        if tensor.is_floating_point():
            tensor = tensor.masked_fill(tensor.isnan(), torch.nan)
        total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


# -- the catalogue -----------------------------------------------------------------------------


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_published_preset_is_offered_at_full_size_and_as_a_smoke_twin(preset):
    assert select(tag=preset, purpose="full")
    assert select(tag=preset, purpose="smoke")


def test_published_workloads_name_their_source():
    assert all(w.source for w in select(tag="published"))


def test_smoke_workloads_are_small_enough_for_an_interpreter():
    for workload in SMOKE:
        drawn = workload.statistics
        assert drawn["q_tokens"] + drawn["k_tokens"] <= 600, workload.name
        assert workload.recipe.heads <= 4, workload.name


def test_every_smoke_workload_is_judged_on_a_device_too():
    assert all("conformance" in w.purposes for w in SMOKE)


def test_full_covers_conformance_except_the_twins_of_full_sizes():
    missing = [w for w in select(purpose="conformance") if "full" not in w.purposes]
    twins_of = {"published", "ladder", "comparison"}
    assert all(twins_of & w.tags and w.name.endswith("-smoke") for w in missing)


def test_full_size_calls_fit_one_device_in_float32_with_their_gradients():
    for workload in select(purpose="full"):
        made, drawn = workload.recipe, workload.statistics
        width = made.qk_dim + made.value_dim
        rows = drawn["q_tokens"] * made.heads + drawn["k_tokens"] * made.num_kv_heads
        assert 2 * 4 * rows * width < 60e9, workload.name


def test_reproduction_values_are_only_in_workloads_named_for_them():
    for workload in CATALOGUE.values():
        named = workload.name.endswith("-repro-values")
        assert named or not isinstance(workload.recipe.values, UniformUnit)


def test_the_reproduction_keeps_keys_at_full_length_and_the_jagged_variant_does_not():
    repro = CATALOGUE["gdpa-self-l1024-fill0.5-repro"].statistics
    jagged = CATALOGUE["gdpa-self-l1024-fill0.5-jagged"].statistics
    assert repro["k_fill"] == 1
    assert jagged["k_fill"] == pytest.approx(0.5, abs=0.02)
    assert jagged["pairs"] / repro["pairs"] == pytest.approx(2 / 3, abs=0.02)


@pytest.mark.parametrize("operator", sorted(OPERATORS))
@pytest.mark.parametrize("purpose", PURPOSES)
def test_every_operator_has_workloads_for_every_purpose(operator, purpose):
    quantised = OPERATORS[operator].quantised
    assert len(select(operator=operator, purpose=purpose)) >= (14 if quantised else 40)


def test_every_activation_occurs_in_a_smoke_workload():
    used = set()
    for workload in select(operator="gdpa", purpose="smoke"):
        given = workload.recipe.activation
        used |= set(given) if isinstance(given, tuple) else {given}
    assert set(ACTIVATIONS) <= used


@pytest.mark.parametrize("operator", OPERATOR_NAMES)
def test_every_head_dim_mask_grouping_and_offsets_type_occurs_in_a_smoke_workload(operator):
    made = [w.recipe for w in select(operator=operator, purpose="smoke")]
    assert {16, 32, 64, 72, 80, 96, 104, 128, 192, 256} <= {r.qk_dim for r in made}
    assert {"start", "end"} <= {r.align for r in made if r.causal}
    windows = {r.window for r in made if r.window}
    assert any(left is None for left, _ in windows)
    assert any(right is None for _, right in windows)
    assert any(left == right for left, right in windows)
    assert any(None not in w and w[0] != w[1] for w in windows)
    assert any(r.kv_heads == 1 for r in made)
    assert any(1 < r.num_kv_heads < r.heads for r in made)
    assert any(r.value_dim != r.qk_dim for r in made)
    assert {"int32", "int64"} == {r.offsets_type for r in made}


@pytest.mark.parametrize("operator", OPERATOR_NAMES)
def test_prefix_and_last_queries_occur_with_every_mask_in_a_smoke_workload(operator):
    made = select(operator=operator, purpose="smoke")
    beyond = [w.recipe for w in made if w.recipe.prefix or w.recipe.last_full]
    shown = {(r.prefix > 0, r.last_full > 0, r.causal) for r in beyond}
    assert {
        (p, last, c) for p, last, c in itertools.product((True, False), repeat=3) if p or last
    } <= shown
    assert {"start", "end"} <= {r.align for r in beyond if r.k_lengths is not None}
    lengths = [(r, n) for r in beyond for n in r.lengths(2026)["k_offsets"] if n]
    assert any(r.prefix > n for r, n in lengths)
    assert any(r.last_full > n for r, n in lengths)


def test_an_option_that_came_later_leaves_digests_alone_at_its_default():
    # The digests of DIGESTS are older than `prefix`; here, that the option counts when it is set.
    plain = CATALOGUE["jagged_attention-d32-gqa-window"]
    recipe = dataclasses.replace(plain.recipe, prefix=1)
    assert dataclasses.replace(plain, recipe=recipe).digest != plain.digest
    with pytest.raises(ValueError, match=r"prefix .* got -1"):
        dataclasses.replace(plain.recipe, prefix=-1)


def test_every_bias_occurs_in_a_smoke_workload():
    made = [w.recipe for w in select(operator="jagged_attention", purpose="smoke")]
    found = {(r.bias, r.bias_heads) for r in made if r.bias != "none"}
    assert len(found) == 4


def test_no_two_workloads_share_a_digest():
    counts = collections.Counter(w.digest for w in CATALOGUE.values())
    assert max(counts.values()) == 1


def test_selection_joins_its_conditions():
    found = select(operator="gdpa", purpose="full", tag="gdpa_self", name="gdpa-self-l256-*")
    assert {w.name for w in found} == {
        "gdpa-self-l256-fill1.0", "gdpa-self-l256-fill0.5-jagged", "gdpa-self-l256-fill0.5-repro"
    }  # fmt: skip
    assert select(name="nothing-of-this-name") == ()


# -- drawing -----------------------------------------------------------------------------------


@by_name
def test_a_workload_keeps_its_operator_s_shapes_and_drawn_statistics(workload):
    inputs = workload.inputs()
    made, drawn = workload.recipe, workload.statistics
    tensors = inputs.tensors()
    if workload.operator in OPERATOR_NAMES:
        rows = drawn["k_tokens"] + made.k_padding
        assert inputs.pair_bounds()[-1] == drawn["pairs"]
    else:
        rows = drawn["k_tokens"] + made.padding
    own = () if isinstance(made, QuantizeRecipe) else (made.num_kv_heads, made.qk_dim)
    if isinstance(made, NormLinearRecipe):
        own = (made.features,)
    if isinstance(made, QuantizeRecipe):
        own = (made.heads, made.columns) if made.heads > 1 else (made.columns,)
        assert inputs.upstream is None
    if isinstance(made, LinearInputs | MxProjectionRecipe):
        own = (made.features,)
    if isinstance(made, MxNormRecipe):
        own = (made.heads, made.features) if made.heads > 1 else (made.features,)
    for name in {"k", "x"} & set(tensors):
        dense = not inputs.is_jagged and tensors[name].dim() == 3
        x = tensors[name].transpose(0, 1) if dense else tensors[name]
        assert x.shape == (rows, *own)
    if "v" in tensors:
        assert tensors["v"].shape[1:] == (made.num_kv_heads, made.value_dim)
    assert inputs.num_sequences == (1 if made.batch is None else made.batch)
    with torch.no_grad():
        outcome = run(inputs.operator.reference, inputs)
    assert workload.differentiable == bool(inputs.operator.differentiable)
    if isinstance(made, MatmulInputs):
        assert outcome["out"].shape == (made.rows, made.columns)
    elif inputs.operator.codes is None:
        assert outcome["out"].shape == inputs.upstream.shape
    else:
        found = {name: tuple(tensor.shape) for name, tensor in outcome.items()}
        assert found == inputs.operator.codes.shapes(inputs)


@pytest.mark.parametrize(
    "workload", select(purpose="smoke", tag="adversarial"), ids=lambda w: w.name
)
def test_the_truth_of_an_adversarial_workload_is_finite(workload):
    inputs = workload.inputs(dtype=torch.float64)
    outcome = run(inputs.operator.reference, inputs, backward=True)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in outcome.values())


def test_the_bytes_of_a_workload_are_those_of_every_other_machine():
    found = {
        f"{name} {dtype}": fingerprint(CATALOGUE[name].inputs(dtype=getattr(torch, dtype)))
        for name, dtype in BYTES
    }
    assert found == {f"{name} {dtype}": digest for (name, dtype), digest in BYTES.items()}


def test_the_digest_of_a_workload_is_that_of_every_other_machine():
    assert {name: CATALOGUE[name].digest for name in DIGESTS} == DIGESTS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_draws_the_bytes_of_a_cpu(dtype):
    for workload in SMOKE:
        drawn = workload.inputs("cuda", dtype).to(device="cpu")
        assert fingerprint(drawn) == fingerprint(workload.inputs("cpu", dtype)), workload.name


def test_two_draws_are_equal_and_share_no_memory():
    workload = CATALOGUE["gdpa-self-fill0.5-jagged-smoke"]
    first, second = workload.inputs(), workload.inputs()
    assert fingerprint(first) == fingerprint(second)
    assert first.tensors()["q"].data_ptr() != second.tensors()["q"].data_ptr()


def test_upstream_is_left_out_where_it_is_not_wanted():
    assert CATALOGUE["gdpa-tb-pma-smoke"].inputs(upstream=False).upstream is None


def test_every_recipe_is_hashable_and_serialisable():
    for workload in CATALOGUE.values():
        hash(workload.recipe)
        json.dumps(dataclasses.asdict(workload.recipe))


def test_a_digest_tells_laws_of_equal_fields_apart():
    one = dataclasses.replace(CATALOGUE["gdpa-hstu-smoke"], recipe=recipe(values=QKNormalised()))
    other = dataclasses.replace(one, recipe=recipe(values=UniformUnit()))
    assert one.digest != other.digest


def test_a_dense_query_has_an_upstream_gradient_for_every_sequence():
    made = recipe(q_lengths=None, dense_rows=5, k_lengths=Fixed(7))
    inputs = draw(made)
    assert inputs.arguments["q_offsets"] is None
    assert inputs.tensors()["q"].shape == (5, 2, 16)
    assert inputs.upstream.shape == (3, 5, 2, 16)
    assert made.statistics(1)["pairs"] == 3 * 5 * 7


def test_padding_rows_lie_past_the_last_offset():
    inputs = draw(recipe(q_lengths=Explicit((4, 0, 2)), q_padding=3, k_padding=5))
    assert inputs.tensors()["q"].shape[0] == 9
    assert inputs.tensors()["v"].shape[0] == 11
    assert inputs.offsets("q_offsets").tolist() == [0, 4, 4, 6]


def test_a_dense_bias_has_a_row_for_every_pair():
    made = recipe(bias="dense", bias_heads="one", k_lengths=Fixed(6))
    assert draw(made).tensors()["bias"].shape == (made.statistics(1)["pairs"], 1)


@pytest.mark.parametrize("k_lengths", [None, Explicit((9, 0, 4))])
def test_a_log_time_bias_has_a_bucket_for_every_pair(k_lengths):
    made = recipe(q_lengths=Explicit((5, 7, 0)), bias="log_time", k_lengths=k_lengths, buckets=12)
    bias = draw(made).arguments["bias"]
    assert isinstance(bias, BucketedBias)
    assert bias.table.shape == (12, 2)
    assert bias.bucket_ids.numel() == made.statistics(1)["pairs"]
    assert int(bias.bucket_ids.min()) >= 0
    assert int(bias.bucket_ids.max()) < 12
    if k_lengths is None:
        # An event is no time away from itself.
        assert bias.bucket_ids[:25].view(5, 5).diagonal().tolist() == [0] * 5
    assert len(set(bias.bucket_ids.tolist())) > 3


def test_only_options_that_are_set_are_passed():
    assert draw(recipe()).options == {}
    made = recipe(causal=True, align="start", window=(3, None), scale=0.5)
    assert draw(made).options == {
        "causal": True, "align": "start", "window": (3, None), "scale": 0.5
    }  # fmt: skip


def test_statistics_count_visible_pairs_and_waste():
    made = recipe(q_lengths=Explicit((3, 0, 5)), causal=True)
    found = made.statistics(1)
    assert found["visible_pairs"] == 6 + 15
    assert found["pairs"] == 9 + 25
    assert found["padded_pairs"] == 3 * 25
    assert found["empty_sequences"] == 1
    assert found["q_fill"] == pytest.approx(8 / 15)
    assert found["q_max_over_mean"] == pytest.approx(15 / 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dense_rows": 4}, "exactly one of q_lengths and dense_rows"),
        ({"q_lengths": None}, "exactly one of q_lengths and dense_rows"),
        ({"q_lengths": None, "dense_rows": 4}, "needs k_lengths"),
        ({"heads": 4, "kv_heads": 3}, "3 kv_heads do not divide 4 heads"),
        ({"operator": "gdpa"}, "gdpa needs an activation"),
        ({"operator": "gdpa", "activation": "gelu", "scale": 2.0}, "no scale=2.0"),
        ({"operator": "gdpa", "activation": ("gelu",)}, "1 activations for 2 heads"),
        ({"activation": "gelu"}, r"takes no \['activation'\]"),
        ({"operator": "conv"}, "got 'conv'"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        recipe(**changes)


# -- block attention and rotary --------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["block_attention", "rotary"])
def test_every_head_dim_table_and_offsets_type_occurs_in_a_smoke_workload_of(operator):
    made = [w.recipe for w in select(operator=operator, purpose="smoke")]
    assert {16, 32, 64, 72, 80, 96, 104, 128, 192, 256} <= {r.qk_dim for r in made}
    assert {"int32", "int64"} == {r.offsets_type for r in made}
    assert {"position", "log_time"} <= {r.table.kind for r in made}
    assert {"float32", "values"} == {r.table.dtype for r in made}
    for kind in ("position", "log_time"):
        of_kind = [r.table.dim for r in made if r.table.kind == kind]
        assert None in of_kind
        assert any(dim is not None for dim in of_kind)


def test_every_grouping_block_size_and_rotation_of_values_occurs_in_a_smoke_workload():
    made = [w.recipe for w in select(operator="block_attention", purpose="smoke")]
    assert any(r.kv_heads == 1 for r in made)
    assert any(1 < r.num_kv_heads < r.heads for r in made)
    assert any(r.value_dim != r.qk_dim for r in made)
    assert {None, 1, 16, 32, 128} <= {r.block_size for r in made}
    turned = [r.rotate_values for r in made if r.table.kind != "none"]
    assert {None, False} <= set(turned)
    forms = {(r.interleaved, r.inverse) for r in (w.recipe for w in select(operator="rotary"))}
    assert {(None, None), (False, None), (None, True), (False, True)} <= forms


def test_every_tail_of_a_block_occurs_in_a_workload():
    found = CATALOGUE["block_attention-every-tail"].recipe.lengths(0)["offsets"]
    assert {n % 64 for n in found} == set(range(64))
    assert all(n >= 64 for n in found)


def test_the_published_rotary_shape_has_its_number_of_tokens_and_heads():
    for name in ("block_attention-rotary-l2000-1735537-tokens", "rotary-l2000-1735537-tokens"):
        workload = CATALOGUE[name]
        assert workload.statistics["q_tokens"] == 1_735_537
        assert workload.recipe.heads == 3
        assert workload.recipe.table.kind == "position"


def test_histories_beyond_7000_tokens_come_in_batches_of_768():
    for workload in select(tag="block_attn_long", purpose="full"):
        assert workload.recipe.batch == 768
        assert max(workload.recipe.lengths(workload.seed)["offsets"]) > 7000


def test_visible_pairs_of_a_workload_are_those_of_whole_blocks_and_tails():
    found = blocks(sequence_lengths=Explicit((70, 0, 64))).statistics(1)
    assert found["visible_pairs"] == 64 * 64 + 6 * 6 + 64 * 64
    assert found["pairs"] == 70 * 70 + 64 * 64
    assert turns().statistics(1)["visible_pairs"] == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_table_is_drawn_wide_unless_it_is_to_be_like_the_values(dtype):
    made = blocks(table=Table("position", 8))
    assert draw(made, dtype).arguments["rotary"].dtype == torch.float32
    made = blocks(table=Table("position", 8, dtype="values"))
    assert draw(made, dtype).arguments["rotary"].dtype == dtype


def test_a_table_by_position_has_the_rows_of_the_longest_sequence_or_those_asked_for():
    assert draw(turns()).arguments["table"].shape == (7, 16)
    made = turns(table=Table("position", 4, positions=20))
    assert draw(made).arguments["table"].shape == (20, 4)
    assert draw(turns(batch=0, sequence_lengths=Explicit(()))).arguments["table"].shape == (0, 16)


def test_a_table_by_time_has_a_row_for_every_token_and_the_last_event_is_not_turned():
    table = draw(turns(table=Table("log_time"), padding=2)).arguments["table"]
    assert isinstance(table, TokenTable)
    assert table.rows.shape == (14, 16)
    for last in (4, 11, 12, 13):
        assert table.rows[last].tolist() == [0.0] * 8 + [1.0] * 8
    assert (table.rows[:4, :8] != 0).all()


def test_only_options_of_a_block_that_are_set_are_passed():
    assert draw(blocks()).options == {}
    made = blocks(block_size=16, scale=0.5, rotate_values=False, table=Table("position"))
    assert draw(made).options == {"block_size": 16, "scale": 0.5, "rotate_values": False}
    assert draw(turns(interleaved=False, inverse=True)).options == {
        "interleaved": False, "inverse": True
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: blocks(heads=4, kv_heads=3), "3 kv_heads do not divide 4 heads"),
        (lambda: blocks(table=Table("position", 18)), "18 columns does not fit heads of 16"),
        (lambda: blocks(table=Table("position", 7)), "7 columns"),
        (lambda: blocks(table=Table("position"), v_dim=8), "16 columns does not fit heads of 8"),
        (lambda: turns(table=Table()), "does not fit heads of 16"),
    ],
)
def test_a_recipe_of_blocks_that_cannot_be_is_refused(make, words):
    blocks(table=Table("position"), v_dim=8, rotate_values=False)
    with pytest.raises(ValueError, match=words):
        make()


BYTES = {
    ("gdpa-self-fill0.5-jagged-smoke", "bfloat16"): "0234e9866de4ee2d",
    ("jagged_attention-hstu-smoke", "float32"): "57c2905b9da464f8",
    ("jagged_attention-log-time-bias-causal", "float16"): "506c30c3bf96b0c0",
    ("gdpa-strongly-negative-scores", "float32"): "a6b58af8021e23cb",
    ("gdpa-dense-query-gqa", "bfloat16"): "4faa021002277f31",
    ("block_attention-d64-log-time-rotary", "bfloat16"): "0903f4bcc92b82b6",
    ("block_attention-d32-gqa-rotary", "float32"): "d7fe8159961691b6",
    ("rotary-smoke", "float16"): "6c2ab6d5b79c7fa0",
    ("norm_linear-layer-larger-offset", "float32"): "0f680134c3154e10",
    ("norm_linear-rms-k128-n128-wide-affine-bias", "bfloat16"): "8868368634a9b25a",
    ("norm_linear-rms-rows-of-zeros", "float16"): "9d88a9433ee28d1b",
    ("mx_quantize-32x32-boundary-maxima-e4m3-rceil", "float32"): "8843470add535a97",
    ("mx_quantize-1x32-end-scales-e2m1-ceil", "bfloat16"): "70e0f2c88f55a0ab",
    ("mx_quantize-32x1-not-numbers-e5m2-ceil", "float16"): "38407d398ff1509d",
    ("mx_linear-wgrad-mx-outliers", "float32"): "e32369a314b04df5",
    ("mx_matmul-32x32-e4m3-e5m2", "bfloat16"): "76395f534296d946",
    ("mx_attention-gqa-cross", "float16"): "b021d95d6580b928",
    ("mx_gdpa-large-scores", "float32"): "ffb6dfb3ffc329da",
}
DIGESTS = {
    "gdpa-self-l1024-fill0.5-jagged": "61df80dd31f31c54",
    "jagged_attention-history-median800-wide": "c1e01e18b69275b4",
    "gdpa-hstu-l4096": "db31da2712110994",
    "jagged_attention-block-rotary-shape": "601d9784f9176702",
    "gdpa-more-than-65535-sequences": "36e95e7e960462ad",
    "block_attention-l2000-fill0.7": "38f8c9a57f0bd949",
    "block_attention-rotary-l2000-1735537-tokens": "30fcec486e8c58cb",
    "block_attention-l7168-b768-rotary": "4754b0bb6fa39221",
    "rotary-l2000-1735537-tokens": "9468c48b728d7de8",
    "norm_linear-rms-m262144-k512-n512": "57dd9325aca81b17",
    "norm_linear-layer-m524288-k512-n512": "91b081937dbac85e",
    "mx_quantize-1x32-m1048576-k512": "22588a759499ad31",
    "mx_quantize-32x32-jagged-history": "6702460c17936f9b",
    "mx_linear-m262144-k512-n512-wgrad-mx": "01107e2dc5882b75",
    "mx_matmul-1x32-4096": "ea0db866364cee90",
    "mx_attention-tlx-l4096": "06e0b141f53de897",
    "mx_gdpa-self-l1024-fill0.5-jagged": "a7f355e1f19ba031",
}
