"""One call of an operator as data: arguments, options, upstream gradient; and how to cut it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jagbench.spec import PAIRS, PLACED, ROWS, SHARED, Operator


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call.

    operator: the operator called.
    arguments: in the order of the signature: tensors, None, or records of tensors (`BucketedBias`).
    options: plain keyword values (scale, causal, window, activation, ...), only those that are set.
    upstream: gradient of the output `out`, of its shape and dtype; None where no backward is run.
    """

    operator: Operator
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    upstream: Tensor | None = None

    # -- views ---------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor argument; the fields of a record are named by a dotted path."""
        return dict(_leaves(self.arguments))

    def offsets(self, name: str) -> Tensor | None:
        """Offsets argument by name; None where the operator is called without it."""
        value = self.arguments[name]
        assert value is None or isinstance(value, Tensor)
        return value

    def lengths(self, name: str) -> Tensor | None:
        """Lengths `[batch]` under an offsets argument; None where that is None."""
        offsets = self.offsets(name)
        return None if offsets is None else offsets.diff()

    @property
    def is_jagged(self) -> bool:
        """Whether the call has offsets."""
        return any(self.offsets(name) is not None for name in self.operator.offsets_arguments)

    @property
    def num_sequences(self) -> int:
        """Sequences in the batch; a call without offsets is one."""
        for name in self.operator.offsets_arguments:
            offsets = self.offsets(name)
            if offsets is not None:
                return int(offsets.numel()) - 1
        return 1

    @property
    def dtype(self) -> torch.dtype:
        """Floating dtype of the call: of its first floating argument, else its option `dtype`."""
        floats = (t.dtype for t in self.tensors().values() if t.is_floating_point())
        found: torch.dtype | None = next(floats, self.options.get("dtype"))
        if found is None:
            raise ValueError(f"{self.operator.name}: no argument and no option says a float dtype")
        return found

    @property
    def device(self) -> torch.device:
        """Device of the call."""
        return next(iter(self.tensors().values())).device

    def layout_of(self, name: str) -> str:
        """Offsets argument that packs a tensor's rows, `SHARED` or `PAIRS`, as called here."""
        offsets = self.operator.layout.get(name, SHARED)
        if offsets == ROWS:
            return SHARED
        if offsets not in (SHARED, PAIRS) and self.arguments[offsets] is None:
            return SHARED
        return offsets

    # -- calls ---------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], **extra: Any) -> Any:
        """Call an implementation's function with these arguments; `extra` overrides options."""
        positional = {k: v for k, v in self.arguments.items() if k not in _keyword_only(self)}
        keywords = {k: v for k, v in self.arguments.items() if k in _keyword_only(self)}
        return function(*positional.values(), **keywords, **{**self.options, **extra})

    # -- changes -------------------------------------------------------------------------------

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Inputs:
        """The same call with every tensor argument (and "upstream") passed through `change`."""
        arguments = {k: _map_leaf(k, v, change) for k, v in self.arguments.items()}
        upstream = None if self.upstream is None else change("upstream", self.upstream)
        return dataclasses.replace(self, arguments=arguments, upstream=upstream)

    def to(
        self, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Inputs:
        """Floating tensors (and the option `dtype`) cast to `dtype`, all moved to `device`."""

        def move(_: str, tensor: Tensor) -> Tensor:
            target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            return tensor.to(device=device or tensor.device, dtype=target)

        moved = self.map(move)
        return moved.with_options(dtype=dtype) if dtype and "dtype" in self.options else moved

    def clone(self) -> Inputs:
        """Deep copy of every tensor; strides are kept."""
        return self.map(lambda _, tensor: tensor.clone())

    def replace(self, **tensors: Any) -> Inputs:
        """The same call with some arguments replaced (top-level names only)."""
        unknown = set(tensors) - set(self.arguments)
        if unknown:
            raise ValueError(f"{self.operator.name} has no arguments {sorted(unknown)}")
        return dataclasses.replace(self, arguments={**self.arguments, **tensors})

    def with_options(self, **options: Any) -> Inputs:
        """The same call with some options set."""
        return dataclasses.replace(self, options={**self.options, **options})

    def select(self, sequences: Sequence[int]) -> Inputs:
        """The call on some sequences of the batch, in the given order (repeats allowed).

        Padding rows past the last offset are dropped; offsets keep their dtype.
        """
        bounds = {n: _bounds(self.offsets(n)) for n in self.operator.offsets_arguments}
        rows = {n: _gather(b, sequences, self.device) for n, b in bounds.items() if b is not None}

        def cut(name: str, tensor: Tensor) -> Tensor:
            if name in bounds:
                return _offsets_of(bounds[name], sequences, tensor)
            if name == "upstream":
                return self._cut_output("out", tensor, sequences, rows)
            layout = self.layout_of(name)
            if layout == SHARED:
                return tensor
            if layout == PAIRS:
                return tensor[_gather(self.pair_bounds(), sequences, tensor.device)]
            return tensor[rows[layout]]

        return self.map(cut)

    def cut_output(self, name: str, tensor: Tensor, sequences: Sequence[int]) -> Tensor:
        """Rows of an output (or of the gradient of an argument) that belong to some sequences.

        name: an output ("out", "lse") or a tensor argument. A shared argument is returned whole.
        """
        return self._cut_output(name, tensor, sequences, {})

    def _cut_output(
        self, name: str, tensor: Tensor, sequences: Sequence[int], rows: Mapping[str, Tensor]
    ) -> Tensor:
        if not self.is_jagged:
            return tensor
        if name in self.operator.output_layout:
            layout = self.operator.output_layout[name]
            if layout == PLACED:
                return tensor[self._placed_rows(name, sequences, tensor.device)]
            if self.arguments.get(layout) is None:
                # A dense query shared by all sequences: outputs are [batch, rows, ...].
                return tensor[torch.as_tensor(list(sequences), device=tensor.device)]
        else:
            layout = self.layout_of(name)
            if layout == SHARED:
                return tensor
        if layout in rows:
            return tensor[rows[layout]]
        bounds = self.pair_bounds() if layout == PAIRS else _bounds(self.offsets(layout))
        assert bounds is not None
        return tensor[_gather(bounds, sequences, tensor.device)]

    def _placed_rows(self, name: str, sequences: Sequence[int], device: torch.device) -> Tensor:
        assert self.operator.codes is not None
        places = [self.operator.codes.rows(self, name, s) for s in sequences]
        ranges = [torch.arange(start, stop, device=device) for start, stop in places]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *ranges])

    def pair_bounds(self) -> list[int]:
        """Running count of query-key pairs (visible or not) before each sequence, `[batch + 1]`."""
        lengths = [self.lengths(name) for name in self.operator.offsets_arguments]
        counts = torch.ones(self.num_sequences, dtype=torch.int64)
        for name, length in zip(self.operator.offsets_arguments, lengths, strict=True):
            rows = self._dense_rows(name) if length is None else length.cpu().long()
            counts = counts * rows
        return [0, *counts.cumsum(0).tolist()]

    def _dense_rows(self, offsets_name: str) -> int:
        """Rows of a dense argument whose offsets are None."""
        name = next(k for k, v in self.operator.layout.items() if v == offsets_name)
        return int(self.tensors()[name].shape[0])


def concatenate(parts: Sequence[Inputs]) -> Inputs:
    """One call on the sequences of several calls that share options and shared arguments.

    Padding rows past the last offset of a part are dropped.
    """
    parts = [part.select(range(part.num_sequences)) for part in parts]
    first = parts[0]
    operator = first.operator
    leaves = [part.tensors() for part in parts]

    def join(name: str, tensor: Tensor) -> Tensor:
        if name == "upstream":
            return torch.cat([p.upstream for p in parts if p.upstream is not None])
        if name in operator.offsets_arguments:
            lengths = torch.cat([leaf[name].diff() for leaf in leaves])
            return torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(tensor.dtype)])
        if first.layout_of(name) == SHARED:
            return tensor
        return torch.cat([leaf[name] for leaf in leaves])

    return first.map(join)


def _keyword_only(inputs: Inputs) -> set[str]:
    parameters = inputs.operator.signature.parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def _leaves(arguments: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found.append((name, value))
        elif dataclasses.is_dataclass(value):
            inner = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            found += [(f"{name}.{k}", v) for k, v in _leaves(inner)]
    return found


def _map_leaf(name: str, value: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(name, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(
            value, **{k: _map_leaf(f"{name}.{k}", v, change) for k, v in fields.items()}
        )
    return value


def _bounds(offsets: Tensor | None) -> list[int] | None:
    return None if offsets is None else offsets.tolist()


def _gather(bounds: Sequence[int], sequences: Sequence[int], device: torch.device) -> Tensor:
    """Row indices of some sequences, in order; int64."""
    ranges = [torch.arange(bounds[s], bounds[s + 1], device=device) for s in sequences]
    return torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *ranges])


def _offsets_of(bounds: Sequence[int] | None, sequences: Sequence[int], like: Tensor) -> Tensor:
    assert bounds is not None
    lengths = torch.tensor([0, *(bounds[s + 1] - bounds[s] for s in sequences)])
    return lengths.cumsum(0).to(device=like.device, dtype=like.dtype)
