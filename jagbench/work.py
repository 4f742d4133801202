"""What there is to measure, and how much work a region asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from jagbench import result
from jagbench.implementation import Implementation
from jagbench.inputs import Inputs
from jagbench.workload import Workload


def cases(
    implementation: Implementation,
    workload: Workload,
    dtype: torch.dtype,
    regions: Sequence[result.Region] = ("forward", "backward"),
    modes: Sequence[result.Mode] = ("cold", "steady"),
) -> Iterator[result.Case]:
    """What there is to measure of an implementation on a workload.

    Where the implementation offers `prepare`, each region is measured with and without it, and the
    preparation alone beside the forward.
    """
    preparations: tuple[result.Preparation, ...] = ("none",)
    if callable(getattr(implementation.namespace, "prepare", None)):
        preparations = ("included", "excluded", "alone")
    for region in regions:
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
    once. Tokens: rows of the longest jagged or dense argument.
    """
    operator = inputs.operator
    forward = operator.flops(inputs)
    moved = operator.bytes_moved(inputs)
    tensors = inputs.tensors()
    gradients = sum(tensors[name].nbytes for name in operator.differentiable if name in tensors)
    upstream = inputs.upstream.nbytes if inputs.upstream is not None else 0
    needed = (t for n, t in tensors.items() if n not in operator.unread_in_backward)
    arguments = sum(tensor.nbytes for tensor in needed)
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
    packed = {n for n, v in operator.layout.items() if v in operator.offsets_arguments}
    tokens = max((int(t.shape[0]) for n, t in tensors.items() if n in packed), default=0)
    return result.Work(
        flop=round(forward * kernel),
        model_flop=round(forward * model),
        bytes_moved=least.get(region, least["forward_backward"]),
        sequences=inputs.num_sequences,
        tokens=tokens,
    )
