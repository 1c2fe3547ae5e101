"""What a step of training spends its time on: a table of its phases, and a trace."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hvdtrain import files

PHASES = ("data", "forward", "backward", "allreduce", "update")
WARM_STEPS = 3
TIMED_STEPS = 10
TRACED_STEPS = 10
STEPS = WARM_STEPS + TIMED_STEPS + 2 + TRACED_STEPS
"""Steps that a run needs for a whole profile."""


class Profiler:
    """Measures TIMED_STEPS, after WARM_STEPS, for the table `phases.json`; then traces TRACED_STEPS to `profile.json`.

    `trace` is a context manager around the steps. A step begins with its data and ends with its update. On a GPU, CUDA
    events are between the phases: a phase is what the GPU did or waited for, and no step waits for the clock.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._on_gpu = folder, device.type == "cuda"
        self._steps = 0
        self._spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in (*PHASES, "step")}
        self._began: Any = None
        trace = str(folder / "profile.json")
        self.trace = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=STEPS - TRACED_STEPS - 2, warmup=2, active=TRACED_STEPS, repeat=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(trace),
        )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the block as one of PHASES."""
        began = self._now()
        if name == PHASES[0]:
            self._began = began
        if self._on_gpu:
            torch.cuda.nvtx.range_push(name)
        with torch.profiler.record_function(name):
            yield
        if self._on_gpu:
            torch.cuda.nvtx.range_pop()
        self._add(name, began)

    def step(self) -> list[str]:
        """Ends a step. Returns the lines of the table after the last timed step, else none."""
        self._add("step", self._began)
        self._steps += 1
        self.trace.step()
        return self._table() if self._steps == WARM_STEPS + TIMED_STEPS else []

    def lacking(self) -> list[str]:
        """A line of the log where the run was too short for a profile."""
        if self._steps >= STEPS:
            return []
        return [f"the run's {self._steps} steps are too few for a profile: table and trace need {STEPS} steps"]

    def _add(self, name: str, began: Any) -> None:
        if WARM_STEPS <= self._steps < WARM_STEPS + TIMED_STEPS:
            self._spans[name].append((began, self._now()))

    def _now(self) -> Any:
        """An event on the GPU's stream; without a GPU, seconds."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _table(self) -> list[str]:
        if self._on_gpu:
            torch.cuda.synchronize()
        sums = {name: sum(self._milliseconds(*span) for span in spans) for name, spans in self._spans.items()}
        mean = {name: total / TIMED_STEPS for name, total in sums.items()}
        step = mean.pop("step")
        mean["rest"] = step - sum(mean.values())
        clock = "CUDA events" if self._on_gpu else "the host's clock"
        results = {"steps": TIMED_STEPS, "clock": clock, "step_ms": step, "phases_ms": mean}
        files.write(self._folder / "phases.json", json.dumps(results, indent=1))
        return table(mean, step, f"mean of {TIMED_STEPS} steps, by {clock}")

    def _milliseconds(self, began: Any, ended: Any) -> float:
        return began.elapsed_time(ended) if self._on_gpu else 1000 * (ended - began)


def table(phases: dict[str, float], step: float, how: str) -> list[str]:
    """The lines of a table of the phases' milliseconds and percentages of the step's."""
    rows = [*phases.items(), ("step", step)]
    return [f"{'phase':10}{'ms':>9}{'%':>7}  ({how})", *(f"{n:10}{ms:9.2f}{100 * ms / step:7.1f}" for n, ms in rows)]
