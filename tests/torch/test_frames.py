"""How far it is from the command line to an update."""

from itertools import pairwise
from pathlib import Path

from ranks import needs_torch

import hvdtrain

pytestmark = needs_torch

FRAMES, CLIMBS = 7, 4
PROGRAM = """
import runpy, sys, traceback
from hvdtrain.torch.optimizers import SGD

step = SGD.step

def printed_step(self, closure=None):
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        print("frame", frame.f_code.co_filename, frame.f_code.co_name, sep="\\t")
    return step(self, closure)

SGD.step = printed_step
sys.argv[0] = "hvdtrain.torch"
runpy.run_module("hvdtrain.torch", run_name="__main__", alter_sys=True)
"""


def test_few_frames_of_ours_lie_between_the_command_and_an_update(python):
    ended = python("-c", PROGRAM, "linear", "--max-steps", "1", "--output", "run")
    assert ended.returncode == 0, ended.stderr
    frames = [line.split("\t")[1:] for line in ended.stdout.splitlines() if line.startswith("frame\t")]
    house = Path(hvdtrain.__file__).parent
    ours = [(Path(file).relative_to(house), name) for file, name in frames if Path(file).is_relative_to(house)]
    assert ours[-1] == (Path("torch/__main__.py"), "<module>")
    assert len(ours) <= FRAMES, ours
    rooms = [path.parts[0] for path, _ in reversed(ours)]
    climbs = [pair for pair in pairwise(rooms) if pair == ("run", "torch")]  # from a layer to one above it
    assert len(climbs) <= CLIMBS, rooms
