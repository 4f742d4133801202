"""A norm that quantises: what it normalises by, what reaches the codes, and in which order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.execution import Outcome, named_outputs
from jagbench.inputs import Inputs
from jagbench.mx import ALONG_COLUMNS, NAN_SCALE_CODE, SQUARE, Block
from jagbench.reference import OPERATORS
from jagbench.reference.mx import mx_quantize
from jagbench.reference.norm import layer_norm, rms_norm
from jagbench.suite import shapes
from jagbench.suite.candidate import Candidate
from jagbench.suite.quantizing import normal

pytestmark = pytest.mark.operator("mx_norm")

Check = Callable[[Inputs, Outcome], None]

OF_EITHER_NORM = pytest.mark.parametrize("norm", ["rms", "layer"])
OF_EITHER_BLOCK = pytest.mark.parametrize(
    "block", [ALONG_COLUMNS, SQUARE], ids=lambda b: f"{b[0]}x{b[1]}"
)


def call(
    candidate: Candidate,
    x: Tensor,
    offsets: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> Inputs:
    """A call on the session's device, RMSNorm under eps 1e-6 unless told otherwise."""
    given = {"x": x, "offsets": offsets, "norm_weight": weight, "norm_bias": bias}
    device = candidate.settings.device
    arguments = {n: None if t is None else t.to(device) for n, t in given.items()}
    kept = {n: t for n, t in arguments.items() if t is not None or n == "offsets"}
    return Inputs(OPERATORS["mx_norm"], kept, {"norm": "rms", "eps": 1e-6, **options})


def codes_of(candidate: Candidate, *tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Codes and scales that the implementation gives, as bytes on the CPU."""
    outcome = candidate.run(call(candidate, *tensors, **options))
    return outcome["codes"].cpu(), outcome["scales"].cpu()


# -- what the row is divided by --------------------------------------------------------------------


@OF_EITHER_BLOCK
def test_eps_is_added_to_the_mean_square_under_the_root(candidate: Candidate, block: Block) -> None:
    """Rows of 1 and -1 under eps 3 have the size 2: 0.5 is 256 times 2^-9."""
    x = torch.ones(32, 64, dtype=candidate.settings.main_dtype)
    x[:, ::2] = -1
    for norm in ("rms", "layer"):
        codes, scales = codes_of(candidate, x, norm=norm, eps=3.0, block=block)
        assert set(scales.flatten().tolist()) == {118}
        assert set(codes[:, ::2].flatten().tolist()) == {0xF8}
        assert set(codes[:, 1::2].flatten().tolist()) == {0x78}


@OF_EITHER_NORM
def test_the_size_of_a_row_reaches_no_scale(candidate: Candidate, norm: str, check: Check) -> None:
    """Rows 2^6 times as large, or as small, have the scales of the others: of what was normed."""
    x = normal(candidate, 40, 96)
    quiet = codes_of(candidate, x, norm=norm, eps=0.0)[1]
    for power in (6, -6):
        loud = call(candidate, x * 2.0**power, norm=norm, eps=0.0)
        outcome = candidate.run(loud)
        check(loud, outcome)
        assert torch.equal(outcome["scales"].cpu(), quiet)


def test_a_constant_added_to_a_row_does_not_change_its_layer_norm(candidate: Candidate) -> None:
    """The mean is taken off before anything is squared; all numbers here are exact in every dtype.

    Sums of whole numbers have no order: codes and scales are equal bit for bit.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-4, 5, (33, 64), generator=generator).to(candidate.settings.main_dtype)
    plain = codes_of(candidate, x, norm="layer", eps=1e-5)
    moved = codes_of(candidate, x + 32, norm="layer", eps=1e-5)
    share = float((plain[0] != moved[0]).double().mean())
    assert share <= 1e-3, f"{share:.2%} of the codes differ"
    assert torch.equal(plain[1], moved[1])


# -- what is quantised -----------------------------------------------------------------------------


@OF_EITHER_NORM
@OF_EITHER_BLOCK
def test_the_fused_pair_has_the_codes_of_the_norm_and_then_the_quantisation(
    candidate: Candidate, norm: str, block: Block
) -> None:
    """Of the float32 result of the norm, at most a code in a thousand is a step beside.

    That of a result which was rounded to bfloat16 between is, in more than one of a hundred.
    """
    x = normal(candidate, 64, 256)
    plain = rms_norm(x.float(), eps=1e-6) if norm == "rms" else layer_norm(x.float(), eps=1e-6)
    wanted, wanted_scales = mx_quantize(plain, block=block)
    codes, scales = codes_of(candidate, x, norm=norm, block=block)
    assert torch.equal(scales, wanted_scales)
    steps = (codes.int() - wanted.int()).abs()
    assert int(steps.max()) <= 1
    assert float((steps > 0).double().mean()) <= 1e-3
    between, _ = mx_quantize(plain.to(torch.bfloat16), block=block)
    assert float((between != wanted).double().mean()) > 1e-2


@OF_EITHER_BLOCK
def test_the_weight_of_the_norm_counts_for_the_scale(candidate: Candidate, block: Block) -> None:
    """Weights 2^(3 b) in block b of the features move its scale by 3 b and no code."""
    x = normal(candidate, 64, 128)
    weight = torch.exp2(3.0 * torch.arange(4)).repeat_interleave(32)
    codes, scales = codes_of(candidate, x, block=block)
    heavy, heavy_scales = codes_of(candidate, x, weight=weight, block=block)
    assert torch.equal(heavy, codes)
    assert torch.equal(heavy_scales.int(), scales.int() + 3 * torch.arange(4))


@OF_EITHER_NORM
@OF_EITHER_BLOCK
def test_rows_of_zeros_have_the_codes_of_the_bias(
    candidate: Candidate, norm: str, block: Block
) -> None:
    """0 and scale code 0 under RMSNorm; under LayerNorm the bias, as it is quantised alone."""
    dtype = candidate.settings.main_dtype
    x = torch.zeros(33, 40, dtype=dtype)
    if norm == "rms":
        codes, scales = codes_of(candidate, x, block=block)
        assert not codes.any()
        assert not scales.any()
        return
    bias = torch.linspace(-1.25, 1.25, 40).to(dtype)
    found = codes_of(candidate, x, bias=bias, norm="layer", block=block)
    wanted = mx_quantize(bias.expand(33, 40), block=block)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


# -- what belongs to a row and to a block ----------------------------------------------------------


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@OF_EITHER_NORM
def test_what_is_no_number_stays_in_its_row(candidate: Candidate, norm: str, value: str) -> None:
    """The block that holds it has scale code 255, and no other row changes."""
    x = normal(candidate, 40, 96)
    clean_codes, clean_scales = codes_of(candidate, x, norm=norm)
    x[17, 40] = float(value)
    codes, scales = codes_of(candidate, x, norm=norm)
    assert int(scales[17, 1]) == NAN_SCALE_CODE
    others = [row for row in range(40) if row != 17]
    assert torch.equal(codes[others], clean_codes[others])
    assert torch.equal(scales[others], clean_scales[others])


@OF_EITHER_NORM
@OF_EITHER_BLOCK
def test_every_sequence_is_normed_and_quantised_as_if_alone(
    candidate: Candidate, norm: str, block: Block
) -> None:
    """Squares start with each sequence, and neither a bias nor a neighbour fills the short ones."""
    lengths = [33, 0, 31]
    offsets = shapes.offsets(lengths)
    x = normal(candidate, sum(lengths) + 5, 40)
    options: dict[str, Any] = {"norm": norm, "block": block}
    if norm == "layer":
        options["bias"] = torch.full((40,), 64.0)
        options["weight"] = torch.full((40,), 0.125)
    codes, scales = codes_of(candidate, x, offsets, **options)
    for i, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        if start == stop:
            continue
        alone = codes_of(candidate, x[start:stop], **options)
        first = start if block[0] == 1 else start // block[0] + i
        own = scales[first : first + -(-(stop - start) // block[0])]
        assert torch.equal(alone[0], codes[start:stop]), f"codes of sequence {i}"
        assert torch.equal(alone[1], own), f"scales of sequence {i}"
    assert not codes[offsets[-1] :].any(), "codes past the last offset"


@OF_EITHER_BLOCK
def test_a_bias_does_not_fill_short_blocks(
    candidate: Candidate, block: Block, check: Check
) -> None:
    """Rows behind a sequence's end and columns behind a row's have no part in a scale.

    The row's own numbers cancel the bias, so that nothing in the block is as large as it.
    """
    sign = torch.where(torch.arange(40) % 2 == 0, 1.0, -1.0)
    x = sign.expand(33, 40).to(candidate.settings.main_dtype)
    weight, bias = torch.full((40,), 8.0), -8.0 * sign + 2**-6
    inputs = call(
        candidate, x.contiguous(), weight=weight, bias=bias, norm="layer", eps=1e-5, block=block
    )
    outcome = candidate.run(inputs)
    check(inputs, outcome)
    assert int(outcome["scales"].max()) < 119, "a scale is that of the bias"


# -- around the call -------------------------------------------------------------------------------


def test_autocast_and_gradients_leave_the_codes_of_a_norm_alone(candidate: Candidate) -> None:
    """X is taken as it is, under autocast too, and whether or not it requires a gradient."""
    inputs = call(candidate, normal(candidate, 32, 64), weight=torch.linspace(0.5, 1.5, 64))
    expected = candidate.run(inputs)
    with torch.autocast(candidate.settings.device.type, dtype=torch.bfloat16):
        cast = candidate.run(inputs)
    live = inputs.map(lambda _, t: t.clone().requires_grad_() if t.is_floating_point() else t)
    function = candidate.settings.implementation.get("mx_norm")
    found = named_outputs(live, live.call(function))
    for name, value in expected.items():
        assert torch.equal(cast[name], value), name
        assert torch.equal(found[name], value), name
