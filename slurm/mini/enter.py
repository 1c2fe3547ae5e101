"""Runs a person's command on a host of the cluster, as if it had been started there."""

import ctypes
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mini import ClusterError, quota
from mini.state import Cluster

# Another launcher's or cluster's variables, and what sudo and the machine's own shells leave behind.
FOREIGN = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "PMI", "OMPI_", "PRTE_", "HOROVOD_", "SUDO_", "BASH_FUNC_")
HIDDEN_FOLDERS = ("TMPDIR", "XDG_RUNTIME_DIR")
NAMESPACES = ("ipc", "uts", "net", "pid", "mnt")  # the mounts last: /proc is another behind them
PASSED_ON = {
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
}  # fmt: skip
PR_SET_PDEATHSIG = 1


def caller(environ: Mapping[str, str]) -> pwd.struct_passwd:
    """The person behind sudo, or root."""
    return pwd.getpwuid(int(environ.get("SUDO_UID", os.getuid())))


def environment(environ: Mapping[str, str], user: pwd.struct_passwd, given: Mapping[str, str]) -> dict[str, str]:
    """What a command of this user finds in its environment: the caller's, without another launcher's variables."""
    kept = {
        name: value for name, value in environ.items() if not name.startswith(FOREIGN) and name not in HIDDEN_FOLDERS
    }
    kept |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
    folders = [f"{environ['VIRTUAL_ENV']}/bin"] if "VIRTUAL_ENV" in environ else []
    folders += [folder for folder in environ.get("PATH", os.defpath).split(":") if folder not in folders]
    # /etc/profile sets PATH anew in `bash -l`, with which sites' scripts start; ours puts this one back.
    kept["PATH"] = kept["MINICLUSTER_PATH"] = ":".join([*folders, "/run/minicluster/bin"])
    # Most of the cores do not exist: ranks that spin while they wait would take the real ones from one another.
    kept["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if user.pw_uid == 0:
        for library in ("OMPI", "PRTE"):
            kept |= {f"{library}_ALLOW_RUN_AS_ROOT": "1", f"{library}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, **given}


def run(cluster: Cluster, host: str, command: Sequence[str], given: Mapping[str, str]) -> int:
    """The exit code of a command on a host, in the current directory, this process's signals passed on to it.

    Whatever way this process ends, the command gets SIGTERM: srun takes it for the end of its step.
    """
    # Only root may change a cluster.
    user = pwd.getpwuid(0) if command[0] == "scontrol" else caller(os.environ)
    environ = environment(os.environ, user, given)
    directory = Path.cwd()
    node = cluster.process(host)
    quota.hold(cluster, host, os.getpid())
    _move_to(node.pid)
    try:
        os.chdir(directory)
    except OSError:
        raise ClusterError(
            f"{directory} is not on {host}, whose /tmp and /run are its own: slurm/minicluster up --share {directory}"
        ) from None
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    try:
        child = subprocess.Popen(
            command,
            env=environ,
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=os.getgrouplist(user.pw_name, user.pw_gid),
            preexec_fn=_end_with_parent,  # noqa: PLW1509  there is one thread
        )
    except FileNotFoundError:
        print(
            f"minicluster: {host} has no command {command[0]!r}: give a path, or the PATH that finds it.",
            file=sys.stderr,
        )
        return 127
    return _end_of(child)


def _move_to(pid: int) -> None:
    """Moves this process into the namespaces of another; into its process numbers, only the children follow."""
    library = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in NAMESPACES]
    for descriptor in opened:
        if library.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def _end_of(child: subprocess.Popen[bytes]) -> int:
    while child.poll() is None:
        got = signal.sigwaitinfo(PASSED_ON | {signal.SIGCHLD})
        # What the terminal sends, it sends to the child too: a second Ctrl-C would make srun kill its step.
        if got.si_signo != signal.SIGCHLD and got.si_code <= 0:
            child.send_signal(got.si_signo)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode
