"""Which workloads, in which dtypes, a test runs on."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from jagbench import workloads
from jagbench.accuracy import PAIRS_PER_SLICE_GPU
from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS
from jagbench.spec import Operator
from jagbench.suite.settings import DTYPES, Settings
from jagbench.workload import Workload

NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: Tags of workloads whose time says something; the others show features and edges.
TIMED_TAGS = frozenset({"comparison", "ladder", "production", "published"})


@dataclass(frozen=True)
class Case:
    """A workload in one dtype; its id reads `gdpa-self-...-float32`."""

    workload: Workload
    dtype: torch.dtype

    @property
    def id(self) -> str:
        """Name in test ids."""
        return f"{self.workload.name}-{NAMES[self.dtype]}"

    @property
    def operator(self) -> Operator:
        """The operator's record."""
        return OPERATORS[self.workload.operator]

    @property
    def memory(self) -> float:
        """Bytes that judging this case takes at most, roughly; 0 if the recipe tells no widths.

        The call: arguments, their copy, outputs, gradients, and as much again for the kernels'
        needs. The truth: float64 matrices of the pairs of a slice, or of the longest sequence; one
        that quantises holds more of those, and as many of each row.
        """
        recipe = self.workload.recipe
        heads = getattr(recipe, "heads", 0)
        lengths = list(recipe.lengths(self.workload.seed).values())
        rows = max((sum(each) for each in lengths), default=0)
        longest = max((math.prod(pair) for pair in zip(*lengths, strict=True)), default=0)
        pairs = min(max(longest, PAIRS_PER_SLICE_GPU), sum(map(sum, lengths)) ** 2)
        elements = rows * heads * getattr(recipe, "qk_dim", 0)
        matrices = 22 if self.operator.quantised else 0
        if self.operator.codes is not None:
            matrices = min(matrices, 10)  # no gradients
        scores = heads * pairs * max(12, matrices)
        return float(16 * self.dtype.itemsize * elements + 8 * (matrices * elements + scores))

    def inputs(self, device: torch.device) -> Inputs:
        """The drawn inputs, with an upstream gradient."""
        return self.workload.inputs(device, self.dtype)


def parametrize(metafunc: pytest.Metafunc, settings: Settings) -> None:
    """Give a test its `case` or `operator` parameters.

    The mark `cases` says which: `every=True` for all workloads of the session, `timed=True` for
    those worth a time, otherwise a few small ones of each operator that together show its features
    (`cover`); `where` they fulfil it. The mark `operators_with` names parameters that an operator
    must have; with `residual=False`, its queries must not pass through beside the attention. The
    mark `differentiable` leaves out operators without gradients. Operators that quantise inside
    have files of their own: beside all workloads they run the few tests of the mark `quantised`.
    """
    smooth = metafunc.definition.get_closest_marker("differentiable") is not None
    quantised = metafunc.definition.get_closest_marker("quantised") is not None
    if "case" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("cases")
        options = dict(mark.kwargs) if mark is not None else {}
        whole = bool(options.get("timed") or options.get("every"))
        if options.pop("timed", False):
            found = timed(settings)
        else:
            choose = every if options.pop("every", False) else cover
            found = choose(settings, **options)
        found = [c for c in found if c.operator.differentiable or not smooth]
        if not whole:
            found = [c for c in found if quantised or not c.operator.quantised]
        metafunc.parametrize("case", [pytest.param(c, id=c.id, marks=_group(c)) for c in found])
    elif "operator" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("operators_with")
        needed = set(mark.args) if mark is not None else set()
        names = [n for n in settings.operators if needed <= set(OPERATORS[n].signature.parameters)]
        if mark is not None and mark.kwargs.get("residual") is False:
            names = [n for n in names if not OPERATORS[n].residual]
        names = [n for n in names if OPERATORS[n].differentiable or not smooth]
        names = [n for n in names if OPERATORS[n].offsets_arguments]
        names = [n for n in names if quantised or not OPERATORS[n].quantised]
        metafunc.parametrize("operator", [pytest.param(OPERATORS[n], id=n) for n in names])


def _group(case: Case) -> pytest.MarkDecorator:
    # Tests of one case share one run of the implementation, so they belong in one process.
    return pytest.mark.xdist_group(case.id)


def every(settings: Settings, *, where: Callable[[Workload], bool] | None = None) -> list[Case]:
    """Every workload of the session (that fulfils `where`) in each of its dtypes."""
    chosen = [w for w in settings.workloads if where is None or where(w)]
    return [Case(w, d) for w in chosen for d in dtypes_of(w, settings)]


def timed(settings: Settings) -> list[Case]:
    """The workloads named, or those of the session whose shapes are of real use; one dtype."""
    chosen = [w for w in settings.workloads if settings.chosen or w.tags & TIMED_TAGS]
    return [Case(w, d) for w in chosen for d in settings.dtypes or (settings.main_dtype,)]


def dtypes_of(workload: Workload, settings: Settings) -> Sequence[torch.dtype]:
    """Dtypes a workload runs in: those asked for, else all three of training on a GPU.

    On a CPU every workload runs in float32, a quarter of them in float16 and an eighth in bfloat16
    too: half precision is emulated there, and shows the same faults on a few shapes as on all. The
    choice hangs on the name alone, so that it stays when workloads come and go.
    """
    if settings.dtypes:
        return settings.dtypes
    if settings.device.type != "cpu":
        return (torch.bfloat16, torch.float16, torch.float32)
    mark = zlib.crc32(workload.name.encode()) % 8
    extra = {0: (torch.float16,), 3: (torch.bfloat16,), 4: (torch.float16,)}
    return (torch.float32, *extra.get(mark, ()))


def size(workload: Workload) -> int:
    """Rows of a workload, summed over its jagged arguments."""
    return sum(sum(lengths) for lengths in workload.recipe.lengths(workload.seed).values())


def several_sequences(workload: Workload) -> bool:
    """Whether at least two sequences have rows in every jagged argument."""
    lengths = list(workload.recipe.lengths(workload.seed).values())
    return sum(1 for row in zip(*lengths, strict=True) if all(row)) >= 2


def is_plain(workload: Workload) -> bool:
    """Whether nothing but the lengths says which query sees which key (no mask, no bias)."""
    return several_sequences(workload) and not workload.tags & {
        "causal",
        "window",
        "bias",
        "prefix",
    }


def is_adversarial(workload: Workload) -> bool:
    """Whether a workload belongs to the adversarial set."""
    return "adversarial" in workload.tags


def cover(
    settings: Settings,
    *,
    limit: int = 3,
    where: Callable[[Workload], bool] = several_sequences,
) -> list[Case]:
    """At most `limit` small workloads of each operator that show the most features between them.

    where: what a workload must fulfil to be of use.
    """
    found = []
    for operator in settings.operators:
        known = settings.workloads if settings.chosen else workloads.select(purpose="smoke")
        usable = [w for w in known if w.operator == operator and where(w)]
        # Workloads of published shapes differ by their shapes, and show no feature of their own.
        usable = [w for w in usable if not w.tags & {"published", "ladder"}] or usable
        found += [Case(w, settings.main_dtype) for w in _cover_tags(usable, limit)]
    return found


def _cover_tags(usable: Sequence[Workload], limit: int) -> list[Workload]:
    """Greedy set cover of the tags; ties go to the smaller workload, then to the earlier."""
    chosen: list[Workload] = []
    shown: set[str] = set()
    rest = list(usable)
    while rest and len(chosen) < limit:
        # The first has queries of its own in every sequence: most layouts are about them.
        first = [w for w in rest if "dense-query" not in w.tags] if not chosen else []
        best = min(first or rest, key=lambda w: (-len(w.tags - shown), size(w)))
        chosen.append(best)
        shown |= best.tags
        rest.remove(best)
    return chosen
