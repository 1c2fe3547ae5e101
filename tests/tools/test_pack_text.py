"""`pack-text`: ids that give the text back, files that are whole or not there, and one line for whatever is no text."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from paths import REPOSITORY
from refusals import refusal
from users import NOBODY, needs_root, user

from hvdtrain import cli, datasets
from hvdtrain.datasets import tokens
from hvdtrain.errors import DataError, EngineUnavailable, OutputError
from hvdtrain.tools import pack_text

TEXTS = [f"Document {k}: größer — 中文 {'word ' * (k % 40)}\n\n" for k in range(300)]
REMEDY = "give UTF-8 text, JSON lines or Parquet, or leave it out."


def packed(*sources, to, **options):
    pack_text.pack(pack_text.Options(tuple(map(Path, sources)), Path(to), **options))
    return Path(to)


def documents(folder, split, *, shows=lambda ids: bytes(ids.astype(np.uint8)).decode()):
    """The documents of a split, without the ids that end them."""
    about = json.loads((folder / f"{split}.json").read_text())
    ids = np.fromfile(folder / f"{split}.bin", about["dtype"])
    starts = np.fromfile(folder / f"{split}.starts", "<u8").astype(int)
    assert len(ids) == about["count"]
    found = np.split(ids, starts[1:])
    assert all(of[-1] == about["end"] and (of[:-1] != about["end"]).all() for of in found)
    return [shows(of[:-1]) for of in found]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps({"id": k, "text": text}) + "\n" * (1 + k % 2) for k, text in enumerate(TEXTS)))
    return path


def parquet(path, texts, column="text", **options):
    pa = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pa.table({"other": range(len(texts)), column: texts}), path, **options)
    return path


def test_every_document_is_in_one_split_as_it_was(lines, tmp_path):
    folder = packed(lines, to=tmp_path / "ids")
    train, valid = (documents(folder, split) for split in ("train", "val"))
    assert sorted(train + valid) == sorted(TEXTS)
    assert [text for text in TEXTS if text in set(train)] == train
    assert 3 < len(valid) < 40
    assert sum(json.loads((folder / f"{split}.json").read_text())["bytes"] for split in ("train", "val")) == sum(
        len(text.encode()) for text in TEXTS
    )
    dataset = datasets.load("tokens", data_dir=folder, sequence_length=16, sequences="padded")
    x = dataset.train.read(np.array([0]), None)[0]
    assert train[0].startswith(tokens.decode(dataset.text, x[0]).rstrip("\ufffd"))
    assert dataset.text.tokenizer == "bytes"
    # With more sources none of the documents moves.
    (tmp_path / "b.jsonl").write_text('{"text": "one more"}\n')
    more = packed(lines, tmp_path / "b.jsonl", to=tmp_path / "more")
    assert set(documents(more, "val")) - {"one more"} == set(valid)


def test_parquet_has_the_same_documents(lines, tmp_path):
    path = parquet(tmp_path / "all.parquet", TEXTS, column="story", row_group_size=70)
    folder = packed(path, to=tmp_path / "ids", column="story")
    assert sorted(documents(folder, "train") + documents(folder, "val")) == sorted(TEXTS)


def test_a_folder_is_read_but_for_what_is_hidden(tmp_path):
    for k in range(40):
        (tmp_path / f"in/sub{k % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"in/sub{k % 3}/{k}.txt").write_text(f"text {k}")
    (tmp_path / "in/.git").mkdir()
    (tmp_path / "in/.git/pack").write_bytes(b"\xff")
    folder = packed(tmp_path / "in", to=tmp_path / "ids", valid_share=30.0)
    assert sorted(documents(folder, "train") + documents(folder, "val")) == sorted(f"text {k}" for k in range(40))


@needs_root
def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    closed = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        with user(NOBODY) as nobody:
            said = nobody(refusal, DataError, packed, closed, to=tmp_path / "ids")
    finally:
        closed.rmdir()
    assert said == f"{closed} cannot be read (Permission denied): {REMEDY}"


@pytest.mark.parametrize("line", ["word " * 30 + "\n", "中" * 5000])
def test_of_a_text_alone_the_end_is_held_out(tmp_path, monkeypatch, line):
    monkeypatch.setattr(pack_text, "PIECE", 1000)
    monkeypatch.setattr(pack_text, "UNIT", 3000)
    text = line * 20
    (tmp_path / "input.txt").write_text(text)
    folder = packed(tmp_path / "input.txt", to=tmp_path / "ids", valid_share=10.0)
    (train,), (valid,) = (documents(folder, split) for split in ("train", "val"))
    assert train + valid == text
    assert 0.04 < len(valid) / len(text) < 0.12


KILLED = """
import os, signal, sys
from hvdtrain import cli
from hvdtrain.tools import pack_text
pack_text.UNIT, left = 4000, int(sys.argv[1])
write = pack_text.files.write

def counted(*given):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)  # ids are written, and not recorded
    write(*given)

pack_text.files.write = counted
sys.exit(cli.main(["pack-text", *sys.argv[2:]]))
"""


def run(*argv, code=KILLED):
    command = [sys.executable, "-c", code, *map(str, argv)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_a_killed_call_is_continued_with_the_same_bytes(lines, tmp_path):
    whole = run(0, lines, "--output", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    for left in (3, 5):
        assert run(left, lines, "--output", tmp_path / "ids").returncode == -signal.SIGKILL
        assert not (tmp_path / "ids").exists()
    (unfinished,) = tmp_path.glob(".ids.*.tmp")
    done = json.loads((unfinished / ".done").read_text())[0]
    assert done == 6
    assert run(0, lines, "--output", tmp_path / "ids").stdout == whole.stdout.replace("whole", "ids")
    assert contents(tmp_path / "ids") == contents(tmp_path / "whole")
    kinds = ("bin", "json", "starts")
    assert contents(tmp_path / "ids").keys() == {f"{split}.{kind}" for split in ("train", "val") for kind in kinds}


HOSTILE = {
    "not UTF-8": (
        "a.txt",
        b"x" * 5000 + "é".encode() + b"\xff\xfe",
        f"is not UTF-8 at byte 5,002 (0xff): {REMEDY}",
    ),
    "half a character at the end": ("a.txt", b"x" * 30 + b"\xe4\xb8", f"is not UTF-8 at byte 30 (0xe4): {REMEDY}"),
    "compressed": ("a.txt.gz", b"\x1f\x8b\x08\x00", f"is not UTF-8 at byte 1 (0x8b): {REMEDY}"),
    "a line not UTF-8": ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', f"is not UTF-8 at byte 24 (0xff): {REMEDY}"),
    "no column": ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}', "line 2 must be JSON"),
    "no text": ("a.jsonl", b'{"text": 7}', "line 1 must be JSON"),
    "half a character": ("a.jsonl", b'{"text": "\\ud800"}', "line 1 must be JSON"),
    "nested": ("a.jsonl", b"[" * 200_000, "line 1 must be JSON"),
    "a long line": ("a.jsonl", b'{"text": "' + b"a" * 20_000 + b'"}', "line 1 must be JSON of at most 10,000 bytes"),
    "no Parquet": ("a.parquet", b"PAR1" * 9, "is damaged"),
    "terminal codes": ("a.jsonl", b'{"text": "a"}\n{"\x1b[31m": 1}', "line 2 must be JSON"),
}


@pytest.mark.parametrize(("name", "content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_text_is_refused_by_file_and_place(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(pack_text, "LONGEST", 10_000 if "long" in message or "10,000" in message else 1 << 24)
    monkeypatch.setattr(pack_text, "PIECE", 1000)
    (tmp_path / name).write_bytes(content)
    found = refusal(DataError, packed, tmp_path / name, to=tmp_path / "ids")
    assert found.startswith(f"{tmp_path / name} is ")
    assert message in found
    assert found.isprintable()
    assert len(found) < 600
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("kind", ["pipe", "link", "device", "dangling"])
def test_a_folder_with_what_is_no_file_is_refused(tmp_path, kind):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in/odd.txt"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/etc/passwd")
        case "device":
            path.symlink_to("/dev/zero")
        case "dangling":
            path.symlink_to("nowhere")
    rule = "it is not a regular file" if kind == "pipe" else "it is a link, which is not followed"
    message = f"{path} is damaged (ValueError: {rule}): {REMEDY}"
    assert refusal(DataError, packed, tmp_path / "in", to=tmp_path / "ids") == message


BOMB = """
import resource, sys
import pyarrow as pa
from pyarrow.parquet import write_table
resource.setrlimit(resource.RLIMIT_FSIZE, (200 << 20,) * 2)
text = "a" * 500_000
rows = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int32()), pa.array([text]))
write_table(pa.table({"text": rows}), sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + (6 << 30),) * 2)
from hvdtrain import cli
code = cli.main(["pack-text", sys.argv[1], "--output", sys.argv[2]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
sys.exit(code)
"""


def test_a_parquet_file_of_500_gb_in_a_few_kb_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    done = run(tmp_path / "bomb.parquet", tmp_path / "ids", code=BOMB)
    assert done.returncode == 2, done.stderr
    assert "it unpacks to more than 1,000 times its size" in done.stderr
    assert done.stderr.count("\n") == 1
    assert int(done.stdout) < 2000  # MB, of 500,000


def test_what_is_there_is_not_written_over_and_an_empty_split_is_refused(lines, tmp_path, capsys):
    folder = packed(lines, to=tmp_path / "ids")
    assert "is there already" in refusal(OutputError, packed, lines, to=folder)
    (tmp_path / "one.jsonl").write_text('{"text": "alone"}\n')
    message = refusal(DataError, packed, tmp_path / "one.jsonl", to=tmp_path / "other")
    assert message == "no document is in val: give more documents, or another --valid-share, which is 5 percent."
    assert cli.main(["pack-text", str(lines), "--output", str(tmp_path / "new"), "--valid-share", "200"]) == 2
    assert "--valid-share must be less than 100" in capsys.readouterr().err


def test_a_tokenizer_that_is_not_installed_or_damaged_is_named(lines, tmp_path, monkeypatch):
    (tmp_path / "t.json").write_text("{}")
    tokens.tokenizer_of.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        message = refusal(EngineUnavailable, packed, lines, to=tmp_path / "ids", tokenizer=tmp_path / "t.json")
        assert "pip install 'hvdtrain[tokenizers]'" in message
    pytest.importorskip("tokenizers")
    message = refusal(DataError, packed, lines, to=tmp_path / "ids", tokenizer=tmp_path / "t.json")
    assert message.startswith(f"{tmp_path}/t.json is damaged")


def bpe(path, *, special="<|endoftext|>"):
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=400, special_tokens=[special], initial_alphabet=alphabet)
    made.train_from_iterator(TEXTS, trainer)
    made.enable_truncation(5)
    made.enable_padding()
    made.save(str(path))
    return made


def test_a_tokenizer_of_the_library_gives_the_texts_back(tmp_path):
    """Nothing is cut or padded, and the name of a special token in a text is text."""
    bpe(tmp_path / "t.json")
    texts = [*TEXTS, "an <|endoftext|> inside"] * 2
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    folder = packed(tmp_path / "all.jsonl", to=tmp_path / "ids", tokenizer=tmp_path / "t.json")
    dataset = datasets.load("tokens", data_dir=folder, sequence_length=16)
    shows = lambda ids: tokens.decode(dataset.text, ids.tolist())  # noqa: E731
    found = [text for split in ("train", "val") for text in documents(folder, split, shows=shows)]
    assert sorted(found) == sorted(texts)
    assert dataset.text.vocabulary == 400
    assert dataset.text.tokens_per_byte < 0.9
    bpe(tmp_path / "t.json", special="<stop>")
    tokens.tokenizer_of.cache_clear()
    message = refusal(DataError, packed, tmp_path / "all.jsonl", to=tmp_path / "new", tokenizer=tmp_path / "t.json")
    assert message.endswith("to end a document with: give --end.")
