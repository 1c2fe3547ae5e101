"""ImageNet by index files, which are read without running pickled code."""

import os
import pickle
import re
from collections import OrderedDict, defaultdict
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import pytest
from PIL import Image

from hvdtrain import datasets
from hvdtrain.datasets import DRAWS, index
from hvdtrain.errors import DataError, RecipeError

SIDES = {"train_crop": 8, "valid_resize": 8, "valid_crop": 8}


def write(folder, train, valid, **how):
    """Both index files."""
    for name, held in ((index.FILES["train"], train), (index.FILES["val"], valid)):
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


FORMS = {
    "NumPy's numbers": lambda pairs: {path: np.int64(label) for path, label in pairs},
    "big-endian": lambda pairs: {path: np.array(label, ">u2")[()] for path, label in pairs},
    "arrays of one": lambda pairs: {path: np.array(label) for path, label in pairs},
    "NumPy's text": lambda pairs: {np.str_(path): np.str_("abc"[label]) for path, label in pairs},
    "NumPy's bytes": lambda pairs: {np.bytes_(path): label for path, label in pairs},
    "digits": lambda pairs: {path: str(label) for path, label in pairs},
    "an ordered dict": OrderedDict,
    "a dict with a default": lambda pairs: defaultdict(int, pairs),
    "pairs": list,
    "lists": lambda pairs: [[path, label] for path, label in pairs],
    "written on Windows": lambda pairs: {f"..\\{path.replace('/', chr(92))}": label for path, label in pairs},
    "joined on Windows": lambda pairs: {f"../{path.replace('/', chr(92))}": label for path, label in pairs},
    "paths of Windows": lambda pairs: {PureWindowsPath("..", path): label for path, label in pairs},
}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("form", FORMS)
def test_what_programs_write_is_read_as_plain_dicts(tmp_path, images, form, protocol):
    (tmp_path / "d").mkdir()
    paths = [image.rename(tmp_path / "d" / image.name) for image in images]
    pairs = [(f"d/{path.name}", number % 3) for number, path in enumerate(paths)]
    folder = tmp_path / "d" if "Windows" in form else tmp_path
    write(folder, FORMS[form](pairs), FORMS[form](pairs[::-1]), protocol=protocol)
    data = datasets.load("imagenet", data_dir=folder, **SIDES)
    assert (data.classes, data.train.labels.tolist()) == (3, [0, 1, 2] * 2)
    x, y = data.valid.read(np.arange(6), None)
    assert (x[:, 0, 0, 0].tolist(), y.tolist()) == ([200, 160, 120, 80, 40, 0], [2, 1, 0] * 2)


def test_digits_are_numbers_and_not_sorted_as_names(tmp_path, images):
    held = {images[number % 6].parent / f"./{number}/../{images[number % 6].name}": str(number) for number in range(12)}
    for number in range(12):
        (tmp_path / str(number)).mkdir()
    write(tmp_path, {str(path): label for path, label in held.items()}, {images[0].name: "10"})
    data = datasets.load("imagenet", data_dir=tmp_path, **SIDES)
    assert (data.train.labels.tolist(), data.valid.labels.tolist()) == (list(range(12)), [10])


def test_a_backslash_in_a_name_stays(tmp_path, images):
    image = images[1].rename(tmp_path / "a\\b.png")
    write(tmp_path, {image.name: 0}, {image.name: 0})
    assert datasets.load("imagenet", data_dir=tmp_path, **SIDES).train.path(0) == image


@pytest.mark.parametrize("written", ["$IMAGES/", "${IMAGES}/", "~/"])
def test_a_path_begins_with_a_variable(tmp_path, images, monkeypatch, written):
    folder, odd = tmp_path / "index", tmp_path / "a" / "$IMAGES" / "b$.png"
    folder.mkdir()
    odd.parent.mkdir(parents=True)
    images[0].rename(odd)
    for name in ("IMAGES", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    write(folder, {f"{written}a/$IMAGES/b$.png": 0, "../$PRICE.png": 1}, {written + images[1].name: 1})
    images[2].rename(tmp_path / "$PRICE.png")
    data = datasets.load("imagenet", data_dir=folder, **SIDES)
    assert (data.train.path(0), data.valid.path(0)) == (odd, images[1])
    x, _ = data.train.read(np.arange(2), None)
    assert x[:, 0, 0, 0].tolist() == [0, 80]


def test_a_variable_that_is_not_set_is_named(tmp_path, images, monkeypatch):
    """The path need not be among those that are looked for."""
    monkeypatch.delenv("IMAGES", raising=False)
    held = {**{f"./{'../' * number}{images[0]}": 0 for number in range(2)}, "$IMAGES/a.png": 0}
    write(tmp_path, held, {str(images[0]): 0})
    monkeypatch.setattr(index, "MOST_LOOKED_FOR", 1)
    with pytest.raises(RecipeError, match=r"train_data\.pkl needs the environment variable \$IMAGES, which is not set"):
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)


@pytest.mark.parametrize(("count", "looked_for", "lacking"), [(6, 6, 1), (5000, 1000, 1000)])
def test_images_that_are_not_there_are_counted_before_training(tmp_path, images, count, looked_for, lacking):
    """Of an index of 5,000 images, 1,000 are looked for."""
    held = {f"no/{number}.png" if count > 6 or number == 4 else images[number].name: 0 for number in range(count)}
    write(tmp_path, held, {images[0].name: 0})
    first = "no/4.png" if count == 6 else "no/0.png"
    with pytest.raises(DataError) as refused:
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)
    assert str(refused.value) == (
        f"{tmp_path}/train_data.pkl: {lacking} of {looked_for} images that were looked for are not there, the first "
        f"{tmp_path}/{first}: write paths that are absolute, relative to {tmp_path}, or begin with $NAME/ or ~/."
    )


@pytest.mark.parametrize("kind", ["series", "frame"])
def test_of_pandas_the_way_to_a_dict_is_named(tmp_path, kind):
    """The file holds only the beginning of what pandas writes; no more is read."""
    name = {"series": "Series", "frame": "DataFrame"}[kind]
    (tmp_path / index.FILES["train"]).write_bytes(f"\x80\x02cpandas.core.{kind}\n{name}\n)\x81}}b.".encode("latin1"))
    with pytest.raises(DataError) as refused:
        index.read(tmp_path / index.FILES["train"])
    series = ", of which dict(series) makes a dict" if kind == "series" else ""
    assert str(refused.value).endswith(
        f"train_data.pkl holds an object of pandas.core.{kind}.{name}{series}: {index.PLAIN}"
    )


def test_folders_go_before_an_index(tmp_path, images):
    (tmp_path / "train").mkdir()
    write(tmp_path, {"a": 0}, {"a": 0})
    with pytest.raises(DataError, match=r"train holds no class folders|val or .*valid is missing"):
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)


class Evil:
    def __reduce__(self):
        return print, ("run",)


REMEDY = r"an index file is a pickled dict \{path: class\}; write it again\."
BAD = {
    "a call": ({"a": Evil()}, r"holds an object of builtins\.print"),
    "a list of paths": (["a", "b"], "holds an object of type list"),
    "two lists": ((["a", "b"], [0, 1]), "holds an object of type tuple"),
    "triples": ([("a", 0, 1)], "holds an object of type list"),
    "a number": (3, "holds an object of type int"),
    "nothing": ({}, "holds an empty index"),
    "no class": ({"a": None}, "must map paths to classes, got 'a' with class None of type NoneType"),
    "a flag": ({"a": True}, "must map paths to classes, got 'a' with class True of type bool"),
    "a flag of NumPy's": ({"a": np.True_}, "must map paths to classes, got 'a' with class True of type bool"),
    "a fraction": ({"a": np.float32(1)}, "must map paths to classes, got 'a' with class 1.0 of type float"),
    "a list as class": ({"a": [1]}, r"must map paths to classes, got 'a' with class \[1\] of type list"),
    "an array as class": (
        {"a": np.arange(2)},
        r"got 'a' with class array\(\[0, 1\]\) of type ndarray",
    ),
    "an array": (np.array([["a", "0"]]), "holds an object of type Array"),
    "an array of objects": (
        np.array([["a", 0]], object),
        r"is damaged \(UnpicklingError: an array of 'O8', where numbers or text are expected\)",
    ),
    "no path": ({3: 1}, "must map paths to classes, got 3 with class 1 of type int"),
    "a path twice": ([("a", 0), ("b", 1), (b"a", 1)], "names 'a' twice: name each image once."),
    "from 1": ({"a": 1, "b": 2}, r"classes 1\.\.2 for 2 classes: they count from 0; write each less 1\."),
    "digits from 1": ({"a": "1", "b": "2"}, r"classes 1\.\.2 for 2 classes: they count from 0; write each less 1\."),
    "a gap": (
        {"a": 0, "b": np.int8(2)},
        r"classes 0\.\.2 for 2 classes: class 1 has no image; number them from 0 .*\.",
    ),
    "from 5": ({"a": 5, "b": 6}, r"classes 5\.\.6 for 2 classes: class 0 has no image; number them from 0 .*\."),
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
    remedy = "" if message.endswith(".") else f": ({REMEDY}|{re.escape(index.PLAIN)})"
    with pytest.raises(DataError, match=rf"train_data\.pkl:? .*{message}{remedy}$") as refused:
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)
    assert "\n" not in str(refused.value) and capsys.readouterr().out == ""


POSIX = b"\x80\x02cpathlib\nPurePosixPath\n"


STATE = b"}X\x0a\x00\x00\x00__fspath__X\x06\x00\x00\x00forgeds"
FORGED = {
    "the dictionary of a class": POSIX + STATE + b"b.",
    "the attributes of a class": POSIX + b"N" + STATE + b"\x86b.",
    "the attributes of a path": POSIX + b"X\x01\x00\x00\x00a\x85RN" + STATE + b"\x86b.",
    "the attributes of a codec": b"\x80\x02c_codecs\nencode\nN" + STATE + b"\x86b.",
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_file_sets_no_attribute(tmp_path, case):
    """Without the check, such a file could replace methods of pathlib in the whole process."""
    before = dict(vars(PurePosixPath))
    write(tmp_path, {"a": 0}, {"a": 0})
    (tmp_path / index.FILES["train"]).write_bytes(FORGED[case])
    with pytest.raises(DataError, match=rf"is damaged \(.*: {REMEDY}"):
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
    (tmp_path / index.FILES["train"]).write_bytes(written)
    assert index.read(tmp_path / index.FILES["train"]) == {b"d/a.png": 1}


def test_a_cut_off_or_missing_file_is_named(tmp_path):
    write(tmp_path, {"a": 0}, {"a": 0})
    (tmp_path / index.FILES["val"]).write_bytes(pickle.dumps({"a": 0})[:-3])
    with pytest.raises(DataError, match=rf"val_data\.pkl is damaged \(.*\): {REMEDY}"):
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)
    (tmp_path / index.FILES["val"]).unlink()
    with pytest.raises(DataError, match=rf"val_data\.pkl is missing: {REMEDY}"):
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)


def test_a_class_that_is_never_trained_is_refused(tmp_path, images):
    write(tmp_path, {images[0].name: 0, images[1].name: 1}, {"a": 1, "b": 2})
    with pytest.raises(DataError, match=re.escape("holds 1 classes that train_data.pkl lacks (2): both must hold")):
        datasets.load("imagenet", data_dir=tmp_path, **SIDES)
