"""Text as token ids, of which windows or documents are the examples.

A data_dir holds train.bin and val.bin: ids as uint16 or uint32, little-endian, one after the other, as nanoGPT writes
them. Beside each, `pack-text` writes a .json that says what they are, and .starts, the place of each document's first
id, as uint64. Files are read by offset: one of 100 GB takes neither memory nor time to open.
"""

import functools
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from hvdtrain import files, untrusted
from hvdtrain.datasets.base import IGNORED, Dataset, TextData, digest
from hvdtrain.datasets.packed import SPLITS, Files
from hvdtrain.datasets.pickles import as_data_error
from hvdtrain.errors import DataError, EngineUnavailable

BYTES, END = "bytes", 256
"""The tokenizer whose ids are bytes, and its id that ends a document."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""The names that the token has which ends a document."""
NANOGPT = 50_304
"""The vocabulary that nanoGPT's train.py takes where no file says it: GPT-2's 50,257, rounded up."""
VOCABULARIES = {"uint16": 1 << 16, "uint32": 1 << 32}
"""The largest vocabulary, by the type of the ids."""
NUMBERS = {"vocabulary": 1, "end": 0, "count": 0, "bytes": 1}
"""The numbers in a .json, and their least values; all but the first may be left out."""
SAMPLED, BLOCK = 64, 2048
"""How many blocks of a file, of how many ids, go into its digest."""
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
"""The folders of Python's standard library that are not read."""
MOST_OF_TOKENIZER = 1 << 27
REMEDY = "make it again by python -m hvdtrain pack-text."


@dataclass(frozen=True, eq=False)
class Stored:
    """The ids of a file, which are read when they are asked for."""

    files: Files
    dtype: np.dtype[Any]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, where: slice) -> NDArray[Any]:
        size = self.dtype.itemsize
        with as_data_error(self.files.paths[0], REMEDY):
            found = self.files.read(0, where.start * size, (where.stop - where.start) * size)
            if len(found) < (where.stop - where.start) * size:
                raise ValueError("it has become shorter")
            return np.frombuffer(found, self.dtype)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The examples of a split: windows of T ids and the ids that follow them or, by `starts`, documents."""

    path: Path
    ids: NDArray[Any] | Stored
    about: dict[str, Any]
    """What is known of it: vocabulary, end, bytes, tokenizer and source."""
    length: int
    starts: NDArray[np.int64] | None = None
    """Where documents start, and the end of the last one; None for windows."""

    @functools.cached_property
    def pieces(self) -> NDArray[np.int64]:
        """The number of examples in the documents before each, and in all."""
        return np.concatenate([[0], np.cumsum(-((1 - np.diff(np.asarray(self.starts))) // self.length))])

    def __len__(self) -> int:
        return max(0, len(self.ids) - 1) // self.length if self.starts is None else int(self.pieces[-1])

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        firsts = indices * self.length
        stops = firsts + self.length + 1
        if self.starts is not None:
            document = np.searchsorted(self.pieces, indices, side="right") - 1
            firsts = self.starts[document] + (indices - self.pieces[document]) * self.length
            stops = np.minimum(firsts + self.length + 1, self.starts[document + 1])
        x = np.full((len(indices), self.length), self.about["end"] or 0, np.int64)
        y = np.full_like(x, IGNORED)
        for row, first, stop in zip(range(len(x)), firsts.tolist(), stops.tolist(), strict=True):
            ids = self.ids[first:stop]
            if (most := ids.max()) >= self.about["vocabulary"]:
                rule = f"ids must be below the vocabulary of {self.about['vocabulary']:,}, got {most:,} after {first:,}"
                raise DataError(f"{self.path}: {rule}; write a larger one into {self.path.with_suffix('.json').name}.")
            x[row, : len(ids) - 1], y[row, : len(ids) - 1] = ids[:-1], ids[1:]
        return x, y

    def digest(self) -> str:
        """Of what the .json says, the size, and a sample of the content: not of 100 GB."""
        about = np.frombuffer(json.dumps([self.about, len(self.ids)]).encode(), np.uint8)
        places = np.linspace(0, max(0, len(self.ids) - BLOCK), SAMPLED).astype(np.int64).tolist()
        blocks = (self.ids[at : min(at + BLOCK, len(self.ids))] for at in places)
        return digest(about, *blocks, np.asarray([] if self.starts is None else self.starts))


def load(
    data_dir: Path | None = None, sequence_length: int = 256, sequences: str = "packed", token_dtype: str | None = None
) -> Dataset:
    """The text in data_dir, or else the source of Python's standard library.

    Raises DataError where a file is missing or damaged, is shorter than an example, or does not say what it must.
    """
    how = sequence_length, sequences == "padded"
    splits = [_opened(data_dir / f"{split}.bin", *how, token_dtype) for split in SPLITS] if data_dir else _library(*how)
    train, valid = splits
    about, more = train.about, valid.about
    for key in ("vocabulary", "end", "tokenizer"):
        if about[key] != more[key]:
            raise DataError(f"{valid.path} has {key} {more[key]}, and {train.path} {about[key]}: {REMEDY}")
    if sequences == "separate" and about["end"] is None:
        raise DataError(f"sequences separate needs the id that ends a document: write end into {train.path.stem}.json.")
    if few := [split for split in (train, valid) if not len(split)]:
        rule = f"must have the {sequence_length + 1:,} ids of an example, got {len(few[0].ids):,}"
        raise DataError(f"{few[0].path} {rule}; lower sequence_length, or hold out more.")
    tokenizer = BYTES
    if data_dir and about["tokenizer"] != BYTES:
        tokenizer = str(path) if (path := data_dir / "tokenizer.json").is_file() else ""
    vocabulary, rate = about["vocabulary"], len(valid.ids) / more["bytes"] if more["bytes"] else None
    counts = f"{len(train.ids):,} ids to train, {len(valid.ids):,} to validate, in a vocabulary of {vocabulary:,}"
    note = f"{about['source'] or train.path}; {counts}"
    text = TextData(vocabulary, about["end"], rate, tokenizer)
    shape = (sequence_length,)
    return Dataset("tokens", train, valid, vocabulary, shape, (), (), draws=0, notes=(note,), text=text, by_index=True)


def _opened(path: Path, length: int, is_padded: bool, token_dtype: str | None) -> Tokens:
    beside, about = path.with_suffix(".json"), dict[str, Any](dtype=token_dtype, vocabulary=NANOGPT)
    with as_data_error(path, REMEDY), files.opened(path) as file:
        size = os.fstat(file.fileno()).st_size
    if beside.exists():
        with as_data_error(beside, REMEDY):
            about = dict(untrusted.mapping(files.read_json(beside)))
    elif not token_dtype:
        raise DataError(f"{path} has no {beside.name} that says its type; give token_dtype uint16 or uint32.")
    numbers = {key: untrusted.whole(about.get(key), least) for key, least in NUMBERS.items()}
    wrong = [key for key, number in numbers.items() if number is None and about.get(key) is not None]
    vocabulary, most = numbers["vocabulary"] or 0, VOCABULARIES.get(str(about.get("dtype")), 0)
    if wrong or not (numbers["end"] or 0) < vocabulary <= most:
        rule = f"dtype ({' or '.join(VOCABULARIES)}), vocabulary, which fits it, and maybe end, count and bytes"
        raise DataError(f"{beside} must have {rule}, whole numbers: {REMEDY}")
    dtype = np.dtype(about["dtype"]).newbyteorder("<")
    count, rest = divmod(size, dtype.itemsize)
    if rest or numbers["count"] not in {None, count}:
        raise DataError(f"{path} has {size:,} bytes, which are not {numbers['count'] or 'whole'} ids: {REMEDY}")
    names = {key: untrusted.text(about.get(key)) for key in ("tokenizer", "source")}
    stored = Stored(Files((path,)), dtype, count)
    return Tokens(path, stored, {**numbers, **names}, length, _starts(path, count) if is_padded else None)


def _starts(path: Path, count: int) -> NDArray[np.int64]:
    beside = path.with_suffix(".starts")
    with as_data_error(beside, "sequences padded needs it; pack the text by pack-text, or take packed."):
        starts = np.frombuffer(files.read_bytes(beside, 8 * (count + 1)), "<u8").astype(np.int64)
        starts = np.append(starts, count)
        if starts[0] or (np.diff(starts) < 1).any():
            raise ValueError("the starts of documents must rise from 0 to the number of ids")
    return starts


def is_held_out(name: str, share: float) -> bool:
    """Whether the document of that name is to validate with, as about this share of all are."""
    return xxhash.xxh3_64_intdigest(os.fsencode(name)) < share * 2**64


def _library(length: int, is_padded: bool) -> Iterator[Tokens]:
    """The .py files of Python's standard library as bytes; about every 20th is to validate with."""
    root, found = Path(sysconfig.get_path("stdlib")), dict[bool, list[bytes]]({False: [], True: []})
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        paths = (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
        for path in filter(Path.is_file, paths):  # a link may lead nowhere
            found[is_held_out(str(path.relative_to(root)), 1 / 20)].append(path.read_bytes())
    of_python = f"{sum(map(len, found.values())):,} files of the standard library of Python {platform.python_version()}"
    source = f"{of_python} as bytes, without {', '.join(sorted(LEFT_OUT))}"
    for texts in found.values():
        parts = [np.append(np.frombuffer(text, np.uint8), np.uint16(END)) for text in texts]
        about = {"vocabulary": END + 1, "end": END, "bytes": sum(map(len, texts)), "tokenizer": BYTES, "source": source}
        ids = np.concatenate([np.empty(0, np.uint16), *parts])
        yield Tokens(root, ids, about, length, np.cumsum([0, *map(len, parts)]) if is_padded else None)


class Tokenizer(NamedTuple):
    """Text as ids and back: the number of ids, those of its tokens by name, two functions, and its file's content."""

    vocabulary: int
    known: dict[str, int]
    encode: Callable[[list[str]], Sequence[Any]]
    decode: Callable[[Sequence[int]], str]
    content: str


@functools.lru_cache
def tokenizer_of(path: str) -> Tokenizer:
    """The tokenizer of bytes, or that of the library in the file, which cuts and pads nothing, and reads no special
    token out of a text. Raises DataError, and EngineUnavailable without the library."""
    if path == BYTES:

        def of_texts(texts: list[str]) -> list[NDArray[np.uint8]]:
            return [np.frombuffer(of.encode(), np.uint8) for of in texts]

        def of_ids(ids: Sequence[int]) -> str:
            return bytes(each for each in ids if each < END).decode(errors="replace")

        return Tokenizer(END + 1, {ENDS[0]: END}, of_texts, of_ids, "")
    if not path:
        raise DataError("the tokenizer of these ids is not known: put its tokenizer.json into data_dir.")
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        why = untrusted.one_line(error)
        raise EngineUnavailable(f"{path} needs tokenizers ({why}); pip install 'hvdtrain[tokenizers]'.") from None
    with as_data_error(Path(path), "give a tokenizer.json, as the library tokenizers writes it."):
        found = Library.from_str(content := files.read(Path(path), MOST_OF_TOKENIZER))
    found.no_truncation()
    found.no_padding()
    found.encode_special_tokens, known = True, found.get_vocab()

    def encoded(texts: list[str]) -> list[list[int]]:
        return [each.ids for each in found.encode_batch_fast(texts, add_special_tokens=False)]

    return Tokenizer(max(known.values(), default=0) + 1, known, encoded, found.decode, content)


def encode(text: TextData, of: str) -> list[int]:
    """The ids of a text. Raises what `tokenizer_of` raises."""
    return [*map(int, tokenizer_of(text.tokenizer).encode([of])[0])]


def decode(text: TextData, ids: Sequence[int]) -> str:
    """The text of ids, which is others' to a terminal. Raises what `tokenizer_of` raises."""
    return tokenizer_of(text.tokenizer).decode([*ids])
