"""The judge of outputs that are codes, and mx_quantize as an operator of such outputs."""

import importlib.util

import pytest
import torch
from recording import tree
from repository import ROOT

from jagbench import html
from jagbench.accuracy import judge
from jagbench.codes import judge_codes
from jagbench.execution import run
from jagbench.implementation import of_functions
from jagbench.inputs import Inputs
from jagbench.measure import Settings, measure
from jagbench.mx import BLOCKS, SQUARE
from jagbench.reference import OPERATORS, mx_quantize
from jagbench.result import Record
from jagbench.ring import Ring
from jagbench.suite import explain
from jagbench.timing import QUICK
from jagbench.work import cases, work
from jagbench.workloads import CATALOGUE, select

QUANTIZE = OPERATORS["mx_quantize"]
OFFSETS = (0, 5, 5, 38, 60)


def call(shape=(70, 2, 40), offsets=OFFSETS, **options):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, generator=generator)
    given = None if offsets is None else torch.tensor(offsets)
    return Inputs(QUANTIZE, {"x": x, "offsets": given}, options)


def problems(inputs, outcome, **options):
    return [a.problem for a in judge_codes(inputs, outcome, **options) if not a.ok]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic", "seed": 5}], ids=str)
@pytest.mark.parametrize("shape", [(70, 40), (70, 2, 33)], ids=str)
def test_the_truth_in_pieces_is_the_reference(shape, options, block):
    inputs = call(shape, block=block, **options)
    inputs.tensors()["x"][3] = torch.nan
    outcome = run(mx_quantize, inputs)
    for elements in (None, 200, 3000):
        assert problems(inputs, outcome, elements=elements) == []


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(70, 40), (3, 40, 33)], ids=str)
def test_the_truth_of_a_dense_call_is_the_reference(shape, block):
    inputs = call(shape, None, block=block, rounding="stochastic", seed=9)
    assert problems(inputs, run(mx_quantize, inputs), elements=500) == []


def test_a_dense_row_is_judged_too():
    inputs = call((40,), None)
    assert problems(inputs, run(mx_quantize, inputs)) == []


def test_one_wrong_byte_is_found_and_named():
    inputs = call(block=SQUARE)
    outcome = dict(run(mx_quantize, inputs))
    outcome["codes"] = outcome["codes"].clone()
    outcome["codes"][40, 1, 3] ^= 1
    codes, scales = judge(inputs, outcome)
    assert scales.ok
    assert not codes.ok
    assert codes.error == 1.0
    assert codes.worst_index == (40, 1, 3)
    assert (codes.worst_sequence, codes.worst_position) == (3, 2)
    assert codes.problem is not None
    assert codes.problem.startswith("1 of 5600 bytes differ")
    text = explain.problems([codes, scales])
    assert "first element codes[40, 1, 3]: sequence 3, position 2" in text
    assert "SNR" not in text


def test_a_scale_is_placed_in_the_sequence_that_owns_it():
    inputs = call(block=SQUARE)
    outcome = dict(run(mx_quantize, inputs))
    outcome["scales"] = outcome["scales"].clone()
    # Sequence 2 begins in row 5: its blocks have rows 5 // 32 + 2 and the next.
    outcome["scales"][3, 0, 1] += 1
    scales = judge(inputs, outcome)[1]
    assert (scales.worst_sequence, scales.worst_position) == (2, 1)


@pytest.mark.parametrize(("name", "row"), [("codes", 65), ("scales", 1)])
def test_rows_of_no_sequence_must_hold_0(name, row):
    inputs = call(block=SQUARE)
    outcome = dict(run(mx_quantize, inputs))
    outcome[name] = outcome[name].clone()
    outcome[name][row] = 7
    found = [a for a in judge(inputs, outcome) if not a.ok]
    assert [a.name for a in found] == [name]
    assert "is 0x07, want 0x00" in str(found[0].problem)
    assert found[0].worst_sequence is None


def test_codes_under_a_scale_of_nan_are_free_and_others_are_not():
    inputs = call((64, 40), (0, 64))
    inputs.tensors()["x"][7, 3] = torch.inf
    codes, scales = mx_quantize(*inputs.arguments.values())
    assert int(scales[7, 0]) == 255
    codes[7, :32] = 0x11
    assert problems(inputs, {"codes": codes, "scales": scales}) == []
    codes[7, 32] ^= 1
    assert len(problems(inputs, {"codes": codes, "scales": scales})) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.to(torch.int16), "dtype torch.int16, want torch.uint8"),
        (lambda x: x[:-1], r"shape \(69, 2, 40\), want \(70, 2, 40\)"),
        (lambda x: None, "did not come back"),
    ],
)
def test_an_output_of_another_form_is_wrong(change, words):
    inputs = call()
    outcome = dict(run(mx_quantize, inputs))
    outcome["codes"] = change(outcome["codes"])
    verdict = judge(inputs, {n: t for n, t in outcome.items() if t is not None})[0]
    assert not verdict.ok
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(verdict.problem)


@pytest.mark.parametrize(
    ("elem_dtype", "kind"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_codes_and_scales_may_come_in_the_types_of_torch(elem_dtype, kind):
    def views(*arguments, **options):
        codes, scales = mx_quantize(*arguments, **options)
        return codes.view(kind), scales.view(torch.float8_e8m0fnu)

    inputs = call(elem_dtype=elem_dtype)
    assert problems(inputs, run(views, inputs, backward=True)) == []


@pytest.mark.parametrize("name", ["1x32-smoke", "32x1-smoke", "32x32-smoke"])
def test_work_counts_every_byte_once(name):
    inputs = CATALOGUE[f"mx_quantize-{name}"].inputs(dtype=torch.bfloat16)
    x, offsets = inputs.arguments["x"], inputs.arguments["offsets"]
    _, scales = inputs.call(mx_quantize)
    tall = inputs.options["block"][0]
    blocks = sum(-(-n // tall) for n in offsets.diff().tolist()) * scales.shape[1]
    found = work(inputs, "forward")
    # No padding here: each element is read in two bytes and written in one.
    assert found.bytes_moved == 3 * x.numel() + 8 * len(offsets) + blocks
    assert (found.flop, found.sequences, found.tokens) == (0, len(offsets) - 1, len(x))


def test_work_of_a_dense_call_is_that_of_one_sequence():
    inputs = call((64, 96), None, block=SQUARE)
    found = work(inputs, "forward")
    assert found.bytes_moved == 5 * 64 * 96 + 2 * 3
    assert (found.sequences, found.tokens) == (1, 64)


def test_only_the_forward_of_an_operator_without_gradients_is_measured():
    implementation = of_functions("mine", mx_quantize=mx_quantize)
    workload = CATALOGUE["mx_quantize-1x32-smoke"]
    regions = ("forward", "backward", "forward_backward")
    found = list(cases(implementation, workload, torch.bfloat16, regions))
    assert [(case.region, case.mode) for case in found] == [
        ("forward", "cold"), ("forward", "steady")
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["1x32-smoke", "1x32-e5m2-floor-k72-dense"])
def test_a_ring_of_calls_has_new_values_each_time(name):
    workload = CATALOGUE[f"mx_quantize-{name}"]
    implementation = of_functions("mine", mx_quantize=mx_quantize)
    case = next(iter(cases(implementation, workload, torch.float32)))
    ring = Ring(implementation, workload.inputs(), case, 1)
    seen = []
    for _ in range(3):
        ring.refresh(0)
        outputs = ring.packed(0, ring.call(0))
        assert set(outputs) == {"codes", "scales"}
        assert problems(ring.inputs(0), outputs) == []
        seen.append(outputs["codes"])
    assert not torch.equal(seen[0], seen[1]) or not torch.equal(seen[1], seen[2])


def test_a_backward_that_is_asked_for_all_the_same_is_unsupported():
    workload = CATALOGUE["mx_quantize-1x32-smoke"]
    implementation = of_functions("mine", mx_quantize=mx_quantize)
    forward = next(iter(cases(implementation, workload, torch.float32)))
    record = measured(implementation, workload, forward.model_copy(update={"region": "backward"}))
    assert record.outcome == "unsupported"
    assert record.reason == "region 'backward' of an operator without gradients"


def measured(implementation, workload, case):
    how = Settings(rule=QUICK, ceilings=False, second_clock=False)
    return measure(implementation, workload, case, torch.device("cpu"), settings=how, session="a")


def record_of(function):
    workload = CATALOGUE["mx_quantize-1x32-smoke"]
    implementation = of_functions("mine", mx_quantize=function)
    case = next(iter(cases(implementation, workload, torch.float32)))
    return measured(implementation, workload, case)


def test_a_record_counts_the_bytes_that_differ():
    record = record_of(mx_quantize)
    assert record.outcome == "measured"
    assert [(a.name, a.error, a.allowed) for a in record.accuracies] == [
        ("codes", 0.0, 0.0), ("scales", 0.0, 0.0)
    ]  # fmt: skip


def test_one_wrong_byte_costs_the_time():
    def off_by_one(*arguments, **options):
        codes, scales = mx_quantize(*arguments, **options)
        scales[0, 0] += 1
        return codes, scales

    record = record_of(off_by_one)
    assert (record.outcome, record.timing) == ("wrong", None)
    assert record.reason.startswith("scales: 1 of 234 bytes differ")


def test_reports_show_an_operator_without_gradients(tmp_path):
    made = tree(
        case__operator="mx_quantize", case__workload="mx_quantize-1x32-m1048576-k512",
        case__preparation="none", work__flop=0, work__model_flop=0,
    )  # fmt: skip
    record = Record.model_validate(made)
    path = tmp_path / "page.html"
    html.write_report([record], path, by_bandwidth=frozenset({"mx_quantize"}))
    assert "1x32-m1048576-k512" in path.read_text()


def test_the_readme_table_of_an_operator_without_gradients_is_the_forward_alone(monkeypatch):
    path = ROOT / "benchmarks" / "readme_table.py"
    spec = importlib.util.spec_from_file_location("readme_table", path)
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    workload = "mx_quantize-1x32-m1048576-k512"
    made = tree(
        case__operator="mx_quantize", case__workload=workload, case__preparation="none",
        work__flop=0, work__model_flop=0,
    )  # fmt: skip
    monkeypatch.setattr(table, "records", lambda: [Record.model_validate(made)])
    lines = table.table().splitlines()
    assert "| `mx_quantize`, GB/s (share of a copy's) forward | jagbench.impl |" in lines
    row = next(line for line in lines if "m1048576" in line)
    assert "/" not in row


def test_every_workload_of_codes_says_that_it_has_no_gradients():
    for workload in select():
        assert workload.differentiable == bool(OPERATORS[workload.operator].differentiable)
