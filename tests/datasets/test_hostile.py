"""Reading damaged and forged data files ends in one line: it does not hang, nor fill the memory."""

import os
import subprocess
import sys

from paths import REPOSITORY, SUPPORT

SLOW = ("a_thousand_forged",)


def test_a_thousand_forged_files_end_in_a_line_each(tmp_path):
    """In a process that a hang, or 1 GB of memory, would end."""
    command = [sys.executable, SUPPORT / "hostile_data.py", "1000", "1", tmp_path]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr.rpartition("\r")[2]
    assert " 0 failed, " in ended.stdout
