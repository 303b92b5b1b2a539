"""Random replay functions: each is one frozen dataclass whose repr, pasted, builds the same function, inputs and loss again.

`fuzz_check.py` runs them every way, `fuzz_oracle.py` says what must come out.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from jagg_fx.plan import even, explicit, paper

DIM, HIDDEN = 3, 4


@dataclass(frozen=True, repr=False)
class Case:
    """One random replay function, its inputs and its loss. The first value of each kind is the simplest."""

    steps: int = 5
    batch: int = 2
    dtype: str = "float64"
    denoiser: str = "tensor"  # what the denoiser returns
    condition: str = "none"  # how the denoiser is given its prompt
    frozen: bool = False  # whether a part of the denoiser is
    inputs: str = "positional"  # how the function is given its arguments
    latents: str = "steps first"  # how the states are stored
    times: str = "expanded"  # the form of one step's time
    schedule: str = "bent"  # the times of all steps
    streams: str = "one"  # which calls a step makes
    loop: str = "plain"  # what happens to some of the steps
    glue: str = "square"  # what is computed of a step's velocity
    outputs: str = "stack"  # how the function returns it
    extras: str = "none"  # what it returns beside it
    cotangents: tuple[float | None, ...] = (1.0,)  # each step's weight in the loss, in turn; None leaves it out
    once: bool = True  # one backward for all steps, where there could be one for each
    plan: str = "paper"
    size: int = 4  # steps of a group, or number of knots, or the explicit knots as bits
    weights: str = "time"
    degree: int = 1
    cos_threshold: float | None = None
    jagg_frac: float | None = None
    debias: float | None = None
    chain: str = "error"
    seed: int = 0

    def __repr__(self) -> str:
        """Without what is left at its default."""
        given = [
            (f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return f"Case({', '.join(f'{name}={value!r}' for name, value in given)})"

    @property
    def options(self) -> dict[str, Any]:
        """For `transform`."""
        lengths = self.lengths
        plans = [self.placement(n) for n in lengths]
        return {
            "plan": plans[0] if len(plans) == 1 or self.plan != "explicit" else plans,
            "weights": self.weights,
            "degree": self.degree,
            "cos_threshold": self.cos_threshold,
            "jagg_frac": self.jagg_frac,
            "debias": self.debias,
        }

    def placement(self, steps: int) -> Any:
        if self.plan == "paper":
            return paper(self.size)
        return even(self.size) if self.plan == "even" else explicit(self.knots(steps))

    def knots(self, steps: int) -> tuple[int, ...]:
        """Of a stream of so many steps."""
        if self.plan == "paper":
            groups = [range(a, min(a + self.size, steps)) for a in range(0, steps, self.size)]
            return tuple(sorted({k for group in groups for k in (group[0], group[-1])}))
        if self.plan == "even":
            return tuple(sorted({round((steps - 1) * k / (self.size - 1)) for k in range(self.size)}))
        return tuple(sorted({0, steps - 1} | {k for k in range(steps) if self.size >> k & 1}))

    @property
    def calls(self) -> tuple["Call", ...]:
        """All calls of the denoisers, in their order."""
        return tuple(call for i in range(self.steps) for call in self.calls_at(i))

    def calls_at(self, i: int) -> list["Call"]:
        special = i % 3 == 1 and i < self.steps - 1
        if self.loop == "skips" and special:
            return []
        has_gradient = not (self.loop == "no_grad" and special)
        if self.streams == "experts":
            own = [Call(i, stream=int(i >= self.steps // 2), model=int(i >= self.steps // 2))]
        elif self.streams in ("guidance", "swapped"):
            own = [Call(i, stream=half, half=half) for half in (0, 1)]
            # Without prompts the halves are known by their order.
            own = own[::-1] if self.streams == "swapped" and self.condition != "none" and i % 2 else own
        else:
            own = [Call(i)]
        own = own if has_gradient else [dataclasses.replace(call, kind="no_grad") for call in own]
        if self.streams == "reference":
            own.append(Call(i, kind="beside"))
        if self.loop == "unused" and special:
            own.append(Call(i, kind="unused"))
        return own

    @property
    def lengths(self) -> list[int]:
        """Steps of each stream, in the order of their first calls."""
        streams = [call.stream for call in self.calls if call.kind == "step"]
        return [streams.count(stream) for stream in dict.fromkeys(streams)]


@dataclass(frozen=True)
class Call:
    """One call of a denoiser.

    Attributes:
        i: step of the loop.
        stream: the path that it belongs to.
        model: which denoiser is called.
        half: of guidance.
        kind: "step"; or "no_grad", the loop's own step without gradients; "beside", one more without gradients; "unused", one
            more with gradients, whose value is thrown away.
    """

    i: int
    stream: int = 0
    model: int = 0
    half: int = 0
    kind: str = "step"


CHOICES: dict[str, list[Any]] = {
    "batch": [2, 1, 3],
    "dtype": ["float64", "float32", "bfloat16"],
    "denoiser": ["tensor", "tuple", "dict", "dataclass", "transposed"],
    "condition": ["none", "positional", "keyword", "tuple", "dict", "dataclass", "trained"],
    "frozen": [False, True],
    "inputs": ["positional", "keywords", "tuple", "dict", "dataclass"],
    "latents": ["steps first", "batch first", "list", "stacked", "transposed"],
    "times": ["expanded", "shared", "column", "one", "own", "computed", "integers", "numbers"],
    "schedule": ["bent", "even", "rising", "shuffled", "repeated", "constant"],
    "streams": ["one", "reference", "guidance", "swapped", "experts"],
    "loop": ["plain", "branches", "skips", "no_grad", "unused", "chained"],
    "glue": ["square", "sum", "value", "in place", "in place on the value", "in place on a view"],
    "outputs": ["stack", "list", "tuple", "dict", "dataclass", "buffer"],
    "extras": ["none", "values", "detached", "mixed"],
    "cotangents": [
        *[(1.0,), (1.0, -2.0, 0.5), (0.0, 1.0), (0.0,), (1.0, None), (1e30, 1.0, 1e-30)],
        *[(1.0, 1.0, float("inf")), (1.0, float("nan"))],
    ],
    "once": [True, False],
    "weights": ["time", "index"],
    "degree": [1, 2],
    "cos_threshold": [None, 0.8, -0.5, 0.99],
    "jagg_frac": [None, 1.0, 0.5, 0.0],
    "debias": [None, None, 0.5, 1.0],
    "chain": ["error", "stop", "stop"],
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Simple in more than half of all respects, so that a feature is seen with few others as well as among many."""
    fields = {name: draw(st.sampled_from([choices[0]] * len(choices) + choices)) for name, choices in CHOICES.items()}
    if fields["schedule"] in ("repeated", "constant") and fields["times"] in ("computed", "numbers"):
        fields["times"] = (
            "expanded"  # else two steps are at one time, and nothing tells them from two calls of one step
        )
    steps = draw(st.sampled_from([*range(1, 10), *range(1, 25)]))
    plan = draw(st.sampled_from(["paper", "explicit", "even"]))
    sizes = {
        "paper": st.sampled_from(range(2, steps + 3)),
        "explicit": st.integers(0, 2**steps - 1),
        "even": st.sampled_from(range(2, max(3, min(steps // 2 + 2, 7)))),
    }
    return Case(steps=steps, plan=plan, size=draw(sizes[plan]), seed=draw(st.sampled_from(range(100))), **fields)


# What a case is made of.


@dataclass(frozen=True)
class Prompt:
    scale: Tensor
    shift: Tensor | None = None


@dataclass
class Prediction:
    sample: Tensor
    loss: Tensor | None = None


@dataclass(frozen=True)
class Inputs:
    latents: Any
    times: Any
    prompt: Tensor


@dataclass(frozen=True)
class Outputs:
    results: list[Tensor]
    extras: Any


class Velocity(nn.Module):
    """A velocity of a few units; `body` is where an oracle can look at calls without their packaging."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.returns = returns

    def forward(self, z: Tensor, t: Any, condition: Any = None) -> Any:
        if not isinstance(t, Tensor):
            t = torch.tensor(t, dtype=torch.float64 if isinstance(t, float) else None)
        values = self.body(z, t, *prompt_in(condition))
        if self.returns == "tuple":
            return values[0], None, values[0].argmax(-1), values[1]
        if self.returns == "dict":
            return {"sample": values[0], "loss": values[1]}
        return Prediction(*values) if self.returns == "dataclass" else values[0]

    def body(self, z: Tensor, t: Tensor, *prompt: Tensor) -> list[Tensor]:
        t = t.to(z.dtype) if t.is_floating_point() else t.to(z.dtype) / 100
        h = torch.tanh(self.a(z) * (1 + (t.reshape(-1, 1) if t.dim() else t)))
        for tensor in prompt:
            h = h * tensor
        if self.returns == "transposed":
            return [nn.functional.linear(h, self.b.weight).t().contiguous().t() + self.b.bias]
        v = self.b(h)
        return [v] if self.returns == "tensor" else [v, v.sum(-1).sin()]


def prompt_in(condition: Any) -> list[Tensor]:
    if isinstance(condition, Prompt):
        return [condition.scale]
    if isinstance(condition, dict):
        return [condition["scale"]]
    return list(condition) if isinstance(condition, tuple) else [] if condition is None else [condition]


def values_in(output: Any) -> list[Tensor]:
    """The floating-point tensors that a denoiser returned."""
    if isinstance(output, tuple):
        return [output[0], output[3]]
    if isinstance(output, dict):
        return list(output.values())
    return [output.sample, output.loss] if isinstance(output, Prediction) else [output]


@dataclass(frozen=True)
class Replay:
    """A case that was built: `fn(*args, **kwargs)` runs the models over the steps, `parameters` get gradients."""

    case: Case
    models: list[Velocity]
    data: Inputs
    weights: list[Tensor]  # of the results of each step, at random
    parameters: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, case: Case) -> "Replay":
        generator = torch.Generator().manual_seed(case.seed)
        dtype = getattr(torch, case.dtype)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        models = [Velocity(case.denoiser).to(dtype) for _ in range(2 if case.streams == "experts" else 1)]
        for model in models:
            for parameter in model.parameters():
                parameter.data = 0.7 * normal(*parameter.shape)
            model.a.requires_grad_(not case.frozen)
        prompt = normal(2, case.batch, HIDDEN).requires_grad_(case.condition == "trained")
        data = Inputs(_latents(case, normal), _times(case, generator, dtype), prompt)
        parameters = [p for model in models for p in model.parameters() if p.requires_grad]
        trained = [prompt] if prompt.requires_grad else []
        return cls(case, models, data, [normal(case.batch, DIM) for _ in range(case.steps)], parameters + trained)

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `fn`."""
        parts = {f.name: getattr(self.data, f.name) for f in dataclasses.fields(Inputs)}
        packed: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
            "positional": (tuple(parts.values()), {}),
            "keywords": ((), parts),
            "tuple": ((tuple(parts.values()),), {}),
            "dict": ((parts,), {}),
            "dataclass": ((self.data,), {}),
        }
        return packed[self.case.inputs]

    def fn(self, latents: Any, times: Any = None, prompt: Any = None) -> Any:
        if self.case.inputs == "tuple":
            latents, times, prompt = latents
        elif self.case.inputs == "dict":
            latents, times, prompt = latents["latents"], latents["times"], latents["prompt"]
        elif self.case.inputs == "dataclass":
            latents, times, prompt = latents.latents, latents.times, latents.prompt
        if self.case.latents == "stacked":
            latents = torch.stack(latents)
        z, results, velocities = self.state(latents, 0), [], []
        for i in range(self.case.steps):
            v = self.velocity(i, z, times, prompt, self.models)
            if v is not None:
                velocities.append(v.clone())
                results.append(self.result(i, v, latents))
            z = self.following(i, z, v, latents)
        return self.packed(results, velocities, latents)

    def train(self, models: list[Any]) -> list[Tensor]:
        """The same as a loop with a backward for each step, or one for all. Returns the results of the steps."""
        latents = torch.stack(self.data.latents) if self.case.latents == "stacked" else self.data.latents
        z, losses, results = self.state(latents, 0), [], []
        for i in range(self.case.steps):
            v = self.velocity(i, z, self.data.times, self.data.prompt, models)
            if v is not None:
                velocity = v.clone()
                results.append(self.result(i, v, latents))
                losses += self.loss_of(i, results[-1], velocity)
            if not self.case.once and losses:
                losses.pop().backward()
            z = self.following(i, z, v, latents)
        if losses:
            torch.stack(losses).sum().backward()
        return [result.detach() for result in results]

    def following(self, i: int, z: Tensor, v: Tensor | None, latents: Any) -> Tensor:
        """The state of the next step."""
        if self.case.loop == "chained" and v is not None:
            return z - 0.1 * v
        return self.state(latents, i + 1)

    def state(self, latents: Any, i: int) -> Tensor:
        z: Tensor = latents[:, i] if self.case.latents == "batch first" else latents[i]
        return z

    def time(self, times: Any, i: int) -> Any:
        form = self.case.times
        if form == "computed":
            return (times[i] * 2).expand(self.case.batch)
        if form in ("expanded", "integers"):
            return times[i].expand(self.case.batch)
        if form == "column":
            return times[i].expand(self.case.batch)[:, None]
        return times[i : i + 1] if form == "one" else times[i]

    def velocity(self, i: int, z: Tensor, times: Any, prompt: Tensor, models: list[Any]) -> Tensor | None:
        """What the calls of one step make together."""
        halves, beside = [], None
        for call in self.case.calls_at(i):
            if call.kind in ("no_grad", "beside"):
                with torch.no_grad():
                    values = self.values(models[call.model], call, z, times, prompt)
            else:
                values = self.values(models[call.model], call, z, times, prompt)
            v = values[0] if len(values) == 1 else values[0] + 0.1 * values[1][:, None]
            if call.kind == "beside":
                beside = v
            elif call.kind != "unused":
                halves.insert(call.half, v)
        if not halves:
            return None
        v = halves[0] if len(halves) == 1 else halves[0] + 3 * (halves[1] - halves[0])
        return v if beside is None else v - 0.5 * beside

    def values(self, model: Any, call: Call, z: Tensor, times: Any, prompt: Tensor) -> list[Tensor]:
        t, form = self.time(times, call.i), self.case.condition
        if form == "none":
            return values_in(model(z if call.half == 0 else 2 * z, t))
        own = prompt[call.half]
        if form == "keyword":
            return values_in(model(t=t, condition=own, z=z))
        packed = {"tuple": (own, own), "dict": {"scale": own}, "dataclass": Prompt(own)}
        return values_in(model(z, t, packed.get(form, own)))

    def result(self, i: int, v: Tensor, latents: Any) -> Tensor:
        glue, later = self.case.glue, self.state(latents, i + 1)
        if self.case.loop == "branches" and i % 3 == 1:
            v = v.sin()
        if glue == "value":
            return v
        if glue == "sum":
            return v.sum()
        if glue == "in place on the value":
            v.mul_(2).sub_(later)
        elif glue == "in place on a view":
            v[:, 0].mul_(2)
            v[:, 1:].add_(later[:, 1:])
        loss = (later - v).square()
        if glue == "in place":
            loss += 1
            loss.mul_(0.5)
        return loss.mean(-1)

    def packed(self, results: list[Tensor], velocities: list[Tensor], latents: Any) -> Any:
        extras: dict[str, Any] = {
            "none": (),
            "values": tuple(velocities),
            "detached": tuple(v.detach() for v in velocities),
            "mixed": (None, 3, "name", self.state(latents, 0)),
        }
        form, extra = self.case.outputs, extras[self.case.extras]
        if form == "buffer":
            buffer = torch.zeros(len(results), *results[0].shape, dtype=results[0].dtype)
            for n, result in enumerate(results):
                buffer[n] = result
            return buffer, extra
        if form == "dict":
            return {"results": results, "extras": extra}
        if form == "dataclass":
            return Outputs(results, extra)
        return {"stack": torch.stack, "list": list, "tuple": tuple}[form](results), extra

    def loss_of(self, i: int, result: Tensor, velocity: Tensor | None) -> list[Tensor]:
        """What step `i` adds to the loss: nothing, or a sum."""
        weight = self.case.cotangents[i % len(self.case.cotangents)]
        parts = [result] if velocity is None or self.case.extras != "values" else [result, velocity]
        if weight is None or not any(part.requires_grad for part in parts):
            return []
        return [torch.stack([(part * self.weight(i, part, weight)).sum() for part in parts]).sum()]

    def weight(self, i: int, part: Tensor, weight: float) -> Tensor:
        own = self.weights[i]
        scale = torch.full_like(own, weight)
        if not math.isfinite(weight):
            scale[1:] = 1  # of one sample alone
        return (own * scale)[(slice(None),) * part.dim() + (0,) * (2 - part.dim())]

    def loss(self, outputs: Any) -> Tensor:
        if isinstance(outputs, dict):
            outputs = tuple(outputs.values())
        elif isinstance(outputs, Outputs):
            outputs = outputs.results, outputs.extras
        results, velocities = outputs
        called = [i for i in range(self.case.steps) if any(call.kind != "unused" for call in self.case.calls_at(i))]
        losses = [
            self.loss_of(i, results[n], velocities[n] if self.case.extras == "values" else None)
            for n, i in enumerate(called)
        ]
        return torch.stack([loss for own in losses for loss in own]).sum()

    def run(self, fn: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
        """All tensors that `fn` returns, and the gradients of the parameters."""
        args, kwargs = self.call
        torch.manual_seed(self.case.seed)
        outputs = fn(*args, **kwargs)
        gradients = torch.autograd.grad(self.loss(outputs), self.parameters, allow_unused=True)
        pairs = zip(self.parameters, gradients, strict=True)
        return tensors_of(outputs), [torch.zeros_like(p) if g is None else g for p, g in pairs]


def tensors_of(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs.detach()]
    if isinstance(outputs, dict):
        outputs = tuple(outputs.values())
    if isinstance(outputs, Outputs):
        outputs = (outputs.results, outputs.extras)
    return [tensor for item in outputs for tensor in tensors_of(item)] if isinstance(outputs, (tuple, list)) else []


def _latents(case: Case, normal: Callable[..., Tensor]) -> Any:
    z = normal(case.steps + 1, case.batch, DIM)
    if case.latents == "batch first":
        return z.transpose(0, 1).contiguous()
    if case.latents == "transposed":
        return z.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    return list(z) if case.latents in ("list", "stacked") else z


def _times(case: Case, generator: torch.Generator, dtype: torch.dtype) -> Any:
    t = torch.linspace(1, 0.1, case.steps, dtype=torch.float64)
    t = t if case.schedule == "even" else t**1.5
    if case.schedule == "rising":
        t = t.flip(0)
    elif case.schedule == "repeated":
        t[case.steps // 2] = t[case.steps // 2 - 1]
    elif case.schedule == "constant":
        t[:] = 0.5
    if case.times == "own":
        t = t[:, None] + 0.01 * torch.arange(case.batch)
        order = torch.stack([torch.randperm(case.steps, generator=generator) for _ in range(case.batch)], 1)
        t = t.gather(0, order) if case.schedule == "shuffled" else t
    elif case.schedule == "shuffled":
        t = t[torch.randperm(case.steps, generator=generator)]
    if case.times == "numbers":
        numbers: list[float] = t.tolist()
        return numbers
    return (100 * t).round().long() if case.times == "integers" else t.to(dtype)
