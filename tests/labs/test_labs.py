"""The labs as files: a notebook is its source, nothing more, and names no machine."""

import jupytext
import nbformat
import paths
import pytest

LABS = sorted(paths.LABS.glob("*-*.py"))
NAMES = [
    "1-linear_regression_sgd_single_gpu",
    "2-exercise-linear_regression_sgd_horovod",
    "2-solution-linear_regression_sgd_horovod",
    "3-ring_allreduce",
    "4-large_batches",
    "5-scaling_and_profiling",
]


def test_the_labs_are_all_there():
    assert [lab.stem for lab in LABS] == NAMES


@pytest.mark.parametrize("lab", LABS, ids=[lab.stem for lab in LABS])
def test_a_notebook_is_its_source(lab):
    """`jupytext --to ipynb labs/*.py` makes it so."""
    notebook = nbformat.read(lab.with_suffix(".ipynb"), as_version=4)
    source = jupytext.read(lab)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in source.cells
    ]


@pytest.mark.parametrize("lab", LABS, ids=[lab.stem for lab in LABS])
def test_a_notebook_holds_no_output(lab):
    notebook = nbformat.read(lab.with_suffix(".ipynb"), as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert notebook.metadata["kernelspec"]["name"] == "python3"  # whichever environment JupyterLab runs in
    assert notebook.metadata["jupytext"]["formats"] == "ipynb,py:percent"
