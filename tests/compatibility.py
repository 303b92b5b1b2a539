"""The compatibility table in the README, made of what the tests of `test_matrix.py` found. Never written by hand."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import peft
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
    """Add what a run found to `RESULTS`, and write the table into the README.

    What other runs found under the same versions stays, so that a part of the table can be run again.
    """
    results = load(RESULTS) if RESULTS.exists() else {}
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "peft": peft.__version__}
    known = results if results.get("versions") == versions else {"passed": [], "failed": []}
    passed, failed = ({tuple(cell) for cell in known[name]} - set(outcomes) for name in ("passed", "failed"))
    for cell, has_passed in outcomes.items():
        (passed if has_passed else failed).add(cell)
    found = {"versions": versions, "passed": sorted(passed), "failed": sorted(failed)}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n\n{table(load(RESULTS))}\n\n{END}{after}")


def load(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def table(results: Mapping[str, Any]) -> str:
    """Features by families: "yes", "yes*" where Inductor was tried as well, "fails", or the number of a reason."""
    passed, failed = ({tuple(cell) for cell in results[name]} for name in ("passed", "failed"))
    reasons: list[str] = []

    def cell(feature: Feature, family: str) -> str:
        both = [(feature.name, family, lowering) for lowering in ("eager", "inductor")]
        if failed & set(both):
            return "fails"
        if both[0] not in passed:
            return "not run"
        if family in feature.unavailable:
            reason = feature.unavailable[family]
            if reason not in reasons:
                reasons.append(reason)
            return f"- ({reasons.index(reason) + 1})"
        return "yes*" if both[1] in passed else "yes"

    rows = [[feature.name, *(cell(feature, family) for family in zoo)] for feature in FEATURES]
    headers = ["", *(family.kind.__name__ for family in zoo.values())]
    notes = [f"({n}) {reason}" for n, reason in enumerate(reasons, start=1)]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines: Sequence[str] = (
        str(tabulate(rows, headers=headers, tablefmt="github")),
        "",
        f"yes: the gradient is the eager reference's and the values are unchanged, interpreted; yes*: through Inductor as well. "
        f"{'; '.join(notes)}. {versions}, on a CPU.",
    )
    return "\n".join(lines)
