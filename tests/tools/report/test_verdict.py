"""The verdict: how a run ended, how good it is, what it kept, what to do next."""

import json
import re

import pytest
import report_folders

from hvdtrain.ranks.messages import Times
from hvdtrain.ranks.slow import columns
from hvdtrain.record import reader
from hvdtrain.terminal import Status
from hvdtrain.tools import report
from hvdtrain.tools.bench import engines
from hvdtrain.tools.report import page, scaling
from hvdtrain.tools.report.assemble import run_report
from hvdtrain.tools.report.results import is_higher_better, words
from hvdtrain.tools.report.verdict import NOT_KNOWN
from hvdtrain.tools.watch.frame import _slowest


def edited(path, change):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(each) + "\n" for record in records if (each := change(record))))


def metrics(change, **more):
    """Makes a finished run with some records of its metrics changed: `change` gives what is other in a record."""

    def make(folder):
        report_folders.finished(folder, **more)
        edited(folder / "metrics.jsonl", lambda record: record | change(record))

    return make


def of_epochs(first=0, last=99, **values):
    """In records of epochs, from the first to the last: these values."""
    return lambda record: values if record["kind"] == "epoch" and first <= record["epoch"] <= last else {}


def by_epoch(**values):
    """In records of epochs: of these lists, the value of the epoch."""
    return lambda record: {
        name: each[record["epoch"] - 1] for name, each in values.items() if record["kind"] == "epoch"
    }


def own(change=lambda record: {}, **about):
    """Makes a finished run of a loop of one's own, with records changed as by `metrics`, and more in run.json."""

    def make(folder):
        report_folders.own_program(folder)
        path = folder / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | about))
        edited(folder / "metrics.jsonl", lambda record: record | change(record))

    return make


def rates(of_step):
    """In log lines: this throughput."""
    return lambda record: {"examples_per_second": of_step(record["step"])} if record["kind"] == "step" else {}


def without(name, is_lost):
    """Makes a finished run that lacks these records of a file, or the file where all are lost."""

    def make(folder):
        report_folders.finished(folder)
        edited(folder / name, lambda record: None if is_lost(record) else record)

    return make


def jumped(folder):
    report_folders.resumed(folder)
    high = lambda each: {"loss": 2.3 + each["step"] % 3 / 10} if each["kind"] == "step" and each["step"] > 132 else {}  # noqa: E731
    edited(folder / "metrics.jsonl", lambda record: record | high(record))


def running_to_nan(folder):
    report_folders.running(folder)
    lost = lambda each: {"loss": None} if each["kind"] == "step" and each["step"] > 100 else {}  # noqa: E731
    edited(folder / "metrics.jsonl", lambda record: record | lost(record))


def out_of_memory(folder):
    run = report_folders.Run(folder, expected={"valid_acc1": 0.978})
    run.launch(report_folders.BEGAN)
    run.train(150)
    run.end("failed", "CUDA out of memory; take a smaller batch.")


def finished(**more):
    return lambda folder: report_folders.finished(folder, **more)


def named(name, **more):
    """Makes a finished run of a recipe of the user's own, which expects something, or nothing."""

    def make(folder):
        report_folders.finished(folder, expected=more or None)
        path = folder / "recipe.yaml"
        text = path.read_text().replace("# digits,", f"# {name},")
        path.write_text(text if more else re.sub("(?m)^  expected: .*", "  expected: {}", text))

    return make


def regression(name, expected, value):
    """Makes a finished run without classes, whose validation has a metric of that name."""

    def make(folder):
        named("mine.yaml", **{f"valid_{name}": expected})(folder)
        edited(folder / "launches.jsonl", lambda record: record | ({"classes": None} if "classes" in record else {}))
        other = {"train_acc1", "valid_acc1"}
        lean = lambda record: {key: each for key, each in record.items() if key not in other}  # noqa: E731
        more = of_epochs(**{f"valid_{name}": value})
        edited(folder / "metrics.jsonl", lambda record: lean(record) | more(record))

    return make


def slower(first, last=10**9):
    """Makes a finished run of 275 images/s, which has 75 in these steps."""

    def change(record):
        rate = 75.0 if first <= record["step"] <= last else 275.0 + record["step"] % 7
        return {"examples_per_second": rate} if record["kind"] == "step" else {}

    return metrics(change)


def without_validation(folder):
    metrics(of_epochs(valid_loss=None, valid_examples=0))(folder)
    edited(folder / "metrics.jsonl", lambda record: {k: v for k, v in record.items() if k != "valid_acc1"})
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"valid_examples": 0}))


def diverged_early(folder):
    run = report_folders.Run(folder, changed={"base_lr": 5.0, "log_every_steps": 1})
    run.launch(report_folders.BEGAN)
    run.train(5)
    run.metrics[-1]["loss"] = None
    run.end("failed", "the training loss is nan at step 5; lower the LR (peak 5), or set --clip-norm.")


def on_fewer_ranks(folder):
    run = report_folders.Run(folder, expected={"valid_acc1": 0.978}, ranks=2)
    run.launch(report_folders.BEGAN)
    run.records[-1]["ranks"] = 4
    run.train(100)
    run.launch(run.began + run.clock + 20)
    run.train()
    run.end("finished")


def torn(folder):
    report_folders.finished(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "step": 22')


def with_flags(*flags, recipe="mine.yaml", **expected):
    """Makes a finished run of that recipe, whose command line had these flags."""

    def make(folder):
        named(recipe, **expected)(folder)
        of_launch = lambda each: {"command": [*each["command"], *flags]} if each["kind"] == "launch" else {}  # noqa: E731
        edited(folder / "launches.jsonl", lambda each: each | of_launch(each))

    return make


ENDS = ("status.json", "launches.jsonl")
KINDS = {
    # kind of a run: how it is made, the verdict that a person gives it ("good", "bad", "undecidable"), and why
    "to its end": (finished(), "good", "0.9750, expected 0.978: as it should be."),
    "better than expected": (finished(accuracy=0.998), "good", "which is better"),
    "lower by chance": (finished(accuracy=0.97), "good", "as it should be"),
    "too low": (finished(accuracy=0.94), "bad", "lower by more than chance (0.0155)."),
    "other epochs": (finished(changed={"epochs": 5}), "undecidable", "differs from the recipe in epochs."),
    "one epoch": (finished(changed={"epochs": 1, "warmup_epochs": 0}), "undecidable", "epochs, warmup_epochs."),
    "another batch": (finished(changed={"batch_size": 32}), "undecidable", "batch_size"),
    "another seed": (finished(changed={"seed": 3}), "undecidable", "seed"),
    "what does not matter": (finished(changed={"log_every_steps": 2}), "good", "as it should be"),
    "NaN at the end": (
        metrics(of_epochs(9, valid_loss=None)),
        "bad",
        "Validation loss is NaN at the end: 2 of 10 values are NaN, the first at epoch 9; the best is 0.134",
    ),
    "the expected one is NaN": (metrics(of_epochs(10, valid_acc1=None)), "bad", "accuracy NaN, expected 0.978."),
    "every metric is NaN": (
        metrics(of_epochs(valid_loss=None, train_loss=None, valid_acc1=None, train_acc1=None)),
        "bad",
        "Training loss is NaN at the end: 10 of 10 values are NaN, the first at epoch 1.",
    ),
    "NaN with other epochs": (
        metrics(of_epochs(3, valid_acc1=None), changed={"epochs": 3}),
        "bad",
        "1 of 3 values are NaN",
    ),
    "NaN in the middle": (metrics(of_epochs(4, 5, valid_loss=None)), "bad", "was NaN for a while: 2 of 10"),
    "no better than guessing": (finished(accuracy=0.1), "bad", "0.1000 is no better than guessing (0.1000), of 10"),
    "worse than guessing": (
        metrics(of_epochs(valid_loss=11.66, valid_acc1=0.37), changed={"epochs": 2}),
        "bad",
        "Validation loss 11.6600 is worse than guessing (2.3026), of 10 classes.",
    ),
    "the loss is constant": (metrics(lambda record: {"loss": 2.3}), "bad", "2.3 from the beginning to the end"),
    "the loss rises": (
        metrics(lambda record: {"train_loss": 1 + record["epoch"]} if record["kind"] == "epoch" else {}),
        "bad",
        "The training loss has risen from 2 to 11.",
    ),
    "diverged at step 5": (diverged_early, "bad", "Loss is NaN at the end: 1 of 5 values are NaN, the first at step 5"),
    "diverged later": (report_folders.failed, "bad", "the training loss is nan at step 35"),
    "one rank": (finished(ranks=1, launcher="alone"), "good", "as it should be"),
    "resumed twice": (report_folders.resumed, "good", "Launched 3 times"),
    "on fewer ranks after a loss": (on_fewer_ranks, "good", "Launched 2 times"),
    "killed": (report_folders.killed, "bad", "Ended without a message"),
    "stopped by the time limit": (report_folders.stopped, "bad", "by SIGUSR1"),
    "still running": (report_folders.running, "undecidable", "Still running"),
    "a slow rank": (report_folders.slow, "bad", "Rank 2 on node3 is slow in computing"),
    "TensorFlow": (report_folders.tensorflow, "good", "as it should be"),
    "error as expected": (regression("mae", 0.31, 0.315), "good", "Validation mae 0.3150, expected 0.31: as it should"),
    "error too high": (regression("mae", 0.31, 0.4), "bad", "higher by more than 5 % of it (0.0155)."),
    "perplexity lower than expected": (regression("perplexity", 20.0, 15.0), "good", "lower by more than 5 %"),
    "perplexity too high": (regression("perplexity", 20.0, 25.0), "bad", "higher by more than 5 %"),
    "R2 too low": (regression("r2", 0.9, 0.5), "bad", "lower by more than 5 %"),
    "a metric of no known direction": (regression("zeal", 2.0, 2.5), "bad", "it is not known which is better."),
    "no validation": (without_validation, "undecidable", "the run has recorded no validation accuracy."),
    "throughput falls": (slower(100), "bad", "Throughput fell from 278 to 75 examples/s (-73 %) at step 100."),
    "throughput falls for a while": (slower(100, 150), "bad", "to 75 examples/s (-73 %) at step 100, until step 155."),
    "a few quick lines that differ": (
        metrics(
            lambda each: {"examples_per_second": 900 / each["step"]} if each["kind"] == "step" else {},
            rank_seconds=0.01,
        ),
        "good",
        "as it should be",
    ),
    "a torn last line": (torn, "good", "as it should be"),
    "a recipe of one's own": (named("mine.yaml"), "undecidable", "no expected value of a metric is known"),
    "its own expectation": (named("mine.yaml", valid_acc1=0.97), "good", "expected 0.97: as it should be"),
    "another metric is expected": (named("m.yaml", valid_f1=0.9), "undecidable", "has recorded no validation f1."),
    "flags over its own recipe": (with_flags("--epochs=2", valid_acc1=0.99), "undecidable", "differs from the recipe"),
    "an expectation by flag": (
        with_flags("--expected", "valid_acc1=0.9", "--epochs", "10", valid_acc1=0.9),
        "good",
        "which is better",
    ),
    "a loop of one's own": (report_folders.own_program, "undecidable", "no expected value of a metric is known"),
    "a busy machine": (finished(processor=0.2), "good", "This machine did other work, or a step slept: a rank had"),
    "it overfits": (
        metrics(by_epoch(valid_loss=[1.5, 0.8, 0.5, 0.4, 0.45, 0.55, 0.7, 0.85, 1.0, 1.2])),
        "bad",
        "Validation loss was 0.4 at epoch 4, and is 1.2 at the end.",
    ),
    "training rises in the last third": (
        metrics(by_epoch(train_loss=[1, 0.5, 0.3, 0.9], valid_acc1=[0.5, 0.8, 0.95, 0.7]), changed={"epochs": 4}),
        "bad",
        "Validation accuracy was 0.95 at epoch 3, and is 0.7 at the end.",
    ),
    "an accuracy that falls, of nothing expected": (
        own(by_epoch(valid_acc1=[0.5, 0.7, 0.9, 0.95, 0.95, 0.96, 0.97, 0.9, 0.85, 0.8])),
        "bad",
        "Validation accuracy was 0.97 at epoch 7, and is 0.8 at the end.",
    ),
    "a validation loss that varies": (
        metrics(by_epoch(valid_loss=[0.5, 0.3, 0.5, 0.3, 0.5, 0.3, 0.5, 0.3, 0.5, 0.45])),
        "good",
        "as it should be",
    ),
    "an error that grows again": (
        own(by_epoch(valid_mae=[100, 10, 1, 0.3, 0.5, 0.8, 1.2, 1.5, 1.8, 2])),
        "bad",
        "Validation mae was 0.3 at epoch 4, and is 2 at the end.",
    ),
    "a loss that is tiny": (
        metrics(by_epoch(valid_loss=[1, 0.1, 0.01, 0.001, 0.001, 0.0011, 0.0012, 0.0013, 0.0014, 0.0015])),
        "good",
        "as it should be",
    ),
    "the same accuracy after each epoch": (metrics(of_epochs(valid_acc1=0.975)), "good", "0.975 after each of 10"),
    "no accuracy at all": (finished(accuracy=0.0), "bad", "0.0000 is no better than guessing"),
    "far above what is expected": (finished(expected={"valid_acc1": 0.6}, accuracy=0.999), "bad", "too good to be"),
    "a perplexity that only a leak has": (regression("perplexity", 20.0, 1.01), "bad", "which is too good to be"),
    "a negative cross-entropy": (
        metrics(by_epoch(valid_loss=[-0.1 * epoch for epoch in range(10)])),
        "bad",
        "Validation loss -0.9000 is negative, which no cross-entropy is.",
    ),
    "a negative loss of one's own": (own(by_epoch(train_loss=[-float(n) for n in range(10)])), "undecidable", "known"),
    "an infinite loss": (metrics(of_epochs(10, valid_loss=float("inf"))), "bad", "is NaN at the end"),
    "NaN in the training loss alone": (metrics(of_epochs(10, train_loss=None)), "bad", "Training loss is NaN at the"),
    "NaN in the first epoch": (metrics(of_epochs(1, 1, valid_loss=None)), "bad", "was NaN for a while: 1 of 10"),
    "NaN in a gradient's norm": (
        metrics(lambda each: {"gradient_norm": None} if each["step"] == 20 else {}),
        "good",
        "as it should be",
    ),
    "an accuracy in percent": (metrics(of_epochs(valid_acc1=97.5)), "undecidable", "one of the two is in percent."),
    "an expectation in percent": (finished(expected={"valid_acc1": 97.8}), "undecidable", "one of the two is in perc"),
    "a negative R2": (own(of_epochs(r2=-0.3)), "bad", "R2 -0.3000 is no better than guessing (0)."),
    "an AUC of one half": (own(of_epochs(valid_auc=0.5)), "bad", "Validation auc 0.5000 is no better than guessing"),
    "an AUC of more": (own(of_epochs(valid_auc=0.9)), "undecidable", "no expected value of a metric is known"),
    "an F1 of zero": (own(of_epochs(macro_f1=0.0)), "bad", "no better than guessing (0)."),
    "the user's metric falls": (
        own(by_epoch(zeal=[1, 2, 3, 4, 5, 6, 7, 5, 3, 2]), highest="zeal"),
        "bad",
        "Zeal was 7 at epoch 7, and is 2 at the end.",
    ),
    "the user's metric rises": (own(by_epoch(zeal=[9, 8, 7, 6, 5, 4, 3, 2, 3, 6]), lowest="zeal"), "bad", "Zeal was 2"),
    "a metric of no direction falls": (own(by_epoch(zeal=[9] * 9 + [1])), "undecidable", "no expected value"),
    "a dice that shall be low": (
        own(by_epoch(dice=[0.9 - epoch / 20 for epoch in range(10)]), lowest="dice"),
        "undecidable",
        "no expected value",
    ),
    "the loss jumps at a resume": (
        jumped,
        "bad",
        "The loss jumped from 0.1448 to 2.4 at step 132, where the run resumed",
    ),
    "out of memory": (out_of_memory, "bad", "Failed at step 150 of 220: CUDA out of memory"),
    "running, with NaN": (running_to_nan, "bad", "Loss is NaN at the end: 10 of 30 values"),
    "throughput rises": (metrics(rates(lambda step: 75.0 + step)), "good", "as it should be"),
    "throughput swings": (
        metrics(rates(lambda step: 275.0 if step % 10 else 75.0)),
        "bad",
        "Throughput swings between 75 and 275 examples/s.",
    ),
    "throughput varies": (metrics(rates(lambda step: 275.0 if step % 10 else 220.0)), "good", "as it should be"),
    "another LR": (finished(changed={"base_lr": 0.01}), "undecidable", "differs from the recipe in base_lr."),
    "no journal": (
        without("launches.jsonl", lambda record: True),
        "good",
        "No record shows whether these promises were kept: the right world, replicas compared, exact resume.",
    ),
    "no metrics": (without("metrics.jsonl", lambda record: True), "undecidable", "recorded no validation accuracy"),
    "the last metrics are lost": (
        without("metrics.jsonl", lambda record: record["epoch"] > 8),
        "undecidable",
        "expected 0.978, but after epoch 8: that of epoch 10 is not recorded.",
    ),
    "an end that is not known": (
        lambda folder: [report_folders.finished(folder), *((folder / name).unlink() for name in ENDS)],
        "undecidable",
        "How it ended is not known; it reached step 220 of 220.",
    ),
    "few validation examples": (
        finished(examples=(1437, 10), accuracy=0.92),
        "good",
        "A difference may be chance: of 10 validation examples each is 0.1 of an accuracy.",
    ),
    "half of what is expected": (
        finished(expected={"valid_acc1": 0.978, "valid_f1": 0.9}),
        "undecidable",
        "Nothing to compare with: the run has recorded no validation f1.",
    ),
    "an expectation of guessing": (finished(expected={"valid_acc1": 0.1}, accuracy=0.12), "bad", "no better than gues"),
}
LEVELS = {"good": ["good"], "bad": ["bad", "attention"], "undecidable": ["unjudged", "open"]}


@pytest.mark.parametrize(("make", "expected", "why"), KINDS.values(), ids=KINDS)
def test_a_person_gives_the_same_verdict(make, expected, why, tmp_path):
    make(tmp_path)
    verdict = run_report(tmp_path).verdict
    text = " ".join([verdict.headline, *verdict.details, *verdict.doubts, verdict.limit])
    assert why in text
    assert verdict.level in LEVELS[expected], text
    assert (verdict.level == "good") <= (verdict.outcome == "as expected")


RUNS = {
    # name: state, level, a part of the headline, a part of the advice
    "finished": ("finished", "good", "Trained to the end: step 220 of 220.", ""),
    "resumed": ("finished", "good", "Trained to the end", ""),
    "left": ("left", "attention", "The program exited at step 130 of 220", "Run the same command again"),
    "stopped": ("stopped", "attention", "at step 130 of 220 by SIGUSR1", "Run the same command again"),
    "failed": (
        "failed",
        "bad",
        "Failed at step 35 of 220: the training loss is nan",
        "Lower the learning rate (now 5)",
    ),
    "killed": ("killed", "bad", "Ended without a message at step 120 of 220", "Run the same command again"),
    "running": ("running", "open", "Still running: step 150 of 220", "hvdtrain watch"),
    "slow": ("finished", "attention", "Trained to the end", "--exclude=node3"),
    "tensorflow": ("finished", "good", "Trained to the end", ""),
    "own_program": ("finished", "unjudged", "Trained to the end: step 220.", ""),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By name, the report of each made-up run."""
    folder = tmp_path_factory.mktemp("runs")
    for name in RUNS:
        report_folders.ALL[name](folder / name)
    return {name: run_report(folder / name) for name in RUNS}


@pytest.mark.parametrize(("name", "expected"), RUNS.items(), ids=RUNS)
def test_verdicts(name, expected, runs):
    run_state, level, headline, advice = expected
    run = runs[name]
    assert (run.state, run.verdict.level) == (run_state, level)
    assert headline in run.verdict.headline
    assert advice in run.verdict.advice
    assert bool(advice) == bool(run.verdict.advice)
    assert not [check for check in run.verdict.checks if check.state == "broken"]
    assert run.missing == ()


def test_a_slow_rank_is_named_with_host_and_cause(runs):
    (named,) = [text for text in runs["slow"].verdict.details if "slow" in text]
    assert named.startswith("Rank 2 on node3 is slow in computing: 800 ms of each step")
    assert runs["slow"].heat.slow == {2: named.partition(" is ")[2].rstrip(".")}
    assert runs["slow"].heat.rows[2] == "rank 2 on node3"
    seconds = runs["slow"].heat.seconds
    assert seconds.shape[0] == 4
    assert (seconds[2] > 1.4 * seconds[[0, 1, 3]].max(axis=0)).all()


def test_details(runs):
    accuracy = "Validation accuracy 0.9750, expected 0.978: as it should be."
    assert runs["finished"].verdict.details == (accuracy,)
    assert runs["resumed"].verdict.details == (accuracy, "Launched 3 times; 19.6 s of steps were made again.")
    assert runs["stopped"].verdict.details == ("Validation accuracy 0.9333 after epoch 5.",)


def test_what_casts_doubt_on_a_verdict_is_said_once(tmp_path, runs):
    """On the page and in Markdown, of verdicts that find nothing wrong."""
    KINDS["few validation examples"][0](tmp_path)
    document = report.document_of(report.Options(runs=(tmp_path,)), Status(""))
    for text in (page.render(document), page.markdown(document)):
        assert text.count("A difference may be chance: of 10 validation examples each is 0.1 of an accuracy.") == 1
    assert {name: run.verdict.doubts for name, run in runs.items() if run.verdict.doubts}.keys() == {"own_program"}


def test_a_result_that_was_better_is_exported_from_the_best_checkpoint(tmp_path):
    """Where one is marked."""
    KINDS["it overfits"][0](tmp_path)
    assert run_report(tmp_path).verdict.advice == "Train for fewer epochs, or with a lower LR."
    (tmp_path / "best.json").write_text("{}")
    command = f"python -m hvdtrain export {tmp_path} --best --to pt"
    found = run_report(tmp_path)
    assert (found.verdict.advice, found.origin.export) == (f"Take the best checkpoint: {command}", command)


def test_what_limits_the_step(runs):
    assert runs["finished"].verdict.limit.startswith("Computing limits the step: ")


def test_where_nothing_shows_how_long_ranks_wait_nothing_is_blamed(tmp_path):
    """As on GPUs: the journal has what ranks reported whose engine does not know how long it waited."""
    report_folders.finished(tmp_path)
    times = {rank: Times(reading=0.4, rest=0.1, waiting=None) for rank in range(2)}
    of_ranks = columns(times, times)
    edited(tmp_path / "launches.jsonl", lambda each: each | (of_ranks if each["kind"] == "ranks" else {}))
    report, run = run_report(tmp_path), reader.read(tmp_path)
    assert (report.verdict.limit, report.verdict.advice, page.heat(report.heat)) == (NOT_KNOWN, "", None)
    assert _slowest(run.launch) == "not known"
    assert scaling._sweep_run(run).parts is None
    assert engines.read(tmp_path).waiting is None


def test_promises_of_a_resumed_run(runs):
    details = {check.name: check.detail for check in runs["resumed"].verdict.checks}
    assert details == {
        "The right world": "2 ranks, as srun launched them",
        "Replicas compared": "compared at least 3 times, and equal each time",
        "Exact metrics": "10 validations, each of all 360 examples, once",
        "Exact resume": "resumed 2 times, from the checkpoints of steps 44, 132",
    }


def valid_lost(folder):
    edited(folder / "metrics.jsonl", lambda each: each | ({"valid_examples": 359} if each["step"] == 44 else {}))


def logged_twice(folder):
    edited(folder / "metrics.jsonl", lambda each: each | ({"step": 40} if each["step"] == 45 else {}))


def smaller_world(folder):
    edited(folder / "launches.jsonl", lambda each: each | ({"ranks": 1} if each["kind"] == "launch" else {}))


def resumed_elsewhere(folder):
    def change(record):
        return record | ({"step": 50} if (record["kind"], record.get("step")) == ("launch", 44) else {})

    edited(folder / "launches.jsonl", change)


def differed(folder):
    content = json.loads((folder / "status.json").read_text())
    error = "after step 100 the ranks differ in weights: rank 1 on nid1 has 000000000000002a, rank 0 on nid0 0: resume"
    (folder / "status.json").write_text(json.dumps({**content, "state": "failed", "error": error}))


def too_short(folder):
    edited(folder / "metrics.jsonl", lambda each: each if each["step"] <= 200 else None)
    edited(folder / "launches.jsonl", lambda each: each if (each.get("step") or 0) <= 200 else None)
    (folder / "status.json").write_text('{"state": "finished", "step": 200}')


BROKEN = {
    "a validation counted too few": ("Exact metrics", valid_lost),
    "a step is logged twice": ("Exact resume", logged_twice),
    "fewer ranks than planned": ("The right world", smaller_world),
    "the replicas differed": ("Replicas compared", differed),
    "finished before its end": ("Exact resume", too_short),
}


@pytest.mark.parametrize(("promise", "damage"), BROKEN.values(), ids=BROKEN)
def test_a_broken_promise_is_bad(promise, damage, tmp_path):
    report_folders.finished(tmp_path)
    damage(tmp_path)
    verdict = run_report(tmp_path).verdict
    assert verdict.level == "bad"
    assert [check.name for check in verdict.checks if check.state == "broken"] == [promise]
    assert promise in verdict.advice


def test_a_resume_that_no_checkpoint_explains_is_broken(tmp_path):
    report_folders.resumed(tmp_path)
    resumed_elsewhere(tmp_path)
    states = {check.name: check.state for check in run_report(tmp_path).verdict.checks}
    assert states["Exact resume"] == "broken"


REPEATED = {
    # launcher: its ranks' hosts, words of rank 0's command, the command that repeats the run
    "alone": (["a"], "python -m hvdtrain.torch digits --output runs/x", "python -m hvdtrain.torch digits"),
    "horovodrun": (
        ["a", "a"],
        "/env/bin/python3 -u -m hvdtrain.torch digits --output=runs/x --seed 1",
        "horovodrun -np 2 python -u -m hvdtrain.torch digits --seed 1",
    ),
    "mpirun": (["a", "b"], "python train.py --output x", "mpirun -np 2 -H a:1,b:1 python train.py --output x"),
    "mpiexec": (["a", "a"], "python train.py", "mpiexec -n 2 python train.py"),
    "srun": (
        ["a", "a", "b", "b"],
        "python -m hvdtrain.lightning digits --output runs/x",
        "srun --nodes=2 --ntasks=4 python -m hvdtrain.lightning digits",
    ),
    "torchrun": (
        ["a", "a", "b", "b"],
        "python -u -m hvdtrain.torch digits",
        "torchrun --nproc-per-node=2 --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a:29400 -m hvdtrain.torch digits",
    ),
    "env://": (["a", "b"], "python train.py", "RANK=0..1 WORLD_SIZE=2 MASTER_ADDR=a python train.py"),
}


@pytest.mark.parametrize(("launcher", "case"), REPEATED.items(), ids=REPEATED)
def test_the_command_that_repeats_a_run(launcher, case, tmp_path):
    hosts, words, expected = case
    report_folders.finished(tmp_path, launcher=launcher, hosts=tuple(hosts), ranks=len(hosts))
    edited(
        tmp_path / "launches.jsonl",
        lambda each: each | ({"command": words.split()} if each["kind"] == "launch" else {}),
    )
    assert run_report(tmp_path).origin.command == expected


def test_a_run_continues_in_its_own_folder(tmp_path):
    report_folders.stopped(tmp_path)
    continued = f"srun --nodes=2 --ntasks=2 python -m hvdtrain.torch digits --output {tmp_path}"
    assert run_report(tmp_path).verdict.advice == f"Run the same command again to continue: {continued}"


def test_a_promise_with_nothing_to_check_is_not_kept(tmp_path):
    without_validation(tmp_path)
    for path in ("launches.jsonl", "plan.json"):
        text = (tmp_path / path).read_text().replace('"ranks": 2', '"ranks": 1').replace('"size": 2', '"size": 1')
        (tmp_path / path).write_text(text.replace('"horovodrun"', '"alone"'))
    found = {check.name: (check.state, check.detail) for check in run_report(tmp_path).verdict.checks}
    assert found == {
        "The right world": ("not applicable", "one rank, without a launcher"),
        "Replicas compared": ("not applicable", "one rank"),
        "Exact metrics": ("not applicable", "no validation"),
        "Exact resume": ("not applicable", "one launch, no resume"),
    }


def test_goodput_says_what_it_includes(tmp_path):
    """Waiting for other ranks, and steps of a run that diverged."""
    report_folders.finished(tmp_path / "finished")
    diverged_early(tmp_path / "diverged")
    texts = [dict(run_report(tmp_path / name).numbers)["Goodput"] for name in ("finished", "diverged")]
    assert texts[0].endswith(" % (8.8 % of a step waits)")
    assert texts[1].endswith(" % (the run diverged: its steps led to no result)")


def test_what_limits_the_step_needs_processor_time(tmp_path):
    """Without it, as on a GPU, it is not known whether a rank computed or waited for a core."""
    report_folders.finished(tmp_path)
    edited(tmp_path / "launches.jsonl", lambda each: {key: value for key, value in each.items() if key != "gpus"})
    assert run_report(tmp_path).verdict.limit.startswith("Computing takes most of a step: ")


def test_a_poor_result_is_repeated_and_a_wrong_one_is_not(tmp_path):
    for accuracy, advice in ((0.94, "Repeat it with another --seed"), (0.1, "Train longer, or look at the LR")):
        report_folders.finished(tmp_path, accuracy=accuracy)
        assert advice in run_report(tmp_path).verdict.advice


DIRECTIONS = {
    True: "acc1 accuracy valid_acc5 auc f1 miou dice r2 precision recall map bleu psnr ssim top5 mcc balanced_accuracy",
    False: "loss valid_loss mae mse rmse perplexity ppl nll wer cer fid mean_absolute_error top1_error cross_entropy",
    None: "zeal temperature length reward steps",
}


def test_which_metrics_are_better_where_they_are_higher():
    for higher, names in DIRECTIONS.items():
        assert {name: is_higher_better(name) for name in names.split()} == dict.fromkeys(names.split(), higher)


ADVICE = {
    "checkpoints": (lambda run: run._spend("checkpoint", 60), "Checkpoint less often"),
    "imports": (lambda run: run._spend("import", 200), "Put Python's packages on a disk"),
    "first step": (lambda run: run._spend("first_step", 100), "Keep what is compiled"),
}


def test_a_short_run_needs_no_advice(tmp_path):
    run = report_folders.Run(tmp_path, changed={"max_steps": 20})
    run.launch(report_folders.BEGAN, opening={"start": 1.0, "import": 30.0})
    run.train()
    run.end("finished")
    report = run_report(tmp_path)
    assert max(report.waterfall.parts, key=lambda part: part.seconds).name == "import"
    assert (report.state, report.verdict.advice) == ("finished", "")


@pytest.mark.parametrize(("spend", "advice"), ADVICE.values(), ids=ADVICE)
def test_the_largest_loss_of_time_is_what_to_do_next(spend, advice, tmp_path):
    run = report_folders.Run(tmp_path)
    run.launch(report_folders.BEGAN)
    spend(run)
    run.train()
    run.end("finished")
    assert advice in run_report(tmp_path).verdict.advice


def test_names_of_metrics():
    assert [words(name) for name in ("valid_acc1", "train_loss", "dice", "valid_")] == [
        "validation accuracy",
        "training loss",
        "dice",
        "valid_",
    ]
