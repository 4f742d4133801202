"""Published figures: what others say they measured, kept apart from what was measured here.

A claim is an annotation of a chart. It is never a record, never a baseline of a comparison and
never decides whether a test passes: a measurement is refused by `read`, and a claim by
`jagbench.result.Record`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from jagbench.result import Model, NotNegative, Positive, Region

#: "ratio" is speed over the baseline's speed; "share" the part of the time a unit was busy.
Quantity = Literal["TFLOP/s", "TB/s", "ms", "ratio", "share"]

#: ISO date, or year and month where no more was published.
Date = Annotated[str, Field(pattern=r"^\d{4}-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?$")]
Text = Annotated[str, Field(min_length=1)]


class Claim(Model):
    """One published figure.

    source: short name of the publication; date: of the publication; citation: title or address.
    hardware: folder name of the device ("nvidia-b200").
    case: shape and conditions as published; workload: the one of the catalogue that has this
        shape, None where none has.
    baseline: what a ratio is over.
    tolerance: half width, in the unit of the value, within which the figure is known.
    note: what a reader must know: power cap, how the value was read, what it does not say.
    """

    claim_version: Literal[1] = 1
    source: Text
    date: Date
    citation: Text
    hardware: Text
    implementation: Text
    operator: Text
    case: Text
    workload: str | None = None
    region: Region
    quantity: Quantity
    value: Positive
    baseline: str | None = None
    tolerance: NotNegative | None = None
    dtype: str | None = None
    note: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Claim:
        if (self.quantity == "ratio") != (self.baseline is not None):
            raise ValueError("a ratio has a baseline, and nothing else has one")
        if self.quantity == "share" and self.value > 1:
            raise ValueError(f"a share is at most 1, got {self.value}")
        return self


def read(path: Path) -> list[Claim]:
    """Claims of a JSON-lines file, in its order; empty lines are skipped.

    Raises ValueError, with the number of the line, for a measurement and for anything else that is
    no claim.
    """
    claims = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            claims.append(Claim.model_validate_json(line))
        except ValidationError as error:
            raise ValueError(f"{path.name}, line {number}: {_problem(line, error)}") from error
    return claims


def _problem(line: str, error: ValidationError) -> str:
    try:
        content = json.loads(line)
    except ValueError:
        return "not JSON"
    if isinstance(content, dict) and "schema_version" in content:
        return "this is a measurement, not a claim"
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the claim"
    return f"{place}: {first['msg']}"
