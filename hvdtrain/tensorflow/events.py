"""TensorBoard's events, written with TensorFlow's own records: tensorboardX would load PyTorch beside TensorFlow."""

import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

V1 = tf.compat.v1


class EventWriter:
    """Scalars into a new file of `folder`; readers forget those from `first_step` on that older files hold."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._records = tf.io.TFRecordWriter(str(self._path))
        self._write(file_version="brain.Event:2")
        self._write(step=first_step, session_log=V1.SessionLog(status=V1.SessionLog.START))

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._write(step=step, summary=V1.Summary(value=[V1.Summary.Value(tag=tag, simple_value=value)]))

    def flush(self) -> None:
        """Raises OSError where the disk is full."""
        try:
            self._records.flush()
        except tf.errors.ResourceExhaustedError:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path)) from None

    def close(self) -> None:
        self.flush()
        self._records.close()

    def _write(self, **what: Any) -> None:
        self._records.write(V1.Event(wall_time=time.time(), **what).SerializeToString())
