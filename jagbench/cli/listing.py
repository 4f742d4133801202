"""`jagbench list` and `jagbench describe`: what there is to judge, and on what."""

from __future__ import annotations

import importlib.metadata

import click
from rich.console import Console
from rich.table import Table

from jagbench.hardware import DEVICES
from jagbench.implementation import ENTRY_POINT_GROUP
from jagbench.peers import MX_QUANTIZE_PEERS, NORM_LINEAR_PEERS, PEERS
from jagbench.plain import safe
from jagbench.reference import OPERATORS
from jagbench.workload import PURPOSES, Workload
from jagbench.workloads import CATALOGUE, select, workload_from_text

KINDS = ("workloads", "operators", "implementations", "hardware")


@click.command("list")
@click.argument("kind", type=click.Choice(KINDS), default="workloads")
@click.option("--operator", type=click.Choice(sorted(OPERATORS)), help="Only of this operator.")
@click.option("--purpose", type=click.Choice(PURPOSES), help="Only workloads that serve it.")
@click.option("--tag", help="Only workloads with this tag.")
def list_command(kind: str, operator: str | None, purpose: str | None, tag: str | None) -> None:
    """List WORKLOADS (the default), operators, implementations or known hardware."""
    if kind == "workloads":
        workloads(operator, purpose, tag)
    elif kind == "operators":
        operators(operator)
    elif kind == "implementations":
        implementations()
    else:
        known_hardware()


def operators(only: str | None) -> None:
    """Signature, definition and number of workloads of every operator."""
    for operator in OPERATORS.values():
        if only in (None, operator.name):
            click.echo(f"{operator.name}{operator.signature}")
            click.echo(f"    defined in: {operator.paper}")
            gradients = ", ".join(operator.differentiable) or "nothing: its outputs are codes"
            click.echo(f"    gradients of: {gradients}")
            click.echo(f"    workloads: {len(select(operator=operator.name))}")


def implementations() -> None:
    """Names that --impl takes: entry points and peers; any other module path works too."""
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)):
        click.echo(f"{entry.name:<32} {entry.value}")
    for name, module in sorted({**PEERS, **NORM_LINEAR_PEERS, **MX_QUANTIZE_PEERS}.items()):
        click.echo(f"{name:<32} {module}")
    click.echo("any other module or object: --impl=package.module or --impl=package.module:object")


def known_hardware() -> None:
    """Devices with a datasheet, and their dense peaks."""
    for device in DEVICES:
        peaks = ", ".join(f"{n} {rate / 1e12:g}" for n, rate in device.flop_per_second.items())
        click.echo(device.names[0])
        click.echo(f"    {peaks} TFLOP/s; {device.bytes_per_second / 1e12:g} TB/s")
        click.echo(f"    {device.source} ({device.date})")


def workloads(operator: str | None, purpose: str | None, tag: str | None) -> None:
    """Workloads with their realised statistics."""
    found = select(operator=operator, purpose=purpose, tag=tag)
    if not found:
        tags = sorted({t for w in CATALOGUE.values() for t in w.tags})
        raise click.UsageError(f"no workload meets this; tags are: {', '.join(tags)}")
    table = Table(box=None)
    table.add_column("workload", no_wrap=True)
    for heading in ("sequences", "q tokens", "k tokens", "visible pairs", "k fill"):
        table.add_column(heading, justify="right")
    for heading in ("purposes", "digest"):
        table.add_column(heading, no_wrap=True)
    for workload in found:
        table.add_row(*_row(workload))
    # A table cut to fit a pipe's 80 columns would lose its digests.
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    console.print(table)
    console.print(f"{len(found)} workloads")


def _row(workload: Workload) -> tuple[str, ...]:
    statistics = workload.statistics
    counts = ("sequences", "q_tokens", "k_tokens", "visible_pairs")
    purposes = ", ".join(p for p in PURPOSES if p in workload.purposes)
    return (
        workload.name,
        *(f"{int(statistics[name]):,}" for name in counts),
        f"{statistics['k_fill']:.3f}",
        purposes,
        workload.digest,
    )


@click.command()
@click.argument("name")
@click.option("--operator", type=click.Choice(sorted(OPERATORS)), default="jagged_attention",
              help="Operator of a replayed workload.")  # fmt: skip
def describe(name: str, operator: str) -> None:
    """Describe one workload by NAME, or a file of lengths by replay:PATH[:COLUMN]."""
    workload = CATALOGUE.get(name)
    if workload is None and name.startswith("replay:"):
        try:
            workload = workload_from_text(name, operator)
        except (ValueError, ImportError) as error:
            raise click.UsageError(safe(str(error))) from error
    if workload is None:
        raise click.UsageError(f"no workload is named {name!r}; see `jagbench list`")
    for label, value in _description(workload):
        click.echo(f"{label:<18} {value}")


def _description(workload: Workload) -> list[tuple[str, str]]:
    recipe = {
        name: value
        for name, value in vars(workload.recipe).items()
        if value is not None and name != "operator"
    }
    lines = [
        ("name", workload.name),
        ("operator", workload.operator),
        ("digest", workload.digest),
        ("seed", str(workload.seed)),
        ("purposes", ", ".join(p for p in PURPOSES if p in workload.purposes)),
        ("tags", ", ".join(sorted(workload.tags))),
        ("source", workload.source or "ours"),
    ]
    lines += [(f"  {name}", _brief(value)) for name, value in recipe.items()]
    lines += [(name, f"{value:,.6g}" if isinstance(value, float) else f"{value:,}")
              for name, value in workload.statistics.items()]  # fmt: skip
    return lines


def _brief(value: object, limit: int = 160) -> str:
    """Text of a value, cut where a replayed file would fill the screen."""
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
