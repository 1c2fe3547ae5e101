"""Paths of this repository and of the data beside it."""

import tarfile
from pathlib import Path

SUPPORT = Path(__file__).parent
REPOSITORY = SUPPORT.parents[1]
LABS = REPOSITORY / "labs"
IN_LABS = {"metadata": {"path": str(LABS)}}
"""nbclient's resources, with which it runs a notebook in the folder of the labs, as JupyterLab does."""
SHARED = REPOSITORY.parent / "shared"
"""Beside the checkout on the developers' machines only; tests that use it are skipped where it is absent."""
DATA = SHARED / "data"
DUMPS = SHARED / "launcher-environments"
UNPACKING = getattr(tarfile, "data_filter", None)
"""The filter for members of a tar file; Debian 12's own Python has none."""
