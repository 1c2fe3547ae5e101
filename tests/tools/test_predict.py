"""`python -m hvdtrain predict`: published runs that it was not fitted to, made-up truths, and its output."""

import json
import math
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import warm

from hvdtrain.errors import RecipeError
from hvdtrain.tools import predict
from hvdtrain.tools.predict.scaling import BACKWARD, Point, Points, StepModel


def forecast(*argv: str, capsys) -> dict:
    assert predict.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# Published: TensorFlow's benchmarks of 2017 (docs_src/performance/benchmarks.md), synthetic data, images/s: K80s of
# EC2's p2.8xlarge, 8 a node, parameter servers; P100s of one DGX-1. JSC's course: seconds of 10 epochs of ImageNet,
# batch 256 a GPU on one, 128 on the others. What the model was fitted to, the run that it then predicts, how near.
SERIES = {
    "InceptionV3, K80, 8 and 16 to 32": ({8: 8 / 229, 16: 16 / 459}, 8, (32, 32 / 902), 0.03),
    "InceptionV3, K80, 8 and 16 to 64": ({8: 8 / 229, 16: 16 / 459}, 8, (64, 64 / 1783), 0.03),
    "ResNet-50, K80, 8 and 16 to 32": ({8: 8 / 378, 16: 16 / 751}, 8, (32, 32 / 1388), 0.08),
    "ResNet-50, K80, 8 and 16 to 64": ({8: 8 / 378, 16: 16 / 751}, 8, (64, 64 / 2744), 0.09),
    "ResNet-152, K80, 8 and 16 to 32": ({8: 8 / 146, 16: 16 / 291}, 8, (32, 32 / 565), 0.03),
    "ResNet-152, K80, 8, 16 and 32 to 64": ({8: 8 / 146, 16: 16 / 291, 32: 32 / 565}, 8, (64, 64 / 981), 0.15),
    "InceptionV3, P100, 1 and 2 to 8": ({1: 1 / 142, 2: 2 / 284}, 1, (8, 8 / 1131), 0.01),
    "ResNet-50, P100, 1 and 2 to 8": ({1: 1 / 219, 2: 2 / 422}, 1, (8, 8 / 1734), 0.08),
    "ResNet-152, P100, 1 and 2 to 8": ({1: 1 / 91.8, 2: 2 / 181}, 1, (8, 8 / 716), 0.02),
    "VGG16, P100, 1 and 2 to 8": ({1: 1 / 154, 2: 2 / 295}, 1, (8, 8 / 1081), 0.05),
    "JSC, 1 and 4 to 16": ({1: 20531.9, 4: 4 * 5355.9}, 1, (16, 16 * 1488.2), 0.03),
}


@pytest.mark.parametrize(("fitted", "node", "kept_back", "near"), SERIES.values(), ids=SERIES)
def test_published_runs_that_it_was_not_fitted_to(fitted, node, kept_back, near):
    points = tuple(Point(ranks, rank_seconds / ranks) for ranks, rank_seconds in fitted.items())
    ranks, rank_seconds = kept_back
    of_run = None if points[0].seconds > 1000 else 0.0  # images/s were taken without a run's start
    found = Points(points, node, fixed_seconds=of_run).forecast([ranks])
    assert found.seconds[0] == pytest.approx(rank_seconds / ranks, rel=near)


# Sergeev and Del Balso 2018, arXiv:1802.05799: 128 P100s, 4 a node, 25 Gbit/s. The paper gives no seconds of a step:
# they are of TensorFlow's benchmarks (P100, batch 64 a GPU: InceptionV3 142, VGG16 154 images/s; ResNet-101 129,
# between ResNet-50's 219 and ResNet-152's 91.8 by their arithmetic).
PAPER = {
    "Inception V3": (64 / 142, 23_817_352, 0.90, 0.02),
    "ResNet-101": (64 / 129, 44_601_832, 0.90, 0.04),
    "VGG-16": (64 / 154, 138_357_544, 0.79, 0.11),
}


@pytest.mark.parametrize(("step", "weights", "efficiency", "near"), PAPER.values(), ids=PAPER)
def test_the_horovod_paper_from_step_gradient_and_link(step, weights, efficiency, near, capsys):
    argv = ["--step-seconds", f"{step}", "--gradient-mb", f"{4e-6 * weights}", "--link-gbit", "25", "--fusion-mb", "64"]
    (row,) = forecast(*argv, "--ranks-per-node", "4", "--ranks", "128", capsys=capsys)["forecast"]
    assert row["efficiency"] == pytest.approx(efficiency, abs=near)
    low, high = row["band"]["efficiency"]
    assert low < efficiency < high


def test_the_kept_back_series(capsys):
    argv = ["--point", "4:5355.9", "--point", "16:1488.2", "--ranks", "32,64,128"]
    found = forecast(*argv, capsys=capsys)
    seconds = [row["seconds"] for row in found["forecast"]]
    # The middle of two explanations: a fixed part of 199 s, and a ring of 2 (M - 1) / M among M nodes.
    lost = 16 * 1488.2 - 4 * 5355.9
    fixed = [(4 * 5355.9 - lost / 3) / n + lost / 12 for n in (32, 64, 128)]
    ring = [(4 * 5355.9 + lost * (1 - 4 / n) / 0.75) / n for n in (32, 64, 128)]
    assert seconds == pytest.approx(np.sqrt(np.multiply(fixed, ring)), rel=1e-4)
    assert found["efficiency_against"] == {"ranks": 4}
    assert found["throughput_unit"] == "runs/h"
    for row in found["forecast"]:
        assert row["throughput"] == pytest.approx(3600 / row["seconds"])
        assert row["efficiency"] == pytest.approx(4 * 5355.9 / row["ranks"] / row["seconds"])
        assert sum(row["shares"].values()) == pytest.approx(1)
        for name in ("seconds", "throughput", "efficiency"):
            low, high = row["band"][name]
            assert low < row[name] < high


TRUTHS = {  # rank-seconds of a run: one cause, and mixtures
    "nothing lost": StepModel(1000, 1, 0),
    "fixed": StepModel(1000, 1, 0, drag=10),
    "network": StepModel(1000, 1, 150, node=4),
    "hidden network": StepModel(1000, 1, 400, node=4, hidden=0.2),
    "stragglers": StepModel(1000, 1, 0, straggle=30),
    "all": StepModel(1000, 1, 50, node=4, drag=4, straggle=10),
}


OFF = {"exact": (1, 1), "less lost": (1.009, 0.991), "more lost": (0.991, 1.009)}
OFF |= {"three points": (1, 1, 1), "one above": (0.991, 1.009, 0.991), "one below": (1.009, 0.991, 1.009)}


@pytest.mark.parametrize("off", OFF.values(), ids=OFF)
@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS)
def test_the_band_holds_whichever_cause_is_true(truth, off):
    ranks = np.array([8, 32, 128, 1024])
    points = [Point(n, float(truth.step(n)) / n * part) for n, part in zip((4, 16, 64), off, strict=False)]
    found = Points(tuple(points), 4).forecast(ranks.tolist())
    seconds = truth.step(ranks) / ranks
    assert (found.low <= seconds * (1 + 1e-6)).all()
    assert (seconds <= found.high * (1 + 1e-6)).all()


def test_the_band_holds_a_cost_of_joining():
    found = Points((Point(1, 1000), Point(2, 525)), 1).forecast([4, 64])
    assert (found.low <= [1050 / 4, 1050 / 64]).all()
    assert (found.high >= [(1000 + 3 * 50) / 4, (1000 + 63 * 50) / 64]).all()  # or a fixed part


def test_more_points_narrow_the_band():
    truth = TRUTHS["all"]
    points = [Point(n, float(truth.step(n)) / n) for n in (4, 16, 64, 256)]
    two, four = (Points(tuple(points[:count]), 4).forecast([1024]) for count in (2, 4))
    assert four.high[0] / four.low[0] < two.high[0] / two.low[0]
    assert four.seconds[0] == pytest.approx(float(truth.step(1024)) / 1024, rel=0.05)


SHAPED = {  # a rank a node at 1 Gbit/s and 50 us, ResNet50's gradient: seconds of a step's compute, overlap, cores
    "slow link": (0.5, 0.0, None),
    "half hidden": (1.0, 0.5, None),
    "just hidden at two": (1.3, 0.62, None),
    "two cores for all": (1.5, 0.3, 2),
}


@pytest.mark.parametrize(("compute", "overlap", "cores"), SHAPED.values(), ids=SHAPED)
def test_shaped_links_at_four_from_one_and_two(compute, overlap, cores, capsys):
    truth = StepModel(compute, 4 * 25_557_032, 8e-9, 5e-5, hidden=overlap, cores=cores or math.inf)
    points = [argument for n in (1, 2) for argument in ("--point", f"{n}:{100 * float(truth.step(n)) / n}")]
    known = ["--link-gbit", "1", "--latency-us", "50", "--gradient-mb", "102.23", "--batch", "16", "--examples", "1600"]
    argv = [*points, *known, "--ranks", "4", *(["--cores", str(cores)] if cores else [])]
    (row,) = forecast(*argv, capsys=capsys)["forecast"]
    assert row["step_seconds"] == pytest.approx(float(truth.step(4)), rel=0.05)


# Measured on a minicluster at 1 Gbit/s and 50 us, a rank a node, Horovod over Open MPI's ring; a step sleeps for its
# compute and hands over ResNet50's gradient in 8 pieces meanwhile. Medians of two or three runs of 4 to 6 steps on a
# busy machine, which made the runs of 2 ranks differ by 17 %.
MINICLUSTER = {"compute 0.9 s": (0.9025, 1.821, 2.042, 0.10), "compute 2.0 s": (2.003, 2.423, 2.541, 0.05)}


@pytest.mark.parametrize(("one", "two", "four", "near"), MINICLUSTER.values(), ids=MINICLUSTER)
@pytest.mark.parametrize("link", [None, StepModel(1, 4 * 25_557_032, 8e-9, 5e-5)], ids=["points", "and link"])
def test_measured_shaped_links(one, two, four, near, link):
    found = Points((Point(1, one), Point(2, two / 2)), 1, fixed_seconds=0, link=link).forecast([4])
    assert 4 * found.seconds[0] == pytest.approx(four, rel=near)


MODELS = {  # the model, ranks, seconds of a step: what the lab's tests do not have
    "two rings": (StepModel(1, 1e6, 1e-8, node=4, node_byte_seconds=1e-9), 8, 1 + 0.01 + 0.0015),
    "buffers pay latency": (StepModel(1, 4e6, 0, message_seconds=0.01, fusion_bytes=1e6), 2, 1.08),
    "nothing hides the last": (StepModel(1, 4e6, 1e-7, hidden=1, fusion_bytes=1e6), 2, 1.1),
    "a single one hides": (StepModel(1, 4e6, 1e-7, hidden=1, fusion_bytes=1e7), 2, 1.0),
    "stragglers": (StepModel(1, 1e6, 0, straggle=0.1), 8, 1.3),
}


@pytest.mark.parametrize(("model", "ranks", "seconds"), MODELS.values(), ids=MODELS)
def test_the_model_of_a_step(model, ranks, seconds):
    assert float(model.step(ranks)) == pytest.approx(seconds)


def test_a_step_and_a_link_lie_between_all_overlap_and_none():
    model = StepModel(1, 1e9, 1e-9)
    found = Points((Point(1, 1),), 1, fixed_seconds=0, link=model).forecast([16])
    few, many = (float(replace(model, hidden=part).step(16)) / 16 for part in (BACKWARD, 0))
    assert found.seconds[0] == pytest.approx(math.sqrt(few * many))
    assert found.low[0] < few < many < found.high[0]
    assert found.fractions(0)["network"] == pytest.approx(1 - found.fractions(0)["compute"])


JSC = ["--point", "4:5355.9", "--point", "16:1488.2"]
REFUSALS = {  # the flags: what the message says
    "an image": ("{} --picture x.png", "--picture is a page: name a file that ends in .html, got 'x.png'."),
    "nothing": ("", "or add --step-seconds, --gradient-mb, --link-gbit."),
    "one point": ("--point 4:10", "--point must be given at least twice, got 1;"),
    "no number": ("--point 4:x", "--point must read like 4:5355.9 (ranks:seconds), got '4:x'."),
    "no time": ("--point 4:0", "--point must have 1 to 16384 ranks and 1e-09 to 1e+12 seconds, got '4:0'."),
    "twice": ("--point 4:10 --point 4:9", "--point gives 4 ranks twice;"),
    "rising": ("--point 4:10 --point 16:11", "--point: 16 ranks take 11 s, no less than 4 with 10 s;"),
    "two jobs": ("--point 1:10 --point 2:1", "--point: the nearest fit misses a point by 77%;"),
    "too many ranks": ("{} --ranks 32,20000", "--ranks must lie in [1, 16384], got 20000."),
    "ranks as text": ("{} --ranks many", "--ranks must read like 32,64,128, got 'many'."),
    "points and physics": ("{} --step-seconds 1", "--step-seconds and measured points exclude each other;"),
    "a link alone": ("{} --link-gbit 100", "--link-gbit beside points needs --gradient-mb, --batch and --examples,"),
    "overlap alone": ("{} --overlap 0.5", "--overlap beside points needs --link-gbit;"),
    "overlap above one": ("{} --overlap 2", "--overlap must be at most 1, got '2'"),
    "all fixed": (
        "{} --fixed-seconds 2000",
        "--fixed-seconds must be less than the 1488.2 s of a whole run, got 2000.",
    ),
    "no link": ("--step-seconds 1 --link-gbit 0", "--link-gbit must be at least 1e-09, got '0'"),
    "two gradients": ("--recipe synthetic --gradient-mb 1", "--recipe and --gradient-mb exclude each other;"),
    "absent file": ("--from /absent.json", "got /absent.json: No such file or directory."),
    "no figures": ("--from {empty}", "--from must name the JSON of bench scaling with its weak part, got "),
}


@pytest.mark.parametrize(("argv", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(argv, message, tmp_path):
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(RecipeError) as refused:
        predict.main(argv.format(" ".join(JSC), empty=tmp_path / "empty.json").split())
    assert message in str(refused.value)


def test_what_people_read(capsys):
    assert predict.main([*JSC, "--ranks", "32,128", "--examples", "12811670"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ranks  seconds  lowest-highest  examples/s  efficiency/%  lowest-highest",
        "   32    798.9     736.9-896.2       16037            84           75-91",
        "  128    262.6     185.7-429.8       48791            64           39-90",
        "",
        "ranks  where the time goes",
        "   32  compute 82%, fixed part 12%, network 6%",
        "  128  compute 63%, fixed part 32%, network 5%",
        "",
        "Efficiency is against 4 ranks.",
        "What limits next: the fixed part, from 32 ranks on more than a tenth of the",
        "time; half of it would make 128 ranks 19% faster (what a run does once: start,",
        "find the files, start the readers anew, save).",
        "The points leave open what took the time. Narrower with: --fixed-seconds (the",
        "time to a run's first step), or --link-gbit with --gradient-mb, --batch and",
        "--examples, or one more point.",
    ]


def test_a_network_that_no_point_has_seen(capsys):
    inside = ["--point", "1:100", "--point", "4:26", "--ranks-per-node", "4"]
    remark = "No point spans two nodes, so the network between them is left out; --link-gbit brings it in."
    for ranks, wanted in (("8", True), ("3", False)):
        assert predict.main([*inside, "--ranks", ranks]) == 0
        assert (remark in " ".join(capsys.readouterr().out.split())) == wanted


def test_a_fast_link_leaves_other_causes(capsys):
    known = ["--link-gbit", "800", "--gradient-mb", "102.2", "--batch", "128", "--examples", "12811670"]
    (row,) = forecast(*JSC, *known, "--ranks", "128", capsys=capsys)["forecast"]
    assert row["shares"]["network"] < 0.01
    assert row["step_seconds"] == pytest.approx(row["seconds"] * 128 * 128 / 12811670)
    assert row["shares"]["fixed"] + row["shares"]["stragglers"] > 0.2


def test_a_fixed_part_that_is_known_leaves_less_open(capsys):
    argv = [*JSC, "--ranks", "128"]
    open_, known = (forecast(*argv, *more, capsys=capsys)["forecast"][0] for more in ([], ["--fixed-seconds", "60"]))
    assert known["shares"]["fixed"] == pytest.approx(60 / known["seconds"], rel=1e-3)
    assert np.ptp(known["band"]["seconds"]) < np.ptp(open_["band"]["seconds"])


def test_points_that_no_fit_reaches_widen_the_band(capsys):
    found = forecast("--point", "1:10", "--point", "2:4", "--ranks", "4", capsys=capsys)
    low, high = found["forecast"][0]["band"]["seconds"]
    assert found["misfit"] == pytest.approx(0.12, abs=0.02)
    assert low < 2
    assert high > 2.5


def test_no_fit_is_without_compute(capsys):
    """Stragglers alone pass through these points, and would take no time on one rank."""
    argv = ["--point", "8:3", "--point", "16:2", "--cores", "2", "--ranks", "1"]
    (row,) = forecast(*argv, capsys=capsys)["forecast"]
    assert row["band"]["seconds"][0] > 0
    assert row["shares"]["compute"] == pytest.approx(1)


def test_the_figures_of_bench_scaling(tmp_path, capsys):
    path = tmp_path / "scaling.json"
    weak = {"1": [1.0, 1.01], "2": [1.05]}
    path.write_text(json.dumps({"bench": "scaling", "batch": 16, "cores": 2, "ranks_per_node": 2, "weak": weak}))
    (row,) = forecast("--from", str(path), "--ranks", "4", capsys=capsys)["forecast"]
    assert row["step_seconds"] == pytest.approx(2 * 1.005 + 0.045 * 1.5, rel=0.01)  # four ranks on two cores
    assert row["throughput"] == pytest.approx(4 * 16 / row["step_seconds"])


def test_the_picture(tmp_path, capsys):
    path = tmp_path / "predicted.html"
    assert predict.main([*JSC, "--ranks", "64", "--picture", str(path)]) == 0
    assert "<svg" in path.read_text()
    options = predict.flags.parse(predict.Options, "predict", [*JSC, "--ranks", "64,1024"])
    figure = predict.figure(predict.task_of(options))
    assert figure.y_label == "% of a rank's speed on 4 ranks"
    assert list(figure.lines) == ["forecast", "measured"]
    (four,), (sixteen,) = figure.lines["measured"].values()
    assert (four, sixteen) == pytest.approx((100, 100 * 4 * 5355.9 / (16 * 1488.2)))


def test_from_the_command_line():
    command = warm.command("hvdtrain", "-m", "hvdtrain", "predict", "--point", "4:5355.9")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("RecipeError: --point must be given at least twice, got 1;")


def test_a_recipe_in_place_of_its_gradients_size(capsys):
    physics = ["--step-seconds", "0.2", "--link-gbit", "10", "--ranks", "4"]
    by_recipe, by_size = (
        forecast(*given, *physics, capsys=capsys)
        for given in (["--recipe", "synthetic"], ["--gradient-mb", str(4 * 25_557_032 / 1e6)])
    )
    assert by_recipe["forecast"] == by_size["forecast"]
