"""`jagg-fx explain`: what would be done with a function, without running it."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jagg_fx
from jagg_fx.commands.naming import find, importing, told
from jagg_fx.commands.printing import print_json
from jagg_fx.errors import JaggError
from jagg_fx.explain import Explanation, misfit_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "function", metavar="module:function", help="as it is imported from here, or path/to/file.py:function"
    )
    parser.add_argument(
        "--inputs",
        metavar="module:function",
        help="returns the arguments of one call: a tuple, a dict of keywords, or one tensor (default: there are none)",
    )
    parser.add_argument(
        "--denoiser", metavar="module:name", help="the module that is called at every step (default: found)"
    )
    parser.add_argument("--time", metavar="NAME", help="the denoiser's time argument (default: found)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--W", type=int, metavar="N", help="groups of N steps (default 4)")
    how.add_argument(
        "--knots",
        type=_knots,
        metavar="KNOTS",
        help="how many, or which steps, separated by commas: 4, or 0,3,8",
    )
    parser.add_argument(
        "--cos-threshold",
        type=_threshold,
        default="auto",
        metavar="X",
        help="least cosine of an interpolated segment, none for no guard, or auto (the default)",
    )
    parser.add_argument("--meta", action="store_true", help="make models and inputs on the meta device, without memory")
    parser.add_argument("--html", type=Path, metavar="OUT.html", help="write the page")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what `jagg-fx report` reads")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(arguments: argparse.Namespace) -> int:
    """Exit code 1 if nothing would be rewritten."""
    with contextlib.redirect_stdout(sys.stderr), importing():  # what the user's modules print is not our answer
        explanation = _explain(arguments)
    if arguments.json:
        print_json(explanation.to_dict())
    else:
        print(explanation)
    if arguments.save:
        explanation.save_report(arguments.save)
    if arguments.html and explanation.graphs:
        explanation.graphs[0].to_html(arguments.html)
    return 0 if any(view.segments for view in explanation.graphs) else 1


def _explain(arguments: argparse.Namespace) -> Explanation:
    with torch.device("meta") if arguments.meta else contextlib.nullcontext():
        function = _callable(arguments.function)
        denoiser = find(arguments.denoiser) if arguments.denoiser else None
        args, kwargs = ((), {}) if arguments.inputs is None else _inputs(arguments.inputs)
    if misfit := misfit_of(function, args, kwargs):
        given = f"what --inputs {arguments.inputs} returned" if arguments.inputs else "no arguments"
        raise ValueError(
            f"{arguments.function} cannot be called with {given}: {misfit}. Write --inputs module:function, and let it return "
            "all arguments of one call."
        )
    options = {name: value for name in ("W", "knots", "time") if (value := getattr(arguments, name)) is not None}
    if sys.stderr.isatty():
        print("capturing ... (minutes for a large model)", file=sys.stderr)
    try:
        return jagg_fx.explain(
            function, *args, kwargs=kwargs, denoiser=denoiser, cos_threshold=arguments.cos_threshold, **options
        )
    except JaggError:
        raise
    except Exception as error:
        raise ValueError(
            f"{arguments.function} raised {told(error)}. Correct it, or what --inputs gives it."
        ) from error


def _callable(name: str) -> Callable[..., Any]:
    found = find(name)
    if not callable(found):
        raise ValueError(f"{name} is of type {type(found).__name__}, and cannot be called. Name a function.")
    return found  # type: ignore[no-any-return]


def _inputs(name: str) -> Arguments:
    make = _callable(name)
    try:
        given = make()
    except Exception as error:
        raise ValueError(
            f"--inputs {name} raised {told(error)}. It is called without arguments, and returns those of one call."
        ) from error
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, dict):
        return (), given
    if isinstance(given, (tuple, list)):
        return tuple(given), {}
    raise ValueError(
        f"--inputs {name} returned an object of type {type(given).__name__}. Let it return a tuple of arguments, a dict of "
        "keywords, or one tensor."
    )


def _knots(text: str) -> int | tuple[int, ...]:
    try:
        return tuple(map(int, text.split(","))) if "," in text else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number of knots, 4, or their steps, 0,3,8") from None


def _threshold(text: str) -> float | str | None:
    try:
        return None if text == "none" else text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write a cosine such as 0.8, none or auto") from None
