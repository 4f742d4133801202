"""What devices can do: one table of documented peaks, and ceilings measured on the device itself.

Every peak is *dense*: vendors also print figures for 2:4 sparse operands, which are twice as high.
Devices are looked up by their exact name; another device is unknown, however alike its name is
("NVIDIA H100 PCIe" is no "NVIDIA H100 80GB HBM3"). To add one, add an entry to `DEVICES`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jagbench.result import Ceiling, now

#: Sides of the largest square matmul, and bytes of the least copy, by device type.
LARGEST_SIDE = {"cuda": 8192, "cpu": 4096}
LEAST_COPY = {"cuda": 1 << 30, "cpu": 128 << 20}
#: A copied buffer is this many times the L2 cache, so that little of it can stay there.
COPY_OF_CACHES = 8
#: Longest matmul, warm-up and sampling, in seconds.
LONGEST_CALL, WARM_UP, SAMPLING = 0.06, 0.1, 0.15
#: Samples of one ceiling.
FEWEST, MOST = 3, 50

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Device:
    """A documented device.

    names: as `torch.cuda.get_device_name` gives them, exactly.
    flop_per_second: dtype name -> dense matrix product with float32 accumulation. A dtype that the
        device lacks, or that no document gives, is absent. float32 would be the CUDA cores'
        own, never TF32.
    bytes_per_second: of the memory.
    source: where the figures stand; date: when they were read (ISO).
    """

    names: tuple[str, ...]
    flop_per_second: Mapping[str, float]
    bytes_per_second: float
    source: str
    date: str = "2026-11-30"


def _peaks(
    half: float, fp8: float | None = None, fp4: float | None = None, *, fnuz: bool = False
) -> Mapping[str, float]:
    """Peaks by dtype name from TFLOP/s; both 16-bit types run alike, and so do both fp8 types."""
    peaks = {"bfloat16": half, "float16": half}
    if fp8 is not None:
        suffixes = ("e4m3fnuz", "e5m2fnuz") if fnuz else ("e4m3fn", "e5m2")
        peaks |= {f"float8_{suffix}": fp8 for suffix in suffixes}
    if fp4 is not None:
        peaks["float4_e2m1fn_x2"] = fp4
    return {dtype: peak * 1e12 for dtype, peak in peaks.items()}


DEVICES: tuple[Device, ...] = (
    Device(
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        _peaks(312),
        2.039e12,
        "NVIDIA A100 80GB SXM data sheet",
    ),
    Device(
        ("NVIDIA H100 80GB HBM3",),
        _peaks(989, 1979),
        3.35e12,
        "NVIDIA H100 SXM data sheet, its sparse figures halved",
    ),
    Device(
        ("NVIDIA H200",),
        _peaks(989, 1979),
        4.8e12,
        "NVIDIA H200 SXM data sheet, its sparse figures halved",
    ),
    Device(
        ("NVIDIA B200",),
        _peaks(2250, 4500, 9000),
        8.0e12,
        "NVIDIA Blackwell data sheet, HGX B200 (1000 W), its sparse figures halved; memory 7.7 to "
        "8 TB/s by document, the higher taken so that no true time is called impossible",
    ),
    Device(
        ("NVIDIA GB200",),
        _peaks(2500, 5000, 10000),
        8.0e12,
        "NVIDIA Blackwell data sheet, GB200 NVL72 (1200 W), its sparse figures halved",
    ),
    Device(
        ("NVIDIA B300 SXM6 AC",),
        _peaks(2250, 4500),
        8.0e12,
        "NVIDIA HGX B300 page, its sparse figures halved; fp4 left out: documents say 13.1 to 14 "
        "PFLOP/s",
    ),
    Device(
        ("NVIDIA GB300",),
        _peaks(2500, 5000, 15000),
        8.0e12,
        "NVIDIA GB300 NVL72 page, figures of the rack (dense) over 72",
    ),
    Device(
        ("AMD Instinct MI300X",),
        # Its matrix cores know the fnuz forms of fp8 only.
        _peaks(1307, 2615, fnuz=True),
        5.3e12,
        "AMD Instinct MI300X data sheet",
    ),
    Device(
        ("AMD Instinct MI350X",),
        _peaks(2310, 4614),
        8.0e12,
        "AMD Instinct MI350X data sheet; fp4 left out: not in a document we read",
    ),
)

_BY_NAME = {name: device for device in DEVICES for name in device.names}


def documented(device_name: str) -> Device | None:
    """The table's entry for an exact device name; None for an unknown device."""
    return _BY_NAME.get(device_name)


def datasheet(device_name: str, dtype: str) -> Ceiling | None:
    """Documented ceiling of a device in a dtype ("bfloat16"); None for an unknown device.

    For a dtype the entry does not give, `flop_per_second` is None: no other dtype stands in.
    """
    device = documented(device_name)
    if device is None:
        return None
    return Ceiling(
        flop_per_second=device.flop_per_second.get(dtype),
        bytes_per_second=device.bytes_per_second,
        source=device.source,
        date=device.date,
    )


def measured_ceiling(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    side: int | None = None,
    copy_bytes: int | None = None,
) -> Ceiling:
    """What the device itself does at best: a large square matmul and a copy; once a process.

    The matmul is the largest up to `LARGEST_SIDE` that stays below `LONGEST_CALL` (8192 in 16 bits
    on any recent GPU), float32 without TF32; the copy counts bytes read and bytes written. Medians
    after a warm-up, by CUDA events, on a CPU by the wall clock. A part that the device cannot do
    (a dtype without a matmul, too little free memory) is None.

    side, copy_bytes: sizes to use instead.
    """
    place = _indexed(torch.device(device))
    return Ceiling(
        flop_per_second=_or_none(lambda: _matmul_rate(place, dtype, side)),
        bytes_per_second=_or_none(lambda: _copy_rate(place, copy_bytes)),
        source="measured",
        date=now().date().isoformat(),
    )


def _indexed(device: torch.device) -> torch.device:
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _or_none(rate: Callable[[], float]) -> float | None:
    try:
        return rate()
    except (NotImplementedError, torch.OutOfMemoryError):
        return None


@cache
def _matmul_rate(device: torch.device, dtype: torch.dtype, side: int | None) -> float:
    with _on(device), _exact_float32(device):
        side = side or _affordable_side(device, dtype)
        return 2 * side**3 / _median_seconds(_matmul(device, dtype, side), device)


def _affordable_side(device: torch.device, dtype: torch.dtype) -> int:
    """Side of the largest matmul that stays below `LONGEST_CALL`, found by doubling."""
    side = 512
    while True:
        call = _matmul(device, dtype, side)
        call()  # the first call also chooses a kernel
        seconds = min(_wall_seconds(call, device) for _ in range(2))
        if side >= LARGEST_SIDE.get(device.type, 4096) or 8 * seconds > LONGEST_CALL:
            return side
        side *= 2


def _matmul(device: torch.device, dtype: torch.dtype, side: int) -> Callable[[], Tensor]:
    """A square matmul of normal values: constant ones draw less power and run too fast.

    Raises NotImplementedError for a dtype in which the device has no fast matmul.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=generator) for _ in range(2))
    if dtype in _FP8:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            raise NotImplementedError(f"no matmul in {dtype} on {device}")
        # Libraries multiply e5m2 by e4m3 only; `b` is wanted column-major.
        first, second = a.to(dtype), b.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            first, second, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise NotImplementedError(f"no matmul in {dtype}")
    first, second = a.to(dtype), b.to(dtype)
    out = torch.empty(side, side, dtype=dtype, device=device)
    return lambda: torch.mm(first, second, out=out)


@cache
def _copy_rate(device: torch.device, copy_bytes: int | None) -> float:
    with _on(device):
        if copy_bytes is None:
            copy_bytes = LEAST_COPY.get(device.type, 128 << 20)
            if device.type == "cuda":
                properties = torch.cuda.get_device_properties(device)
                copy_bytes = max(copy_bytes, COPY_OF_CACHES * properties.L2_cache_size)
        source = torch.arange(copy_bytes // 8, device=device)
        target = torch.empty_like(source)
        seconds = _median_seconds(lambda: target.copy_(source), device)
        return 2 * source.nbytes / seconds


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call after a warm-up."""
    began = time.perf_counter()
    call()
    one = _wall_seconds(call, device)
    while time.perf_counter() - began < WARM_UP:
        _wall_seconds(call, device)
    count = min(MOST, max(FEWEST, int(SAMPLING / one)))
    if device.type == "cuda":
        return statistics.median(_event_seconds(call, count))
    return statistics.median(_wall_seconds(call, device) for _ in range(count))


def _event_seconds(call: Callable[[], object], count: int) -> Iterator[float]:
    """Seconds between events in one queue of calls, so that the host's launches do not show."""
    event_type: Any = torch.cuda.Event
    events = [event_type(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    for start, stop in pairwise(events):
        yield start.elapsed_time(stop) / 1e3


def _wall_seconds(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    with torch.inference_mode():
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield


@contextmanager
def _exact_float32(device: torch.device) -> Iterator[None]:
    """No TF32 inside; the setting before is restored."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    # torch has two switches for this and refuses to read them where they disagree: the older one
    # sets both, so that neither restoring nor running leaves them apart.
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32 = before == "tf32"
        matmul.fp32_precision = before
