"""What the benchmarks share: the answer as a table, a sentence and JSON, and what they show while they measure."""

import json
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import OutputError
from hvdtrain.launch.topology import Topology
from hvdtrain.tools.bench import allreduce, engines, measure, ranks, train
from hvdtrain.tools.bench.engines import Contender, Measured
from hvdtrain.tools.bench.measure import Kept

LONG = [1234.5678, 1201.1234, 1340.9876]  # seconds


def answers():
    """An answer of each benchmark, of figures as long as they get."""
    of_train = {"recipe": "cifar100:bs256-amp", "ranks": 2, "engine": "multiworker", "framework": "tensorflow"}
    times = {key: [second / 1000 for second in LONG] for key in train.MEANS}
    libraries = ("Horovod over Gloo", "torch.distributed (gloo)")
    network = {library: {4000: LONG, 4096 * allreduce.MB: [second / 2 for second in LONG]} for library in libraries}
    return {
        "train": train.answer({**of_train, "global_batch": 16384, "step_seconds": times}),
        "allreduce": allreduce.answer(network, 16384),
    }


@pytest.mark.parametrize("what", answers())
def test_an_answer_fits_80_columns_and_ends_with_a_sentence(what, capsys):
    answers()[what].conclude(Kept())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    blank = lines.index("")
    sentence = " ".join(lines[blank + 1 :])
    assert blank >= 3 and sentence[0].isupper() and sentence.endswith(".")


def answer():
    return measure.Answer("it", ["a table"], "a sentence.", {"figure": 3}, lambda axes: axes.plot([1, 2]))


def test_without_a_flag_there_is_the_table_and_the_sentence_alone(capsys):
    answer().conclude(Kept())
    assert capsys.readouterr().out == "a table\n\nA sentence.\n"


def test_json_to_stdout_stands_there_alone(capsys):
    answer().conclude(Kept(json="-"))
    assert json.loads(capsys.readouterr().out)["figure"] == 3


def test_files_have_the_figures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    answer().conclude(Kept(json=tmp_path / "x.json", output=tmp_path / "folder"))
    assert capsys.readouterr().out == "a table\n\nA sentence.\n"
    ours, theirs = (json.loads(path.read_text()) for path in (tmp_path / "x.json", tmp_path / "folder" / "it.json"))
    assert ours == theirs and (ours["bench"], ours["figure"]) == ("it", 3)
    assert (tmp_path / "folder" / "it.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="give --json a file that can be written"):
        answer().conclude(Kept(json=tmp_path / "file" / "x.json"))


def test_columns_are_aligned():
    assert measure.table(("name", "ms", "why"), [("a", "1.5", "x"), ("long", "10.25", "")]) == [
        "name     ms  why",
        "a       1.5  x",
        "long  10.25",
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.1234], "0.123 (0.123 to 0.123)"),
        ([12.3, 12.0, 13.4], "12.30 (12.00 to 13.40)"),
        ([123.45], "123.5 (123.5 to 123.5)"),
        ([12345.6], "12346 (12346 to 12346)"),
    ],
)
def test_a_summary_has_about_four_digits(values, text):
    assert measure.summary(values) == text


def test_each_measurement_is_shown_as_it_begins():
    seen = []
    measure.interleaved({"a": lambda: 1.0, "b": lambda: 2.0}, 2, show=seen.append)
    assert seen == [
        "warm-up: a", "warm-up: b", "round 1 of 2: b", "round 1 of 2: a", "round 2 of 2: a", "round 2 of 2: b",
    ]  # fmt: skip


def test_the_fastest_library_at_the_largest_and_the_smallest_size():
    found = {"MPI": {4000: [1.0], 10**7: [3.6]}, "Gloo": {4000: [1.01], 10**7: [2.0]}}
    assert allreduce.fastest(found) == (
        "at 10 MB Gloo is fastest, 1.8 times as fast as MPI; at 0.004 MB MPI is fastest, as fast as Gloo."
    )
    assert allreduce.fastest({"NCCL": {10**6: [1.0]}}) == "at 1 MB NCCL is fastest."


def test_the_fastest_engine():
    found = {
        Contender("torch", "local", 2): Measured([1.0], 100),
        Contender("torch", "ddp", 2): Measured([0.5], 100),
        Contender("torch", "horovod", 2): Measured([0.8], 100),
        Contender("torch", "dataparallel", 2): Measured([], reason="needs GPUs"),
    }
    assert engines.fastest(found) == (
        "torch ddp is fastest with 200.0 examples/s, 1.6 times as fast as torch horovod, 2.0 times as fast as "
        "torch local."
    )


RANK = """
import os, time
from hvdtrain.launch.topology import Topology
from hvdtrain.tools.bench import ranks

with ranks.showing(Topology.alone()) as show:
    show("round 1 of 1: it")
    while not os.path.exists("seen"):
        time.sleep(0.01)
ranks.keep({"figure": 3})
"""


def test_what_rank_0_does_is_shown_where_the_ranks_were_started(tmp_path, monkeypatch):
    (tmp_path / "measures.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    monkeypatch.chdir(tmp_path)
    seen = []

    def show(text):
        seen.append(text)
        if text == "round 1 of 1: it":
            Path("seen").touch()

    assert ranks.launch(["measures.py"], "local", 1, show=show) == {"figure": 3}
    assert (seen[0], seen[-1]) == ("starting the process that measures", "round 1 of 1: it")


def test_other_ranks_show_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(ranks.NOW, str(tmp_path / "now"))
    for rank in (1, 0):
        with ranks.showing(Topology(rank, 2, rank, 2, 0, "here", "horovodrun", None)) as show:
            show(f"of rank {rank}")
        assert (tmp_path / "now").exists() == (rank == 0)
    assert (tmp_path / "now").read_text() == "of rank 0"


def test_the_table_of_engines_fits_80_columns():
    found = {
        Contender("tensorflow", "parameter-server", 16): Measured([second / 1000 for second in LONG], 65536),
        Contender("lightning", "dataparallel", 2): Measured([], reason="DeviceError: it needs at least 2 devices " * 3),
    }
    lines = engines.table(found)
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:2] == ["engine", "launch"]
    assert lines[-1].startswith("parameter-server  workers of unequal speed")


def test_an_engine_that_failed_once_is_left_out_of_the_next_round(monkeypatch):
    first, other = Contender("torch", "local", 2), Contender("torch", "dataparallel", 2)
    monkeypatch.setattr(
        engines, "run", lambda one, recipe, steps: Measured([1.0], 1) if one == first else Measured([], reason="no GPU")
    )
    seen = []
    engines.measure_all([first, other], "linear", 2, 3, seen.append)
    assert seen == [
        "round 1 of 2: torch local (1 of 2)",
        "round 1 of 2: torch dataparallel (2 of 2)",
        "round 2 of 2: torch local (1 of 2)",
    ]
