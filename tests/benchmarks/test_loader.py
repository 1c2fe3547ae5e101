"""`python tests/benchmarks/loader.py`: the figures it finds on a few generated images, and the flags it refuses."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import loader
import pytest
from images import write_tree
from paths import REPOSITORY

from hvdtrain.errors import RecipeError
from hvdtrain.tools import pack
from hvdtrain.tools.bench.measure import Kept


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A folder, and the same packed."""
    folder = tmp_path_factory.mktemp("sets")
    pack.pack(pack.Options(write_tree(folder / "tree", 4, 1), folder / "packed"))
    return folder / "tree", folder / "packed"


@pytest.fixture
def torchvision():
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is missing: pip install torchvision")


@pytest.mark.slow
def test_readers_are_measured_interleaved(sets, torchvision, tmp_path):
    tree, packed = sets
    flags = ["--data-dir", tree, "--packed", packed, "--workers", 1, "--pictures", 6, "--batch-size", 4]
    command = [sys.executable, loader.__file__, *flags, "--crop", 32, "--rounds", 2]
    command += ["--json", tmp_path / "found.json"]
    done = subprocess.run(map(str, command), cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    table, _, _ = done.stdout.partition("\n\n")
    assert [line.split()[0] for line in table.splitlines()] == ["images/s", "shards", "folder", "torchvision"]
    results = json.loads((tmp_path / "found.json").read_text())
    assert (results["data"], results["workers"], results["crop"]) == (str(tree), 1, 32)
    for key in ("images_per_core_second", "images_per_second"):
        assert {name: len(values) for name, values in results[key].items()} == {
            "shards": 2,
            "folder": 2,
            "torchvision": 2,
        }
    ours, theirs = (results["images_per_core_second"][name] for name in ("shards", "torchvision"))
    assert results["ratios"]["shards"] == [one / other for one, other in zip(ours, theirs, strict=True)]


def test_its_answer_fits_80_columns_and_ends_with_a_sentence(capsys):
    long = [1234.5678, 1201.1234, 1340.9876]  # seconds
    readers = dict.fromkeys(("shards", "folder", "DALI", "torchvision"), long)
    found = {"images_per_core_second": readers, "images_per_second": readers, "cores": 128}
    ratios = {name: [2.1] for name in readers if name != "torchvision"}
    loader.answer({**found, "ratios": ratios}, True).conclude(Kept())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    blank = lines.index("")
    sentence = " ".join(lines[blank + 1 :])
    assert blank >= 3 and sentence[0].isupper() and sentence.endswith(".")


BUSY = """
import subprocess, sys, time
from loader import TICK, processor_seconds

command = "import time\\nwhile (used := time.process_time()) < .3: pass\\nprint(used, flush=True)\\ninput()"
command += "\\nprint(time.process_time())"
child = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
least = float(child.stdout.readline()) + time.process_time()
found = processor_seconds()
print(least - 4 * TICK < found < float(child.communicate(b"\\n")[0]) + time.process_time() + 4 * TICK)
"""


def test_the_time_of_a_living_child_is_counted():
    done = subprocess.run(
        [sys.executable, "-c", BUSY], cwd=Path(loader.__file__).parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def test_generated_pictures_are_a_folder_of_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "GENERATED", 8)
    loader.generated(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.JPEG")) == sorted(
        f"{'val' if k < 4 else 'train'}/class{k % 4}/{k}.JPEG" for k in range(8)
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "-1"], "--workers must be at least 0, got '-1'; --help lists the flags."),
        (["--batch-size", "0"], "--batch-size must be at least 1, got '0'; --help lists the flags."),
        (["--pictures", "0"], "--pictures must be at least 1, got '0'; --help lists the flags."),
        (["--crop", "0"], "--crop must be at least 1, got '0'; --help lists the flags."),
        (["--rounds", "0"], "--rounds must be at least 1, got '0'; --help lists the flags."),
        (
            ["--data-dir", "{packed}"],
            "--data-dir must be a folder of images for torchvision, {packed} is packed.",
        ),
        (
            ["--data-dir", "{tree}", "--packed", "{tree}"],
            "--packed must be the packed set of a --data-dir, got {tree}.",
        ),
        (["--packed", "{packed}"], "--packed must be the packed set of a --data-dir, got {packed}."),
    ],
    ids=["workers", "batch", "pictures", "crop", "rounds", "packed data", "packed is none", "packed alone"],
)
def test_a_wrong_flag_is_refused(sets, torchvision, flags, message):
    tree, packed = sets
    with pytest.raises(RecipeError) as refusal:
        loader.main([flag.format(tree=tree, packed=packed) for flag in flags])
    assert str(refusal.value) == message.format(tree=tree, packed=packed)
