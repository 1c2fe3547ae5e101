"""What one more row, or a key, must find by itself: each test makes one and follows it through the package."""

import json

import warm
from ranks import needs_torch, run

from hvdtrain.record import reader
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


@needs_torch
def test_whatever_ends_a_recipes_run_early_is_no_broken_promise(tmp_path):
    (tmp_path / "main.py").write_text(EARLY)
    out = run("alone", 1, warm.command("torch", tmp_path / "main.py"), cwd=tmp_path).good().out
    assert out.count("INFO - ended after epoch 3: the loss is no better") == 2
    assert out.count("INFO - finished at step 30;") == 3
    assert "INFO - step 30, epoch 3, " in out
    folder = tmp_path / out.split()[-1]
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["step"], status["ended"]) == ("finished", 30, "the loss is no better")
    assert reader.read(folder).total_steps == 60
    verdict = run_report(folder).verdict
    assert verdict.headline == "Ended early after epoch 3: the loss is no better."
    assert verdict.level != "bad" and "broken" not in {check.state for check in verdict.checks}
