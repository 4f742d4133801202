"""torch's chain of a norm and a linear layer as peers of norm_linear."""

import inspect

import pytest
import torch

from jagbench.accuracy import judge
from jagbench.execution import run
from jagbench.implementation import load
from jagbench.peers import NORM_LINEAR_PEERS
from jagbench.peers.torch_norm_linear import Peer, chain
from jagbench.reference import OPERATORS
from jagbench.suite import changes, shapes
from jagbench.workloads import CATALOGUE, select

EAGER = NORM_LINEAR_PEERS["torch-norm-linear"]


@pytest.mark.parametrize("name", NORM_LINEAR_PEERS)
def test_a_peer_has_the_pinned_signature_and_no_other_operator(name):
    implementation = load(NORM_LINEAR_PEERS[name])
    found = inspect.signature(implementation.get("norm_linear")).parameters.values()
    pinned = OPERATORS["norm_linear"].signature.parameters.values()
    assert [(p.name, p.kind, p.default) for p in found] == [
        (p.name, p.kind, p.default) for p in pinned
    ]
    with pytest.raises(NotImplementedError, match="gdpa"):
        implementation.get("gdpa")


# torch rounds where it likes in half precision, and takes the mean its own way: float32, and no
# rows far from 0.
USUAL = [
    w
    for w in select(operator="norm_linear", purpose="smoke")
    if "offset" not in w.name and "constant" not in w.name
]


@pytest.mark.parametrize("workload", USUAL, ids=lambda w: w.name)
def test_the_eager_chain_is_right(workload):
    inputs = workload.inputs()
    outcome = run(load(EAGER).get("norm_linear"), inputs, backward=True)
    assert not [f"{a.name}: {a.problem}" for a in judge(inputs, outcome) if not a.ok]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_compiled_chain_is_the_same_function():
    # The eager backend traces everything, and needs no C compiler.
    peer = Peer(lambda: torch.compile(chain, backend="aot_eager"), "traced")
    inputs = CATALOGUE["norm_linear-layer-padding-past-the-last-offset"].inputs()
    outcome = run(peer.norm_linear, inputs, backward=True)
    assert not [a for a in judge(inputs, outcome) if not a.ok]


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_prepared_call_gives_what_the_call_gives(norm):
    name = f"norm_linear-{norm}-more-padding-than-rows"
    inputs = CATALOGUE[name].inputs()
    implementation = load(EAGER)
    prepared = implementation.namespace.prepare("norm_linear", inputs)
    leaves = {n: t.detach().requires_grad_() for n, t in prepared.tensors.items()}
    out = prepared.call(**leaves)
    found = torch.autograd.grad(out, list(leaves.values()), prepared.upstream)
    outcome = {"out": out.detach(), **{f"grad {n}": g for n, g in zip(leaves, found, strict=True)}}
    outcome = {n: prepared.unpack(n, t) for n, t in outcome.items()}
    assert not [a for a in judge(inputs, outcome) if not a.ok]
    assert implementation.namespace.prepare("gdpa", inputs) is None
    assert implementation.namespace.configuration("norm_linear", inputs)["mode"] == "eager"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(4, 31)}, r"weight \(4, 31\)"),
        ({"offsets": torch.tensor([0, 9])}, "to 9 do not fit 8 rows"),
        ({"bias": torch.zeros(5)}, r"bias must be \[32\], got torch.float32 \(5,\)"),
        ({"norm_bias": torch.zeros(32)}, "32 features has no norm_bias"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(change, words):
    inputs = changes.floats(shapes.attention("norm_linear", [3, 5]), lambda x: x)
    function = load(EAGER).get("norm_linear")
    with pytest.raises(ValueError, match=words):
        function(**{**inputs.arguments, **change}, norm="rms", eps=1e-6)
    with pytest.raises(ValueError, match="got 'batch', 1e-06"):
        function(**inputs.arguments, norm="batch", eps=1e-6)
