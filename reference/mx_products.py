"""The products of quantised operands as operators: what they cost, and which codes may differ.

The operands of `mx_matmul`, and those of `mx_linear` but for a transformed weight gradient, follow
from the arguments bit by bit: the budget is that of an ordinary product. Inside attention and GDPA
the weights P and the gradient dS of the scores are computed in float32 before they are quantised,
so that some of their codes fall on the other side of a boundary (`SHARE`).
"""

from __future__ import annotations

import math

from jagbench.inputs import Inputs
from jagbench.mx import AttentionRecipe, ElemDtype, LinearRecipe
from jagbench.reference import costs
from jagbench.reference.gdpa import GDPA
from jagbench.reference.jagged_attention import JAGGED_ATTENTION
from jagbench.reference.mx_attention import mx_attention
from jagbench.reference.mx_formats import format_of
from jagbench.reference.mx_gdpa import mx_gdpa
from jagbench.reference.mx_matmul import mx_linear, mx_matmul
from jagbench.spec import PAIRS, ROWS, SHARED, Flips, Operator

#: Largest share of codes that fall to the other side of a boundary for float32 arithmetic.
#:
#: A number x that is off by e x comes to another code with probability e x over the distance of
#: two codes, which in E4M3 is at least x / 16: 16 e, to nearest as stochastically. A weight
#: exp(S - max) is off by the error of S, some 2^-24 |S| with |S| up to 20, and by 2 ulp of the
#: exponential: e is about 1.5e-6 and the share 2.4e-5. The reference in float32 differs from itself
#: in float64 by 1e-6 to 6e-6 of the codes of P and dS (lengths 64 to 600, head_dim 32 to 128,
#: normals of deviation 1 and 3). Four times the estimate is allowed: normwise 1.2e-3 of the truth
#: in E4M3, where quantisation itself brings in 4e-2. In half precision dS differs in 6e-3 to
#: 2e-2 of its codes, because the output of which D is taken has been rounded; so it does in the
#: naive run, of whose error a multiple is allowed.
#:
#: The worst element may be off by a step of the largest (`Flips.step`, 1/8 in E4M3): one element
#: that is wrong by less is not seen by itself, only in the norm of its tensor and sequence.
SHARE = 1e-4


def _flips(elem_dtype: ElemDtype) -> Flips:
    return Flips(SHARE, 2.0 ** -format_of(elem_dtype).mantissa_bits)


def _linear_flips(inputs: Inputs, name: str) -> Flips | None:
    """Of the weight gradient behind a transform, whose sums are rounded before they are quantised.

    A sum of 64 numbers is off by about 2^-24 of its size: the share is that of attention at most.
    """
    recipe: LinearRecipe = inputs.options["recipe"]
    transformed = recipe.weight_gradient == "mx" and recipe.hadamard is not None
    if name != "grad weight" or not transformed:
        return None
    return max(_flips(recipe.elem_dtype), _flips(recipe.gradient_elem_dtype), key=_step)


def _attention_flips(inputs: Inputs, name: str) -> Flips | None:
    """Of P in the output and the gradient of v, of dS in those of q and k; none in the rest."""
    recipe: AttentionRecipe = inputs.options["recipe"]
    if name in ("out", "grad v"):
        return _flips(recipe.elem_dtype)
    if name in ("grad q", "grad k"):
        # D is taken of the output, so that the codes of P have a part in dS.
        return max(_flips(recipe.elem_dtype), _flips(recipe.gradient_elem_dtype), key=_step)
    if name.startswith("grad bias"):
        return _flips(recipe.elem_dtype)
    if name == "lse" and recipe.row_sum == "quantized":
        return _flips(recipe.elem_dtype)
    return None


def _step(flips: Flips) -> float:
    return flips.step


def _draws_by_row(inputs: Inputs) -> bool:
    """Whether gradients are rounded by random bits that belong to numbered rows."""
    recipe: AttentionRecipe = inputs.options["recipe"]
    return inputs.upstream is not None and recipe.gradient_rounding == "stochastic"


def mx_linear_flops(inputs: Inputs) -> int:
    """FLOP of one forward pass: 2 features out_features a row; the quantisation counts 0."""
    t = inputs.tensors()
    return 2 * (t["x"].numel() // t["x"].shape[-1]) * t["weight"].numel()


def mx_linear_bytes(inputs: Inputs) -> int:
    """Least bytes of one forward pass: every argument read once, the output written once."""
    t = inputs.tensors()
    rows = t["x"].numel() // t["x"].shape[-1]
    return costs.read_once(inputs) + rows * t["weight"].shape[0] * t["x"].element_size()


def mx_matmul_flops(inputs: Inputs) -> int:
    """FLOP of one call: 2 m n k a matrix; scales count 0."""
    t = inputs.tensors()
    return 2 * t["a"].numel() * t["b"].shape[-1]


def mx_matmul_bytes(inputs: Inputs) -> int:
    """Least bytes of one call: codes and scales read once, the product written once."""
    a, b = (inputs.tensors()[name] for name in "ab")
    elements = math.prod(a.shape[:-1]) * b.shape[-1]
    return costs.read_once(inputs) + elements * inputs.dtype.itemsize


MX_LINEAR = Operator(
    name="mx_linear",
    reference=mx_linear,
    layout={"x": ROWS, "weight": SHARED, "bias": SHARED},
    output_layout={"out": ROWS},
    differentiable=("x", "weight", "bias"),
    flops=mx_linear_flops,
    bytes_moved=mx_linear_bytes,
    flips=_linear_flips,
    quantised=True,
    unread_in_backward=("bias",),
    # Two products against one; nothing is recomputed.
    backward_flops_ratio=2.0,
    paper="arXiv 2506.08027 (three quantised products) and 2509.25149 (transform, roundings)",
)

MX_MATMUL = Operator(
    name="mx_matmul",
    reference=mx_matmul,
    layout={"a": ROWS, "a_scales": ROWS, "b": SHARED, "b_scales": SHARED},
    output_layout={"out": ROWS},
    differentiable=(),
    flops=mx_matmul_flops,
    bytes_moved=mx_matmul_bytes,
    quantised=True,
    paper="OCP Microscaling Formats (MX) Specification 1.0, section 6.2",
)

MX_ATTENTION = Operator(
    name="mx_attention",
    reference=mx_attention,
    layout={
        "q": "q_offsets",
        "k": "k_offsets",
        "v": "k_offsets",
        "bias": PAIRS,
        "bias.table": SHARED,
        "bias.bucket_ids": PAIRS,
    },
    output_layout={"out": "q_offsets", "lse": "q_offsets"},
    differentiable=("q", "k", "v", "bias", "bias.table"),
    flops=JAGGED_ATTENTION.flops,
    bytes_moved=JAGGED_ATTENTION.bytes_moved,
    flips=_attention_flips,
    by_row_number=_draws_by_row,
    quantised=True,
    paper="facebookexperimental/triton (TLX), MXFP8 attention; GEM Training, 2026 (squares)",
)

MX_GDPA = Operator(
    name="mx_gdpa",
    reference=mx_gdpa,
    layout={"q": "q_offsets", "k": "k_offsets", "v": "k_offsets"},
    output_layout={"out": "q_offsets"},
    differentiable=("q", "k", "v"),
    flops=GDPA.flops,
    bytes_moved=GDPA.bytes_moved,
    approximation=GDPA.approximation,
    flips=_attention_flips,
    by_row_number=_draws_by_row,
    quantised=True,
    paper="facebookresearch/ads_model_kernel_library, FP8 GDPA; GEM Training, 2026 (squares)",
)
