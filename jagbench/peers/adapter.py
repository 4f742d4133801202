"""From a peer's kernel in its own layout to an operator, to a prepared call, to a configuration.

An adapter writes one function, `plan(call) -> Plan`: how the packed tensors are laid out for the
library, what is called, and how results come back. The operator and `prepare` are made of the same
plan, so what is timed without its preparation is the very call that is judged.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from jagbench.bias import BucketedBias
from jagbench.implementation import Prepared
from jagbench.inputs import Inputs
from jagbench.pairs import Align, Window
from jagbench.peers.arguments import Call, check

Result = Tensor | tuple[Tensor, Tensor]


def as_it_is(_: str, tensor: Tensor) -> Tensor:
    """Layout change of a library that takes packed tensors."""
    return tensor


@dataclass(frozen=True)
class Plan:
    """One call in a library's own terms. Every function is differentiable.

    kernel: takes q, k, v in the library's layout; returns out, or out and lse if the call asks.
    pack: brings "q", "k", "v", or the upstream gradient as "out", into the library's layout.
    unpack: brings "out", "lse" or a gradient ("grad q") back to packed rows.
    notes: what was chosen, for `configuration`.
    """

    kernel: Callable[[Tensor, Tensor, Tensor], Result]
    pack: Callable[[str, Tensor], Tensor] = as_it_is
    unpack: Callable[[str, Tensor], Tensor] = as_it_is
    notes: Mapping[str, str] | None = None


Planner = Callable[[Call], Plan]


class JaggedAttention(Protocol):
    """The pinned signature."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor | None,
        k_offsets: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        align: Align = "end",
        window: Window | None = None,
        prefix: int = 0,
        last_full: int = 0,
        bias: Tensor | BucketedBias | None = None,
        max_q_len: int | None = None,
        max_k_len: int | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> Result:
        """Softmax attention within each sequence, as `jagbench.reference` defines it."""
        ...


@dataclass(frozen=True)
class Peer:
    """An implementation made of one planner (`--impl=jagbench.peers.NAME`)."""

    jagged_attention: JaggedAttention
    prepare: Callable[[str, Inputs], Prepared | None]
    configuration: Callable[[str, Inputs], Mapping[str, str]]
    __version__: str


def peer(planner: Planner, version: str) -> Peer:
    """The operator, `prepare` and `configuration` of a planner."""

    def jagged_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor | None,
        k_offsets: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        align: Align = "end",
        window: Window | None = None,
        prefix: int = 0,
        last_full: int = 0,
        bias: Tensor | BucketedBias | None = None,
        max_q_len: int | None = None,
        max_k_len: int | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> Result:
        """Softmax attention within each sequence, as `jagbench.reference` defines it.

        Raises ValueError for malformed arguments, NotImplementedError for what the library lacks.
        """
        call = check(
            q, k, v, q_offsets, k_offsets, scale=scale, causal=causal, align=align, window=window,
            prefix=prefix, last_full=last_full, bias=bias, max_q_len=max_q_len, max_k_len=max_k_len,
            deterministic=deterministic, return_lse=return_lse,
        )  # fmt: skip
        # Before the empty call is answered, so that what is unsupported is so whatever the lengths.
        plan = planner(call)
        return nothing(call) if call.empty else _whole(call, attend(call, plan))

    def prepare(operator: str, inputs: Inputs) -> Prepared | None:
        """The call with layout, masks and lengths done beforehand; None for other operators."""
        if operator != "jagged_attention":
            return None
        call = _described(inputs)
        if call.empty:
            raise NotImplementedError("a call without pairs has nothing to prepare")
        return _prepared(call, planner(call), inputs)

    def configuration(operator: str, inputs: Inputs) -> Mapping[str, str]:
        """What the adapter chooses for this call; the library's version."""
        notes = planner(_described(inputs)).notes if operator == "jagged_attention" else None
        return {"library": version, **(notes or {})}

    return Peer(jagged_attention, prepare, configuration, version)


def packed_query(call: Call) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """For libraries without a dense query: how to repeat it for every sequence; its offsets."""
    if call.q_offsets is not None:
        return (lambda q: q), call.q_offsets
    rows = call.q.shape[0]
    offsets = torch.arange(
        0, (call.batch + 1) * rows, max(rows, 1),
        dtype=call.k_offsets.dtype, device=call.k_offsets.device,
    )  # fmt: skip

    def repeat(q: Tensor) -> Tensor:
        return q[None].expand(call.batch, *q.shape).reshape(-1, *q.shape[1:])

    return repeat, offsets


def pad_columns(x: Tensor, width: int) -> Tensor:
    """`[..., columns]` with zero columns behind, up to a width."""
    gap = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, gap)) if gap else x


def packed_plan(
    call: Call,
    kernel: Callable[[Tensor, Tensor, Tensor], Result],
    *,
    multiple: int = 1,
    one_width: bool = False,
    notes: Mapping[str, str] | None = None,
) -> Plan:
    """Plan of a library that takes packed tensors, with columns of zeros where it needs them.

    multiple: head_dim must be one of it. one_width: values must be as wide as queries and keys.
    Zero columns of q and k add nothing to a score; those of v are cut off the output.
    """
    dims = {"q": call.q.shape[2], "k": call.q.shape[2], "v": call.v.shape[2]}
    width = {n: -(-d // multiple) * multiple for n, d in dims.items()}
    if one_width:
        width = dict.fromkeys("qkv", max(width.values()))
    dims["out"], width["out"] = dims["v"], width["v"]
    repeat, _ = packed_query(call)

    def pack(name: str, x: Tensor) -> Tensor:
        return pad_columns(repeat(x) if name == "q" else x, width[name]).contiguous()

    def unpack(name: str, x: Tensor) -> Tensor:
        if name == "lse":
            return x
        x = x[..., : dims[name.removeprefix("grad ")]]
        if name == "grad q" and call.q_offsets is None:
            return x.reshape(call.batch, *call.q.shape).sum(0)
        return x

    return Plan(kernel, pack, unpack, notes)


class _GradientLaidOutLikeIt(torch.autograd.Function):
    """Identity whose gradient has its strides.

    Several backwards refuse any others, and cuDNN's in torch 2.11 is silently wrong: it keeps one
    plan for all strides of the upstream gradient, those of the first it met.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.strides = x.stride()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0]
        if gradient.stride() == ctx.strides:
            return gradient
        return gradient.new_empty_strided(gradient.shape, ctx.strides).copy_(gradient)


def hide_blind_rows(lse: Tensor) -> Tensor:
    """Log-sum-exp with -inf for a row that sees no key; FlashAttention 2 writes +inf there."""
    return torch.where(torch.isinf(lse), -math.inf, lse)


def attend(call: Call, plan: Plan) -> Result:
    """Results of the packed rows of a call that has pairs."""
    result = plan.kernel(*(plan.pack(n, x) for n, x in zip("qkv", _values(call), strict=True)))
    if isinstance(result, tuple):
        out, lse = result
        return plan.unpack("out", gradient_like(out)), plan.unpack("lse", lse)
    return plan.unpack("out", gradient_like(result))


def gradient_like(out: Tensor) -> Tensor:
    """The output, whose gradient reaches the library laid out as it is."""
    return _GradientLaidOutLikeIt.apply(out)  # type: ignore[no-any-return, no-untyped-call]


def _values(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    return call.q, call.k, call.v


def _whole(call: Call, result: Result) -> Result:
    """With the rows past the last offset, which are 0."""
    if isinstance(result, tuple):
        return padded(call, result[0]), padded(call, result[1])
    return padded(call, result)


def padded(call: Call, packed: Tensor) -> Tensor:
    """With the rows past the last offset, which are 0."""
    if call.q_offsets is None:
        return packed.reshape(call.batch, call.rows, *packed.shape[1:])
    gap = call.rows - packed.shape[0]
    return torch.cat([packed, packed.new_zeros(gap, *packed.shape[1:])]) if gap else packed


def nothing(call: Call) -> Result:
    """Out 0 and lse -inf for every row, tied to q in the graph."""
    rows = call.batch * call.rows if call.q_offsets is None else call.q_lengths.total
    shape = (rows, call.q.shape[1], call.v.shape[2])
    none = call.q[:0, :, :1].expand(0, *shape[1:])
    out = torch.cat([none, call.q.new_zeros(shape)])
    wide = torch.promote_types(out.dtype, torch.float32)
    lse = out.new_full(shape[:2], -math.inf, dtype=wide)
    if call.return_lse:
        return padded(call, out), padded(call, lse)
    return padded(call, out)


_PARAMETERS = inspect.signature(JaggedAttention.__call__).parameters


def _described(inputs: Inputs) -> Call:
    """The inputs of a workload as a checked call, without gradients."""
    return inputs.map(lambda _, tensor: tensor.detach()).call(_check_all)  # type: ignore[no-any-return]


def _check_all(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, **options: Any
) -> Call:
    defaults = {n: p.default for n, p in _PARAMETERS.items() if p.default is not p.empty}
    return check(q, k, v, q_offsets, k_offsets, **{**defaults, **options})


def _prepared(call: Call, plan: Plan, inputs: Inputs) -> Prepared:
    """A plan with its layout changes done."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = plan.kernel(q, k, v)
        return gradient_like(result[0] if isinstance(result, tuple) else result)

    def unpack(name: str, tensor: Tensor) -> Tensor:
        packed = plan.unpack(name, tensor)
        if name in ("out", "lse"):
            return padded(call, packed)
        given = inputs.tensors()[name.removeprefix("grad ")]
        gap = given.shape[0] - packed.shape[0]
        return torch.cat([packed, packed.new_zeros(gap, *packed.shape[1:])]) if gap else packed

    with torch.no_grad():
        tensors = {n: plan.pack(n, x) for n, x in zip("qkv", _values(call), strict=True)}
        return Prepared(tensors, kernel, plan.pack("out", upstream_of(call, inputs)), unpack)


def upstream_of(call: Call, inputs: Inputs) -> Tensor:
    """Upstream gradient of the packed rows of a call; zeros where the inputs have none."""
    upstream = inputs.upstream
    if upstream is None:
        upstream = call.q.new_zeros(call.rows, call.q.shape[1], call.v.shape[2])
        if call.q_offsets is None:
            upstream = upstream.expand(call.batch, *upstream.shape)
    if call.q_offsets is None:
        return upstream.reshape(-1, *upstream.shape[2:])
    return upstream[: call.q_lengths.total]
