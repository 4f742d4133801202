"""Sweep tile sizes of the portable kernels on the GPU at hand and print the fastest of each.

    python benchmarks/sweep_tiles.py [--out FILE.jsonl] [--workers 12]
    python benchmarks/sweep_tiles.py blocks [...]     block attention and rotary (sweep_blocks.py)

Every configuration is compiled first, in parallel processes, into Triton's own cache; then all are
timed in one process: CUDA events, L2 flushed before each call, median. Useful TFLOP/s count
visible pairs only (4 H d a pair forward; 2 and 3 of the backward's 5 products for dQ and dK/dV).
A table for `impl/kernels/tuning.py`, not a record: figures that are kept come from `results/`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

#: Batch, heads, head_dim, longest query, longest key, query fill < 1, key fill < 1.
Shape = tuple[int, int, int, int, int, bool, bool]
#: q, k, v, upstream gradient, query and key offsets, query-key pairs.
Data = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]

SHAPES: dict[str, Shape] = {
    "self512_jagged": (1152, 4, 128, 512, 512, True, True),
    "self1024_jagged": (1152, 4, 128, 1024, 1024, True, True),
    "self2048_jagged": (1152, 4, 128, 2048, 2048, True, True),
    "self1024_dense": (1152, 4, 128, 1024, 1024, False, False),
    "cross1024x256": (1152, 4, 128, 1024, 256, False, False),
    "cross1024x128": (1152, 4, 128, 1024, 128, False, False),
    "cross1024x64": (1152, 4, 128, 1024, 64, True, False),
    "pooling32x2048": (1152, 4, 128, 32, 2048, False, True),
    "self1024_jagged_d64": (1152, 8, 64, 1024, 1024, True, True),
    "self1024_jagged_d256": (384, 2, 256, 1024, 1024, True, True),
}


@dataclass(frozen=True)
class Candidate:
    """One kernel with one configuration; `variant` is a generation or the name of an activation."""

    kernel: str
    variant: str
    tiles: tuple[int, int, int, int]


def candidates() -> list[Candidate]:
    """What is tried; products of small sets, cut to what fits registers and shared memory."""
    forward = [
        (64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 4, 3),
        (128, 32, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2),
    ]  # fmt: skip
    short = [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2)]
    query = [
        (64, 32, 4, 3), (64, 32, 4, 2), (64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 8, 2),
        (128, 32, 8, 3),
    ]  # fmt: skip
    key_value = [
        (32, 64, 4, 3), (32, 64, 4, 2), (64, 64, 4, 2), (64, 128, 8, 3), (64, 128, 8, 2),
        (32, 128, 8, 3), (32, 128, 8, 2), (16, 64, 4, 3),
    ]  # fmt: skip
    found = [Candidate("softmax", v, t) for v in ("v1", "v2", "v3") for t in forward]
    found += [Candidate("gdpa", "walk", t) for t in forward]
    found += [Candidate(k, "short", t) for k in ("softmax", "gdpa") for t in short]
    found += [Candidate("query_gradient", a, t) for a in ("softmax", "gdpa") for t in query]
    found += [Candidate("key_value_gradient", a, t) for a in ("softmax", "gdpa") for t in key_value]
    return found


def draw(shape: Shape, batch: int | None = None) -> Data:
    """Random q, k, v, upstream gradient and offsets of a shape, and its query-key pairs."""
    b, heads, dim, longest_q, longest_k, jagged_q, jagged_k = shape
    b = batch or b
    generator = torch.Generator().manual_seed(7)

    def lengths(longest: int, jagged: bool) -> torch.Tensor:
        if not jagged:
            return torch.full((b,), longest)
        return torch.randint(1, longest + 1, (b,), generator=generator)

    lq = lengths(longest_q, jagged_q)
    lk = lq if longest_q == longest_k and jagged_q else lengths(longest_k, jagged_k)
    q_offsets, k_offsets = (
        torch.cat([torch.zeros(1, dtype=torch.int64), x.cumsum(0)]).cuda() for x in (lq, lk)
    )
    q, k, v, g = (
        torch.randn(int(n.sum()), heads, dim, device="cuda", dtype=torch.bfloat16)
        for n in (lq, lk, lk, lq)
    )
    return q, k, v, g, q_offsets, k_offsets, int((lq * lk).sum())


def call(candidate: Candidate, data: Data) -> Callable[[], object]:
    """The call to time, with everything it does not measure done beforehand."""
    from jagbench.impl.kernels import attention_launch as launch
    from jagbench.impl.kernels import gdpa as gdpa_module
    from jagbench.impl.kernels.activations import ACTIVATION_IDS, SOFTMAX
    from jagbench.impl.kernels.arguments import check_arguments
    from jagbench.impl.kernels.jagged_attention_launch import LOG2E, launch_forward
    from jagbench.impl.kernels.mask import Mask
    from jagbench.impl.kernels.tuning import Schedule, TileConfig

    q, k, v, g, q_offsets, k_offsets, _ = data
    tiles = TileConfig(*candidate.tiles)
    geometry = check_arguments("sweep", q, k, v, q_offsets, k_offsets)
    mask = Mask(-1, -1, False)
    if candidate.kernel == "softmax" and candidate.variant == "short":
        plan = Schedule("v2", forward=tiles)
        return lambda: launch_forward(
            q, k, v, q_offsets, k_offsets, geometry, mask, launch.Bias(), 0.1, plan, max_k_len=64
        )
    if candidate.kernel == "softmax":
        plan = Schedule(candidate.variant, forward=tiles)
        return lambda: launch_forward(
            q, k, v, q_offsets, k_offsets, geometry, mask, launch.Bias(), q.shape[2] ** -0.5, plan,
            max_k_len=1 << 30,
        )  # fmt: skip
    if candidate.kernel == "gdpa":
        act, scales = [ACTIVATION_IDS["fast_gelu"]], (q.shape[2] ** -0.5, 1.0)
        if candidate.variant == "short":
            resident = 1 if int(k_offsets.diff().max()) <= tiles.block_k else 2
            return lambda: gdpa_module._launch_short_keys(
                q, k, v, q_offsets, k_offsets, geometry, mask, tiles, act, scales, resident
            )
        return lambda: gdpa_module._launch_walk(
            q, k, v, q_offsets, k_offsets, geometry, mask, tiles, act, scales, False
        )
    softmax = candidate.variant != "gdpa"
    out, lse, _ = launch_forward(
        q, k, v, q_offsets, k_offsets, geometry, mask, launch.Bias(), q.shape[2] ** -0.5, Schedule()
    )
    for_query = candidate.kernel == "query_gradient"
    backward = launch.BackwardCall(
        geometry=geometry, mask=mask,
        schedule=Schedule(query_gradient=tiles, key_value_gradient=tiles),
        activation=SOFTMAX.value if softmax else ACTIVATION_IDS["fast_gelu"],
        score_scale=q.shape[2] ** -0.5 * (LOG2E if softmax else 1.0),
        grad_scale=q.shape[2] ** -0.5,
        statistics=launch.row_statistics(out, g, lse, None, q_offsets, k_offsets, geometry),
        needs=launch.Needs(for_query, not for_query),
    )  # fmt: skip
    return lambda: launch.attention_backward(q, k, v, g, q_offsets, k_offsets, backward)


def compile_one(job: tuple[Candidate, str]) -> str | None:
    """Compile by running on a few sequences; the message if it fails."""
    candidate, name = job
    try:
        call(candidate, draw(SHAPES[name], batch=3))()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return None


def fits(candidate: Candidate, name: str) -> bool:
    """Pairs worth trying: the short-key kernel needs short keys."""
    longest = SHAPES[name][4]
    if candidate.variant == "short":
        return longest <= (64 if candidate.kernel == "softmax" else 2 * candidate.tiles[1])
    return True


def measure(function: Callable[[], object], flush: torch.Tensor, repeats: int) -> float:
    """Median seconds of a call."""
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


SHARE = {"softmax": 1.0, "gdpa": 1.0, "query_gradient": 1.0, "key_value_gradient": 1.5}


def main() -> None:
    """Compile, time and print what the command line asks for."""
    if sys.argv[1:2] == ["blocks"]:
        from sweep_blocks import main as sweep_blocks

        sweep_blocks(sys.argv[2:])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--top", type=int, default=3)
    options = parser.parse_args()
    jobs = [(c, n) for n, c in itertools.product(options.shapes, candidates()) if fits(c, n)]
    # One compiled form per (candidate, head dim): shapes differ in counts only.
    forms = {(c, SHAPES[n][2]): (c, n) for c, n in reversed(jobs)}
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        outcomes = pool.map(compile_one, forms.values(), chunksize=1)
    failed = dict(zip(forms, outcomes, strict=True))
    broken = {key: why for key, why in failed.items() if why}
    print(f"{len(forms)} forms, {len(broken)} do not run", file=sys.stderr, flush=True)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    rows = []
    for name in options.shapes:
        data = draw(SHAPES[name])
        flop = 4 * SHAPES[name][1] * SHAPES[name][2] * data[-1]
        for candidate in (c for c, n in jobs if n == name):
            why = failed[candidate, SHAPES[name][2]]
            row = {"shape": name, **asdict(candidate)}
            if why is None:
                try:
                    seconds = measure(call(candidate, data), flush, options.repeats)
                except Exception as error:  # out of resources in a form this shape alone needs
                    rows.append(row | {"error": f"{type(error).__name__}: {str(error)[:120]}"})
                    continue
                share = SHARE[candidate.kernel]
                row |= {"seconds": seconds, "tflops": flop * share / seconds / 1e12}
            else:
                row |= {"error": why}
            rows.append(row)
        del data
        torch.cuda.empty_cache()
    if options.out:
        with open(options.out, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    groups = itertools.groupby(
        sorted(rows, key=lambda r: (r["shape"], r["kernel"], r["variant"], -r.get("tflops", 0))),
        key=lambda r: (r["shape"], r["kernel"], r["variant"]),
    )
    for group, members in groups:
        best = [f"{r['tiles']}={r['tflops']:.0f}" for r in members if "tflops" in r][: options.top]
        print(*group, *best)


if __name__ == "__main__":
    main()
