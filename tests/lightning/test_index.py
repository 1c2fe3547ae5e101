"""ImageNet by index files, without unpickling anything else; and the course script of JSC over it."""

import json
import os
import pickle
import re
import tarfile
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import warm
from paths import DATA, SUPPORT, UNPACKING
from PIL import Image
from ranks import lacking, run

from hvdtrain import datasets
from hvdtrain.datasets import DRAWS, index
from hvdtrain.errors import DataError

SCRIPT = SUPPORT / "lightning_jsc_course.py"
SLOW = ("course_script",)
SIDES = {"train_crop": 8, "valid_resize": 8, "valid_crop": 8}


def write(folder, train, valid, **how):
    """Both index files."""
    for name, held in ((index.TRAIN, train), (index.VALID, valid)):
        (folder / name).write_bytes(pickle.dumps(held, **how))


@pytest.fixture
def images(tmp_path):
    """Six images, each of one colour."""
    paths = [tmp_path / f"{shade}.png" for shade in range(0, 240, 40)]
    for path in paths:
        Image.new("RGB", (12, 10), (int(path.stem),) * 3).save(path)
    return paths


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize(
    "named",
    [str, lambda path: path.name, lambda path: path.name.encode(), lambda path: PurePosixPath(path.name), Path],
    ids=["absolute", "relative", "bytes", "pure path", "path"],
)
def test_images_are_read_in_the_order_of_the_index(tmp_path, images, named, protocol):
    chosen = [images[i] for i in (3, 1, 5, 0)]
    train = {named(path): label for path, label in zip(chosen, (2, 0, 1, 2), strict=True)}
    write(tmp_path, train, {named(images[2]): 1}, protocol=protocol)
    data = datasets.load("imagenet", data_dir=tmp_path, **SIDES)
    assert (len(data.train), len(data.valid), data.classes, data.sample_shape) == (4, 1, 3, (8, 8, 3))
    x, y = data.train.read(np.array([0, 2]), None)
    assert y.tolist() == [2, 1] and x[:, 0, 0, 0].tolist() == [120, 200]
    x, _ = data.train.read(np.array([1]), np.zeros((1, DRAWS), np.float32))
    assert x.shape == (1, 8, 8, 3) and (x == 40).all()


def test_named_classes_are_numbered_in_alphabetical_order(tmp_path, images):
    train = dict(zip(map(str, images), ["zebra", "ape", "zebra", "mole", "ape", "mole"], strict=True))
    write(tmp_path, train, {str(images[0]): "mole"})
    data = datasets.load("imagenet", data_dir=tmp_path, **SIDES)
    assert data.train.labels.tolist() == [2, 0, 2, 1, 0, 1] and data.valid.labels.tolist() == [1]
    assert data.classes == 3


def test_folders_go_before_an_index(tmp_path, images):
    (tmp_path / "train").mkdir()
    write(tmp_path, {"a": 0}, {"a": 0})
    with pytest.raises(DataError, match=r"val or .*valid is missing"):
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)


class Evil:
    def __reduce__(self):
        return print, ("run",)


REMEDY = r"an index file is a pickled dict \{path: class\}; write it again\."
BAD = {
    "a call": (
        {"a": Evil()},
        r"is damaged \(UnpicklingError: it requests builtins\.print, which no index file needs\)",
    ),
    "a number of NumPy's": (
        {"a": np.int64(1)},
        r"UnpicklingError: it requests numpy.*scalar, which no index file needs\)",
    ),
    "a list": ([("a", 0)], "holds an object of type list"),
    "nothing": ({}, "holds an empty index"),
    "no class": ({"a": None}, "must map paths to classes, got 'a' with class None"),
    "a flag": ({"a": True}, "must map paths to classes, got 'a' with class True"),
    "a list as class": ({"a": [1]}, r"must map paths to classes, got 'a' with class \[1\]"),
    "no path": ({3: 1}, "must map paths to classes, got 3 with class 1"),
    "below 0": ({"a": -1}, "classes must all be names or all numbers from 0, got -1"),
    "too many classes": ({"a": 100_000}, "classes must be below 100,000, got 100000"),
    "10 ** 30 classes": ({"a": 10**30}, "classes must be below 100,000, got 10000000000.*0000"),
    "a path too long": ({"a" * 4097: 1}, f"must hold paths of at most 4096 bytes, got '{'a' * 37}...{'a' * 38}'"),
    "names and numbers": ({"a": 0, "b": "ape"}, "classes must all be names or all numbers from 0, got 'ape'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_index_is_refused_in_a_line(tmp_path, capsys, case):
    held, message = BAD[case]
    write(tmp_path, held, {"a": 0})
    with pytest.raises(DataError, match=rf"train_data\.pkl:? .*{message}: {REMEDY}") as refused:
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)
    assert "\n" not in str(refused.value) and capsys.readouterr().out == ""


POSIX = b"\x80\x02cpathlib\nPurePosixPath\n"
LONG = b"X" + (900_000).to_bytes(4, "little") + b"a" * 900_000
BOMBS = {
    "a long path of one text again and again": (
        POSIX + b"(" + LONG + b"q\0" + b"h\0" * 400 + b"tR.",
        "a path of more than 4096 characters",
    ),
    "numbers with one hash": (
        b"\x80\x02}(" + b"".join(pickle.dumps((2**61 - 1) * i, 2)[2:-1] + b"K\1" for i in range(1, 60_000)) + b"u.",
        "a key that is neither text nor a number of a class",
    ),
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_bomb_is_refused_at_once(tmp_path, case):
    content, reason = BOMBS[case]
    (tmp_path / "train_data.pkl").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        index.read(tmp_path / "train_data.pkl")


STATE = b"}X\x0a\x00\x00\x00__fspath__X\x06\x00\x00\x00forgeds"
FORGED = {
    "the dictionary of a class": POSIX + STATE + b"b.",
    "the attributes of a class": POSIX + b"N" + STATE + b"\x86b.",
    "the attributes of a path": POSIX + b"X\x01\x00\x00\x00a\x85RN" + STATE + b"\x86b.",
    "the attributes of a codec": b"\x80\x02c_codecs\nencode\nN" + STATE + b"\x86b.",
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_file_sets_no_attribute(tmp_path, case):
    """Once it rewrote pathlib for the whole process, whose next commit then deleted what the forger chose."""
    before = dict(vars(PurePosixPath))
    write(tmp_path, {"a": 0}, {"a": 0})
    (tmp_path / index.TRAIN).write_bytes(FORGED[case])
    with pytest.raises(DataError, match=rf"is damaged \(UnpicklingError: it holds the opcode b'b', which .*: {REMEDY}"):
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)
    try:
        assert dict(vars(PurePosixPath)) == before
        assert str(Path("a") / "b") == os.fspath(Path("a", "b")) == "a/b"
    finally:
        for name in vars(PurePosixPath).keys() - before.keys():
            delattr(PurePosixPath, name)


@pytest.mark.parametrize(
    "written",
    [
        b"(dp0\ncpathlib\nPosixPath\np1\n(Vd\np2\nVa.png\np3\ntp4\nRp5\nI1\ns.",
        b"\x80\x04\x95.\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x07pathlib\x94\x8c\tPosixPath\x94\x93\x94\x8c\x01d\x94\x8c\x05"
        b"a.png\x94\x86\x94R\x94K\x01s.",
        b"\x80\x04\x953\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x0epathlib._local\x94\x8c\tPosixPath\x94\x93\x94\x8c\x07d/a.png"
        b"\x94\x85\x94R\x94K\x01s.",
        b"(dp0\ncpathlib._local\nPosixPath\np1\n(Vd/a.png\np2\ntp3\nRp4\nI1\ns.",
        b"(dp1\nS'd/a.png'\np2\nI1\ns.",
        b"\x80\x02}q\x01U\x07d/a.pngq\x02K\x01s.",
    ],
    ids=["3.12, protocol 0", "3.12", "3.13", "3.13, protocol 0", "2.7, protocol 0", "2.7"],
)
def test_what_other_versions_of_python_wrote_is_read(tmp_path, written):
    (tmp_path / index.TRAIN).write_bytes(written)
    assert index.read(tmp_path / index.TRAIN) == {b"d/a.png": 1}


def test_a_cut_off_or_missing_file_is_named(tmp_path):
    write(tmp_path, {"a": 0}, {"a": 0})
    (tmp_path / index.VALID).write_bytes(pickle.dumps({"a": 0})[:-3])
    with pytest.raises(DataError, match=rf"val_data\.pkl is damaged \(.*\): {REMEDY}"):
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)
    (tmp_path / index.VALID).unlink()
    with pytest.raises(DataError, match=rf"val_data\.pkl is missing: {REMEDY}"):
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)


def test_a_class_that_is_never_trained_is_refused(tmp_path):
    write(tmp_path, {"a": 0, "b": 2}, {"a": 1, "b": 2})
    with pytest.raises(DataError, match=re.escape("holds 1 classes that train_data.pkl lacks (1): both must hold")):
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)


@pytest.fixture(scope="module")
def imagenette(tmp_path_factory):
    """Imagenette as the course lays it out: 40 images to train on and 17 to validate, by index files."""
    folder, held = tmp_path_factory.mktemp("course"), {"train": {}, "val": {}}
    with tarfile.open(DATA / "imagenette_4k.tar") as packed:
        packed.extraction_filter = UNPACKING
        for member in packed:
            *_, part, wnid, _ = ["", "", "", *Path(member.name).parts]
            if not member.isfile() or part not in held:
                continue
            classes = sorted({*(wnid for _, wnid in held[part].values()), wnid})
            if sum(w == wnid for _, w in held[part].values()) < (4 if part == "train" else 2) and len(classes) <= 10:
                packed.extract(member, folder)
                held[part][member.name] = (member.name, wnid)
    wnids = sorted({wnid for _, wnid in held["train"].values()})
    train, valid = ({name: wnids.index(wnid) for name, wnid in held[part].values()} for part in ("train", "val"))
    write(folder, train, dict(list(valid.items())[:17]))
    return folder


def course(launcher, ranks, *argv):
    """The figures that the script prints."""
    ended = run(launcher, ranks, warm.command("lightning", SCRIPT, *argv), limit=300).good()
    (line,) = [line[line.index("{") :] for line in ended.out.splitlines() if '"accuracy"' in line]
    return json.loads(line)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs {DATA}: Imagenette, packed as its README says")
@pytest.mark.skipif(bool(lacking("torch")), reason=lacking("torch"))
def test_the_course_script_validates_over_two_ranks_what_one_process_does(imagenette, tmp_path):
    pytest.importorskip("lightning", reason="needs Lightning: pip install -e .[lightning]")
    few = [imagenette, "--batch-size", "10", "--crop", "32"]
    weights = {strategy: tmp_path / f"{strategy}.pt" for strategy in ("horovod", "ddp")}
    trained = {
        strategy: course("mpi", 2, *few, "--strategy", strategy, "--save", weights[strategy]) for strategy in weights
    }
    assert trained["horovod"]["losses"] == pytest.approx(trained["ddp"]["losses"], rel=1e-3)
    alone = course("alone", 1, *few, "--checkpoint", weights["horovod"])
    for figures in (alone, *trained.values()):
        assert figures["images"] == 17
        assert figures["accuracy"] == alone["accuracy"] > 0
