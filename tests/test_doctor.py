import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from repository import PROJECT

from jagbench import doctor, environment
from jagbench.doctor import Facts, Finding, examine, judge, look
from jagbench.monitor import Setup
from jagbench.result import DeviceState

GIB = 1 << 30
HEALTHY = Facts(
    device="cuda",
    name="NVIDIA H200",
    versions={"torch": "2.11.0+cu130", "triton": "3.6.0", "driver": "580.159.03", "cuda": "13.0"},
    commit="0123456789abcdef",
    dirty=False,
    nvml=True,
    state=DeviceState(temperature_celsius=35.0, power_limit_watts=700.0, throttled=()),
    setup=Setup(
        default_power_limit_watts=700.0,
        persistence=True,
        mig=False,
        clocks_set=True,
        slowdown_celsius=95.0,
        free_bytes=140 * GIB,
        total_bytes=141 * GIB,
        others=0,
        busy=0.0,
    ),
    load=0.5,
    cores=16,
)
QUIET_CPU = dataclasses.replace(
    HEALTHY, device="cpu", name="cpu (x86_64)", nvml=False, state=DeviceState(), setup=Setup(),
    versions=HEALTHY.versions | {"driver": None, "cuda": None},
)  # fmt: skip


def state(**changes):
    return {"state": HEALTHY.state.model_copy(update=changes)}


def setup(**changes):
    return {"setup": dataclasses.replace(HEALTHY.setup, **changes)}


def versions(**changes):
    return {"versions": HEALTHY.versions | changes}


def troubles(facts):
    """Level and text of what is not well."""
    return [(finding.level, finding.what) for finding in judge(facts) if finding.level != "ok"]


@pytest.mark.parametrize("facts", [HEALTHY, QUIET_CPU], ids=["gpu", "cpu"])
def test_a_machine_without_faults_has_no_warning(facts):
    assert troubles(facts) == []
    assert all(finding.fix == "" for finding in judge(facts))
    assert len(judge(facts)) >= 5


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"name": None}, "error", "no cuda device"),
        ({"name": "NVIDIA H300"}, "warning", "NVIDIA H300 is not in the table"),
        (versions(torch="2.10.1"), "error", "torch 2.10.1 is not supported"),
        (versions(torch="2.14.0a0+git1"), "error", "torch 2.14.0a0+git1 is not supported"),
        (versions(triton="3.8.0"), "error", "triton 3.8.0 is not supported"),
        (versions(triton=None), "error", "triton is not installed"),
        (versions(driver="570.86.15"), "error", "driver 570.86.15 is too old for CUDA 13.0"),
        (versions(driver="470.1", cuda="12.8"), "error", "too old for CUDA 12.8"),
        (versions(driver=None), "warning", "driver's version is unknown"),
        (setup(others=1), "warning", "1 other process on the GPU"),
        (setup(others=2), "warning", "2 other processes on the GPU"),
        (setup(busy=0.37), "error", "busy 37% of the time"),
        (setup(free_bytes=70 * GIB), "warning", "70.0 of 141.0 GiB of memory are free"),
        (state(throttled=("power cap", "thermal")), "error", "throttled: power cap, thermal"),
        (state(temperature_celsius=88.0), "warning", "at 88 °C, hot from 85"),
        (
            state(temperature_celsius=84.0) | setup(slowdown_celsius=None),
            "warning",
            "at 84 °C, hot from 80",
        ),
        (state(power_limit_watts=450.0), "warning", "capped at 450 W, 700 W is the default"),
        (setup(clocks_set=False), "warning", "clocks are not locked"),
        (setup(clocks_set=None), "warning", "clocks are not seen to be locked"),
        (setup(persistence=False), "warning", "persistence mode is off"),
        (setup(mig=True), "error", "split (MIG)"),
        ({"variables": {"TRITON_INTERPRET": "1"}}, "error", "Triton kernels run on the host"),
        ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, "error", "every launch waits"),
        ({"variables": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}, "error", "asks the driver"),
        ({"variables": {"NVIDIA_TF32_OVERRIDE": "1"}}, "error", "another arithmetic"),
        ({"variables": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}, "warning", "other kernels"),
        (
            {"variables": {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}},
            "warning",
            "replaces torch's caching allocator",
        ),
        ({"commit": None, "dirty": None}, "warning", "the commit is unknown"),
        ({"dirty": True}, "warning", "tracked files differ from commit 0123456789ab"),
        ({"load": 40.0}, "warning", "load 40.0 on 16 cores"),
    ],
)
def test_each_fault_of_a_gpu_machine_is_the_one_thing_found(changes, level, words):
    found = troubles(dataclasses.replace(HEALTHY, **changes))
    assert [entry[0] for entry in found] == [level]
    assert words in found[0][1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"load": 12.0}, "load 12.0 on 16 cores"),
        ({"governor": "powersave"}, "governor is powersave"),
        ({"variables": {"TRITON_INTERPRET": "1"}}, "the interpreter's"),
        ({"versions": QUIET_CPU.versions | {"triton": None}}, "triton is not installed"),
    ],
)
def test_each_fault_of_a_cpu_run_is_the_one_thing_found(changes, words):
    found = troubles(dataclasses.replace(QUIET_CPU, **changes))
    assert [entry[0] for entry in found] == ["warning"]
    assert words in found[0][1]


def test_without_nvml_one_warning_says_so_and_nothing_is_made_up():
    blind = dataclasses.replace(HEALTHY, nvml=False, state=DeviceState(), setup=Setup())
    assert troubles(blind) == [("warning", "clocks, power and throttling cannot be recorded")]
    told = " ".join(finding.what for finding in judge(blind))
    assert "°C" not in told
    assert "nobody else" not in told


def test_settings_that_change_nothing_are_not_reported():
    quiet = {
        "CUDA_LAUNCH_BLOCKING": "0",
        "TRITON_INTERPRET": "0",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True,backend:native",
        "TRITON_DEBUG": "",
    }
    assert troubles(dataclasses.replace(HEALTHY, variables=quiet)) == []
    quiet = dataclasses.replace(QUIET_CPU, governor="performance")
    assert troubles(quiet) == []


def test_a_commit_told_by_a_copy_is_well():
    assert troubles(dataclasses.replace(HEALTHY, dirty=None)) == []


def test_every_trouble_comes_with_what_to_do():
    broken = dataclasses.replace(
        HEALTHY,
        variables=dict.fromkeys(doctor.VARIABLES, "1"),
        commit=None,
        load=99.0,
        **setup(others=3, busy=1.0, free_bytes=0, mig=True, persistence=False, clocks_set=False),
        **state(throttled=("power cap",), temperature_celsius=99.0, power_limit_watts=1.0),
    )
    found = judge(broken)
    assert all(finding.fix for finding in found if finding.level != "ok")
    levels = [finding.level for finding in found]
    assert levels == sorted(levels, key=["error", "warning", "ok"].index)


def test_a_path_in_a_variable_is_not_shown():
    told = {"CUDA_INJECTION64_PATH": f"{os.sep}opt{os.sep}profiler.so"}
    [(_, what)] = troubles(dataclasses.replace(HEALTHY, variables=told))
    assert os.sep not in what


def test_the_supported_versions_are_those_of_the_project_file():
    for package, (oldest, beyond) in doctor.SUPPORTED.items():
        wanted = f"{package}>={doctor._dotted(oldest)},<{doctor._dotted(beyond)}"
        [line] = [d for d in PROJECT["project"]["dependencies"] if d.startswith(package)]
        assert line.partition(";")[0].strip() == wanted


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.13.0+cu130", (2, 13, 0)),
        ("580.159.03", (580, 159, 3)),
        ("3.7.1", (3, 7, 1)),
        ("x", (0,)),
    ],
)
def test_a_version_is_read_by_its_leading_numbers(version, numbers):
    assert doctor._numbers(version) == numbers


def test_this_machine_can_be_examined_for_a_cpu_run(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    facts = look(torch.device("cpu"))
    assert facts.name.startswith("cpu")
    assert facts.variables["CUDA_LAUNCH_BLOCKING"] == "1"
    assert facts.versions["torch"] == torch.__version__
    found = examine("cpu")
    assert all(isinstance(finding, Finding) for finding in found)
    assert any("CUDA_LAUNCH_BLOCKING" in finding.what for finding in found)


def test_a_missing_gpu_is_an_error_and_not_an_exception(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    first = examine("cuda")[0]
    assert (first.level, first.what) == ("error", "no cuda device is to be seen")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert examine("cuda:1")[0].what == "no cuda device is to be seen"
    assert "no mps device" in examine("mps")[0].what


def test_a_gpu_is_looked_at_through_nvml(monkeypatch):
    watch = SimpleNamespace(
        present=True,
        sample=lambda: None,
        state=lambda: HEALTHY.state,
        setup=lambda: HEALTHY.setup,
        driver=lambda: "580.1",
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "Monitor", lambda device: watch)
    detect = environment.detect
    seen = dataclasses.replace(detect("cpu"), device="NVIDIA H200", cuda="13.0")
    monkeypatch.setattr(environment, "detect", lambda device: seen)
    facts = look(torch.device("cuda"))
    assert (facts.name, facts.nvml, facts.versions["driver"]) == ("NVIDIA H200", True, "580.1")
    assert facts.setup == HEALTHY.setup


def test_the_governor_is_read_where_there_is_one(tmp_path):
    path = tmp_path / "scaling_governor"
    assert doctor._governor(path) is None
    path.write_text("powersave\n")
    assert doctor._governor(path) == "powersave"


def test_examining_writes_nothing_and_starts_nothing_that_does(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("the doctor changes nothing")

    for name in ("write_text", "write_bytes", "mkdir", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    before = dict(os.environ)
    examine("cpu")
    assert dict(os.environ) == before
