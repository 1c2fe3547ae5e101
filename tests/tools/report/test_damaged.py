"""Run folders after power cuts, from full disks, and filled on purpose: the report shows what is
there, and a line on what is not."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import odd_json
import pytest
import report_folders
from paths import SUPPORT
from users import NOBODY, needs_root

from hvdtrain import cli
from hvdtrain.record.reader import CHUNK
from hvdtrain.terminal import Status
from hvdtrain.tools import report, watch
from hvdtrain.tools.report import assemble, page

FILES = ("status.json", "recipe.yaml", "plan.json", "metrics.jsonl", "launches.jsonl")
LINES = ("metrics.jsonl", "launches.jsonl")
IS_ROOT = os.geteuid() == 0


CONTENTS = {  # what becomes of the bytes of each file
    "empty files": lambda content: b"",
    "files of zeros": lambda content: bytes(len(content)),
    "torn files": lambda content: content[: len(content) * 2 // 3],
    "NULs in between": lambda content: content[:200] + bytes(500) + content[200:],
    "invalid UTF-8": lambda content: content.replace(b'"kind"', b'"\xff\xfe"').replace(b"epochs", b"\xc3\x28"),
    "noise": lambda content: random.Random(0).randbytes(20_000),
    "JSON of the wrong shape": lambda content: b'[1]\n"x"\n1\nnull\n{"kind": []}\n{"kind": {}}\n' * 2,
    "a list": lambda content: b"[1, 2]\n",
    "lines backwards": lambda content: b"\n".join(reversed(content.splitlines())),
    "huge lines": lambda content: b'{"x": "' + b"y" * (3 * CHUNK) + b'"}\n' + content,
    "nested too deeply": lambda content: content + b"[" * 20_000 + b"\n" + b'{"kind":' * 20_000 + b"\n",
}
NODES = {  # what is there in the place of each file
    "folders in place of files": Path.mkdir,
    "pipes in place of files": os.mkfifo,
    "links to themselves": lambda path: path.symlink_to(path.name),
    "files that nobody may read": lambda path: path.touch(0o000),
}
ABSENT = {
    "status alone": ("recipe.yaml", "plan.json", "metrics.jsonl", "launches.jsonl"),
    "launches alone": ("recipe.yaml", "plan.json", "metrics.jsonl", "status.json"),
    "without recipe and plan": ("recipe.yaml", "plan.json"),
    "without metrics": ("metrics.jsonl",),
    "without launches": ("launches.jsonl",),
}
NUMBERS = {  # what every number of every record and of the plan is, as JSON has it
    "infinite numbers": "1e400",
    "NaN": "NaN",
    "negative numbers": "-3.5",
    "2^70": str(2**70),
    "a thousand digits": "9" * 1000,
    "zero": "0",
    "the largest float": "1.7e308",
    "tiny": "1e-320",
    "true": "true",
    "lists": "[[1], 2]",
    "texts for numbers": '"\\u001b[2J12"',
}
MANY = {  # records behind the others
    "hundreds of metrics": ({"kind": "step", "step": n + 500, f"name{n}\x1b[2J": 1.0} for n in range(300)),
    "thousands of launches": [{"kind": "launch", "time": 1764000000}] * 3000,
    "thousands of events": ({"kind": "event", "event": "slow", "clock": n, "text": "x" * 900} for n in range(5000)),
    "thousands of kinds of events": ({"kind": "event", "event": f"kind{n}", "clock": n} for n in range(3000)),
}
DAMAGES = (*CONTENTS, *NODES, *ABSENT, *NUMBERS, *MANY)


def changed(path, change):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(record)) + "\n" for record in records))


def damage(folder, name):
    for file in FILES:
        path = folder / file
        if name in CONTENTS:
            path.write_bytes(CONTENTS[name](path.read_bytes()))
        elif name in NODES:
            path.unlink()
            NODES[name](path)
        elif name in NUMBERS and path.suffix != ".yaml":
            path.write_text(re.sub(r"(?<=[ \[])-?\d[\d.e+-]*", lambda _: NUMBERS[name], path.read_text()))
    for file in ABSENT.get(name, ()):
        (folder / file).unlink()
    if name in MANY:
        with (folder / ("metrics.jsonl" if "metrics" in name else "launches.jsonl")).open("a") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in MANY[name])


SPEAK = {
    "without launches": "launches.jsonl is not there",
    "empty files": "launches.jsonl has no records",
    "infinite numbers": "launches.jsonl has no times",
    "files of zeros": "metrics.jsonl: 1 of 1 line cannot be read",
    "torn files": "1 of",
    "folders in place of files": "recipe.yaml cannot be read (",
    "pipes in place of files": "metrics.jsonl cannot be read (it is not a regular file)",
    "links to themselves": "metrics.jsonl cannot be read (it is a link, which is not followed)",
    "huge lines": "metrics.jsonl: 1 of",
    "a list": "status.json holds no object",
    "thousands of launches": "launches after the first",
    "nested too deeply": "status.json is not JSON",
}
"""A part of what `missing` says then."""
WATCHED = {
    "pipes in place of files": "metrics.jsonl cannot be read, launches.jsonl cannot be read",
    "links to themselves": "status.json cannot be read",
    "without recipe and plan": "no plan.json, no recipe.yaml",
    "without launches": "no launches.jsonl",
}
"""A part of the row that `watch` shows then."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with all kinds of records."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    report_folders.slow(folder)
    return folder


def reported(folder) -> dict:
    """The report in every format, and what is watched; the report's values."""
    rows = dict(watch.rows(watch.find(str(folder)).frame(), time.time())) if any(folder.iterdir()) else {}
    assert all(value.isprintable() for value in rows.values())
    document = report.document_of(report.Options(runs=(folder,)), Status(""))
    markdown, values = page.markdown(document), report.to_json(document)
    assert all(letter.isprintable() or letter == "\n" for letter in markdown)
    assert page.render(document)
    return json.loads(values, parse_constant=pytest.fail)["runs"][0]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_reported(name, whole, tmp_path):
    if name == "files that nobody may read" and IS_ROOT:
        pytest.skip("root may read all: run it as another user")
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    damage(folder, name)
    found = reported(folder)
    assert found["verdict"]["headline"]
    assert SPEAK.get(name, "") in "\n".join(found["missing"])
    if name in WATCHED:
        assert WATCHED[name] in dict(watch.rows(watch.find(str(folder)).frame(), time.time()))["missing"]
    if found["waterfall"]:
        parts = sum(part["seconds"] for part in found["waterfall"]["parts"])
        assert parts == pytest.approx(found["waterfall"]["wall_seconds"], rel=1e-6)


def test_a_whole_folder_lacks_nothing(whole):
    assert reported(whole)["missing"] == []


def read(folder):
    """The report and what is watched, of a folder whose files hold anything."""
    assert assemble.run_report(folder).verdict.headline
    assert dict(watch.rows(watch.find(str(folder)).frame(), time.time()))["run"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["status.json", "plan.json"])
def test_odd_json(name, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / name
    good = json.loads(path.read_text())
    for odd in odd_json.texts(good, 40):
        path.write_text(odd, errors="surrogatepass")
        read(tmp_path / "run")


@pytest.mark.parametrize("name", LINES)
def test_odd_lines(name, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / name
    records = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {record["kind"]: record for record in records}
    odd = [text for record in kinds.values() for text in odd_json.texts(record, 150)]
    lines = [*map(json.dumps, kinds.values()), *odd]
    path.write_text("".join(f"{line}\n" for line in lines), errors="surrogatepass")
    read(tmp_path / "run")


def test_no_run_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "loop", "nothing\x1b"):
        assert cli.main(["report", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


PRIVATE = "a private key\n"


@needs_root
@pytest.mark.parametrize("names", [(*FILES, "job.sh", "scaling.json"), ("run.json",)], ids=["a recipe", "own program"])
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_links_of_a_stranger_are_not_followed(names, link, whole, tmp_path, monkeypatch, capsys):
    """Else what root reads stands in a file that the stranger reads."""
    folder, private = tmp_path / "his", tmp_path / "private"
    shutil.copytree(whole, folder)
    private.write_text(PRIVATE)
    private.chmod(0o600)
    for name in ("recipe.yaml", *names):
        (folder / name).unlink(missing_ok=True)
    for name in names:
        link(private, folder / name)
    os.chown(folder, NOBODY, NOBODY)
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in folder.iterdir())
    assert cli.main(["report", "his"]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert sorted(path.name for path in folder.iterdir()) == before
    page_text = (tmp_path / "report.html").read_text()
    assert PRIVATE.strip() not in page_text and PRIVATE.strip() not in json.dumps(reported(folder))
    for name in FILES if len(names) > 1 else names:
        assert f"{name} cannot be read (it is a" in page_text


def test_neither_the_job_script_nor_secrets_are_in_a_report(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/job.sh").write_text("export WANDB_API_KEY=hunter2\n")
    words = ["/usr/bin/python3", "train.py", "--hf-token", "hunter2", "x" * 500 + " DB_PASSWORD=hunter2", "--lr=3"]
    changed(tmp_path / "run/launches.jsonl", lambda record: record | {"command": words})
    with (tmp_path / "run/recipe.yaml").open("a") as recipe:
        recipe.write("  model_args: {hf_token: hunter2}\n")
    found = reported(tmp_path / "run")
    assert "hunter2" not in json.dumps(found)
    assert found["origin"]["command"].startswith("srun --nodes=4 --ntasks=4 python train.py --hf-token '***' ")
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
    for count in (2, 6):
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
