"""docs/bring.md typed word for word: its program and recipe train alike on one process and on two ranks."""

import re
from pathlib import Path

import pytest
from ranks import needs_horovod, needs_torch, train
from worlds import records

pytestmark = [pytest.mark.launched, needs_torch]
PAGE = Path(__file__).parents[2] / "docs" / "bring.md"


@needs_horovod
def test_the_pages_first_part(tmp_path):
    program, recipe = re.findall(r"^```(?:python|yaml)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[:2]
    (tmp_path / "cells.py").write_text(program)
    (tmp_path / "cells.yaml").write_text(recipe)
    epochs = []
    for launcher, ranks in (("alone", 1), ("mpi", 2)):
        train("torch", launcher, ranks, "cells.yaml", "--output", f"on-{ranks}", cwd=tmp_path).good()
        of_run = [line for line in records(tmp_path / f"on-{ranks}") if line["kind"] == "epoch"]
        epochs.append([value for line in of_run for key, value in line.items() if key not in {"kind", "seconds"}])
    assert len(epochs[0]) == 3 * 6
    assert epochs[0] == pytest.approx(epochs[1], rel=1e-5)
