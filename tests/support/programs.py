"""What the tests start on every rank: `python programs.py FRAMEWORK FOLDER`.

FOLDER/given.json holds programs by name, with the values to call them with: functions of this module, or of the
framework's own (torch_programs.py, tensorflow_programs.py). What they return on rank R goes to FOLDER/rank-R.json.
Without a folder it trains what it reads, a JSON list of arguments a line, and answers each with a line.
"""

import contextlib
import gc
import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import small
from captured import captured

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.topology import discover
from hvdtrain.ranks.world import variables
from hvdtrain.run import main as runs
from hvdtrain.run.loop import Loop
from hvdtrain.run.process import RankProcess

FRAMEWORK = sys.argv[1]
framework: Any = importlib.import_module(f"{FRAMEWORK}_programs")
small.shrink(FRAMEWORK)
results: dict[str, Any] = {}


def prepared(argv: list[str]) -> Any:
    """A loop ready to begin, as `python -m hvdtrain.FRAMEWORK ARGV` makes it."""
    run = runs.prepare(FRAMEWORK, argv, RankProcess(discover(os.environ)))
    os.environ.update(variables(run.world, FRAMEWORK, os.environ))
    return Loop(run, framework.Trainer(run, framework.open_engine(run)))


def digest(arrays: dict[str, np.ndarray]) -> str:
    """The same for two ranks only where every array is the same to the bit."""
    content = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        content.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return content.hexdigest()


def verbs(engine: str = "horovod") -> dict[str, Any]:
    """Every verb of an engine that joins ranks."""
    return framework.results_of(getattr(framework, engine)())


def local_verbs() -> dict[str, Any]:
    """Every verb of the engine of one process."""
    return framework.results_of(framework.local())


def trainings(given: dict[str, list[str]]) -> dict[str, Any]:
    """Runs by name, one after the other in one process group: digest of the state, imported modules.

    Of a network's curve only the first epoch's updates are made: validating and storing it takes far longer.
    """
    results = {}
    for name, argv in given.items():
        training = prepared(argv)
        if name.endswith("curve"):
            for _ in training.epoch():
                pass
        else:
            training.train()
        results[name] = {
            "state": digest(framework.state(training.trainer)),
            "modules": sorted({name.partition(".")[0] for name in sys.modules}),
            "line": training.fitted_line(),
            "parameters": framework.parameters(training.trainer),
        }
        del training
        gc.collect()
    return results


def recipes(given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Whole runs by name, one after the other in one process group: exit code, stdout and stderr."""
    return {name: recipe(**one) for name, one in given.items()}


def recipe(argv: list[str], folder: str = ".", adapter: str = FRAMEWORK, kill: int | None = None) -> dict[str, Any]:
    """`python -m hvdtrain.ADAPTER ARGV` in that folder; SIGKILL ends every rank at the step `kill`."""

    def train(run: runs.Run) -> None:
        engine = framework.open_engine(run)  # which stays open for the next
        run.world.exchange(engine.sum)
        if adapter == "lightning":
            from hvdtrain.lightning.recipe import fit, quiet

            with quiet():
                fit(run, engine)
            return
        trainer = framework.Trainer(run, engine)
        update = trainer.update

        def killed_or_updated(batch: Any, lr: float, step: int) -> None:
            if step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            update(batch, lr, step)

        trainer.update = killed_or_updated
        Loop(run, trainer).train()

    with inside(folder):
        return captured(adapter, argv, train)


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    """The folder as the current one; modules that are imported from it are forgotten at the end."""
    if folder == ".":
        yield
        return
    before, paths = Path.cwd(), list(sys.path)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = paths
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "") or "").startswith(folder):
                del sys.modules[name]


def resumed_states(cases: dict[str, list[str]], folder: str, engine: str = "auto") -> dict[str, list[str]]:
    """By case the digests of the state after 15 updates: of one run, and of one that was resumed after 7."""
    results: dict[str, list[str]] = {}
    for name, argv in cases.items():
        given = ["linear", *argv, "--epochs", "2", "--lr", "0.05", "--engine", engine]
        for steps, run in (("15", "whole"), ("7", "resumed"), ("15", "resumed")):
            training = prepared([*given, "--max-steps", steps, "--output", f"{folder}/{name}-{run}"])
            training.train()
            ended = digest(framework.state(training.trainer))
            del training
            gc.collect()
            if steps == "15":
                results.setdefault(name, []).append(ended)
    return results


def initial(given: dict[str, list[str]]) -> None:
    """Leaves a checkpoint of step 0 of each run."""
    for argv in given.values():
        prepared(argv).write_checkpoint(None)


def logits(argv: list[str]) -> list[list[float]]:
    """What the run's newest checkpoint answers to its first validation images."""
    trainer = prepared(argv).trainer
    x, _ = next(trainer.loader.batches(trainer.dataset.valid, [(np.arange(32), None)]))
    if FRAMEWORK == "tensorflow":
        return trainer.model(trainer.step.objective.inputs(x), training=False).numpy().tolist()
    return trainer.model.eval()(x).detach().numpy().tolist()


def redone(argv: list[str], step: int) -> str:
    """The digest of the state of a run, one of whose updates has lost its gradients and is made again."""
    training = prepared(argv)
    framework.lose_once(training.trainer, step)
    try:
        for _ in training.epoch():
            pass
    except ConnectionError:
        training.train()
    return digest(framework.state(training.trainer))


def refusals(cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The engine's refusal of each recipe that it cannot run here."""
    results = {}
    for name, overrides in cases.items():
        try:
            framework.horovod(**overrides)
            results[name] = "taken"
        except HvdtrainError as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


def one_gpu() -> str:
    """What ends Horovod's engine where NCCL would have one GPU for all ranks. No machine of the tests has one: what the
    framework, Horovod and the driver say of it is made up."""
    from hvdtrain.core.recipe import load
    from hvdtrain.engines.registry import Setup
    from hvdtrain.ranks import agreement

    engines = importlib.import_module(f"hvdtrain.{FRAMEWORK}.engines.horovod")
    engines.take_device = lambda *_, **__: framework.torch.device("cuda") if FRAMEWORK == "torch" else "/GPU:0"
    engines.hvd.nccl_built, agreement.own_gpu = (lambda: True), (lambda *_: "GPU-a")
    try:
        engines.HorovodEngine.open(Setup(load("linear"), discover(os.environ), (), ()))
    except HvdtrainError as error:
        return str(error)
    return ""


def overflow(argv: list[str]) -> dict[str, Any]:
    """Three updates with float16's scaler; in the second one rank's input overflows. After each: state, scale."""
    training = prepared(argv)
    trainer = training.trainer
    seen = []
    for step, own in zip(range(3), trainer.batches(training.progress), strict=False):
        micro_batches = own
        if step == 1 and trainer.engine.rank == trainer.engine.size - 1:
            micro_batches = [(x * 1e30, y) for x, y in own]
        trainer.update(micro_batches, 0.01, step)
        weights = framework.state(trainer)
        finite = all(bool(np.isfinite(array).all()) for array in weights.values())
        seen.append([digest(weights), trainer.state.scaler.state_dict()["scale"], finite])
    return {"seen": seen}


def parted(argv: list[str], step: int) -> dict[str, Any]:
    """A run in which one bit of the last rank's weights changes just before that step: exit code and stderr."""

    def train(run: runs.Run) -> None:
        trainer = framework.Trainer(run, framework.open_engine(run))
        run.world.exchange(trainer.engine.sum)
        update = trainer.update

        def flip_then_update(batch: Any, lr: float, made: int) -> None:
            if made + 1 == step and trainer.engine.rank == trainer.engine.size - 1:
                framework.flip_a_bit(trainer)
            update(batch, lr, made)

        trainer.update = flip_then_update
        Loop(run, trainer).train()

    return captured(FRAMEWORK, argv, train)


def abandoned(argv: list[str], step: int) -> dict[str, Any]:
    """A run whose last rank exits at that step, which no launcher takes for a failure: exit code and stderr.

    The last program of a launch, as the ranks are joined no more.
    """
    update = framework.Trainer.update

    def leave_or_update(trainer: Any, batch: Any, lr: float, made: int) -> None:
        if made + 1 == step and trainer.engine.rank == trainer.engine.size - 1:
            results["abandoned"] = None
            write(trainer.engine.rank)
            os._exit(0)
        update(trainer, batch, lr, made)

    framework.Trainer.update = leave_or_update
    return captured(FRAMEWORK, argv, framework.train)


def write(rank: int) -> None:
    (Path(sys.argv[2]) / f"rank-{rank}.json").write_text(json.dumps(results))


def serve() -> None:
    for line in sys.stdin:
        print(json.dumps(list(captured(FRAMEWORK, json.loads(line), framework.train).values())), flush=True)


def run_all(folder: Path) -> None:
    rank = discover(os.environ).rank
    for name, given in json.loads((folder / "given.json").read_text()).items():
        program = getattr(framework, name, None) or globals()[name]
        results[name] = program(**given)
    write(rank)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run_all(Path(sys.argv[2]))
    else:
        serve()
