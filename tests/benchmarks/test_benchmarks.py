"""The benchmarks of hvdtrain itself: what they refuse, how answers look, and that they measure."""

import importlib.util
import json
import subprocess
from pathlib import Path

import checkpoint
import loader
import overhead
import pytest
import warm
from images import write_tree
from PIL import Image
from ranks import needs_horovod, needs_tensorflow, needs_torch

from hvdtrain.errors import RecipeError
from hvdtrain.tools import pack
from hvdtrain.tools.bench import allreduce, ranks, train
from hvdtrain.tools.bench.measure import Kept

LONG = [1234.5678, 1201.1234, 1340.9876]  # seconds, as many digits as there may be


def run(program, *argv, cwd):
    command = warm.command("hvdtrain", program.__file__, *argv)
    return subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=240)


def measured(program, *argv, cwd):
    """The results that a benchmark prints, and nothing else."""
    done = run(program, "--json", "-", *argv, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def measured_warm(tmp_path, monkeypatch, capsys):
    """The same of a single rank, which begins with PyTorch loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ranks, "launcher", lambda name, count, *flags: warm.command("torch"))

    def measure(program, *argv):
        assert program.main(["--json", "-", "--ranks", "1", "--rounds", "2", *argv]) == 0
        return json.loads(capsys.readouterr().out)

    return measure


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A folder of images, and the same packed."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is missing: pip install torchvision")
    folder = tmp_path_factory.mktemp("sets")
    pack.pack(pack.Options(write_tree(folder / "tree", 4, 1), folder / "packed"))
    return {"tree": folder / "tree", "packed": folder / "packed"}


@pytest.mark.parametrize(
    ("program", "argv", "message"),
    [
        (checkpoint, "--steps 25", "--steps must be a multiple of --every 10, got 25."),
        (overhead, "--rounds 1", "--rounds must be at least 2, got '1'; --help lists the flags."),
        (overhead, "--engine ddp --framework tensorflow", "--engine ddp is PyTorch's; drop --framework tensorflow."),
        (
            overhead,
            "--recipe synthetic:amp",
            "--recipe must have precision float32, as the hand-written loop has, got ",
        ),
        (overhead, "--recipe imagenet", "--recipe must have a data set in memory or one of your own, got imagenet; "),
        (loader, "--workers -1", "--workers must be at least 0, got '-1'; --help lists the flags."),
        *(
            (loader, f"--{name} 0", f"--{name} must be at least 1, got '0'; --help lists the flags.")
            for name in ("batch-size", "images", "crop", "rounds")
        ),
        (loader, "--data-dir {packed}", "--data-dir must be a folder of images for torchvision, {packed} is packed."),
        (loader, "--data-dir {tree}/train", "--data-dir must hold images in train/<class>, got {tree}/train."),
        (
            loader,
            "--enlarge 0x9",
            "--enlarge must be WIDTHxHEIGHT, in pixels up to 9999, got '0x9'.",
        ),
    ],
)
def test_refusals(program, argv, message, request):
    paths = request.getfixturevalue("sets") if program is loader else {}
    with pytest.raises(RecipeError) as refused:
        program.main(argv.format(**paths).split())
    assert str(refused.value).startswith(message.format(**paths))


def test_a_refusal_is_one_line(tmp_path):
    done = run(checkpoint, "--steps", "25", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (RecipeError.exit_code, "")
    assert done.stderr == "RecipeError: --steps must be a multiple of --every 10, got 25.\n"


def answers():
    """An answer of each benchmark, the package's too, of figures as long as they get."""
    of_train = {"recipe": "cifar100:bs256-amp", "ranks": 2, "engine": "multiworker", "framework": "tensorflow"}
    times = {key: [second / 1000 for second in LONG] for key in train.MEANS}
    libraries = ("Horovod over Gloo", "torch.distributed (gloo)")
    network = {library: {4000: LONG, 4096 * allreduce.MB: [second / 2 for second in LONG]} for library in libraries}
    kinds = dict.fromkeys(checkpoint.KINDS, LONG)
    stalls = {"every": 10, "step_seconds": kinds, "copies": LONG, "stalls": LONG}
    loops = dict.fromkeys(("hvdtrain", "hand-written", "hvdtrain.lightning", "Lightning"), LONG)
    ratio = {"wall": [1.01, 0.99], "processor": [1.0123, 1.0045]}
    over = dict.fromkeys(("hvdtrain", "hvdtrain.lightning", "Lightning"), ratio)
    readers = dict.fromkeys(loader.CONTENDERS, LONG)
    read = {"images_per_core_second": readers, "peak_bytes": dict.fromkeys(readers, 12_345_000_000)}
    left_out = {"SPDL": "not installed"}
    ratios = {name: [2.123, 2.05, 2.2] for name in readers if name != loader.BASE}
    return {
        "train": train.answer({**of_train, "global_batch": 16384, "step_seconds": times}),
        "allreduce": allreduce.answer(network, 16384),
        "checkpoint": checkpoint.answer(stalls),
        "overhead": overhead.answer({"step_seconds": loops, "ratios": over}),
        "loader": loader.answer({**read, "ratios": ratios, "left_out": left_out}, True),
    }


@pytest.mark.parametrize("what", answers())
def test_an_answer_fits_80_columns_and_ends_with_a_sentence(what, capsys):
    answers()[what].conclude(Kept())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    blank = lines.index("")
    sentence = " ".join(lines[blank + 1 :])
    assert blank >= 3 and sentence[0].isupper() and sentence.endswith(".")


def test_the_figures_of_checkpoints():
    seconds = {"none": [1.0, 2.0], "checkpoints": [1.1, 2.0]}
    found = checkpoint.figures({"step_seconds": seconds, "stalls": [1.0] * 19 + [9.0], "copies": [0.5, 1.0, 3.0]})
    assert found["ratios"] == [1.1, 1.0]
    assert found["stall_over_copy"] == pytest.approx(1.4)


@pytest.mark.launched
@needs_torch
def test_checkpoints_are_measured(measured_warm, tmp_path):
    result = measured_warm(checkpoint, "--recipe", "linear", "--every", "5", "--steps", "15")
    assert len(result["stalls"]) == len(result["copies"]) == 2 * 3
    assert all(len(seconds) == 2 for seconds in result["step_seconds"].values())
    assert list(tmp_path.iterdir()) == []  # its checkpoints are gone


@pytest.mark.slow
def test_readers_are_measured_interleaved(sets, tmp_path):
    flags = ["--data-dir", sets["tree"], "--enlarge", "50x40", "--workers", 1, "--images", 6]
    flags += ["--batch-size", 4, "--crop", 32, "--rounds", 2, "--json", tmp_path / "found.json"]
    done = run(loader, *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    readers = [name for name, (library, _) in loader.CONTENDERS.items() if library in ("torchvision", "hvdtrain")]
    for name in readers:
        assert f"\n{name}  " in done.stdout
    results = json.loads((tmp_path / "found.json").read_text())
    assert results["data"] == f"{sets['tree']}, brought to 50x40 at quality 90"
    assert (results["images"], results["workers"], results["crop"]) == (6, 1, 32)
    rates = results["images_per_core_second"]
    assert {*rates, *results["left_out"]} == {*loader.CONTENDERS} and {*rates} >= {*readers}
    for key in ("images_per_core_second", "images_per_second"):
        assert all(len(values) == 2 for values in results[key].values())
    ours, theirs = (rates[name] for name in ("hvdtrain, shards", "torchvision"))
    assert results["ratios"]["hvdtrain, shards"] == [one / other for one, other in zip(ours, theirs, strict=True)]
    assert all(results["peak_bytes"][name] > 1e7 for name in readers)


def test_the_images_of_a_round_are_spread_over_the_classes(tmp_path):
    for number in range(8):
        path = tmp_path / "all" / "train" / f"class{number // 4}" / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (30, 60), number).save(path)
    folder, count = loader.chosen(tmp_path / "all", tmp_path / "chosen", 4, "50x40")
    names = ["train/class0/0.JPEG", "train/class0/2.JPEG", "train/class1/4.JPEG", "train/class1/6.JPEG"]
    names += ["val/class0/0.JPEG", "val/class1/4.JPEG"]
    assert count == 4
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.JPEG")) == names
    assert {Image.open(path).size for path in folder.rglob("*.JPEG")} == {(50, 40)}
    assert loader.chosen(tmp_path / "all", tmp_path / "whole", 9, None)[1] == 8


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
    command, folder = warm.command("hvdtrain", "-c", BUSY), Path(loader.__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_generated_images_are_a_folder_of_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "GENERATED", 8)
    loader.generated(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.JPEG")) == sorted(
        f"train/class{k % 4}/{k}.JPEG" for k in range(8)
    )


OWN = """
import random
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden, self.norm, self.top = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1)

    def forward(self, x):
        return self.top(torch.relu(self.norm(self.hidden(x))))

class Points(torch.utils.data.Dataset):
    def __init__(self, count):
        self.x = torch.linspace(0, 1, 4 * count, dtype=torch.float64).view(count, 4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + random.random(), self.x[index].sum(0, keepdim=True)

def points():
    return Points(32), Points(8)

def step(model, batch):
    x, y = batch
    return (model(x) - y).square().mean(), {}
"""
OWN_RECIPE = """
default:
  model: own_of_bench:Net
  model_args: {width: 8}
  dataset: own_of_bench:points
  loss: mse
  optimizer: adam
  batch_size: 8
  base_lr: 0.001
  epochs: 1
step:
  extends: own.yaml:default
  loss: null
  step: own_of_bench:step
"""


@pytest.fixture
def user_code(tmp_path):
    (tmp_path / "own_of_bench.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text(OWN_RECIPE)


@pytest.mark.launched
@needs_torch
@needs_horovod
def test_overhead_of_the_users_step(user_code, measured_warm):
    result = measured_warm(overhead, "--recipe", "own.yaml:step")
    assert set(result["step_seconds"]) == {"hvdtrain", "hand-written"}
    assert all(ratio > 0 for kind in ("wall", "processor") for ratio in result["ratios"]["hvdtrain"][kind])


@pytest.mark.launched
@pytest.mark.slow
@needs_torch
def test_overhead_of_the_users_loss_over_ddp(user_code, tmp_path):
    result = measured(overhead, "--recipe", "own.yaml", "--rounds", 2, "--ranks", 2, "--engine", "ddp", cwd=tmp_path)
    assert {"hvdtrain", "hand-written"} <= set(result["step_seconds"])
    assert all(ratio > 0 for kind in ("wall", "processor") for ratio in result["ratios"]["hvdtrain"][kind])


# synthetic:tiny with a tenth of its examples.
SHORT = """
default:
  model: resnet50
  stem: cifar
  dataset: synthetic
  image_size: 8
  classes: 10
  examples: 64
  batch_size_per_rank: 16
  base_lr: 0.1
  base_batch_size: 256
  lr_rule: linear
  momentum: 0.9
  weight_decay: 5e-5
  epochs: 1
"""


@pytest.mark.launched
@pytest.mark.slow
@needs_horovod
@pytest.mark.parametrize(
    "framework", [pytest.param("torch", marks=needs_torch), pytest.param("tensorflow", marks=needs_tensorflow)]
)
def test_overhead_measures_both_loops(framework, tmp_path):
    (tmp_path / "short.yaml").write_text(SHORT)
    ranks = {"torch": "2", "tensorflow": "1"}[framework]  # two of TensorFlow's take half a minute longer
    given = ["--recipe", "short.yaml", "--rounds", "2", "--framework", framework, "--ranks", ranks]
    done = run(overhead, *given, "--output", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "overhead.json").read_text())
    header, ours, hand_written, _, sentence, *_ = done.stdout.splitlines()
    assert [line.split()[0] for line in (header, ours, hand_written)] == ["loop", "hvdtrain", "hand-written"]
    assert sentence.startswith("A step of hvdtrain takes ")
    assert "<svg" in (tmp_path / "overhead.html").read_text()
    assert result["framework"] == framework
    assert result["ratio"]["hvdtrain"] > 0
    assert all(seconds > 0 for times in result["step_seconds"].values() for seconds in times)
