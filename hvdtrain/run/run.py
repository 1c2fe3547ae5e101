"""A run: everything that is needed to train, and what rank 0 writes about it."""

import functools
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain import datasets
from hvdtrain.core.metrics import TextUnits, Totals
from hvdtrain.core.plan import Plan
from hvdtrain.core.progress import Progress
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.wording import counted
from hvdtrain.errors import DivergedError
from hvdtrain.launch.devices import peak_flops
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import agreement
from hvdtrain.ranks.world import World
from hvdtrain.record import trackers
from hvdtrain.record.folder import Identity, ResumePoint, RunFolder, folder_name
from hvdtrain.record.journal import Journal
from hvdtrain.record.reporter import Events, Reporter
from hvdtrain.record.trackers import Trackers
from hvdtrain.record.writer import State
from hvdtrain.run.samples import Samples
from hvdtrain.terminal import SCREEN


@dataclass(frozen=True)
class BaseRun:
    """What every run has; `world`: its ranks."""

    identity: Identity
    recipe: Recipe
    """The recipe; of a program `recipe.of_program`."""
    engine: str
    devices: tuple[str, ...]
    """The devices of an engine that computes on several in one process; () with other engines."""
    folder: RunFolder | None
    """The run folder on rank 0, None on the others."""
    resume: ResumePoint
    """Where the run continues, as rank 0 knows; on other ranks it has no checkpoint."""
    world: World
    journal: Journal
    """Rank 0's records of this launch, and each rank's clock."""
    trackers: tuple[str, ...] = field(default=("tensorboard",), kw_only=True)
    """The names of the trackers."""
    best: str = field(default="", kw_only=True)
    """The metric of which a checkpoint's score is, as "highest f1"; "" where none is named."""

    @property
    def topology(self) -> Topology:
        return self.world.topology

    @functools.cached_property
    def samples(self) -> Samples:
        """The examples that are compared over the ranks."""
        return Samples(self.recipe.sample_check)

    def reporter(self, step: int, device: object, notes: tuple[str, ...]) -> Reporter | None:
        """The reporter on rank 0, None on others. Its first lines describe the run; `notes` are the engine's."""
        if not self.folder:
            return None
        folder, topology = self.folder.path, self.topology
        curves = Events(folder, step + 1, self.identity.framework) if "tensorboard" in self.trackers else None
        reporter = Reporter(folder, curves, step, SCREEN, trackers=self._start_trackers(folder), **self._log(device))
        on = ",".join(self.devices) or str(device).strip("/").lower()
        where = (
            f"{counted(topology.size, 'rank')}, {topology.launcher}, {self.engine} on {on} ({self.identity.framework})"
        )
        for line in (*self.identity.lines, f"ranks       {where}", f"output      {folder}", *notes, *self.resume.notes):
            reporter.note(line)
        return reporter

    def agreed(self) -> dict[str, Any]:
        """The values that must be equal on all ranks and may change while the run trains."""
        return {}

    def check_finite(self, totals: Totals, step: int) -> None:
        """Raises DivergedError where the loss over all ranks is no longer finite. Every rank calls it."""
        if not math.isfinite(totals.loss):
            found = self.samples.not_finite()
            of_data = found and f"{found} is not finite: correct it, or leave it out; where that is meant, "
            raise DivergedError(f"the training loss is {totals.loss} at step {step}; {of_data}{self._remedy()}.")
        self.samples.passed = step

    @functools.cached_property
    def code(self) -> dict[str, str]:
        """A digest of the file of each of the user's modules that are imported as the training begins."""
        return agreement.code()

    def metadata(self, progress: Progress, state: State, valid_score: float | None) -> dict[str, Any]:
        """A checkpoint's `meta`: the part of the state that is no array."""
        return {
            **progress.metadata(),
            "framework": self.identity.framework,
            "model": self.identity.model,
            "recipe": self.identity.name,
            "ranks": self.topology.size,
            "scaler": state.scaler.state_dict(),
            "optimizer": dict(state.values()),
            "data": self.identity.contents,
            "valid_score": valid_score,
            "best": self.best,
            "code": self.code,
            "samples": self.samples.kept,
        }

    def finish(self, reporter: Reporter | None, step: int, *, is_over: bool, early: str) -> None:
        """Writes the status and the last line of the log, on rank 0. `is_over`: whether the run trains no more;
        `early`: why, where epochs are left."""
        if not reporter or not self.folder:
            return
        why = {"ended": early} if early else {}
        before = " before: nothing was trained" if self.resume.checkpoint and self.resume.step == step else ""
        self.folder.write_status("finished" if is_over else "stopped", step=step, **why)
        reporter.note(
            f"finished at step {step}{before}; everything is in {self.folder.path}"
            if is_over
            else f"left at step {step} with epochs to go: the same command continues. To end a run for good, call "
            'run.stop("why") in its last epoch.'
        )

    def _start_trackers(self, folder: Path) -> Trackers:
        described = self._described() | ({"best": self.best} if self.best else {})
        about = trackers.metadata(self.topology, self.identity.framework, self.engine, **described)
        project = folder_name(self.identity.name.partition(":")[0])
        return Trackers(self.trackers, folder, project, about, resumes=self.resume.checkpoint is not None)

    def _remedy(self) -> str:
        """What a person may do where the training diverges."""
        raise NotImplementedError

    def _described(self) -> dict[str, Any]:
        """What the trackers show of the model and its training."""
        return {"model": self.identity.model}

    def _log(self, device: object) -> dict[str, Any]:
        """More arguments of the Reporter."""
        return {"is_program": True}


@dataclass(frozen=True)
class Run(BaseRun):
    """The run of a recipe."""

    dataset: datasets.Dataset
    plan: Plan
    evaluates: str = field(default="", kw_only=True)
    """How the metrics of the checkpoint are printed, line or json, where it is evaluated and not trained."""

    def given(self) -> dict[str, Any]:
        """The values that must be equal on all ranks from the start."""
        return agreement.of_plan(self.plan, self.identity.contents) | {"recipe: engine": self.engine}

    def _remedy(self) -> str:
        return f"lower the LR (peak {self.plan.schedule.peak_lr:g}), lengthen the warm-up, or set --clip-norm"

    def _described(self) -> dict[str, Any]:
        return {"recipe": self.recipe.model_dump(mode="json"), "plan": self.plan.to_json()}

    def _log(self, device: object) -> dict[str, Any]:
        return {"valid_examples": self.plan.valid_examples, "text": self.text_units(str(device))}

    def text_units(self, device: str) -> TextUnits | None:
        """What the run is reported in where its data are text. The part of the FLOPs that are used is known in mixed
        precision, on GPUs whose highest rate is known."""
        if not self.dataset.text:
            return None
        is_known = self.plan.flops and self.recipe.precision.endswith("16") and "cpu" not in device.lower()
        peak = peak_flops(os.environ) if is_known else None
        use = 3 * (self.plan.flops or 0) / (peak * self.plan.size) if peak else 0.0
        return TextUnits(self.recipe.sequence_length, self.dataset.text.tokens_per_byte, use)
