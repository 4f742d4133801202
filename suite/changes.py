"""Changes to a call that must not change its result, or change it in a known way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jagbench.inputs import Inputs
from jagbench.spec import PAIRS, ROWS, SHARED

Layout = Callable[[Tensor], Tensor]


def layout_of(inputs: Inputs, name: str) -> str:
    """Layout of an argument, an output or "upstream"."""
    operator = inputs.operator
    if name == "upstream":
        name = "out"
    if name not in operator.output_layout:
        return inputs.layout_of(name)
    layout = operator.output_layout[name]
    if layout == ROWS:
        return SHARED
    # The outputs of a dense query have a leading batch dim and no padding.
    return SHARED if inputs.arguments.get(layout, 0) is None else layout


def with_padding(inputs: Inputs, rows: int, fill: float) -> Inputs:
    """`rows` rows of `fill` behind the last offset of every jagged float argument."""

    def pad(name: str, tensor: Tensor) -> Tensor:
        if name in inputs.operator.offsets_arguments or layout_of(inputs, name) in (PAIRS, SHARED):
            return tensor
        return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), fill)])

    return inputs.map(pad)


def in_sequence(inputs: Inputs, sequence: int, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The call with the float values of one sequence passed through `change`, in every argument."""

    def edit(name: str, tensor: Tensor) -> Tensor:
        layout = layout_of(inputs, name)
        dense_output = name == "upstream" and layout == SHARED
        if not tensor.is_floating_point() or (layout == SHARED and not dense_output):
            return tensor
        start, stop = (sequence, sequence + 1) if dense_output else bounds(inputs, layout, sequence)
        edited = tensor.clone()
        edited[start:stop] = change(tensor[start:stop])
        return edited

    return inputs.map(edit)


def bounds(inputs: Inputs, layout: str, sequence: int) -> tuple[int, int]:
    """First row and end of a sequence under a layout."""
    if layout == PAIRS:
        limits = inputs.pair_bounds()
    else:
        offsets = inputs.offsets(layout)
        assert offsets is not None
        limits = offsets.tolist()
    return limits[sequence], limits[sequence + 1]


def floats(inputs: Inputs, change: Layout, *, names: Sequence[str] | None = None) -> Inputs:
    """The call with its float tensors (of the given names) passed through `change`."""

    def edit(name: str, tensor: Tensor) -> Tensor:
        wanted = tensor.is_floating_point() and (names is None or name in names)
        return change(tensor) if wanted else tensor

    return inputs.map(edit)


def packed(inputs: Inputs) -> tuple[str, ...]:
    """Names of the arguments of values that have rows of their own (q, k and v; x)."""
    operator, given = inputs.operator, inputs.tensors()
    # Where there are gradients, these are the arguments that have one.
    names = [n for n in operator.differentiable or operator.layout if n in given]
    return tuple(n for n in names if operator.layout[n] in operator.offsets_arguments)


def transposed(x: Tensor) -> Tensor:
    """The same values, stored with the first two dims exchanged."""
    if x.dim() < 2:
        return x
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def sliced(x: Tensor) -> Tensor:
    """The same values, as a slice of a wider tensor whose other columns are NaN."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 8), math.nan)
    wide[..., 8 : 8 + x.shape[-1]] = x
    return wide[..., 8 : 8 + x.shape[-1]]


def strided(x: Tensor) -> Tensor:
    """The same values, every second element of a longer last dim, the others NaN."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
    wide[..., ::2] = x
    return wide[..., ::2]


def expanded(x: Tensor) -> Tensor:
    """The first head of x, expanded over all heads without a copy."""
    return x if x.dim() < 3 else x.narrow(-2, 0, 1).expand(x.shape)


def behind(offsets: Tensor) -> Tensor:
    """The same offsets, as a slice of a longer tensor whose next elements are huge."""
    huge = torch.full(
        (8,), torch.iinfo(torch.int32).max, dtype=offsets.dtype, device=offsets.device
    )
    return torch.cat([offsets, huge])[: offsets.numel()]


def column(offsets: Tensor) -> Tensor:
    """The same offsets, as a column of a matrix; read as if contiguous, each is there twice."""
    return torch.stack([offsets, offsets], 1)[:, 0]


def permute_keys(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """The keys of every sequence in another order, with their values (no mask, no bias)."""
    layout = inputs.layout_of("k")
    offsets = inputs.offsets(layout)
    assert offsets is not None
    order = [torch.arange(int(offsets[-1]), inputs.tensors()["k"].shape[0])]
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        order.insert(-1, start + torch.randperm(stop - start, generator=generator))
    index = torch.cat(order).to(inputs.device)
    return floats(inputs, lambda x: x[index], names=("k", "v"))


def duplicate_keys(inputs: Inputs) -> Inputs:
    """Every key and value twice in its sequence (no mask, no bias)."""
    layout = inputs.layout_of("k")
    offsets = inputs.offsets(layout)
    assert offsets is not None
    total = int(offsets[-1])

    def edit(name: str, tensor: Tensor) -> Tensor:
        if name == layout:
            return tensor * 2
        if name in ("k", "v"):
            return tensor[:total].repeat_interleave(2, 0)
        return tensor

    return inputs.map(edit)
