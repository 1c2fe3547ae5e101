"""`exif: apply`: images are turned upright before they are cropped, the same by each decoder and in each form."""

import io
import json

import numpy as np
import pytest
from images import draws, scene
from PIL import Image, ImageOps

from hvdtrain import cli, datasets
from hvdtrain.core import recipe
from hvdtrain.datasets import images
from hvdtrain.tools import pack

ORIENTATION = 0x0112
SIZES = {"train_crop": 32, "valid_resize": 48, "valid_crop": 40}
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def saved(orientation, form="JPEG", **options):
    """A photograph of 90 x 60 pixels; None has no EXIF."""
    exif, written = Image.Exif(), io.BytesIO()
    exif.update({} if orientation is None else {ORIENTATION: orientation, 0x010F: "a maker"})
    lossless = {"lossless": True} if form == "WEBP" else {}
    scene(90, 60, 7).save(written, form, **lossless, **options, **({"exif": exif} if exif else {}))
    return written.getvalue()


def behind_the_pixels(png):
    """The PNG with its EXIF behind its pixels, as the standard allows."""
    begin = png.index(b"eXIf") - 4
    end = begin + 12 + int.from_bytes(png[begin : begin + 4], "big")
    return png[:begin] + png[end:-12] + png[begin:end] + png[-12:]


TURNED = {
    **{f"JPEG, {orientation}": saved(orientation) for orientation in range(1, 9)},
    "PNG": saved(6, "PNG"),
    "PNG, behind the pixels": behind_the_pixels(saved(6, "PNG")),
    "WebP": saved(6, "WEBP"),
    "TIFF": saved(6, "TIFF"),
}
AS_STORED = {
    "no EXIF": saved(None),
    "no such orientation": saved(9),
    "a damaged EXIF": saved(6).replace(b"Exif\0\0MM\0*", b"Exif\0\0XX\0*"),
    "an EXIF cut short": saved(6).replace(b"Exif\0\0MM\0*\0\0\0\x08", b"Exif\0\0MM\0*\xff\0\0\x08"),
    "XMP alone": saved(None, xmp=XMP),
    "a comment like an EXIF": saved(None, comment=b"Exif\0\0MM\0*\0\0\0\x08"),
}


def tree(root, contents):
    for split in ("train", "val"):
        folder = root / split / "n01"
        folder.mkdir(parents=True)
        for number, content in enumerate(contents):
            (folder / f"{number:02}.jpg").write_bytes(content)
    return root


def read(data_dir, **keys):
    dataset = datasets.load("imagenet", data_dir=data_dir, **SIZES, **keys)
    indices = np.arange(len(dataset.train))
    return [dataset.train.read(indices, draws(len(indices)))[0], dataset.valid.read(indices, None)[0]]


def upright(content):
    """The image as a PNG without an EXIF, turned by Pillow's own function."""
    written = io.BytesIO()
    ImageOps.exif_transpose(Image.open(io.BytesIO(content))).save(written, "PNG", exif=b"")
    return written.getvalue()


@pytest.mark.parametrize("decoder", ["pillow", "turbo"])
@pytest.mark.parametrize("form", ["folder", "shards"])
def test_images_are_turned_before_they_are_cropped(tmp_path, decoder, form):
    root, expected = (
        tree(tmp_path / "tree", TURNED.values()),
        tree(tmp_path / "turned", [*map(upright, TURNED.values())]),
    )
    if form == "shards":
        pack.pack(pack.Options(root, tmp_path / "set"))
        root = tmp_path / "set"
    for ours, exact in zip(read(root, exif="apply", decoder=decoder), read(expected), strict=True):
        np.testing.assert_array_equal(ours[1:], exact[1:])
        assert abs(ours[0].astype(int) - exact[0]).mean() <= 1  # the upright one, by libjpeg-turbo
    for stored, exact in zip(read(root), read(expected), strict=True):
        assert (abs(stored.astype(int) - exact).mean(axis=(1, 2, 3)) > 5).tolist() == [False, *[True] * 10, False]


@pytest.mark.parametrize("decoder", ["pillow", "turbo"])
def test_what_has_no_whole_orientation_is_read_as_it_is_stored(tmp_path, decoder):
    root = tree(tmp_path, AS_STORED.values())
    for ours, exact in zip(read(root, exif="apply", decoder=decoder), read(root, decoder=decoder), strict=True):
        np.testing.assert_array_equal(ours, exact)


def test_reduced_images_are_turned_too(tmp_path):
    root = tree(tmp_path / "tree", TURNED.values())
    pack.pack(pack.Options(root, tmp_path / "set", shorter_side=48, quality=95))
    for ours, exact in zip(read(tmp_path / "set", exif="apply"), read(root, exif="apply"), strict=True):
        assert abs(ours.astype(int) - exact).mean(axis=(1, 2, 3)).max() < 8


def test_the_exif_is_parsed_of_a_jpeg_that_has_one_and_under_apply_alone(tmp_path, monkeypatch):
    parsed, real = [], images._orientation
    monkeypatch.setattr(images, "_orientation", lambda content: parsed.append(len(content)) or real(content))
    for contents, exif, count in (((None, 1, 6), "ignore", 0), ((None,), "apply", 0), ((1,), "apply", 1)):
        root = tree(tmp_path / f"{contents} {exif}", [*map(saved, contents)])
        split = datasets.load("imagenet", data_dir=root, **SIZES, exif=exif).train
        del parsed[:]
        split.read(np.arange(len(split)), draws(len(split)))
        assert len(parsed) == count


def test_the_plan_and_the_recipe_have_it(tmp_path, capsys):
    root = tree(tmp_path, [saved(6)] * 4)
    flags = ["--data-dir", str(root), "--batch-size=2", "--train-crop=64"]
    assert cli.main(["plan", "imagenet", *flags, "--exif", "apply"]) == 0
    line = "data        images are turned upright by their EXIF orientation\n"
    assert line in capsys.readouterr().out
    assert cli.main(["plan", "imagenet", *flags]) == 0
    assert line not in capsys.readouterr().out
    kept = recipe.dump(recipe.load("imagenet", {"exif": "apply"}))  # what a resumed run is compared with
    assert 'exif: "apply"' in kept or "exif: apply" in kept, json.dumps(kept)
