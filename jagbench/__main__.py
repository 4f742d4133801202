"""`jagbench` and `python -m jagbench`: the command, interruptible while it still imports torch."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; 130 if interrupted."""
    try:
        from jagbench.cli import main as command

        command(prog_name="jagbench")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
