"""docs/bring.md typed word for word: its program and recipe train alike on one process and on two ranks."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from ranks import needs_horovod, needs_torch, run, train
from worlds import records

pytestmark = [pytest.mark.launched, needs_torch]
PAGE = Path(__file__).parents[2] / "docs" / "bring.md"


PROGRAM, RECIPE, STEP, BEFORE, OWN_LOOP = re.findall(
    r"^```(?:python|yaml)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
)


@needs_horovod
def test_the_recipe(tmp_path):
    (tmp_path / "cells.py").write_text(PROGRAM)
    (tmp_path / "cells.yaml").write_text(RECIPE)
    epochs = []
    for launcher, ranks in (("alone", 1), ("mpi", 2)):
        train("torch", launcher, ranks, "cells.yaml", "--output", f"on-{ranks}", cwd=tmp_path).good()
        of_run = [line for line in records(tmp_path / f"on-{ranks}") if line["kind"] == "epoch"]
        epochs.append([value for line in of_run for key, value in line.items() if key not in {"kind", "seconds"}])
    assert len(epochs[0]) == 3 * 6
    assert epochs[0] == pytest.approx(epochs[1], rel=1e-5)


@needs_horovod
def test_the_loop_of_ones_own(tmp_path):
    before, after = ([line.partition("  #")[0].strip() for line in text.splitlines()] for text in (BEFORE, OWN_LOOP))
    assert 5 < len([line for line in after if line and line not in before]) <= 10
    (tmp_path / "cells.py").write_text(PROGRAM)
    (tmp_path / "own_loop.py").write_text(OWN_LOOP)
    epochs = []
    for launcher, ranks in (("alone", 1), ("mpi", 2)):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        run(launcher, ranks, [sys.executable, "own_loop.py"], cwd=tmp_path).good()
        epochs.append([line["iou"] for line in records(tmp_path / "runs" / "cells") if line["kind"] == "epoch"])
    assert len(epochs[0]) == 3
    assert epochs[0] == pytest.approx(epochs[1], rel=1e-5)
