"""The command line of slurm/minicluster."""

import argparse
import fcntl
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from mini import ClusterError, cluster, config, enter, network, packages, quota, status
from mini.state import HEAD, Cluster, require_roots

DEFAULT_STATE = "/var/lib/minicluster"
SLURM_COMMANDS = ("srun", "sbatch", "salloc", "sinfo", "squeue", "scancel", "scontrol")
HELP = f"""usage: slurm/minicluster [--state DIR] [-e NAME=VALUE] COMMAND ...

A real SLURM of several nodes on this machine: a login host {HEAD!r} with slurmctld, and on every node slurmd, an
address, a hostname, a /tmp of its own. Needs root; sudo keeps the environment with
    sudo -E env "PATH=$PATH" slurm/minicluster ...

commands:
  up          bring it up: up --help lists what a site can be given
  down        end everything and forget it
  status      what is up, and its state in SLURM
  exec        exec NODE COMMAND...: run a command on a node
  srun, sbatch, salloc, sinfo, squeue, scancel, scontrol
              SLURM's own, on the login host, in the current directory
  shape       shape NODE|all --rate 1gbit --delay 50us: another speed for links
  cut         cut NODE: its link drops every packet; cut --power NODE: everything on it dies at once
  heal        heal NODE: undo a cut, boot it again
  install     get Debian's packages; none of their services is started

--state DIR, or MINICLUSTER_STATE, is the cluster's folder (default {DEFAULT_STATE}): give each cluster its own.
-e NAME=VALUE sets a variable for the command; the caller's own SLURM_*, SBATCH_*, SRUN_*, PMI*, OMPI_*, PRTE_* and
HOROVOD_* are left out."""


class Parser(argparse.ArgumentParser):
    """Raises an error of one line."""

    def error(self, message: str) -> NoReturn:
        raise ClusterError(f"{message}; {self.prog} --help lists what there is.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # status | head
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except ClusterError as error:
        print(f"minicluster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("minicluster: interrupted", file=sys.stderr)
        return 128 + signal.Signals[str(interrupt) or "SIGINT"]


def _main(argv: Sequence[str]) -> int:
    parser = Parser(prog="slurm/minicluster", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--state", default=os.environ.get("MINICLUSTER_STATE", DEFAULT_STATE))
    parser.add_argument("-e", dest="environ", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("command", nargs="?", metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    flags = parser.parse_args(argv)
    if flags.help or not flags.command:
        print(HELP)
        return 0 if flags.help else 2
    if os.geteuid() == 0:
        require_roots(Path(flags.state))
    folder = Path(flags.state).resolve()
    given = _assignments(flags.environ)
    if flags.command in SLURM_COMMANDS:
        _require_root()
        return enter.run(Cluster.load(folder), HEAD, [flags.command, *flags.arguments], given)
    if flags.command not in COMMANDS:
        raise ClusterError(f"no command {flags.command!r}; commands: {', '.join([*COMMANDS, *SLURM_COMMANDS])}.")
    add_flags, command = COMMANDS[flags.command]
    own = Parser(prog=f"slurm/minicluster {flags.command}", description=command.__doc__, allow_abbrev=False)
    add_flags(own)
    parsed = own.parse_args(flags.arguments)
    parsed.given = given
    return command(folder, parsed)


def _assignments(assignments: Sequence[str]) -> dict[str, str]:
    for assignment in assignments:
        if "=" not in assignment:
            raise ClusterError(f"-e must be NAME=VALUE, got {assignment!r}.")
    return dict(assignment.split("=", 1) for assignment in assignments)


def _require_root() -> None:
    if os.geteuid():
        raise ClusterError(
            'nodes are made of namespaces, which needs root: sudo -E env "PATH=$PATH" slurm/minicluster ...'
        )


def _number(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,7}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, got {text!r}")
        return int(text)

    return number


def _memory(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,7})([MGT])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must read like 192G (M, G or T), got {text!r}")
    return int(found[1]) * {"M": 1, "G": 1024, "T": 1024**2}[found[2]]


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,30}", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"must be a letter and then letters, digits, - or _, got {text!r}")
    return text


def _names(text: str) -> str:
    return ",".join(_name(name) for name in text.split(",") if text)


def _up_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("--nodes", type=_number(1), default=4)
    add("--cpus", type=_number(1), default=96, help="of a node, as SLURM counts them: hardware threads (96)")
    add("--threads-per-core", type=_number(1), default=2)
    add("--mem", type=_memory, default="192G", help="of a node (192G)")
    add("--gpus", type=_number(0), default=4, help="of a node (4): SLURM hands them out, none is there")
    add("--partition", type=_name, nargs="+", action="extend", metavar="NAME", help="the first is the default (batch)")
    add("--feature", type=_names, default="", metavar="A,B", help="what --constraint may request")
    add("--hostname", type=_name, default="nid", metavar="PREFIX", help="nodes are called nid001 and so on")
    add("--rate", default="none", help="of a node's link, both ways, like 1gbit")
    add("--delay", default="none", help="from node to node, one way, like 50us")
    add("--cpu-quota", type=float, metavar="N", help="processors that a node may really use, like .3 (all there are)")
    add("--fabric", type=_name, metavar="IFNAME", help="a second network, like ib0, which then has the rate and delay")
    add("--fabric-suffix", type=_name, metavar="LETTER", help="nid001i is then nid001's address on the fabric")
    add("--mpi", type=_name, default="pmix", help="what srun takes without --mpi (pmix)")
    add(
        "--slurmd-timeout",
        type=_number(2),
        default=10,
        metavar="S",
        help="until a silent node is down (10; sites: 300)",
    )
    add("--kill-wait", type=_number(1), default=2, metavar="S", help="between TERM and KILL (2; sites: 30)")
    add("--share", nargs="+", action="extend", metavar="DIR", help="a folder below /tmp or /run that every node sees")
    add("--install", action="store_true", help="get Debian's packages first")


def _up(folder: Path, flags: argparse.Namespace) -> int:
    """Brings a cluster up: a login host and nodes."""
    _check(flags)
    link, shares = _link(flags), _shares(flags.share, os.environ)
    _require_root()
    if flags.install:
        packages.install()
    packages.require()
    packages.require_mpi(flags.mpi)
    if flags.cpu_quota is not None:
        quota.require(flags.nodes, flags.cpu_quota)
    program = network.needs_program(*link)
    if program:
        packages.require_compiler()
        print("this kernel has no netem or tbf: our own switch does the links' rate and delay")
    nodes = [f"{flags.hostname}{number:03}" for number in range(1, flags.nodes + 1)]
    new = Cluster(
        folder=folder,
        nodes=nodes,
        networks={"eth0": "10.77"} | ({flags.fabric: "10.78"} if flags.fabric else {}),
        suffix=flags.fabric_suffix or f"-{flags.fabric}",
        shares=shares,
        description=f"{flags.cpus} CPUs, {flags.mem // 1024} GB and {flags.gpus} GPUs a node"
        + (f", of which {flags.cpu_quota:g} CPUs are real" if flags.cpu_quota else ""),
        cpu_quota=flags.cpu_quota,
        program=program,
        links=dict.fromkeys(nodes, link),
    )
    began = time.monotonic()
    cluster.up(new, _machine(flags), enter.caller(os.environ))
    print(f"{HEAD} and {len(nodes)} nodes are up after {time.monotonic() - began:.1f} s: slurm/minicluster status")
    return 0


def _check(flags: argparse.Namespace) -> None:
    """Raises ClusterError where flags of `up` do not fit together."""
    if flags.cpus % flags.threads_per_core:
        rule = f"a multiple of --threads-per-core={flags.threads_per_core}"
        raise ClusterError(f"--cpus must be {rule}, got {flags.cpus}.")
    if flags.fabric == "eth0" or len(flags.fabric or "") > 15:
        raise ClusterError(f"--fabric must be an interface's name of up to 15 letters, not eth0, got {flags.fabric!r}.")
    if flags.fabric_suffix and not flags.fabric:
        raise ClusterError(f"--fabric-suffix {flags.fabric_suffix} names addresses on a fabric: give --fabric ib0 too.")


def _machine(flags: argparse.Namespace) -> config.Machine:
    return config.Machine(
        cpus=flags.cpus,
        threads_per_core=flags.threads_per_core,
        memory=flags.mem,
        gpus=flags.gpus,
        partitions=flags.partition or ["batch"],
        features=flags.feature,
        mpi=flags.mpi,
        slurmd_timeout=flags.slurmd_timeout,
        kill_wait=flags.kill_wait,
    )


def _link(flags: argparse.Namespace) -> tuple[str, str]:
    network.quantity("--rate", flags.rate, network.RATES)
    network.quantity("--delay", flags.delay, network.DELAYS)
    return flags.rate.replace("none", ""), flags.delay.replace("none", "")


def _shares(requested: list[str] | None, environ: Mapping[str, str]) -> list[str]:
    """The folders to show on every node in spite of its own /tmp and /run; without --share, those in use here."""
    python = environ.get("VIRTUAL_ENV") or str(Path(shutil.which("python") or "/usr/bin/python").parents[1])
    folders = {Path(folder).resolve() for folder in requested or [str(Path.cwd()), python]}
    for folder in folders if requested else ():
        if not folder.is_dir() or str(folder) in cluster.HIDDEN:
            hidden = ", ".join(cluster.HIDDEN)
            raise ClusterError(
                f"--share must be a folder that exists, and none of {hidden}, every node's own; got {folder}."
            )
    return sorted(str(folder) for folder in folders if any(str(folder).startswith(f"{top}/") for top in cluster.HIDDEN))


def _no_flags(parser: Parser) -> None:
    pass


def _node_flags(parser: Parser) -> None:
    parser.add_argument("node")


def _cut_flags(parser: Parser) -> None:
    parser.add_argument("--power", action="store_true", help="kill everything on it instead")
    parser.add_argument("node")


def _shape_flags(parser: Parser) -> None:
    parser.add_argument("node", help="a node, or all")
    parser.add_argument("--rate", default="none")
    parser.add_argument("--delay", default="none")


def _exec_flags(parser: Parser) -> None:
    parser.add_argument("-e", dest="environ", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("node")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="COMMAND")


def _loaded(folder: Path, host: str | None = None) -> Cluster:
    _require_root()
    found = Cluster.load(folder)
    if host:
        found.check(host)
    return found


def _changed(folder: Path, host: str | None = None) -> Cluster:
    """The cluster, for this command alone until it ends: another's change would otherwise be lost."""
    _loaded(folder, host)
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
    return _loaded(folder, host)


def _down(folder: Path, _flags: argparse.Namespace) -> int:
    """Ends the cluster and forgets it."""
    cluster.down(_changed(folder))
    return 0


def _status(folder: Path, _flags: argparse.Namespace) -> int:
    """Shows what is up."""
    print(status.table(_loaded(folder)))
    return 0


def _exec(folder: Path, flags: argparse.Namespace) -> int:
    """Runs a command on a node, in the current directory; scontrol as root, all else as the caller of sudo."""
    if not flags.arguments:
        raise ClusterError(f"exec needs a command: slurm/minicluster exec {flags.node} hostname")
    return enter.run(
        _loaded(folder, flags.node), flags.node, flags.arguments, flags.given | _assignments(flags.environ)
    )


def _shape(folder: Path, flags: argparse.Namespace) -> int:
    """Gives links another rate and delay."""
    link = _link(flags)
    found = _changed(folder, None if flags.node == "all" else flags.node)
    if flags.node == HEAD:
        raise ClusterError(f"the link of {HEAD} has no limits: shape a node, or all.")
    if not found.program and network.needs_program(*link):
        raise ClusterError(
            "this kernel has no netem or tbf, and this cluster not our own switch: "
            "slurm/minicluster down, then up with the --rate and --delay to begin with."
        )
    for node in found.nodes if flags.node == "all" else [flags.node]:
        found.process(node)
        found.links[node] = link
        network.shape(found, node)
    found.save()
    return 0


def _cut(folder: Path, flags: argparse.Namespace) -> int:
    """Cuts a node's link, which drops every packet from now on, or its power."""
    (cluster.power_off if flags.power else cluster.cut)(_changed(folder, flags.node), flags.node)
    return 0


def _heal(folder: Path, flags: argparse.Namespace) -> int:
    """Restores a node's link, boots it where it is off, and waits until SLURM has it back."""
    cluster.heal(_changed(folder, flags.node), flags.node)
    return 0


def _install(_folder: Path, _flags: argparse.Namespace) -> int:
    """Gets Debian's packages, and leaves their services off."""
    _require_root()
    packages.install()
    return 0


COMMANDS: dict[str, tuple[Callable[[Parser], None], Callable[[Path, argparse.Namespace], int]]] = {
    "up": (_up_flags, _up),
    "down": (_no_flags, _down),
    "status": (_no_flags, _status),
    "exec": (_exec_flags, _exec),
    "shape": (_shape_flags, _shape),
    "cut": (_cut_flags, _cut),
    "heal": (_node_flags, _heal),
    "install": (_no_flags, _install),
}
