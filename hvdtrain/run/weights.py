"""The weights that a recipe starts from: the file or the checkpoint that they are in, and which of them go where.

A file may be from somebody else: no code in it is run, and it is no larger than this host's memory.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from hvdtrain import files
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.recipe.finetuning import BEST, LAST, chosen
from hvdtrain.core.wording import counted
from hvdtrain.errors import CheckpointError, HvdtrainError
from hvdtrain.record import checkpoint
from hvdtrain.record.checkpoint import HEADER_LIMIT, Checkpoint
from hvdtrain.record.folder import ResumePoint
from hvdtrain.untrusted import one_line, printable

SUFFIXES = {
    "torch": (".safetensors", ".pt", ".pth", ".bin", ".ckpt"),
    "tensorflow": (".safetensors", ".keras", ".h5"),
}
LIBRARIES = {"torch": ("torchvision:", "timm:"), "tensorflow": ()}
"""Libraries with published weights, which lie in a folder of theirs."""
PREFIXES = ("module.", "_orig_mod.", "model.")
"""What DistributedDataParallel, torch.compile and Lightning put before the names of a network's tensors."""
LONGEST_NAME = 1000
MOST_NAMED = 5


def checked(recipe: Recipe, framework: str, resume: ResumePoint) -> list[str]:
    """A line for the log where `init_from` is not read, as the run goes on. Raises CheckpointError where it names what
    is not there, or is nothing that the framework reads."""
    if not recipe.init_from or resume.checkpoint:
        line = f"init_from   is not read: the run goes on from its checkpoint of step {resume.step}"
        return [line] * bool(recipe.init_from)
    source = files.expanded(str(recipe.init_from), "init_from")
    path, shown = _path(source), printable(source, 200)
    if source.startswith(LIBRARIES[framework]) or path.is_dir():
        return []
    if path.suffix not in SUFFIXES[framework]:
        named = " or ".join(f"{each}NAME" for each in LIBRARIES[framework])
        raise CheckpointError(
            f"init_from must be a run folder, a checkpoint, or a file that ends in {', '.join(SUFFIXES[framework])}"
            f"{', or ' * bool(named)}{named}, for {framework}, got {shown}."
        )
    if not path.exists():
        raise CheckpointError(f"init_from {shown} is not there; give the path of a file on rank 0's host.")
    return []


@contextlib.contextmanager
def explained(source: str) -> Iterator[None]:
    """Turns whatever the block raises, which reads the weights, into one line."""
    try:
        yield
    except HvdtrainError:
        raise
    except Exception as error:  # a damaged file may raise any exception
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(error, 200)}"
        raise CheckpointError(
            f"init_from {printable(source, 200)} cannot be read ({why}); give a whole file of weights."
        ) from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The regular file, open. A link of another user's is not followed. Raises OSError, ValueError."""
    with files.opened(path, follow=files.is_own(path.lstat())) as file:
        if os.fstat(file.fileno()).st_size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise ValueError("it is larger than this host's memory")
        yield file


def safetensors(path: Path, framework: str) -> dict[str, Any]:
    """The tensors of a file, as safetensors gives them to that framework. Raises OSError, ValueError, and what the
    library raises."""
    from safetensors import safe_open

    with opened(path) as file:
        if int.from_bytes(file.read(8), "little") > HEADER_LIMIT:
            raise ValueError(f"it has a header of more than {HEADER_LIMIT >> 20} MiB")
        with safe_open(f"/proc/self/fd/{file.fileno()}", framework=framework) as found:
            return {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118 - it is no mapping


def checkpoint_of(source: str, framework: str) -> tuple[Checkpoint, str] | None:
    """The checkpoint of ours that the folder holds or is, and what it is, in words; None where there is no such folder.
    Raises CheckpointError, also where it is of the other framework."""
    path = _path(source)
    if not path.is_dir():
        return None
    is_one, best = (path / checkpoint.META).exists(), source.endswith(BEST)
    found = checkpoint.read(path) if is_one else checkpoint.chosen(path, best=best)[0]
    if (theirs := found.meta.get("framework")) != framework:
        raise CheckpointError(
            f"init_from {printable(source, 200)} is of {theirs}; convert it: "
            f"python -m hvdtrain convert {printable(str(path), 200)} --to {framework}"
        )
    return found, f"step {found.meta['step']}{', the best' * best} of {printable(str(path), 200)}"


def assigned(r: Recipe, own: Mapping[str, str], found: Mapping[str, str], also: Mapping[str, str]) -> dict[str, str]:
    """By the name of each of the network's tensors that is taken, its name in the file.

    `own`, `found`: the kind and shape of each tensor here and there, as text; `also`: other names of tensors here.
    Raises CheckpointError where a tensor is missing, left over or of another shape and `init_skip` does not name it.
    """
    taken, left, known = dict[str, str](), dict[str, str](), {*own, *also}
    for name in found:
        first = also.get(ours := _renamed(r, name, known), ours)
        if first in own and first not in taken:
            taken[first] = name
        elif ours not in {*also, *also.values()}:  # a tied tensor may be there by both names
            left[name if first in own else ours] = name
    chosen("init_rename", filter(None, r.init_rename), {part for name in found for part in (name, _stripped(name))}, {})
    skipped = chosen("init_skip", r.init_skip, dict.fromkeys([*own, *left, *taken]), {})
    missing = [name for name in own if name not in taken and name not in skipped]
    over = [name for name in left if name not in skipped]
    taken = {name: there for name, there in taken.items() if name not in skipped}
    other = [name for name, there in taken.items() if own[name] != found[there]]
    if wrong := [*missing, *over, *other]:
        unlike = [f"{name} is {found[taken[name]]}, here {own[name]}" for name in other]
        listed = {"missing": missing, "left over": over, "of another shape": unlike}
        texts = [f"{what}: {_shortened(names)}" for what, names in listed.items() if names]
        heads = list(dict.fromkeys([*r.init_skip, *(name.rpartition(".")[0] or name for name in wrong)]))
        raise CheckpointError(
            f"init_from {r.init_from} does not fit model {r.model}: {'. '.join(texts)}. Give init_rename where the "
            f"names differ, or leave them out: init_skip: [{_shortened(heads)}]."
        )
    if not taken:
        raise CheckpointError(f"init_from {r.init_from}: init_skip leaves nothing to take; drop it.")
    return taken


def line(taken: Mapping[str, str], own: Mapping[str, str], where: str) -> str:
    """The log's line on what was taken."""
    left = [name for name in own if name not in taken]
    new = f"; new: {_shortened(left)}" if left else ""
    return f"init        {len(taken)} of {counted(len(own), 'tensor')} are from {where}{new}"


def _path(source: str) -> Path:
    return Path(source.removesuffix(BEST).removesuffix(LAST))


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(printable(name, 200) for name in names[:MOST_NAMED])}{more}"


def _stripped(name: str) -> str:
    while prefix := next((each for each in PREFIXES if name.startswith(each)), ""):
        name = name.removeprefix(prefix)
    return name


def _renamed(r: Recipe, name: str, own: set[str]) -> str:
    """The name here of a tensor in the file: renamed, and without the prefixes that its name here does not have."""
    if len(name) > LONGEST_NAME:
        raise ValueError(f"it has a name of {len(name):,} characters")
    while True:
        for old, new in r.init_rename.items():
            if not old or name == old or name.startswith(f"{old}."):
                return f"{new}.{name.removeprefix(old).removeprefix('.')}".strip(".")
        prefix = next((each for each in PREFIXES if name.startswith(each)), "")
        if name in own or not prefix:
            return name
        name = name.removeprefix(prefix)
