"""The examples of the two inner pages run, and every error that a user can see has its entry under Troubleshooting."""

import re
from pathlib import Path

import pytest
import torch

from jagg_fx import errors

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "jagg_fx" / "README.md", ROOT / "passes" / "README.md"]
BLOCKS = [
    pytest.param(page, block, id=f"{page.parent.name}-{n}")
    for page in PAGES
    for n, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_the_examples_run(page: Path, block: str) -> None:
    assert len(block.splitlines()) < 25
    torch.manual_seed(0)
    exec(compile(block, str(page), "exec"), {})


def test_every_page_has_an_example() -> None:
    assert {param.values[0] for param in BLOCKS} == set(PAGES)


def test_every_error_has_an_entry_and_every_entry_an_error() -> None:
    defined = {
        name
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, errors.JaggError) and thing.__module__ == errors.__name__
    } - {"JaggError"}
    _, _, entries = PAGES[0].read_text().partition("\n## Troubleshooting\n")
    headings = re.findall(r"^### (.+)$", entries, re.MULTILINE)
    assert len(headings) == len(set(headings)), "one entry each"
    assert set(headings) == defined
    texts = re.split(r"^### .+$", entries, flags=re.MULTILINE)[1:]
    assert all(text.strip() for text in texts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_lines_fit_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 130
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in target or (page.parent / target).exists(), target
