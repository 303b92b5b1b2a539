"""`wrap` on two processes (DDP, FSDP2, accelerate), against one process that averages the reference's gradients itself."""

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing, nn

import jagg_fx
from tests import distributed_workers as workers
from tests.distributed_workers import MICRO, RANKS, UPDATES, VARIANTS, Case, Data, Outcome
from tests.problems import STEPS, relative_error

pytestmark = [pytest.mark.xdist_group("distributed"), pytest.mark.timeout(400), pytest.mark.slow]

LIMIT = 300  # seconds for all checks; then the processes are stopped
Outcomes = dict[str, list[Outcome]]
TOLERANCE = {"no": 1e-10, "bf16": 1e-2}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of every check, one for each process."""
    folder = tmp_path_factory.mktemp("distributed")
    _run(folder)
    by_rank = [torch.load(folder / f"outcomes{rank}", weights_only=False) for rank in range(RANKS)]
    return {name: [outcome[name] for outcome in by_rank] for name in by_rank[0]}


def _run(folder: Path) -> None:
    processes: Any = multiprocessing
    context = processes.spawn(workers.run_all, (str(folder),), nprocs=RANKS, join=False)
    end = time.monotonic() + LIMIT
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, f"the processes did not end within {LIMIT} seconds"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _exact_on(case: Case, rank: int) -> bool:
    """Whether the first segment is exact: on rank 0, and with it on all ranks where they must run alike."""
    return case.variant == "guarded" and (rank == 0 or case.framework == "fsdp")


def _options(case: Case, rank: int) -> dict[str, Any]:
    """The same without a guard: what is exact is a knot."""
    exact = {"knots": (0, 1, 2, 3, 4, 7, 8), "cos_threshold": None}
    return exact if _exact_on(case, rank) else {**VARIANTS[case.variant], "cos_threshold": None}


def _backward(model: nn.Module, batch: Data, case: Case, rank: int, **options: Any) -> None:
    """One trajectory's share of the gradient, in one process."""
    further = workers.further_arguments(case.model)
    if case.precision == "bf16":  # not the reference: rounding is not alike there
        denoiser = jagg_fx.wrap(model, num_steps=STEPS, **VARIANTS[case.variant or "W=2"])
        for i in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16):
                v = denoiser(batch.z[i], batch.t[i])
            batch.loss(i, v.float()).backward()
        return

    def fn(z: Tensor, t: Tensor) -> Tensor:
        return torch.stack([batch.loss(i, model(z[i], t[i], *further)) for i in range(STEPS)])

    if case.variant in ("", "W=2"):
        fn(batch.z, batch.t).sum().backward()
    else:
        options = options or _options(case, rank)
        jagg_fx.transform(fn, lowering="reference", denoiser=model, **options)(batch.z, batch.t).sum().backward()


@functools.cache
def _expected(case: Case) -> tuple[list[Tensor], Tensor]:
    """Gradients of all updates, and the weights after them."""
    model = workers.make_model(case.model, case.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=workers.RATE)
    gradients = []
    for _ in range(UPDATES):
        optimizer.zero_grad()
        for rank in range(RANKS):
            for micro in range(MICRO):
                _backward(model, workers.data(rank, micro, case.dtype), case, rank)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= RANKS
        gradients.append(workers.flat(parameter.grad for parameter in model.parameters()))
        nn.utils.clip_grad_norm_(model.parameters(), workers.MAX_NORM)
        optimizer.step()
    return gradients, workers.flat(model.parameters())


def _of(outcomes: Outcomes, name: object) -> list[Outcome]:
    for rank, outcome in enumerate(outcomes[str(name)]):
        assert not outcome.error, f"process {rank}:\n{outcome.error}"
    return outcomes[str(name)]


def _assert_expected(outcomes: Outcomes, case: Case) -> None:
    gradients, weights = _expected(case)
    for outcome in _of(outcomes, case):
        assert len(outcome.gradients) == UPDATES
        for got, want in zip(outcome.gradients, gradients, strict=True):
            assert relative_error(got, want) < TOLERANCE[case.precision]
        assert outcome.weights is not None
        assert relative_error(outcome.weights, weights) < TOLERANCE[case.precision]


def _assert_refused(outcomes: Outcomes, case: Case, message: str) -> None:
    for outcome in outcomes[str(case)]:
        assert "jagg_fx.errors.WrapperError" in outcome.error
        assert message in outcome.error


@pytest.mark.parametrize("case", [*workers.LOOPS, *workers.WRAPPED, *workers.WIDE], ids=str)
def test_gradients_are_the_references_average(case: Case, outcomes: Outcomes) -> None:
    _assert_expected(outcomes, case)


@pytest.mark.parametrize("case", workers.WRAPPED, ids=str)
def test_nothing_is_interpolated_at_two_and_something_else(case: Case, outcomes: Outcomes) -> None:
    for got, original in zip(_of(outcomes, case), _of(outcomes, case.original), strict=True):
        error = relative_error(got.gradients[0], original.gradients[0])
        assert error < 1e-12 if case.variant == "W=2" else error > (1e-3 if case.variant == "guarded" else 0.1)


@pytest.mark.parametrize("micro", range(MICRO))
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("model", ["mlp", "blocks"])
def test_the_processes_disagree_on_what_is_exact(model: str, rank: int, micro: int) -> None:
    """Which segments the guard refuses is what `_exact_on` says: with data of one rank alone, before they agree."""
    case, gradients = Case("ddp", "outside", "guarded", model=model), []
    for options in (VARIANTS["guarded"], _options(case, rank)):
        denoiser = workers.make_model(model)
        _backward(denoiser, workers.data(rank, micro), case, rank, **options)
        gradients.append(workers.flat(parameter.grad for parameter in denoiser.parameters()))
    assert relative_error(*gradients) < 1e-12


@pytest.mark.parametrize(
    "case", [case for case in workers.WRAPPED if (case.framework, case.variant) != ("fsdp", "guarded")], ids=str
)
def test_wrapped_loop_exchanges_no_more(case: Case, outcomes: Outcomes) -> None:
    """FSDP gathers parameters once more for a step that is run again to be exact, so guarded runs of it are left out."""
    for got, original in zip(_of(outcomes, case), _of(outcomes, case.original), strict=True):
        for mine, theirs in zip(got.collectives, original.collectives, strict=True):
            assert theirs.total() > 0
            assert not mine - theirs
            if case.variant == "W=4" and case.sync == "every":  # a backward per group reaches the parameters: 3 of 9
                reduced = [counted["allreduce_"] + counted["_reduce_scatter_base_"] for counted in (mine, theirs)]
                assert 3 * reduced[0] == reduced[1]


@pytest.mark.parametrize(
    "case", [case for case in [*workers.WRAPPED, *workers.WIDE] if case.framework == "fsdp"], ids=str
)
def test_fsdp_gathers_no_more_at_a_time_and_shards_again(case: Case, outcomes: Outcomes) -> None:
    """Intermediate steps run without a backward that would shard the root, which stays gathered: as much for any W."""
    for got, original in zip(_of(outcomes, case), _of(outcomes, case.original), strict=True):
        assert set(got.seen["unsharded afterwards"]) == {0}
        assert 0 < got.seen["unsharded at most"] <= original.seen["unsharded at most"]


@pytest.mark.parametrize("case", workers.DDP_OPTIONS, ids=str)
def test_options_of_ddp(case: Case, outcomes: Outcomes) -> None:
    if case.place == "inside" and "static_graph" in str(case):
        _assert_refused(outcomes, case, "Leave static_graph out, or put wrap outside")
    else:
        _assert_expected(outcomes, case)


@pytest.mark.parametrize("case", workers.NO_BROADCASTS, ids=str)
def test_buffers_that_are_not_broadcast(case: Case, outcomes: Outcomes) -> None:
    _assert_expected(outcomes, case)


@pytest.mark.parametrize("case", workers.BROADCASTS, ids=str)
def test_buffers_that_are_broadcast(case: Case, outcomes: Outcomes) -> None:
    """DDP broadcasts them at every call, in place; before torch 2.13 the backward of a group then finds them changed."""
    errors = [outcome.error for outcome in outcomes[str(case)]]
    if not all("modified by an inplace operation" in error for error in errors):
        _assert_expected(outcomes, case)


@pytest.mark.parametrize("case", workers.PROMPTED, ids=str)
def test_fsdp_with_an_argument_that_is_trained(case: Case, outcomes: Outcomes) -> None:
    if case.place == "inside":
        _assert_refused(outcomes, case, "Put wrap outside: jagg_fx.wrap(fully_shard(denoiser), ...)")
    else:
        _assert_expected(outcomes, case)


@pytest.mark.parametrize("case", workers.MEASURED, ids=str)
def test_measured_knots_are_rank_zeros_on_every_process(case: Case, outcomes: Outcomes) -> None:
    own = []
    for rank in range(RANKS):  # what each process would have chosen by itself
        wrapped = jagg_fx.wrap(workers.make_model(case.model), num_steps=STEPS, **VARIANTS[case.variant])
        batch = workers.data(rank, 0)
        for i in range(STEPS + 1):
            batch.loss(i % STEPS, wrapped(batch.z[i % STEPS], batch.t[i % STEPS])).backward()
        own.append(wrapped.plans[0].knots)
        wrapped.reset()
    assert own[0] != own[1]
    gradient: Tensor | float = 0.0
    for rank in range(RANKS):
        model = workers.make_model(case.model)
        _backward(model, workers.data(rank, 0), case, rank, knots=own[0], cos_threshold=None)
        gradient = gradient + workers.flat(parameter.grad for parameter in model.parameters()) / RANKS
    assert isinstance(gradient, Tensor)
    for outcome in _of(outcomes, case):
        assert [plan.knots for plan in outcome.seen["plans"]] == [own[0]]
        assert relative_error(outcome.gradients[0], gradient) < TOLERANCE["no"]


@pytest.mark.parametrize("case", workers.EARLY, ids=str)
def test_a_step_in_the_middle_is_refused_on_every_process(case: Case, outcomes: Outcomes) -> None:
    for outcome in outcomes[f"early-{case}"]:
        assert "PendingStepsError" in outcome.error
        assert "steps 4, 5 are pending" in outcome.error


@pytest.mark.parametrize("case", workers.SAVED, ids=str)
def test_checkpoints_are_sharded(case: Case, outcomes: Outcomes) -> None:
    for outcome in _of(outcomes, f"save-{case}"):
        assert outcome.seen["gathered"]
        assert outcome.seen["saved whole"] == []
