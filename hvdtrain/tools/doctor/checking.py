"""What the doctor looks at now: several things at once."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from hvdtrain.tools.rank_status import Show, hidden


class Checking:
    """Shows the names of what is being checked; any thread may call it."""

    def __init__(self, show: Show = hidden) -> None:
        self._show = show
        self._names: list[str] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Until the block ends, that is being checked."""
        self._change(self._names.append, name)
        try:
            yield
        finally:
            self._change(self._names.remove, name)

    def _change(self, change: Callable[[str], None], name: str) -> None:
        with self._lock:
            change(name)
            if self._names:
                self._show(f"checking: {', '.join(self._names)}")
