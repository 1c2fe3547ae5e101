"""`python -m hvdtrain pack-text SOURCES --output DIR`: packs text into files of token ids for a language model.

A text file, a line of JSON lines and a row of Parquet is a document each. Which of them are to validate with follows
from their names and places, so that more sources move none.
"""

import codecs
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Annotated, NamedTuple, NoReturn

import numpy as np
import pydantic
from pydantic import Field

from hvdtrain import files
from hvdtrain.core import flags
from hvdtrain.core.flags import Flag
from hvdtrain.core.recipe import expanding
from hvdtrain.datasets.base import SHOWN, read_ahead
from hvdtrain.datasets.packed import SPLITS
from hvdtrain.datasets.pickles import as_data_error
from hvdtrain.datasets.tokens import BYTES, ENDS, Tokenizer, is_held_out, tokenizer_of
from hvdtrain.errors import DataError, EngineUnavailable
from hvdtrain.terminal import Status, hidden
from hvdtrain.tools.pack import filled
from hvdtrain.untrusted import one_line, quoted

UNIT = 1 << 23
"""About how many characters are encoded and written together: what is lost where the process is killed."""
PIECE = 1 << 20
"""About how many bytes of a text file are encoded as one text, which ends with a line."""
LONGEST = 1 << 24
"""The most bytes of a line of JSON, and characters of a row of Parquet."""
UNPACKED = 1000
"""How many times its own size a Parquet file may unpack to, beside a PIECE."""
ROWS = 256
READERS = 2
"""Threads that encode. The library of tokenizers has a thread for each processor."""
Columns = tuple[np.ndarray, np.ndarray, int]
REMEDY = "give UTF-8 text, JSON lines or Parquet, or leave it out."


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Packs text into files of token ids: a data_dir of the data set tokens."""

    sources: Annotated[
        tuple[Annotated[Path, expanding("SOURCES")], ...],
        Flag("text files, JSON lines (.jsonl), .parquet, or folders of such", is_positional=True),
    ]
    output: Annotated[Path, expanding("--output"), Flag("new folder of the ids")]
    tokenizer: Annotated[Path, expanding("--tokenizer"), Flag("bytes, or a tokenizer.json")] = Path(BYTES)
    end: Annotated[str | None, Flag(f"what ends a document; left out: the first token of {' '.join(ENDS)}")] = None
    column: Annotated[str, Flag("of JSON lines and Parquet that holds the text")] = "text"
    valid_share: Annotated[float, Field(gt=0, lt=100), Flag("percent of the documents, to validate with")] = 5.0


class File(NamedTuple):
    """A file to read; what is behind `cut` is to validate with."""

    path: Path
    name: str
    is_named: bool
    size: int
    changed: int
    cut: int


class Piece(NamedTuple):
    """Some text of a document, and the bytes of its file up to its end."""

    text: str
    read: int
    is_held_out: bool
    is_first: bool = True
    is_last: bool = True


def main(argv: Sequence[str]) -> int:
    """Packs the text. Raises RecipeError, OutputError, EngineUnavailable, and DataError for what is no text."""
    options = flags.parse(Options, "python -m hvdtrain pack-text", argv)
    with Status("looking at the files") as status:
        written = pack(options, status.update)
    print(f"{options.output}: {written}")
    return 0


def pack(options: Options, show: Callable[[str], None] = hidden) -> str:
    """Packs the text, and returns what was written, as text for the user. `show` gets how far it is."""
    tokenizer, names = tokenizer_of(str(options.tokenizer)), [options.end] if options.end else ENDS
    if not (ends := [tokenizer.known[name] for name in names if name in tokenizer.known]):
        named = " or ".join(map(quoted, names))
        raise DataError(f"{options.tokenizer} has no token {named} to end a document with: give --end.")
    found = [each for source in options.sources for each in _files(source)]
    if len(found) == 1:  # a text alone is one document, the end of which is to validate with
        found = [found[0]._replace(cut=round(found[0].size * (1 - options.valid_share / 100)))]
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    about = {"vocabulary": tokenizer.vocabulary, "dtype": dtype.name, "end": ends[0]}
    about |= {"tokenizer": options.tokenizer.name, "source": " ".join(source.name for source in options.sources)}
    with filled(options.output, f"{options} {found} {tokenizer.content}") as folder:
        encoded = functools.partial(_encoded, tokenizer=tokenizer, end=ends[0], dtype=dtype)
        at = _write(folder, _units(_pieces(found, options)), encoded, sum(each.size for each in found), show)
        for split, counts in at.items():
            if not counts[0]:
                share = f"--valid-share, which is {options.valid_share:g} percent"
                raise DataError(f"no document is in {split}: give more documents, or another {share}.")
            of_split = dict(zip(("count", "documents", "bytes"), counts, strict=True))
            (folder / f"{split}.json").write_text(json.dumps(about | of_split))
        if tokenizer.content:
            (folder / "tokenizer.json").write_text(tokenizer.content)
    texts = (
        f"{count:,} ids of {documents:,} documents, {size / 1e6:,.1f} MB" for count, documents, size in at.values()
    )
    return f"{' and '.join(texts)}, to train and to validate with, in a vocabulary of {tokenizer.vocabulary:,}"


def _files(source: Path) -> Iterator[File]:
    """The file, or all files in the folder but the hidden ones. Raises DataError for a link in it, or a folder that
    cannot be read."""
    paths = [source] * (not source.is_dir())
    for at, folders, names in os.walk(source, onerror=_unreadable) if source.is_dir() else ():
        folders[:] = [name for name in folders if not name.startswith(".")]
        shown = [Path(at, name) for name in (*folders, *names) if not name.startswith(".")]
        paths += [path for path in shown if path.is_symlink() or not path.is_dir()]
    for path in sorted(paths):
        name = path.relative_to(source) if path != source else Path(path.name)
        with as_data_error(path, REMEDY), files.opened(path, follow=path == source) as file:
            status = os.fstat(file.fileno())
            yield File(path, str(name), path == source, status.st_size, status.st_mtime_ns, status.st_size)


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename} cannot be read ({error.strerror}): {REMEDY}")


def _write(
    folder: Path,
    units: Iterator[list[Piece]],
    encoded: Callable[[list[Piece]], list[Columns]],
    total: int,
    show: Callable[[str], None],
) -> dict[str, list[int]]:
    """Writes ids and starts into the folder, from where a killed call was. Returns each split's numbers of ids, of
    documents and of bytes of text."""
    record, began = folder / ".done", time.monotonic()
    done, kept, at = json.loads(record.read_text()) if record.exists() else (0, 0, {split: [0] * 3 for split in SPLITS})
    found = read_ahead(lambda unit: (unit[-1].read, encoded(unit)), itertools.islice(units, done, None), READERS)
    for number, (read, splits) in enumerate(found, done + 1):
        for split, (ids, starts, size) in zip(SPLITS, splits, strict=True):
            count, documents, _ = at[split]
            for kind, column, before in (("bin", ids, count), ("starts", starts + count, documents)):
                with (folder / f"{split}.{kind}").open("ab") as file:
                    file.truncate(before * column.itemsize)
                    file.write(column.tobytes())
                    file.flush()
                    os.fsync(file.fileno())
            at[split] = [before + more for before, more in zip(at[split], (len(ids), len(starts), size), strict=True)]
        files.write(record, json.dumps([number, read, at]))
        rate = max(1.0, (read - kept) / (time.monotonic() - began))
        left = timedelta(seconds=max(0, round((total - read) / rate)))
        show(f"{read / 1e6:,.0f} of {total / 1e6:,.0f} MB, {rate / 1e6:,.1f} MB a second, {left} left")
    return at


def _encoded(unit: list[Piece], tokenizer: Tokenizer, end: int, dtype: np.dtype) -> list[Columns]:
    """For each split the ids of a unit, where documents start among them, and the bytes of their text."""
    pairs, splits = [*zip(unit, tokenizer.encode([piece.text for piece in unit]), strict=True)], []
    for held in (False, True):
        ids, starts, count, size = [np.empty(0, dtype)], list[int](), 0, 0
        for piece, found in pairs:
            if piece.is_held_out == held:
                starts += [count] * piece.is_first
                ids += [np.asarray(found, dtype), np.full(int(piece.is_last), end, dtype)]
                count += len(found) + piece.is_last
                size += len(piece.text.encode())
        splits.append((np.concatenate(ids), np.array(starts, "<u8"), size))
    return splits


def _units(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    unit, size = list[Piece](), 0
    for piece in pieces:
        unit.append(piece)
        size += len(piece.text) + 100  # of the piece itself
        if size >= UNIT:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def _pieces(found: list[File], options: Options) -> Iterator[Piece]:
    """The text of the files in order. Raises DataError."""
    before = 0
    for each in found:
        read = FORMS.get(each.path.suffix.lower(), _of_text)
        with as_data_error(each.path, REMEDY), files.opened(each.path, follow=each.is_named) as file:
            for piece in read(file, each, options):
                yield piece._replace(read=before + piece.read)
        before += each.size


def _of_text(file: IO[bytes], each: File, options: Options) -> Iterator[Piece]:
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    held = each.cut == each.size and is_held_out(each.name, options.valid_share / 100)
    for last, is_held in ((each.cut, held), (each.size, True)):
        begin = at
        while at < last:
            if not (content := file.read(min(PIECE, last - at)) + file.readline(PIECE)):
                raise ValueError("it has become shorter")
            text = _decoded(each, at, content, decoder, at + len(content) >= each.size)
            at += len(content)
            yield Piece(text, at, is_held, at - len(content) == begin, at >= last)


def _of_lines(file: IO[bytes], each: File, options: Options) -> Iterator[Piece]:
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    for number in itertools.count(1):
        if not (line := file.readline(LONGEST + 1)):
            return
        text = _decoded(each, at, line, decoder) if len(line) <= LONGEST else ""
        at += len(line)
        if text.isspace():
            continue
        try:
            text = json.loads(text)[options.column]
            text.encode()  # JSON may hold half a character
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            rule = f"line {number:,} must be JSON of at most {LONGEST:,} bytes with a text in {quoted(options.column)}"
            raise ValueError(f"{rule}, got {type(error).__name__}: {error}") from None
        yield Piece(text, at, is_held_out(f"{each.name}:{number}", options.valid_share / 100))


def _of_rows(file: IO[bytes], each: File, options: Options) -> Iterator[Piece]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        why = one_line(error)
        raise EngineUnavailable(f"Parquet needs pyarrow ({why}): pip install 'hvdtrain[parquet]'.") from None
    column, size = options.column, 0
    # Texts of a dictionary, which may come a million times, are not copied for each row.
    table = ParquetFile(file, read_dictionary=[column], pre_buffer=False)
    if column not in (names := table.schema_arrow.names):
        raise ValueError(f"it has no column {quoted(column)}, but {one_line(', '.join(names), SHOWN)}; give --column")
    batches = table.iter_batches(ROWS, columns=[column], use_threads=False)
    for row, value in enumerate(value for batch in batches for value in batch.column(0)):
        if not isinstance(text := value.as_py(), str) or len(text) > LONGEST:
            raise ValueError(f"row {row:,} must have a text of at most {LONGEST:,} characters in {quoted(column)}")
        if (size := size + len(text) + 1) > UNPACKED * each.size + PIECE:
            raise ValueError(f"it unpacks to more than {UNPACKED:,} times its size")
        read = each.size * row // table.metadata.num_rows
        yield Piece(text, read, is_held_out(f"{each.name}:{row}", options.valid_share / 100))


FORMS = {".jsonl": _of_lines, ".parquet": _of_rows}
"""What reads a file, by its suffix; any other file is a text."""


def _decoded(each: File, at: int, content: bytes, decoder: codecs.IncrementalDecoder, final: bool = True) -> str:
    """The text of some bytes of a file from `at` on. Raises DataError where they are not UTF-8."""
    at -= len(decoder.getstate()[0])
    try:
        return decoder.decode(content, final)
    except UnicodeDecodeError as error:
        place = f"at byte {at + error.start:,} (0x{error.object[error.start]:02x})"
        raise DataError(f"{each.path} is not UTF-8 {place}: {REMEDY}") from None
