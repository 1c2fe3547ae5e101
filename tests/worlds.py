"""What is run on how many ranks: one start for each launcher and size, shared by all tests of a session."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ranks import programs

LINE = ["linear", "--epochs", "30", "--log-every-steps", "1", "--guard-every-steps", "10"]
SHORT_LINE = ["linear", "--epochs", "4", "--log-every-steps", "1"]
CLIPPED = [*SHORT_LINE, "--clip-norm", "0.05", "--momentum", "0.5"]
PICTURES = [
    "synthetic:tiny", "--batch-size", "16", "--examples", "64", "--epochs", "9", "--log-every-steps", "1",
    "--lr-rule", "none", "--base-lr", "0.01", "--momentum", "0.9", "--weight-decay", "5e-4",
]  # fmt: skip
DIGITS = [
    "digits", "--batch-size", "16", "--log-every-steps", "1", "--lr-rule", "none", "--warmup-epochs", "0",
    "--lr-schedule", "constant",
]  # fmt: skip
SYNC = [*DIGITS, "--batch-norm", "sync", "--base-lr", "1e-3"]
FROZEN = [*DIGITS, "--batch-norm", "frozen", "--base-lr", "1e-3"]
EXACT = ["--max-steps", "4", "--precision", "float64"]

RUNS: dict[str, list[str]] = {
    "line": LINE,
    "line a rank": [*LINE, "--batch-size-per-rank", "25"],
    "short": SHORT_LINE,
    "parts": [*SHORT_LINE, "--accumulation-steps", "5"],
    "clipped": CLIPPED,
    "clipped parts": [*CLIPPED, "--accumulation-steps", "5"],
    "compressed": [*SHORT_LINE, "--compression", "fp16"],
    "adasum": [*SHORT_LINE, "--reduction", "adasum"],
    "bfloat16": [*SHORT_LINE, "--precision", "bfloat16"],
    "float16": [*SHORT_LINE, "--precision", "float16"],
    "float16 clipped": [*CLIPPED, "--precision", "float16", "--compression", "fp16"],
    "workers": [*SHORT_LINE, "--workers", "1"],
    "few to validate": [*PICTURES, "--examples", "16", "--max-steps", "1"],
    "nesterov curve": [*PICTURES, "--nesterov", "--fused-optimizer", "--max-steps", "3"],
    "unfused curve": [*PICTURES, "--nesterov", "--max-steps", "3"],
    "channels last curve": [*PICTURES, "--nesterov", "--channels-last", "--max-steps", "3"],
    "sync curve": [*SYNC, "--max-steps", "8"],
    "frozen curve": [*FROZEN, "--max-steps", "6"],
    "sync float64 curve": [*SYNC, *EXACT],
    "frozen float64 curve": [*FROZEN, *EXACT],
}


@dataclass(frozen=True)
class World:
    """What one start gave: by program, what each rank told; and the folders of its runs."""

    size: int
    folder: Path
    told: dict[str, list[Any]]

    def losses(self, run: str) -> np.ndarray:
        """The training loss of every step that the run recorded."""
        return np.array([record["loss"] for record in records(self.folder / run) if record["kind"] == "step"])

    def of(self, run: str) -> list[dict[str, Any]]:
        """What each rank told of that run."""
        return [rank[run] for rank in self.told["trainings"]]


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def arrays(folder: Path) -> bytes:
    """The arrays of the run's newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return (newest / "state.safetensors").read_bytes()


LINES = ["line", "line a rank", "short", "parts", "clipped", "clipped parts", "compressed", "bfloat16"]
NETWORKS = ["sync curve", "frozen curve", "sync float64 curve", "frozen float64 curve"]

STARTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "alone-1": (
        [
            *LINES,
            "float16",
            "float16 clipped",
            "nesterov curve",
            "unfused curve",
            "channels last curve",
            *NETWORKS,
        ],
        {},
    ),
    "mpi-1": ([], {}),
    "gloo-1": (["line"], {}),
    "mpi-2": (
        [*LINES, "float16", "float16 clipped", "adasum", "workers", "few to validate", *NETWORKS],
        {
            "sync_batch_norm": {"shape": [3, 5, 4, 6], "steps": 3},
            "overflow": {"argv": ["linear", "--precision", "float16", "--output", "{folder}/overflow"]},
            "adasum": {},
            "refusals": {"cases": {"float16": {"reduction": "adasum", "precision": "float16"}}},
            "parted": {"argv": [*LINE, "--output", "{folder}/parted"], "step": 27},
        },
    ),
    "gloo-2": (["line", "sync curve"], {"refusals": {"cases": {"gloo": {"reduction": "adasum"}}}}),
    "mpi-3": (
        [],
        {
            "sync_batch_norm": {"shape": [1, 4, 3, 3], "steps": 2},
            "refusals": {"cases": {"three ranks": {"reduction": "adasum"}}},
        },
    ),
    "mpi-4": ([*LINES, "sync curve", "frozen curve"], {}),
    "gloo-4": (["line"], {}),
}


def begin(name: str, folder: Path) -> World:
    """Everything of that start; its runs are in `folder`."""
    launcher, _, size = name.partition("-")
    chosen, more = STARTS[name]
    runs = {run: [*RUNS[run], "--output", str(folder / run)] for run in chosen}
    filled = json.loads(json.dumps(more).replace("{folder}", str(folder)))
    given = {"verbs": {}, "trainings": {"given": runs}, **filled}
    return World(int(size), folder, programs(launcher, int(size), folder, given))
