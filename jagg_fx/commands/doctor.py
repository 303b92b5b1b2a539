"""`jagg-fx doctor`: what works in this environment."""

import argparse
import importlib.metadata
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate

import jagg_fx
from jagg_fx import canaries
from jagg_fx.commands.printing import print_json
from jagg_fx.models.linear_gaussian import GaussianVelocity
from jagg_fx.models.samplers import FlowSDE, replay, rollout, schedule

TRIED = "2.13"  # the README lists what was tried


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compile", action="store_true", help="also compile a small function (up to a minute)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(arguments: argparse.Namespace) -> int:
    """Exit code 1 if something that is needed does not work."""
    checks: dict[str, Callable[[], str]] = {
        "jagg_fx": lambda: jagg_fx.__version__,
        "torch": _torch,
        "device": _device,
        "C++ compiler": _compiler,
        "backend": _entry_point,
        "canaries": lambda: (
            "; ".join(f.note for f in canaries.findings(_device_type())) or "no known bug of torch found"
        ),
        "diffusers, peft": lambda: ", ".join(map(_version, ("diffusers", "peft"))),
        "cache": lambda: (
            os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "torch's own (TORCHINDUCTOR_CACHE_DIR is not set)"
        ),
        "rewrite, eager": lambda: _rewrites("eager"),
    }
    if arguments.compile:
        checks["rewrite, inductor"] = lambda: _rewrites("inductor")
    rows = [_run(name, check) for name, check in checks.items()]
    if arguments.json:
        print_json({name: {"works": works, "found": found} for name, works, found in rows})
    else:
        table = [(name, "ok" if works else "PROBLEM", found) for name, works, found in rows]
        print(
            tabulate(
                table,
                headers=["", "", "found"],
                tablefmt="simple",
                disable_numparse=True,
                maxcolwidths=[None, None, 90],
            )
        )
    return 0 if all(works for _, works, _ in rows) else 1


def _run(name: str, check: Callable[[], str]) -> tuple[str, bool, str]:
    try:
        return name, True, check()
    except Exception as error:
        return name, False, f"{type(error).__name__}: {error}"


def _torch() -> str:
    tried = torch.__version__.startswith(TRIED)
    return torch.__version__ + ("" if tried else f" (tried was {TRIED}: report what does not work)")


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"


def _compiler() -> str:
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), None)
    if found is None:
        raise FileNotFoundError("Inductor needs g++ or clang++ (or CXX); lowering='eager' works without")
    return found


def _entry_point() -> str:
    names = [point.name for point in importlib.metadata.entry_points(group="torch_dynamo_backends")]
    if "jagg" not in names:
        raise LookupError("torch.compile(backend='jagg') is not registered: install the package (pip install -e .)")
    return "torch.compile(backend='jagg') is registered"


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def _rewrites(lowering: str) -> str:
    """A small replay, rewritten and against the reference."""
    model, sampler, sigmas = GaussianVelocity(4), FlowSDE(), schedule(6)
    latents = rollout(model, sampler, torch.randn(3, 4), sigmas).latents

    def log_probs(latents: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
        return replay(model, sampler, latents, sigmas).log_probs

    def gradient(options: dict[str, Any]) -> torch.Tensor:
        fast = jagg_fx.transform(log_probs, W=3, cos_threshold=None, **options)
        found = torch.autograd.grad(fast(latents[:6], sigmas[:6]).sum(), list(model.parameters()))
        return torch.cat([g.flatten() for g in found])

    got, want = gradient({"lowering": lowering, "capture": "whole"}), gradient({"lowering": "reference"})
    error = float((got - want).norm() / want.norm())
    if not error < 1e-4:
        raise ArithmeticError(f"the gradient is off by {error:.1e} from the reference")
    return f"gradient equal to the reference ({error:.0e})"
