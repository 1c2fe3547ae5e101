"""What a run reports: exact means, the full text of the log, metrics.jsonl over a resume, TensorBoard's tags."""

import json
import os
import re
import resource
import sys
import time
from pathlib import Path

import numpy as np
import odd_json
import pytest
from event_files import events, scalars

from hvdtrain.core.metrics import Totals
from hvdtrain.core.progress import Progress, UserSampling, shard
from hvdtrain.errors import OutputError
from hvdtrain.record.reporter import Events, Reporter
from hvdtrain.terminal import Screen

PASSED = Totals(loss=30.0, count=8.0, metrics={"acc1": (6.0, 8.0)})
VALID = Totals(loss=5.0, count=4.0, metrics={"acc1": (3.0, 4.0)})
LENGTH = UserSampling(10, 800, 1, epochs=2)


def writer(folder: Path, first_step: int) -> Events:
    return Events(folder, first_step + 1, "torch")


@pytest.fixture
def reporter(tmp_path, make_plan):
    """reporter("digits", first_step=0): closed at the end."""
    opened = []

    def make(name: str = "synthetic:tiny", first_step: int = 0) -> Reporter:
        opened.append(Reporter(tmp_path, writer(tmp_path, first_step), first_step))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_an_event_file_holds_what_was_written(tmp_path):
    written = Events(tmp_path, 7, "torch")
    written.add_scalar("loss", 0.5, 7)
    written.flush()
    assert scalars(tmp_path) == {"loss": [(7, 0.5)]}
    written.add_scalar("loss", 0.25, 8)
    written.add_scalar("lr", 1.0, 8)
    written.close()
    head, start, *_ = events(tmp_path)
    assert head.file_version == "brain.Event:2"
    # readers ignore later steps of older files
    assert (start.step, start.session_log.status) == (7, start.session_log.START)
    assert scalars(tmp_path) == {"loss": [(7, 0.5), (8, 0.25)], "lr": [(8, 1.0)]}


def test_a_full_disk_is_an_error_and_no_hang(tiny_disk):
    written = Events(tiny_disk, 1, "torch")
    with pytest.raises(OSError, match="No space left on device"):
        for step in range(100_000):
            written.add_scalar("loss", 0.5, step)


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_totals_add_up_and_divide_once():
    total = Totals(1.0, 4.0, {"acc1": (2.0, 4.0)}) + Totals(0.5, 2.0, {"acc1": (1.0, 2.0), "iou": (1.0, 0.0)})
    assert total == Totals(1.5, 6.0, {"acc1": (3.0, 6.0), "iou": (1.0, 0.0)})
    assert (total.mean_loss, total.means["acc1"]) == (0.25, 0.5)
    assert "iou" not in total.means
    assert str(total.of_validation) == "{'valid_acc1': 0.5, 'valid_iou': nan, 'valid_loss': 0.25}"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 400])
def test_means_over_ranks_are_those_of_the_whole_set(size):
    losses = np.random.default_rng(0).integers(0, 100, 361) / 64  # sums of these are exact
    right = losses < 0.5
    shards = [shard(361, rank, size) for rank in range(size)]
    of_shards = [
        (losses[indices].sum(), len(indices), {"acc1": (right[indices].sum(), len(indices))}) for indices in shards
    ]
    ranks = [Totals(*of_shard) for of_shard in of_shards]

    def sum_over_ranks(_):
        return np.sum([[rank.loss, rank.count, *rank.metrics["acc1"]] for rank in ranks], axis=0)

    for rank in ranks:
        total = rank.over_ranks(sum_over_ranks)
        assert (total.mean_loss, total.means["acc1"], total.count) == (losses.mean(), right.mean(), 361)


def test_what_is_handed_to_the_sum_is_one_array_of_doubles():
    given = []
    totals = Totals(1.0, 3.0, {"b": (5.0, 6.0), "a": (2.0, 3.0)})
    totals.over_ranks(lambda array: given.append(array) or array * 2)
    assert [(array.dtype, array.tolist()) for array in given] == [(np.float64, [1.0, 3.0, 2.0, 3.0, 5.0, 6.0])]
    doubled = Totals(2.0, 6.0, {"a": (4.0, 6.0), "b": (10.0, 12.0)})
    assert totals.over_ranks(lambda array: array * 2) == doubled


def test_the_log_of_a_classifier(reporter, capsys):
    log = reporter()
    log.begin_epoch(Progress(78, 1), LENGTH)
    log.stepped(Progress(79, 1, 10), LENGTH)
    log.stepped(Progress(80, 1, 20), LENGTH)
    log.steps(80, 2, Totals(4.0, 68.02), 0.1, 0.1)
    log.epoch(80, 2, PASSED, VALID)
    log.note("finished")
    lines = capsys.readouterr().out.splitlines()
    line = "INFO - Epoch: 2, Step: 80/158, Loss: 0.0588, LR: 0.1, Time left: 0 s, Avg img/sec: 680.2"
    assert lines[0] == line  # whose last word is the images/s, as in Horovod's tutorial
    assert re.fullmatch(r"INFO - Time taken for epoch 2 is \d+\.\d sec", lines[1])
    assert lines[2:] == [
        "INFO - train loss=3.75000, valid loss=1.25000",
        "INFO - train acc1=0.7500, valid acc1=0.7500",
        "INFO - finished",
    ]


def test_a_regression_has_no_accuracy(reporter, capsys, tmp_path):
    log = reporter("linear")
    log.epoch(10, 1, Totals(30.0, 8.0), Totals(5.0, 4.0))
    log.close()
    assert "acc1" not in capsys.readouterr().out
    about = {"kind", "step", "epoch", "seconds", "time", "train_examples", "valid_examples"}
    assert set(records(tmp_path)[0]) == {*about, "train_loss", "valid_loss"}
    assert set(scalars(tmp_path)) == {"loss/train", "loss/valid"}


def test_a_metric_of_the_validation_alone(reporter, capsys, tmp_path):
    uncounted = Totals(30.0, 8.0, {"overlap": (0.0, 0.0)})
    reporter().epoch(12, 1, uncounted, Totals(5.0, 4.0, {"overlap": (3.0, 4.0)}))
    assert "INFO - valid overlap=0.7500\n" in capsys.readouterr().out
    assert records(tmp_path)[-1]["valid_overlap"] == 0.75 and "train_overlap" not in records(tmp_path)[-1]


def test_metrics_jsonl(reporter, tmp_path):
    log, began = reporter(), time.time()
    log.steps(20, 1, PASSED, 0.125, 2.0)
    log.epoch(40, 1, PASSED, VALID)
    step, epoch = records(tmp_path)  # written at once, not when the run ends
    assert all(began - 1 < record.pop("time") <= round(time.time(), 3) for record in (step, epoch))
    assert step == {"kind": "step", "step": 20, "epoch": 1, "loss": 3.75, "lr": 0.125, "examples_per_second": 4.0}
    assert epoch.pop("seconds") >= 0
    assert epoch == {
        "kind": "epoch",
        "step": 40,
        "epoch": 1,
        "train_loss": 3.75,
        "valid_loss": 1.25,
        "train_acc1": 0.75,
        "valid_acc1": 0.75,
        "train_examples": 8,
        "valid_examples": 4,
    }


def test_a_gradient_norm_is_written_where_it_is_known(reporter, tmp_path):
    log = reporter()
    log.steps(20, 1, PASSED, 0.125, 2.0, gradient_norm=1.5)
    log.close()
    assert records(tmp_path)[0]["gradient_norm"] == 1.5
    assert scalars(tmp_path)["gradient_norm"] == [(20, 1.5)]


def test_the_log_of_a_loop_of_ones_own(tmp_path, capsys):
    log = Reporter(tmp_path, writer(tmp_path, 0), 0, is_program=True)
    log.begin_epoch(Progress(), UserSampling(0, 0, 1))  # what they are is known with the batches
    log.stepped(Progress(1, 0, 10), UserSampling(10, 100, 1, epochs=sys.maxsize))
    log.steps(1, 1, PASSED, 0.1, 2.0)
    log.begin_epoch(Progress(1, 0, 10), UserSampling(0, 0, 1, epochs=2))
    log.stepped(Progress(2, 0, 20), UserSampling(10, 100, 1, epochs=2))
    log.steps(2, 1, PASSED, 0.1, 2.0, gradient_norm=1.5)
    log.close()
    known = "Epoch: 1, Step: 2/20, loss: 3.75, acc1: 0.75, gradient_norm: 1.5, LR: 0.1, Time left: 0 s, Avg"
    assert capsys.readouterr().out.splitlines() == [
        "INFO - Epoch: 1, Step: 1, loss: 3.75, acc1: 0.75, LR: 0.1, Avg examples/sec: 4.0",
        f"INFO - {known} examples/sec: 4.0",
    ]


@pytest.mark.parametrize(("columns", "begin"), [(70, "Epoch: 1, Step: 2/20"), (65, "Step: 2/20")])
def test_a_narrow_terminal_costs_a_loop_of_ones_own_the_epoch_last(columns, begin, tmp_path, capsys):
    log = Reporter(tmp_path, None, 0, Screen(columns), is_program=True)
    log.begin_epoch(Progress(1, 0, 10), UserSampling(10, 100, 1, epochs=2))
    log.stepped(Progress(2, 0, 20), UserSampling(10, 100, 1, epochs=2))
    log.steps(2, 1, Totals(0.7126123, 1.0), 0.1, 0.0001, gradient_norm=1.5)
    log.close()
    assert capsys.readouterr().out == f"INFO - {begin}, loss: 0.71261, Avg examples/sec: 10000.0\n"


def test_a_diverged_validation_is_null_in_json(reporter, tmp_path):
    reporter().epoch(40, 1, PASSED, Totals(float("nan"), 4.0))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert '"valid_loss": null' in line
    assert "NaN" not in line


RESUMED = {  # the file as a killed run left it, the step of its checkpoint: steps that stay
    "no file": (None, 0, []),
    "up to the checkpoint": ('{"step": 20}\n{"step": 40}\n{"step": 60}\n', 40, [20, 40]),
    "half a last line": ('{"step": 20}\n{"kind": "step", "st', 40, [20]),
    "a last line without its end": ('{"step": 20}\n{"step": 40}', 40, [20, 40]),
    "half a line in the midst": ('{"step": 20}\n{"ste\n{"step": 30}\n', 40, [20, 30]),
    "bytes of a power cut": ('{"step": 20}\n\0\0\xff', 40, [20]),
    "lines that are no records": ('{"step": 20}\n\n3\n[]\n{}\n', 40, [20]),
    "anew": ('{"step": 20}\n', 0, []),
}


@pytest.mark.parametrize(("text", "first_step", "stay"), RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_drops_what_it_makes_again(text, first_step, stay, reporter, tmp_path):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    log = reporter(first_step=first_step)
    assert [record["step"] for record in records(tmp_path)] == stay
    log.steps(first_step + 20, 1, PASSED, 0.1, 1.0)
    assert [record["step"] for record in records(tmp_path)] == [*stay, first_step + 20]


def test_fuzzed_lines_are_kept_or_dropped(reporter, tmp_path):
    """And none of them hides the lines beside it."""
    good = {"kind": "step", "step": 20, "epoch": 1, "loss": 3.75, "lr": 0.1, "examples_per_second": 4.0}
    with (tmp_path / "metrics.jsonl").open("w", errors="surrogatepass") as file:
        for mark, text in enumerate(odd_json.texts(good)):
            file.write(f'{text}\n{{"step": 1, "mark": {mark}}}\n')
    reporter(first_step=20)
    kept = records(tmp_path)
    assert [record["mark"] for record in kept if "mark" in record] == list(range(odd_json.COUNT))
    assert all(type(record["step"]) is int and 0 <= record["step"] <= 20 for record in kept)
    assert odd_json.COUNT < len(kept) < 2 * odd_json.COUNT


def test_a_line_without_end_is_not_read_whole(reporter, tmp_path):
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.write(b'{"step": 20}\n')
        file.truncate(1 << 27)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reporter(first_step=20)
    assert [record["step"] for record in records(tmp_path)] == [20]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["a folder", "a pipe"])
def test_what_is_no_file_is_refused(make, reporter, tmp_path):
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(OutputError, match=r"^cannot append to .*metrics.jsonl: .*; give another --output\.$"):
        reporter()


def test_tensorboard_tags_steps_and_values(reporter, tmp_path):
    log = reporter()
    log.steps(20, 1, PASSED, 0.125, 2.0)
    log.epoch(40, 1, PASSED, VALID)
    log.close()
    assert scalars(tmp_path) == {
        "loss/step": [(20, 3.75)],
        "learning_rate": [(20, 0.125)],
        "loss/train": [(40, 3.75)],
        "loss/valid": [(40, 1.25)],
        "acc1/train": [(40, 0.75)],
        "acc1/valid": [(40, 0.75)],
    }
