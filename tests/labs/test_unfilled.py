"""Cells that need a gap which is not right: they name the cells to fill, in place of a traceback."""

import jupytext
import nbclient
import paths
import pytest
from ranks import needs_tensorflow, needs_torch

from labtools import LabError, needs, notebooks
from labtools.exercises import large_batches


def test_a_cell_names_the_cells_that_it_needs(capsys):
    check = large_batches.Check()
    with pytest.raises(LabError) as refused:
        check.needs("scaled_lr", "updates")
    assert str(refused.value).splitlines() == [
        "This cell needs what is not right yet:",
        "    gap 2, scaled_lr: the cell above check.scaled_lr",
        "    gap 1, updates: the cell above check.updates",
        "Fill it, run it and its check, and then this.",
    ]
    check.updates(lambda examples, batch, epochs: examples // batch * epochs)
    check.needs("updates")
    with pytest.raises(LabError, match=r"gap 2, scaled_lr: .*\n.*gap 3, warmup: .*\n.*gap 4, choice"):
        check.needs()
    with pytest.raises(LabError):
        check.updates(lambda *_: None)  # changed for the worse
    with pytest.raises(LabError, match="gap 1, updates"):
        check.needs("updates")


@pytest.mark.slow
@pytest.mark.launched
@pytest.mark.xdist_group("labs")
@needs_torch
@pytest.mark.parametrize("lab", [*"123456", pytest.param("7", marks=needs_tensorflow), "8", "9"])
def test_an_exercise_with_all_gaps_empty_shows_no_traceback(tmp_path, monkeypatch, lab):
    monkeypatch.setenv("HVDTRAIN_LAB_SCALE", "0.1")
    notebooks.copy(tmp_path)
    (path,) = tmp_path.glob(f"{lab}-exercise-*")
    notebook = jupytext.read(path)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources, allow_errors=True
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    errors = [output for output in outputs if output.output_type == "error"]
    assert [error.traceback for error in errors if error.ename != "LabError"] == []
    texts = ["\n".join(error.traceback) for error in errors]
    assert all(text.startswith(("Gap ", "This cell needs what")) for text in texts), texts
    assert any(text.startswith("This cell needs what") for text in texts)


def test_a_lab_that_needs_tensorflow_says_so_with_the_command(monkeypatch):
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    with pytest.raises(LabError) as refused:
        needs.tensorflow()
    first, command = str(refused.value).splitlines()
    assert first.startswith("This needs TensorFlow, which is not installed here.")
    assert command == f"    cd {paths.LABS.parent} && make tensorflow"
    monkeypatch.setattr(needs, "find_spec", lambda name: name)
    monkeypatch.setattr(needs, "horovod_library", lambda name: None)
    needs.tensorflow()
    with pytest.raises(LabError, match="needs a Horovod that was built for TensorFlow"):
        needs.tensorflow(horovod=True)
