"""An implementation under test: any module or object with callables named after the operators."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

#: Entry-point group in which packages offer implementations by a short name.
ENTRY_POINT_GROUP = "jagbench.implementations"


@dataclass(frozen=True)
class Implementation:
    """What `--impl` named.

    name: as given on the command line.
    namespace: module or object that holds the operators.
    version: its `__version__`, or that of its distribution, or "unknown".
    """

    name: str
    namespace: Any
    version: str

    def get(self, operator: str) -> Callable[..., Any]:
        """The callable for an operator.

        Raises NotImplementedError where the namespace has no such name: unsupported, not wrong.
        """
        function = getattr(self.namespace, operator, None)
        if function is None:
            raise NotImplementedError(f"{self.name} has no {operator}")
        if not callable(function):
            raise TypeError(f"{self.name}.{operator} is {type(function).__name__}, not callable")
        return function  # type: ignore[no-any-return]


def load(name: str) -> Implementation:
    """Load an implementation by entry-point name, module path, or `module:attribute`.

    Raises ValueError if nothing answers to `name`, with the known entry points. An import error
    from inside the module is passed on unchanged: it is the implementer's to see.
    """
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for entry in entry_points:
        if entry.name == name:
            return Implementation(name, entry.load(), _version(entry.value))
    module_name, _, attribute = name.partition(":")
    try:
        namespace: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        known = sorted(entry.name for entry in entry_points)
        raise ValueError(
            f"--impl={name}: no module {error.name!r}, and no entry point of that name in group "
            f"{ENTRY_POINT_GROUP} (known: {', '.join(known) or 'none'})"
        ) from error
    for part in filter(None, attribute.split(".")):
        try:
            namespace = getattr(namespace, part)
        except AttributeError as error:
            raise ValueError(f"--impl={name}: {error}") from error
    return Implementation(name, namespace, _version(module_name, namespace))


def of_functions(name: str, **functions: Callable[..., Any]) -> Implementation:
    """An implementation made of plain functions (tests of the suite use it)."""
    return Implementation(name, SimpleNamespace(**functions), "unknown")


def _version(module_name: str, namespace: Any = None) -> str:
    version = getattr(namespace, "__version__", None)
    if isinstance(version, str):
        return version
    top = module_name.partition(":")[0].partition(".")[0]
    for distribution in importlib.metadata.packages_distributions().get(top, []):
        return importlib.metadata.version(distribution)
    return str(getattr(importlib.import_module(top), "__version__", "unknown"))
