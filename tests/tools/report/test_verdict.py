"""The verdict: how a run ended, how good it is, what it kept, what to do next."""

import json

import pytest
import report_folders

from hvdtrain.ranks.messages import Times
from hvdtrain.ranks.slow import columns
from hvdtrain.record import reader
from hvdtrain.tools.bench import engines
from hvdtrain.tools.report import page, scaling
from hvdtrain.tools.report.assemble import run_report
from hvdtrain.tools.report.verdict import NOT_KNOWN, compared, words
from hvdtrain.tools.watch.frame import _slowest

RUNS = {
    # name: state, level, a part of the headline, a part of the advice
    "finished": ("finished", "good", "Trained to the end: step 220 of 220.", ""),
    "resumed": ("finished", "good", "Trained to the end", ""),
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
    "own_program": ("finished", "good", "Trained to the end: step 220.", ""),
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


def edited(path, change):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(each) + "\n" for record in records if (each := change(record))))


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


def result_of(folder, **more):
    report_folders.finished(folder, **more)
    (result,) = compared(reader.read(folder))
    return result


EXPECTED = {
    # the run, whether it is below what is expected, what makes the comparison unfair
    "as expected": ({}, False, ()),
    "better": ({"accuracy": 0.995}, False, ()),
    "by chance lower": ({"accuracy": 0.97}, False, ()),
    "lower": ({"accuracy": 0.94}, True, ()),
    "lower with fewer epochs": ({"accuracy": 0.9, "changed": {"epochs": 5}}, True, ("epochs",)),
    "another batch": ({"changed": {"batch_size": 32}}, False, ("batch_size",)),
    "another seed": ({"changed": {"seed": 3}}, False, ("seed",)),
    "what does not matter": ({"changed": {"log_every_steps": 2, "keep_checkpoints": 5}}, False, ()),
}


@pytest.mark.parametrize(("more", "is_below", "unfair"), EXPECTED.values(), ids=EXPECTED)
def test_accuracy_beside_the_expected_one(more, is_below, unfair, tmp_path):
    result = result_of(tmp_path, **more)
    assert (result.is_below, result.unfair) == (is_below, unfair)
    verdict = run_report(tmp_path).verdict
    assert (verdict.level == "attention") == (is_below and not unfair)
    assert ("Repeat it with another --seed" in verdict.advice) == (is_below and not unfair)
    if unfair:
        assert f"differs from the shipped recipe in {', '.join(unfair)}." in str(result)


def test_a_loss_is_worse_where_it_is_higher(tmp_path):
    result = result_of(tmp_path, expected={"valid_loss": 0.05})
    assert result.is_below


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
