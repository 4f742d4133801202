"""The activations of device code against the float64 reference, and the interpreter's helpers."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from jagbench.impl.kernels import activations as device_code
from jagbench.impl.kernels.interpreter import INTERPRET, dot, round_to, to_float
from jagbench.reference.activations import ACTIVATIONS, HARDWARE_TANH_ERROR, derivative

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET.value else "cpu"
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not INTERPRET.value, reason="needs a GPU or interpreter"
    ),
    # The sigmoid's exponential overflows to inf on purpose; numpy, in the interpreter, says so.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

NAMES = sorted(device_code.ACTIVATION_IDS)
HARDWARE = device_code.HARDWARE_TANH.value
FAST = ("fast_gelu", "fast_silu", "fast_gelu_bf16")
SIZE = 1024


@triton.jit
def _apply(x, y, dy, ID: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    values = tl.load(x + at)
    _, slope = device_code.activate_and_derivative(values, ID)
    tl.store(y + at, device_code.activate(values, ID))
    tl.store(dy + at, slope)


@triton.jit
def _apply_dynamic(x, ids, plain, y, dy, AMONG: tl.constexpr, SIZE: tl.constexpr):
    head = tl.program_id(0)
    at = tl.arange(0, SIZE)
    values = tl.load(x + at)
    activation_id = tl.load(ids + head)
    value, slope = device_code.activate_and_derivative_dynamic(values, activation_id, AMONG)
    at += head * SIZE
    tl.store(plain + at, device_code.activate_dynamic(values, activation_id, AMONG))
    tl.store(y + at, value)
    tl.store(dy + at, slope)


@triton.jit
def _apply_branching(x, y, dy, ID: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    value, slope = device_code.activate_and_derivative(tl.load(x + at), ID, True)
    tl.store(y + at, value)
    tl.store(dy + at, slope)


@triton.jit
def _round(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, round_to(tl.load(x + at), y.dtype.element_ty))


@triton.jit
def _widen(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, to_float(tl.load(x + at)))


@triton.jit
def _multiply(a, b, c, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = dot(tl.load(a + at), tl.load(b + at))
    tl.store(c + at, dot(tl.load(a + at), tl.load(b + at), product))


def _scores() -> torch.Tensor:
    """Special values off the kinks, then normal ones of several widths, fp32."""
    special = [1.0, 1.2, 1.25, 1.3, 5.0, 20.0, 100.0, 1e4, 1e18, 1e-30, 1e-40]
    special = special + [-value for value in special]
    generator = torch.Generator().manual_seed(7)
    random = torch.randn(SIZE - len(special), generator=generator)
    random *= torch.tensor([0.3, 1.0, 4.0]).repeat(SIZE)[: random.numel()]
    return torch.cat([torch.tensor(special), random])


def _device(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.to(DEVICE)
    y, dy = torch.empty_like(x), torch.empty_like(x)
    _apply[(1,)](x, y, dy, device_code.ACTIVATION_IDS[name], SIZE)
    return y.cpu().double(), dy.cpu().double()


def test_every_activation_of_the_reference_has_a_device_id() -> None:
    assert set(device_code.ACTIVATION_IDS) == set(ACTIVATIONS)
    assert sorted(device_code.ACTIVATION_IDS.values()) == list(range(len(ACTIVATIONS)))


@pytest.mark.parametrize("name", NAMES)
def test_an_activation_equals_the_float64_reference(name: str) -> None:
    x = _scores()
    y, _ = _device(x, name)
    truth = ACTIVATIONS[name].forward(x.double())
    tolerance = HARDWARE_TANH_ERROR / 2 if HARDWARE and name in FAST else 0.0
    error = (y - truth).abs() / truth.abs().maximum(x.double().abs()).clamp(min=1)
    assert error.max().item() <= tolerance + 2.5e-7


@pytest.mark.parametrize("name", NAMES)
def test_a_derivative_equals_the_float64_reference(name: str) -> None:
    x = _scores()
    _, dy = _device(x, name)
    truth = derivative(name)(x.double())
    # 1 - gate loses the last bits of the gate, times x u' < 12 where the gate is not yet 1; the
    # hardware's gate is off by the same factor of its own error.
    tolerance = 12 * HARDWARE_TANH_ERROR / 2 if HARDWARE and name in FAST else 0.0
    error = (dy - truth).abs() / truth.abs().clamp(min=1)
    assert error.max().item() <= tolerance + 2e-6


@pytest.mark.parametrize("name", NAMES)
def test_the_derivative_belongs_to_the_forward_computed(name: str) -> None:
    x = torch.linspace(-2.9, 2.9, SIZE) + 1e-4
    near_jump = ((x.abs() - 1.25).abs() < 0.05) | (x.abs() < 0.05)
    step = 2.0**-6
    above, below = _device(x + step, name)[0], _device(x - step, name)[0]
    slope = (above - below) / ((x + step).double() - (x - step).double())
    dy = _device(x, name)[1]
    tolerance = 3 * HARDWARE_TANH_ERROR / step if HARDWARE and name in FAST else 2e-3
    assert (slope - dy)[~near_jump].abs().max().item() <= tolerance


@pytest.mark.parametrize("name", NAMES)
def test_zero_of_either_sign_gives_zero_and_the_reference_slope(name: str) -> None:
    x = torch.zeros(SIZE)
    x[::2] = -0.0
    y, dy = _device(x, name)
    assert y.abs().max().item() == 0.0
    assert torch.allclose(dy, derivative(name)(x.double()), atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_score_stays_nan(name: str) -> None:
    y, _ = _device(torch.full((SIZE,), torch.nan), name)
    assert y.isnan().all()


@pytest.mark.parametrize("names", [tuple(NAMES), ("relu", "silu", "relu", "identity")])
def test_the_activation_of_a_run_time_id_equals_the_compiled_one(names: tuple[str, ...]) -> None:
    x = _scores().to(DEVICE)
    ids = torch.tensor([device_code.ACTIVATION_IDS[name] for name in names], dtype=torch.int32)
    plain, y, dy = torch.empty(3, len(names), SIZE, device=DEVICE)
    among = device_code.activation_set(names)
    _apply_dynamic[(len(names),)](x, ids.to(DEVICE), plain, y, dy, among, SIZE)
    for head, name in enumerate(names):
        value, slope = _device(x, name)
        # Compiled apart, the two may fuse multiplications and additions differently.
        assert torch.allclose(plain[head].cpu().double(), value, rtol=1e-5, atol=1e-6)
        assert torch.allclose(y[head].cpu().double(), value, rtol=1e-5, atol=1e-6)
        assert torch.allclose(dy[head].cpu().double(), slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gelu_taylor6", "gelu_taylor10"])
@pytest.mark.parametrize("width", [1e-3, 1.0])
def test_skipping_the_taylor_fallback_changes_no_result(name: str, width: float) -> None:
    x = _scores().clamp(-100, 100) * width
    y, dy = torch.empty(2, SIZE, device=DEVICE)
    _apply_branching[(1,)](x.to(DEVICE), y, dy, device_code.ACTIVATION_IDS[name], SIZE)
    value, slope = _device(x, name)
    assert torch.allclose(y.cpu().double(), value, rtol=1e-5, atol=1e-6)
    assert torch.allclose(dy.cpu().double(), slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_to_nearest_even_as_in_torch(dtype: torch.dtype) -> None:
    x = _scores()
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11])
    ends = torch.tensor([torch.inf, -torch.inf, 3.4e38, -0.0, 65519.0, 65520.0, 1e-39])
    x[:11] = torch.cat([ties, ends])
    y = torch.empty(SIZE, dtype=dtype, device=DEVICE)
    _round[(1,)](x.to(DEVICE), y, SIZE)
    assert torch.equal(y.cpu(), x.to(dtype))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1])
def test_nan_of_any_payload_rounds_to_nan(bits: int) -> None:
    x = torch.full((SIZE,), bits, dtype=torch.int32).view(torch.float32)
    y = torch.empty(SIZE, dtype=torch.bfloat16, device=DEVICE)
    _round[(1,)](x.to(DEVICE), y, SIZE)
    assert y.isnan().all()


def test_every_bfloat16_widens_exactly() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    y = torch.empty(x.numel(), device=DEVICE)
    _widen[(1,)](x.to(DEVICE), y, x.numel())
    assert torch.equal(y.cpu().nan_to_num(1.0), x.float().nan_to_num(1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_accumulates_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, 64, 64, generator=generator).to(dtype)
    c = torch.empty(64, 64, device=DEVICE)
    _multiply[(1,)](a.to(DEVICE), b.to(DEVICE), c, 64)
    assert torch.allclose(c.cpu().double(), 2 * (a.double() @ b.double()), rtol=1e-5, atol=1e-4)
