"""Where a rank's output ends, read from trees like /proc: who started it, and where its launcher's output goes."""

import pytest

from hvdtrain.launch.display import display_of, name_of

TTY, PIPE, FILE = "/dev/pts/3", "pipe:[77]", "/home/me/job.log"
SSHD, SHELL, STEPD = ["sshd: me@pts/3"], ["-bash"], ["slurmstepd: [12.0]"]
HOROVODRUN = ["/env/bin/python", "/env/bin/horovodrun", "-np", "2", "python"]
VIA_SHELL = ["/bin/sh", "-c", "mpirun -np 2 python -m hvdtrain.torch digits"]
MPIRUN = ["mpirun", "-np", "2"]
TORCHRUN = ["/env/bin/python3.11", "/env/bin/torchrun", "--nproc-per-node", "2"]
TORCH_MODULE = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
JOB, BATCH = {"SLURM_JOB_ID": "12"}, {"SLURM_JOB_ID": "12", "ENVIRONMENT": "BATCH"}

CASES = {  # launcher, environment, the rank's stdout, [(arguments, stdout) above it, nearest first], expected
    "alone": ("alone", {}, TTY, [(SHELL, TTY), (SSHD, PIPE)], "bar"),
    "alone, into a file": ("alone", {}, FILE, [(SHELL, TTY)], "file"),
    "alone in a batch script": ("alone", BATCH, FILE, [(["/bin/bash", "job.sh"], FILE), (STEPD, FILE)], "file"),
    "alone, into a pipe in a person's job": ("alone", JOB, PIPE, [(SHELL, TTY), (STEPD, FILE)], "file"),
    "horovodrun over Gloo": ("horovodrun", {}, PIPE, [(HOROVODRUN, TTY), (SHELL, TTY)], "lines"),
    "horovodrun over Gloo, into a file": ("horovodrun", {}, PIPE, [(HOROVODRUN, FILE), (SHELL, TTY)], "file"),
    "horovodrun over MPI": (
        "mpirun",
        {},
        "/dev/pts/9",
        [(MPIRUN, PIPE), (VIA_SHELL, PIPE), (HOROVODRUN, TTY), (SHELL, TTY)],
        "lines",
    ),
    "mpirun": ("mpirun", {}, "/dev/pts/9", [(MPIRUN, TTY), (SHELL, TTY)], "lines"),
    "mpirun, into a file": ("mpirun", {}, "/dev/pts/9", [(MPIRUN, FILE), (SHELL, TTY)], "file"),
    "mpirun of another host": ("mpirun", {}, "/dev/pts/9", [(["prted", "--daemonize"], "/dev/null")], "file"),
    "mpirun of another host, a person's job": ("mpirun", JOB, "/dev/pts/9", [(["prted"], "/dev/null")], "lines"),
    "mpirun of another host, a job's script": ("mpirun", BATCH, "/dev/pts/9", [(["prted"], "/dev/null")], "file"),
    "Hydra": ("mpiexec", {}, PIPE, [(["hydra_pmi_proxy"], PIPE), (["/opt/mpiexec.hydra"], TTY)], "lines"),
    "torchrun": ("torchrun", {}, TTY, [(TORCHRUN, TTY), (SHELL, TTY)], "bar"),
    "python -m torch.distributed.run": ("torchrun", {}, TTY, [(TORCH_MODULE, TTY), (SHELL, TTY)], "bar"),
    "torchrun --tee": ("torchrun", {}, FILE, [(TORCHRUN, TTY), (SHELL, TTY)], "lines"),
    "torchrun in mpirun": ("torchrun", {}, "/dev/pts/9", [(TORCHRUN, "/dev/pts/9"), (MPIRUN, TTY)], "lines"),
    "srun elsewhere": ("srun", JOB, PIPE, [(STEPD, "/dev/null")], "lines"),
    "srun elsewhere, in a batch script": ("srun", BATCH, PIPE, [(STEPD, "/dev/null")], "file"),
    "srun --pty": ("srun", JOB, TTY, [(STEPD, "/dev/null")], "bar"),
    "srun --output of each task": ("srun", JOB, FILE, [(STEPD, "/dev/null")], "file"),
    "torchrun in srun": ("torchrun", JOB, PIPE, [(TORCHRUN, PIPE), (STEPD, "/dev/null")], "lines"),
    "torchrun in srun in a batch script": ("torchrun", BATCH, PIPE, [(TORCHRUN, PIPE), (STEPD, "/dev/null")], "file"),
}
SRUNS = {  # [(SLURM_JOB_ID of an srun on this host, its stdout)], expected of a rank of job 12 in a person's job
    "at a terminal": ([("12", TTY)], "lines"),
    "in a script": ([("12", FILE)], "file"),
    "two steps, one into a file": ([("12", TTY), ("12", FILE)], "file"),
    "another job's": ([("13", FILE)], "lines"),
    "without a job of its own": ([(None, FILE)], "file"),
    "one without a job, one of this job": ([(None, FILE), ("12", TTY)], "lines"),
}


def add(proc, pid, parent, arguments, stdout, environ=None):
    """A process in the tree."""
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (a) b) S {parent} 1 1")
    (folder / "cmdline").write_text("".join(f"{argument}\0" for argument in arguments))
    (folder / "environ").write_text("".join(f"{name}={value}\0" for name, value in (environ or {}).items()))
    (folder / "fd" / "1").symlink_to(stdout)


def rank_in(proc, stdout, above):
    """A rank, the first process of the tree, below others."""
    add(proc, 100, 101, ["python", "-m", "hvdtrain.torch", "digits"], stdout)
    for number, (arguments, end) in enumerate(above, 101):
        add(proc, number, number + 1 if number - 100 < len(above) else 1, arguments, end)


@pytest.mark.parametrize(("launcher", "environ", "stdout", "above", "expected"), CASES.values(), ids=CASES)
def test_the_display_of_a_rank(launcher, environ, stdout, above, expected, tmp_path):
    rank_in(tmp_path, stdout, above)
    assert display_of(launcher, stdout.startswith("/dev/pts"), environ, 100, tmp_path) == expected


@pytest.mark.parametrize(("sruns", "expected"), SRUNS.values(), ids=SRUNS)
def test_an_srun_of_this_host_decides(sruns, expected, tmp_path):
    rank_in(tmp_path, PIPE, [(STEPD, "/dev/null")])
    for pid, (job, stdout) in enumerate(sruns, 200):
        add(tmp_path, pid, 1, ["srun", "-n2", "python"], stdout, {"SLURM_JOB_ID": job} if job else {})
    (tmp_path / "meminfo").write_text("")
    assert display_of("srun", False, JOB, 100, tmp_path) == expected


def test_processes_that_may_not_be_read(tmp_path):
    (tmp_path / "100").mkdir()
    assert display_of("horovodrun", False, {}, 100, tmp_path) == "file"
    assert name_of([]) == name_of([""]) == ""
