"""Weights that FSDP2 gathers as MX codes and scales: its extension points, and layers given them.

FSDP2 (torch 2.6 on) asks a parameter's local tensor, if it has the two methods, what to gather and
what to make of it: `fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)` and
`fsdp_post_all_gather(outputs, metadata, param_dtype, *, out)`. The shard that the optimiser updates
stays in high precision, and gradients reach it as FSDP2 reduces them.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map_only

from jagbench.impl.precision.layers import RecipeLinear
from jagbench.impl.precision.recipe import LinearPrecision
from jagbench.impl.precision.shards import (
    ShardFormat,
    dequantize_weight,
    quantize_shard,
    rows_of_shards,
    scales_shape,
)
from jagbench.mx import SQUARE

if TYPE_CHECKING:
    # As long to import as torch itself, and no use to whoever trains on one device.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

_aten = torch.ops.aten
#: What FSDP2 makes shards with, moves and copies them with: their results are gathered as codes
#: too. Everything else, an optimiser's arithmetic above all, sees and returns plain tensors.
_KEEPING = {
    _aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default,
    _aten.empty_like.default, _aten.new_zeros.default, _aten.new_empty.default,
    _aten.slice.Tensor, _aten.split.Tensor, _aten.view.default, _aten.as_strided.default,
    _aten._pin_memory.default,
}  # fmt: skip


class QuantizedGather(Tensor):
    """A weight, or a rank's shard of it, whose all-gather under FSDP2 is of codes and scales.

    high: its values, `[rows, columns]`, in high precision; the tensor shows them.
    form: how a shard is quantised.
    """

    high: Tensor
    form: ShardFormat

    @staticmethod
    def __new__(cls: type[QuantizedGather], high: Tensor, form: ShardFormat) -> QuantizedGather:
        """Wraps the tensor: its memory is shared."""
        made: QuantizedGather = torch.Tensor._make_wrapper_subclass(
            cls, high.size(), strides=high.stride(), storage_offset=high.storage_offset(),
            dtype=high.dtype, layout=high.layout, device=high.device,
        )  # fmt: skip
        return made

    def __init__(self, high: Tensor, form: ShardFormat) -> None:
        self.high, self.form = high, form

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedGather({self.high!r}, {self.form!r})"

    def __tensor_flatten__(self) -> tuple[list[str], ShardFormat]:
        """Names of the tensors inside, and the rest."""
        return ["high"], self.form

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], form: ShardFormat, size: Any, stride: Any
    ) -> QuantizedGather:
        """Inverse of `__tensor_flatten__`."""
        return QuantizedGather(inner["high"], form)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The operation on the values; see `_KEEPING`."""
        plain_args, plain_kwargs = tree_map_only(cls, lambda t: t.high, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        written = func._schema.arguments[0].alias_info if func._schema.arguments else None
        if written is not None and written.is_write and isinstance(out, Tensor):
            return args[0]
        if func not in _KEEPING or not isinstance(args[0], cls):
            return out
        form = args[0].form
        return tree_map_only(Tensor, lambda t: cls(t, form), out)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], None]:
        """Codes and scales of this rank's shard, after the policy's `param_dtype`.

        Rounded to that dtype first, since a layer that gathers the weight and quantises it then
        sees it so. A rank alone sends nothing, and FSDP2 hands on the first tensor only: that is
        then the values of the codes. Raises ValueError, on all ranks alike, for shards that are no
        whole blocks, a module that is not under the format's recipe, and an autocast to another
        dtype.
        """
        rows = rows_of_shards(outer_size[0], mesh.size(), self.form.block)
        if tuple(self.shape) != (rows, *outer_size[1:]):
            raise ValueError(
                f"a weight {tuple(outer_size)} over {mesh.size()} ranks is gathered in codes along "
                f"dim 0, in shards of {(rows, *outer_size[1:])}; got {tuple(self.shape)}"
            )
        dtype = mp_policy.param_dtype or self.dtype
        _check_module(module, self.form)
        _check_autocast(self.device.type, dtype)
        found = quantize_shard(self.high.to(dtype), self.form)
        if mesh.size() == 1:
            return (dequantize_weight(found, self.form, dtype),), None
        return found, None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight in `param_dtype`: the values of the gathered codes.

        out: the weight of an earlier gather, to be written again. Returns it, and what FSDP2 frees
        with it. Raises ValueError for scales that are not of the codes.
        """
        if len(all_gather_outputs) == 1:
            # FSDP2 has written it already, where `out` lies too.
            return None if out is not None else (all_gather_outputs[0], all_gather_outputs)
        codes, scales = all_gather_outputs
        wanted = scales_shape(codes.shape[0], codes.shape[1], self.form.block)
        if tuple(scales.shape) != wanted:
            raise ValueError(
                f"scales of codes {tuple(codes.shape)} in blocks {self.form.block} must be "
                f"{wanted}, got {tuple(scales.shape)}"
            )
        weight = dequantize_weight((codes, scales), self.form, param_dtype)
        if out is None:
            return weight, (weight,)
        # Autograd saved the weight in the forward; these are the same values.
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            out.copy_(weight)
        return None


def quantize_gathers(
    model: nn.Module, world_size: int, *, keep: tuple[str, ...] = (), quantized_twice: bool = False
) -> tuple[str, ...]:
    """Let FSDP2 gather the weights of layers under a recipe as codes; returns the layers' names.

    Call it after `apply` and before `fully_shard`. A layer's weight is replaced by a parameter of
    the same values; optimisers are made after `fully_shard`, as always under FSDP2.

    world_size: of the group that the weight is sharded over.
    keep: names of layers that are gathered as they are, as patterns; each must match something.
    quantized_twice: take layers with blocks of 1 x 32 too. Their gradient of the input quantises
        the weight anew along its rows, and after a gather that is quantised it can only do so to
        the codes' values: forward as without FSDP2, input gradient not.

    Raises ValueError, and changes nothing, if any layer cannot be gathered so, with all reasons:
    shards that are no whole blocks; a product that reads the weight unquantised, or quantised
    otherwise; a scale for the whole tensor; a weight shared with another kind of layer or sharded.
    """
    chosen = _chosen(model, keep)
    reasons = [
        f"{name}: {reason}"
        for name, layer in chosen.items()
        for reason in _reasons(layer, world_size, quantized_twice)
    ]
    reasons += _shared(model, list(chosen.values())) if not reasons else []
    if reasons:
        raise ValueError(
            f"{len(reasons)} reasons against gathering weights as codes: {'; '.join(reasons)}"
        )
    made: dict[Tensor, nn.Parameter] = {}
    for layer in chosen.values():
        old = layer.weight
        if old not in made:
            made[old] = _parameter(QuantizedGather(_plain(old), form_of(layer)), old)
        layer.weight = made[old]
    return tuple(chosen)


def plain_gathers(model: nn.Module) -> tuple[str, ...]:
    """Take `quantize_gathers` back, before `fully_shard`; returns the names of the weights."""
    found: list[str] = []
    made: dict[Tensor, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for own, old in list(module.named_parameters(recurse=False)):
            if isinstance(old, QuantizedGather):
                setattr(module, own, made.setdefault(old, _parameter(_plain(old), old)))
                found.append(f"{prefix}.{own}" if prefix else own)
    return tuple(found)


def _plain(weight: Tensor) -> Tensor:
    own = weight.detach()
    return own.high if isinstance(own, QuantizedGather) else own


def _parameter(values: Tensor, old: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=old.requires_grad)


def form_of(layer: RecipeLinear) -> ShardFormat:
    """The format of a layer's weight. ValueError if the layer has a scale for the whole tensor."""
    own = layer.precision
    if not isinstance(own.precision, LinearPrecision):
        raise ValueError(f"{own.layer}: one scale for the whole weight is not of a shard")
    return ShardFormat.of(own.precision, own.functions)


def _chosen(model: nn.Module, keep: tuple[str, ...]) -> dict[str, RecipeLinear]:
    """Layers under a recipe whose names match no pattern of `keep`."""
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, RecipeLinear)
    }
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise ValueError(f"keep {pattern!r} matches none of {len(layers)}: {', '.join(layers)}")
    chosen = {
        name: layer
        for name, layer in layers.items()
        if not any(fnmatchcase(name, pattern) for pattern in keep)
    }
    if not chosen:
        raise ValueError("no layer of the model is under a recipe and not kept: apply one first")
    return chosen


def _reasons(layer: RecipeLinear, world_size: int, quantized_twice: bool) -> Iterator[str]:
    """Why a layer's weight cannot be gathered as codes."""
    from torch.distributed.tensor import DTensor

    precision = layer.precision.precision
    if not isinstance(precision, LinearPrecision):
        yield "one scale for the whole weight is not of a shard"
        return
    if isinstance(layer.weight, DTensor):
        yield "the weight is sharded already"
    for name in ("forward", "input_gradient"):
        if not getattr(precision, name):
            yield f"{name} is not quantised and reads the weight in high precision"
    if precision.recipe.weight_block != SQUARE and not quantized_twice:
        yield (
            f"blocks {precision.recipe.weight_block} are quantised along the rows for the input "
            "gradient, which cannot be had from these codes (quantized_twice=True takes the "
            "codes' values)"
        )
    try:
        rows_of_shards(layer.weight.shape[0], world_size, precision.recipe.weight_block)
    except ValueError as error:
        yield str(error)


def _shared(model: nn.Module, chosen: list[RecipeLinear]) -> list[str]:
    """Layers that share a weight with a chosen one and read it otherwise."""
    forms = {layer.weight: form_of(layer) for layer in chosen}
    found = []
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            wanted = forms.get(parameter)
            same = module in chosen and own == "weight" and form_of(module) == wanted
            if wanted is not None and not same:
                found.append(f"{name}.{own} is the weight of a layer under a recipe too")
    return found


def _check_module(module: nn.Module, form: ShardFormat) -> None:
    """Refuse a linear layer that was taken back from its recipe, or put under another, since."""
    if not isinstance(module, nn.Linear):
        return
    if not isinstance(module, RecipeLinear) or form_of(module) != form:
        raise ValueError(
            f"a {type(module).__name__} reads a weight that is gathered as {form}: its recipe was "
            "changed since; call quantize_gathers after apply, and fully_shard after that"
        )


def _check_autocast(device: str, dtype: torch.dtype) -> None:
    """Refuse an autocast that would have rounded the weight before it is quantised."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return
    wanted = torch.get_autocast_dtype(device)
    if wanted != dtype:
        raise ValueError(
            f"autocast to {wanted} over a weight that is gathered as codes of {dtype}: give "
            f"fully_shard MixedPrecisionPolicy(param_dtype={wanted})"
        )
