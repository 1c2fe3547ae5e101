"""Text that every machine has, for lab 8: pieces of the source of Python's standard library, as bytes."""

import hashlib
import random
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from hvdtrain.untrusted import printable

END = 256
"""The token before a piece and behind it. Those below are the bytes."""
VOCABULARY = 257
LEFT_OUT = {"test", "idlelib", "lib2to3", "site-packages", "dist-packages"}
HELD_OUT = 13  # of 256 files, for validation
BLANK = re.compile(rb"\n\s*\n")


def pieces(length: int, train: int, valid: int) -> tuple[list[bytes], list[bytes]]:
    """So many pieces for training, and others for validation, which are of other files.

    A piece is what stands between two blank lines, or some lines of that, at most `length` bytes. Fewer are given where
    the library has fewer. Every process on this machine gets the same.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = {file.relative_to(folder).as_posix(): file for file in (*folder.glob("*.py"), *folder.glob("*/*.py"))}
    found: tuple[list[bytes], list[bytes]] = [], []
    for name in sorted(files):
        if LEFT_OUT.isdisjoint(name.split("/")):
            held_out = hashlib.sha256(name.encode()).digest()[0] < HELD_OUT
            found[held_out].extend(cut(files[name].read_bytes(), length))
    for each in found:
        random.Random(0).shuffle(each)  # noqa: S311  no secret
    return found[0][:train], found[1][:valid]


def cut(text: bytes, length: int) -> list[bytes]:
    """A text's pieces: whole lines, as many as fit into `length` bytes; of a line that is longer, its beginning."""
    found = []
    for block in BLANK.split(text):
        piece = b""
        for line in block.rstrip().splitlines(keepends=True):
            if piece and len(piece) + len(line.rstrip()) > length:
                found.append(piece.rstrip())
                piece = b""
            piece += line[:length]
        found.append(piece.rstrip())
    return [piece for piece in found if piece]


def shown(tokens: Iterable[int]) -> str:
    """What a model has written, for a screen: control characters are escaped, and what is not UTF-8 is marked."""
    text = bytes(token for token in tokens if token < END).decode(errors="replace")
    return "\n".join(printable(line, len(line) + 1) for line in text.split("\n"))
