"""Text as token ids: windows and documents, what files must say, hostile files, and the order by index."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import refusal

from hvdtrain import datasets
from hvdtrain.core.progress import Epoch, Permutation, Progress, UserSampling, train_requests
from hvdtrain.core.recipe import validate
from hvdtrain.datasets import tokens
from hvdtrain.errors import DataError, RecipeError
from hvdtrain.untrusted import redacted

T = 8
BARE = {"token_dtype": "uint16"}
DOCUMENTS = [[1, 2, 3], [4], list(range(5, 26)), [30, 31, 32, 33, 34, 35, 36, 37], []]
END = 99


def write(folder: Path, split: str = "train", documents=DOCUMENTS, dtype: str = "uint16", **about) -> Path:
    """A split as pack-text writes it; each document ends with END."""
    ids = [each for of in documents for each in (*of, END)]
    np.array(ids, dtype).tofile(folder / f"{split}.bin")
    np.cumsum([0, *(len(of) + 1 for of in documents[:-1])], dtype=np.uint64).tofile(folder / f"{split}.starts")
    said = {"vocabulary": 100, "dtype": dtype, "end": END, "count": len(ids), "bytes": 2 * len(ids)}
    (folder / f"{split}.json").write_text(json.dumps(said | {"tokenizer": "mine", "source": "a test"} | about))
    return folder


@pytest.fixture
def text(tmp_path):
    return write(write(tmp_path), "val", DOCUMENTS[::-1])


def load(folder, **keys):
    return datasets.load("tokens", data_dir=folder, sequence_length=T, **keys)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_follow_one_another_and_predict_each_id_once(tmp_path, dtype):
    dataset = load(write(write(tmp_path, dtype=dtype), "val", dtype=dtype))
    ids = np.fromfile(tmp_path / "train.bin", dtype)
    assert len(dataset.train) == (len(ids) - 1) // T == 4
    x, y = pickle.loads(pickle.dumps(dataset.train)).read(np.array([3, 0, 1, 2]), None)
    order = [1, 2, 3, 0]
    np.testing.assert_array_equal(x[order].ravel(), ids[: 4 * T])
    np.testing.assert_array_equal(y[order].ravel(), ids[1 : 4 * T + 1])
    assert (x.dtype, y.dtype, dataset.classes, dataset.sample_shape) == (np.int64, np.int64, 100, (T,))
    assert dataset.text == (100, END, 0.5, "")


def test_a_padded_example_is_a_document_or_a_piece_of_it(text):
    split = load(text, sequences="padded").train
    x, y = split.read(np.arange(len(split)), None)
    seen = []
    for row in range(len(split)):
        kept = y[row] != tokens.IGNORED
        assert sorted(kept, reverse=True) == kept.tolist()
        assert kept.any()
        assert (x[row][len(kept[kept]) :] == END).all()
        seen.append((*x[row][kept], y[row][kept][-1]))
    # The last document has nothing but its end, and so nothing to predict.
    first, second = [*range(5, 26), END][:9], [*range(5, 26), END][8:17]
    third = [*range(5, 26), END][16:]
    assert seen == [(1, 2, 3, END), (4, END), *map(tuple, (first, second, third)), (*DOCUMENTS[3], END)]


def test_a_bare_file_of_nanogpts_is_read_where_its_type_is_said(tmp_path):
    """As nanoGPT's prepare.py writes it: np.array(ids, dtype=np.uint16).tofile(...)."""
    for split in ("train", "val"):
        np.array([50256, 15, 7] * 9, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    message = f"{tmp_path}/train.bin has no train.json that says its type; give token_dtype uint16 or uint32."
    assert refusal(DataError, load, tmp_path) == message
    dataset = load(tmp_path, **BARE)
    assert dataset.train.read(np.array([0]), None)[0].tolist() == [[50256, 15, 7, 50256, 15, 7, 50256, 15]]
    assert dataset.text == (50304, None, None, "")
    message = refusal(DataError, load, tmp_path, sequences="padded", **BARE)
    assert message == (
        f"{tmp_path}/train.starts is missing: sequences padded needs it; pack the text by pack-text, or take packed."
    )
    message = refusal(DataError, load, tmp_path, sequences="separate", **BARE)
    assert message == "sequences separate needs the id that ends a document: write end into train.json."


WRONG = {
    "no dtype": ("train.json", b'{"vocabulary": 100}', "must have dtype"),
    "a list": ("train.json", b"[1]", "must have dtype"),
    "a dtype that is none": ("train.json", b'{"vocabulary": 100, "dtype": ["uint16"]}', "must have dtype"),
    "an end that is no id": ("train.json", b'{"vocabulary": 9, "dtype": "uint16", "end": 9}', "must have dtype"),
    "more ids than the type has": ("train.json", b'{"vocabulary": 65537, "dtype": "uint16"}', "must have dtype"),
    "another count": ("train.json", b'{"vocabulary": 100, "dtype": "uint16", "count": 7}', "which are not 7 ids"),
    "half an id": ("train.bin", b"123", "has 3 bytes, which are not"),
    "no JSON": ("train.json", b"\xff", "is damaged"),
    "another vocabulary": ("val.json", b'{"vocabulary": 101, "dtype": "uint16"}', "has vocabulary 101, and"),
    "starts beyond the end": ("train.starts", np.array([0, 9, 2**63], "<u8").tobytes(), "must rise from 0"),
    "starts that fall": ("train.starts", np.array([0, 9, 4], "<u8").tobytes(), "must rise from 0"),
    "too many starts": ("train.starts", bytes(1000), "at most"),
    "an empty file": ("val.bin", b"", "which are not"),
}


@pytest.mark.parametrize(("name", "content", "message"), WRONG.values(), ids=WRONG)
def test_a_damaged_file_is_refused_in_one_line(text, name, content, message):
    (text / name).write_bytes(content)
    found = refusal(DataError, load, text, sequences="padded")
    assert message in found
    assert found.startswith(str(text))
    assert found.isprintable()


def test_an_id_outside_of_the_vocabulary_and_a_file_that_shrinks_are_refused_where_they_are_read(text):
    write(text, documents=[[*range(20), 100, *range(30)]])
    dataset = load(text)
    dataset.train.read(np.array([0, 1]), None)
    assert "below the vocabulary of 100, got 100 after 16" in refusal(
        DataError, dataset.train.read, np.array([2]), None
    )
    with (text / "train.bin").open("r+b") as file:
        file.truncate(20)
    assert "it has become shorter" in refusal(DataError, dataset.train.read, np.array([1]), None)


def test_a_pipe_is_not_waited_for(text):
    import os

    (text / "val.bin").unlink()
    os.mkfifo(text / "val.bin")
    assert "it is not a regular file" in refusal(DataError, load, text)


def test_files_that_differ_are_other_examples(text):
    before = load(text).contents()
    assert before == load(text).contents()
    ids = np.fromfile(text / "train.bin", "uint16")
    ids[5] += 1
    ids.tofile(text / "train.bin")
    after = load(text).contents()
    assert [key for key in before if before[key] != after[key]] == ["training list"]


def test_without_a_folder_it_is_the_source_of_pythons_library():
    dataset = datasets.load("tokens", sequence_length=64, sequences="padded")
    x, y = dataset.train.read(np.array([0]), None)
    of = tokens.decode(dataset.text, [*x[0], y[0][-1]])
    assert (dataset.text.vocabulary, dataset.text.end, dataset.text.tokenizer) == (257, 256, "bytes")
    assert 1 < dataset.text.tokens_per_byte < 1.01
    assert "# " in of or '"""' in of
    assert tokens.encode(dataset.text, "é") == [0xC3, 0xA9]
    share = len(dataset.valid.ids) / (len(dataset.train.ids) + len(dataset.valid.ids))
    assert 0.01 < share < 0.15
    assert "files of the standard library of Python 3" in dataset.notes[0]
    assert (dataset.train.ids != 256).any()
    again = datasets.load("tokens", sequence_length=64, sequences="padded")
    assert again.contents() == dataset.contents()


def test_every_place_has_another_index():
    for n in range(1, 5001):
        order = Permutation(n, 3, n)[np.arange(n)]
        assert np.bincount(order, minlength=n).tolist() == [1] * n, n


def test_the_order_looks_random_and_is_anothers_in_each_epoch():
    n = 5000
    places = np.arange(n)
    orders = [Permutation(n, seed, epoch)[places] for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert abs(np.corrcoef(order, places)[0, 1]) < 0.06
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06
        assert (order == places).sum() < 8
        # The mean of each tenth of the epoch is that of all, within four standard errors.
        assert np.abs(order.reshape(10, -1).mean(axis=1) - n / 2).max() < 4 * n / np.sqrt(12 * n / 10)
    assert (orders[0] != orders[1]).mean() > 0.99
    assert (orders[0] != orders[2]).mean() > 0.99


@pytest.mark.parametrize("sizes", [(1, 2), (4, 3)])
def test_ranks_read_one_order_and_an_epoch_continues_where_it_was(sizes):
    n, batch = 1000, 24
    whole = Epoch.by_index(n, 5, 2).order[np.arange(n)]
    read = []
    for size, (begin, end) in zip(sizes, ((0, 10), (10, n // batch)), strict=True):
        sampling = UserSampling(batch, n, size, seed=5, by_index=True)
        progress = Progress(epoch=2, sample=begin * batch)
        of_ranks = [train_requests(sampling, progress, rank)[1][: end - begin] for rank in range(size)]
        for step in zip(*of_ranks, strict=True):
            read += [index for indices, draws in step for index in indices]
            assert all(draws.shape == (len(indices), 0) for indices, draws in step)
    assert read == whole[: n // batch * batch].tolist()


LARGE = """
import resource, sys, time
import numpy as np
from hvdtrain.core.progress import Progress, UserSampling, train_requests
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
starts, requests = train_requests(UserSampling(64, 10**12, 2, by_index=True), Progress(sample=64 * 10**9), 1)
assert len(requests) == len(starts) == 10**12 // 64 - 10**9
indices, draws = requests[10**6]
assert len(set(indices.tolist())) == 32 and indices.max() < 10**12 and draws.shape == (32, 0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_million_million_windows_take_no_memory():
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20_000  # kB


KEYS = {"name": "mine", "model": "m:Net", "dataset": "tokens", "batch_size": 8, "epochs": 1, "base_lr": 0.1}
REFUSED = {
    "no text for a network of images": (
        {"model": "resnet50"},
        "model resnet50 cannot learn dataset tokens: gpt goes with tokens only.",
    ),
    "separate without gpt": (
        {"sequences": "separate"},
        "sequences separate is what model gpt does, got m:Net; take packed, and mask there.",
    ),
    "a type of no file": (
        {"token_dtype": "uint16"},
        "token_dtype is of the .bin files in a data_dir; give one.",
    ),
    "no length": ({"sequence_length": 0}, "sequence_length must be greater than 0, got 0."),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_keys_that_do_not_go_together(keys, message):
    assert refusal(RecipeError, validate, KEYS | keys) == message


def test_the_type_of_the_ids_is_shown_in_records():
    assert redacted("train --token-dtype uint16 --hub-token x1") == "train --token-dtype uint16 --hub-token ***"
