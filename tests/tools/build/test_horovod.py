"""The Horovod that `python -m hvdtrain build` has installed: its edits, seen from outside."""

import base64
import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import warm
from marks import marked
from paths import REPOSITORY
from ranks import gloo_first, mpi_first, needs_our_horovod, needs_signalled_horovodrun

from hvdtrain.launch import mpi
from hvdtrain.tools.build.prove import proof_line

pytestmark = [pytest.mark.launched, needs_our_horovod]

HOROVODRUN = str(Path(sys.executable).parent / "horovodrun")
KEY = bytes(range(32))
ADDRESSES = {"lo": [("127.0.0.1", 1)]}


def horovodrun(controller, ranks, *command, by=(), **environ):
    return subprocess.run(
        [*by, HOROVODRUN, f"--{controller}", "-np", str(ranks), *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )


class Touch:
    """Unpickled by a careless reader, it creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mknod, (self.path,))


class Driver:
    def __init__(self):
        self.registered = []

    def register_worker_server(self, *args):
        self.registered.append(args)


@pytest.fixture
def rendezvous():
    """A real rendezvous server of an elastic run: its driver, and a function that PUTs worker addresses, signed."""
    from horovod.runner.elastic.rendezvous import create_rendezvous_handler
    from horovod.runner.http.http_auth import request
    from horovod.runner.http.http_server import RendezvousServer

    driver, server = Driver(), RendezvousServer(key=KEY)
    port = server.start(create_rendezvous_handler(driver), "127.0.0.1")

    def put(value):
        return request(KEY, "127.0.0.1", port, "PUT", "worker_addresses", "localhost:0", value)[0]

    yield driver, put
    server.stop()


def test_a_workers_put_is_taken_and_a_forged_or_senseless_one_refused(rendezvous, tmp_path):
    from horovod.runner.common.util import codec

    driver, put = rendezvous
    forged = tmp_path / "forged"
    pickled = (Touch(forged), (ADDRESSES, Touch(forged)), 1, (1, 2))
    for value in (b"", b"%%%", base64.b64encode(b"junk"), *(base64.b64encode(pickle.dumps(it)) for it in pickled)):
        assert put(value) == 400
    assert not forged.exists()
    assert driver.registered == []
    assert put(codec.dumps_base64((ADDRESSES, b"key"), to_ascii=False)) == 200
    assert driver.registered == [("localhost", 0, ADDRESSES, b"key")]


def test_a_workers_reply_is_understood_and_a_forged_one_runs_nothing(tmp_path):
    """Whoever registers an address chooses the key too, so the reply's signature proves nothing."""
    from horovod.runner.common.util import network
    from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationClient, WorkerNotificationService

    forged, reported = tmp_path / "forged", []

    class Forger(network.BasicService):
        def _handle(self, req, client_address):
            return Touch(forged)

    class Manager:
        def handle_hosts_updated(self, timestamp, result):
            reported.append((timestamp, result))

    with contextlib.ExitStack() as services:

        def client_of(service):
            services.callback(service.shutdown)
            return WorkerNotificationClient({"lo": [("127.0.0.1", service.get_port())]}, b"key", 0)

        with pytest.raises(network.NoValidAddressesFound):
            client_of(Forger("worker notification service", b"key", None))
        client = client_of(WorkerNotificationService(b"key", None, Manager()))
        client.notify_hosts_updated(7, HostUpdateResult.added)
    assert not forged.exists()
    assert reported == [(7, HostUpdateResult.added)]


def test_one_scope_of_finished_ranks_is_forgotten_at_a_time():
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_auth import request
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer(key=KEY)
    port = server.start(address="127.0.0.1")
    server.init([SlotInfo("localhost", rank, rank, 0, 2, 2, 1) for rank in (0, 1)])
    try:
        for scope, key in (("global", 0), ("cross_0", 0), ("local_localhost", 0), ("global", 1)):
            assert request(KEY, "127.0.0.1", port, "DELETE", scope, key)[0] == 200
        # cross_0 has one rank and is complete, global has both; one of local_localhost's two has finished.
        assert dict(server._httpd.finished_list) == {"local_localhost": ["0"]}
    finally:
        server.stop()


@pytest.mark.parametrize("framework", marked(["torch", "tensorflow"], slow={"tensorflow"}))  # the build proves both
@gloo_first
def test_two_ranks_add_and_start_again(controller, framework):
    """hvdtrain.tools.build.prove calls hvd.init() twice in one process."""
    if not mpi.horovod_library(framework):
        pytest.skip(f"Horovod was built without {framework}: pip install {framework}; python -m hvdtrain build")
    ran = horovodrun(controller, 2, *warm.command(framework, "-m", "hvdtrain.tools.build.prove", framework))
    assert ran.returncode == 0, ran.stderr
    assert "installed with version" not in ran.stderr  # Horovod's warning of another version than it was built with
    for rank in (0, 1):
        assert proof_line(rank, 2, controller) in ran.stdout


FAILS_IN_RANK_1 = textwrap.dedent("""
    import os, sys
    if "1" in (os.environ.get("HOROVOD_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
        sys.exit("2: the recipe is wrong" if len(sys.argv) > 1 else 2)
""")


@mpi_first
def test_a_ranks_exit_code_is_horovodruns_without_a_traceback(controller):
    ran = horovodrun(controller, 2, sys.executable, "-c", FAILS_IN_RANK_1)
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr


def test_over_gloo_a_failed_rank_is_one_line():
    ran = horovodrun("gloo", 2, sys.executable, "-c", FAILS_IN_RANK_1, "loud")
    assert ran.returncode == 1
    assert "[1]<stderr>:2: the recipe is wrong" in ran.stderr
    assert ran.stderr.splitlines()[-1] == "horovodrun: rank 1 ended first, with exit code 1; the job was stopped."


@gloo_first
def test_more_ranks_than_cores_run(controller):
    ranks = len(os.sched_getaffinity(0)) + 2
    ran = horovodrun(controller, ranks, sys.executable, "-c", "print('here')")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("here") == ranks


SHORT = textwrap.dedent("""
    import torch
    import horovod.torch as hvd
    hvd.init()
    for number in range(2 + hvd.rank()):
        hvd.allreduce(torch.ones(1))
        hvd.allreduce(torch.ones(1), name="named")
    hvd.join()
    print(hvd.allgather(torch.ones(1)).tolist(), "gathered")
""")


@gloo_first
def test_a_short_program_has_a_whole_timeline_and_collectives_after_join(controller, tmp_path):
    if not mpi.horovod_library("torch"):
        pytest.skip("Horovod was built without torch: pip install torch; python -m hvdtrain build")
    file = tmp_path / "timeline"
    ran = horovodrun(controller, 2, *warm.command("torch", "-c", SHORT), HOROVOD_TIMELINE=str(file))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("gathered") == 2
    assert {"ALLREDUCE", "ALLGATHER"} < {each.get("name") for each in json.loads(file.read_text())}


SUMS = textwrap.dedent("""
    import hashlib
    import time
    import torch
    import horovod.torch as hvd
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    digest = hashlib.sha256()
    for elements in (1, 5, 1001, 700_001):
        for kind in (torch.float32, torch.float64, torch.float16, torch.int32):
            given = ((torch.arange(elements) + rank) % 7).to(kind)
            every = sum(((torch.arange(elements) + each) % 7) for each in range(size))
            kept = given.clone()
            assert torch.equal(hvd.allreduce(given, op=hvd.Sum), every.to(kind)), (elements, kind)
            scaled = hvd.allreduce(given, op=hvd.Sum, prescale_factor=4, postscale_factor=2)
            assert torch.equal(scaled, (8 * every).to(kind)), (elements, kind)
            assert torch.equal(given, kept)
            if kind.is_floating_point:
                mean = hvd.allreduce_(given, op=hvd.Average)
                assert torch.allclose(mean, (every / size).to(kind), rtol=1e-3), (elements, kind)
        mean = hvd.allreduce(torch.rand(elements, generator=torch.Generator().manual_seed(rank)))
        digest.update(mean.numpy().tobytes())
    print("digest", digest.hexdigest())
    if rank == 1:
        time.sleep(2)
    begin, used = time.monotonic(), time.process_time()
    hvd.allreduce(torch.ones(1))
    if rank == 0:
        print("of one core", (time.process_time() - used) / (time.monotonic() - begin))
""")


def test_allreduce_scales_copies_is_equal_on_all_ranks_and_a_rank_that_waits_leaves_its_processor_to_others(controller):
    if not mpi.horovod_library("torch"):
        pytest.skip("Horovod was built without torch: pip install torch; python -m hvdtrain build")
    ran = horovodrun(controller, 3, *warm.command("torch", "-c", SUMS))
    assert ran.returncode == 0, ran.stderr
    digests = re.findall(r"digest (\w+)", ran.stdout)
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert float(re.search(r"of one core (\S+)", ran.stdout)[1]) < 0.5


def test_tensors_go_by_the_interface_that_is_named():
    """The host's name may have the address of another one."""
    if not mpi.horovod_library("torch"):
        pytest.skip("Horovod was built without torch: pip install torch; python -m hvdtrain build")
    import psutil

    found = psutil.net_if_addrs()
    with_address = [name for name, of in found.items() if any(each.family == socket.AF_INET for each in of)]
    name = max(with_address, key=lambda name: name != "lo")
    given = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": name, "LOG_LEVEL": "debug"}
    ran = subprocess.run(
        warm.command("torch", "-c", "import horovod.torch as hvd; hvd.init()"),
        env={**os.environ, **{f"HOROVOD_{key}": value for key, value in given.items()}},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        cwd=REPOSITORY,
    )
    assert set(re.findall(r"rendezvous started .* iface=([^,]+)", ran.stdout + ran.stderr)) == {name}


CORES = """
#include <iostream>
#include "waiting.h"
int main(int count, char**) {
  using namespace horovod::common;
  auto mine = AllowedCores();
  if (count > 1) {
    std::cout << mine[1];
    return 0;
  }
  std::vector<int> alone(mine.begin(), mine.end());
  std::cout << mine[0] << ShareCores(alone)
            << ShareCores({8, 1, 8, 1, 8, 1, 8, 1}) << ShareCores({8, 1, 8, 1, 8, 1, 8, 1, 8, 1})
            << ShareCores({2, 1, 2, 2, 2, 3}) << ShareCores({2, 1, 2, 2, 2, 2}) << ShareCores({1, 1, 64, 2});
}
"""


def test_ranks_know_which_cores_they_share(tmp_path):
    """Four ranks on eight cores, five, three with cores of their own, two that share, and one with a single core."""
    folder = REPOSITORY / "hvdtrain/tools/build/sources/horovod/common"
    (tmp_path / "cores.cc").write_text(CORES)
    subprocess.run(["c++", "-std=c++17", f"-I{folder}", "cores.cc", "-o", "cores"], cwd=tmp_path, check=True)
    one, which = str(min(os.sched_getaffinity(0))), set()
    shown = subprocess.run(["taskset", "-c", one, "./cores"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout == "1101011"
    show = ["sh", "-c", 'hostname "$0"; ./cores which']
    for name in ("one", "two"):  # containers of one machine
        command = ["unshare", "--map-root-user", "--uts", *show, name]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        if ran.returncode:
            pytest.skip(f"no namespaces here: {ran.stderr}")
        which.add(ran.stdout)
    assert len(which) == 1


@mpi_first
def test_horovodrun_by_its_path_finds_its_own_environment(controller):
    ran = horovodrun(controller, 2, "python", "-c", "import sys; print(sys.prefix)", PATH="/usr/bin:/bin")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(sys.prefix) == 2


@mpi_first
def test_a_killed_mpirun_of_the_same_process_id_is_in_nobodys_way(controller, tmp_path):
    left = f"""
        for process in $(seq $$ $(($$ + 300))); do folders="$folders $TMPDIR/ompi.$process"; done
        mkdir $folders
        for folder in $folders; do : > $folder/pmix.{socket.gethostname()}.tool; done
        exec "$@"
    """
    ran = horovodrun(controller, 1, "echo", "here", by=["sh", "-c", left, "sh"], TMPDIR=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert "here" in ran.stdout


HANDLER = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(flush=True); signal.pause()"
TERMINATED = {
    "a command below the shell": "echo; sleep 600; sleep 0.2; exit 7",
    "a command that the shell has become": f'exec {sys.executable} -c "{HANDLER}"',
}


@pytest.mark.parametrize("command", TERMINATED.values(), ids=TERMINATED)
def test_a_terminated_command_keeps_its_exit_code(command):
    import psutil
    from horovod.runner.common.util.safe_shell_exec import terminate_executor_shell_and_children

    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE) as shell:
        shell.stdout.readline()
        while "exec" not in command and not psutil.Process(shell.pid).children():
            time.sleep(0.01)
        terminate_executor_shell_and_children(shell.pid)
        assert shell.wait() == 7


def test_mpich_is_recognised(tmp_path):
    from horovod.runner import mpi_run

    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'HYDRA build details:'\necho '    Version: 5.0.2'\n")
    mpirun.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert mpi_run.is_mpich(environ)


WATCHES = """
import sys, time
from hvdtrain.launch.ancestors import LauncherShell
shell = LauncherShell()
print("begun", flush=True)
while not shell.take_end():
    time.sleep(0.01)
sys.exit(7)
"""
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@needs_signalled_horovodrun
@pytest.mark.skipif(os.geteuid() != 0, reason="a container of its own needs root")
@pytest.mark.parametrize("number", marked([signal.SIGTERM, signal.SIGHUP], fast={signal.SIGTERM}))
def test_the_first_process_of_a_container_ends_its_ranks_in_order(number):
    command = [*CONTAINER, HOROVODRUN, "--mpi", "-np", "1", sys.executable, "-c", WATCHES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, start_new_session=True) as outer:
        assert "begun" in outer.stdout.readline()
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        os.kill(int(children[0]), number)
        assert outer.wait(120) == 7
