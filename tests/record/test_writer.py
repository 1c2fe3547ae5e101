"""Checkpoints written beside training: the same bytes, one at a time, whole before the run has ended.
As often as they are worth: what rank 0 measures, and the interval that follows."""

import contextlib
import os
import shutil
import subprocess
import threading
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.core.metrics import Totals
from hvdtrain.core.progress import Progress, UserSampling
from hvdtrain.core.recipe import of_program
from hvdtrain.errors import DivergedError, LoopError, OutputError, StoppedError
from hvdtrain.files import read_json
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks.world import World
from hvdtrain.record import checkpoint
from hvdtrain.record.checkpoint import ARRAYS, META, Checkpoint, commit, committed, newest
from hvdtrain.record.folder import hold
from hvdtrain.record.journal import Journal
from hvdtrain.record.writer import FIRST, Checkpointing, Pace, Writer, daly
from hvdtrain.run.loop import Hooks
from hvdtrain.run.process import RunListener
from hvdtrain.run.samples import Samples
from hvdtrain.run.session import check_intervals

COMMIT = commit


class Live:
    """A state of one array."""

    scaler = SimpleNamespace(state_dict=dict)

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        self.x, self.held = np.zeros(100_000), np.zeros(100_000)

    def snapshot(self) -> dict[str, np.ndarray]:
        np.copyto(self.held, self.x)
        return {"x": self.held}

    def values(self) -> dict:
        return {}

    def share(self, engine: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path):
    folder = hold(tmp_path / "run")
    yield folder
    folder.lock.close()


@pytest.fixture
def gate(monkeypatch):
    """Commits begin at once and end when `gate` is set; `gate.most` is how many were under way together."""
    gate = threading.Event()
    gate.under_way = gate.most = 0

    def slowly(*given):
        gate.under_way += 1
        gate.most = max(gate.most, gate.under_way)
        gate.wait()
        path = COMMIT(*given)
        gate.under_way -= 1
        return path

    monkeypatch.setattr(checkpoint, "commit", slowly)
    yield gate
    gate.set()


@pytest.fixture
def opens(gate, monkeypatch):
    """The gate is open while training waits for a commit that is under way."""
    wait = futures.wait

    def waits(under_way, *limit):
        if under_way:
            gate.set()
        wait(under_way, *limit)
        gate.clear()

    monkeypatch.setattr(futures, "wait", waits)


def status_of(folder) -> dict:
    return read_json(folder.path / "status.json") if (folder.path / "status.json").exists() else {}


def test_the_bytes_are_those_of_one_written_in_the_loop(folder, gate, tmp_path):
    live, writer, meta = Live(), Writer(folder, 2), {"step": 7, "model": "m", "scaler": {"scale": 2.0}}
    live.x[:] = np.arange(100_000)
    path = COMMIT(tmp_path / "in the loop", Checkpoint({"x": live.x.copy()}, {**meta, "scaler": {"scale": 2.0}}), 2)
    writer.write(live, meta)
    live.x[:] = -1  # training has gone on
    meta["scaler"]["scale"] = 4.0
    assert writer.is_writing and not committed(folder.checkpoints) and not status_of(folder)
    gate.set()
    writer.wait()
    assert not writer.is_writing
    for name in (ARRAYS, META):
        assert (folder.checkpoints / "step-00000007" / name).read_bytes() == (path / name).read_bytes()
    assert status_of(folder)["step"] == 7


def test_never_two_at_once_and_one_snapshot(folder, gate, opens):
    live, writer = Live(), Writer(folder, 9)
    writer.write(live, {"step": 1})
    writer.write(live, {"step": 2})
    assert committed(folder.checkpoints)[0].name == "step-00000001"
    for step in range(3, 20):
        live.x[:] = step
        writer.write(live, {"step": step})
    writer.wait()
    assert gate.most == 1
    assert newest(folder.checkpoints)[0].arrays["x"].tolist() == [19.0] * 100_000


def test_one_thread_writes_all(folder, monkeypatch):
    seen, live, writer = [], Live(), Writer(folder, 2)
    monkeypatch.setattr(checkpoint, "commit", lambda *_: seen.append(threading.current_thread()))
    for step in range(4):
        writer.write(live, {"step": step})
        writer.wait()
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert seen[0] is not threading.current_thread()


def test_what_goes_wrong_beside_is_raised_in_training_once(folder, monkeypatch):
    def full(*_):
        raise OutputError("checkpoint x could not be written: No space left on device")

    monkeypatch.setattr(checkpoint, "commit", full)
    live, writer = Live(), Writer(folder, 2)
    for raises in (writer.wait, lambda: writer.write(live, {"step": 2})):
        writer.write(live, {"step": 1})
        with pytest.raises(OutputError, match=r"^checkpoint x could not be written: No space left on device$"):
            raises()
        writer.wait()
    writer.write(live, {"step": 3})
    futures.wait([writer._last])
    with pytest.raises(OutputError):
        writer.check_written()
    writer.check_written()
    assert not status_of(folder)


def removed(path):
    shutil.rmtree(path)


def replaced(path):
    path.rename(path.with_name("aside"))
    path.mkdir()


def unmounted(path):
    subprocess.run(["umount", "--lazy", path], check=True)


def read_only(path):
    trigger = Path(f"/sys/fs/ext4/{Path(files_system_of(path)).name}/trigger_fs_error")
    with contextlib.suppress(OSError):  # the write itself fails too
        trigger.write_text("provoked")


def files_system_of(path):
    """The device that is mounted there."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return next(device for device, where, *_ in mounts if where == str(path))


GONE = r"^the run folder .* was removed, replaced or unmounted while the run wrote to it; nothing more is written\. "
LOST = {removed: GONE, replaced: GONE, unmounted: GONE, read_only: "could not be written: .*Read-only file system"}


@pytest.mark.parametrize("lose", LOST, ids=lambda lose: lose.__name__)
def test_a_lost_folder_ends_the_run_at_its_next_write_and_is_not_made_anew(lose, tmp_path, request):
    path = tmp_path / "run"
    if lose in (unmounted, read_only):
        path.mkdir()
        image = tmp_path / "image"
        image.write_bytes(bytes(4 << 20))
        for command in (["mkfs.ext4", "-q", "-F", image], ["mount", "-o", "loop,errors=remount-ro", image, path]):
            if not shutil.which(command[0]) or subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("needs ext4 on a loop device: apt install e2fsprogs, and run the tests as root")
        request.addfinalizer(lambda: subprocess.run(["umount", "--lazy", path], capture_output=True, check=False))
    folder = hold(path)
    request.addfinalizer(folder.lock.close)
    writer = Writer(folder, 2)
    writer.write(Live(), {"step": 1, "scaler": {}})
    writer.wait()
    lose(path)
    writer.write(Live(), {"step": 2, "scaler": {}})
    with pytest.raises(OutputError, match=LOST[lose]):
        writer.wait()
    RunListener.status(SimpleNamespace(folder=folder), "failed", "so it ends")
    if lose is not read_only:
        with pytest.raises(OutputError, match=GONE):
            folder.write_status("finished")
        assert not path.exists() or not any(path.iterdir())


def test_a_log_line_finds_that_the_folder_is_lost(hooks, folder):
    step(hooks)
    hooks.checkpointing.wait()
    replaced(folder.path)
    hooks.run.recipe = of_program(log_every_steps=1, checkpoint_every_steps=1000)
    hooks.checkpointing._every = 1000
    with pytest.raises(OutputError, match=GONE):
        step(hooks)


def test_a_full_disk_keeps_room_for_the_status(tiny_disk):
    folder = hold(tiny_disk / "run")
    folder.write_status("running", step=1)
    with contextlib.suppress(OSError), (tiny_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    with pytest.raises(OSError, match="No space left"):
        folder.write_status("running", step=2)
    folder.write_status("failed", error="No space left on device")
    assert status_of(folder) == {**status_of(folder), "state": "failed", "error": "No space left on device"}
    folder.lock.close()


def test_a_run_that_fails_waits_a_little_and_keeps_its_status(folder, gate, monkeypatch):
    monkeypatch.setattr("hvdtrain.record.writer.LAST_CHECKPOINT", 0.1)
    writer = Writer(folder, 2)
    writer.write(Live(), {"step": 1})
    waits, wait = [], futures.wait
    monkeypatch.setattr(futures, "wait", lambda *given: waits.append(given) or wait(*given))
    writer.leave()
    assert waits == [([writer._last], 0.1)]
    folder.write_status("failed", error="x")
    gate.set()
    writer.wait()
    assert newest(folder.checkpoints)[0].meta["step"] == 1  # written all the same
    assert status_of(folder)["state"] == "failed"


def test_a_forked_child_has_no_writer_to_wait_for(folder, gate):
    writer = Writer(folder, 2)
    writer.write(Live(), {"step": 1})
    if (child := os.fork()) == 0:
        writer.wait()
        os._exit(int(writer.is_writing))
    assert os.waitpid(child, 0)[1] == 0
    assert writer.is_writing


class StoppingWorld(World):
    """Stops after step 3."""

    made = 0

    def stops_after_step(self) -> bool:
        self.made += 1
        return self.made >= 3


@pytest.fixture
def hooks(folder):
    """A run's hooks, over one rank that trains nothing."""
    engine = SimpleNamespace(
        rank=0, size=1, device="cpu", notes=(), waited=None, broadcast=lambda _, meta: meta, sum=np.asarray
    )
    trainer = SimpleNamespace(
        engine=engine,
        state=Live(),
        begun=(),
        events=None,
        totals=lambda: Totals(0.0, 0.0),
        gradient_noise=lambda: None,
        average_statistics=lambda: None,
        fingerprints=lambda: [1],
        after_first_step=list,
        learns=tuple,
        watch=lambda _: None,
        cause="weights",
    )
    run = SimpleNamespace(
        folder=folder,
        recipe=of_program(checkpoint_every_steps=1),
        resume=SimpleNamespace(checkpoint=None),
        reporter=lambda *_: None,
        world=StoppingWorld(Topology.alone()),
        journal=Journal(),
        devices=(),
        topology=SimpleNamespace(host="here"),
        check_finite=lambda *_: None,
        metadata=lambda progress, *_: progress.metadata(),
        code={},
        samples=Samples("off"),
        finish=lambda reporter, step, is_over, early: folder.write_status("finished", step=step),
    )
    return Hooks(run, trainer, UserSampling(10, 100, 1, epochs=2))


def step(hooks) -> None:
    hooks.progress.advance(hooks.length)
    hooks.after_update(0.1)


def test_a_stop_waits_for_the_one_under_way(hooks, folder, opens):
    with pytest.raises(StoppedError):
        while True:
            step(hooks)
    assert [path.name for path in committed(folder.checkpoints)] == ["step-00000002", "step-00000003"]
    assert status_of(folder)["step"] == 3
    assert not hooks.checkpointing.writer.is_writing


def test_the_end_waits_for_the_last_one(hooks, folder, opens):
    with hooks.reported():
        step(hooks)
    assert status_of(folder) == {**status_of(folder), "state": "finished", "step": 1}
    assert newest(folder.checkpoints)[0].meta["step"] == 1


def test_an_error_beside_ends_the_run_at_its_next_step(hooks, monkeypatch):
    def full(*_):
        raise OutputError("checkpoint x could not be written: No space left on device")

    monkeypatch.setattr(checkpoint, "commit", full)
    hooks.checkpointing = Checkpointing(hooks.run.folder, of_program(checkpoint_every_steps=2), 0, np.asarray)
    hooks.run.world = World(Topology.alone())
    step(hooks)
    step(hooks)
    futures.wait([hooks.checkpointing.writer._last])
    with pytest.raises(OutputError, match="No space left"):
        step(hooks)


def test_an_error_of_the_run_is_the_one_that_is_raised(hooks, folder, gate, monkeypatch):
    monkeypatch.setattr("hvdtrain.record.writer.LAST_CHECKPOINT", 0.1)
    with pytest.raises(DivergedError), hooks.reported():
        step(hooks)
        raise DivergedError("nan")
    gate.set()
    hooks.checkpointing.writer.wait()
    assert hooks.progress == Progress(1, sample=10)
    assert status_of(folder)["state"] == "running"  # another one is RankProcess's to write


class Run:
    """Steps of 0.1 s by a clock of our own; beside a checkpoint, which takes three steps, they take 0.12 s."""

    def __init__(self, mtbf_hours: float, stall: float = 0.05, write_seconds: float = 0.36) -> None:
        self.pace, self.now, self.step, self.left = Pace(mtbf_hours, 100), 0.0, 100, 0
        self.stall, self.write_seconds = stall, write_seconds
        self.made: list[int] = []
        self.lines: list[str] = []

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.12 if self.left else 0.1
            self.step, self.left = self.step + 1, max(0, self.left - 1)
            self.pace.costs.stepped(self.now, is_writing=self.left > 0)
            if self.pace.due(self.step):
                self.checkpoint()

    def checkpoint(self) -> None:
        stall = self.stall if self.made else 1.0  # the first one takes the memory
        self.now, self.left = self.now + stall, 3
        self.made.append(self.step)
        self.pace.costs.written(stall, self.write_seconds)
        interval = self.pace.wanted()
        self.pace.renew(self.step, interval)
        if line := self.pace.news(interval):
            self.lines.append(line)


def test_the_interval_is_that_of_the_measured_cost():
    run = Run(mtbf_hours=1.0)
    run.go(1000)
    assert run.made[:3] == [100 + FIRST, 100 + 2 * FIRST, 100 + 3 * FIRST]
    assert run.pace.costs.step_seconds == pytest.approx(0.1)
    steps = run.made[4] - run.made[3]
    assert steps == pytest.approx(daly(0.11, 3600) / 0.1, abs=1)
    assert run.lines == [
        f"a checkpoint every {steps} steps ({steps / 10:.1f} s): one costs training 110 ms and is written in 0.4 s; "
        "mtbf_hours 1"
    ]


def test_no_checkpoint_before_the_one_before_is_written():
    run = Run(mtbf_hours=1e-6, write_seconds=1.55)
    run.go(200)
    assert run.made[4] - run.made[3] == 16


def test_the_epochs_end_is_no_step():
    run = Run(mtbf_hours=1.0)
    for _ in range(30):
        run.go(10)
        run.now += 5
        run.pace.costs.pause()
    assert run.pace.costs.step_seconds == pytest.approx(0.1)


def test_another_cost_is_reported_again():
    run = Run(mtbf_hours=0.01)
    run.go(1000)
    run.stall = 2.0
    run.go(3000)
    assert len(run.lines) > 1
    assert run.lines[-1] != run.lines[0]


def test_ranks_that_do_not_measure_keep_the_interval_that_they_are_given():
    pace = Pace(1.0, 0)
    assert next(step for step in range(50) if pace.due(step)) == FIRST
    pace.renew(FIRST, 7)
    assert next(step for step in range(FIRST, 50) if pace.due(step)) == FIRST + 7
    assert pace.news(7) is None


MISUSED = {
    "auto alone": (
        {"checkpoint_every_steps": "auto"},
        "checkpoint_every_steps='auto' needs mtbf_hours, the mean hours between failures of the whole job: those of "
        "one node divided by the job's nodes.",
    ),
    "text": ({"checkpoint_every_steps": "often"}, "checkpoint_every_steps must be a number or 'auto', got 'often'."),
    "text elsewhere": ({"keep_checkpoints": "auto"}, "keep_checkpoints must be a number, got 'auto'."),
    "no time": ({"mtbf_hours": 0.0}, "mtbf_hours must be greater than 0, got 0.0."),
    "none kept": ({"keep_checkpoints": 0}, "keep_checkpoints must be at least 1, got 0."),
}


@pytest.mark.parametrize(("given", "message"), MISUSED.values(), ids=MISUSED)
def test_a_loop_of_ones_own_is_refused_in_one_line(given, message):
    with pytest.raises(LoopError) as caught:
        check_intervals(of_program(**given))
    assert str(caught.value) == message


def test_half_an_hour_is_a_time():
    check_intervals(of_program(checkpoint_every_steps="auto", mtbf_hours=0.5))
