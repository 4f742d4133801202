"""What `jagbench run` was asked for, checked before anything starts."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click


def device_named(name: str) -> str:
    """The device a text names, "cpu" for every CPU. A usage error for what is not measured on."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise click.UsageError(f"--device={name}: {error}") from error
    if device.type not in ("cuda", "cpu"):
        raise click.UsageError(f"--device={name}: {device.type} is neither cuda nor cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise click.UsageError(f"--device={name}: torch sees {torch.cuda.device_count()} GPU here")
    return "cpu" if device.type == "cpu" else name


def choices_in(path: Path) -> Mapping[str, str]:
    """Choices of a JSON file: an object of strings. A usage error where it holds anything else."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise click.UsageError(f"--pin={path}: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise click.UsageError(f"--pin={path}: want a JSON object whose values are strings")
    return found


def finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Callback of an option: refuse NaN and infinity, which pass every range."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not finite", context, parameter)
    return value


def writable(results: Path) -> None:
    """A usage error where records cannot be kept in this folder; it is made if need be."""
    try:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results):
            pass
    except OSError as error:
        raise click.UsageError(f"--results={results}: {error}") from error
