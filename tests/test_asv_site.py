"""What asv itself makes of the records, the site, and the classes it collects."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from datetime import timedelta

import pytest
from asv_records import START, read, record
from repository import ROOT

from jagbench import asv_format

COMMITS = 12


def script(name):
    """A module of `benchmarks/`, which is no package; by its path below that folder."""
    path = ROOT / "benchmarks" / f"{name}.py"
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def git(repository, *arguments, when=START):
    stamp = when.isoformat()
    identity = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "a"), ("EMAIL", "a@example.org"), ("DATE", stamp))
    }
    identity["GIT_CONFIG_GLOBAL"] = os.devnull
    command = ["git", "-C", str(repository), *arguments]
    done = subprocess.run(
        command, env={**os.environ, **identity}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def samples(median, noise):
    """Twenty samples of a run: one shift of the whole run, and a spread within it."""
    run = median * (1.0 + noise.gauss(0.0, 0.008))
    return [run * (1.0 + abs(noise.gauss(0.0, 0.015))) for _ in range(20)]


#: Tests of one published site stay on one worker of pytest-xdist.
of_the_site = pytest.mark.xdist_group("asv site")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """asv's site of a dozen commits; `slow` takes 10 % longer from the eighth on."""
    pytest.importorskip("asv", reason="needs asv: pip install 'jagbench[test]'")
    root = tmp_path_factory.mktemp("site")
    repository = root / "repository"
    repository.mkdir()
    git(repository, "init", "-q", "-b", "main")
    noise = random.Random(2026)
    records, dates = [], {}
    for n in range(COMMITS):
        when = START + timedelta(days=n)
        git(repository, "commit", "-q", "--allow-empty", "-m", f"commit {n}", when=when)
        commit = git(repository, "rev-parse", "HEAD")
        dates[commit] = when
        slow = 1.0 if n < 8 else 1.1
        for name, factor in (("slow", slow), ("steady", 1.0), ("faster", 1.0 / slow)):
            for mode in ("cold", "steady"):
                timing = samples(1e-3 * factor, noise)
                records.append(
                    record(timing, commit=commit, day=n, workload=f"gdpa-{name}", mode=mode)
                )
    asv_format.write(records, root / "results", commit_dates=dates)
    history = script("history")
    settings = history.configuration(
        ROOT, repo=repository, results_dir=root / "results", html_dir=root / "html"
    )
    settings["branches"] = ["main"]
    (root / "home").mkdir()
    history.asv(root / "home", settings, "publish", "--no-pull")
    return root / "html", list(dates)


def regressions(html):
    """Workload and quantity -> the regressions asv's page shows."""
    found = {}
    for entry, _, _, _, last, best, jumps in read(html / "regressions.json")["regressions"]:
        name, _, parameters = entry.partition("(")
        found.setdefault(name, []).append((parameters, last, best, jumps))
    return found


@of_the_site
def test_a_planted_slowdown_of_a_tenth_is_found_at_its_commit(site):
    html, commits = site
    found = regressions(html)["gdpa.slow.track_seconds"]
    assert len(found) == 2  # cold and steady
    revisions = read(html / "index.json")["revision_to_hash"]
    for _, last, best, jumps in found:
        ((_, after, _, _),) = jumps
        assert revisions[str(after)] == commits[8]
        assert last / best == pytest.approx(1.1, abs=0.03)


@of_the_site
def test_nothing_but_the_slowdown_is_called_a_regression(site):
    # Not the control, and not the falling TFLOP/s or the rising error of anybody.
    html, _ = site
    assert set(regressions(html)) == {"gdpa.slow.track_seconds"}


@of_the_site
def test_rates_are_published_as_graphs_with_their_units(site):
    html, _ = site
    listed = read(html / "index.json")["benchmarks"]
    assert listed["gdpa.slow.track_tflops"]["unit"] == "TFLOP/s"
    assert {name.rpartition(".")[2] for name in listed} == set(asv_format.QUANTITIES)
    (graph,) = (
        path
        for path in (html / "graphs").rglob("gdpa.faster.track_tflops.json")
        if "summary" not in path.parts
    )
    points = read(graph)
    assert len(points) == COMMITS


@of_the_site
def test_no_path_of_this_machine_is_in_the_published_site(site):
    html, _ = site
    words = (str(html.parent), sys.prefix, str(ROOT))
    for path in html.rglob("*.json"):
        text = path.read_text()
        assert not [word for word in words if word in text], path.name


@of_the_site
def test_the_page_loads_nothing_from_elsewhere_once_vendored(site, tmp_path, monkeypatch):
    vendor_site = script("vendor_site")
    html, _ = site
    packages = {}
    for name, file in vendor_site.FILES.items():
        path = tmp_path / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        digest = vendor_site.hashlib.sha256(name.encode()).hexdigest()
        packages[name] = vendor_site.File(file.path, digest)
    with pytest.raises(vendor_site.VendorError, match="has SHA-256"):
        vendor_site.vendor(html, tmp_path)
    assert not (html / "vendor").exists()
    monkeypatch.setattr(vendor_site, "FILES", packages)
    names = vendor_site.vendor(html, tmp_path)
    page = (html / "index.html").read_text()
    assert set(names) == set(packages)
    assert not re.findall(r'(?:script src|stylesheet" href)="https?:', page)
    for address in re.findall(r'(?:src|href)="(vendor/[^"]+)"', page):
        assert (html / address).is_file()


def test_without_npm_the_reason_is_told(tmp_path, monkeypatch):
    vendor_site = script("vendor_site")
    monkeypatch.setattr(vendor_site.shutil, "which", lambda _: None)
    with pytest.raises(vendor_site.VendorError, match="no npm"):
        vendor_site.fetch(tmp_path)


@pytest.fixture(scope="module")
def discovered():
    """What asv finds in the folder that asv.conf.json names, in a process of its own."""
    pytest.importorskip("asv_runner", reason="needs asv: pip install 'jagbench[test]'")
    folder = script("history").configuration(ROOT)["benchmark_dir"]
    code = (
        "import json, sys, torch\n"
        "from asv_runner.discovery import list_benchmarks\n"
        f"list_benchmarks({folder!r}, sys.stdout)\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'jagbench.impl' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout)


def test_asv_finds_a_benchmark_per_workload_and_quantity(discovered):
    from jagbench.workloads import CATALOGUE

    assert discovered
    names = [benchmark["name"] for benchmark in discovered]
    assert len(set(names)) == len(names)
    digests = {
        asv_format.benchmark_name(w.operator, w.name, quantity): w.digest
        for w in CATALOGUE.values()
        for quantity in asv_format.QUANTITIES
    }
    for benchmark in discovered:
        assert benchmark["version"] == digests[benchmark["name"]]
        assert benchmark["param_names"] == list(asv_format.PARAMETERS)
        assert benchmark["unit"] == asv_format.QUANTITIES[benchmark["name"].split(".")[2]].unit


CASE = ("jagbench.impl", "float32", "forward", "steady", "none")


@pytest.fixture
def tracked(monkeypatch):
    """The module of asv's classes, and the cases it is asked to measure."""
    module = script("tracked/operators")
    asked = []

    def answer_with(answer):
        def measure(workload, implementation, parameters):
            asked.append((workload.name, implementation, *parameters))
            return answer

        monkeypatch.setattr(module, "_measure", measure)
        return asked

    return module, answer_with


def benchmarks_of(module):
    """One instance of each quantity of the first workload, by name of the quantity."""
    first = next(module.workloads())
    classes = [module._benchmark(first, quantity) for quantity in module.quantities()]
    return {c.quantity.name: c() for c in classes}


def test_a_case_is_measured_once_for_all_its_quantities(tracked, tmp_path):
    module, answer_with = tracked
    asked = answer_with(record(2e-3))
    values = {}
    for name, benchmark in benchmarks_of(module).items():
        benchmark.setup(str(tmp_path), *CASE)
        values[name] = getattr(benchmark, name)(str(tmp_path), *CASE)
    assert len(asked) == 1
    assert values["track_seconds"] == 2e-3
    assert values["track_tflops"] == pytest.approx(500.0)


@pytest.mark.parametrize(
    ("outcome", "error"), [("unsupported", NotImplementedError), ("wrong", RuntimeError)]
)
def test_a_case_without_a_time_raises_what_asv_takes_for_it(tracked, tmp_path, outcome, error):
    module, answer_with = tracked
    answer_with(record(outcome=outcome))
    for benchmark in benchmarks_of(module).values():
        with pytest.raises(error, match="a reason"):
            benchmark.setup(str(tmp_path), *CASE)
