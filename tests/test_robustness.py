"""What goes on around a transformed function: processes that are killed or share a cache, threads, thousands of updates."""

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import jagg_fx
from tests.problems import Problem, relative_error
from tests.robustness_worker import STEPS, small

KNOTS = (0, 2)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"lowering": "eager", "capture": "whole", "knots": KNOTS},
    "denoiser": {"lowering": "eager", "capture": "denoiser", "knots": KNOTS},
    "reference": {"lowering": "reference", "knots": KNOTS},
}


class Process:
    """A process that compiles a small function through Inductor, in a cache of its own or a shared one."""

    def __init__(self, cache: Path, name: str) -> None:
        self.cache, self._file = cache, cache.parent / f"{cache.name}_{name}.pt"
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-m", "tests.robustness_worker", str(self._file)]
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)

    def kill_while_it_compiles(self) -> None:
        """SIGKILL, also to the compiler that it has started for code of which there is no library yet."""
        while not 2 <= self._count("so") < self._count("cpp"):
            assert self._process.poll() is None, "it ended before it was killed"
            time.sleep(0.01)
        self.stop()
        assert not self._file.exists()

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def gradient(self) -> Tensor:
        """What it computed, twice the same and as the reference does."""
        assert self._process.wait(timeout=400) == 0
        first, second, reference = torch.load(self._file)
        assert torch.equal(first, second)
        assert relative_error(first, reference) < 1e-6
        return first  # type: ignore[no-any-return]

    def _count(self, ending: str) -> int:
        return sum(1 for _ in self.cache.rglob(f"*.{ending}"))


@pytest.mark.inductor
def test_processes_that_are_killed_and_that_share_a_cache_give_the_same_gradient_to_the_bit(tmp_path: Path) -> None:
    started: list[Process] = []

    def start(cache: str, name: str) -> Process:
        started.append(Process(tmp_path / cache, name))
        return started[-1]

    try:
        start("killed", "first").kill_while_it_compiles()
        at_once = [start("shared", name) for name in ("one", "other")]
        restarted = start("killed", "second").gradient()
        for process in at_once:
            assert torch.equal(process.gradient(), restarted)
    finally:
        for process in started:
            process.stop()


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """What the calls return, all of them begun at once."""
    barrier, results = threading.Barrier(len(calls)), [None] * len(calls)

    def run(n: int) -> None:
        barrier.wait()
        try:
            results[n] = calls[n]()
        except Exception as error:
            results[n] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("way", WAYS)
def test_one_function_in_two_threads(way: str) -> None:
    """After it was compiled; each thread with inputs of its own."""
    first = small()
    problems = [first, replace(first, args=small().args)]
    fast = jagg_fx.transform(first.fn, **WAYS[way])
    want = [problem.run(fast)[1] for problem in problems]

    def several(problem: Problem) -> list[Tensor]:
        return [problem.run(fast)[1] for _ in range(50)]

    results = in_threads([functools.partial(several, problem) for problem in problems])
    for gradients, expected in zip(results, want, strict=True):
        assert not isinstance(gradients, Exception), repr(gradients)
        assert all(torch.equal(gradient, expected) for gradient in gradients)
    assert "forward" not in vars(first.model)


@pytest.mark.parametrize("way", WAYS)
def test_two_functions_in_two_threads(way: str) -> None:
    """Not compiled before, over models of their own."""
    problems = [small(), small()]
    want = [problem.run(jagg_fx.transform(problem.fn, **WAYS["reference"]))[1] for problem in problems]
    transformed = [jagg_fx.transform(problem.fn, **WAYS[way]) for problem in problems]
    calls = [functools.partial(problem.run, fast) for problem, fast in zip(problems, transformed, strict=True)]
    for result, expected in zip(in_threads(calls), want, strict=True):
        assert not isinstance(result, Exception), repr(result)
        assert relative_error(result[1], expected) < 1e-6
    assert all("forward" not in vars(problem.model) for problem in problems)


def one_update(way: str) -> Callable[[], None]:
    problem = small()
    optimizer = torch.optim.SGD(problem.parameters, lr=1e-3)
    fast = jagg_fx.transform(problem.fn, **WAYS["whole"])
    wrapped, (z, t) = jagg_fx.wrap(problem.model, num_steps=STEPS, knots=KNOTS), problem.args

    def update() -> None:
        if way == "wrap":
            for i in range(STEPS):
                wrapped(z[i], t[i]).sum().backward()
        else:
            fast(z, t).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "wrap"])
def test_a_thousand_updates_keep_no_memory(way: str) -> None:
    update = one_update(way)

    def after(count: int) -> tuple[int, int, int]:
        """How many tensors and objects there are, and the bytes of the process."""
        for _ in range(count):
            update()
        gc.collect()
        objects = gc.get_objects()
        tensors = sum(issubclass(type(item), Tensor) for item in objects)
        return tensors, len(objects), psutil.Process().memory_info().rss

    tensors, objects, resident = after(100)
    tensors_later, objects_later, resident_later = after(1000)
    assert tensors_later == tensors
    assert objects_later - objects < 10
    assert resident_later - resident < 1000 * 4096, "4 KiB an update: what Python does not see of torch's own objects"
