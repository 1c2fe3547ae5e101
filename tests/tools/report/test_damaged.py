"""Run folders as power cuts, old versions, full disks and jokers leave them: a report of what is there, and one line on
what is not."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tracemalloc

import odd_json
import pytest
import report_folders
from paths import SUPPORT
from users import NOBODY, needs_root

from hvdtrain import cli
from hvdtrain.terminal import Status
from hvdtrain.tools import report
from hvdtrain.tools.report import assemble, page, text
from hvdtrain.tools.report.lines import LONGEST_LINE

SLOW = ("odd_json",)

FILES = ("status.json", "recipe.yaml", "plan.json", "metrics.jsonl", "launches.jsonl")
LINES = ("metrics.jsonl", "launches.jsonl")
IS_ROOT = os.geteuid() == 0


def of_each(change, names=FILES):
    return lambda folder: [change(folder / name) for name in names]


def emptied(path):
    path.write_bytes(b"")


def zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


def torn(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def to_folder(path):
    path.unlink()
    path.mkdir()


def to_pipe(path):
    path.unlink()
    os.mkfifo(path)


def to_loop(path):
    path.unlink()
    path.symlink_to(path.name)


def to_noise(path):
    path.write_bytes(random.Random(0).randbytes(20_000))


def with_nuls(path):
    content = path.read_bytes()
    path.write_bytes(content[:200] + bytes(500) + content[200:])


def not_utf8(path):
    path.write_bytes(path.read_bytes().replace(b'"kind"', b'"\xff\xfe"').replace(b"epochs", b"\xc3\x28"))


def wrong_shapes(path):
    path.write_text("[1, 2]\n" if path.suffix != ".jsonl" else '[1]\n"x"\n1\nnull\n{"kind": []}\n{"kind": {}}\n')


def changed(path, change):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(record)) + "\n" for record in records))


def every_number(value, number):
    if isinstance(value, dict):
        return {key: every_number(each, number) for key, each in value.items()}
    if isinstance(value, list):
        return [every_number(each, number) for each in value]
    return number if isinstance(value, int | float) and not isinstance(value, bool) else value


def numbers(number):
    """Every number of every record, and of the plan, is that one; written as JSON has it."""

    def change(folder):
        for name in LINES:
            changed(folder / name, lambda record: every_number(record, "@"))
        plan = every_number(json.loads((folder / "plan.json").read_text()), "@")
        (folder / "plan.json").write_text(json.dumps(plan))
        for name in (*LINES, "plan.json"):
            (folder / name).write_text((folder / name).read_text().replace('"@"', number))

    return change


def texts(shown):
    """Every number of every record is a text."""
    return of_each(lambda path: changed(path, lambda record: every_number(record, shown)), LINES)


def huge_line(folder):
    for name in LINES:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(b'{"x": "' + b"y" * (3 * LONGEST_LINE) + b'"}\n' + content)


def backwards(folder):
    for name in LINES:
        content = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(reversed(content)))


def many_names(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        for number in range(300):
            file.write(json.dumps({"kind": "step", "step": number + 500, f"name{number}\x1b[2J": 1.0}) + "\n")


def many_launches(folder):
    with (folder / "launches.jsonl").open("a") as file:
        file.write('{"kind": "launch", "time": 1764000000}\n' * 3000)


def many_events(folder):
    with (folder / "launches.jsonl").open("a") as file:
        for number in range(5000):
            file.write(json.dumps({"kind": "event", "event": "slow", "clock": number, "text": "x" * 900}) + "\n")


def many_kinds(folder):
    with (folder / "launches.jsonl").open("a") as file:
        for number in range(3000):
            file.write(json.dumps({"kind": "event", "event": f"kind{number}", "clock": number}) + "\n")


def deep(folder):
    for name in LINES:
        with (folder / name).open("a") as file:
            file.write("[" * 100_000 + "\n" + '{"kind":' * 100_000 + "\n")
    (folder / "status.json").write_text("[" * 100_000)
    (folder / "recipe.yaml").write_text("[" * 30_000)


def without(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def older(folder):
    """Of a version without launches.jsonl, and without times in the metrics."""
    (folder / "launches.jsonl").unlink()
    gone = {"time", "gradient_norm", "train_examples", "valid_examples"}
    changed(folder / "metrics.jsonl", lambda record: {key: each for key, each in record.items() if key not in gone})


def unreadable(folder):
    for name in FILES:
        (folder / name).chmod(0)


DAMAGES = {
    "empty folder": without(*FILES),
    "an older version": older,
    "status alone": without("recipe.yaml", "plan.json", "metrics.jsonl", "launches.jsonl"),
    "launches alone": without("recipe.yaml", "plan.json", "metrics.jsonl", "status.json"),
    "without recipe and plan": without("recipe.yaml", "plan.json"),
    "without metrics": without("metrics.jsonl"),
    "empty files": of_each(emptied),
    "files of zeros": of_each(zeros),
    "torn files": of_each(torn),
    "torn lines": of_each(torn, LINES),
    "NULs in between": of_each(with_nuls),
    "invalid UTF-8": of_each(not_utf8),
    "noise": of_each(to_noise),
    "folders in place of files": of_each(to_folder),
    "pipes in place of files": of_each(to_pipe),
    "links to themselves": of_each(to_loop),
    "files that nobody may read": unreadable,
    "JSON of the wrong shape": of_each(wrong_shapes),
    "infinite numbers": numbers("1e400"),
    "NaN": numbers("NaN"),
    "negative numbers": numbers("-3.5"),
    "2^70": numbers(str(2**70)),
    "a thousand digits": numbers("9" * 1000),
    "zero": numbers("0"),
    "the largest float": numbers("1.7e308"),
    "tiny": numbers("1e-320"),
    "true": numbers("true"),
    "lists": numbers("[[1], 2]"),
    "texts for numbers": texts("\x1b[2J12"),
    "huge lines": huge_line,
    "lines backwards": backwards,
    "hundreds of metrics": many_names,
    "thousands of launches": many_launches,
    "thousands of events": many_events,
    "thousands of kinds of events": many_kinds,
    "nested too deeply": deep,
}
SPEAK = {
    "an older version": "launches.jsonl is not there",
    "empty files": "launches.jsonl has no records",
    "infinite numbers": "launches.jsonl has no times",
    "files of zeros": "metrics.jsonl: 1 of 1 line cannot be read",
    "torn lines": "1 of",
    "folders in place of files": "recipe.yaml cannot be read (",
    "pipes in place of files": "metrics.jsonl cannot be read (it is not a regular file)",
    "links to themselves": "metrics.jsonl cannot be read (it is a link, which is not followed)",
    "huge lines": "metrics.jsonl: 1 of",
    "JSON of the wrong shape": "status.json holds no object",
    "thousands of launches": "launches after the first",
    "nested too deeply": "status.json is not JSON",
}
"""A part of what `missing` says then."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with all kinds of records."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    report_folders.slow(folder)
    return folder


def reported(folder) -> dict:
    """The report in every format; the values."""
    document = report.document_of(report.Options(runs=(folder,)), Status(""))
    markdown, values = text.markdown(document), text.to_json(document)
    assert all(letter.isprintable() or letter == "\n" for letter in markdown)
    assert page.render(document)
    return json.loads(values, parse_constant=pytest.fail)["runs"][0]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_reported(name, whole, tmp_path):
    if name == "files that nobody may read" and IS_ROOT:
        pytest.skip("root may read all: run it as another user")
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    DAMAGES[name](folder)
    found = reported(folder)
    assert found["verdict"]["headline"]
    assert SPEAK.get(name, "") in "\n".join(found["missing"])
    if found["waterfall"]:
        parts = sum(part["seconds"] for part in found["waterfall"]["parts"])
        assert parts == pytest.approx(found["waterfall"]["wall_seconds"], rel=1e-6)


def test_a_whole_folder_lacks_nothing(whole):
    assert reported(whole)["missing"] == []


@pytest.mark.parametrize("name", ["status.json", "plan.json"])
def test_odd_json(name, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / name
    good = json.loads(path.read_text())
    for odd in odd_json.texts(good, 40):
        path.write_text(odd, errors="surrogatepass")
        assert assemble.run_report(tmp_path / "run").verdict.headline


@pytest.mark.parametrize("name", LINES)
def test_odd_lines(name, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / name
    records = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {record["kind"]: record for record in records}
    for record in kinds.values():
        lines = "".join(odd + "\n" for odd in odd_json.texts(record, 150))
        path.write_text("".join(json.dumps(each) + "\n" for each in kinds.values()) + lines, errors="surrogatepass")
        assert assemble.run_report(tmp_path / "run").verdict.headline


def test_no_run_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "loop", "nothing\x1b"):
        assert cli.main(["report", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


PRIVATE = "a private key\n"


@needs_root
@pytest.mark.parametrize("name", [*FILES, "run.json", "job.sh", "scaling.json"])
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_links_of_a_stranger_are_not_followed(name, link, whole, tmp_path, monkeypatch, capsys):
    """Else what root reads stands in a file that the stranger reads."""
    folder, private = tmp_path / "his", tmp_path / "private"
    shutil.copytree(whole, folder)
    private.write_text(PRIVATE)
    private.chmod(0o600)
    (folder / name).unlink(missing_ok=True)
    if name == "run.json":
        (folder / "recipe.yaml").unlink()
    link(private, folder / name)
    os.chown(folder, NOBODY, NOBODY)
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in folder.iterdir())
    assert cli.main(["report", "his"]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert sorted(path.name for path in folder.iterdir()) == before
    page_text = (tmp_path / "report.html").read_text()
    assert PRIVATE.strip() not in page_text and PRIVATE.strip() not in json.dumps(reported(folder))
    if name in FILES:
        assert f"{name} cannot be read (it is a" in page_text


def test_a_report_goes_into_a_run_folder_of_ones_own_and_an_output_wins(whole, tmp_path, monkeypatch, capsys):
    shutil.copytree(whole, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for words, path in ((["run"], "run/report.html"), (["run", "run"], "report.html")):
        assert cli.main(["report", *words]) == 0
        assert capsys.readouterr().out == f"{path}\n"
        assert (tmp_path / path).is_file()


def test_neither_the_job_script_nor_secrets_are_in_a_report(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/job.sh").write_text("export WANDB_API_KEY=hunter2\n")
    words = ["/usr/bin/python3", "train.py", "--hf-token", "hunter2", "x" * 500 + " DB_PASSWORD=hunter2", "--lr=3"]
    changed(tmp_path / "run/launches.jsonl", lambda record: record | {"command": words})
    with (tmp_path / "run/recipe.yaml").open("a") as recipe:
        recipe.write("  model_args: {hf_token: hunter2}\n")
    found = reported(tmp_path / "run")
    assert "hunter2" not in json.dumps(found)
    assert found["origin"]["command"].startswith("python train.py --hf-token '***' ")
    assert found["origin"]["command"].endswith(" --lr=3")


def test_a_recipes_own_code_is_not_run(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "run")
    recipe = (tmp_path / "run/recipe.yaml").read_text()
    own = "his_net:net\n  loss: his_net:loss\n  dataset: his_net:data"
    (tmp_path / "run/recipe.yaml").write_text(
        re.sub(r"(?m)^  dataset: .*\n", "", re.sub(r"(?<=\n  model: ).*", own, recipe))
    )
    (tmp_path / "his_net.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    assert "his_net:net" in reported(tmp_path / "run")["origin"]["recipe"]
    assert not (tmp_path / "imported").exists()


def test_memory_does_not_grow_with_what_launches_hold(tmp_path):
    """Python takes 64 bytes for each list of three."""
    line = b'{"kind": "launch", "x": [' + b"[]," * 300_000 + b"0]}\n"
    peaks = []
    for count in (3, 12):
        (tmp_path / "launches.jsonl").write_bytes(line * count)
        tracemalloc.start()
        assemble.run_report(tmp_path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


MEASURED = """
import sys
from hvdtrain import cli
sys.path.insert(0, sys.argv[3])
from costs import peak_mib
assert cli.main(["report", sys.argv[1], "--output", sys.argv[2]]) == 0
print(peak_mib())
"""


@pytest.mark.slow
def test_a_million_lines_take_little_memory(tmp_path):
    run = report_folders.finished(tmp_path / "run")
    first = {key: each for key, each in run.metrics[0].items() if key != "step"}
    with (tmp_path / "run" / "metrics.jsonl").open("w") as file:
        for step in range(1, 1_000_001):
            file.write(json.dumps({"step": step, **first}) + "\n")
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "run"), str(tmp_path / "page.html"), str(SUPPORT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) * 2**20 < 500e6
    assert (tmp_path / "page.html").stat().st_size < 1_000_000
