"""Does compile time grow with the number of steps?

    python -m benchmarks.compile_time

Compiles the first forward and backward of a replay of the digits DiT (the log-probs of every step) at several numbers of
steps, each in a fresh process with an empty cache: plain torch.compile with the denoiser as a nested region ("exact"), and
jagg_fx at W=4. Prints a table and, with `--out`, writes the numbers as JSON.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

VARIANTS = ("exact", "W=4")


def measure(variant: str, steps: int, batch: int, quick: bool) -> float:
    """Seconds of the first forward and backward in this process."""
    import time

    import torch

    from jagg_fx import transform
    from jagg_fx.demo.train import SAMPLER
    from jagg_fx.models.digits_dit import DigitsDiT, load_digits_dit
    from jagg_fx.models.samplers import replay, rollout, schedule

    model = DigitsDiT(dim=32, depth=1, heads=2) if quick else load_digits_dit()
    sigmas, labels = schedule(steps + 1), torch.arange(batch) % 10
    latents = rollout(model, SAMPLER, torch.randn(batch, 1, 8, 8), sigmas, labels).latents
    region = torch.compiler.nested_compile_region(lambda x, t, labels: model(x, t, labels))
    denoiser = region if variant == "exact" else model

    def log_probs(latents: torch.Tensor, sigmas: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return replay(denoiser, SAMPLER, latents, sigmas, labels).log_probs

    function = torch.compile(log_probs, fullgraph=True) if variant == "exact" else transform(log_probs, denoiser=model)
    began = time.perf_counter()
    function(latents[: steps + 1], sigmas[: steps + 1], labels).sum().backward()
    return time.perf_counter() - began


def in_fresh_process(variant: str, steps: int, batch: int, quick: bool) -> float:
    command = [sys.executable, "-m", "benchmarks.compile_time", "--one", variant, "--steps", str(steps)]
    command += ["--batch", str(batch)] + (["--quick"] if quick else [])
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(result.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[6, 18], help="replayed steps to compare (default 6 18)"
    )
    parser.add_argument("--repeats", type=int, default=2, help="runs of each, in turn; the median counts (default 2)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="one small block instead of the digits DiT, one repeat")
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(measure(args.one, args.steps[0], args.batch, args.quick))
        return

    import statistics

    import torch
    from tabulate import tabulate
    from tqdm import tqdm

    cases = [(variant, steps) for variant in VARIANTS for steps in args.steps]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    with tqdm(total=len(cases) * (1 if args.quick else args.repeats), unit="compile") as bar:
        for _ in range(1 if args.quick else args.repeats):
            for case in cases:
                bar.set_postfix_str(f"{case[0]}, {case[1]} steps")
                seconds[case].append(in_fresh_process(*case, args.batch, args.quick))
                bar.update()
    medians = {case: statistics.median(values) for case, values in seconds.items()}
    rows = []
    for variant in VARIANTS:
        times = [medians[variant, steps] for steps in args.steps]
        rows.append([variant, *(f"{t:.1f} s" for t in times), f"{times[-1] / times[0]:.2f}"])
    headers = ["", *(f"{steps} steps" for steps in args.steps), f"ratio {args.steps[-1]} : {args.steps[0]}"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    print(
        f"\nFirst forward and backward, empty cache, fresh process; torch {torch.__version__}, {os.cpu_count()} cores."
    )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        payload = {
            "command": f"python -m benchmarks.compile_time --steps {' '.join(map(str, args.steps))} --repeats {args.repeats}",
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "seconds": {f"{variant}, {steps} steps": values for (variant, steps), values in seconds.items()},
        }
        args.out.write_text(json.dumps(payload, indent=1) + "\n")


if __name__ == "__main__":
    main()
