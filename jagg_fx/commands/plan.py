"""`jagg-fx plan`: where knots go by the schedule alone, before anything was run."""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from tabulate import tabulate

from jagg_fx.budget import Schedule
from jagg_fx.commands.printing import print_json
from jagg_fx.models.samplers import CPS, DDIM, DanceSDE, FlowSDE, Sampler, gains, schedule
from jagg_fx.plan import Plan, Rule, budget, even, paper

SAMPLERS: dict[str, Callable[..., Sampler]] = {"flow-sde": FlowSDE, "dance-sde": DanceSDE, "cps": CPS, "ddim": DDIM}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=10, help="sampling steps (default 10)")
    parser.add_argument("--trained", type=int, help="the first so many of them are trained (default: all but the last)")
    parser.add_argument("--shift", type=float, default=1.0, help="shift of the schedule, 3 for SD3 (default 1)")
    parser.add_argument(
        "--sampler", choices=SAMPLERS, default="flow-sde", help="whose steps weigh how much (default flow-sde)"
    )
    parser.add_argument("--noise", type=float, help="the sampler's noise level or eta (default: its own)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--knots", type=int, metavar="K", help="K knots, placed by the schedule")
    how.add_argument("--even", type=int, metavar="K", help="K evenly spread knots")
    how.add_argument("--W", type=int, metavar="W", help="the paper's groups of W steps (default 4)")
    parser.add_argument(
        "--backward",
        type=float,
        default=2.0,
        help="forwards that a backward pass costs: 2, or 1 for LoRA, and 1 more with checkpointing (default 2)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; its 'plan' is what Plan.from_json reads")


def main(arguments: argparse.Namespace) -> int:
    steps = arguments.steps
    trained = steps - 1 if arguments.trained is None else arguments.trained
    if not 1 <= trained <= steps:
        raise ValueError(f"--steps {steps} --trained {trained}: between 1 and {steps} steps can be trained.")
    if arguments.noise is not None and arguments.noise < 0:
        raise ValueError(
            f"--noise {arguments.noise:g}: a noise level is 0 or more; leave it out for the sampler's own."
        )
    kind = SAMPLERS[arguments.sampler]
    sampler = kind() if arguments.noise is None else kind(arguments.noise)
    sigmas = schedule(steps, arguments.shift)
    times, weights = sigmas[:trained].tolist(), gains(sampler, sigmas)[:trained].tolist()
    if not all(map(math.isfinite, weights)):
        raise ValueError(
            f"--sampler {arguments.sampler}: the last step has no noise, and no finite weight. Leave it out: "
            f"--trained {steps - 1}."
        )
    plan = _plan(arguments, Schedule.create(times, weights))
    before, after = (trained * (1 + arguments.backward), trained + len(plan.knots) * arguments.backward)
    result = _result(plan, times, weights, before, after)
    if arguments.json:
        print_json(result)
    else:
        print(_table(result))
    return 0


def _plan(arguments: argparse.Namespace, numbers: Schedule) -> Plan:
    count = len(numbers.times)
    if arguments.knots is not None:
        return budget(arguments.knots, schedule=numbers).place(count, Rule())
    if arguments.even is not None:
        return even(arguments.even).place(count, Rule())
    return paper(4 if arguments.W is None else arguments.W).place(count, Rule())


def _result(plan: Plan, times: list[float], weights: list[float], before: float, after: float) -> dict[str, Any]:
    largest = max(map(abs, weights))
    return {
        "plan": json.loads(plan.to_json()),
        "origin": plan.origin,
        "knots": list(plan.knots),
        "steps": [
            {"step": i, "sigma": t, "weight": abs(w) / largest, "keeps_vjp": i in plan.knots}
            for i, (t, w) in enumerate(zip(times, weights, strict=True))
        ],
        "backward_passes_before": plan.num_steps,
        "backward_passes_after": len(plan.knots),
        "cost_before_in_forwards": before,
        "cost_after_in_forwards": after,
        "predicted_saving": 1 - after / before,
    }


def _table(result: dict[str, Any]) -> str:
    rows = [
        (step["step"], f"{step['sigma']:.3f}", f"{step['weight']:.3f}", "knot" if step["keeps_vjp"] else "value only")
        for step in result["steps"]
    ]
    table = tabulate(rows, headers=["step", "sigma", "weight |c/S|", ""], tablefmt="simple", disable_numparse=True)
    return (
        f"{table}\n\n{result['origin']}: knots {', '.join(map(str, result['knots']))}\n"
        f"backward passes {result['backward_passes_before']} -> {result['backward_passes_after']}; forward and backward "
        f"{result['cost_before_in_forwards']:g} -> {result['cost_after_in_forwards']:g} forwards, "
        f"{result['predicted_saving']:.0%} less (before rollouts, and without steps that a guard keeps exact)"
    )
