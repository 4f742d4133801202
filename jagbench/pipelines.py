"""Whether a copy that runs ahead overwrites what is still read: two kinds, seen in lowered code.

An operand of a product in flight (`overwritten_operands`). Triton 3.6 and 3.7 give a tile of a
software-pipelined loop a buffer too few where it is used twice, by a wgmma from shared memory and
by registers (a sum beside the product): the product of a step may still run when the copy for a
later step lands in its operand. Results then differ between repeats. Nothing is reported.

A tile on its way to registers (`early_releases`). A load from shared memory is complete when its
values are used; an arrival at an mbarrier does not wait for it, and the copy that the arrival lets
go is not ordered behind it. On an H200 a few rows in 10^5 of a kernel that did so were wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_ALLOCATION = re.compile(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x")
_VIEW = re.compile(r"(%\S+) = ttg\.memdesc_(?:index|trans|subslice|reshape)\s+(%[\w#]+)")
_COPY = re.compile(r"ttn?g\.async_(?:tma_)?copy_global_to_local\s+(.*)")
_PRODUCT = re.compile(r"ttng\.warp_group_dot (%[\w#]+), (%[\w#]+),.*isAsync = true")
_LOAD = re.compile(r"(%\S+) = ttg\.local_load ")
_ARRIVAL = re.compile(r"ttng\.arrive_barrier ")
_END = re.compile(r"^\s*(?:\}|partition\d|default\b|tt\.func\b)")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")


def overwritten_operands(ttgir: str) -> list[str]:
    """What is wrong with the pipelined loops of a kernel in Triton's GPU dialect, in words.

    An operand needs a buffer more than copies are issued before its loop, if the loop leaves a
    product in flight.
    """
    lines = ttgir.splitlines()
    buffers = {m[1]: int(m[2]) for line in lines if (m := _ALLOCATION.search(line))}
    owner = _owners(lines, buffers)
    copies = [
        (number, owner[name])
        for number, line in enumerate(lines)
        if (found := _COPY.search(line))
        for name in re.findall(r"%[\w#]+", found[1])
        if name in owner
    ]
    problems = []
    loops = list(_loops(lines))
    for start, stop in loops:
        body = lines[start:stop]
        if not any((wait := _WAIT.search(line)) and int(wait[1]) > 0 for line in body):
            continue
        read = {owner.get(n) for line in body if (m := _PRODUCT.search(line)) for n in m.groups()}
        for name in sorted({who for at, who in copies if start <= at < stop} & (read - {None})):
            ahead = sum(
                who == name and at < start and not any(a <= at < b for a, b in loops)
                for at, who in copies
            )
            if buffers[name] <= ahead:
                problems.append(
                    f"{name}: {buffers[name]} buffers, copies {ahead} steps ahead, and a product "
                    "in flight reads it: a tile used by a product and by registers?"
                )
    return problems


def early_releases(ttgir: str) -> list[str]:
    """What a kernel in Triton's GPU dialect loads but does not use before the next arrival.

    A use means any: whether it still stands before the arrival in machine code is not seen here.
    """
    problems: list[str] = []
    loads: dict[str, int] = {}
    for number, line in enumerate(ttgir.splitlines(), 1):
        for name in [n for n in loads if re.search(re.escape(n) + r"(?![\w#])", line)]:
            del loads[name]
        if found := _LOAD.search(line):
            loads[found[1]] = number
        elif _ARRIVAL.search(line):
            problems += [
                f"{name}: loaded on line {at}, not used before the arrival on line {number}, which "
                "may let the next copy overwrite it"
                for name, at in loads.items()
            ]
            loads.clear()
        elif _END.search(line):
            loads.clear()
    return problems


def _owners(lines: Sequence[str], buffers: dict[str, int]) -> dict[str, str]:
    """Name of a view -> its allocation."""
    owner = {name: name for name in buffers}
    for line in lines:
        if (view := _VIEW.search(line)) and view[2] in owner:
            owner[view[1]] = owner[view[2]]
    return owner


def _loops(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """First line and the one behind the last of every innermost loop."""
    open_loops: list[tuple[int, int]] = []
    innermost = -1
    depth = 0
    for number, line in enumerate(lines):
        if "scf.for" in line and line.rstrip().split(" loc(")[0].endswith("{"):
            open_loops.append((number, depth))
            innermost = number
        depth += line.count("{") - line.count("}")
        if open_loops and depth <= open_loops[-1][1]:
            start, _ = open_loops.pop()
            if start == innermost:
                yield start, number + 1
