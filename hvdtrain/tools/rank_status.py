"""A status line of rank 0, however it was started."""

import contextlib
from collections.abc import Callable, Iterator

from hvdtrain.launch.topology import Topology
from hvdtrain.terminal import Status

Show = Callable[[str], None]
"""Shows what is done now."""


def hidden(text: str) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def shown(topology: Topology, text: str) -> Iterator[Show]:
    """What replaces `text` at the terminal of rank 0, or at its launcher's; nothing on other ranks and in files."""
    from hvdtrain.launch.display import display

    kind = display(topology.launcher) if topology.is_rank_0 else "file"
    if kind == "file" and topology.launcher != "alone":
        yield hidden
        return
    with Status(text, as_lines=kind == "lines") as status:
        yield status.update
