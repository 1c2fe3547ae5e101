"""Where the processes stand that read for a rank."""

import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")

from hvdtrain.core.settings import OwnReadSettings  # noqa: E402
from hvdtrain.datasets import Dataset  # noqa: E402
from hvdtrain.ranks.stacks import Stacks  # noqa: E402
from hvdtrain.torch.data import Loader  # noqa: E402
from hvdtrain.torch.examples import Examples  # noqa: E402

READS = """
import pathlib
import time


class Files:
    def __init__(self, path):
        self.path = pathlib.Path(path)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        while index == 3 and self.path.exists():
            time.sleep(0.01)
        return float(index)
"""


def test_the_line_of_a_worker_that_is_stuck(tmp_path, monkeypatch):
    (tmp_path / "reads.py").write_text(READS)
    (tmp_path / "stuck").touch()
    monkeypatch.syspath_prepend(tmp_path)
    from reads import Files

    examples, own, batches = Examples(Files(tmp_path / "stuck")), Stacks(), []
    dataset = Dataset("files", examples, examples, None, (), (), ())

    def train():
        own.train_here()
        loader = Loader(OwnReadSettings(2), dataset, torch.device("cpu"))
        batches.extend(loader.batches(examples, [(np.array([index]), None) for index in range(4)]))

    thread = threading.Thread(target=train)
    thread.start()
    line = READS.splitlines().index("            time.sleep(0.01)") + 1
    stuck, where = f"; a reader stands in {tmp_path}/reads.py:{line}, in __getitem__", ""
    for _ in range(2400):
        time.sleep(0.05)
        where = own.now()[2]
        if where.endswith(stuck):
            break
    (tmp_path / "stuck").unlink()
    thread.join()
    assert where.endswith(stuck)
    assert [batch.data.item() for batch in batches] == [0, 1, 2, 3]
