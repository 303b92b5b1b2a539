"""The command line: `python -m jagg_fx` or `jagg-fx`."""

import argparse
import sys
from collections.abc import Sequence

import jagg_fx
from jagg_fx.commands import doctor, plan
from jagg_fx.errors import JaggError


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="jagg-fx", description=jagg_fx.__doc__)
    parser.add_argument("--version", action="version", version=f"jagg_fx {jagg_fx.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="GRPO post-training of a small flow DiT: exact, W=4 and 4 knots side by side",
        description="GRPO post-training of a flow DiT on scikit-learn's digits: plain torch.compile, W=4 and 4 knots in "
        "one run. Prints a table and writes two pictures.",
    )
    planning = commands.add_parser(
        "plan",
        help="where knots go by the schedule alone, and what that saves",
        description="Place knots by the sampler's schedule alone, before anything was run. The plan that --json prints is what "
        "jagg_fx.plan.Plan.from_json reads.",
    )
    plan.add_arguments(planning)
    planning.set_defaults(run=plan.main)
    checking = commands.add_parser(
        "doctor",
        help="what works in this environment",
        description="Check torch, compiler, device, known bugs of torch and a small rewrite. Exit code 1 if something fails.",
    )
    doctor.add_arguments(checking)
    checking.set_defaults(run=doctor.main)
    try:
        from jagg_fx.demo import command
    except ModuleNotFoundError as error:
        if arguments_given[:1] == ["demo"] and "--help" not in arguments_given:
            print(f'jagg-fx demo needs {error.name}: pip install "jagg_fx[demo]"', file=sys.stderr)
            return 2
    else:
        command.add_arguments(demo)
        demo.set_defaults(run=command.main)
    arguments = parser.parse_args(arguments_given)
    try:
        result: int = arguments.run(arguments)
    except (ValueError, JaggError) as error:
        print(f"jagg-fx {arguments.command}: {error}", file=sys.stderr)
        return 2
    return result


if __name__ == "__main__":
    sys.exit(main())
