"""Kernels for Hopper in Gluon: warp-specialised, persistent over a work list built on the device.

Nothing here imports Gluon until a kernel is launched: `triton.experimental.gluon` may be missing,
and Triton's interpreter cannot run it. `support` says which calls this tier takes.
"""
