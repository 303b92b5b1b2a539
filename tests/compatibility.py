"""The compatibility table in the README, made of what the tests of `test_matrix.py` found. Never written by hand."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from jagg_fx.models.zoo import zoo
from tests.matrix import FEATURES, Feature

RESULTS = Path(__file__).with_name("compatibility.json")
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- compatibility: written by `make test-matrix` -->", "<!-- end of compatibility -->"

Cell = tuple[str, str, str]  # feature, family, lowering


def cells_of(features: Iterable[Feature], families: Iterable[str]) -> list[Cell]:
    families = list(families)
    return [(feature.name, family, "eager") for feature in features for family in families]


def save(outcomes: Mapping[Cell, bool]) -> None:
    """Write what a whole run found to `RESULTS`, and the table into the README."""
    import diffusers
    import peft

    results = {
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "peft": peft.__version__,
        "cells": [list(cell) for cell in sorted(outcomes)],
        "failed": [list(cell) for cell, passed in sorted(outcomes.items()) if not passed],
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n\n{table(load(RESULTS))}\n\n{END}{after}")


def load(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def table(results: Mapping[str, Any]) -> str:
    """Features by families: "yes", "yes*" where Inductor was tried as well, "fails", or the number of a reason."""
    passed = {tuple(cell) for cell in results["cells"]} - {tuple(cell) for cell in results["failed"]}
    reasons: list[str] = []

    def cell(feature: Feature, family: str) -> str:
        if (feature.name, family, "eager") not in passed:
            return "fails"
        if family in feature.unavailable:
            reason = feature.unavailable[family]
            if reason not in reasons:
                reasons.append(reason)
            return f"- ({reasons.index(reason) + 1})"
        return "yes*" if (feature.name, family, "inductor") in passed else "yes"

    rows = [[feature.name, *(cell(feature, family) for family in zoo)] for feature in FEATURES]
    headers = ["", *(family.kind.__name__ for family in zoo.values())]
    notes = [f"({n}) {reason}" for n, reason in enumerate(reasons, start=1)]
    versions = f"torch {results['torch']}, diffusers {results['diffusers']}, peft {results['peft']}, on a CPU"
    lines: Sequence[str] = (
        str(tabulate(rows, headers=headers, tablefmt="github")),
        "",
        f"yes: the gradient is the eager reference's and the values are unchanged, interpreted; yes*: through Inductor as well. "
        f"{'; '.join(notes)}. {versions}.",
    )
    return "\n".join(lines)
