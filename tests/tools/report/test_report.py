"""`python -m hvdtrain report`: what it prints and writes, and what it refuses."""

import json
import os
import re
import subprocess
import sys

import pytest
import report_folders
from paths import REPOSITORY

from hvdtrain import cli
from hvdtrain.tools import report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`resumed`, `slow`, `tensorflow` and `bench_scaling`."""
    folder = tmp_path_factory.mktemp("folder")
    for name in ("resumed", "slow", "tensorflow", "bench_scaling", "hostile"):
        report_folders.ALL[name](folder / name)
    (folder / "one" / "deep" / "checkpoints").mkdir(parents=True)
    (folder / "bare").mkdir()
    return folder


def printed(capsys, *argv) -> str:
    assert cli.main(["report", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_markdown_is_short_and_fits_a_terminal(folder, capsys):
    text = printed(capsys, folder / "resumed", "--format", "md")
    lines = text.splitlines()
    assert lines[:3] == ["# resumed", "", "**As expected: Trained to the end: step 220 of 220.**"]
    assert len(lines) < 70
    assert max(len(line) for line in lines if line.startswith("|")) <= 80
    assert "| lost work   | 19.6 s     | 3.6 %        |" in lines
    assert "- 8 min 7 s: resumed from step 132" in lines
    assert lines[-1] == "Command: `srun --nodes=2 --ntasks=2 python -m hvdtrain.torch digits`"


def test_markdown_of_several_runs_and_a_sweep(folder, capsys):
    sweep = folder / "bench_scaling"
    text = printed(capsys, folder / "slow", folder / "tensorflow", "--sweep", sweep, "--format", "md")
    headings = [line for line in text.splitlines() if line.startswith("# ")]
    assert headings == ["# slow", "# tensorflow", "# Side by side", "# Weak scaling", "# Strong scaling"]
    assert "4 ranks are 3.51 times as fast as 1" in text
    assert "| software | framework " in text


def test_markup_of_others_is_text_in_markdown(folder, capsys):
    text = printed(capsys, folder / "hostile", "--format", "md")
    assert "\\<script>" in text
    assert "<script>" not in text.replace("\\<script>", "")


def test_json_has_all_values(folder, capsys):
    text = printed(capsys, folder / "slow", "--json", "--co2-g-per-kwh", "350")
    values = json.loads(text, parse_constant=pytest.fail)
    (run,) = values["runs"]
    assert run["verdict"]["level"] == "attention"
    assert len(run["heat"]["seconds"]) == len(run["heat"]["rows"]) == 4
    assert run["energy"]["co2_grams"] == pytest.approx(350 * run["energy"]["rows"][0]["kwh"])
    assert len(run["curves"][1]["series"][0]["x"]) == 44
    again = json.loads(printed(capsys, folder / "slow", "--format", "json", "--co2-g-per-kwh", "350"))
    assert again["runs"] == values["runs"]


def test_output_of_any_format_goes_to_a_file(folder, tmp_path, capsys):
    for name in ("html", "md", "json"):
        path = tmp_path / f"report.{name}"
        assert printed(capsys, folder / "slow", "--format", name, "--output", path) == f"{path}\n"
        assert "node3" in path.read_text()


PLACES = {
    "one run: beside it": (["slow"], [], "slow/report.html"),
    "several: here": (["slow", "tensorflow"], [], "report.html"),
    "a sweep: beside it": ([], ["--sweep", "bench_scaling"], "bench_scaling/report.html"),
}


@pytest.mark.parametrize(("runs", "more", "place"), PLACES.values(), ids=PLACES)
def test_where_the_page_goes(runs, more, place, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert printed(capsys, *runs, *more) == f"{place}\n"
    assert (folder / place).read_text().lower().startswith("<!doctype html>")
    (folder / place).unlink()


def test_a_report_stays_the_same_beside_its_own_page(folder, capsys):
    before = printed(capsys, folder / "resumed", "--format", "md")
    printed(capsys, folder / "resumed")
    assert printed(capsys, folder / "resumed", "--format", "md") == before
    (folder / "resumed" / "report.html").unlink()


REFUSED = {
    "nothing": ([], "RUN or --sweep must be given"),
    "no such run": (["nowhere"], "RUN must be a run folder, nowhere is not there"),
    "a folder of runs": (
        ["."],
        "RUN must be a run folder, . holds 5 runs; give one, the newest with: python -m hvdtrain report ",
    ),
    "a folder of one run": (["one"], "one holds 1 run; give one, the newest with: python -m hvdtrain report one/deep"),
    "no run": (["bare"], "has none of a run's files; train writes run folders to runs/."),
    "no such sweep": (["--sweep", "nowhere"], "--sweep must name a folder"),
    "a run is no sweep": (["--sweep", "slow"], "has no two runs on different numbers of ranks"),
    "too many runs": (["slow"] * 65, "at most 64"),
    "another format": (["slow", "--format", "pdf"], "--format must be"),
    "a negative factor": (["slow", "--co2-g-per-kwh", "-1"], "--co2-g-per-kwh"),
    "no folder to write to": (["slow", "--output", "no/such/folder/x.html"], "give --output a file"),
}


@pytest.mark.parametrize(("argv", "says"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line(argv, says, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert cli.main(["report", *argv]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_folder_of_runs_is_searched_without_links_and_within_bounds(tmp_path, capsys, monkeypatch):
    """A hostile one: links to runs elsewhere and to itself, a pipe, and more entries than are looked at."""
    report_folders.finished(tmp_path / "elsewhere" / "run")
    report_folders.finished(tmp_path / "runs" / "digits" / "\x1b[2Jmine")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere" / "run")
    (tmp_path / "runs" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs" / "self").symlink_to(".")
    os.mkfifo(tmp_path / "runs" / "pipe")
    assert cli.main(["report", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert error.endswith(
        f"holds 1 run; give one, the newest with: {report.PROG} {tmp_path}/runs/digits/\\x1b[2Jmine\n"
    )
    for number in range(30):
        (tmp_path / "many" / f"{number:02}" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(report, "MOST_ENTRIES", 20)
    assert cli.main(["report", str(tmp_path / "many")]) == 2
    error = capsys.readouterr().err
    assert "holds 20 runs; give one" in error
    assert f" and 11 more; all in one page: {report.PROG} {tmp_path}/many/*" in error


def test_no_library_of_charts_is_loaded_for_text(folder):
    program = "import sys; from hvdtrain import cli; cli.main(sys.argv[1:]); print(sorted(sys.modules))"
    command = [sys.executable, "-c", program, "report", str(folder / "slow"), "--format", "md"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert not [name for name in ("matplotlib", "torch", "tensorflow", "scipy") if f"'{name}'" in loaded]


def without_images(text):
    """The page without its heat maps, whose compression depends on zlib."""
    return re.sub(r"data:image/png;base64,[^\"]*", "", text)


def test_the_reports_in_the_docs_are_current(tmp_path):
    kept = {path.stem: path.read_text() for path in (REPOSITORY / "docs" / "reports").glob("*.html")}
    made = report_folders.pages(tmp_path)
    assert kept.keys() == made.keys()
    assert [name for name in made if without_images(kept[name]) != without_images(made[name])] == [], "make reports"
