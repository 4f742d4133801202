"""A ring of inputs whose values are new before every call: what `timing` times.

The tensors stay where they are; their rows are rolled by a random shift from call to call. So an
implementation that remembers an earlier output gives a wrong one, and one that recognises its
inputs has to read them.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from jagbench import result
from jagbench.checking import Wrong, plain
from jagbench.execution import gradient_name, named_outputs
from jagbench.implementation import Implementation, Prepared
from jagbench.inputs import Inputs
from jagbench.spec import ROWS, SHARED
from jagbench.timing import Outputs


class Ring:
    """A `timing.Subject`: members hold the workload's values, rolled anew before every call."""

    def __init__(
        self, implementation: Implementation, source: Inputs, case: result.Case, members: int
    ) -> None:
        self.case, self.source = case, source
        self._function = implementation.get(case.operator)
        self._prepare: Callable[[str, Inputs], Prepared | None] | None = None
        if case.preparation in ("excluded", "alone"):
            self._prepare = implementation.namespace.prepare
        self._inputs = [source.clone() for _ in range(members)]
        self._calls: list[Callable[[], Outputs] | None] = [None] * members
        self._prepared: list[Prepared | None] = [None] * members
        self._shifts: list[dict[str, int]] = [{} for _ in range(members)]
        self._flipped: list[tuple[str, ...]] = [()] * members
        self._random = random.Random(secrets.randbits(64))
        self._ends = {
            name: int(offsets[-1]) if (offsets := source.offsets(name)) is not None else None
            for name in source.operator.offsets_arguments
        }

    @property
    def members(self) -> int:
        """Members of the ring."""
        return len(self._inputs)

    def inputs(self, member: int) -> Inputs:
        """A member's tensors as they are now."""
        return self._inputs[member]

    def given(self, member: int) -> Inputs:
        """What a member's last call was given, made anew from the workload.

        An implementation may have written into its arguments: it is judged by what they held.
        """
        made = self.source.clone()
        self._fill(made, self._shifts[member])
        for name in self._flipped[member]:
            made.tensors()[name].neg_()
        return made

    def refresh(self, member: int) -> None:
        """Roll the rows of every tensor of values; run what the region needs done before it."""
        self._calls[member] = self._prepared[member] = None
        self._flipped[member] = ()
        self._shifts[member] = {
            name: self._random.randrange(1, 1 << 30) for name in (*self._ends, ROWS)
        }
        self._fill(self._inputs[member], self._shifts[member])
        self._calls[member] = self._region(member)

    def _fill(self, into: Inputs, shifts: Mapping[str, int]) -> None:
        """Offsets and other integers stay: writing them would make every call look at them anew."""
        values = self.source.tensors()
        for name, tensor in into.tensors().items():
            layout = self.source.operator.layout.get(name, SHARED)
            if tensor.is_floating_point() or layout == ROWS:
                self._roll(tensor, values[name], layout, shifts)
        if self.source.upstream is not None and into.upstream is not None:
            layout = self.source.operator.output_layout["out"]
            self._roll(into.upstream, self.source.upstream, layout, shifts)

    def _roll(self, into: Any, source: Tensor, layout: str, shifts: Mapping[str, int]) -> None:
        """Rows past the last offset keep their place: they may hold what must not be read."""
        if layout == SHARED or source.shape[0] < 2:
            into.copy_(source)
            return
        end = self._ends.get(layout)
        rows = source.shape[0] if end is None else end
        shift = shifts.get(layout, next(iter(shifts.values()), 1)) % max(1, rows)
        into[rows:].copy_(source[rows:])
        into[: rows - shift].copy_(source[shift:rows])
        into[rows - shift : rows].copy_(source[:shift])

    def call(self, member: int) -> Outputs:
        """The region."""
        call = self._calls[member]
        assert call is not None, "refresh comes before every call"
        return call()

    def packed(self, member: int, outputs: Outputs) -> Outputs:
        """Outputs of a member's last call in the packed layout."""
        prepared = self._prepared[member]
        if prepared is None:
            return outputs
        if self.case.preparation == "alone":
            with torch.no_grad():
                outputs = self._timed(prepared.call(**prepared.tensors))
        packed = {}
        for name, tensor in outputs.items():
            plain(name, tensor)
            packed[name] = prepared.unpack(name, tensor)
            if bool(prepared.unpack(name, torch.zeros_like(tensor)).any()):
                raise Wrong(f"{name} unpacked from zeros is not 0: unpacking may only move values")
        return packed

    def _region(self, member: int) -> Callable[[], Outputs]:
        inputs = self._inputs[member]
        if self.case.preparation == "alone":
            return lambda: self._keep(member, self._ready(inputs))
        if self.case.preparation == "excluded":
            prepared = self._ready(inputs)
            self._prepared[member] = prepared
            self._flip(member, prepared)
            leaves = {
                n: t.detach().requires_grad_(t.is_floating_point() and self._has_gradients)
                for n, t in prepared.tensors.items()
            }

            def alone(**tensors: Tensor) -> Outputs:
                return self._timed(prepared.call(**tensors))

            return _region(self.case.region, alone, leaves, leaves, prepared.upstream)
        wanted = [n for n in inputs.operator.differentiable if n in inputs.tensors()]
        backward = self.case.region != "forward"
        live = inputs.map(
            lambda n, t: t.detach().requires_grad_(backward and n in wanted) if n in wanted else t
        )
        leaves = {name: live.tensors()[name] for name in wanted}

        def function(**_: Tensor) -> Outputs:
            return self._timed(live.call(self._function))

        return _region(self.case.region, function, {}, leaves, inputs.upstream)

    @property
    def _has_gradients(self) -> bool:
        return bool(self.source.operator.differentiable)

    def _timed(self, returned: Any) -> Outputs:
        """What of a call's outputs is judged: `out`, or every output of codes."""
        named = named_outputs(self.source, returned)
        return named if self.source.operator.codes is not None else {"out": named["out"]}

    def _ready(self, inputs: Inputs) -> Prepared:
        assert self._prepare is not None
        prepared = self._prepare(self.case.operator, inputs)
        if prepared is None:
            raise NotImplementedError(f"nothing to prepare for {self.case.operator}")
        if not isinstance(prepared, Prepared):
            raise Wrong(f"prepare returned {type(prepared).__name__}, want Prepared")
        return prepared

    def _flip(self, member: int, prepared: Prepared) -> None:
        """Change signs of some of q, k, v after the preparation, so that the call must read them.

        Columns beyond the head dim, in which an adapter may keep a mask, are left alone.
        """
        live = self._inputs[member].tensors()
        names = [name for name in prepared.tensors if name in live]
        chosen = [name for name in names if self._random.random() < 0.5] or names[:1]
        for name in chosen:
            tensor, given = prepared.tensors[name], live[name]
            given.neg_()
            # A view of the argument has changed with it.
            if tensor.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
                tensor.detach()[..., : given.shape[-1]].neg_()
        self._flipped[member] = tuple(chosen)

    def _keep(self, member: int, prepared: Prepared) -> Outputs:
        self._prepared[member] = prepared
        return {}


def _region(
    region: result.Region,
    function: Callable[..., Outputs],
    arguments: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    upstream: Tensor | None,
) -> Callable[[], Outputs]:
    """The region as a function of nothing; a backward's graph is made here, before it is timed."""
    names = [gradient_name(name) for name in leaves]

    def gradients(out: Tensor) -> Outputs:
        found = torch.autograd.grad(out, list(leaves.values()), upstream, allow_unused=True)
        pairs = zip(names, leaves.values(), found, strict=True)
        return {n: torch.zeros_like(x) if g is None else g for n, x, g in pairs}

    def forward() -> Outputs:
        with torch.no_grad():
            return function(**arguments)

    def both() -> Outputs:
        out = function(**arguments)["out"]
        return {"out": out.detach(), **gradients(out)}

    if region == "forward":
        return forward
    if not leaves:
        raise NotImplementedError(f"region {region!r} of an operator without gradients")
    if region == "forward_backward":
        return both
    if region == "backward":
        out = function(**arguments)["out"]
        return lambda: gradients(out)
    raise NotImplementedError(f"region {region!r} of a single operator: it has no optimiser step")
