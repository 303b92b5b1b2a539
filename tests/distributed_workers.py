"""What the two processes of `test_wrap_distributed` run: training loops with a backward per step, over gloo.

All checks run in one pair of processes, since a start costs seconds. Each has a process group of its own, so that a check that
fails on one process does not disturb the next, and an exchange that waits in vain ends with an error.
"""

import dataclasses
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

import jagg_fx
from tests.problems import BATCH, DIM, MLP, STEPS

RANKS, MICRO, UPDATES, RATE, MAX_NORM = 2, 2, 2, 0.1, 1.0
PATIENCE = timedelta(seconds=20)  # for one exchange between the processes

VARIANTS: dict[str, dict[str, Any]] = {
    "W=4": {"W": 4, "cos_threshold": None},
    "guarded": {"W": 4, "cos_threshold": 0.9},  # steps 1 and 2 of rank 0 are below, see `data`
    "W=2": {"W": 2},
    "W=9": {"W": 9, "cos_threshold": None},
    "knots=4": {"knots": 4, "cos_threshold": None},
}


# Problems. The test's own process computes the references with the same functions.


@dataclass(frozen=True)
class Data:
    """One micro-batch: states `[N + 1, B, D]` and times `[N, B]` of a trajectory."""

    z: Tensor
    t: Tensor

    def loss(self, i: int, v: Tensor) -> Tensor:
        """Of step `i`; they add up to the loss of an update, the mean over micro-batches."""
        per_sample = (self.z[i + 1] - self.z[i] - 0.1 * v).square().mean(-1)
        return per_sample.dot(torch.linspace(1, 2, BATCH).to(v)) * (1 + i) / MICRO


def data(rank: int, micro: int, dtype: torch.dtype = torch.float64) -> Data:
    """Trajectories whose velocities agree with their interpolation, but for steps 1 and 2 of rank 0: those leave the path."""
    generator = torch.Generator().manual_seed(10 * rank + micro)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    z = normal(1, BATCH, DIM) + 0.02 * normal(STEPS + 1, BATCH, DIM)
    if rank == 0:
        z[1:3] = normal(2, BATCH, DIM)
    t = torch.linspace(1, 0.2, STEPS, dtype=torch.float64)[:, None] ** 1.5 + torch.tensor([0.0, 0.01, 0.02])
    return Data(z.to(dtype), t.to(dtype))


class Buffered(MLP):
    """A buffer that the backward reads."""

    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.linspace(0.5, 1.5, 2 * DIM))

    def forward(self, z: Tensor, t: Tensor, condition: Tensor | None = None) -> Any:
        return super().forward(z, t, self.gain)


class Block(nn.Module):
    """Attention over tokens `[B, L, C]`, modulated by the time `[B]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x * (1 + t[:, None, None])).chunk(3, -1)
        change: Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + change.tanh()


class Blocks(nn.Module):
    """A transformer with parameters of its own beside its blocks'."""

    TOKENS = 4

    def __init__(self, depth: int = 3, width: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(DIM // self.TOKENS, width), nn.Linear(width, DIM // self.TOKENS)
        self.position = nn.Parameter(torch.randn(self.TOKENS, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, z: Tensor, t: Tensor, prompt: Tensor | None = None) -> Tensor:
        x: Tensor = self.embed(z.unflatten(-1, (self.TOKENS, -1))) + self.position
        if prompt is not None:
            x = x * prompt
        for block in self.blocks:
            x = block(x, t)
        change: Tensor = self.head(x).flatten(-2)
        return z + change


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": MLP, "buffered": Buffered, "blocks": Blocks, "prompted": Blocks}


def make_model(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype)


def further_arguments(name: str) -> tuple[Tensor, ...]:
    """Of the denoiser at every step: a trained prompt, for "prompted"."""
    prompt = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)
    return (prompt.requires_grad_(),) if name == "prompted" else ()


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """All elements, those of other processes included: a collective call for sharded tensors."""
    parts = [tensor.detach() for tensor in tensors if tensor is not None]
    return torch.cat([(part.full_tensor() if isinstance(part, DTensor) else part).flatten() for part in parts])


# Loops.


@dataclass(frozen=True)
class Case:
    """One training loop.

    Attributes:
        framework: "ddp", "fsdp" (FSDP2) or "accelerate".
        place: where `wrap` is: "nowhere", or "outside" or "inside" of what the framework puts around the denoiser.
        variant: options of `wrap`, see `VARIANTS`.
        sync: gradients are reduced after "every" backward, or after the "last" one of an update.
        model: see `MODELS`.
        precision: accelerate's `mixed_precision`.
        ddp: further options of DistributedDataParallel.
    """

    framework: str
    place: str = "nowhere"
    variant: str = ""
    sync: str = "every"
    model: str = "mlp"
    precision: str = "no"
    ddp: tuple[tuple[str, bool], ...] = ()

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.ddp]
        precision = self.precision if self.framework == "accelerate" else ""
        words = [self.framework, self.place, self.variant, self.sync, self.model, precision, *options]
        return "-".join(word for word in words if word)

    @property
    def original(self) -> "Case":
        """The same loop without `wrap`."""
        return dataclasses.replace(self, place="nowhere", variant="")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "no" else torch.float32

    def wrapped(self, variants: Iterable[str]) -> "list[Case]":
        """This loop with `wrap`, in both places."""
        return [dataclasses.replace(self, place=place, variant=v) for v in variants for place in ("outside", "inside")]


LOOPS = [
    *(Case("ddp", sync=sync) for sync in ("every", "last")),
    *(Case("fsdp", sync=sync, model="blocks") for sync in ("every", "last")),
    *(Case("accelerate", sync="last", precision=precision) for precision in ("no", "bf16")),
]
WRAPPED = [case for loop in LOOPS for case in loop.wrapped(("W=4", "guarded", "W=2"))]
WIDE = Case("fsdp", model="blocks").wrapped(("W=9",))
DDP_OPTIONS = [
    case
    for option in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    for case in Case("ddp", ddp=((option, True),)).wrapped(("guarded",))
]
BROADCASTS = Case("ddp", model="buffered").wrapped(("W=4", "guarded"))
NO_BROADCASTS = Case("ddp", model="buffered", ddp=(("broadcast_buffers", False),)).wrapped(("W=4", "guarded"))
PROMPTED = Case("fsdp", model="prompted").wrapped(("W=4",))
EARLY = [case for case in WRAPPED if (case.variant, case.sync) == ("W=4", "every")]
SAVED = [case for case in EARLY if case.framework == "fsdp"]
MEASURED = [*Case("ddp").wrapped(("knots=4",)), *Case("fsdp", model="blocks").wrapped(("knots=4",))]


@dataclass
class Outcome:
    """What one process saw.

    Attributes:
        gradients: of each update, before they are clipped.
        weights: after the last update.
        collectives: operators of torch.distributed that each update called.
        seen: further findings by name.
        error: traceback, if the check raised.
    """

    gradients: list[Tensor] = field(default_factory=list)
    weights: Tensor | None = None
    collectives: list[Counter[str]] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Collectives(TorchDispatchMode):
    """Counts what is exchanged between processes, also what DDP's reducer sends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.counted[func._opname] += 1
        return func(*args, **(kwargs or {}))


class Unsharded:
    """The most elements of parameters that were gathered at once, seen from within the forward and the backward."""

    def __init__(self, model: nn.Module) -> None:
        self.peak = 0
        self._model = model
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: self._look())
            module.register_forward_hook(self._watch_backward)

    @property
    def now(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters() if not isinstance(parameter, DTensor))

    def _look(self) -> None:
        self.peak = max(self.peak, self.now)

    def _watch_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self._look())


def wrap(model: Any, case: Case) -> Any:
    return jagg_fx.wrap(model, num_steps=STEPS, **VARIANTS[case.variant])


def distribute(case: Case) -> tuple[Any, nn.Module]:
    """What the loop calls, and the denoiser in it."""
    model: Any = make_model(case.model)
    denoiser = model
    if case.place == "inside":
        model = wrap(model, case)
    if case.framework == "ddp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for broadcast_buffers
            options: dict[str, Any] = dict(case.ddp)
            model = DistributedDataParallel(model, **options)
    else:
        for block in denoiser.blocks:
            fully_shard(block)
        fully_shard(model)
    return wrap(model, case) if case.place == "outside" else model, denoiser


def train(case: Case, rank: int, outcome: Outcome) -> None:
    """Updates as trainers write them without accelerate."""
    model, denoiser = distribute(case)
    unsharded, further = Unsharded(denoiser), further_arguments(case.model)

    def synchronised(last: bool) -> AbstractContextManager[Any]:
        if case.sync == "last" and case.framework == "ddp" and not last:
            no_sync: AbstractContextManager[Any] = model.no_sync()
            return no_sync
        if case.sync == "last" and case.framework == "fsdp":
            model.set_requires_gradient_sync(last)
        return nullcontext()

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(UPDATES):
        with Collectives() as collectives:
            for micro in range(MICRO):
                batch = data(rank, micro)
                for i in range(STEPS):
                    with synchronised(last=(micro, i) == (MICRO - 1, STEPS - 1)):
                        batch.loss(i, model(batch.z[i], batch.t[i], *further)).backward()
                outcome.seen.setdefault("unsharded afterwards", []).append(unsharded.now)
        outcome.collectives.append(collectives.counted)
        outcome.gradients.append(flat(parameter.grad for parameter in model.parameters()))
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    outcome.seen["unsharded at most"] = unsharded.peak
    outcome.weights = flat(model.parameters())


def train_accelerate(case: Case, rank: int, outcome: Outcome) -> None:
    """Updates as trainers write them with accelerate: the optimizer's step is called after every backward."""
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=case.precision, gradient_accumulation_steps=MICRO * STEPS)
    model: Any = make_model(case.model, case.dtype)
    if case.place == "inside":
        model = wrap(model, case)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    assert isinstance(model, DistributedDataParallel)
    if case.place == "outside":
        model = wrap(model, case)
    for _ in range(UPDATES):
        with Collectives() as collectives:
            for micro in range(MICRO):
                batch = data(rank, micro, case.dtype)
                for i in range(STEPS):
                    with accelerator.accumulate(model):
                        loss = batch.loss(i, model(batch.z[i], batch.t[i]))
                        accelerator.backward(MICRO * STEPS * loss)  # it divides by the number of backwards
                        if accelerator.sync_gradients:
                            outcome.gradients.append(flat(parameter.grad for parameter in model.parameters()))
                            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                        optimizer.step()
                        optimizer.zero_grad()
        outcome.collectives.append(collectives.counted)
    outcome.weights = flat(model.parameters())


# Further checks.


def measure(case: Case, rank: int, outcome: Outcome) -> None:
    """Three trajectories; the first one measures where the knots of the others are."""
    model, _ = distribute(case)
    batch = data(rank, 0)
    for _ in range(3):
        model.zero_grad()
        for i in range(STEPS):
            batch.loss(i, model(batch.z[i], batch.t[i])).backward()
    wrapped = model.module if case.framework == "ddp" and case.place == "inside" else model
    outcome.seen["plans"] = wrapped.plans
    outcome.gradients.append(flat(parameter.grad for parameter in model.parameters()))


def step_too_early(case: Case, rank: int, outcome: Outcome) -> None:
    """Gradient accumulation that does not end with a trajectory."""
    model, _ = distribute(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batch = data(rank, 0)
    for i in range(STEPS - 3):
        batch.loss(i, model(batch.z[i], batch.t[i])).backward()
    optimizer.step()


def save(case: Case, rank: int, outcome: Outcome) -> None:
    """A checkpoint after calls without gradients, which leave the root gathered."""
    model, _ = distribute(case)
    batch = data(rank, 0)
    with torch.no_grad():
        model(batch.z[0], batch.t[0])
    outcome.seen["gathered"] = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    outcome.seen["saved whole"] = [name for name, p in model.state_dict().items() if not isinstance(p, DTensor)]


def checks() -> dict[str, Callable[[int, Outcome], None]]:
    """What runs, by name, in this order."""
    loops = [*LOOPS, *WRAPPED, *WIDE, *DDP_OPTIONS, *NO_BROADCASTS, *PROMPTED, *BROADCASTS]
    found: dict[str, Callable[[int, Outcome], None]] = {}
    for case in loops:
        found[str(case)] = partial(train_accelerate if case.framework == "accelerate" else train, case)
    for case in MEASURED:
        found[str(case)] = partial(measure, case)
    for case in EARLY:
        found[f"early-{case}"] = partial(step_too_early, case)
    for case in SAVED:
        found[f"save-{case}"] = partial(save, case)
    return found


def run_all(rank: int, folder: str) -> None:
    """Run everything on one of the processes, and save the outcomes."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    outcomes = {}
    for n, (name, check) in enumerate(checks().items()):
        outcomes[name] = Outcome()
        dist.init_process_group("gloo", f"file://{folder}/group{n}", PATIENCE, rank=rank, world_size=RANKS)
        try:
            check(rank, outcomes[name])
        except Exception:
            outcomes[name].error = traceback.format_exc()
        dist.destroy_process_group()
    torch.save(outcomes, f"{folder}/outcomes{rank}")
