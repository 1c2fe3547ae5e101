"""`python small.py hvdtrain.FRAMEWORK ARGV` is `python -m hvdtrain.FRAMEWORK ARGV` with a small network in place of
ResNet50. It has all kinds of ResNet50's layers: blocks with and without a convolution in the shortcut, with and without
a stride.

ResNet50 takes TensorFlow ten seconds to trace in every process, and a step of it ten times as long on either framework.
"""

import os
import sys
import time

from warm import perform

WHOLE = "HVDTRAIN_TEST_WHOLE_NETWORK"
"""Set in the environment, it leaves ResNet50 as it is."""
HOLD = "HVDTRAIN_TEST_HOLD"
"""A rank, the step after which it waits until it gets a signal, and perhaps the path of a file that ends the wait too.
The other ranks wait for it in the next step."""


def hold() -> None:
    """Makes the rank of that variable wait."""
    if HOLD not in os.environ:
        return
    from hvdtrain.ranks.world import World

    stops_at = World.stops_at
    rank, last, *released_by = os.environ[HOLD].split(maxsplit=2)

    def held(world: World, step: int) -> bool:
        if (world.topology.rank, step) == (int(rank), int(last)):
            while not (world.stop._requested or any(map(os.path.exists, released_by))):
                time.sleep(0.01)
        return stops_at(world, step)

    World.stops_at = held  # type: ignore[method-assign]


def shrink(framework: str) -> None:
    """Makes every ResNet50 that is built from now on small."""
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
