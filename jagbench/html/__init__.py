"""One self-contained HTML file of records, claims and a comparison, for reading from disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jagbench.html.page import page
from jagbench.html.rows import gather
from jagbench.published import Claim
from jagbench.result import Record

if TYPE_CHECKING:
    from jagbench.compare import Comparison

__all__ = ["LIMIT", "write_report"]

#: Most bytes of a report.
LIMIT = 2_000_000


def write_report(
    records: Sequence[Record],
    path: Path,
    *,
    claims: Sequence[Claim] = (),
    comparison: Comparison | None = None,
    title: str = "jagbench report",
    by_bandwidth: frozenset[str] = frozenset(),
) -> Path:
    """Write the report and return its path; the same arguments give the same bytes.

    records: of each device, implementation and case the last is shown.
    claims: published figures, marked as claims wherever they appear.
    by_bandwidth: operators shown by GB/s and share of the copy's rate (`Operator.bandwidth_bound`).
    Raises ImportError naming the extra where altair is missing, ValueError where the file would
    have `LIMIT` bytes or more, OSError where it cannot be written.
    """
    text = page(gather(records, claims, comparison, by_bandwidth), title).encode()
    if len(text) >= LIMIT:
        raise ValueError(
            f"a report of {len(records)} records would have {len(text)} bytes, the limit is "
            f"{LIMIT}: choose fewer (by hardware, operator or dtype)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
    return path
