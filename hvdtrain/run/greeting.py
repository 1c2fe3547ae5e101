"""The first words of a recipe's run, before the imports that take a while."""

import os
from collections.abc import Sequence

from hvdtrain import __version__
from hvdtrain.errors import TopologyError
from hvdtrain.launch.topology import discover
from hvdtrain.run.display import display
from hvdtrain.run.screen import SCREEN
from hvdtrain.untrusted import printable


def greet(adapter: str, argv: Sequence[str]) -> None:
    """On rank 0: prints what begins, and shows from now on what is waited for."""
    try:
        topology = discover(os.environ)
    except TopologyError:  # reported where the run begins
        return
    if not topology.is_rank_0 or not argv or not {"-h", "--help"}.isdisjoint(argv):
        return
    what = adapter if argv[0].startswith("-") else f"{printable(argv[0])} with {adapter}"
    ranks = "1 rank" if topology.size == 1 else f"{topology.size} ranks"
    SCREEN.print(f"INFO - hvdtrain {__version__}: {what}, {ranks}, {topology.launcher}")
    SCREEN.open(display(topology.launcher))
    SCREEN.waiting("importing hvdtrain")
