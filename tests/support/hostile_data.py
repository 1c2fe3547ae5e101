"""Feeds a reader of data files with damaged and forged ones: `hostile_data.py READER COUNT SEED FOLDER`.

Whatever is no DataError of one printable line, takes more than 2 s of a processor or 1 GB of memory, is printed or ends
the process.
"""

import gzip
import io
import json
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tarfile
import traceback
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cifar100_files import batch
from costs import peak_mib
from images import EPS
from PIL import Image

from hvdtrain import datasets
from hvdtrain.datasets import download, index
from hvdtrain.datasets.packed import shards
from hvdtrain.errors import DataError

SECONDS = 100  # of processor time: what takes longer hangs
MEMORY = 1 << 30
SIDES = {"train_crop": 16, "valid_resize": 20, "valid_crop": 16}
NUMBERS = (0, 1, 2, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
TWICE = b")" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(60))
"""Opcodes of a tuple that holds one tuple twice, which holds one twice, 60 deep."""


class Reader(NamedTuple):
    """What is fed with bytes."""

    read: Callable[[Path, bytes], None]
    bombs: Callable[[], dict[str, bytes]]
    others: Callable[[random.Random], bytes]
    """A damaged or forged file."""


def mutated(chance: random.Random, content: bytes, times: int = 4) -> bytes:
    """Damaged in one to four places."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, times)):
        place = chance.randrange(len(changed) + 1)
        until = min(len(changed), place + chance.choice((1, 1, 2, 4, 8, 30)))
        match chance.randrange(7):
            case 0 if place < len(changed):
                changed[place] ^= 1 << chance.randrange(8)
            case 1:
                changed[place:until] = b""
            case 2:
                changed[place:place] = changed[place:until] * chance.choice((1, 2, 50))
            case 3:
                changed[place:until] = chance.randbytes(until - place)
            case 4:
                del changed[place:]
            case 5:
                number, width = chance.choice(NUMBERS), chance.choice((1, 2, 4, 8))
                changed[place : place + width] = (number % 256**width).to_bytes(width, chance.choice(("little", "big")))
            case _:
                start = chance.randrange(len(content) + 1)
                changed[place:place] = content[start : start + chance.choice((4, 30, 200))]
    return bytes(changed)


def binary(text: str | bytes) -> bytes:
    """The opcode of a text."""
    encoded = text if isinstance(text, bytes) else text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def kind_of(code: str, order: str = "<") -> bytes:
    """Opcodes of a kind of NumPy's."""
    return b"cnumpy\ndtype\n" + binary(code) + b"K\x00K\x01\x87R(K\x03" + binary(order) + b"tb"


PIECES = [
    b"}", b"]", b")", b"(", b"N", b"\x88", b"\x89", b"K\x05", b"J\xff\xff\xff\xff", b"M\x01\x02", b"s", b"u", b"a",
    b"e", b"t", b"l", b"d", b"\x85", b"\x86", b"\x87", b"R", b"b", b"\x81", b"\x92", b"0", b"1", b"2", b"\x8f",
    b"\x90", b"\x91", b"\x94", b"q\x00", b"h\x00", b"q\x01", b"h\x01", b"r\xff\xff\xff\xff", b"j\x00\x00\x00\x00",
    b"p0\n", b"g0\n", b"P0\n", b"Q", b"\x8a\x01\x07", b"\x8b\xff\xff\xff\x7f", b"\x8a\xff" + b"\x7f" * 255,
    b"L99999999999999999999L\n", b"I01\n", b"I7\n", b"F1.5\n", b"G\x7f\xf0\0\0\0\0\0\0", b"S'ab'\n", b"U\x02ab",
    b"T\xff\xff\xff\x7f", b"Vab\n", binary("a.png"), binary("/"), binary("latin1"), binary(b"\xed\xa0\x80"),
    binary("a\0b"), binary("\x1b[31m"), b"X\xff\xff\xff\xff", b"\x8c\x02ab", b"\x8d" + b"\xff" * 8,
    b"\x8e\0\0\0\0\0\0\0\x01", b"\x96\0\0\0\x7f\0\0\0\0", b"B\x02\0\0\0ab", b"C\x02ab", b"\x97", b"\x98", b"\x93",
    b"cpathlib\nPurePosixPath\n", b"cpathlib\nPath\n", b"c_codecs\nencode\n",
    b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"cos\nsystem\n",
    b"cnumpy.core.multiarray\nscalar\n", b"cnumpy._core.numeric\n_frombuffer\n", b"ccollections\nOrderedDict\n",
    kind_of("i8"), kind_of("U9"),
    b"(ios\nsystem\n", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x95\x03\0\0\0\0\0\0\0", b"\x80\x04", b"\x82\x01",
    b".",
]  # fmt: skip


def opcodes(chance: random.Random, seed: bytes) -> bytes:
    """Opcodes at random, among those of a good file or alone."""
    made = b"".join(chance.choice(PIECES) for _ in range(chance.randint(1, 40)))
    if chance.random() < 0.5:
        return b"\x80\x02" + made + b"."
    place = chance.randrange(len(seed))
    return seed[:place] + made + seed[place:]


PATHS = b"cpathlib\nPurePosixPath\n"
POSIX = b"\x80\x02" + PATHS
SCALAR, ARRAY = b"cnumpy.core.multiarray\nscalar\n", b"cnumpy._core.numeric\n_frombuffer\n"


def index_bombs() -> dict[str, bytes]:
    state = binary("__fspath__") + b"Ns"
    many = b"".join(binary(f"{number}.png") + b"K\x00" for number in range(3000))
    return {
        "state of a class": POSIX + b"}" + state + b"b.",
        "state of attributes": POSIX + b"N}" + state + b"\x86b.",
        "state of a path": POSIX + binary("a") + b"\x85R}" + state + b"b.",
        "state of a codec": b"\x80\x02c_codecs\nencode\n}" + state + b"b.",
        "a memo of number 2 ** 32 - 1": b"\x80\x02}r\xff\xff\xff\xff" + binary("a") + b"K\x00s.",
        "a memo of number 2 ** 28": b"\x80\x02}r\x00\x00\x00\x10" + binary("a") + b"K\x00s.",
        "state of a number's kind": b"\x80\x02" + kind_of("i8") + b"}" + state + b"b.",
        "state of a function of NumPy's": b"\x80\x02" + SCALAR + b"}" + state + b"b.",
        "state of a dict's function": b"\x80\x02ccollections\nOrderedDict\n}" + state + b"b.",
        "a kind of pointers": b"\x80\x02}" + binary("a") + SCALAR + kind_of("O8") + b"B\x08\0\0\0aaaaaaaa\x86Rs.",
        "pointers by their byte order": b"\x80\x02}" + binary("a") + SCALAR + kind_of("i8", "O")
        + b"B\x08\0\0\0aaaaaaaa\x86Rs.",
        "a long byte order, 3,000 times": b"\x80\x02(" + binary("i1," * 20_000) + b"q\x01" + 3000 * (
            b"cnumpy\ndtype\n" + binary("i8") + b"K\x00K\x01\x87R(K\x03h\x01tb"
        ) + b"l.",
        "a long text of NumPy's, 30,000 times": b"\x80\x04(" + kind_of("U99999") + b"q\x01B"
        + struct.pack("<I", 400_000) + b"a\0\0\0" * 100_000 + b"q\x02" + (SCALAR + b"h\x01h\x02\x86R") * 30_000 + b"l.",
        "an array of 2 ** 60 by 0": b"\x80\x02}" + binary("a") + ARRAY + b"(B\0\0\0\0" + kind_of("i8")
        + b"\x8a\x08" + (2**60).to_bytes(8, "little") + b"K\x00\x86" + binary("C") + b"tRs.",
        "a long array, 30,000 times": b"\x80\x04(" + binary("a") + ARRAY + b"(B" + struct.pack("<I", 10**6)
        + bytes(10**6) + kind_of("i1", "|") + b"\x8a\x04" + struct.pack("<I", 10**6) + b"\x85" + binary("C")
        + b"tRq\x01\x86" + b"".join(binary(str(number)) + b"h\x01\x86" for number in range(30_000)) + b"l.",
        "a bytearray of 2 ** 40": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"a.",
        "text of 2 ** 62 bytes": b"\x80\x04}\x8d" + struct.pack("<Q", 2**62),
        "text of 2 ** 32 bytes": b"\x80\x02}X\xff\xff\xff\xff",
        "bytes of 2 ** 40": b"\x80\x05}\x96" + struct.pack("<Q", 2**40),
        "a frame of 2 ** 40 bytes": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"}.",
        "a number of 2 ** 31 bytes": b"\x80\x02}\x8b\xff\xff\xff\x7f",
        "a tuple of 2 ** 60 as path": b"\x80\x02}" + TWICE + b"K\x00s.",
        "a tuple of 2 ** 60 as class": b"\x80\x02}" + binary("a") + TWICE + b"s.",
        "a tuple of 2 ** 60 in a set": b"\x80\x04\x8f(" + TWICE + b"\x90.",
        "a tuple of 2 ** 60 as part": POSIX + TWICE + b"R.",
        "a tuple 300,000 deep as path": b"\x80\x02}(" + b")" + b"\x85" * 300_000 + b"K\x00u.",
        "lists 100,000 deep as class": b"\x80\x02}" + binary("a") + b"]" * 10**5 + b"a" * (10**5 - 1) + b"s.",
        "10 ** 30 classes": pickle.dumps({"a": 10**30}),
        "10 ** 9 classes": pickle.dumps({"a": 10**9}),
        "a class of 5,000 digits": pickle.dumps({"a": 10**5000}),
        "a class of minus 5,000 digits": pickle.dumps({"a": -(10**5000)}),
        "a written number of 5,000 digits": b"(dp0\nVa\nL" + b"9" * 5000 + b"L\ns.",
        "one path of 10 ** 6 bytes among 3,000": b"\x80\x02}(" + binary("a" * 10**6) + b"K\x00" + many + b"u.",
        "a part of 10 ** 6 bytes, 3,000 times": POSIX + b"q\x010}(" + binary("a" * 10**6) + b"q\x020" + b"".join(
            b"h\x01h\x02" + binary(str(number)) + b"\x86RK\x00" for number in range(3000)
        ) + b"u.",
        "text encoded 3,000 times": b"\x80\x02c_codecs\nencode\nq\x010" + binary("a" * 10**6) + b"q\x020"
        + binary("latin1") + b"q\x030(" + b"h\x01h\x02h\x03\x86R" * 3000 + b"l.",
        "half a character": pickle.dumps({"\ud800": 0}),
        "half a character as class": pickle.dumps({"a": "\ud800"}),
        "a path with a zero byte": pickle.dumps({"a\0b": 0}),
        "a device": pickle.dumps({"/dev/zero": 0}),
        "orders to the terminal": pickle.dumps({"a": "\x1b]0;x\x07"}) ,
        "orders to the terminal by name": b"\x80\x02c\x1b[2J\n\x1b[31m\n.",
    }  # fmt: skip


def read_index(folder: Path, content: bytes) -> None:
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(image_file("PNG"))
    (folder / index.TRAIN).write_bytes(content)
    (folder / index.VALID).write_bytes(pickle.dumps({"a.png": 0}))
    try:
        split = datasets.load("imagenet", data_dir=folder, **SIDES).train
        split.read(np.array([0, len(split) - 1]), None)
    finally:
        (folder / index.VALID).write_bytes(content)
        (folder / index.TRAIN).write_bytes(pickle.dumps({"a.png": 0, "b.png": 1}))
        datasets.load("imagenet", data_dir=folder, **SIDES)


def index_others(chance: random.Random) -> bytes:
    names = [f"n0{number % 3}/{number}.png" for number in range(6)]
    named = chance.choice((str, str.encode, Path))
    label = chance.choice((int, np.int64, np.str_, np.array, lambda number: f"ape {number}"))
    kind = chance.choice((dict, list, OrderedDict))
    held = kind((named(name), label(number % 3)) for number, name in enumerate(names))
    seed = pickle.dumps(held, protocol=chance.randrange(6))
    return chance.choice((mutated, opcodes))(chance, seed)


def cifar_bombs() -> dict[str, bytes]:
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"

    def shaped(shape: bytes) -> bytes:
        return b"\x80\x02}U\x04data" + array + b"(K\x01" + shape + kind + b"\x89U\x04abcdtbs."

    return {
        **{name: content for name, content in index_bombs().items() if "class" not in name or "state" in name},
        "a shape of 10 ** 12": shaped(b"\x8a\x06" + (10**12).to_bytes(6, "little") + b"\x85"),
        "a shape of 10 ** 12 by 0": shaped(b"\x8a\x06" + (10**12).to_bytes(6, "little") + b"K\x00\x86"),
        "a shape of a tuple of 2 ** 60": shaped(TWICE),
        "a shape of 10 ** 5 axes": shaped(b"(" + b"K\x01" * 10**5 + b"t"),
        "state of a function": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n}" + binary("__kwdefaults__") + b"}sb.",
        "attributes of a function": b"\x80\x02c_codecs\nencode\nN}" + binary("__defaults__") + b")s\x86b.",
        "state of ndarray": b"\x80\x02cnumpy\nndarray\n}" + binary("array") + b"Nsb.",
        "state of dtype": b"\x80\x02cnumpy\ndtype\n}" + binary("__init__") + b"Nsb.",
        "itself": b"\x80\x02}q\x00U\x04datah\x00s.",
    }


def read_cifar(folder: Path, content: bytes) -> None:
    for split in ("train", "test"):
        (folder / "cifar-100-python").mkdir(exist_ok=True)
        (folder / "cifar-100-python" / split).write_bytes(content)
    datasets.load("cifar100", data_dir=folder).train.read(np.array([0]), np.zeros((1, datasets.DRAWS), np.float32))


def cifar_others(chance: random.Random) -> bytes:
    seed = pickle.dumps({**batch(1), b"filenames": [b"a.png"]}, protocol=chance.choice((2, 3, 4, 5)))
    return chance.choice((mutated, opcodes))(chance, seed)


IMAGES = 4


def image_file(form: str, mode: str = "RGB", size: tuple[int, int] = (24, 18), **options: object) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 50).convert(mode).save(file, form, **options)
    return file.getvalue()


ABOUT = {"version": 1, "classes": 2, "names": ["n01", "n02"]}


def packed_arrays() -> dict[str, np.ndarray]:
    """Of an index; the shard of either split holds images of PLACES bytes."""
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
    for is_by_shard in (False, True):
        split = datasets.load("imagenet", data_dir=folder, is_by_shard=is_by_shard, **SIDES).train
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


def tar(members: list[tarfile.TarInfo], form: int = tarfile.GNU_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)) if member.isreg() else None)
    return file.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 10) -> tarfile.TarInfo:
    made = tarfile.TarInfo(f"cifar-100-python/{name}")
    made.type, made.linkname, made.size = kind, link, size if kind == tarfile.REGTYPE else 0
    return made


def cifar_members() -> list[tarfile.TarInfo]:
    return [member(name) for name in download.MEMBERS]


def with_size(header: bytes, size: bytes) -> bytes:
    """A header of 512 bytes with another size in it, and a sum that fits."""
    changed = header[:124] + size.ljust(12, b"\0") + header[136:148] + b" " * 8 + header[156:512]
    return changed[:148] + b"%06o\0 " % sum(changed) + changed[156:]


def archive_bombs() -> dict[str, bytes]:
    good, sizes = (
        tar(cifar_members()),
        {"8 GB": b"77777777777\0", "less than none": b"\xff" * 12, "2 ** 94": b"\x80" + b"\x3f" * 11},
    )
    paxed = member("train")
    paxed.pax_headers = {
        "GNU.sparse.map": "0,1," * 20 + "1,1",
        "GNU.sparse.size": str(10**12),
        "GNU.sparse.numblocks": "21",
    }
    links = {"links in a ring": [member("train", tarfile.SYMTYPE, "test"), member("test", tarfile.SYMTYPE, "train")]}
    links["a link to itself"] = [member("train", tarfile.LNKTYPE, "cifar-100-python/train")]
    links["a link to a file"] = [member("train", tarfile.SYMTYPE, "/etc/passwd")]
    links["a pipe"] = [member("train", tarfile.FIFOTYPE)]
    links["a folder"] = [member("train", tarfile.DIRTYPE)]
    many = [member(str(number), size=0) for number in range(20000)]
    return {
        **{name: gzip.compress(tar([*cifar_members(), *members])) for name, members in links.items()},
        **{f"a size of {name}": gzip.compress(with_size(good, size) + good[512:]) for name, size in sizes.items()},
        "holes": gzip.compress(tar([*cifar_members(), paxed], tarfile.PAX_FORMAT)),
        "20,000 members": gzip.compress(tar(many), 1),
        "long names of long names": gzip.compress(tar([member("a" * 200)])[:1024] * 5000 + good),
        "1 GB of zeros": gzip.compress(bytes(1 << 20)) * 1024,
    }


def read_archive(folder: Path, content: bytes) -> None:
    archive, unpacked = folder / "archive", folder / "unpacked"
    archive.write_bytes(content)
    unpacked.mkdir()
    try:
        with archive.open("rb") as file:
            download._unpack(file, unpacked, lambda: None)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def archive_others(chance: random.Random) -> bytes:
    kinds = (tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
    more = [
        member(chance.choice(("train", "test", "..")), chance.choice(kinds), chance.choice(("train", "/etc/passwd")))
    ]
    packed = tar(cifar_members() + more, chance.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)))
    if chance.random() < 0.2:
        return mutated(chance, gzip.compress(packed, 1))
    place = 1024 * chance.randrange(3)
    head = mutated(chance, packed[place : place + 512]).ljust(512, b"\0")[:512]
    summed = head[:148] + b"%06o\0 " % (sum(head[:148]) + 256 + sum(head[156:])) + head[156:]
    return gzip.compress(packed[:place] + summed + packed[place + 512 :], 1)


def image_bombs() -> dict[str, bytes]:
    def png(width: int, height: int, mode: str = "1") -> bytes:
        file = io.BytesIO()
        Image.new(mode, (width, height)).save(file, "PNG")
        return file.getvalue()

    def announced(width: int, height: int) -> bytes:
        small = png(8, 8)
        changed = bytearray(small)
        changed[16:24] = struct.pack(">II", width, height)
        changed[29:33] = struct.pack(">I", zlib.crc32(bytes(changed[12:29])))
        return bytes(changed)

    return {
        "EPS": EPS,
        "a line of 60,000 pixels": png(1, 60000),
        "a line across of 60,000 pixels": png(60000, 1),
        "12,000 by 12,000 pixels": png(12000, 12000),
        "announced 2 ** 31 by 2 ** 31": announced(2**31 - 1, 2**31 - 1),
        "announced 13,000 by 13,000": announced(13000, 13000),
        "announced 9,000 by 9,000": announced(9000, 9000),
        "none": announced(0, 0),
    }


def read_image(folder: Path, content: bytes) -> None:
    path = folder / "train" / "n01" / "a.JPEG"
    for part in ("train", "val"):
        (folder / part / "n01").mkdir(parents=True, exist_ok=True)
    (folder / "val" / "n01" / "b.JPEG").touch()
    path.write_bytes(content)
    split = datasets.load("imagenet", data_dir=folder, **SIDES).train
    try:
        split.read(np.array([0]), None)
    finally:
        split.read(np.array([0]), np.zeros((1, datasets.DRAWS), np.float32))


FORMS = [
    ("JPEG", "RGB", {}), ("JPEG", "L", {}), ("JPEG", "CMYK", {}), ("JPEG", "RGB", {"progressive": True}),
    ("PNG", "RGB", {}), ("PNG", "P", {}), ("PNG", "LA", {}), ("PNG", "1", {}), ("GIF", "L", {}), ("BMP", "RGB", {}),
]  # fmt: skip


def image_others(chance: random.Random) -> bytes:
    form, mode, options = chance.choice(FORMS)
    return mutated(chance, image_file(form, mode, **options))


READERS = {
    "index": Reader(read_index, index_bombs, index_others),
    "cifar": Reader(read_cifar, cifar_bombs, cifar_others),
    "packed": Reader(read_packed, packed_bombs, packed_others),
    "archive": Reader(read_archive, archive_bombs, archive_others),
    "image": Reader(read_image, image_bombs, image_others),
}


def inputs(reader: Reader, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    yield from reader.bombs().items()
    for number in range(count):
        yield f"{seed}:{number}", reader.others(random.Random(f"{seed}:{number}"))


def complaint(reader: Reader, folder: Path, content: bytes) -> str:
    """What is wrong with what the reader made of it; usually nothing."""
    try:
        reader.read(folder, content)
    except DataError as error:
        message = str(error)
        if "fit into memory" in message or "MemoryError" in message:
            return f"memory: {message}"
        return "" if message.isprintable() and len(message) < 1000 else f"message: {message!r}"
    except BaseException:
        return traceback.format_exc()
    return ""


def main(name: str, count: int, seed: int, folder: Path) -> int:
    reader, failed, read = READERS[name], 0, 0
    for label, content in inputs(reader, count, seed):
        print(f"\r{label}", end="", file=sys.stderr)  # the last one, where this process ends
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        wrong = complaint(reader, folder, content)
        signal.setitimer(signal.ITIMER_PROF, 0)
        read += 1
        if wrong:
            failed += 1
            print(f"--- {label}: {wrong}")
    peak = peak_mib()
    print(f"{read} read, {failed} failed, at most {peak} MB")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
