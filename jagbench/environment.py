"""Where a measurement was made: versions, device, commit; no host name and no path."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from jagbench.version import __version__

if TYPE_CHECKING:
    from jagbench.result import Provenance

#: Endings of the files that make an implementation what it is.
SOURCES = (
    ".py", ".cu", ".cuh", ".cpp", ".cc", ".h", ".hpp", ".so", ".cubin", ".ptx", ".hsaco",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """What a reader must know to make a result again.

    commit: what JAGBENCH_COMMIT says, for a copy of a checkout has no history, or another one; else
        of the checkout this package runs from; None for an installed wheel.
    dirty: whether tracked files differed from the commit; None where JAGBENCH_COMMIT speaks: a copy
        cannot be compared with its commit.
    device: name of the accelerator, or the CPU's architecture; driver: version of its driver.
    cpu: model of the host's processor.
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
    cpu: str | None = None


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
        cpu=_cpu(),
    )


@cache
def provenance(device: torch.device | str) -> Provenance:
    """The environment as a record keeps it; looked up once a process and device."""
    # Here, so that the suite, which keeps no records, runs where pydantic is not installed.
    from jagbench.result import Provenance

    return Provenance(**asdict(detect(device)))


def source_hash(namespace: Any) -> str | None:
    """Hash of the source that holds an implementation: 16 hex digits of SHA-256.

    Of a package every file in it and below whose name ends in one of `SOURCES`; of another module
    its file and those in its folder and below that it imports, however indirectly, by statements
    anywhere in it (not what happens to be loaded, or the hash would depend on what else runs), with
    the compiled code and kernels beside it. Of a class or an object the module of the class.
    Names are relative, so that the hash of the same files is the same on every machine. None where
    there is no source to read (an interactive session, a namespace of loose functions, a compiled
    module).
    """
    if isinstance(namespace, SimpleNamespace):
        return None
    if isinstance(namespace, ModuleType):
        module: ModuleType | None = namespace
    else:
        owner = namespace if isinstance(namespace, type) else type(namespace)
        module = sys.modules.get(owner.__module__)
    folders = tuple(getattr(module, "__path__", ()))
    package = getattr(module, "__name__", "").rpartition(".")[0]
    return _hash(getattr(module, "__file__", None), folders, package)


@cache
def _hash(file: str | None, folders: tuple[str, ...], package: str = "") -> str | None:
    found = {(p.relative_to(f).as_posix(), p) for f in folders for p in _sources(Path(f))}
    if not folders and file is not None and file.endswith(".py"):
        path = Path(file)
        found = {(p.relative_to(path.parent).as_posix(), p) for p in _with_helpers(path, package)}
    if not found:
        return None
    digest = hashlib.sha256()
    for name, path in sorted(found):
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _sources(folder: Path) -> Iterator[Path]:
    return (p for p in folder.rglob("*") if p.suffix in SOURCES and p.is_file())


def _with_helpers(file: Path, package: str) -> set[Path]:
    """A module's file and what it imports from its folder and below."""
    folder = file.parent
    # Beside a module that was installed lies everybody else's code.
    if not package and folder.name in ("site-packages", "dist-packages"):
        return {file}
    found = {file, *(p for p in folder.glob("*") if p.suffix in SOURCES and p.suffix != ".py")}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        for name in _imported(path, folder, package):
            inner = folder.joinpath(*name.split("."))
            helpers = [inner.with_name(inner.name + ".py")]
            helpers += _sources(folder / name.partition(".")[0])
            new = {helper for helper in helpers if helper.is_file()} - found
            found |= new
            waiting += [helper for helper in new if helper.suffix == ".py"]
    return found


def _imported(file: Path, folder: Path, package: str) -> set[str]:
    """Dotted names, from the folder on, that a file may import; some may be no modules."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    inside = file.parent.relative_to(folder).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = (*package.split("."), *inside) if package else inside
                kept = parts[: len(parts) - node.level + 1]
                base = ".".join((*kept, *((base,) if base else ())))
            names |= {base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)}
    start = f"{package}." if package else ""
    return {n.removeprefix(start) for n in names if n.startswith(start)} - {""}


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


def _cpu() -> str | None:
    """Model of the processor; no folder separator, or it would look like a path."""
    name = _cpu_from(Path("/proc/cpuinfo"))
    if name is None and platform.system() == "Darwin":
        name = _output(["sysctl", "-n", "machdep.cpu.brand_string"], None)
    return " ".join((name or platform.processor()).replace("/", " ").split()) or None


def _cpu_from(path: Path) -> str | None:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    # "model name" on x86; Arm kernels name the board at most.
    names = ("model name", "hardware", "cpu model")
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in names and value.strip():
            return value.strip()
    return None


def _commit(root: Path) -> tuple[str | None, bool | None]:
    told = os.environ.get("JAGBENCH_COMMIT", "").strip()
    if told:
        return told, None
    # An installed wheel may lie inside somebody else's checkout: only our own root counts.
    known = (root / "pyproject.toml").is_file() and (root / ".git").exists()
    commit = _output(["git", "rev-parse", "HEAD"], root) if known else None
    if commit is None:
        return None, None
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
