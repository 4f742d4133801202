"""The Hopper backward of block attention: which calls it takes, why not others, who decides.

That it is right is for the conformance suite on such a GPU; that it compiles, for compile cases.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.impl import block_attention
from jagbench.impl.kernels import block_attention_launch as dispatch
from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.attention_launch import Needs
from jagbench.impl.kernels.block_attention_launch import BlockCall
from jagbench.impl.kernels.hopper import block_gradient_launch as launch
from jagbench.impl.kernels.hopper.block_gradient_launch import block_gradient_problem
from jagbench.impl.kernels.tuning import Schedule
from jagbench.reference.rotary import position_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GEOMETRY = Geometry(2, 3, 3, 128, 128, 90, 90, False)
TABLE = position_table(70, 128).to(torch.float32)
CALL = BlockCall(64, 0.1, TABLE, by_token=False, rotate_values=True)


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "device_problem", lambda device: None)


def reason(
    geometry: dict[str, Any] | None = None,
    call: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    needs: Needs = Needs(),  # noqa: B008 - frozen
) -> str | None:
    return block_gradient_problem(
        torch.empty(0, dtype=dtype, device=DEVICE),
        dataclasses.replace(GEOMETRY, **(geometry or {})),
        dataclasses.replace(CALL, **(call or {})),
        needs,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("change", [{}, {"by_token": True}, {"rotate_values": False}])
def test_blocks_of_64_rows_and_128_elements_with_rotary_are_taken(
    as_on_hopper, change, heads, dtype
):
    assert reason({"heads": heads, "kv_heads": heads}, change, dtype) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"call": {"portable": True}}, "schedule"),
        ({"call": {"qk_norm_eps": 1e-6}}, "normalises"),
        ({"needs": Needs(query=False)}, "not all are wanted"),
        ({"needs": Needs(key_value=False)}, "not all are wanted"),
        ({"dtype": torch.float32}, "torch.float32"),
        ({"call": {"block_size": 32}}, "64 rows, got 32"),
        ({"geometry": {"qk_dim": 64, "v_dim": 64}}, "got 64 and 64"),
        ({"geometry": {"v_dim": 64}}, "got 128 and 64"),
        ({"geometry": {"kv_heads": 1}}, "got 3 of them to one"),
        ({"call": {"table": None}}, "without rotary"),
        ({"call": {"table": TABLE[:, :64]}}, "got 64 elements"),
        ({"geometry": {"total_q": 2**29, "total_k": 2**29}}, "536870912 rows"),
        (
            {"geometry": {"heads": 2**18, "kv_heads": 2**18, "total_q": 2**20}},
            "blocks of all heads",
        ),
    ],
)
def test_why_a_call_is_not_taken_is_said(as_on_hopper, arguments: dict[str, Any], words: str):
    assert words in str(reason(**arguments))


@pytest.mark.skipif(DEVICE == "cuda", reason="asks about a machine without a GPU")
def test_a_device_that_is_no_hopper_is_named():
    assert "interpreter" in str(reason()) or "NVIDIA GPU" in str(reason())


def gradients(schedule: Any, leaves: str = "qkv") -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    t = {n: torch.randn(9, 1, 128, generator=generator).to(DEVICE, torch.float16) for n in "qkv"}
    for name in leaves:
        t[name].requires_grad_()
    offsets = torch.tensor([0, 4, 7], device=DEVICE, dtype=torch.int32)
    table = TABLE.to(DEVICE)
    block_attention(**t, offsets=offsets, rotary=table, schedule=schedule).sum().backward()
    return [t[name].grad for name in leaves]  # type: ignore[misc]


@pytest.fixture
def taken(as_on_hopper, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A stand-in for the launch that notes its calls, and gives gradients of ones."""
    calls: list[tuple[Any, ...]] = []

    def noted(
        q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, offsets: Tensor, call: BlockCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        calls.append((d_out.shape, call))
        return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)

    monkeypatch.setattr(dispatch, "launch_block_gradient", noted)
    return calls


def test_auto_gives_the_hopper_kernel_what_it_takes(taken):
    assert all(bool((t == 1).all()) for t in gradients("auto"))
    ((shape, call),) = taken
    assert tuple(shape) == (9, 1, 128)
    assert (call.block_size, call.by_token, call.rotate_values) == (64, False, True)


@pytest.mark.parametrize("schedule", ["portable", Schedule(backward="split")])
def test_a_portable_schedule_never_gets_the_hopper_kernel(taken, schedule):
    assert not all(bool((t == 1).all()) for t in gradients(schedule))
    assert not taken


def test_a_call_that_wants_fewer_gradients_stays_portable(taken):
    gradients("auto", "kv")
    assert not taken
