"""Runs the loops of docs/bring.md, one program after the other, in the ranks of one `join`.

`python bring_loops.py FOLDER NAME...` runs FOLDER/loop_NAME.py in float64. What each `run.batches` has read there is in
FOLDER/NAME-RANK.pt: a list for each set, in the order of the calls.
"""

import contextlib
import sys
from pathlib import Path

import torch

import hvdtrain.torch as ht
from hvdtrain.torch.user_loop.run import Run


def main() -> None:
    folder, *names = sys.argv[1:]
    sys.path.insert(0, folder)
    torch.set_default_dtype(torch.float64)
    read, batches = list[list](), Run.batches

    def kept(self, *given, **more):
        of = batches(self, *given, **more)
        read.append(mine := [])
        of._batches = (mine.append(batch) or batch for batch in of._batches)
        return of

    Run.batches = kept
    with ht.join(device="cpu") as world:
        ht.join = lambda: contextlib.nullcontext(world)
        for name in names:
            read.clear()
            exec(compile(Path(folder, f"loop_{name}.py").read_text(), f"{name}.py", "exec"), {"__name__": "__main__"})
            torch.save(read, Path(folder, f"{name}-{world.rank}.pt"))


if __name__ == "__main__":
    main()
