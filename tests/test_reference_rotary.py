import importlib
import math

import pytest
import torch
from counted import Counted
from oracles import offsets_of

import jagbench.reference
from jagbench.execution import run
from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS, rotary
from jagbench.reference.rotary import (
    angle_table,
    frequencies,
    log_time_table,
    position_table,
    rotary_bytes,
    rotary_flops,
)
from jagbench.rotary import TokenTable

LENGTHS = [5, 0, 3]
FORMS = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])
DIMS = pytest.mark.parametrize("rotary_dim", [8, 6, 2])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_complex_numbers(x, positions, rotary_dim, interleaved, base=10_000.0):
    """x `[rows, heads, dim]` with pair i as a complex number times exp(i position omega)."""
    half = rotary_dim // 2
    first = [2 * i if interleaved else i for i in range(half)]
    second = [2 * i + 1 if interleaved else i + half for i in range(half)]
    out = x.clone()
    for i in range(half):
        angle = positions * base ** (-2 * i / rotary_dim)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        number = torch.complex(x[..., first[i]], x[..., second[i]]) * turn
        out[..., first[i]], out[..., second[i]] = number.real, number.imag
    return out


def positions_of(lengths):
    return torch.tensor([float(p) for n in lengths for p in range(n)], dtype=torch.float64)


def test_the_package_offers_the_function_and_not_the_module():
    importlib.import_module("jagbench.reference.rotary")
    assert jagbench.reference.rotary is OPERATORS["rotary"].reference


# -- values ----------------------------------------------------------------------------------------


@FORMS
@DIMS
def test_a_pair_is_a_complex_number_times_a_phase(rotary_dim, interleaved):
    x, table = normal(8, 2, 8), position_table(5, rotary_dim)
    found = rotary(x, offsets_of(LENGTHS), table, interleaved=interleaved)
    wanted = by_complex_numbers(x, positions_of(LENGTHS), rotary_dim, interleaved)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    assert torch.equal(found[..., rotary_dim:], x[..., rotary_dim:])


def test_sines_come_first_in_the_table():
    table = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    x = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    assert rotary(x, offsets_of([1]), table).flatten().tolist() == [0.8, 0.6]
    assert rotary(x, offsets_of([1]), table, inverse=True).flatten().tolist() == [0.8, -0.6]


@FORMS
@DIMS
def test_a_rotation_keeps_norms_and_its_inverse_undoes_it(rotary_dim, interleaved):
    x, ends = normal(8, 2, 8), offsets_of(LENGTHS)
    table = position_table(9, rotary_dim)
    turned = rotary(x, ends, table, interleaved=interleaved)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    back = rotary(turned, ends, table, interleaved=interleaved, inverse=True)
    torch.testing.assert_close(back, x)


@FORMS
def test_products_depend_on_the_difference_of_positions_alone(interleaved):
    q, k = (normal(1, 1, 8, seed=s).expand(12, 1, 8) for s in (1, 2))
    ends, table = offsets_of([12]), position_table(12, 8)
    q, k = (rotary(x, ends, table, interleaved=interleaved)[:, 0] for x in (q, k))
    scores = q @ k.T
    for shift in range(-11, 12):
        diagonal = scores.diagonal(shift)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.isclose(scores[0, 3], scores[3, 0])


def test_the_half_split_form_is_the_interleaved_form_of_permuted_elements():
    x, ends, table = normal(8, 2, 8), offsets_of(LENGTHS), position_table(5, 8)
    order = torch.arange(8).reshape(2, 4).T.flatten()
    split = rotary(x, ends, table, interleaved=False)
    torch.testing.assert_close(split[..., order], rotary(x[..., order], ends, table))


def test_a_table_by_token_of_positions_is_the_table_by_position():
    x, ends, table = normal(8, 2, 8), offsets_of(LENGTHS), position_table(5, 6)
    rows = torch.cat([table[:n] for n in LENGTHS])
    assert torch.equal(rotary(x, ends, TokenTable(rows)), rotary(x, ends, table))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_rotation_rounds_once(dtype):
    x, table = normal(8, 2, 8).to(dtype), position_table(5, 8).float()
    found = rotary(x, offsets_of(LENGTHS), table)
    exact = rotary(x.double(), offsets_of(LENGTHS), table.double())
    assert found.dtype == dtype
    assert ((found - exact).abs() <= 1.01 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


# -- gradients, padding ----------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("inverse", [True, False], ids=["inverse", "forward"])
def test_gradients_are_those_of_numerical_differentiation(interleaved, inverse):
    x, table = normal(3, 2, 4).requires_grad_(), position_table(2, 2).requires_grad_()

    def out(x, table):
        return rotary(x, offsets_of([2, 1]), table, interleaved=interleaved, inverse=inverse)

    assert torch.autograd.gradcheck(out, (x, table))


def test_the_gradient_is_the_inverse_rotation_of_the_upstream_gradient():
    call = call_of(normal(8, 2, 8), LENGTHS, position_table(5, 6))
    found = run(rotary, call, backward=True)["grad x"]
    wanted = rotary(call.upstream, call.arguments["offsets"], position_table(5, 6), inverse=True)
    torch.testing.assert_close(found, wanted)


def test_rows_past_the_last_offset_are_zero_and_never_read():
    x = torch.cat([normal(8, 2, 8), torch.full((2, 2, 8), math.nan)])
    table = torch.cat([position_table(5, 8), torch.full((3, 8), math.nan)])
    for tables in (table, TokenTable(torch.cat([table[:8].nan_to_num(), table[8:].repeat(2, 1)]))):
        if isinstance(tables, TokenTable):
            tables = TokenTable(torch.cat([tables.rows[:8], x[8:, 0]]))
        found = run(rotary, call_of(x, LENGTHS, tables), backward=True)
        for value in found.values():
            assert (value[8:] == 0).all()
            assert value.isfinite().all()


def test_an_empty_batch_gives_an_empty_output_and_zero_gradients():
    found = run(rotary, call_of(normal(0, 2, 8), [], position_table(0, 8)), backward=True)
    assert found["out"].shape == found["grad x"].shape == (0, 2, 8)


# -- tables ----------------------------------------------------------------------------------------


def test_frequencies_fall_geometrically_from_one():
    assert frequencies(4, 100.0).tolist() == pytest.approx([1.0, 0.1])


def test_a_log_time_table_turns_by_the_logarithm_of_the_age():
    table = log_time_table(torch.tensor([0, 60, 3540]), 4, time_scale=60.0, base=100.0)
    wanted = [math.log(1.0), math.log(2.0), math.log(60.0)]
    for row, tau in zip(table.rows, wanted, strict=True):
        angles = [tau, 0.1 * tau]
        assert row.tolist() == pytest.approx([*map(math.sin, angles), *map(math.cos, angles)])


def test_log_time_scores_depend_on_the_ratio_of_shifted_ages_alone():
    """tau_i - tau_j = log((t + a_i) / (t + a_j)): doubling both leaves a score alone."""
    ages = torch.tensor([3.0, 1.0, 13.0, 9.0])  # with t = 7: 10 / 8 and 20 / 16
    q, k = normal(1, 1, 8, seed=3), normal(1, 1, 8, seed=4)
    table = log_time_table(ages, 8, time_scale=7.0)
    q, k = (rotary(x.expand(4, 1, 8), offsets_of([4]), table)[:, 0] for x in (q, k))
    torch.testing.assert_close(q[0] @ k[1], q[2] @ k[3])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: position_table(4, 3), "even and at least 2, got 3"),
        (lambda: position_table(-1, 4), "at least 0, got -1"),
        (lambda: log_time_table(torch.tensor([-2.0]), 4, time_scale=1.0), "at least 0, got -2"),
        (lambda: log_time_table(torch.tensor([math.nan]), 4, time_scale=1.0), "at least 0"),
        (lambda: log_time_table(torch.tensor([2.0]), 4, time_scale=0.0), "above 0, got 0.0"),
    ],
)
def test_a_table_that_cannot_be_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# -- costs -----------------------------------------------------------------------------------------


def call_of(x, lengths, table, **options):
    arguments = {"x": x, "offsets": offsets_of(lengths), "table": table}
    upstream = torch.where(x.isnan(), x, normal(*x.shape, seed=9).to(x.dtype))
    return Inputs(OPERATORS["rotary"], arguments, options, upstream)


@pytest.mark.parametrize(("heads", "rotary_dim"), [(1, 2), (3, 6), (2, 8)])
def test_flops_are_those_counted_pair_by_pair(heads, rotary_dim):
    call = call_of(normal(10, heads, 8), LENGTHS, position_table(5, rotary_dim))
    Counted.count = 0
    for _ in range(sum(LENGTHS) * heads * rotary_dim // 2):
        a, b, sin, cos = map(Counted, (0.5, 2.0, 0.6, 0.8))
        _ = (a * cos - b * sin, a * sin + b * cos)
    assert rotary_flops(call) == Counted.count


def test_bytes_read_x_the_used_rows_of_the_table_and_the_offsets():
    x = normal(10, 3, 8).half()
    call = call_of(x, LENGTHS, position_table(99, 6).float())
    assert rotary_bytes(call) == 2 * 2 * 8 * 3 * 8 + 4 * 5 * 6 + 8 * 4
    by_token = call_of(x, LENGTHS, TokenTable(torch.zeros(10, 6)))
    assert rotary_bytes(by_token) == 2 * 2 * 8 * 3 * 8 + 4 * 8 * 6 + 8 * 4
    assert rotary_bytes(call_of(normal(0, 1, 2), [], position_table(9, 2))) == 8


# -- refusals --------------------------------------------------------------------------------------

GOOD = {
    "x": torch.ones(8, 2, 8),
    "offsets": offsets_of(LENGTHS),
    "table": angle_table(torch.arange(5), 8).float(),
}
BAD = {
    "dims": ({"x": torch.ones(8, 8)}, r"\(8, 8\)"),
    "integers": ({"x": torch.ones(8, 2, 8).int()}, "int32"),
    "past the end": ({"offsets": offsets_of([5, 4])}, "offsets end at 9, past the 8 rows of x"),
    "decreasing": ({"offsets": torch.tensor([0, 5, 3])}, "offsets decrease at index 2: 5 to 3"),
    "first offset": ({"offsets": torch.tensor([1, 5])}, "start at 0, got 1"),
    "offsets device": ({"offsets": offsets_of([2]).to("meta")}, "meta"),
    "odd table": ({"table": torch.ones(5, 7)}, "got 7"),
    "no columns": ({"table": torch.ones(5, 0)}, "got 0"),
    "wide table": ({"table": torch.ones(5, 10)}, "head_dim 8, got 10"),
    "short table": ({"table": torch.ones(4, 8)}, "4 positions, and the longest sequence has 5"),
    "table dims": ({"table": torch.ones(5, 1, 8)}, r"\(5, 1, 8\)"),
    "table dtype": ({"table": torch.ones(5, 8, dtype=torch.float64)}, "float64"),
    "table type": ({"table": None}, "NoneType"),
    "table device": ({"table": torch.ones(5, 8, device="meta")}, "meta"),
    "tokens": ({"table": TokenTable(torch.ones(5, 8))}, "5 rows for 8 tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(name):
    changes, words = BAD[name]
    rotary(**GOOD)
    with pytest.raises(ValueError, match=words):
        rotary(**{**GOOD, **changes})
