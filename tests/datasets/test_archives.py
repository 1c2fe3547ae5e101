"""Archives as `pack` reads them: the folder's samples from each form, and one line for whatever is hostile."""

import importlib.util
import io
import os
import random
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from hostile_data import mutated
from images import contents, of_split, packed, samples, scene, write_tree
from PIL import Image
from refusals import refusal

from hvdtrain import datasets
from hvdtrain.datasets import archives
from hvdtrain.errors import DataError
from hvdtrain.tools import pack

SIZES = {"train_crop": 32, "valid_resize": 48, "valid_crop": 40}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return write_tree(tmp_path_factory.mktemp("tree"))


def tar(path, members, form=tarfile.PAX_FORMAT):
    """A tar of {name: bytes, or a TarInfo}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
            else:
                member = tarfile.TarInfo(name)
                member.size, member.mtime = len(content), 1.5  # for which Python writes a header of pax
                archive.addfile(member, io.BytesIO(content))
    return path


def ilsvrc(tree, dest, labels="{name} {wnid}"):
    """The archives as ImageNet's site gives them, but for their sizes, and a list of labels."""
    train, val = of_split(tree, "train"), of_split(tree, "val")
    wnids = sorted({wnid for wnid, _ in train})
    inner = {}
    for wnid in reversed(wnids):
        images = {name: content for (of, name), content in reversed(train.items()) if of == wnid}
        inner[f"{wnid}.tar"] = tar(dest / "inner.tar", images).read_bytes()
    (dest / "inner.tar").unlink()
    tar(dest / "ILSVRC2012_img_train.tar", inner, tarfile.GNU_FORMAT)
    tar(dest / "ILSVRC2012_img_val.tar", {name: content for (_, name), content in val.items()})
    listed = [labels.format(name=name, wnid=wnid, number=wnids.index(wnid), stem=name[:-5]) for wnid, name in val]
    (dest / "labels.txt").write_text("\n".join(["ImageId,PredictionString"] * ("," in labels) + listed))
    return dest


def webdataset(tree, dest, folder="", labels=None):
    """Two shards of each split."""
    for split in ("train", "val"):
        images = list(of_split(tree, split).items())
        for shard in range(2):
            members = {}
            for number, ((wnid, name), content) in list(enumerate(images))[shard::2]:
                key, label = f"{folder}{number:04}", (labels or {}).get(wnid, wnid)
                suffix = "png" if name.endswith(".png") else "JPEG"
                members |= {f"{key}.{suffix}": content, f"{key}.json": b"{}", f"{key}.cls": f"{label}\n".encode()}
            tar(dest / f"set-{split}-{shard:06}.tar", members)
    return dest


def tfrecords(tree, dest, base=1):
    """Two files of each split, named as by TensorFlow's script for ImageNet."""
    dest.mkdir()
    for split, name in (("train", "train"), ("val", "validation")):
        images = list(of_split(tree, split).items())
        for shard in range(2):
            frames = []
            for (wnid, _), content in images[shard::2]:
                begin, end = pack.tfrecord_frame("", "", base + (wnid == "n02"), content)
                frames.append(begin + content + end)
            (dest / f"{name}-{shard:05}-of-00002").write_bytes(b"".join(frames))
    return dest


LISTS = "{name} {wnid}", "{name} {number}", "{stem} {number}", "{wnid}", "{number}", "{stem},{wnid} 1 2 3 4"


@pytest.mark.parametrize("labels", LISTS)
def test_the_archives_of_ilsvrc2012_make_the_bytes_that_the_folder_makes(tree, tmp_path, labels):
    source = ilsvrc(tree, tmp_path / "source", labels)
    ours = packed(source, tmp_path / "ours", shards=3, val_labels=source / "labels.txt")
    assert contents(ours) == contents(packed(tree, tmp_path / "other", shards=3))


@pytest.mark.parametrize("form", ["webdataset", "in folders", "long names", "numbers", "numbers from 1", "ours"])
def test_a_webdataset_has_the_samples_of_the_folder(tree, tmp_path, form, capsys):
    folder = {"in folders": "a.b/c/", "long names": "d" * 150 + "/"}.get(form, "")
    labels = {"numbers": {"n01": "0", "n02": "1"}, "numbers from 1": {"n01": "1", "n02": "2"}}.get(form)
    if form == "ours":
        packed(tree, tmp_path / "source", shards=2)
        (tmp_path / "source" / "index.npz").unlink()
        labels = {"n01": "0", "n02": "1"}
    else:
        webdataset(tree, tmp_path / "source", folder, labels)
    ours = datasets.load("imagenet", data_dir=packed(tmp_path / "source", tmp_path / "ours"), **SIZES)
    names = ("0", "1") if labels else ("n01", "n02")
    assert ours.names == names
    expected = [
        sorted((names[wnid == "n02"], content) for (wnid, _), content in of_split(tree, split).items())
        for split in ("train", "val")
    ]
    assert samples(ours) == expected
    assert ("labels count from 1: each is taken less 1\n" in capsys.readouterr().out) == (form == "numbers from 1")


@pytest.mark.parametrize("base", [0, 1])
def test_tfrecords_have_the_samples_of_the_folder(tree, tmp_path, base, capsys):
    ours = datasets.load(
        "imagenet", data_dir=packed(tfrecords(tree, tmp_path / "source", base), tmp_path / "ours"), **SIZES
    )
    expected = [
        sorted((str(int(wnid == "n02")), content) for (wnid, _), content in of_split(tree, split).items())
        for split in ("train", "val")
    ]
    assert samples(ours) == expected
    assert ("labels count from 1" in capsys.readouterr().out) == bool(base)


BY_TENSORFLOW = """
import sys
from pathlib import Path
import tensorflow as tf

image = Path(sys.argv[1]).read_bytes()
for split in ("train", "validation"):
    with tf.io.TFRecordWriter(f"{sys.argv[2]}/{split}-00000-of-00001") as writer:
        for label in (1, 2, 1000):
            value = {
                "image/filename": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"image/encoded"])),
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                "image/object/bbox/xmin": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5] * 300)),
                "image/height": tf.train.Feature(int64_list=tf.train.Int64List(value=[500])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=value)).SerializeToString())
"""


@pytest.mark.slow
def test_what_tensorflow_wrote_is_read(tree, tmp_path):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is missing: pip install tensorflow")
    image = next((tree / "train").glob("*/*.JPEG"))
    subprocess.run([sys.executable, "-c", BY_TENSORFLOW, image, tmp_path], check=True, capture_output=True)
    with (tmp_path / "train-00000-of-00001").open("rb") as file:
        content = file.read()
    found = list(archives._records(lambda at, size: content[at : at + size], len(content)))
    assert [label for label, *_ in found] == ["1", "2", "1000"]
    assert {content[at : at + size] for _, at, size in found} == {image.read_bytes()}


@pytest.mark.parametrize("other", ["train", "index.npz"])
def test_what_is_unpacked_or_packed_already_is_read_before_archives(tree, tmp_path, other):
    webdataset(tree, tmp_path)
    assert archives.load(tmp_path, None)
    if other == "train":
        (tmp_path / other).mkdir()
    else:
        (tmp_path / other).touch()
    assert archives.load(tmp_path, None) is None
    assert archives.load(tree, None) is None


def test_other_archives_are_another_set(tree, tmp_path):
    """By their contents a pack knows whether the one that was killed before it packed the same."""
    source = webdataset(tree, tmp_path / "source")
    before = archives.load(source, None).contents()
    assert archives.load(source, None).contents() == before
    (source / "set-train-000001.tar").unlink()
    assert archives.load(source, None).contents() != before


def header(name, **fields):
    member = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(member, key, value)
    return member


def raw(*headers, content=b""):
    """A tar of such headers, whatever they say."""
    blocks = [each.tobuf(tarfile.GNU_FORMAT) if isinstance(each, tarfile.TarInfo) else each for each in headers]
    return b"".join(blocks) + content + bytes(1024)


def pax(**records):
    text = b"".join(f"{len(key) + len(value) + 5} {key}={value}\n".encode() for key, value in records.items())
    member = header("pax", type=tarfile.XHDTYPE, size=len(text))
    return member.tobuf(tarfile.USTAR_FORMAT) + text + bytes(-len(text) % 512)


CLASS = raw(header("0.cls", size=1))[:512] + b"0" + bytes(511)
HOSTILE = {  # a training tar of webdataset's form; what its line says
    "a link": (raw(header("0.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")), "'0.jpg' is no plain file"),
    "a hard link": (raw(header("0.jpg", type=tarfile.LNKTYPE, linkname="/etc/passwd")), "'0.jpg' is no plain file"),
    "a device": (raw(header("0.jpg", type=tarfile.CHRTYPE, devmajor=1, devminor=5)), "'0.jpg' is no plain file"),
    "a pipe": (raw(header("0.jpg", type=tarfile.FIFOTYPE)), "'0.jpg' is no plain file"),
    "a sparse file": (raw(header("0.jpg", type=tarfile.GNUTYPE_SPARSE)), "'0.jpg' is no plain file"),
    "a sparse file of pax": (
        raw(pax(**{"GNU.sparse.major": "1"}), header("0.jpg")),
        "'' is a sparse file, or has 8 GB",
    ),
    "a size in pax": (raw(pax(size="9"), header("0.jpg")), "'' is a sparse file, or has 8 GB"),
    "beyond its end": (raw(header("0.jpg", size=1 << 40)), "'0.jpg' of 1,099,511,627,776 bytes is not all there"),
    "a size below 0": (raw(header("0.jpg", size=-5)), "'0.jpg' of -5 bytes is not all there"),
    "no end": (raw(header("0.jpg"))[:512], "its end is missing"),
    "a header cut short": (raw(header("0.jpg"))[:300], "truncated header"),
    "compressed": (b"\x1f\x8b" + bytes(range(256)) * 4, "InvalidHeaderError: invalid header"),
    "empty": (b"", "its end is missing"),
    "no image": (raw(CLASS), "'0' must have an image and a .cls, got ['.cls']"),
    "no class": (raw(header("0.jpg")), "'0' must have an image and a .cls, got ['.jpg']"),
    "two images": (raw(CLASS, header("0.jpg"), header("0.png")), "'0' must have an image and a .cls, got "),
    "orders to the terminal": (raw(header("\x1b[2J.jpg")), r"'\x1b[2J' must have an image and a .cls"),
    "a class of signs": (
        raw(raw(header("0.cls", size=4))[:512] + b"\x1b[2J" + bytes(508), header("0.jpg")),
        r"an image of 0 bytes with the label '\x1b[2J'",
    ),
    "no text as class": (
        raw(raw(header("0.cls", size=1))[:512] + b"\xff" + bytes(511), header("0.jpg")),
        "UnicodeDecode",
    ),
    "an empty class": (raw(header("0.cls"), header("0.jpg")), "an image of 0 bytes with the label ''"),
    "a class of 4,000 digits": (
        raw(raw(header("0.cls", size=4000))[:512] + b"9" * 4000 + bytes(96), header("0.jpg")),
        "an image of 0 bytes with the label '999",
    ),
}


@pytest.mark.parametrize(("content", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_tar_is_one_line(tmp_path, content, said):
    path = tmp_path / "train-000000.tar"
    path.write_bytes(content)
    message = refusal(DataError, archives.load, tmp_path, None)
    assert message.startswith(f"{path} is damaged (") and message.endswith("): fetch it again."), message
    assert said in message and message.isprintable() and len(message) < 700


def test_no_name_of_a_member_is_a_path(tree, tmp_path):
    """Names that lead elsewhere are only text; nothing but the set is written."""
    source = webdataset(tree, tmp_path / "source", folder="../../../../etc/")
    (tmp_path / "here").mkdir()
    dest = packed(source, tmp_path / "here" / "dest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "source"]
    assert sorted(path.name for path in dest.iterdir()) == ["index.npz", "train-000000.tar", "val-000000.tar"]


def test_pipes_in_the_place_of_archives_are_refused(tmp_path):
    os.mkfifo(tmp_path / "train-0.tar")
    assert "(ValueError: it is not a regular file)" in refusal(DataError, archives.load, tmp_path, None)


def test_archives_of_one_split_and_classes_of_one_split_are_refused(tree, tmp_path):
    source = webdataset(tree, tmp_path / "source")
    for path in source.glob("*val*"):
        path.unlink()
    message = refusal(DataError, archives.load, source, None)
    assert message == f"{source}/*val*.tar is missing, or holds no image: fetch it again."
    tar(source / "val.tar", {"0.jpg": b"", "0.cls": b"n99"})
    assert refusal(DataError, archives.load, source, None) == (
        f"{source} validates with classes of no training image (n99): fetch all archives."
    )


LABELS = {
    "none": (None, "ILSVRC2012_img_val.tar needs --val-labels FILE, a text with lines of `NAME CLASS`"),
    "missing": ("no such file", "no such file is missing: give a text with lines of"),
    "the development kit's": ("1\n1\n1\n2\n2\n2", "got '2': the development kit's numbers, from 1, have another order"),
    "one too few": ("n01\n" * 5, "is damaged (ValueError: zip() argument 2 is shorter than argument 1)"),
    "a name is missing": ("n01_0 n01\n" * 6, "must give 'n01_1' a class of the training images"),
    "an unknown class": ("n77\n" * 6, "got 'n77': the development"),
    "no text": (b"\xff\xfe", "is damaged (UnicodeDecodeError: "),
}


@pytest.mark.parametrize(("labels", "said"), LABELS.values(), ids=LABELS)
def test_a_list_of_labels_that_does_not_fit_is_refused(tree, tmp_path, labels, said):
    source, path = ilsvrc(tree, tmp_path / "source"), tmp_path / "labels"
    if labels == "no such file":
        path = tmp_path / labels
    elif labels is not None:
        path.write_bytes(labels if isinstance(labels, bytes) else labels.encode())
    message = refusal(DataError, archives.load, source, None if labels is None else path)
    assert said in message and message.isprintable()


BAD_RECORDS = {
    "empty": b"",
    "zeros": bytes(100),
    "a size of 2 ** 64 - 1": b"\xff" * 100,
    "cut off": pack.tfrecord_frame("", "", 1, b"image" * 9)[0],
    "no label": b"".join(pack.tfrecord_frame("", "", 1, b"image")).replace(b"class/label", b"class/lab_l"),
    "a label below 0": pack.tfrecord_frame("", "", (1 << 64) - 1, b"image")[0] + b"image" + bytes(4),
}


@pytest.mark.parametrize("content", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_hostile_record_is_one_line(tmp_path, content):
    (tmp_path / "train-00000-of-00001").write_bytes(content)
    message = refusal(DataError, archives.load, tmp_path, None)
    assert message.isprintable() and len(message) < 500 and message.startswith(str(tmp_path))


def test_damaged_archives_of_each_form_end_in_a_line_each(tree, tmp_path):
    sources = {
        "set-train-000000.tar": webdataset(tree, tmp_path / "tars"),
        "train-00000-of-00002": tfrecords(tree, tmp_path / "records"),
        "ILSVRC2012_img_train.tar": ilsvrc(tree, tmp_path / "ilsvrc"),
    }
    refused = 0
    for name, source in sources.items():
        whole = (source / name).read_bytes()
        for number in range(60):
            chance = random.Random(f"{name} {number}")
            (source / name).write_bytes(mutated(chance, whole))
            try:
                found = archives.load(source, source / "labels.txt")
                for index in range(len(found.train)):
                    found.train.encoded(index)
            except DataError as error:
                refused += 1
                assert str(error).isprintable() and len(str(error)) < 1000
    assert refused > 40


def odd_images():
    """{name: (an image, whether it can be packed)}."""
    written = {}

    def saved(name, image, form, **options):
        file = io.BytesIO()
        image.save(file, form, **options)
        written[name] = file.getvalue()

    saved("cmyk", scene(90, 70).convert("CMYK"), "JPEG")
    saved("bits", Image.fromarray(np.arange(4800, dtype=np.uint16).reshape(60, 80) * 13), "PNG")
    saved("pixel", scene(1, 1), "PNG")
    saved("huge", Image.new("1", (9000, 8000)), "PNG")
    saved("damaged", scene(90, 70), "JPEG")
    written["damaged"] = written["damaged"][:900]
    return written


ODD = odd_images()
REASONS = {"huge": "9000 x 8000 pixels are more than", "damaged": "cannot be read as an image ("}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("form", ["folder", "shards", "reduced", "ilsvrc", "webdataset", "records"])
def test_odd_images_are_right_or_one_line_in_each_form(tmp_path, kind, form):
    tree = write_tree(tmp_path / "tree", 2, 1)
    path = sorted((tree / "train").glob("n01/*"))[0]
    path.write_bytes(ODD[kind])
    match form:
        case "folder":
            source, options = tree, None
        case "ilsvrc":
            source = ilsvrc(tree, tmp_path / "source")
            options = {"val_labels": source / "labels.txt"}
        case "webdataset" | "records":
            source = {"webdataset": webdataset, "records": tfrecords}[form](tree, tmp_path / "source")
            options = {}
        case _:
            source, options = tree, {"shorter_side": 48 * (form == "reduced")}

    def found():
        return values(source if options is None else packed(source, tmp_path / "set", **options))

    if kind in REASONS:
        message = refusal(DataError, found)
        assert REASONS[kind] in message and "; " not in message
    else:
        distance = np.abs(found()[:, None].astype(int) - values(tree)[None]).mean(axis=(2, 3, 4)).min(axis=0)
        assert distance.max() <= (6 if form == "reduced" else 0)


def values(data_dir):
    """The training images, resized and cropped alike."""
    dataset = datasets.load("imagenet", data_dir=data_dir, **SIZES)
    return dataset.train.read(np.arange(len(dataset.train)), None)[0]
