"""Every test starts from a Dynamo without compiled code, fixed seeds, and a cache of its own."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import jagg_fx  # noqa: F401

# No test depends on how fast a busy machine is.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")

_outcomes: dict[Any, bool] = {}  # of the compatibility table's cells


@pytest.fixture(autouse=True)
def _captured_whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the compiled path must not pass because `transform` settled for another one."""
    if not request.node.get_closest_marker("falls_back"):
        log = sys.modules["jagg_fx.transform"].log
        monkeypatch.setattr(log, "warning", lambda message, *args: pytest.fail(message % args))


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix", action="store_true", help="run the whole compatibility table, and write it into the README"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("inductor"):  # heavy compiles run one after the other, in one worker
            item.add_marker(pytest.mark.xdist_group("inductor"))
    if not config.getoption("--matrix"):
        left_out = [item for item in items if item.get_closest_marker("matrix")]
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, cell in report.user_properties:
        if name == "cell" and (report.when == "call" or report.failed):
            _outcomes[tuple(cell)] = report.passed  # type: ignore[arg-type]


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if session.config.getoption("--matrix") and _outcomes and not is_worker:
        from tests.compatibility import save

        save(_outcomes)
