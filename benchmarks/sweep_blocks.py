"""Sweep tiles and runs of block attention and rotary on the GPU at hand.

    python benchmarks/sweep_tiles.py blocks [--out FILE.jsonl] [--workers 12] [--kernels block ...]

Lengths of the two published shapes; values are random. Every compiled form is first judged on a few
sequences against the truth, in parallel processes that fill Triton's cache; then each is timed with
several lengths of a program's run. GB/s count the least traffic, each byte once; share is of the
copy bandwidth measured in the same process. A table for `impl/kernels/tuning.py` and the constants
beside it, not a record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from jagbench.inputs import Inputs

#: Kernel -> the workload whose lengths, heads and table it is swept on.
WORKLOADS = {
    "block": "block_attention-l2000-fill0.7",
    "block_gradient": "block_attention-l2000-fill0.7",
    "block_rotary": "block_attention-rotary-l2000-1735537-tokens",
    "block_rotary_gradient": "block_attention-rotary-l2000-1735537-tokens",
    "rotary": "rotary-l2000-1735537-tokens",
}
#: Programs a multiprocessor before runs grow, and the longest run.
RUNS = ((16, 8), (16, 32), (8, 128), (4, 1024), (2, 1024), (1, 1024))


@dataclass(frozen=True)
class Candidate:
    """A kernel's compiled form: tiles as `TileConfig` has them; of rotary, elements and warps."""

    kernel: str
    tiles: str


@dataclass(frozen=True)
class Trial:
    """A candidate and how long a program's run of blocks may be; None for rotary."""

    candidate: Candidate
    run: tuple[int, int] | None


def candidates(kernels: Sequence[str]) -> list[Candidate]:
    """What is tried."""
    found = []
    for kernel in (k for k in kernels if k != "rotary"):
        whole = itertools.product((64,), (4, 8), (1, 2, 3))
        halves = itertools.product((32,), (4, 8), (1,)) if "gradient" in kernel else ()
        for block_q, warps, stages in (*whole, *halves):
            found.append(Candidate(kernel, f"{block_q}x64 warps {warps} stages {stages}"))
    if "rotary" in kernels:
        for elements, warps in itertools.product((2048, 4096, 8192), (2, 4, 8)):
            found.append(Candidate("rotary", f"{elements} elements warps {warps}"))
    return found


def choose(candidate: Candidate, run: tuple[int, int] | None) -> None:
    """Make the kernels of this process take a candidate."""
    from jagbench.impl.kernels import block_attention_launch as launch
    from jagbench.impl.kernels import rotary as rotary_module
    from jagbench.impl.kernels.tuning import pin_tiles

    if candidate.kernel == "rotary":
        elements, _, _, warps = candidate.tiles.split()
        rotary_module._TILE, rotary_module._WARPS = int(elements), int(warps)
        return
    pin_tiles({f"{candidate.kernel}/128": candidate.tiles})
    if run is not None:
        launch._WAVES, launch._LONGEST_RUN = run


def taken(candidate: Candidate) -> str | None:
    """Why the kernels did not run as the candidate says; None if they did."""
    from jagbench.impl.kernels.tuning import take_used

    found = take_used().get(candidate.kernel)
    if candidate.kernel != "rotary" and found != candidate.tiles:
        return f"does not fit: {found} ran"
    return None


def inputs_of(kernel: str, batch: int | None = None) -> Inputs:
    """Random inputs of a kernel's workload on the GPU, or of its first sequences alone."""
    from jagbench.reference import OPERATORS
    from jagbench.reference.rotary import position_table
    from jagbench.workloads import CATALOGUE

    workload = CATALOGUE[WORKLOADS[kernel]]
    recipe: Any = workload.recipe
    lengths = recipe.lengths(workload.seed)["offsets"][:batch]
    offsets = torch.tensor([0, *lengths]).cumsum(0).cuda()
    shape = (sum(lengths), recipe.heads, recipe.qk_dim)
    names = ("x", "g") if kernel == "rotary" else ("q", "k", "v", "g")
    values = {n: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for n in names}
    upstream = values.pop("g")
    arguments = {**values, "offsets": offsets}
    if "rotary" in kernel:
        table = position_table(2000, recipe.qk_dim).to("cuda", torch.float32)
        arguments["table" if kernel == "rotary" else "rotary"] = table
    return Inputs(OPERATORS[workload.operator], arguments, {}, upstream)


def _portable(inputs: Inputs) -> Callable[..., Any]:
    """The operator on the kernels whose tiles can be chosen; rotary has no others."""
    from jagbench import impl

    function: Callable[..., Any] = getattr(impl, inputs.operator.name)
    if inputs.operator.name == "rotary":
        return function
    return partial(function, schedule="portable")


def call_of(candidate: Candidate, inputs: Inputs) -> Callable[[], object]:
    """The kernel alone: a forward, or a backward whose forward has run."""
    function = _portable(inputs)
    if "gradient" not in candidate.kernel:
        return lambda: inputs.call(function)
    leaves = {n: inputs.tensors()[n].detach().requires_grad_() for n in "qkv"}
    out = inputs.replace(**leaves).call(function)
    wanted = list(leaves.values())
    return lambda: torch.autograd.grad(out, wanted, inputs.upstream, retain_graph=True)


def judge_one(candidate: Candidate) -> str | None:
    """Compile by running on three sequences, and judge; what is wrong, or None."""
    from jagbench.accuracy import judge
    from jagbench.execution import run

    try:
        choose(candidate, RUNS[0])
        inputs = inputs_of(candidate.kernel, batch=3)
        function = _portable(inputs)
        verdicts = judge(inputs, run(function, inputs, backward=True))
        wrong = [f"{each.name}: {each.problem}" for each in verdicts if not each.ok]
        return "WRONG: " + "; ".join(wrong) if wrong else taken(candidate)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"


def copy_rate() -> float:
    """Bytes a second of a copy, read plus written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), 9)


def seconds_of(function: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, L2 flushed before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    function()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        times.append((start, stop))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in times)[repeats // 2] / 1e3


def time_all(
    kernels: Sequence[str], broken: dict[Candidate, str | None], rate: float, repeats: int
) -> list[dict[str, object]]:
    """A row a trial: seconds, GB/s, share of the copy, or what is wrong."""
    from jagbench.work import work

    rows: list[dict[str, object]] = []
    for kernel in kernels:
        inputs = inputs_of(kernel)
        region = "backward" if "gradient" in kernel else "forward"
        moved = work(inputs, region).bytes_moved  # type: ignore[arg-type]
        for candidate in (c for c in broken if c.kernel == kernel):
            for run in (None,) if kernel == "rotary" else RUNS:
                row: dict[str, object] = {**asdict(candidate), "run": run}
                if broken[candidate] is None:
                    choose(candidate, run)
                    seconds = seconds_of(call_of(candidate, inputs), repeats)
                    speed = moved / seconds
                    row |= {"seconds": seconds, "gbytes": speed / 1e9, "share": speed / rate}
                else:
                    row["error"] = broken[candidate]
                rows.append(row)
        del inputs
        torch.cuda.empty_cache()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, judge, time, and print the fastest of every kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kernels", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--top", type=int, default=8)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    tried = candidates(options.kernels)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        broken = dict(zip(tried, pool.map(judge_one, tried, chunksize=1), strict=True))
    for candidate, why in broken.items():
        if why is not None:
            print(f"{candidate.kernel} {candidate.tiles}: {why}", file=sys.stderr)
    rate = copy_rate()
    print(
        f"copy {rate / 1e12:.2f} TB/s; compiled after {time.monotonic() - began:.0f} s", flush=True
    )
    rows = time_all(options.kernels, broken, rate, options.repeats)
    if options.out:
        with open(options.out, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    timed = sorted((r for r in rows if "seconds" in r), key=lambda r: r["seconds"])  # type: ignore[arg-type,return-value]
    for kernel in options.kernels:
        print(f"\n{kernel} ({WORKLOADS[kernel]})")
        for row in [r for r in timed if r["kernel"] == kernel][: options.top]:
            print(
                f"  {row['tiles']!s:28} run {row['run']!s:12} {row['seconds'] * 1e3:7.3f} ms "  # type: ignore[operator]
                f"{row['gbytes']:6.0f} GB/s {row['share']:6.1%}"
            )
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
