"""Launch a kernel again without Triton's look at every argument.

`kernel[grid](...)` binds and classifies all arguments in Python before each launch, which takes the
host longer than the launch itself: 10 to 20 microseconds of a small kernel's 13 to 25, several
times that when the host's caches are cold. A caller that knows what the compiled form hangs on says
so by a key, and the form found for it is launched straight away.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

# (kernel, compiled form) by (id of the kernel, device, key). Triton hashes a kernel by its source,
# behind a lock; the kernel is kept, so that its id stays its own.
_compiled: dict[tuple[int, torch.device, Hashable], tuple[Any, Any]] = {}


def relaunch(
    kernel: Any,
    programs: int,
    device: torch.device,
    key: Hashable,
    *arguments: Any,
    **options: int,
) -> None:
    """Launch `programs` programs of a kernel on the current device, which is `device`.

    arguments: every parameter of the kernel in order, compile-time ones included, as the compiled
        form takes them. options: num_warps and the like.
    key: all that Triton would compile anew for: types and 16-byte alignment of pointers and which
        of them are None (`traits`), compile-time values, options. Integers must be declared
        `do_not_specialize` and stay within int32, or be part of the key.
    """
    found = _compiled.get((id(kernel), device, key))
    if found is not None:
        found[1][programs, 1, 1](*arguments)
        return
    compiled = kernel[(programs,)](*arguments, **options)
    # The interpreter compiles nothing, and has nothing to give.
    if compiled is not None:
        _compiled[id(kernel), device, key] = kernel, compiled


def traits(*tensors: Tensor | None) -> tuple[tuple[torch.dtype, bool] | None, ...]:
    """What a compiled form hangs on of its pointers."""
    # A list first: a generator takes longer, and every launch asks.
    return tuple([None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors])
