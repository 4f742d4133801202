"""The Hopper forward of a norm with a linear layer: which calls it takes, why not others.

That it is right is for the conformance suite on such a GPU; that it compiles, for compile cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.impl import norm_linear
from jagbench.impl.kernels import norm_linear_launch as dispatch
from jagbench.impl.kernels.hopper import norm_product_launch as launch
from jagbench.impl.kernels.hopper.norm_product_launch import norm_product_problem, stages_of
from jagbench.impl.kernels.norm_linear_launch import NormCall
from jagbench.reference.norm_linear import norm_linear as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "device_problem", lambda device: None)
    monkeypatch.setattr(launch, "multiprocessors", lambda like: 132)


def reason(
    rows: int = 90, features: int = 512, width: int = 512, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    return norm_product_problem(torch.empty(1, dtype=dtype).expand(rows, features), width)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("features", "width"), [(512, 512), (8, 8), (200, 1000), (64, 132 * 128)])
def test_features_whose_slice_of_the_weight_fits_shared_memory_are_taken(
    as_on_hopper, features, width, dtype
):
    assert reason(features=features, width=width, dtype=dtype) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, "torch.float32"),
        ({"features": 520}, "at most 512 features .* got 520"),
        ({"features": 100}, "got 100 and 512"),
        ({"width": 4}, "got 512 and 4"),
        ({"rows": 2**29}, "536870912 rows"),
        ({"width": 132 * 128 + 8}, "16904 outputs"),
    ],
)
def test_why_a_call_is_not_taken_is_said(as_on_hopper, change: dict[str, Any], words: str):
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(reason(**change))


@pytest.mark.parametrize("features", range(64, 513, 64))
def test_the_rings_fit_shared_memory_beside_the_weight(features):
    steps = features // launch.DEPTH
    stages = stages_of(steps)
    tile = 2 * launch.BLOCK_ROWS * launch.DEPTH
    weight = 2 * launch.COLUMNS * features
    used = weight + launch.GROUPS * (stages + launch.BUFFERS) * tile
    assert stages >= 4
    assert used + 1024 <= 227 << 10


@pytest.mark.skipif(DEVICE == "cuda", reason="asks about a machine without a GPU")
def test_a_device_that_is_no_hopper_is_named():
    assert "interpreter" in str(reason()) or "NVIDIA GPU" in str(reason())


@pytest.fixture
def taken(as_on_hopper, monkeypatch: pytest.MonkeyPatch) -> list[NormCall]:
    """A stand-in for the launch that notes its calls and fills the output with ones."""
    calls: list[NormCall] = []

    def noted(call: NormCall, bias: Tensor | None, out: Tensor, statistics: Tensor) -> None:
        calls.append(call)
        out.fill_(1)
        statistics[0].fill_(1)

    monkeypatch.setattr(dispatch, "launch_norm_product", noted)
    return calls


def output(schedule: str, norm: str = "rms", features: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, features, generator=generator).to(DEVICE, torch.float16)
    weight = torch.randn(8, features, generator=generator).to(DEVICE, torch.float16)
    return norm_linear(x, weight, None, norm=norm, eps=1e-6, schedule=schedule)


@pytest.mark.parametrize("schedule", ["auto", "hopper"])
def test_the_hopper_kernel_gets_what_it_takes(taken, schedule):
    assert bool((output(schedule) == 1).all())
    assert [call.norm for call in taken] == ["rms"]


def test_a_portable_schedule_never_gets_the_hopper_kernel(taken):
    assert not bool((output("portable") == 1).all())
    assert not taken


def test_auto_takes_the_portable_kernel_where_the_hopper_kernel_cannot(taken):
    assert not bool((output("auto", features=20) == 1).all())
    assert not taken


def test_the_hopper_schedule_says_why_it_cannot(taken):
    with pytest.raises(NotImplementedError, match="got 20 and 8"):
        output("hopper", features=20)


def test_statistics_of_layer_norm_are_ready_before_the_hopper_kernel_runs(taken, monkeypatch):
    found: list[Tensor] = []

    def keep(call: NormCall, bias: Tensor | None, out: Tensor, statistics: Tensor) -> None:
        unit = (call.x.float() - statistics[0, :, None]) - statistics[1, :, None]
        unit = (unit * statistics[2, :, None]).to(call.x.dtype)
        found.append(torch.nn.functional.linear(unit, call.weight))
        out.copy_(found[0])

    monkeypatch.setattr(dispatch, "launch_norm_product", keep)
    generator = torch.Generator().manual_seed(4)
    x = (torch.randn(9, 24, generator=generator) + 3).to(DEVICE, torch.float16)
    weight = torch.randn(8, 24, generator=generator).to(DEVICE, torch.float16)
    ours = norm_linear(x, weight, None, norm="layer", eps=1e-6)
    truth = reference(x.double(), weight.double(), None, norm="layer", eps=1e-6)
    assert len(found) == 1
    torch.testing.assert_close(ours.double(), truth, atol=2e-2, rtol=5e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_every_row_of_a_large_batch_is_right_on_every_repeat(norm):
    generator = torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn(524_288, 512, generator=generator, device=DEVICE, dtype=torch.float16)
    weight = torch.randn(512, 512, generator=generator, device=DEVICE, dtype=torch.float16) / 22
    out = norm_linear(x, weight, None, norm=norm, eps=1e-6)
    for rows in range(0, x.shape[0], 65_536):
        part = slice(rows, rows + 65_536)
        truth = reference(x[part].float(), weight.float(), None, norm=norm, eps=1e-6)
        assert float((out[part].float() - truth).abs().max()) < 0.03
    for _ in range(20):
        assert torch.equal(norm_linear(x, weight, None, norm=norm, eps=1e-6), out)
