"""The examples on real ranks: the same losses on 1, 2 and 4, over Horovod and ddp, and to the bit after a SIGKILL."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import warm
from marks import marked, rows
from ranks import NEEDS, PROGRAMS, clean_environ, left_by, once, run
from safetensors.numpy import load_file
from worlds import arrays, furthest, losses, of_kind

from hvdtrain.core import recipe

ROOT = Path(__file__).parents[2]
COPY = "HVDTRAIN_NANOGPT"
"""Names a local copy of nanoGPT's model.py, for a machine without network."""

pytestmark = [pytest.mark.launched, NEEDS["torch"], pytest.mark.timeout(600)]

STEPS = ["--log-every-steps", "1", "--warmup-epochs", "0", "--max-steps", "5", "--checkpoint-every-steps", "2"]
LAST = 5
DOUBLE = ["--precision", "float64"]
SMALL_STEPS = ["--base-lr", "1e-5"]  # at .001 a ReLU's input within rounding of 0 takes the other side in float32
UNET = ["unet.yaml", "--dataset-args", "images=26", "side=16", "--model-args", "channels=4", "levels=2"]
UNET += ["--batch-size", "8"]
LM = ["lm.yaml", "--dataset-args", "length=16", "characters=600", "--model-args", "length=16", "width=16"]
LM += ["--batch-size", "8"]
GPT = ["nanogpt.yaml", "--dataset-args", "length=16", "characters=600", "--batch-size", "8"]
VIT = ["vit.yaml", "--batch-size", "32"]
SSD = ["--dataset-args", "images=20", "side=64", "--batch-size", "4", "--base-lr", "0.001"]
PER_IMAGE = ["ssdlite.yaml:per_image", *SSD, "--max-steps", "2"]
UNUSED = ["odd.yaml", "--model-args", "unused=true", "--weight-decay", "0.1"]

CASES = {  # by name: folder, arguments
    "unet": ("unet", [*UNET, *SMALL_STEPS]),
    "unet float64": ("unet", [*UNET, *DOUBLE]),
    "lm": ("lm", LM),
    "lm float64": ("lm", [*LM, *DOUBLE, "--accumulation-steps", "2"]),
    "nanogpt": ("nanogpt", GPT),
    "nanogpt float64": ("nanogpt", [*GPT, *DOUBLE]),
    "vit": ("timm", VIT),
    "vit float64": ("timm", [*VIT, "--batch-size", "30", *DOUBLE]),
    "per image float64": ("detection", [*PER_IMAGE, *DOUBLE]),
    "ssdlite": ("detection", ["ssdlite.yaml", *SSD]),
    "ssdlite float64": ("detection", ["ssdlite.yaml", *SSD, *DOUBLE, "--max-steps", "2"]),
    "dict": ("odd", ["odd.yaml"]),
    "tuple": ("odd", ["odd.yaml", "--dataset-args", "kind=tuple"]),
    "norms float64": ("odd", ["odd.yaml:norms", *DOUBLE]),
    "few to validate": ("odd", ["odd.yaml", "--dataset-args", "valid=3"]),
    "unused float64": ("odd", [*UNUSED, *DOUBLE]),
    "bfloat16": ("lm", [*LM, "--precision", "bfloat16"]),
    "read in workers": ("detection", ["ssdlite.yaml", *SSD, "--workers", "1"]),
    "micro-batches": ("unet", [*UNET, *DOUBLE, "--accumulation-steps", "2"]),
    "changing": ("odd", ["odd.yaml", "--model-args", "sometimes=true"]),
}
BY_THEIR_BATCH = {"ssdlite", "ssdlite float64", "read in workers", "micro-batches"}
"""The losses of these depend on which examples share a local batch: torchvision's detection models divide by the boxes
matched in it, and BatchNorm over micro-batches normalises by those of one micro-batch."""
BOUNDS = {"float64": 1e-12, "bfloat16": 1e-2}
ALIKE = [name for name in CASES if name not in BY_THEIR_BATCH]
ON_HOROVOD = {"changing", "read in workers", "dict", "tuple", "few to validate", "bfloat16"}
ON_DDP = [name for name in CASES if name not in ON_HOROVOD]
# Of the examples the smallest, and of each odd network.
FIRST = ["lm float64", "norms float64", "unused float64", "few to validate"]
FIRST_ON_DDP = ["unused float64"]
LAUNCHES = {  # by name: how many ranks, and what they train
    "alone": (1, {"horovod": [name for name in ALIKE if name in FIRST]}),
    "alone, more": (1, {"horovod": [name for name in ALIKE if name not in FIRST]}),
    "two": (2, {"horovod": FIRST, "ddp": FIRST_ON_DDP}),
    "two, more": (
        2,
        {
            "horovod": [name for name in CASES if name not in FIRST],
            "ddp": [name for name in ON_DDP if name not in FIRST_ON_DDP],
        },
    ),
    "four": (
        4,
        {
            "horovod": ["unet float64", "norms float64", "unused float64", "few to validate", "changing"],
            "ddp": ["lm float64", "nanogpt float64", "vit float64", "per image float64"],
        },
    ),
}


def nanogpt_model():
    """Whether the file is there; fetches it where it can."""
    folder = ROOT / "examples" / "nanogpt"
    if not (folder / "model.py").exists():
        copy = [os.environ[COPY]] if COPY in os.environ else []
        done = subprocess.run(
            [sys.executable, folder / "fetch.py", *copy], capture_output=True, text=True, check=False, timeout=60
        )
        assert "SHA-256" not in done.stderr, done.stderr
    return (folder / "model.py").exists()


@pytest.fixture(scope="session")
def cases():
    """CASES without those whose code is not on this machine; and by folder, what is lacking."""
    lacking = {}
    if not nanogpt_model():
        lacking["nanogpt"] = f"needs nanoGPT's model.py: python examples/nanogpt/fetch.py, or {COPY}=a copy of it"
    for module, folder in (("timm", "timm"), ("torchvision", "detection")):
        if not importlib.util.find_spec(module):
            lacking[folder] = f"needs {module}: pip install {module}"
    return {name: case for name, case in CASES.items() if case[0] not in lacking}, lacking


def given(folder, engine, name, **more):
    """The case as an argument of `recipes` in programs.py."""
    own, (entry, *flags) = CASES[name]
    where = Path(__file__).parent / "odd" if own == "odd" else ROOT / "examples" / own
    argv = [entry, *STEPS, *flags, "--engine", engine, "--output", str(folder / f"{engine} {name}")]
    return {"folder": str(where), "argv": argv, **more}


def launch(folder, ranks, trainings, kind="torch"):
    """Makes these trainings on so many ranks. Returns 0 and, by name, what each rank returned; or the launch's exit
    code and stderr."""
    (folder / "given.json").write_text(json.dumps({"recipes": {"given": trainings}}))
    for old in folder.glob("rank-*.json"):
        old.unlink()
    ended = run("alone" if ranks == 1 else "mpi", ranks, warm.command(kind, PROGRAMS, "torch", folder))
    if ended.code:
        return ended.code, ended.err
    return 0, {name: [rank["recipes"][name] for rank in left_by(ranks, folder)] for name in trainings}


@pytest.fixture(scope="session")
def launched(cases, tmp_path_factory):
    """`launched("two")`: the folder of that launch's runs, and what its ranks returned. Each is started once."""

    @once
    def of(name):
        folder = tmp_path_factory.mktemp(name)
        ranks, chosen = LAUNCHES[name]
        trainings = {
            f"{engine} {case}": given(folder, engine, case)
            for engine, names in chosen.items()
            for case in names
            if case in cases[0]
        }
        code, ended = launch(folder, ranks, trainings)
        assert code == 0, ended[-3000:]
        return folder, ended

    return of


def run_on(launched, ranks, engine, name):
    """The folder of that run."""
    for launch, (size, chosen) in LAUNCHES.items():
        if size == ranks and name in chosen.get(engine, ()):
            return launched(launch)[0] / f"{engine} {name}"
    raise KeyError((ranks, engine, name))


def curve(run_folder):
    """The training loss of every step, then the validation's."""
    return np.append(losses(run_folder), [record["valid_loss"] for record in of_kind("epoch", run_folder)])


def skip_where_lacking(cases, name):
    if name not in cases[0]:
        pytest.skip(cases[1][CASES[name][0]])


PARITY = [
    pytest.param(ranks, engine, name, id=f"{launch}-{engine}-{name}", marks=() if launch == "two" else pytest.mark.slow)
    for launch, (ranks, chosen) in LAUNCHES.items()
    if ranks > 1
    for engine, names in chosen.items()
    for name in names
    if name not in BY_THEIR_BATCH | {"changing"}
]


@pytest.mark.parametrize(("ranks", "engine", "name"), PARITY)
def test_the_losses_of_any_number_of_ranks(launched, cases, ranks, engine, name):
    skip_where_lacking(cases, name)
    bound = next((bound for word, bound in BOUNDS.items() if word in name), 1e-6)
    ours, theirs = curve(run_on(launched, 1, "horovod", name)), curve(run_on(launched, ranks, engine, name))
    assert furthest(theirs, ours) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ssdlite float64", "micro-batches"])
def test_losses_that_depend_on_the_local_batch_are_those_of_the_other_engine(launched, cases, name):
    skip_where_lacking(cases, name)
    ours, theirs = (curve(run_on(launched, 2, engine, name)) for engine in ("horovod", "ddp"))
    assert furthest(ours, theirs) <= 1e-12


@pytest.mark.slow
def test_workers_read_and_collate_the_same_bits(launched, cases):
    skip_where_lacking(cases, "ssdlite")
    assert arrays(run_on(launched, 2, "horovod", "read in workers")) == arrays(
        run_on(launched, 2, "horovod", "ssdlite")
    )


@pytest.mark.parametrize(
    ("name_of_launch", "engine"), marked([("two", "horovod"), ("two", "ddp"), ("four", "horovod")], slow={"four"})
)
def test_a_parameter_without_gradient_decays_alike_on_any_number_of_ranks(launched, name_of_launch, engine):
    weights = []
    for folder, of in ((launched("alone")[0], "horovod"), (launched(name_of_launch)[0], engine)):
        newest = max((folder / f"{of} unused float64" / "checkpoints").glob("step-*"))
        weights.append(load_file(newest / "state.safetensors")["model.spare.weight"])
    assert np.array_equal(*weights)


@pytest.mark.parametrize("name", marked(LAUNCHES, slow={"alone, more", "two, more", "four"}))
def test_every_run_ended_well(launched, name):
    for training, ranks in launched(name)[1].items():
        assert [rank["code"] for rank in ranks] == [0] * len(ranks), (training, ranks[0]["err"])


KILLED = [("horovod", "unet"), ("ddp", "lm"), ("horovod", "ssdlite")]


@pytest.mark.slow
def test_a_run_killed_at_a_random_step_resumes_to_the_same_bits(launched, cases, tmp_path):
    killed = [(engine, name) for engine, name in KILLED if name in cases[0]]
    steps = {}
    for engine, name in killed:
        steps[name] = kill = random.randrange(2, LAST)
        code, _ = launch(tmp_path, 2, {"killed": given(tmp_path, engine, name, kill=kill)})
        assert code
        assert not (tmp_path / f"{engine} {name}" / "checkpoints" / f"step-{LAST:08}").exists()
    code, ended = launch(tmp_path, 2, {f"{engine} {name}": given(tmp_path, engine, name) for engine, name in killed})
    assert code == 0, ended
    for engine, name in killed:
        run_name = f"{engine} {name}"
        assert arrays(tmp_path / run_name) == arrays(run_on(launched, 2, engine, name)), (run_name, steps[name])


@pytest.mark.slow
def test_lightning_makes_the_same_steps(launched, cases, tmp_path):
    pytest.importorskip("lightning", reason="needs Lightning: pip install -e .[lightning]")
    names = [name for name in ("unet", "nanogpt", "vit", "ssdlite", "lm float64", "bfloat16") if name in cases[0]]
    by_lightning = {name: given(tmp_path, "horovod", name, adapter="lightning") for name in names}
    code, ended = launch(tmp_path, 2, by_lightning, kind="lightning")
    assert code == 0, ended
    for name in names:
        bound = 1e-2 if name == "bfloat16" else 1e-6
        theirs = curve(run_on(launched, 2, "horovod", name))
        assert furthest(curve(tmp_path / f"horovod {name}"), theirs) <= bound, name


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "size"), [("unet", "--images"), ("lm", "--characters")])
def test_the_program_before_runs(tmp_path, folder, size):
    program = ROOT / "examples" / folder / "before.py"
    small = [size, "2000" if folder == "lm" else "16", "--epochs", "1", "--batch-size", "8"]
    done = subprocess.run(
        [sys.executable, program, *small],
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "epoch 0" in done.stdout, done.stderr


ENTRIES = {path.stem: path for path in sorted(ROOT.glob("examples/*/*.yaml"))}


@pytest.mark.parametrize("path", marked(rows(ENTRIES), slow={"ssdlite", "unet"}))
def test_every_entry_is_a_recipe(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    entries = re.findall(r"^(\w+):", path.read_text(), re.MULTILINE)
    assert all(recipe.load(f"{path.name}:{entry}").model for entry in entries)


def test_another_file_than_the_pinned_one_is_refused(tmp_path):
    (tmp_path / "model.py").write_text("print('not nanoGPT')")
    fetch = ROOT / "examples" / "nanogpt" / "fetch.py"
    done = subprocess.run(
        [sys.executable, fetch, tmp_path / "model.py"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1 and "is not nanoGPT's model.py of commit 3adf61e" in done.stderr


@pytest.mark.parametrize("folder", marked(["unet", "lm"], slow={"unet"}))
def test_a_readme_counts_the_lines(folder):
    """The README counts the lines of before.py, and those of the recipe (and the step) that replace it."""
    where = ROOT / "examples" / folder
    after = sum(
        len((where / name).read_text().splitlines())
        for name in (f"{folder}.yaml", "step.py")
        if (where / name).exists()
    )
    before = len((where / "before.py").read_text().splitlines())
    assert f"-{before} +{after} lines" in (where / "README.md").read_text()
