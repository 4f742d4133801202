"""What our kernels promise beyond the operators' contract: schedules, custom ops, FLOP counts."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from jagbench import impl, workloads
from jagbench.accuracy import judge
from jagbench.bias import BucketedBias
from jagbench.execution import run
from jagbench.impl import gdpa, jagged_attention
from jagbench.impl.kernels import tuning
from jagbench.impl.kernels.jagged_attention import subtraction_guard_rate
from jagbench.impl.kernels.tuning import Schedule, TileConfig
from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUNCTIONS = {"jagged_attention": jagged_attention, "gdpa": gdpa}
SCHEDULES = {
    "v1-atomic": Schedule("v1", "atomic"),
    "v2-split": Schedule("v2", "split"),
    "v3-split": Schedule("v3", "split"),
    "v2-atomic": Schedule("v2", "atomic"),
}
# Unequal lengths throughout: a persistent loop whose bound sticks at its first value (a known
# miscompile of triton 3.6 and 3.7) gives wrong answers here.
Q_LENGTHS, K_LENGTHS = [70, 0, 5, 130, 1], [65, 9, 0, 100, 128]


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    total = torch.tensor([0, *lengths]).cumsum(0)
    return total.to(device=DEVICE, dtype=dtype)


def example(operator: str, heads: int = 2, dim: int = 32, **options: object) -> Inputs:
    torch.manual_seed(3)
    q, g = (torch.randn(sum(Q_LENGTHS) + 3, heads, dim, device=DEVICE) for _ in range(2))
    k, v = (torch.randn(sum(K_LENGTHS) + 2, 1, dim, device=DEVICE) for _ in range(2))
    arguments = {
        "q": q, "k": k, "v": v,
        "q_offsets": offsets_of(Q_LENGTHS), "k_offsets": offsets_of(K_LENGTHS),
    }  # fmt: skip
    if operator == "gdpa":
        options = {"activation": "silu", "pre_scale": 0.3, **options}
    return Inputs(OPERATORS[operator], arguments, options, g)


def problems(inputs: Inputs, schedule: Schedule) -> list[str]:
    function = FUNCTIONS[inputs.operator.name]
    outcome = run(lambda *a, **kw: function(*a, **kw, schedule=schedule), inputs, backward=True)
    return [f"{a.name}: {a.problem}" for a in judge(inputs, outcome) if not a.ok]


@pytest.mark.parametrize("operator", FUNCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_is_within_budget(operator: str, schedule: Schedule) -> None:
    assert problems(example(operator), schedule) == []


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(
    "mask", [{"causal": True}, {"window": (9, 4), "align": "start"}, {"window": (None, 3)}]
)
def test_every_schedule_masks_alike(schedule: Schedule, mask: dict[str, object]) -> None:
    assert problems(example("jagged_attention", **mask), schedule) == []


def test_tiles_can_be_pinned() -> None:
    tiles = TileConfig(32, 16, 4, 1)
    schedule = Schedule("v2", "split", tiles, tiles, tiles)
    assert problems(example("jagged_attention"), schedule) == []
    assert problems(example("gdpa"), schedule) == []


def test_a_schedule_survives_its_encoding() -> None:
    schedule = Schedule("v3", "atomic", TileConfig(64, 32, 4, 3), None, TileConfig(32, 64, 8, 2))
    assert Schedule.decode(schedule.encode()) == schedule


@pytest.mark.parametrize(
    ("change", "number"),
    [({"block_q": 48}, "48"), ({"num_warps": 3}, "3"), ({"num_stages": 0}, "0")],
)
def test_impossible_tiles_are_refused(change: dict[str, int], number: str) -> None:
    with pytest.raises(ValueError, match=number):
        dataclasses.replace(TileConfig(64, 64, 4, 2), **change)


def test_atomic_gradients_cannot_be_promised_deterministic() -> None:
    with pytest.raises(ValueError, match="atomic"):
        example("gdpa").call(gdpa, deterministic=True, schedule=Schedule("v2", "atomic"))


def negative_scores(keys: int) -> tuple[Tensor, ...]:
    """Scores far below the 0 of a padded key: the subtraction would cancel to nothing."""
    torch.manual_seed(5)
    q = 3 + torch.rand(40, 1, 32, device=DEVICE)
    k = -3 - torch.rand(keys, 1, 32, device=DEVICE)
    v = torch.randn(keys, 1, 32, device=DEVICE)
    return q, k, v, offsets_of([40]), offsets_of([keys])


@pytest.mark.parametrize("keys", [20, 70])
@pytest.mark.parametrize("variant", ["v2", "v3"])
def test_strongly_negative_scores_take_the_masked_path(keys: int, variant: str) -> None:
    q, k, v, q_offsets, k_offsets = negative_scores(keys)
    arguments = {"q": q, "k": k, "v": v, "q_offsets": q_offsets, "k_offsets": k_offsets}
    inputs = Inputs(OPERATORS["jagged_attention"], arguments, {}, torch.randn_like(q))
    assert problems(inputs, Schedule(variant)) == []  # type: ignore[arg-type]


def test_the_guard_reports_how_often_it_refused() -> None:
    assert subtraction_guard_rate(*negative_scores(70)) == 1.0
    mild = example("jagged_attention")
    assert mild.call(subtraction_guard_rate) == 0.0


def test_a_log_time_bias_has_the_gradient_of_its_table_in_fixed_order() -> None:
    inputs = example("jagged_attention")
    pairs = sum(a * b for a, b in zip(Q_LENGTHS, K_LENGTHS, strict=True))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 7, (pairs,), generator=generator).to(DEVICE, torch.int32)
    table = torch.randn(7, 2, generator=generator).to(DEVICE)
    inputs = dataclasses.replace(
        inputs, arguments={**inputs.arguments, "bias": BucketedBias(table, ids)}
    )
    first, second = (run(jagged_attention, inputs, backward=True) for _ in range(2))
    assert [a.name for a in judge(inputs, first) if not a.ok] == []
    assert torch.equal(first["grad bias.table"], second["grad bias.table"])


@pytest.mark.parametrize(
    ("rows", "ids", "message"),
    [(5, None, "5 rows"), (None, 7, "run from 7 to 7"), (None, -1, "run from -1")],
)
def test_a_bias_that_does_not_fit_is_refused(
    rows: int | None, ids: int | None, message: str
) -> None:
    inputs = example("jagged_attention")
    pairs = sum(a * b for a, b in zip(Q_LENGTHS, K_LENGTHS, strict=True))
    bias: object = torch.zeros(rows or pairs, 2, device=DEVICE)
    if ids is not None:
        full = torch.full((pairs,), ids, dtype=torch.int32, device=DEVICE)
        bias = BucketedBias(torch.zeros(7, 2, device=DEVICE), full)
    with pytest.raises(ValueError, match=message):
        inputs.call(jagged_attention, bias=bias)


def test_the_log_sum_exp_has_a_gradient() -> None:
    inputs = example("jagged_attention")

    def grads(function: object, dtype: torch.dtype) -> list[Tensor]:
        live = inputs.to(dtype).map(lambda n, t: t.requires_grad_() if n in "qkv" else t)
        _, lse = live.call(function, return_lse=True)  # type: ignore[arg-type]
        seen = torch.where(torch.isfinite(lse), lse, 0.0)
        weights = torch.arange(lse.numel(), device=DEVICE).view(lse.shape) % 5
        loss = (seen * weights).sum()
        return list(torch.autograd.grad(loss, [live.arguments[n] for n in "qk"]))

    reference = OPERATORS["jagged_attention"].reference
    for got, want in zip(
        grads(jagged_attention, torch.float32), grads(reference, torch.float64), strict=True
    ):
        assert float((got - want).norm() / want.norm()) < 2e-6


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_custom_ops_pass_opcheck(operator: str) -> None:
    inputs = example(operator)
    q, k, v, q_offsets, k_offsets = inputs.arguments.values()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    plan = Schedule().encode()
    if operator == "gdpa":
        extra: tuple[object, ...] = ([7], 0.3, 1.0, [-1, -1, 1, 0, 0, 0], -1, plan)
    else:
        extra = (None, None, 0.2, [-1, -1, 1, 0, 0, 0], -1, plan)
    op = getattr(torch.ops.jagbench, f"{operator}_forward").default
    torch.library.opcheck(op, (*leaves, q_offsets, k_offsets, *extra))


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_compilation_meets_no_graph_break(operator: str) -> None:
    inputs = example(operator)
    function = FUNCTIONS[operator]
    compiled = torch.compile(
        lambda x: function(x * 2, *list(inputs.arguments.values())[1:], **inputs.options) + 1,
        fullgraph=True,
        backend="aot_eager",
    )
    q = inputs.arguments["q"].clone().requires_grad_()
    eager = inputs.replace(q=q * 2).call(function) + 1
    out = compiled(q)
    assert torch.equal(out, eager)
    assert torch.equal(
        *(torch.autograd.grad(o.sum(), q, retain_graph=True)[0] for o in (out, eager))
    )


@pytest.mark.parametrize("operator", FUNCTIONS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 2), "align": "start"}])
def test_torch_counts_the_flops_of_visible_pairs(operator: str, options: dict[str, object]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    inputs = example(operator, **options)
    record = OPERATORS[operator]
    live = inputs.map(lambda n, t: t.requires_grad_() if n in "qkv" else t)
    with FlopCounterMode(display=False) as forward:
        out = live.call(FUNCTIONS[operator])
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == record.flops(inputs)
    assert backward.get_total_flops() == int(record.backward_flops_ratio * record.flops(inputs))


def test_short_keys_are_computed_in_full_whatever_the_hint_says() -> None:
    for operator in FUNCTIONS:
        inputs = example(operator)
        hinted = run(lambda *a, f=FUNCTIONS[operator], **kw: f(*a, **kw, max_k_len=16), inputs)
        assert [a.name for a in judge(inputs, hinted) if not a.ok] == []


def test_offsets_changed_in_place_are_looked_at_again() -> None:
    inputs = example("gdpa")
    inputs.call(gdpa)
    inputs.arguments["k_offsets"][1] = 10_000
    with pytest.raises(ValueError, match="10000"):
        inputs.call(gdpa)


def test_rows_past_the_last_offset_and_empty_sequences_are_written() -> None:
    out, lse = example("jagged_attention").call(jagged_attention, return_lse=True)
    assert not out[sum(Q_LENGTHS) :].any()
    blind = slice(Q_LENGTHS[0] + Q_LENGTHS[1], sum(Q_LENGTHS[:3]))
    assert not out[blind].any()
    assert bool((lse[blind] == -math.inf).all())


def column_of_a_matrix(offsets: Tensor) -> Tensor:
    """The same offsets with other numbers between them in memory."""
    matrix = torch.full((offsets.numel(), 3), 7, dtype=offsets.dtype, device=offsets.device)
    matrix[:, 1] = offsets
    return matrix[:, 1]


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_offsets_that_are_not_contiguous_mean_what_their_copies_mean(operator: str) -> None:
    inputs = example(operator, causal=True)
    odd = {n: column_of_a_matrix(inputs.arguments[n]) for n in ("q_offsets", "k_offsets")}
    assert problems(inputs.replace(**odd), Schedule()) == []


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_bias_of_minus_infinity_hides_pairs_tiles_and_rows(schedule: Schedule) -> None:
    inputs = example("jagged_attention")
    pairs = [a * b for a, b in zip(Q_LENGTHS, K_LENGTHS, strict=True)]
    bias = torch.zeros(sum(pairs), 2, device=DEVICE)
    long = bias[sum(pairs[:3]) : sum(pairs[:4])].view(130, 100, 2)
    long[:20, :66] = -math.inf  # more than the first tile of keys
    long[20:40, 0] = -math.inf
    long[50] = -math.inf
    inputs = dataclasses.replace(inputs, arguments={**inputs.arguments, "bias": bias})
    assert problems(inputs.with_options(return_lse=True), schedule) == []


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_inference_mode_computes_the_same(operator: str) -> None:
    inputs = example(operator)
    expected = inputs.call(FUNCTIONS[operator])
    with torch.inference_mode():
        drawn = inputs.clone()
        assert torch.equal(drawn.call(FUNCTIONS[operator]), expected)
        drawn.arguments["k_offsets"][1] = 10_000
        with pytest.raises(ValueError, match="10000"):
            drawn.call(FUNCTIONS[operator])


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_float64_is_unsupported_and_not_malformed(operator: str) -> None:
    with pytest.raises(NotImplementedError, match="float64"):
        example(operator).to(torch.float64).call(FUNCTIONS[operator])


@pytest.mark.parametrize("operator", FUNCTIONS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("k_offsets", None, "k_offsets must be a tensor, got NoneType"),
        ("q_offsets", [0, 4], "q_offsets must be a tensor, got list"),
        ("v", None, "v must be a tensor, got NoneType"),
        ("q", torch.zeros(5, 0, 32, device=DEVICE), "1 key heads do not divide 0"),
    ],
    ids=["no-k-offsets", "a-list", "no-v", "no-heads"],
)
def test_what_is_no_tensor_or_has_no_heads_is_refused(
    operator: str, name: str, value: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        example(operator).replace(**{name: value}).call(FUNCTIONS[operator])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint16, torch.float32])
def test_bucket_ids_of_an_unknown_dtype_are_refused(dtype: torch.dtype) -> None:
    pairs = sum(a * b for a, b in zip(Q_LENGTHS, K_LENGTHS, strict=True))
    ids = torch.zeros(pairs, dtype=torch.int32, device=DEVICE).to(dtype)
    bias = BucketedBias(torch.zeros(7, 2, device=DEVICE), ids)
    with pytest.raises(ValueError, match=str(dtype)):
        example("jagged_attention").call(jagged_attention, bias=bias)


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_meta_tensors_give_shapes_without_values(operator: str) -> None:
    inputs = example(operator)
    out = inputs.to(device="meta").call(FUNCTIONS[operator])
    assert (out.device.type, out.shape) == ("meta", inputs.arguments["q"].shape)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_token_counts_do_not_compile_kernels_anew() -> None:
    from jagbench.impl.kernels.attention_backward import key_value_gradient_kernel
    from jagbench.impl.kernels.jagged_attention_forward import jagged_attention_forward_kernel

    kernels = (jagged_attention_forward_kernel, key_value_gradient_kernel)

    def compiled() -> int:
        return sum(len(cache[0]) for k in kernels for cache in k.device_caches.values())

    def step(tokens: int) -> None:
        q = torch.randn(tokens, 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        offsets = offsets_of([tokens // 3, tokens - tokens // 3])
        jagged_attention(q, q, q, offsets, offsets, schedule=Schedule("v2")).sum().backward()

    for tokens in (1000, 1001):
        step(tokens)
    warm = compiled()
    for tokens in range(2000, 4000, 173):
        step(tokens)
    assert compiled() == warm


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Within: a call that waits for the device raises."""
    with warnings.catch_warnings():
        # torch warns that the mode is a prototype, and our filters make an error of any warning.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(DEVICE == "cpu", reason="shows on a device: a synchronising call is refused")
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_a_second_call_with_the_same_offsets_does_not_wait_for_the_device(operator: str) -> None:
    inputs = example(operator)
    live = inputs.map(lambda name, x: x.requires_grad_() if name in ("q", "k", "v") else x)

    def step() -> None:
        # Not `run`, which hands over aliases: offsets are checked once for each tensor object.
        torch.autograd.grad(live.call(FUNCTIONS[operator]), live.arguments["q"], live.upstream)

    step()
    with refusing_to_wait():
        step()


def test_smoke_workloads_that_exist_for_both_operators_are_offered() -> None:
    for operator in FUNCTIONS:
        assert len(workloads.select(operator=operator, purpose="smoke")) >= 40


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_pinned_tiles_are_those_of_the_launch(operator: str) -> None:
    kernel = {"gdpa": "gdpa", "jagged_attention": "softmax"}[operator]
    inputs = example(operator)
    width = max(64, tuning.padded(inputs.tensors()["q"].shape[-1]))
    impl.configuration(operator, inputs)
    tuning.pin_tiles({f"{kernel}/{width}": "32x32 warps 4 stages 1"})
    try:
        run(functools.partial(FUNCTIONS[operator], schedule="portable"), inputs)
        used = impl.configuration(operator, inputs)
    finally:
        tuning.pin_tiles({})
    assert used[kernel] == "32x32 warps 4 stages 1"


def test_tiles_can_be_pinned_and_are_reported() -> None:
    tuning.pin_tiles({"softmax/128": "32x64 warps 4 stages 2"})
    try:
        pinned = tuning.table_config("softmax", torch.float16, 128, 128, 1 << 17)
        assert pinned == TileConfig(32, 64, 4, 2)
    finally:
        tuning.pin_tiles({})
    assert tuning.table_config("softmax", torch.float16, 128, 128, 1 << 17) != pinned
    inputs = example("gdpa")
    impl.configuration("gdpa", inputs)
    run(gdpa, inputs, backward=True)
    used = impl.configuration("gdpa", inputs)
    assert any("query_gradient" in kernel for kernel in used)
    assert all(str(TileConfig.parse(tiles)) == tiles for tiles in used.values())
    assert impl.configuration("gdpa", inputs) == {}


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"softmax/96": "32x64 warps 4 stages 2"}, "softmax/128"),
        ({"softmax/128": "32x64"}, "128x64 warps 8 stages 3"),
        ({"softmax/128": "48x64 warps 4 stages 2"}, "got 48"),
    ],
)
def test_a_bad_pin_changes_nothing(choices: dict[str, str], words: str) -> None:
    before = tuning.table_config("softmax", torch.float16, 128, 128, 1 << 17)
    with pytest.raises(ValueError, match=words):
        tuning.pin_tiles(choices)
    assert tuning.table_config("softmax", torch.float16, 128, 128, 1 << 17) == before
