import os
import sys
from types import SimpleNamespace

import pytest
import torch

from jagbench import monitor
from jagbench.monitor import Monitor, Setup
from jagbench.result import DeviceState

UUID = "5f4a1c9e-0000-1111-2222-333344445555"


class FakeNvml:
    """NVML with one GPU at a known identity; answers are attributes, None = not supported."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.started = 0
        self.bus_ids = ["00000000:1a:00.0"]
        self.uuids = [f"GPU-{UUID}"]
        self.sm_clock, self.memory_clock = 1980, 3201
        self.power, self.limit, self.default_limit = 350_000, 700_000, 700_000
        self.temperature, self.slowdown = 41, 95
        self.reasons = 0x1
        self.persistence, self.mig = 1, (0, 0)
        self.memory = SimpleNamespace(free=140 << 30, total=141 << 30)
        self.use = SimpleNamespace(gpu=0)
        self.processes = []

    def nvmlInit(self):
        self.started += 1

    def _told(self, value):
        if value is None:
            raise self.NVMLError("not supported")
        return value

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._told("handle" if uuid in self.uuids else None)

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        return self._told("handle" if bus_id in self.bus_ids else None)

    def nvmlDeviceGetClockInfo(self, handle, which):
        assert handle == "handle"
        return self._told({1: self.sm_clock, 2: self.memory_clock}[which])

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._told(self.power)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self._told(self.limit)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle):
        return self._told(self.default_limit)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return self._told(self.temperature)

    def nvmlDeviceGetTemperatureThreshold(self, handle, which):
        return self._told(self.slowdown)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._told(self.reasons)

    def nvmlDeviceGetPersistenceMode(self, handle):
        return self._told(self.persistence)

    def nvmlDeviceGetMigMode(self, handle):
        return self._told(self.mig)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self._told(self.memory)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self._told(self.use)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return self._told(self.processes)

    def nvmlSystemGetDriverVersion(self):
        return b"580.159.03"


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    properties = SimpleNamespace(uuid=UUID, pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    fake.properties = properties
    monitor._nvml.cache_clear()
    yield fake
    monitor._nvml.cache_clear()


def test_a_cpu_has_no_state_and_is_steady():
    with Monitor("cpu") as watch:
        watch.sample()
    assert not watch.present
    assert watch.state() == DeviceState()
    assert watch.setup() == Setup()
    assert watch.steady()


@pytest.mark.parametrize("absent", [None, "no driver"])
def test_without_nvml_every_field_is_none_and_nothing_raises(nvml, monkeypatch, absent):
    if absent is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:

        def refuse():
            raise nvml.NVMLError("driver not loaded")

        nvml.nvmlInit = refuse
    with Monitor("cuda:0") as watch:
        watch.sample()
    assert watch.state() == DeviceState()
    assert watch.setup() == Setup()
    assert watch.driver() is None
    assert watch.steady()


def test_a_device_unknown_to_nvml_has_no_state(nvml):
    nvml.uuids, nvml.bus_ids = [], []
    watch = Monitor("cuda:0")
    watch.sample()
    assert watch.state() == DeviceState()
    assert watch.steady()


def test_the_handle_is_found_by_identity_and_else_by_place_on_the_bus(nvml):
    assert Monitor("cuda:3").present
    nvml.uuids = []
    assert Monitor("cuda:3").present
    nvml.properties.pci_bus_id = 0x1B
    assert not Monitor("cuda:3").present
    del nvml.properties.pci_bus_id
    assert not Monitor("cuda:3").present


def test_a_slice_of_a_device_is_found_by_its_own_identity(nvml):
    nvml.uuids, nvml.bus_ids = [f"MIG-{UUID}"], []
    assert Monitor("cuda:0").present


def test_nvml_is_started_once_a_process(nvml):
    for _ in range(3):
        Monitor("cuda:0").sample()
    assert nvml.started == 1


def test_the_state_is_in_hertz_watts_and_celsius(nvml):
    watch = Monitor("cuda:0")
    watch.sample()
    state = watch.state()
    assert state.sm_clock_hz == pytest.approx(1.98e9)
    assert state.memory_clock_hz == pytest.approx(3.201e9)
    assert state.power_watts == pytest.approx(350)
    assert state.power_limit_watts == pytest.approx(700)
    assert state.temperature_celsius == 41
    assert state.throttled == ()


def test_the_state_holds_medians_of_clocks_the_highest_temperature_and_any_throttling(nvml):
    with Monitor("cuda:0") as watch:
        nvml.sm_clock, nvml.temperature, nvml.reasons = 1000, 88, 0x4 | 0x2
        watch.sample()
        nvml.sm_clock, nvml.temperature, nvml.reasons = 1900, 60, 0x40
    state = watch.state()
    assert state.sm_clock_hz == pytest.approx(1.9e9)
    assert state.temperature_celsius == 88
    assert state.throttled == ("power cap", "hardware thermal")


def test_idling_and_set_clocks_are_no_throttling_and_an_unknown_reason_is_named(nvml):
    nvml.reasons = 0x1 | 0x2 | 0x4000
    watch = Monitor("cuda:0")
    watch.sample()
    assert watch.state().throttled == ("reason 0x4000",)


def test_what_the_driver_does_not_support_is_none_and_the_rest_is_read(nvml):
    nvml.power = nvml.reasons = nvml.memory = nvml.processes = None
    watch = Monitor("cuda:0")
    watch.sample()
    state = watch.state()
    assert state.power_watts is None
    assert state.throttled is None
    assert state.sm_clock_hz is not None
    assert (watch.setup().free_bytes, watch.setup().others) == (None, None)


def test_an_older_name_of_the_reasons_is_asked_too(nvml):
    nvml.reasons = None
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x20
    watch = Monitor("cuda:0")
    watch.sample()
    assert watch.state().throttled == ("thermal",)


def test_a_device_is_steady_when_clock_and_power_of_the_last_readings_agree(nvml):
    watch = Monitor("cuda:0")
    watch.sample()
    watch.sample()
    assert not watch.steady()
    watch.sample()
    assert watch.steady()
    nvml.power *= 1.05
    watch.sample()
    assert not watch.steady()
    assert watch.steady(tolerance=0.1)
    watch.sample()
    watch.sample()
    assert watch.steady()
    nvml.sm_clock *= 0.9
    watch.sample()
    assert not watch.steady()


def test_a_device_that_tells_neither_clock_nor_power_counts_as_steady(nvml):
    nvml.sm_clock = nvml.power = None
    watch = Monitor("cuda:0")
    for _ in range(3):
        watch.sample()
    assert watch.steady()


def test_the_setup_tells_cap_mode_memory_and_neighbours(nvml):
    nvml.processes = [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=-1)]
    nvml.mig, nvml.persistence, nvml.use.gpu = (1, 1), 0, 37
    found = Monitor("cuda:0").setup()
    assert found == Setup(
        default_power_limit_watts=700.0,
        persistence=False,
        mig=True,
        clocks_set=None,
        slowdown_celsius=95.0,
        free_bytes=140 << 30,
        total_bytes=141 << 30,
        others=1,
        busy=0.37,
    )
    assert Monitor("cuda:0").driver() == "580.159.03"


@pytest.mark.parametrize(("reasons", "told"), [(0x1, None), (0x2, True), (0x3, True), (0x4, False)])
def test_set_clocks_show_unless_the_device_idles(nvml, reasons, told):
    nvml.reasons = reasons
    assert Monitor("cuda:0").setup().clocks_set is told


def test_a_newer_name_of_the_temperature_is_asked_too(nvml):
    nvml.temperature = None
    nvml.nvmlDeviceGetTemperatureV = lambda handle, sensor: 55
    watch = Monitor("cuda:0")
    watch.sample()
    assert watch.state().temperature_celsius == 55
