"""The hosts, judged: GPUs, network, limits, CPUs, clock, names and folder, on every rank that reported."""

import shlex
import time
from collections.abc import Callable
from functools import partial

from hvdtrain.errors import DeviceError
from hvdtrain.launch.devices import gpu_index
from hvdtrain.launch.topology import Topology
from hvdtrain.tools.doctor import launch
from hvdtrain.tools.doctor.findings import Check, Findings, Framework, Interface, Rank, Verdict, count, over_ranks
from hvdtrain.untrusted import whole_number

FILES = 4096
FREE_BYTES = 5 * 10**9
SKEW_SECONDS = 1.0
FIRST_YEAR = 2024


def checks(findings: Findings) -> list[Check]:
    """The lines about the machines."""
    per_rank: list[tuple[str, str, Callable[[Rank], Verdict]]] = [
        ("GPUs", "GPU", partial(_gpus, findings)),
        ("NCCL's interface", "network", partial(_nccl_interface, findings)),
        ("Gloo's interface", "network", partial(_gloo_interface, findings)),
        ("InfiniBand", "network", _infiniband),
        ("locked memory", "limits", _memlock),
        ("open files", "limits", _nofile),
        ("cpus per task", "cpus", partial(_cpus, findings)),
        ("OMP_NUM_THREADS", "cpus", _threads),
        ("hostname", "host", _hostname),
        ("output folder", "host", _folder),
        ("free space", "host", _space),
    ]
    return [
        _driver(findings).named("driver", "GPU"),
        _cuda(findings).named("CUDA", "GPU"),
        _nccl(findings).named("NCCL", "GPU"),
        *(over_ranks(findings, name, group, judge) for name, group, judge in per_rank),
        _binding(findings).named("binding", "cpus"),
        _clock(findings).named("clock", "host"),
    ]


def _torch(findings: Findings) -> Framework:
    return next((it for it in findings.software.frameworks if it.name == "torch"), Framework("torch"))


def _driver(findings: Findings) -> Verdict:
    driver = findings.software.driver
    return (
        Verdict("ok", f"{driver}, runs CUDA {findings.software.driver_cuda}") if driver else Verdict("skip", "no GPU")
    )


def _cuda(findings: Findings) -> Verdict:
    cuda, runs = _torch(findings).cuda, findings.software.driver_cuda
    if not cuda or not runs:
        return Verdict("skip", "torch is built for the CPU" if runs else "no GPU")
    if (whole_number(cuda.split(".")[0]) or 0) > (whole_number(runs.split(".")[0]) or 0):
        fix = f"# install a torch built for CUDA {runs} or older, or request a driver of CUDA {cuda}"
        return Verdict("fail", f"torch is built for CUDA {cuda}, the driver runs {runs}", "a driver as new", fix)
    return Verdict("ok", f"torch is built for {cuda}, the driver runs {runs}")


def _nccl(findings: Findings) -> Verdict:
    torch = _torch(findings)
    if not any(rank.visible_gpus for rank in findings.ranks):
        return Verdict("skip", "no GPU")
    if not torch.nccl_built:
        fix = "python -m hvdtrain build --frameworks torch --gpu nccl"
        return Verdict("fail", "GPUs are visible, but this Horovod averages on the CPU", "one built with NCCL", fix)
    return Verdict("ok", f"torch brings {torch.nccl}, and Horovod is built with it")


def _gpus(findings: Findings, rank: Rank) -> Verdict:
    """Whether each rank finds a GPU of its own, as training would take it."""
    if not rank.visible_gpus:
        return Verdict("skip", "no GPU")
    topology = Topology(0, rank.local_size, 0, rank.local_size, None, rank.host, findings.step.topology.launcher, None)
    try:
        gpu_index("auto", rank.visible_gpus, topology, gpu_operations=True)
    except DeviceError:
        found = f"{rank.visible_gpus} GPUs visible to each of {rank.local_size} ranks on {rank.host}"
        enough = rank.visible_gpus > rank.local_size
        mask = f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(rank.local_size)))}"
        fix = mask if enough else f"# start at most {rank.visible_gpus} ranks a host: one for each GPU"
        return Verdict("fail", found, "one for each rank, or to each rank its own", fix)
    return Verdict("ok", f"{rank.visible_gpus} visible, {count(rank.local_size, 'rank')} on the host")


def _nccl_interface(findings: Findings, rank: Rank) -> Verdict:
    usable = [it for it in rank.interfaces if it.up and it.address]
    requested = rank.environ.get("NCCL_SOCKET_IFNAME", "")
    if requested:
        exclude, exact = requested.startswith("^"), requested.lstrip("^").startswith("=")
        names = requested.lstrip("^=").split(",")
        taken = [it for it in usable if exclude != any(_means(it.name, name, exact) for name in names)]
        return _taken("NCCL_SOCKET_IFNAME", requested, taken, usable, findings)
    # NCCL's own order: InfiniBand's interfaces, then any but these, then these.
    last = ("docker", "lo")
    taken = [it for it in usable if it.name.startswith("ib")]
    taken = taken or [it for it in usable if not it.name.startswith(last)] or usable
    return _taken("NCCL_SOCKET_IFNAME", "", taken, usable, findings)


def _means(interface: str, name: str, exact: bool) -> bool:
    return interface == name if exact else interface.startswith(name)


def _gloo_interface(findings: Findings, rank: Rank) -> Verdict:
    usable = [it for it in rank.interfaces if it.up and it.address]
    variable = next((name for name in ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME") if rank.environ.get(name)), "")
    if variable:
        names = rank.environ[variable].split(",")
        return _taken(variable, rank.environ[variable], [it for it in usable if it.name in names], usable, findings)
    # Gloo binds to the address of the host's name. The whole of 127/8 is lo's, though lo shows only one.
    loopback = [Interface("lo", True, rank.address)] if rank.address.startswith("127.") else []
    taken = loopback or [it for it in usable if it.address == rank.address]
    return _taken("HOROVOD_GLOO_IFACE", "", taken, usable, findings)


def _taken(
    variable: str, requested: str, taken: list[Interface], usable: list[Interface], findings: Findings
) -> Verdict:
    """The interface that will be used, or why it will not do."""
    there = ", ".join(it.name for it in usable) or "none"
    outside = [it.name for it in usable if not it.address.startswith("127.")]
    fix = f"export {variable}={outside[0]}" if outside else f"# {variable}: no interface of this host is up"
    if not taken:
        found = (
            f"{variable}={requested} names none that is up" if requested else "none that is up has this host's address"
        )
        return Verdict("fail", found, f"one of: {there}", fix)
    it = taken[0]
    if it.address.startswith("127.") and findings.hosts > 1:
        return Verdict("fail", f"{it.name} ({it.address}), for {findings.hosts} hosts", f"one of: {there}", fix)
    source = f", from {variable}" if requested else ""
    return Verdict("ok", f"{it.name} ({it.address}){source}")


def _infiniband(rank: Rank) -> Verdict:
    if not rank.infiniband:
        return Verdict("skip", "no device")
    if rank.environ.get("NCCL_IB_DISABLE") == "1":
        found = f"{', '.join(rank.infiniband)}, but NCCL_IB_DISABLE=1"
        return Verdict("warn", found, "NCCL over InfiniBand", "unset NCCL_IB_DISABLE")
    return Verdict("ok", ", ".join(rank.infiniband))


def _memlock(rank: Rank) -> Verdict:
    size = "unlimited" if rank.memlock == -1 else f"{rank.memlock / 2**20:.0f} MiB"
    if not rank.infiniband or rank.memlock == -1:
        return Verdict("ok", size if rank.infiniband else f"{size}; no InfiniBand to need it")
    may = rank.memlock_hard == -1
    fix = "ulimit -l unlimited" if may else "# administrator: PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    return Verdict("fail", size, "unlimited, as InfiniBand pins what it sends", fix)


def _nofile(rank: Rank) -> Verdict:
    if rank.nofile == -1 or rank.nofile >= FILES:
        return Verdict("ok", "unlimited" if rank.nofile == -1 else f"{rank.nofile}")
    may = rank.nofile_hard == -1 or rank.nofile_hard >= FILES
    fix = f"ulimit -n {FILES}" if may else f"# administrator: nofile {FILES} in /etc/security/limits.conf"
    return Verdict("warn", f"{rank.nofile}", f"at least {FILES}, for data workers and connections", fix)


def _cpus(findings: Findings, rank: Rank) -> Verdict:
    """Whether the task got the CPUs that the job requested."""
    have = rank.granted(len(rank.cpus))
    requested = launch.cpus_per_task(rank)
    found = f"{len(rank.cpus)} of the host's {rank.cpus_of_host}"
    found += f", by the container's quota {rank.quota:g} of them" if have < len(rank.cpus) else ""
    # A SLURM configured with more CPUs than the host has cannot give them: all there are is enough.
    wanted = whole_number(requested)
    if wanted is None or have >= min(wanted, rank.cpus_of_host):
        return Verdict("ok", found + (f", {requested} requested" if requested else ""))
    if findings.step.topology.launcher != "srun":
        return Verdict(
            "warn", f"{found}, {requested} requested", requested, "# start the ranks with srun, which gives them"
        )
    expected = f"{requested}: srun of SLURM 22.05 and newer does not take it from sbatch"
    if "SRUN_CPUS_PER_TASK" in rank.environ:
        expected = f"{requested}, as SRUN_CPUS_PER_TASK has it"
    return Verdict("fail", found, expected, launch.srun(findings))


def _threads(rank: Rank) -> Verdict:
    value, have = rank.environ.get("OMP_NUM_THREADS"), rank.granted(len(rank.cpus))
    if not value:
        return Verdict("ok", "not set: hvdtrain takes the CPUs of the task")
    threads = whole_number(value.split(",")[0])
    if threads is None:
        return Verdict("fail", f"OMP_NUM_THREADS={value}", "a number", f"export OMP_NUM_THREADS={have}")
    if threads > have:
        found = f"{value} threads on {count(have, 'CPU')}"
        return Verdict("warn", found, f"at most {have}", f"export OMP_NUM_THREADS={have}")
    return Verdict("ok", f"{value}, on {count(have, 'CPU')}")


def _binding(findings: Findings) -> Verdict:
    """Whether ranks of one host share CPUs though they are bound."""
    by_host: dict[str, list[Rank]] = {}
    for rank in findings.ranks:
        by_host.setdefault(rank.host, []).append(rank)
    for host, ranks in by_host.items():
        # Only rank 0 is known where the ranks could not join.
        together = ranks[0].granted(len(set().union(*(rank.cpus for rank in ranks))))
        everybody = ranks[0].local_size
        if len(ranks) == everybody and together < everybody:
            found = f"{everybody} ranks on {count(together, 'CPU')} of {host}"
            fix = f"# start at most {count(together, 'rank')} a host, or request more CPUs; mpirun: --bind-to none"
            return Verdict("warn", found, "a CPU for each rank", fix)
    bound = len(findings.rank_0.cpus) < findings.rank_0.cpus_of_host
    return Verdict("ok", "each rank to its CPUs" if bound else "none: the ranks of a host share its CPUs")


def _hostname(rank: Rank) -> Verdict:
    if rank.address:
        return Verdict("ok", f"{rank.host} is {rank.address}")
    fix = f'echo "$(hostname -I | cut -d" " -f1) {shlex.quote(rank.host)}" >> /etc/hosts  # as root'
    return Verdict("fail", f"{rank.host} does not resolve", "an address: Gloo and torchrun look it up", fix)


def _folder(rank: Rank) -> Verdict:
    if rank.unwritable:
        return Verdict("fail", rank.unwritable, f"to write {rank.folder}", 'cd "${SCRATCH:-$HOME}"')
    return Verdict("ok", f"{rank.folder} can be written")


def _space(rank: Rank) -> Verdict:
    if rank.unwritable:
        return Verdict("skip", "nowhere to write")
    size = f"{rank.free_bytes / 1e9:.1f} GB"
    if rank.free_bytes < FREE_BYTES:
        return Verdict("warn", size, "5 GB for checkpoints", f"du -sh {shlex.quote(rank.folder)}/* | sort -h")
    return Verdict("ok", size)


def _clock(findings: Findings) -> Verdict:
    year = time.gmtime(findings.clock).tm_year
    if year < FIRST_YEAR:
        return Verdict("fail", f"the year is {year}", f"{FIRST_YEAR} or later", "timedatectl set-ntp true  # as root")
    clocks = findings.step.live.clocks if findings.step.live else ()
    if len(clocks) < 2:
        return Verdict("ok", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(findings.clock)))
    ordered = sorted(clocks)
    middle = ordered[len(ordered) // 2]
    off, rank = max((abs(clock - middle), rank) for rank, clock in enumerate(clocks))
    if off <= SKEW_SECONDS:
        return Verdict("ok", f"the ranks agree to {ordered[-1] - ordered[0]:.2f} s")
    found = f"rank {rank} on {findings.ranks[rank].host} is {clocks[rank] - middle:+.1f} s off"
    fix = f"ssh {shlex.quote(findings.ranks[rank].host)} timedatectl set-ntp true  # as root"
    return Verdict("warn", found, f"within {SKEW_SECONDS:g} s", fix)
