"""The source tree, as tests of the project's own layout read it."""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]

#: Folder in the tree -> package it maps to.
PACKAGE_OF_FOLDER = {folder: name for name, folder in SETUPTOOLS["package-dir"].items()}


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_modules(path):
    """Names of the modules a file imports, wherever in the file the import stands."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            if node.module and not node.level:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
