"""The files of a cluster: SLURM's, ssh's and what else a host finds below /etc."""

import os
import pwd
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from mini.processes import run
from mini.state import Cluster


@dataclass(frozen=True)
class Machine:
    """Every node's shape in SLURM, and how soon it marks one as down; `memory` is in MB."""

    cpus: int
    threads_per_core: int
    memory: int
    gpus: int
    partitions: list[str]
    features: str
    mpi: str
    slurmd_timeout: int
    kill_wait: int


SLURM = """\
ClusterName=minicluster
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its credential has expired before it may start again: 120 s by default.
AuthInfo=cred_expire=10
MpiDefault={mpi}
# Neither needs cgroups, nor CPUs that exist.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
StateSaveLocation=/run/minicluster/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/run/minicluster/log/slurmctld.log
SlurmdLogFile=/run/minicluster/log/slurmd.%h.log
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=5,bf_continue
TopologyPlugin=topology/tree
SlurmdTimeout={slurmd_timeout}
# SLURM pings a silent node twice before it is down, and waits this long each time. A busy machine's slurmd may need
# more than 5 s to respond; a batch job that it could not launch in time, twice, is held.
MessageTimeout=10
# What a task leaves behind in the background is nobody's child, escapes linuxproc and keeps the step's output open.
EioTimeout=5
KillWait={kill_wait}
MinJobAge=3600
GresTypes=gpu
DefMemPerCPU={memory_per_cpu}
NodeName={nodes} CPUs={cpus} Boards=1 SocketsPerBoard={sockets} CoresPerSocket={cores} \
ThreadsPerCore={threads_per_core} RealMemory={memory}{gres}{features} State=UNKNOWN
"""
SSHD = """\
HostKey /etc/ssh/host
AuthorizedKeysFile /etc/ssh/authorized_keys
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
UseDNS no
PrintMotd no
MaxStartups 200
PidFile /run/sshd.pid
Subsystem sftp internal-sftp
"""
SSH = """\
Host *
  IdentityFile /etc/ssh/keys/%u
  IdentitiesOnly yes
  GlobalKnownHostsFile /etc/ssh/known_hosts
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  ConnectTimeout 10
  LogLevel ERROR
"""
# Sites' scripts start with `bash -l`, whose profiles forget the caller's PATH, and load modules to have their Python.
PROFILE = """\
module() { PATH=${MINICLUSTER_PATH:-$PATH}; }
module
"""


def slurm(machine: Machine, nodes: list[str]) -> str:
    """The text of slurm.conf."""
    cores = machine.cpus // machine.threads_per_core
    sockets = 1 if cores % 2 else 2
    derived = {
        "memory_per_cpu": max(1, machine.memory // machine.cpus),
        "nodes": ",".join(nodes),
        "sockets": sockets,
        "cores": cores // sockets,
        "gres": f" Gres=gpu:{machine.gpus}" if machine.gpus else "",
        "features": f" Feature={machine.features}" if machine.features else "",
    }
    text = SLURM.format(**(vars(machine) | derived))
    for partition in machine.partitions:
        default = "YES" if partition == machine.partitions[0] else "NO"
        text += f"PartitionName={partition} Nodes=ALL Default={default} MaxTime=INFINITE State=UP\n"
    return text


def hosts(cluster: Cluster) -> str:
    """The text of /etc/hosts; a host's address on the fabric has its name with the suffix."""
    lines = ["127.0.0.1 localhost"]
    for interface in cluster.networks:
        suffix = "" if interface == "eth0" else cluster.suffix
        lines += [f"{cluster.address(host, interface)} {host}{suffix}" for host in cluster.hosts]
    return "\n".join(lines) + "\n"


def write(cluster: Cluster, machine: Machine, user: pwd.struct_passwd) -> None:
    """Everything that the hosts of a cluster share, into its state folder."""
    for folder in ("log", "slurmctld", "gpu", "bin", "etc/munge", "etc/slurm", "etc/ssh/keys"):
        (cluster.folder / folder).mkdir(parents=True)
    etc = cluster.folder / "etc"
    (etc / "hosts").write_text(hosts(cluster))
    # sshd refuses a user whose password is locked.
    (etc / "shadow").write_text("".join(f"{entry.pw_name}:*:19000:0:99999:7:::\n" for entry in pwd.getpwall()))
    shutil.copytree("/etc/profile.d", etc / "profile.d")
    (etc / "profile.d" / "zz-minicluster.sh").write_text(PROFILE)
    _command(cluster.folder / "bin" / "module")
    for private in ("shadow", "munge"):
        (etc / private).chmod(0o600 if private == "shadow" else 0o700)
    key = etc / "munge" / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    _write_slurm(cluster, machine)
    _write_ssh(etc / "ssh", {"root": 0, user.pw_name: user.pw_uid})


def _command(path: Path) -> None:
    """A command that does nothing, whatever its arguments."""
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def _write_slurm(cluster: Cluster, machine: Machine) -> None:
    folder = cluster.folder / "etc" / "slurm"
    nodes = ",".join(cluster.nodes)
    # SLURM hands out the numbers at the ends of these names, wants devices behind them, and opens none.
    for gpu in range(machine.gpus):
        os.mknod(cluster.folder / "gpu" / f"gpu{gpu}", 0o666 | stat.S_IFCHR, Path(os.devnull).stat().st_rdev)
    gres = f"NodeName={nodes} Name=gpu File=/run/minicluster/gpu/gpu[0-{machine.gpus - 1}]\n" if machine.gpus else ""
    texts = {
        "slurm.conf": slurm(machine, cluster.nodes),
        "topology.conf": f"SwitchName=switch Nodes={nodes}\n",
        "gres.conf": f"AutoDetect=off\n{gres}",
        # The tree lets a rank leave MPI_Init early: of the starts on 4 nodes 8 in 100 crash or hang.
        "mpi.conf": "PMIxCollFence=ring\n",
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)


def _write_ssh(folder: Path, users: dict[str, int]) -> None:
    """One host key for all, and one user key that opens every host, each user's copy his own."""
    for name in ("host", "user"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "minicluster", "-f", str(folder / name))
    for name, number in users.items():
        own = folder / "keys" / name
        shutil.copyfile(folder / "user", own)
        own.chmod(0o600)
        os.chown(own, number, -1)
    (folder / "known_hosts").write_text("* " + (folder / "host.pub").read_text())
    (folder / "user.pub").rename(folder / "authorized_keys")
    (folder / "user").unlink()
    (folder / "sshd_config").write_text(SSHD)
    (folder / "ssh_config").write_text(SSH)
