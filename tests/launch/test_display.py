"""How a rank shows its progress, in processes below launchers that are programs of their names."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from ranks import clean_environ

PROGRAM = """
import os, pty, subprocess, sys

how, *command = sys.argv[1:]
match how:
    case "pipe":  # as horovodrun, srun and torchrun --tee read their ranks
        print(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout, end="", flush=True)
    case "terminal":  # as mpirun
        pty.spawn(command)
    case "same":  # as torchrun
        subprocess.run(command)
"""
ASKS = "import sys; from hvdtrain.launch.display import screen; open(sys.argv[2], 'w').write(str(screen(sys.argv[1])))"
JOB, BATCH = {"SLURM_JOB_ID": "12"}, {"SLURM_JOB_ID": "12", "ENVIRONMENT": "BATCH"}
BAR, LINES, ELSEWHERE, FILE = ("bar", 100), ("lines", 85), ("lines", 65), ("file", None)
MPI = "horovodrun pipe", "mpirun terminal"

CASES = {  # launcher, environment, where the outermost one's stdout goes, what is above the rank, expected
    "alone": ("alone", {}, "terminal", (), BAR),
    "at a dumb terminal": ("alone", {"TERM": "dumb"}, "terminal", (), ("lines", 100)),
    "alone, into a file": ("alone", {}, "file", (), FILE),
    "alone, into a pipe in a person's job": ("alone", JOB, "pipe", (), FILE),
    "horovodrun over Gloo": ("horovodrun", {}, "terminal", ("horovodrun pipe",), LINES),
    "horovodrun over Gloo, into a file": ("horovodrun", {}, "file", ("horovodrun pipe",), FILE),
    "horovodrun over Gloo, into a file in a person's job": ("horovodrun", JOB, "file", ("horovodrun pipe",), FILE),
    "horovodrun over MPI": ("mpirun", {}, "terminal", MPI, LINES),
    "horovodrun over MPI, into a pipe": ("mpirun", {}, "pipe", MPI, FILE),
    "mpirun": ("mpirun", {}, "terminal", ("mpirun terminal",), LINES),
    "mpirun, into a file": ("mpirun", {}, "file", ("mpirun terminal",), FILE),
    "mpirun of another host": ("mpirun", {}, "terminal", (), FILE),
    "mpirun of another host, a person's job": ("mpirun", JOB, "terminal", (), ELSEWHERE),
    "mpirun of another host, a job's script": ("mpirun", BATCH, "terminal", (), FILE),
    "torchrun": ("torchrun", {}, "terminal", ("torchrun same",), BAR),
    "torchrun --tee": ("torchrun", {}, "terminal", ("torchrun pipe",), LINES),
    "torchrun in mpirun": ("torchrun", {}, "terminal", ("mpirun terminal", "torchrun same"), LINES),
    "srun elsewhere": ("srun", JOB, "pipe", (), ELSEWHERE),
    "srun elsewhere, in a batch script": ("srun", BATCH, "pipe", (), FILE),
    "srun --pty": ("srun", JOB, "terminal", (), BAR),
    "srun --output of each task": ("srun", JOB, "file", (), FILE),
    "torchrun in srun": ("torchrun", JOB, "pipe", ("torchrun pipe",), ELSEWHERE),
    "torchrun in srun in a batch script": ("torchrun", BATCH, "pipe", ("torchrun pipe",), FILE),
}


@pytest.mark.parametrize(("launcher", "environ", "out", "above", "expected"), CASES.values(), ids=CASES)
def test_the_display_of_a_rank(launcher, environ, out, above, expected, tmp_path):
    command = [sys.executable, "-c", ASKS, launcher, str(tmp_path / "answer")]
    for program, how in reversed([each.split() for each in above]):
        (tmp_path / program).write_text(PROGRAM)
        command = [sys.executable, str(tmp_path / program), how, *command]
    parent, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with (tmp_path / "file").open("w") as file:
        ends = {"terminal": terminal, "file": file, "pipe": subprocess.PIPE}
        environ = {**clean_environ(), "TERM": "xterm", **environ}
        subprocess.run(command, stdin=terminal, stdout=ends[out], env=environ, check=True)
    os.close(terminal)
    os.close(parent)
    assert (tmp_path / "answer").read_text() == str(expected)
