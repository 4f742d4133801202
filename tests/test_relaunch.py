"""A kernel launched again by its key: what is remembered, and what is not."""

from __future__ import annotations

from typing import Any

import torch

from jagbench.impl.kernels.relaunch import relaunch, traits

CPU = torch.device("cpu")


class _Kernel:
    """Notes how it is launched; what it "compiles" notes its own launches."""

    def __init__(self, compiles: bool = True) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.compiles = compiles

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.calls.append(("compiled", grid, arguments, options))
            return _Form(self.calls) if self.compiles else None

        return launch


class _Form:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.calls.append(("again", grid, arguments))


def test_a_form_is_compiled_once_for_each_key_and_device() -> None:
    kernel = _Kernel()
    for device, key in ((CPU, 1), (CPU, 1), (CPU, 2), (torch.device("meta"), 1), (CPU, 2)):
        relaunch(kernel, 5, device, key, "a", 7, num_warps=8)
    assert [call[0] for call in kernel.calls] == [
        "compiled", "again", "compiled", "compiled", "again",
    ]  # fmt: skip
    assert kernel.calls[0] == ("compiled", (5,), ("a", 7), {"num_warps": 8})
    assert kernel.calls[1] == ("again", (5, 1, 1), ("a", 7))


def test_an_interpreter_that_compiles_nothing_is_asked_every_time() -> None:
    kernel = _Kernel(compiles=False)
    for _ in range(2):
        relaunch(kernel, 1, CPU, None)
    assert [call[0] for call in kernel.calls] == ["compiled", "compiled"]


def test_a_kernel_made_later_is_never_taken_for_one_that_is_gone() -> None:
    for _ in range(50):
        kernel = _Kernel()
        relaunch(kernel, 1, CPU, "gone")
        assert [call[0] for call in kernel.calls] == ["compiled"]


def test_the_traits_of_pointers_are_type_alignment_and_absence() -> None:
    numbers = torch.zeros(8, dtype=torch.int32)
    assert traits(numbers, numbers[1:], None) == (
        (torch.int32, True), (torch.int32, False), None,
    )  # fmt: skip
