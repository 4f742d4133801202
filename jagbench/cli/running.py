"""`jagbench run` and `jagbench doctor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from jagbench.cli.measuring import interruptible, measure_all
from jagbench.cli.selecting import choices_in, device_named, finite, writable
from jagbench.plain import safe
from jagbench.reference import OPERATORS
from jagbench.worker import Request
from jagbench.workload import PURPOSES
from jagbench.workloads import CATALOGUE, select

#: Tag of what is measured where nothing else is asked for.
DEFAULT_TAG = "comparison"
DTYPES = ("bfloat16", "float16", "float32")


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
    callback=finite,
    metavar="SECONDS",
    help="Most seconds of sampling a case, once it has 24 samples.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=180.0,
    show_default=True,
    callback=finite,
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
    with interruptible():
        device = device_named(device)
        quick = device == "cpu"
        request = Request(
            implementation="",
            workloads=_workloads(
                patterns, operator, tag, purpose or ("smoke" if quick else "full")
            ),
            dtypes=dtypes or (("float32",) if quick else ("bfloat16",)),
            device=device,
            session="",
            regions=regions or ("forward", "backward"),
            modes=modes or ("cold", "steady"),
            preparations=preparations or ("included", "excluded", "alone"),
            against=against,
            quick=quick,
            budget=budget,
            pin=choices_in(pin) if pin else None,
            second_clock=not no_second_clock,
        )
        names = implementations or ("jagbench.impl",)
        writable(results)
        sys.exit(measure_all(request, names, results, time_limit, retry=retry, again=again))


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


@click.command()
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:1 or cpu.")
def doctor(device: str) -> None:
    """Say whether this machine can give valid numbers now, and what to mend. Changes nothing."""
    from jagbench.doctor import examine

    findings = examine(device_named(device))
    for finding in findings:
        mend = f" -> {finding.fix}" if finding.fix else ""
        click.echo(safe(f"{finding.level:<8} {finding.what}{mend}"))
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    click.echo(f"{errors} errors, {warnings} warnings")
    sys.exit(1 if errors else 0)
