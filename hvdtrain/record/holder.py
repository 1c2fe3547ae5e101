"""Locks a run folder on a file system without flock, as Lustre may be mounted: by a file with a heartbeat.

The file is made with O_EXCL, which works there too. Its holder writes a new number into it every two seconds. Another
run that finds the file watches it: while the number changes, its holder is alive; else the holder was killed.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from hvdtrain import files
from hvdtrain.errors import OutputError
from hvdtrain.launch.keys import boot_id
from hvdtrain.untrusted import printable

NAME = ".holder"
BUSY = "wait for it, or give another {folder}"
"""The remedy where another run writes into the folder."""
HEARTBEAT = 2.0
"""Seconds between two heartbeats."""
DEAD = 30.0
"""Seconds without a heartbeat after which a run counts as killed, where it cannot be seen that its process is gone."""


class Holder:
    """Holds a folder by a file, which `close` removes."""

    def __init__(self, folder: Path) -> None:
        """Raises OutputError where another run holds the folder, OSError."""
        self.path, self._closed, self._heartbeats = folder / NAME, threading.Event(), 0
        self._token = secrets.token_hex(8)  # in containers, two processes of a host may have the same number
        while not self._created():
            before = _read(self.path)
            if _lives(self.path, before):
                pid, host = (printable(str(before.get(key)), 100) for key in ("pid", "host"))
                named = f" (process {pid} on {host})" if before.get("host") else ""
                raise OutputError(f"{folder} is being written by another run{named}", remedy=BUSY)
            self._remove(before)
        threading.Thread(target=self._keep_alive, name="holder", daemon=True).start()

    def check_held(self) -> None:
        """Raises OutputError where another run has taken the folder, as from one that was suspended."""
        found = _read(self.path)  # empty while the file system does not answer
        if found and not self._closed.is_set() and not self._is_own(found):
            raise OutputError(f"{self.path.parent} was taken by another run while this one stood still; it ends here.")

    def close(self) -> None:
        """Removes the file, so that another run may hold the folder."""
        if not self._closed.is_set():
            self._closed.set()
            if self._is_own(_read(self.path)):
                files.remove(self.path)

    def _text(self) -> str:
        own = {"host": socket.gethostname(), "boot": _processes(), "pid": os.getpid(), "token": self._token}
        return json.dumps({**own, "heartbeat": self._heartbeats})

    def _created(self) -> bool:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(self._text())
        return True

    def _keep_alive(self) -> None:
        while not self._closed.wait(HEARTBEAT):
            self._heartbeats += 1
            with contextlib.suppress(OSError):
                if self._is_own(_read(self.path)):
                    files.write(self.path, self._text())

    def _is_own(self, found: dict[str, object]) -> bool:
        return (found.get("token"), found.get("pid")) == (self._token, os.getpid())

    def _remove(self, dead: dict[str, object]) -> None:
        """Removes a dead run's file, but not that of a run which began meanwhile. Raises OSError where it may not, as
        of another user's file in a folder like /tmp."""
        aside = files.temporary(self.path)
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(aside)
            if _read(aside) == dead:
                files.remove(aside)
            else:
                aside.rename(self.path)


def _read(path: Path) -> dict[str, object]:
    """What the file holds; empty where there is none, or it cannot be read."""
    try:
        found = files.read_json(path, follow=False)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _processes() -> str:
    """Names the kernel and the container, in which a process number is unique."""
    return f"{boot_id()} {Path('/proc/self/ns/pid').stat().st_ino}"


def _lives(path: Path, before: dict[str, object]) -> bool:
    """Whether the run that holds the folder is alive."""
    pid = before.get("pid")
    if before.get("boot") == _processes() and not Path(f"/proc/{pid}").exists():
        return False
    deadline = time.monotonic() + DEAD
    while time.monotonic() < deadline:
        if not path.exists():
            return False
        if _read(path) not in ({}, before):
            return True
        time.sleep(HEARTBEAT / 2)
    return False
