"""`jagbench compare`: records against records."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from jagbench.cli.reading import BY_BANDWIDTH, RESULTS, claims_under, records_under, refusal
from jagbench.compare import a_a
from jagbench.compare import compare as compare_records
from jagbench.compare_view import false_alarm_lines, show, show_by_hardware
from jagbench.selection import resolve


@click.command()
@click.argument("sides", nargs=-1, metavar="[BASELINE CANDIDATE]")
@RESULTS
@click.option("--by", type=click.Choice(("implementation", "hardware")), default="implementation",
              show_default=True, help="What the two sides differ in; with no sides, "
              "`--by hardware` shows every device beside the others.")  # fmt: skip
@click.option("--band", type=click.FloatRange(0, 1, min_open=True), default=0.02,
              show_default=True, help="Ratios within it are the same.")  # fmt: skip
@click.option("--alpha", type=click.FloatRange(0, 0.5, min_open=True), default=0.05,
              show_default=True, help="Level of intervals and tests.")  # fmt: skip
@click.option("--all-sessions", is_flag=True, help="Samples of all sessions, not the newest's.")
@click.option("--a-a", "against_itself", is_flag=True,
              help="Compare every implementation (or the one named) with itself.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--strict", is_flag=True, help="Exit with 3 if anything is undecided or refused.")
def compare(
    sides: tuple[str, ...], results: Path, by: str, band: float, alpha: float,
    all_sessions: bool, against_itself: bool, as_json: bool, strict: bool,
) -> None:  # fmt: skip
    """Compare records of CANDIDATE with those of BASELINE, case by case.

    A side is NAME (an implementation), HARDWARE/NAME, NAME@COMMIT, hardware:NAME, or a file.
    Verdicts: faster, slower, same (within the band, by an equivalence test) or undecided; the
    family's false discoveries are controlled. To take the samples of both in turns, run
    `jagbench run --impl CANDIDATE --against BASELINE` first.

    Exit codes: 0 nothing is slower; 1 something is; 2 not understood, or no such records; 3 nothing
    could be compared, or --strict. With --a-a: 0 if the share of cases called faster or slower is
    at most --alpha, else 1.
    """
    records = records_under([results])
    if not records and not sides:
        raise refusal(f"no records under {results}")
    console = Console()
    try:
        if against_itself:
            chosen = resolve(sides[0], records).records if sides else records
            found = a_a(chosen, band=band, alpha=alpha)
            click.echo(found.to_json() if as_json else "\n".join(false_alarm_lines(found)))
            sys.exit(0 if found.rate <= alpha else 1)
        if by == "hardware" and not sides:
            show_by_hardware(records, console, claims_under([results]), BY_BANDWIDTH)
            return
        if len(sides) != 2:
            raise click.UsageError(f"two sides are compared, {len(sides)} were named")
        comparison = compare_records(
            resolve(sides[0], records), resolve(sides[1], records), band=band, alpha=alpha,
            by=by, sessions="all" if all_sessions else "newest", strict=strict,  # type: ignore[arg-type]
        )  # fmt: skip
    except ValueError as error:
        raise refusal(error) from error
    if as_json:
        click.echo(comparison.to_json())
    else:
        show(comparison, console)
    sys.exit(comparison.exit_code)
