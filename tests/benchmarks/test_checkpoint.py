"""`python tests/benchmarks/checkpoint.py`: what it refuses, and that it measures."""

import json
import subprocess
import sys

import checkpoint
import pytest
from ranks import needs_torch

from hvdtrain.errors import RecipeError
from hvdtrain.tools.bench.measure import Kept


def run(*argv, cwd):
    command = [sys.executable, checkpoint.__file__, *argv]
    return subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=240)


def test_blocks_that_checkpoints_do_not_fill_are_refused_in_one_line(tmp_path):
    done = run("--steps", "25", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (RecipeError.exit_code, "")
    assert done.stderr == "RecipeError: --steps must be a multiple of --every 10, got 25.\n"


def test_the_figures_of_checkpoints():
    seconds = {"none": [1.0, 2.0], "checkpoints": [1.1, 2.0]}
    found = checkpoint.figures({"step_seconds": seconds, "stalls": [1.0] * 19 + [9.0], "copies": [0.5, 1.0, 3.0]})
    assert found["ratios"] == [1.1, 1.0]
    assert found["stall_over_copy"] == pytest.approx(1.4)


def test_its_answer_fits_80_columns_and_ends_with_a_sentence(capsys):
    long = [1234.5678, 1201.1234, 1340.9876]  # seconds
    found = {"every": 10, "step_seconds": dict.fromkeys(checkpoint.KINDS, long), "copies": long, "stalls": long}
    checkpoint.answer({**found, "ratios": [1.02, 1.05], "stall_over_copy": 1.4}).conclude(Kept())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    blank = lines.index("")
    sentence = " ".join(lines[blank + 1 :])
    assert blank >= 3 and sentence[0].isupper() and sentence.endswith(".")


@pytest.mark.launched
@needs_torch
def test_checkpoints_are_measured(tmp_path):
    argv = ["--recipe", "linear", "--ranks", "1", "--rounds", "2", "--every", "5", "--steps", "15"]
    done = run("--json", "-", *argv, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert len(result["stalls"]) == len(result["copies"]) == 2 * 3
    assert all(len(seconds) == 2 for seconds in result["step_seconds"].values())
    assert list(tmp_path.iterdir()) == []  # its checkpoints are gone
