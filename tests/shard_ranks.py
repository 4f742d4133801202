"""What two processes of gloo do for tests/test_precision_gathers.py; each saves what it found."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from jagbench.impl.precision import (
    Functions,
    LinearPrecision,
    QuantizedGather,
    Recipe,
    ShardFormat,
    apply,
    quantize_gathers,
    recipe_named,
    set_step,
)
from jagbench.mx import ALONG_COLUMNS, SQUARE, LinearRecipe
from jagbench.reference.mx import mx_dequantize, mx_quantize
from jagbench.reference.mx_attention import mx_attention
from jagbench.reference.mx_gdpa import mx_gdpa
from jagbench.reference.mx_matmul import mx_linear

TRUTH = Functions(mx_linear, mx_attention, mx_gdpa, mx_quantize, mx_dequantize)
RANKS = 2
STEPS = 2
TOKENS = 40
SQUARES = replace(recipe_named("mxfp8"), keep_roles=())
NARROW = Recipe("1x32", LinearPrecision(LinearRecipe(weight_block=ALONG_COLUMNS)))
#: Weights and sums in float32; weights in bfloat16, gradients added in float32.
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
Found = dict[str, Any]


def model() -> nn.Sequential:
    """Rows of both layers are two shards of whole squares; columns of the first end in a block."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(72, 128), nn.SiLU(), nn.Linear(128, 64, bias=False))
    with torch.no_grad():
        for layer in (layers[0], layers[2]):
            spread(layer.weight)
    return layers


def spread(weight: Tensor) -> None:
    """Another size for every 32 rows, so that a scale of another block shows; and some outliers."""
    rows, columns = weight.shape
    sizes = torch.exp2(torch.arange(rows) // 32 % 4 - 2.0)
    weight.mul_(sizes[:, None])
    weight[::7, :: max(1, columns // 3)] *= 2**7


def inputs(rank: int, step: int) -> Tensor:
    """Of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(TOKENS, 72, generator=generator)


def optimiser(layers: nn.Module) -> torch.optim.Optimizer:
    """The same arithmetic for whole parameters and shards."""
    return torch.optim.AdamW(layers.parameters(), lr=2**-6, foreach=False)


def unsharded(recipe: Recipe, dtype: torch.dtype) -> Found:
    """One process with float32 parameters: both ranks' batches, gradients averaged in float32."""
    master = model()
    steps = optimiser(master)
    out: list[list[Tensor]] = []
    for step in range(STEPS):
        grads: list[list[Tensor]] = []
        for rank in range(RANKS):
            copied = copy.deepcopy(master).to(dtype)
            apply(copied, recipe, functions=TRUTH)
            set_step(copied, step, rank=rank)
            x = inputs(rank, step).requires_grad_()
            y = copied(x.to(dtype))
            y.square().sum().backward()
            grads.append([p.grad.float() for p in copied.parameters()])
            out.append([y.detach(), x.grad])
        for p, first, second in zip(master.parameters(), *grads, strict=True):
            p.grad = (first + second) / RANKS
        steps.step()
    return {
        "out": out,
        "grads": [p.grad for p in master.parameters()],
        "weights": [p.detach() for p in master.parameters()],
    }


def sharded(
    rank: int,
    recipe: Recipe,
    policy: MixedPrecisionPolicy,
    wrap: Callable[[nn.Module], Any] = lambda layers: quantize_gathers(layers, RANKS),
    **options: Any,
) -> Found:
    """The same training under FSDP2; this rank's outputs, and gathered parameters."""
    layers = model()
    apply(layers, recipe, functions=TRUTH)
    wrap(layers)
    for layer in (layers[0], layers[2]):
        fully_shard(layer, mp_policy=policy, **options)
    fully_shard(layers, mp_policy=policy, **options)
    steps = optimiser(layers)
    out: list[list[Tensor]] = []
    with gathered() as sent:
        for step in range(STEPS):
            set_step(layers, step, rank=rank)
            x = inputs(rank, step).requires_grad_()
            steps.zero_grad()
            y = layers(x)
            y.square().sum().backward()
            out.append([y.detach(), x.grad])
            steps.step()
    states = {type(s).__name__ for p in steps.state.values() for s in p.values()}
    locals_ = {type(s.to_local()).__name__ for p in steps.state.values()
               for s in p.values() if hasattr(s, "to_local")}  # fmt: skip
    return {
        "out": out,
        "grads": [p.grad.full_tensor() for p in layers.parameters()],
        "weights": [p.detach().full_tensor() for p in layers.parameters()],
        "dtypes": [p.dtype for p in layers.parameters()],
        "shards": [tuple(p.to_local().shape) for p in layers.parameters()],
        "sent": sent,
        "states": states | locals_,
    }


@contextmanager
def gathered() -> Iterator[list[int]]:
    """Bytes that this rank hands to every all-gather."""
    sent: list[int] = []
    # FSDP2 calls the first from torch 2.13 on, the second before.
    name = next(n for n in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, n))
    whole = getattr(dist, name)

    def counted(output: Tensor, input: Tensor, *rest: Any, **options: Any) -> Any:
        sent.append(input.numel() * input.itemsize)
        return whole(output, input, *rest, **options)

    setattr(dist, name, counted)
    try:
        yield sent
    finally:
        setattr(dist, name, whole)


@dataclass(frozen=True)
class One:
    """A linear layer of its own."""

    rows: int
    columns: int
    recipe: Recipe = SQUARES

    def layer(self) -> nn.Linear:
        """The layer under its recipe."""
        torch.manual_seed(5)
        layer = nn.Linear(self.columns, self.rows, bias=False)
        with torch.no_grad():
            spread(layer.weight)
        apply(layer, self.recipe, functions=TRUTH)
        return layer


def payload(block: tuple[int, int]) -> int:
    """Bytes of one forward of a layer of 128 x 96, whose weight alone is gathered."""
    recipe = SQUARES if block == SQUARE else NARROW
    layer = One(128, 96, recipe).layer()
    quantize_gathers(layer, RANKS, quantized_twice=True)
    fully_shard(layer)
    with gathered() as sent:
        layer(torch.ones(8, 96))
    return sum(sent)


def narrow() -> Found:
    """Blocks of 1 x 32: beside the layer that is not sharded, and the one on the codes' values."""
    case = One(70, 96, NARROW)
    x = torch.randn(TOKENS, 96, generator=torch.Generator().manual_seed(8))
    layer, whole, values = case.layer(), case.layer(), case.layer()
    codes = mx_quantize(values.weight.detach(), block=ALONG_COLUMNS)
    values.weight.data = mx_dequantize(*codes, block=ALONG_COLUMNS)
    quantize_gathers(layer, RANKS, quantized_twice=True)
    fully_shard(layer)
    found = {}
    for name, own in (("sharded", layer), ("whole", whole), ("values", values)):
        given = x.clone().requires_grad_()
        y = own(given)
        y.square().sum().backward()
        found[name] = [y.detach(), given.grad]
    return found


def refusal(call: Callable[[], Any]) -> str:
    """What a ValueError says."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def misaligned(rows: int, recipe: Recipe) -> str:
    """A forward of a layer whose weight was wrapped without a look at its rows."""
    layer = One(rows, 64, recipe).layer()
    form = ShardFormat(block=recipe.linear.recipe.weight_block, functions=TRUTH)
    layer.weight = nn.Parameter(QuantizedGather(layer.weight.detach(), form))
    fully_shard(layer)
    return refusal(lambda: layer(torch.ones(4, 64)))


class Swapped(QuantizedGather):
    """Wrong: shards in the order of the ranks reversed."""

    def fsdp_post_all_gather(self, all_gather_outputs: Any, *args: Any, **options: Any) -> Any:
        turned = tuple(torch.cat(t.chunk(RANKS)[::-1]) for t in all_gather_outputs)
        return super().fsdp_post_all_gather(turned, *args, **options)


class NeighboursScales(QuantizedGather):
    """Wrong: each shard's codes with the scales of the next rank."""

    def fsdp_post_all_gather(self, all_gather_outputs: Any, *args: Any, **options: Any) -> Any:
        codes, scales = all_gather_outputs
        turned = scales.roll(scales.shape[0] // RANKS, 0)
        return super().fsdp_post_all_gather((codes, turned), *args, **options)


class FirstGatherKept(QuantizedGather):
    """Wrong: the weight of the first step for ever."""

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        if out is None:
            found = super().fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype)
            FirstGatherKept.first = {
                **getattr(FirstGatherKept, "first", {}), found[0].shape: found[0].clone()
            }  # fmt: skip
            return found
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(self.first[out.shape])
        return None


class RoundedOnce(QuantizedGather):
    """Wrong: codes of the float32 shard under a policy whose weights are bfloat16."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return super().fsdp_pre_all_gather(
            mesh, outer_size, outer_stride, module, MixedPrecisionPolicy()
        )


WRONG = (Swapped, NeighboursScales, FirstGatherKept, RoundedOnce)


def wrapped_by(kind: type[QuantizedGather]) -> Callable[[nn.Module], None]:
    """`quantize_gathers` with another kind of tensor."""

    def wrap(layers: nn.Module) -> None:
        quantize_gathers(layers, RANKS)
        for layer in (layers[0], layers[2]):
            own = layer.weight.detach()
            layer.weight = nn.Parameter(kind(own.high, own.form))

    return wrap


def stored() -> Found:
    """State dict of a sharded layer, and a layer that loads it."""
    first, second = One(64, 64).layer(), One(64, 64).layer()
    wanted = first.weight.detach().clone()
    with torch.no_grad():
        second.weight.zero_()
    for layer in (first, second):
        quantize_gathers(layer, RANKS)
        fully_shard(layer)
    second.load_state_dict(first.state_dict())
    x = torch.ones(4, 64)
    return {
        "wanted": wanted,
        "state": first.state_dict()["weight"].full_tensor(),
        "out": [first(x).detach(), second(x).detach()],
    }


def under_autocast() -> str:
    """A forward under autocast of weights that are gathered in float32."""
    layer = One(64, 64).layer()
    quantize_gathers(layer, RANKS)
    fully_shard(layer)
    with torch.autocast("cpu", torch.bfloat16):
        return refusal(lambda: layer(torch.ones(4, 64)))


def changed_recipe() -> str:
    """A forward of a layer that was put under another recipe after its weight was wrapped."""
    layer = One(64, 64).layer()
    quantize_gathers(layer, RANKS)
    apply(layer, replace(recipe_named("mxfp8_floor"), keep_roles=()), functions=TRUTH)
    fully_shard(layer)
    return refusal(lambda: layer(torch.ones(4, 64)))


def other_dim() -> str:
    """A forward of a weight that FSDP2 was told to shard along its columns."""
    layer = One(64, 64).layer()
    quantize_gathers(layer, RANKS)
    fully_shard(layer, shard_placement_fn=lambda parameter: Shard(1))
    return refusal(lambda: layer(torch.ones(4, 64)))


def run(rank: int, folder: str) -> None:
    """All of it on one rank; `rank.pt` in the folder has what was found."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'rendezvous'}", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    try:
        torch.save(everything(rank), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def everything(rank: int) -> Found:
    """Trainings by name, and single layers."""
    policy = POLICIES["bfloat16"]
    names = ("replicate", "shard")
    hybrid = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=names)
    copies = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=names)
    return {
        **{name: sharded(rank, SQUARES, own) for name, own in POLICIES.items()},
        **{kind.__name__: sharded(rank, SQUARES, policy, wrapped_by(kind)) for kind in WRONG},
        "kept": sharded(rank, SQUARES, policy, reshard_after_forward=False),
        "hybrid": sharded(rank, SQUARES, policy, mesh=hybrid),
        "copies": sharded(rank, SQUARES, policy, mesh=copies),
        "as it is": sharded(rank, SQUARES, policy, lambda layers: None),
        "payload": {block: payload(block) for block in (SQUARE, ALONG_COLUMNS)},
        "narrow": narrow(),
        "stored": stored(),
        "refused": {
            "misaligned": misaligned(96, SQUARES),
            "uneven": misaligned(63, NARROW),
            "empty": misaligned(1, NARROW),
            "autocast": under_autocast(),
            "recipe": changed_recipe(),
            "dim": other_dim(),
        },
    }
