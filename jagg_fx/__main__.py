"""The command line: `python -m jagg_fx` or `jagg-fx`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jagg_fx
from jagg_fx.commands import doctor, explain, plan, report
from jagg_fx.commands.printing import visible
from jagg_fx.errors import JaggError

EXIT_CODES = """\
exit codes:
  0     done; explain: something would be rewritten; doctor: all that is needed works
  1     explain: nothing would be rewritten; doctor: something does not work
  2     the command cannot do what it was asked for: a line on stderr says why, and what to write instead
  130   demo: stopped by Ctrl-C, after what was done so far is printed
"""


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, as the commands do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code."""
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        prog="jagg-fx",
        description=jagg_fx.__doc__,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jagg_fx {jagg_fx.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="GRPO post-training of a small flow DiT: exact, W=4 and 4 knots side by side",
        description="GRPO post-training of a flow DiT on scikit-learn's digits: plain torch.compile, W=4 and 4 knots in "
        "one run. Prints a table and writes two pictures.",
    )

    def add(name: str, module: Any, help: str, description: str) -> None:
        command = commands.add_parser(name, help=help, description=description)
        module.add_arguments(command)
        command.set_defaults(run=module.main)

    add(
        "plan",
        plan,
        "where knots go by the schedule alone, and what that saves",
        "Place knots by the sampler's schedule alone, before anything was run. The plan that --json prints is what "
        "jagg_fx.plan.Plan.from_json reads.",
    )
    add(
        "explain",
        explain,
        "what would be rewritten of your function, and what that saves",
        "Capture one call of a function and plan its rewrite; nothing is trained or compiled. Exit code 1 if nothing "
        "would be rewritten: the problem is printed.",
    )
    add(
        "report",
        report,
        "read a saved report: table, decisions, graphs",
        "Print what save_report(...) wrote: the report, what the last backward decided for each segment and why, "
        "and what became of each step. The function and the model are not needed.",
    )
    add(
        "doctor",
        doctor,
        "what works in this environment",
        "Check torch, compiler, device, known bugs of torch and a small rewrite. Exit code 1 if something fails.",
    )
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
    except (ValueError, OSError, ModuleNotFoundError, JaggError) as error:
        print(f"jagg-fx {arguments.command}: {visible(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    return result


if __name__ == "__main__":
    sys.exit(main())
