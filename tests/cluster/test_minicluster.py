"""slurm/minicluster: what a node is, what SLURM does on it, faults, and that nothing stays."""

import contextlib
import json
import os
import pwd
import signal
import subprocess
from pathlib import Path

import pytest
from marks import marked, rows
from paths import REPOSITORY
from ranks import wait_until

# What is slow is of the tool itself, which changes seldom.
pytestmark = [pytest.mark.cluster]

COMMAND = REPOSITORY / "slurm" / "minicluster"


class Mini:
    """The command line, for the cluster of one state folder."""

    def __init__(self, state):
        self.state = state

    @contextlib.contextmanager
    def start(self, *arguments, **settings):
        """A process, which is killed if it still runs at the end of the block."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen([COMMAND, "--state", self.state, *arguments], **(pipes | settings)) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, *arguments, given=None, **settings):
        """Exit code, output and errors."""
        stdin = {} if given is None else {"stdin": subprocess.PIPE}
        with self.start(*arguments, **stdin, **settings) as process:
            output, errors = process.communicate(given, timeout=120)
        return process.returncode, output, errors

    def __call__(self, *arguments, **settings):
        """The output of what must succeed."""
        code, output, errors = self.run(*arguments, **settings)
        assert code == 0, errors
        return output

    def network_namespaces(self):
        processes = json.loads((self.state / "cluster.json").read_text())["processes"]
        return {Path(f"/proc/{pid}/ns/net").readlink() for pid, _ in processes.values()}


@contextlib.contextmanager
def brought_up(state, *flags):
    mini = Mini(state)
    mini("up", *flags)
    try:
        yield mini
    finally:
        mini("down")


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    """Four nodes, which every site's job fits."""
    flags = ("--gpus", "8", "--mem", "960G", "--partition", "batch", "booster", "gpu_p2", "--feature", "gpu,nvme")
    with brought_up(tmp_path_factory.mktemp("mini") / "state", *flags) as mini:
        yield mini


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


def in_namespaces(namespaces):
    """The processes whose network is one of these."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found += [link] if link.readlink() in namespaces else []
    return found


def naming(state):
    """The processes that have the state folder on their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [file] if str(state) in file.read_text() else []
    return found


def interfaces():
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


def gone(state, namespaces=frozenset()):
    wait_until(lambda: not in_namespaces(namespaces) and not naming(state))
    return not state.exists() and str(state) not in Path("/proc/self/mountinfo").read_text()


def test_up_shows_nothing_on_the_machine_and_down_leaves_nothing(state):
    before = interfaces()
    with brought_up(state, "--nodes", "2") as mini:
        assert interfaces() == before
        namespaces = mini.network_namespaces()
        assert len(namespaces) == 4  # two nodes, the login host and the switch
        assert len(in_namespaces(namespaces)) > 10
        mini("sbatch", "--output=/dev/null", "--wrap", "sleep 1000")
    assert gone(state, namespaces)
    assert interfaces() == before
    assert mini.run("status") == (
        2,
        "",
        f"minicluster: no cluster in {state}: slurm/minicluster up, or name its folder with --state.\n",
    )


def test_a_node_is_a_machine_of_its_own(mini):
    script = "hostname; ip -4 -o address show eth0; ls /sys/class/net"
    name, address, *devices = mini("exec", "nid003", "sh", "-c", script).splitlines()
    assert name == "nid003"
    assert " 10.77.1.3/16 " in address
    assert devices == ["eth0", "lo"]
    mini("exec", "nid003", "touch", "/tmp/only-there", "/dev/shm/only-there", "/run/only-there")
    for folder in ("/tmp", "/dev/shm", "/run"):
        assert "only-there" in mini("exec", "nid003", "ls", folder)
        assert "only-there" not in mini("exec", "nid004", "ls", folder)
        assert not (Path(folder) / "only-there").exists()


def test_hosts_know_one_another_over_ssh(mini):
    assert mini("exec", "nid001", "ssh", "nid004", "ssh", "head", "ssh", "nid002", "hostname") == "nid002\n"


def test_srun_reaches_every_node_in_the_current_directory(mini):
    output = mini("srun", "-N4", "-n8", "sh", "-c", 'echo "$(hostname) $PWD"', cwd=REPOSITORY / "tests")
    assert sorted(output.splitlines()) == [f"nid00{n} {REPOSITORY}/tests" for n in (1, 1, 2, 2, 3, 3, 4, 4)]


@pytest.mark.slow
def test_a_login_shell_finds_the_callers_python_once_a_module_is_loaded(mini):
    environ = os.environ | {"PATH": f"/callers/bin:{os.environ['PATH']}"}
    output = mini("srun", "bash", "-lc", "module load PyTorch; echo $PATH", env=environ)
    assert "/callers/bin" in output.split(":")  # pyenv's shim for this very Python puts its own before it


FOREIGN = [f"{tool}_FOREIGN" for tool in ("SLURM", "SRUN", "SBATCH", "OMPI", "PMI", "PRTE", "HOROVOD")]


def test_a_command_has_the_callers_variables_and_no_other_launchers(mini):
    given = {"LEARNING": "rate", "VIRTUAL_ENV": "/callers/own", "PATH": "/usr/bin:/bin", **dict.fromkeys(FOREIGN, "1")}
    lines = mini("exec", "nid001", "env", env=os.environ | given).splitlines()
    assert {"LEARNING=rate", "OMPI_ALLOW_RUN_AS_ROOT=1"} <= set(lines)
    assert any(line.startswith("PATH=/callers/own/bin:") for line in lines)
    assert not [line for line in lines if line.startswith(tuple(FOREIGN))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("-e", "SRUN_FOREIGN=1", "exec", "nid001"),
        ("exec", "-e", "SRUN_FOREIGN=1", "nid001"),
        ("-e", "SRUN_FOREIGN=1", "srun"),
    ],
    ids=["before exec", "after exec", "before srun"],
)
def test_a_variable_set_on_purpose(mini, command):
    assert mini(*command, "sh", "-c", "echo $SRUN_FOREIGN") == "1\n"


@pytest.mark.slow
def test_commands_run_as_the_caller_of_sudo_but_scontrol(state):
    person = next((entry for entry in pwd.getpwall() if 1000 <= entry.pw_uid < 60000), None)
    if not person:
        pytest.skip("needs an ordinary user: useradd --create-home --shell /bin/bash anybody")
    environ = os.environ | {"SUDO_UID": str(person.pw_uid)}
    mini = Mini(state)
    mini("up", "--nodes", "2", env=environ)
    try:
        assert (
            mini("exec", "nid001", "sh", "-c", "id -un; echo $HOME", env=environ)
            == f"{person.pw_name}\n{person.pw_dir}\n"
        )
        assert mini("srun", "-N2", "id", "-un", env=environ) == f"{person.pw_name}\n" * 2
        assert mini("exec", "nid001", "ssh", "nid002", "id", "-un", env=environ) == f"{person.pw_name}\n"
        mini("exec", "head", "scontrol", "update", "nodename=nid001", "state=drain", "reason=test", env=environ)
    finally:
        mini("down")


def test_input_output_and_exit_code_pass_through(mini):
    assert mini("srun", "tr", "a-z", "A-Z", given="gradient\n") == "GRADIENT\n"
    assert mini.run("srun", "sh", "-c", "exit 7")[0] == 7
    assert mini.run("exec", "nid002", "sh", "-c", "kill -9 $$")[0] == 128 + signal.SIGKILL
    assert mini.run("exec", "nid002", "no-such-thing") == (
        127,
        "",
        "minicluster: nid002 has no command 'no-such-thing': give a path, or the PATH that finds it.\n",
    )


@pytest.mark.parametrize("how", marked(rows({"SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}), slow={"SIGTERM"}))
def test_srun_ends_with_its_wrapper(mini, how):
    def sleeping():
        return ["sleep 1000" in mini("exec", node, "ps", "-C", "sleep", "-o", "args=") for node in ("nid001", "nid002")]

    with mini.start("srun", "-N2", "sleep", "1000") as wrapper:
        wait_until(lambda: all(sleeping()))
        wrapper.send_signal(how)
        assert wrapper.wait()
    wait_until(lambda: mini("squeue", "--noheader") == "")
    assert not any(sleeping())


def test_one_interrupt_is_one_interrupt(mini):
    with mini.start(
        "srun", "-u", "sh", "-c", "trap 'echo caught; exit 5' INT; echo ready; while sleep .1; do :; done"
    ) as wrapper:
        assert wrapper.stdout.readline() == "ready\n"
        wrapper.send_signal(signal.SIGINT)
        wait_until(lambda: "one more within 1 sec" in wrapper.stderr.readline())
        assert wrapper.poll() is None
        wrapper.send_signal(signal.SIGINT)
        assert wrapper.stdout.readline() == "caught\n"
        wrapper.communicate(timeout=60)


@pytest.mark.slow
def test_two_clusters_side_by_side(mini, state):
    with brought_up(state, "--nodes", "1", "--hostname", "jwb", "--fabric", "ib0", "--fabric-suffix", "i") as other:
        assert other("srun", "hostname") == "jwb001\n"
        assert "10.78.1.1" in other("exec", "head", "getent", "hosts", "jwb001i")
        assert " 10.78.1.1/16 " in other("exec", "jwb001", "ip", "-4", "-o", "address", "show", "ib0")
        assert other("exec", "head", "ssh", "jwb001i", "hostname") == "jwb001\n"
        assert mini("srun", "-wnid001", "hostname") == "nid001\n"
    assert mini("srun", "-wnid001", "hostname") == "nid001\n"


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=1)"


def test_a_cut_link_swallows_packets_until_it_is_healed(mini):
    connects = ("exec", "nid001", "python3", "-c", CONNECT, "nid002")
    mini(*connects)
    mini("cut", "nid002")
    code, _, errors = mini.run(*connects)
    assert code
    assert "TimeoutError" in errors or "No route to host" in errors
    assert mini("exec", "nid002", "cat", "/sys/class/net/eth0/carrier") == "1\n"
    assert "nid002  10.77.1.2  cut" in mini("status")
    mini("heal", "nid002")
    mini(*connects)
    assert mini("srun", "-wnid002", "hostname") == "nid002\n"


def test_a_node_without_power_is_dead_until_it_is_healed(mini):
    before = mini("exec", "nid003", "ls", "/tmp").split()
    with mini.start("exec", "nid003", "sh", "-c", "touch /tmp/mine; echo ready; sleep 1000") as victim:
        assert victim.stdout.readline() == "ready\n"
        mini("cut", "--power", "nid003")
        assert victim.wait() == 128 + signal.SIGKILL
    assert "nid003  10.77.1.3  power is off" in mini("status")
    assert mini.run("exec", "nid003", "true") == (2, "", "minicluster: nid003 is off: slurm/minicluster heal nid003.\n")
    mini("heal", "nid003")
    assert set(mini("exec", "nid003", "ls", "/tmp").split()) <= {*before} - {"mine", "only-there"}  # but what is shared
    assert mini("srun", "-wnid003", "hostname") == "nid003\n"


@pytest.mark.slow
def test_slurmctld_comes_back_with_its_jobs(mini):
    job = mini("sbatch", "--parsable", "--output=/dev/null", "--job-name=kept", "--wrap", "sleep 1000").strip()
    wait_until(lambda: b"kept" in (mini.state / "slurmctld" / "job_state").read_bytes())  # which is some seconds behind
    mini("cut", "--power", "head")
    assert "slurmctld does not respond: slurm/minicluster heal head" in mini("status")
    mini("heal", "head")
    assert job in mini("squeue", "--noheader", "--format=%i").split()
    mini("scancel", job)


@pytest.mark.slow
def test_a_job_whose_node_dies_starts_again_elsewhere(state):
    with brought_up(state, "--nodes", "2", "--slurmd-timeout", "5") as mini:
        job = mini("sbatch", "--parsable", "--requeue", "--output=/dev/null", "--wrap", "sleep 1000").strip()
        wait_until(lambda: mini("squeue", "--noheader", "--format=%N").strip())
        first = mini("squeue", "--noheader", "--format=%N").strip()
        mini("cut", "--power", first)
        wait_until(lambda: mini("squeue", "--noheader", "--format=%T").strip() != "RUNNING")
        wait_until(lambda: mini("squeue", "--noheader", "--format=%T").strip() == "RUNNING")
        shown = mini("scontrol", "show", "job", job)
    assert "Restarts=1" in shown
    assert f"NodeList={first}\n" not in shown


TALK = """
import socket, sys, time
if sys.argv[1] == "serve":
    server = socket.create_server(("", 5555))
    print("ready", flush=True)
    while True:
        peer, _ = server.accept()
        left = 1 + 2_000_000
        while left and (got := peer.recv(1 << 20)):
            left -= len(got)
            if not left or len(got) == 1:
                peer.send(b"x")
else:
    peer = socket.create_connection((sys.argv[1], 5555))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    began = time.perf_counter()
    peer.send(b"x"), peer.recv(1)
    answered = time.perf_counter()
    peer.sendall(b"x" * 2_000_000), peer.recv(1)
    print(answered - began, time.perf_counter() - answered)
"""


def speed(mini):
    """Seconds for one byte to and fro, and for two million one way, from nid002 to nid001: no machine is too fast for
    a link that is slow."""
    with mini.start("exec", "nid001", "python3", "-c", TALK, "serve") as server:
        server.stdout.readline()
        latency, transfer = map(float, mini("exec", "nid002", "python3", "-c", TALK, "nid001").split())
        server.terminate()
        server.wait()
    return latency, transfer


@pytest.mark.slow
def test_links_have_their_rate_and_delay(state):
    with brought_up(state, "--nodes", "2", "--delay", "30ms") as mini:
        assert speed(mini)[0] > 0.06
        mini("shape", "all", "--delay", "300ms")
        assert speed(mini)[0] > 0.6
        mini("shape", "all", "--delay", "none")
        assert min(speed(mini)[0] for _ in range(5)) < 0.6
        mini("shape", "nid001", "--rate", "10mbit")
        assert "nid001  10.77.1.1  10mbit" in mini("status")
        assert speed(mini)[1] > 1
        mini("cut", "nid001")
        assert mini.run("exec", "nid002", "python3", "-c", CONNECT, "nid001")[0]
        mini("heal", "nid001")
        mini("exec", "nid002", "python3", "-c", CONNECT, "nid001")
        mini("cut", "--power", "nid001")
        mini("heal", "nid001")
        assert speed(mini)[1] > 1


BUSY = """
import time
began = time.monotonic()
while time.monotonic() < began + 2:
    pass
print(time.process_time() / (time.monotonic() - began))
"""


@pytest.mark.slow
def test_a_node_keeps_to_its_quota(state):
    """Whatever way its processes came to it, and after it was off. The head has none."""

    def used(*arguments):
        """The part of a processor that two seconds of trying give."""
        return float(mini(*arguments, "python3", "-c", BUSY))

    def groups():
        return list(Path("/sys/fs/cgroup").glob(f"**/minicluster*{state.parent.name}-{state.name}-*"))

    with brought_up(state, "--nodes", "2", "--cpu-quota", ".2") as mini:
        assert "of which 0.2 CPUs are real" in mini("status")
        assert used("srun", "-w", "nid001") < 0.4
        mini("cut", "--power", "nid002")
        mini("heal", "nid002")
        assert used("exec", "nid002") < 0.4
        assert {path.name.rpartition("-")[2] for path in groups()} == {"nid001", "nid002"}
    assert groups() == []


def test_a_rate_needs_no_switch_of_ours(mini):
    mini("shape", "all", "--rate", "10mbit")
    assert speed(mini)[1] > 1
    mini("shape", "all")


@pytest.mark.slow
def test_a_folder_below_tmp_is_seen_where_it_is_shared(mini, tmp_path, state):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").touch()
    assert mini.run("exec", "nid001", "ls", cwd=tmp_path / "data") == (
        2,
        "",
        f"minicluster: {tmp_path}/data is not on nid001, whose /tmp and /run are its own: "
        f"slurm/minicluster up --share {tmp_path}/data\n",
    )
    with brought_up(state, "--nodes", "1", "--share", str(tmp_path / "data")) as sharing:
        assert sharing("exec", "nid001", "ls", cwd=tmp_path / "data") == "file\n"
        sharing("cut", "--power", "nid001")
        sharing("heal", "nid001")
        assert sharing("srun", "ls", cwd=tmp_path / "data") == "file\n"


def test_status_is_a_table(mini):
    lines = mini("status").splitlines()
    assert lines[0].startswith("4 nodes, 96 CPUs, 960 GB and 8 GPUs a node; ")
    assert lines[2:] == [
        "node    address    link       SLURM",
        "head    10.77.0.1  unlimited  slurmctld",
        "nid001  10.77.1.1  unlimited  idle",
        "nid002  10.77.1.2  unlimited  idle",
        "nid003  10.77.1.3  unlimited  idle",
        "nid004  10.77.1.4  unlimited  idle",
        "",
        "no job is running or waiting",
    ]


REFUSED = {  # arguments, message
    "no such command": (
        "upp",
        "no command 'upp'; commands: up, down, status, exec, shape, cut, heal, install, srun, sbatch, salloc, sinfo, "
        "squeue, scancel, scontrol.",
    ),
    "no such flag": (
        "up --node 4",
        "unrecognized arguments: --node 4; slurm/minicluster up --help lists what there is.",
    ),
    "half a core": ("up --cpus 3", "--cpus must be a multiple of --threads-per-core=2, got 3."),
    "rate": ("up --rate 1gib", "--rate must be a number above 0 with one of kbit, mbit, gbit, or none; got '1gib'."),
    "plugin": ("up --mpi pmi3", "--mpi must be one of cray_shasta, none, pmi2, pmix, pmix_v4, got 'pmi3'."),
    "all of /tmp": (
        "up --share /tmp",
        "--share must be a folder that exists, and none of /tmp, /dev/shm, /run, every node's own; got /tmp.",
    ),
    "somebody's folder": ("--state /etc up", "/etc holds what is no minicluster's: name another folder with --state."),
    "up twice": ("up", "a cluster is up in {state}: slurm/minicluster down, or give another folder to --state."),
    "no such node": ("exec nid009 true", "no node 'nid009': this cluster has head, nid001, nid002, nid003, nid004."),
    "nothing to run": ("exec nid001", "exec needs a command: slurm/minicluster exec nid001 hostname"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(mini, arguments, message):
    assert mini.run(*arguments.split()) == (2, "", f"minicluster: {message.format(state=mini.state)}\n")


def test_only_for_root(mini):
    message = 'nodes are made of namespaces, which needs root: sudo -E env "PATH=$PATH" slurm/minicluster ...'
    as_another = ("setpriv", "--reuid", "65534", "--clear-groups", COMMAND, "--state", mini.state)
    for command in (["up"], ["exec", "nid001", "true"]):
        done = subprocess.run([*as_another, *command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"minicluster: {message}\n")


@contextlib.contextmanager
def begun(mini):
    """An `up` that has its login host, and the process id of that host."""
    known = {}

    def has_a_head():
        with contextlib.suppress(OSError):
            known.update(json.loads((mini.state / "cluster.json").read_text())["processes"])
        return "head" in known

    with mini.start("up", "--nodes", "4") as process:
        wait_until(has_a_head)
        yield process, known["head"][0]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=lambda how: how.name)
def test_an_interrupted_up_leaves_nothing(state, how):
    with begun(Mini(state)) as (process, _):
        process.send_signal(how)
        assert process.communicate(timeout=60) == ("", "minicluster: interrupted\n")
    assert process.returncode == 128 + how
    assert gone(state)


@pytest.mark.slow
def test_what_a_killed_up_left_goes_down(state):
    with begun(Mini(state)) as (process, head):
        namespace = Path(f"/proc/{head}/ns/net").readlink()
        process.kill()
        process.communicate(timeout=60)
    Mini(state)("down")
    assert gone(state, {namespace})


@pytest.mark.slow
def test_a_host_that_dies_ends_up(state):
    with begun(Mini(state)) as (process, head):
        os.kill(head, signal.SIGKILL)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    assert errors.startswith("minicluster: ")
    assert errors.count("\n") == 1
    assert gone(state)


@pytest.mark.slow
def test_a_cluster_of_before_a_restart_is_replaced(state):
    mini = Mini(state)
    mini("up", "--nodes", "1")
    for pid, _ in json.loads((state / "cluster.json").read_text())["processes"].values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not naming(state))
    with brought_up(state, "--nodes", "1"):
        assert mini("srun", "hostname") == "nid001\n"
