"""GPUs: what NVML and NCCL's own log say of them, and the checks of it. What a driver does not tell is left out."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from hvdtrain import files
from hvdtrain.core.wording import counted
from hvdtrain.errors import DeviceError
from hvdtrain.launch.devices import gpu_index, nvml_gpus
from hvdtrain.launch.topology import Topology
from hvdtrain.tools.doctor.findings import NOTHING, Findings, Gpu, Rank, Verdict, check, fail, ok, skip, warn
from hvdtrain.tools.doctor.launch import BUILD
from hvdtrain.untrusted import whole_number

MOST_BYTES, MOST_CONNECTIONS = 2**22, 256  # of NCCL's log
CHANNEL = re.compile(
    r"NCCL INFO (?:Channel|Ring) [0-9/]{1,9} : ([0-9]{1,6})\S{0,18} -> ([0-9]{1,6})\S{0,18}(?: \[\w{4,7}\])? via "
    r"(P2P|SHM|NET/[A-Za-z0-9_ -]{1,40})(?=[/\s]|$)"
)
SEE_ALL = "# in place of --gpus-per-task: #SBATCH --gpus-per-node=N, and srun --gpu-bind=none"


def shown() -> tuple[Gpu, ...]:
    """The GPUs of this host that no control group hides from this process."""
    with contextlib.suppress(Exception):  # of a driver
        nvml, handles = nvml_gpus()
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        driver = f"{nvml.nvmlSystemGetDriverVersion()}, runs CUDA {cuda // 1000}.{cuda % 1000 // 10}"
        return tuple(_gpu(nvml, uuid, handle, driver) for uuid, handle in handles.items())
    return ()


def _gpu(nvml: Any, uuid: str, handle: Any, driver: str) -> Gpu:
    def read(query: str, *given: int) -> Any:
        with contextlib.suppress(Exception):  # not every card supports it
            return getattr(nvml, f"nvmlDeviceGet{query}")(handle, *given)
        return None

    links = [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if read("NvLinkState", link)]
    kinds = (nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY)
    of_links = [read("NvLinkErrorCounter", link, kind) or 0 for link in links for kind in kinds]
    # GB/s in one direction, from the sources in docs/cluster.md: a NVLink of Blackwell has 50, one before it 25.
    each, pcie = 50 if (read("CudaComputeCapability") or [0])[0] >= 10 else 25, read("MaxPcieLinkGeneration") or 0
    speed = f"{len(links)} NVLinks, {len(links) * each}" if links else f"PCIe {pcie}, {2 ** (pcie + 1)}"
    kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    ecc = [read("TotalEccErrors", kind, since) for since in (nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC)]
    link = f"{speed} GB/s each way" if links or pcie else ""
    return Gpu(uuid, read("Name") or "", read("PersistenceMode"), ecc[0], ecc[1], link, sum(of_links), driver)


def connections_in(log: Path) -> list[tuple[int, int, str]]:
    """The connections in NCCL's log: none where the file is another user's, or a link."""
    with contextlib.suppress(OSError, ValueError), files.opened(log, follow=False) as opened:
        if files.is_own(os.fstat(opened.fileno())):
            return connections(opened.read(MOST_BYTES).decode(errors="replace"))
    return []


def connections(text: str) -> list[tuple[int, int, str]]:
    """Two ranks and what connects them, for each line of NCCL like `Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM`."""
    return sorted({(int(a), int(b), via.rstrip()) for a, b, via in CHANNEL.findall(text)})[:MOST_CONNECTIONS]


@check("driver", "GPU", "one for each GPU host")
def _driver(findings: Findings) -> Verdict:
    found = next((rank.gpus[0].driver for rank in findings.ranks if rank.gpus), "")
    return ok(found) if found else skip("no GPU")


@check("CUDA", "GPU", "a driver at least as new as the frameworks' CUDA")
def _cuda(findings: Findings) -> Verdict:
    driver, built = _driver(findings), [it for it in findings.software.frameworks if it.cuda]
    runs = driver.found.rpartition("CUDA ")[2]
    if not built or driver.status == "skip":
        return skip("the frameworks are built for the CPU") if driver.status == "ok" else driver
    for it in built:
        if (whole_number(it.cuda.partition(".")[0]) or 0) > (whole_number(runs.partition(".")[0]) or 0):
            fix = f"# install a {it.name} built for CUDA {runs} or older, or request a driver of CUDA {it.cuda}"
            return fail(f"{it.name} is built for CUDA {it.cuda}, the driver runs {runs}", "a driver as new", fix)
    return ok(f"{', '.join(f'{it.name} is built for {it.cuda}' for it in built)}, the driver runs {runs}")


@check("NCCL", "GPU", "a Horovod built with NCCL, where there are GPUs")
def _nccl(findings: Findings) -> Verdict:
    built = [f"{it.name} {it.nccl}".rstrip() for it in findings.software.frameworks if it.nccl_built]
    if not any(rank.visible_gpus for rank in findings.ranks):
        return skip("no GPU")
    if not built:
        found, fix = "GPUs are visible, but this Horovod averages on the CPU", f"{BUILD} --gpu nccl"
        return fail(found, "one built with NCCL", fix)
    return ok(f"Horovod is built with that of {', '.join(built)}")


@check("GPUs", "GPU", "one for each rank, or to each rank its own", each="rank")
def _gpus(findings: Findings, rank: Rank) -> Verdict:
    """Whether each rank of a host finds a GPU that no other rank takes, and reaches those of the others."""
    if not rank.visible_gpus:
        return skip("no GPU")
    topology = Topology(0, rank.local_size, 0, rank.local_size, None, rank.host, findings.step.topology.launcher, None)
    try:
        gpu_index("auto", rank.visible_gpus, topology, gpu_operations=True)
    except DeviceError:
        found = f"{counted(rank.visible_gpus, 'GPU')} visible to each of {rank.local_size} ranks on {rank.host}"
        enough = rank.visible_gpus > rank.local_size
        mask = f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(rank.local_size)))}"
        fix = mask if enough else f"# start at most {counted(rank.visible_gpus, 'rank')} a host: one for each GPU"
        return fail(found, fix=fix)
    others = {it.gpu: it.rank for it in findings.ranks if it.host == rank.host and it.rank != rank.rank and it.gpu}
    if rank.gpu in others:
        found = f"rank {others[rank.gpu]} has the same one, {rank.gpu}: NCCL refuses that, also of its slices (MIG)"
        return fail(found, fix=f"# start at most {counted(len(others), 'rank')} on {rank.host}: one for each GPU")
    if rank.gpus and (hidden := others.keys() - {gpu.uuid for gpu in rank.gpus}):
        found = f"control groups hide the GPUs of {counted(len(hidden), 'other rank')} of its host"
        return warn(found, "all of the host's are seen: NCCL reaches a hidden one neither by NVLink nor PCIe", SEE_ALL)
    return ok(f"{rank.visible_gpus} visible, {counted(rank.local_size, 'rank')} on the host")


@check("GPUs' health", "GPU", "no errors of memory and links, and a driver that stays loaded", each="rank")
def _health(_: Findings, rank: Rank) -> Verdict:
    if not rank.gpus:
        return NOTHING
    for gpu in rank.gpus:
        title, fix = f"{gpu.name} {gpu.uuid}", f"nvidia-smi -q -i {gpu.uuid}  # for the administrator"
        if gpu.ecc_errors:
            return fail(f"{title}: {gpu.ecc_errors} uncorrected errors of its memory", fix=fix)
        if gpu.nvlink_errors:
            return warn(f"{title}: {gpu.nvlink_errors} replays and recoveries of its NVLinks", fix=fix)
        if gpu.persistence == 0:
            return warn(f"{title}: no persistence mode", fix="nvidia-smi -pm 1  # as root")
    ever = sum(gpu.ecc_ever or 0 for gpu in rank.gpus)
    return ok(f"{counted(len(rank.gpus), 'GPU')} without errors" + (f" now, {ever} of memory before" if ever else ""))


@check("NCCL's transport", "GPU", "P2P in a host, and no sockets where there is a faster network")
def _transport(findings: Findings) -> Verdict:
    """By what NCCL connected the ranks of the doctor's own allreduce."""
    live = findings.step.live
    if not live or not live.connections:
        return NOTHING
    hosts, first = {rank.rank: rank.host for rank in findings.ranks}, findings.rank_0
    near, far = (
        [via for a, b, via in live.connections if (hosts.get(a) == hosts.get(b)) is same] for same in (True, False)
    )
    places = [(sorted({*near}), "in a host"), (sorted({*far}), "between hosts")]
    text = "; ".join(f"{', '.join(vias)} {place}" for vias, place in places if vias)
    if set(near) - {"P2P"} and any("NVLink" in gpu.link for rank in findings.ranks for gpu in rank.gpus):
        return warn(text, "P2P in a host: its GPUs have NVLinks", f"unset NCCL_P2P_DISABLE NCCL_P2P_LEVEL  {SEE_ALL}")
    fast = [*first.infiniband, *(it.name for it in first.usable_interfaces if it.name.startswith("hsn"))]
    if "NET/Socket" in far and fast:
        fix = "unset NCCL_IB_DISABLE NCCL_NET  # and load the site's plugin of NCCL, as aws-ofi-nccl on Slingshot"
        return warn(text, f"a transport over {', '.join(fast)}", fix)
    return ok(text)
