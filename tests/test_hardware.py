import time

import pytest
import torch

from jagbench import hardware
from jagbench.hardware import DEVICES, datasheet, measured_ceiling

#: First name -> (multiprocessors or compute units, dense 16-bit FLOP a clock of one, top clock Hz).
#: A figure for sparse operands would be twice what these give.
UNITS = {
    "NVIDIA A100-SXM4-80GB": (108, 2048, 1.41e9),
    "NVIDIA H100 80GB HBM3": (132, 4096, 1.83e9),
    "NVIDIA H200": (132, 4096, 1.83e9),
    "NVIDIA B200": (148, 8192, 1.85e9),
    "NVIDIA GB200": (152, 8192, 2.0e9),
    "NVIDIA B300 SXM6 AC": (148, 8192, 1.85e9),
    "NVIDIA GB300": (152, 8192, 2.0e9),
    "AMD Instinct MI300X": (304, 2048, 2.1e9),
    "AMD Instinct MI350X": (256, 4096, 2.2e9),
}


@pytest.fixture(autouse=True)
def fresh_caches():
    hardware._matmul_rate.cache_clear()
    hardware._copy_rate.cache_clear()


def test_every_device_of_the_specification_is_in_the_table():
    assert {device.names[0] for device in DEVICES} == set(UNITS)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.names[0])
def test_every_peak_is_dense(device):
    units, flop_per_clock, clock = UNITS[device.names[0]]
    dense = units * flop_per_clock * clock
    assert device.flop_per_second["bfloat16"] == pytest.approx(dense, rel=0.05)
    assert device.flop_per_second["float16"] == device.flop_per_second["bfloat16"]
    for dtype, peak in device.flop_per_second.items():
        if dtype.startswith("float8"):
            assert peak == pytest.approx(2 * dense, rel=0.05)
        elif dtype.startswith("float4"):
            # Blackwell Ultra's fp4 is half as fast again.
            assert 4 * 0.95 <= peak / dense <= 6 * 1.05


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.names[0])
def test_every_entry_has_a_source_a_date_and_dtypes_of_torch(device):
    assert device.source
    assert time.strptime(device.date, "%Y-%m-%d")
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in device.flop_per_second)
    assert 1e12 < device.bytes_per_second < 1e13
    assert "sparse figures halved" in device.source or "sparse" not in device.source


def test_no_name_stands_in_two_entries():
    names = [name for device in DEVICES for name in device.names]
    assert len(names) == len(set(names))


def test_torch_keeps_sparse_figures_which_are_not_ours():
    info = pytest.importorskip("torch._inductor.analysis.device_info")
    theirs = info.lookup_device_info("NVIDIA H100")
    assert theirs is not None
    peak = theirs.tops[torch.bfloat16] * 1e12
    ours = datasheet("NVIDIA H100 80GB HBM3", "bfloat16")
    assert peak == pytest.approx(2 * ours.flop_per_second, rel=0.01)


def test_a_known_device_has_its_documented_ceiling():
    ceiling = datasheet("NVIDIA H200", "bfloat16")
    assert (ceiling.flop_per_second, ceiling.bytes_per_second) == (989e12, 4.8e12)
    assert "H200" in ceiling.source
    assert datasheet("NVIDIA H200", "float8_e4m3fn").flop_per_second == 1979e12
    assert datasheet("A100-SXM4-80GB", "float16") == datasheet("NVIDIA A100-SXM4-80GB", "float16")


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA H200 NVL",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA A100-SXM4-40GB",
        "nvidia h200",
        "H200",
        "cpu (x86_64)",
        "",
    ],
)
def test_an_unknown_device_has_no_documented_ceiling(name):
    assert datasheet(name, "bfloat16") is None


def test_no_dtype_stands_in_for_another():
    for name, dtype in (
        ("NVIDIA H200", "float32"),
        ("NVIDIA H200", "float4_e2m1fn_x2"),
        ("NVIDIA A100-SXM4-80GB", "float8_e4m3fn"),
        ("AMD Instinct MI300X", "float8_e4m3fn"),
        ("NVIDIA H200", "no such dtype"),
    ):
        ceiling = datasheet(name, dtype)
        assert ceiling.flop_per_second is None
        assert ceiling.bytes_per_second is not None


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(hardware, "WARM_UP", 0.0)
    monkeypatch.setattr(hardware, "SAMPLING", 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_cpu_measures_its_own_ceilings(quick, dtype):
    ceiling = measured_ceiling("cpu", dtype, side=64, copy_bytes=1 << 16)
    assert ceiling.source == "measured"
    assert ceiling.flop_per_second > 0
    assert ceiling.bytes_per_second > 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int32])
def test_a_dtype_without_a_fast_matmul_has_no_measured_rate(quick, dtype):
    ceiling = measured_ceiling("cpu", dtype, side=16, copy_bytes=1 << 12)
    assert ceiling.flop_per_second is None
    assert ceiling.bytes_per_second is not None


def test_a_ceiling_is_measured_once_a_process_and_dtype(quick, monkeypatch):
    made = []
    matmul = hardware._matmul
    monkeypatch.setattr(hardware, "_matmul", lambda *a: made.append(a) or matmul(*a))
    for _ in range(3):
        measured_ceiling("cpu", torch.float32, side=16, copy_bytes=1 << 12)
    assert len(made) == 1
    measured_ceiling("cpu", torch.float64, side=16, copy_bytes=1 << 12)
    assert len(made) == 2


def test_a_device_without_room_has_no_ceiling_and_is_asked_again(quick, monkeypatch):
    matmul = hardware._matmul

    def full(*_):
        raise torch.OutOfMemoryError("16 GiB asked for")

    monkeypatch.setattr(hardware, "_matmul", full)
    assert measured_ceiling("cpu", torch.float32, side=16, copy_bytes=64).flop_per_second is None
    monkeypatch.setattr(hardware, "_matmul", matmul)
    assert measured_ceiling("cpu", torch.float32, side=16, copy_bytes=64).flop_per_second > 0


def test_the_matmul_doubles_while_it_is_affordable(monkeypatch):
    monkeypatch.setattr(hardware, "_matmul", lambda device, dtype, side: lambda: side)
    # A device of 2 TFLOP/s: 4096 takes 69 ms, which is over the longest call.
    monkeypatch.setattr(hardware, "_wall_seconds", lambda call, device: 2 * call() ** 3 / 2e12)
    assert hardware._affordable_side(torch.device("cpu"), torch.float32) == 2048
    monkeypatch.setattr(hardware, "_wall_seconds", lambda call, device: 1e-9)
    assert hardware._affordable_side(torch.device("cpu"), torch.float32) == 4096
    assert hardware._affordable_side(torch.device("cuda:0"), torch.bfloat16) == 8192


def test_the_rate_is_two_flop_a_product_and_the_copy_counts_both_ways(monkeypatch):
    monkeypatch.setattr(hardware, "_median_seconds", lambda call, device: 0.5)
    ceiling = measured_ceiling("cpu", torch.float32, side=32, copy_bytes=1 << 12)
    assert ceiling.flop_per_second == 2 * 32**3 / 0.5
    assert ceiling.bytes_per_second == 2 * (1 << 12) / 0.5


def test_tf32_is_off_while_a_ceiling_is_measured_and_restored_after():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for earlier in ("tf32", "ieee", "none"):
            matmul.allow_tf32 = earlier == "tf32"
            matmul.fp32_precision = earlier
            with hardware._exact_float32(torch.device("cuda")):
                assert matmul.fp32_precision == "ieee"
                assert matmul.allow_tf32 is False
            assert matmul.fp32_precision == earlier
            assert matmul.allow_tf32 is (earlier == "tf32")
    finally:
        matmul.fp32_precision = before
