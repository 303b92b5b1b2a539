"""Measurements the demo and the benchmarks share: seconds, peak memory, and how far one gradient is from another."""

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

MIB = 2**20
_M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock:
    """Seconds by name, over many repetitions."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        synchronize()
        began = time.perf_counter()
        yield
        synchronize()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)


def flat_gradient(parameters: Sequence[nn.Parameter]) -> Tensor:
    """All gradients as one vector in float64 (a missing one counts as zero)."""
    pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([piece.detach().flatten().double().cpu() for piece in pieces])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def relative_error(a: Tensor, exact: Tensor) -> float:
    return float((a - exact).norm() / exact.norm())


def peak_memory(fn: Callable[[], object], device: str = "cpu") -> float:
    """Peak memory of `fn()` in MiB above what was in use before it. It runs once before, so that what stays (gradients) is there.

    On "cuda" torch's own counter. On a CPU (Linux, glibc) the peak of the resident set, with every allocation above
    64 KiB given back to the system as soon as it is freed, so that the peak follows the tensors. NaN elsewhere.
    """
    if device == "cuda":
        fn()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
        fn()
        gc.collect()
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak, proc(5)
        before = _status("VmRSS")
        fn()
        peak = _status("VmHWM") - before
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * MIB)
        return peak / 1024
    except (OSError, AttributeError, KeyError):
        return float("nan")


def _status(field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0])
