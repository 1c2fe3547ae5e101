"""Checkpoints that survive anything: written beside, synced, checksummed, renamed; read without unpickling.

One checkpoint is a folder `step-00000120` with `state.safetensors` (every array by name) and `meta.json`
(position, numbers, the model's name, and the SHA-256 of all this and the arrays' file). The folder appears
complete, by one rename, or not at all; names that begin with a dot are what a killed run left.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hvdtrain.errors import CheckpointError, OutputError

ARRAYS, META = "state.safetensors", "meta.json"


@dataclass(frozen=True)
class Checkpoint:
    """A training state: arrays by name, and `meta`, a JSON mapping that has at least `step` and `model`."""

    arrays: Mapping[str, np.ndarray]
    meta: Mapping[str, Any]


def commit(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write it as `folder/step-N`, then drop all but the `keep` newest and the best. Returns its path.

    Raises OutputError where it cannot be written; the checkpoints that were there stay.
    """
    final = folder / f"step-{checkpoint.meta['step']:08d}"
    beside = folder / f".{final.name}.tmp"
    try:
        _sweep(folder)
        beside.mkdir(parents=True)
        save_file({k: np.asarray(v, order="C") for k, v in checkpoint.arrays.items()}, beside / ARRAYS)
        meta = {**checkpoint.meta, "sha256": _digest(beside / ARRAYS, checkpoint.meta)}
        (beside / META).write_text(json.dumps(meta, indent=1, sort_keys=True), encoding="utf-8")
        _sync(beside / ARRAYS, beside / META, beside)
        _remove(final)
        beside.rename(final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise OutputError(
            f"checkpoint {final} could not be written: {_reason(error)}; free space or give another --output. "
            "The checkpoints before it are whole: the same command goes on from there."
        ) from None
    _prune(folder, keep)
    return final


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and a line about each newer one that is damaged."""
    damaged: list[str] = []
    for path in reversed(committed(folder)):
        try:
            return read(path), damaged
        except CheckpointError as error:
            damaged.append(str(error))
    return None, damaged


def committed(folder: Path) -> list[Path]:
    """The folder's checkpoints, oldest first."""
    paths = (path for path in folder.glob("step-*") if path.is_dir())
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`. Raises CheckpointError where it is damaged."""
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
        if not isinstance(meta, dict) or _digest(path / ARRAYS, meta) != meta.get("sha256"):
            raise CheckpointError(f"checkpoint {path} is damaged: its checksum differs.")
        return Checkpoint(load_file(path / ARRAYS), meta)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {_reason(error)}.") from None


def _prune(folder: Path, keep: int) -> None:
    paths = committed(folder)
    best = max(reversed(paths), key=_valid_score)  # the newest of equals
    for path in paths[:-keep]:
        if path != best or _valid_score(path) == -math.inf:
            _remove(path)


def _remove(path: Path) -> None:
    """Renamed first: a half-deleted folder must not pass for a checkpoint."""
    doomed = path.with_name(f".{path.name}.old")
    with contextlib.suppress(OSError):
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Frees what a killed run left half written or half deleted."""
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def _valid_score(path: Path) -> float:
    """What the checkpoint scored in validation; -inf where it was not validated, or diverged."""
    try:
        score = float(json.loads((path / META).read_text(encoding="utf-8"))["valid_score"])
    except (OSError, ValueError, KeyError, TypeError):
        return -math.inf
    return -math.inf if math.isnan(score) else score


def _reason(error: Exception) -> str:
    """The error in one line, without the folder that the message names already."""
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return " ".join(str(error).split())


def _digest(path: Path, meta: Mapping[str, Any]) -> str:
    facts = {key: value for key, value in meta.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(*paths: Path) -> None:
    for path in paths:
        with _descriptor(path) as descriptor:
            os.fsync(descriptor)


@contextlib.contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
