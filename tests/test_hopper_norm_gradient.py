"""The Hopper weight gradient of norm_linear: which calls it takes, why not others, how it deals.

That it is right is shown on such a GPU, below; that it compiles, by compile cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.impl.kernels.hopper import norm_gradient_launch as launch
from jagbench.impl.kernels.hopper.norm_gradient_launch import (
    launch_weight_gradient,
    output_tile,
    splits_of,
    why_not,
)
from jagbench.impl.kernels.hopper.support import device_problem
from jagbench.impl.kernels.norm_linear_launch import NormCall, launch_forward
from jagbench.impl.kernels.tuning import take_used

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROBLEM = device_problem(torch.device(DEVICE))
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def call_of(
    rows: int = 70, features: int = 128, width: int = 256, dtype: torch.dtype = torch.bfloat16,
    layer: bool = True, offsets: Tensor | None = None,
) -> tuple[NormCall, Tensor]:  # fmt: skip
    """A call and an upstream gradient, uniform on [-1, 1]."""
    generator = torch.Generator().manual_seed(rows + features + width)

    def draw(*shape: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=generator) - 1).to(DEVICE, dtype)

    call = NormCall(draw(rows, features), draw(width, features), offsets, layer, 1e-5)
    return call, draw(rows, width)


# -- which calls -----------------------------------------------------------------------------------


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "device_problem", lambda device: None)


@HALVES
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(
    ("rows", "features", "width"), [(0, 128, 128), (1, 512, 512), (9, 1152, 384)]
)
def test_features_and_outputs_in_whole_tiles_are_taken(
    as_on_hopper, rows, features, width, layer, dtype
):
    call, d_out = call_of(rows, features, width, dtype, layer)
    assert why_not(call, d_out) is None


def test_rows_of_a_wider_matrix_are_taken(as_on_hopper):
    call, d_out = call_of()
    wide = torch.zeros(70, 400, dtype=torch.bfloat16, device=DEVICE)
    call = NormCall(wide[:, 8:136], call.weight, None, True, 1e-5)
    assert why_not(call, d_out) is None


def test_whatever_the_strides_of_a_single_row_are_it_is_taken(as_on_hopper):
    call, _ = call_of(1)
    one = torch.zeros(3, 256, dtype=torch.bfloat16, device=DEVICE)
    assert why_not(call, one.as_strided((1, 256), (3, 1))) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": torch.float32}, "torch.float32"),
        ({"features": 192}, "got 192 and 256"),
        ({"width": 320}, "got 128 and 320"),
    ],
)
def test_why_types_and_sizes_are_not_taken_is_said(as_on_hopper, arguments: dict[str, Any], words):
    assert words in str(why_not(*call_of(**arguments)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.to(torch.float16), "torch.bfloat16 and torch.float16"),
        (lambda d: d.T.contiguous().T, "d_out: strides (1, 70)"),
        (lambda d: d[:1].expand(70, -1), "d_out: strides (0, 1)"),
        (lambda d: torch.cat([d, d[:, :4]], 1)[:, :256], "d_out: strides (260, 1)"),
        (lambda d: torch.cat([d, d[:, :8]], 1)[:, 4:260], "d_out: it starts 8 bytes past"),
    ],
    ids=["type", "transposed", "expanded", "stride", "address"],
)
def test_why_an_upstream_gradient_is_not_taken_is_said(as_on_hopper, change, words):
    call, d_out = call_of()
    assert words in str(why_not(call, change(d_out)))


def test_too_many_rows_are_named(as_on_hopper):
    call, d_out = call_of(2)
    many = call.x[:1].expand(2**29, -1)
    reason = why_not(NormCall(many, call.weight, None, True, 1e-5), d_out)
    assert "536870912 rows" in str(reason)


@pytest.mark.skipif(PROBLEM is None, reason="asks about a device that is no Hopper GPU")
def test_a_device_that_is_no_hopper_is_named():
    assert why_not(*call_of()) == PROBLEM


# -- how rows are dealt ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "tiles", "expected"),
    [(4096, 8, 16), (4096, 32, 4), (4096, 1, 132), (4096, 512, 1), (1, 8, 1), (3, 1, 3)],
)
def test_programs_fill_132_multiprocessors_where_rows_last(steps, tiles, expected):
    assert splits_of(steps, tiles, 132) == expected


def test_a_second_wave_is_begun_only_where_that_ends_sooner():
    """72 tiles: one wave leaves 60 of 132 multiprocessors idle, seven runs in four waves 24."""
    assert splits_of(4096, 72, 132) == 7
    assert splits_of(16, 72, 132) == 1


def test_wide_tiles_where_outputs_allow_it():
    assert [output_tile(n)[0] for n in (128, 256, 384, 512)] == [128, 256, 128, 256]


@pytest.mark.parametrize("rows", [0, 1, 700])
def test_partial_products_of_every_split_are_added(monkeypatch, rows):
    """A stand-in for the kernel writes the number of the split everywhere."""

    def written(kernel, programs, device, key, x, d_out, partial, sums, *rest, **options):
        assert programs == 2 * 2 * splits
        assert rest[4] == splits == len(partial)
        for split in range(splits):
            partial[split] = split + 1
            sums[2 * split : 2 * split + 2] = split + 1

    splits = splits_of(-(-rows // 64), 4, launch.multiprocessors(torch.empty(0, device=DEVICE)))
    monkeypatch.setattr(launch, "relaunch", written)
    monkeypatch.setattr(launch, "jagged_descriptor", lambda *arguments: None)
    monkeypatch.setattr(launch, "_kernel", lambda: None)
    call, d_out = call_of(rows, 256, 512)
    product, sums = launch_weight_gradient(call, d_out, call.empty_statistics())
    total = splits * (splits + 1) // 2 if rows else 0
    assert product.shape == (512, 256)
    assert sums.shape == (512,)
    assert (product == total).all()
    assert (sums == 2 * total).all()


# -- on a Hopper GPU -------------------------------------------------------------------------------

on_hopper = pytest.mark.skipif(PROBLEM is not None, reason=f"runs the kernel: {PROBLEM}")


def expected(call: NormCall, d_out: Tensor, statistics: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Product and sums of the rows in use: units as the kernel rounds them, then float64."""
    rows, d = statistics[:, :used, None], d_out[:used].double()
    unit = call.x[:used].float()
    if call.layer:
        unit = (unit - rows[0]) - rows[1]
    unit = (unit * rows[-1]).to(call.x.dtype)
    return d.T @ unit.double(), d.sum(0)


def assert_right(call: NormCall, d_out: Tensor, used: int) -> None:
    """Nothing but the additions may be off, and the tensor cores cut what they add in float32."""
    _, statistics = launch_forward(call, None)
    statistics[:, used:] = float("nan")
    found = launch_weight_gradient(call, d_out, statistics)
    truth = expected(call, d_out, statistics, used)
    for value, true, limit in zip(found, truth, (2.0**-12, 2.0**-18), strict=True):
        assert value.dtype == torch.float32
        assert (value.double() - true).norm() <= limit * max(float(true.norm()), 1e-30)
    again = launch_weight_gradient(call, d_out, statistics)
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


@on_hopper
@HALVES
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(
    ("rows", "features", "width"),
    [(1, 128, 128), (64, 128, 256), (65, 512, 512), (5000, 512, 512), (3001, 1152, 384)],
)
def test_products_and_sums_are_right_and_repeat(rows, features, width, layer, dtype):
    take_used()
    assert_right(*call_of(rows, features, width, dtype, layer), used=rows)
    assert "hopper_norm_gradient" in take_used()


@on_hopper
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("used", [0, 1, 63, 64, 65, 1000, 2999])
def test_nan_behind_the_last_offset_is_never_read_on_hopper(used, layer):
    offsets = torch.tensor([0, used // 2, used], device=DEVICE)
    call, d_out = call_of(3000, 512, 512, layer=layer, offsets=offsets)
    call.x[used:] = float("nan")
    d_out[used:] = float("nan")
    assert_right(call, d_out, used)


@on_hopper
@HALVES
def test_rows_of_wider_matrices_give_the_bits_of_contiguous_ones(dtype):
    call, d_out = call_of(777, 256, 384, dtype)
    _, statistics = launch_forward(call, None)
    straight = launch_weight_gradient(call, d_out, statistics)
    wide = NormCall(call.x.repeat(1, 2)[:, 256:], call.weight, None, True, 1e-5)
    strided = launch_weight_gradient(wide, d_out.repeat(1, 2)[:, 384:], statistics)
    assert all(torch.equal(a, b) for a, b in zip(strided, straight, strict=True))
