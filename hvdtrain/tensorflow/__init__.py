"""The TensorFlow adapter: `python -m hvdtrain.tensorflow RECIPE [flags]`.

It offers the names of `hvdtrain.keras` too, for code that imports them from here.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

from hvdtrain import installed

installed.refuse("numpy", "tensorflow", "keras", "horovod", "mpi4py")

# What TensorFlow 2.21 prints when it is imported, at every log level.
BANNER = re.compile(rb"WARNING: All log messages before absl|I\d{4} |To enable the following instructions")


@contextlib.contextmanager
def without_banner() -> Iterator[None]:
    """Keeps TensorFlow's banner out of stderr while the block imports TensorFlow, and makes it Keras's backend.

    What a crash inside the block prints is lost; TF_CPP_MIN_LOG_LEVEL=0 prints everything.
    """
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") == "0":
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


def __getattr__(name: str) -> Any:
    from hvdtrain import keras  # from the layer above, which only a user's program asks for: see setup.cfg

    try:
        return getattr(keras, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    from hvdtrain import keras

    return sorted({*globals(), *dir(keras)})
