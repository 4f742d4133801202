"""A GPU's memory is shared among workers by slots."""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack

import pytest
import torch

from jagbench import workloads
from jagbench.suite import room
from jagbench.suite.cases import Case


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(room.tempfile, "gettempdir", lambda: str(tmp_path))


def test_who_finds_too_few_slots_waits_until_they_are_free():
    entered = threading.Event()

    def second() -> None:
        with ExitStack() as held:
            room._take(room.SLOTS // 2, held)
            entered.set()

    with ExitStack() as held:
        room._take(room.SLOTS // 2 + 1, held)
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(5)
    thread.join()


def test_calls_that_fit_together_do_not_wait():
    with ExitStack() as first, ExitStack() as second:
        room._take(room.SLOTS // 2, first)
        room._take(room.SLOTS // 2, second)


def test_memory_is_rounded_up_to_slots_and_infinity_is_the_whole_gpu():
    total = 100e9
    slot = room.SHARED_OUT * total / room.SLOTS
    asked = [1.0, slot, 1.5 * slot, total, math.inf]
    assert [room.slots_for(memory, total) for memory in asked] == [1, 1, 2, room.SLOTS, room.SLOTS]


def test_a_cpu_shares_nothing():
    with room.room_for(math.inf, torch.device("cpu")):
        pass


def test_every_full_size_case_fits_a_gpu_by_itself():
    budget = room.SHARED_OUT * 141e9
    over = [
        case.id
        for w in workloads.select(purpose="full")
        for case in [Case(w, torch.float32)]
        if case.memory > budget
    ]
    assert over == []


def test_memory_grows_with_the_dtype_and_the_longest_sequence():
    (large,) = workloads.select(operator="gdpa", name="gdpa-self-l2048-fill1.0")
    (small,) = workloads.select(operator="gdpa", name="gdpa-self-l256-fill1.0")
    assert Case(large, torch.float32).memory > Case(large, torch.bfloat16).memory
    assert Case(large, torch.bfloat16).memory > 4 * Case(small, torch.bfloat16).memory


def test_a_truth_that_quantises_asks_for_more_room():
    """On an H200 judging these two took 61 and 45 GiB, where 17 and 21 had been asked for."""
    (layer,) = workloads.select(name="mx_linear-m65536-k4096-n1024-default")
    (attention,) = workloads.select(name="mx_attention-self-l1024-fill0.5-jagged")
    assert Case(layer, torch.float32).memory > 59 * 2**30
    assert Case(attention, torch.bfloat16).memory > 45 * 2**30
