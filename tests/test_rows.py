"""What one more row, or a key, must find by itself: each test makes one and follows it through the package."""

import ast
import configparser
import importlib.util
import json
import sys

import pytest
import warm
from paths import REPOSITORY
from ranks import needs_torch, run
from refusals import refusal

from hvdtrain.core import flags
from hvdtrain.core.compatibility import EngineSpec
from hvdtrain.core.settings import TRACKERS
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import RecipeError
from hvdtrain.record import reader
from hvdtrain.tools.bench import engines, train
from hvdtrain.tools.report.assemble import run_report

EARLY = """
from dataclasses import replace
from pathlib import Path
import sys

from hvdtrain.core.progress import Progress
from hvdtrain.run import main
from hvdtrain.torch.__main__ import train

next_epoch = Progress.next_epoch


def patient(*given):
    after = next_epoch(*given)
    return replace(after, ended="the loss is no better") if after.epoch == 3 else after


Progress.next_epoch = patient
argv = ["linear", "--epochs", "6"]
assert main.main("torch", argv, train) == 0
(folder,) = Path("runs/linear").iterdir()
(folder / "status.json").unlink()
assert main.main("torch", argv, train) == 0
assert len(list(Path("runs/linear").iterdir())) == 2
Progress.next_epoch = next_epoch
assert main.main("torch", [*argv, "--output", str(folder)], train) == 0
assert main.main("torch", ["--evaluate", str(folder)], train) == 0
print("folder", folder)
"""


TRACKER = """
import json
from pathlib import Path


class Tracker:
    def start(self, start):
        self.path = start.folder / "notebook.txt"
        return "7"

    def add(self, metrics, step):
        self.path.write_text(f"{step} {sorted(metrics)}")

    def close(self, state):
        with self.path.open("a") as file:
            file.write(f" {state}")
"""
SITE = """
from hvdtrain.core.settings import TRACKERS
import hvdtrain.record.trackers
TRACKERS["notebook"] = "json"
hvdtrain.record.trackers.__path__.append({!r})
"""


@needs_torch
def test_a_tracker_is_added_by_one_file_and_one_row(tmp_path, monkeypatch):
    (tmp_path / "notebook.py").write_text(TRACKER)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE.format(str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/site:{REPOSITORY}")
    train = [sys.executable, "-m", "hvdtrain.torch", "linear", "--epochs", "2", "--output", str(tmp_path / "run")]
    run("alone", 1, [*train, "--tracker", "notebook"]).good()
    step, *names, state = (tmp_path / "run" / "notebook.txt").read_text().split()
    assert (step, state) == ("20", "finished") and "'valid_loss']" in names
    refused = run("alone", 1, [*train, "--tracker", "notebok"])
    assert refused.code == 2 and "'notebook'" in refused.err


def test_benchmarks_measure_every_engine_of_several_ranks(monkeypatch):
    row = EngineSpec("mpi4py", "mpi4py", {"torch": "mpi_engine:MpiEngine"}, "MPI alone", launcher="mpirun")
    monkeypatch.setitem(ENGINES, "mpi4py", row)
    spec = importlib.util.find_spec("hvdtrain.tools.bench.scaling")
    spec.loader.exec_module(scaling := importlib.util.module_from_spec(spec))  # anew, with the table as it is now
    assert flags.parse(scaling.Options, "x", ["--engine", "mpi4py"]).engine == "mpi4py"
    options = flags.parse(scaling.Options, "x", ["--engine", "mpi4py", "--framework", "tensorflow"])
    message = "--engine mpi4py does not go with --framework tensorflow; drop one."
    assert refusal(RecipeError, scaling._check, options) == message
    assert train.engine_in(["digits", "--engine=mpi4py"]) == train.engine_in(["--engine", "mpi4py"]) == "mpi4py"
    assert train.engine_in(["ddp.yaml"]) == "horovod"
    assert [each.engine for each in engines.contenders(["torch"], 2)].count("mpi4py") == 1


@pytest.mark.parametrize("name", [name for name, module in TRACKERS.items() if module])
def test_a_tracker_of_the_table_is_complete(name):
    extras = configparser.ConfigParser()
    extras.read(REPOSITORY / "setup.cfg")
    assert name in extras["options.extras_require"]
    assert f"| `{name}` | " in (REPOSITORY / "docs/trackers.md").read_text()
    tree = ast.parse((REPOSITORY / f"hvdtrain/record/trackers/{name}.py").read_text())
    assert "Tracker" in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


@needs_torch
def test_whatever_ends_a_recipes_run_early_is_no_broken_promise(tmp_path):
    (tmp_path / "main.py").write_text(EARLY)
    out = run("alone", 1, warm.command("torch", tmp_path / "main.py"), cwd=tmp_path).good().out
    assert out.count("INFO - ended after epoch 3: the loss is no better") == 2
    assert out.count("INFO - finished at step 30") == 3
    assert out.count("INFO - finished at step 30 before: nothing was trained;") == 1
    assert "INFO - step 30, epoch 3, " in out
    folder = tmp_path / out.split()[-1]
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["step"], status["ended"]) == ("finished", 30, "the loss is no better")
    assert reader.read(folder).total_steps == 60
    verdict = run_report(folder).verdict
    assert verdict.headline == "Ended early after epoch 3 of 6: the loss is no better."
    assert verdict.level != "bad" and "broken" not in {check.state for check in verdict.checks}
