"""Random numbers that a data set draws are those of the sample, whether or not the set was found to draw any; and where
the processes stand that read for a rank."""

import itertools
import multiprocessing
import random
import threading
import time
from collections.abc import Mapping

import numpy as np
import pytest
from images import draws, write_tree
from refusals import refusal

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")

from torch.utils.data import Dataset  # noqa: E402

from hvdtrain.core import recipe  # noqa: E402
from hvdtrain.core.recipe import augmentation, of_program  # noqa: E402
from hvdtrain.core.recipe.classes import labels_of  # noqa: E402
from hvdtrain.datasets import Dataset as OfSplits  # noqa: E402
from hvdtrain.errors import DataError  # noqa: E402
from hvdtrain.ranks.stacks import Stacks  # noqa: E402
from hvdtrain.run.examples import DRAWS  # noqa: E402
from hvdtrain.run.setup import load_dataset  # noqa: E402
from hvdtrain.torch.data import Examples, Loader  # noqa: E402

N = 16
INDICES = np.arange(N)
SEEDS = np.random.default_rng(0).random((N, DRAWS), dtype=np.float32)


class Drawing(Dataset):
    """Sample i is i, with something drawn added to the last ones by `draw`."""

    def __init__(self, draw):
        self.draw, self.reads = draw, 0

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.reads += 1
        return torch.tensor(index + (self.draw() if index >= N // 2 else 0.0), dtype=torch.float64)


def no_draw():
    return 0.0


def behind_a_fork():
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


def failing_draw():
    if (number := random.random()) < 0.95:
        raise ValueError(f"drew {number}")
    return number


DRAWS_OF = {
    "random": random.random,
    "a gauss that random keeps": lambda: random.gauss(0, 1),
    "numpy.random": lambda: float(np.random.rand()),
    "a gauss that numpy.random keeps": lambda: float(np.random.randn()),
    "torch": lambda: torch.rand(()).item(),
}


@pytest.mark.parametrize("name", DRAWS_OF)
def test_a_set_that_draws_late_draws_as_one_that_always_did(name):
    seeded, checked = Examples(Drawing(DRAWS_OF[name])), Examples(Drawing(DRAWS_OF[name]))
    before = checked.generators.states()
    checked.look(0, 60.0, True)
    assert checked.generators.states() == before
    assert not checked.is_random  # the first that was read draws nothing
    random.gauss(0, 1), np.random.randn()  # each keeps a second number
    for first in range(0, N, 4):
        rows = slice(first, first + 4)
        assert checked.read(INDICES[rows], SEEDS[rows]).equal(seeded.read(INDICES[rows], SEEDS[rows]))
    assert checked.is_random


def test_a_set_that_draws_nothing_is_read_once_and_not_seeded():
    examples = Examples(Drawing(no_draw))
    examples.look(0, 60.0, True)
    before, examples.dataset.reads = examples.generators.states(), 0
    examples.read(INDICES, SEEDS)
    assert (examples.dataset.reads, examples.is_random, examples.generators.states()) == (N, False, before)


def test_what_takes_too_long_is_not_looked_at():
    examples = Examples(Drawing(no_draw))
    assert examples.look(0, 0.0, True)["marks"] == {}
    assert examples.dataset.reads == 0
    assert len(examples.look(0, 60.0, True)["marks"]) == 5
    assert examples.dataset.reads == 8


class Broken:
    """A value that raises an error wherever one looks."""

    __class__ = Mapping  # type: ignore[assignment]

    def __getattr__(self, name):
        raise RuntimeError(name)


def test_what_cannot_be_looked_at_is_left_out():
    looked = Examples(Listed([(Broken(), 1)] * 4)).look(0, 60.0, True)
    assert looked["marks"] == {}


def test_numbers_drawn_behind_a_fork_are_the_samples_own():
    one, other = (Examples(Drawing(behind_a_fork)) for _ in range(2))
    for examples in (one, other):
        examples.look(1, 60.0, True)
        assert examples.is_random
    first = one.read(INDICES, SEEDS)
    torch.rand(3)
    assert other.read(INDICES, SEEDS).equal(first)


def test_an_error_of_what_was_drawn_is_the_seeded_ones():
    examples = Examples(Drawing(failing_draw))
    examples.look(0, 60.0, True)
    before = examples.generators.states()
    with pytest.raises(Exception, match=r"sample 8: .*ValueError: drew ") as first:
        examples.read(INDICES, SEEDS)
    assert examples.generators.states() == before
    with pytest.raises(Exception, match=r"drew ") as again:
        Examples(Drawing(failing_draw)).read(INDICES, SEEDS)
    assert str(first.value) == str(again.value)


class Listed(Dataset):
    """These samples."""

    def __init__(self, samples: list) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.samples[index]


def without_none(samples: list) -> torch.Tensor:
    return torch.stack([sample for sample in samples if sample is not None])


def in_pairs(samples: list) -> torch.Tensor:
    return torch.stack([torch.stack(samples[:2]), torch.stack(samples[2:])])


@pytest.mark.parametrize("collate", [without_none, in_pairs])
def test_a_collate_that_makes_no_batch_of_one_sample(collate):
    samples = [None if collate is without_none and index % 3 == 0 else torch.full((2,), index) for index in range(4)]
    examples = Examples(Listed(samples), "numbers", collate)
    assert len(examples.look(0, 60.0, False)["marks"]) == 4
    assert torch.equal(examples.read(np.arange(4), None), collate(samples))


ODD = {  # the samples: what is named, in whatever order they are read
    "None": ([torch.ones(1), None, None, torch.ones(1)], "sample 1 is NoneType, sample 0 is float32 [1]"),
    "mostly None": ([None, None, torch.ones(1), None], "sample 0 is NoneType, sample 2 is float32 [1]"),
    "nothing else": ([None] * 4, "sample 0 is NoneType"),
    "one shape of several": (
        [torch.ones(1), torch.ones(2), torch.ones(2), torch.ones(3)],
        "sample 0 is float32 [1], sample 1 is float32 [2]",
    ),
}


@pytest.mark.parametrize(("samples", "named"), ODD.values(), ids=ODD)
def test_what_is_said_of_samples_does_not_depend_on_their_order(samples, named):
    examples = Examples(Listed(samples), "numbers")
    for order in itertools.permutations(range(4)):
        assert (
            refusal(DataError, examples.read, np.array(order), None)
            == f"numbers: {named} in {__file__}; {examples.alike}."
        )


class Read(Listed):
    """The sum of each sample."""

    def __getitem__(self, index: int) -> float:
        of = self.samples[index]
        return float(np.sum(np.asarray(of.value if index == 0 else of)))


OFF = OfSplits("off", None, None, None, (), (), ())


def mixed(samples: list) -> torch.Tensor:
    return torch.stack(samples)[torch.randperm(len(samples))] * random.random() + np.random.rand()


def test_what_collate_draws_is_the_batchs_own():
    one, other = (Examples(Listed(list(torch.arange(16.0).split(1))), "numbers", mixed) for _ in range(2))
    before = one.generators.states()
    one.look(0, 60.0, True)  # reads twice
    first = one.read(INDICES, SEEDS)
    assert one.generators.states() == before
    torch.rand(3), random.random(), np.random.rand()
    assert other.read(INDICES, SEEDS).equal(first)
    assert not other.read(INDICES, SEEDS[::-1]).equal(first)
    assert other.read(INDICES, None).equal(one.read(INDICES, None))


def test_workers_have_the_set_as_the_program_has_it():
    data = [multiprocessing.get_context("forkserver").Value("i", 1), np.zeros(2**18), torch.zeros(4), [0.0]]
    examples = Examples(Read(data))
    loader, pools = Loader(of_program(workers=1, precision=None), OFF, torch.device("cpu")), []
    for epoch, changes in enumerate(
        (lambda: None, lambda: data[2].fill_(1), lambda: data[3].append(1.0), lambda: data[1].fill(1), lambda: None)
    ):
        changes()
        data[0].value = epoch
        (batch,) = loader.batches(examples, [(np.arange(4), None)])
        assert batch.data.tolist() == [epoch, *(float(np.sum(np.asarray(of))) for of in data[1:])]
        pools.append([each.pid for each in multiprocessing.active_children()])
    assert [before == after for before, after in itertools.pairwise(pools)] == [True, False, False, True]
    assert {len(pool) for pool in pools} == {1}


def test_images_are_augmented_by_workers_as_here(tmp_path):
    keys = {"data_dir": write_tree(tmp_path), "train_crop": 24, "valid_resize": 24, "valid_crop": 24, "workers": 1}
    chosen = recipe.load("imagenet", {**keys, "mixup": 0.5, "cutmix": 1.0, "random_erasing": 0.5})
    dataset, indices = load_dataset(chosen), np.arange(6)
    loader, drawn = Loader(chosen, dataset, torch.device("cpu")), np.tile(draws(6), 2)
    loader._normalised = lambda x, y: (x, y)
    ((x, y),) = loader.batches(dataset.train, [(indices, drawn)])
    expected = dataset.train.read(indices, draws(6))[0]
    augmenter = augmentation.augmenter(chosen, dataset)
    augmenter.images(expected, drawn)
    np.testing.assert_array_equal(x, expected)
    np.testing.assert_array_equal(y, augmenter.targets(dataset.train.labels[indices], drawn, 24, 24))
    ((_, labels),) = loader.batches(dataset.valid, [(indices, None)])
    np.testing.assert_array_equal(labels, dataset.valid.labels)


def test_images_come_from_workers_as_they_are_read_here_also_after_a_wait_an_end_and_an_error(tmp_path):
    tree = write_tree(tmp_path)
    given = {
        "data_dir": tree,
        "train_crop": 24,
        "valid_resize": 24,
        "valid_crop": 24,
        "workers": 2,
        "decoder": "pillow",
    }
    chosen = recipe.load("imagenet", given)
    dataset = load_dataset(chosen)
    loader, random = Loader(chosen, dataset, torch.device("cpu")), np.random.default_rng(0)
    loader._normalised = lambda x, y: (x, y)

    def requests(*lengths):
        return [(random.permutation(16)[:n], draws(n)) for n in lengths]

    for lengths in ((3,) * 12, (4, 3, 2), (9, 1)):
        asked = requests(*lengths)
        next(loader.batches(dataset.train, requests(*lengths)))  # and left
        for (x, y), request in zip(loader.batches(dataset.train, asked), asked, strict=True):
            expected, labels = dataset.train.read(*request)
            np.testing.assert_array_equal(x, expected)
            np.testing.assert_array_equal(y, labels)
            time.sleep(0.01)  # the readers are as far ahead as they may be
    path = dataset.train.path(0)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match="cannot be read as an image"):
        list(loader.batches(dataset.train, [(np.array([0]), None)]))
    ((x, _),) = loader.batches(dataset.train, [(np.array([5]), None)])
    np.testing.assert_array_equal(x, dataset.train.read(np.array([5]), None)[0])


def test_a_lock_that_workers_cannot_have_is_named():
    loader = Loader(of_program(workers=1, precision=None), OFF, torch.device("cpu"))
    examples = Examples(Read([multiprocessing.get_context("fork").Value("i", 1)]), "numbers")
    said = refusal(DataError, list, loader.batches(examples, [(np.arange(1), None)]))
    assert said.startswith("numbers cannot be sent to workers, as pickle: A SemLock created in a fork context")
    assert said.endswith('get_context("forkserver"), or set workers to 0.')


READS = """
import pathlib
import time
from collections.abc import Mapping


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
    dataset = OfSplits("files", examples, examples, None, (), (), ())

    def train():
        own.train_here()
        loader = Loader(of_program(workers=2, precision=None), dataset, torch.device("cpu"))
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


def test_the_labels_of_a_data_set_of_the_users():
    x, y = torch.zeros(6, 2), torch.tensor([0, 2, 1, 0, 0, 2])
    of_tensors = torch.utils.data.TensorDataset(x, y)
    for dataset in (of_tensors, torch.utils.data.Subset(of_tensors, [1, 3, 5])):
        labels = labels_of(OfSplits("mine", Examples(dataset), Examples(dataset), None, (), (), ()), "sample balanced")
        np.testing.assert_array_equal(labels, [each[1] for each in dataset])
    for wrong in (of_tensors.tensors[:1], (x, y - 1), (x, y.float()), (x, x, y)):
        with pytest.raises(DataError, match="sample balanced needs the label of each training example"):
            dataset = Examples(torch.utils.data.TensorDataset(*wrong))
            labels_of(OfSplits("mine", dataset, dataset, None, (), (), ()), "sample balanced")
