"""A worker that says what a test has it say, in place of the interpreter `jagbench.run` starts."""

import json
import sys

import recording

#: Before a test puts another in its place.
PYTHON = sys.executable
PRELUDE = """#!{python} -IS
import copy, json, os, signal, sys, time

pipe, parent = map(int, sys.argv[3:5])
request = json.load(sys.stdin)
crash = json.loads({crash!r})


def say(line):
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    with open(pipe, "wb", closefd=False) as out:
        out.write(data + b"\\n")


def case(index, **who):
    made = copy.deepcopy(crash)
    made["case"]["workload"] = f"case-{{index}}"
    made["who"] |= who
    return made
"""


def install(folder, monkeypatch, code):
    """From now on workers run `code` after `PRELUDE`: no torch, no kernels, milliseconds."""
    crash = recording.tree(outcome="crashed", reason="the process died", timing=None)
    script = folder / "fake-python"
    script.write_text(PRELUDE.format(python=PYTHON, crash=json.dumps(crash)) + code)
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
