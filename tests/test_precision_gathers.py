"""FSDP2 gathers weights as codes and scales: two processes train as one, bit for bit."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import shard_ranks as ranks
import torch
from shard_ranks import NARROW, RANKS, SQUARES, STEPS, TRUTH
from torch import Tensor, nn

from jagbench.impl.precision import (
    LinearPrecision,
    QuantizedGather,
    Recipe,
    apply,
    payload_bits,
    plain_gathers,
    quantize_gathers,
    recipe_named,
)
from jagbench.mx import ALONG_COLUMNS, SQUARE

#: Seconds after which the two processes are ended.
LIMIT = 120
#: Imported once for both; all but what lies in tests/, which the server does not find.
PRELOADED = ["torch.distributed.fsdp", "jagbench.impl.precision", "jagbench.reference"]


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


def start(folder: Path, end: float) -> None:
    """Run both processes, and end them at a time at the latest."""
    # Of a server that imports once for both, which is most of the time.
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = torch.multiprocessing.start_processes(
        ranks.run, (str(folder),), nprocs=RANKS, join=False, start_method="forkserver"
    )
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, f"two processes did not end in {LIMIT} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
        (folder / "ended").touch()


@pytest.fixture(scope="module")
def shard_run(tmp_path_factory):
    """What each of two processes found: started once, whichever workers of xdist ask for it."""
    base, end = tmp_path_factory.getbasetemp(), time.monotonic() + LIMIT
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shard-ranks"
    try:
        folder.mkdir()
    except FileExistsError:
        while not (folder / "ended").exists():
            assert time.monotonic() < end, f"another worker's processes did not end in {LIMIT} s"
            time.sleep(0.2)
    else:
        start(folder, end)
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
     ("hybrid", "bfloat16"), ("copies", "bfloat16"), ("as it is", "bfloat16")],
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
        ("empty", "1 rows over 2 ranks has shards of 1 rows and fewer; blocks of 1 x 32"),
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
