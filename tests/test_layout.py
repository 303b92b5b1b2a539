"""Rules of the house that a reader relies on."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [p for folder in ("jagg_fx", "passes", "models", "benchmarks") for p in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_torch_is_named_in_compat_alone(path: Path) -> None:
    if path.name == "_compat.py":
        return
    private = re.compile(
        r"(from|import)\s+(torch|functorch)\S*\._|torch\._(?!_version__|ops\b|dynamo\.mark_dynamic)|from torch import _"
    )
    lines = [line for line in path.read_text().splitlines() if private.search(line)]
    assert not lines


def test_passes_and_models_are_one_folder_each() -> None:
    assert (ROOT / "jagg_fx" / "passes").resolve() == ROOT / "passes"
    assert (ROOT / "jagg_fx" / "models").resolve() == ROOT / "models"


def test_importing_the_package_compiles_nothing_and_needs_no_extra() -> None:
    code = (
        "import sys; sys.modules['sklearn'] = sys.modules['matplotlib'] = sys.modules['tqdm'] = None\n"
        "import jagg_fx; assert 'jagg_fx.demo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
