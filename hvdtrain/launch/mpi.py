"""Which MPI a library would load, and by which plugin srun connects its tasks. Files are read, and nothing is
loaded."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import EngineUnavailable
from hvdtrain.files import read_bytes
from hvdtrain.launch import slurm
from hvdtrain.launch.devices import folders_of
from hvdtrain.launch.topology import Kind, Topology
from hvdtrain.untrusted import one_line

TITLES: Mapping[Kind, str] = {"openmpi": "Open MPI", "mpich": "MPICH"}
PLUGINS: Mapping[Kind, tuple[str, ...]] = {"openmpi": ("pmix",), "mpich": ("pmi2", "cray_shasta")}
"""The plugins for `srun --mpi=` that an MPI of each kind can use; `Mpi.plugins` are those of one library."""

# The file names by which a program requests its MPI. Cray's and Intel's MPI have MPICH's ABI, and its number 12.
SONAME = re.compile(rb"\0(libmpi\.so\.40|lib(?:mpi|mpich|mpi_cray|mpi_gnu_?\w*|mpi_intel\w*)\.so\.12)\0")
VERSION = re.compile(rb"(?<=\0)[1-9]\d{0,3}(?:\.\d{1,4}){1,2}(?:rc\d{1,4}|[ab]\d{1,4})?(?=\0)")
VENDORS = {
    "Cray MPICH": (b"CRAY MPICH version", re.compile(rb"CRAY MPICH version ([\d.]{1,20})")),
    "Intel MPI": (b"Intel(R) MPI Library", re.compile(rb"(?<=\0)20\d\d(?:\.\d{1,3}){1,2}(?=\0)")),
}
"""What is in the library of each vendor's MPI that has MPICH's ABI, and its version there."""
OF_MPI = re.compile(r"undefined symbol: (?:P?MPI[XR]?_|ompi_|opal_|mca_)|lib(?:mpi|open-|pmix)", re.IGNORECASE)
"""Found in the loader's message where it has loaded another MPI than Horovod was built with."""
MOST_BYTES = 256 * 2**20  # of a library; the largest MPI has a tenth


@dataclass(frozen=True)
class Mpi:
    """An MPI library: whose ABI it has, its version ("" where unknown), and its file (only a name where none is found).

    `vendor`: the name of `VENDORS` that it has, or "". `also`: further plugins that a site has built into it.
    """

    kind: Kind
    version: str
    library: Path
    vendor: str = ""
    also: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The MPI's usual name and its version: `Open MPI 5.0.11`."""
        return f"{self.vendor or TITLES[self.kind]} {self.version}".rstrip()

    @property
    def plugins(self) -> tuple[str, ...]:
        """The plugins for `srun --mpi=` that this library can use, the best first."""
        if self.vendor == "Cray MPICH":
            return tuple(reversed(PLUGINS["mpich"]))
        return (PLUGINS[self.kind][0], *self.also)

    @property
    def is_found(self) -> bool:
        """Whether the loader finds the library's file."""
        return self.library.is_absolute()


def horovod_library(framework: str) -> Path | None:
    """Horovod's compiled library for that framework; None where Horovod was not built for it, or is not installed."""
    found = (path for folder in folders_of("horovod") for path in sorted((folder / framework).glob("mpi_lib*.so")))
    return next(found, None)


def of_horovod(framework: str) -> Mpi | None:
    """The MPI that Horovod loads with that framework; None where it was built without MPI, or is not installed."""
    library = horovod_library(framework)
    return of_library(library) if library else None


def of_library(path: Path) -> Mpi | None:
    """The MPI that the loader loads for this library; None where it needs no MPI, or cannot be read."""
    requested = SONAME.search(_contents(path))
    if not requested:
        return None
    soname = requested[1].decode()
    kind: Kind = "openmpi" if soname.endswith(".40") else "mpich"
    library = _loaded(path, soname)
    if library is None:
        return Mpi(kind, "", Path(soname))
    data = _contents(library)
    vendor = next((name for name, (mark, _) in VENDORS.items() if mark in data), "")
    # What not every MPI of the kind has: pmi2 in an Open MPI up to 4, PMIx in an MPICH.
    has_pmi2 = kind == "openmpi" and (library.parent / "openmpi" / "mca_pmix_s2.so").exists()
    also = ("pmi2",) * has_pmi2 + ("pmix",) * (kind == "mpich" and b"libpmix.so" in data)
    return Mpi(kind, _version(data, vendor), library, vendor, also)


def unavailable(framework: str, title: str, error: Exception) -> EngineUnavailable:
    """The error where Horovod cannot be imported. To build it again does not help where another MPI hides its own."""
    found = of_horovod(framework) if OF_MPI.search(str(error)) else None
    remedy = f"build it: python -m hvdtrain build --frameworks {framework}"
    if found and is_by_path(found):
        remedy = (
            f"LD_LIBRARY_PATH makes the loader take {found.library}, another MPI than it was built with: take that out "
            "(module unload, unset LD_LIBRARY_PATH), or build for it: python -m hvdtrain build --mpi system"
        )
    return EngineUnavailable(f"Horovod for {title} cannot be imported ({one_line(error)}); {remedy}")


def is_by_path(found: Mpi) -> bool:
    """Whether the loader finds it in a folder of LD_LIBRARY_PATH."""
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return found.library in [each.resolve() for folder in folders for each in folder.glob("lib*mpi*.so*")]


def plugin_of(environ: Mapping[str, str]) -> str | None:
    """The plugin by which srun connects the tasks of this step, "none" where there is none; None outside a step."""
    if not slurm.is_step(environ):
        return None
    # SLURM_MPI_TYPE proves nothing: a user may have exported it, and srun --mpi=none leaves it as it is.
    return next(iter(slurm.plugins_of(environ)), "none")


def _contents(path: Path) -> bytes:
    try:
        return read_bytes(path, MOST_BYTES)
    except (OSError, ValueError):
        return b""


def _loaded(path: Path, soname: str) -> Path | None:
    """The file that the loader finds for the library in this environment."""
    try:
        ldd = [shutil.which("ldd") or "/usr/bin/ldd", str(path)]
        listed = subprocess.run(ldd, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(rf"^\s*{re.escape(soname)} => (/.*) \(0x", listed, re.MULTILINE)
    return Path(found[1]).resolve() if found else None


def _version(data: bytes, vendor: str) -> str:
    """The version, which is a constant in the library."""
    # Other libraries that are linked into this one have shorter numbers: where any has three parts it is the MPI's.
    found = (VENDORS[vendor][1] if vendor else VERSION).findall(data)
    return max(found, key=lambda version: version.count(b"."), default=b"").decode()


def uses_gloo(topology: Topology, framework: str, environ: Mapping[str, str]) -> bool:
    """Whether the ranks use Gloo with a rendezvous server that rank 0 starts."""
    if not topology.row.needs_rendezvous:
        return False
    if not topology.row.by_slurm or environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
        return True
    return bool(horovod_library(framework)) and of_horovod(framework) is None
