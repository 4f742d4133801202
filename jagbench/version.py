"""The version of the suite, by calendar: new tests may fail kernels that passed an older one."""

__version__ = "2026.11.0"
