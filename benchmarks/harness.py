"""What the benchmarks share: options, alternated timing, ratios within a round, fresh processes, tables, results.

Updates are timed A B A B in one process, after a warm-up in which the variants compile, and compared within a round, so that a
slow minute of the machine slows all of them. What a process can do only once (a cold compile, a peak) has a fresh one for each
case. The same code runs on a CPU and on a GPU: clocks wait for the device.
"""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from jagg_fx.demo.measure import Clock, synchronize

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    options.add_argument("--device", type=_device, default=default, help=f"cpu or cuda (default here: {default})")
    options.add_argument("--quick", action="store_true", help="tiny models, few runs: shows that it works")
    options.add_argument(
        "--out", type=Path, help="JSON file of the numbers (default: in results/, but for --quick none)"
    )
    return options


def _device(name: str) -> str:
    if name not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{name!r}: choose cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no CUDA device; leave it out to run on the CPU")
    return name


def positive(text: str) -> int:
    """An argument that is a positive number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a positive number")
    return int(text)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


@dataclass(frozen=True)
class Times:
    """Seconds of one variant, by what was measured: of the first run, which compiles, and of every round."""

    first: float
    rounds: dict[str, list[float]]

    def spread(self, name: str) -> Spread:
        return Spread.of(self.rounds[name])

    def speedup(self, base: "Times", name: str) -> Spread:
        """How many times as fast as `base`, within each round."""
        return Spread.of([theirs / own for own, theirs in zip(self.rounds[name], base.rounds[name], strict=True)])


def alternate(
    variants: Mapping[str, Callable[[Clock], object]], rounds: int, warm_up: int = 2, total: str = "update"
) -> dict[str, Times]:
    """Run each variant `warm_up` times, then one of each in turn, for so many rounds.

    Args:
        variants: each measures its parts with the clock it is given.
        rounds: of measured runs.
        warm_up: runs of each beforehand, at least 1.
        total: name under which the sum of a run's parts is kept.
    """
    first: dict[str, float] = {}
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    with tqdm(total=len(variants) * (warm_up + rounds), unit="run", file=sys.stderr) as bar:
        for name, run in variants.items():
            bar.set_postfix_str(f"first run of {name}")
            began = time.perf_counter()
            run(Clock())
            synchronize()
            first[name] = time.perf_counter() - began
            for _ in range(warm_up - 1):
                run(Clock())
            bar.update(warm_up)
        for _ in range(rounds):
            for name, run in variants.items():
                bar.set_postfix_str(name)
                watch = Clock()
                run(watch)
                parts = {part: sum(seconds) for part, seconds in watch.seconds.items()}
                for part, seconds in {**parts, total: sum(parts.values())}.items():
                    measured[name].setdefault(part, []).append(seconds)
                bar.update()
    return {name: Times(first[name], measured[name]) for name in variants}


def in_fresh_process(
    module: str,
    function: str,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **arguments: Any,
) -> Any:
    """`module.function(**arguments)` in a process of its own; arguments and result are JSON.

    Raises:
        RuntimeError: it failed, with the end of what it wrote, or took longer than `timeout` seconds.
    """
    code = (
        "import importlib, json, sys\n"
        f"result = getattr(importlib.import_module({module!r}), {function!r})(**json.loads(sys.argv[1]))\n"
        "print('\\n' + json.dumps(result))"
    )
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    variables = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{module}.{function}({arguments}) took longer than {timeout:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"{module}.{function}({arguments}) failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def cause(error: Exception) -> str:
    """What went wrong, in one line: of an error in another process, the last line of its traceback that names one."""
    named = [line for line in str(error).splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (named[-1] if named else f"{type(error).__name__}: {error}".splitlines()[0])[:160]


def environment(device: str) -> dict[str, Any]:
    """Versions and hardware."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Of the sources, with a + if they were changed since; None outside of a repository."""
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def caption(device: str) -> str:
    e = environment(device)
    return f"torch {e['torch']}, {e['device']}, {e['cores']} cores, {e['threads']} threads."


def publish(name: str, arguments: argparse.Namespace, results: Mapping[str, Any], table: str, note: str) -> None:
    """Print what a finished run found, and write it beside its numbers, as `.md`."""
    text = f"{table}\n\n{note}"
    print(text)
    if out := save(name, arguments, results):
        out.with_suffix(".md").write_text(f"    {_command()}\n\n{text}\n")
        print(f"\nwrote {out} and {out.with_suffix('.md')}")


def save(name: str, arguments: argparse.Namespace, results: Mapping[str, Any]) -> Path | None:
    """Write the numbers with what they were measured on; returns the file, None for a quick run without `--out`."""
    if arguments.quick and not arguments.out:
        return None
    out: Path = arguments.out or RESULTS / f"{name}_{arguments.device}.json"
    payload = {
        "command": _command(),
        "environment": environment(arguments.device),
        **results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(payload), parse_float=lambda text: float(f"{float(text):.5g}"))
    out.write_text(json.dumps(rounded, indent=1) + "\n")
    return out


def _command() -> str:
    return shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
