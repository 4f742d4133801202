"""The state of a GPU while it is measured, and how it is set up, as NVIDIA's driver tells (NVML).

NVML comes with the package nvidia-ml-py. Where it, the driver or a single answer is missing the
field is None: nothing raises, and nothing is guessed.
"""

from __future__ import annotations

import importlib
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Self

import torch

from jagbench.result import DeviceState

#: Readings that must agree for a device to be steady.
STEADY_READINGS = 3

#: Bit of NVML's clock event reasons -> word; what only sets a clock, or idles, is left out.
REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}
_IDLE, _CLOCKS_SET = 0x01, 0x02

#: NVML's numbers for sensors, clocks and thresholds.
_SM_CLOCK, _MEMORY_CLOCK, _CORE_SENSOR, _SLOWDOWN = 1, 2, 0, 1


@dataclass(frozen=True)
class Reading:
    """One look at the device; units as `jagbench.result.DeviceState`.

    reasons: NVML's bits for what holds the clocks.
    """

    sm_clock_hz: float | None
    memory_clock_hz: float | None
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: float | None
    reasons: int | None


@dataclass(frozen=True)
class Setup:
    """How the device is set up and who uses it; None where the driver does not tell.

    clocks_set: whether clocks were seen held by a setting; an idle device does not show it.
    slowdown_celsius: where the hardware slows itself.
    others: processes that hold memory, this one left out as far as process ids tell (inside a
        container they may be hidden, or numbered differently).
    busy: share of the last moments in which a kernel ran.
    """

    default_power_limit_watts: float | None = None
    persistence: bool | None = None
    mig: bool | None = None
    clocks_set: bool | None = None
    slowdown_celsius: float | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    others: int | None = None
    busy: float | None = None


class Monitor:
    """Readings of one device between timing samples.

    As a context manager it takes a reading on entry and on exit; `sample` takes more. The driver
    refreshes clocks and power every few tens of milliseconds: nearer readings repeat each other.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._nvml = _nvml() if self._device.type == "cuda" else None
        self._handle = None if self._nvml is None else _handle(self._nvml, self._device)
        self._readings: list[Reading] = []

    def __enter__(self) -> Self:
        self.sample()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.sample()

    @property
    def present(self) -> bool:
        """Whether the driver answers for this device."""
        return self._handle is not None

    def sample(self) -> None:
        """Take a reading."""
        if not self.present:
            return
        self._readings.append(
            Reading(
                sm_clock_hz=_times(self._ask("nvmlDeviceGetClockInfo", _SM_CLOCK), 1e6),
                memory_clock_hz=_times(self._ask("nvmlDeviceGetClockInfo", _MEMORY_CLOCK), 1e6),
                power_watts=_times(self._ask("nvmlDeviceGetPowerUsage"), 1e-3),
                power_limit_watts=_times(self._ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
                temperature_celsius=self._temperature(),
                reasons=self._reasons(),
            )
        )

    def state(self) -> DeviceState:
        """All readings in one: medians of clocks and power, highest temperature, any throttling."""
        return DeviceState(
            sm_clock_hz=_median(self._values("sm_clock_hz")),
            memory_clock_hz=_median(self._values("memory_clock_hz")),
            power_watts=_median(self._values("power_watts")),
            power_limit_watts=min(self._values("power_limit_watts"), default=None),
            temperature_celsius=max(self._values("temperature_celsius"), default=None),
            throttled=self._throttled(),
        )

    def steady(self, tolerance: float = 0.03) -> bool:
        """Whether clock and power of the last readings are within `tolerance` of their greatest.

        True where the driver does not tell; False before there are `STEADY_READINGS`.
        """
        if not self.present:
            return True
        last = self._readings[-STEADY_READINGS:]
        if len(last) < STEADY_READINGS:
            return False
        for name in ("sm_clock_hz", "power_watts"):
            values = [value for r in last if (value := getattr(r, name)) is not None]
            if values and max(values) - min(values) > tolerance * max(values):
                return False
        return True

    def setup(self) -> Setup:
        """How the device is set up now."""
        reasons = self._reasons()
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        use = self._ask("nvmlDeviceGetUtilizationRates")
        persistence = self._ask("nvmlDeviceGetPersistenceMode")
        mig = self._ask("nvmlDeviceGetMigMode")
        limit = self._ask("nvmlDeviceGetPowerManagementDefaultLimit")
        slowdown = self._ask("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN)
        return Setup(
            default_power_limit_watts=_times(limit, 1e-3),
            persistence=None if persistence is None else bool(persistence),
            mig=None if mig is None else bool(mig[0]),
            clocks_set=_clocks_set(reasons),
            slowdown_celsius=_times(slowdown, 1.0),
            free_bytes=None if memory is None else int(memory.free),
            total_bytes=None if memory is None else int(memory.total),
            others=self._others(),
            busy=None if use is None else use.gpu / 100,
        )

    def driver(self) -> str | None:
        """Version of the driver."""
        return _text(_call(self._nvml, "nvmlSystemGetDriverVersion"))

    def _ask(self, name: str, *arguments: Any) -> Any:
        return _call(self._nvml, name, self._handle, *arguments) if self.present else None

    def _temperature(self) -> float | None:
        found = self._ask("nvmlDeviceGetTemperature", _CORE_SENSOR)
        if found is None:
            # The name above is to be gone with CUDA 14.
            found = self._ask("nvmlDeviceGetTemperatureV", _CORE_SENSOR)
        return None if found is None else float(found)

    def _reasons(self) -> int | None:
        found = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if found is None:
            # Drivers and packages before 2024 have the older name alone.
            found = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if found is None else int(found)

    def _others(self) -> int | None:
        found = [
            self._ask(name)
            for name in (
                "nvmlDeviceGetComputeRunningProcesses",
                "nvmlDeviceGetGraphicsRunningProcesses",
            )
        ]
        if all(processes is None for processes in found):
            return None
        ids = {process.pid for processes in found for process in processes or ()}
        return len(ids - {os.getpid()})

    def _values(self, name: str) -> list[float]:
        found = (getattr(reading, name) for reading in self._readings)
        return [value for value in found if value is not None]

    def _throttled(self) -> tuple[str, ...] | None:
        masks = [r.reasons for r in self._readings if r.reasons is not None]
        return tuple(_words(masks)) if masks else None


def _words(masks: Sequence[int]) -> Iterator[str]:
    """Words for the reasons in any of the masks, lowest bit first."""
    seen = 0
    for mask in masks:
        seen |= mask
    for place in range(seen.bit_length()):
        bit = seen & (1 << place)
        if bit and bit not in (_IDLE, _CLOCKS_SET):
            yield REASONS.get(bit, f"reason {bit:#x}")


def _clocks_set(reasons: int | None) -> bool | None:
    if reasons is None:
        return None
    if reasons & _CLOCKS_SET:
        return True
    return None if reasons & _IDLE else False


@cache
def _nvml() -> Any:
    """NVML's module, initialised once a process; None where there is none."""
    try:
        module = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        module.nvmlInit()
    except module.NVMLError:
        return None
    return module


def _handle(nvml: Any, device: torch.device) -> Any:
    """NVML's handle of a torch device: by identity, as CUDA_VISIBLE_DEVICES numbers differently."""
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        for prefix in ("GPU-", "MIG-"):
            name = str(uuid) if str(uuid).startswith(prefix) else f"{prefix}{uuid}"
            handle = _call(nvml, "nvmlDeviceGetHandleByUUID", name)
            if handle is not None:
                return handle
    if not hasattr(properties, "pci_bus_id"):
        return None
    domain, bus, slot = (getattr(properties, f"pci_{p}_id") for p in ("domain", "bus", "device"))
    return _call(nvml, "nvmlDeviceGetHandleByPciBusId", f"{domain:08x}:{bus:02x}:{slot:02x}.0")


def _call(nvml: Any, name: str, *arguments: Any) -> Any:
    """NVML's answer; None where the driver or the package does not know the question."""
    function = getattr(nvml, name, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
