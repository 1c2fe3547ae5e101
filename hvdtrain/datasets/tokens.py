"""STAND-IN."""

import sysconfig
from pathlib import Path

import numpy as np

from hvdtrain.datasets.base import Arrays, Dataset, TextData


def load(sequence_length: int = 256, sequences: str = "packed", data_dir: Path | None = None) -> Dataset:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [[], []]
    for i, file in enumerate(files):
        parts[i % 20 == 0].append(np.append(np.frombuffer(file.read_bytes(), np.uint8).astype(np.int64), 256))
    t, made = sequence_length, []
    for part in parts:
        if sequences == "padded":
            pieces = [doc[k : k + t + 1] for doc in part for k in range(0, len(doc) - 1, t)]
            x, y = np.zeros((len(pieces), t), np.int64), np.full((len(pieces), t), -100)
            for row, piece in enumerate(pieces):
                x[row, : len(piece) - 1], y[row, : len(piece) - 1] = piece[:-1], piece[1:]
        else:
            flat = np.concatenate(part)
            n = (len(flat) - 1) // t
            x, y = flat[: n * t].reshape(n, t), flat[1 : n * t + 1].reshape(n, t)
        made.append(Arrays(x, y))
    return Dataset("tokens", *made, 257, (t,), (), (), draws=0, text=TextData(257, 256, 1.0, "bytes"))


def decode(text: TextData, ids) -> str:
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def encode(text: TextData, content: str) -> list[int]:
    return list(content.encode())
