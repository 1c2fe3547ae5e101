"""Replaces ResNet50 by a small network with all its kinds of layers: blocks with and without a convolution in the
shortcut, with and without a stride. `python small.py hvdtrain.FRAMEWORK ARGV` is `python -m hvdtrain.FRAMEWORK ARGV`
with the small network.

TensorFlow takes ten seconds to trace ResNet50 in a process, and its steps take ten times as long in both frameworks.
"""

import os
import sys
import time

from warm import perform

WHOLE = "HVDTRAIN_TEST_WHOLE_NETWORK"
"""The environment variable that, if set, leaves ResNet50 as it is."""
HOLD = "HVDTRAIN_TEST_HOLD"
"""The environment variable `RANK STEP [PATH]`: after that step the rank waits for a signal to stop, or for that file,
while the other ranks wait in the next step."""


def hold() -> None:
    """Has a rank wait as the variable HOLD requests."""
    if HOLD not in os.environ:
        return
    from hvdtrain.run.loop import Hooks

    after_update = Hooks.after_update
    rank, last, *released_by = os.environ[HOLD].split(maxsplit=2)

    def held(hooks: Hooks, lr: float) -> None:
        if (hooks.engine.rank, hooks.progress.step) == (int(rank), int(last)):
            while not (hooks.run.world.stop._requested or any(map(os.path.exists, released_by))):
                time.sleep(0.01)
        after_update(hooks, lr)

    Hooks.after_update = held  # type: ignore[method-assign]


def shrink(framework: str) -> None:
    """Makes the networks small that are built from now on."""
    if WHOLE in os.environ:
        return
    if framework.startswith("tensorflow"):
        from hvdtrain.tensorflow import resnet

        resnet.BLOCKS = tuple(SMALL_BLOCKS.values())
    else:
        from hvdtrain.torch import resnet

        resnet.BLOCKS = SMALL_BLOCKS


SMALL_BLOCKS = {"layer1": 2, "layer2": 1}

if __name__ == "__main__":
    shrink(sys.argv[1].rpartition(".")[2])
    hold()
    perform(["-m", *sys.argv[1:]])
