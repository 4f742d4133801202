import importlib
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_same, offsets_of, quick

import jagbench.reference
from jagbench.execution import run
from jagbench.inputs import Inputs
from jagbench.pairs import attention_flops
from jagbench.reference import OPERATORS, block_attention, jagged_attention, rotary
from jagbench.reference.block_attention import (
    block_attention_bytes,
    block_attention_flops,
    uncancelled,
    visible_pairs,
)
from jagbench.reference.rotary import log_time_table, position_table
from jagbench.rotary import TokenTable

TABLES = ("none", "position", "token")


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    block_size: int = 4
    kv_heads: int = 1
    group: int = 1
    dim: int = 4
    v_dim: int = 4
    padding: int = 0
    table: str = "none"
    rotary_dim: int = 4
    rotate_values: bool = True
    scale: float | None = None
    seed: int = 0


@st.composite
def cases(draw):
    even = st.sampled_from([2, 4, 6])
    dim, v_dim = draw(even), draw(even)
    return Case(
        lengths=tuple(draw(st.lists(st.integers(0, 11), max_size=4))),
        block_size=draw(st.sampled_from([1, 2, 3, 4, 64])),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        dim=dim,
        v_dim=v_dim,
        padding=draw(st.integers(0, 2)),
        table=draw(st.sampled_from(TABLES)),
        rotary_dim=draw(even.filter(lambda n: n <= min(dim, v_dim))),
        rotate_values=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.7])),
        seed=draw(st.integers(0, 1000)),
    )


def call_of(case, dtype=torch.float64):
    """The call a case describes; rows past the last offset are NaN."""
    generator = torch.Generator().manual_seed(case.seed)

    def packed(heads, dim):
        values = torch.randn(sum(case.lengths), heads, dim, generator=generator).to(dtype)
        return torch.cat([values, values.new_full((case.padding, heads, dim), math.nan)])

    heads = case.kv_heads * case.group
    arguments = {
        "q": packed(heads, case.dim),
        "k": packed(case.kv_heads, case.dim),
        "v": packed(case.kv_heads, case.v_dim),
        "offsets": offsets_of(list(case.lengths)),
    }
    if case.table != "none":
        longest = max(case.lengths, default=0)
        table = position_table(longest, case.rotary_dim)
        if case.table == "token":
            ages = torch.arange(sum(case.lengths) + case.padding).flip(0) ** 2
            table = log_time_table(ages, case.rotary_dim, time_scale=5.0)
        arguments["rotary"] = table
    options = {"block_size": case.block_size, "rotate_values": case.rotate_values}
    if case.scale is not None:
        options["scale"] = case.scale
    return Inputs(OPERATORS["block_attention"], arguments, options, packed(heads, case.v_dim))


def turned_by_hand(x, angle, rotary_dim, sign=1):
    """x `[rows, heads, dim]` times one dense rotation matrix a row."""
    out = x.clone()
    for row in range(x.shape[0]):
        matrix = torch.eye(x.shape[2], dtype=x.dtype)
        for i in range(rotary_dim // 2):
            s, c = sign * angle[row, i], angle[row, i + rotary_dim // 2]
            a, b = 2 * i, 2 * i + 1
            matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = c, -s, s, c
        out[row] = x[row] @ matrix.T
    return out


def oracle(inputs, case):
    """Outputs and gradients through one dense mask over the packed rows; the backward by hand."""
    t, total = inputs.arguments, sum(case.lengths)
    q, k, v, g = (x[:total] for x in (t["q"], t["k"], t["v"], inputs.upstream))
    place = [(s, p // case.block_size) for s, n in enumerate(case.lengths) for p in range(n)]
    seen = torch.tensor([[a == b for b in place] for a in place], dtype=torch.bool)
    seen = seen.reshape(total, total)
    turn = case.table != "none"
    if turn:
        rows = t["rotary"].rows[:total] if case.table == "token" else torch.cat(
            [t["rotary"][:n] for n in case.lengths] or [t["rotary"][:0]]
        )  # fmt: skip
        q, k = (turned_by_hand(x, rows, case.rotary_dim) for x in (q, k))
        v = turned_by_hand(v, rows, case.rotary_dim) if case.rotate_values else v
    scale = case.scale if case.scale is not None else case.dim**-0.5
    kk, vv = (x.repeat_interleave(case.group, 1) for x in (k, v))
    scores = scale * torch.einsum("qhd,khd->hqk", q, kk)
    weights = torch.where(seen, scores.exp(), 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.einsum("hqk,khd->qhd", weights, vv)
    flow = torch.einsum("qhd,khd->hqk", g, vv)
    slope = scale * weights * (flow - (weights * flow).sum(-1, keepdim=True))
    grads = {
        "grad q": torch.einsum("hqk,khd->qhd", slope, kk),
        "grad k": torch.einsum("hqk,qhd->khd", slope, q),
        "grad v": torch.einsum("hqk,qhd->khd", weights, g),
    }
    for name in ("grad k", "grad v"):
        rows_, _, dim = grads[name].shape
        grads[name] = grads[name].reshape(rows_, case.kv_heads, case.group, dim).sum(2)
    for name in grads if turn else ():
        if name != "grad v" or case.rotate_values:
            grads[name] = turned_by_hand(grads[name], rows, case.rotary_dim, -1)
    found = {"out": out, **grads}
    return {n: torch.cat([x, x.new_zeros(case.padding, *x.shape[1:])]) for n, x in found.items()}


def test_the_package_offers_the_function_and_not_the_module():
    importlib.import_module("jagbench.reference.block_attention")
    assert jagbench.reference.block_attention is OPERATORS["block_attention"].reference


# -- values ----------------------------------------------------------------------------------------


@quick
@given(cases())
def test_reference_and_oracle_agree_in_outputs_and_gradients(case):
    inputs = call_of(case)
    assert_same(run(block_attention, inputs, backward=True), oracle(inputs, case))


@pytest.mark.parametrize("table", TABLES)
def test_gradients_are_those_of_numerical_differentiation(table):
    inputs = call_of(Case((5, 0, 2), block_size=3, kv_heads=2, group=2, table=table))
    leaves = [inputs.arguments[n].requires_grad_() for n in "qkv"]

    def out(q, k, v):
        return inputs.replace(q=q, k=k, v=v).call(block_attention)

    assert torch.autograd.gradcheck(out, leaves)


def test_sequences_no_longer_than_a_block_see_themselves_whole():
    inputs = call_of(Case((64, 1, 0, 63, 17), block_size=64, group=2))
    q, k, v, ends = inputs.arguments.values()
    torch.testing.assert_close(inputs.call(block_attention), jagged_attention(q, k, v, ends, ends))


def test_blocks_are_sequences_of_their_own():
    inputs = call_of(Case((64 + 5, 130, 3), block_size=64))
    q, k, v, _ = inputs.arguments.values()
    ends = offsets_of([64, 5, 64, 64, 2, 3])
    torch.testing.assert_close(inputs.call(block_attention), jagged_attention(q, k, v, ends, ends))


@pytest.mark.parametrize("tail", range(1, 64))
def test_a_tail_of_any_length_is_a_block_of_its_own(tail):
    case = Case((64 + tail, 9), block_size=64, dim=2, v_dim=2)
    inputs = call_of(case)
    assert_same(run(block_attention, inputs, backward=True), oracle(inputs, case))


def test_blocks_are_of_64_unless_told_otherwise():
    inputs = call_of(Case((100,), block_size=64))
    q, k, v, ends = inputs.arguments.values()
    assert torch.equal(block_attention(q, k, v, ends), inputs.call(block_attention))


@pytest.mark.parametrize("rotate_values", [True, False])
def test_a_rotary_table_is_the_rotary_operator_before_it(rotate_values):
    inputs = call_of(Case((9, 2), table="position", rotate_values=rotate_values))
    q, k, v, ends, table = inputs.arguments.values()
    values = rotary(v, ends, table) if rotate_values else v
    chain = block_attention(
        rotary(q, ends, table), rotary(k, ends, table), values, ends, block_size=4
    )
    assert torch.equal(inputs.call(block_attention), chain)


def test_scores_do_not_see_a_shift_of_all_positions():
    case = Case((4,), table="position", rotate_values=False)
    inputs = call_of(case)
    later = inputs.replace(rotary=position_table(100, 4)[61:])
    torch.testing.assert_close(later.call(block_attention), inputs.call(block_attention))


def test_the_uncancelled_gradients_are_the_terms_and_the_output_the_same():
    inputs = call_of(Case((1, 6)))
    true, terms = (run(f, inputs, backward=True) for f in (block_attention, uncancelled))
    torch.testing.assert_close(true["out"], terms["out"])
    torch.testing.assert_close(true["grad v"], terms["grad v"])
    assert (true["grad q"][0] == 0).all()
    assert (terms["grad q"][0] != 0).any()


# -- empty and padded ------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_an_empty_batch_gives_empty_output_and_zero_gradients(table):
    found = run(block_attention, call_of(Case((), table=table, v_dim=6)), backward=True)
    assert found["out"].shape == (0, 1, 6)
    assert (found["grad q"] == 0).all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("table", TABLES)
def test_an_empty_batch_has_a_gradient_of_each_tensor_alone(name, table):
    inputs = call_of(Case((), padding=2, table=table))
    value = inputs.arguments[name].zero_().requires_grad_()
    (gradient,) = torch.autograd.grad(inputs.call(block_attention).sum(), value)
    assert torch.equal(gradient, torch.zeros_like(value))


@pytest.mark.parametrize("table", TABLES)
def test_rows_past_the_last_offset_are_zero_and_never_read(table):
    inputs = call_of(Case((6, 3), padding=2, table=table))
    if table == "token":
        inputs.arguments["rotary"].rows[9:] = math.nan
    for value in run(block_attention, inputs, backward=True).values():
        assert (value[9:] == 0).all()
        assert value.isfinite().all()


# -- costs -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 300), max_size=5), st.integers(1, 130))
def test_visible_pairs_are_those_counted_by_hand(lengths, block_size):
    by_hand = [
        sum(min(n, (p // block_size + 1) * block_size) - p // block_size * block_size
            for p in range(n))
        for n in lengths
    ]  # fmt: skip
    assert visible_pairs(torch.tensor(lengths), block_size).tolist() == by_hand


def test_flops_count_short_tails_and_no_padding():
    case = Case((130, 64, 1), block_size=64, kv_heads=2, group=2, dim=8, v_dim=6, padding=3)
    pairs = 2 * 64 * 64 + 2 * 2 + 64 * 64 + 1
    assert block_attention_flops(call_of(case)) == 2 * 4 * (8 + 6) * pairs
    assert block_attention_flops(call_of(case)) == attention_flops(pairs, 4, 8, 6)
    assert block_attention_flops(call_of(Case(()))) == 0


def test_bytes_read_each_input_once_and_write_each_output_once():
    case = Case((5, 2), kv_heads=2, group=2, dim=8, v_dim=6, padding=3)
    q, k, v, out = 7 * 4 * 8, 7 * 2 * 8, 7 * 2 * 6, 7 * 4 * 6
    wanted = 2 * (q + k + v + out) + 3 * 8
    inputs = call_of(case, torch.float16)
    assert block_attention_bytes(inputs) == wanted
    table = Inputs(
        inputs.operator, {**inputs.arguments, "rotary": torch.zeros(90, 6)}, inputs.options, None
    )
    assert block_attention_bytes(table) == wanted + 4 * 5 * 6
    rows = TokenTable(torch.zeros(10, 6, dtype=torch.float16))
    assert block_attention_bytes(table.replace(rotary=rows)) == wanted + 2 * 7 * 6


# -- refusals --------------------------------------------------------------------------------------

GOOD = {
    "q": torch.ones(6, 4, 8),
    "k": torch.ones(6, 2, 8),
    "v": torch.ones(6, 2, 6),
    "offsets": offsets_of([4, 2]),
    "rotary": torch.ones(4, 6),
}
BAD = {
    "block size": ({"block_size": 0}, "at least 1, got 0"),
    "block size type": ({"block_size": 64.0}, "got 64.0"),
    "qk norm": ({"qk_norm_eps": -1}, "eps must be at least 0, got -1"),
    "qk norm of a word": ({"qk_norm_eps": "small"}, "eps must be at least 0, got 'small'"),
    "fewer keys": ({"k": torch.ones(5, 2, 8), "v": torch.ones(5, 2, 6)}, "6 rows and k has 5"),
    "fewer values": ({"v": torch.ones(5, 2, 6)}, "k and v differ"),
    "heads": ({"q": torch.ones(6, 3, 8)}, "2 kv_heads do not divide 3 heads"),
    "head_dim": ({"q": torch.ones(6, 4, 6)}, "q has head_dim 6 and k has 8"),
    "dtype": ({"q": torch.ones(6, 4, 8).double()}, "differ in dtype"),
    "past the end": ({"offsets": offsets_of([4, 3])}, "offsets end at 7, past the 6 rows"),
    "offsets device": ({"offsets": offsets_of([4, 2]).to("meta")}, "meta"),
    "wide table": ({"rotary": torch.ones(4, 8)}, "head_dim 6, got 8"),
    "short table": ({"rotary": torch.ones(3, 6)}, "3 positions, and the longest sequence has 4"),
    "tokens": ({"rotary": TokenTable(torch.ones(7, 6))}, "7 rows for 6 tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(name):
    changes, words = BAD[name]
    block_attention(**GOOD)
    with pytest.raises(ValueError, match=words):
        block_attention(**{**GOOD, **changes})


def test_a_table_may_be_wider_than_values_that_are_not_turned():
    block_attention(**{**GOOD, "rotary": torch.ones(4, 8)}, rotate_values=False)
