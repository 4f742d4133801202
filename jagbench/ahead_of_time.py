"""Compile Triton kernels for GPUs that are not there, and look at what came out.

The triton wheel carries ptxas and a disassembler, so registers, spills, shared memory and matrix
instructions of every supported architecture can be checked on a machine without a GPU. It proves
that a kernel compiles to the right instructions; not that it is right or fast.

A kernel that defeats the compiler may take the process with it, so every kernel and architecture
is compiled in a process of its own, forked from a server that has imported torch and the kernels
once. From the command line (one JSON record a line):

    python -m jagbench.ahead_of_time --case gdpa_forward-bf16-d128 --arch 90
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from jagbench.pipelines import early_releases, overwritten_operands

#: Compute capabilities: Ampere, Hopper, Blackwell (data centre), Blackwell (workstation).
ARCHITECTURES = (80, 90, 100, 120)
#: Bytes of shared memory a thread block may use (CUDA C++ Programming Guide, compute capabilities).
SHARED_LIMITS: Mapping[int, int] = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
#: SASS opcode of a 16-bit (or tf32) matrix product: mma.sync, wgmma, tcgen05.mma, mma.sync.
MATRIX_OPCODES: Mapping[int, str | None] = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
#: SASS opcodes that a record counts: matrix products, copies to shared memory (LDGSTS is cp.async,
#: UTMA* are TMA, USETMAXREG is setmaxnreg), conversions to narrow floats in pairs, loads and stores
#: of 16 bytes a thread, and the local loads and stores that a spill makes.
OPCODES = (
    *("HMMA", "IMMA", "DMMA", "QMMA", "OMMA", "HGMMA", "QGMMA", "IGMMA"),
    *("UTCHMMA", "UTCQMMA", "UTCOMMA", "LDGSTS", "UTMALDG", "UTMASTG", "UTMAREDG", "USETMAXREG"),
    *("F2FP", "LDG.E.128", "STG.E.128", "STL", "LDL"),
)
#: Module with the compile cases of the project's own kernels.
DEFAULT_CASES = "jagbench.impl.kernels.compile_cases"
#: Seconds one kernel may take to compile for one architecture.
TIME_LIMIT = 120.0


@dataclass(frozen=True)
class CompileCase:
    """One kernel with the types and constants it is launched with, and what must come of it.

    A module offers its cases as `CASES: tuple[CompileCase, ...]`.

    name: unique in the module; kernel, dtype, then what sets it apart ("gdpa_forward-bf16-d128").
    kernel: `package.module:attribute` of a `@triton.jit` or `@gluon.jit` function (autotune and
        heuristics wrappers are looked through).
    signature: run-time argument -> Triton type ("*bf16", "i32", "fp32"), in any order; a host
        descriptor of a Gluon kernel is "tensordesc<bf16[64, 128]>", with that block's own layout.
    constexprs: every other argument -> its value; None for an absent pointer, 1 for a unit stride,
        as a launch would specialise them.
    aligned: run-time arguments divisible by 16, as a launch finds pointers and strides to be.
    dtype: element type, for reading.
    architectures: compute capabilities to compile for.
    matrix_opcode: architecture -> SASS opcode that must occur; None where no matrix unit is used.
    opcodes: further SASS opcodes (of `OPCODES`) that must occur.
    ptx: words that must occur in the PTX ("block_scale": its scales are applied by the hardware).
    max_registers: registers a thread at launch, where the launch sets them.
    may_spill: whether registers may be spilled to local memory, without limit.
    spill_limit: bytes of stack a thread that may be spilled where may_spill is not set.
    shared_limit: architecture -> bytes of shared memory allowed.
    """

    name: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    dtype: str = "bf16"
    architectures: tuple[int, ...] = ARCHITECTURES
    matrix_opcode: Mapping[int, str | None] = field(default_factory=lambda: MATRIX_OPCODES)
    opcodes: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()
    max_registers: int | None = None
    may_spill: bool = False
    spill_limit: int = 0
    shared_limit: Mapping[int, int] = field(default_factory=lambda: SHARED_LIMITS)


@dataclass(frozen=True)
class CompileRecord:
    """What the compiler made of one case on one architecture.

    error: None, or what went wrong: the exception, the signal, the end of the compiler's output.
    registers: a thread; stack_bytes, local_bytes: a thread, beyond registers.
    shared_bytes: a thread block; num_warps: as compiled (warp specialisation adds some).
    opcodes: SASS opcode of `OPCODES` -> occurrences, those that occur.
    missing_ptx: words of the case's `ptx` that do not occur.
    advice: what ptxas says of serialised wgmma (C7510 to C7514), Gluon kernels only.
    overwritten: what a copy may overwrite while it is read (`pipelines`).
    """

    case: str
    arch: int
    error: str | None = None
    registers: int = 0
    stack_bytes: int = 0
    local_bytes: int = 0
    shared_bytes: int = 0
    num_warps: int = 0
    opcodes: Mapping[str, int] = field(default_factory=dict)
    missing_ptx: tuple[str, ...] = ()
    advice: str = ""
    overwritten: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def spilled(self) -> bool:
        """Whether the kernel keeps anything of a thread in local memory."""
        used = self.stack_bytes + self.local_bytes
        return used > 0 or "STL" in self.opcodes or "LDL" in self.opcodes


def load_cases(module: str) -> Mapping[str, CompileCase]:
    """Cases of a module by name. Raises ValueError if a name occurs twice."""
    cases: Sequence[CompileCase] = importlib.import_module(module).CASES
    twice = [name for name, count in Counter(case.name for case in cases).items() if count > 1]
    if twice:
        raise ValueError(f"{module}: compile cases named twice: {', '.join(twice)}")
    return {case.name: case for case in cases}


def problems(case: CompileCase, record: CompileRecord) -> list[str]:
    """What a record breaks of its case's expectations, in words; empty if nothing."""
    if record.error is not None:
        return [f"does not compile: {record.error}"]
    found = []
    wanted = (case.matrix_opcode[record.arch], *case.opcodes)
    for opcode in (name for name in wanted if name is not None):
        if opcode not in record.opcodes:
            found.append(f"no {opcode} in the machine code (found {dict(record.opcodes)})")
    found.extend(f"no {word!r} in the PTX" for word in record.missing_ptx)
    if record.advice:
        found.append(f"wgmma is serialised: {record.advice}")
    found.extend(f"race: {operand}" for operand in record.overwritten)
    if record.spilled and not case.may_spill and record.stack_bytes > case.spill_limit:
        found.append(
            f"spills: stack {record.stack_bytes} B, local {record.local_bytes} B a thread, "
            f"{record.opcodes.get('STL', 0)} stores and {record.opcodes.get('LDL', 0)} loads, "
            f"{record.registers} registers"
        )
    limit = case.shared_limit[record.arch]
    if record.shared_bytes > limit:
        found.append(f"{record.shared_bytes} B of shared memory, limit {limit} B")
    return found


def compile_here(case: CompileCase, arch: int) -> CompileRecord:
    """Compile in this process. Raises whatever the compiler raises; may end the process."""
    import triton
    from triton.backends.compiler import GPUTarget

    start = time.perf_counter()
    kernel = _kernel(case.kernel)
    missing = set(kernel.arg_names) - set(case.signature) - set(case.constexprs)
    unknown = (set(case.signature) | set(case.constexprs)) - set(kernel.arg_names)
    if missing or unknown:
        raise ValueError(
            f"{case.name}: arguments missing {sorted(missing)}, unknown {sorted(unknown)}"
        )
    source, options = _source(case, kernel)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage, opcodes = _inspect(compiled.asm["cubin"])
    check = early_releases if kernel.is_gluon() else overwritten_operands
    return CompileRecord(
        case=case.name,
        arch=arch,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        local_bytes=usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        opcodes=opcodes,
        missing_ptx=tuple(word for word in case.ptx if word not in compiled.asm["ptx"]),
        advice=_advice(compiled.asm["ptx"], arch) if kernel.is_gluon() else "",
        overwritten=tuple(check(compiled.asm["ttgir"])),
        seconds=round(time.perf_counter() - start, 3),
    )


def _source(case: CompileCase, kernel: Any) -> tuple[Any, dict[str, Any]]:
    """What `triton.compile` takes of a case: the source and the options."""
    from triton.compiler import ASTSource

    options: dict[str, Any] = {"num_warps": case.num_warps}
    signature = {name: case.signature.get(name, "constexpr") for name in kernel.arg_names}
    kind: Any = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        kind = GluonASTSource
        signature = {name: _with_layout(text) for name, text in signature.items()}
    else:
        options["num_stages"] = case.num_stages
    if case.max_registers is not None:
        options["maxnreg"] = case.max_registers
    source = kind(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(n),): value for n, value in case.constexprs.items()},
        attrs={(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in case.aligned},
    )
    return source, options


def _with_layout(text: str) -> str:
    """A descriptor's type with the shared-memory layout of its block, as a Gluon launch writes it.

    Other types are returned as they are.
    """
    from triton.experimental.gluon import language as gl

    found = re.fullmatch(r"tensordesc<(\w+)\[([\d, ]+)\]>", text)
    if found is None:
        return text
    element = {
        "bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32, "fp8e4nv": gl.float8e4nv
    }[found[1]]  # fmt: skip
    block = [int(size) for size in found[2].split(",")]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return f"{text[:-1]},{layout!r}>"


def _advice(ptx: str, arch: int) -> str:
    """Lines of ptxas about wgmma that it could not leave asynchronous; "" if there are none."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        command = [str(tools / "ptxas"), "-v", f"-arch=sm_{arch}a", str(file)]
        text = _output(*command, "-o", str(Path(folder, "kernel.cubin")))
    return "; ".join(line for line in text.splitlines() if re.search(r"C751[0-4]", line))


def _kernel(path: str) -> Any:
    """The `JITFunction` at `module:attribute`, out of its autotune and heuristics wrappers."""
    from triton.runtime.jit import JITFunction

    module, _, attribute = path.partition(":")
    kernel = getattr(importlib.import_module(module), attribute)
    while not isinstance(kernel, JITFunction):
        if not hasattr(kernel, "fn") or "Interpreted" in type(kernel).__name__:
            raise TypeError(f"{path} is {type(kernel).__name__}, not a kernel that can be compiled")
        kernel = kernel.fn
    return kernel


def _inspect(cubin: bytes) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Resource usage (REG, STACK, SHARED, LOCAL) and opcode counts of a cubin with one kernel."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(str(tools / "cuobjdump"), "-res-usage", file.name)
        assembly = _output(str(tools / "nvdisasm"), "-c", file.name)
    figures = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if figures is None:
        raise RuntimeError(f"cuobjdump told no resource usage: {usage[-500:]!r}")
    names = ("REG", "STACK", "SHARED", "LOCAL")
    found = Counter(re.findall(rf"\b({'|'.join(map(re.escape, OPCODES))})\b", assembly))
    return dict(zip(names, map(int, figures.groups()), strict=True)), dict(sorted(found.items()))


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def compile_apart(case: CompileCase, arch: int, time_limit: float = TIME_LIMIT) -> CompileRecord:
    """Compile in a forked process with a fresh Triton cache; whatever happens there is a record."""
    with tempfile.TemporaryDirectory(prefix="jagbench-aot-") as folder:
        log, result = Path(folder, "log"), Path(folder, "record")
        child = os.fork()
        if child == 0:
            _compile_and_exit(case, arch, log, result)
        status = _wait(child, time_limit)
        if status is None:
            return CompileRecord(case.name, arch, f"not done after {time_limit:.0f} s")
        if status == 0 and result.exists():
            return CompileRecord(**json.loads(result.read_text()))
        text = log.read_text(errors="replace")[-2000:].strip() if log.exists() else ""
        if status < 0:
            text = f"killed by {signal.Signals(-status).name}; its output ended: {text}"
        return CompileRecord(case.name, arch, text or f"exit status {status}")


def _compile_and_exit(case: CompileCase, arch: int, log: Path, result: Path) -> None:
    """Body of the forked process: never returns."""
    status = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        # A stale cache would hide a failure.
        os.environ["TRITON_CACHE_DIR"] = str(log.with_name("cache"))
        record = compile_here(case, arch)
        result.write_text(json.dumps(dataclasses.asdict(record)))
        status = 0
    except BaseException as error:  # told to the parent, whatever it is
        print("".join(traceback.format_exception_only(error)), file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int, time_limit: float) -> int | None:
    """Exit status of a child (negative signal number if killed); None if it had to be stopped."""
    deadline = time.monotonic() + time_limit
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class Compiler:
    """A running compile server; see `compiler`."""

    def __init__(self, process: subprocess.Popen[str], cases: str) -> None:
        self._process = process
        self._cases = cases

    def compile(self, case: str, arch: int) -> CompileRecord:
        """Record of a case of the server's module. Raises RuntimeError if the server is gone."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(f"{case} {arch}\n")
            requests.flush()
            answer = _read_line(answers, TIME_LIMIT + 60)
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(
                f"the compile server for {self._cases} is gone (its output is above)"
            )
        return CompileRecord(**json.loads(answer))


def _read_line(stream: IO[str], seconds: float) -> str:
    """A line from a pipe; "" at its end or when none came in time."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(seconds) else ""


@contextmanager
def compiler(cases: str = DEFAULT_CASES) -> Iterator[Compiler]:
    """Start a compile server for the cases of a module, and stop it at the end.

    The server runs without Triton's interpreter, whatever this process does.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "jagbench.ahead_of_time", "--cases", cases, "--serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        yield Compiler(process, cases)
        assert process.stdin is not None
        process.stdin.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the cases asked for, print a JSON record a line; 0 if all meet their expectations."""
    parser = argparse.ArgumentParser(prog="python -m jagbench.ahead_of_time")
    parser.add_argument("--cases", default=DEFAULT_CASES, help="module with CASES")
    parser.add_argument("--case", help="name of one case (default: all)")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, help="default: all")
    parser.add_argument("--serve", action="store_true", help="read 'case arch' lines from stdin")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("unset TRITON_INTERPRET: the interpreter's functions cannot be compiled")
    cases = load_cases(options.cases)
    for case in cases.values():
        _preload(case)
    if options.serve:
        return _serve(cases)
    if options.case is not None and options.case not in cases:
        parser.error(f"no case {options.case!r} in {options.cases}: {', '.join(cases)}")
    failed = False
    for case in [cases[options.case]] if options.case else cases.values():
        for arch in [options.arch] if options.arch else case.architectures:
            record = compile_apart(case, arch)
            broken = problems(case, record)
            failed |= bool(broken)
            print(json.dumps({**dataclasses.asdict(record), "problems": broken}), flush=True)
    return int(failed)


def _serve(cases: Mapping[str, CompileCase]) -> int:
    """Answer each line "case arch" on stdin with a record, until stdin ends."""
    for line in sys.stdin:
        name, arch = line.split()
        print(json.dumps(dataclasses.asdict(compile_apart(cases[name], int(arch)))), flush=True)
    return 0


def _preload(case: CompileCase) -> None:
    """Import a kernel's module ahead of the forks; a failure is told when the case is compiled."""
    try:
        importlib.import_module(case.kernel.partition(":")[0])
    except Exception:
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
