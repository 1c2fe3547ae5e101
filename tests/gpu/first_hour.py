"""Everything that this project claims of GPUs, asked of one card in half an hour: `python tests/gpu/first_hour.py`.

Four parts of at most eight minutes each; `--part 2` runs one of them, `--dry-run` runs all on the CPU, as CI does, so
that this program itself is not what fails. Each check is a process of its own with a time limit: one that breaks the
card's context breaks no other. The last lines are a table: claim, pass or fail, figure, card. docs/gpu.md says what to
carry to a machine without a network.

Checks are forked from a process that has imported PyTorch and has not touched the card. Every process carries MARK in
its environment: by that the first one ends them all, and the second one where the first is killed.
"""

import argparse
import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PART_SECONDS = 480
MARK = "HVDTRAIN_FIRST_HOUR"
PR_SET_PDEATHSIG = 1
TESTS = Path(__file__).parents[1]
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
class Here:
    """Where a check runs: on the card, or in a dry run on the CPU; and its folder."""

    dry: bool
    folder: Path

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def steps(self) -> int:
        return 2 if self.dry else 20


@dataclass(frozen=True)
class Check:
    """One claim, the function that shows it, and how long that may take."""

    part: int
    claim: str
    show: Callable[[Here], str]
    seconds: int


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


def begin(here: Here, *argv: object, before: Callable[[], object] = int, **environ: str) -> int:
    """Begins `python -m hvdtrain.torch ARGV` in a forked process, which calls `before` first; its process number."""
    if not (process := os.fork()):
        os.environ.update(environ)
        run_hvdtrain(here, argv, before)
    return process


def run_hvdtrain(here: Here, argv: Any, before: Callable[[], object] = int) -> None:
    """Does what `python -m hvdtrain.torch ARGV` does, in this process, and ends it."""
    os.chdir(here.folder)
    before()
    flags = ["--tracker", "none", "--log-every-steps", "1"]
    sys.argv[:] = ["hvdtrain.torch", *map(str, argv), *flags]
    sys.argv += [] if "--device" in argv else ["--device", here.device]
    try:
        runpy.run_module("hvdtrain.torch", run_name="__main__", alter_sys=True)
        os._exit(0)
    except SystemExit as ended:
        sys.stdout.flush()
        os._exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def ended(process: int) -> int:
    """The exit code of a forked process; negative, the number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def train(here: Here, *argv: object, before: Callable[[], object] = int, **environ: str) -> None:
    code = ended(begin(here, *argv, before=before, **environ))
    assert code == 0, f"the run ended with exit code {code}: its lines are above"


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step of a run."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


# Part 1: the build, and which card a rank takes.


@check(1, "Horovod is built with NCCL, without a network", 400)
def offline_build(here: Here) -> str:
    flags = ["--print"] if here.dry else []
    began = time.monotonic()
    build = ("-m", "hvdtrain", "build", "--frameworks", "torch", "--gpu", "nccl", *flags)
    text = command(here, sys.executable, *build, PIP_NO_INDEX="1")
    if here.dry:
        return next(line for line in text.splitlines() if "GPU: " in line).partition("GPU: ")[2]
    built = command(here, sys.executable, "-c", "import horovod.torch as hvd; print(hvd.nccl_built())")
    assert built.split()[-1] not in {"0", "False"}, f"nccl_built() is {built[-200:]}"
    return f"{time.monotonic() - began:.0f} s"


@check(1, "one rank adds on the card, and the hooks of hvdtrain's engine average its gradients")
def one_rank(here: Here) -> str:
    if here.dry and not importlib.util.find_spec("horovod"):
        return "no Horovod here"
    import horovod.torch as hvd
    import torch

    from hvdtrain.core import recipe as recipes
    from hvdtrain.torch.averaging import Averager
    from hvdtrain.torch.engines.horovod import HorovodEngine

    device, engine = device_of(here), HorovodEngine(recipes.load("digits"), None)
    engine.device = device
    assert here.dry or hvd.nccl_built(), "this Horovod has no NCCL"
    given = torch.arange(1000.0, device=device)
    found = hvd.allreduce(given, op=hvd.Sum)
    assert found.device == given.device and torch.equal(found, given), "a sum over one rank is another"
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)).to(device)
    wanted = torch.autograd.grad(model(torch.ones(4, 8, device=device)).sum(), list(model.parameters()))
    averager = Averager(model, engine, "none", at_end=False)  # as with two ranks: an engine of one has no hooks
    model(torch.ones(4, 8, device=device)).sum().backward()
    averager.finish()
    assert all(torch.equal(each.grad, one) for each, one in zip(model.parameters(), wanted, strict=True)), "gradients"
    engine.close()
    return f"{len(wanted)} gradients, {device}"


@check(1, "CUDA_VISIBLE_DEVICES by index, by UUID and empty is understood as the driver does, without nvidia-smi too")
def device_selection(here: Here) -> str:
    import torch

    from hvdtrain.launch import devices

    uuid = "GPU-0" if here.dry else f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    cases = [None, "0", uuid, uuid[:12], "", "-1", "0,-1", "0,0", " 0", "NoDevFiles", "99"]
    ask = "import ctypes; c = ctypes.CDLL('libcuda.so.1'); n = ctypes.c_int(); c.cuInit(0); "
    ask += "c.cuDeviceGetCount(ctypes.byref(n)); print(n.value)"
    wrong = []
    for value in cases:
        environ = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environ |= {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        driver = 0 if here.dry else int(command(here, sys.executable, "-c", ask, CUDA_VISIBLE_DEVICES=value))
        for path in (environ.get("PATH", ""), "/nowhere"):  # with nvidia-smi and without
            devices.driver_gpus.cache_clear()
            ours = devices.visible_gpus({**environ, "PATH": path})
            wrong += [f"{value!r}: {ours}, the driver {driver}"] if ours != driver and not here.dry else []
    assert not wrong, "; ".join(wrong)
    return f"{len(cases)} values"


@check(1, "NVML's energy is that of its power")
def energy(here: Here) -> str:
    import torch

    from hvdtrain.ranks import energy as ours

    counters = ours.gpu_counters(os.environ)
    if here.dry:
        return f"{len(counters)} counters"
    assert counters, "no counter"
    pynvml = importlib.import_module("pynvml")
    handles = [pynvml.nvmlDeviceGetHandleByUUID(counter.key.removeprefix("nvml:")) for counter in counters]
    square, watts = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), []
    began, before = time.monotonic(), [counter.joules() for counter in counters]
    while time.monotonic() - began < 10:
        for _ in range(20):
            square @ square
        torch.cuda.synchronize()
        watts.append(sum(pynvml.nvmlDeviceGetPowerUsage(handle) for handle in handles) / 1e3)
    seconds = time.monotonic() - began
    used = sum(counter.joules() - first for counter, first in zip(counters, before, strict=True))
    mean = sum(watts) / len(watts)
    assert 0.7 < used / seconds / mean < 1.3, f"{used / seconds:.0f} W by energy, {mean:.0f} W by power"
    return f"{used / seconds:.0f} W by energy, {mean:.0f} W by power"


# Part 2: the arithmetic of a step.


def step_losses(
    here: Here, device: Any = None, dropout: float = 0.0, graph: bool = False, **settings: Any
) -> list[float]:
    """The losses of some updates of a small residual network, by hvdtrain's own step."""
    import torch
    from torch import nn

    from hvdtrain.core import recipe as recipes
    from hvdtrain.torch import engines
    from hvdtrain.torch.engines.cuda_graph import record_cuda_graph
    from hvdtrain.torch.engines.local import LocalEngine
    from hvdtrain.torch.step import Step

    device = device or device_of(here)
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.reset()
    lr = settings.pop("lr", 0.003)
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
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(3200, 10),
    )
    layout = torch.channels_last if recipe.channels_last else torch.preserve_format
    model = model.to(device, real, memory_format=layout)
    record = record_cuda_graph if graph else None
    step = Step(recipe, LocalEngine(device), model, lr, in_one=True, record=record)
    step.objective.classes = 10
    found = []
    for number in range(here.steps):
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

    reference = step_losses(here, torch.device("cpu"), precision="float64")
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
    return tolerated({name: (far(step_losses(here, **of), reference), most) for name, (of, most) in cases.items()})


@check(2, "AdamW, LAMB and LARS are near float64 on the CPU", 120)
def optimizers(here: Here) -> str:
    import torch

    found = {}
    for name, lr in (("adamw", 1e-3), ("lamb", 1e-2), ("lars", 1.0)):
        settings = {"optimizer": name, "lr": lr}
        reference = step_losses(here, torch.device("cpu"), precision="float64", **settings)
        found[name] = far(step_losses(here, **settings), reference), 1e-3
    return tolerated(found)


def tolerated(found: dict[str, tuple[float, float]]) -> str:
    text = ", ".join(f"{name} {value:.1e}" for name, (value, _) in found.items())
    assert all(value <= most for value, most in found.values()), text
    return text


@check(2, "a CUDA graph's steps are the eager ones to the bit, with dropout and seeds too", 120)
def graphs(here: Here) -> str:
    for settings in ({}, {"dropout": 0.5}, {"optimizer": "adamw", "lr": 1e-3}, {"clip_norm": 1.0}):
        eager = step_losses(here, fused_optimizer=True, **settings)
        again = step_losses(here, graph=not here.dry, **({"fused_optimizer": True} | settings))
        assert eager == again, f"{settings}: they differ"
        assert not settings.get("dropout") or eager != step_losses(here, fused_optimizer=True), "dropout drops nothing"
    return f"4 kinds of {here.steps} steps"


@check(2, "compiled steps are near the eager ones, and their graph equals them", 200)
def compiled(here: Here) -> str:
    import torch

    if here.dry:  # without a C++ compiler's minute
        from hvdtrain.torch import step

        step.check_compiler = lambda device: None
        torch.compile = functools.partial(torch.compile, backend="eager")
    eager = step_losses(here)
    plain = step_losses(here, compile=True)
    assert here.dry or step_losses(here, compile=True, graph=True) == plain, "the graph differs"
    return tolerated({"compiled": (far(plain, eager), 1e-3)})


# Part 3: two ranks on one card, and runs that are cut short. NCCL refuses two ranks on one card.


def over_gloo() -> None:
    from hvdtrain.torch.engines import ddp

    ddp._backend = lambda topology, device: "gloo"


def staged() -> None:
    """Horovod's gradients by way of the CPU."""
    from hvdtrain.torch.engines.horovod import HorovodEngine

    average, gather, broadcast = HorovodEngine.average, HorovodEngine.gather_rows, HorovodEngine.broadcast

    def averaged(self: Any, tensor: Any, name: str) -> Callable[[], object]:
        wait = average(self, host := tensor.cpu(), name)
        return lambda: (wait(), tensor.copy_(host))

    def broadcast_of(self: Any, tensors: dict[str, Any], metadata: Any) -> Any:
        hosts = {name: tensor.cpu() for name, tensor in tensors.items()}
        found = broadcast(self, hosts, metadata)
        for name, tensor in tensors.items():
            tensor.data.copy_(hosts[name])
        return found

    HorovodEngine.average, HorovodEngine.broadcast = averaged, broadcast_of
    HorovodEngine.gather_rows = lambda self, row: gather(self, row.cpu()).to(row.device)
    HorovodEngine.gpu_operations = True


LINEAR = ["linear", "--epochs", 1]


@functools.cache
def alone(here: Here) -> list[float]:
    """The losses of one process on the CPU, with the batch of two ranks."""
    train(here, *LINEAR, "--engine", "local", "--device", "cpu", "--output", "alone")
    return [*losses(here.folder / "alone").values()]


@check(3, "two ranks on one card: ddp over Gloo has the losses of one process", 120)
def two_ranks_ddp(here: Here) -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    argv = [*LINEAR, "--engine", "ddp", "--output", "card"]
    ranks = [begin(here, *argv, before=over_gloo, RANK=str(rank), LOCAL_RANK=str(rank), **names) for rank in range(2)]
    codes = [ended(rank) for rank in ranks]
    assert codes == [0, 0], f"the ranks ended with {codes}: their lines are above"
    return tolerated({"losses": (far([*losses(here.folder / "card").values()], alone(here)), 1e-5)})


@check(3, "two ranks on one card: Horovod, staged through the CPU, has the losses of one process", 120)
def two_ranks_horovod(here: Here) -> str:
    if here.dry and not importlib.util.find_spec("horovod"):
        return "no Horovod here"
    program = [sys.executable, __file__, *(["--dry-run"] if here.dry else []), "--folder", here.folder, "--staged"]
    launch = [Path(sys.executable).with_name("horovodrun"), "--disable-cache", "--gloo", "-np", 2]
    command(here, *launch, *program, *LINEAR, "--engine", "horovod", "--output", "card")
    return tolerated({"losses": (far([*losses(here.folder / "card").values()], alone(here)), 1e-5)})


def deterministic() -> None:
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)


def cut_short(number: signal.Signals) -> None:
    """The run gets this signal after its 12th step, and waits until its monitor has read it."""
    deterministic()
    from hvdtrain.ranks.stop import StopAgreement
    from hvdtrain.torch.trainer import Trainer

    read, signalled = threading.Event(), StopAgreement.signalled

    def noted(*given: Any, **named: Any) -> None:
        signalled(*given, **named)
        read.set()

    StopAgreement.signalled = noted

    update = Trainer.update

    def updated(self: Any, batch: Any, lr: float, step: int) -> None:
        update(self, batch, lr, step)
        if step == 11:
            os.kill(os.getpid(), number)
            read.wait(60)

    Trainer.update = updated


@check(3, "stopped by SIGTERM and by SIGKILL, a run continues to the same bits", 240)
def resumed(here: Here) -> str:
    name = "linear" if here.dry else "digits"
    flags = [name, "--epochs", 2, "--checkpoint-every-steps", 5]
    train(here, *flags, "--output", "whole", before=deterministic)
    whole = losses(here.folder / "whole")
    for number in (signal.SIGTERM, signal.SIGKILL):
        stopped = begin(here, *flags, "--output", number.name, before=functools.partial(cut_short, number))
        code, steps = ended(stopped), losses(here.folder / number.name)
        assert code != 0 and len(steps) < len(whole), f"{number.name} after {len(steps)} steps: exit code {code}"
        train(here, *flags, "--output", number.name, before=deterministic)
        assert losses(here.folder / number.name) == whole, f"after {number.name} the losses are others"
    return f"{len(whole)} steps, twice"


# Part 4: memory, copies, speed.

WIDE = """
import torch
from torch import nn

class Wide(nn.Sequential):
    def __init__(self, side, most):
        layers = [nn.Conv2d(3 if at == 0 else 64, 64, 3, padding=1) for at in range(20)]
        super().__init__(*(each for layer in layers for each in (layer, nn.Tanh())), nn.Flatten(),
                         nn.Linear(64 * side**2, 4))
        self.most = most

    def forward(self, x):
        if self.training and x.device.type == "cpu" and len(x) > self.most > 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return super().forward(x)

def images(side):
    x = torch.randn(128, 3, side, side, generator=torch.Generator().manual_seed(0))
    return (torch.utils.data.TensorDataset(x, torch.arange(128) % 4),) * 2
"""


def with_little_memory(gigabytes: float) -> None:
    """PyTorch may have so much of the card, from now on."""
    import torch

    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gigabytes * 2**30 / whole, 0)


@check(4, "where 64 images do not fit into a part of the card's memory, halves of them make the same losses", 90)
def too_little_memory(here: Here) -> str:
    from hvdtrain.record import checkpoint

    (here.folder / "wide.py").write_text(WIDE)
    side = 4 if here.dry else 96
    kept = 64 * 20 * 2 * 64 * side**2 * 4 / 2**30  # of 64 images, by the outputs of 20 convolutions and their tanh
    argv = ["linear", "--model", "wide:Wide", "--dataset", "wide:images", "--dataset-args", f"side={side}"]
    argv += ["--loss", "cross_entropy", "--batch-size", 64, "--base-lr", 0.01, "--epochs", 2, "--engine", "local"]
    for name, most in (("whole", 0), ("halves", 32)):
        limit = functools.partial(with_little_memory, 0.75 * kept) if most and not here.dry else int
        more = ["--model-args", f"side={side}", f"most={most}", "--fit-memory", "--output", name]
        train(here, *argv, *more, before=limit)
    parts = checkpoint.chosen(here.folder / "halves", best=False)[0].meta["parts"]
    assert parts == 2, f"each micro-batch was divided into {parts}"
    found, whole = ([*losses(here.folder / name).values()] for name in ("halves", "whole"))
    return f"{kept:.1f} GiB kept; {tolerated({'losses': (far(found, whole), 1e-3)})}"


def measured_epochs(file: Path) -> None:
    """Writes what the card's memory holds at the beginning of each epoch: MiB reserved, allocated; streams."""
    import torch

    from hvdtrain.torch.trainer import Trainer

    batches, seen = Trainer.batches, []

    def counted(self: Any, progress: Any) -> Any:
        streams = {block["stream"] for block in torch.cuda.memory_snapshot()} if torch.cuda.is_available() else ()
        of = (torch.cuda.memory_reserved, torch.cuda.memory_allocated)
        seen.append([*(measure() / 2**20 if streams else 0 for measure in of), len(streams)])
        file.write_text(json.dumps(seen))
        yield from batches(self, progress)

    Trainer.batches = counted


@check(4, "memory does not grow from the third epoch to the 20th", 150)
def memory(here: Here) -> str:
    argv = ["linear", "--epochs", 4] if here.dry else ["digits", "--epochs", 20]
    file = here.folder / "memory.json"
    train(here, *argv, "--output", "run", before=functools.partial(measured_epochs, file))
    seen = json.loads(file.read_text())
    assert len(seen) == argv[-1], f"{len(seen)} epochs"
    (reserved, allocated, _), last = seen[2], seen[-1]
    text = f"MiB reserved {reserved:.0f}, then {last[0]:.0f}; allocated {allocated:.0f}, then {last[1]:.0f}"
    assert last[0] <= reserved + 16 and last[1] <= allocated + 1 and last[2] <= 3, f"{text}; {last[2]} streams"
    return f"{text}; {last[2]} streams"


@check(4, "the next batch is copied while the card computes", 60)
def copies(here: Here) -> str:
    import numpy as np
    import torch

    from hvdtrain import datasets
    from hvdtrain.core import recipe as recipes
    from hvdtrain.torch.data import Loader

    side = 16 if here.dry else 224
    dataset = datasets.load("synthetic", image_size=side, classes=10, examples=256)
    loader = Loader(recipes.load("synthetic"), dataset, device_of(here))
    if not here.dry:
        torch.cuda.set_device(0)
        square = torch.randn(8192, 8192, device="cuda")
    copied, computed, copy = [], [], loader._copied

    def mark() -> Any:
        if here.dry:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(tensor: Any) -> Any:
        began, found = mark(), copy(tensor)
        copied.append((began, mark()))
        return found

    loader._copied = timed
    first, count = mark(), 0
    for _ in loader.batches(dataset.train, [(np.arange(256), None)] * 8):
        began, count = mark(), count + 1
        for _ in range(0 if here.dry else 4):
            square @ square
        computed.append((began, mark()))
    assert count == 8, f"{count} batches"
    if here.dry:
        return "nothing to overlap"
    torch.cuda.synchronize()
    spans = [[tuple(first.elapsed_time(event) for event in span) for span in each] for each in (copied[4:], computed)]
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans[0] for b in spans[1])
    total = sum(end - begin for begin, end in spans[0])
    assert both > total / 2, f"{both / total:.0%} of {total:.1f} ms"
    return f"{both / total:.0%} of {total:.1f} ms"


@check(4, "the ladder of cifar100's recipes, in short", 270)
def ladder(here: Here) -> str:
    sys.path += [str(TESTS / "support"), str(TESTS / "benchmarks")]
    import ladder as program
    from cifar100_files import batch, write

    from hvdtrain.datasets import cifar100

    counts = (40, 24) if here.dry else (50_000, 10_000)
    write(here.folder / cifar100.FOLDER, *(pickle.dumps(batch(count)) for count in counts))
    rungs, file = ("bs256", "bs256-bf16-nhwc-extra-opts", "bs256-bf16-nhwc-extra-opts-compile-resident"), "ladder.json"
    short = ("--device", "cpu", "--seconds", "1") if here.dry else ("--seconds", "430")  # of which it keeps 190 s
    os.chdir(here.folder)
    program.main(["--data", str(here.folder), "--json", file, "--rungs", ",".join(rungs), *short])
    found = json.loads(Path(file).read_text())["rungs"]
    rates = {name: sorted(rung.get("images_per_second") or [0]) for name, rung in found.items()}
    text = ", ".join(f"{name} {of[len(of) // 2]:,.0f}" for name, of in rates.items())
    assert here.dry or all(map(all, rates.values())), text
    return f"images/s: {text}"


def card() -> str | None:
    """The name of the first GPU that PyTorch can use; None where there is none."""
    ask = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    ran = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    return next(iter(ran.stdout.splitlines()[-1:]), "").strip() or None


def show(chosen: Check, here: Here) -> None:
    """Runs one check in this process, ends it, and writes what came of it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        passed, figure = True, chosen.show(here)
    except AssertionError as error:
        passed, figure = False, str(error)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        passed, figure = False, f"{type(error).__name__}: {error}"
    result = [passed, " ".join(figure.replace("|", "/").split())[:400]]
    (here.folder / "result").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


def run(chosen: Check, dry: bool, left: float) -> tuple[str, str]:
    """Runs one check in a process of its own: pass or fail, and its figure."""
    with tempfile.TemporaryDirectory(prefix="first-hour-", ignore_cleanup_errors=True) as folder:
        here, limit = Here(dry, Path(folder)), min(chosen.seconds, left)
        if limit <= 0:
            return "fail", "not begun: the part's time was over"
        until = time.monotonic() + limit
        if not (process := os.fork()):
            show(chosen, here)
        while not os.waitpid(process, os.WNOHANG)[0]:
            if time.monotonic() > until:
                end_marked(but=os.getpid())
                os.waitpid(process, 0)
                return "fail", f"no end within {limit:.0f} s"
            time.sleep(0.05)
        end_marked(but=os.getpid())
        result = here.folder / "result"
        if not result.exists():
            return "fail", "it was killed: its lines are above"
        passed, figure = json.loads(result.read_text())
        return "pass" if passed else "fail", figure


def marked(but: int) -> list[int]:
    """The processes that this program has started, except one; those forked have the environment of their parent."""
    wanted, found = f"{MARK}={os.environ[MARK]}".encode(), []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if int(each.name) != but and wanted in (each / "environ").read_bytes().split(b"\0"):
                found.append(int(each.name))
    return found


def end_marked(but: int = 0) -> None:
    """Kills these processes, and those that they have started meanwhile."""
    for _ in range(10):
        if not (found := marked(but)):
            return
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # those that became this process's
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def work(dry: bool, part: int | None, name: str) -> int:
    """Runs the checks one after the other, and prints the table."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: (end_marked(but=os.getpid()), os._exit(143)))
    os.environ |= {"HVDTRAIN_REPORT": "off", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for module in ("torch._dynamo", "hvdtrain.torch.trainer", "hvdtrain.run.main"):
        importlib.import_module(module)
    rows, began = [], {}
    for each in CHECKS:
        if part in {None, each.part}:
            print(f"== {each.claim}", flush=True)
            since = time.monotonic()
            left = PART_SECONDS - (since - began.setdefault(each.part, since))
            rows.append((each.claim, *run(each, dry, left)))
            print(f"== {': '.join(rows[-1][1:])} ({time.monotonic() - since:.1f} s)", flush=True)
    print("\n| claim | result | figure | card |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} | {name} |")
    return int(any(result != "pass" for _, result, _ in rows))


def main() -> int:
    """0 where all claims hold, or where there is no GPU; 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=sorted({each.part for each in CHECKS}))
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, to see that this program runs")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    parser.add_argument("--staged", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.staged:
        run_hvdtrain(Here(given.dry_run, given.folder), given.staged, staged)
    if not given.dry_run:  # one card, also where there are more
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    name = "no card: a dry run on the CPU" if given.dry_run else card()
    if name is None:
        print("no GPU that PyTorch can use: nothing was run; --dry-run tries this program on the CPU")
        return 0
    if MARK in os.environ:
        return work(given.dry_run, given.part, name)
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return subprocess.run([sys.executable, __file__, *sys.argv[1:]], check=False).returncode
    finally:
        end_marked()


if __name__ == "__main__":
    sys.exit(main())
