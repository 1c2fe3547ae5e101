"""Programs of the engines over tf.distribute, for programs.py. A process can start each of them once, so all trainings
of a launch share one."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow_programs import collectives

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import rendezvous
from hvdtrain.launch.topology import discover
from hvdtrain.ranks.world import joined
from hvdtrain.run import main as runs
from hvdtrain.run.loop import Loop
from hvdtrain.run.process import RankProcess
from hvdtrain.tensorflow import data
from hvdtrain.tensorflow.engines import Engine, add, distribute, put, subtract
from hvdtrain.tensorflow.trainer import Trainer, open_engine


def strategies(engines: dict[str, dict[str, list[str]]], folder: str) -> dict[str, Any]:
    """For each engine, by its name and devices as in "mirrored cpu,cpu": what its verbs gave, and what each of these
    runs reported, by name; they are in FOLDER/ENGINE."""
    return {name: of_engine(name, chosen, Path(folder) / name) for name, chosen in engines.items()}


def of_engine(name: str, chosen: dict[str, list[str]], folder: Path) -> dict[str, Any]:
    engine_name, _, devices = name.partition(" ")
    flags = ["--engine", engine_name, *(["--devices", devices] if devices else [])]
    with run_of(["linear", *flags, "--output", str(folder / "first")]) as (run, process):
        engine = open_engine(run)
        if engine.serves:
            run.world.serve_rank_0()
            return {"served": engine.world}
        results: dict[str, Any] = {"verbs": verbs(engine)}
        for title, argv in chosen.items():
            prepared = runs.prepare("tensorflow", [*argv, *flags, "--output", str(folder / title)], process)
            results[title] = PROGRAMS.get(title, trained)(prepared, engine)
    return results


@contextlib.contextmanager
def run_of(argv: list[str]) -> Iterator[tuple[runs.Run, RankProcess]]:
    """A run whose ranks are ready, as `run.main` makes it."""
    topology = discover(os.environ)
    process = RankProcess(topology, rendezvous.from_launcher(topology, os.environ))
    world = process.world
    world.start()
    try:
        run = runs.prepare("tensorflow", argv, process)
        with joined(world, "tensorflow", run.engine, os.environ):
            yield run, process
    except BaseException as error:
        world.leave(f"{type(error).__name__}: {error}")
        raise
    world.leave()


def training_of(run: runs.Run, engine: Engine) -> Loop[Trainer]:
    engine._widened = run.recipe.compression == "fp64"
    return Loop(run, Trainer(run, engine))


def trained(run: runs.Run, engine: Engine) -> dict[str, Any]:
    """Trains to the end; ResNet50 only in the first epoch, as validation and checkpoints take far longer."""
    training = training_of(run, engine)
    if run.recipe.model == "resnet50":
        for _ in training.epoch():
            pass
    else:
        training.train()
    trainer = training.trainer
    copies = zip(*map(trainer.engine.copies, trainer.state.tensors.values()), strict=True)
    states = [hashlib.sha256(b"".join(variable.numpy().tobytes() for variable in copy)).hexdigest() for copy in copies]
    return {"line": training.fitted_line(), "states": states}


def overflow(run: runs.Run, engine: Engine) -> list[Any]:
    """Three updates with float16's scaler; in the second one replica's input overflows. After each: weight, scale."""
    training = training_of(run, engine)
    trainer = training.trainer
    seen = []
    for step, own in zip(range(3), trainer.batches(training.progress), strict=False):
        *micro_batches, (x, y) = own
        micro_batches.append((x * (1e30 if step == 1 and engine.rank == engine.size - 1 else 1), y))
        trainer.update(micro_batches, 0.01, step)
        weight = [copy.numpy().item() for copy in trainer.engine.copies(trainer.weights[0])]
        seen.append([weight, trainer.state.scaler.state_dict()["scale"]])
    return seen


def parted(run: runs.Run, engine: Engine) -> str:
    """The error once one bit of the last replica's weights has changed."""
    training = training_of(run, engine)
    weight = training.trainer.engine.copies(training.trainer.weights[0])[-1]
    bits = weight.numpy()
    bits.view(np.int32)[0] ^= engine.rank == engine.size - 1
    weight.assign(bits)
    try:
        training.comparison.replicas(training.progress)
    except HvdtrainError as error:
        return f"{type(error).__name__}: {error}"
    return ""


PROGRAMS = {"overflow": overflow, "parted": parted}


def verbs(engine: Engine) -> dict[str, Any]:
    """The results of each method of an engine on this rank, as plain lists."""
    return {"world": [*engine.world, engine.replicas], **collectives(engine), **replicated(engine)}


def replicated(engine: Engine) -> dict[str, list[float]]:
    """Two updates of every replica, of factor 1 and 10, with its own number: 1 for the first one of all, 2, ...

    By copy of the variables: the sum of the numbers and the gradient of the replicas' own x sum, by the own one in a
    sum; the weight that the combined numbers x factor were subtracted from; and the numbers that were kept.
    """
    with engine.scope():
        results = {
            name: tf.Variable(0.0, dtype=tf.float64, trainable=False) for name in ("sum", "gradient", "weight", "kept")
        }

    def step(own: tf.Tensor, factor: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            tape.watch(own)
            total = engine.sum_tensor(own)
            loss = total * tf.stop_gradient(own)
        put(results["sum"], total)
        put(results["gradient"], tape.gradient(loss, own))
        engine.update(lambda combined: subtract(results["weight"], combined[0]), [own * factor])
        engine.keep(lambda tensors: add(results["kept"], tensors[0]), [own])

    on_all = engine.replicate(step)
    first = 1 + engine.rank * engine.replicas
    inputs = [(tf.constant(float(first + index), tf.float64),) for index in range(engine.replicas)]
    for factor in (1.0, 10.0):
        on_all(inputs, tf.constant(factor, tf.float64))
    return {name: [float(copy) for copy in engine.copies(variable)] for name, variable in results.items()}


def evened() -> list[Any]:
    """The batches that replicas with 3, 2 and 0 requests read, and their weights."""
    read, counts = data.evened([[("a0",), ("a1",), ("a2",)], [("b0",), ("b1",)], []])
    return [["".join(request) for request in read], counts]


def refused(cases: list[list[str]]) -> list[str]:
    """The names or the error for each list of devices."""
    results = []
    for devices in cases:
        try:
            results.append(" ".join(distribute.take(devices)))
        except HvdtrainError as error:
            results.append(f"{type(error).__name__}: {error}")
    return results
