import dataclasses
import math

import pytest
import torch
from oracles import Case, call_of

from jagbench import reference, workloads
from jagbench.accuracy import judge
from jagbench.execution import run
from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS

CASES = {
    "jagged": Case([20, 0, 33, 7, 1], [20, 5, 0, 40, 1], kv_heads=2, group=2, qk_dim=16, v_dim=16),
    "dense query": Case(None, [20, 0, 33, 40, 1], rows=6, kv_heads=2, qk_dim=16, v_dim=16),
    "bias": Case([20, 3, 0, 9], [20, 5, 3, 1], qk_dim=16, bias="dense", causal=True),
    "bias table": Case([20, 3, 0, 9], [20, 5, 3, 1], qk_dim=16, kv_heads=2, bias="bucketed"),
    "padding": Case([20, 3, 9], [20, 5, 1], qk_dim=16, padding=(3, 2)),
    "empty batch": Case([], []),
    "all empty": Case([0, 0], [0, 0]),
}
MANY = Case([9] * 40, [9] * 40, kv_heads=2, qk_dim=16, v_dim=16)


def judged(inputs, outcome=None, **options):
    if outcome is None:
        outcome = run(inputs.operator.reference, inputs, backward=True)
    return {accuracy.name: accuracy for accuracy in judge(inputs, outcome, **options)}


def outcome_of(inputs):
    return dict(run(inputs.operator.reference, inputs, backward=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pairs_per_slice", [1, 1 << 22])
@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_within_every_budget(case, pairs_per_slice, dtype):
    inputs = call_of(CASES[case], "jagged_attention", dtype, return_lse=True)
    verdicts = judged(inputs, pairs_per_slice=pairs_per_slice)
    assert {"out", "lse", "grad q", "grad k", "grad v"} <= set(verdicts)
    assert [(v.name, v.problem) for v in verdicts.values() if not v.ok] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["jagged", "dense query", "padding", "empty batch"])
def test_gdpa_is_within_every_budget(case, dtype):
    inputs = call_of(CASES[case], "gdpa", dtype, activation="gelu", pre_scale=0.25)
    assert [(v.name, v.problem) for v in judged(inputs).values() if not v.ok] == []


@pytest.mark.parametrize("name", ["out", "grad q", "grad k", "grad v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("operator", ["jagged_attention", "gdpa"])
def test_one_percent_in_one_sequence_among_many_is_caught_and_located(operator, dtype, name):
    options = {"activation": "silu", "pre_scale": 0.25} if operator == "gdpa" else {}
    inputs = call_of(MANY, operator, dtype, **options)
    outcome = outcome_of(inputs)
    outcome[name][17 * 9 : 18 * 9] *= 1.01
    verdicts = judged(inputs, outcome)
    assert [v.name for v in verdicts.values() if not v.ok] == [name]
    assert verdicts[name].worst_sequence == 17


# In bfloat16 the naive run itself is off by about 1 %.
@pytest.mark.parametrize(("name", "factor"), [("out", 1.05), ("grad q", 1.1), ("grad v", 1.1)])
def test_a_larger_error_in_one_sequence_is_caught_in_bfloat16(name, factor):
    inputs = call_of(MANY, "jagged_attention", torch.bfloat16)
    outcome = outcome_of(inputs)
    outcome[name][17 * 9 : 18 * 9] *= factor
    assert judged(inputs, outcome)[name].bad_sequence == 17


@pytest.mark.parametrize("pairs_per_slice", [1, 200, 1 << 22])
def test_the_worst_element_is_named_by_sequence_and_position(pairs_per_slice):
    case = Case([4, 0, 7, 5], [3, 2, 6, 1], kv_heads=2, padding=(2, 0), v_dim=3)
    inputs = call_of(case, "jagged_attention", torch.float32)
    outcome = outcome_of(inputs)
    outcome["out"][9, 1, 2] += 0.5
    outcome["grad k"][11, 0, 1] -= 0.5
    verdicts = judged(inputs, outcome, pairs_per_slice=pairs_per_slice)
    out, grad_k = verdicts["out"], verdicts["grad k"]
    assert (out.worst_index, out.worst_sequence, out.worst_position) == ((9, 1, 2), 2, 5)
    assert (grad_k.worst_index, grad_k.worst_sequence, grad_k.worst_position) == ((11, 0, 1), 3, 0)
    assert out.worst_error == pytest.approx(0.5, rel=1e-5)
    assert not out.ok
    assert not grad_k.ok


def test_the_worst_pair_of_a_bias_gradient_is_named():
    inputs = call_of(CASES["bias"], "jagged_attention", torch.float32)
    outcome = outcome_of(inputs)
    outcome["grad bias"][403, 0] += 0.5
    verdict = judged(inputs, outcome)["grad bias"]
    assert (verdict.worst_index, verdict.worst_sequence, verdict.worst_position) == ((403, 0), 1, 3)


def test_the_worst_element_of_a_dense_query_is_named():
    inputs = call_of(CASES["dense query"], "jagged_attention", torch.float32)
    outcome = outcome_of(inputs)
    outcome["out"][3, 2, 1, 0] += 0.5
    outcome["grad q"][4, 1, 0] += 0.5
    verdicts = judged(inputs, outcome, pairs_per_slice=1)
    assert verdicts["out"].worst_index == (3, 2, 1, 0)
    assert verdicts["out"].worst_sequence == 3
    assert verdicts["grad q"].worst_index == (4, 1, 0)
    assert verdicts["grad q"].worst_sequence is None


@pytest.mark.parametrize(
    ("case", "name"), [("dense query", "grad q"), ("bias table", "grad bias.table")]
)
def test_a_shared_gradient_is_summed_over_slices(case, name):
    inputs = call_of(CASES[case], "jagged_attention", torch.float32)
    outcome = outcome_of(inputs)
    one, many = (judged(inputs, outcome, pairs_per_slice=n)[name] for n in (1 << 22, 1))
    assert one.ok
    assert many.ok
    assert many.error == pytest.approx(one.error, rel=1e-6)
    outcome[name] = outcome[name] * 1.01
    for pairs_per_slice in (1 << 22, 1):
        assert not judged(inputs, outcome, pairs_per_slice=pairs_per_slice)[name].ok


def test_a_shared_gradient_that_misses_one_sequence_is_caught():
    inputs = call_of(CASES["dense query"], "jagged_attention", torch.float32)
    outcome = outcome_of(inputs)
    outcome["grad q"] = outcome_of(inputs.select([0, 1, 3, 4]))["grad q"]
    assert not judged(inputs, outcome, pairs_per_slice=1)["grad q"].ok


@pytest.mark.parametrize("change", ["fewer rows", "more rows", "no heads", "transposed"])
@pytest.mark.parametrize("name", ["out", "lse", "grad k", "grad bias"])
def test_a_wrong_shape_is_a_verdict_and_no_crash(name, change):
    inputs = call_of(CASES["bias"], "jagged_attention", torch.float32, return_lse=True)
    outcome = outcome_of(inputs)
    value = outcome[name]
    outcome[name] = {
        "fewer rows": value[:-1],
        "more rows": torch.cat([value, value[:1]]),
        "no heads": value.flatten(),
        "transposed": value.transpose(0, -1),
    }[change]
    if outcome[name].shape == value.shape:
        pytest.skip("the change leaves this shape alone")
    assert "shape" in judged(inputs, outcome)[name].problem


@pytest.mark.parametrize("shape", [(5, 2, 16), (7, 2, 16), (6, 16)])
def test_a_wrong_shape_of_a_shared_gradient_is_a_verdict(shape):
    inputs = call_of(CASES["dense query"], "jagged_attention", torch.float32)
    outcome = outcome_of(inputs)
    outcome["grad q"] = torch.zeros(shape)
    assert "shape" in judged(inputs, outcome)["grad q"].problem


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["out", "lse", "grad v"])
def test_one_element_that_is_not_finite_is_caught_and_located(name, poison):
    inputs = call_of(CASES["jagged"], "jagged_attention", torch.float32, return_lse=True)
    outcome = outcome_of(inputs)
    outcome[name].view(outcome[name].shape[0], -1)[3, 1] = poison
    verdict = judged(inputs, outcome)[name]
    assert not verdict.ok
    assert verdict.worst_error == math.inf
    assert verdict.worst_index[0] == 3
    assert verdict.snr_db == -math.inf


def test_a_finite_lse_on_a_row_that_sees_nothing_is_caught():
    inputs = call_of(CASES["jagged"], "jagged_attention", torch.float32, return_lse=True)
    outcome = outcome_of(inputs)
    assert (outcome["lse"][20:53] == -math.inf).all()
    outcome["lse"][20:53] = -1e9
    assert not judged(inputs, outcome)["lse"].ok


@pytest.mark.parametrize("case", ["jagged", "dense query", "bias", "bias table"])
def test_zeros_in_place_of_any_tensor_are_caught(case):
    inputs = call_of(CASES[case], "jagged_attention", torch.bfloat16, return_lse=True)
    outcome = {name: torch.zeros_like(value) for name, value in outcome_of(inputs).items()}
    assert [v.name for v in judged(inputs, outcome).values() if v.ok] == []


def test_rows_past_the_last_offset_are_not_judged_here():
    inputs = call_of(CASES["padding"], "jagged_attention", torch.float32)
    outcome = outcome_of(inputs)
    outcome["out"][-1] = math.nan
    assert judged(inputs, outcome)["out"].ok


def test_an_exact_result_has_infinite_signal_to_noise():
    inputs = call_of(CASES["jagged"], "jagged_attention", torch.float64)
    verdict = judged(inputs)["out"]
    assert verdict.error == 0
    assert verdict.snr_db == math.inf


def test_the_signal_to_noise_ratio_is_that_of_the_error():
    inputs = call_of(CASES["jagged"], "jagged_attention", torch.float64)
    outcome = outcome_of(inputs)
    outcome["out"] = outcome["out"] * 1.1
    assert judged(inputs, outcome)["out"].snr_db == pytest.approx(20, rel=1e-9)


def test_a_forward_only_outcome_is_judged_forward_only():
    inputs = call_of(CASES["jagged"], "jagged_attention", torch.float32)
    verdicts = judged(inputs, run(inputs.operator.reference, inputs))
    assert list(verdicts) == ["out"]


def one_token_sequences(dtype: torch.dtype) -> Inputs:
    """Softmax over one key: the gradients of q and k are exactly 0."""
    generator = torch.Generator().manual_seed(4)
    q, k, v, g = (torch.randn(9, 2, 16, generator=generator).to(dtype) for _ in range(4))
    offsets = torch.arange(10, dtype=torch.int32)
    arguments = {"q": q, "k": k, "v": v, "q_offsets": offsets, "k_offsets": offsets}
    return Inputs(OPERATORS["jagged_attention"], arguments, {}, g)


def test_a_gradient_that_cancels_to_zero_may_have_the_rounding_of_its_terms() -> None:
    inputs = one_token_sequences(torch.bfloat16)
    outcome = dict(run(inputs.operator.reference, inputs, backward=True))
    terms = run(inputs.operator.uncancelled, inputs, backward=True)
    outcome["grad q"] = (terms["grad q"] * 2**-9).to(torch.bfloat16)
    assert all(a.ok for a in judge(inputs, outcome))
    outcome["grad q"] = (terms["grad q"] * 2**-5).to(torch.bfloat16)
    assert [a.name for a in judge(inputs, outcome) if not a.ok] == ["grad q"]


def test_an_infinite_budget_excuses_no_nan() -> None:
    """A naive run that overflows sets no bound; what is not finite is wrong all the same."""
    inputs = one_token_sequences(torch.float16)
    inputs = inputs.replace(v=torch.full_like(inputs.arguments["v"], 6e4))
    inputs = inputs.with_options(scale=1.0)
    outcome = dict(run(inputs.operator.reference, inputs))
    outcome["out"] = torch.full_like(outcome["out"], float("nan"))
    (verdict,) = judge(inputs, outcome)
    assert verdict.problem == "not finite where the truth is"


def test_a_naive_run_that_overflows_excuses_nothing_but_an_overflow():
    inputs = workloads.CATALOGUE["gdpa-self-fill0.5-jagged-smoke"].inputs("cpu", torch.float16)
    large = inputs.replace(**{name: inputs.tensors()[name] * 40 for name in ("q", "k", "v")})
    (right,) = judge(large, run(reference.gdpa, large))
    assert right.ok, right.problem
    zeros = {"out": torch.zeros_like(run(reference.gdpa, large)["out"])}
    (wrong,) = judge(large, zeros)
    assert not wrong.ok
    assert wrong.allowed < wrong.error


def test_rows_bound_the_slices_of_an_operator_with_one_offsets_argument():
    inputs = workloads.CATALOGUE["block_attention-d16-moderate"].inputs()
    outcome = run(inputs.operator.reference, inputs, backward=True)
    rows, longest = sum(inputs.lengths("offsets")), max(inputs.lengths("offsets"))
    sizes = []

    def spy(*arguments, **options):
        sizes.append(arguments[0].shape[0])
        return inputs.operator.reference(*arguments, **options)

    operator = dataclasses.replace(inputs.operator, reference=spy)
    judge(dataclasses.replace(inputs, operator=operator), outcome, pairs_per_slice=16 * 700)
    assert max(sizes) <= max(700, longest) < rows
    assert sum(sizes) == 2 * rows
