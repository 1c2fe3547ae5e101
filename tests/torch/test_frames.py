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


def test_a_run_that_finds_none_of_the_gpus_says_so(tmp_path):
    (tmp_path / "pynvml.py").write_text(
        "nvmlInit = lambda: None\nnvmlDeviceGetCount = lambda: 1\nnvmlDeviceGetHandleByIndex = int\n"
        "nvmlDeviceGetUUID = lambda handle: 'GPU-a'\n"
    )
    (tmp_path / "nvidia-smi").touch(0o755)
    program = "import os, sys, runpy; sys.argv[0] = 'hvdtrain.torch'; sys.path.insert(0, os.getcwd()); "
    program += "sys.modules.pop('pynvml', None)  # of the warm process\n"
    program += "os.environ['PATH'] += ':' + os.getcwd(); os.environ['CUDA_VISIBLE_DEVICES'] = '1'; "
    program += "runpy.run_module('hvdtrain.torch', run_name='__main__', alter_sys=True)"
    command = warm.command("torch", "-c", program, "linear", "--max-steps", "1", "--output", "run")
    ended = run("alone", 1, command, cwd=tmp_path).good()
    assert "the driver has GPUs (1): CUDA_VISIBLE_DEVICES=1 names none of them: correct it, or unset it" in ended.out
