"""Each tier, generation and backward form as an implementation of its own.

    pytest suite/ --impl=jagbench.impl.variants:hopper

`jagbench.impl` itself chooses; these never do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from jagbench.impl.choices import configuration, describe, pin
from jagbench.impl.kernels.block_attention import block_attention
from jagbench.impl.kernels.block_mask import masked_block_attention
from jagbench.impl.kernels.gdpa import gdpa
from jagbench.impl.kernels.jagged_attention import jagged_attention
from jagbench.impl.kernels.norm_linear import norm_linear
from jagbench.impl.kernels.pffn_block import pffn_block
from jagbench.impl.kernels.rotary import rotary
from jagbench.impl.kernels.tuning import Schedule
from jagbench.version import __version__


def _namespace(schedule: Schedule, **others: Callable[..., Any]) -> SimpleNamespace:
    """The operators with an attention of pairs under one schedule, and others that have but one."""
    return SimpleNamespace(
        jagged_attention=partial(jagged_attention, schedule=schedule),
        gdpa=partial(gdpa, schedule=schedule),
        pffn_block=partial(pffn_block, schedule=schedule),
        norm_linear=partial(norm_linear, schedule=schedule),
        __version__=__version__,
        configuration=configuration,
        describe=partial(describe, schedule=schedule),
        pin=pin,
        **others,
    )


#: -inf masks on every tile, atomic dQ. Makes no promise of determinism.
v1 = _namespace(Schedule("v1", "atomic"))
#: Subtraction masking with its guard, split backward.
v2 = _namespace(Schedule("v2", "split"))
#: Persistent, zigzag, tensor descriptors where the device has them, split backward.
v3 = _namespace(Schedule("v3", "split"))
#: What `jagbench.impl` takes on devices other than Hopper.
portable = _namespace(
    Schedule(tier="portable"),
    block_attention=block_attention,
    rotary=rotary,
)
#: Warp-specialised Gluon kernels alone: a call they cannot take is reported as unsupported.
hopper = _namespace(Schedule(tier="hopper"))
#: Block attention as a mask of the general portable kernels, rotary a step of its own before it.
block_mask = SimpleNamespace(
    block_attention=masked_block_attention,
    __version__=__version__,
    configuration=configuration,
    describe=partial(describe, schedule=Schedule(tier="portable")),
    pin=pin,
)
