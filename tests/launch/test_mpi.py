"""Which MPI a library requests, by which plugin srun connects a step, which plugins are refused, and which ranks use
Gloo."""

import shutil
import subprocess
from pathlib import Path

import pytest
from choices import choice
from environments import CRAY, DAEMONS, HOROVODRUN, HYDRA, JOB, OPENMPI4, PMI2, PMIX, STEP, TORCHRUN, environment
from paths import DUMPS
from ranks import needs_horovod

from hvdtrain.core import compatibility
from hvdtrain.errors import WorldError
from hvdtrain.launch import mpi
from hvdtrain.launch.mpi import Mpi, horovod_library, of_horovod, of_library, plugin_of
from hvdtrain.launch.topology import discover

needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler: apt install gcc")


def shared_object(path: Path, source: str, *flags: str) -> Path:
    """A library built from that C."""
    path.parent.mkdir(exist_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path, *flags], input=source.encode(), check=True)
    return path


def library(folder: Path, soname: str, constants: str) -> Path:
    """An MPI of that name, with those strings in it."""
    source = f"const char *const constants[] = {{{constants}}}; int MPI_Init(void) {{ return 0; }}"
    return shared_object(folder / soname, source, f"-Wl,-soname,{soname}")


def program(folder: Path, of: Path) -> Path:
    """A library that requests that MPI and finds it as wheels do, from its own folder."""
    source = "int MPI_Init(void); int go(void) { return MPI_Init(); }"
    flags = [f"-L{of.parent}", f"-l:{of.name}", "-Wl,-rpath,$ORIGIN/../lib"]
    return shared_object(folder / "mpi_lib.so", source, *flags)


LIBRARIES = {  # name, strings in it: kind, version, vendor, plugins, what a person calls it
    "Open MPI": ("libmpi.so.40", '"5.0.11", "2.7"', "openmpi", "5.0.11", "", ("pmix",), "Open MPI 5.0.11"),
    "MPICH": ("libmpi.so.12", '"2.0", "4.1.2"', "mpich", "4.1.2", "", ("pmi2",), "MPICH 4.1.2"),
    "Debian's MPICH": ("libmpich.so.12", '"4.1"', "mpich", "4.1", "", ("pmi2",), "MPICH 4.1"),
    "MPICH with PMIx": (
        "libmpi.so.12",
        '"4.2.3", "libpmix.so.2"',
        "mpich",
        "4.2.3",
        "",
        ("pmi2", "pmix"),
        "MPICH 4.2.3",
    ),
    "no version": ("libmpi.so.12", '"hello"', "mpich", "", "", ("pmi2",), "MPICH"),
    "Cray's": (
        "libmpi_gnu_123.so.12",
        '"MPI VERSION : CRAY MPICH version 8.1.28.10 (ANL base 3.4a2)", "3.4.2"',
        "mpich",
        "8.1.28.10",
        "Cray MPICH",
        ("cray_shasta", "pmi2"),
        "Cray MPICH 8.1.28.10",
    ),
    "Intel's": (
        "libmpi.so.12",
        '"Intel(R) MPI Library %s for Linux* OS", "1.3.2", "2021.18.1"',
        "mpich",
        "2021.18.1",
        "Intel MPI",
        ("pmi2",),
        "Intel MPI 2021.18.1",
    ),
}


@needs_compiler
@pytest.mark.parametrize(
    ("soname", "constants", "kind", "version", "vendor", "plugins", "title"), LIBRARIES.values(), ids=LIBRARIES.keys()
)
def test_the_mpi_that_a_library_loads(soname, constants, kind, version, vendor, plugins, title, tmp_path):
    there = library(tmp_path / "lib", soname, constants)
    found = of_library(program(tmp_path / "bin", there))
    assert (found.kind, found.version, found.library, found.vendor) == (kind, version, there, vendor)
    assert (found.plugins, found.title, found.is_found) == (plugins, title, True)


@needs_compiler
def test_an_mpi_that_the_loader_does_not_find(tmp_path):
    there = library(tmp_path / "lib", "libmpi.so.40", '"5.0.11"')
    requesting = program(tmp_path / "bin", there)
    there.unlink()
    found = of_library(requesting)
    assert found == Mpi("openmpi", "", Path("libmpi.so.40"))
    assert not found.is_found


@needs_compiler
def test_an_open_mpi_that_a_site_has_built_for_pmi2(tmp_path):
    there = library(tmp_path / "lib", "libmpi.so.40", '"4.1.5"')
    (there.parent / "openmpi").mkdir()
    (there.parent / "openmpi" / "mca_pmix_s2.so").touch()
    assert of_library(program(tmp_path / "bin", there)).plugins == ("pmix", "pmi2")


@needs_compiler
def test_a_library_without_mpi(tmp_path):
    assert of_library(shared_object(tmp_path / "mpi_lib.so", "int gloo(void) { return 0; }")) is None


@needs_horovod
@needs_compiler
@pytest.mark.parametrize(
    ("error", "given", "expected"),
    [
        ("undefined symbol: ompi_mpi_group_empty", "lib", "LD_LIBRARY_PATH makes the loader take {} another MPI"),
        ("libmpi.so.40: file too short", "lib", "LD_LIBRARY_PATH makes the loader take {} another MPI"),
        ("undefined symbol: ompi_mpi_group_empty", "none", "build it: python -m hvdtrain build --frameworks torch"),
        ("undefined symbol: _ZN3c106detail", "lib", "build it: python -m hvdtrain build --frameworks torch"),
        ("No module named 'horovod'", "lib", "build it: python -m hvdtrain build --frameworks torch"),
    ],
)
def test_an_mpi_that_hides_horovods_own(tmp_path, monkeypatch, error, given, expected):
    foreign = library(tmp_path / "lib", "libmpi.so.40", '"4.1.2"')
    horovods = program(tmp_path, library(tmp_path / "own", "libmpi.so.40", '"5.0.11"'))
    monkeypatch.setattr(mpi, "horovod_library", lambda framework: horovods)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / given))
    found = str(mpi.unavailable("torch", "PyTorch", ImportError(error)))
    assert found.startswith(f"Horovod for PyTorch cannot be imported ({error}); {expected.format(f'{foreign},')}")


def test_horovod_here():
    assert horovod_library("mxnet") is None
    assert of_horovod("mxnet") is None
    libraries = [path for name in ("torch", "tensorflow") if (path := horovod_library(name))]
    assert libraries
    for path in libraries:
        assert path.name.startswith("mpi_lib")
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        assert (of_library(path) is not None) == ("libmpi" in listed)


STEPS = {
    "pmix": (PMIX, "pmix"),
    "pmi2": (PMI2, "pmi2"),
    "cray_shasta": (CRAY, "cray_shasta"),
    "none": (STEP, "none"),
    "none, another step's type exported": (f"{STEP} SLURM_MPI_TYPE=pmix", "none"),
    "another step's pmix": (f"{STEP} PMIX_NAMESPACE=slurm.pmix.21.0 PMIX_RANK=0", "none"),
    "no step: a batch shell": (JOB, None),
    "no step: mpirun over ssh": (OPENMPI4, None),
    "no step: Hydra over ssh": (HYDRA, None),
    "mpirun's daemons' step": (f"{DAEMONS} {OPENMPI4}", "none"),
}


@pytest.mark.parametrize(("text", "plugin"), STEPS.values(), ids=STEPS.keys())
def test_the_plugin_of_a_step(text, plugin):
    assert plugin_of(environment(text)) == plugin


OPEN_MPI_5 = Mpi("openmpi", "5.0.11", Path("/opt/libmpi.so.40"))
OPEN_MPI_4 = Mpi("openmpi", "4.1.5", Path("/opt/libmpi.so.40"), also=("pmi2",))
MPICH = Mpi("mpich", "4.0.2", Path("/opt/libmpich.so.12"))
MPICH_PMIX = Mpi("mpich", "4.2.3", Path("/opt/libmpi.so.12"), also=("pmix",))
CRAY_MPICH = Mpi("mpich", "8.1.28", Path("/opt/libmpi_cray.so.12"), vendor="Cray MPICH")
NOT_FOUND = Mpi("mpich", "", Path("libmpi.so.12"))

REFUSED = (
    "srun started 4 tasks with the plugin {}, but this Horovod uses {}, which would not find the others by it; start "
    "with: srun --mpi={} (srun --mpi=list shows what SLURM has), or load the module of the MPI that belongs to that "
    "plugin and build again: python -m hvdtrain build --mpi system"
)
MESSAGES = {  # environment, Horovod's MPI: the message
    "pmix, Open MPI": (PMIX, OPEN_MPI_5, None),
    "pmi2, Open MPI 5": (PMI2, OPEN_MPI_5, REFUSED.format("pmi2", "Open MPI 5.0.11", "pmix")),
    "pmi2, an Open MPI built for it": (PMI2, OPEN_MPI_4, None),
    "none, Open MPI": (STEP, OPEN_MPI_5, REFUSED.format("none", "Open MPI 5.0.11", "pmix")),
    "none, but another PMIx": (f"{STEP} PMIX_NAMESPACE=prte-1 PMIX_RANK=3", OPEN_MPI_5, None),
    "cray_shasta, Open MPI": (CRAY, OPEN_MPI_5, REFUSED.format("cray_shasta", "Open MPI 5.0.11", "pmix")),
    "pmi2, MPICH": (PMI2, MPICH, None),
    "pmix, MPICH": (PMIX, MPICH, REFUSED.format("pmix", "MPICH 4.0.2", "pmi2")),
    "pmix, an MPICH built for it": (PMIX, MPICH_PMIX, None),
    "none, MPICH: a site may have its way": (STEP, MPICH, None),
    "cray_shasta, Cray's": (CRAY, CRAY_MPICH, None),
    "pmix, Cray's": (PMIX, CRAY_MPICH, REFUSED.format("pmix", "Cray MPICH 8.1.28", "cray_shasta")),
    "an MPI that is not there": (PMIX, NOT_FOUND, None),
    "mpirun": (OPENMPI4, MPICH, None),
    "horovodrun": (HOROVODRUN, MPICH, None),
    "torchrun": (TORCHRUN, MPICH, None),
    "Gloo requested": (f"{STEP} HOROVOD_CONTROLLER=gloo", OPEN_MPI_5, None),
    "no MPI": (STEP, None, None),
}


def refused(environ, library, monkeypatch):
    monkeypatch.setattr(mpi, "of_horovod", lambda framework: library)
    try:
        compatibility.check_choice(choice(topology=discover(environ)), environ)
    except WorldError as error:
        return str(error)


@pytest.mark.parametrize(("text", "library", "message"), MESSAGES.values(), ids=MESSAGES.keys())
def test_a_plugin_that_cannot_reach_the_mpi_is_refused(text, library, message, monkeypatch):
    assert refused(environment(text), library, monkeypatch) == message


@pytest.mark.skipif(not DUMPS.is_dir(), reason=f"the dumps of real steps are not at {DUMPS}")
def test_the_plugins_of_real_steps(monkeypatch):
    seen = set()
    for path in DUMPS.glob("srun-*.env"):
        environ = dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
        plugin, name = mpi.plugin_of(environ), path.name.partition("srun-")[2].partition(".")[0]
        assert plugin == name or name not in {"pmix", "pmi2", "none"}
        if discover(environ).launcher != "srun" or discover(environ).size == 1 or "gloo" in path.name:
            continue
        seen.add(plugin)
        assert bool(refused(environ, OPEN_MPI_5, monkeypatch)) == (plugin != "pmix"), path
        assert bool(refused(environ, MPICH, monkeypatch)) == (plugin == "pmix"), path
    assert seen >= {"pmix", "pmi2", "none"}


GLOO = {
    "srun": (PMIX, OPEN_MPI_5, "mpi_lib.so", False),
    "srun, Horovod without MPI": (PMIX, None, "mpi_lib.so", True),
    "srun, no Horovod": (PMIX, None, None, False),
    "srun, requested": (f"{PMIX} HOROVOD_CONTROLLER=GLOO", OPEN_MPI_5, "mpi_lib.so", True),
    "torchrun": (TORCHRUN, OPEN_MPI_5, "mpi_lib.so", True),
    "horovodrun": (HOROVODRUN, None, "mpi_lib.so", False),
    "mpirun": (OPENMPI4, None, "mpi_lib.so", False),
}


@pytest.mark.parametrize(("text", "library", "compiled", "gloo"), GLOO.values(), ids=GLOO.keys())
def test_who_uses_gloo(text, library, compiled, gloo, monkeypatch):
    monkeypatch.setattr(mpi, "of_horovod", lambda framework: library)
    monkeypatch.setattr(mpi, "horovod_library", lambda framework: compiled and Path(compiled))
    assert mpi.uses_gloo(discover(environment(text)), "torch", environment(text)) is gloo
