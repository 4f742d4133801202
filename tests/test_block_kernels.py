"""What our block attention and rotary kernels promise beyond the operators' contract."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from jagbench.accuracy import difference, judge
from jagbench.ahead_of_time import DEFAULT_CASES, compiler
from jagbench.execution import run
from jagbench.impl import block_attention, rotary
from jagbench.impl.kernels.block_attention_launch import fitting_tiles
from jagbench.impl.kernels.tuning import Schedule, TileConfig
from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS
from jagbench.reference.rotary import angle_table, position_table
from jagbench.rotary import TokenTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [70, 0, 5, 131, 1]
FUNCTIONS = {"block_attention": block_attention, "rotary": rotary}


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=DEVICE, dtype=torch.int32)


def table_of(dim: int = 32, positions: int = 131) -> Tensor:
    return position_table(positions, dim).to(DEVICE, torch.float32)


def example(
    heads: int = 2, kv_heads: int = 1, dim: int = 32, v_dim: int = 32, padding: int = 3,
    dtype: torch.dtype = torch.float32, **options: Any,
) -> Inputs:  # fmt: skip
    """q, k, v of jagged sequences and an upstream gradient; `rotary` in options is an argument."""
    generator = torch.Generator().manual_seed(5)
    total = sum(LENGTHS) + padding
    q, k, v, g = (
        torch.randn(total, h, d, generator=generator).to(DEVICE, dtype)
        for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim))
    )
    arguments = {"q": q, "k": k, "v": v, "offsets": offsets_of(LENGTHS)}
    if "rotary" in options:
        arguments["rotary"] = options.pop("rotary")
    return Inputs(OPERATORS["block_attention"], arguments, options, g)


def rotation(dtype: torch.dtype = torch.float32, **options: Any) -> Inputs:
    inputs = example(dtype=dtype)
    arguments = {"x": inputs.arguments["q"], "offsets": offsets_of(LENGTHS), "table": table_of()}
    return Inputs(OPERATORS["rotary"], arguments, options, inputs.upstream)


def outcome_of(inputs: Inputs) -> dict[str, Tensor]:
    return dict(run(FUNCTIONS[inputs.operator.name], inputs, backward=True))


def assert_right(inputs: Inputs) -> None:
    found = [f"{a.name}: {a.problem}" for a in judge(inputs, outcome_of(inputs)) if not a.ok]
    assert not found, "; ".join(found)


def test_the_fused_gradients_are_strictly_closer_to_the_truth_than_the_rounded_chain():
    """The chain rounds turned inputs alike, but a gradient twice: before it is turned back too."""
    fused = example(kv_heads=2, dtype=torch.bfloat16, padding=0, rotary=table_of())
    t = fused.tensors()
    truth = run(OPERATORS["block_attention"].reference, fused.to(torch.float64), backward=True)
    turned = {n: rotary(t[n], t["offsets"], t["rotary"]) for n in "qkv"}
    plain = Inputs(fused.operator, {**turned, "offsets": t["offsets"]}, {}, fused.upstream)
    ours, chain = outcome_of(fused), outcome_of(plain)
    assert torch.equal(ours["out"], chain["out"])
    for name in ("grad q", "grad k", "grad v"):
        back = rotary(chain[name], t["offsets"], t["rotary"], inverse=True)
        errors = [float(difference(x, truth[name]).norm()) for x in (ours[name], back)]
        assert errors[0] < 0.97 * errors[1], f"{name}: {errors[0]:.3e} fused, {errors[1]:.3e} apart"


@pytest.mark.parametrize("block_size", [7, 33, 100, 128])
def test_blocks_of_any_size_to_128_are_right(block_size):
    assert_right(example(block_size=block_size, rotary=table_of(16)))


def test_larger_blocks_are_refused_with_both_numbers():
    with pytest.raises(NotImplementedError, match=r"128 rows, got 129"):
        example(block_size=129).call(block_attention)


@pytest.mark.parametrize("dims", [(32, 48), (48, 32), (20, 20)], ids=str)
def test_heads_of_values_may_have_another_width(dims):
    assert_right(example(heads=6, kv_heads=2, dim=dims[0], v_dim=dims[1], rotary=table_of(12)))


def test_views_of_packed_projections_give_the_bits_of_contiguous_tensors():
    inputs = example(kv_heads=2, rotary=table_of())
    t = inputs.tensors()
    q, k, v = torch.stack([t[n] for n in "qkv"], 1).unbind(1)
    wide = t["rotary"].repeat(1, 2)[:, 32:]
    assert inputs.upstream is not None
    upstream = inputs.upstream.transpose(0, 1).contiguous().transpose(0, 1)
    strided = dataclasses.replace(inputs.replace(q=q, k=k, v=v, rotary=wide), upstream=upstream)
    expected = outcome_of(inputs)
    for name, tensor in outcome_of(strided).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("by_token", [False, True])
def test_nan_behind_the_last_offset_is_never_read(by_token):
    total = sum(LENGTHS)
    table: Any = table_of()
    if by_token:
        rows = angle_table(torch.rand(total + 3), 32).to(DEVICE, torch.float32)
        rows[total:] = float("nan")
        table = TokenTable(rows)
    inputs = example(rotary=table)
    clean = outcome_of(inputs)
    assert inputs.upstream is not None
    for tensor in (*(inputs.tensors()[n] for n in "qkv"), inputs.upstream):
        tensor[total:] = float("nan")
    for name, tensor in outcome_of(inputs).items():
        assert torch.equal(tensor, clean[name]), name
        assert (tensor[total:] == 0).all(), name


def test_a_rotation_never_reads_behind_the_last_offset():
    inputs = rotation()
    assert inputs.upstream is not None
    for tensor in (inputs.tensors()["x"], inputs.upstream):
        tensor[sum(LENGTHS) :] = float("nan")
    for name, tensor in outcome_of(inputs).items():
        assert (tensor[sum(LENGTHS) :] == 0).all(), name
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_a_single_gradient_has_the_bits_of_all_together(wanted):
    inputs = example(kv_heads=2, rotary=table_of())
    leaf = inputs.tensors()[wanted].clone().requires_grad_()
    out = inputs.replace(**{wanted: leaf}).call(block_attention)
    (found,) = torch.autograd.grad(out, leaf, inputs.upstream)
    assert torch.equal(found, outcome_of(inputs)[f"grad {wanted}"])


@pytest.mark.parametrize("inputs", [example(rotary=table_of()), rotation()], ids=["block", "alone"])
def test_a_table_that_wants_a_gradient_is_refused(inputs):
    name = "rotary" if "rotary" in inputs.arguments else "table"
    learnt = inputs.replace(**{name: table_of().requires_grad_()})
    with pytest.raises(NotImplementedError, match="gradient"):
        learnt.call(FUNCTIONS[inputs.operator.name])
    with torch.no_grad():
        learnt.call(FUNCTIONS[inputs.operator.name])


def test_an_eps_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="qk_norm_eps must be at least 0 or None, got 'small'"):
        block_attention(**example().arguments, qk_norm_eps="small")


def test_rotate_values_is_taken_for_its_truth_as_the_reference_takes_it():
    inputs = example()
    for given in (None, 0, 1, "no"):
        changed = inputs.with_options(rotate_values=given)
        wanted = inputs.with_options(rotate_values=bool(given)).call(block_attention)
        assert torch.equal(changed.call(block_attention), wanted)


def test_a_schedule_of_more_than_a_tier_is_refused():
    inputs = example()
    for plan in (
        Schedule("v1"),
        Schedule(backward="atomic"),
        Schedule(forward=TileConfig(64, 64, 4, 1)),
    ):
        with pytest.raises(NotImplementedError, match=r"block_attention: .* a tier alone"):
            block_attention(**inputs.arguments, schedule=plan)
    block_attention(**inputs.arguments, schedule=Schedule(tier="portable"))


def test_the_hopper_tier_is_refused():
    inputs = example()
    with pytest.raises(NotImplementedError, match="Hopper"):
        block_attention(**inputs.arguments, schedule="hopper")


def test_a_table_too_short_is_refused_however_often_the_offsets_were_seen():
    inputs = example(rotary=table_of())
    for positions in (130, 131, 130):
        call = inputs.replace(rotary=table_of(positions=positions))
        if positions == 131:
            call.call(block_attention)
            continue
        with pytest.raises(ValueError, match=r"130 positions.*131"):
            call.call(block_attention)


def test_the_flop_counter_counts_what_the_formula_counts():
    inputs = example(padding=0, rotary=table_of())
    with FlopCounterMode(display=False) as counter:
        outcome_of(inputs)
    forward = inputs.operator.flops(inputs)
    assert counter.get_total_flops() == forward + forward * 5 // 2
    alone = rotation()
    with FlopCounterMode(display=False) as counter:
        outcome_of(alone)
    assert counter.get_total_flops() == 2 * alone.operator.flops(alone)


def test_the_custom_ops_keep_torch_s_rules():
    t = example(kv_heads=2, rotary=table_of()).tensors()
    leaves = [t[n].clone().requires_grad_() for n in "qkv"]
    arguments = (*leaves, t["offsets"], t["rotary"], False, 64, 0.2, True, False, 1e-6)
    # Static: a dynamic trace would ask the interpreter for symbolic shapes.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.jagbench.block_attention_forward.default, arguments, test_utils=checks
    )
    turned = (leaves[0], t["offsets"], t["rotary"], False, True, False)
    torch.library.opcheck(torch.ops.jagbench.rotary.default, turned, test_utils=checks)


def test_blocks_that_do_not_fit_shared_memory_are_refused_with_the_numbers():
    tiles = TileConfig(64, 64, 8, 1)
    with pytest.raises(NotImplementedError, match=r"128 rows.*256 and 256.*101376 bytes"):
        fitting_tiles("block_gradient", tiles, 2, 256, 256, 128, 101376)
    assert fitting_tiles("block_gradient", tiles, 2, 128, 128, 64, 101376).block_q == 32


@pytest.mark.parametrize(
    ("kernel", "limit", "stages"),
    [
        ("block", 232448, 2),
        ("block_rotary_gradient", 232448, 2),
        ("block_rotary_gradient", 101376, 1),
        ("block", 101376, 1),
    ],
)
def test_a_kernel_fetches_ahead_where_shared_memory_holds_both_blocks(kernel, limit, stages):
    rotary_dim = 128 if "rotary" in kernel else 0
    tiles = fitting_tiles(kernel, TileConfig(64, 64, 8, 2), 2, 128, 128, 64, limit, rotary_dim)
    assert tiles.num_stages == stages


def test_float32_products_stay_off_the_matrix_units_of_sm_100():
    """With other numbers of warps triton 3.7 makes one of them tf32."""
    with compiler(DEFAULT_CASES) as kernels:
        record = kernels.compile("block_attention_backward-rotary-fp32-d64", 100)
    assert record.error is None
    assert "UTCHMMA" not in record.opcodes
