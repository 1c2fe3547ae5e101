"""What the tests of odd_keras_fits.py, odd_lightning.py and odd_loops.py share: launches, and how results compare."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import warm
from paths import SUPPORT
from ranks import Ended, left_by, once, run

Became = dict[str, Any]
"""By seed, what became of its program."""


class Programs:
    """The launches of one program, each made once."""

    def __init__(self, kind: str, program: str, folders: Any) -> None:
        """`kind`: what the process that forks them has loaded. `folders` makes one by name."""
        self.kind, self.program, self.folders = kind, program, folders
        self.of_ranks = once(self._of_ranks)

    def _of_ranks(self, way: str, ranks: int, seeds: tuple[int, ...], left: int = 0) -> list[Became]:
        """What became of these seeds on each rank."""
        folder = self.folders(way.replace(" ", "-"))
        self._launched(folder, ranks, way=way, seeds=seeds, left=left).good()
        return left_by(ranks, folder)

    def moved(self, kind: str, engines: tuple[tuple[str, int], ...], seeds: tuple[int, ...]) -> list[Became]:
        """What became of them on each rank, after they were left at a random step with the first engine and its number
        of ranks, and started again with the second one and its number."""
        folder, begun = self.folders("moved"), " ".join([kind, engines[0][0]]).strip()
        for left, (engine, ranks) in zip((2, 0), engines, strict=True):
            way = " ".join([kind, engine]).strip()
            self._launched(folder, ranks, way=way, begun=begun, seeds=seeds, left=left).good()
        return left_by(ranks, folder)

    def killed(self, way: str, seed: int, number: int = signal.SIGKILL, ranks: int = 1) -> list[Became]:
        """What became of it on each rank, after all had got this signal at a random step, and were started again."""
        folder = self.folders("killed")
        code = self._launched(folder, ranks, way=way, seeds=[seed], left=number).code
        assert code in {-number, 128 + number} or (code and ranks > 1)
        self._launched(folder, ranks, way=way, seeds=[seed], left=0).good()
        return left_by(ranks, folder)

    def _launched(self, folder: Path, ranks: int, **given: Any) -> Ended:
        (folder / "given.json").write_text(json.dumps(given))
        return run("alone" if ranks == 1 else "mpi", ranks, warm.command(self.kind, SUPPORT / self.program, folder))


def check_stopped(programs: Programs, oddities: Callable[[int], set[str]], seeds: tuple[int, ...]) -> None:
    """Two ranks that are stopped at a random step, and started again, have the bits of those that are not."""
    left, whole = (programs.of_ranks("tolerant", 2, seeds, number) for number in (signal.SIGTERM, 0))
    for of_left, of_whole in zip(left, whole, strict=True):
        for seed in of_whole:
            check_weights(oddities(int(seed)), of_left[seed], of_whole[seed])


def check_killed(programs: Programs, oddities: Callable[[int], set[str]], seed: int) -> None:
    (whole,) = programs.of_ranks("tolerant", 1, (seed,))
    check_weights(oddities(seed), programs.killed("tolerant", seed)[0][str(seed)], whole[str(seed)])


def check_alike(has: set[str], ours: Any, theirs: Any, *, resumed: bool = False, limit: float = 1e-12) -> None:
    """Weights and logs. What is `resumed` has logs of the epochs since, and of a part of the first of them."""
    check_weights(has, ours, theirs, limit)
    own, other = ours["logs"], theirs["logs"]
    assert own.keys() == other.keys() or (resumed and not own["epochs"]), has
    unlike = set()
    for name, values in own.items():
        assert len(values) == len(other[name]) or resumed, (has, name)
        for back in range(1, len(values) + 1):
            if not np.allclose(values[-back], other[name][-back], limit, limit, equal_nan=True):
                unlike.add(back)
    assert len(unlike) <= resumed, (has, own, other)


def check_tensors(has: set[str], ours: Any, theirs: Any, limit: float = 1e-12) -> None:
    """Every tensor of the trained model."""
    assert not isinstance(ours, str), (has, ours)
    assert ours.keys() == theirs.keys(), has
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=limit, atol=limit, err_msg=f"{has} {name}")


def check_own(has: set[str], ours: Any, theirs: Any, limit: float, name: str = "") -> None:
    """What callbacks have, nested, with its types as kept_callbacks.py writes them."""
    if isinstance(theirs, float):
        assert ours == theirs or np.isclose(ours, theirs, limit, limit, equal_nan=True), (has, name, ours, theirs)
    elif isinstance(theirs, dict | list) and ours:
        assert len(ours) == len(theirs), (has, name, ours, theirs)
        for key in theirs if isinstance(theirs, dict) else range(len(theirs)):
            check_own(has, ours[key], theirs[key], limit, f"{name} {key}")
    elif name.split()[:1] != ["Hashed"]:  # which is another one after the last bit of a weight
        assert ours == theirs, (has, name, ours, theirs)


def check_weights(has: set[str], ours: Any, theirs: Any, limit: float = 0) -> None:
    """And what callbacks have. 0: the same bits."""
    assert not isinstance(ours, str), (has, ours)
    check_tensors(has, ours["weights"], theirs["weights"], limit)
    check_own(has, ours.get("own"), theirs.get("own"), limit)
