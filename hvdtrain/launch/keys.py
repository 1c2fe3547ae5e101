"""The key by which the ranks of a run prove to each other that one user has started them.

On a shared node anybody may connect to a port, or take it first. What others cannot read is the environment of a user's
processes, a file of mode 0600, and what munge encrypts for the user.
"""

import contextlib
import errno
import hashlib
import hmac
import os
import pwd
import re
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from hvdtrain import files
from hvdtrain.errors import WorldError
from hvdtrain.launch.topology import Topology

BYTES = 32
INHERITED = ("HVDTRAIN_KEY", "HOROVOD_RENDEZVOUS_KEY")
"""Variables that hold a key: the job scripts of `hvdtrain slurm` set the first, horovodrun the second."""
OTHER_NODE = 10.0  # seconds after which a file that another node has made is visible here, on a network file system
MUNGE_SECONDS = 5
INSECURE = "--insecure-rendezvous"
MAKE = "export HVDTRAIN_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
REMEDY = f"give all ranks one, {MAKE}, or {INSECURE} where nobody else can reach these nodes."
OPEN = bytes(BYTES)
"""The key of a run whose ranks need not prove that they belong together."""
WARNING = (
    f"{INSECURE}: whoever can connect to these nodes may join this run, end it, or have code of his own run in it."
)


def of_run(environ: Mapping[str, str], topology: Topology) -> tuple[bytes | None, str | None]:
    """The key of this rank; on rank 0 also a credential with the key, for ranks on nodes with another home.

    Another rank has no key where it has to read rank 0's credential by munge. Raises WorldError.
    """
    if key := inherited(environ):
        return key, None
    key, why = None, ""
    try:
        key = of_user(environ)
    except OSError as error:
        why = f"{error.filename or 'the home'}: {error.strerror}"
    chosen = key or secrets.token_bytes(BYTES)
    is_known_to_all = key is not None and topology.local_size == topology.size
    credential = wrapped(chosen) if key is None or (topology.is_rank_0 and not is_known_to_all) else None
    if key is None and credential is None:
        raise of_this_host(f"no key of this user's ({why}), and munge does not answer; {REMEDY}")
    return (chosen, credential) if topology.is_rank_0 else (key, None)


def source(environ: Mapping[str, str], topology: Topology) -> str:
    """Where the ranks of this run get their key from, for a person; "" where they have none. Raises WorldError."""
    if inherited(environ):
        return next(name for name in INHERITED if name in environ)
    if topology.row.mpi and topology.local_size < topology.size:
        return "MPI, which carries one"
    try:
        of_user(environ)
    except OSError:
        return "munge" if wrapped(OPEN) else ""
    return str(path(environ))


def inherited(environ: Mapping[str, str]) -> bytes | None:
    """The key in the environment, from the launcher or the job script. Raises WorldError."""
    name = next((name for name in INHERITED if name in environ), None)
    if name is None:
        return None
    if not re.fullmatch(f"[0-9a-fA-F]{{{2 * BYTES}}}", environ[name]):
        raise of_this_host(
            f"{name} must be {2 * BYTES} hexadecimal digits, got {len(environ[name])} characters; unset it, or {REMEDY}"
        )
    return bytes.fromhex(environ[name])


def path(environ: Mapping[str, str]) -> Path:
    """Where the user's key is kept. Raises OSError where there is no home."""
    folder = Path(environ.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():  # as the XDG Base Directory Specification wants it
        try:
            home = Path(environ.get("HOME") or pwd.getpwuid(os.geteuid()).pw_dir)
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "uid without a home", f"uid {os.geteuid()}") from None
        if not home.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such home", str(home))
        folder = home / ".config"
    return folder / "hvdtrain" / "key"


def of_user(environ: Mapping[str, str]) -> bytes:
    """The key in the user's home. It is made if there is none.

    Raises OSError where it cannot be made, WorldError where others may have read or written it.
    """
    file = path(environ)
    with contextlib.suppress(FileNotFoundError):
        return _read(file)
    for folder in (file.parent.parent, file.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.create_private(file, secrets.token_bytes(BYTES))
    deadline = time.monotonic() + OTHER_NODE
    while True:
        try:
            return _read(file)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _read(file: Path) -> bytes:
    folder = file.parent.stat()
    if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
        raise _refused(file.parent, "a folder", folder)
    with contextlib.suppress(ValueError, IsADirectoryError), files.opened(file, follow=False) as opened:
        found = os.fstat(opened.fileno())
        is_private = found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if is_private and len(key := opened.read(BYTES + 1)) == BYTES:
            return key
    raise _refused(file, f"a file of {BYTES} bytes", file.lstat())


def _refused(found: Path, wanted: str, status: os.stat_result) -> WorldError:
    return of_this_host(
        f"{found} must be {wanted} that uid {os.geteuid()} alone may change or read, got {status.st_size} bytes, uid "
        f"{status.st_uid}, {stat.filemode(status.st_mode)}; remove it, and the next run makes another, or {REMEDY}"
    )


def wrapped(key: bytes) -> str | None:
    """The key as a credential of munge's, which only this user's processes can read; None where there is no munge."""
    # A site may have configured munge not to encrypt, or to let credentials expire after seconds.
    return _munge("munge", f"--restrict-uid={os.geteuid()}", "--cipher=aes128", "--ttl=-1", given=key.hex())


def unwrapped(credential: str) -> bytes | None:
    """The key in another rank's credential; None where munge has not encrypted it for this user, by this user."""
    read = _munge("unmunge", "--numeric", "--keys=UID", given=credential)
    found = re.fullmatch(rf"UID:\s+{os.geteuid()}\s+([0-9a-f]{{{2 * BYTES}}})", read or "")
    return bytes.fromhex(found[1]) if found else None


def _munge(program: str, *options: str, given: str) -> str | None:
    """The output of munge or unmunge, also for a credential that was read before."""
    if not (found := shutil.which(program)):
        return None
    try:
        done = subprocess.run(
            [found, *options], input=given, capture_output=True, text=True, timeout=MUNGE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeError):
        return None
    return done.stdout.strip() or None


def boot_id() -> str:
    """A text that is different on each host, and the same in all containers of a host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def derived(key: bytes, *purpose: object) -> bytes:
    """A key for one purpose, derived from the run's."""
    return hmac.digest(key, os.fsencode("\0".join(map(str, purpose))), hashlib.sha256)


def of_this_host(text: str) -> WorldError:
    """An error that other hosts may not have, so that each prints its own."""
    error = WorldError(text)
    error.everywhere = False
    return error
