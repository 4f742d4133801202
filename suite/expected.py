"""Known gaps of an implementation: tests that its authors expect to fail, until a date."""

from __future__ import annotations

import datetime
import fnmatch
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from jagbench.implementation import Implementation

FILE_NAME = "jagbench_expected_failures.toml"


@dataclass(frozen=True)
class ExpectedFailure:
    """One entry of the file.

    id: test id from `conformance/` on, or its part from the test's name on; `*` and `?` are
        wildcards, brackets are not; without the bracketed parameters it means all of them.
    reason: why it fails.
    expires: last day on which the failure is excused.
    """

    id: str
    reason: str
    expires: datetime.date

    def matches(self, test_id: str) -> bool:
        """Whether a test's id is meant."""
        pattern = self.id.replace("[", "[[]")
        forms = [test_id, test_id.partition("::")[2]]
        forms += [form.partition("[")[0] for form in forms]
        return any(fnmatch.fnmatchcase(form, pattern) for form in forms)

    def expired(self, today: datetime.date) -> bool:
        """Whether the entry excuses nothing any more."""
        return today > self.expires


def find(option: str | None, implementation: Implementation) -> Path | None:
    """The file named on the command line, or the one beside the implementation's module."""
    if option is not None:
        path = Path(option)
        if not path.is_file():
            raise pytest.UsageError(f"--expected-failures={option}: no such file")
        return path
    module = sys.modules.get(implementation.name.partition(":")[0])
    origins = (getattr(m, "__file__", None) for m in (implementation.namespace, module))
    beside = [Path(origin).parent / FILE_NAME for origin in origins if origin is not None]
    return next((path for path in beside if path.is_file()), None)


def read(path: Path | None) -> Sequence[ExpectedFailure]:
    """Entries of a file. Raises pytest.UsageError that names what is missing in which entry."""
    if path is None:
        return ()
    try:
        content = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise pytest.UsageError(f"{path.name}: {error}") from error
    return tuple(_entry(path.name, i, e) for i, e in enumerate(content.get("expected", ()), 1))


def _entry(file: str, number: int, entry: dict[str, object]) -> ExpectedFailure:
    test_id, reason, expires = entry.get("id"), entry.get("reason"), entry.get("expires")
    if not isinstance(test_id, str) or not isinstance(reason, str) or not reason.strip():
        raise pytest.UsageError(f"{file}: entry {number} needs an id and a reason, got {entry}")
    if not isinstance(expires, datetime.date) or isinstance(expires, datetime.datetime):
        raise pytest.UsageError(
            f"{file}: entry {number} ({test_id}) needs expires = YYYY-MM-DD, got {expires!r}"
        )
    return ExpectedFailure(test_id, reason, expires)
