"""examples/keras_cnn: one training on 1, 2 and 4 ranks, and the same bits after a kill."""

import random
import shutil
from pathlib import Path

import pytest
from ranks import command, held, needs_horovod, needs_tensorflow, started, train, wait_for_step
from worlds import arrays, records

EXAMPLE = Path(__file__).parents[2] / "examples" / "keras_cnn"
ARGV = ("keras_cnn.yaml", "--precision", "float64", "--compression", "fp64", "--epochs", "2", "--log-every-steps", "1")

pytestmark = [pytest.mark.launched, needs_tensorflow, needs_horovod]


@pytest.fixture
def example(tmp_path):
    return Path(shutil.copytree(EXAMPLE, tmp_path / "example"))


def losses(folder):
    return [line.get("loss", line.get("valid_loss")) for line in records(folder)]


@pytest.mark.slow
def test_the_same_losses_on_any_number_of_ranks_and_the_same_bits_after_a_kill(example):
    for launcher, ranks in (("alone", 1), ("mpi", 2), ("gloo", 4)):
        train("tensorflow", launcher, ranks, *ARGV, "--output", f"on-{ranks}", cwd=example).good()
    alone, two, four = (losses(example / f"on-{ranks}") for ranks in (1, 2, 4))
    assert len(alone) == 2 * (22 + 1)
    assert two == pytest.approx(alone, rel=1e-12)
    assert four == pytest.approx(alone, rel=1e-12)

    argv = [*ARGV, "--checkpoint-every-steps", "5", "--output", "killed"]
    step = random.randrange(11, 40)  # by then the checkpoint of step 5 is whole, as that of step 10 waits for it
    with started("mpi", 2, command("tensorflow", *argv), cwd=example, **held(step)) as ranks:
        wait_for_step(ranks, example / "killed", step)
        ranks.kill()
    assert "resuming from step" in train("tensorflow", "mpi", 2, *argv, cwd=example).good().out
    assert arrays(example / "killed") == arrays(example / "on-2")
    assert losses(example / "killed") == two
