import sys

from hvdtrain import installed, terminal

if __name__ == "__main__":  # before the imports, which take a while
    terminal.listen()
    installed.answer(sys.argv)
    from hvdtrain.launch import display

    display.greet("tensorflow", sys.argv[1:])

from hvdtrain.run import main, process
from hvdtrain.run.run import Run
from hvdtrain.tensorflow import without_banner


def train(prepared: Run) -> None:
    """Trains the run."""
    with without_banner(), main.importing(prepared, "TensorFlow"):
        from hvdtrain.run.loop import Loop
        from hvdtrain.tensorflow.trainer import Trainer, engine_of
    with engine_of(prepared) as engine:
        if engine.serves:
            prepared.world.serve_rank_0()
        else:
            loop = Loop(prepared, Trainer(prepared, engine))
            main.evaluate(loop) if prepared.evaluates else loop.train()


if __name__ == "__main__":
    process.end(main.main("tensorflow", sys.argv[1:], train))
