"""Trackers: what wandb and MLflow have stored of a run, killed and resumed; and trackers that raise, hang, die and
find the disk full, of which a training notices nothing."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
import warm
from marks import marked, rows
from ranks import SMALL, cold_command, held, needs_torch, run, started, wait_for_step, wait_until

from hvdtrain.core.metrics import Totals
from hvdtrain.errors import EngineUnavailable, RecipeError, StoppedError
from hvdtrain.record import trackers
from hvdtrain.record.reporter import Reporter
from hvdtrain.record.trackers import Trackers
from hvdtrain.run.options import parse_run

HOUSE = str(Path(trackers.__file__).parents[3])
BLOCK = 1 << 15


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A machine under load may take long to import a library."""
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 280.0)
    monkeypatch.setattr(trackers, "STOP_SECONDS", 280.0)


def wandb_records(path: Path) -> list:
    """Of a .wandb file: blocks of 32 KiB of pieces, each with a header of checksum, length and type."""
    # Not above: both libraries take seconds, in every process that collects tests.
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, whole, found = path.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        size, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        whole += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in {1, 4}:  # whole, last
            found.append(Record.FromString(whole))
            whole = b""
    return found


def wandb_runs(folder: Path) -> list[list]:
    return [wandb_records(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def values(items) -> dict:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def history(records: list) -> list[dict]:
    return [values(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]


def config(records: list) -> dict:
    return values(next(record.run for record in records if record.WhichOneof("record_type") == "run").config.update)


def mlflow_client(store: Path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowClient(store.as_uri())


def curve(records: list[dict], name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in records if name in record]


@pytest.mark.slow
@needs_torch
@pytest.mark.launched
def test_killed_and_resumed_it_is_one_run(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    argv = ["linear", "--epochs", 6, "--log-every-steps", 1, "--checkpoint-every-steps", 7, "--output", folder]
    argv += ["--tracker", "wandb", "mlflow", "tensorboard", "--best", "lowest loss"]
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:1"}
    command = [sys.executable, str(SMALL), "hvdtrain.torch", *map(str, argv)]
    with started("alone", 1, command, **nowhere, **held(45)) as ranks:
        wait_for_step(ranks, folder, 45)
        ranks.process.kill()
        assert ranks.left() == []

    kept = {name: folder / "trackers" / f"{name}.json" for name in ("wandb", "mlflow")}
    first = {name: json.loads(path.read_text()) for name, path in kept.items()}
    before, continues = {path: path.stat().st_ino for path in kept.values()}, tmp_path / "continues"
    assert {of["last"]["loss"] >= 44 for of in first.values()} == {True}  # what was in the pipe is not lost
    with started("alone", 1, command, **nowhere, **held(55, until=continues)) as ranks:
        # Else a machine may take longer to load the libraries than the end of a run waits for them.
        wait_until(lambda: all(path.stat().st_ino != number for path, number in before.items()))
        continues.touch()
        ended = ranks.wait().good()
    assert "resuming from step" in ended.out
    assert "tracker wandb: offline (127.0.0.1 does not answer); to sync: wandb sync" in ended.out
    assert "tracker" not in ended.err
    assert "wandb" not in ended.err

    recorded = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in recorded for name in record} - {"kind", "step"}
    assert names >= {"epoch", "loss", "lr", "examples_per_second", "train_loss", "valid_loss", "seconds"}

    client = mlflow_client(tmp_path / "mlruns", monkeypatch)
    (found,) = client.search_runs([client.get_experiment_by_name("linear").experiment_id])
    assert (found.info.run_id, found.info.status, found.info.run_name) == (first["mlflow"]["id"], "FINISHED", "run")
    assert found.data.params["recipe.base_lr"] == "0.5"
    assert found.data.params["plan.total_steps"] == "60"
    assert {"framework", "engine", "launcher", "hosts", "job_id", "versions.torch", "git"} - set(found.data.tags) <= {
        "git"
    }
    for name in ("loss", "lr", "train_loss", "valid_loss"):
        points = [(point.step, point.value) for point in client.get_metric_history(found.info.run_id, name)]
        assert points == curve(recorded, name), name

    runs = wandb_runs(folder)
    rows = [row for records in runs for row in history(records)]
    assert len(runs) == 2
    assert {path.parent.name.rpartition("-")[2] for path in folder.glob("wandb/offline-*/*.wandb")} == {
        first["wandb"]["id"]
    }
    for name in ("loss", "lr", "train_loss", "valid_loss"):
        assert curve(rows, name) == curve(recorded, name), name
    stored = config(runs[-1])
    assert set(stored) - {"_wandb"} == {"recipe", "plan", "framework", "engine", "launcher", "ranks", "hosts",
                                        "best", "job_id", "versions", "git"}  # fmt: skip
    assert stored["recipe"]["model"] == "linear"
    assert stored["versions"]["torch"] and stored["best"] == "lowest valid_loss"
    metrics = [record.metric for record in runs[-1] if record.HasField("metric")]
    assert [each.name for each in metrics if each.summary.min] == ["valid_loss"]


@pytest.mark.slow
def test_a_training_that_begins_anew_has_a_new_run(tmp_path, monkeypatch):
    for resumes in (False, True, False):
        of = Trackers(("mlflow",), tmp_path / "run", "linear", {"recipe": {"base_lr": 0.5 + resumes}}, resumes)
        of.add({"loss": 1.0, "top@5": 0.5}, 1)
        assert [line for line in of.close("stopped") if "in file:" not in line] == []
    client = mlflow_client(tmp_path / "mlruns", monkeypatch)
    new, old = client.search_runs([client.get_experiment_by_name("linear").experiment_id])
    assert [len(client.get_metric_history(one.info.run_id, "loss")) for one in (new, old)] == [1, 1]
    assert old.data.metrics["top_5"] == 0.5
    assert (old.data.params["recipe.base_lr"], old.data.tags["recipe.base_lr"]) == ("0.5", "1.5")
    assert (old.info.status, new.info.status) == ("KILLED", "KILLED")


@pytest.mark.slow
def test_the_users_own_settings_win(tmp_path, monkeypatch):
    store = tmp_path / "store"
    for name, value in {
        "MLFLOW_TRACKING_URI": store.as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_EXPERIMENT_NAME": "mine",
        "WANDB_MODE": "offline",
        "WANDB_PROJECT": "mine",
        "WANDB_RUN_ID": "chosen",
    }.items():
        monkeypatch.setenv(name, value)
    of = Trackers(("mlflow", "wandb"), tmp_path / "run", "linear", {})
    of.add({"loss": 1.0}, 1)
    lines = of.close("finished")
    assert any(f"in {store.as_uri()}" in line for line in lines)
    assert any("tracker wandb: offline; to sync: wandb sync" in line for line in lines)
    client = mlflow_client(store, monkeypatch)
    assert len(client.search_runs([client.get_experiment_by_name("mine").experiment_id])) == 1
    ((records),) = wandb_runs(tmp_path / "run")
    (about,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (about.run_id, about.project) == ("chosen", "mine")


def test_wandb_is_offline_where_its_server_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    of = Trackers(("wandb",), tmp_path, "linear", {})
    of.add({"loss": 1.0}, 1)
    (line,) = of.close("finished")
    assert line.startswith("tracker wandb: offline (127.0.0.1 does not answer); to sync: wandb sync ")
    assert "x" * 40 not in "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())


def test_a_server_answers_or_not(monkeypatch):
    from hvdtrain.record.trackers.wandb import answers

    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.delenv("http_proxy", raising=False)
        monkeypatch.setenv("no_proxy", "")
        assert answers(here)
        monkeypatch.setenv("http_proxy", here)
        assert answers("http://beyond.invalid")
    assert not answers(here)
    monkeypatch.delenv("http_proxy")
    found = threading.Event()

    def looks_up(*_):  # for ever
        found.wait()
        raise OSError

    monkeypatch.setattr(socket, "create_connection", looks_up)
    assert not answers("http://beyond.invalid", 0.5)
    found.set()


LIBRARY = """
import os, sys, time
class Settings:
    model_fields, model_fields_set = {}, {"mode"}
    def __init__(self, **given): pass
class Run:
    offline, url, id, summary = False, "", "x", {}
    def define_metric(self, *given, **named): pass
    def log(self, row): on_point()
    def finish(self, exit_code): pass
class setup:
    settings = Settings()
def init(**given):
    on_start()
    return Run()
def nothing(): pass
def fails(): raise OSError("no\\nservice")
def hangs(): time.sleep(1000)
def dies(): os._exit(3)
def prints():
    print("hello"); print("there", file=sys.stderr, flush=True)
"""
LAGS = "tracker wandb lags behind: it misses points; metrics.jsonl has them all"
HUNG = ["tracker wandb did not end within 1 s; it may miss the last points", "tracker wandb misses N points; "
        "metrics.jsonl has them"]  # fmt: skip
FAILING = {  # what it does at the start, at every point; lines of the log
    "prints": ("prints", "prints", []),
    "raises at the start": (
        "fails",
        "nothing",
        ["tracker wandb: it cannot start, the training continues without it: OSError: no service"],
    ),
    "raises at every point": (
        "nothing",
        "fails",
        ["tracker wandb: it fails, the training continues: OSError: no service"],
    ),
    "dies": ("nothing", "dies", ["tracker wandb ended with exit code 3; see trackers/wandb.log"]),
    "hangs at the start": ("hangs", "nothing", [LAGS, *HUNG]),
    "hangs at every point": ("nothing", "hangs", [LAGS, *HUNG]),
}


@pytest.fixture
def library(tmp_path, monkeypatch):
    """library(on_start, on_point): puts such a wandb in the place of the installed one."""

    def put(on_start: str, on_point: str) -> None:
        (tmp_path / "library").mkdir()
        text = f"{LIBRARY}\non_start, on_point = {on_start}, {on_point}\n"
        (tmp_path / "library" / "wandb.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/library:{HOUSE}")

    return put


@pytest.mark.parametrize(("on_start", "on_point", "lines"), marked(rows(FAILING), slow={"hangs at the start"}))
def test_no_tracker_stops_or_slows_a_training(on_start, on_point, lines, library, tmp_path, monkeypatch, capfd):
    library(on_start, on_point)
    hangs = "hangs" in {on_start, on_point}
    if hangs:
        monkeypatch.setattr(trackers, "CLOSE_SECONDS", 1.0)
    monkeypatch.setattr(trackers, "QUEUE_BYTES", 4096)
    of = Trackers(("wandb",), tmp_path, "linear", {})
    pid = of._processes[0]._process.pid
    logged = [line for step in range(2000 if hangs else 5) for line in of.add({"loss": 1.0}, step)]
    logged += of.close("finished")
    assert [re.sub(r"\d+ points", "N points", line) for line in logged] == lines
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert ("hello" in (tmp_path / "trackers" / "wandb.log").read_text()) == (on_start == "prints")


@pytest.mark.parametrize(
    "plant", [lambda log, to: log.symlink_to(to), lambda log, _: os.mkfifo(log)], ids=["link", "pipe"]
)
def test_a_log_in_somebody_elses_place_is_not_opened(plant, tmp_path):
    precious, log = tmp_path / "precious", tmp_path / "trackers" / "wandb.log"
    precious.write_text("kept")
    log.parent.mkdir()
    plant(log, precious)
    of = Trackers(("wandb",), tmp_path, "linear", {})
    (line,) = of.close("finished")
    assert line.startswith("tracker wandb could not be started: [Errno ")
    assert precious.read_text() == "kept"


def test_signals_to_all_of_a_step_leave_it_alone(library, tmp_path):
    library("nothing", "nothing")
    of = Trackers(("wandb",), tmp_path, "linear", {})
    wait_until((tmp_path / "trackers" / "wandb.json").exists)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(of._processes[0]._process.pid, number)
    of.add({"loss": 1.0}, 1)
    assert of.close("stopped") == []
    assert json.loads((tmp_path / "trackers" / "wandb.json").read_text()) == {"id": "x", "last": {"loss": 1}}


@needs_torch
@pytest.mark.launched
def test_a_run_ends_well_with_a_tracker_that_fails(library, tmp_path):
    library("fails", "fails")
    argv = ["linear", "--epochs", 2, "--tracker", "wandb", "--output", tmp_path / "run"]
    ended = run("alone", 1, cold_command("torch", *argv), PYTHONPATH=os.environ["PYTHONPATH"]).good()
    assert "INFO - tracker wandb: it cannot start, the training continues without it: OSError: no service" in ended.out
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"
    assert not list((tmp_path / "run").glob("events.*"))  # TensorBoard was not asked for


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


def test_a_full_disk_at_the_start(tiny_disk):
    fill(tiny_disk)
    of = Trackers(("wandb", "mlflow"), tiny_disk / "run", "linear", {})
    lines = of.add({"loss": 1.0}, 1) + of.close("finished")
    assert [line.partition(":")[0] for line in lines] == [
        "tracker wandb could not be started",
        "tracker mlflow could not be started",
    ]
    assert all("No space left on device" in line for line in lines)


@pytest.mark.slow
def test_a_disk_that_fills_up(tiny_disk):
    of = Trackers(("mlflow",), tiny_disk / "run", "linear", {})
    lines = []
    wait_until(lambda: lines.extend(of.add({"loss": 1.0}, 1)) or lines)
    assert "in file:" in lines[0]
    fill(tiny_disk)
    lines = [line for step in range(2, 5) for line in of.add({f"a{step}": 1.0}, step)] + of.close("finished")
    assert len(lines) == 1
    assert lines[0].startswith("tracker mlflow: it fails, the training continues: ")
    assert "No space left on device" in lines[0]


class Kept(Trackers):
    """Keeps what it is given."""

    def __init__(self):
        self.given = []

    def add(self, metrics, step):
        self.given.append((dict(metrics), step))
        return ["a line"]

    def close(self, state):
        self.given.append(state)
        return ["the end"]


class Broken:
    """TensorBoard's writer, on a disk that takes nothing."""

    def add_scalar(self, *_):
        raise OSError(28, "No space left on device")

    flush = close = add_scalar


ENDINGS = {
    "finished": None,
    "stopped": StoppedError(3, "SIGUSR1", 138),
    "failed": OSError(5, "Input/output error"),
    "stopped by Ctrl-C": KeyboardInterrupt(),
}


@pytest.mark.parametrize(("state", "error"), ENDINGS.items(), ids=ENDINGS)
def test_the_reporter_hands_on_its_mapping_and_the_state(state, error, tmp_path, capsys):
    kept = Kept()
    with (
        pytest.raises(type(error)) if error else contextlib.nullcontext(),
        Reporter(tmp_path, Broken(), 0, trackers=kept) as reporter,
    ):
        reporter.steps(20, 1, Totals(loss=30.0, count=8.0), 0.125, 2.0)
        if error:
            raise error
    (metrics, step), ending = kept.given
    recorded = json.loads((tmp_path / "metrics.jsonl").read_text())
    del recorded["time"]  # trackers have a clock of their own
    assert {"kind": "step", "step": step, **metrics} == recorded
    assert ending == state.partition(" ")[0]
    out = capsys.readouterr().out
    assert "INFO - a line\n" in out
    assert "INFO - the end\n" in out
    ends = "INFO - tracker tensorboard ends: OSError: [Errno 28] No space left on device\n"
    assert out.count(ends) == out.count("tensorboard") == 1


FAILS = """
import pathlib
import time

import torch
import hvdtrain.torch as ht

with ht.join() as world:
    model = torch.nn.Linear(1, 1)
    run = world.run("run", model, torch.optim.SGD(model.parameters(), lr=0.1), trackers=["mlflow"])
    while not list(pathlib.Path().glob("mlruns/*/*/meta.yaml")):  # on a busy machine MLflow loads for long
        time.sleep(0.1)
    raise RuntimeError("a fault of the user's")
"""


@pytest.mark.slow
@needs_torch
def test_a_loop_of_ones_own_hands_on_how_it_ended(tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text(FAILS)
    assert run("alone", 1, warm.command("torch", "fails.py"), cwd=tmp_path).code == 1
    client = mlflow_client(tmp_path / "mlruns", monkeypatch)
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert found.info.status == "FAILED"


REFUSED = {
    "another name": (["tensorbord"], r"--tracker must be .*, got 'tensorbord'; --help lists the flags\."),
    "nothing": ([], r"--tracker needs a value; --help lists the flags\."),
    "none and another": (["none", "wandb"], r"--tracker none stands alone, got none wandb; drop none or the others\."),
}


@pytest.mark.parametrize(("names", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(names, message):
    with pytest.raises(RecipeError, match=f"^{message}$"):
        parse_run("x", ["linear", "--tracker", *names])


TAKEN = {
    "left out": ([], ("tensorboard",)),
    "several": (["--tracker", "wandb", "mlflow", "--epochs", "2"], ("wandb", "mlflow")),
    "with =": (["--tracker=mlflow"], ("mlflow",)),
}


@pytest.mark.parametrize(("argv", "names"), TAKEN.values(), ids=TAKEN)
def test_taken(argv, names):
    assert parse_run("x", ["linear", *argv])[1].tracker == names


MISSING = """
import sys
from hvdtrain.run import main
from hvdtrain.record import trackers
trackers.check_installed(("wandb", "mlflow"))
trackers.Trackers(("wandb", "mlflow")).close("finished")
print({"wandb", "mlflow"} & {*sys.modules}, flush=True)
trackers.TRACKERS["wandb"] = "not_there"
sys.exit(main.main("torch", ["linear", "--tracker", "wandb"], None))
"""


def test_a_library_that_is_missing_is_refused_before_training(tmp_path, monkeypatch, python):
    (tmp_path / "not_there").mkdir()  # such as wandb leaves in the current folder
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(trackers.TRACKERS, "wandb", "not_there")
    with pytest.raises(EngineUnavailable, match=r"^tracker wandb is not installed; pip install 'hvdtrain\[wandb\]'\.$"):
        trackers.check_installed(("mlflow", "wandb"))
    ended = python("-c", MISSING, environ={"PYTHONPATH": HOUSE})
    assert ended.returncode == 2
    assert ended.stdout == "set()\n"  # no library is imported into the training
    assert ended.stderr.count("\n") == 1
    assert "pip install 'hvdtrain[wandb]'" in ended.stderr
    assert not (tmp_path / "runs").exists()
