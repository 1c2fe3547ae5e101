"""`python tests/support/example_reports.py`: makes docs/reports anew; root, and a quarter of an hour.

Each is of a real run on this machine: digits on two ranks; the same, killed and resumed twice; four ranks on
minicluster of which one node is slowed; a run that fails; a sweep over 1, 2 and 4 ranks; PyTorch beside TensorFlow.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster import minicluster
from paths import REPOSITORY
from slowness import NODES, PROCESSORS, PROGRAM, RATE, RECIPE, slowed, training

REPORTS = REPOSITORY / "docs" / "reports"
TWO_RANKS = ("horovodrun", "-np", "2", "python", "-m")
DIGITS = ("hvdtrain.torch", "digits", "--output")


def launched(*command: object) -> subprocess.Popen[bytes]:
    """The command, with one thread a rank."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.Popen([str(word) for word in command], env=environ)


def report(name: str, *argv: object) -> None:
    """Writes that report from the runs or the sweep."""
    output = REPORTS / f"{name}.html"
    if code := launched(sys.executable, "-m", "hvdtrain", "report", *argv, "--output", output).wait():
        sys.exit(f"report {name} ended with exit code {code}")


def digits() -> None:
    launched(*TWO_RANKS, *DIGITS, "digits").wait()
    report("digits", "digits")


def killed_twice() -> None:
    """Rank 0 is killed after steps 60 and 130, or soon after."""
    folder = Path("killed-twice")
    for step in (60, 130):
        run = launched(*TWO_RANKS, *DIGITS, folder, "--checkpoint-every-steps", 25)
        while last_step(folder) < step:
            if run.poll() is not None:
                sys.exit(f"the run has ended before step {step}")
            time.sleep(0.2)
        os.kill(rank_0(folder), signal.SIGKILL)
        run.wait()
        time.sleep(5)
    launched(*TWO_RANKS, *DIGITS, folder, "--checkpoint-every-steps", 25).wait()
    report("killed_twice", folder)


def slow_node() -> None:
    """The third of four nodes has half of its processor from step 100 on."""
    for name, text in (("slow.py", PROGRAM), ("slow.yaml", RECIPE)):
        Path(name).write_text(text)
    with (
        minicluster(Path.cwd(), "--nodes", NODES, "--rate", RATE, "--cpu-quota", PROCESSORS) as cluster,
        training(cluster, "ddp", "--max-steps", "400", HVDTRAIN_REPORT="off") as run,
    ):
        run.wait_for(100)
        with slowed(cluster, 2, "computing"):  # for good: a processor's part is given back by nobody
            run.wait_for(300)
        run.ranks.process.wait()
        shutil.copytree(run.folder, "slow-node")
    report("slow_node", "slow-node")


def failed() -> None:
    """Without warm-up, and a learning rate a thousand times too high."""
    launched(*TWO_RANKS, *DIGITS, "failed", "--base-lr", "1e6", "--warmup-epochs", 0, "--epochs", 2).wait()
    report("failed", "failed")


def sweep() -> None:
    launched(sys.executable, "-m", "hvdtrain", "bench", "scaling", "--ranks", "1,2,4", "--output", "sweep").wait()
    report("sweep", "--sweep", "sweep")


def comparison() -> None:
    """PyTorch's run is that of `digits`."""
    if not Path("digits").exists():
        digits()
    launched(*TWO_RANKS, "hvdtrain.tensorflow", "digits", "--output", "digits-tensorflow").wait()
    report("comparison", "digits", "digits-tensorflow")


def last_step(folder: Path) -> int:
    """The last one that the run has logged; 0 before the first."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def rank_0(folder: Path) -> int:
    """The process that holds the run folder."""
    lock = (folder / ".lock").resolve()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(file.resolve() == lock for file in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:  # it has just ended
            continue
    sys.exit(f"nobody holds {folder}")


EXAMPLES = {each.__name__: each for each in (digits, killed_twice, slow_node, failed, sweep, comparison)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(EXAMPLES), help=f"left out: {' '.join(EXAMPLES)}")
    parser.add_argument("--folder", type=Path, required=True, help="an empty one for the runs, as /scratch/reports")
    flags = parser.parse_args()
    flags.folder.mkdir(parents=True, exist_ok=True)
    REPORTS.mkdir(exist_ok=True)
    os.chdir(flags.folder)
    for name in flags.names:
        EXAMPLES[name]()


if __name__ == "__main__":
    main()
