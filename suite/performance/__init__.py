"""Timings of the implementation through pytest-benchmark: `pytest suite/performance`."""
