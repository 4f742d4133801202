"""The `jagbench` command.

Exit codes: 0 all is well; 1 something judged or measured is not (wrong, crashed, slower, damaged);
2 the command was not understood; 3 a comparison was undecided or refused under --strict; 130
interrupted (what was finished is kept).
"""

from __future__ import annotations

import click

from jagbench.cli.comparing import compare
from jagbench.cli.listing import describe, list_command
from jagbench.cli.reading import report, schema, verify
from jagbench.cli.running import doctor, run
from jagbench.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jagbench")
def main() -> None:
    """Benchmark and conformance suite for jagged kernels.

    The conformance tests run by pytest (`pytest suite/`, or `python -m pytest --pyargs
    jagbench.suite -p jagbench.suite.plugin`); this command measures, keeps and compares.

    Exit codes: 0 all is well; 1 something judged or measured is not; 2 the command was not
    understood; 3 undecided or refused under --strict; 130 interrupted, what was finished is kept.

    Shell completion: eval "$(_JAGBENCH_COMPLETE=bash_source jagbench)", or zsh_source, fish_source.
    """


for command in (list_command, describe, doctor, run, compare, report, verify, schema):
    main.add_command(command)
