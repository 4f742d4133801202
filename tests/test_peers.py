"""Adapters of public kernels: right where the library runs here, honest where it does not."""

import importlib
import inspect
from contextlib import nullcontext

import pytest
import torch
from peer_stand_ins import call_of, problems, smoke
from torch.nn.attention import SDPBackend

from jagbench.accuracy import judge
from jagbench.execution import run
from jagbench.implementation import load
from jagbench.peers import (
    PEERS,
    adapter,
    arguments,
    fbgemm_jfa,
    flash_attention_4,
    flash_linear_attention,
    nested_sdpa,
    padded_sdpa,
)
from jagbench.reference import OPERATORS
from jagbench.suite import shapes

# torch's own, on its way to a loop over sequences.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

#: Those with jagged_attention.
JAGGED = tuple(name for name in PEERS if name != "torch-compile")
HERE = ("padded-sdpa-math", "padded-sdpa-flash", "nested-sdpa")
SMOKE = (
    "jagged_attention-self-fill1.0-smoke",
    "jagged_attention-d104-causal-end-cross",
    "jagged_attention-d192-v128-gqa",
    "jagged_attention-broadcast-q-smoke",
    "jagged_attention-padding-past-the-last-offset",
    "jagged_attention-some-keys-and-some-queries-empty",
    "jagged_attention-keys-all-empty",
    "jagged_attention-empty-batch-with-padding",
)
MATH_ONLY = (
    "jagged_attention-d64-window-start-gqa-cross",
    "jagged_attention-log-time-bias-one-head-window-cross",
    "jagged_attention-dense-query-gqa",
    "jagged_attention-window-rows-that-see-nothing",
)


# -- every adapter


@pytest.mark.parametrize("name", PEERS)
def test_an_adapter_loads_as_an_implementation_with_the_pinned_signatures(name):
    implementation = load(PEERS[name])
    offered = [operator for operator in OPERATORS if hasattr(implementation.namespace, operator)]
    assert offered
    for operator in offered:
        found = inspect.signature(implementation.get(operator)).parameters.values()
        pinned = OPERATORS[operator].signature.parameters.values()
        assert [(p.name, p.kind, p.default) for p in found] == [
            (p.name, p.kind, p.default) for p in pinned
        ]
    assert implementation.version == implementation.namespace.__version__


@pytest.mark.parametrize("name", PEERS)
def test_an_adapter_has_no_gdpa(name):
    with pytest.raises(NotImplementedError, match="gdpa"):
        load(PEERS[name]).get("gdpa")


@pytest.mark.parametrize(
    ("module", "package"),
    [
        (flash_attention_4, "flash-attn-4 >= 4.0.0b36"),
        (fbgemm_jfa, "fbgemm-gpu >= 1.6"),
        (flash_linear_attention, "fla-core >= 0.4"),
    ],
)
def test_a_library_that_is_not_there_is_named(module, package, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    inputs = shapes.attention("jagged_attention", [3, 4], dtype=torch.float16)
    with pytest.raises(NotImplementedError, match=package):
        run(module.jagged_attention, inputs)


@pytest.mark.parametrize("name", JAGGED)
@pytest.mark.parametrize(
    ("argument", "values", "number"),
    [
        ("q_offsets", [1, 3, 7], "1"),
        ("k_offsets", [0, 5, 4], "decrease at index 2: 5 to 4"),
        ("k_offsets", [0, 3, 9], "9"),
        ("q_offsets", [0, 7], "1 sequences"),
    ],
)
def test_malformed_offsets_are_refused_with_their_numbers(name, argument, values, number):
    inputs = shapes.attention("jagged_attention", [3, 4]).replace(
        **{argument: torch.tensor(values)}
    )
    with pytest.raises(ValueError, match=number):
        run(load(PEERS[name]).get("jagged_attention"), inputs)


@pytest.mark.parametrize("length", ["max_q_len", "max_k_len"])
def test_a_maximum_length_that_is_too_small_is_refused(length):
    inputs = shapes.attention("jagged_attention", [3, 9])
    with pytest.raises(ValueError, match=f"{length} is 4, and the longest . sequence has 9"):
        run(padded_sdpa.math.jagged_attention, inputs.with_options(**{length: 4}))


def test_offsets_changed_in_place_are_looked_at_again():
    offsets, values = torch.tensor([0, 3, 7]), torch.zeros(7, 1, 1)
    assert arguments.lengths_of("q", offsets, values, None).host.tolist() == [3, 4]
    offsets[1] = 2
    assert arguments.lengths_of("q", offsets, values, None).host.tolist() == [2, 5]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ({"window": (3, 0), "prefix": 2}, "no contextual prefix .asked for 2"),
        ({"causal": True, "prefix": 2}, "no contextual prefix .asked for 2"),
        ({"window": (3, 1), "last_full": 4}, r"no last queries .4. that"),
    ],
)
def test_what_lies_beyond_the_window_is_unsupported(mask, words):
    with pytest.raises(NotImplementedError, match=words):
        call_of([5, 3], [2, 9], **mask)


def test_a_prefix_or_last_queries_that_show_nothing_more_are_taken():
    assert not call_of([5, 3], [2, 9], prefix=2, last_full=3).bounded
    assert call_of([5, 3], [2, 9], causal=True, last_full=3).causal_only


def test_a_window_side_beyond_every_key_binds_nothing():
    call = call_of([5, 3], [2, 9], window=(14, 13))
    assert (call.left, call.right) == (None, 13)


# -- libraries that run on a CPU


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("workload", SMOKE)
def test_outputs_and_gradients_are_within_budget(name, workload):
    try:
        assert not problems(load(PEERS[name]).namespace, smoke(workload))
    except NotImplementedError:
        assert name == "nested-sdpa"


@pytest.mark.parametrize("workload", MATH_ONLY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_math_takes_windows_biases_and_dense_queries(workload, dtype):
    assert not problems(padded_sdpa.math, smoke(workload, dtype))


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("workload", [*SMOKE[:6], *MATH_ONLY])
def test_a_prepared_call_gives_the_same_bits(name, workload):
    peer, inputs = load(PEERS[name]).namespace, smoke(workload)
    try:
        whole = run(peer.jagged_attention, inputs, backward=True)
    except NotImplementedError:
        assert name != "padded-sdpa-math"
        return
    prepared = peer.prepare("jagged_attention", inputs)
    leaves = {n: t.detach().requires_grad_() for n, t in prepared.tensors.items()}
    out = prepared.call(**leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), prepared.upstream)
    found = {"out": out.detach()}
    found |= {f"grad {n}": g for n, g in zip(leaves, gradients, strict=True)}
    for key, tensor in found.items():
        assert torch.equal(prepared.unpack(key, tensor), whole[key]), key


def test_another_operator_has_nothing_to_prepare():
    inputs = shapes.attention("gdpa", [3])
    assert padded_sdpa.math.prepare("gdpa", inputs) is None


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_flash_hides_padded_keys_in_a_column(scale, dtype):
    inputs = shapes.attention("jagged_attention", [3, 5, 2], [9, 0, 4], scale=scale, dtype=dtype)
    notes = padded_sdpa.flash.configuration("jagged_attention", inputs)
    assert (notes["masking"], notes["head_dim"]) == ("column", "40")
    assert not problems(padded_sdpa.flash, inputs)


def test_flash_refuses_a_scale_that_cannot_hide_keys():
    inputs = shapes.attention("jagged_attention", [3, 5], scale=0.0)
    with pytest.raises(NotImplementedError, match="scale 0"):
        run(padded_sdpa.flash.jagged_attention, inputs)


@pytest.mark.parametrize(
    ("lengths", "options", "masking"),
    [
        (([4, 4], [6, 6]), {}, "none"),
        (([4, 2], [4, 2]), {"causal": True}, "causal flag"),
        (([4, 2], [6, 3]), {}, "keys"),
        (([4, 2], [6, 3]), {"causal": True}, "pairs"),
    ],
)
def test_padded_math_masks_no_more_than_it_must(lengths, options, masking):
    inputs = shapes.attention("jagged_attention", *lengths, **options)
    notes = padded_sdpa.math.configuration("jagged_attention", inputs)
    assert notes["masking"] == masking
    assert not problems(padded_sdpa.math, inputs)


@pytest.fixture
def any_backend(monkeypatch):
    """cuDNN's masks, with whatever kernel a CPU has."""
    real = arguments.refuse
    monkeypatch.setattr(padded_sdpa, "refuse", lambda c, r: real(c and "run on cpu" not in r, r))
    monkeypatch.setattr(padded_sdpa, "sdpa_kernel", lambda _: nullcontext())


@pytest.mark.parametrize("workload", [*SMOKE[:6], MATH_ONLY[0], MATH_ONLY[3]])
def test_the_masks_of_cudnn_are_right_and_finite(any_backend, workload):
    inputs = smoke(workload, torch.bfloat16)
    call = adapter._described(inputs)
    lengths = max(call.q_lengths.longest, 1), max(call.k_lengths.longest, 1)
    mask = padded_sdpa._mask(call, SDPBackend.CUDNN_ATTENTION, padded_sdpa._masking(call), *lengths)
    assert mask is None or torch.isfinite(mask).all()
    assert not problems(padded_sdpa.cudnn, inputs)


def test_cudnn_takes_a_bias_but_gives_it_no_gradient(any_backend):
    inputs = smoke("jagged_attention-dense-bias", torch.bfloat16)
    outcome = run(padded_sdpa.cudnn.jagged_attention, inputs)
    assert all(verdict.ok for verdict in judge(inputs, outcome))
    with pytest.raises(NotImplementedError, match="gradient"):
        run(padded_sdpa.cudnn.jagged_attention, inputs, backward=True)


def test_nested_sdpa_is_causal_between_equal_lengths_only():
    inputs = shapes.attention("jagged_attention", [3, 5], [4, 5], causal=True)
    with pytest.raises(NotImplementedError, match="equal lengths"):
        run(nested_sdpa.jagged_attention, inputs)


class _Watched(torch.autograd.Function):
    """Identity that notes the strides of its output and of the gradient that comes back."""

    seen: list[tuple[int, ...]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        _Watched.seen.append(x.stride())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        _Watched.seen.append(gradient.stride())
        return gradient


@pytest.mark.parametrize("prepared", [False, True])
def test_the_upstream_gradient_reaches_the_library_laid_out_as_its_output(monkeypatch, prepared):
    inputs = smoke("jagged_attention-self-fill0.5-jagged-smoke")
    sdpa = padded_sdpa.F.scaled_dot_product_attention
    monkeypatch.setattr(_Watched, "seen", [])
    monkeypatch.setattr(
        padded_sdpa.F,
        "scaled_dot_product_attention",
        lambda *a, **o: _Watched.apply(sdpa(*a, **o)),
    )
    if prepared:
        found = padded_sdpa.math.prepare("jagged_attention", inputs)
        leaves = {n: x.detach().requires_grad_() for n, x in found.tensors.items()}
        upstream = found.upstream.contiguous()
        torch.autograd.grad(found.call(**leaves), list(leaves.values()), upstream)
    else:
        run(padded_sdpa.math.jagged_attention, inputs, backward=True)
    forward, backward = _Watched.seen
    assert forward == backward
