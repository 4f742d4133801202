"""Share one GPU's memory among the workers of a session.

A session with pytest-xdist runs several calls at once. Each takes as many slots of the memory as it
may need, and waits while others hold them. A slot is a file lock, which the system gives back when
a worker dies, however it dies.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import torch

#: Slots a GPU's memory is divided into.
SLOTS = 32
#: Share of the memory that is shared out; the rest is for contexts, compiled kernels, fragments.
SHARED_OUT = 0.8
#: Bytes below which a call does not wait.
SMALL = 1 << 27


@contextmanager
def room_for(memory: float, device: torch.device) -> Iterator[None]:
    """Within: room on a GPU for a call that needs `memory` bytes (as much as there is, at most).

    Unused memory goes back to the device at the end, or a worker would keep what others wait for.
    """
    if device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    with ExitStack() as held:
        if memory > SMALL:
            _take(slots_for(memory, total), held)
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def slots_for(memory: float, total: float) -> int:
    """Slots that hold `memory` bytes on a GPU of `total` bytes; all of them for infinity."""
    return math.ceil(min(SLOTS, memory * SLOTS / (SHARED_OUT * total)))


def _take(count: int, held: ExitStack) -> None:
    """Lock `count` slots; the gate makes others wait their turn meanwhile, so none starves."""
    folder = Path(tempfile.gettempdir()) / f"jagbench-memory-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with (folder / "gate").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        free = list(range(SLOTS))
        while count:
            for slot in tuple(free):
                if count and (lock := _try(folder / str(slot))) is not None:
                    held.enter_context(lock)
                    free.remove(slot)
                    count -= 1
            if count:
                time.sleep(0.02)


def _try(path: Path) -> IO[str] | None:
    """The locked file, or None if another worker has it."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
