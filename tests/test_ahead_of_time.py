"""Every kernel compiles for the supported architectures, to the right instructions.

Each case for compute capability 9.0 and one other that its name decides, so that all cases
together cover every architecture; with JAGBENCH_ARCHITECTURES=all each for every one.
Each kernel and architecture is a test of its own, compiled in a process of its own. The harness is
tried first on toy kernels that are wrong in known ways.
"""

import dataclasses
import importlib.util
import os
import zlib

import pytest

from jagbench.ahead_of_time import (
    ARCHITECTURES,
    DEFAULT_CASES,
    CompileCase,
    CompileRecord,
    compiler,
    load_cases,
    problems,
)

CASES = load_cases(DEFAULT_CASES) if importlib.util.find_spec(DEFAULT_CASES) else {}
EVERY = os.environ.get("JAGBENCH_ARCHITECTURES") == "all"


def chosen(case: CompileCase) -> list[int]:
    """Architectures that a case is compiled for: minutes of a run hang on their number."""
    others = [arch for arch in case.architectures if arch != 90]
    if EVERY or not others:
        return list(case.architectures)
    other = others[zlib.crc32(case.name.encode()) % len(others)]
    return [arch for arch in case.architectures if arch in (90, other)]


@pytest.fixture(scope="module")
def kernels():
    with compiler(DEFAULT_CASES) as running:
        yield running


@pytest.fixture(scope="module")
def toys():
    with compiler("toy_compile_cases") as running:
        yield running


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        pytest.param(case, arch, id=f"{case.name}-sm_{arch}")
        for case in CASES.values()
        for arch in chosen(case)
    ],
)
def test_compiles_for(kernels, case, arch):
    assert not problems(case, kernels.compile(case.name, arch))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_product_uses_the_matrix_unit_of_its_architecture(toys, arch):
    case = load_cases("toy_compile_cases")["product-bf16"]
    record = toys.compile("product-bf16", arch)
    assert not problems(case, record)
    assert 0 < record.registers <= 255
    assert record.shared_bytes > 0
    assert record.num_warps == 4


def test_a_kernel_that_spills_is_reported_with_its_stack(toys):
    case = load_cases("toy_compile_cases")["crowded-fp32"]
    record = toys.compile("crowded-fp32", 90)
    assert record.stack_bytes > 0
    assert record.opcodes["STL"] > 0
    assert "spills" in problems(case, record)[0]
    assert not problems(dataclasses.replace(case, may_spill=True), record)


def test_a_type_the_architecture_lacks_is_an_error_in_the_record(toys):
    assert "fp8e4nv not supported" in str(toys.compile("product-fp8", 80).error)


def test_another_instruction_than_expected_is_reported(toys):
    case = load_cases("toy_compile_cases")["product-fp8"]
    assert "no HGMMA" in problems(case, toys.compile("product-fp8", 90))[0]


def test_a_gluon_kernel_uses_wgmma_and_tma(toys):
    case = load_cases("toy_compile_cases")["gluon-bf16"]
    record = toys.compile("gluon-bf16", 90)
    assert not problems(case, record)
    assert {"HGMMA", "UTMALDG"} <= set(record.opcodes)


def test_an_accumulator_touched_in_flight_is_reported(toys):
    case = load_cases("toy_compile_cases")["gluon-touched-bf16"]
    assert "wgmma is serialised" in problems(case, toys.compile("gluon-touched-bf16", 90))[0]


def test_a_further_opcode_that_is_missing_is_reported():
    case = CompileCase("k-bf16", "m:k", {}, {}, opcodes=("UTMALDG",))
    record = CompileRecord("k-bf16", 90, opcodes={"HGMMA": 1})
    assert problems(case, record) == ["no UTMALDG in the machine code (found {'HGMMA': 1})"]


def test_a_word_that_is_missing_in_the_ptx_is_reported(toys):
    case = load_cases("toy_compile_cases")["product-without-scales"]
    found = problems(case, toys.compile("product-without-scales", 90))
    assert found == ["no 'block_scale' in the PTX"]


def test_a_crash_is_reported_and_hides_no_other_case(toys):
    record = toys.compile("crash", 90)
    assert "SIGABRT" in str(record.error)
    assert "Cannot select" in str(record.error)
    assert toys.compile("product-bf16", 90).error is None


def test_a_case_that_leaves_out_arguments_names_them(toys):
    assert "['DTYPE', 'b', 'out']" in str(toys.compile("incomplete", 90).error)


def test_shared_memory_beyond_the_limit_is_reported_with_both_figures():
    case = CompileCase("k-bf16", "m:k", {}, {})
    record = CompileRecord("k-bf16", 120, shared_bytes=102400, opcodes={"HMMA": 1})
    assert problems(case, record) == ["102400 B of shared memory, limit 101376 B"]
