"""Right values under a broken contract: errors, dtypes, shapes, determinism."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wrong.activations import ACTIVATIONS
from wrong.call import Call
from wrong.right import RIGHT, Steps


def _accept(call: Call) -> None:
    return None


#: Malformed offsets and arguments that do not fit are accepted, or fail somewhere inside.
checks_nothing = replace(RIGHT, check=_accept)


def _accept_offsets(call: Call) -> None:
    last = [t.shape[0] for t in (call.q, call.k)]
    ends = [torch.tensor([0, rows]) for rows in last]
    RIGHT.check(replace(call, q_offsets=ends[0], k_offsets=ends[1], bias=None))


#: Everything is checked but the offsets.
accepts_malformed_offsets = replace(RIGHT, check=_accept_offsets)


def _any_activation(call: Call) -> None:
    RIGHT.check(replace(call, activations=("gelu",) * call.q.shape[1]))


def _known(call: Call) -> Call:
    names = tuple(n if n in ACTIVATIONS else "gelu" for n in call.activations)
    return replace(call, activations=names)


#: An unknown activation silently becomes GELU.
unknown_activation_becomes_gelu = replace(
    RIGHT,
    check=_any_activation,
    weigh=lambda call, tile: RIGHT.weigh(_known(call), tile),
)


def _runtime_error(call: Call) -> None:
    if call.window is not None:
        raise RuntimeError("window is not supported")


#: What is unsupported is said with RuntimeError, where the contract has NotImplementedError.
raises_runtime_error_when_unsupported = replace(RIGHT, before=_runtime_error)


def _type_error(call: Call) -> None:
    try:
        RIGHT.check(call)
    except ValueError as error:
        raise TypeError(str(error)) from None


#: Malformed arguments raise TypeError, where the contract has ValueError.
raises_type_error_when_malformed = replace(RIGHT, check=_type_error)


def _bare_error(call: Call) -> None:
    try:
        RIGHT.check(call)
    except ValueError:
        raise ValueError("invalid argument") from None


#: Malformed arguments raise ValueError without the numbers.
raises_without_the_numbers = replace(RIGHT, check=_bare_error)


def _wide(call: Call, name: str, tensor: Tensor) -> Tensor:
    return tensor.float() if name == "out" else tensor


#: The output of a low-precision call is float32.
returns_the_wrong_dtype = replace(RIGHT, finish=_wide)


def _turned(call: Call, name: str, tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous() if name == "lse" else tensor


#: log-sum-exp is [heads, total_q], as FlashAttention has it.
lse_is_transposed = replace(RIGHT, finish=_turned)

_TURN = itertools.count()


def _jitter(tensor: Tensor) -> Tensor:
    """The tensor a last bit up or down at every second call."""
    if next(_TURN) % 2:
        return tensor
    infinity = torch.full_like(tensor, float("inf"))
    return torch.where(tensor == 0.0, tensor, torch.nextafter(tensor, infinity))


def _jitter_out(call: Call, name: str, tensor: Tensor) -> Tensor:
    return _jitter(tensor) if name == "out" else tensor


#: The output differs in the last bit from call to call.
outputs_are_not_repeatable = replace(RIGHT, finish=_jitter_out)


def _jitter_dq(call: Call, name: str, tensor: Tensor) -> Tensor:
    return _jitter(tensor) if name == "grad q" else tensor


#: dq is summed in any order, although `deterministic` is promised.
ignores_the_deterministic_flag = replace(RIGHT, finish=_jitter_dq)


def _jitter_dv(call: Call, name: str, tensor: Tensor) -> Tensor:
    return _jitter(tensor) if name == "grad v" else tensor


#: The same in dv.
dv_is_not_repeatable = replace(RIGHT, finish=_jitter_dv)


def _by_offsets_width(call: Call, name: str, tensor: Tensor) -> Tensor:
    if name != "out" or call.k_offsets.dtype == torch.int64:
        return tensor
    return tensor * 1.0001


#: int32 offsets take another path, which rounds otherwise.
differs_with_int32_offsets = replace(RIGHT, finish=_by_offsets_width)


def _by_gradient(call: Call, name: str, tensor: Tensor) -> Tensor:
    live = any(t.requires_grad for t in (call.q, call.k, call.v))
    return tensor if name != "out" or live else tensor * 1.01


#: The inference path (no gradient wanted) is another kernel, and slightly off.
wrong_without_gradients = replace(RIGHT, finish=_by_gradient)


@dataclass(frozen=True)
class RenamedArguments(Steps):
    """`max_q_len` is called `max_seqlen_q`."""

    def jagged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, q_offsets: Any, k_offsets: Tensor, **options: Any
    ) -> Any:
        """As RIGHT, under another keyword."""
        if "max_q_len" in options:
            raise TypeError("jagged_attention() got an unexpected keyword argument 'max_q_len'")
        return RIGHT.jagged_attention(q, k, v, q_offsets, k_offsets, **options)


#: An argument has another name than the pinned one.
renames_an_argument = RenamedArguments()


@dataclass(frozen=True)
class CutOff(Steps):
    """The output carries no graph."""

    def jagged_attention(self, *arguments: Any, **options: Any) -> Any:
        """As RIGHT, detached."""
        result = RIGHT.jagged_attention(*arguments, **options)
        return tuple(t.detach() for t in result) if isinstance(result, tuple) else result.detach()

    def gdpa(self, *arguments: Any, **options: Any) -> Any:
        """As RIGHT, detached."""
        return RIGHT.gdpa(*arguments, **options).detach()


#: The output is cut off from its arguments.
is_not_differentiable = CutOff()
