"""torchao's MX casts as peers of mx_quantize: with stand-ins, and with torchao where it is."""

import enum
import importlib
import inspect
import warnings
from types import SimpleNamespace

import pytest
import torch

from jagbench.accuracy import judge
from jagbench.execution import run
from jagbench.implementation import load
from jagbench.inputs import Inputs
from jagbench.mx import ALONG_COLUMNS, ALONG_ROWS, SQUARE
from jagbench.peers import MX_QUANTIZE_PEERS, torchao_mx
from jagbench.reference import OPERATORS
from jagbench.reference.mx import mx_quantize as truth
from jagbench.reference.mx_formats import pack_e2m1
from jagbench.workloads import CATALOGUE

QUANTIZE = OPERATORS["mx_quantize"]


class ScaleCalculationMode(enum.Enum):
    FLOOR = "floor"
    RCEIL = "rceil"
    CEIL = "ceil"
    EVEN = "even"


NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float4_e2m1fn_x2: "e2m1"}


def fake_to_mx(x, kind, block_size, mode):
    assert x.is_contiguous()
    assert x.dtype in (torch.bfloat16, torch.float32)
    assert (block_size, x.shape[-1] % 32) == (32, 0)
    codes, scales = truth(x, elem_dtype=NAMES[kind], scale_mode=mode.value)
    codes = pack_e2m1(codes) if NAMES[kind] == "e2m1" else codes
    return scales.view(torch.float8_e8m0fnu), codes.view(kind)


def fake_dim0(x, block_size, mode):
    codes, scales = truth(x, scale_mode=mode)
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)


def fake_dim1(x, block_size, mode):
    codes, scales = fake_dim0(x.mT.contiguous(), block_size, mode)
    return codes.t(), scales


@pytest.fixture
def torchao(monkeypatch):
    """torchao's modules, made of the reference."""
    modules = {
        "torchao": SimpleNamespace(),
        "torchao.prototype.mx_formats.config": SimpleNamespace(
            ScaleCalculationMode=ScaleCalculationMode
        ),
        "torchao.prototype.mx_formats.mx_tensor": SimpleNamespace(to_mx=fake_to_mx),
        "torchao.prototype.mx_formats.kernels": SimpleNamespace(
            triton_to_mxfp8_dim0=fake_dim0, triton_to_mxfp8_dim1=fake_dim1
        ),
    }
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda n: modules.get(n) or real(n))
    torchao_mx._to_mx.cache_clear()
    yield
    torchao_mx._to_mx.cache_clear()


def call(*shape, offsets=None, dtype=torch.bfloat16, **options):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = None if offsets is None else torch.tensor(offsets)
    return Inputs(QUANTIZE, {"x": x, "offsets": given}, options)


def problems(inputs, function=torchao_mx.mx_quantize):
    return [f"{a.name}: {a.problem}" for a in judge(inputs, run(function, inputs)) if not a.ok]


@pytest.mark.parametrize("name", MX_QUANTIZE_PEERS)
def test_a_peer_has_the_pinned_signature_and_no_other_operator(name):
    implementation = load(MX_QUANTIZE_PEERS[name])
    found = inspect.signature(implementation.get("mx_quantize")).parameters.values()
    pinned = QUANTIZE.signature.parameters.values()
    assert [(p.name, p.kind, p.default) for p in found] == [
        (p.name, p.kind, p.default) for p in pinned
    ]
    with pytest.raises(NotImplementedError, match="gdpa"):
        implementation.get("gdpa")


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("elem_dtype", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize("block", [ALONG_COLUMNS, ALONG_ROWS])
def test_to_mx_gives_codes_in_our_layout(block, elem_dtype, mode):
    options = {"block": block, "elem_dtype": elem_dtype, "scale_mode": mode}
    assert problems(call(64, 96, **options)) == []
    assert problems(call(2, 64, 96, dtype=torch.float32, **options)) == []


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("offsets", [[0, 5, 5, 30], [0, 41], [0]])
def test_jagged_rows_are_those_before_the_last_offset(offsets):
    assert problems(call(41, 2, 64, offsets=offsets)) == []
    assert problems(call(41, 32, offsets=offsets)) == []


@pytest.mark.usefixtures("torchao")
def test_the_kernels_give_codes_in_our_layout():
    peer = torchao_mx.Peer(torchao_mx.by_kernels, "stand-ins")
    for block in (ALONG_COLUMNS, ALONG_ROWS):
        assert problems(call(128, 256, block=block), peer.mx_quantize) == []
        assert problems(call(128, 256, block=block, scale_mode="floor"), peer.mx_quantize) == []
    assert problems(call(130, 64, offsets=[0, 3, 70]), peer.mx_quantize) == []


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (call(128, 128, elem_dtype="e5m2"), "not e5m2"),
        (call(128, 128, scale_mode="even"), "no scale_mode 'even'"),
        (call(128, 128, dtype=torch.float32), "not torch.float32"),
        (call(128, 96, block=ALONG_ROWS), r"multiples of 128, got \(128, 96\)"),
        (call(4, 40), "whole blocks of 32, got 40"),
    ],
)
def test_what_the_kernels_lack_is_refused_with_a_reason(inputs, words):
    peer = torchao_mx.Peer(torchao_mx.by_kernels, "stand-ins")
    with pytest.raises(NotImplementedError, match=words):
        run(peer.mx_quantize, inputs)


REFUSED = [
    (call(64, 96, rounding="stochastic", seed=1), "rounds to nearest only"),
    (call(64, 96, block=SQUARE), r"no blocks of \(32, 32\)"),
    (call(64, 96, block=ALONG_ROWS, offsets=[0, 33]), "knows no sequences"),
    (call(64, 40), "whole blocks of 32, got 40"),
    (call(40, 64, block=ALONG_ROWS), "whole blocks of 32, got 40"),
    (call(64, 96, dtype=torch.float16), "not torch.float16"),
]


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize(("inputs", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_torchao_lacks_is_refused_with_a_reason(inputs, words):
    with pytest.raises(NotImplementedError, match=words):
        run(torchao_mx.mx_quantize, inputs)


@pytest.mark.usefixtures("torchao")
def test_kernels_on_a_cpu_are_refused_with_a_reason():
    with pytest.raises(NotImplementedError, match="need a GPU"):
        run(torchao_mx.kernels.mx_quantize, call(128, 128))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(4, 32, dtype=torch.int32)}, "got torch.int32"),
        ({"offsets": torch.tensor([0, 9])}, "to 9 do not fit 4 rows"),
        ({"offsets": torch.tensor([0.0, 2.0])}, r"got torch.float32 \(2,\)"),
        ({"block": ALONG_ROWS, "x": torch.zeros(32)}, r"x \(32,\) has too few dims"),
        ({"seed": 3}, "uses no seed, got 3"),
        ({"scale_mode": "up"}, "got 'up'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(change, words):
    given = {"x": torch.zeros(4, 32), "offsets": None, **change}
    with pytest.raises(ValueError, match=words):
        torchao_mx.mx_quantize(given.pop("x"), given.pop("offsets"), **given)


def test_a_library_that_is_not_there_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(NotImplementedError, match=r"torchao >= 0.18"):
        run(torchao_mx.mx_quantize, call(64, 96))


@pytest.fixture(scope="module")
def real_torchao():
    """torchao itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(
            "torchao.prototype.mx_formats.mx_tensor",
            reason="needs torchao: pip install --no-deps torchao==0.18.0",
        )


@pytest.mark.usefixtures("real_torchao")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    ["1x32-smoke", "1x32-e5m2-rceil-k64-stochastic-short", "1x32-boundary-maxima-e4m3-floor"],
)
def test_torchao_itself_is_right_on_ordinary_numbers(name, dtype):
    inputs = CATALOGUE[f"mx_quantize-{name}"].inputs(dtype=dtype)
    options = {n: v for n, v in inputs.options.items() if n not in ("rounding", "seed")}
    assert problems(Inputs(QUANTIZE, inputs.arguments, options)) == []
