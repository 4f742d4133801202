"""The HTML report: complete, escaped, self-contained, the same bytes again, drawn by a browser."""

import builtins
import html
import json
import re
import shutil
import subprocess
import sys

import html_records
import pytest

from jagbench import compare
from jagbench import html as report
from jagbench.html import charts, datasets, markup, rows, summary, tables
from jagbench.published import Claim

pytest.importorskip("altair", reason="the report needs the extra jagbench[report]")
pytest.importorskip("vl_convert", reason="the report needs the extra jagbench[report]")

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'`${1}"
CHARTS = ("bars", "heat", "roofline", "generations", "errors", "samples")
CLAIM = Claim(
    source="a blog", date="2026-03", citation="a title", hardware="nvidia-b200",
    implementation="FA4", operator="jagged_attention", case="self, fill 1, L 1024",
    workload="jagged_attention-self-l1024-fill1.0", region="forward", quantity="TFLOP/s",
    value=613.0, tolerance=5.0, dtype="bfloat16",
)  # fmt: skip


@pytest.fixture(scope="module")
def records():
    return html_records.plausible()


@pytest.fixture(scope="module")
def comparison(records):
    def side(name):
        return [r for r in records if r.who.name == name and r.hardware == "nvidia-h200"]

    return compare.compare(side("jagbench.peers.fa4"), side("jagbench.peers.flex_attention"))


@pytest.fixture(scope="module")
def page(records, comparison, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write_report(records, path, claims=[CLAIM], comparison=comparison)
    return path


def written(folder, given, **options):
    return report.write_report(given, folder / "report.html", **options).read_text()


def without_bundle(text):
    return re.sub(r"id=vega-bundle>[^<]*<", "id=vega-bundle><", text)


def data(text):
    return json.loads(re.search(r"id=report-data>(.*?)</script>", text, re.S)[1])


def table(text, name):
    content = data(text)["tables"][name]
    return [dict(zip(content["fields"], row, strict=True)) for row in content["rows"]]


def renamed(record, **changes):
    """A record with other words in it: `case__workload="x"` sets the workload."""
    content = record.model_dump()
    for key, value in changes.items():
        *folders, last = key.split("__")
        place = content
        for folder in folders:
            place = place[folder]
        place[last] = value
    return type(record).model_validate(content)


def test_five_hundred_records_stay_under_two_megabytes(tmp_path):
    many = html_records.plausible(draws=60, preparations=("included", "excluded"))
    many += [renamed(r, case__operator="gdpa") for r in many[:70]]
    assert len(many) > 500
    text = written(tmp_path, many)
    assert len(text.encode()) < report.LIMIT <= 2_000_000


def test_a_report_over_the_limit_is_refused_with_the_numbers(tmp_path, records, monkeypatch):
    monkeypatch.setattr(report, "LIMIT", 1000)
    with pytest.raises(ValueError, match=r"224 records would have \d+ bytes, the limit is 1000"):
        written(tmp_path, records)
    assert list(tmp_path.iterdir()) == []


def test_the_page_loads_nothing_from_anywhere(page):
    text = without_bundle(page.read_text())
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", text)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", text)
    assert not re.search(r"<script[^>]*\bsrc", text)
    assert "https://" not in text
    assert text.count("id=vega-bundle") == 1


def test_the_same_records_in_any_order_give_the_same_bytes(tmp_path, page, records, comparison):
    again = written(tmp_path, records[::-1], claims=[CLAIM], comparison=comparison)
    assert again == page.read_text()


def test_a_new_process_gives_the_same_bytes(tmp_path):
    code = (
        "import sys, html_records, jagbench.html as r; from pathlib import Path;"
        "r.write_report(html_records.plausible()[:30], Path(sys.argv[1]))"
    )
    folder = str(html_records.__file__).rpartition("/")[0]
    code = f"import sys; sys.path.insert(0, {folder!r});" + code
    path = tmp_path / "other.html"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=300)
    assert path.read_text() == written(tmp_path, html_records.plausible()[:30])


def test_the_page_has_no_date_but_the_newest_record(page):
    text = without_bundle(page.read_text())
    assert set(re.findall(r"20\d\d-\d\d-\d\d", text)) == {"2026-11-30", "2026-08-01"}


def test_every_chart_has_its_table(page):
    text = page.read_text()
    shown = [chart["id"] for chart in data(text)["charts"]]
    assert shown == ["comparison", *CHARTS]
    for name in shown:
        figure, after = text.split(f"<figure id={name}>")[1].split("</figure>", 1)
        assert "<div class=chart>" in figure
        section = after.split("</section>")[0]
        assert "<summary>Data of this chart</summary>" in section
        assert section.count("<tr>") > 4, name


def test_every_specification_is_valid_vega_lite(page):
    altair = charts.altair()
    for chart in data(page.read_text())["charts"]:
        altair.Chart.from_dict(chart["spec"])


def hostile(record):
    return renamed(
        record, hardware=HOSTILE, session=HOSTILE, who__name=HOSTILE, who__version=HOSTILE,
        case__workload=HOSTILE, case__operator=HOSTILE, case__dtype=HOSTILE, flags=(HOSTILE,),
        provenance__device=HOSTILE, provenance__commit=HOSTILE, provenance__driver=HOSTILE,
        configuration={HOSTILE: HOSTILE}, datasheet__source=HOSTILE, state__throttled=(HOSTILE,),
        **{
            "accuracies": [
                {"name": HOSTILE, "error": 1.0, "allowed": 2.0, "naive": 1.0},
            ]
        },
    )  # fmt: skip


def test_no_text_of_a_record_becomes_markup(tmp_path, records):
    bad = renamed(
        hostile(records[0]), outcome="wrong", reason=HOSTILE, timing=None, case__mode="steady"
    )
    claim = CLAIM.model_copy(
        update=dict.fromkeys(
            ("source", "citation", "implementation", "case", "note", "hardware"), HOSTILE
        )
    )
    comparison = compare.Comparison(
        HOSTILE, HOSTILE, "implementation", 0.02, 0.05, (),
        (compare.Refused(bad.case, HOSTILE, "not measured", HOSTILE),), (HOSTILE,),
    )  # fmt: skip
    given = [hostile(records[0]), bad]
    text = written(tmp_path, given, claims=[claim], comparison=comparison, title=HOSTILE)
    clean = without_bundle(text)
    assert "<img" not in clean.lower()
    assert clean.count("</script>") == 3
    assert html.escape(HOSTILE) in clean
    assert HOSTILE in json.dumps(data(text), ensure_ascii=False).replace('\\"', '"')


def test_an_unmeasured_case_is_shown_with_its_reason_and_never_as_zero(page, records):
    text = page.read_text()
    unmeasured = [r for r in records if r.outcome != "measured"]
    outcomes = {r.outcome for r in unmeasured}
    assert outcomes == {"unsupported", "wrong", "invalid", "out of memory"}
    for record in unmeasured:
        assert html.escape(record.reason) in text
    for name in ("rows", "errors"):
        entries = table(text, name)
        missing = [e for e in entries if e["outcome"] not in ("measured", "not checked")]
        assert {e["outcome"] for e in missing} == outcomes
    entries = table(text, "rows")
    assert len(entries) == len(records)
    for entry in entries:
        assert (entry["teraflops"] is None) == (entry["outcome"] != "measured")
        assert entry["teraflops"] != 0


def test_no_records_give_a_page_that_says_so(tmp_path):
    text = written(tmp_path, [])
    assert "No records were given" in text
    assert data(text)["charts"] == []


def test_claims_alone_are_shown_as_claims(tmp_path):
    text = written(tmp_path, [], claims=[CLAIM])
    (entry,) = table(text, "generations")
    assert entry["kind"] == "claim"
    assert "Published claims; none of them was measured by this project" in text


def test_one_record_has_no_ratio_and_no_verdict(tmp_path, records):
    text = written(tmp_path, records[:1])
    assert table(text, "rows")[0]["ratio"] is None
    assert "no peer measured" in text


def test_a_claim_carries_the_name_of_the_same_peer_and_the_device_it_was_made_on(page):
    entries = [e for e in table(page.read_text(), "generations") if e["kind"] == "claim"]
    assert [(e["implementation"], e["hardware"]) for e in entries] == [("fa4", "NVIDIA B200")]
    assert entries[0]["panel"] == "self-l1024-fill1.0 · forward"
    assert entries[0]["rate"] == 613.0


def test_what_was_not_compared_is_listed_with_its_reason(page, comparison):
    text = page.read_text()
    assert comparison.rows
    assert comparison.refused
    for refused in comparison.refused:
        assert f"<td>{html.escape(refused.reason)}" in text


def test_only_the_last_record_of_a_case_counts_whatever_the_clock_said(records):
    old = records[0]
    for year in (2025, 2027):
        new = renamed(old, date=old.date.replace(year=year), session="later")
        contents = rows.gather([old, new], (), None)
        assert [row.record.session for row in contents.rows] == ["later"]
        assert contents.older == 1


def test_a_time_of_what_also_failed_carries_the_doubt(records):
    old = next(record for record in records if record.outcome == "measured")
    wrong = renamed(old, session="bad", outcome="wrong", reason="NaN", timing=None)
    (row,) = rows.gather([wrong, old], (), None).rows
    assert "also wrong in session bad" in row.record.flags
    (row,) = rows.gather([old, wrong], (), None).rows
    assert row.record.outcome == "wrong"


def test_an_error_over_next_to_nothing_stays_finite(records):
    old = next(record for record in records if record.outcome == "measured")
    accuracy = {"name": "out", "error": 1e30, "allowed": 5e-324, "naive": 0.0}
    contents = rows.gather([renamed(old, accuracies=(accuracy,))], (), None)
    text = tables.errors(contents) + json.dumps(datasets.datasets(contents), allow_nan=False)
    assert "1e+99" in text


def test_workloads_of_one_name_and_unlike_inputs_are_kept_apart(records):
    other = renamed(records[0], case__digest="0123456789ab", who__name="jagbench.peers.fa4")
    contents = rows.gather([records[0], other], (), None)
    assert len({row.case for row in contents.rows}) == 2
    assert all(row.ratio is None for row in contents.rows)
    assert len({row.grid for row in contents.rows}) == 2


@pytest.mark.parametrize(
    ("workload", "place"),
    [
        ("op-self-l1024-fill0.5-jagged", (1024, 0.5, "self-jagged")),
        ("op-l512-fill1.0", (512, 1.0, "all")),
        ("op-self-d64-l2048-fill0.95", (2048, 0.95, "self-d64")),
        ("op-cross-kv256-l1024", (None, None, None)),
        ("op-broadcast-q-fill0.5", (None, None, None)),
        ("op-pool-small", (None, None, None)),
    ],
)
def test_length_and_fill_are_read_from_the_name_where_it_has_both(records, workload, place):
    case = renamed(records[0], case__operator="op", case__workload=workload).case
    assert rows.grid_position(case) == place


def test_cases_that_the_heat_map_cannot_place_are_listed_under_it(page):
    assert "2 cases are not here, their names carry no length or no fill" in page.read_text()


def test_what_has_nothing_to_prepare_is_shown_in_both_views(records):
    def prepared(record, view):
        case = record.case.model_copy(update={"preparation": view})
        return record.model_copy(update={"case": case})

    ours = [prepared(r, "none") for r in records if r.who.name == "jagbench.impl"]
    peers = [prepared(r, "excluded") for r in records if r.who.name.endswith("fa4")]
    shown = rows.gather([*ours, *peers], (), None).rows
    views = {r.view.preparation for r in shown if r.implementation == "jagbench.impl"}
    assert views == {"included", "excluded"}
    assert {r.view.preparation for r in rows.gather(ours, (), None).rows} == {"included"}


def test_standings_count_wins_and_keep_the_worst_three(records):
    contents = rows.gather(records, (), None)
    view = contents.views[0]
    assert (view.mode, view.preparation, view.hardware) == ("cold", "included", "NVIDIA H200")
    found = summary.standings([row for row in contents.rows if row.view == view])
    ours = next(s for s in found if (s.implementation, s.region) == ("jagbench.impl", "forward"))
    assert (ours.compared, ours.fastest) == (9, 4)
    assert [case for case, _ in ours.worst] == [
        "cross-kv256-l1024", "self-l1024-fill1.0", "dense-llm-l8192-fill1.0",
    ]  # fmt: skip
    text = summary.summary(contents, {})
    assert "backward: jagbench.impl is number 2 of 6: 1.08 × the time of the best peer" in text
    ratios = [r.ratio for r in contents.rows if r.view == view and r.ratio and r.record.who.name
              == "jagbench.impl" and r.record.case.region == "forward"]  # fmt: skip
    assert ours.mean == pytest.approx(rows.geometric_mean(ratios))
    assert sum(s.fastest for s in found if s.region == "forward") == 9


def test_a_ratio_is_over_the_fastest_other_implementation(records):
    contents = rows.gather(records, (), None)
    row = next(r for r in contents.rows if r.ratio is not None and r.ratio > 1)
    peers = [
        r.record.seconds
        for r in contents.rows
        if (r.view, r.record.case) == (row.view, row.record.case) and r is not row
    ]
    best = min(seconds for seconds in peers if seconds is not None)
    assert row.ratio == pytest.approx(row.record.seconds / best)


def test_an_implementation_has_one_colour_in_every_chart(page):
    found = {}

    def walk(node):
        if isinstance(node, dict):
            if node.get("field") == "implementation" and "range" in node.get("scale", {}):
                pairs = zip(node["scale"]["domain"], node["scale"]["range"], strict=True)
                for name, colour in pairs:
                    if colour.startswith("#"):
                        found.setdefault(name, set()).add(colour)
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(data(page.read_text())["charts"])
    assert len(found) == 6
    assert all(len(colours) == 1 for colours in found.values())
    assert len({next(iter(colours)) for colours in found.values()}) == 6


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345, "12,345"), (0.000234, "0.000234"), (0.9137, "0.914"), (345.6, "346"),
     (1.018, "1.02"), (12345.6, "12,346"), (5e-9, "5e-09")],
)  # fmt: skip
def test_a_number_is_short_and_never_rounds_to_zero(value, text):
    assert markup.number(value) == text


def test_a_roof_rises_to_the_ridge_and_is_flat_after_it():
    corners = datasets.roof(html_records.H200, 10.0, 1000.0)
    assert corners == [(10.0, 48e12), (pytest.approx(989 / 4.8), 989e12), (1000.0, 989e12)]


def test_a_missing_altair_names_the_extra(tmp_path, records, monkeypatch):
    original = builtins.__import__

    def without(name, *arguments, **options):
        if name == "altair":
            raise ImportError(name)
        return original(name, *arguments, **options)

    charts.javascript()  # kept from before, so the error must not depend on it
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"jagbench\[report\]"):
        written(tmp_path, records[:1])


def chromium():
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def browse(page, folder):
    """The page's elements after its scripts ran, and what it said on the console."""
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={folder}", "--window-size=1400,2000", "--virtual-time-budget=30000",
        "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


needs_browser = pytest.mark.skipif(
    chromium() is None, reason="no chromium, chromium-browser or google-chrome is installed"
)


@needs_browser
def test_a_browser_draws_every_chart_and_reports_no_problem(page, tmp_path):
    elements, console = browse(page, tmp_path)
    assert console == []
    assert 'data-charts="drawn"' in elements
    for name in ("comparison", *CHARTS):
        figure = elements.split(f'<figure id="{name}">')[1].split("</figure>")[0]
        assert "<svg" in figure, name
        assert "NaN" not in figure, name
    bars = elements.split('<figure id="bars">')[1].split("</figure>")[0]
    for word in ("forward", "backward", "unsupported", "invalid", "TFLOP/s"):
        assert f">{word}" in bars, word


@needs_browser
def test_a_browser_runs_nothing_that_a_record_says(tmp_path, records):
    path = report.write_report([hostile(records[0])], tmp_path / "report.html", title=HOSTILE)
    elements, console = browse(path, tmp_path / "profile")
    assert console == []
    assert 'data-charts="drawn"' in elements
    assert "<img" not in without_bundle(re.sub(r"<script.*?</script>", "", elements, flags=re.S))


@needs_browser
@pytest.mark.parametrize("count", [0, 1])
def test_a_browser_opens_a_page_of_little(tmp_path, records, count):
    path = report.write_report(records[:count], tmp_path / "report.html")
    elements, console = browse(path, tmp_path / "profile")
    assert console == []
    assert 'data-charts="drawn"' in elements
