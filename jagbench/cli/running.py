"""`jagbench run` and `jagbench doctor`."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jagbench import store
from jagbench.reference import OPERATORS
from jagbench.result import Record
from jagbench.run import WorkerFailure
from jagbench.run import run as run_request
from jagbench.worker import Request
from jagbench.workload import PURPOSES
from jagbench.workloads import CATALOGUE, select

#: Tag of what is measured where nothing else is asked for.
DEFAULT_TAG = "comparison"
DTYPES = ("bfloat16", "float16", "float32")
FAILURES = ("wrong", "crashed", "timed out", "out of memory", "invalid")


@click.command()
@click.option(
    "--impl",
    "implementations",
    multiple=True,
    metavar="NAME",
    help="Module, module:object or entry point; repeatable [default: jagbench.impl].",
)
@click.option("--operator", type=click.Choice(sorted(OPERATORS)), help="Only of this operator.")
@click.option(
    "--workload",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Workloads by name or pattern, or OPERATOR:replay:PATH[:COLUMN]; repeatable.",
)
@click.option("--tag", help=f"Workloads with this tag [default: {DEFAULT_TAG}].")
@click.option(
    "--purpose",
    type=click.Choice(PURPOSES),
    help="Workloads that serve it [default: full on a GPU, smoke on a CPU].",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(DTYPES),
    help="Repeatable [default: bfloat16 on a GPU, float32 on a CPU].",
)
@click.option(
    "--region",
    "regions",
    multiple=True,
    help="Repeatable [default: forward, backward].",
    type=click.Choice(("forward", "backward", "forward_backward")),
)
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(("cold", "steady")),
    help="Repeatable [default: both].",
)
@click.option(
    "--preparation",
    "preparations",
    multiple=True,
    type=click.Choice(("included", "excluded", "alone")),
    help="With padding, masks and plans, without them, or they alone; repeatable [default: all].",
)
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:1 or cpu.")
@click.option(
    "--results",
    type=click.Path(path_type=Path, file_okay=False),
    default="results",
    show_default=True,
    help="Folder of the records.",
)
@click.option(
    "--against",
    metavar="NAME",
    help="A second implementation whose samples alternate with the first's.",
)
@click.option(
    "--pin",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="JSON file of choices (tiles) for the implementation to pin.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Most seconds of sampling a case.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=180.0,
    show_default=True,
    metavar="SECONDS",
    help="A case that takes longer is killed.",
)
@click.option("--retry", is_flag=True, help="Measure again what failed before.")
@click.option("--again", is_flag=True, help="Measure everything again.")
@click.option("--no-second-clock", is_flag=True, help="Do without the profiler's cross-check.")
def run(
    implementations: tuple[str, ...], operator: str | None, patterns: tuple[str, ...],
    tag: str | None, purpose: str | None, dtypes: tuple[str, ...], regions: tuple[str, ...],
    modes: tuple[str, ...], preparations: tuple[str, ...], device: str, results: Path,
    against: str | None, pin: Path | None, budget: float | None, time_limit: float,
    retry: bool, again: bool, no_second_clock: bool,
) -> None:  # fmt: skip
    """Measure implementations and append a record a case under the results folder.

    Every timed call is checked against the truth; what is wrong, unsupported or crashes gets a
    record that says so and no time. Cases with a record of the same source, commit and versions are
    not measured again. Ctrl-C keeps what is finished.
    """
    device = _device(device)
    quick = device == "cpu"
    names = _workloads(patterns, operator, tag, purpose or ("smoke" if quick else "full"))
    request = Request(
        implementation="",
        workloads=names,
        dtypes=dtypes or (("float32",) if quick else ("bfloat16",)),
        device=device,
        session=secrets.token_hex(4),
        regions=regions or ("forward", "backward"),
        modes=modes or ("cold", "steady"),
        preparations=preparations or ("included", "excluded", "alone"),
        against=against,
        quick=quick,
        budget=budget,
        pin=json.loads(pin.read_text()) if pin else None,
        second_clock=not no_second_clock,
    )
    requests = [
        _of_implementation(request, name, results, retry, again)
        for name in implementations or ("jagbench.impl",)
    ]
    sys.exit(_measure_all(requests, results, time_limit))


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise click.UsageError(f"--device={name}: {error}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise click.UsageError(f"--device={name}: torch sees {torch.cuda.device_count()} GPU here")
    return name


def _workloads(
    patterns: Sequence[str], operator: str | None, tag: str | None, purpose: str
) -> tuple[str, ...]:
    """Names of the workloads asked for; a usage error where there are none."""
    if patterns:
        found = [name for pattern in patterns for name in _matching(pattern, operator)]
    else:
        chosen = select(operator=operator, purpose=purpose, tag=tag or DEFAULT_TAG)
        found = [workload.name for workload in chosen]
    if not found:
        raise click.UsageError(
            f"no workload has tag {tag or DEFAULT_TAG!r} and purpose {purpose!r}; see "
            "`jagbench list`"
        )
    return tuple(dict.fromkeys(found))


def _matching(pattern: str, operator: str | None) -> list[str]:
    if ":replay:" in pattern:
        return [pattern]
    found = [workload.name for workload in select(operator=operator, name=pattern)]
    if not found:
        raise click.UsageError(
            f"--workload={pattern}: none of {len(CATALOGUE)} workloads is called so; see "
            "`jagbench list`"
        )
    return found


def _of_implementation(
    request: Request, name: str, results: Path, retry: bool, again: bool
) -> Request:
    """The request for one implementation, with the keys of what its file holds already."""
    import dataclasses

    from jagbench.environment import provenance

    hardware = provenance(request.device).hardware
    names = [name] + ([request.against] if request.against else [])
    finished: set[tuple[str, ...]] = set()
    for each in names:
        path = store.path_for(results, hardware, each)
        if not again:
            redo: Any = FAILURES if retry else ()
            finished |= store.finished(path, again=redo)
    # One session a process: samples of one session were taken side by side.
    return dataclasses.replace(
        request,
        implementation=name,
        finished=tuple(sorted(finished)),
        session=secrets.token_hex(4),
    )


def _measure_all(requests: Sequence[Request], results: Path, time_limit: float) -> int:
    console = Console()
    counts: Counter[str] = Counter()
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console,
        transient=True,
    ) if console.is_terminal else None  # fmt: skip
    status = 0
    try:
        with progress or nullcontext():
            task = progress.add_task("starting", total=None) if progress else None

            def on_start(record: Record) -> None:
                if progress is not None and task is not None:
                    progress.update(task, description=_title(record))

            def on_record(record: Record, path: Path) -> None:
                counts[record.outcome] += 1
                console.print(_line(record), highlight=False, markup=False, soft_wrap=True)

            for request in requests:
                try:
                    run_request(
                        request,
                        results,
                        time_limit=time_limit,
                        on_start=on_start,
                        on_record=on_record,
                    )
                except (WorkerFailure, ValueError, OSError) as error:
                    click.echo(f"error: {error}", err=True)
                    status = 1
    except KeyboardInterrupt:
        click.echo("interrupted; what was finished is kept", err=True)
        status = 130
    total = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    click.echo(f"{total or 'nothing new to measure'}; records under {os.fspath(results)}")
    return status or int(any(counts[name] for name in FAILURES))


def _title(record: Record) -> str:
    case = record.case
    return (
        f"{record.who.name} {case.workload} {case.dtype} {case.region} {case.mode} "
        f"{f'preparation {case.preparation}' if case.preparation != 'none' else ''}"
    ).rstrip()


def _line(record: Record) -> str:
    """One record for a person."""
    if record.timing is None:
        return f"{_title(record)}: {record.outcome}: {record.reason}"
    parts = [f"{record.timing.seconds * 1e3:.4g} ms"]
    if record.flop_per_second and record.case.preparation != "alone":
        parts.append(f"{record.flop_per_second / 1e12:.3g} TFLOP/s")
        share = record.share(record.measured_ceiling)
        parts += [f"{share:.2g} of the measured ceiling"] if share is not None else []
    parts += [f"{record.outcome}: {record.reason}"] if record.reason else []
    parts += [*record.flags, *([record.timing.unmet] if record.timing.unmet else [])]
    return f"{_title(record)}: {'; '.join(parts)}"


@click.command()
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:1 or cpu.")
def doctor(device: str) -> None:
    """Say whether this machine can give valid numbers now, and what to mend. Changes nothing."""
    from jagbench.doctor import examine

    findings = examine(_device(device))
    for finding in findings:
        mend = f" -> {finding.fix}" if finding.fix else ""
        click.echo(f"{finding.level:<8} {finding.what}{mend}")
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    click.echo(f"{errors} errors, {warnings} warnings")
    sys.exit(1 if errors else 0)
