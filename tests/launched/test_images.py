"""Real images through the real readers on two ranks; a damaged one; Horovod's settings and the traces."""

import functools
import pickle
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from images import write_tree
from marks import marked
from paths import DATA, UNPACKING
from ranks import FRAMEWORKS, cold_command, programs, run, train
from worlds import losses, of_kind

from hvdtrain import datasets
from hvdtrain.core.progress import Epoch
from hvdtrain.datasets import DRAWS

pytestmark = [pytest.mark.launched, pytest.mark.timeout(900)]
on_both = pytest.mark.parametrize("framework", FRAMEWORKS)
needs_images = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"needs {DATA}: CIFAR-100 and Imagenette, packed as its README says"
)


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """CIFAR-100's published files, cut down to 64 images to train on and 16 to validate with."""
    folder = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, DATA / "unpack_cifar100.py", folder, "--only", "1"], check=True, timeout=120)
    for name, count in (("train", 64), ("test", 16)):
        path = folder / "cifar-100-python" / name
        whole = pickle.loads(path.read_bytes())
        path.write_bytes(pickle.dumps({key: value[:count] for key, value in whole.items()}, protocol=2))
    return folder


@pytest.fixture(scope="module")
def imagenette(tmp_path_factory):
    """ImageNet's tree: ten classes of four images to train on and two to validate with."""
    folder, taken = tmp_path_factory.mktemp("imagenette"), {}
    with tarfile.open(DATA / "imagenette_4k.tar") as packed:
        packed.extraction_filter = UNPACKING
        for member in packed:
            path = Path(member.name)
            taken[path.parent] = taken.get(path.parent, 0) + member.isfile()
            if member.isfile() and taken[path.parent] <= (4 if "train" in path.parts else 2):
                packed.extract(member, folder)
    return folder / "imagenette"


CROPS = ["--train-crop", "32", "--valid-resize", "40", "--valid-crop", "32"]
FEW = ["--batch-size", "8", "--max-steps", "2", "--log-every-steps", "1"]


@pytest.mark.slow
@on_both
@needs_images
def test_images_train_on_two_ranks(framework, cifar, imagenette, tmp_path):
    runs = {
        "cifar": ["cifar100", "--data-dir", str(cifar), *FEW],
        "imagenet": ["imagenet", "--data-dir", str(imagenette), *CROPS, *FEW, "--workers", "1"],
    }
    given = {name: [*argv, "--output", str(tmp_path / name)] for name, argv in runs.items()}
    results = programs(framework, "mpi", 2, tmp_path / "results", {"trainings": {"given": given}})["trainings"]
    for name in runs:
        curve = losses(tmp_path / name)
        assert len(curve) == 2 and np.isfinite(curve).all()
        assert results[0][name]["state"] == results[1][name]["state"]


@on_both
@needs_images
def test_a_damaged_image_is_named_by_the_rank_that_meets_it(framework, imagenette, tmp_path):
    tree = datasets.load("imagenet", data_dir=imagenette, train_crop=32, valid_resize=40, valid_crop=32).train
    second_rank = Epoch.shuffled(len(tree), 0, 0, DRAWS).local_batch(0, 8, 1, 2)
    damaged = tree.path(int(second_rank[0]))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    try:
        argv = ["imagenet", "--data-dir", imagenette, *CROPS, *FEW, "--workers", "0", "--output", tmp_path]
        ended = train(framework, "mpi", 2, *argv)
    finally:
        damaged.write_bytes(whole)
    assert ended.code != 0
    assert ended.left == []
    (line,) = (line for line in ended.lines if not line.startswith("AbortedError"))
    assert line.startswith("DataError (rank 1 on ")
    assert f"{damaged} cannot be read as an image" in line


SETTINGS = ["--epochs", "12", "--autotune", "--fusion-threshold-mb", "3", "--cycle-time-ms", "1.5"]
SETTINGS += ["--horovod-timeline", "--profile"]

# Where a profile is written, and what stands in it.
PROFILES = {
    "torch": ("profile.json", b'"traceEvents"'),
    "tensorflow": ("plugins/profile/*/*.xplane.pb", b"HorovodAllreduce"),
}
QUICK = {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2"}


@pytest.mark.slow
@on_both
def test_horovod_gets_its_settings_and_writes_its_traces(framework, tmp_path):
    log = tmp_path / "autotune.csv"
    environ = {**QUICK, "HOROVOD_AUTOTUNE_LOG": str(log)}
    # Horovod reads QUICK when it is loaded.
    run("gloo", 2, cold_command(framework, "linear", *SETTINGS, "--output", tmp_path), **environ).good()
    (profile,) = tmp_path.glob(PROFILES[framework][0])
    assert PROFILES[framework][1] in profile.read_bytes()
    assert "ALLREDUCE" in (tmp_path / "timeline.json").read_text()
    heading, first, *_ = log.read_text().splitlines()
    row = dict(zip(heading.split(","), first.split(","), strict=False))
    assert float(row["cycle_time_ms"]) == 1.5
    assert float(row["tensor_fusion_threshold"]) == 3  # MiB


def move(root, one, other):
    (root / one).rename(root / other)


def rename_class(root):
    for split in ("train", "val"):
        move(root / split, "n01", "n03")


def copy(root, one, other):
    shutil.copytree(root / one, root / other) if (root / one).is_dir() else shutil.copy(root / one, root / other)


ANEW = "the data have changed since the checkpoint of step 2 ({}): this epoch begins anew with them"
ONWARD = "the data have changed since the checkpoint of step 2 ({}): the run continues with them"
REFUSED = "{} in the checkpoint of step 2 ({} classes now, {} then): the network has learned other labels; restore"
OTHER_DATA = {
    "class renamed": (rename_class, None, REFUSED.format("class 0 is 'n02' in the data, 'n01'", 2, 2)),
    "class added": (
        lambda root: [copy(root / split, "n02", "n03") for split in ("train", "val")],
        None,
        REFUSED.format("class 2 is 'n03' in the data, not there", 3, 2),
    ),
    "class removed": (
        lambda root: [shutil.rmtree(root / split / "n02") for split in ("train", "val")],
        None,
        REFUSED.format("class 1 is not there in the data, 'n02'", 1, 2),
    ),
    "files added": (
        lambda root: [copy(root / "train/n01", f"n01_{k}.JPEG", f"n01_{k}_again.JPEG") for k in range(3)],
        16,
        ANEW.format("19 training examples, 16 then"),
    ),
    "files removed": (
        lambda root: (root / "train/n01/n01_0.JPEG").unlink(),
        12,
        ANEW.format("15 training examples, 16 then"),
    ),
    "order changed": (
        lambda root: move(root / "train/n01", "n01_0.JPEG", "n01_9.JPEG"),
        16,
        ANEW.format("another training list"),
    ),
    "validation images removed": (
        lambda root: (root / "val/n01/n01_0.JPEG").unlink(),
        16,
        ONWARD.format("5 validation examples, 6 then"),
    ),
    "content replaced": (
        lambda root: shutil.copy(root / "train/n02/n02_1.JPEG", root / "train/n01/n01_0.JPEG"),
        16,
        None,  # names alone are compared: of a packed set each image's CRC
    ),
}


@pytest.fixture(scope="module")
def begun(train_here, tmp_path_factory):
    """By framework: a folder with images, and a run that stopped after two of the four steps of its first epoch."""

    @functools.cache
    def begin(framework):
        folder = tmp_path_factory.mktemp("begun")
        write_tree(folder / "data")
        flags = ["--data-dir", folder / "data", "--output", folder / "run"]
        train_here(framework, *OF_IMAGES, *flags, "--max-steps", 2).good()
        return folder

    return begin


OF_IMAGES = ["imagenet", *CROPS, "--batch-size", "4", "--epochs", "1", "--warmup-epochs", "0"]
OF_IMAGES += ["--workers", "0", "--log-every-steps", "1"]


@pytest.mark.parametrize("framework", marked(FRAMEWORKS, slow={"tensorflow"}))
@pytest.mark.parametrize(
    "kind", marked(OTHER_DATA, slow={"class added", "class removed", "files removed", "order changed"})
)
def test_a_run_whose_data_have_changed_resumes_by_the_rule(framework, begun, train_here, kind, tmp_path):
    change, examples, line = OTHER_DATA[kind]
    shutil.copytree(begun(framework), tmp_path, dirs_exist_ok=True)
    change(tmp_path / "data")
    ended = train_here(framework, *OF_IMAGES, "--data-dir", tmp_path / "data", "--output", tmp_path / "run")
    if examples is None:
        assert ended.code == 2
        assert line in ended.lines[0]
        return
    assert ended.good().out.count("the data have changed") == bool(line)
    assert line is None or line in ended.out
    last = of_kind("epoch", tmp_path / "run")[-1]
    assert last["train_examples"] == examples
