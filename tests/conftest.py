"""Set-up of the project's own tests: interpreter, poisoned memory, strict warnings, fixed draws."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Triton reads this where a kernel is decorated, so it is set before any kernel is imported. Tests
# that compile for real do so in processes without it (jagbench.ahead_of_time).
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Workers share few cores; the tensors of these tests are too small to be split over threads.
torch.set_num_threads(1)

# Every exception to "error" is named here with its reason.
WARNINGS = (
    "error",
    # pytest-benchmark says so under xdist; nothing here is timed.
    "ignore:Benchmarks are automatically disabled",
    # Triton's interpreter computes with numpy, which warns of what a GPU does silently: inf - inf
    # in a lane that is masked afterwards, exp2 out of range. Results are judged, not these.
    "ignore::RuntimeWarning:triton.runtime.interpreter",
)

#: Expensive fixtures: the tests that share one stay on one worker of pytest-xdist.
MADE_ONCE = ("endings", "wheel")

settings.register_profile(
    "jagbench",
    derandomize=True,
    deadline=None,
    database=None,
    # The poisoned allocations below hold for every example alike.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("jagbench")


def pytest_configure(config):
    for line in WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        for name in MADE_ONCE:
            if name in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group(name))


def _poisoned(allocate):
    """`allocate` with its result filled with NaN, as memory that held something else may be."""

    def poisoned(*arguments, **options):
        tensor = allocate(*arguments, **options)
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return poisoned


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch):
    """Uninitialised floating tensors hold NaN, so an element nobody wrote shows in the result."""
    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
