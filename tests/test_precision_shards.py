"""Weights quantised shard by shard are the weight quantised whole; FSDP2 gathers them as codes."""

from __future__ import annotations

import copy
import io
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import shard_ranks as ranks
import torch
from mx_oracles import normal
from shard_ranks import NARROW, RANKS, SQUARES, STEPS, TRUTH
from torch import Tensor, nn

from jagbench.impl.precision import (
    LinearPrecision,
    QuantizedGather,
    Recipe,
    ShardFormat,
    apply,
    dequantize_weight,
    join_shards,
    payload_bits,
    plain_gathers,
    quantize_gathers,
    quantize_shard,
    recipe_named,
    rows_of_shards,
)
from jagbench.impl.precision.layers import OWN
from jagbench.impl.precision.shards import Quantized
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE
from jagbench.reference.mx import mx_dequantize

#: Seconds after which the two processes are ended.
LIMIT = 120
#: Imported once for both; all but what lies in tests/, which the server does not find.
PRELOADED = ["torch.distributed.fsdp", "jagbench.impl.precision", "jagbench.reference"]
BLOCKS = pytest.mark.parametrize("block", [SQUARE, ALONG_COLUMNS], ids=["32x32", "1x32"])
MODES = pytest.mark.parametrize("scale_mode", ["rceil", "floor", "ceil", "even"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks of different sizes, with outliers that make others subnormal."""
    made = normal(rows, columns, seed=rows).float()
    ranks.spread(made)
    return made.to(dtype)


def form(block: tuple[int, int] = SQUARE, **options: str) -> ShardFormat:
    return ShardFormat(block=block, functions=TRUTH, **options)


# -- shards and the whole --------------------------------------------------------------------------


def check_order_of_gather_and_quantise(
    join: Callable[[list[Quantized]], Quantized],
    own: ShardFormat,
    sizes: list[int],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Quantising shards of these sizes, then joining, is quantising the whole weight."""
    whole = weight(sum(sizes), 72, dtype)
    found = join([quantize_shard(shard, own) for shard in whole.split(sizes)])
    for got, wanted in zip(found, quantize_shard(whole, own), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@DTYPES
@MODES
@BLOCKS
def test_quantising_before_the_gather_is_quantising_after_it(block, scale_mode, dtype):
    own = form(block, scale_mode=scale_mode)
    check_order_of_gather_and_quantise(lambda s: join_shards(s, block), own, [64, 64, 64], dtype)


@pytest.mark.parametrize("elem_dtype", ["e5m2", "e2m1"])
@BLOCKS
def test_quantising_before_the_gather_is_quantising_after_it_in_other_types(block, elem_dtype):
    own = form(block, elem_dtype=elem_dtype)
    check_order_of_gather_and_quantise(lambda s: join_shards(s, block), own, [32, 32])


@pytest.mark.parametrize(
    ("block", "sizes"),
    [(ALONG_COLUMNS, [33, 33, 31]), (ALONG_COLUMNS, [1, 1]), (SQUARE, [64, 64, 40])],
)
def test_shards_of_unequal_size_join_where_no_block_is_cut(block, sizes):
    check_order_of_gather_and_quantise(lambda s: join_shards(s, block), form(block), sizes)


def test_our_kernel_quantises_shards_as_the_whole():
    own = ShardFormat()
    check_order_of_gather_and_quantise(lambda s: join_shards(s, SQUARE), own, [32, 32])


def reversed_order(shards: list[Quantized]) -> Quantized:
    """Wrong: the last rank's rows first."""
    return join_shards(shards[::-1], SQUARE)


def neighbours_scales(shards: list[Quantized]) -> Quantized:
    """Wrong: every shard with the scales of the next."""
    turned = [scales for _, scales in shards]
    turned = [*turned[1:], turned[0]]
    return join_shards([(c, s) for (c, _), s in zip(shards, turned, strict=True)], SQUARE)


def first_scales(shards: list[Quantized]) -> Quantized:
    """Wrong: every shard with the scales of the first."""
    return join_shards([(codes, shards[0][1]) for codes, _ in shards], SQUARE)


def interleaved(shards: list[Quantized]) -> Quantized:
    """Wrong: rows of the ranks in turn, as if a rank had every second row."""
    codes = torch.stack([c for c, _ in shards], 1).flatten(0, 1)
    return codes, torch.cat([s for _, s in shards])


@pytest.mark.parametrize("join", [reversed_order, neighbours_scales, first_scales, interleaved])
def test_a_wrong_join_is_caught(join):
    with pytest.raises(AssertionError):
        check_order_of_gather_and_quantise(join, form(), [32, 32, 32])


def test_shards_that_cut_squares_would_not_join_to_the_whole():
    """Wrong: no look at the rows; 48 of each rank have two rows of squares, the whole has three."""

    def unchecked(shards: list[Quantized]) -> Quantized:
        return torch.cat([c for c, _ in shards]), torch.cat([s for _, s in shards])

    with pytest.raises(AssertionError):
        check_order_of_gather_and_quantise(unchecked, form(), [48, 48])


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "world_size", "block", "wanted"),
    [(128, 2, SQUARE, 64), (96, 3, SQUARE, 32), (32, 1, SQUARE, 32), (70, 2, ALONG_COLUMNS, 35)],
)
def test_shards_of_whole_blocks_have_equal_rows(rows, world_size, block, wanted):
    assert rows_of_shards(rows, world_size, block) == wanted


@pytest.mark.parametrize(
    ("rows", "world_size", "block", "says"),
    [
        (96, 2, SQUARE, "96 rows over 2 ranks has shards of 48 rows; .* 32 x 32 .* 64 or 128"),
        (31, 1, SQUARE, "31 rows over 1 ranks .* 32: 32 rows would do"),
        (160, 2, SQUARE, "shards of 80 rows; .* 128 or 192 rows"),
        (127, 4, SQUARE, "shards of 32 rows and fewer; .* 128 rows would do"),
        (63, 2, ALONG_COLUMNS, "63 rows over 2 ranks has shards of 32 rows and fewer; .* 62 or 64"),
        (64, 0, SQUARE, "no shards of 64 rows over 0 ranks"),
    ],
)  # fmt: skip
def test_shards_that_are_no_whole_blocks_are_refused(rows, world_size, block, says):
    with pytest.raises(ValueError, match=says):
        rows_of_shards(rows, world_size, block)


@pytest.mark.parametrize(("block", "bits"), [(SQUARE, 8 + 8 / 1024), (ALONG_COLUMNS, 8.25)])
def test_the_payload_counts_codes_and_scales(block, bits):
    assert payload_bits(64, 96, block) == bits
    for rows, columns in ((64, 96), (64, 72), (32, 8)):
        sent = sum(
            t.numel() * t.itemsize for t in quantize_shard(weight(rows, columns), form(block))
        )
        assert payload_bits(rows, columns, block) == 8 * sent / (rows * columns)
    with pytest.raises(ValueError, match="a shard of 0 x 96 has no elements"):
        payload_bits(0, 96, block)


def test_shards_that_do_not_fit_are_not_joined():
    codes, scales = quantize_shard(weight(48, 64), form())
    other = quantize_shard(weight(32, 32), form())
    with pytest.raises(ValueError, match="no shard"):
        join_shards([], SQUARE)
    with pytest.raises(ValueError, match="shard 0 of 2 has 48 rows: it ends inside a block"):
        join_shards([(codes, scales)] * 2, SQUARE)
    with pytest.raises(ValueError, match=r"shard 1 must be \[rows, 64\], got \(32, 32\)"):
        join_shards([(codes[:32], scales[:1]), other], SQUARE)
    with pytest.raises(ValueError, match=r"shard 0: .* must be \(2, 2\), got \(1, 2\)"):
        join_shards([(codes, scales[:1])], SQUARE)
    with pytest.raises(ValueError, match=r"a shard is \[rows, columns\], got \(64,\)"):
        quantize_shard(torch.ones(64), form())
    with pytest.raises(ValueError, match="shards are quantised in blocks"):
        ShardFormat(block=ALONG_ROWS)


# -- quantised again by the layer ------------------------------------------------------------------


@DTYPES
@MODES
@BLOCKS
def test_values_of_codes_are_exact_and_quantised_again_stay(block, scale_mode, dtype):
    """From the smallest number of the dtype on, subnormal blocks, zeros and what is no number."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    w = weight(192, 96, dtype)
    w[:32, :32] = (w[:32, :32].double() * smallest * 40).to(dtype)
    w[32:64, :32] = (w[32:64, :32].double() * smallest * 3000).to(dtype)
    w[64:96] = 0
    w[100, 5], w[130, 70] = float("nan"), float("inf")
    own = form(block, scale_mode=scale_mode)
    codes, scales = quantize_shard(w, own)
    values = dequantize_weight((codes, scales), own, dtype)
    exact = mx_dequantize(codes, scales, block=block, dtype=torch.float64)
    torch.testing.assert_close(values.double(), exact, rtol=0, atol=0, equal_nan=True)
    again = dequantize_weight(quantize_shard(values, own), own, dtype)
    torch.testing.assert_close(again, values, rtol=0, atol=0, equal_nan=True)


def test_a_number_at_the_end_of_the_range_rounds_to_infinity():
    w = torch.full((32, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    values = dequantize_weight(quantize_shard(w, form()), form(), torch.bfloat16)
    assert torch.isposinf(values).all()


@pytest.mark.parametrize(
    ("recipe", "functions", "dtype"),
    [("mxfp8", TRUTH, torch.bfloat16), ("mxfp8_wgrad_mx", TRUTH, torch.bfloat16),
     ("mxfp8_floor", TRUTH, torch.bfloat16), ("mxfp8", OWN, torch.float32)],
    ids=["default", "weight-gradient", "floor", "our-kernels"],
)  # fmt: skip
def test_a_layer_on_the_values_of_codes_has_the_bits_of_the_layer(recipe, functions, dtype):
    own = recipe_named(recipe).linear.recipe
    w = weight(64, 96, dtype)
    how = ShardFormat.of(recipe_named(recipe).linear, functions)
    values = dequantize_weight(quantize_shard(w, how), how, dtype)
    assert not torch.equal(values, w)
    found = []
    for given in (w, values):
        x = normal(40, 96, seed=2).to(dtype).requires_grad_()
        given = given.requires_grad_()
        y = functions.linear(x, given, recipe=own)
        upstream = normal(40, 64, seed=4).to(dtype)
        found.append((y, *torch.autograd.grad(y, (x, given), upstream)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


# -- layers of a model -----------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.first = nn.Linear(32, 64, bias=False)
        self.second = nn.Linear(32, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def under(recipe: Recipe = SQUARES) -> nn.Sequential:
    layers = ranks.model()
    apply(layers, recipe, functions=TRUTH)
    return layers


def test_a_layer_that_is_not_sharded_computes_the_same_on_a_wrapped_weight():
    layers, wrapped = under(), under()
    assert quantize_gathers(wrapped, RANKS) == ("0", "2")
    assert isinstance(wrapped[0].weight, nn.Parameter)
    assert isinstance(wrapped[0].weight, QuantizedGather)
    found = []
    for own in (layers, wrapped):
        steps = ranks.optimiser(own)
        y = own(ranks.inputs(0, 0))
        y.sum().backward()
        steps.step()
        found.append([y.detach(), *(p.grad for p in own.parameters()), own[0].weight.detach() + 0])
    for got, wanted in zip(*found, strict=True):
        assert type(got) is Tensor
        assert torch.equal(got, wanted)
    assert isinstance(wrapped[0].weight, QuantizedGather)
    assert "QuantizedGather(tensor" in repr(wrapped[0].weight.detach())


def test_a_wrapped_model_is_copied_and_stored():
    layers = nn.Sequential(nn.Linear(32, 64))
    apply(layers, SQUARES)
    quantize_gathers(layers, RANKS)
    stored = io.BytesIO()
    torch.save(layers, stored)
    stored.seek(0)
    for other in (copy.deepcopy(layers), torch.load(stored, weights_only=False)):
        own = other[0].weight
        assert isinstance(own, QuantizedGather)
        assert own.form == layers[0].weight.form
        assert torch.equal(own.detach().high, layers[0].weight.detach().high)
        assert own.data_ptr() != layers[0].weight.detach().high.data_ptr()


def test_wrapping_is_taken_back_and_done_again():
    layers = under()
    wanted = layers[0].weight.detach().clone()
    quantize_gathers(layers, RANKS)
    quantize_gathers(layers, RANKS)
    assert type(layers[0].weight.detach().high) is Tensor
    assert plain_gathers(layers) == ("0.weight", "2.weight")
    assert type(layers[0].weight) is nn.Parameter
    assert torch.equal(layers[0].weight, wanted)
    assert plain_gathers(layers) == ()


def test_layers_that_share_a_weight_go_on_sharing_it():
    model = Tied()
    model.second.weight = model.first.weight
    apply(model, SQUARES, functions=TRUTH)
    assert quantize_gathers(model, RANKS) == ("first", "second")
    assert model.first.weight is model.second.weight
    assert plain_gathers(model) == ("first.weight", "second.weight")
    assert model.first.weight is model.second.weight


def test_a_weight_that_an_embedding_reads_too_is_refused():
    model = Tied()
    model.first.weight = model.embedding.weight
    apply(model, SQUARES, functions=TRUTH)
    with pytest.raises(ValueError, match=r"1 reasons .* embedding.weight is the weight of a layer"):
        quantize_gathers(model, RANKS)


def one(**options: object) -> Recipe:
    return Recipe("own", LinearPrecision(**options))


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (one(forward=False), "forward is not quantised and reads the weight in high precision"),
        (one(input_gradient=False), "input_gradient is not quantised"),
        (NARROW, r"0: blocks \(1, 32\) .* cannot be had from these codes"),
        (replace(recipe_named("fp8_tensorwise"), keep_roles=()), "2: one scale for the whole"),
        (Recipe("none"), "no layer of the model is under a recipe"),
    ],
)  # fmt: skip
def test_a_recipe_whose_results_would_change_is_refused(recipe, says):
    layers = under(recipe)
    with pytest.raises(ValueError, match=says):
        quantize_gathers(layers, RANKS)
    assert all(type(p) is nn.Parameter for p in layers.parameters())


def test_layers_whose_shards_cut_blocks_are_all_named_and_none_is_changed():
    layers = under()
    says = "2 reasons .* 0: a weight of 128 rows over 3 ranks .*; 2: a weight of 64 rows over 3"
    with pytest.raises(ValueError, match=says):
        quantize_gathers(layers, 3)
    assert all(type(p) is nn.Parameter for p in layers.parameters())
    with pytest.raises(ValueError, match=r"1 reasons .* 2: a weight of 64 rows over 4 ranks"):
        quantize_gathers(layers, 4)
    assert quantize_gathers(layers, 4, keep=("2",)) == ("0",)
    with pytest.raises(ValueError, match="keep 'head' matches none of 2: 0, 2"):
        quantize_gathers(layers, 2, keep=("head",))


# -- two processes under FSDP2 ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def shard_run(tmp_path_factory):
    """What each of two processes found, started once."""
    folder = tmp_path_factory.mktemp("ranks")
    # Of a server that imports once for both, which is most of the time.
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = torch.multiprocessing.start_processes(
        ranks.run, (str(folder),), nprocs=RANKS, join=False, start_method="forkserver"
    )
    end = time.monotonic() + LIMIT
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, f"two processes did not end in {LIMIT} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def whole():
    """The same training in one process, by dtype of the weights."""
    return {name: ranks.unsharded(SQUARES, getattr(torch, name)) for name in ranks.POLICIES}


def differing(found: list[dict], name: str, wanted: dict) -> list[str]:
    """What is not bit for bit as in one process."""
    names = []
    for rank in range(RANKS):
        got = found[rank][name]
        for step in range(STEPS):
            pairs = zip(got["out"][step], wanted["out"][RANKS * step + rank], strict=True)
            for what, (a, b) in zip(("out", "dx"), pairs, strict=True):
                names += [] if torch.equal(a, b) else [f"{what} of step {step} on rank {rank}"]
        for what in ("grads", "weights"):
            for i, (a, b) in enumerate(zip(got[what], wanted[what], strict=True)):
                names += [] if torch.equal(a, b) else [f"{what} {i} on rank {rank}"]
    return names


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("kept", "bfloat16"),
     ("hybrid", "bfloat16"), ("as it is", "bfloat16")],
)  # fmt: skip
def test_training_with_gathered_codes_is_training_in_one_process_bit_for_bit(
    shard_run, whole, name, dtype
):
    assert differing(shard_run, name, whole[dtype]) == []


@pytest.mark.parametrize("kind", ranks.WRONG)
def test_a_wrong_gather_is_caught(shard_run, whole, kind):
    assert differing(shard_run, kind.__name__, whole["bfloat16"])


def test_the_gradient_and_the_optimiser_stay_on_shards_in_high_precision(shard_run):
    for found in shard_run:
        assert found["bfloat16"]["dtypes"] == [torch.float32] * 3
        assert found["bfloat16"]["shards"] == [(64, 72), (64,), (32, 128)]
        assert found["bfloat16"]["states"] == {"DTensor", "Tensor"}


@pytest.mark.parametrize("block", [SQUARE, ALONG_COLUMNS], ids=["32x32", "1x32"])
def test_the_bytes_of_the_all_gather_are_the_payload(shard_run, block):
    for found in shard_run:
        assert 8 * found["payload"][block] / (64 * 96) == payload_bits(64, 96, block)


def test_weights_are_gathered_anew_in_the_backward_unless_they_are_kept(shard_run):
    for found in shard_run:
        assert len(found["bfloat16"]["sent"]) == 4 * STEPS
        assert len(found["kept"]["sent"]) == 2 * STEPS
        # Codes, two bytes of bias an element, and scales; else two bytes an element.
        assert found["bfloat16"]["sent"][:2] == [64 * 72 + 64 * 2 + 2 * 3, 32 * 128 + 4]
        assert found["as it is"]["sent"][:2] == [64 * 72 * 2 + 64 * 2, 32 * 128 * 2]


def test_blocks_of_a_row_have_the_forward_of_one_process_and_the_gradient_of_their_values(
    shard_run,
):
    for found in shard_run:
        case = found["narrow"]
        assert torch.equal(case["sharded"][0], case["whole"][0])
        assert torch.equal(case["sharded"][0], case["values"][0])
        assert torch.equal(case["sharded"][1], case["values"][1])
        assert not torch.equal(case["sharded"][1], case["whole"][1])


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("misaligned", "96 rows over 2 ranks has shards of 48 rows; blocks of 32 x 32"),
        ("uneven", "63 rows over 2 ranks has shards of 32 rows and fewer; blocks of 1 x 32"),
        ("autocast", "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
        ("recipe", "its recipe was changed since"),
        ("dim", "along dim 0, in shards of (32, 64); got (64, 32)"),
    ],
)
def test_what_cannot_be_gathered_so_is_refused_on_every_rank(shard_run, case, says):
    for found in shard_run:
        assert says in found["refused"][case]


def test_a_state_dict_has_the_weight_in_high_precision_and_is_loaded(shard_run):
    for found in shard_run:
        assert torch.equal(found["stored"]["state"], found["stored"]["wanted"])
        assert torch.equal(*found["stored"]["out"])
