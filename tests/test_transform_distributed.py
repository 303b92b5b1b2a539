"""Replay functions on two processes: `transform` of a function that calls a denoiser under DDP or FSDP2, one backward."""

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import jagg_fx
from tests.problems import BATCH, DIM, MLP, STEPS, relative_error, squared

RANKS = 2
CASES: dict[str, dict[str, Any]] = {
    "W=4": {"cos_threshold": None},
    "guarded": {"cos_threshold": 0.9},  # rank 1's path is smooth, rank 0's is not
    "knots=4": {"knots": 4, "cos_threshold": None},
}


def data(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    z = torch.randn(STEPS + 1, BATCH, DIM, dtype=torch.float64, generator=generator)
    z = z if rank == 0 else z[:1] + 0.02 * z
    return z, torch.linspace(1, 0.2, STEPS + 1, dtype=torch.float64) ** 1.5


def model() -> nn.Module:
    torch.manual_seed(0)
    return MLP().double()


def replay(denoiser: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([squared(z, t, i, denoiser(z[i], t[i].expand(BATCH))) for i in range(STEPS)], 1)

    return fn


def gradient(module: nn.Module) -> Tensor:
    gradients = [p.grad for p in module.parameters()]
    assert all(g is not None for g in gradients)
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in gradients if g is not None])


def sharded(module: nn.Module) -> nn.Module:
    for child in module.children():
        fully_shard(child)
    return fully_shard(module)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": DistributedDataParallel, "FSDP2": sharded}


def _check(rank: int, wrapper: str, lowering: str, capture: str, options: dict[str, Any]) -> dict[str, Any]:
    module = model()
    denoiser = WRAPPERS[wrapper](module)
    fast = jagg_fx.transform(replay(denoiser), lowering=lowering, capture=capture, **options)
    for _ in range(2):  # the first one measures or learns which steps are knots
        module.zero_grad()
        fast(*data(rank)).sum().backward()
    assert fast.stats is not None
    return {
        "gradient": gradient(module),
        "knots": [plan.knots for plan in fast.plans],
        "capture": fast.report.capture,
        "jagg_frac": fast.stats.last.jagg_frac,
    }


def _work(rank: int, folder: Path, checks: dict[Any, Any]) -> None:
    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=patience)
    results: dict[Any, Any] = {}
    for name, (wrapper, lowering, capture, case) in checks.items():
        try:
            results[name] = _check(rank, wrapper, lowering, capture, CASES[case])
        except Exception:
            results[name] = traceback.format_exc()
            break  # the other process may wait in vain
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


def _results(folder: Path, checks: dict[Any, Any]) -> dict[Any, list[Any]]:
    mp.spawn(_work, (folder, checks), nprocs=RANKS)  # type: ignore[no-untyped-call]
    by_rank = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    return {name: [results.get(name, "not reached") for results in by_rank] for name in checks}


EAGER = {
    f"{wrapper}, {case}": (wrapper, "eager", "auto" if case == "W=4" else "denoiser", case)
    for wrapper in WRAPPERS
    for case in CASES
}
COMPILED = {wrapper: (wrapper, "inductor", "denoiser", "W=4") for wrapper in WRAPPERS}


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return _results(tmp_path_factory.mktemp("eager"), EAGER)


def _wanted(**options: Any) -> Tensor:
    """The mean over the ranks' data, in one process."""
    gradients = []
    for rank in range(RANKS):
        module = model()
        jagg_fx.transform(replay(module), lowering="reference", **options)(*data(rank)).sum().backward()
        gradients.append(gradient(module))
    return torch.stack(gradients).mean(0)


def _good(found: list[Any]) -> list[dict[str, Any]]:
    for result in found:
        assert isinstance(result, dict), result
    return found


one_worker = pytest.mark.xdist_group("transform_distributed")  # the processes start once


@one_worker
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_are_those_of_one_process(eager: dict[str, list[Any]], wrapper: str) -> None:
    for result in _good(eager[f"{wrapper}, W=4"]):
        assert relative_error(result["gradient"], _wanted(cos_threshold=None)) < 1e-6
        assert "the denoiser alone" in result["capture"]  # Dynamo does not capture their hooks


@one_worker
def test_ranks_of_ddp_decide_for_themselves_and_those_of_fsdp_together(eager: dict[str, list[Any]]) -> None:
    own = [result["jagg_frac"] for result in _good(eager["DDP, guarded"])]
    assert own == [0.0, 1.0]
    for result in eager["DDP, guarded"]:
        assert relative_error(result["gradient"], _wanted(cos_threshold=0.9)) < 1e-6
    for result in _good(eager["FSDP2, guarded"]):  # a step that one rank runs, all run
        assert result["jagg_frac"] == 0.0
        assert relative_error(result["gradient"], _wanted(W=2)) < 1e-6


@one_worker
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_placed_knots_are_the_same_everywhere(eager: dict[str, list[Any]], wrapper: str) -> None:
    first, second = _good(eager[f"{wrapper}, knots=4"])
    assert first["knots"] == second["knots"]
    (knots,) = first["knots"]
    assert relative_error(first["gradient"], _wanted(knots=knots, cos_threshold=None)) < 1e-6


@pytest.mark.inductor
def test_a_compiled_denoiser(tmp_path: Path) -> None:
    for results in _results(tmp_path, COMPILED).values():
        for result in _good(results):
            assert relative_error(result["gradient"], _wanted(cos_threshold=None)) < 1e-6
