"""Second oracles: dense, padded, masked, backward by hand. They share no code with `reference/`.

Everything is `[batch, heads, longest query, longest key]` with one boolean mask, in float64. Also
here: cases drawn by hypothesis, and how a case becomes a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from jagbench.bias import BucketedBias
from jagbench.inputs import Inputs
from jagbench.reference import OPERATORS

MASKS = [{}, {"causal": True}, {"window": (2, 1)}, {"causal": True, "align": "start"}]

quick = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Same names, and every tensor equal to 1e-12."""
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, wanted[name], rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Sizes, mask and seed of one call; `q_lengths=None` is a dense query of `rows` rows."""

    q_lengths: list[int] | None
    k_lengths: list[int]
    rows: int = 3
    kv_heads: int = 1
    group: int = 1
    qk_dim: int = 4
    v_dim: int = 4
    padding: tuple[int, int] = (0, 0)
    causal: bool = False
    align: str = "end"
    window: tuple[int | None, int | None] | None = None
    prefix: int = 0
    last_full: int = 0
    bias: str = "none"
    bias_heads: str = "all"
    offsets_dtype: torch.dtype = torch.int64
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def mask(self) -> dict[str, object]:
        names = ("causal", "align", "window", "prefix", "last_full")
        return {name: getattr(self, name) for name in names}


@st.composite
def cases(draw: st.DrawFn, biases: tuple[str, ...] = ("none",)) -> Case:
    lengths = st.sampled_from([0, 1, 2, 3, 5, 8])
    sides = st.sampled_from([None, 0, 1, 3])
    k_lengths = draw(st.lists(lengths, max_size=4))
    size = len(k_lengths)
    return Case(
        q_lengths=draw(st.none() | st.lists(lengths, min_size=size, max_size=size)),
        k_lengths=k_lengths,
        rows=draw(st.integers(1, 4)),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        qk_dim=draw(st.integers(1, 5)),
        v_dim=draw(st.integers(1, 5)),
        padding=draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        causal=draw(st.booleans()),
        align=draw(st.sampled_from(["start", "end"])),
        window=draw(st.none() | st.tuples(sides, sides)),
        prefix=draw(st.sampled_from([0, 0, 1, 2, 4, 20])),
        last_full=draw(st.sampled_from([0, 0, 1, 2, 4, 20])),
        bias=draw(st.sampled_from(biases)),
        bias_heads=draw(st.sampled_from(["all", "one"])),
        offsets_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        seed=draw(st.integers(0, 1000)),
    )


def call_of(
    case: Case, operator: str, dtype: torch.dtype = torch.float64, **options: object
) -> Inputs:
    """The call a case describes, with an upstream gradient; rows past the last offset are NaN."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def packed(rows: int, padding: int, *shape: int) -> Tensor:
        return torch.cat([normal(rows, *shape), torch.full((padding, *shape), math.nan).to(dtype)])

    dense = case.q_lengths is None
    total_k = sum(case.k_lengths)
    q_padding, k_padding = (0 if dense else case.padding[0]), case.padding[1]
    q_rows = case.rows if dense else sum(case.q_lengths)
    q = packed(q_rows, q_padding, case.heads, case.qk_dim)
    out_rows = (
        normal(len(case.k_lengths), q_rows, case.heads, case.v_dim)
        if dense
        else packed(q_rows, q_padding, case.heads, case.v_dim)
    )
    arguments = {
        "q": q,
        "k": packed(total_k, k_padding, case.kv_heads, case.qk_dim),
        "v": packed(total_k, k_padding, case.kv_heads, case.v_dim),
        "q_offsets": None if dense else offsets_of(case.q_lengths, case.offsets_dtype),
        "k_offsets": offsets_of(case.k_lengths, case.offsets_dtype),
    }
    q_lengths = [case.rows] * len(case.k_lengths) if dense else case.q_lengths
    pairs = sum(m * n for m, n in zip(q_lengths, case.k_lengths, strict=True))
    width = case.heads if case.bias_heads == "all" else 1
    if case.bias == "dense":
        arguments["bias"] = normal(pairs, width)
    elif case.bias == "bucketed":
        ids = torch.randint(0, 4, (pairs,), generator=generator, dtype=torch.uint8)
        arguments["bias"] = BucketedBias(normal(4, width), ids)
    return Inputs(OPERATORS[operator], arguments, {**case.mask, **options}, out_rows)


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


# -- padding and masks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """Where every padded cell of a call lives in its packed tensors.

    q_rows `[batch, m]`, k_rows `[batch, n]`: packed row; q_valid, k_valid: whether there is one.
    visible `[batch, m, n]`: the mask. pairs `[batch, m, n]`: packed pair.
    """

    q_rows: Tensor
    k_rows: Tensor
    q_valid: Tensor
    k_valid: Tensor
    visible: Tensor
    pairs: Tensor


def frame_of(inputs: Inputs) -> Frame:
    q, k_offsets = inputs.arguments["q"], inputs.arguments["k_offsets"].long()
    q_offsets = inputs.arguments["q_offsets"]
    n_lengths = k_offsets[1:] - k_offsets[:-1]
    if q_offsets is None:
        m_lengths, q_starts = torch.full_like(n_lengths, q.shape[0]), torch.zeros_like(n_lengths)
    else:
        m_lengths, q_starts = (q_offsets[1:] - q_offsets[:-1]).long(), q_offsets[:-1].long()
    m, n = (int(x.max()) if x.numel() else 0 for x in (m_lengths, n_lengths))
    m = m if q_offsets is not None else q.shape[0]
    batch, i, j = torch.meshgrid(
        torch.arange(len(n_lengths)), torch.arange(m), torch.arange(n), indexing="ij"
    )
    lag = i - j  # how far the key lies behind the query
    if inputs.options.get("align", "end") == "end":
        lag = lag + (n_lengths - m_lengths)[batch]
    left, right = inputs.options.get("window") or (None, None)
    hidden = (i >= m_lengths[batch]) | (j >= n_lengths[batch])
    hidden |= lag > (math.inf if left is None else left)
    hidden |= -lag > (math.inf if right is None else right)
    if inputs.options.get("causal", False):
        hidden |= lag < 0
    hidden &= ~_beyond_the_window(inputs, i, j, lag, m_lengths[batch], n_lengths[batch])
    sizes = m_lengths * n_lengths
    starts = sizes.cumsum(0) - sizes
    return Frame(
        q_rows=q_starts[:, None] + torch.arange(m),
        k_rows=k_offsets[:-1, None] + torch.arange(n),
        q_valid=torch.arange(m) < m_lengths[:, None],
        k_valid=torch.arange(n) < n_lengths[:, None],
        visible=~hidden,
        pairs=(starts[batch] + i * n_lengths[batch] + j)
        * ((i < m_lengths[batch]) & (j < n_lengths[batch])),
    )


def _beyond_the_window(
    inputs: Inputs, i: Tensor, j: Tensor, lag: Tensor, m: Tensor, n: Tensor
) -> Tensor:
    """Pairs of a context, or of one of the last queries; the query's place is its key plus lag."""
    options, place = inputs.options, j + lag
    prefix, last_full = options.get("prefix", 0), options.get("last_full", 0)
    shown = (j < prefix) | ((place < prefix) & (place >= 0))
    free = m - i <= last_full
    shown |= free & (lag >= 0) if options.get("causal", False) else free
    return shown & (i < m) & (j < n)


def _pad(x: Tensor, rows: Tensor, valid: Tensor) -> Tensor:
    """Packed `[rows, heads, dim]` to `[batch, heads, length, dim]`, zeros where there is no row."""
    if x.shape[0] == 0:
        return x.new_zeros(*rows.shape, *x.shape[1:]).transpose(1, 2)
    gathered = x[rows.clamp(max=x.shape[0] - 1)]
    return gathered.masked_fill(~valid[..., None, None], 0.0).transpose(1, 2)


def _unpad(x: Tensor, valid: Tensor, rows: int) -> Tensor:
    """Padded `[batch, heads, length, dim]` back to packed, zeros past the last row."""
    packed = x.transpose(1, 2)[valid]
    return torch.cat([packed, packed.new_zeros(rows - packed.shape[0], *packed.shape[1:])])


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """Sum the gradient of repeated heads, `[batch, heads, n, dim]`, into that of kv_heads."""
    batch, heads, n, dim = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads, n, dim).sum(2)


@dataclass(frozen=True)
class _Padded:
    """Padded operands of a call, its key heads repeated, and the upstream gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor

    @classmethod
    def of(cls, inputs: Inputs, frame: Frame) -> _Padded:
        q, k, v = (inputs.arguments[name] for name in "qkv")
        dense = inputs.arguments["q_offsets"] is None
        head = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
        upstream = inputs.upstream
        return cls(
            _pad(q, frame.q_rows, frame.q_valid),
            _pad(k, frame.k_rows, frame.k_valid)[:, head],
            _pad(v, frame.k_rows, frame.k_valid)[:, head],
            upstream.transpose(1, 2) if dense else _pad(upstream, frame.q_rows, frame.q_valid),
        )


def _pack(
    inputs: Inputs, frame: Frame, out: Tensor, grads: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """Name and pack out and the gradients of q, k, v (repeated key heads)."""
    q, k = inputs.arguments["q"], inputs.arguments["k"]
    dq, dk, dv = grads
    if inputs.arguments["q_offsets"] is None:
        packed_out, packed_dq = out.transpose(1, 2), dq.sum(0).transpose(0, 1)
    else:
        packed_out = _unpad(out, frame.q_valid, q.shape[0])
        packed_dq = _unpad(dq, frame.q_valid, q.shape[0])
    return {
        "out": packed_out,
        "grad q": packed_dq,
        "grad k": _unpad(_fold(dk, k.shape[1]), frame.k_valid, k.shape[0]),
        "grad v": _unpad(_fold(dv, k.shape[1]), frame.k_valid, k.shape[0]),
    }


# -- operators -------------------------------------------------------------------------------------


def attention_oracle(inputs: Inputs) -> dict[str, Tensor]:
    """Every output and gradient of `jagged_attention` (P = exp(S - LSE); spec of the backward)."""
    frame = frame_of(inputs)
    x = _Padded.of(inputs, frame)
    scale = inputs.options.get("scale") or inputs.arguments["q"].shape[2] ** -0.5
    visible = frame.visible[:, None]
    bias = inputs.arguments.get("bias")
    s = torch.einsum("bhid,bhjd->bhij", x.q, x.k) * scale
    if bias is not None:
        packed = bias if isinstance(bias, Tensor) else bias.table[bias.bucket_ids.long()]
        if packed.shape[0]:
            s = s + packed[frame.pairs].permute(0, 3, 1, 2)
    terms = torch.where(visible, torch.exp(s), 0.0)
    total = terms.sum(-1)
    lse = torch.log(total)
    p = terms / torch.where(total > 0, total, 1.0)[..., None]
    out = torch.einsum("bhij,bhjd->bhid", p, x.v)
    dv = torch.einsum("bhij,bhid->bhjd", p, x.upstream)
    dp = torch.einsum("bhid,bhjd->bhij", x.upstream, x.v)
    ds = p * (dp - (x.upstream * out).sum(-1, keepdim=True))
    dq = scale * torch.einsum("bhij,bhjd->bhid", ds, x.k)
    dk = scale * torch.einsum("bhij,bhid->bhjd", ds, x.q)
    found = _pack(inputs, frame, out, (dq, dk, dv))
    found["lse"] = _pack(inputs, frame, lse[..., None], (dq, dk, dv))["out"][..., 0]
    if bias is not None:
        found.update(_bias_gradients(bias, frame, ds))
    return found


def _bias_gradients(bias: Tensor | BucketedBias, frame: Frame, ds: Tensor) -> dict[str, Tensor]:
    """Gradient of a dense bias is dS, pair by pair; of a table, the sum over a bucket's pairs."""
    valid = frame.q_valid[:, :, None] & frame.k_valid[:, None, :]
    per_pair = ds.permute(0, 2, 3, 1)[valid]  # packed: row-major in each sequence
    width = (bias if isinstance(bias, Tensor) else bias.table).shape[1]
    if width == 1:
        per_pair = per_pair.sum(1, keepdim=True)
    if isinstance(bias, Tensor):
        return {"grad bias": per_pair}
    chosen = functional.one_hot(bias.bucket_ids.long(), bias.table.shape[0]).to(ds.dtype)
    return {"grad bias.table": chosen.T @ per_pair}


def gdpa_oracle(inputs: Inputs) -> dict[str, Tensor]:
    """Every output and gradient of `gdpa` (A = post act(S), dS = post act'(S) dA)."""
    frame = frame_of(inputs)
    x = _Padded.of(inputs, frame)
    heads = inputs.arguments["q"].shape[1]
    names = inputs.options["activation"]
    names = [names] * heads if isinstance(names, str) else names
    pre, post = (inputs.options.get(name, 1.0) for name in ("pre_scale", "post_scale"))
    visible = frame.visible[:, None].to(torch.float64)
    s = pre * torch.einsum("bhid,bhjd->bhij", x.q, x.k)
    pairs = [activation_oracle(name, s[:, h]) for h, name in enumerate(names)]
    a = visible * post * torch.stack([value for value, _ in pairs], 1)
    slope = visible * post * torch.stack([slope for _, slope in pairs], 1)
    out = torch.einsum("bhij,bhjd->bhid", a, x.v)
    dv = torch.einsum("bhij,bhid->bhjd", a, x.upstream)
    ds = slope * torch.einsum("bhid,bhjd->bhij", x.upstream, x.v)
    dq = pre * torch.einsum("bhij,bhjd->bhid", ds, x.k)
    dk = pre * torch.einsum("bhij,bhid->bhjd", ds, x.q)
    return _pack(inputs, frame, out, (dq, dk, dv))


# -- activations -----------------------------------------------------------------------------------


def _tanh_form(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * torch.sigmoid(2 * factor * x * (1 + 0.044715 * x**2))


def _polynomial_or_tanh(*coefficients: float) -> Callable[[Tensor], Tensor]:
    def evaluate(x: Tensor) -> Tensor:
        inner = x.clamp(-1.25, 1.25)
        powers = torch.stack([inner ** (2 * i) for i in range(1, len(coefficients) + 1)], -1)
        polynomial = 0.5 * inner + (powers * torch.tensor(coefficients, dtype=x.dtype)).sum(-1)
        return torch.where(x.abs() > 1.25, functional.gelu(x, approximate="tanh"), polynomial)

    return evaluate


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: 1.0 * x,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "fast_gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "fast_gelu_bf16": _tanh_form(0.796875),
    "silu": functional.silu,
    "fast_silu": functional.silu,
    "relu": functional.relu,
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.01),
    "relu_squared": lambda x: x.clamp(min=0) ** 2,
    "hardswish": functional.hardswish,
    "gelu_taylor6": _polynomial_or_tanh(0.39894228, -0.06649038, 0.00997356),
    "gelu_taylor10": _polynomial_or_tanh(
        0.39894228, -0.06649038, 0.00997356, -0.00118733, 0.00011718
    ),
}
ACTIVATION_NAMES = tuple(_ACTIVATIONS)


def activation_oracle(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Value and slope of an activation, from torch's own functions and their autograd."""
    x = x.detach().requires_grad_()
    value = _ACTIVATIONS[name](x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), slope
