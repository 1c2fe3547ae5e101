"""A rank whose program reads with DataLoaders of its own, in a process of each kind, each of which stays in its data
set; and starts one of its own. `python own_loaders.py FOLDER`: each process makes a file named as its number."""

import multiprocessing
import os
import sys
import time
from pathlib import Path

from torch.utils.data import DataLoader, Dataset


class Endless(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        stay()


def stay():
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(100_000)


def main():
    import hvdtrain.torch as ht

    with ht.join():
        contexts = ("fork", "spawn", "forkserver")
        kept = [iter(DataLoader(Endless(), num_workers=1, multiprocessing_context=context)) for context in contexts]
        multiprocessing.get_context("spawn").Process(target=stay).start()
        next(kept[0])


if __name__ == "__main__":
    main()
