"""Measure HEAD with asv, add the records of GPU machines, publish the site (`tox -e history`).

    python benchmarks/history.py [--no-measure] [--bench REGEX] [--html DIR]

1. asv measures the workloads of `benchmarks/tracked` at HEAD, in a folder of its own; its numbers
   are taken over into `results/asv` under the machine's hardware name, without host name and
   interpreter path. Skipped where tracked files (but results) differ from HEAD.
2. The records of `results/<hardware>/*.jsonl` are added in asv's format.
3. `asv publish` writes the site to `.asv/html`; its scripts are put beside it, so that it works
   without the internet. Without npm the site is built all the same, and needs the internet.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import vendor_site

from jagbench import asv_format, store
from jagbench.result import Record, hardware_name

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def main() -> int:
    """Command line; 1 where asv failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--no-measure", action="store_true", help="publish what there is")
    parser.add_argument("--bench", default=None, help="measure only what matches (asv's --bench)")
    parser.add_argument("--html", type=Path, default=ROOT / ".asv" / "html")
    arguments = parser.parse_args()
    dates = commit_dates(ROOT)
    results = RESULTS / "asv"
    failed = False
    if not arguments.no_measure:
        failed = not measure(results, dates, arguments.bench)
    add_records(results, dates)
    if not (results / "benchmarks.json").is_file():
        print("there are no results to publish")
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        settings = configuration(ROOT, html_dir=arguments.html)
        asv(Path(temporary), settings, "publish", "--no-pull")
    make_offline(arguments.html)
    print(f"to look at it: python -m http.server -d {_short(arguments.html)}")
    return int(failed)


def commit_dates(root: Path) -> dict[str, datetime]:
    """Commits that HEAD descends from, and HEAD, with their dates."""
    lines = _git(root, "log", "--format=%H %ct").splitlines()
    pairs = (line.split() for line in lines)
    return {commit: datetime.fromtimestamp(int(seconds), UTC) for commit, seconds in pairs}


def measure(results: Path, dates: dict[str, datetime], bench: str | None) -> bool:
    """Run asv on HEAD and take over its results; whether every benchmark went well."""
    # Results are not measured: a run that wrote some may be followed by another.
    changed = ("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
    if _git(ROOT, *changed):
        print("tracked files differ from HEAD: not measured (commit, or stash)")
        return True
    # Needs torch, which publishing does not.
    import torch

    from jagbench import environment

    device = torch.device("cuda" if torch.cuda.device_count() else "cpu")
    provenance = environment.provenance(device)
    hardware, head = hardware_name(provenance.device), _git(ROOT, "rev-parse", "HEAD").strip()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _describe_machine(folder, hardware)
        settings = configuration(ROOT, results_dir=folder / "results")
        options = ["--python=same", f"--set-commit-hash={head}", f"--machine={hardware}"]
        options += [f"--bench={bench}"] if bench else []
        # Starting Python with torch takes longer than most of these benchmarks; CUDA must not fork.
        options += ["--launch-method=forkserver"] if device.type == "cpu" else []
        went_well = asv(folder, settings, "run", "--show-stderr", *options, check=False)
        written = asv_format.adopt(
            folder / "results",
            results,
            hardware=hardware,
            commit=head,
            date=dates[head],
            provenance=provenance,
        )
    print(f"measured on {hardware}: {', '.join(map(_short, written)) or 'nothing'}")
    return went_well


def add_records(results: Path, dates: dict[str, datetime]) -> None:
    """Write the records of `results/<hardware>/*.jsonl` in asv's format."""
    records: list[Record] = []
    damaged = 0
    for path in sorted(RESULTS.glob("*/*.jsonl")):
        reading = store.read(path)
        records += reading.records
        damaged += len(reading.damaged)
    kept, left_out = asv_format.usable(records, dates)
    asv_format.write(kept, results, commit_dates=dates)
    print(f"records: {len(kept)} added")
    for reason, count in left_out.items():
        print(f"records: {count} left out: {reason}")
    if damaged:
        print(f"records: {damaged} lines that are no records of this schema")


def configuration(root: Path, **changes: Path) -> dict[str, Any]:
    """Settings of asv from `asv.conf.json`, with paths that hold wherever it is run from."""
    text = (root / "asv.conf.json").read_text(encoding="utf-8")
    settings: dict[str, Any] = json.loads(re.sub(r"(?m)^\s*//.*$", "", text))
    for name in ("repo", "benchmark_dir", "results_dir", "html_dir", "env_dir"):
        settings[name] = str(changes.get(name, root / settings[name]))
    # A checkout of one commit, as CI makes it, has no branch of that name.
    branches = _git(root, "branch", "--format=%(refname:short)").split()
    settings["branches"] = [b for b in settings["branches"] if b in branches] or ["HEAD"]
    return settings


def asv(folder: Path, settings: dict[str, Any], *arguments: str, check: bool = True) -> bool:
    """Run asv with settings of its own; `folder` is its home, where it keeps machine names."""
    config = folder / "asv.conf.json"
    config.write_text(json.dumps(settings))
    environment = os.environ | {"HOME": str(folder)}
    # Git and Triton still find what the user has.
    home = Path.home()
    if (home / ".gitconfig").is_file():
        environment.setdefault("GIT_CONFIG_GLOBAL", str(home / ".gitconfig"))
    environment.setdefault("TRITON_CACHE_DIR", str(home / ".triton" / "cache"))
    command = [sys.executable, "-m", "asv", "--config", str(config), *arguments]
    return subprocess.run(command, env=environment, check=check).returncode == 0


def make_offline(html: Path) -> None:
    """Vendor the site's scripts, or say why it needs the internet."""
    try:
        names = vendor_site.vendor(html, vendor_site.fetch(html.parent / "npm"))
    except vendor_site.VendorError as error:
        print(f"the site is built, but needs the internet to show its graphs: {error}")
    else:
        print(f"the site works without the internet: {len(names)} files in its vendor folder")


def _describe_machine(home: Path, hardware: str) -> None:
    """What asv would ask for, and otherwise fill with this machine's host name."""
    fields: Sequence[str] = ("os", "arch", "cpu", "num_cpu", "ram")
    machine = {"machine": hardware, **dict.fromkeys(fields, "")}
    (home / ".asv-machine.json").write_text(json.dumps({hardware: machine, "version": 1}))


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    sys.exit(main())
