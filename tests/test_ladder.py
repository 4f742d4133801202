"""The ladder, and reports of operators that memory binds: GB/s and share of the floor, no MFU."""

import re

import html_records
import pytest
from test_html_report import renamed, table, written

from jagbench import workloads
from jagbench.cli.measuring import line
from jagbench.html.ladder import ladder_text, steps
from jagbench.html.rows import gather
from jagbench.published import Claim
from jagbench.reference import OPERATORS
from jagbench.result import Work

BOUND = frozenset({"block_attention", "norm_linear", "rotary"})
#: Operator, rung, milliseconds and GB of the least traffic.
RUNGS = (
    ("jagged_attention", "full", 40.0, 4.0),
    ("jagged_attention", "swa128", 8.0, 4.0),
    ("block_attention", "block", 2.0, 4.0),
    ("block_attention", "rotary", 2.5, 4.3),
    ("rotary", "turn", 1.0, 2.15),
)


def record(operator, workload, milliseconds, gigabytes, *, who=0, **changes):
    base = html_records.one(who, html_records.CASES[0], "forward", draws=1)
    timing = base.timing.model_copy(update={"samples_seconds": (milliseconds / 1e3,)})
    work = Work(
        flop=10**12, model_flop=10**12, bytes_moved=round(gigabytes * 1e9), sequences=1, tokens=1
    )
    made = base.model_copy(update={"timing": timing, "work": work})
    return renamed(
        made, case__operator=operator, case__workload=f"{operator}-{workload}",
        case__digest=workload, **changes,
    )  # fmt: skip


def ladder_records(length=4096, factor=1.0, **changes):
    return [
        record(operator, f"ladder-{rung}-l{length}-fill0.5", factor * ms, factor * gb, **changes)
        for operator, rung, ms, gb in RUNGS
    ]


def only_group(records):
    [found] = steps(gather(records, (), None, BOUND)).values()
    return found


def test_rungs_stand_in_order_with_their_speed_up_and_share_of_the_floor():
    found = only_group(ladder_records(4096)[::-1] + ladder_records(2048, 0.5))
    assert [step.length for step in found] == [2048] * 6 + [4096] * 6
    ours = found[6:]
    names = ["full", "swa128", "swa128 + 3 turn (sum of records)", "block", "rotary", "turn"]
    assert [step.rung for step in ours] == names
    assert [step.speed_up for step in ours] == pytest.approx([1, 5, 40 / 11, 20, 16, None])
    # 4 GB in 2 ms, and 4.3 TB/s of a copy.
    assert ours[3].bytes_per_second == pytest.approx(2e12)
    assert ours[3].floor == pytest.approx(2 / 4.3)
    assert ours[2].seconds == pytest.approx(11e-3)
    assert ours[2].floor is None


def test_another_implementation_is_measured_by_the_first_one_s_full_attention():
    mask = record("block_attention", "ladder-block-l4096-fill0.5", 4.0, 4.0, who=1)
    found = only_group([*ladder_records(), mask])
    [theirs] = [step for step in found if step.implementation != "jagbench.impl"]
    assert theirs.speed_up == pytest.approx(10)


def test_a_prepared_call_and_one_without_a_time_are_no_rungs():
    failed = html_records.one(0, html_records.CASES[0], "forward")
    failed = renamed(
        failed, outcome="unsupported", reason="no", timing=None, accuracies=(),
        case__workload="jagged_attention-ladder-full-l64-fill0.5",
    )  # fmt: skip
    prepared = ladder_records(case__preparation="excluded")
    assert steps(gather([failed, *prepared], (), None, BOUND)) == {}


def test_the_report_has_the_ladder_and_the_terminal_the_same_lines(tmp_path):
    records = ladder_records()
    text = written(tmp_path, records, by_bandwidth=BOUND)
    assert "<h2>Ladder</h2>" in text
    assert "<td>swa128 + 3 turn (sum of records)" in text
    lines = ladder_text(gather(records, (), None, BOUND))
    assert any(
        re.search(r"block .* 2.000 ms +2,000 GB/s +46.5% of floor +20.00 x", x) for x in lines
    )
    assert "Ladder" not in written(
        tmp_path, [html_records.one(0, html_records.CASES[0], "forward")]
    )


def test_what_memory_binds_is_shown_by_bytes(tmp_path):
    text = written(tmp_path, ladder_records(), by_bandwidth=BOUND)
    rows = {(r["operator"], r["case"]): r for r in table(text, "rows")}
    bound = rows["block_attention", "ladder-block-l4096-fill0.5"]
    free = rows["jagged_attention", "ladder-full-l4096-fill0.5"]
    assert (bound["unit"], bound["rate"], bound["roof"]) == ("GB/s", 2000.0, 4300.0)
    assert (free["unit"], free["rate"]) == ("TFLOP/s", 25.0)
    assert "<td>2,000 (47%)" in text
    panels = {r["panel"] for r in table(text, "generations")}
    assert "ladder-block-l4096-fill0.5 · forward · GB/s" in panels
    assert "ladder-full-l4096-fill0.5 · forward" in panels


def test_the_mfu_column_is_empty_for_what_memory_binds(tmp_path):
    def mfu(operator, rung):
        [one] = [
            r for r in ladder_records() if r.case.workload.startswith(f"{operator}-ladder-{rung}-")
        ]
        text = written(tmp_path, [one], by_bandwidth=BOUND)
        part = text[text.index("MFU, % of datasheet") :]
        return re.findall(r"<td[^>]*>([^<]*)", part[: part.index("</table>")])[9]

    assert mfu("block_attention", "block") == "–"
    assert float(mfu("jagged_attention", "full")) > 0


def test_a_claimed_time_becomes_gigabytes_of_the_measured_workload(tmp_path):
    claim = Claim(
        source="Their post", date="2026-05", citation="a post", hardware="nvidia-b200",
        implementation="theirs", operator="block_attention", case="as published",
        workload="block_attention-ladder-block-l4096-fill0.5", region="forward", quantity="ms",
        value=1.0, dtype="bfloat16",
    )  # fmt: skip
    text = written(tmp_path, ladder_records(), claims=[claim], by_bandwidth=BOUND)
    [drawn] = [row for row in table(text, "generations") if row["kind"] == "claim"]
    assert drawn["rate"] == 4000.0
    assert drawn["panel"].endswith("GB/s")
    assert "<td>2 ms, NVIDIA H200" in text


def test_the_catalogue_has_every_rung_on_the_same_sequences():
    for length in (2048, 4096, 8192):
        rungs = [
            w for w in workloads.select(tag="ladder", purpose="full") if f"-l{length}-" in w.name
        ]
        assert [w.name.split("-ladder-")[1].split("-")[0] for w in rungs] == [
            r for _, r, *_ in RUNGS
        ]
        drawn = {tuple(next(iter(w.recipe.lengths(w.seed).values()))) for w in rungs}
        assert len(drawn) == 1


def test_block_attention_and_rotary_are_judged_by_bytes():
    assert {n for n, o in OPERATORS.items() if o.bandwidth_bound} >= BOUND
    assert not OPERATORS["jagged_attention"].bandwidth_bound


def test_a_line_of_the_terminal_has_the_unit_of_its_operator():
    names = [rung for _, rung, *_ in RUNGS]
    found = dict(zip(names, map(line, ladder_records()), strict=True))
    assert "2000 GB/s; 0.47 of the bandwidth floor" in found["block"]
    assert "FLOP" not in found["block"]
    assert "25 TFLOP/s" in found["full"]
