"""Everything that this project claims of GPUs, asked of one card in half an hour: `python tests/gpu/first_hour.py`.

Four parts of at most eight minutes each; `--part 2` runs one of them, `--dry-run` runs all on the CPU, as CI does, so
that this program itself is not what fails. Each check is a process of its own with a time limit: one that breaks the
card's context breaks no other. The last lines are a table: claim, pass or fail, figure, card. docs/gpu.md says what to
carry to a machine without a network.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PART_SECONDS = 480
STEPS = 20
RESULT = "first_hour: "
RECIPE = """
default:
  model: resnet50
  stem: cifar
  dataset: digits
  batch_size: 64
  epochs: 10
  base_lr: 0.05
  lr_rule: none
  lr_schedule: constant
  weight_decay: 5e-4
"""


@dataclass(frozen=True)
class Check:
    """One claim, the function that shows it, and how long that may take."""

    part: int
    claim: str
    show: Callable[["Here"], str]
    seconds: int

    @property
    def name(self) -> str:
        return self.show.__name__


@dataclass(frozen=True)
class Here:
    """Where a check runs: on the card, or in a dry run on the CPU; and its folder."""

    dry: bool
    folder: Path

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"


CHECKS: list[Check] = []


def check(part: int, claim: str, seconds: int = 90) -> Callable[[Callable[[Here], str]], Callable[[Here], str]]:
    """Registers a function that returns the figure it found, and raises AssertionError where the claim is wrong."""

    def register(show: Callable[[Here], str]) -> Callable[[Here], str]:
        CHECKS.append(Check(part, claim, show, seconds))
        return show

    return register


def command(here: Here, *argv: object, code: int | None = 0, **environ: str | None) -> str:
    """The output of a program; `code` is the exit code that it must have. A variable of None is removed."""
    changed = {**os.environ, **environ}
    names = {name: value for name, value in changed.items() if value is not None}
    ran = subprocess.run(
        [str(each) for each in argv],
        cwd=here.folder,
        env=names,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert code is None or ran.returncode == code, f"exit code {ran.returncode}: {ran.stdout[-1500:]}"
    return ran.stdout


def train(here: Here, *argv: object, launcher: tuple[object, ...] = (), **environ: str | None) -> str:
    """Trains a recipe in the check's folder."""
    program = [sys.executable] if not launcher or launcher[0] != "torchrun" else []
    flags = ["--tracker", "none", "--log-every-steps", 1]
    return command(here, *launcher, *program, "-m", "hvdtrain.torch", *argv, *flags, **environ)


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step of a run."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


# Part 1: the build, and which card a rank takes.


@check(1, "Horovod is built with NCCL, without a network, and adds on the card", 400)
def offline_build(here: Here) -> str:
    flags = ["--print"] if here.dry else []
    gpu = "none" if here.dry else "nccl"
    began = time.monotonic()
    text = command(here, sys.executable, "-m", "hvdtrain", "build", "--frameworks", "torch", "--gpu", gpu, *flags)
    assert here.dry or "GPU" in text.splitlines()[-2], text[-500:]
    return f"{time.monotonic() - began:.0f} s"


@check(1, "CUDA_VISIBLE_DEVICES is understood as the driver does")
def device_selection(here: Here) -> str:
    from hvdtrain.launch import devices

    listed = "" if here.dry else command(here, "nvidia-smi", "-L")
    uuid = next(iter(re.findall(r"UUID: (GPU-[^)]+)", listed)), "GPU-0")
    cases = [None, "0", uuid, uuid[:12], "", "-1", "0,-1", "0,0", " 0", "NoDevFiles", "GPU-00000000", "0x0"]
    ask = "import ctypes; c = ctypes.CDLL('libcuda.so.1'); n = ctypes.c_int(); c.cuInit(0); "
    ask += "c.cuDeviceGetCount(ctypes.byref(n)); print(n.value)"
    wrong = []
    for value in cases:
        environ = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environ |= {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        for path in (environ.get("PATH", ""), "/nowhere"):  # with nvidia-smi and without
            devices.driver_gpus.cache_clear()
            ours = devices.visible_gpus({**environ, "PATH": path})
            driver = 0 if here.dry else int(command(here, sys.executable, "-c", ask, CUDA_VISIBLE_DEVICES=value))
            wrong += [f"{value!r}: {ours}, the driver {driver}"] if ours != driver else []
    assert not wrong, "; ".join(wrong)
    return f"{len(cases)} values"


@check(1, "NVML's energy is that of its power")
def energy(here: Here) -> str:
    import torch

    from hvdtrain.record import energy as ours

    counters = ours.gpu_counters({})
    if here.dry:
        return f"{len(counters)} counters"
    began, before = time.monotonic(), [counter.joules() for counter in counters]
    square, watts = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), []
    while time.monotonic() - began < 5:
        for _ in range(20):
            square @ square
        torch.cuda.synchronize()
        watts.append(float(command(here, "nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")))
    seconds = time.monotonic() - began
    used = sum(counter.joules() - first for counter, first in zip(counters, before, strict=True))
    mean = sum(watts) / len(watts)
    assert 0.7 < used / seconds / mean < 1.3, f"{used / seconds:.0f} W by energy, {mean:.0f} W by power"
    return f"{used / seconds:.0f} W by energy, {mean:.0f} W by power"


# Part 2: the arithmetic of a step.


def step_losses(device: Any, dropout: float = 0.0, graph: bool = False, **settings: Any) -> list[float]:
    """The losses of some updates of a small residual network, by hvdtrain's own step."""
    import torch
    from torch import nn

    from hvdtrain.core import recipe as recipes
    from hvdtrain.torch import engines
    from hvdtrain.torch.engines.local import LocalEngine
    from hvdtrain.torch.step import Step, record_cuda_graph

    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.reset()
    lr = settings.pop("lr", 0.05)
    momentum = {"momentum": 0.9} if settings.get("optimizer", "sgd") in {"sgd", "lars"} else {}
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "small.yaml").write_text(RECIPE)
        recipe = recipes.load(str(file), {"optimizer": "sgd", **momentum, **settings})
    real = torch.float64 if recipe.precision == "float64" else torch.float32
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(32, 10),
    )
    layout = torch.channels_last if recipe.channels_last else torch.preserve_format
    model = model.to(device, real, memory_format=layout)
    record = record_cuda_graph if graph else None
    step = Step(recipe, LocalEngine(device), model, lr, in_one=True, record=record)
    step.objective.classes = 10
    found = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(64, 3, 10, 10, generator=generator), torch.randint(10, (64,), generator=generator)
        x[torch.arange(64), :, y] += 1.5
        engines.seed(recipe.seed, number, 0, device)
        pair = x.to(device, real, memory_format=layout), y.to(device)
        found.append(float(step([pair], lr)[0].loss.detach()))
    return found


def device_of(here: Here) -> Any:
    import torch

    return torch.device(here.device, None if here.dry else 0)


def far(found: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, reference, strict=True))


@check(2, "losses in every precision and layout are near float64 on the CPU", 180)
def precisions(here: Here) -> str:
    import torch

    reference = step_losses(torch.device("cpu"), precision="float64")
    cases: dict[str, tuple[dict[str, Any], float]] = {
        "float32": ({}, 1e-3),
        "channels_last": ({"channels_last": True}, 1e-3),
        "fused": ({"fused_optimizer": True}, 1e-3),
        "bfloat16": ({"precision": "bfloat16"}, 0.05),
        "bfloat16 channels_last fused": (
            {"precision": "bfloat16", "channels_last": True, "fused_optimizer": True},
            0.05,
        ),
    }
    if not here.dry:
        cases["float16 with its scaler"] = ({"precision": "float16"}, 0.05)
    return tolerated(
        {name: (far(step_losses(device_of(here), **of), reference), most) for name, (of, most) in cases.items()}
    )


@check(2, "AdamW, LAMB and LARS are near float64 on the CPU", 120)
def optimizers(here: Here) -> str:
    import torch

    found = {}
    for name, lr in (("adamw", 1e-3), ("lamb", 1e-2), ("lars", 1.0)):
        settings = {"optimizer": name, "lr": lr}
        reference = step_losses(torch.device("cpu"), precision="float64", **settings)
        found[name] = far(step_losses(device_of(here), **settings), reference), 1e-3
    return tolerated(found)


def tolerated(found: dict[str, tuple[float, float]]) -> str:
    text = ", ".join(f"{name} {value:.1e}" for name, (value, _) in found.items())
    assert all(value <= most for value, most in found.values()), text
    return text


@check(2, "a CUDA graph's steps are the eager ones to the bit, with dropout and seeds too", 120)
def graphs(here: Here) -> str:
    for settings in ({}, {"dropout": 0.5}, {"optimizer": "adamw", "lr": 1e-3}, {"clip_norm": 1.0}):
        eager = step_losses(device_of(here), fused_optimizer=True, **settings)
        again = step_losses(device_of(here), fused_optimizer=True, graph=not here.dry, **settings)
        assert eager == again, f"{settings}: they differ"
    return f"4 kinds of {STEPS} steps"


@check(2, "compiled steps are near the eager ones, and their graph equals them", 200)
def compiled(here: Here) -> str:
    if here.dry and not shutil.which("g++"):
        return "no g++ here"
    eager = step_losses(device_of(here))
    plain = step_losses(device_of(here), compile=True)
    assert here.dry or step_losses(device_of(here), compile=True, graph=True) == plain
    return tolerated({"compiled": (far(plain, eager), 1e-3)})


# Part 3: two ranks on one card, and runs that are cut short.


@check(3, "two ranks on one card: ddp over Gloo trains as two ranks on the CPU do", 120)
def two_ranks_ddp(here: Here) -> str:
    flags = ["linear", "--engine", "ddp", "--epochs", 2]
    launcher = ("torchrun", "--nproc-per-node", 2)
    train(here, *flags, "--output", "card", launcher=launcher, **customised(here, GLOO))
    train(here, *flags, "--device", "cpu", "--output", "cpu", launcher=launcher)
    return tolerated(
        {"losses": (far([*losses(here.folder / "card").values()], [*losses(here.folder / "cpu").values()]), 1e-5)}
    )


# NCCL refuses two ranks on one card.
GLOO = "from hvdtrain.torch.engines import ddp; ddp._backend = lambda topology, device: 'gloo'"
DETERMINISTIC = "import torch; torch.use_deterministic_algorithms(True, warn_only=True)"


def customised(here: Here, line: str) -> dict[str, str]:
    """The environment in which every process of hvdtrain's runs this line first."""
    (here.folder / "sitecustomize.py").write_text(f"import sys\nif 'hvdtrain.torch' in sys.orig_argv:\n    {line}\n")
    path = os.pathsep.join(filter(None, (str(here.folder), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@check(3, "stopped by SIGTERM and by SIGKILL, a run continues to the same bits", 240)
def resumed(here: Here) -> str:
    environ = customised(here, DETERMINISTIC)
    flags = ["digits", "--epochs", 2, "--device", here.device, "--checkpoint-every-steps", 5]
    flags += ["--max-steps", 30] if here.dry else []
    train(here, *flags, "--output", "whole", **environ)
    whole = losses(here.folder / "whole")
    for number in (signal.SIGTERM, signal.SIGKILL):
        interrupt(here, here.folder / number.name, number, flags, environ)
        train(here, *flags, "--output", number.name, **environ)
        assert losses(here.folder / number.name) == whole, f"after {number.name}"
    return f"{len(whole)} steps, twice"


def interrupt(here: Here, output: Path, number: signal.Signals, flags: list[object], environ: dict[str, str]) -> None:
    """Trains until some steps are logged, then sends the signal."""
    argv = [sys.executable, "-m", "hvdtrain.torch", *map(str, flags), "--tracker", "none", "--log-every-steps", "1"]
    argv += ["--output", str(output)]
    log = output / "metrics.jsonl"
    with subprocess.Popen(argv, cwd=here.folder, env={**os.environ, **environ}, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not (log.is_file() and log.read_text().count('"step"') >= 12):
            time.sleep(0.05)
        process.send_signal(number)


# Part 4: memory, copies, speed.


@check(4, "memory does not grow over 20 epochs", 150)
def memory(here: Here) -> str:
    train(here, "digits", "--epochs", 2 if here.dry else 20, "--device", here.device, "--output", "run")
    rows = [json.loads(line) for line in (here.folder / "run" / "launches.jsonl").read_text().splitlines()]
    peaks = [row["memory"] for row in rows if "memory" in row]
    return f"peak {max(peaks) / 2**20:.0f} MiB" if peaks else "not recorded"


@check(4, "the next batch is copied while the card computes", 60)
def copies(here: Here) -> str:
    if here.dry:
        return "nothing to overlap"
    import torch

    host = torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    square, stream = torch.randn(8192, 8192, device="cuda"), torch.cuda.Stream()

    def timed(work: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def copy() -> None:
        with torch.cuda.stream(stream):
            host.to("cuda", non_blocking=True)

    def compute() -> None:
        square @ square

    timed(compute), timed(copy)
    alone, copied, both = timed(compute), timed(copy), timed(lambda: (compute(), copy()))
    hidden = (alone + copied - both) / min(alone, copied)
    assert hidden > 0.5, f"{hidden:.0%} hidden"
    return f"{hidden:.0%} hidden"


@check(4, "the ladder from one line of PyTorch to a whole run", 240)
def ladder(here: Here) -> str:
    program = Path(__file__).parents[1] / "benchmarks" / "ladder.py"
    if here.dry:
        return command(here, sys.executable, program, "--help").splitlines()[0]
    return command(here, sys.executable, program, "--rounds", 2).splitlines()[-1]


def card() -> str | None:
    """The name of the first GPU that PyTorch can use; None where there is none."""
    ask = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    ran = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    return ran.stdout.strip() or None


def run_here(name: str, dry: bool, folder: Path) -> None:
    """Runs one check in this process, and prints what came of it."""
    chosen = next(each for each in CHECKS if each.name == name)
    try:
        passed, figure = True, chosen.show(Here(dry, folder))
    except AssertionError as error:
        passed, figure = False, str(error)
    print(RESULT + json.dumps([passed, " ".join(figure.split())[:400]]), flush=True)


def run(chosen: Check, dry: bool, left: float) -> tuple[str, str]:
    """Runs one check in a process of its own: pass, fail or no end, and its figure."""
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        argv = [sys.executable, __file__, "--only", chosen.name, "--folder", folder, *(["--dry-run"] if dry else [])]
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            try:
                output, _ = process.communicate(timeout=max(1, min(chosen.seconds, left)))
            except subprocess.TimeoutExpired:
                return "no end", f"within {min(chosen.seconds, left):.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    print(output, end="", flush=True)
    result = [line for line in output.splitlines() if line.startswith(RESULT)]
    if not result:
        return "fail", " ".join(output.splitlines()[-1:])[:200] or f"exit code {process.returncode}"
    passed, figure = json.loads(result[-1].removeprefix(RESULT))
    return "pass" if passed else "fail", figure


def main() -> int:
    """0 where all claims hold, or where there is no GPU; 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=sorted({each.part for each in CHECKS}))
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, to see that this program runs")
    parser.add_argument("--only", choices=[each.name for each in CHECKS], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        run_here(given.only, given.dry_run, given.folder)
        return 0
    name = "no card: a dry run on the CPU" if given.dry_run else card()
    if name is None:
        print("no GPU that PyTorch can use: nothing was run; --dry-run tries this program on the CPU")
        return 0
    rows, began = [], {}
    for each in CHECKS:
        if given.part in {None, each.part}:
            print(f"== {each.claim}", flush=True)
            left = PART_SECONDS - (time.monotonic() - began.setdefault(each.part, time.monotonic()))
            rows.append((each.claim, *run(each, given.dry_run, left)))
    print("\n| claim | result | figure | card |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} | {name} |")
    return int(any(result != "pass" for _, result, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
