"""What there is to measure, and how much work a region asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from jagbench import result
from jagbench.implementation import Implementation
from jagbench.inputs import Inputs
from jagbench.spec import ROWS
from jagbench.workload import Workload


def cases(
    implementation: Implementation,
    workload: Workload,
    dtype: torch.dtype,
    regions: Sequence[result.Region] = ("forward", "backward"),
    modes: Sequence[result.Mode] = ("cold", "steady"),
) -> Iterator[result.Case]:
    """What there is to measure of an implementation on a workload.

    Of an operator without gradients the forward alone. Where the implementation offers `prepare`,
    each region is measured with and without it, and the
    preparation alone beside the forward.
    """
    preparations: tuple[result.Preparation, ...] = ("none",)
    if callable(getattr(implementation.namespace, "prepare", None)):
        preparations = ("included", "excluded", "alone")
    for region in regions:
        if region != "forward" and not workload.differentiable:
            continue
        for preparation in preparations:
            if preparation == "alone" and region != "forward":
                continue
            for mode in modes:
                yield result.Case(
                    operator=workload.operator,
                    workload=workload.name,
                    digest=workload.digest,
                    dtype=str(dtype).removeprefix("torch."),
                    region=region,
                    mode=mode,
                    preparation=preparation,
                )


def work(inputs: Inputs, region: result.Region) -> result.Work:
    """FLOP, least bytes, sequences and tokens of a region.

    Bytes of a backward: every argument that it needs and the upstream gradient read, every gradient
    written; of both passes together: arguments and upstream read once, output and gradients written
    once. Rows past the last offset count nowhere; a rotary table by position counts whole. Tokens:
    rows of the longest jagged or dense argument.
    """
    operator = inputs.operator
    forward = operator.flops(inputs)
    moved = operator.bytes_moved(inputs)
    tensors = inputs.tensors()
    used = {n: _used_bytes(inputs, t, inputs.layout_of(n)) for n, t in tensors.items()}
    gradients = sum(used[name] for name in operator.differentiable if name in used)
    upstream = 0
    if inputs.upstream is not None:
        upstream = _used_bytes(inputs, inputs.upstream, operator.output_layout["out"])
    arguments = sum(size for n, size in used.items() if n not in operator.unread_in_backward)
    factors = {"forward": (1.0, 1.0)}
    backward = operator.backward_flops_ratio, operator.model_backward_flops_ratio
    factors["backward"] = backward
    factors["forward_backward"] = factors["step"] = (1 + backward[0], 1 + backward[1])
    least = {
        "forward": moved,
        "backward": arguments + upstream + gradients,
        "forward_backward": moved + upstream + gradients,
    }
    kernel, model = factors[region]
    rows = (*operator.offsets_arguments, ROWS)
    packed = {n for n, v in operator.layout.items() if v in rows}
    tokens = max((int(t.shape[0]) for n, t in tensors.items() if n in packed), default=0)
    return result.Work(
        flop=round(forward * kernel),
        model_flop=round(forward * model),
        bytes_moved=least.get(region, least["forward_backward"]),
        sequences=inputs.num_sequences,
        tokens=tokens,
    )


def _used_bytes(inputs: Inputs, tensor: Tensor, layout: str) -> int:
    """Bytes of a tensor's rows up to the last offset of its layout; of all where it has none."""
    packs = layout in inputs.operator.offsets_arguments
    offsets = inputs.offsets(layout) if packs else None
    rows = tensor.shape[0] if offsets is None else int(offsets[-1])
    return rows * tensor[:1].numel() * tensor.element_size()
