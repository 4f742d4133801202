"""Numbers at which code breaks: past 2^31, past 2^15, and 0; on a CPU wherever it can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from jagbench.execution import Outcome
from jagbench.inputs import Inputs
from jagbench.spec import SHARED, Operator
from jagbench.suite import changes, shapes
from jagbench.suite.candidate import Candidate, differing, has_scale, option_names, repeatable
from jagbench.suite.room import room_for

Check = Callable[[Inputs, Outcome], None]

#: Elements between two rows: the third row starts past 2^31 elements.
WIDE = 2**30 + 8


def _wide(x: Tensor) -> Tensor:
    """The same three rows, `WIDE` elements apart; nothing between them is ever touched."""
    memory = torch.empty(2 * WIDE + x[0].numel(), dtype=x.dtype, device=x.device)
    view = memory.as_strided(x.shape, (WIDE, *x[0].stride()))
    return view.copy_(x)


def _is_argument(operator: Operator, name: str) -> bool:
    if name == "upstream":
        return bool(operator.differentiable)
    return name in operator.signature.parameters


@pytest.mark.combinations(where=_is_argument)
@pytest.mark.parametrize("name", ["q", "k", "v", "x", "upstream"])
def test_rows_that_start_past_2_to_the_31_elements(
    candidate: Candidate, operator: Operator, name: str
) -> None:
    """Row times stride wraps in 32 bits: the last row is read elsewhere (flash-attention 2611)."""
    settings = candidate.settings
    inputs = repeatable(
        shapes.attention(operator, [1, 2], dim=16, dtype=torch.float16, device=settings.device)
    )
    wide = changes.floats(inputs, _wide, names=(name,))
    plain = candidate.run(inputs, backward=True)
    assert not differing(plain, candidate.run_in_place(wide, backward=True))


#: More keys than 15 bits count; a multiple of 32, so that fp16 holds the number itself.
MANY = 40_960


def _many_equal_keys(operator: Operator, device: torch.device) -> Inputs:
    """One query and `MANY` keys of the same score, with values of 1."""
    options: dict[str, Any] = (
        {"activation": "identity"} if "activation" in option_names(operator) else {}
    )
    inputs = shapes.attention(
        operator, [1], [MANY], heads=1, dim=16, dtype=torch.float16, device=device, **options
    )
    unit = torch.zeros(1, 1, 16, dtype=torch.float16, device=device)
    unit[..., 0] = 1
    keys = unit.expand(MANY, 1, 16).contiguous()
    return inputs.replace(q=unit, k=keys, v=torch.ones_like(keys))


@pytest.mark.operators_with("k_offsets", residual=False)
def test_the_last_of_many_keys_counts_in_full(candidate: Candidate, operator: Operator) -> None:
    """A sum kept in fp16 or bf16 stops growing; a length kept in 16 bits turns negative."""
    inputs = _many_equal_keys(operator, candidate.settings.device)
    # Without a normaliser the weights of 1 add up to their number.
    expected = MANY if "activation" in option_names(operator) else 1
    out = candidate.run(inputs)["out"].double()
    worst = float((out / expected - 1).abs().max())
    assert worst <= 2**-10, f"off by {worst:.3g} of the sum over {MANY} keys"


@pytest.mark.operators_with("window")
@pytest.mark.parametrize("window", [(0, None), (None, 0), (0, 3), (3, 0)])
@pytest.mark.parametrize("align", ["start", "end"])
def test_a_window_side_of_zero_is_a_bound(
    candidate: Candidate,
    operator: Operator,
    window: tuple[int | None, int | None],
    align: str,
    check: Check,
) -> None:
    """0 is not None: nothing beyond a query's own position is seen on that side."""
    settings = candidate.settings
    inputs = shapes.attention(
        operator, [9, 4], [7, 6], dtype=settings.main_dtype, device=settings.device
    ).with_options(window=window, align=align)
    check(inputs, candidate.run(inputs, backward=True))


@pytest.mark.combinations(where=has_scale)
def test_a_scale_of_zero_is_a_scale(candidate: Candidate, operator: Operator, check: Check) -> None:
    """0 is not None: softmax becomes the mean of the values; gdpa without its scores is act(0)."""
    names = {"scale", "pre_scale"} & option_names(operator)
    settings = candidate.settings
    inputs = shapes.attention(
        operator, [9, 4], [7, 6], dtype=settings.main_dtype, device=settings.device
    ).with_options(**dict.fromkeys(names, 0.0))
    check(inputs, candidate.run(inputs, backward=True))


@pytest.mark.operator("jagged_attention")
@pytest.mark.parametrize(
    "scores", [(300.0, -300.0, 0.0, 298.0), (-300.0,) * 4], ids=["far-apart", "all-low"]
)
def test_scores_beyond_the_range_of_exp_are_ordinary_scores(
    candidate: Candidate, scores: tuple[float, ...]
) -> None:
    """exp(300) overflows and exp(-300) is 0 in float32; only differences of scores matter."""
    settings = candidate.settings
    inputs = shapes.attention(
        "jagged_attention", [2], [4], heads=1, dim=16, dtype=settings.main_dtype,
        device=settings.device, scale=1.0,
    )  # fmt: skip
    unit = torch.zeros_like(inputs.tensors()["k"])
    unit[..., 0] = 1
    column = torch.tensor(scores, device=inputs.device, dtype=torch.float64)
    inputs = inputs.replace(q=unit[:2], k=unit * column.to(inputs.dtype)[:, None, None])
    values = inputs.tensors()["v"][:, 0].double()
    expected = torch.softmax(column, 0) @ values
    error = float((candidate.run(inputs)["out"].double() - expected).abs().max())
    # A score of 300 is itself rounded, once it is scaled for exp2: by 2^-16 in float32.
    allowed = (2.0**-12 + 2 * torch.finfo(inputs.dtype).eps) * float(values.abs().max())
    assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"


# Index width and launch limits at the sizes that showed the fault


@pytest.fixture
def whole_gpu(candidate: Candidate) -> Iterator[None]:
    """The GPU's memory for this test alone: other workers of the session wait."""
    with room_for(math.inf, candidate.settings.device):
        yield


def _draw(
    candidate: Candidate, operator: Operator, lengths: Sequence[int], **options: Any
) -> Inputs:
    settings = candidate.settings
    options = {"dtype": settings.main_dtype, "device": settings.device, **options}
    return candidate.every_output(shapes.attention(operator, lengths, **options))


def _check_tiles(inputs: Inputs, times: int, candidate: Candidate, check: Check) -> None:
    """The batch many times over: its first and last copies are right, all copies are bit-equal."""
    many = repeatable(shapes.tiled(inputs, times))
    outcome = candidate.run(many, backward=True)
    # The gradient of a shared argument is a sum over all copies.
    packed = {
        n: t
        for n, t in outcome.items()
        if changes.layout_of(many, n.removeprefix("grad ")) != SHARED
    }
    batch = inputs.num_sequences
    for copy in (0, times - 1):
        part = range(copy * batch, (copy + 1) * batch)
        rows = {n: many.cut_output(n.removeprefix("grad "), t, part) for n, t in packed.items()}
        check(inputs, rows)
    for name, tensor in packed.items():
        copies = tensor.reshape(times, -1)
        equal = torch.equal(copies, copies[:1].expand_as(copies))
        assert equal, f"{name} is not the same for equal sequences"


@pytest.mark.usefixtures("whole_gpu")
@pytest.mark.needs_gpu("2^31 elements of scratch")
def test_a_batch_of_8300_single_tokens(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """A product of three 32-bit integers wrapped in the backward (flash-attention 2260, 1500)."""
    inputs = _draw(candidate, operator, [1] * 83, heads=16, dim=128)
    _check_tiles(inputs, 100, candidate, check)


@pytest.mark.differentiable
@pytest.mark.usefixtures("whole_gpu")
@pytest.mark.needs_gpu("4 GB of upstream gradient")
def test_a_wide_view_of_the_upstream_gradient(candidate: Candidate, operator: Operator) -> None:
    """Offset times row stride wrapped in 32 bits (flash-attention 2611)."""
    lengths = [511] * 441  # 225,351 tokens; row 225,304 starts at element 2,191,757,312
    inputs = repeatable(_draw(candidate, operator, lengths, dim=64, dtype=torch.bfloat16))
    plain = candidate.run(inputs, backward=True)
    assert inputs.upstream is not None
    rows, *rest = inputs.upstream.shape
    wide = inputs.upstream.new_full((rows, 9728), math.nan)
    wide[:, : math.prod(rest)] = inputs.upstream.flatten(1)
    view = wide.as_strided((rows, *rest), (9728, *inputs.upstream[0].stride()))
    odd = changes.floats(inputs, lambda _: view, names=("upstream",))
    assert not differing(plain, candidate.run_in_place(odd, backward=True))


@pytest.mark.usefixtures("whole_gpu")
@pytest.mark.needs_gpu("2^31 elements of every argument")
def test_arguments_of_more_than_2_to_the_31_elements(
    candidate: Candidate, operator: Operator, check: Check
) -> None:
    """Row times stride of a packed argument passes 32 bits: the last sequence is still right."""
    inputs = _draw(candidate, operator, [500, 12, 512], heads=8, dim=128, dtype=torch.bfloat16)
    _check_tiles(inputs, 2100, candidate, check)  # 2100 x 1024 x 1024 elements = 1.025 x 2^31


@pytest.mark.needs_gpu("65,536 sequences")
@pytest.mark.parametrize("sequences", [65_535, 65_536])
def test_more_than_65535_sequences(
    candidate: Candidate, operator: Operator, sequences: int, check: Check
) -> None:
    """The batch lay on a grid axis of 16 bits (flash-attention 1786, xformers 845)."""
    batch = 51 if sequences == 65_535 else 64
    inputs = _draw(candidate, operator, [16] * batch, heads=1, dim=64)
    _check_tiles(inputs, sequences // batch, candidate, check)


@pytest.mark.usefixtures("whole_gpu")
@pytest.mark.needs_gpu("1.1 billion pairs")
def test_a_sequence_of_33728_zeros(candidate: Candidate, operator: Operator) -> None:
    """A length cast to 16 bits made NaN (xformers 719)."""
    inputs = _draw(candidate, operator, [33_728], dim=64)
    zeros = changes.floats(inputs, torch.zeros_like, names=changes.packed(inputs))
    assert not any(output.any() for output in candidate.run(zeros).values())
