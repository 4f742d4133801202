import io
import json
import random
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from jagbench import compare_view, store
from jagbench.compare import Selection, a_a, compare, resolve
from jagbench.published import Claim
from jagbench.result import Accuracy, Case, Ceiling, Provenance, Record, Timing, Who, Work

BEGIN = datetime(2026, 11, 30, tzinfo=UTC)
CASE = Case(
    operator="gdpa", workload="gdpa-self-l512", digest="00aa", dtype="bfloat16",
    region="forward", mode="cold",
)  # fmt: skip
ACCURACY = Accuracy(name="out", error=1e-3, allowed=2e-3, naive=1e-3)
BASE = "peers.base"
MINE = "mine.kernels"


def samples(seconds=1e-3, *, seed=0, count=40, spread=0.01):
    draw = random.Random(seed)
    return tuple(seconds * (1 + spread * draw.gauss(0, 1)) for _ in range(count))


def record(
    who=BASE, *, case=CASE, hardware="nvidia-h200", session="s1", day=0, commit="4a5f1cf2" * 5,
    seconds=1e-3, times=None, outcome="measured", reason=None, accuracies=(ACCURACY,), flags=(),
    clock="cuda events", torch="2.13.0", ceiling=None, source="5e5e", configuration=(), **changes,
):  # fmt: skip
    if times is None:
        times = samples(seconds, seed=f"{who} {hardware} {session} {changes}")
    measured = outcome in ("measured", "invalid")
    return Record(
        date=BEGIN + timedelta(days=day),
        session=session,
        hardware=hardware,
        who=Who(name=who, version="1", source=source),
        case=case.model_copy(update=changes),
        outcome=outcome,
        reason=reason,
        flags=flags,
        work=Work(
            flop=3 * 10**11, model_flop=3 * 10**11, bytes_moved=10**9, sequences=64, tokens=9
        ),
        timing=Timing(samples_seconds=times, clock=clock) if measured else None,
        accuracies=accuracies,
        datasheet=ceiling,
        measured_ceiling=ceiling,
        configuration=dict(configuration),
        provenance=Provenance(
            jagbench="1", commit=commit, dirty=False, python="3.11", torch=torch, triton="3.7",
            numpy="2", platform="Linux", device="NVIDIA H200", driver="580", cuda="13.0",
        ),
    )  # fmt: skip


def workloads(*names, who=BASE, seconds=1e-3, **options):
    return [
        record(who, workload=name, digest=f"hash of {name}", seconds=seconds, **options)
        for name in names
    ]


# Verdicts


def test_a_slow_case_is_found_among_the_same_ones():
    baseline = workloads("a", "b", "c", "d")
    candidate = [*workloads("a", "b", "c", who=MINE), *workloads("d", who=MINE, seconds=1.1e-3)]
    found = compare(baseline, candidate)
    assert [row.verdict for row in found.rows] == ["slower", "same", "same", "same"]
    worst = found.worst(1)[0]
    assert worst.case.workload == "d"
    assert worst.ratio == pytest.approx(1.1, rel=0.02)
    assert worst.ratio == pytest.approx(worst.candidate_seconds / worst.baseline_seconds)
    assert worst.low < worst.ratio < worst.high
    assert worst.speed_up == pytest.approx(1 / worst.ratio)
    assert found.refused == ()


def test_rows_are_sorted_worst_first_and_the_summary_shows_three():
    names = ("a", "b", "c", "d")
    candidate = [
        one
        for name, seconds in zip(names, (0.5e-3, 1.3e-3, 1e-3, 1.2e-3), strict=True)
        for one in workloads(name, who=MINE, seconds=seconds)
    ]
    found = compare(workloads(*names), candidate)
    assert [row.case.workload for row in found.rows] == ["b", "d", "c", "a"]
    summary = found.summary
    assert [row.case.workload for row in summary.worst] == ["b", "d", "c"]
    assert summary.geometric_mean == pytest.approx((0.5 * 1.3 * 1.2) ** 0.25, rel=0.02)
    assert summary.verdicts == {"slower": 2, "faster": 1, "same": 1, "undecided": 0}
    text = compare_view.summary(found)
    assert all(name in text for name in ("Geometric mean", "gdpa b", "gdpa d", "gdpa c"))


def test_records_made_side_by_side_are_compared_within_their_session():
    apart = compare([record()], [record(MINE, session="s2")]).rows[0]
    together = compare([record()], [record(MINE)]).rows[0]
    assert together.high / together.low < apart.high / apart.low


def test_the_newest_session_counts_with_all_its_samples():
    old = record(MINE, session="old", day=0, seconds=2e-3)
    new = [record(MINE, session="new", day=d, times=samples(1e-3, seed=d)) for d in (1, 2)]
    (row,) = compare([record()], [new[0], old, new[1]]).rows
    assert row.verdict == "same"
    (all_of_it,) = compare([record()], [new[0], old, new[1]], sessions="all").rows
    assert all_of_it.candidate_seconds == pytest.approx(2**0.5 * 1e-3, rel=0.02)
    assert all_of_it.verdict == "undecided"


def test_other_sources_are_never_mixed_into_a_side():
    old = record(MINE, session="old", seconds=2e-3, source="0ld0")
    new = record(MINE, session="new", day=1)
    (row,) = compare([record()], [old, new], sessions="all").rows
    assert row.verdict == "same"


def test_a_newer_failure_hides_an_older_time():
    old = record(MINE, session="old")
    new = record(MINE, session="new", day=1, outcome="wrong", reason="NaN in out")
    found = compare([record()], [old, new])
    assert not found.rows
    assert found.refused[0].reason == "candidate is wrong: NaN in out"


def test_what_has_nothing_to_prepare_stands_beside_both_views_of_what_has():
    views = [record(preparation=view) for view in ("included", "excluded")]
    plain = record(MINE, preparation="none")
    found = compare(views, [plain])
    assert {row.case.preparation for row in found.rows} == {"included", "excluded"}
    assert found.refused == ()
    turned = compare([plain], views[1:])
    assert [row.case.preparation for row in turned.rows] == ["excluded"]
    both = compare([record(preparation="none")], [plain])
    assert [row.case.preparation for row in both.rows] == ["none"]


def test_the_order_of_the_file_goes_before_a_clock_that_was_set_back():
    old = record(MINE, session="old", day=5)
    new = record(MINE, session="new", day=1, outcome="wrong", reason="NaN in out")
    found = compare([record()], [old, new])
    assert found.refused[0].reason == "candidate is wrong: NaN in out"
    lines = compare_view.hardware_lines([old, new])
    assert lines[1].startswith("  wrong")


def test_each_view_of_a_pair_is_compared_with_what_stood_beside_it():
    peer = [
        record(preparation=p, session=f"s1-{p}", seconds=1e-3) for p in ("included", "excluded")
    ]
    mine = [
        record(MINE, preparation="none", session="s1-included", seconds=1e-3),
        record(MINE, preparation="none", session="s1-excluded", seconds=2e-3),
    ]
    for sides, wanted in (((peer, mine), (1.0, 2.0)), ((mine, peer), (1.0, 0.5))):
        rows = {row.case.preparation: row.ratio for row in compare(*sides).rows}
        assert rows["included"] == pytest.approx(wanted[0], rel=0.02)
        assert rows["excluded"] == pytest.approx(wanted[1], rel=0.02)


def test_code_measured_again_alone_is_not_hidden_by_an_older_pair():
    mine = [record(MINE, seconds=2e-3), record(MINE, session="s2", day=1, source="new")]
    assert compare([record()], mine).rows[0].ratio == pytest.approx(1.0, rel=0.02)


def test_two_sources_of_one_session_are_not_pooled():
    old = record(MINE, seconds=2e-3, source="0ld0")
    (row,) = compare([record()], [old, record(MINE)]).rows
    assert row.candidate_seconds == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize("sessions", ["newest", "all"])
def test_failures_of_the_same_code_are_told_beside_its_time(sessions):
    failed = [
        record(MINE, session="bad", outcome="wrong", reason="NaN"),
        record(MINE, session="bad", outcome="wrong", reason="NaN"),
        record(MINE, session="worse", outcome="timed out", reason="60 s"),
        record(MINE, session="else", outcome="crashed", reason="x", source="0ld0"),
    ]
    found = compare([record()], [*failed, record(MINE, session="lucky")], sessions=sessions)
    told = [reason for one in (*found.rows, *found.refused)
            for reason in (getattr(one, "flags", ()) or [one.reason])]  # fmt: skip
    if sessions == "newest":
        assert told == [
            "candidate: also wrong in session bad (2 times)",
            "candidate: also timed out in session worse",
        ]
    else:
        assert told == ["candidate is wrong: NaN; candidate is timed out: 60 s"]


def test_an_a_a_of_what_also_failed_says_so():
    failed = record(session="bad", outcome="wrong", reason="NaN")
    found = a_a([failed, record(), record(day=1)])
    assert found.comparison.rows[0].flags == ("also wrong in session bad",)


def test_choices_that_differ_under_one_key_are_noted():
    twice = [
        record(MINE, session=name, configuration={"tile": tile, "warps": "4"})
        for name, tile in (("s1", "64"), ("s2", "128"))
    ]
    note = (
        "configuration differs between records of the same code: tile: 64, 128 "
        "(gdpa-self-l512 forward)"
    )
    assert a_a(twice).comparison.notes == (note,)
    assert note in a_a(twice).to_json()
    assert compare([record()], twice, sessions="all").notes == (note,)
    assert compare([record()], twice).notes == ()
    assert compare(twice[:1], twice[1:]).notes == (note,)


def test_nothing_to_prepare_hides_no_implementation_and_is_not_hidden():
    peer = record("peers.c", preparation="included")
    sides = [record(MINE, preparation="none"), record(preparation="included")]
    with pytest.raises(ValueError, match=r"candidate holds 2 .* choose one"):
        compare([peer], sides)
    # What had something to prepare before and has nothing now: the last record counts.
    sides = [record(MINE, preparation="included", seconds=2e-3), record(MINE, preparation="none")]
    for order, seconds in ((sides, 1e-3), (sides[::-1], 2e-3)):
        found = compare([peer], order)
        assert found.rows[0].candidate_seconds == pytest.approx(seconds, rel=0.02)
        assert (len(found.rows), found.refused) == (1, ())


def test_by_hardware_nothing_to_prepare_stands_beside_both_views_too():
    views = [record(hardware="nvidia-b200", preparation=v) for v in ("included", "excluded")]
    found = compare([record(preparation="none")], views, by="hardware")
    assert [row.held for row in found.rows] == [BASE, BASE]
    assert found.refused == ()


# Refusals


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"digest": "00bb"}, "unlike", "unlike workload hash: baseline 00aa, candidate 00bb"),
        ({"region": "backward"}, "unlike", "unlike region: baseline forward, candidate backward"),
        ({"dtype": "float16"}, "unlike",
         "unlike maths: dtype: baseline bfloat16, candidate float16"),
        ({"mode": "steady"}, "unlike", "unlike mode: baseline cold, candidate steady"),
        (
            {"preparation": "excluded"},
            "unlike",
            "unlike preparation: baseline included, candidate excluded",
        ),
        (
            {"hardware": "nvidia-b200"},
            "unlike",
            "unlike hardware: baseline nvidia-h200, candidate nvidia-b200 (compare by hardware)",
        ),
        ({"outcome": "unsupported", "reason": "no gdpa"}, "not measured",
         "candidate is unsupported: no gdpa"),
        ({"outcome": "invalid", "reason": "below the floor"}, "not measured",
         "candidate is invalid: below the floor"),
        (
            {"accuracies": (ACCURACY.model_copy(update={"error": 3e-3}),)},
            "not right",
            "candidate has error 0.003 of out, allowed 0.002",
        ),
        ({"accuracies": ()}, "not right", "candidate has outputs that were not checked"),
        ({"times": samples(count=5)}, "too few samples",
         "candidate has 5 samples, want at least 8"),
        ({"times": samples(count=3), "clock": "wall"}, "too few samples",
         "candidate has 3 samples, want at least 8 (a CPU's quick run is not for comparing; use "
         "--budget); unlike clocks: cuda events and wall"),
        ({"clock": "wall"}, "unlike", "unlike clocks: cuda events and wall"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_listed_with_its_reason(changes, kind, reason):
    found = compare([record()], [record(MINE, **changes)])
    assert not found.rows
    assert [(one.kind, one.reason) for one in found.refused] == [(kind, reason)]
    assert reason in "\n".join(compare_view.lines(found))
    assert found.summary is None


def test_an_inaccurate_baseline_is_refused_too():
    over = ACCURACY.model_copy(update={"error": 1.0})
    found = compare([record(accuracies=(over,))], [record(MINE)])
    assert found.refused[0].reason == "baseline has error 1 of out, allowed 0.002"


def test_every_reason_is_given():
    found = compare(
        [record(outcome="crashed", reason="segfault")],
        [record(MINE, outcome="timed out", reason="60 s")],
    )
    assert found.refused[0].reason == "baseline is crashed: segfault; candidate is timed out: 60 s"


def test_cases_of_one_side_alone_are_listed():
    found = compare(workloads("a", "b"), workloads("b", "c", "d", who=MINE))
    assert [row.case.workload for row in found.rows] == ["b"]
    assert [(one.case.workload, one.kind, one.reason) for one in found.refused] == [
        ("a", "missing", "candidate has no record of it"),
        ("c", "missing", "baseline has no record of it"),
        ("d", "missing", "baseline has no record of it"),
    ]


def test_cases_of_one_side_alone_share_a_line_of_the_text():
    shown = compare_view.lines(compare(workloads("a", "b"), workloads("b", "c", "d", who=MINE)))
    refused = [line for line in shown if line.startswith("refused")]
    assert len(refused) == 2
    assert refused[0].endswith("missing: candidate has no record of it")
    assert " c " in refused[1]
    assert refused[1].endswith("baseline has no record of it, nor of 1 more of gdpa")


def test_one_more_region_on_one_side_is_missing_not_unlike():
    found = compare([record(), record(region="backward")], [record(MINE)])
    assert [row.case.region for row in found.rows] == ["forward"]
    assert [(one.case.region, one.kind) for one in found.refused] == [("backward", "missing")]


def test_padding_alone_needs_no_checked_output():
    sides = [record(who, preparation="alone", accuracies=()) for who in (BASE, MINE)]
    assert len(compare([sides[0]], [sides[1]]).rows) == 1


def test_a_side_with_two_implementations_of_a_case_is_refused():
    with pytest.raises(
        ValueError, match=r"baseline holds 2 .* mine.kernels, peers.base; choose one"
    ):
        compare([record(), record(MINE)], [record(MINE)])


# By hardware


def test_devices_are_compared_when_asked_for():
    other = record(hardware="nvidia-b200", session="s2", seconds=0.5e-3)
    found = compare([record()], [other], by="hardware")
    assert [(row.held, row.verdict) for row in found.rows] == [(BASE, "faster")]


def test_by_hardware_another_implementation_is_refused():
    other = record(MINE, hardware="nvidia-b200")
    found = compare([record()], [other], by="hardware")
    assert found.refused[0].reason == f"unlike implementation: baseline {BASE}, candidate {MINE}"


def test_by_hardware_a_side_with_two_devices_is_refused():
    with pytest.raises(ValueError, match="nvidia-b200, nvidia-h200; choose one"):
        compare([record(), record(hardware="nvidia-b200")], [record()], by="hardware")


# Exit codes and notes


def undecided():
    noisy = samples(1.03e-3, seed=3, spread=0.1)
    return compare([record()], [record(MINE, times=noisy)])


def with_strict(found, strict):
    return type(found)(**{**vars(found), "strict": strict}).exit_code


def test_exit_codes():
    same = compare([record()], [record(MINE)])
    slower = compare([record()], [record(MINE, seconds=1.2e-3)])
    faster = compare([record()], [record(MINE, seconds=0.8e-3)])
    partly = compare(workloads("a", "b"), workloads("a", who=MINE))
    nothing = compare(workloads("a"), workloads("b", who=MINE))
    assert undecided().rows[0].verdict == "undecided"
    cases = (same, slower, faster, undecided(), partly, nothing)
    assert [found.exit_code for found in cases] == [0, 1, 0, 0, 0, 3]
    assert [with_strict(found, True) for found in cases] == [0, 1, 0, 3, 3, 3]


def test_nothing_at_all_is_no_success():
    assert compare([], []).exit_code == 3
    assert compare_view.summary(compare([], [])) == "nothing was compared; 0 refused"


def test_unlike_versions_and_flags_are_shown():
    mine = record(MINE, torch="2.11.0", flags=("throttled: power cap",))
    found = compare([record()], [mine])
    assert found.notes == ("torch: baseline 2.13.0, candidate 2.11.0",)
    assert found.rows[0].flags == ("candidate: throttled: power cap",)
    text = "\n".join(compare_view.lines(found))
    assert "note: torch: baseline 2.13.0" in text
    assert "[candidate: throttled: power cap]" in text


def test_json_is_strict_and_whole():
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    found = compare(workloads("a", "b"), workloads("a", who=MINE, seconds=1.2e-3))
    content = json.loads(found.to_json(), parse_constant=refuse)
    assert content["exit_code"] == 1
    assert content["summary"]["verdicts"]["slower"] == 1
    assert len(content["summary"]["worst"]) == 1
    assert content["rows"][0]["case"]["workload"] == "a"
    assert content["rows"][0]["verdict"] == "slower"
    assert content["refused"][0]["reason"] == "candidate has no record of it"
    assert json.loads(compare([], []).to_json())["summary"] is None


# A/A


def test_halves_of_one_record_are_the_same():
    found = a_a(workloads(*"abcdefgh"))
    assert set(found.how) == {"halves"}
    assert (found.alarms, found.same, found.rate, found.same_rate) == (0, 8, 0.0, 1.0)
    assert found.upper == pytest.approx(1 - 0.05 ** (1 / 8))
    assert "A/A: 0 of 8 called faster or slower" in compare_view.false_alarm_lines(found)[-1]
    assert json.loads(found.to_json())["same"] == 8


def test_a_drift_within_a_session_is_no_false_alarm():
    drifting = [s * (1 + 0.002 * i) for i, s in enumerate(samples(spread=0.005))]
    assert a_a([record(times=drifting)]).same == 1


def test_two_series_of_one_implementation_are_compared_with_each_other():
    twice = [record(times=samples(seed=i, spread=0.003), day=i) for i in range(2)]
    found = a_a(twice)
    assert found.how == ("series",)
    assert found.same == 1
    moved = record(session="later", day=2, times=samples(1.2e-3))
    assert a_a([twice[0], moved]).alarms == 1


def test_a_a_compares_no_two_implementations_and_lists_what_is_too_short():
    found = a_a(
        [record(), record(MINE, seconds=2e-3), record(workload="w", times=samples(count=9))]
    )
    assert found.alarms == 0
    assert len(found.comparison.rows) == 2
    assert "samples, want at least 8" in found.comparison.refused[0].reason


def test_a_a_of_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="1 records hold no case"):
        a_a([record(outcome="crashed", reason="x")])


# Interleaving


# Choosing sides

RECORDS = [
    record(),
    record(MINE),
    record(MINE, commit="4b" * 20, session="s2"),
    record(MINE, commit=None, session="s3"),
    record(MINE, hardware="nvidia-b200"),
]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (BASE, 1),
        (MINE, 4),
        (f"{MINE}@4b4b", 1),
        (f"{MINE}@4B4B4b", 1),
        ("hardware:nvidia-b200", 1),
        ("hardware:NVIDIA H200", 4),
        (f"nvidia-b200/{MINE}", 1),
        (f"nvidia-h200/{MINE}@4a", 1),
    ],
)
def test_a_side_is_chosen_by_a_few_words(text, count):
    assert len(resolve(text, RECORDS).records) == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("theirs", r"no records of implementation 'theirs'; there are: nvidia-b200/mine.kernels"
                   r" \(1 records\), nvidia-h200/mine.kernels \(3 records\)"),
        ("nvidia-a100/mine.kernels", "no records of implementation"),
        ("hardware:a100", r"no records of hardware 'a100'; there are: nvidia-b200 \(1 records\)"),
        (f"{MINE}@ffff", "0 commits of mine.kernels begin with 'ffff', want 1; there are: 4a5f1"),
        (f"{MINE}@4", r"2 commits .* no known commit \(1 records\)"),
        (f"{MINE}@", "0 commits"),
        ("nowhere/results.jsonl", r"nowhere/results.jsonl: No such file"),
    ],
)  # fmt: skip
def test_what_names_nothing_is_refused_with_what_there_is(text, message):
    with pytest.raises(ValueError, match=message):
        resolve(text, RECORDS)


def test_a_file_is_a_side_and_its_damage_is_told(tmp_path):
    path = tmp_path / "results.jsonl"
    store.append(path, record())
    with path.open("a") as handle:
        handle.write("{torn\n")
    side = resolve(str(path), [])
    assert side.records == (record(),)
    assert side.label == "peers.base on nvidia-h200 at 4a5f1cf2 (results.jsonl)"
    found = compare(side, [record(MINE)])
    assert found.baseline == side.label
    assert found.notes[0].startswith("results.jsonl, line 2: damaged: not JSON")
    path.write_text("{torn\n")
    with pytest.raises(ValueError, match="0 records and 1 damaged"):
        resolve(str(path), [])


# Views


def golden():
    flat = [1e-3] * 20
    baseline = [
        record(workload="a", digest="1", times=flat),
        record(workload="b", digest="2", times=flat),
        record(workload="c", digest="3", times=flat),
        record(workload="[bold]d", digest="4", times=flat, preparation="excluded"),
    ]
    candidate = [
        record(MINE, workload="a", digest="1", times=flat),
        record(MINE, workload="b", digest="2", times=[1.25e-3] * 20),
        record(MINE, workload="c", digest="3", outcome="crashed", reason="line 1\n\x1b[2Jline 2"),
        record(MINE, workload="[bold]d", digest="4", times=[0.5e-3] * 20, preparation="excluded"),
    ]
    return compare(Selection("before", tuple(baseline)), Selection("after", tuple(candidate)))


GOLDEN = """\
after over before, seconds: below 1 is faster; same within 2.0%, intervals at 95%, false discoveries at 5%
slower     1.250 [1.241, 1.259]       1 ms ->   1.25 ms  nvidia-h200: gdpa b bfloat16 forward cold
same       1.000 [0.993, 1.007]       1 ms ->      1 ms  nvidia-h200: gdpa a bfloat16 forward cold
faster     0.500 [0.497, 0.503]       1 ms ->    500 µs  nvidia-h200: gdpa [bold]d bfloat16 forward cold preparation excluded
refused    nvidia-h200: gdpa c bfloat16 forward cold: not measured: candidate is crashed: line 1  [2Jline 2
3 compared: 1 slower, 1 faster, 1 same; 1 refused. Geometric mean 0.855, worst 1.250 nvidia-h200: gdpa b bfloat16 forward cold; 1.000 nvidia-h200: gdpa a bfloat16 forward cold; 0.500 nvidia-h200: gdpa [bold]d bfloat16 forward cold preparation excluded
"""  # noqa: E501


def printed(show, *arguments, terminal, width=80):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    show(*arguments[:1], console, *arguments[1:])
    return out.getvalue()


def test_plain_lines_are_as_they_were():
    assert printed(compare_view.show, golden(), terminal=False) == GOLDEN


def test_a_terminal_gets_a_table_that_cuts_no_name():
    name = "gdpa-" + "very-long-name-" * 12
    found = compare([record(workload=name)], [record(MINE, workload=name)])
    text = printed(compare_view.show, found, terminal=True, width=100)
    cells = "".join(line.split("│")[-2].strip() for line in text.splitlines() if "│" in line)
    assert name in cells
    assert "…" not in text
    assert "Geometric mean" in text


def test_a_terminal_shows_the_refused_and_takes_names_literally():
    text = printed(compare_view.show, golden(), terminal=True, width=200)
    assert "[bold]d" in text
    assert "candidate is crashed: line 1" in text
    assert "\x1b[2J" not in text


CLAIM = Claim(
    source="a blog", date="2026-10", citation="A blog", hardware="nvidia-b200",
    implementation="theirs", operator="gdpa", case="B 1, L 512", region="forward",
    quantity="TFLOP/s", value=800.0, tolerance=5.0,
)  # fmt: skip


def by_hardware_records():
    ceiling = Ceiling(flop_per_second=1e15, bytes_per_second=4e12, source="sheet", date="2026")
    return [
        record(times=[1.5e-3] * 9, session="older"),
        record(times=[1e-3] * 9, ceiling=ceiling, day=1),
        record(MINE, hardware="nvidia-b200", outcome="unsupported", reason="no kernel"),
    ]


def test_devices_stand_beside_each_other_and_claims_are_marked():
    lines = compare_view.hardware_lines(by_hardware_records(), [CLAIM])
    assert lines == [
        "gdpa gdpa-self-l512 bfloat16 forward cold",
        "  unsupported  nvidia-b200  mine.kernels  no kernel",
        "  measured  nvidia-h200  peers.base  1 ms  300 TFLOP/s  30.0% of datasheet"
        "  30.0% of measured ceiling",
        "published, not measured here: gdpa B 1, L 512 forward",
        "  claim  nvidia-b200  theirs  800 ± 5 TFLOP/s (a blog, 2026-10)",
    ]
    plain = printed(compare_view.show_by_hardware, by_hardware_records(), [CLAIM], terminal=False)
    assert plain == "\n".join(lines) + "\n"
    text = printed(
        compare_view.show_by_hardware, by_hardware_records(), [CLAIM], terminal=True, width=140
    )
    assert "claim" in text
    assert "unsupported" in text


def test_operators_bound_by_memory_show_bytes_a_second():
    moved = record(times=[1e-3] * 9).bytes_per_second
    lines = compare_view.hardware_lines(by_hardware_records(), by_bandwidth={"gdpa"})
    [measured] = [line for line in lines if "measured " in line]
    assert f"1 ms  {moved * 1e-9:.4g} GB/s  30.0% of datasheet" in measured
    text = printed(
        compare_view.show_by_hardware, by_hardware_records(), [], {"gdpa"}, terminal=True, width=140
    )
    assert "GB/s" in text
    assert "TFLOP/s" not in text


def test_unlike_workloads_of_one_name_stay_apart():
    lines = compare_view.hardware_lines([record(), record(digest="00bb", hardware="nvidia-b200")])
    assert sum(line.endswith("(workload hash 00bb)") for line in lines) == 1
    assert sum(line.endswith("(workload hash 00aa)") for line in lines) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.5 s"), (8.2012e-4, "820.1 µs"), (1e-6, "1 µs"), (5e-9, "5 ns")],
)
def test_durations_have_four_digits_and_a_unit(seconds, text):
    assert compare_view.duration(seconds) == text
