"""Triton kernels of the portable tier."""
