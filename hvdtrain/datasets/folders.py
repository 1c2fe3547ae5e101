"""The image files of each class, found as by torchvision's ImageFolder; files that are not read are counted by kind."""

import errno
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from hvdtrain.datasets.base import SHOWN
from hvdtrain.errors import DataError
from hvdtrain.terminal import counted
from hvdtrain.untrusted import one_line, printable, quoted

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""The suffixes of images, as in torchvision's IMG_EXTENSIONS."""
DANGLING = "dangling links"
MOST_KINDS = 5
MOST_FOLDERS = 1 << 17
"""The most folders in a class: a few folders with links to each other make endlessly many paths."""
NUMBERED = re.compile(r"(.+)[._-][0-9]+\.[^.]+")
BY_NAME = 'for f in *[._-][0-9]*.*; do c=${f%.*}; c=${c%[._-]*}; mkdir -p -- "$c" && mv -- "$f" "$c"; done'
ONE_IN_TEN = (
    f"find train/ -mindepth 2 ! -type d | grep -iE '[.]({'|'.join(each[1:] for each in SUFFIXES)})$' | shuf | "
    "awk -F/ 'n[$2]++ % 10 == 0' | while read -r f; do "
    'mkdir -p "val/$(dirname "${f#train/}")" && mv "$f" "val/${f#train/}"; done'
)
TINY = 'while read -r f c _; do mkdir -p "$c" && mv "images/$f" "$c"; done < val_annotations.txt; rmdir images'
FOOD = (
    'for s in train test; do while read -r f; do mkdir -p "$s/${f%/*}" && ln "images/$f.jpg" "$s/${f%/*}"; done '
    "< meta/$s.txt; done"
)


@dataclass(frozen=True)
class Found:
    """The images of a split, class after class."""

    root: Path
    classes: tuple[str, ...]
    names: list[bytes]
    """The images' paths, relative to the folders of their classes."""
    counts: list[int]
    """The number of images in each class."""
    left_out: Counter[str]
    """The number of files that are not read, by kind."""


def find(root: Path) -> Found:
    """The images in the folders root/<class>, in the order of class, folder and name. Links are followed; hidden files
    and folders are left out.

    Raises DataError where there are no classes, a class is empty or a dangling link, or a folder cannot be listed.
    """
    left_out, names, counts = Counter[str](), list[bytes](), []
    outside, folders = _listed(root, left_out)
    if not folders:
        raise DataError(_flat(root, outside))
    if left_out[DANGLING]:
        found = f"{left_out[DANGLING]} {DANGLING} (find {shlex.quote(str(root))} -maxdepth 1 -xtype l)"
        raise DataError(f"{root} must hold a folder for each class, got {found}: fix them.")
    left_out += Counter({"outside of class folders": len(outside)})
    for folder in folders:
        of_class = Counter[str]()
        images = list(chain.from_iterable(some for _, some in sorted(_below(folder, of_class))))
        if not images:
            held = f", but {_kinds(of_class)}: convert them" if of_class else ": fill it"
            raise DataError(f"{one_line(folder)} holds no {', '.join(SUFFIXES)} image{held}, or remove that class.")
        names += images
        counts.append(len(images))
        left_out += of_class
    return Found(root, tuple(folder.name for folder in folders), names, counts, left_out)


def left_out(*found: Found) -> str:
    """The files that are not read, as `26 of 60 files left out: 12 .gif, 8 dangling links, 6 hidden`; "" for none."""
    kinds = sum((split.left_out for split in found), Counter[str]())
    files = kinds.total() + sum(len(split.names) for split in found)
    return f"{kinds.total():,} of {counted(files, 'file')} left out: {_kinds(kinds)}" if kinds else ""


def _kinds(found: Counter[str]) -> str:
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    others = sum(count for _, count in ordered[MOST_KINDS:])
    return ", ".join([f"{n:,} {kind}" for kind, n in ordered[:MOST_KINDS]] + [counted(others, "other")] * (others > 0))


def _below(folder: Path, left_out: Counter[str]) -> Iterator[tuple[bytes, list[bytes]]]:
    """The folder and those in it, at any depth, each with its images in order. Paths are relative to the folder."""
    waiting, count = [folder], 0
    while waiting:
        images, folders = _listed(one := waiting.pop(), left_out)
        names = sorted(map(os.fsencode, images))
        inner = b"" if one is folder else os.fsencode(one.relative_to(folder))
        yield inner, [inner + b"/" + name for name in names] if inner else names
        waiting += folders
        if (count := count + 1) > MOST_FOLDERS:
            raise DataError(f"{one_line(folder)} must have at most {MOST_FOLDERS:,} folders: remove links to some.")


def _listed(folder: Path, left_out: Counter[str]) -> tuple[list[str], list[Path]]:
    """The names of the images in a folder, and the folders in it, in order. Raises DataError."""
    images, folders = list[str](), list[Path]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if (kind := _kind(entry)) == "image":
                    images.append(entry.name)
                elif kind == "folder":
                    folders.append(folder / entry.name)
                else:
                    left_out[kind] += 1
    except OSError as error:
        raise DataError(f"{one_line(folder)} cannot be listed ({error.strerror}): fix its permissions.") from None
    return images, sorted(folders)


def _kind(entry: os.DirEntry[str]) -> str:
    """The kind of a file: `image`, `folder`, or why it is not read."""
    if entry.name.startswith("."):  # macOS leaves ._NAME.JPEG files in archives
        return "hidden"
    try:
        if entry.is_file():
            is_image = entry.name.lower().endswith(SUFFIXES)
            return "image" if is_image else printable(Path(entry.name).suffix.lower(), 20) or "without suffix"
        if entry.is_dir():
            is_around = entry.is_symlink() and _is_around(Path(entry.path))
            return "links to folders around them" if is_around else "folder"
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link to itself
            raise
        return DANGLING
    return "pipes or devices" if Path(entry.path).exists() else DANGLING


def _is_around(link: Path) -> bool:
    """Whether the link leads to a folder on its own path, so that it could be followed endlessly."""
    target = link.stat()
    return any(os.path.samestat(target, folder.stat()) for folder in link.absolute().parents)


def split_folder(data_dir: Path, *names: str) -> Path:
    """The first of the folders that exists. Raises DataError."""
    for name in names:
        if (data_dir / name).is_dir():
            return data_dir / name
    wanted = " or ".join(str(data_dir / name) for name in names)
    step = _step(data_dir, names[0])
    rule = "data_dir must hold the folders train/<class> and val/<class>"
    raise DataError(f"{wanted} is missing: {rule}{f'; {step}' if step else '.'}")


def _step(data_dir: Path, missing: str) -> str:
    """The command that would make the folder's layout readable; "" where none is known."""
    if not data_dir.is_dir():
        return ""
    _, folders = _listed(data_dir, Counter())
    held = {each.name: _listed(each, Counter()) for each in folders if os.access(each, os.R_OK | os.X_OK)}
    flat, nested = ([name for name, found in held.items() if found[kind]] for kind in (0, 1))
    cd = f"cd {shlex.quote(str(data_dir))} &&"
    if missing == "train":
        if (data_dir / "meta" / "train.txt").is_file() and "images" in nested:
            return f"by its lists: {cd} {FOOD}"
        if len(flat) > 1:
            return f"if its folders are classes: {cd} mkdir .train && mv * .train && mv .train train"
        likely = sorted([*flat, *nested], key=lambda name: "train" not in name.lower())
    else:
        likely = [name for word in ("val", "test") for name in nested if word in name.lower()]
        if not likely and "train" in nested:
            return f"to validate with one in ten: {cd} {ONE_IN_TEN}"
    return f"if {quoted(likely[0])} is it: {cd} ln -s {shlex.quote(likely[0])} {missing}" if likely else ""


def _flat(root: Path, images: list[str]) -> str:
    """The message for a folder without class folders, which may hold images."""
    if not images:
        return f"{root} holds no class folders: sort its images into {root}/<class>."
    wrong = f"{root} holds {counted(len(images), 'image')} and no class folders: sort them into {root}/<class>"
    prefixes = {match[1] for match in map(NUMBERED.fullmatch, images) if match}
    if "ILSVRC2012_val" in prefixes:
        return f"{wrong}, as valprep.sh of github.com/soumith/imagenetloader.torch does."
    by_name = f"; where names begin with their class: cd {shlex.quote(str(root))} && {BY_NAME}"
    return f"{wrong}{by_name if 1 < len(prefixes) <= len(images) / 2 else '.'}"


def require_same_classes(train: Found, valid: Found) -> None:
    """Raises DataError where one split lacks classes of the other."""
    is_tiny = (valid.root / "val_annotations.txt").is_file()
    step = f"; by val_annotations.txt: cd {shlex.quote(str(valid.root))} && {TINY}" if is_tiny else "."
    for one, other in ((valid, train), (train, valid)):
        if lacking := sorted(set(other.classes) - set(one.classes)):
            some = one_line(", ".join(lacking[:3]), SHOWN) + (", ..." if len(lacking) > 3 else "")
            wrong = f"{one.root} lacks {len(lacking)} of the classes in {other.root} ({some})"
            raise DataError(f"{wrong}: both must hold the same{step}")
