"""A residual network with all kinds of ResNet50's layers in its place: blocks with and without a convolution beside
them, with and without a stride. `python small.py hvdtrain.FRAMEWORK ARGV`: `python -m hvdtrain.FRAMEWORK ARGV` with it.

ResNet50 takes TensorFlow ten seconds to trace in every process, and a step of it ten times as long on either framework.
"""

import os
import runpy
import sys

WHOLE = "HVDTRAIN_TEST_WHOLE_NETWORK"
"""Set in the environment, it leaves ResNet50 as it is."""


def shrink(framework: str) -> None:
    """Networks that are built from now on are small."""
    if WHOLE in os.environ:
        return
    if framework.startswith("tensorflow"):
        from hvdtrain.tensorflow import models

        models.STAGES = SMALL_STAGES
    else:
        from hvdtrain.torch import resnet

        resnet.BLOCKS = SMALL_BLOCKS


SMALL_STAGES = ((2, 64, 1), (1, 128, 2))
SMALL_BLOCKS = {"layer1": 2, "layer2": 1}

if __name__ == "__main__":
    sys.argv[:] = sys.argv[1:]
    shrink(sys.argv[0].rpartition(".")[2])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
