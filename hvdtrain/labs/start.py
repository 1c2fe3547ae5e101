"""Starts a notebook's ranks through horovod.run: `python -m hvdtrain.labs.start`, told on stdin what to start."""

import pickle
import sys


def main() -> None:
    """Returns when all ranks have ended."""
    import horovod

    function, arguments, ranks, over_mpi = pickle.load(sys.stdin.buffer)
    horovod.run(function, arguments, np=ranks, use_mpi=over_mpi, use_gloo=not over_mpi)


if __name__ == "__main__":  # Horovod's launcher imports this module again in processes of its own
    main()
