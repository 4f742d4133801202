"""torch.compile for peers: each shape compiled anew, and never a silent fall back to eager code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

#: Shapes compiled in one process before that is an error.
RECOMPILATIONS = 4096


def limited(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function through torch.compile; reaching the limit of recompilations is an error."""
    made: Callable[..., Any] = torch.compile(function, dynamic=False, **options)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        settings: Any = torch._dynamo.config
        with settings.patch(
            recompile_limit=RECOMPILATIONS,
            accumulated_recompile_limit=RECOMPILATIONS,
            fail_on_recompile_limit_hit=True,
        ):
            return made(*arguments, **keywords)

    return call
