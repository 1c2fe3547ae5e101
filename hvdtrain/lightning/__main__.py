"""The Lightning adapter: `python -m hvdtrain.lightning RECIPE [--strategy ddp|horovod] [flags]`."""

import sys

from hvdtrain import installed, terminal

if __name__ == "__main__":  # before the imports below, which take seconds
    terminal.listen()
    installed.answer(sys.argv)
    from hvdtrain.launch import display

    display.greet("lightning", sys.argv[1:])

from hvdtrain.run import ending, main
from hvdtrain.run.run import Run
from hvdtrain.terminal import SCREEN


def train(prepared: Run) -> None:
    """Trains the run. It imports Lightning only now, as recipe, data and run folder are checked."""
    prepared.journal.enter("import")
    SCREEN.waiting("importing Lightning")
    with terminal.postponed():
        from hvdtrain.lightning.recipe import train as train_with_lightning

    prepared.journal.enter("rendezvous")
    train_with_lightning(prepared)


if __name__ == "__main__":
    ending.end(main.main("lightning", sys.argv[1:], train))
