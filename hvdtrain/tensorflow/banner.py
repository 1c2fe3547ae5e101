"""TensorFlow's environment, set before its first import, and its banner, left out."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator

# A log that a person can read, and never another backend.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

# What TensorFlow 2.21 prints while it is imported, whatever the level.
BANNER = re.compile(rb"WARNING: All log messages before absl|I\d{4} |To enable the following instructions")


@contextlib.contextmanager
def without_banner() -> Iterator[None]:
    """Leaves TensorFlow's banner out of what the block writes to stderr.

    What a crash inside the block prints is lost: TF_CPP_MIN_LOG_LEVEL=0 leaves everything as it is.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        yield
        return
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            os.write(2, b"".join(line for line in caught if not BANNER.match(line)))
