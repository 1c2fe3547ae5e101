import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from hvdtrain import interrupts

if __name__ == "__main__":  # before the imports, which take a while
    interrupts.listen()

from hvdtrain.run import ending, main
from hvdtrain.run.run import Run

# Before the first import of TensorFlow or Keras: a log that a person can read, and never another backend.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

# What TensorFlow 2.21 prints while it is imported, whatever the level.
BANNER = re.compile(rb"WARNING: All log messages before absl|I\d{4} |To enable the following instructions")


def train(prepared: Run) -> None:
    """Trains the run. Imports the framework only now that recipe, data and output folder are checked."""
    with without_banner(), interrupts.postponed():
        from hvdtrain.run.loop import Loop
        from hvdtrain.tensorflow.engines.replication import replication_of
        from hvdtrain.tensorflow.opening import engine_of
        from hvdtrain.tensorflow.trainer import Trainer

    with engine_of(prepared) as engine:
        if replication_of(engine).serves:
            prepared.world.serve_rank_0()
        else:
            Loop(prepared, Trainer(prepared, engine)).train()


@contextlib.contextmanager
def without_banner() -> Iterator[None]:
    """Leaves TensorFlow's banner out of what the block writes to stderr.

    What a crash inside the block prints is lost: TF_CPP_MIN_LOG_LEVEL=0 leaves everything as it is.
    """
    if os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0":
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


if __name__ == "__main__":
    ending.end(main.main("tensorflow", sys.argv[1:], train))
