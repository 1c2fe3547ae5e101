"""The Lightning adapter: `python -m hvdtrain.lightning RECIPE [--strategy ddp|horovod] [flags]`."""

import sys

from hvdtrain import interrupts, version

if __name__ == "__main__":  # before the imports, which take a while
    interrupts.listen()
    version.answer(sys.argv)
    from hvdtrain.run import greeting

    greeting.greet("lightning", sys.argv[1:])

from hvdtrain.run import ending, main
from hvdtrain.run.run import Run
from hvdtrain.run.screen import SCREEN


def train(prepared: Run) -> None:
    """Trains the run. Imports the framework only now that recipe, data and output folder are checked."""
    prepared.world.launch.enter("import")
    SCREEN.waiting("importing Lightning")
    with interrupts.postponed():
        from hvdtrain.lightning.train import train as train_with_lightning

    prepared.world.launch.enter("rendezvous")
    train_with_lightning(prepared)


if __name__ == "__main__":
    ending.end(main.main("lightning", sys.argv[1:], train))
