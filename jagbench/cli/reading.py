"""`jagbench report`, `verify` and `schema`: what is done with records."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from jagbench import result, store
from jagbench.plain import safe
from jagbench.published import Claim
from jagbench.published import read as read_claims
from jagbench.reference import OPERATORS
from jagbench.result import Record
from jagbench.verify import CLAIMS, folded
from jagbench.verify import verify as verify_files

#: Operators that reports judge by bytes a second.
BY_BANDWIDTH = frozenset(name for name, one in OPERATORS.items() if one.bandwidth_bound)


def refusal(error: object) -> click.UsageError:
    """What cannot be done with what was named: exit code 2, which no verdict has."""
    return click.UsageError(safe(str(error)))


def records_under(paths: Sequence[Path]) -> list[Record]:
    """Records of files, and of every file of folders; what is damaged is said on standard error."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        files += [file for file in found if file.name != CLAIMS]
    records: list[Record] = []
    for file in files:
        try:
            reading = store.read(file)
        except OSError as error:
            raise refusal(f"{file}: {error.strerror or error}") from error
        records += reading.records
        for damaged in reading.damaged:
            click.echo(safe(f"{file}:{damaged.line}: set aside: {damaged.reason}"), err=True)
    return records


def claims_under(paths: Sequence[Path]) -> list[Claim]:
    """Published claims beside the records."""
    found = [path / CLAIMS for path in paths if path.is_dir() and (path / CLAIMS).is_file()]
    try:
        return [claim for path in found for claim in read_claims(path)]
    except (OSError, ValueError) as error:
        raise refusal(error) from error


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
    from jagbench.html.ladder import ladder_text
    from jagbench.html.rows import gather

    chosen = [
        record
        for record in records_under([results])
        if hardware in (None, record.hardware) and operator in (None, record.case.operator)
    ]
    if not chosen:
        raise refusal(f"no record under {results} meets this")
    try:
        path = write_report(
            chosen, output, claims=claims_under([results]), title=title, by_bandwidth=BY_BANDWIDTH
        )
    except ImportError as error:
        raise click.ClickException(safe(str(error))) from error
    except OSError as error:
        raise refusal(f"{output} cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        raise refusal(error) from error
    for line in ladder_text(gather(chosen, (), None, BY_BANDWIDTH)):
        click.echo(safe(line))
    click.echo(f"{safe(str(path))}: {len(chosen)} records, {path.stat().st_size:,} bytes")


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option("--notes/--no-notes", default=True, help="Whether notes are shown beside errors.")
def verify(paths: tuple[Path, ...], notes: bool) -> None:
    """Check files of records (PATHS, by default results/) before they are published.

    Exit codes: 0 no errors; 1 errors; 2 there is nothing to check.
    """
    paths = paths or (Path("results"),)
    if not any(path.is_file() or any(path.rglob("*.jsonl")) for path in paths):
        raise refusal(f"no files of records under {', '.join(map(str, paths))}")
    problems = verify_files(paths, host_names=[platform.node()])
    for line in folded(one for one in problems if notes or one.severity == "error"):
        click.echo(line)
    errors = sum(problem.severity == "error" for problem in problems)
    click.echo(f"{errors} errors, {len(problems) - errors} notes")
    sys.exit(1 if errors else 0)


@click.command()
def schema() -> None:
    """Print the JSON Schema of a record."""
    click.echo(json.dumps(result.schema(), indent=2, sort_keys=True))
