"""The `demo` command."""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from jagg_fx.commands.printing import print_json
from jagg_fx.demo import output
from jagg_fx.demo.train import Run, Settings

FULL = {"updates": 60, "more_seeds": 2, "groups": 8}
QUICK = {"updates": 3, "more_seeds": 0, "groups": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--updates", type=int, help=f"optimizer steps of each variant (default {FULL['updates']})")
    parser.add_argument(
        "--steps", type=int, default=10, help="sampling steps; the last one is not trained (default 10)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts, noise and task (default 0)")
    parser.add_argument(
        "--more-seeds",
        type=int,
        help=f"further seeds of the exact run, for the spread of its final reward (default {FULL['more_seeds']})",
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder of the results (default demo_out)")
    parser.add_argument(
        "--quick", action="store_true", help="interpret the graphs instead of compiling them, and fewer updates"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, and all else to stderr")


def settings_of(arguments: argparse.Namespace) -> Settings:
    defaults = QUICK if arguments.quick else FULL
    given = {name: value for name in defaults if (value := getattr(arguments, name, None)) is not None}
    settings = Settings(steps=arguments.steps, seed=arguments.seed, quick=arguments.quick, **{**defaults, **given})
    if settings.updates < 1 or settings.more_seeds < 0 or settings.steps < 4:
        raise ValueError("--updates is at least 1, --more-seeds at least 0 and --steps at least 4.")
    return settings


def main(arguments: argparse.Namespace) -> int:
    """Run the demo. Ctrl-C stops training and still prints and saves what was done."""
    settings, began = settings_of(arguments), time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # an empty cache, so that every variant's compile time is its own
        return run(settings, arguments.out, began, arguments.json)


def run(settings: Settings, out: Path, began: float, as_json: bool) -> int:
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        demo, interrupted = _run(settings)
        print(f"\n{output.table(demo)}\n")
        compiled = sum(v.compile_seconds for v in demo.variants if v.compile_seconds == v.compile_seconds)
        print(f"compile time {compiled:.0f} s of {time.perf_counter() - began:.0f} s in all")
        for file in output.save(demo, out):
            print(f"wrote {file}")
    if as_json:
        print_json(output.numbers(demo))
    return 130 if interrupted else 0


def _run(settings: Settings) -> tuple[Run, bool]:
    """What was done, and whether Ctrl-C ended it."""
    print("Task: digits that keep their class with the mean ink drawn to zero; 3 variants of one GRPO run.")
    demo = Run(settings)
    interrupted = False
    try:
        with tqdm(demo.variants, desc="compiling", unit="variant") as compiling:
            for variant in compiling:
                compiling.set_postfix_str(variant.name)
                demo.compile(variant)
        with tqdm(total=settings.updates * len(demo.variants), desc="training", unit="update") as bar:
            demo.train(bar)
        demo.finish()
        if settings.more_seeds:
            with tqdm(total=settings.updates * settings.more_seeds, desc="exact, more seeds", unit="update") as bar:
                demo.train_more_seeds(bar)
    except KeyboardInterrupt:
        interrupted = True
        print("\nStopped; this is what was done so far.")
    return demo, interrupted
