"""A norm that quantises gives the codes of the norm and then the quantisation, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mx_bits import DEVICE, LENGTHS, assert_bits, every_dtype
from mx_oracles import MODES, normal, snr
from oracles import offsets_of
from torch import Tensor

from jagbench.impl.kernels import mx_norm_launch
from jagbench.impl.kernels.mx import mx_dequantize, mx_quantize
from jagbench.impl.kernels.mx_launch import MxTiles
from jagbench.impl.kernels.mx_norm import mx_layer_norm, mx_norm_gradient, mx_rms_norm
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE
from jagbench.reference.mx_norm import mx_layer_norm as true_layer_norm
from jagbench.reference.mx_norm import mx_norm_gradient as true_norm_gradient
from jagbench.reference.mx_norm import mx_rms_norm as true_rms_norm
from jagbench.reference.norm import layer_norm, rms_norm

NORMS = pytest.mark.parametrize("norm", ["rms", "layer"])
SHAPES = pytest.mark.parametrize("block", [ALONG_COLUMNS, SQUARE], ids=["1x32", "32x32"])
OURS: dict[str, Callable[..., Any]] = {"rms": mx_rms_norm, "layer": mx_layer_norm}
TRUTH: dict[str, Callable[..., Any]] = {"rms": true_rms_norm, "layer": true_layer_norm}
PLAIN: dict[str, Callable[..., Any]] = {"rms": rms_norm, "layer": layer_norm}
MOST_APART = 1e-3


def assert_codes_agree(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """At most one code in a thousand differs, by one step; so may as many blocks' scales."""
    for ours, theirs in zip(found[:2], wanted[:2], strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype == torch.uint8
    codes, scales = (ours.cpu().int() - theirs.int() for ours, theirs in
                     zip(found[:2], wanted[:2], strict=True))  # fmt: skip
    assert scales.abs().max() <= 1
    assert (scales != 0).double().mean() <= MOST_APART
    if not scales.any():
        assert codes.abs().max() <= 1
        assert (codes != 0).double().mean() <= MOST_APART
    for ours, theirs in zip(found[2:], wanted[2:], strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs.double(), rtol=3e-6, atol=3e-6)


def arguments(norm: str, *shape: int, dtype: torch.dtype = torch.float32, affine: bool = True,
              shift: float = 0.5) -> list[Tensor]:  # fmt: skip
    x = (3 * normal(*shape) + shift).to(dtype)
    if not affine:
        return [x]
    parameters = [1 + normal(shape[-1], seed=3) / 4, normal(shape[-1], seed=4)]
    return [x, *(p.to(dtype) for p in parameters[: 1 + (norm == "layer")])]


def assert_like_the_truth(
    norm: str, given: list[Tensor], offsets: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    there = [t.to(DEVICE) for t in given]
    jagged = None if offsets is None else offsets.to(DEVICE)
    options = {"eps": 1e-5, "return_statistics": True, **options}
    found = OURS[norm](*there, offsets=jagged, **options)
    assert_codes_agree(found, TRUTH[norm](*given, offsets=offsets, **options))
    return found


# -- codes -----------------------------------------------------------------------------------------


@NORMS
@SHAPES
@every_dtype
def test_codes_and_statistics_are_those_of_the_norm_and_then_the_quantisation(norm, block, dtype):
    assert_like_the_truth(norm, arguments(norm, 2, 37, 96, dtype=dtype), block=block)


@NORMS
@pytest.mark.parametrize("elem_dtype", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize("mode", MODES)
def test_every_type_and_mode_has_the_codes_of_the_truth(norm, elem_dtype, mode):
    given = arguments(norm, 34, 70)
    assert_like_the_truth(norm, given, elem_dtype=elem_dtype, scale_mode=mode)
    assert_like_the_truth(
        norm, given, elem_dtype=elem_dtype, scale_mode=mode, block=SQUARE, rounding="stochastic",
        seed=2**41 + 3,
    )  # fmt: skip


@NORMS
@SHAPES
@pytest.mark.parametrize("features", [1, 33, 768, 4096])
def test_every_width_has_the_codes_of_the_truth(norm, block, features):
    assert_like_the_truth(norm, arguments(norm, 33, features), block=block)
    assert_like_the_truth(norm, arguments(norm, 3, features, affine=False), block=block)


@NORMS
@SHAPES
def test_an_unfused_float32_norm_and_our_own_quantisation_give_the_same_codes(norm, block):
    given = [t.to(DEVICE) for t in arguments(norm, 64, 320, dtype=torch.bfloat16)]
    wide = PLAIN[norm](*(t.float() for t in given), eps=1e-6)
    pair = mx_quantize(wide, block=block)
    found = OURS[norm](*given, eps=1e-6, block=block)
    assert_codes_agree(found, tuple(t.cpu() for t in pair))


@NORMS
def test_the_result_is_not_rounded_to_bfloat16_between(norm):
    """Codes of the rounded result differ in far more places than sums in another order do."""
    given = arguments(norm, 64, 512, dtype=torch.bfloat16)
    rounded = PLAIN[norm](*given, eps=1e-5)
    assert rounded.dtype == torch.bfloat16
    found = OURS[norm](*(t.to(DEVICE) for t in given), eps=1e-5)[0].cpu()
    assert (found != mx_quantize(rounded.to(DEVICE))[0].cpu()).double().mean() > 10 * MOST_APART


@NORMS
@SHAPES
def test_rows_read_in_column_tiles_have_the_codes_of_rows_read_at_once(norm, block, monkeypatch):
    given = arguments(norm, 40, 300, shift=5.0)
    for tiles in (MxTiles(32, 64, 4), MxTiles(32, 128, 4), MxTiles(32, 512, 4)):
        monkeypatch.setattr(mx_norm_launch, "mx_norm_tiles", lambda *_, tiles=tiles: tiles)
        assert_like_the_truth(norm, given, block=block)


def test_a_layer_norm_of_rows_far_from_zero_keeps_its_precision(monkeypatch):
    x = (normal(8, 128) + 4096).float()
    exact = layer_norm(x.double(), eps=1e-6)
    for columns in (32, 128):
        tiles = MxTiles(8, columns, 4)
        monkeypatch.setattr(mx_norm_launch, "mx_norm_tiles", lambda *_, tiles=tiles: tiles)
        back = mx_dequantize(*mx_layer_norm(x.to(DEVICE), eps=1e-6)).cpu()
        assert snr(back, exact) > 30


@NORMS
@SHAPES
@pytest.mark.parametrize("padding", [0, 45])
def test_sequences_have_the_codes_of_the_truth_and_padding_has_none(norm, block, padding):
    given = arguments(norm, sum(LENGTHS) + padding, 1 + bool(padding), 72)
    given[0][sum(LENGTHS) :] = math.nan
    offsets = offsets_of(LENGTHS).to(torch.int32)
    random = {"rounding": "stochastic", "seed": 5} if padding else {}
    found = assert_like_the_truth(norm, given, offsets, block=block, **random)
    assert not found[0][sum(LENGTHS) :].any()
    assert not any(statistic[sum(LENGTHS) :].any() for statistic in found[2:])


@NORMS
@SHAPES
@pytest.mark.parametrize("jagged", [False, True])
def test_swizzled_scales_are_those_of_the_same_values_quantised_apart(norm, block, jagged):
    shape = (sum(LENGTHS) + 6, 1, 140) if jagged else (2, 66, 140)
    given = [t.to(DEVICE) for t in arguments(norm, *shape)]
    offsets = offsets_of(LENGTHS).to(DEVICE) if jagged else None
    wide = PLAIN[norm](*given, eps=1e-5)
    pair = mx_quantize(wide, offsets, block=block, scale_layout="swizzled")
    found = OURS[norm](*given, offsets=offsets, eps=1e-5, block=block, scale_layout="swizzled")
    assert_codes_agree(found, tuple(t.cpu() for t in pair))


@NORMS
def test_rows_of_zeros_and_of_what_is_not_finite_are_as_the_truth_has_them(norm):
    x = normal(6, 64).float()
    x[1], x[2, 5], x[3, 40], x[4] = 0.0, math.nan, math.inf, 1e30
    for eps in (0.0, 1e-5):
        found = OURS[norm](x.to(DEVICE), eps=eps)
        wanted = TRUTH[norm](x, eps=eps)
        assert_bits(found[1:2], wanted[1:2])
        fine = (wanted[1] != 255).repeat_interleave(32, 1)
        assert ((found[0].cpu().int() - wanted[0].int()).abs()[fine] <= 1).all()


@NORMS
@SHAPES
def test_nothing_and_strided_rows_are_legal(norm, block):
    for shape in ((0, 40), (3, 0, 40)):
        codes, scales = OURS[norm](torch.zeros(shape, device=DEVICE), eps=1e-5, block=block)
        wanted = TRUTH[norm](torch.zeros(shape), eps=1e-5, block=block)
        assert_bits((codes, scales), wanted)
    x = normal(9, 3, 64).float()
    found = OURS[norm](x[:, 1].to(DEVICE), eps=1e-5, block=block)
    assert_codes_agree(found, TRUTH[norm](x[:, 1].contiguous(), eps=1e-5, block=block))


# -- gradient --------------------------------------------------------------------------------------


@NORMS
@every_dtype
@pytest.mark.parametrize("jagged", [False, True])
def test_the_gradient_is_that_of_the_norm_at_what_was_not_quantised(norm, dtype, jagged):
    """Against autograd in float64 through the plain norm, past which quantisation is let."""
    used = sum(LENGTHS)
    given = arguments(norm, used + 6, 2, 72, dtype=dtype)
    d_out = normal(used + 6, 2, 72, seed=9).float()
    if jagged:
        given[0][used:], d_out[used:] = math.nan, math.nan
    offsets = offsets_of(LENGTHS) if jagged else None
    rows = used if jagged else used + 6
    leaves = [t.double()[:rows] if i == 0 else t.double() for i, t in enumerate(given)]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    PLAIN[norm](*leaves, eps=1e-5).backward(d_out[:rows].double())
    there = [t.to(DEVICE) for t in given]
    jagged_there = None if offsets is None else offsets.to(DEVICE)
    _, _, *saved = OURS[norm](*there, offsets=jagged_there, eps=1e-5, return_statistics=True)
    kept = dict(zip(("rstd", "mean"), saved, strict=False))
    found = mx_norm_gradient(d_out.to(DEVICE), *there[:2], jagged_there, **kept)
    exact = {torch.float32: 110, torch.float16: 60, torch.bfloat16: 45}[dtype]
    assert snr(found[0][:rows].cpu(), leaves[0].grad) > exact
    assert not found[0][rows:].any()
    assert found[0].dtype == dtype
    for ours, leaf in zip(found[1:], leaves[1:], strict=False):
        assert snr(ours.cpu(), leaf.grad) > 110
    assert (found[2] is None) == (norm == "rms")
    theirs = true_norm_gradient(
        d_out, *given[:2], offsets, **{name: t.cpu() for name, t in kept.items()}
    )
    assert snr(found[0][:rows].cpu(), theirs[0][:rows]) > exact


def test_the_truth_of_the_gradient_is_that_of_autograd_in_float64():
    x, weight, bias = (t.double() for t in arguments("layer", 5, 3, 40))
    d_out = normal(5, 3, 40, seed=9)
    for plain, ours, parameters in (
        (rms_norm, true_rms_norm, [weight.requires_grad_()]),
        (layer_norm, true_layer_norm, [weight.requires_grad_(), bias.requires_grad_()]),
    ):
        leaf = x.clone().requires_grad_()
        wanted = torch.autograd.grad(plain(leaf, *parameters, eps=1e-3), [leaf, *parameters], d_out)
        with torch.no_grad():
            saved = ours(x, *parameters, eps=1e-3, return_statistics=True)[2:]
            kept = dict(zip(("rstd", "mean"), saved, strict=False))
            found = true_norm_gradient(d_out, x, weight, **kept)
        for a, b in zip(found, wanted, strict=False):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradients_of_parameters_are_bit_equal_on_repeats():
    x, weight, bias = (t.to(DEVICE) for t in arguments("layer", 300, 64))
    _, _, rstd, mean = mx_layer_norm(x, weight, bias, eps=1e-5, return_statistics=True)
    first, second = (mx_norm_gradient(x, x, weight, rstd=rstd, mean=mean) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- refusals --------------------------------------------------------------------------------------

X, W = torch.zeros(4, 40), torch.ones(40)
OFFSETS = offsets_of([1, 3])
REFUSED = {
    "eps": ({"eps": -1.0}, ValueError, "-1.0"),
    "weight": ({"weight": W[:39]}, ValueError, r"\[40\], got \(39,\)"),
    "weight dtype": ({"weight": W.half()}, ValueError, "float16"),
    "block": ({"block": (16, 32)}, ValueError, r"\(16, 32\)"),
    "along rows": ({"block": ALONG_ROWS}, NotImplementedError, r"\(32, 1\)"),
    "float64": ({"x": X.double()}, NotImplementedError, "float64"),
    "whole numbers": ({"x": X.int()}, ValueError, "int32"),
    "no features": ({"x": X[:, :0], "weight": None}, ValueError, r"\(4, 0\)"),
    "layout": ({"scale_layout": "swirled"}, ValueError, "swirled"),
    "offsets": ({"offsets": offsets_of([1, 4])}, ValueError, "end at 5, but there are 4 rows"),
    "seed": ({"rounding": "stochastic"}, ValueError, "None"),
}


@NORMS
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(norm, name):
    changed, error, message = REFUSED[name]
    given = {"x": X, "weight": W, "eps": 1e-5, **changed}
    given = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in given.items()}
    with pytest.raises(error, match=message):
        OURS[norm](given.pop("x"), **given)


def test_operands_of_the_gradient_that_do_not_fit_are_refused_with_their_numbers():
    x, rstd = X.to(DEVICE), torch.ones(4, device=DEVICE)
    for changed, message in (
        ({"d_out": x[:3]}, r"d_out must be \(4, 40\), got \(3, 40\)"),
        ({"rstd": rstd[:3]}, r"rstd must be \(4,\), got \(3,\)"),
        ({"mean": rstd.half()}, "mean must be one of .*float16"),
        ({"weight": rstd}, r"weight must be \[40\], got \(4,\)"),
    ):
        given = {"d_out": x, "x": x, "rstd": rstd, **changed}
        with pytest.raises(ValueError, match=message):
            mx_norm_gradient(given.pop("d_out"), given.pop("x"), **given)


def test_the_custom_ops_pass_torchs_own_check():
    x = normal(33, 40).float().to(DEVICE)
    options = (1e-5, True, "e4m3", [32, 32], "rceil", None, 0, False, True)
    torch.library.opcheck(torch.ops.jagbench.mx_norm.default, (x, None, None, None, *options))
    rstd = torch.ones(33, device=DEVICE)
    torch.library.opcheck(
        torch.ops.jagbench.mx_norm_gradient.default, (x, x, None, rstd, rstd, None)
    )
