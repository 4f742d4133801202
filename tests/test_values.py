import hashlib

import pytest
import torch

from jagbench.workloads import counter, values
from jagbench.workloads.values import (
    HeavyTailed,
    Normal,
    QKNormalised,
    Small,
    StronglyNegativeScores,
    UniformUnit,
    draw_values,
)

CPU = torch.device("cpu")
LAWS = [
    Normal(0.5),
    QKNormalised(),
    HeavyTailed(),
    StronglyNegativeScores(),
    UniformUnit(),
    Small(),
]
by_name = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.law)


def draw(law, role="q", shape=(300, 2, 64), seed=1, dtype=torch.float32):
    return draw_values(law, role, shape, seed, dtype, CPU)


def fingerprint(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def test_tensor_and_integer_arithmetic_give_the_same_bits():
    key = counter.stream(5, "x")
    found = counter.bits_tensor(key, 3, 50, CPU)
    assert [int(x) % 2**64 for x in found] == [counter.bits(key, i) for i in range(3, 53)]


def test_bits_are_those_of_splitmix64():
    # First outputs of Steele, Lea and Flood's generator for seed 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [counter.bits(0, i) for i in range(3)] == expected


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 7])
def test_lanes_do_not_depend_on_where_a_draw_begins(first):
    whole = counter.lanes_tensor(9, 0, 40, CPU)
    assert torch.equal(counter.lanes_tensor(9, first, 21, CPU), whole[first : first + 21])
    assert int(whole.min()) >= 0
    assert int(whole.max()) < 2**16


@by_name
@pytest.mark.parametrize("role", ["q", "k", "v", "upstream"])
def test_values_do_not_depend_on_the_chunk(law, role, monkeypatch):
    whole = draw(law, role, (37, 3, 24))
    monkeypatch.setattr(values, "CHUNK", 5 * 3 * 24 + 1)
    assert torch.equal(draw(law, role, (37, 3, 24)), whole)


@by_name
def test_every_tensor_of_a_seed_has_a_stream_of_its_own(law):
    drawn = [draw(law, role, seed=seed) for role in ("q", "k", "v") for seed in (1, 2)]
    assert len({fingerprint(tensor) for tensor in drawn}) == len(drawn)


@by_name
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_dtype_holds_the_rounded_float32_values(law, dtype):
    assert torch.equal(draw(law, dtype=dtype), draw(law).to(dtype))


@by_name
def test_no_rows_make_an_empty_tensor(law):
    assert draw(law, shape=(0, 2, 16)).shape == (0, 2, 16)


def test_normal_values_have_their_deviation_and_kurtosis():
    found = draw(Normal(0.5), shape=(2000, 2, 64)).double()
    assert float(found.mean()) == pytest.approx(0, abs=0.005)
    assert float(found.std()) == pytest.approx(0.5, rel=0.01)
    assert float((found / 0.5).pow(4).mean()) == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("dim", [16, 72, 128])
def test_normalised_queries_and_keys_have_unit_size_in_every_row(dim):
    for role in ("q", "k"):
        mean_square = draw(QKNormalised(), role, (50, 2, dim)).double().square().mean(-1)
        assert float((mean_square - 1).abs().max()) < 2e-3
    assert float(draw(QKNormalised(), "v").std()) == pytest.approx(1, rel=0.03)


def test_normalised_values_lie_on_their_grid():
    found = draw(QKNormalised()) * 1024
    assert torch.equal(found, found.round())


def test_heavy_tails_stand_in_few_channels():
    size = draw(HeavyTailed(0.5, 8.0), shape=(4000, 2, 64)).double().std(0)
    outliers = size > 2
    assert outliers.sum(-1).min() >= 1
    assert outliers.sum(-1).max() <= 2
    assert float(size[outliers].min()) == pytest.approx(4, rel=0.1)
    assert float(size[~outliers].max()) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 128])
def test_strongly_negative_scores_lie_about_minus_sixteen(dim, dtype):
    q, k = (draw(StronglyNegativeScores(), r, (80, 1, dim), dtype=dtype)[:, 0] for r in "qk")
    scores = (q.double() @ k.double().mT) / dim**0.5
    assert float(scores.mean()) == pytest.approx(-16, abs=0.5)
    assert -24 < float(scores.min()) < -18
    assert -14 < float(scores.max()) < -9


def test_unit_uniform_values_fill_the_interval_and_scale_the_upstream_gradient():
    found = draw(UniformUnit())
    assert 0 <= float(found.min()) < 0.01
    assert 0.99 < float(found.max()) < 1
    assert float(draw(UniformUnit(), "upstream").mean()) == pytest.approx(0.005, rel=0.02)


def test_small_values_keep_their_bound():
    found = draw(Small(0.01))
    assert float(found.abs().max()) <= 0.01
    assert float(found.mean()) == pytest.approx(0, abs=1e-4)


def test_drawn_values_are_those_of_every_other_machine():
    found = {
        f"{law.law} {role}": fingerprint(draw(law, role, (33, 2, 24)))
        for law in LAWS
        for role in ("q", "k", "upstream")
    }
    assert found == GOLDEN


GOLDEN = {
    "normal q": "086bccf7c564",
    "normal k": "be1be18273da",
    "normal upstream": "fce84f5456e3",
    "qk_normalised q": "133d044a8fb8",
    "qk_normalised k": "c66d93e91ab9",
    "qk_normalised upstream": "89aafa7f9f56",
    "heavy_tailed q": "bf4f096a33da",
    "heavy_tailed k": "84f674465923",
    "heavy_tailed upstream": "fce84f5456e3",
    "strongly_negative_scores q": "6f2d6d6261e5",
    "strongly_negative_scores k": "abf68a44ca18",
    "strongly_negative_scores upstream": "89aafa7f9f56",
    "uniform_unit q": "0f838ef7a273",
    "uniform_unit k": "0ba3b12049cd",
    "uniform_unit upstream": "66ebfc353cfa",
    "small q": "a4458472c3fd",
    "small k": "de38dc612d9b",
    "small upstream": "89aafa7f9f56",
}
