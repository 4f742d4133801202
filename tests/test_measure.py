"""Records of real calls: what was timed was right, and what was not right has no time."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from jagbench import measure, reference, result, workloads
from jagbench.implementation import Prepared, of_functions
from jagbench.measure import Measurement, Settings, measure_pair
from jagbench.physics import physical_floor
from jagbench.ring import Ring
from jagbench.timing import QUICK
from jagbench.work import cases, work

CPU = torch.device("cpu")
WORKLOAD = workloads.CATALOGUE["jagged_attention-self-fill0.5-jagged-smoke"]
SETTINGS = Settings(rule=dataclasses.replace(QUICK, least=3, most=3), ceilings=False)
attention = reference.jagged_attention


def case(region="forward", mode="cold", preparation="none", workload=WORKLOAD):
    return result.Case(
        operator=workload.operator,
        workload=workload.name,
        digest=workload.digest,
        dtype="float32",
        region=region,
        mode=mode,
        preparation=preparation,
    )


def record(function, **changes):
    implementation = of_functions("stranger", jagged_attention=function)
    return measure.measure(implementation, WORKLOAD, case(**changes), CPU, settings=SETTINGS)


@pytest.mark.parametrize("mode", ["cold", "steady"])
@pytest.mark.parametrize("region", ["forward", "backward", "forward_backward"])
def test_a_right_implementation_is_measured(region, mode):
    found = record(attention, region=region, mode=mode)
    assert found.outcome == "measured", found.reason
    assert len(found.timing.samples_seconds) == 3
    assert found.timing.calls_per_sample == (1 if mode == "cold" else 2)
    names = {accuracy.name for accuracy in found.accuracies}
    gradients = {"grad q", "grad k", "grad v"}
    wanted = {"forward": {"out"}, "backward": gradients, "forward_backward": {"out"} | gradients}
    assert names == wanted[region]
    assert found.seconds > 0
    assert found.flop_per_second == found.work.flop / found.seconds


def test_an_implementation_that_keeps_its_output_is_wrong():
    kept = []

    def cached(*arguments, **options):
        if not kept:
            kept.append(attention(*arguments, **options))
        return kept[0]

    found = record(cached)
    assert found.outcome == "wrong"
    assert found.timing is None
    assert "out" in found.reason


def test_an_implementation_that_skips_work_on_tensors_it_has_seen_is_wrong():
    seen = {}

    def skipping(q, *arguments, **options):
        if q.data_ptr() not in seen:
            seen[q.data_ptr()] = attention(q, *arguments, **options)
        return seen[q.data_ptr()]

    assert record(skipping, mode="steady").outcome == "wrong"


def test_one_that_is_wrong_only_after_the_first_calls_is_found():
    calls = []

    def worn(*arguments, **options):
        calls.append(1)
        out = attention(*arguments, **options)
        return out if len(calls) < 3 else out * 1.01

    assert record(worn).outcome == "wrong"


def test_a_nan_outside_the_judged_sequences_is_found():
    def spoiled(q, k, v, q_offsets, k_offsets, **options):
        out = attention(q, k, v, q_offsets, k_offsets, **options)
        out[-1, -1, -1] = torch.nan
        return out

    found = record(spoiled)
    assert found.outcome == "wrong"
    assert "1 NaN" in found.reason


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (NotImplementedError("no windows here"), "unsupported"),
        (RuntimeError("misaligned address"), "crashed"),
        (torch.cuda.OutOfMemoryError("tried to allocate 9 GiB"), "out of memory"),
        (MemoryError("9 GiB"), "out of memory"),
    ],
)
def test_what_an_implementation_raises_becomes_a_typed_outcome(error, outcome):
    def raising(*arguments, **options):
        raise error

    found = record(raising)
    assert (found.outcome, found.timing) == (outcome, None)
    assert str(error) in found.reason


def test_a_missing_operator_is_unsupported():
    found = measure.measure(of_functions("empty"), WORKLOAD, case(), CPU, settings=SETTINGS)
    assert found.outcome == "unsupported"


def test_a_time_below_the_physical_floor_is_invalid(monkeypatch):
    slow = result.Ceiling(
        flop_per_second=1.0, bytes_per_second=1.0, source="test", date="2026-11-30"
    )
    monkeypatch.setattr(measure.hardware, "datasheet", lambda *_: slow)
    found = record(attention)
    assert found.outcome == "invalid"
    assert "below the physical floor" in found.reason
    assert found.timing is not None
    assert found.seconds is None


def test_the_floor_is_the_slower_of_arithmetic_and_memory():
    amount = result.Work(flop=250, model_flop=200, bytes_moved=30, sequences=1, tokens=1)

    def ceiling(flop, moved):
        return result.Ceiling(
            flop_per_second=flop, bytes_per_second=moved, source="s", date="2026-11-30"
        )

    assert physical_floor(amount, ceiling(100.0, 100.0), None) == 2.0
    assert physical_floor(amount, ceiling(100.0, 10.0), ceiling(50.0, 15.0)) == 2.0
    assert physical_floor(amount, None, ceiling(100.0, None)) == pytest.approx(200 / 135)
    assert physical_floor(amount, None, None) is None


def test_every_refresh_gives_values_the_tensors_have_not_held():
    source = WORKLOAD.inputs(CPU, torch.float32)
    ring = Ring(of_functions("r", jagged_attention=attention), source, case(), 2)
    seen = set()
    for _ in range(5):
        for member in range(2):
            ring.refresh(member)
            rows = ring.inputs(member).tensors()["q"]
            seen.add(float(rows[0, 0, 0]))
            assert torch.equal(rows.sort(0).values, source.tensors()["q"].sort(0).values)
    assert len(seen) > 5


def test_rows_past_the_last_offset_are_left_alone():
    source = WORKLOAD.inputs(CPU, torch.float32)
    q = torch.cat([source.tensors()["q"], torch.full((3, 2, 64), torch.nan)])
    padded = source.replace(q=q)
    ring = Ring(of_functions("r", jagged_attention=attention), padded, case(), 1)
    ring.refresh(0)
    rows = ring.inputs(0).tensors()["q"]
    assert bool(rows[-3:].isnan().all())
    assert not bool(rows[:-3].isnan().any())


def prepared_namespace(wrong=False):
    """Keeps q, k, v with heads first once prepared."""

    def prepare(operator, inputs):
        tensors = {n: inputs.tensors()[n].transpose(0, 1).contiguous() for n in ("q", "k", "v")}
        offsets = inputs.arguments["q_offsets"]

        def call(q, k, v):
            rows = [x.transpose(0, 1) for x in (q, k, v)]
            out = attention(*rows, offsets, offsets).transpose(0, 1)
            return out * 1.1 if wrong else out

        upstream = inputs.upstream.transpose(0, 1)
        return Prepared(tensors, call, upstream, lambda _, x: x.transpose(0, 1))

    return SimpleNamespace(jagged_attention=attention, prepare=prepare, __version__="1")


def of_namespace(namespace):
    return dataclasses.replace(of_functions("prepared"), namespace=namespace)


@pytest.mark.parametrize("region", ["forward", "backward"])
def test_a_preparation_is_left_out_and_its_result_still_judged(region):
    for wrong, outcome in ((False, "measured"), (True, "wrong")):
        found = measure.measure(
            of_namespace(prepared_namespace(wrong)), WORKLOAD,
            case(region, preparation="excluded"), CPU, settings=SETTINGS,
        )  # fmt: skip
        assert found.outcome == outcome, found.reason


def test_a_preparation_is_timed_alone():
    found = measure.measure(
        of_namespace(prepared_namespace()), WORKLOAD, case(preparation="alone"), CPU,
        settings=SETTINGS,
    )  # fmt: skip
    assert found.outcome == "measured", found.reason
    assert {accuracy.name for accuracy in found.accuracies} == {"out"}


def with_prepare(prepare):
    return of_namespace(SimpleNamespace(jagged_attention=attention, prepare=prepare))


def of_prepared(namespace, preparation):
    return measure.measure(
        namespace, WORKLOAD, case(preparation=preparation), CPU, settings=SETTINGS
    )


def test_a_preparation_that_computes_the_answer_is_wrong():
    def prepare(operator, inputs):
        answer = inputs.call(attention)
        tensors = {n: inputs.tensors()[n].clone() for n in ("q", "k", "v")}
        return Prepared(tensors, lambda **_: answer.clone(), inputs.upstream, lambda _, x: x)

    assert of_prepared(with_prepare(prepare), "excluded").outcome == "wrong"


@pytest.mark.parametrize("view", [True, False])
def test_a_preparation_may_be_a_view_of_the_arguments_or_a_copy(view):
    workload = workloads.CATALOGUE["jagged_attention-padding-past-the-last-offset"]

    def prepare(operator, inputs):
        offsets = [inputs.arguments[name] for name in ("q_offsets", "k_offsets")]
        ends = {"q": int(offsets[0][-1]), "k": int(offsets[1][-1]), "v": int(offsets[1][-1])}
        tensors = {n: inputs.tensors()[n][:end] for n, end in ends.items()}
        if not view:
            tensors = {n: x.clone() for n, x in tensors.items()}
        rest = inputs.upstream.shape[0] - ends["q"]

        def unpack(name, x):
            gap = inputs.tensors()[name.removeprefix("grad ")].shape[0] if " " in name else None
            gap = rest if gap is None else gap - x.shape[0]
            return torch.cat([x, x.new_zeros(gap, *x.shape[1:])])

        def call(q, k, v):
            return attention(q, k, v, *offsets, **inputs.options)

        return Prepared(tensors, call, inputs.upstream[: ends["q"]], unpack)

    for region in ("forward", "backward"):
        asked = case(region, preparation="excluded", workload=workload)
        found = measure.measure(with_prepare(prepare), workload, asked, CPU, settings=SETTINGS)
        assert found.outcome == "measured", found.reason


def test_an_unpacking_that_computes_the_answer_is_wrong():
    def prepare(operator, inputs):
        tensors = {n: inputs.tensors()[n].clone() for n in ("q", "k", "v")}

        def unpack(name, x):
            rest = [inputs.arguments[n] for n in ("q_offsets", "k_offsets")]
            return attention(tensors["q"], tensors["k"], tensors["v"], *rest)

        return Prepared(tensors, lambda q, **_: torch.zeros_like(q), inputs.upstream, unpack)

    found = of_prepared(with_prepare(prepare), "excluded")
    assert found.outcome == "wrong"
    assert "unpack" in found.reason


@pytest.mark.parametrize("preparation", ["excluded", "alone"])
def test_a_preparation_of_another_kind_is_wrong(preparation):
    found = of_prepared(with_prepare(lambda operator, inputs: 42), preparation)
    assert found.outcome == "wrong"
    assert "prepare returned int" in found.reason


def zeroing(name):
    def function(q, k, v, q_offsets, k_offsets, **options):
        out = attention(q, k, v, q_offsets, k_offsets, **options)
        {"q": q, "k": k, "v": v, "q_offsets": q_offsets, "k_offsets": k_offsets}[name].zero_()
        return out if name == "k_offsets" else torch.zeros_like(out)

    return function


@pytest.mark.parametrize("name", ["q", "k", "v", "q_offsets", "k_offsets"])
def test_an_implementation_that_writes_into_its_arguments_is_wrong(name):
    found = record(zeroing(name))
    assert found.outcome == "wrong"
    assert f"of {name} were written" in found.reason


class _Late(torch.Tensor):
    """Puts its work off."""


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: out.to(torch.bfloat16), "torch.bfloat16"),
        (lambda out: out.double(), "torch.float64"),
        (lambda out: torch.cat([out, out]), "want torch.float32"),
        (lambda out: out[:3], "want torch.float32"),
        (lambda out: out.as_subclass(_Late), "_Late"),
        (lambda out: out.numpy(), "ndarray"),
        (lambda out: None, "NoneType"),
    ],
)
def test_an_output_of_another_type_dtype_or_shape_is_wrong(spoil, words):
    found = record(lambda *a, **o: spoil(attention(*a, **o)))
    assert found.outcome == "wrong", found.reason
    assert words in found.reason


def test_coarse_products_allowed_for_the_whole_process_loosen_no_budget():
    before = torch.get_float32_matmul_precision()

    def coarse(*arguments, **options):
        torch.set_float32_matmul_precision("medium")
        return attention(*arguments, **options).bfloat16().float()

    try:
        found = record(coarse)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert found.outcome == "wrong"


def test_a_description_that_fails_or_is_huge_costs_no_time():
    def fails(operator, inputs):
        raise NotImplementedError("not today")

    def huge(operator, inputs):
        return {f"choice {i}": "x" * 10**6 for i in range(1000)}

    for describe in (fails, huge):
        namespace = SimpleNamespace(jagged_attention=attention, configuration=describe)
        found = measure.measure(of_namespace(namespace), WORKLOAD, case(), CPU, settings=SETTINGS)
        assert found.outcome == "measured", found.reason
        assert len(found.configuration) <= 64
        assert all(len(text) < 600 for text in found.configuration.values())
    assert not found.flags or "raised" not in found.flags[0]


def test_cases_name_preparations_only_where_there_are_any():
    plain = of_functions("plain", jagged_attention=attention)
    assert {c.preparation for c in cases(plain, WORKLOAD, torch.float32)} == {"none"}
    found = list(cases(of_namespace(prepared_namespace()), WORKLOAD, torch.float32))
    alone = [c for c in found if c.preparation == "alone"]
    assert {c.preparation for c in found} == {"included", "excluded", "alone"}
    assert {c.region for c in alone} == {"forward"}


def test_work_counts_what_each_region_must_read_and_write():
    inputs = WORKLOAD.inputs(CPU, torch.float32)
    sizes = {n: t.numel() * t.element_size() for n, t in inputs.tensors().items()}
    values, offsets = sizes["q"] + sizes["k"] + sizes["v"], sizes["q_offsets"] + sizes["k_offsets"]
    out = inputs.upstream.numel() * 4
    forward, backward, both = (work(inputs, r) for r in measure_regions())
    assert forward.bytes_moved == inputs.operator.bytes_moved(inputs)
    assert backward.bytes_moved == 2 * values + offsets + out
    assert both.bytes_moved == forward.bytes_moved + out + values
    assert (backward.flop, both.flop) == (2.5 * forward.flop, 3.5 * forward.flop)
    assert (backward.model_flop, both.model_flop) == (2 * forward.flop, 3 * forward.flop)
    assert forward.sequences == inputs.num_sequences


def test_a_linear_operator_does_not_read_its_argument_again_in_the_backward():
    inputs = workloads.CATALOGUE["rotary-smoke"].inputs(CPU, torch.float32)
    sizes = {n: t.nbytes for n, t in inputs.tensors().items()}
    backward = work(inputs, "backward")
    assert backward.bytes_moved == 2 * sizes["x"] + sizes["table"] + sizes["offsets"]
    assert backward.flop == work(inputs, "forward").flop
    assert backward.tokens == inputs.tensors()["x"].shape[0] == 113


@pytest.mark.parametrize("region", ["backward", "forward_backward"])
@pytest.mark.parametrize(
    "name",
    [
        "rotary-padding-past-the-last-offset",
        "block_attention-padding-past-the-last-offset-rotary",
        "norm_linear-layer-padding-past-the-last-offset",
        "pffn_block-padding-past-the-last-offset-silu",
        "jagged_attention-padding-past-the-last-offset",
    ],
)
def test_rows_past_the_last_offset_count_in_no_region(name, region):
    padded = workloads.CATALOGUE[name].inputs(CPU, torch.float32)
    packed = padded.select(range(padded.num_sequences))
    assert padded.upstream.shape[0] > packed.upstream.shape[0]
    assert work(padded, region).bytes_moved == work(packed, region).bytes_moved


def measure_regions():
    return "forward", "backward", "forward_backward"


def test_a_single_operator_has_no_step():
    found = record(attention, region="step")
    assert found.outcome == "unsupported"


def test_two_implementations_take_turns():
    log = []

    def noting(name):
        def function(*arguments, **options):
            log.append(name)
            return attention(*arguments, **options)

        return function

    def measurement(name):
        implementation = of_functions(name, jagged_attention=noting(name))
        return Measurement(implementation, WORKLOAD, case(), CPU, SETTINGS)

    first, second = measure_pair(measurement("a"), measurement("b"))
    assert (first.who.name, second.who.name) == ("a", "b")
    assert "".join(log[-6:]) == "abbaab"


def test_the_key_of_a_measurement_is_that_of_its_record():
    measurement = Measurement(
        of_functions("r", jagged_attention=attention), WORKLOAD, case(), CPU, SETTINGS
    )
    assert measure.finish(measurement).key == measurement.key
