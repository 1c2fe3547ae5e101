import sys

from hvdtrain import installed, terminal

if __name__ == "__main__":  # before the imports, which take a while
    terminal.listen()
    installed.answer(sys.argv)
    from hvdtrain.launch import display

    display.greet("torch", sys.argv[1:])

from hvdtrain.run import main, process
from hvdtrain.run.run import Run


def train(prepared: Run) -> None:
    """Trains the run."""
    with main.importing(prepared, "PyTorch"):
        from hvdtrain.run.loop import Loop
        from hvdtrain.torch.trainer import Trainer, engine_of
    with engine_of(prepared) as engine:
        loop = Loop(prepared, Trainer(prepared, engine))
        main.evaluate(loop) if prepared.evaluates else loop.train()


if __name__ == "__main__":
    process.end(main.main("torch", sys.argv[1:], train))
