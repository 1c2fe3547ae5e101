"""horovodrun as another user sees it: no command line, here or behind ssh, holds a value of the environment."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from marks import marked, rows
from paths import REPOSITORY
from ranks import needs_our_horovod

pytestmark = [pytest.mark.launched, needs_our_horovod]

HOROVODRUN = str(Path(sys.executable).parent / "horovodrun")
NOBODY = 65534
SECRET, KEY = "hvdtrain-test-token '$HOME' of $USER", "5a" * 32
ELSEWHERE = "203.0.113.7"  # an address of documentation: no host has it

# What every new process shows to everybody, again and again, until standard input ends.
WATCH = """
    import json, os, select
    seen, before = set(), set(os.listdir("/proc"))
    print("watching", flush=True)
    while not select.select([0], [], [], 0.01)[0]:
        for pid in filter(str.isdigit, set(os.listdir("/proc")) - before):
            try:
                with open(f"/proc/{pid}/cmdline", errors="replace") as file:
                    seen.add(file.read())
            except OSError:
                pass
    print(json.dumps(list(seen)))
"""
RANK = """
    import json, os, pathlib, sys, time
    names = ("TOKEN", "HOROVOD_RENDEZVOUS_KEY", "HOROVOD_GLOO_RENDEZVOUS_ADDR")
    rank = int(os.environ["HOROVOD_RANK"])
    given = {"rank": rank, "stdin": os.readlink("/proc/self/fd/0"), "folder": os.getcwd()}
    print(json.dumps({**given, **{name: os.environ.get(name) for name in names}}), flush=True)
    pathlib.Path(sys.argv[2], f"printed-{rank}").touch()
    while not all(pathlib.Path(sys.argv[2], f"printed-{each}").exists() for each in (0, 1)):
        time.sleep(0.05)  # the first that fails ends the other
    sys.exit(rank * int(sys.argv[1]))
"""
SSH = """\
#!/bin/sh
options() { case $1 in -o | -p | -i) return 0 ;; esac; return 1; }
while options "$1"; do shift 2; done
shift  # the host
while options "$1"; do shift 2; done
cd / && exec env -i PATH="$PATH" HOME=/ sh -c "$*"
"""
STARTS = {  # flags, rank 1's exit code
    "on one host": (["-np", "2"], 0),
    "behind ssh": (["-np", "2", "-H", f"localhost:1,{ELSEWHERE}:1", "--disable-cache"], 3),
    "elastic": (
        ["-np", "2", "--min-np", "2", "--host-discovery-script", "{folder}/hosts", "--network-interface", "lo"],
        0,
    ),
}


@pytest.fixture
def folder(tmp_path):
    for name, text in (("ssh", SSH), ("hosts", "#!/bin/sh\necho localhost:2\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def watched(command, environ):
    """What the command did, and every command line that another user saw meanwhile."""
    if os.geteuid() != 0:
        pytest.skip("another user's view needs root: sudo python -m pytest tests/tools/build/test_launcher_secrets.py")
    watch = [sys.executable, "-ISc", textwrap.dedent(WATCH)]
    with subprocess.Popen(
        ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *watch],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as watcher:
        assert watcher.stdout.readline() == "watching\n"
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120, cwd=REPOSITORY, env=environ
        )
        return ran, json.loads(watcher.communicate("enough")[0])


@pytest.mark.parametrize(("flags", "code"), marked(rows(STARTS), slow={"elastic"}))
def test_ps_shows_no_value_of_the_environment(folder, flags, code):
    arguments = [flag.format(folder=folder) for flag in flags]
    rank = [sys.executable, "-c", textwrap.dedent(RANK), str(code), str(folder)]
    environ = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TOKEN": SECRET,
        "HOROVOD_RENDEZVOUS_KEY": KEY,
    }
    command = [HOROVODRUN, "--gloo", *arguments, "--output-filename", str(folder / "output"), *rank]
    ran, seen = watched(command, environ)
    assert ran.returncode == code, ran.stderr
    ours = [line for line in seen if str(folder) in line]
    assert ours
    assert not [line for line in ours if "HOROVOD_" in line.replace(rank[-3], "")]
    assert not [line for line in seen if "hvdtrain-test-token" in line or KEY in line]
    assert not [line for line in seen if "task_fn\0" in line and line.split("task_fn\0")[1].strip("\0'")]
    for number in (0, 1):
        reported = json.loads((folder / "output" / f"rank.{number}" / "stdout").read_text().partition("]<stdout>:")[2])
        assert reported.pop("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        given = {"TOKEN": SECRET, "HOROVOD_RENDEZVOUS_KEY": KEY}
        assert reported == {"rank": number, "stdin": "/dev/null", "folder": str(REPOSITORY), **given}


FUNCTION = """
    import os, sys
    import horovod

    def add():
        return len(bytes.fromhex(os.environ["HOROVOD_RENDEZVOUS_KEY"])), "TOKEN" in os.environ

    if __name__ == "__main__":
        how = {sys.argv[1]: True}
        print(horovod.run(add, num_proc=2, disable_cache=True, **how), "HOROVOD_RENDEZVOUS_KEY" in os.environ)
"""


@pytest.mark.parametrize("how", marked(["use_gloo", "use_mpi"], slow={"use_mpi"}))
def test_a_function_runs_on_ranks_as_before_and_ps_shows_no_key(folder, how):
    (folder / "function.py").write_text(textwrap.dedent(FUNCTION))
    environ = {**os.environ, "HOME": str(folder), "TOKEN": SECRET, "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    ran, seen = watched([sys.executable, str(folder / "function.py"), how], environ)
    assert ran.stdout.splitlines()[-1:] == ["[(32, True), (32, True)] False"], ran.stderr
    assert not [line for line in seen if "hvdtrain-test-token" in line or "HOROVOD_RENDEZVOUS_KEY=" in line]
