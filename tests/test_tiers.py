"""Which tier a call takes: the table, the dispatch of both passes, determinism, layouts, names."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jagbench import impl
from jagbench.impl import gdpa, jagged_attention, variants
from jagbench.impl.kernels import arguments, attention_launch, hopper, tuning
from jagbench.impl.kernels import jagged_attention_launch as portable
from jagbench.impl.kernels.activations import PER_HEAD, SOFTMAX
from jagbench.impl.kernels.arguments import Geometry
from jagbench.impl.kernels.attention_launch import BackwardCall, Bias
from jagbench.impl.kernels.hopper import support
from jagbench.impl.kernels.jagged_attention_launch import LOG2E
from jagbench.impl.kernels.mask import Mask
from jagbench.impl.kernels.tuning import Schedule, TileConfig
from jagbench.implementation import load

# By name: the package attribute of this name may be the function.
gdpa_module = importlib.import_module("jagbench.impl.kernels.gdpa")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASK = Mask(-1, -1, False)
GEOMETRY = Geometry(2, 2, 1, 64, 64, 9, 9, False)
SILU = 7
OPERATORS = {
    "jagged_attention": jagged_attention,
    "gdpa": lambda *a, **options: gdpa(*a, activation="silu", **options),
}
both_operators = pytest.mark.parametrize("operator", OPERATORS)


def tensors(dtype: torch.dtype = torch.float16, dim: int = 64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, n, dim).to(DEVICE, dtype).requires_grad_() for n in (2, 1, 1))
    offsets = torch.tensor([0, 4, 7], device=DEVICE, dtype=torch.int32)
    return q, k, v, offsets, offsets


def reason(
    dtype: torch.dtype = torch.float16,
    change: dict[str, int] | None = None,
    bias: int = 0,
    activations: tuple[int, ...] = (SOFTMAX.value,),
    deterministic: bool = False,
    mask: Mask = MASK,
) -> str | None:
    q, k, v, *_ = tensors(dtype)
    geometry = dataclasses.replace(GEOMETRY, **(change or {}))
    return support.unsupported(q, k, v, geometry, mask, bias, activations, deterministic)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if the device were a Hopper; its kernels are stand-ins that note their calls."""
    taken: list[str] = []

    def launch_forward(
        q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor,
        geometry: Geometry, mask: Mask, *, scale: float, out_scale: float, activation: int,
        max_k_len: int,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        taken.append("forward")
        # Softmax is told its scale in units of log 2, the portable launch in natural ones.
        natural = scale / LOG2E if activation == SOFTMAX.value else scale
        out, lse, _ = portable.launch_forward(
            q, k, v, q_offsets, k_offsets, geometry, mask, Bias(), natural, Schedule()
        )
        return out, lse if activation == SOFTMAX.value else None

    def launch_backward(
        q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, q_offsets: Tensor, k_offsets: Tensor,
        call: BackwardCall,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        taken.append("backward")
        return tuple(torch.ones_like(t) for t in (q, k, v))

    monkeypatch.setattr(support, "device_problem", lambda device: None)
    for name, launch in (("forward", launch_forward), ("backward", launch_backward)):
        module: Any = types.ModuleType(f"{hopper.__name__}.{name}_launch")
        setattr(module, launch.__name__, launch)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(hopper, f"{name}_launch", module, raising=False)
    tuning.take_used()
    return taken


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"dtype": torch.float32}, "torch.float32"),
        ({"change": {"qk_dim": 32, "v_dim": 32}}, "got 32 and 32"),
        ({"change": {"v_dim": 128}}, "got 64 and 128"),
        ({"bias": 2}, "bias"),
        ({"mask": Mask(8, 0, True, prefix=3)}, "prefix 3 and last_full 0"),
        ({"mask": Mask(8, 0, True, last_full=2, causal=True)}, "prefix 0 and last_full 2"),
        ({"activations": (1, 2)}, "one activation"),
        ({"activations": (PER_HEAD.value,)}, "one activation"),
        ({"deterministic": True}, "no fixed order"),
        ({"change": {"total_k": 2**29 + 1}}, "536870913 rows"),
        ({"change": {"total_q": 2**20, "shared_q": True, "batch": 2**11}}, "2147483648 rows"),
        ({"change": {"total_q": 2**29 - 1, "heads": 8}}, "row statistics"),
    ],
)
def test_what_the_tier_cannot_take_is_said(on_hopper, call: dict[str, Any], words: str) -> None:
    assert words in str(reason(**call))


@pytest.mark.parametrize("activation", [SOFTMAX.value, SILU])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_the_tier_can_take_has_no_reason_against_it(on_hopper, activation, dtype, dim) -> None:
    change = {"qk_dim": dim, "v_dim": dim}
    assert reason(dtype, change, activations=(activation,)) is None


@pytest.mark.skipif(DEVICE == "cuda", reason="asks about a machine without a GPU")
def test_a_device_that_is_no_hopper_is_named() -> None:
    assert "interpreter" in str(reason()) or "NVIDIA GPU" in str(reason())


@both_operators
def test_a_call_takes_the_tier_that_can_and_says_so(on_hopper, operator: str) -> None:
    OPERATORS[operator](*tensors()).sum().backward()
    assert on_hopper == ["forward", "backward"]
    used = impl.configuration(operator, None)  # type: ignore[arg-type]
    assert {"hopper_forward", "hopper_backward"} <= set(used)


def test_the_softmax_scale_reaches_the_tier_in_its_own_units(on_hopper) -> None:
    found, wanted = (
        jagged_attention(*tensors(), scale=0.3, schedule=tier) for tier in ("hopper", "portable")
    )
    assert on_hopper == ["forward"]
    torch.testing.assert_close(found, wanted)


@both_operators
@pytest.mark.parametrize(
    "schedule",
    [
        "portable",
        Schedule("v2"),
        Schedule(tier="portable"),
        Schedule(forward=TileConfig(64, 64, 4, 1), query_gradient=TileConfig(64, 64, 4, 1)),
    ],
    ids=["portable", "a generation", "a portable schedule", "portable tiles"],
)
def test_a_portable_choice_stays_portable(on_hopper, operator: str, schedule) -> None:
    OPERATORS[operator](*tensors(), schedule=schedule).sum().backward()
    assert on_hopper == []
    used = impl.configuration(operator, None)  # type: ignore[arg-type]
    assert not any(name.startswith("hopper") for name in used)


@both_operators
@pytest.mark.parametrize("form", ["split", "atomic"])
def test_a_backward_that_is_named_is_portable(on_hopper, operator: str, form) -> None:
    OPERATORS[operator](*tensors(), schedule=Schedule(backward=form)).sum().backward()
    assert on_hopper == ["forward"]


@both_operators
def test_deterministic_gradients_come_from_the_portable_backward(on_hopper, operator: str) -> None:
    OPERATORS[operator](*tensors(), deterministic=True).sum().backward()
    assert on_hopper == ["forward"]


@both_operators
@pytest.mark.parametrize("warn_only", [False, True])
def test_torch_demanding_determinism_is_heard_unless_it_only_warns(
    on_hopper, operator: str, warn_only: bool
) -> None:
    out = OPERATORS[operator](*tensors()).sum()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        out.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert on_hopper == (["forward", "backward"] if warn_only else ["forward"])


@both_operators
def test_the_tier_by_name_refuses_what_it_cannot_take(on_hopper, operator: str) -> None:
    function = OPERATORS[operator]
    with pytest.raises(NotImplementedError, match=r"torch\.float32"):
        function(*tensors(torch.float32), schedule="hopper")
    with pytest.raises(NotImplementedError, match="no fixed order"):
        function(*tensors(), schedule="hopper", deterministic=True)
    with torch.no_grad():
        function(*tensors(), schedule="hopper", deterministic=True)
    function(*tensors(), schedule="hopper").sum().backward()
    assert on_hopper == ["forward", "forward", "backward"]


@both_operators
def test_a_gradient_that_nobody_asked_for_is_not_kept(on_hopper, operator: str) -> None:
    q, k, v, *offsets = tensors()
    out = OPERATORS[operator](q, k.detach(), v.detach(), *offsets)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert bool((dq == 1).all())


@both_operators
@pytest.mark.parametrize("needs", [[True, False], [False, True]])
@pytest.mark.parametrize("schedule", [Schedule(), Schedule(backward="atomic")])
def test_the_shapes_of_gradients_do_not_hang_on_the_tier(
    on_hopper, operator: str, needs: list[bool], schedule: Schedule
) -> None:
    q, k, v, *offsets = (t.detach() for t in tensors())
    if operator == "gdpa":
        inputs = (q, q, k, v, *offsets, [SILU], 1.0, 1.0, MASK.encode(), schedule.encode(), needs)
        op = torch.ops.jagbench.gdpa_backward.default
    else:
        lse = torch.zeros(2, 9, device=DEVICE)
        inputs = (
            q, None, q, k, v, q, lse, *offsets, None, None, 0.1, MASK.encode(), schedule.encode(),
            [*needs, False],
        )  # fmt: skip
        op = torch.ops.jagbench.jagged_attention_backward.default
    shapes = [t.shape for t in op(*inputs)]
    meta = [t.to("meta") if isinstance(t, Tensor) else t for t in inputs]
    assert [t.shape for t in op(*meta)] == shapes
    assert shapes[0] == (q.shape if needs[0] else (0,))
    assert shapes[1] == (k.shape if needs[1] else (0,))


@pytest.mark.parametrize("given", ["hoper", None, 3])
@both_operators
def test_an_unknown_schedule_is_refused(operator: str, given: object) -> None:
    with pytest.raises(ValueError, match="portable"):
        OPERATORS[operator](*tensors(), schedule=given)


@pytest.mark.parametrize("tier", ["auto", "portable", "hopper"])
def test_a_tier_survives_its_encoding(tier) -> None:
    schedule = Schedule(tier=tier)
    assert Schedule.decode(schedule.encode()) == schedule
    repeatable = Schedule.decode(schedule.encode(repeatable=True))
    assert repeatable == dataclasses.replace(schedule, backward="split")
    assert repeatable.backward_tier == "portable"


def test_a_schedule_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="contradicts"):
        Schedule("v2", tier="hopper")
    with pytest.raises(ValueError, match="contradicts"):
        Schedule(tier="hopper", forward=TileConfig(64, 64, 4, 1))
    with pytest.raises(ValueError, match="tier must be"):
        Schedule(tier="ampere")  # type: ignore[arg-type]


def test_the_variants_say_which_tier_they_are() -> None:
    device = torch.device("meta")
    assert variants.v2.describe(device) == variants.portable.describe(device) == "tier portable"
    assert variants.hopper.describe(device).startswith("tier hopper, which cannot be had")
    assert impl.describe(device).startswith("tier portable (hopper ")
    assert load("jagbench.impl.variants:v1").describe(device) == "tier portable"
    assert load("jagbench.reference").describe(device) == ""


def test_a_hopper_variant_reports_what_it_lacks_as_unsupported() -> None:
    with pytest.raises(NotImplementedError, match="schedule 'hopper'"):
        variants.hopper.jagged_attention(*tensors(torch.float32))


ODD = {
    "heads apart": lambda t: t.expand(4, 2, 64).transpose(0, 1).contiguous().transpose(0, 1),
    "expanded rows": lambda t: t[:1].expand(4, 2, 64),
    "an odd stride": lambda t: torch.as_strided(t.new_zeros(4 * 129), (4, 2, 64), (129, 64, 1)),
    "an odd address": lambda t: t.new_zeros(4 * 128 + 1)[1:].view(4, 2, 64),
    "one row of an odd stride": lambda t: torch.as_strided(t, (1, 2, 64), (3, 64, 1)),
    "elements apart": lambda t: t.new_zeros(4, 2, 128)[..., ::2],
}


@pytest.mark.parametrize("case", ODD)
def test_what_tma_cannot_address_is_copied(case: str) -> None:
    tensor = ODD[case](torch.randn(4, 2, 64, dtype=torch.bfloat16))
    made = support.tma_layout(tensor)
    assert torch.equal(made, tensor)
    assert made.stride() == (128, 64, 1)
    assert made.data_ptr() % 16 == 0


@pytest.mark.parametrize("rows", [slice(None), slice(None, None, 2), slice(0, 0), slice(3, 4)])
def test_what_tma_can_address_is_taken_as_it_is(rows: slice) -> None:
    fused = torch.randn(4, 3, 2, 64, dtype=torch.bfloat16)[rows]
    tensor = fused[:, 1]
    assert support.tma_layout(tensor) is tensor


def test_offsets_are_looked_at_once_for_both_sides(monkeypatch) -> None:
    looked = []
    look = arguments._look_at
    monkeypatch.setattr(arguments, "_look_at", lambda *a: looked.append(a[1]) or look(*a))
    q, k, v, offsets, _ = tensors()
    longer = torch.cat([q, q])
    for _ in range(2):
        jagged_attention(longer, k, v, offsets, offsets)
    assert looked == ["q_offsets"]
    with pytest.raises(ValueError, match="k_offsets end at 7, but there are 6 rows"):
        jagged_attention(longer, k[:6], v[:6], offsets, offsets)


def test_activations_of_heads_are_tabled_once() -> None:
    q, k, v, *offsets = tensors(torch.float32, 32)
    outs = [gdpa(q, k, v, *offsets, activation=["silu", "relu"]) for _ in range(2)]
    table = gdpa_module._activation_table((7, 5), q.device)
    assert table is gdpa_module._activation_table((7, 5), q.device)
    assert table.tolist() == [7, 5]
    assert torch.equal(*outs)


@both_operators
def test_a_second_derivative_is_refused(operator: str) -> None:
    q, *rest = tensors(torch.float32, 32)
    out = OPERATORS[operator](q, *rest)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "jagbench":
            self.names.append(function._schema.name)
        return function(*arguments, **(options or {}))


@both_operators
def test_a_dispatch_mode_sees_each_op_once(operator: str) -> None:
    with _Seen() as seen:
        OPERATORS[operator](*tensors(torch.float32, 32)).sum().backward()
    assert seen.names == [f"jagbench::{operator}_forward", f"jagbench::{operator}_backward"]


def test_a_demand_for_order_needs_more_than_a_warning() -> None:
    assert not attention_launch.order_is_demanded()
