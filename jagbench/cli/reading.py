"""`jagbench report`, `verify` and `schema`: what is done with records."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from jagbench import result, store
from jagbench.published import Claim
from jagbench.published import read as read_claims
from jagbench.result import Record
from jagbench.verify import CLAIMS
from jagbench.verify import verify as verify_files


def records_under(paths: Sequence[Path]) -> list[Record]:
    """Records of files, and of every file of folders; what is damaged is said on standard error."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        files += [file for file in found if file.name != CLAIMS]
    records: list[Record] = []
    for file in files:
        reading = store.read(file)
        records += reading.records
        for damaged in reading.damaged:
            click.echo(f"{file}:{damaged.line}: set aside: {damaged.reason}", err=True)
    return records


def claims_under(paths: Sequence[Path]) -> list[Claim]:
    """Published claims beside the records."""
    found = [path / CLAIMS for path in paths if path.is_dir() and (path / CLAIMS).is_file()]
    return [claim for path in found for claim in read_claims(path)]


RESULTS = click.option(
    "--results", type=click.Path(path_type=Path, exists=True), default="results",
    show_default=True, help="Folder or file of the records.",
)  # fmt: skip


@click.command()
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False), default="report.html")
@RESULTS
@click.option("--hardware", help="Only records of this hardware (folder name).")
@click.option("--operator", help="Only of this operator.")
@click.option("--title", default="jagbench report", show_default=True)
def report(
    output: Path, results: Path, hardware: str | None, operator: str | None, title: str
) -> None:
    """Write one self-contained HTML file (OUTPUT) of the records and the published claims."""
    from jagbench.html import write_report

    chosen = [
        record
        for record in records_under([results])
        if hardware in (None, record.hardware) and operator in (None, record.case.operator)
    ]
    if not chosen:
        raise click.ClickException(f"no record under {results} meets this")
    try:
        path = write_report(chosen, output, claims=claims_under([results]), title=title)
    except (ImportError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{path}: {len(chosen)} records, {path.stat().st_size:,} bytes")


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option("--notes/--no-notes", default=True, help="Whether notes are shown beside errors.")
def verify(paths: tuple[Path, ...], notes: bool) -> None:
    """Check files of records (PATHS, by default results/) before they are published."""
    problems = verify_files(paths or (Path("results"),), host_names=[platform.node()])
    for problem in problems:
        if notes or problem.severity == "error":
            click.echo(problem)
    errors = sum(problem.severity == "error" for problem in problems)
    click.echo(f"{errors} errors, {len(problems) - errors} notes")
    sys.exit(1 if errors else 0)


@click.command()
def schema() -> None:
    """Print the JSON Schema of a record."""
    click.echo(json.dumps(result.schema(), indent=2, sort_keys=True))
