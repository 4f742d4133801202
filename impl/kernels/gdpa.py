"""GDPA: custom ops, autograd, public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from jagbench.impl.kernels.activations import ACTIVATION_IDS, PER_HEAD, activation_set
from jagbench.impl.kernels.arguments import (
    Geometry,
    check_arguments,
    check_both_offsets,
    empty_output,
    geometry_of,
    kernel_layout,
    tensor_arguments,
)
from jagbench.impl.kernels.attention_launch import (
    BackwardCall,
    Needs,
    attention_gradients,
    check_repeatable,
    flops_of_offsets,
    multiprocessors,
    require_device,
)
from jagbench.impl.kernels.gdpa_forward import gdpa_forward_kernel, gdpa_short_keys_kernel
from jagbench.impl.kernels.hopper.support import takes_hopper, tma_layout
from jagbench.impl.kernels.mask import Mask, mask_of
from jagbench.impl.kernels.operators import define, differentiable
from jagbench.impl.kernels.schedule import build_tile_list
from jagbench.impl.kernels.tuning import (
    Schedule,
    Tier,
    TileConfig,
    as_schedule,
    note_tier,
    padded,
    tile_config,
)

NAME = "gdpa"
_NAMES = {code: name for name, code in ACTIVATION_IDS.items()}
# Query tiles one program of the short-key kernel walks at most.
_CHUNK = 8
# Activation ids of calls with one per head, by (ids, device, stream).
_tables: dict[tuple[tuple[int, ...], torch.device, int], Tensor] = {}


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    activation: str | Sequence[str],
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    causal: bool = False,
    align: str = "end",
    window: tuple[int | None, int | None] | None = None,
    prefix: int = 0,
    last_full: int = 0,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    deterministic: bool = False,
    schedule: Schedule | Tier = "auto",
) -> Tensor:
    """Generalised dot-product attention: O = post_scale act(pre_scale Q K^T) V, no normaliser.

    Shapes, dtypes, offsets, mask, padding, deterministic and schedule as in `jagged_attention`.
    Masked pairs add exactly 0 to the output and to every gradient, whatever act(0) is.

    activation: a name of `activations.ACTIVATION_IDS`, or one name per query head.
    pre_scale: inside the activation; post_scale: outside it.
    max_k_len: a hint; at most 128 chooses the kernel that keeps K and V on chip. A sequence that
        is longer all the same is computed in full.

    Returns `[total_q, heads, v_dim]` (dense query: `[batch, rows, heads, v_dim]`) in q's dtype.
    Raises ValueError for malformed arguments, NotImplementedError for what no kernel does yet.
    Source: PyTorch blog "Generalized Dot-Product Attention" (2026-03); Kunlun, arXiv 2602.10016.
    """
    mask = mask_of(NAME, causal, align, window, prefix, last_full)
    plan = as_schedule(NAME, schedule)
    q, k, v, q_offsets, k_offsets = tensor_arguments(NAME, q, k, v, q_offsets, k_offsets)
    check_arguments(NAME, q, k, v, q_offsets, k_offsets)
    if deterministic:
        check_repeatable(NAME, plan, q, k, v)
    out: Tensor = _differentiable_op(
        q, k, v, q_offsets, k_offsets, activation_codes(activation, q.shape[1]),
        float(pre_scale), float(post_scale), mask.encode(),
        -1 if max_k_len is None else int(max_k_len), plan.encode(repeatable=deterministic),
    )  # fmt: skip
    return out


def activation_codes(
    activation: str | Sequence[str], heads: int, operator: str = NAME
) -> list[int]:
    """One id, or one per head where they differ; ValueError names what is known."""
    names = [activation] if isinstance(activation, str) else list(activation)
    unknown = [name for name in names if name not in ACTIVATION_IDS]
    if unknown:
        known = ", ".join(ACTIVATION_IDS)
        raise ValueError(f"{operator}: unknown activation {unknown[0]!r}; known: {known}")
    if not isinstance(activation, str) and len(names) != heads:
        raise ValueError(f"{operator}: {len(names)} activations for {heads} heads")
    codes = [ACTIVATION_IDS[name] for name in names]
    return codes[:1] if len(set(codes)) == 1 else codes


def activation_arguments(codes: list[int], device: torch.device) -> tuple[int, int, Tensor | None]:
    """Kernel's ACTIVATION, ACTIVATION_SET and table of ids."""
    if len(codes) == 1:
        return codes[0], 0, None
    chosen = activation_set(tuple(_NAMES[code] for code in codes))
    return PER_HEAD.value, chosen, _activation_table(tuple(codes), device)


def _activation_table(codes: tuple[int, ...], device: torch.device) -> Tensor:
    """Ids `[heads]`, int32, made once for each stream: one fill a head is dear in every call."""
    stream, capturing = 0, False
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        capturing = torch.cuda.is_current_stream_capturing()
    found = _tables.get((codes, device, stream))
    if found is None:
        # Filled value by value: a copy from host memory would wait for the stream.
        found = torch.empty(len(codes), dtype=torch.int32, device=device)
        for index, code in enumerate(codes):
            found[index].fill_(code)
        # What a graph captures is filled when it is replayed, in memory of the graph's own.
        if not capturing:
            _tables[codes, device, stream] = found
    return found


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    activation: list[int],
    pre_scale: float,
    post_scale: float,
    mask: list[int],
    max_k_len: int,
    schedule: list[int],
) -> Tensor:
    """Arguments as `gdpa` has checked them; only the offsets' values are not yet."""
    require_device(NAME, q)
    geometry = geometry_of(q, k, v, q_offsets, k_offsets)
    check_both_offsets(NAME, geometry, q_offsets, k_offsets)
    plan, seen = Schedule.decode(schedule), Mask.decode(mask)
    scales = (pre_scale, post_scale)
    with torch.cuda.device_of(q):
        if takes_hopper(NAME, plan.forward_tier, q, k, v, geometry, seen, 0, activation):
            return _forward_on_hopper(
                q, k, v, q_offsets, k_offsets, geometry, seen, activation[0], scales, max_k_len
            )
        return _portable_forward(
            q, k, v, q_offsets, k_offsets, geometry, seen, plan, activation, scales, max_k_len
        )


def _forward_on_hopper(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor,
    geometry: Geometry, mask: Mask, activation: int, scales: tuple[float, float], max_k_len: int,
) -> Tensor:  # fmt: skip
    """Imported here: Gluon is asked for by a launch alone."""
    from jagbench.impl.kernels.hopper import forward_launch

    q, k, v = tma_layout(q), tma_layout(k), tma_layout(v)
    out, _ = forward_launch.launch_forward(
        q, k, v, q_offsets, k_offsets, geometry, mask,
        scale=scales[0], out_scale=scales[1], activation=activation, max_k_len=max_k_len,
    )  # fmt: skip
    note_tier("hopper_forward")
    return out


def _portable_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor,
    geometry: Geometry, mask: Mask, plan: Schedule, activation: list[int],
    scales: tuple[float, float], max_k_len: int,
) -> Tensor:  # fmt: skip
    """With K and V kept on chip where keys are short, else by walking them."""
    q, k, v = (kernel_layout(t) for t in (q, k, v))
    sizes = (q, geometry.qk_dim, geometry.v_dim, plan.forward)
    persistent = plan.variant == "v3"
    tiles = tile_config("gdpa_short", *sizes)
    resident = 0 if persistent else _resident_key_tiles(geometry, max_k_len, tiles)
    if resident != 1:
        tiles = tile_config("gdpa_short2" if resident else "gdpa", *sizes)
    if resident:
        return _launch_short_keys(
            q, k, v, q_offsets, k_offsets, geometry, mask, tiles, activation, scales, resident
        )
    return _launch_walk(
        q, k, v, q_offsets, k_offsets, geometry, mask, tiles, activation, scales, persistent
    )


def _resident_key_tiles(geometry: Geometry, max_k_len: int, tiles: TileConfig) -> int:
    """Key tiles to keep on chip, 1 or 2; 0 if keys are not short or queries not the longer side.

    Told by max_k_len, else by the mean length: a wrong guess costs time, never rows.
    """
    if geometry.batch == 0 or max(padded(geometry.qk_dim), padded(geometry.v_dim)) > 128:
        return 0
    if max_k_len < 0 and geometry.mean_q < 2 * geometry.mean_k:
        return 0
    length = max_k_len if max_k_len >= 0 else geometry.mean_k
    return 1 if length <= tiles.block_k else 2 if length <= 2 * tiles.block_k else 0


def _launch_walk(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor,
    g: Geometry, mask: Mask, tiles: TileConfig, activation: list[int],
    scales: tuple[float, float], persistent: bool,
) -> Tensor:  # fmt: skip
    """Forward by the kernel that walks the keys of each query tile."""
    out = torch.empty(g.out_shape, dtype=q.dtype, device=q.device)
    items = build_tile_list(q_offsets, k_offsets, g.total_q, tiles.block_q, span=mask.span)
    grid = items.upper * g.heads
    if not grid:
        return out
    code, chosen, ids = activation_arguments(activation, q.device)
    gdpa_forward_kernel[(min(grid, multiprocessors(q)) if persistent else grid,)](
        q, k, v, out, ids, q_offsets, k_offsets, items.sequence, items.block, items.count,
        g.batch, g.total_q, g.total_k, *mask.numbers, *scales,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        heads=g.heads, group=g.group, D=g.qk_dim, DV=g.v_dim,
        BLOCK_D=padded(g.qk_dim), BLOCK_DV=padded(g.v_dim),
        BLOCK_Q=tiles.block_q, BLOCK_K=tiles.block_k, **mask.portable,
        ACTIVATION=code, ACTIVATION_SET=chosen, SHARED_Q=g.shared_q, PERSISTENT=persistent,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def _launch_short_keys(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor,
    g: Geometry, mask: Mask, tiles: TileConfig, activation: list[int],
    scales: tuple[float, float], resident: int,
) -> Tensor:  # fmt: skip
    """Forward by the kernel that keeps short keys on chip."""
    out = torch.empty(g.out_shape, dtype=q.dtype, device=q.device)
    items = build_tile_list(q_offsets, k_offsets, g.total_q, _CHUNK * tiles.block_q, span=mask.span)
    grid = items.upper * g.heads
    if not grid:
        return out
    code, chosen, ids = activation_arguments(activation, q.device)
    gdpa_short_keys_kernel[(grid,)](
        q, k, v, out, ids, q_offsets, k_offsets, items.sequence, items.block,
        g.batch, g.total_q, g.total_k, *mask.numbers, *scales,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        heads=g.heads, group=g.group, D=g.qk_dim, DV=g.v_dim,
        BLOCK_D=padded(g.qk_dim), BLOCK_DV=padded(g.v_dim),
        BLOCK_Q=tiles.block_q, BLOCK_K=tiles.block_k,
        KEY_TILES=resident, CHUNK=_CHUNK,
        **mask.portable, ACTIVATION=code, ACTIVATION_SET=chosen, SHARED_Q=g.shared_q,
        NUM_STAGES=tiles.num_stages, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    activation: list[int],
    pre_scale: float,
    post_scale: float,
    mask: list[int],
    max_k_len: int,
    schedule: list[int],
) -> Tensor:
    return empty_output(q, v, q_offsets, k_offsets)[0]


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    activation: list[int],
    pre_scale: float,
    post_scale: float,
    mask: list[int],
    schedule: list[int],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that `needs` asks for (query, key and value); others are empty tensors."""
    geometry = geometry_of(q, k, v, q_offsets, k_offsets)
    rows = (geometry.out_rows, geometry.heads, geometry.v_dim)
    code, chosen, ids = activation_arguments(activation, q.device)
    with torch.cuda.device_of(q):
        call = BackwardCall(
            geometry=geometry,
            mask=Mask.decode(mask),
            schedule=Schedule.decode(schedule),
            activation=code,
            activation_set=chosen,
            activation_ids=ids,
            score_scale=pre_scale,
            grad_scale=pre_scale * post_scale,
            value_scale=post_scale,
            needs=Needs(*needs),
        )
        dq, dk, dv, _ = attention_gradients(
            NAME, q, k, v, d_out.reshape(rows), q_offsets, k_offsets, call
        )
    return dq, dk, dv


def _backward_fake(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    activation: list[int],
    pre_scale: float,
    post_scale: float,
    mask: list[int],
    schedule: list[int],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        t.new_empty(t.shape if need else 0)
        for t, need in zip((q, k, v), (needs[0], needs[1], needs[1]), strict=True)
    )
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, q_offsets, k_offsets, *constants = inputs
    ctx.save_for_backward(q, k, v, q_offsets, k_offsets)
    activation, pre, post, mask, _, schedule = constants
    ctx.constants = (activation, pre, post, mask, schedule)


def _autograd(ctx: Any, wanted: tuple[bool, ...], d_out: Tensor) -> tuple[Any, ...]:
    dq, dk, dv = _backward_op(
        d_out, *ctx.saved_tensors, *ctx.constants, [wanted[0], wanted[1] or wanted[2]]
    )
    gradients = (
        dq if wanted[0] else None,
        dk if wanted[1] else None,
        dv if wanted[2] else None,
    )
    return (*gradients, *(None,) * 8)


_forward_op = define("gdpa_forward", _forward, _forward_fake)
_backward_op = define("gdpa_backward", _backward, _backward_fake)
_differentiable_op = differentiable(_forward_op, _setup, _autograd)


@register_flop_formula(torch.ops.jagbench.gdpa_forward, get_raw=True)
def _forward_flops(
    q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any, activation: Any, pre_scale: float,
    post_scale: float, mask: list[int], *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return flops_of_offsets(q, v, q_offsets, k_offsets, mask)


@register_flop_formula(torch.ops.jagbench.gdpa_backward, get_raw=True)
def _backward_flops(
    d_out: Any, q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any, activation: Any,
    pre_scale: float, post_scale: float, mask: list[int], *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    # Five matrix products against the forward's two: the scores are recomputed.
    return flops_of_offsets(q, v, q_offsets, k_offsets, mask) * 5 // 2
