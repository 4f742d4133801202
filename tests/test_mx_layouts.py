"""MX codes and scales beyond their bits: layouts, back to values, as custom ops, refusals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from mx_bits import (
    DEVICE,
    DTYPES,
    LENGTHS,
    assert_bits,
    assert_same_values,
    every_block,
    every_dtype,
    every_elem_dtype,
    wide_range,
)
from mx_oracles import normal
from oracles import offsets_of
from torch import Tensor

from jagbench.impl.kernels.mx import as_float8, mx_dequantize, mx_quantize
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE, Block
from jagbench.reference import mx as truth
from jagbench.reference.mx_formats import FORMATS, decode, decode_scales

# -- scale layouts ---------------------------------------------------------------------------------


def swizzle(scales: Tensor) -> Tensor:
    """Scales `[n, k]` in the layout that cuBLAS states for 1D block scaling, by its formula."""
    rows, blocks = scales.shape
    across, along = math.ceil(rows / 128), math.ceil(blocks / 4)
    out = torch.zeros(across * along * 512, dtype=torch.uint8)
    for r in range(rows):
        for k in range(blocks):
            tile = r // 128 * along + k // 4
            out[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + k % 4] = scales[r, k]
    return out.view(across * 128, along * 4)


@every_block
@pytest.mark.parametrize("shape", [(130, 140), (1, 1), (33, 300), (128, 128)])
def test_swizzled_scales_are_where_the_formula_puts_them(block: Block, shape):
    x = wide_range(2, *shape, spread=3)
    plain = truth.mx_quantize(x, block=block)
    codes, scales = mx_quantize(x.to(DEVICE), block=block, scale_layout="swizzled")
    assert_bits((codes,), plain[:1])
    for found, own in zip(scales.cpu(), plain[1], strict=True):
        if block == SQUARE:
            own = own.repeat_interleave(32, 0)[: shape[0]]
        assert_bits((found,), (swizzle(own.T if block == ALONG_ROWS else own),))


@pytest.mark.parametrize("block", [ALONG_COLUMNS, SQUARE])
def test_swizzled_scales_of_sequences_follow_the_rows(block):
    x, offsets = wide_range(sum(LENGTHS) + 6, 2, 140, spread=3), offsets_of(LENGTHS)
    x[sum(LENGTHS) :] = math.nan
    codes, scales = mx_quantize(
        x.to(DEVICE), offsets.to(DEVICE), block=block, scale_layout="swizzled"
    )
    wanted = truth.mx_quantize(x, offsets, block=block)
    assert_bits((codes,), wanted[:1])
    for head in range(2):
        rows = torch.zeros(len(x), 5, dtype=torch.uint8)
        for i, (start, stop) in enumerate(itertools.pairwise(offsets)):
            for r in range(start, stop):
                at = r if block == ALONG_COLUMNS else start // 32 + i + (r - start) // 32
                rows[r] = wanted[1][at, head]
        assert_bits((scales[head],), (swizzle(rows),))


# -- back ------------------------------------------------------------------------------------------


@every_elem_dtype
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=lambda d: str(d)[6:])
def test_every_code_under_every_scale_has_the_value_of_the_truth(elem_dtype, dtype):
    codes = torch.arange(1 << FORMATS[elem_dtype].bits, dtype=torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % 32)).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, codes.shape[1] // 32)
    found = mx_dequantize(codes.to(DEVICE), scales.to(DEVICE), elem_dtype=elem_dtype, dtype=dtype)
    assert_same_values(
        found, truth.mx_dequantize(codes, scales, elem_dtype=elem_dtype, dtype=dtype)
    )
    if dtype == torch.float64:
        exact = decode(codes, elem_dtype) * decode_scales(scales).repeat_interleave(32, 1)
        assert_same_values(found, exact)


@every_block
@every_dtype
def test_values_come_back_as_the_truth_has_them(block, dtype):
    x = wide_range(2, 71, 83, spread=4)
    codes, scales = truth.mx_quantize(x, block=block)
    wanted = truth.mx_dequantize(codes, scales, block=block, dtype=dtype)
    found = mx_dequantize(codes.to(DEVICE), scales.to(DEVICE), block=block, dtype=dtype)
    assert_same_values(found, wanted)
    strided = codes.to(DEVICE).transpose(0, 1).contiguous().transpose(0, 1)
    assert_same_values(mx_dequantize(strided, scales.to(DEVICE), block=block, dtype=dtype), wanted)


def test_scales_of_no_block_and_codes_of_padding_are_not_read():
    x, offsets = wide_range(sum(LENGTHS) + 40, 40), offsets_of(LENGTHS)
    codes, scales = truth.mx_quantize(x, offsets, block=SQUARE)
    wanted = truth.mx_dequantize(codes, scales, offsets, block=SQUARE)
    used = set()
    for i, length in enumerate(LENGTHS):
        first = int(offsets[i]) // 32 + i
        used |= set(range(first, first + math.ceil(length / 32)))
    idle = [row for row in range(len(scales)) if row not in used]
    scales[idle] = 255
    codes[sum(LENGTHS) :] = 0x7F
    found = mx_dequantize(*(t.to(DEVICE) for t in (codes, scales, offsets)), block=SQUARE)
    assert len(idle) > 3
    assert_same_values(found, wanted)


# -- as a custom op --------------------------------------------------------------------------------


@every_block
@pytest.mark.parametrize("swizzled", [False, True])
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(block, swizzled):
    layout = "swizzled" if swizzled else "plain"
    x = normal(2, 3, 70, dtype=torch.float32).transpose(0, 1).contiguous().transpose(0, 1)
    cases: list[tuple[Tensor, Tensor | None]] = [(x, None)]
    if not (swizzled and block == ALONG_ROWS):
        cases.append((x, torch.tensor([0, 1, 2])))
    for value, offsets in cases:
        real = mx_quantize(value.to(DEVICE), None if offsets is None else offsets.to(DEVICE),
                           block=block, scale_layout=layout)  # fmt: skip
        fake = mx_quantize(value.to("meta"), None if offsets is None else offsets.to("meta"),
                           block=block, scale_layout=layout)  # fmt: skip
        for found, wanted in zip(fake, real, strict=True):
            assert (found.shape, found.stride(), found.dtype) == (
                wanted.shape, wanted.stride(), wanted.dtype,
            )  # fmt: skip


def test_the_ops_are_what_torch_demands_of_ops():
    x = normal(40, 33, dtype=torch.float32).to(DEVICE)
    offsets = offsets_of([7, 33]).to(DEVICE)
    quantise = (x, offsets, "e4m3", [32, 32], "rceil", 3, 0, None, 0, False)
    torch.library.opcheck(torch.ops.jagbench.mx_quantize.default, quantise)
    codes, scales = mx_quantize(x)
    back = (codes, scales, None, "e4m3", [1, 32], torch.bfloat16)
    torch.library.opcheck(torch.ops.jagbench.mx_dequantize.default, back)


def test_codes_of_a_tensor_that_wants_a_gradient_want_none():
    x = normal(4, 32, dtype=torch.float32).to(DEVICE).requires_grad_()
    assert not any(t.requires_grad for t in mx_quantize(x))


@pytest.mark.parametrize("elem_dtype", ["e4m3", "e5m2"])
def test_codes_are_the_bits_of_torchs_types(elem_dtype):
    x = normal(8, 64, dtype=torch.float32).to(DEVICE)
    codes, scales = mx_quantize(x, elem_dtype=elem_dtype)
    values = as_float8(codes, elem_dtype).float()
    assert torch.equal(values.cpu().double(), decode(codes.cpu(), elem_dtype))
    assert scales.view(torch.float8_e8m0fnu).shape == scales.shape


# -- refusals --------------------------------------------------------------------------------------

X = torch.zeros(4, 32, device=DEVICE)
STOCHASTIC: dict[str, Any] = {"rounding": "stochastic"}


def on_device(*lengths: int) -> Tensor:
    return offsets_of(list(lengths)).to(DEVICE)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "elem_dtype": ({"elem_dtype": "e4m3fn"}, "'e4m3fn'"),
    "block": ({"block": (1, 16)}, r"got \(1, 16\)"),
    "block type": ({"block": 32}, "got 32"),
    "scale_mode": ({"scale_mode": "round"}, "'round'"),
    "rounding": ({"rounding": "up"}, "'up'"),
    "no seed": (STOCHASTIC, "got None"),
    "idle seed": ({"seed": 3}, "no seed, got 3"),
    "negative seed": ({**STOCHASTIC, "seed": -1}, "got -1"),
    "large seed": ({**STOCHASTIC, "seed": 2**63}, str(2**63)),
    "bool seed": ({**STOCHASTIC, "seed": True}, "got True"),
    "stream": ({**STOCHASTIC, "seed": 1, "stream": 17}, "17"),
    "dtype": ({"x": X.int()}, r"\(4, 32\).*int32"),
    "no tensor": ({"x": [1.0]}, "list"),
    "scalar": ({"x": torch.zeros((), device=DEVICE)}, r"at least 1 dims.*\(\)"),
    "one dim of rows": ({"x": X[0], "block": (32, 1)}, r"at least 2 dims.*\(32,\)"),
    "one dim of offsets": ({"x": X[0], "offsets": on_device(8)}, "at least 2 dims"),
    "past the end": ({"offsets": on_device(2, 3)}, "end at 5.*4 rows"),
    "decreasing": ({"offsets": torch.tensor([0, 3, 2], device=DEVICE)}, "1 is 3 and entry 2 is 2"),
    "late start": ({"offsets": torch.tensor([1, 3], device=DEVICE)}, "start at 0, got 1"),
    "float offsets": ({"offsets": torch.zeros(2, device=DEVICE)}, "float32"),
    "offsets device": ({"offsets": offsets_of([4]).to("meta")}, "meta"),
    "hadamard": ({"hadamard": 8, "hadamard_seed": 1}, "got 8"),
    "hadamard dim": ({"hadamard": 64, "hadamard_seed": 1}, r"-1 of x \(4, 32\).* of 64"),
    "hadamard rows": (
        {"hadamard": 16, "hadamard_seed": 1, "block": (32, 1)}, r"-2 of x \(4, 32\).* of 16",
    ),
    "hadamard seed": ({"hadamard": 16}, "got None"),
    "idle signs": ({"hadamard_seed": 5}, "got 5"),
    "hadamard square": (
        {"hadamard": 32, "hadamard_seed": 1, "block": (32, 32)}, r"32 has no dim.*\(32, 32\)",
    ),
    "layout": ({"scale_layout": "blocked"}, "'blocked'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        mx_quantize(**{"x": X, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": torch.zeros(4, 2, dtype=torch.uint8)}, r"must be \(4, 1\), got \(4, 2\)"),
        ({"scales": torch.zeros(4, 1)}, "float32"),
        ({"scales": None}, "NoneType"),
        ({"block": (32, 32)}, r"must be \(1, 1\), got \(4, 1\)"),
        ({"offsets": offsets_of([2, 2]), "block": (32, 1)}, r"must be \(2, 32\), got \(4, 1\)"),
        ({"codes": torch.zeros(4, 32)}, "float32"),
        ({"codes": torch.full((4, 32), 16, dtype=torch.uint8), "elem_dtype": "e2m1"}, "16, got 16"),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_refused(changes, message):
    codes, scales = (t.cpu() for t in mx_quantize(X))
    call = {"codes": codes, "scales": scales, **changes}
    call = {n: v.to(DEVICE) if isinstance(v, Tensor) else v for n, v in call.items()}
    with pytest.raises(ValueError, match=message):
        mx_dequantize(**call)


def test_what_no_kernel_does_is_reported_as_such():
    with pytest.raises(NotImplementedError, match="float64"):
        mx_quantize(X.double())
    with pytest.raises(NotImplementedError, match="int32"):
        mx_dequantize(*mx_quantize(X), dtype=torch.int32)
    offsets = on_device(4)
    with pytest.raises(NotImplementedError, match="scale_layout"):
        mx_quantize(X, offsets, block=ALONG_ROWS, scale_layout="swizzled")
    with pytest.raises(NotImplementedError, match="hadamard"):
        mx_quantize(X, offsets, block=ALONG_ROWS, hadamard=16, hadamard_seed=1)
