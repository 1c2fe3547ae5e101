"""How an engine is added: one file and one row of the registry."""

import json

import warm
from ranks import needs_torch, run

pytestmark = needs_torch

FILE = '''
from hvdtrain.torch.engines import Engine, take_device


class IdleEngine(Engine):
    """Joins no ranks."""

    notes = ("the engine that does nothing",)

    def __init__(self, device):
        self.device = device

    @classmethod
    def open(cls, setup):
        return cls(take_device(setup))

    def close(self):
        print("closed")
'''
ROW = 'EngineSpec("idle", "Idle", {"torch": "idle_engine:IdleEngine"}, "nothing")'
MAIN = f"""
from hvdtrain.core.compatibility import EngineSpec
from hvdtrain.engines.registry import ENGINES
ENGINES["idle"] = {ROW}

from hvdtrain.run import main
from hvdtrain.torch.__main__ import train

for engine in ("idle", "local"):
    argv = ["linear", "--max-steps", "30", "--engine", engine, "--output", engine]
    assert main.main("torch", argv, train) == 0
"""


def metrics(folder):
    """The records of a run, without times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    by_the_clock = {"seconds", "examples_per_second", "time", "gradient_norm"}
    return [{key: value for key, value in line.items() if key not in by_the_clock} for line in lines]


def test_an_engine_is_added_by_one_file_and_one_row(tmp_path):
    (tmp_path / "idle_engine.py").write_text(FILE)
    (tmp_path / "main.py").write_text(MAIN)
    out = run("alone", 1, warm.command("torch", tmp_path / "main.py"), cwd=tmp_path).good().out
    assert "idle on cpu (torch)" in out
    assert "the engine that does nothing" in out
    assert "closed" in out
    losses = metrics(tmp_path / "idle")
    assert losses == metrics(tmp_path / "local")
    assert any("loss" in line for line in losses)
