"""Feeds the reader of packed sets with damaged and forged sets: `hostile_data.py COUNT SEED FOLDER`.

It prints every set whose reading ends in anything but a DataError of one printable line. A set that takes too long or
1 GB of memory ends the process.
"""

import io
import json
import random
import resource
import signal
import struct
import sys
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from costs import peak_mib

from hvdtrain import datasets
from hvdtrain.datasets import packed as shards
from hvdtrain.errors import DataError

SECONDS = 100  # of processor time, after which the process ends
MEMORY = 1 << 30
SIDES = {"train_crop": 16, "valid_resize": 20, "valid_crop": 16}
NUMBERS = (0, 1, 2, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def mutated(chance: random.Random, content: bytes) -> bytes:
    """The content, damaged in one to four places."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(changed) + 1)
        piece = changed[place : place + chance.choice((1, 1, 2, 4, 8, 30))]
        number, width = chance.choice(NUMBERS), chance.choice((1, 2, 4, 8))
        number_bytes = (number % 256**width).to_bytes(width, chance.choice(("little", "big")))
        noise = chance.randbytes(len(piece))
        new = chance.choice((b"", piece * 2, piece * 50, noise, number_bytes, content[: 20 * len(piece)]))
        changed[place : place + len(piece)] = new
    return bytes(changed)


IMAGES = 4
ABOUT = {"version": 1, "classes": 2, "names": ["n01", "n02"]}


def packed_arrays() -> dict[str, np.ndarray]:
    """The arrays of an index; the shard of each split has 4096 bytes."""
    about = {**ABOUT, "shards": {split: {f"{split}-000000.tar": 4096} for split in shards.SPLITS}}
    rows = np.zeros(IMAGES, shards.ENTRY)
    rows["offset"], rows["size"], rows["label"] = np.arange(IMAGES) * 100, 100, np.arange(IMAGES) % 2
    return {"about": np.array(json.dumps(about)), "train": rows, "val": rows}


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()


def npz(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def headed(header: str, content: bytes = b"") -> bytes:
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def packed_bombs() -> dict[str, bytes]:
    good = {name: npy(array) for name, array in packed_arrays().items()}

    def about(text: str) -> bytes:
        return npz({**good, "about": npy(np.array(text))})

    def changed_about(**changes: object) -> bytes:
        return about(json.dumps({**json.loads(str(packed_arrays()["about"])), **changes}))

    def rows(**changes: int) -> bytes:
        changed = packed_arrays()["train"]
        for name, value in changes.items():
            changed[name][0] = value
        return npz({**good, "train": npy(changed)})

    def header(shape: str, descr: str = repr(shards.ENTRY.descr)) -> bytes:
        return npz(
            {**good, "train": headed(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}", bytes(96))}
        )

    def named(name: object) -> bytes:
        return changed_about(shards={split: {name: 4096} for split in shards.SPLITS})

    return {
        "zeros, compressed": npz({**good, "about": npy(np.zeros(10**8, np.uint8))}, zipfile.ZIP_DEFLATED),
        "a shape of 10 ** 12": header("(1000000000000,)"),
        "a shape of 10 ** 30": header(f"({10**30},)"),
        "a shape of 5,000 digits": header("(" + "9" * 5000 + ",)"),
        "a shape below 0": header("(-1,)"),
        "a shape of flags": header("(True,)"),
        "a kind of 2 GB": header("(1,)", "'<U500000000'"),
        "objects": npz({**good, "train": npy(np.array([{}, {}], object))}),
        "a header nested deeply": headed("(" * 5000),
        "a header of signs": npz({**good, "train": headed("-" * 9000 + "1")}),
        "two axes": npz({**good, "train": npy(packed_arrays()["train"].reshape(2, 2))}),
        "JSON nested 10 ** 5 deep": about("[" * 10**5),
        "objects nested 10 ** 5 deep": about('{"a":' * 10**5),
        "5,000 digits": about('{"version": 1, "classes": ' + "9" * 5000 + "}"),
        "10 ** 30 classes": changed_about(classes=10**30),
        "10 ** 9 classes": changed_about(classes=10**9),
        "no classes": changed_about(classes=-1),
        "infinitely many classes": about(json.dumps({**ABOUT, "classes": float("inf")})),
        "a side below 0": changed_about(shorter_side=-1),
        "a side of 10 ** 30": changed_about(shorter_side=10**30, quality=90),
        "a side of text": changed_about(shorter_side="288"),
        "a quality of lists": changed_about(shorter_side=288, quality=[[]]),
        "a flag as version": changed_about(version=True),
        "a list": about("[]"),
        "a number": about("1"),
        "names of numbers": changed_about(names=[1, 2]),
        "names of none": changed_about(names=None),
        "shards of none": changed_about(shards=dict.fromkeys(shards.SPLITS)),
        "a length below 0": changed_about(shards={split: {"a": -1} for split in shards.SPLITS}),
        "a length of 10 ** 30": changed_about(shards={split: {"a": 10**30} for split in shards.SPLITS}),
        "a flag as length": changed_about(shards={split: {"a": True} for split in shards.SPLITS}),
        "10 ** 5 shards": changed_about(
            shards={split: {str(number): 0 for number in range(10**5)} for split in shards.SPLITS}
        ),
        "a shard above": named("../../../../etc/passwd"),
        "a shard elsewhere": named("/etc/passwd"),
        "the folder as shard": named("."),
        "no name": named(""),
        "a zero byte": named("a\0b"),
        "a long name": named("a" * 10**4),
        "half a character": named("\ud800"),
        "orders to the terminal": named("\x1b[2J"),
        "an offset that wraps around": rows(offset=2**64 - 50, size=100),
        "an offset of 2 ** 63": rows(offset=2**63),
        "a size of 4 GB": rows(size=2**32 - 1),
        "a shard of number 2 ** 32 - 1": rows(shard=2**32 - 1),
    }


def read_packed(folder: Path, content: bytes) -> None:
    for split in shards.SPLITS:
        shard = folder / f"{split}-000000.tar"
        if not shard.exists():
            shard.write_bytes(bytes(4096))
    (folder / shards.INDEX).write_bytes(content)
    for shuffle in ("global", "shards"):
        split = datasets.load("imagenet", data_dir=folder, shuffle=shuffle, **SIDES).train
        split.read(np.array([0, len(split) - 1]), np.zeros((2, datasets.DRAWS), np.float32))


def packed_others(chance: random.Random) -> bytes:
    arrays = packed_arrays()
    members = {name: npy(array) for name, array in arrays.items()}
    match chance.randrange(4):
        case 0:
            return mutated(chance, npz(members))
        case 1:
            text = mutated(chance, str(arrays["about"]).encode()).decode("utf-8", "surrogateescape")
            try:
                members["about"] = npy(np.array(text))
            except UnicodeError:
                members["about"] = npy(np.array(text.encode("ascii", "replace").decode()))
        case 2:
            rows = bytearray(arrays["train"].tobytes())
            members["train"] = npy(np.frombuffer(mutated(chance, bytes(rows)).ljust(960, b"\0")[:96], shards.ENTRY))
        case _:
            name = chance.choice(list(members))
            members[name] = mutated(chance, members[name])
    return npz(members, chance.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,)))


def inputs(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    yield from packed_bombs().items()
    for number in range(count):
        yield f"{seed}:{number}", packed_others(random.Random(f"{seed}:{number}"))


def complaint(folder: Path, content: bytes) -> str:
    """What is wrong with how the reader ended; usually ""."""
    try:
        read_packed(folder, content)
    except DataError as error:
        message = str(error)
        if "fit into memory" in message or "MemoryError" in message:
            return f"memory: {message}"
        return "" if message.isprintable() and len(message) < 1000 else f"message: {message!r}"
    except BaseException:
        return traceback.format_exc()
    return ""


def main(count: int, seed: int, folder: Path) -> int:
    failed, read = 0, 0
    for label, content in inputs(count, seed):
        print(f"\r{label}", end="", file=sys.stderr)  # names the set with which this process ended
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        wrong = complaint(folder, content)
        signal.setitimer(signal.ITIMER_PROF, 0)
        read += 1
        if wrong:
            failed += 1
            print(f"--- {label}: {wrong}")
    print(f"{read} read, {failed} failed, at most {peak_mib()} MB")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
