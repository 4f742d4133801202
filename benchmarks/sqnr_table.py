"""Write the tables of docs/precision.md from results/sqnr/jagbench.reference.json.

    python benchmarks/sqnr_table.py            rewrite what lies between the markers
    python benchmarks/sqnr_table.py --check    fail if it is not what the record says

A figure is the mean over the seeds of the record.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "precision.md"
RECORD = ROOT / "results" / "sqnr" / "jagbench.reference.json"
BLOCK = re.compile(r"<!-- sqnr: (\w+) -->\n.*?<!-- sqnr ends -->", re.DOTALL)


@dataclass(frozen=True)
class Found:
    """A record, asked by table and case."""

    content: Mapping[str, Any]

    def value(self, table: str, name: str, **case: object) -> float:
        """Mean over seeds of the one row whose case holds `case`; ValueError if there is none."""
        rows = [
            row
            for row in self.content["rows"]
            if row["table"] == table and all(row["case"].get(n) == v for n, v in case.items())
        ]
        if len(rows) != 1:
            raise ValueError(f"{len(rows)} rows of {table} have {case}")
        values: list[float] = rows[0]["values"][name]
        return sum(values) / len(values)

    def cases(self, table: str, name: str) -> list[Any]:
        """Values of one name of the cases of a table, in their order."""
        found = [row["case"][name] for row in self.content["rows"] if row["table"] == table]
        return list(dict.fromkeys(found))


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def db(value: float) -> str:
    """Decibels with one place."""
    return f"{value:.1f}"


def share(value: float) -> str:
    """A share in per cent; 0 where it is exactly 0."""
    return "0" if value == 0 else f"{100 * value:.2g} %"


def _by_data(found: Found, table: str, of: str, extra: Sequence[str]) -> str:
    """SQNR by what was varied and data, with shares in brackets."""
    data = found.cases(table, "data")
    rows = []
    for one in found.cases(table, of):
        cells = []
        for law in data:
            case = {of: one, "data": law}
            shares = [share(found.value(table, name, **case)) for name in extra]
            cells.append(f"{db(found.value(table, 'sqnr_db', **case))} ({', '.join(shares)})")
        rows.append([str(one), *cells])
    return grid([of.replace("_", " "), *data], rows)


def scale_mode(found: Found) -> str:
    """SQNR, share saturated, share zeroed."""
    return _by_data(found, "scale_mode", "scale_mode", ("saturated", "zeroed"))


def block(found: Found) -> str:
    """SQNR and share zeroed."""
    return _by_data(found, "block", "block", ("zeroed",))


def elem_dtype(found: Found) -> str:
    """SQNR and share zeroed."""
    return _by_data(found, "elem_dtype", "elem_dtype", ("zeroed",))


def rounding(found: Found) -> str:
    """One draw, the mean of 64, and both biases."""
    rows = []
    for law in found.cases("rounding", "data"):
        for name in ("nearest", "stochastic"):
            case = {"data": law, "rounding": name}
            small = "–"
            if law != "normal":
                small = f"{100 * found.value('rounding', 'bias_of_small', **case):.1f} %"
            rows.append([
                f"{law}, {name}",
                db(found.value("rounding", "sqnr_db", **case)),
                db(found.value("rounding", "sqnr_of_mean_db", **case)),
                f"{100 * found.value('rounding', 'bias', **case):+.3f} %",
                small,
            ])  # fmt: skip
    return grid(["gradient", "one draw, dB", "mean of 64, dB", "bias", "bias of small ones"], rows)


def linear(found: Found) -> str:
    """Forward / input gradient by recipe and data."""
    data = found.cases("linear", "data")
    rows = [
        [
            name,
            *(
                f"{db(found.value('linear', 'forward_db', recipe=name, data=law))} / "
                f"{db(found.value('linear', 'input_gradient_db', recipe=name, data=law))}"
                for law in data
            ),
        ]
        for name in found.cases("linear", "recipe")
    ]
    return grid(["recipe", *data], rows)


def weight_gradient(found: Found) -> str:
    """By products and data."""
    data = found.cases("weight_gradient", "data")
    rows = [
        [
            name,
            *(
                db(found.value("weight_gradient", "sqnr_db", products=name, data=law))
                for law in data
            ),
        ]
        for name in found.cases("weight_gradient", "products")
    ]
    return grid(["operands", *data], rows)


def weight_scale(found: Found) -> str:
    """P / output by keys."""
    keys = found.cases("weight_scale", "keys")
    rows = [
        [
            {"block": "one a block", "fixed": "2^-8"}[name],
            *(
                f"{db(found.value('weight_scale', 'weights_db', keys=k, weight_scale=name))} / "
                f"{db(found.value('weight_scale', 'out_db', keys=k, weight_scale=name))}"
                for k in keys
            ),
        ]
        for name in ("block", "fixed")
    ]
    return grid(["scale of P", *(f"{k} keys" for k in keys)], rows)


def _products(found: Found, table: str) -> str:
    rows = []
    for row in found.content["rows"]:
        if row["table"] != table:
            continue
        case = row["case"]
        cells = [
            f"{db(found.value(table, f'{name}_db', **case))} "
            f"({found.value(table, f'{name}_cosine', **case):.4f})"
            for name in ("out", "dq", "dk", "dv")
        ]
        mask = "causal" if case["causal"] else "full"
        rows.append([case["recipe"], f"{case['tokens']}, d {case['dim']}, {mask}", *cells])
    return grid(["recipe", "tokens", "out", "dQ", "dK", "dV"], rows)


def attention(found: Found) -> str:
    """SQNR and cosine of output and gradients."""
    return _products(found, "attention")


def gdpa(found: Found) -> str:
    """SQNR and cosine of output and gradients."""
    return _products(found, "gdpa")


def norm(found: Found) -> str:
    """By data, block and what lies between."""
    data = found.cases("norm", "data")
    rows = []
    for shape in found.cases("norm", "block"):
        for name in ("float32", "bfloat16"):
            case = {"block": shape, "between": name}
            cells = (f"{found.value('norm', 'sqnr_db', data=law, **case):.2f}" for law in data)
            rows.append([f"{shape}, {name}", *cells])
    return grid(["block, between norm and codes", *data], rows)


def decisions(found: Found) -> str:
    """Every decision, where it comes from, and what it costs against its alternative."""

    def costs(table: str, name: str, of: str, a: str, b: str, law: str) -> str:
        ours, theirs = (found.value(table, name, **{of: c, "data": law}) for c in (a, b))
        return f"{theirs - ours:+.1f}"

    def modes(law: str) -> str:
        return costs("scale_mode", "sqnr_db", "scale_mode", "rceil", "floor", law)

    def weight(a: str, b: str, law: str = "normal") -> str:
        return costs("weight_gradient", "sqnr_db", "products", a, b, law)

    elem = costs("elem_dtype", "sqnr_db", "elem_dtype", "e4m3", "e5m2", "normal")
    squares = costs("block", "sqnr_db", "block", "1x32", "32x32", "normal")
    nearest = costs(
        "linear", "input_gradient_db", "recipe", "default", "gradients to nearest", "normal"
    )
    keys = {"keys": 512}
    fixed = found.value("weight_scale", "out_db", weight_scale="fixed", **keys)
    fixed -= found.value("weight_scale", "out_db", weight_scale="block", **keys)
    between = costs_of_norm(found)
    turned, plain = "transform of 32", "no transform"
    rows = [
        ["scales", "E8M0, RCEIL; FLOOR as `mxfp8_floor`",
         "arXiv 2506.08027; OCP MX 1.0 (FLOOR)",
         f"FLOOR {modes('normal')} (normal), {modes('outlier channels')} (outlier channels)"],
        ["blocks", "32 x 32 for weights, Q, K, dO, dS; 1 x 32 for P and linear activations",
         "ours: one quantisation serves both products", f"32 x 32 {squares} against 1 x 32"],
        ["element type", "E4M3 everywhere; E5M2 for gradients as an option",
         "arXiv 2506.08027", f"E5M2 {elem}"],
        ["weight gradient", "BF16; quantised in `mxfp8_wgrad_mx` and `mxfp8_no_rht`", "ours",
         f"quantised {weight('bf16', f'e4m3, {turned}, stochastic')} against bf16"],
        ["Hadamard transform", "32, operands of a quantised weight gradient alone",
         "arXiv 2509.25149 (16, FP4); the size is ours",
         f"spikes x16: E4M3 {weight(f'e4m3, {plain}', f'e4m3, {turned}', 'spikes x16')}, "
         f"E2M1 {weight(f'e2m1, {plain}', f'e2m1, {turned}', 'spikes x16')}; "
         f"normal, E4M3 {weight(f'e4m3, {plain}', f'e4m3, {turned}')}"],
        ["stochastic rounding", "gradients alone", "arXiv 2509.25149",
         f"to nearest {nearest} in dX, with a bias"],
        ["scale of P", "one a block; 2^-8 as an option",
         "facebookexperimental/triton (TLX) has 2^-8 in its backward",
         f"2^-8 {fixed:+.1f} in the output (512 keys)"],
        ["layers in BF16", "heads, over-arch, last block, embeddings, norms",
         "ours; the list is a field of the recipe", "judged by NE, not by SQNR"],
        ["norm and quantisation", "float32 goes to MX directly", "ours",
         f"bfloat16 between {between:+.2f}"],
    ]  # fmt: skip
    return grid(["decision", "here", "source", "the alternative, dB"], rows)


def costs_of_norm(found: Found) -> float:
    """What rounding to bfloat16 before quantising adds, dB."""
    case = {"data": "normal", "block": "1x32"}
    once = found.value("norm", "sqnr_db", between="float32", **case)
    return found.value("norm", "sqnr_db", between="bfloat16", **case) - once


def provenance(found: Found) -> str:
    """Where the record was made, and the largest difference between its seeds."""
    where, content = found.content["environment"], found.content
    spread = max(
        max(values) - min(values)
        for row in content["rows"]
        for name, values in row["values"].items()
        if name.endswith("db") and "log-normal" not in str(row["case"].get("data"))
        and row["table"] != "rounding"
    )  # fmt: skip
    seeds = ", ".join(map(str, content["seeds"]))
    return "\n".join([
        f"`{content['command']}`",
        f"at {where['commit'][:7]}, torch {where['torch']}, in {content['dtype']}. A figure is the "
        f"mean over seeds {seeds}, which",
        f"differ by {spread:.1f} dB at most (log-normal values and roundings apart).",
    ])  # fmt: skip


TABLES: Mapping[str, Callable[[Found], str]] = {
    one.__name__: one
    for one in (
        decisions, provenance, scale_mode, block, elem_dtype, rounding, linear, weight_gradient,
        weight_scale, attention, gdpa, norm,
    )
}  # fmt: skip


def page_of(text: str, found: Found) -> str:
    """The page with every block between markers written anew; ValueError where one is missing."""
    missing = set(TABLES) - set(BLOCK.findall(text))
    if missing:
        raise ValueError(f"the page has no block for {sorted(missing)}")

    def block_of(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- sqnr: {name} -->\n\n{TABLES[name](found)}\n\n<!-- sqnr ends -->"

    return BLOCK.sub(block_of, text)


def main() -> None:
    """Rewrite or check the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = PAGE.read_text()
    wanted = page_of(text, Found(json.loads(RECORD.read_text())))
    if options.check and wanted != text:
        sys.exit(f"{PAGE.name} is not what the record says; run benchmarks/sqnr_table.py")
    if not options.check:
        PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
