"""What the tests of FaultTolerance under Keras and Lightning share."""

import json
import signal
from pathlib import Path
from typing import Any

import warm
from paths import SUPPORT
from ranks import Ended, held, left_by, run

from hvdtrain.record import checkpoint

Case = dict[str, Any]


def trained(kind: str, launcher: str, ranks: int, folder: Path, cases: dict[str, Case], **environ: str) -> Ended:
    """Runs KIND_fault_tolerance.py, which trains these cases, each in the folder of its name; returns how it ended."""
    given = [{"folder": str(folder / name), **case} for name, case in cases.items()]
    program = SUPPORT / f"{kind}_fault_tolerance.py"
    return run(launcher, ranks, warm.command(kind, program, folder, json.dumps(given)), **environ)


def digests(folder: Path) -> list[dict[str, str]]:
    """The digest of the weights by case, for each of two ranks."""
    return [{Path(case).name: digest for case, digest in rank.items()} for rank in left_by(2, folder)]


def position(folder: Path) -> tuple[int, int, int]:
    """Step and epoch of the newest checkpoint, and how many of the epoch's examples were used."""
    meta = checkpoint.metadata(checkpoint.committed(folder / "checkpoints")[-1])
    return meta["step"], meta["epoch"], meta["sample"]


def state(folder: Path) -> str:
    return json.loads((folder / "status.json").read_text())["state"]


def kill(kind: str, folder: Path, case: Case) -> None:
    """Trains the case as "killed"; its last rank gets SIGKILL inside an epoch."""
    ended = trained(kind, "mpi", 2, folder, {"killed": {**case, "at": 9, "signal": signal.SIGKILL}})
    assert ended.code != 0
    assert any("rank 1 on " in line and "ended without a message" in line for line in ended.lines), ended.err
    assert position(folder / "killed") == (8, 1, 16), position(folder / "killed")


def stop(kind: str, folder: Path, case: Case) -> None:
    """Trains the case as "stopped"; its last rank gets SIGTERM inside an epoch."""
    ended = trained(kind, "mpi", 2, folder, {"stopped": {**case, "at": 9, "signal": signal.SIGTERM}}, **held(9))
    assert ended.code == 128 + signal.SIGTERM, ended.err
    assert any("SIGTERM: stopped after step" in line for line in ended.lines), ended.err
    assert position(folder / "stopped") == (11, 1, 40), position(folder / "stopped")
    assert state(folder / "stopped") == "stopped", state(folder / "stopped")


def check_that_a_hang_is_named(kind: str, folder: Path, case: Case) -> None:
    ended = trained(kind, "mpi", 2, folder, {"hung": {**case, "at": 5, "signal": signal.SIGSTOP}})
    assert ended.code != 0
    assert any("no heartbeat from rank 1 on " in line for line in ended.lines), ended.err
