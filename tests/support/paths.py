"""Where things lie, and how an archive of them is unpacked."""

import tarfile
from pathlib import Path

SUPPORT = Path(__file__).parent
REPOSITORY = SUPPORT.parents[1]
LABS = REPOSITORY / "labs"
IN_LABS = {"metadata": {"path": str(LABS)}}
"""Where JupyterLab runs a notebook of this folder: what nbclient takes as its resources."""
SHARED = REPOSITORY.parent / "shared"
"""Beside the checkout on the developers' machines only; tests that use it are skipped where it is absent."""
DATA = SHARED / "data"
DUMPS = SHARED / "launcher-environments"
UNPACKING = getattr(tarfile, "data_filter", None)
"""Of a tar's members; Debian 12's own Python has no filters yet."""
