"""Where a measurement was made: versions, device, commit; no host name and no path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from jagbench.version import __version__


@dataclass(frozen=True)
class Environment:
    """What a reader must know to make a result again.

    commit: of the checkout this package runs from; for a copy without history, what
        JAGBENCH_COMMIT says; None for an installed wheel.
    dirty: whether tracked files differed from the commit.
    device: name of the accelerator, or the CPU's architecture; driver: version of its driver.
    """

    jagbench: str
    commit: str | None
    dirty: bool | None
    python: str
    torch: str
    triton: str | None
    numpy: str | None
    platform: str
    device: str
    driver: str | None
    cuda: str | None


def detect(device: torch.device | str = "cpu") -> Environment:
    """The environment of this process, for results on `device`."""
    device = torch.device(device)
    commit, dirty = _commit(Path(__file__).resolve().parents[1])
    return Environment(
        jagbench=__version__,
        commit=commit,
        dirty=dirty,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        numpy=_version("numpy"),
        platform=f"{platform.system()} {platform.machine()}",
        device=_device_name(device),
        driver=_driver() if device.type == "cuda" else None,
        cuda=torch.version.cuda,
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = _output(command, None)
    return lines.splitlines()[0].strip() if lines else None


def _commit(root: Path) -> tuple[str | None, bool | None]:
    # An installed wheel may lie inside somebody else's checkout: only our own root counts.
    known = (root / "pyproject.toml").is_file() and (root / ".git").exists()
    commit = _output(["git", "rev-parse", "HEAD"], root) if known else None
    if commit is None:
        # A copy of a checkout without its history is told which commit it is.
        return os.environ.get("JAGBENCH_COMMIT"), None
    status = _output(["git", "status", "--porcelain", "--untracked-files=no"], root)
    return commit.strip(), (None if status is None else bool(status.strip()))


def _output(command: list[str], folder: Path | None) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
