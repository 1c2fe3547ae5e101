"""The Lightning adapter: `python -m hvdtrain.lightning RECIPE [--strategy ddp|horovod] [flags]`."""

import sys

from hvdtrain import installed, terminal

if __name__ == "__main__":  # before the imports below, which take seconds
    terminal.listen()
    installed.answer(sys.argv)
    from hvdtrain.launch import display

    display.greet("lightning", sys.argv[1:])

from hvdtrain.run import main, process
from hvdtrain.run.run import Run


def train(prepared: Run) -> None:
    """Trains the run."""
    with main.importing(prepared, "Lightning"):
        from hvdtrain.lightning.recipe import fit, quiet
        from hvdtrain.torch.trainer import engine_of
    with engine_of(prepared) as engine, quiet():
        fit(prepared, engine)


if __name__ == "__main__":
    process.end(main.main("lightning", sys.argv[1:], train))
