"""Parquet files of the hub's form as `pack` reads them, and one line for whatever is hostile."""

import json
import os
import random
import sys

import numpy as np
import pytest
from hostile_data import mutated
from images import contents, of_split, packed, samples, write_tree
from refusals import refusal

from hvdtrain import datasets
from hvdtrain.datasets import archives
from hvdtrain.errors import DataError, EngineUnavailable

pa = pytest.importorskip("pyarrow", reason="pyarrow is missing: pip install hvdtrain[parquet]")
pq = pytest.importorskip("pyarrow.parquet")
IMAGES = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NAMES = ["tench, Tinca tinca", "goldfish"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return write_tree(tmp_path_factory.mktemp("tree"))


def table(images, labels, names=NAMES, **columns):
    rows = [image if image is None else {"bytes": image, "path": "../../x.jpg"} for image in images]
    made = pa.table({"image": pa.array(rows, IMAGES), "label": pa.array(labels, pa.int64()), **columns})
    about = {"info": {"features": {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}}}
    return made.replace_schema_metadata({"huggingface": json.dumps(about)} if names else {})


def hub(tree, dest, names=NAMES, compression="snappy"):
    """Two files of each split, in groups of two rows, in the folder that the hub has them in."""
    (dest / "data").mkdir(parents=True)
    for split, name in (("train", "train"), ("val", "validation")):
        images = list(of_split(tree, split).items())
        for part in range(2):
            mine = images[part::2]
            rows = table([content for _, content in mine], [int(wnid == "n02") for (wnid, _), _ in mine], names)
            path = dest / "data" / f"{name}-{part:05}-of-00002.parquet"
            pq.write_table(rows, path, row_group_size=2, compression=compression)
    return dest


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
@pytest.mark.parametrize("names", [NAMES, None])
def test_parquet_has_the_samples_of_the_folder(tree, tmp_path, names, compression, monkeypatch):
    monkeypatch.setattr("hvdtrain.datasets.parquet.MIXED", 40_000)  # a few groups: they are read anew
    source = hub(tree, tmp_path / "source", names, compression)
    ours = datasets.load("imagenet", data_dir=packed(source, tmp_path / "ours"), train_crop=32)
    assert ours.names == (tuple(NAMES) if names else ("0", "1"))
    expected = [
        sorted((ours.names[wnid == "n02"], content) for (wnid, _), content in of_split(tree, split).items())
        for split in ("train", "val")
    ]
    assert samples(ours) == expected
    again = packed(source / "data", tmp_path / "again")
    assert contents(again) == contents(tmp_path / "ours")


def test_groups_near_in_the_order_are_few_and_all_images_are_in_it(tmp_path, monkeypatch):
    """Whoever mixes all images reads every group once for each of its rows."""
    monkeypatch.setattr("hvdtrain.datasets.parquet.MIXED", 4_000)
    rows = table([bytes([number % 251]) * 100 for number in range(1000)], [number % 2 for number in range(1000)])
    for split in ("train", "val"):
        pq.write_table(rows, tmp_path / f"{split}.parquet", row_group_size=10, compression="none", use_dictionary=False)
    split = archives.load(tmp_path, None).train
    order = split.mixed(np.random.default_rng(0))
    assert sorted(order) == [*range(1000)]
    assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.2
    windows = [len({number // 10 for number in order[begin : begin + 30]}) for begin in range(0, 1000, 30)]
    assert max(windows) <= 8
    assert [*order[:40]] != sorted(order[:40])
    assert [split.encoded(number)[0] for number in order] == [number % 251 for number in order]


def broken(*, images=(b"x",), labels=(0,), names=NAMES, **columns):
    return lambda: table(list(images), list(labels), names, **columns)


HOSTILE = {
    "another label": (broken(labels=[2]), "must have labels of the 2 training classes"),
    "a label below 0": (broken(labels=[-1]), "must have labels of the 2 training classes"),
    "no label": (broken(labels=[None]), "1 rows have no label"),
    "two columns of images": (
        broken(more=pa.array([None], IMAGES)),
        "it must have one column of images as {bytes, path}, and one of whole numbers or `label`; got image, label",
    ),
    "no column of images": (lambda: pa.table({"image": [b"x"], "label": [1]}), "it must have one column of images"),
    "names that are no names": (broken(names=7), "is damaged (TypeError: "),
}


@pytest.mark.parametrize(("made", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_file_of_another_form_is_one_line(tmp_path, made, said):
    pq.write_table(table([b"x", b"y"], [0, 1]), tmp_path / "train.parquet")
    pq.write_table(made(), tmp_path / "val.parquet")
    message = refusal(DataError, archives.load, tmp_path, None)
    assert message.startswith(f"{tmp_path / 'val.parquet'} ") and said in message
    assert message.isprintable() and len(message) < 700


def test_rows_without_an_image_are_named_when_they_are_read(tmp_path):
    for split in ("train", "val"):
        pq.write_table(table([None, b""], [0, 1]), tmp_path / f"{split}.parquet")
    loaded = archives.load(tmp_path, None)
    assert "row 0 of group 0 has no image in it" in refusal(DataError, loaded.train.encoded, 0)
    assert refusal(DataError, packed, tmp_path, tmp_path / "dest").startswith("4 of the 4 images of ")
    assert not (tmp_path / "dest").exists()


def test_one_split_alone_and_pipes_are_refused(tmp_path):
    pq.write_table(table([b"x"], [0]), tmp_path / "train.parquet")
    assert "*val*.parquet is missing, or holds no image" in refusal(DataError, archives.load, tmp_path, None)
    os.mkfifo(tmp_path / "val.parquet")
    assert "(ValueError: it is not a regular file)" in refusal(DataError, archives.load, tmp_path, None)


def test_damaged_files_are_one_line(tree, tmp_path):
    """Bits that changed: a line, or images; never a traceback."""
    source = hub(tree, tmp_path / "source")
    path = source / "data" / "train-00000-of-00002.parquet"
    whole = path.read_bytes()
    refused = 0
    chance = random.Random(0)
    for _ in range(40):
        path.write_bytes(mutated(chance, whole))
        try:
            loaded = archives.load(source, None)
            for index in range(len(loaded.train)):
                loaded.train.encoded(index)
        except DataError as error:
            refused += 1
            assert str(error).isprintable()
    assert refused > 5


def test_without_pyarrow_parquet_is_refused_and_other_folders_are_not(tree, tmp_path, monkeypatch):
    source = hub(tree, tmp_path / "source")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "hvdtrain.datasets.parquet")
    monkeypatch.delattr("hvdtrain.datasets.parquet", raising=False)
    assert "pip install 'hvdtrain[parquet]'" in refusal(EngineUnavailable, archives.load, source, None)
    assert archives.load(tmp_path / "none", None) is None
