"""A notebook is its source, without output and without the name of a machine. The line of labs 1 and 2: its loss, its
minimum, and lab 1's paths to it, which are the same in both frameworks."""

import json
import subprocess

import jupytext
import nbformat
import numpy as np
import paths
import pytest
import warm
from ranks import clean_environ, needs_tensorflow, needs_torch

from labtools import line

SLOW = ("both_frameworks",)
SAVE = "import json; json.dump({size: path.tolist() for size, path in paths.items()}, open(sys.argv[1], 'w'))"
LABS = sorted(paths.SOURCES.glob("*-*.py"))
NAMES = [
    "1-exercise-linear_regression_sgd_single_gpu",
    "1-solution-linear_regression_sgd_single_gpu",
    "2-exercise-linear_regression_sgd_horovod",
    "2-solution-linear_regression_sgd_horovod",
    "3-exercise-ring_allreduce",
    "3-solution-ring_allreduce",
    "4-exercise-large_batches",
    "4-solution-large_batches",
    "5-exercise-scaling_and_profiling",
    "5-solution-scaling_and_profiling",
]


def test_the_labs_are_all_there():
    assert [lab.stem for lab in LABS] == NAMES


@pytest.mark.parametrize("lab", LABS, ids=[lab.stem for lab in LABS])
def test_a_notebook_is_its_source(lab):
    """`make notebooks` makes it so."""
    notebook = nbformat.read(paths.LABS / f"{lab.stem}.ipynb", as_version=4)
    source = jupytext.read(lab)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in source.cells
    ]


@pytest.mark.parametrize("lab", LABS, ids=[lab.stem for lab in LABS])
def test_a_notebook_holds_no_output(lab):
    notebook = nbformat.read(paths.LABS / f"{lab.stem}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert notebook.metadata["kernelspec"]["name"] == "python3"  # whichever environment JupyterLab runs in


def test_the_loss_is_the_mean_squared_error():
    x, y = line.points()
    assert x.shape == y.shape == (1000, 1)
    slopes, intercepts = np.meshgrid([0.0, 1.5, 4.0], [-0.5, 0.1])
    losses = line.loss(x, y, slopes, intercepts)
    assert losses.shape == (2, 3)
    expected = [[np.mean((m * x + n - y) ** 2) for m in (0.0, 1.5, 4.0)] for n in (-0.5, 0.1)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_least_squares_has_the_lowest_loss():
    x, y = line.points()
    m, n = line.least_squares(x, y)
    assert (m, n) == pytest.approx(tuple(np.polyfit(x.ravel(), y.ravel(), 1)), abs=1e-5)
    around = line.loss(x, y, m + np.array([0.01, -0.01, 0, 0]), n + np.array([0, 0, 0.01, -0.01]))
    assert (around > line.loss(x, y, m, n)).all()


def saved_paths(framework, folder):
    """Lab 1's paths by batch size, in this framework."""
    cells = [cell.source for cell in jupytext.read(LABS[1]).cells if cell.cell_type == "code"]
    (last,) = (number for number, cell in enumerate(cells) if "paths = {}" in cell)  # then come figures of the paths
    program = "\n".join(["import sys", *cells[: last + 1], SAVE])
    environ = {"HVDTRAIN_LAB_FRAMEWORK": framework, "HVDTRAIN_LAB_SCALE": "0.1", "MPLBACKEND": "agg"}
    command = warm.command(framework, "-c", program, folder / framework)
    subprocess.run(command, check=True, timeout=200, cwd=paths.LABS, env=clean_environ() | environ)
    return {size: np.array(path) for size, path in json.loads((folder / framework).read_text()).items()}


@needs_torch
@needs_tensorflow
def test_both_frameworks_walk_the_same_paths(tmp_path):
    torch, tensorflow = saved_paths("torch", tmp_path), saved_paths("tensorflow", tmp_path)
    assert {size: len(path) for size, path in torch.items()} == {"1000": 7, "100": 61, "1": 6001}
    for size, path in torch.items():
        np.testing.assert_allclose(tensorflow[size], path, atol=1e-5)
        assert path[0].tolist() == [0.25, -0.4]
    x, y = line.points()
    assert line.loss(x, y, *torch["100"][-1]) < 1.01 * line.loss(x, y, *line.least_squares(x, y))
