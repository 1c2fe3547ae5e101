"""TensorBoard's events, written with TensorFlow's own records: tensorboardX would load PyTorch beside TensorFlow."""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

V1 = tf.compat.v1


class EventWriter:
    """Scalars into a new file of `folder`; readers forget those from `first_step` on that older files hold.
    Every method raises OSError where the disk is full."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._records = tf.io.TFRecordWriter(str(self._path))
        self._write(file_version="brain.Event:2")
        self._write(step=first_step, session_log=V1.SessionLog(status=V1.SessionLog.START))

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._write(step=step, summary=V1.Summary(value=[V1.Summary.Value(tag=tag, simple_value=value)]))

    def flush(self) -> None:
        """Makes what was added visible to a reader."""
        with self._full_disk_as_os_error():
            self._records.flush()

    def close(self) -> None:
        """Ends the file."""
        with self._full_disk_as_os_error():
            self._records.close()

    def _write(self, **what: Any) -> None:
        with self._full_disk_as_os_error():
            self._records.write(V1.Event(wall_time=time.time(), **what).SerializeToString())

    @contextlib.contextmanager
    def _full_disk_as_os_error(self) -> Iterator[None]:
        """Raises OSError for a full disk, as Python's own files do."""
        try:
            yield
        except tf.errors.ResourceExhaustedError:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path)) from None
