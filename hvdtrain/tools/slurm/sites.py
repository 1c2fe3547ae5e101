"""Supercomputers, and what a job script must request at each, from the pages of its computing centre."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")  # as SLURM reads it


@dataclass(frozen=True, kw_only=True)
class Site:
    """One machine. `gpus` and `cpus` are a node's; a CPU is what --cpus-per-task counts, a core or a hyper-thread."""

    title: str
    source: str
    gpus: int
    cpus: int
    time: str = "01:00:00"
    mpi: str | None = "pmix"  # srun's plugin; None where srun takes no --mpi
    gres: bool = True  # whether GPUs are requested with --gres; else the constraint gives all of a node
    memory_gib: int | None = None  # a node's
    tf_memory: str | None = None  # requested with TF_CONFIG, where a job takes one GPU per node
    hint: str | None = None
    directives: tuple[tuple[str, str], ...] = ()  # an option, and why it is given
    account: tuple[str, str] = (r"\S+", "")  # what an account must match, and an example
    modules: tuple[str, ...] = ()
    frameworks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # the module of each
    environment: tuple[tuple[str, str, str], ...] = ()  # name, value, and why it is set
    gpu_order: str | None = None  # CUDA_VISIBLE_DEVICES for every task; SLURM would undo an export of it
    host_suffix: str = ""  # makes a hostname the name of the node's address in the fast network
    partitions: tuple[str, ...] = ()  # those with this kind of node, the usual one first; none: not checked
    constraints: tuple[str, ...] = ()  # a GPU job needs one of these, as the first; none: not checked


_NO_HYPERTHREADS = "nomultithread"
_NERSC_FRAMEWORKS = MappingProxyType({"torch": "pytorch", "tensorflow": "tensorflow"})
_JEAN_ZAY = Site(
    title="IDRIS Jean Zay, 4 GPUs a node",
    source="IDRIS documentation, Jean Zay: multi-GPU SLURM jobs (www.idris.fr)",
    gpus=4,
    cpus=40,
    hint=_NO_HYPERTHREADS,
    account=(r"\w+@\w+", "abc@v100"),
)
_CAPELLA = Site(
    title="ZIH Capella",
    source="ZIH HPC compendium, distributed training (compendium.hpc.tu-dresden.de)",
    gpus=4,
    cpus=56,
    memory_gib=750,
    tf_memory="64000M",
    modules=("release/24.04", "GCC/12.3.0", "OpenMPI/4.1.5"),
    frameworks=MappingProxyType({"torch": "PyTorch/2.1.2-CUDA-12.1.1", "tensorflow": "TensorFlow"}),
)

SITES: Mapping[str, Site] = MappingProxyType(
    {
        "piz-daint": Site(
            title="CSCS Piz Daint (Cray XC50)",
            source="CSCS user portal, Piz Daint: PyTorch and TensorFlow with Horovod (user.cscs.ch)",
            gpus=1,
            cpus=12,
            time="00:15:00",
            mpi=None,
            gres=False,
            hint=_NO_HYPERTHREADS,
            directives=(("--switches=1", "nodes of one Dragonfly group (it has 384): the fastest network"),),
            modules=("daint-gpu",),
            frameworks=MappingProxyType({"torch": "PyTorch", "tensorflow": "TensorFlow"}),
            environment=(
                ("OMP_NUM_THREADS", "$SLURM_CPUS_PER_TASK", "a thread for each CPU of the task"),
                ("NCCL_DEBUG", "INFO", "NCCL reports in the log which network it took"),
                ("NCCL_IB_HCA", "ipogif0", "the Aries network, which NCCL does not find by itself"),
            ),
            constraints=("gpu",),
        ),
        "juwels-booster": Site(
            title="JSC JUWELS Booster",
            source="JSC documentation, JUWELS batch system (apps.fz-juelich.de/jsc/hps/juwels)",
            gpus=4,
            cpus=96,
            time="02:00:00",
            environment=(("CUDA_VISIBLE_DEVICES", "0,1,2,3", "every task sees the node's GPUs and takes its own"),),
            host_suffix="i",
            partitions=("booster", "develbooster", "largebooster"),
        ),
        "jean-zay": _JEAN_ZAY,
        "jean-zay-gpu-p2": replace(
            _JEAN_ZAY,
            title="IDRIS Jean Zay, 8 GPUs a node",
            gpus=8,
            cpus=24,
            partitions=("gpu_p2", "gpu_p2s", "gpu_p2l"),
        ),
        "capella": _CAPELLA,
        "alpha": replace(_CAPELLA, title="ZIH Alpha Centauri", gpus=8, cpus=48, memory_gib=900),
        "perlmutter": Site(
            title="NERSC Perlmutter",
            source="NERSC documentation, Perlmutter: running jobs; deep learning at scale (docs.nersc.gov)",
            gpus=4,
            cpus=128,
            time="00:30:00",
            mpi="cray_shasta",
            frameworks=_NERSC_FRAMEWORKS,
            environment=(
                ("FI_MR_CACHE_MONITOR", "userfaultfd", "keeps the network library from hanging when memory is freed"),
                ("HDF5_USE_FILE_LOCKING", "FALSE", "HDF5 files cannot be locked on this file system"),
            ),
            gpu_order="3,2,1,0",
            constraints=("gpu", "gpu&hbm40g", "gpu&hbm80g"),
        ),
        "cori-gpu": Site(
            title="NERSC Cori GPU",
            source="NERSC documentation, Cori GPU nodes (docs-dev.nersc.gov/cgpu)",
            gpus=8,
            cpus=80,
            time="00:30:00",
            frameworks=_NERSC_FRAMEWORKS,
            constraints=("gpu",),
        ),
        "generic": Site(
            title="any other cluster",
            source="a node of 4 GPUs and 32 CPUs; give yours with --gpus-per-node and --cpus-per-task",
            gpus=4,
            cpus=32,
        ),
    }
)


def table() -> str:
    """The sites and the shapes of their nodes, one site per line."""
    header = ("site", "GPUs", "tasks x CPUs", "time", "srun --mpi", "partition", "machine")
    rows = [header]
    for name, site in SITES.items():
        shape = f"{site.gpus} x {site.cpus // site.gpus}"
        partition = site.partitions[0] if site.partitions else "-"
        rows.append((name, str(site.gpus), shape, site.time, site.mpi or "-", partition, site.title))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
