"""Lab 4: its images, its grid, its figures, and that the gap it describes opens and closes."""

import math
import pickle

import jupytext
import matplotlib.pyplot as plt
import numpy as np
import paths
import pytest

from hvdtrain.core.progress import Epoch
from labtools import batches
from labtools.batches import History, Setting

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
LAB = paths.LABS / "4-solution-large_batches.ipynb"


@pytest.fixture(scope="module")
def digits():
    return batches.digits()


@pytest.fixture(scope="module")
def lab():
    """What the notebook defines before it starts to train, at the scale that it shows a class."""
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVDTRAIN_LAB_SCALE", "1")
        for cell in jupytext.read(LAB).cells:
            if "train_all" in cell.source:
                break
            if cell.cell_type == "code":
                exec(cell.source, names)
    return names


@pytest.fixture(scope="module")
def results(lab):
    """Two seeds of the four settings that the notebook's text compares."""
    settings = [
        Setting(128, "none", 0),
        Setting(2048, "none", 0),
        Setting(2048, "linear", 0),
        Setting(2048, "linear", 5),
    ]

    def train(setting, seed):
        return lab["train"](lab["digits"], lab["BASE_LR"], lab["EPOCHS"], setting, seed)

    return batches.train_all(train, settings, [0, 1])


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close("all")


SHIFTS = {
    "stays": ([0.5, 0.5], slice(0, 8), slice(0, 8), slice(0, 8), slice(0, 8)),
    "up": ([0.99, 0.4], slice(1, 8), slice(0, 8), slice(0, 7), slice(0, 8)),
    "down": ([0.0, 0.4], slice(0, 7), slice(0, 8), slice(1, 8), slice(0, 8)),
    "left": ([0.4, 0.7], slice(0, 8), slice(1, 8), slice(0, 8), slice(0, 7)),
    "down and right": ([0.3, 0.3], slice(0, 7), slice(0, 7), slice(1, 8), slice(1, 8)),
}


@pytest.mark.parametrize(("draws", "rows", "columns", "to_rows", "to_columns"), SHIFTS.values(), ids=SHIFTS)
def test_an_image_is_shifted_as_drawn(digits, draws, rows, columns, to_rows, to_columns):
    x, y = digits.batch(np.array([7]), np.array([draws], np.float32))
    np.testing.assert_array_equal(x[0, 0, to_rows, to_columns], digits.train[0][7, 0, rows, columns])
    assert y.tolist() == [digits.train[1][7]]


def test_an_epoch_of_digits_is_eight_passes_in_a_batch_of_2048(digits):
    examples = np.arange(len(digits))
    assert len(digits) == 8 * 1437
    x, y = digits.batch(examples, np.full((len(digits), 2), 0.5, np.float32))
    assert x.shape == (11496, 1, 8, 8)
    np.testing.assert_array_equal(x.reshape(8, 1437, 1, 8, 8), np.broadcast_to(digits.train[0], (8, 1437, 1, 8, 8)))
    np.testing.assert_array_equal(y, np.tile(digits.train[1], 8))
    assert abs(x.mean()) < 0.05
    assert x.std() == pytest.approx(1, abs=0.05)


def test_sixteen_ranks_see_the_batch_and_the_gradient_of_one_process(lab, digits):
    epoch = Epoch.shuffled(len(digits), 3, 1, draws=2)

    def gradient(indices):
        model = lab["network"](digits, 0)
        x, y = digits.batch(indices, epoch.draws[indices])
        torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        return torch.cat([weights.grad.ravel() for weights in model.parameters()])

    ranks = torch.stack([gradient(epoch.local_batch(2048, 2048, rank, 16)) for rank in range(16)])
    torch.testing.assert_close(ranks.mean(0), gradient(epoch.local_batch(2048, 2048, 0, 1)), rtol=1e-4, atol=1e-6)


def cifar_folder(parent, labels):
    """Striped images, on average of one colour each: red its label, green twice and blue three times that."""
    folder = parent / "cifar-100-python"
    folder.mkdir()
    planes = np.kron(np.outer(labels, [1, 2, 3]), np.tile([2, 0], 512)).astype(np.uint8)
    for split in ("train", "test"):
        (folder / split).write_bytes(pickle.dumps({b"data": planes, b"fine_labels": labels}))


def test_cifar_100_is_found_cut_to_its_first_classes_and_averaged_down(tmp_path, monkeypatch):
    cifar_folder(tmp_path, [5, 0, 99, 4, 20, 19])
    monkeypatch.setenv("HVDTRAIN_DATA", str(tmp_path))
    images = batches.cifar100(classes=20)
    assert images.train[1].tolist() == images.valid[1].tolist() == [5, 0, 4, 19]
    assert images.train[0].shape == (4, 3, 8, 8)
    assert len(images) == 4
    green = (2 * np.array([5, 0, 4, 19]) / 255 - 0.48655) / 0.25644
    np.testing.assert_allclose(images.valid[0][:, 1], np.broadcast_to(green[:, None, None], (4, 8, 8)), rtol=1e-6)


def test_where_cifar_100_is_missing_one_line_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HVDTRAIN_DATA", str(tmp_path))
    assert batches.cifar100(classes=20) is None
    assert capsys.readouterr().out == (
        f"cifar-100-python is not in {tmp_path}: `python -m hvdtrain plan cifar100:bs128` fetches it (169 MB).\n"
    )


def test_the_grid_has_each_training_once():
    settings = batches.grid([128, 256, 2048], ["none", "sqrt", "linear"], [0, 5])
    assert len(settings) == len(set(settings)) == 2 + 2 * 3 * 2
    assert [setting for setting in settings if setting.batch == 128] == [
        Setting(128, "none", 0),
        Setting(128, "none", 5),
    ]
    assert Setting(2048, "sqrt", 5) in settings


def made_up(setting, seed):
    """A training that reaches an accuracy of its own for each setting and seed."""
    reached = 0.9 - setting.batch / 1e4 + 0.01 * len(setting.rule) + 0.1 * (setting.warmup_epochs > 0) + 0.001 * seed
    return History([3.0, 2.0], [0.1, 0.9], [0.1, reached])


@pytest.fixture
def made_up_results():
    return batches.train_all(made_up, batches.grid([128, 2048], ["none", "sqrt", "linear"], [0, 5]), range(3))


def test_every_setting_gets_the_histories_of_its_own_seeds(made_up_results):
    for setting, histories in made_up_results.items():
        expected = [made_up(setting, seed).valid_accuracy for seed in range(3)]
        assert [history.valid_accuracy for history in histories] == expected


def test_the_last_figure_has_a_line_a_rule_and_a_panel_a_warm_up(made_up_results):
    batches.over_batch(made_up_results)
    panels = plt.gcf().axes
    assert [axes.get_title() for axes in panels] == ["Without warm-up", "Warm-up over 5 epochs"]
    for axes, warmup in zip(panels, (0, 5), strict=True):
        drawn = [line.lines[0].get_xydata().tolist() for line in axes.containers]
        small = batches.accuracy(made_up_results[Setting(128, "none", warmup)])
        assert drawn == [
            [[128, small], [2048, batches.accuracy(made_up_results[Setting(2048, rule, warmup)])]]
            for rule in ("none", "sqrt", "linear")
        ]


def test_no_two_lines_of_a_figure_look_alike(made_up_results):
    named = {
        "small": Setting(128, "none", 0),
        "none": Setting(2048, "none", 0),
        "sqrt": Setting(2048, "sqrt", 5),
        "cold": Setting(2048, "linear", 0),
        "warm": Setting(2048, "linear", 5),
    }
    batches.curves(made_up_results, named)
    batches.first_losses(made_up_results, named, updates=2, classes=10)
    for axes, guessing in ((plt.figure(1).axes[0], 0), (plt.figure(1).axes[1], 0), (plt.figure(2).axes[0], 1)):
        looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.lines}
        assert len(looks) == len({colour for colour, _, _ in looks}) == len(named) + guessing


def test_the_report_counts_points_from_the_first(made_up_results, capsys):
    batches.report(made_up_results, {"128": Setting(128, "none", 0), "2048": Setting(2048, "sqrt", 5)})
    _, small, large = capsys.readouterr().out.splitlines()
    assert small.split() == ["128", "92.8%", "0.0", "0%"]
    assert large.split() == ["2048", "83.6%", "9.2", "0%"]


@pytest.mark.slow
def test_the_gap_opens_without_a_rule(results):
    small, large = (batches.accuracy(results[Setting(batch, "none", 0)]) for batch in (128, 2048))
    assert small > 0.97
    assert large < small - 0.04
    # The large batch is behind on its training images just as much.
    behind = [results[Setting(128, "none", 0)][k].train_accuracy[-1] for k in (0, 1)]
    assert np.mean([results[Setting(2048, "none", 0)][k].train_accuracy[-1] for k in (0, 1)]) < np.mean(behind) - 0.04


@pytest.mark.slow
def test_the_linear_rule_without_warm_up_leaps_and_silences_units(results):
    cold = results[Setting(2048, "linear", 0)]
    assert all(max(history.losses[:20]) > 1.5 * math.log(10) for history in cold)
    assert all(history.silent_units > 0.3 for history in cold)


@pytest.mark.slow
def test_the_linear_rule_with_warm_up_closes_the_gap(results):
    warm = results[Setting(2048, "linear", 5)]
    small, large = (batches.accuracy(results[Setting(batch, "none", 0)]) for batch in (128, 2048))
    assert batches.accuracy(warm) > large + 0.5 * (small - large)
    assert all(max(history.losses[1:20]) < 1.5 * math.log(10) for history in warm)
    assert all(history.silent_units < 0.3 for history in warm)
