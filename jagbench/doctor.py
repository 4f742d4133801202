"""Whether this machine can give valid numbers now, and what to do where it cannot.

`examine` looks at the machine and judges what it saw; it changes nothing. The two halves are
apart (`look`, `judge`), so that every judgement can be tested on a machine that has no such fault.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from jagbench import environment, hardware
from jagbench.monitor import Monitor, Setup
from jagbench.result import DeviceState

Level = Literal["ok", "warning", "error"]

#: Package -> oldest version supported, and the first that is not; as pyproject.toml says.
SUPPORTED = {"torch": ((2, 11), (2, 14)), "triton": ((3, 6), (3, 8))}
#: Major version of CUDA -> oldest major version of the driver that runs it.
OLDEST_DRIVER = {"12": 525, "13": 580}

#: Degrees below the hardware's own limit, or Celsius where it does not tell, that count as hot.
NEARLY_HOT, HOT = 10.0, 80.0
#: Share of the memory that other use may take, of the time it may compute, and load a core.
USED, BUSY, LOADED = 0.1, 0.05, 0.5
#: Share below its default at which a power cap is worth a word.
CAPPED = 0.99

#: Variable of the environment -> level and what it does to a measurement when it is set.
VARIABLES: Mapping[str, tuple[Level, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("error", "every launch waits for the kernel"),
    "HIP_LAUNCH_BLOCKING": ("error", "every launch waits for the kernel"),
    "AMD_SERIALIZE_KERNEL": ("error", "kernels run one at a time"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("error", "every allocation asks the driver"),
    "PYTORCH_NO_HIP_MEMORY_CACHING": ("error", "every allocation asks the driver"),
    "NVIDIA_TF32_OVERRIDE": ("error", "float32 means another arithmetic than the program asks for"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": ("error", "float32 matmuls run in TF32"),
    "CUDA_INJECTION64_PATH": ("warning", "a profiler or checker listens to every call"),
    "CUDA_DEVICE_WAITS_ON_EXCEPTION": ("warning", "a debugger is expected"),
    "CUBLAS_WORKSPACE_CONFIG": ("warning", "cuBLAS picks other kernels"),
    "TORCH_USE_CUDA_DSA": ("warning", "kernels carry assertions"),
    "TORCH_SHOW_DISPATCH_TRACE": ("warning", "every operator prints"),
    "TRITON_DEBUG": ("warning", "kernels carry assertions"),
    "TRITON_ALWAYS_COMPILE": ("warning", "kernels are compiled again in every process"),
    "TRITON_KERNEL_OVERRIDE": ("warning", "kernels are replaced by files"),
    "MLIR_ENABLE_DUMP": ("warning", "compiling prints every pass"),
}
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_INTERPRETER = "TRITON_INTERPRET"


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what was seen, and what to do about it ("" where all is well)."""

    level: Level
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Facts:
    """What `look` saw; None where it cannot be known.

    device: type asked for; name: of the device, None if there is none.
    versions: of "torch", "triton", "driver" and "cuda".
    nvml: whether the driver answers through nvidia-ml-py.
    load: processes that want a core, on average of the last minute; cores: of this machine.
    governor: what sets the CPU's frequency.
    variables: of the process's environment.
    """

    device: str
    name: str | None
    versions: Mapping[str, str | None]
    commit: str | None = None
    dirty: bool | None = None
    nvml: bool = False
    state: DeviceState = field(default_factory=DeviceState)
    setup: Setup = field(default_factory=Setup)
    load: float | None = None
    cores: int = 1
    governor: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def examine(device: torch.device | str) -> list[Finding]:
    """Every finding for measurements on a device, errors first. Changes nothing."""
    return judge(look(torch.device(device)))


def look(device: torch.device) -> Facts:
    """See what this machine is like now."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    names = (*VARIABLES, *_ALLOCATOR, _INTERPRETER)
    there = device.type == "cpu" or _exists(device)
    found = environment.detect(device if there else "cpu")
    # NVML is asked before anything is allocated, or this process would count as a neighbour.
    watch = Monitor(device if there else "cpu")
    watch.sample()
    versions = {"torch": found.torch, "triton": found.triton, "cuda": found.cuda}
    return Facts(
        device=device.type,
        name=found.device if there else None,
        versions=versions | {"driver": watch.driver() or found.driver},
        commit=found.commit,
        dirty=found.dirty,
        nvml=watch.present,
        state=watch.state(),
        setup=watch.setup(),
        load=load,
        cores=os.cpu_count() or 1,
        governor=_governor(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        variables={name: os.environ[name] for name in names if name in os.environ},
    )


def judge(facts: Facts) -> list[Finding]:
    """Findings of what was seen, errors first, then warnings, then what is well."""
    found = [finding for check in _CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: ("error", "warning", "ok").index(finding.level))


def _exists(device: torch.device) -> bool:
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return device.index is None or device.index < torch.cuda.device_count()


def _governor(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _device(facts: Facts) -> Iterator[Finding]:
    if facts.name is None:
        yield Finding(
            "error",
            f"no {facts.device} device is to be seen",
            "check the driver (nvidia-smi), CUDA_VISIBLE_DEVICES, and that torch is a build for it",
        )
    elif facts.device == "cpu":
        yield Finding("ok", f"runs on {facts.name}: times say nothing about a GPU")
    elif hardware.documented(facts.name) is None:
        yield Finding(
            "warning",
            f"{facts.name} is not in the table of devices: results get no share of a data sheet",
            "add an entry to jagbench/hardware.py; shares of measured ceilings are given anyway",
        )
    else:
        yield Finding("ok", f"{facts.name}, with documented peaks")


def _versions(facts: Facts) -> Iterator[Finding]:
    for package, (oldest, beyond) in SUPPORTED.items():
        version = facts.versions.get(package)
        wanted = f"{package}>={_dotted(oldest)},<{_dotted(beyond)}"
        if version is None:
            level: Level = "error" if facts.device != "cpu" else "warning"
            yield Finding(level, f"{package} is not installed", f"install {wanted}")
        elif not oldest <= _numbers(version) < beyond:
            yield Finding("error", f"{package} {version} is not supported", f"install {wanted}")
        else:
            yield Finding("ok", f"{package} {version}")


def _driver(facts: Facts) -> Iterator[Finding]:
    driver, cuda = facts.versions.get("driver"), facts.versions.get("cuda")
    if facts.device == "cpu" or facts.name is None or cuda is None:
        return
    oldest = OLDEST_DRIVER.get(cuda.partition(".")[0])
    if driver is None:
        yield Finding(
            "warning", "the driver's version is unknown", "install nvidia-ml-py, or nvidia-smi"
        )
    elif oldest is not None and _numbers(driver)[0] < oldest:
        yield Finding(
            "error", f"driver {driver} is too old for CUDA {cuda}", f"install {oldest} or later"
        )
    else:
        yield Finding("ok", f"driver {driver}, CUDA {cuda}")


def _nvml(facts: Facts) -> Iterator[Finding]:
    if not _on_gpu(facts):
        return
    if facts.nvml:
        yield Finding("ok", "clocks, power and throttling are recorded (NVML)")
    else:
        yield Finding(
            "warning",
            "clocks, power and throttling cannot be recorded",
            "pip install nvidia-ml-py (NVIDIA devices); the checks below were not made",
        )


def _neighbours(facts: Facts) -> Iterator[Finding]:
    setup = facts.setup
    told = (setup.others, setup.busy, setup.free_bytes)
    if told == (None, None, None):
        return
    fix = "stop them, or measure on another device"
    seen = []
    if setup.others:
        plural = "" if setup.others == 1 else "es"
        seen.append(Finding("warning", f"{setup.others} other process{plural} on the GPU", fix))
    if setup.busy is not None and setup.busy > BUSY:
        seen.append(Finding("error", f"the GPU is busy {setup.busy:.0%} of the time", fix))
    if setup.free_bytes is not None and setup.total_bytes:
        used = 1 - setup.free_bytes / setup.total_bytes
        if used > USED:
            free, total = setup.free_bytes / 2**30, setup.total_bytes / 2**30
            what = f"{free:.1f} of {total:.1f} GiB of memory are free"
            seen.append(Finding("warning", what, "free it: large cases will not fit"))
    yield from seen or [Finding("ok", "nobody else is on the GPU, as far as can be seen")]


def _heat(facts: Facts) -> Iterator[Finding]:
    state, limit = facts.state, facts.setup.slowdown_celsius
    if state.throttled:
        yield Finding(
            "error",
            f"the GPU is throttled: {', '.join(state.throttled)}",
            "let it cool, see to its power and cooling (nvidia-smi -q -d PERFORMANCE)",
        )
    if state.temperature_celsius is None:
        return
    hot = HOT if limit is None else limit - NEARLY_HOT
    if state.temperature_celsius >= hot:
        what = f"the GPU is at {state.temperature_celsius:.0f} °C, hot from {hot:.0f}"
        yield Finding("warning", what, "let it cool before you measure")
    elif not state.throttled:
        yield Finding("ok", f"{state.temperature_celsius:.0f} °C, not throttled")


def _power(facts: Facts) -> Iterator[Finding]:
    limit, default = facts.state.power_limit_watts, facts.setup.default_power_limit_watts
    if limit is None or default is None:
        return
    if limit < CAPPED * default:
        yield Finding(
            "warning",
            f"power is capped at {limit:.0f} W, {default:.0f} W is the default",
            f"nvidia-smi --power-limit={default:.0f}, or compare with equally capped results only",
        )
    else:
        yield Finding("ok", f"power limit {limit:.0f} W")


def _clocks(facts: Facts) -> Iterator[Finding]:
    if not facts.nvml:
        return
    if facts.setup.clocks_set:
        yield Finding("ok", "clocks are held by a setting")
    else:
        seen = "not locked" if facts.setup.clocks_set is False else "not seen to be locked"
        yield Finding(
            "warning",
            f"clocks are {seen}: short runs gain from boost, long ones lose it",
            "nvidia-smi --lock-gpu-clocks=MHZ where you may; else compare within one session",
        )


def _modes(facts: Facts) -> Iterator[Finding]:
    if facts.setup.persistence is False:
        yield Finding(
            "warning",
            "persistence mode is off: the driver unloads between runs",
            "nvidia-smi --persistence-mode=1",
        )
    if facts.setup.mig:
        yield Finding(
            "error",
            "the GPU is split (MIG): a slice has neither the peaks nor the name of the whole",
            "nvidia-smi --multi-instance-gpu=0, or use another device",
        )


def _interpreter(facts: Facts) -> Iterator[Finding]:
    on = facts.variables.get(_INTERPRETER) == "1"
    if on and facts.device != "cpu":
        what = f"{_INTERPRETER}=1: Triton kernels run on the host"
        yield Finding("error", what, f"unset {_INTERPRETER}")
    elif on:
        yield Finding(
            "warning",
            f"{_INTERPRETER}=1: times of Triton kernels are the interpreter's",
            "use them to try the tool, not to compare kernels",
        )


def _variables(facts: Facts) -> Iterator[Finding]:
    for name, (level, effect) in VARIABLES.items():
        value = facts.variables.get(name, "")
        if value not in ("", "0"):
            yield Finding(level, f"{name}={_shown(value)}: {effect}", f"unset {name}")
    for name in _ALLOCATOR:
        value = facts.variables.get(name, "").replace(" ", "").lower()
        if "backend:" in value and "backend:native" not in value:
            what = f"{name} replaces torch's caching allocator"
            yield Finding("warning", what, f"unset {name}: others' results are not made so")


def _commit(facts: Facts) -> Iterator[Finding]:
    if facts.commit is None:
        yield Finding(
            "warning",
            "the commit is unknown: results cannot be placed in a history",
            "measure from a checkout, or set JAGBENCH_COMMIT in a copy of one",
        )
    elif facts.dirty:
        what = f"tracked files differ from commit {facts.commit[:12]}"
        yield Finding("warning", what, "commit or stash before you keep results")
    else:
        yield Finding("ok", f"commit {facts.commit[:12]}")


def _host(facts: Facts) -> Iterator[Finding]:
    share = None if facts.load is None else facts.load / facts.cores
    allowed = LOADED if facts.device == "cpu" else 1.0
    if share is not None and share > allowed:
        yield Finding(
            "warning",
            f"load {facts.load:.1f} on {facts.cores} cores",
            "stop what else runs: it takes cores from CPU runs, and delays launches on a GPU",
        )
    elif facts.load is not None:
        yield Finding("ok", f"load {facts.load:.1f} on {facts.cores} cores")
    if facts.device == "cpu" and facts.governor not in (None, "performance"):
        yield Finding(
            "warning",
            f"the CPU's frequency governor is {facts.governor}",
            "cpupower frequency-set --governor performance",
        )


_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _device, _versions, _driver, _nvml, _neighbours, _heat, _power, _clocks, _modes, _interpreter,
    _variables, _commit, _host,
)  # fmt: skip


def _on_gpu(facts: Facts) -> bool:
    return facts.device != "cpu" and facts.name is not None


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.13.0+cu130" -> (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else (0,)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _shown(value: str) -> str:
    """A variable's value without folders of this machine."""
    return "..." if os.sep in value else value
