"""How much memory this process has had at most."""

import re
from pathlib import Path


def peak_mib() -> float:
    """MiB. getrusage's is that of the process it was forked from, too, where that had more."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0
