import sys
from types import SimpleNamespace

import pytest

from jagbench import reference
from jagbench.implementation import load, of_functions
from jagbench.version import __version__


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that can be imported by name; it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def test_a_module_is_found_by_its_path():
    implementation = load("jagbench.reference")
    assert implementation.get("gdpa") is reference.gdpa
    assert implementation.version == __version__


def test_an_object_in_a_module_is_found(module):
    name = module(
        "kernels_of_mine",
        "class Fast:\n    class Inner:\n        gdpa = staticmethod(lambda: 7)\n",
    )
    assert load(f"{name}:Fast.Inner").get("gdpa")() == 7


def test_the_version_is_the_modules_own(module):
    assert load(module("versioned_kernels", "__version__ = '4.5'\n")).version == "4.5"
    assert load(module("unversioned_kernels", "")).version == "unknown"


def test_a_missing_operator_is_unsupported_not_wrong():
    with pytest.raises(NotImplementedError, match="mine has no gdpa"):
        of_functions("mine").get("gdpa")


def test_a_name_that_is_not_callable_is_an_error():
    implementation = load("jagbench.reference")
    odd = type(implementation)("odd", SimpleNamespace(gdpa=3), "1")
    with pytest.raises(TypeError, match=r"odd\.gdpa is int, not callable"):
        odd.get("gdpa")


def test_an_unknown_name_lists_what_is_known():
    with pytest.raises(ValueError, match=r"--impl=no_such_kernels.*known:"):
        load("no_such_kernels")
    with pytest.raises(ValueError, match=r"no module 'jagbench.no_such'"):
        load("jagbench.no_such")


def test_an_object_that_is_not_in_the_module_is_named():
    with pytest.raises(ValueError, match=r"--impl=jagbench.reference:Fast.*no attribute 'Fast'"):
        load("jagbench.reference:Fast")


def test_an_import_error_inside_the_module_is_the_implementers_to_see(module):
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_absent"):
        load(module("broken_kernels", "import a_library_that_is_absent\n"))


def test_the_source_of_an_object_is_the_package_that_holds_it():
    variant = load("jagbench.impl.variants:v1")
    assert variant.source.__name__ == "jagbench.impl"
    assert load("jagbench.reference").source.__name__ == "jagbench.reference"
    assert of_functions("loose").source is None
