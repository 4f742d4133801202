"""block_attention of a peer that has none: its attention over the offsets cut at the blocks.

A block sees itself alone, so attention over sequences that are the blocks is block attention, pair
for pair. Cutting the offsets is preparation, as masks and padding are. A rotary table is a step of
its own before it (plain torch, compiled), and belongs to the call: q, k and v are written out
turned, and gradients are rounded before they are turned back as well as after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from jagbench.implementation import Prepared
from jagbench.inputs import Inputs
from jagbench.peers.adapter import (
    Peer,
    Plan,
    Planner,
    attend,
    gradient_like,
    nothing,
    padded,
    upstream_of,
)
from jagbench.peers.packed import BlockCall, check_blocks, with_values
from jagbench.rotary import TokenTable


class BlockAttention(Protocol):
    """The pinned signature."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        *,
        block_size: int = 64,
        scale: float | None = None,
        rotary: Tensor | TokenTable | None = None,
        rotate_values: bool = True,
    ) -> Tensor:
        """Softmax attention within blocks, as `jagbench.reference` defines it."""
        ...


@dataclass(frozen=True)
class BlockPeer(Peer):
    """A peer whose attention serves both operators."""

    block_attention: BlockAttention


#: A plan of a whole checked call, where the library's is not simply attention over its offsets.
BlockPlanner = Callable[[BlockCall], Plan]


def with_blocks(base: Peer, planner: Planner) -> BlockPeer:
    """The peer of a planner of jagged attention, with block attention made of the same plans."""

    def plan(blocks: BlockCall) -> Plan:
        return planner(blocks.call)

    def prepare(operator: str, inputs: Inputs) -> Prepared | None:
        if operator == "block_attention":
            return prepared_blocks(plan, inputs)
        return base.prepare(operator, inputs)

    def configuration(operator: str, inputs: Inputs) -> Mapping[str, str]:
        if operator != "block_attention":
            return base.configuration(operator, inputs)
        return {"library": base.__version__, **block_notes(plan, inputs)}

    function = block_attention_of(plan)
    return BlockPeer(base.jagged_attention, prepare, configuration, base.__version__, function)


def block_attention_of(planner: BlockPlanner) -> BlockAttention:
    """The operator of a planner."""

    def block_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        *,
        block_size: int = 64,
        scale: float | None = None,
        rotary: Tensor | TokenTable | None = None,
        rotate_values: bool = True,
        qk_norm_eps: float | None = None,
    ) -> Tensor:
        """Softmax attention within blocks, as `jagbench.reference` defines it.

        Raises ValueError for malformed arguments, NotImplementedError for what the library lacks.
        """
        blocks = check_blocks(
            q, k, v, offsets, block_size=block_size, scale=scale, rotary=rotary,
            rotate_values=rotate_values, qk_norm_eps=qk_norm_eps,
        )  # fmt: skip
        call = blocks.call
        plan = planner(blocks)
        if call.empty:
            out = nothing(call)
        else:
            turned = (blocks.rotated(n, getattr(call, n)) for n in "qkv")
            found = attend(with_values(call, *turned), plan)
            assert isinstance(found, Tensor)
            out = padded(call, found)
        return out  # type: ignore[return-value]

    return block_attention


def prepared_blocks(planner: BlockPlanner, inputs: Inputs) -> Prepared:
    """The call with offsets cut, masks made and, where nothing is turned first, layout changed."""
    blocks = _described(inputs)
    call = blocks.call
    if call.empty:
        raise NotImplementedError("a call without pairs has nothing to prepare")
    plan = planner(blocks)
    early = blocks.turn is None

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = {"q": q, "k": k, "v": v}
        if not early:
            given = {n: plan.pack(n, blocks.rotated(n, x)) for n, x in given.items()}
        return gradient_like(plan.kernel(given["q"], given["k"], given["v"]))  # type: ignore[arg-type]

    def unpack(name: str, tensor: Tensor) -> Tensor:
        if early or name == "out":
            tensor = plan.unpack(name, tensor)
        given = call.rows - tensor.shape[0]
        zeros = tensor.new_zeros(given, *tensor.shape[1:])
        return torch.cat([tensor, zeros]) if given else tensor

    with torch.no_grad():
        tensors = {n: getattr(call, n) for n in "qkv"}
        if early:
            tensors = {n: plan.pack(n, x) for n, x in tensors.items()}
        return Prepared(tensors, kernel, plan.pack("out", upstream_of(call, inputs)), unpack)


def block_notes(planner: BlockPlanner, inputs: Inputs) -> dict[str, str]:
    """What a planner chooses for a call; how values are turned."""
    blocks = _described(inputs)
    notes = dict(planner(blocks).notes or {})
    if blocks.turn is not None:
        notes["rotary"] = "a compiled step before attention"
    return notes


def _described(inputs: Inputs) -> BlockCall:
    """The inputs of a workload as a checked call, without gradients."""
    return inputs.map(lambda _, tensor: tensor.detach()).call(check_blocks)  # type: ignore[no-any-return]
