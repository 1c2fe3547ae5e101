"""Run folders as training leaves them, made without training: `python report_folders.py FOLDER` writes all of ALL,
`--pages FOLDER` reports of them, which docs/reports holds.

Times, losses and joules are made up, and the same every time.
"""

import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from hvdtrain.core import recipe as recipes
from hvdtrain.core.plan import Plan
from hvdtrain.core.schedule import Schedule, peak_lr
from hvdtrain.terminal import Status
from hvdtrain.tools import report
from hvdtrain.tools.report import page

BEGAN = 1_764_000_000.0  # 2025-11-24, 16:00 UTC
PHASES = ("start", "import", "rendezvous", "data", "first_step", "training", "validation", "checkpoint", "end")
OPENING = {"start": 0.4, "import": 2.6, "rendezvous": 0.7, "data": 0.3}
COMPUTING, READING, WAITING = 0.5, 0.02, 0.05
"""Seconds of a step."""


class Run:
    """A run that is made record by record: `launch`, then `train`, then one of `end` and nothing (killed)."""

    def __init__(
        self,
        folder: Path,
        *,
        recipe: str = "digits",
        changed: Mapping[str, Any] | None = None,
        expected: Mapping[str, float] | None = None,
        ranks: int = 2,
        hosts: tuple[str, ...] = ("laptop",),
        framework: str = "torch",
        launcher: str = "horovodrun",
        examples: tuple[int, int] = (1437, 360),
        accuracy: float = 0.978,
        rank_seconds: float = COMPUTING,
        rank_watts: Mapping[str, float] | None = None,
        slow: Mapping[int, float] | None = None,
        seed: int = 0,
        processor: float = 0.95,
    ) -> None:
        """`slow`: by rank, how much more seconds it computes a step; `rank_watts`: by source, of one rank;
        `processor`: for how much of a second a rank has a processor."""
        self.folder, self.recipe = folder, recipes.load(recipe, changed)
        self.framework, self.launcher, self.ranks, self.accuracy = framework, launcher, ranks, accuracy
        self.hosts = [hosts[rank * len(hosts) // ranks] for rank in range(ranks)]
        self.seconds, self.watts, self.slow = rank_seconds, rank_watts or {}, slow or {}
        self.random, self.processor = random.Random(seed), processor
        self.plan = plan_of(self.recipe, ranks, examples)
        self.metrics: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []
        self.step, self.kept, self.launches = 0, 0, 0
        folder.mkdir(parents=True, exist_ok=True)
        keys = self.recipe.model_dump(mode="json", exclude={"name"}) | (
            {"expected": dict(expected)} if expected else {}
        )
        lines = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in keys.items())
        (folder / "recipe.yaml").write_text(f"# {recipe}, resolved\ndefault:\n{lines}")
        (folder / "plan.json").write_text(json.dumps({"framework": framework, **self.plan.to_json()}, indent=1))

    def launch(
        self,
        began: float,
        *,
        job: Mapping[str, Any] | None = None,
        queue: tuple[float, float] | None = None,
        opening: Mapping[str, float] = OPENING,
    ) -> None:
        """A process of rank 0 begins; `queue`: the job's submit and start."""
        self.launches += 1
        self.began, self.phases, self.step = began, dict(opening), self.kept
        module = f"hvdtrain.{self.framework}"
        record = {
            "kind": "launch",
            "time": began,
            "launch": self.launches,
            "launcher": self.launcher,
            "engine": "horovod",
            "framework": self.framework,
            "ranks": self.ranks,
            "hosts": self.hosts,
            "devices": ["cpu"] * self.ranks,
            "step": self.kept,
            "job": job,
            "command": ["python", "-m", module, self.recipe.name],
            "cwd": "/home/ada/digits",
            "versions": {"python": "3.12.11", "hvdtrain": "0.1.0", "numpy": "2.3.5", **VERSIONS[self.framework]},
            "classes": 10,
            "gpus": 0,
            "git": {"commit": "5b22e5b0c0ffee5b22e5b0c0ffee5b22e5b0c0ff", "dirty": False},
        }
        self.records.append(record)
        if queue:
            self.records.append({"kind": "job", "submit": queue[0], "start": queue[1]})
        if self.step:
            self.event("resume", f"resumed from step {self.step}")
        self.metrics = [each for each in self.metrics if each["step"] <= self.step]

    @property
    def clock(self) -> float:
        return sum(self.phases.values())

    def train(self, until: int | None = None, first_step: float = 3.0, named_after: int = 40) -> None:
        """Trains to that step, or to the end; a slow rank is named after so many steps."""
        until, first, named = until or self.plan.total_steps, self.step, False
        while self.step < until:
            step_seconds = (self.seconds + READING + WAITING + max(self.slow.values(), default=0.0)) * self._noise(0.05)
            self.step += 1
            self._spend("first_step" if self.step == first + 1 else "training", step_seconds)
            if self.step == first + 1:
                self._spend("first_step", first_step)
            if self.step % self.recipe.log_every_steps == 0:
                self._log(step_seconds)
            if self.slow and not named and self.step >= first + named_after:
                named = True
                self._name_slow()
            if self.step % self.plan.steps_per_epoch == 0:
                self._epoch()

    def checkpoint(self) -> None:
        self._spend("checkpoint", 0.35)
        self.kept = self.step
        self.event("checkpoint", f"checkpoint of step {self.step}")
        self._write_phases()

    def event(self, kind: str, text: str, rank: int | None = None) -> None:
        more = {} if rank is None else {"rank": rank}
        self._add("event", event=kind, time=self.began + self.clock, step=self.step, text=text, **more)

    def end(self, state: str, text: str = "", seconds: float = 0.8) -> None:
        self._spend("end", seconds)
        checks = 1 + self.step // self.recipe.check_replicas_every_steps
        now = self.began + self.clock
        self._energy()
        phases = {name: round(value, 3) for name, value in self.phases.items()}
        self._add("end", state=state, time=now, step=self.step, text=text, phases=phases, replica_checks=checks)
        self.status(state, now, **({"error": text} if text else {}))

    def status(self, state: str, now: float | None = None, **more: Any) -> None:
        """Writes all files."""
        content = {"state": state, "time": now or self.began + self.clock, "step": self.step, **more}
        (self.folder / "status.json").write_text(json.dumps(content, indent=1))
        write_lines(self.folder / "metrics.jsonl", self.metrics)
        write_lines(self.folder / "launches.jsonl", self.records)

    def _spend(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def _noise(self, part: float) -> float:
        return max(0.5, self.random.gauss(1.0, part))

    def _add(self, kind: str, **more: Any) -> None:
        self.records.append({"kind": kind, "clock": round(self.clock, 3), **more})

    def _write_phases(self) -> None:
        phases = {name: round(self.phases[name], 3) for name in PHASES if name in self.phases}
        self._add("phases", time=self.began + self.clock, step=self.step, phases=phases)

    def _progress(self) -> float:
        return self.step / self.plan.total_steps

    def _loss(self) -> float:
        return 2.4 * math.exp(-5 * self._progress()) + 0.01

    def _log(self, step_seconds: float) -> None:
        epoch = (self.step - 1) // self.plan.steps_per_epoch + 1
        lr = self.plan.schedule.lr((self.step - 1) / self.plan.steps_per_epoch)
        record = {"kind": "step", "step": self.step, "epoch": epoch, "loss": self._loss() * self._noise(0.1), "lr": lr}
        record |= {"examples_per_second": self.plan.global_batch / step_seconds, "time": self.began + self.clock}
        self.metrics.append({**record, "gradient_norm": 1.5 * self._noise(0.2) * (1.2 - self._progress())})
        self._ranks()
        self._energy()
        self._write_phases()

    def _ranks(self) -> None:
        times = {rank: self.seconds * self._noise(0.02) + self.slow.get(rank, 0.0) for rank in range(self.ranks)}
        longest = max(times.values())
        rows = {
            "reading": [round(READING * self._noise(0.1), 4) for _ in times],
            "computing": [round(seconds, 4) for seconds in times.values()],
            "waiting": [round(WAITING + longest - seconds, 4) for seconds in times.values()],
        }
        used = self.processor * self.clock
        self._add("ranks", step=self.step, **rows, figures={"processor": [round(used, 2)] * self.ranks})

    def _energy(self) -> None:
        if self.watts:
            joules = {name: round(watts * self.ranks * self.clock, 1) for name, watts in self.watts.items()}
            nodes = len(set(self.hosts))
            self._add("energy", joules=joules, nodes=dict.fromkeys(joules, nodes))

    def _name_slow(self) -> None:
        for rank, more in self.slow.items():
            took, others = 1000 * (self.seconds + more), 1000 * self.seconds
            text = f"rank {rank} on {self.hosts[rank]} is slow in computing: {took:.0f} ms of each step, where "
            self.event("slow", f"{text}the others take {others:.0f} ms and wait for it", rank)

    def _epoch(self) -> None:
        self._spend("validation", 1.1)
        epoch, steps = self.step // self.plan.steps_per_epoch, self.plan.steps_per_epoch
        reached = self.accuracy * (1 - 0.9 * math.exp(-6 * self._progress()))
        correct = round(reached * self.plan.valid_examples)
        record = {"kind": "epoch", "step": self.step, "epoch": epoch, "seconds": steps * self.seconds}
        record |= {"train_loss": self._loss(), "valid_loss": self._loss() + 0.08, "train_acc1": min(1, reached + 0.015)}
        record |= {"valid_acc1": correct / self.plan.valid_examples, "time": self.began + self.clock}
        record |= {"train_examples": steps * self.plan.global_batch, "valid_examples": self.plan.valid_examples}
        self.metrics.append(record)
        self.checkpoint()


VERSIONS = {
    "torch": {"torch": "2.9.1", "horovod": "0.28.1"},
    "tensorflow": {"tensorflow": "2.21.0", "keras": "3.15.0", "horovod": "0.28.1"},
}


def plan_of(recipe: recipes.Recipe, ranks: int, examples: tuple[int, int]) -> Plan:
    """The plan without its data set."""
    batch = recipe.batch_size or recipe.batch_size_per_rank * ranks
    steps = examples[0] // batch
    schedule = Schedule(
        peak_lr(recipe.base_lr, recipe.base_batch_size, batch, recipe.lr_rule),
        steps,
        recipe.epochs,
        recipe.warmup_epochs,
        recipe.lr_schedule,
        recipe.lr_milestones,
        recipe.lr_factor,
        recipe.plateau_patience,
    )
    total = min(recipe.epochs * steps, recipe.max_steps or recipe.epochs * steps)
    local = batch // ranks
    return Plan(recipe, ranks, *examples, batch, local, local, steps, total, 23_528_522, schedule)


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def finished(folder: Path, **more: Any) -> Run:
    """Digits on two ranks of a laptop, to the end."""
    run = Run(folder, **{"expected": {"valid_acc1": 0.978}, "rank_watts": {"rapl": 21.0}, **more})
    run.launch(BEGAN)
    run.train()
    run.end("finished")
    return run


def resumed(folder: Path) -> Run:
    """The same in SLURM: killed in mid-epoch, queued again, killed, started again in the same job, finished."""
    run = Run(folder, expected={"valid_acc1": 0.978}, hosts=("node1", "node2"), launcher="srun")
    run.launch(BEGAN + 95, job={"id": "4711", "restart": 0}, queue=(BEGAN, BEGAN + 90))
    run.train(60)
    run.event("lost", "rank 1 on node2 ended without a message", 1)
    again = run.began + run.clock + 240
    run.event("requeue", "job 4711 is queued again.")
    run.launch(again + 6, job={"id": "4711", "restart": 1}, queue=(again - 230, again))
    run.train(150)
    run.launch(run.began + run.clock + 25, job={"id": "4711", "restart": 1}, queue=(again - 230, again))
    run.train()
    run.end("finished")
    return run


def stopped(folder: Path) -> Run:
    """Stopped by the time limit's signal, with a checkpoint."""
    run = Run(folder, hosts=("node1", "node2"), launcher="srun")
    run.launch(BEGAN + 95, job={"id": "4712", "restart": 0}, queue=(BEGAN, BEGAN + 90))
    run.train(130)
    run.event("signal", "SIGUSR1: the time limit is near")
    run.checkpoint()
    text = "SIGUSR1: stopped after step 130, with a checkpoint; the same command continues from it."
    run.end("stopped", text)
    return run


def left(folder: Path) -> Run:
    """All ranks of the program exited."""
    run = Run(folder)
    run.launch(BEGAN)
    run.train(130)
    run.checkpoint()
    run.end("left", "the program exited after 130 of 220 steps; the same command continues from the last checkpoint")
    return run


def failed(folder: Path) -> Run:
    """Diverged."""
    run = Run(folder, changed={"base_lr": 5.0})
    run.launch(BEGAN)
    run.train(35)
    run.metrics[-1]["loss"] = None
    text = (
        "the training loss is nan at step 35; lower the learning rate (now 5), warm it up, or clip the gradients "
        "(clip_norm)."
    )
    run.end("failed", text)
    return run


def no_number(folder: Path) -> Run:
    """The validation overflows in the last two epochs, as half precision may."""
    run = finished(folder)
    for record in run.metrics:
        if record["kind"] == "epoch" and record["epoch"] > 8:
            record |= {"valid_loss": None, "valid_acc1": None}
    run.status("finished")
    return run


def killed(folder: Path) -> Run:
    """Killed, and never started again."""
    run = Run(folder)
    run.launch(BEGAN)
    run.train(120)
    run.status("running")
    return run


def running(folder: Path) -> Run:
    """Still going; the last sign of life is of now."""
    run, now = Run(folder), time.time()
    run.launch(now)
    run.train(150)
    run.began = now - run.clock
    run.records[0]["time"] = run.began
    run.status("running", now)
    return run


def slow(folder: Path) -> Run:
    """Four ranks on four nodes of a SLURM, the third one slow; whole nodes' counters."""
    hosts = ("node1", "node2", "node3", "node4")
    watts = {"pm_counters": 310.0, "rapl": 140.0}
    run = Run(folder, ranks=4, hosts=hosts, launcher="srun", rank_watts=watts, slow={2: 0.3})
    run.launch(BEGAN + 31, job={"id": "4713", "restart": 0}, queue=(BEGAN, BEGAN + 27))
    run.train()
    run.end("finished")
    return run


def tensorflow(folder: Path) -> Run:
    """The first one in TensorFlow."""
    return finished(folder, framework="tensorflow", rank_seconds=0.62, accuracy=0.9722, seed=7)


def hostile(folder: Path) -> Run:
    """Somebody else's texts: markup, control characters, braces of templates."""
    run = Run(folder, hosts=("<script>alert(1)</script>", "{{ 7 * 7 }}"))
    run.launch(BEGAN, job={"id": "<b>1</b>", "restart": 0})
    run.records[0]["command"] = ["python", "-m", "x", "</title><img src=x onerror=alert(1)>", "\x1b[2J\u202e"]
    run.records[0]["versions"] = {"<script>": "<script>alert(2)</script>"}
    run.train(60)
    run.event("slow", '"><svg onload=alert(3)> & \x00 \x1b]0;x\x07', 1)
    run.end("failed", "</script><script>alert(4)</script> $\\frac{x}{0}$ http://example.com")
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace('model: "resnet50"', "model: '<script>'"))
    (folder / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=2\necho '<script>alert(5)</script>' \x1b[2J\n")
    return run


def own_program(folder: Path) -> Run:
    """A loop of somebody's own: run.json, and metrics of other names."""
    run = finished(folder)
    for name in ("recipe.yaml", "plan.json"):
        (folder / name).unlink()
    about = {"framework": "torch", "engine": "horovod", "ranks": 2, "model": "UNet, 1,234,567 parameters"}
    (folder / "run.json").write_text(json.dumps(about, indent=1))
    for record in run.metrics:
        if record["kind"] == "step":
            record["dice"] = 1 - record["loss"] / 3
        else:
            for name in ("train_acc1", "valid_acc1", "train_examples", "valid_examples", "seconds", "valid_loss"):
                del record[name]
            record["dice"] = 0.9 + record["epoch"] / 200
    run.status("finished")
    return run


def seeds(folder: Path) -> list[Run]:
    """Three runs that differ in their seed alone."""
    accuracies = (0.975, 0.9806, 0.9778)
    return [
        finished(folder / f"seed-{n}", changed={"seed": n}, accuracy=each, seed=n) for n, each in enumerate(accuracies)
    ]


def sweep(folder: Path) -> list[Run]:
    """Runs on 1, 2 and 4 ranks with the same local batch."""
    seconds = {1: 0.5, 2: 0.53, 4: 0.57}
    changed = {"batch_size_per_rank": 32, "epochs": 2, "warmup_epochs": 0}
    runs = []
    for ranks, each in seconds.items():
        runs.append(finished(folder / f"ranks-{ranks}", ranks=ranks, rank_seconds=each, changed=changed, seed=ranks))
    return runs


def bench_scaling(folder: Path) -> None:
    """What `bench scaling --mode both --output FOLDER` leaves."""
    weak = {"1": [1.02, 1.0, 1.01], "2": [1.08, 1.05, 1.1], "4": [1.12, 1.18, 1.15]}
    strong = {"1": [1.02, 1.0, 1.01], "2": [0.58, 0.55, 0.56], "4": [0.36, 0.33, 0.35]}
    results = {"bench": "scaling", "recipe": "synthetic", "framework": "torch", "engine": "horovod", "batch": 16}
    results |= {"model": "resnet50", "threads": 1, "cores": 8, "ranks_per_node": 1, "weak": weak, "strong": strong}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scaling.json").write_text(json.dumps({**results, "machine": {"host": "laptop"}}) + "\n")


ALL: dict[str, Callable[[Path], Any]] = {
    "finished": finished,
    "resumed": resumed,
    "stopped": stopped,
    "left": left,
    "failed": failed,
    "no_number": no_number,
    "killed": killed,
    "running": running,
    "slow": slow,
    "tensorflow": tensorflow,
    "hostile": hostile,
    "own_program": own_program,
    "seeds": seeds,
    "sweep": sweep,
    "bench_scaling": bench_scaling,
}

PAGES = {
    # the page's name: the runs on it, and its sweep
    "digits": (("finished",), None),
    "killed_twice": (("resumed",), None),
    "slow_node": (("slow",), None),
    "failed": (("failed",), None),
    "no_number": (("no_number",), None),
    "sweep": ((), "bench_scaling"),
    "comparison": (("finished", "tensorflow"), None),
}


def pages(folder: Path) -> dict[str, str]:
    """The pages of docs/reports, the same every time, by name; the runs are written into the folder."""
    with contextlib.chdir(folder), mock.patch.dict(os.environ, PATH=""):  # without SLURM's sacct
        for name in {name for runs, sweep in PAGES.values() for name in (*runs, *([sweep] if sweep else []))}:
            ALL[name](Path(name))
        found = {}
        for name, (runs, sweep) in PAGES.items():
            options = report.Options(runs=tuple(map(Path, runs)), sweep=Path(sweep) if sweep else None)
            document = report.document_of(options, Status(""))
            found[name] = page.render(replace(document, made=BEGAN + 86_400))
        return found


if __name__ == "__main__":
    if sys.argv[1] == "--pages":  # make reports
        with tempfile.TemporaryDirectory() as temporary:
            for name, text in pages(Path(temporary)).items():
                Path(sys.argv[2], f"{name}.html").write_text(text)
    else:
        for name, make in ALL.items():
            make(Path(sys.argv[1], name))
