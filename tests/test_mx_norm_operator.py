"""mx_norm as an operator: its truth in pieces, what an order of sums leaves open, its cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mx_oracles import normal as normals
from oracles import offsets_of

from jagbench.codes import judge_codes
from jagbench.execution import run
from jagbench.inputs import Inputs
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE
from jagbench.reference import OPERATORS, mx_norm
from jagbench.reference.mx import mx_quantize
from jagbench.reference.mx_computed import relative_error
from jagbench.reference.mx_norm import mx_layer_norm, mx_rms_norm
from jagbench.work import work

NORM = OPERATORS["mx_norm"]
SHAPES = pytest.mark.parametrize("block", [ALONG_COLUMNS, SQUARE], ids=["1x32", "32x32"])


def normal(*shape, seed=0):
    return normals(*shape, seed=seed).float()


def call(x, offsets=None, weight=None, bias=None, **options):
    given = {"x": x, "offsets": offsets, "norm_weight": weight, "norm_bias": bias}
    arguments = {n: t for n, t in given.items() if t is not None or n == "offsets"}
    return Inputs(NORM, arguments, {"norm": "rms", "eps": 1e-6, **options})


def problems(inputs, outcome, **options):
    return [a.problem for a in judge_codes(inputs, outcome, **options) if not a.ok]


@SHAPES
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic", "seed": 5}], ids=str)
@pytest.mark.parametrize("shape", [(70, 40), (70, 2, 33)], ids=str)
def test_the_truth_in_pieces_is_the_reference(shape, options, norm, block):
    x = normal(*shape)
    x[3] = torch.nan
    offsets = offsets_of([5, 0, 33, 22])
    inputs = call(x, offsets, normal(shape[-1], seed=3), norm=norm, block=block, **options)
    outcome = run(mx_norm, inputs)
    for elements in (None, 500):
        assert problems(inputs, outcome, elements=elements) == []


@SHAPES
@pytest.mark.parametrize("shape", [(40,), (70, 40), (3, 40, 33)], ids=str)
def test_the_truth_of_a_dense_call_is_the_reference(shape, block):
    if len(shape) == 1 and block == SQUARE:
        shape = (1, 40)
    inputs = call(normal(*shape), block=block, rounding="stochastic", seed=9)
    outcome = run(mx_norm, inputs)
    assert problems(inputs, outcome, elements=500) == []
    codes = dict(outcome, codes=outcome["codes"] ^ 1)
    assert len(problems(inputs, codes, elements=500)) == 1


def test_the_two_norms_are_those_of_their_own_functions():
    x, weight, bias = normal(33, 40), normal(40, seed=1), normal(40, seed=2)
    for found, wanted in (
        (mx_norm(x, norm="rms", eps=1e-5, norm_weight=weight), mx_rms_norm(x, weight, eps=1e-5)),
        (
            mx_norm(x, norm="layer", eps=1e-5, norm_weight=weight, norm_bias=bias),
            mx_layer_norm(x, weight, bias, eps=1e-5),
        ),
    ):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_sums_in_any_order_are_right(norm):
    x = normal(64, 512)
    wide = x.cumsum(-1)[:, -1:] / 512 if norm == "layer" else torch.zeros(64, 1)
    squares = (x - wide).square().cumsum(-1)[:, -1:]  # one running total, the worst of orders
    out = (x - wide) / (squares / 512 + 1e-6).sqrt()
    codes, scales = mx_quantize(out)
    verdict = judge_codes(call(x, norm=norm), {"codes": codes, "scales": scales})
    assert [a.problem for a in verdict] == [None, None]


def test_a_norm_that_is_right_to_bfloat16_alone_is_wrong():
    x = normal(64, 512)
    out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    codes, scales = mx_quantize(out.bfloat16())
    found = problems(call(x), {"codes": codes, "scales": scales})
    assert any("codes" not in str(p) and "bytes differ" in str(p) for p in found)


def at_a_tie():
    """Rows whose element in column 0 lies a roundoff from the middle between two codes.

    With 1.0625 as weight the numbers are +-1.0625 (1 - 10^-12), and others are 1.5.
    """
    x = torch.ones(32, 64)
    weight = torch.full((64,), 1.5)
    weight[0] = 1.0625
    return call(x, weight=weight, eps=2e-12)


def test_codes_beside_a_boundary_may_be_a_step_off_and_are_counted():
    inputs = at_a_tie()
    outcome = dict(run(mx_norm, inputs))
    both = []
    for row, step in ((0, 0), (0, 1)):
        codes = outcome["codes"].clone()
        codes[row, 0] = 0x78 + step  # 1.0 and 1.125 under the scale 2^-8
        verdict = judge_codes(inputs, dict(outcome, codes=codes))[0]
        assert verdict.ok, verdict.problem
        both.append(verdict.error)
    assert sorted(both) == [0.0, 1.0]
    codes[0, 0] = 0x7A
    assert len(problems(inputs, dict(outcome, codes=codes))) == 1
    codes = outcome["codes"].clone()
    codes[0, 1] += 1
    assert len(problems(inputs, dict(outcome, codes=codes))) == 1


def test_no_more_than_one_code_in_a_thousand_may_be_a_step_off():
    inputs = at_a_tie()
    outcome = dict(run(mx_norm, inputs))
    codes = outcome["codes"].clone()
    codes[:3, 0] ^= 0x78 ^ 0x79 if int(codes[0, 0]) in (0x78, 0x79) else 0
    verdict = judge_codes(inputs, dict(outcome, codes=codes))[0]
    assert (verdict.error, verdict.allowed) == (3.0, 3.0)
    assert verdict.ok
    codes[3, 0] = codes[0, 0]
    verdict = judge_codes(inputs, dict(outcome, codes=codes))[0]
    assert verdict.problem == ("4 of 2048 codes are a step beside the truth's, at most 3 may be")


def test_a_scale_beside_its_boundary_may_be_either_with_codes_of_its_own():
    # One number alone in a row of 196: 14 = 1.75 2^3, the largest under scale code 122.
    x = torch.zeros(1, 196)
    x[0, 5] = 1.0
    inputs = call(x, eps=1e-12)
    codes, scales = (t.clone() for t in run(mx_norm, inputs).values())
    for scale, code in ((122, 0x7E), (123, 0x76)):
        scales[0, 0], codes[0, 5] = scale, code
        assert problems(inputs, {"codes": codes, "scales": scales}) == []
    scales[0, 0], codes[0, 5] = 123, 0x7E
    assert len(problems(inputs, {"codes": codes, "scales": scales})) == 1
    scales[0, 0], codes[0, 5] = 124, 0x6E
    assert any("want 0x7" in str(p) for p in problems(inputs, {"codes": codes, "scales": scales}))


def test_the_share_is_that_of_the_operators_record():
    assert NORM.codes is not None
    assert dict(NORM.codes.share) == {"codes": 1e-3, "scales": 1.0}
    strict = replace(NORM, codes=replace(NORM.codes, share={}))
    inputs = replace(at_a_tie(), operator=strict)
    outcome = dict(run(mx_norm, inputs))
    flipped = outcome["codes"].clone()
    flipped[0, 0] ^= 1
    assert [
        len(problems(inputs, dict(outcome, codes=codes))) for codes in (outcome["codes"], flipped)
    ] == [0, 1]


def test_the_bound_of_an_error_grows_with_the_root_of_the_features():
    assert relative_error(64, torch.bfloat16) == 16 * 2.0**-24
    assert relative_error(4096, torch.float32) == 72 * 2.0**-24
    assert relative_error(64, torch.float64) == 16 * 2.0**-53


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_work_counts_every_byte_once(norm):
    offsets = offsets_of([31, 0, 40])
    bias = torch.zeros(96, dtype=torch.bfloat16) if norm == "layer" else None
    x = normal(75, 96).bfloat16()
    inputs = call(x, offsets, torch.ones(96), bias, norm=norm, block=SQUARE)
    found = work(inputs, "forward")
    parameters = 4 * 96 + (0 if bias is None else 2 * 96)
    # 71 rows, each element read in two bytes and written in one; 1 + 2 rows of 3 squares.
    assert found.bytes_moved == 3 * 71 * 96 + 4 * 8 + parameters + 9
    assert found.flop == 71 * 96 * (4 if norm == "rms" else 7)


def test_work_of_a_dense_call_is_that_of_all_rows():
    found = work(call(normal(64, 96), block=SQUARE), "forward")
    assert (found.bytes_moved, found.flop) == (5 * 64 * 96 + 6, 3 * 64 * 96)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm": "batch"}, "norm must be one of"),
        ({"norm_bias": torch.zeros(40)}, r"no norm_bias, got one of torch.Size\(\[40\]\)"),
        ({"eps": -1.0}, "-1.0"),
        ({"block": ALONG_ROWS}, r"got \(32, 1\)"),
        ({"norm_weight": torch.ones(39)}, "39"),
    ],
    ids=["norm", "bias", "eps", "block", "weight"],
)
def test_what_does_not_fit_is_refused_with_its_numbers(change, words):
    with pytest.raises(ValueError, match=words):
        mx_norm(normal(8, 40), **{"norm": "rms", "eps": 1e-6, **change})
