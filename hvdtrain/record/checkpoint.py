"""Checkpoints: written under another name, synced, with a checksum, renamed; read without unpickling.

A checkpoint is a folder `step-00000120` with `state.safetensors` (every array by name) and `meta.json`
(the position, numbers, the model's name, and a checksum of all this and of the arrays' file). The folder
appears complete, by one rename, or not at all. A name that begins with a dot was left by a killed run. Once
the run that holds the folder finds a damaged one, it renames it to `damaged-step-00000120`.
"""

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from hvdtrain import files
from hvdtrain.errors import OTHER_FOLDER, CheckpointError, OutputError
from hvdtrain.record import tensor_file
from hvdtrain.untrusted import printable

ARRAYS, META = "state.safetensors", "meta.json"
CHECKSUM = "xxh3_128"
"""The checksum's key in META. It finds damage, and stops no forger, who can write it too."""
NAME = re.compile(r"step-([0-9]{8,19})(\.old)?")
HEADER_LIMIT = 64 << 20
"""The most bytes of the arrays' names and shapes; ResNet50 with momentum takes 50 KB."""
META_LIMIT = 16 << 20
"""The most bytes of META; 800 groups of parameters with a scheduler take 504 KB."""
DAMAGED_KEPT = 2
MOST_TRIED = 3
"""So many damaged checkpoints of another user's run are read before a whole one is."""
HOLLOW, LEAST = 16, 64 << 20
DIFFERS = "its checksum differs"
IS_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}

Layout = Mapping[str, tuple[str, list[int]]]
"""By an array's name: NumPy's name of its dtype, and its shape."""

Count = Annotated[int, Field(ge=0, lt=2**62)]
ShortText = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


class Damaged(CheckpointError):
    """The checkpoint's files are not those that were written. Trying again does not help."""


class Metadata(BaseModel):
    """The keys of `meta` that are checked of every checkpoint; a run checks more (schema.py)."""

    model_config = ConfigDict(strict=True)

    step: Count
    framework: ShortText | None = None
    model: ShortText | None = None
    valid_score: float | None = None
    best: ShortText | None = None
    """Of which metric the score is; "" or None for the framework's or program's own choice."""


@dataclass(frozen=True)
class Checkpoint:
    """A training state: arrays by name, and `meta`, a JSON mapping that has at least `step` and `model`."""

    arrays: Mapping[str, np.ndarray]
    meta: Mapping[str, Any]

    @property
    def layout(self) -> Layout:
        """The dtype and shape of every array."""
        return {name: (array.dtype.name, list(array.shape)) for name, array in self.arrays.items()}

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The array of that name. Raises CheckpointError where there is none of numbers, of that shape."""
        found = self.arrays.get(name)
        if found is None or found.shape != shape or found.dtype.kind not in "biuf":
            there = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise CheckpointError(
                f"the checkpoint of step {self.meta['step']} has {there} as {name}, the model needs numbers of shape "
                f"{list(shape)}",
                remedy=OTHER_FOLDER,
            )
        return found


def commit(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes a checkpoint as `folder/step-N`, and removes all earlier ones but the `keep` newest and the best.

    Returns its path. Raises OutputError where it cannot be written; the checkpoints that were there stay.
    """
    final = folder / f"step-{checkpoint.meta['step']:08d}"
    try:
        if folder.is_symlink():
            raise ValueError(f"{folder.name} is a link")
        files.make_folder(folder)
        old = final.with_name(f"{final.name}.old")
        with files.new_folder(final, aside=old) as unfinished:  # the old one counts until the new one does
            _write(unfinished, checkpoint)
            files.parse_json(files.read(unfinished / META, META_LIMIT))  # within the limits of those who read it
            with files.opened(unfinished / ARRAYS, follow=False) as file:
                _checked_places(file.fileno())
        files.remove(old)
    except (OSError, ValueError, SafetensorError) as error:
        raise OutputError(
            f"checkpoint {final} could not be written: {_reason(error)}",
            remedy="free space or give another {folder}. The checkpoints before it are whole: the same command resumes "
            "from there",
        ) from None
    _prune(folder, final, keep)
    return final


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a line about each newer one that is damaged. Changes nothing, as a
    run may be writing there."""
    damaged: list[str] = []
    listed = _listing(folder)
    for path in reversed(committed(folder)):
        before = _identity(path)
        try:
            return read(path), damaged
        except Damaged as error:
            if before is None or _identity(path) != before:  # pruned or replaced meanwhile: by now there is a newer one
                return newest(folder)
            damaged.append(str(error))
            if len(damaged) >= MOST_TRIED and not files.is_own(folder.stat()):
                rule = f"No more than {MOST_TRIED} damaged ones of another user's run are tried; give another run."
                raise CheckpointError(f"{error} {rule}") from None
    # A run that keeps one has committed the next and removed this one between its name's listing and the look at it.
    return (None, damaged) if _listing(folder) == listed else newest(folder)


def recover(folder: Path, check: Callable[[Checkpoint], None]) -> tuple[Checkpoint | None, list[str]]:
    """As `newest`, for the run that holds the folder: removes what a killed run left, and unless `check` raises,
    renames damaged ones. Of those before the whole one it compares the sizes alone. Raises OSError; CheckpointError
    where one cannot be read now."""
    notes = _tidy(folder)
    found, damaged = None, dict[Path, Damaged]()
    for path in reversed(committed(folder)):
        try:
            if found is None:
                found = read(path)
            else:
                _check(path)
        except Damaged as error:
            damaged[path] = error
    if found:
        check(found)
    notes += [_set_aside(path, error) for path, error in damaged.items()]
    for path in _named(folder, "damaged-")[:-DAMAGED_KEPT]:
        files.remove(path)
    return found, notes


def committed(folder: Path) -> list[Path]:
    """The folder's checkpoints, oldest first; none where the folder is a link. Raises CheckpointError."""
    return _named(folder, "")


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, whose files are read once. Raises CheckpointError, as Damaged where it is damaged."""
    meta = metadata(path)
    written = meta.pop(CHECKSUM, None)
    with _explained(path), files.opened(path / ARRAYS, follow=False) as file:
        (where, size), digest = _checked_places(file.fileno()), _begun(meta)
        arrays = tensor_file.read(file, where, size, digest.update)
        if digest.hexdigest() != written:
            raise ValueError(DIFFERS)
    return Checkpoint(arrays, meta)


def chosen(run: Path, *, best: bool) -> tuple[Checkpoint, list[str]]:
    """The newest whole checkpoint of a run, or the best, and a line about each newer one that is damaged. Changes
    nothing. Raises CheckpointError."""
    path = best_of(committed(run / "checkpoints")) if best else None
    found, damaged = (read(path), []) if path else newest(run / "checkpoints")
    if found is None or (best and not path):
        rule = "whole checkpoint; give the folder of a run that wrote one"
        rule = "checkpoint that was validated; leave out --best" if found else rule
        raise CheckpointError(f"{printable(str(run), 200)} holds no {rule}.")
    return found, damaged


def metadata(path: Path) -> dict[str, Any]:
    """The `meta` of a checkpoint, whose checksum is not compared. Raises CheckpointError."""
    with _explained(path):
        meta = files.parse_json(text := files.read(path / META, META_LIMIT, follow=False))
        if not isinstance(meta, dict) or _text(meta) != text:  # the checksum is of the values: 1e5 and 1E5 are one
            raise ValueError(f"{META} is not as it was written")
        step = Metadata.model_validate(meta).step
        if step != _by_step(path)[0]:
            raise ValueError(f"it is of step {step}")
        return meta


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    digest = _begun(checkpoint.meta)
    tensor_file.write(folder / ARRAYS, checkpoint.arrays, digest.update)
    meta = {**checkpoint.meta, CHECKSUM: digest.hexdigest()}
    (folder / META).write_text(_text(meta), encoding="utf-8")


def _prune(folder: Path, latest: Path, keep: int) -> None:
    """Removes old checkpoints. Those of later steps stay, as another run has written them."""
    paths = [path for path in committed(folder) if _by_step(path) <= _by_step(latest)]
    if latest not in paths:
        raise OutputError(
            f"another run has removed {latest}: two write to one folder", remedy="give each its own {folder}"
        )
    best = best_of(paths)
    for path in paths[:-keep]:
        if path != best:
            files.remove(path)


def best_of(paths: Sequence[Path]) -> Path | None:
    """The newest of the checkpoints whose validation score is highest, of the metric that the newest one is scored by;
    None where none was validated."""
    found = [(path, scored) for path in reversed(paths) if (scored := _valid_score(path))]
    return max(found, key=lambda each: (each[1][0] == found[0][1][0], *each[1][1:]))[0] if found else None


def _tidy(folder: Path) -> list[str]:
    """Undoes what a killed run has left unfinished; a line about each damaged checkpoint that the older one
    of its step replaces."""
    notes = []
    for old in [path for path in committed(folder) if path.suffix]:
        new = old.with_suffix("")
        try:
            if new.exists():
                read(new)
                files.remove(old)
                continue
        except Damaged as error:
            notes.append(_set_aside(new, error))
        files.move(old, new)
    for left in sorted(folder.glob(".step-*")):
        files.remove(left)
    return notes


def _set_aside(path: Path, error: Damaged) -> str:
    """Renames a damaged checkpoint, for a person to examine. Returns a line for the log."""
    aside = path.with_name(f"damaged-{path.name}")
    files.remove(aside)
    files.move(path, aside)
    return f"{error} It is kept as {aside.name} and not used."


def _named(folder: Path, prefix: str) -> list[Path]:
    try:
        paths = [] if folder.is_symlink() else [path for path in folder.glob(f"{prefix}step-*") if path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {folder} cannot be read: {error.strerror}; try again.") from None
    named = (path for path in paths if NAME.fullmatch(path.name.removeprefix(prefix)) and not path.is_symlink())
    return sorted(named, key=_by_step)


def _by_step(path: Path) -> tuple[int, bool]:
    """The key that sorts checkpoints by step; one that was replaced comes before the new one."""
    step, _, old = path.name.rpartition("step-")[2].partition(".")
    return int(step), not old


def _listing(folder: Path) -> set[tuple[str, int]]:
    """The folder's entries with their inodes, as a step that is committed twice has the same name."""
    try:
        with os.scandir(folder) as entries:
            return {(entry.name, entry.inode()) for entry in entries}
    except OSError:
        return set()


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_ctime_ns
    return None


def _valid_score(path: Path) -> tuple[str, bool, float] | None:
    """The checkpoint's score in validation; None where it was not validated, or diverged. Before it: its metric, and
    whether a program that had no other number first chose by the training loss, and no longer does."""
    with contextlib.suppress(CheckpointError):
        score, program, best = map(metadata(path).get, ("valid_score", "program", "best"))
        if score is not None and math.isfinite(score):
            return str(best or ""), isinstance(program, dict) and bool(program.get("is_validated")), score
    return None


def _check(path: Path) -> None:
    """Raises CheckpointError where it is seen without reading all bytes that the checkpoint is damaged."""
    metadata(path)
    with _explained(path), files.opened(path / ARRAYS, follow=False) as file:
        _checked_places(file.fileno())


def _checked_places(file: int) -> tuple[tensor_file.Places, int]:
    """Where the arrays are in their file, which is open, and its bytes. Raises ValueError where it cannot be the one
    that was written, before its bytes are read; what `tensor_file.places` raises."""
    status = os.fstat(file)
    size, length = status.st_size, int.from_bytes(os.pread(file, 8, 0), "little")
    if length > HEADER_LIMIT:
        raise ValueError(f"{ARRAYS} has a header of more than {HEADER_LIMIT >> 20} MiB")
    if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise ValueError(f"{ARRAYS} is larger than this host's memory")
    if size < 8 + length or size != (found := tensor_file.places(os.pread(file, length, 8)))[1]:
        raise ValueError(DIFFERS)
    # Gigabytes of holes cost nobody a disk, but whoever reads them minutes and memory. File systems that compress,
    # or keep zeros as holes, have few blocks too: of floats that were trained never so few.
    is_hollow = size > max(LEAST, HOLLOW * 512 * status.st_blocks) and os.lseek(file, 0, os.SEEK_HOLE) < size
    os.lseek(file, 0, os.SEEK_SET)
    if is_hollow and not files.is_own(status):
        raise ValueError(f"{ARRAYS} of {size:,} bytes is another user's and all but {512 * status.st_blocks:,} holes")
    return found


def _text(meta: Mapping[str, Any]) -> str:
    return json.dumps(meta, indent=1, sort_keys=True)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns what is raised by reading the files of `path` into a CheckpointError."""
    try:
        yield
    except OSError as error:
        if error.errno not in IS_DAMAGE and not isinstance(error, FileNotFoundError):  # it may be whole
            raise CheckpointError(f"checkpoint {path} cannot be read: {_reason(error)}; try again.") from None
        raise Damaged(f"checkpoint {path} is damaged: {_reason(error)}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, SafetensorError) as error:
        raise Damaged(f"checkpoint {path} is damaged: {_reason(error)}.") from None


def reason_of(error: ValidationError) -> str:
    """Which key of `meta` breaks which rule, as text."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{printable('.'.join(map(str, first['loc'])))} in {META}: {first['msg']}"


def _reason(error: Exception) -> str:
    """The error in one line, without the folder, which the message names already."""
    if isinstance(error, ValidationError):
        return reason_of(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{Path(error.filename).name}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())


def _begun(meta: Mapping[str, Any]) -> xxhash.xxh3_128:
    """A checksum that has read `meta`, before the bytes of the arrays' file."""
    return xxhash.xxh3_128(json.dumps(meta, sort_keys=True).encode())
