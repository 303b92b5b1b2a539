"""Does compile time grow with the number of steps, and of blocks?

    python -m benchmarks.compile_time

Seconds of the first forward and backward of a replay, each in a fresh process: once with an empty cache ("cold") and once more
with the cache that it left ("warm"), at several numbers of steps and of blocks, always through Inductor:

    exact                  plain torch.compile, the denoiser a nested region
    W=4                    jagg_fx, the function captured whole
    W=4, no guard          the same without branches
    W=4, the denoiser      capture="denoiser": the denoiser alone is compiled, and the steps run in Python
"""

import itertools
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from benchmarks import harness
from benchmarks.sizes import add_size_arguments, make_problem
from benchmarks.step_time import exact, transformed
from jagg_fx.demo.measure import Clock

OPTIONS: dict[str, dict[str, Any]] = {
    "W=4": {},
    "W=4, no guard": {"cos_threshold": None},
    "W=4, the denoiser": {"capture": "denoiser"},
}
VARIANTS = ("exact", *OPTIONS)
CACHES = ("cold", "warm")


@dataclass(frozen=True)
class Case:
    variant: str
    blocks: int
    steps: int


def measure(size: str, device: str, batch: int | None, quick: bool, variant: str, blocks: int, steps: int) -> float:
    """Seconds of the first forward and backward in this process."""
    problem = make_problem(size, device, steps, batch, quick, blocks)
    began = time.perf_counter()
    run = exact(problem, False) if variant == "exact" else transformed(problem, False, W=4, **OPTIONS[variant])
    run.train(Clock())
    return time.perf_counter() - began


def main() -> None:
    options = harness.parser(__doc__)
    add_size_arguments(options, "digits", steps=[5, 10, 20])
    options.add_argument(
        "--blocks", type=harness.positive, nargs="+", default=[2, 6], help="blocks of the denoiser (default 2 6)"
    )
    options.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="only these (default all)")
    options.add_argument(
        "--repeats", type=harness.positive, default=1, help="runs of each, in turn; the median counts (default 1)"
    )
    args = options.parse_args()
    if args.quick:
        args.steps, args.blocks, args.repeats = args.steps[:2], [1], 1
    common = {"size": args.size, "device": args.device, "batch": args.batch or 16, "quick": args.quick}
    cases = [Case(*each) for each in itertools.product(args.variants, args.blocks, args.steps)]
    seconds: dict[tuple[Case, str], list[float]] = {key: [] for key in itertools.product(cases, CACHES)}
    with tqdm(total=args.repeats * len(seconds), unit="compile") as bar:
        for case in cases * args.repeats:
            with tempfile.TemporaryDirectory() as folder:
                for cache in CACHES:
                    bar.set_postfix_str(f"{case.variant}, {case.blocks} blocks, {case.steps} steps, {cache}")
                    environment = {"TORCHINDUCTOR_CACHE_DIR": folder}
                    found = harness.in_fresh_process(
                        "benchmarks.compile_time", "measure", environment, **common, **asdict(case)
                    )
                    seconds[case, cache].append(found)
                    bar.update()
    rows = []
    for cache, variant, blocks in itertools.product(CACHES, args.variants, args.blocks):
        times = [statistics.median(seconds[Case(variant, blocks, steps), cache]) for steps in args.steps]
        rows.append([variant, blocks, cache, *(f"{t:.1f}" for t in times), f"{times[-1] / times[0]:.2f}"])
    headers = ["", "blocks", "cache", *(f"{steps} steps, s" for steps in args.steps)]
    table = harness.table(rows, [*headers, f"ratio {args.steps[-1]} : {args.steps[0]}"])
    note = f"First forward and backward in a fresh process, size {args.size}; {harness.caption(args.device)}"
    results = [asdict(case) | {"cache": cache, "seconds": found} for (case, cache), found in seconds.items()]
    settings = {"size": args.size, "repeats": args.repeats}
    harness.publish(f"compile_time_{args.size}", args, {"settings": settings, "cases": results}, table, note)


if __name__ == "__main__":
    main()
