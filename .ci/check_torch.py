"""Fail at once if a CUDA build of torch was installed on a machine without an NVIDIA device.

Such a build brings several gigabytes that cannot be used here, and hides that the bounds on torch
no longer select the CPU build. Run by tox before anything else in an environment.
"""

import sys
from pathlib import Path

MESSAGE = """\
torch {version} is built for CUDA {cuda}, but this machine has no NVIDIA device.
Install the CPU build instead and make the environment anew:
    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu tox --recreate ...
"""


def has_nvidia_device(devices: Path = Path("/dev")) -> bool:
    """Whether the system shows an NVIDIA device (or, under WSL, a GPU)."""
    return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()


def problem(version: str, cuda: str | None, has_device: bool) -> str | None:
    """What is wrong with a torch build on this machine; None if nothing."""
    if cuda is None or has_device:
        return None
    return MESSAGE.format(version=version, cuda=cuda)


def main() -> int:
    """Print the problem, if any; 1 if there is one."""
    import torch

    found = problem(
        torch.__version__, torch.version.cuda, has_nvidia_device() or torch.cuda.is_available()
    )
    if found:
        print(found, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
