"""First speed look on a GPU: this project's kernels beside torch's varlen_attn and padded SDPA.

    python benchmarks/compare_attention.py [--out FILE.jsonl] [--rounds 3]

bf16, lengths uniform in [1, L] (fill 0.5) or all L (fill 1). Candidates of a case are interleaved
over several rounds; each sample is one call between CUDA events after a 256 MiB write (L2 flushed);
median and 20/80 % quantiles over all rounds. Region: the public call as a user makes it, tile lists
included; backward is the autograd call with a retained graph. Padded SDPA gets tensors padded
beforehand and no mask. TFLOP/s count visible pairs only: 4 H d a pair forward, 2.5 times that
backward. Our outputs and gradients are judged on a sample of sequences before anything is timed;
a wrong result is reported without a time. One JSON record a line, raw samples included.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from jagbench import impl
from jagbench.accuracy import judge
from jagbench.environment import detect
from jagbench.execution import run
from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS


@dataclass(frozen=True)
class Case:
    """A published comparison shape; `jagged` sides have lengths uniform in [1, longest]."""

    name: str
    batch: int
    heads: int
    head_dim: int
    longest_q: int
    longest_k: int
    jagged_q: bool
    jagged_k: bool


CASES = (
    Case("self 512 fill 0.5", 1152, 4, 128, 512, 512, True, True),
    Case("self 1024 fill 0.5", 1152, 4, 128, 1024, 1024, True, True),
    Case("self 2048 fill 0.5", 1152, 4, 128, 2048, 2048, True, True),
    Case("self 1024 fill 1", 1152, 4, 128, 1024, 1024, False, False),
    Case("cross 1024x256 fill 1", 1152, 4, 128, 1024, 256, False, False),
    Case("cross 1024x64 q fill 0.5", 1152, 4, 128, 1024, 64, True, False),
    Case("PMA 32x2048 kv fill 0.5", 1152, 4, 128, 32, 2048, False, True),
    Case("self 1024 fill 0.5 d64", 1152, 8, 64, 1024, 1024, True, True),
    Case("dense 8192", 8, 16, 128, 8192, 8192, False, False),
)


@dataclass(frozen=True)
class Data:
    """One drawn case: packed tensors, offsets, lengths."""

    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor
    q_offsets: Tensor
    k_offsets: Tensor
    q_lengths: Tensor
    k_lengths: Tensor

    @property
    def pairs(self) -> int:
        """Query-key pairs, all visible."""
        return int((self.q_lengths * self.k_lengths).sum())


def draw(case: Case) -> Data:
    """Random values; lengths from a fixed seed."""
    generator = torch.Generator().manual_seed(2026)

    def lengths(longest: int, jagged: bool) -> Tensor:
        if not jagged:
            return torch.full((case.batch,), longest)
        return torch.randint(1, longest + 1, (case.batch,), generator=generator)

    lq = lengths(case.longest_q, case.jagged_q)
    same = case.jagged_q and case.longest_q == case.longest_k
    lk = lq if same else lengths(case.longest_k, case.jagged_k)
    qo, ko = (torch.cat([lq.new_zeros(1), n.cumsum(0)]).int().cuda() for n in (lq, lk))
    torch.manual_seed(2026)
    q, k, v, g = (
        torch.randn(int(n.sum()), case.heads, case.head_dim, device="cuda", dtype=torch.bfloat16)
        for n in (lq, lk, lk, lq)
    )
    return Data(q, k, v, g, qo, ko, lq, lk)


Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(operator: str, data: Data) -> Call:
    """The public call of one of our operators."""
    if operator == "jagged_attention":
        return lambda q, k, v: impl.jagged_attention(q, k, v, data.q_offsets, data.k_offsets)
    scale = data.q.shape[2] ** -0.5
    return lambda q, k, v: impl.gdpa(
        q, k, v, data.q_offsets, data.k_offsets, activation="fast_gelu", pre_scale=scale
    )


def varlen(case: Case, data: Data) -> Call:
    """torch.nn.attention.varlen (FlashAttention-2)."""
    from torch.nn.attention.varlen import varlen_attn

    return lambda q, k, v: varlen_attn(
        q, k, v, data.q_offsets, data.k_offsets, case.longest_q, case.longest_k
    )


def padded_sdpa(backend: SDPBackend) -> Call:
    """scaled_dot_product_attention on `[batch, heads, longest, head_dim]`, one back end allowed."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return call


def padded_tensors(case: Case) -> tuple[Tensor, ...]:
    """Random padded q, k, v, upstream."""
    return tuple(
        torch.randn(case.batch, case.heads, n, case.head_dim, device="cuda", dtype=torch.bfloat16)
        for n in (case.longest_q, case.longest_k, case.longest_k, case.longest_q)
    )


def problems(operator: str, data: Data) -> list[str]:
    """What is wrong with our outputs and gradients on a sample of sequences; empty if nothing."""
    arguments = {
        "q": data.q, "k": data.k, "v": data.v,
        "q_offsets": data.q_offsets, "k_offsets": data.k_offsets,
    }  # fmt: skip
    options = {}
    if operator == "gdpa":
        options = {"activation": "fast_gelu", "pre_scale": data.q.shape[2] ** -0.5}
    inputs = Inputs(OPERATORS[operator], arguments, options, data.upstream)
    outcome = run(getattr(impl, operator), inputs, backward=True)
    count = inputs.num_sequences
    sample = sorted(random.Random(1).sample(range(count), min(6, count)))
    cut = {
        name: inputs.cut_output(name.removeprefix("grad "), tensor, sample)
        for name, tensor in outcome.items()
    }
    verdicts = judge(inputs.select(sample), cut)
    return [f"{verdict.name}: {verdict.problem}" for verdict in verdicts if not verdict.ok]


def sample_seconds(function: Callable[[], object], flush: Tensor, count: int) -> list[float]:
    """Device seconds of `count` calls."""
    events = []
    for _ in range(count):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) / 1e3 for start, stop in events]


def regions(call: Call, tensors: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    """Forward, and backward of a retained graph."""
    q, k, v, upstream = tensors
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = call(*leaves)

    def forward() -> object:
        with torch.no_grad():
            return call(q, k, v)

    def backward() -> object:
        return torch.autograd.grad(out, leaves, upstream, retain_graph=True)

    return {"forward": forward, "backward": backward}


def candidates(case: Case, data: Data) -> Iterator[tuple[str, str, Call, tuple[Tensor, ...]]]:
    """Name, operator, call and tensors of everything that is timed."""
    packed = (data.q, data.k, data.v, data.upstream)
    yield "jagbench", "jagged_attention", ours("jagged_attention", data), packed
    yield "jagbench", "gdpa", ours("gdpa", data), packed
    yield "torch varlen_attn", "jagged_attention", varlen(case, data), packed
    padded = padded_tensors(case)
    for name, backend in (
        ("padded SDPA flash", SDPBackend.FLASH_ATTENTION),
        ("padded SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
    ):
        yield name, "jagged_attention", padded_sdpa(backend), padded


def measure_case(case: Case, rounds: int, count: int) -> list[dict[str, object]]:
    """Records of one case."""
    data = draw(case)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    flop = 4 * case.heads * case.head_dim * data.pairs
    live: list[tuple[dict[str, object], Callable[[], object], list[float]]] = []
    records: list[dict[str, object]] = []
    for name, operator, call, tensors in candidates(case, data):
        base = {"case": case.name, "implementation": name, "operator": operator}
        found = problems(operator, data) if name == "jagbench" else []
        if found:
            records.append(base | {"outcome": "wrong", "problems": found})
            continue
        try:
            functions = regions(call, tensors)
            for region, function in functions.items():
                function()
                row = base | {
                    "region": region,
                    "flop": flop * (1.0 if region == "forward" else 2.5),
                }
                live.append((row, function, []))
        except Exception as error:  # a peer that cannot run this shape is an outcome, not an end
            records.append(base | {"outcome": f"{type(error).__name__}: {str(error)[:200]}"})
    for _ in range(rounds):
        for _, function, samples in live:
            samples += sample_seconds(function, flush, count)
    for row, _, samples in live:
        low, middle, high = (statistics.quantiles(samples, n=10)[i] for i in (1, 4, 7))
        records.append(
            row | {"outcome": "measured", "median_seconds": middle, "quantile_20": low,
                   "quantile_80": high, "samples_seconds": samples, "shape": asdict(case)}
        )  # fmt: skip
    return records


def main() -> None:
    """Measure every case and append its records to the file asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=5)
    options = parser.parse_args()
    about = asdict(detect("cuda"))
    stamp = datetime.now(UTC).isoformat(timespec="seconds")
    for case in CASES:
        records = measure_case(case, options.rounds, options.samples)
        torch.cuda.empty_cache()
        for record in records:
            record |= {"schema": 1, "date": stamp, "environment": about}
            if options.out:
                with open(options.out, "a") as file:
                    file.write(json.dumps(record) + "\n")
            seconds = record.get("median_seconds")
            rate = (
                f"{record['flop'] / seconds / 1e12:6.0f} TFLOP/s" if seconds else record["outcome"]
            )
            print(
                f"{case.name:26s} {record.get('region', ''):9s} {record['operator']:17s}"
                f" {record['implementation']:18s} {rate} {record.get('problems', '')}",
                flush=True,
            )


if __name__ == "__main__":
    main()
