"""Block attention and rotary of peers: right pair for pair, and prepared calls the same call."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from peer_stand_ins import fake_fa4, fake_flex, fake_varlen
from torch.nn.attention import varlen

from jagbench import workloads
from jagbench.accuracy import judge
from jagbench.execution import run
from jagbench.inputs import Inputs
from jagbench.peers import (
    arguments,
    compiling,
    flash_attention_4,
    flex_attention,
    packed,
    torch_compile,
    varlen_attn,
)
from jagbench.peers.packed import check_blocks, cut_at_blocks
from jagbench.reference import OPERATORS
from jagbench.reference.rotary import position_table
from jagbench.rotary import TokenTable

MODULES = [torch_compile, varlen_attn, flash_attention_4, flex_attention]
BLOCKS = (
    "block_attention-rotary-smoke",
    "block_attention-d32-gqa-rotary",
    "block_attention-d72-partial-rotary",
    "block_attention-d32-log-time-partial-gqa",
    "block_attention-d64-v32-rotary-keys-only",
    "block_attention-d80-block16",
    "block_attention-d32-block1",
    "block_attention-d64-scaled",
    "block_attention-lengths-about-blocks-of-64",
    "block_attention-padding-past-the-last-offset-rotary",
    "block_attention-first-sequence-empty-rotary",
)
EMPTY = ("empty-batch-with-padding", "nothing-but-padding-rotary", "all-sequences-empty")
TURNS = (
    "rotary-d64-half-split",
    "rotary-d80-half-split-inverse",
    "rotary-d72-partial",
    "rotary-d32-log-time-half-split",
    "rotary-padding-past-the-last-offset",
    "rotary-nothing-but-padding",
)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Eager code for compiled code, and dense stand-ins for the libraries."""
    monkeypatch.setattr(packed, "compiled_turn", lambda: packed.turned)
    monkeypatch.setattr(torch_compile, "compiled", lambda: torch_compile.attend)
    monkeypatch.setattr(varlen, "varlen_attn", fake_varlen)
    monkeypatch.setattr(flex_attention, "compiled", lambda: fake_flex)
    library = SimpleNamespace(flash_attn_varlen_func=fake_fa4)
    monkeypatch.setattr(flash_attention_4, "library", lambda *_: library)
    real = arguments.refuse
    monkeypatch.setattr(flex_attention, "refuse", lambda c, r: real(c and "CPU" not in r, r))
    return monkeypatch


def dtype_of(module):
    return torch.float32 if module in (torch_compile, flex_attention) else torch.float16


def inputs_of(name, dtype=torch.float32):
    return workloads.select(name=name)[0].inputs("cpu", dtype)


def assert_right(function, inputs):
    verdicts = judge(inputs, run(function, inputs.clone(), backward=inputs.upstream is not None))
    found = [f"{each.name}: {each.problem}" for each in verdicts if not each.ok]
    assert not found, "; ".join(found)


def example(lengths=(70, 0, 5, 131), padding=3, **options):
    generator = torch.Generator().manual_seed(3)
    q, k, v, g = (torch.randn(sum(lengths) + padding, 2, 32, generator=generator) for _ in range(4))
    given = {"q": q, "k": k, "v": v, "offsets": torch.tensor([0, *lengths]).cumsum(0)}
    if "rotary" in options:
        given["rotary"] = options.pop("rotary")
    return Inputs(OPERATORS["block_attention"], given, options, g)


def of_module(module):
    return module.__name__.rpartition(".")[2]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("module", MODULES, ids=of_module)
def test_block_attention_is_right_with_all_its_gradients(module, name):
    assert_right(module.block_attention, inputs_of(name, dtype_of(module)))


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("module", MODULES, ids=of_module)
def test_nothing_to_compute_gives_zeros(module, name):
    inputs = inputs_of(f"block_attention-{name}", dtype_of(module))
    assert_right(module.block_attention, inputs)
    with pytest.raises(NotImplementedError, match="nothing to prepare"):
        module.prepare("block_attention", inputs)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("module", MODULES, ids=of_module)
def test_a_prepared_call_gives_the_bits_of_the_whole_call(module, name):
    inputs = inputs_of(name, dtype_of(module))
    assert_prepared_like_whole(module, inputs)


@pytest.mark.parametrize("name", TURNS)
def test_rotary_is_right_and_its_prepared_call_the_same(name):
    inputs = inputs_of(name)
    assert_right(torch_compile.rotary, inputs)
    assert_prepared_like_whole(torch_compile, inputs)


def assert_prepared_like_whole(module, inputs):
    operator = inputs.operator.name
    whole = run(getattr(module, operator), inputs, backward=True)
    prepared = module.prepare(operator, inputs)
    leaves = {n: t.detach().requires_grad_() for n, t in prepared.tensors.items()}
    out = prepared.call(**leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), prepared.upstream)
    found = {"out": out.detach()}
    found |= {f"grad {n}": g for n, g in zip(leaves, gradients, strict=True)}
    for key, tensor in found.items():
        assert torch.equal(prepared.unpack(key, tensor), whole[key]), key


@pytest.mark.parametrize(
    ("lengths", "block"), [([70, 0, 5, 131], 64), ([0, 0], 16), ([64, 128, 1], 64), ([], 8)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_are_cut_where_each_sequence_s_blocks_begin(lengths, block, dtype):
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    rows = torch.zeros(sum(lengths), 1, 1)
    cut, described = cut_at_blocks(offsets, arguments.lengths_of("q", offsets, rows, None), block)
    starts = [at + i for at, n in zip(offsets.tolist(), lengths, strict=False)
              for i in range(0, n, block)]  # fmt: skip
    assert cut.tolist() == [*starts, sum(lengths)]
    assert described.host.tolist() == cut.diff().tolist()
    assert (described.total, described.longest) == (
        sum(lengths),
        max(cut.diff().tolist(), default=0),
    )


def test_a_rotation_comes_before_attention_and_is_told():
    inputs = example(rotary=position_table(131, 32).float())
    notes = flex_attention.configuration("block_attention", inputs)
    assert notes["rotary"] == "a compiled step before attention"
    assert "rotary" not in flex_attention.configuration("block_attention", example())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be inst")
def test_a_compiled_call_is_one_graph(stand_ins):
    """Without a break: what is timed is compiled code, all of it."""
    stand_ins.setattr(
        torch_compile, "compiled",
        lambda: compiling.limited(torch_compile.attend, backend="eager", fullgraph=True),
    )  # fmt: skip
    assert_right(torch_compile.block_attention, example(rotary=position_table(131, 32).float()))


def test_reaching_the_limit_of_recompilations_is_an_error(monkeypatch):
    monkeypatch.setattr(compiling, "RECOMPILATIONS", 1)
    function = compiling.limited(lambda x: x + 1, backend="eager")
    function(torch.zeros(2))
    with pytest.raises(Exception, match="recompile_limit"):
        function(torch.zeros(3))


def test_what_memory_cannot_hold_is_refused_with_both_numbers(monkeypatch):
    properties = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    blocks = check_blocks(*example().arguments.values())
    needed = torch_compile.needed_bytes(blocks)
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), shape=blocks.call.q.shape)
    on_gpu.element_size = blocks.call.q.element_size
    call = dataclasses.replace(blocks.call, q=on_gpu)
    with pytest.raises(NotImplementedError, match=f"{needed:,} bytes, the device has 1,000"):
        torch_compile._kernel(dataclasses.replace(blocks, call=call))


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"block_size": 0}, "got 0"),
        ({"rotary": torch.zeros(130, 32)}, "130 rows for 131"),
        ({"rotary": torch.zeros(131, 34)}, "head_dim 32, got 34"),
        ({"rotary": torch.zeros(131, 31)}, "got 31"),
        ({"rotary": TokenTable(torch.zeros(131, 32))}, "131 rows for 209 tokens"),
        ({"rotary": torch.zeros(131, 32, dtype=torch.float64)}, "float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("module", MODULES, ids=of_module)
def test_bad_arguments_are_refused_with_their_numbers(module, options, numbers):
    inputs = example(**options).to(dtype_of(module))
    if "rotary" in options:
        inputs = inputs.replace(rotary=options["rotary"])
    with pytest.raises(ValueError, match=numbers):
        inputs.call(module.block_attention)


def test_a_table_that_wants_a_gradient_is_refused():
    inputs = example(rotary=torch.zeros(131, 32, requires_grad=True))
    with pytest.raises(NotImplementedError, match="no gradient of rotary"):
        inputs.call(torch_compile.block_attention)
