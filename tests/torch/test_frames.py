"""How many calls are between the command line and an update."""

from itertools import pairwise
from pathlib import Path

import warm
from ranks import needs_torch, run

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


def test_few_frames_of_ours_are_between_the_command_and_an_update(tmp_path):
    program = warm.command("torch", "-c", PROGRAM, "linear", "--max-steps", "1", "--output", "run")
    lines = run("alone", 1, program, cwd=tmp_path).good().out.splitlines()
    frames = [line.split("\t")[1:] for line in lines if line.startswith("frame\t")]
    package = Path(hvdtrain.__file__).parent
    ours = [(Path(file).relative_to(package), name) for file, name in frames if Path(file).is_relative_to(package)]
    assert ours[-1] == (Path("torch/__main__.py"), "<module>")
    assert len(ours) <= FRAMES, ours
    folders = [path.parts[0] for path, _ in reversed(ours)]
    climbs = [pair for pair in pairwise(folders) if pair == ("run", "torch")]  # from a layer to one above it
    assert len(climbs) <= CLIMBS, folders
