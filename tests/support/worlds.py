"""What is run on how many ranks: one launch for each framework, launcher and size, shared by all tests of a session."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optimizer_reference as reference
import pytest
from ranks import LAUNCHERS, NEEDS, programs

LINE = ["linear", "--epochs", "20", "--log-every-steps", "1", "--check-replicas-every-steps", "10"]
SHORT_LINE = ["linear", "--epochs", "4", "--log-every-steps", "1"]
CLIPPED = [*SHORT_LINE, "--clip-norm", "0.05", "--momentum", "0.5"]
IMAGES = [
    "synthetic:tiny", "--batch-size", "16", "--examples", "64", "--epochs", "9", "--log-every-steps", "1",
    "--lr-rule", "none", "--base-lr", "0.01", "--momentum", "0.9", "--weight-decay", "5e-4",
]  # fmt: skip
DIGITS = [
    "digits", "--batch-size", "16", "--log-every-steps", "1", "--lr-rule", "none", "--warmup-epochs", "0",
    "--lr-schedule", "constant",
]  # fmt: skip
SYNC = [*DIGITS, "--batch-norm", "sync"]
FROZEN = [*DIGITS, "--batch-norm", "frozen"]
# At .001 a single ReLU's input that lies within rounding of 0 takes the other side in float32, which moves the next
# loss by 8e-5. In float64 none lies so near.
SINGLE = ["--base-lr", "1e-5"]
EXACT = ["--base-lr", "1e-3", "--max-steps", "4", "--precision", "float64"]

SPLIT = ["--engine", "modelparallel", "--devices"]
TWO_MICRO_BATCHES = ["--accumulation-steps", "2"]

RUNS: dict[str, list[str]] = {
    "line": LINE,
    "line a rank": [*LINE, "--batch-size-per-rank", "25"],
    "short": SHORT_LINE,
    "micro-batches": [*SHORT_LINE, "--accumulation-steps", "5"],
    "clipped": CLIPPED,
    "clipped micro-batches": [*CLIPPED, "--accumulation-steps", "5"],
    "compressed": [*SHORT_LINE, "--compression", "fp16"],
    "adasum": [*SHORT_LINE, "--reduction", "adasum"],
    "bfloat16": [*SHORT_LINE, "--precision", "bfloat16"],
    "float16": [*SHORT_LINE, "--precision", "float16"],
    "float16 clipped": [*CLIPPED, "--precision", "float16", "--compression", "fp16"],
    "workers": [*SHORT_LINE, "--workers", "1"],
    "few to validate": [*IMAGES, "--examples", "16", "--max-steps", "1"],
    "nesterov curve": [*IMAGES, "--nesterov", "--fused-optimizer", "--max-steps", "3"],
    "unfused curve": [*IMAGES, "--nesterov", "--max-steps", "3"],
    "channels last curve": [*IMAGES, "--nesterov", "--channels-last", "--max-steps", "3"],
    "compressed bf16": [*SHORT_LINE, "--compression", "bf16"],
    "compressed float16": [*SHORT_LINE, "--precision", "float16", "--compression", "fp16"],
    "xla": [*SHORT_LINE, "--xla"],
    "inside": [*IMAGES, "--max-steps", "7", "--checkpoint-every-steps", "3", "--checkpoint-every-epochs", "9"],
    "sync curve": [*SYNC, *SINGLE, "--max-steps", "8"],
    "frozen curve": [*FROZEN, *SINGLE, "--max-steps", "6"],
    "sync float64 curve": [*SYNC, *EXACT],
    "frozen float64 curve": [*FROZEN, *EXACT],
    "split curve": [*FROZEN, *SINGLE, "--max-steps", "6", *SPLIT, "cpu,cpu"],
    "split micro-batches curve": [*FROZEN, *SINGLE, "--max-steps", "6", *SPLIT, "cpu,cpu,cpu,cpu", *TWO_MICRO_BATCHES],
}


@dataclass(frozen=True)
class World:
    """The results of one launch: by program, what each rank returned; and the folders of its runs."""

    size: int
    folder: Path
    results: dict[str, list[Any]]

    def losses(self, run: str) -> np.ndarray:
        return losses(self.folder / run)

    def of(self, run: str) -> list[dict[str, Any]]:
        """What each rank returned for that run."""
        return [rank[run] for rank in self.results["trainings"]]


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def of_kind(kind: str, folder: Path) -> list[dict[str, Any]]:
    """The run's records of that kind."""
    return [record for record in records(folder) if record["kind"] == kind]


def losses(folder: Path) -> np.ndarray:
    """The training loss of every step that the run recorded."""
    return np.array([record["loss"] for record in of_kind("step", folder)])


def arrays(folder: Path) -> bytes:
    """The arrays of the run's newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return (newest / "state.safetensors").read_bytes()


def furthest(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest relative difference between two curves."""
    assert ours.shape == theirs.shape and len(ours)
    return float(np.max(np.abs(ours - theirs) / np.abs(theirs)))


FIRST_LINES = ["line", "short", "micro-batches", "clipped"]
OTHER_LINES = ["clipped micro-batches", "compressed", "bfloat16"]
ON_FOUR = [*FIRST_LINES, *OTHER_LINES, "line a rank"]
EXACT_NETWORKS = ["sync float64 curve", "frozen float64 curve"]
NETWORKS = ["sync curve", "frozen curve", *EXACT_NETWORKS]

SMALL_FLOATS: dict[str, Any] = {
    "overflow": {"argv": ["linear", "--precision", "float16", "--output", "{folder}/overflow"]},
    "adasum": {},
    "parted": {"argv": [*LINE, "--output", "{folder}/parted"], "step": 27},
}
OVER_GLOO: dict[str, Any] = {
    "refusals": {"cases": {"gloo": {"reduction": "adasum"}}},
    "abandoned": {"argv": [*LINE, "--output", "{folder}/abandoned"], "step": 27},
}
DDP_ABANDONED: dict[str, Any] = {
    "abandoned": {"argv": [*LINE, "--engine", "ddp", "--output", "{folder}/abandoned"], "step": 27},
}
GRADIENTS: dict[str, Any] = {
    "cases": {
        "as they are": {},
        "each alone": {"fusion_threshold_mb": 0},
        "all side by side": {"fusion_threshold_mb": 64},
        "accumulated": {"accumulation_steps": 3},
        "float16": {"compression": "fp16"},
        "float64": {"compression": "fp64"},
    }
}
ON_TWO = ["line", "short", "micro-batches", "clipped", "float16", "adasum"]
# For slow tests alone.
MORE_ON_TWO = ["workers", "few to validate", "inside", "frozen float64 curve", *OTHER_LINES, "float16 clipped"]

ALONE = [
    *FIRST_LINES, "float16", "nesterov curve", "unfused curve", "split curve", "frozen curve", "sync float64 curve",
]  # fmt: skip
MORE_ALONE = [
    *OTHER_LINES, "float16 clipped", "channels last curve", "split micro-batches curve", "sync curve",
    "frozen float64 curve",
]  # fmt: skip

OPTIMIZED = {
    "adam": ["--optimizer", "adam"],
    "adamw, averaged": ["--optimizer", "adamw", "--weight-decay", "0.1", "--ema-decay", "0.9"],
    "lamb": ["--optimizer", "lamb", "--optimizer-args", "weight_decay=0.1", "betas=[0.9,0.99]"],
    "lars": ["--optimizer", "lars", "--momentum", "0.9"],
    "sgd, averaged": ["--momentum", "0.9", "--ema-decay", "0.9"],
}
YOURS = {
    "torch": {
        "adagrad": ["--optimizer", "torch.optim:Adagrad"],
        "radam": ["--optimizer", "torch.optim:RAdam"],
        "growing": ["--optimizer", "growing:Growing"],
    },
    "tensorflow": {"nadam": ["--optimizer", "keras.optimizers:Nadam"]},
}
RESUMED: dict[str, Any] = {
    framework: {"cases": OPTIMIZED | yours, "folder": "{folder}/resumed"} for framework, yours in YOURS.items()
}
FEW_RESUMED = {**RESUMED["torch"], "cases": {"adamw, averaged": OPTIMIZED["adamw, averaged"], **YOURS["torch"]}}


DRAW = np.random.default_rng(0)
BATCH_NORM: dict[str, Any] = {
    "recipes": {
        f"{kind} {precision}": {"batch_norm": kind, "precision": precision}
        for kind in ("local", "sync", "frozen")
        for precision in ("float32", "float64", "float16")
    },
    "values": {
        "x": (DRAW.normal(size=(3, 8, 3, 4, 5)) * 3 + 2).tolist(),  # steps, examples of all ranks, height, width, maps
        "g": DRAW.normal(size=(3, 8, 3, 4, 5)).tolist(),
        "gamma": DRAW.uniform(0.5, 2, 5).tolist(),
        "beta": DRAW.normal(size=5).tolist(),
        "moving_mean": DRAW.normal(size=5).tolist(),
        "moving_variance": DRAW.uniform(0.5, 2, 5).tolist(),
    },
}
ON_TWO_RANKS = [name for name in BATCH_NORM["recipes"] if name.startswith("sync") or name.endswith("float32")]
BATCH_NORM_ON_TWO = {**BATCH_NORM, "recipes": {name: BATCH_NORM["recipes"][name] for name in ON_TWO_RANKS}}
SGD: dict[str, Any] = {
    "options": {
        "plain": {},
        "decay": {"weight_decay": 0.1},
        "momentum": {"momentum": 0.9},
        "momentum and decay": {"momentum": 0.9, "weight_decay": 0.1},
        "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    },
    "start": DRAW.normal(size=4).tolist(),
    "gradients": DRAW.normal(size=(6, 4)).tolist(),
    "lrs": [0.1, 0.1, 0.02, 0.5, 0.0, 0.3],
}
CLIPPING: dict[str, Any] = {"gradients": [[3.0, -4.0], [12.0]], "norms": [1.0, 12.9, 13.1, 1e9]}
SCALING: dict[str, Any] = {"finite": [True] * 7 + [False, True, True, False, False, True, True, True], "interval": 3}
SMOOTHED: dict[str, Any] = {
    "logits": [[2.0, -1.0, 0.5], [0.0, 0.25, -3.0]],
    "labels": [1, 0],
    "smoothings": [0.0, 0.1, 0.9],
}
CLASSES = [10, 1000]

LAUNCHES: dict[str, dict[str, tuple[list[str], dict[str, Any]]]] = {
    "torch": {
        "alone-1": (ALONE, {"local_verbs": {}}),
        "alone-1-more": (MORE_ALONE, {}),
        "alone-1-resumed": ([], {"resumed_states": FEW_RESUMED}),
        "mpi-1": ([], {}),
        "gloo-1": (["line"], {}),
        "mpi-2": (
            [*ON_TWO, "sync float64 curve"],
            {
                "sync_batch_norm": {"shape": [3, 5, 4, 6], "steps": 3},
                "gradients": GRADIENTS,
                "redone": {"argv": [*SHORT_LINE, "--output", "{folder}/redone"], "step": 7},
                **SMALL_FLOATS,
            },
        ),
        "mpi-2-more": ([*MORE_ON_TWO, "sync curve", "frozen curve"], {}),
        "mpi-2-resumed": ([], {"resumed_states": RESUMED["torch"]}),
        "gloo-2": (["line"], {"gradients": GRADIENTS, "patience": {}, **OVER_GLOO}),
        "mpi-3": (
            [],
            {
                "sync_batch_norm": {"shape": [1, 4, 3, 3], "steps": 2},
                "gradients": GRADIENTS,
                "refusals": {"cases": {"three ranks": {"reduction": "adasum"}}},
            },
        ),
        "mpi-4": ([*ON_FOUR, "sync curve"], {}),
        "gloo-4": (["line", "sync curve"], {}),
        "ddp-1": (["line", "micro-batches"], {}),
        "ddp-2": ([*FIRST_LINES, "compressed bf16", "few to validate", "sync float64 curve"], {}),
        "ddp-2-more": ([*OTHER_LINES, "compressed float16", "frozen float64 curve"], DDP_ABANDONED),
        "ddp-2-resumed": (["short"], {"resumed_states": {**RESUMED["torch"], "engine": "ddp"}}),
        "ddp-4": ([*ON_FOUR, "sync curve"], {}),
    },
    "tensorflow": {
        "alone-1": (
            ["line", "short", "clipped"],
            {
                "local_verbs": {},
                "batch_norm": BATCH_NORM,
                "sgd_steps": SGD,
                "optimizer_steps": {"cases": list(reference.CASES)},
                "clipping": CLIPPING,
                "scaling": SCALING,
                "smoothed": SMOOTHED,
                "fingerprints": {},
                "seeds": {},
                "frozen": {},
                "constants": {},
                "events": {"folder": "{folder}"},
            },
        ),
        "alone-1-more": (
            ["micro-batches", "xla", *OTHER_LINES, "float16", "float16 clipped", *EXACT_NETWORKS],
            {},
        ),
        "alone-1-networks": ([], {"networks": {"classes": CLASSES}}),
        "alone-1-resumed": ([], {"resumed_states": RESUMED["tensorflow"]}),
        "mpi-2": (["line", "short", "clipped", "adasum"], {"batch_norm": BATCH_NORM_ON_TWO, **SMALL_FLOATS}),
        "mpi-2-more": (["micro-batches", "float16", *MORE_ON_TWO, "sync float64 curve"], {}),
        "mpi-2-resumed": ([], {"resumed_states": RESUMED["tensorflow"]}),
        "gloo-2": (["line"], OVER_GLOO),
        "mpi-4": (ON_FOUR, {}),
        "gloo-4": (["line"], {}),
    },
}


def on(*launches: str, besides: tuple[Any, ...] = ()) -> list[Any]:
    """Parameters of a test: (framework, launch, *besides) for each of these launches that a framework has."""
    return [
        pytest.param(
            framework, launch, *besides, id="-".join((framework, launch, *map(str, besides))), marks=NEEDS[framework]
        )
        for framework, begun in LAUNCHES.items()
        for launch in launches
        if launch in begun
    ]


def having(launch: str, run: str) -> list[Any]:
    """Parameters of a test: (framework, launch, run) for each framework that makes this run in this launch."""
    return [param for param in on(launch, besides=(run,)) if run in LAUNCHES[param.values[0]][launch][0]]


def alone(framework: str, run: str) -> str:
    """The launch of one process that makes this run."""
    launches = LAUNCHES[framework].items()
    return next(name for name, (runs, _) in launches if name.startswith("alone-1") and run in runs)


def begin(framework: str, name: str, folder: Path) -> World:
    """Starts that launch, whose runs are in `folder`."""
    kind, size = name.split("-")[:2]
    engine = [] if kind in LAUNCHERS else ["--engine", kind]
    launcher = kind if kind in LAUNCHERS else "alone" if size == "1" else "mpi"
    chosen, more = LAUNCHES[framework][name]
    runs = {run: [*RUNS[run], *engine, "--output", str(folder / run)] for run in chosen}
    filled = json.loads(json.dumps(more).replace("{folder}", str(folder)))
    # Trainings first: a rank's threads can be set only before TensorFlow has computed anything.
    given = {"trainings": {"given": runs}, "verbs": {"engine": kind} if engine else {}, **filled}
    return World(int(size), folder, programs(framework, launcher, int(size), folder, given))
