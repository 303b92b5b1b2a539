"""diffusers schedulers inside a function that torch.compile captures.

What works, tried with FlowMatchEulerDiscreteScheduler, DDIMScheduler, DPMSolverMultistepScheduler and UniPCMultistepScheduler of
diffusers 0.42: make the scheduler and call `set_timesteps` before the function (it runs numpy), `restart` it in the function's
first line, then call `scheduler.step` in the order of its timesteps. DDIM keeps no position: give it its timesteps as Python
numbers (`scheduler.timesteps.tolist()`), by which its tables are indexed on the host.
"""

from typing import Any


def restart(scheduler: Any) -> None:
    """Put a scheduler back before its first step, as `set_timesteps` does, in a way that torch.compile can trace.

    Without `set_begin_index` a scheduler looks its first step up by the value of the timestep, which cannot be captured; and with
    the state of an earlier call it would go on counting from there.
    """
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
        scheduler._step_index = None
    if hasattr(scheduler, "model_outputs"):  # multistep solvers remember what the denoiser said before
        scheduler.model_outputs = [None] * scheduler.config.solver_order
        scheduler.lower_order_nums = 0
    if hasattr(scheduler, "timestep_list"):  # UniPC
        scheduler.timestep_list = [None] * scheduler.config.solver_order
        scheduler.last_sample = None
