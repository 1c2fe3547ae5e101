"""The Debian packages that a cluster is made of: which are missing, and how to get them, their services left off."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from mini import ClusterError
from mini.processes import ENVIRON, PATH

PACKAGES = {  # package: a file of it, or a command
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurm-client": "srun",
    "munge": "munged",
    "libpmix-dev": "/usr/lib/*/libpmix.so",  # Debian's SLURM opens PMIx by the name that only this package has
    "openssh-server": "sshd",
    "openssh-client": "ssh-keygen",
    "iproute2": "ip",
    "util-linux": "nsenter",
}
SERVICES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "munge": "munge", "openssh-server": "ssh"}
POLICY = Path("/usr/sbin/policy-rc.d")


def missing() -> list[str]:
    """The packages that this machine lacks."""
    return [package for package, sign in PACKAGES.items() if not _present(sign)]


def _present(sign: str) -> bool:
    return any(Path("/").glob(sign[1:])) if sign.startswith("/") else shutil.which(sign, path=PATH) is not None


def require() -> None:
    """Raises ClusterError where a package is missing."""
    if lacking := missing():
        raise ClusterError(f"not installed: {' '.join(lacking)} (Debian's packages): slurm/minicluster install")


def require_mpi(plugin: str) -> None:
    """Raises ClusterError where SLURM has no such plugin for MPI."""
    plugins = sorted(path.stem.removeprefix("mpi_") for path in Path("/usr/lib").glob("*/slurm-wlm/mpi_*.so"))
    if plugin not in plugins:
        raise ClusterError(f"--mpi must be one of {', '.join(plugins)}, got {plugin!r}.")


def require_compiler() -> None:
    """Raises ClusterError where the switch cannot be compiled."""
    if not shutil.which("cc", path=PATH):
        raise ClusterError(
            "this kernel cannot give links that rate and delay, and our own switch needs a C compiler: "
            "apt-get install gcc libc6-dev"
        )


def install() -> None:
    """Gets what is missing, and leaves every service of it off. Raises ClusterError."""
    lacking = missing()
    if not lacking:
        print(f"nothing to install: {' '.join(PACKAGES)} are there")
        return
    print(f"installing Debian's {' '.join(lacking)}")
    if not shutil.which("apt-get", path=PATH):
        raise ClusterError(
            f"this machine has no apt-get: install {' '.join(lacking)} with its own package manager, then up."
        )
    with _no_service_starts():
        _apt("update", "--quiet")
        _apt("install", "--quiet", "--yes", "--no-install-recommends", *lacking)
    _disable([SERVICES[package] for package in lacking if package in SERVICES])
    require()
    print(f"installed: {' '.join(lacking)}; their services are off")


def _apt(*command: str) -> None:
    done = subprocess.run(["apt-get", *command], env=ENVIRON | {"DEBIAN_FRONTEND": "noninteractive"}, check=False)
    if done.returncode:
        raise ClusterError(
            f"apt-get {command[0]} failed with exit code {done.returncode}: its last lines give the reason."
        )


@contextlib.contextmanager
def _no_service_starts() -> Iterator[None]:
    """Debian starts what it installs, unless this file forbids it; one that is there already stays as it is."""
    try:
        descriptor = os.open(POLICY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
    except FileExistsError:
        yield
        return
    try:
        os.write(descriptor, b"#!/bin/sh\nexit 101\n")
        os.close(descriptor)
        yield
    finally:
        POLICY.unlink()


def _disable(services: Sequence[str]) -> None:
    """Keeps new services off at the next boot of the machine."""
    for service in services:
        by_systemd = ["systemctl", "disable", "--quiet", service]
        command = by_systemd if shutil.which("systemctl", path=PATH) else ["update-rc.d", service, "disable"]
        subprocess.run(command, env=ENVIRON, check=False)
