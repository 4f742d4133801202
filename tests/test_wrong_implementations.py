"""The judge is judged: every planted fault fails in the test of the suite that is named for it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from wrong.driver import Ending
from wrong.fault import Fault
from wrong.faults import FAULTS
from wrong.right import RIGHT, Steps

TESTS = Path(__file__).parent
MODULES = (
    "values",
    "masks",
    "memory",
    "gradients",
    "contract",
    "blocks",
    "norms",
    "blocks_of_pffn",
    "quantisers",
    "norm_quantisers",
    "projections",
    "products",
)
#: What the suite's own assertions raise.
ASSERTIONS = ("AssertionError", "Failed")

#: Plugins of pytest that a session of one test does not need.
PLAIN = ("-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:unraisableexception")

Request = tuple[str, ...]


def _request(target: str, fault: Fault) -> Request:
    """Arguments of pytest that judge an implementation with the fault's test and selection."""
    options = {
        "impl": f"wrong.{target}",
        "operator": fault.operator,
        "dtype": fault.dtype,
        "device": "cuda" if fault.needs_gpu else "cpu",
        "workload": fault.workload,
    }
    chosen = [f"--{name}={value}" for name, value in options.items() if value]
    return (fault.node, *chosen, *PLAIN)


def _right(fault: Fault) -> Request:
    return _request("right:RIGHT", fault)


def _wrong(fault: Fault) -> Request:
    return _request(fault.target, fault)


def _runs_here(fault: Fault) -> bool:
    return not fault.needs_gpu or torch.cuda.is_available()


def _half(fault: Fault) -> int:
    """Which of two workers judges a fault: that of the right implementation's same test."""
    return zlib.crc32("\n".join(_right(fault)).encode()) % 2


@pytest.fixture(scope="module")
def halves(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], Mapping[Request, Sequence[Ending]]]:
    """Judges a half of the faults, once a worker."""
    return cache(lambda half: _judged(half, tmp_path_factory))


@pytest.fixture
def endings(
    fault: Fault, halves: Callable[[int], Mapping[Request, Sequence[Ending]]]
) -> Mapping[Request, Sequence[Ending]]:
    """How the tests of a fault's half ended."""
    return halves(_half(fault))


def _judged(
    half: int, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[Request, Sequence[Ending]]:
    """How every test ended, for each fault and for the right implementation, from one process."""
    here = [fault for fault in FAULTS if _runs_here(fault) and _half(fault) == half]
    requests = list(dict.fromkeys([*map(_right, here), *map(_wrong, here)]))
    folder = tmp_path_factory.mktemp("wrong")
    asked, answered = folder / "requests.json", folder / "results.json"
    asked.write_text(json.dumps(requests))
    done = subprocess.run(
        [sys.executable, "-m", "wrong.driver", str(asked), str(answered)],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(answered.read_text())
    return {
        request: [Ending(**ending) for ending in result]
        for request, result in zip(requests, results, strict=True)
    }


def _cases(faults: Sequence[Fault], name: Callable[[Fault], str]) -> list[object]:
    return [
        pytest.param(
            fault,
            id=name(fault),
            marks=[
                pytest.mark.skipif(not _runs_here(fault), reason=f"GPU only: {fault.needs_gpu}"),
                pytest.mark.xdist_group(f"wrong implementations {_half(fault)}"),
            ],
        )
        for fault in faults
    ]


@pytest.mark.parametrize(
    "fault", _cases(list({_right(f): f for f in FAULTS}.values()), lambda fault: fault.selection)
)
def test_the_right_implementation_passes_the_tests_that_catch_the_wrong_ones(
    fault: Fault, endings: Mapping[Request, Sequence[Ending]]
) -> None:
    """With the same selection: a wrong implementation does not fail there for another reason."""
    found = endings[_right(fault)]
    assert [e for e in found if e.outcome != "passed"] == []


@pytest.mark.parametrize("fault", _cases(FAULTS, lambda fault: fault.id))
def test_a_wrong_implementation_fails_in_the_test_named_for_it(
    fault: Fault, endings: Mapping[Request, Sequence[Ending]]
) -> None:
    """By an assertion of that test, or with the error that the fault itself raises."""
    found = endings[_wrong(fault)]
    failed = [e for e in found if e.outcome == "failed"]
    assert failed, f"{fault.target} got through: {found}"
    expected = ASSERTIONS if fault.error == "AssertionError" else (fault.error,)
    for ending in failed:
        assert ending.test.partition("[")[0].endswith(fault.caught_by)
        assert ending.error in expected, ending


def test_every_wrong_implementation_is_in_the_table() -> None:
    """None is planted and then forgotten."""
    planted = {
        f"{module}:{name}"
        for module in MODULES
        for name, value in vars(importlib.import_module(f"wrong.{module}")).items()
        if isinstance(value, Steps) and value is not RIGHT
    }
    assert planted == {fault.target for fault in FAULTS}
    assert len(planted) >= 24


def test_fault_ids_are_unique() -> None:
    """A fault is listed once for each operator and test."""
    ids = [fault.id for fault in FAULTS]
    assert sorted(set(ids)) == sorted(ids)
