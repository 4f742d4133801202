"""Share one GPU's memory among the workers of a session.

A session with pytest-xdist runs several calls at once. Each takes as many slots of the memory as it
may need, and waits while others hold them. A slot is a file lock, which the system gives back when
a worker dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import torch

#: Slots a GPU's memory is divided into.
SLOTS = 8
#: Copies of its largest argument a judged call holds at most: arguments, their copy, outputs,
#: gradients, and what an implementation needs besides.
COPIES = 14


@contextmanager
def room_for(elements: int, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Within: memory for a call whose largest argument has so many elements.

    A call that needs less than a quarter of a slot does not wait. Unused memory goes back to the
    device at the end, or a worker would keep what others wait for.
    """
    if device.type != "cuda":
        yield
        return
    slot = torch.cuda.get_device_properties(device).total_memory / SLOTS
    need = elements * dtype.itemsize * COPIES / slot
    with ExitStack() as held:
        if need > 0.25:
            _take(min(SLOTS, max(1, round(need))), held)
        try:
            yield
        finally:
            torch.cuda.empty_cache()


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
