"""Documents of reports, made by hand: `full()` fills every section, `hostile()` has what must not get through."""

from dataclasses import replace

import numpy as np

from hvdtrain.tools.report.model import (
    Check,
    Comparison,
    Curve,
    Document,
    Energy,
    EnergyRow,
    Event,
    HeatMap,
    Origin,
    Part,
    RunReport,
    Scaling,
    ScalingRow,
    Series,
    Verdict,
    Waterfall,
)

BEGAN = 1_764_000_000.0
STEPS, EPOCH = 2200, 220
SCRIPT = "<script>alert(1)</script>"
HOSTILE = f'{SCRIPT}"\' onload="x" $\\frac{{1}}{{2}}$ &amp; {{{{ 7 * 7 }}}} \x00\x1b[31m\u202e\ud800' + "long" * 125

RECIPE = """name: digits
model: resnet50
dataset: digits
batch_size: 32
base_lr: 0.05
base_batch: 64
epochs: 10
warmup_epochs: 1
schedule: cosine
seed: 7
"""
PLAN = (
    "recipe      digits: resnet50 (23,528,522 parameters) on digits, 1,437 examples to train, 360 to validate",
    "batch       128 = 4 ranks x 32",
    "steps       220 an epoch, 10 epochs, 2,200 in all",
    "LR          0.1 = 0.05 x 128/64 (rule linear); warm-up over 1 of 10 epochs, then cosine to 0 at epoch 10",
    "precision   float32; gradients of 89.8 MiB a step and rank; a checkpoint of 179.5 MiB",
    "ranks       4 ranks, srun, horovod on cpu (torch)",
)


def full() -> Document:
    """One run that was killed once and resumed, with a slow rank, beside a sweep."""
    return Document(
        title="digits, 4 ranks",
        made=BEGAN + 90_000,
        version="1.0.0",
        runs=(run(),),
        scaling=(weak(), strong()),
        missing=("metrics.jsonl: line 812 is torn and was left out",),
    )


def several(count: int = 3) -> Document:
    """Runs of several seeds, and what differs."""
    runs = tuple(run(seed) for seed in range(count))
    columns = tuple(each.name for each in runs)
    rows = (
        ("recipe", "seed", tuple(str(seed) for seed in range(count))),
        ("recipe", "base_lr", tuple("0.05" if seed else "0.1" for seed in range(count))),
        ("software", "torch", tuple("2.15.0" if seed else "2.14.1" for seed in range(count))),
        ("result", "state", ("finished",) * count),
        ("result", "validation accuracy", tuple(f"{each.results['valid_acc1']:.4f}" for each in runs)),
        ("result", "wall time", ("14 min 25 s",) * count),
    )
    losses = tuple(replace(each.curves[0].series[0], label=each.name, low=None, high=None) for each in runs)
    accuracies = tuple(replace(each.curves[1].series[1], label=each.name) for each in runs)
    curves = (
        Curve("Loss, training", "step", "loss", losses, log=True),
        Curve("Accuracy, validation", "step", "accuracy", accuracies),
    )
    seeds = (f"Validation accuracy over {count} runs with seeds 0, 1, 2: 0.9766 ± 0.0014 (standard deviation).",)
    return Document("digits and others", BEGAN, "1.0.0", runs, Comparison(columns, rows, curves, seeds))


def empty() -> Document:
    """A folder of which nothing could be read."""
    nothing = Verdict("open", "Nothing is known of its training.", (), (), "", "")
    origin = Origin("", False, (), (), {}, (), "", "", "", None, "", "", "")
    energy = Energy((), None, None, None, "")
    only = RunReport("empty", "runs/empty", "unknown", None, nothing, (), {}, None, (), None, (), energy, origin)
    return Document("empty", BEGAN, "1.0.0", (only,))


def hostile() -> Document:
    """Every text is a script, mathematics, markup, control characters and 500 characters long."""
    given = several(2)
    runs = tuple(_hostile_run(each) for each in given.runs)
    assert given.comparison
    rows = tuple((HOSTILE, HOSTILE, (HOSTILE, HOSTILE)) for _ in given.comparison.rows)
    comparison = Comparison((HOSTILE,) * 2, rows, _hostile_curves(given.comparison.curves), (HOSTILE,))
    scaling = replace(weak(), mode=HOSTILE, sentence=HOSTILE, published=((HOSTILE, ((8, 0.9), (64, 0.8))),))
    return Document(HOSTILE, BEGAN, HOSTILE, runs, comparison, (scaling,), (HOSTILE,))


def run(seed: int = 7) -> RunReport:
    """With something in each of its sections."""
    rng = np.random.default_rng(seed)
    return RunReport(
        name=f"2026-11-20_15-33-0{seed}",
        folder=f"runs/digits/2026-11-20_15-33-0{seed}",
        state="finished",
        began=BEGAN,
        verdict=verdict(),
        numbers=(
            ("Validation accuracy", "0.9778"),
            ("Validation loss", "0.1034"),
            ("Epochs", "10 of 10"),
            ("Steps", "2,200 of 2,200"),
            ("Examples/s, median", "1,284"),
            ("Wall time", "14 min 25 s"),
            ("Goodput", "71 %"),
            ("Energy", "62.4 Wh"),
        ),
        results={"valid_acc1": 0.9778 - 0.0014 * seed, "wall_seconds": 865.0, "kwh": 0.0624},
        waterfall=waterfall(),
        curves=curves(rng),
        heat=heat(rng),
        events=events(),
        energy=Energy(
            rows=(
                EnergyRow("Cray pm_counters", 0.0624, 2, "whole nodes"),
                EnergyRow("SLURM ConsumedEnergy", 0.0631, 2, "whole nodes"),
                EnergyRow("NVML", 0.0412, 2, "GPUs only"),
            ),
            mean_watts=312.4,
            kwh_per_epoch=0.00611,
            co2_grams=4.99,
            note="Each node and GPU is counted once. 80 g of CO2 a kWh is the factor given.",
        ),
        origin=Origin(
            recipe=RECIPE,
            is_shipped=True,
            differences=(("epochs", "5", "10"), ("seed", "1", str(seed))),
            plan=PLAN,
            versions={"python": "3.11.7", "hvdtrain": "1.0.0", "torch": "2.15.0", "horovod": "0.28.1"},
            hosts=("node1", "node1", "node2", "node2"),
            launcher="srun",
            engine="horovod",
            framework="torch",
            ranks=4,
            git_commit="5b22e5b1a2bc (with changes)",
            job_id="4711",
            command=f"python -m hvdtrain.torch digits --epochs 10 --seed {seed}",
        ),
        settings={"seed": seed, "epochs": 10},
        missing=("launches.jsonl: the last line is torn and was left out",),
    )


def verdict() -> Verdict:
    """Of a run that is well but for a slow rank."""
    return Verdict(
        level="attention",
        headline="Trained to the end: step 2,200 of 2,200; one rank was slow.",
        details=(
            "Validation accuracy 0.9778, expected 0.97: as it should be.",
            "Rank 3 on node2 is slow in computing: 40 ms of each step, where the others take 26 ms.",
        ),
        checks=(
            Check("World", "kept", "4 ranks on 2 hosts in every launch"),
            Check("Replicas", "kept", "compared 44 times, always equal"),
            Check("Exact metrics", "kept", "every example of a validation counts once"),
            Check("Resumes", "unknown", "launch 1 was killed before its first checkpoint of this epoch"),
        ),
        limit="Computing limits the step: 26 ms of 41 ms; waiting for other ranks 14 ms, reading 1.2 ms.",
        advice="Look at node2: run python -m hvdtrain doctor on it; in SLURM --exclude=node2 leaves it out.",
    )


def waterfall() -> Waterfall:
    """Of two launches."""
    return Waterfall(
        865.0,
        (
            Part("queue", 62.0, "waiting for SLURM to start the job"),
            Part("start", 4.1, "from the job's start until the program runs"),
            Part("import", 9.3, "loading the framework and the user's code"),
            Part("rendezvous", 2.2, "until all ranks had found each other"),
            Part("first step", 12.8, "with what is compiled or warmed up for it"),
            Part("training", 614.2, "steps that count"),
            Part("validation", 31.7),
            Part("checkpoints", 6.4, "as far as they held up training"),
            Part("lost work", 71.3, "steps that a later launch made again"),
            Part("idle", 49.6, "between two launches"),
            Part("end", 1.4),
        ),
        0.71,
    )


def curves(rng: np.random.Generator) -> tuple[Curve, ...]:
    """Loss, accuracy, LR, throughput and gradient norm, as the reading of a run folder makes them."""
    x = np.arange(5.0, STEPS + 1, 5)
    loss = 2.3 * np.exp(-x / 330) + 0.012 * (1 + 0.4 * rng.standard_normal(len(x)) ** 2)
    ends = np.arange(1, 11) * float(EPOCH)
    train, valid = 1 - 0.6 * np.exp(-ends / 400), 0.978 - (0.5 + 0.1 * rng.random()) * np.exp(-ends / 420)
    rate = np.where(x < EPOCH, 0.1 * x / EPOCH, 0.05 * (1 + np.cos(np.pi * (x - EPOCH) / (STEPS - EPOCH))))
    speed = 1284 + 40 * rng.standard_normal(len(x)) - 300 * ((x > 900) & (x < 1010))
    norm = 0.4 + 3 * np.exp(-x / 200) + 0.1 * rng.random(len(x))
    derivation = "0.1 = 0.05 x 128/64 (rule linear); warm-up over 1 of 10 epochs, then cosine to 0 at epoch 10"
    return (
        Curve(
            "Loss",
            "step",
            "loss",
            (
                Series("training, log lines", x, loss, loss * 0.85, loss * 1.2),
                Series("training, epochs", ends, 2.3 * np.exp(-ends / 330) + 0.02),
                Series("validation", ends, 2.2 * np.exp(-ends / 300) + 0.1),
            ),
            log=True,
        ),
        Curve("Accuracy", "step", "accuracy", (Series("training", ends, train), Series("validation", ends, valid))),
        Curve("Learning rate", "step", "LR", (Series("Learning rate", x, rate),), derivation),
        Curve("Throughput", "step", "examples/s", (Series("Throughput", x, speed, speed - 60, speed + 50),)),
        Curve("Gradient norm", "step", "norm", (Series("Gradient norm", x, norm),)),
    )


def heat(rng: np.random.Generator, ranks: int = 4, columns: int = 120) -> HeatMap:
    """The last rank is slow from the middle on; nothing was recorded while the run was down."""
    seconds = 0.026 + 0.0012 * rng.random((ranks, columns))
    seconds[-1, columns // 2 :] = 0.040
    seconds[:, columns // 3 : columns // 3 + 6] = np.nan
    rows = tuple(f"rank {rank} on node{1 + rank // 2}" for rank in range(ranks))
    why = "slow in computing: 40 ms of each step, where the others take 26 ms"
    return HeatMap(np.linspace(90, 860, columns), rows, seconds, {ranks - 1: why})


def events() -> tuple[Event, ...]:
    """Of two launches."""
    saved = [Event(95 + step / 3.1, "checkpoint", f"checkpoint of step {step}", step) for step in range(110, 901, 110)]
    again = [
        Event(240 + step / 3.6, "checkpoint", f"checkpoint of step {step}", step) for step in range(990, 2201, 110)
    ]
    return (
        Event(66.0, "launch", "launch 1 on 4 ranks, job 4711"),
        *saved,
        Event(392.0, "lost", "rank 2 on node2 ended without a message", 905),
        Event(393.0, "end", "no record of its end: killed", 905),
        Event(441.0, "launch", "launch 2 on 4 ranks, job 4711", 880),
        Event(455.0, "resume", "resumes at step 880", 880),
        *again[:5],
        Event(640.0, "slow", "rank 3 on node2 is slow in computing: 40 ms of each step, others 26 ms", 1440),
        *again[5:],
        Event(865.0, "end", "finished", 2200),
    )


def weak() -> Scaling:
    """With a prediction, published runs, and communication."""
    rows = (
        ScalingRow(1, (0.301, 0.302, 0.299), 53.2, 1.0, (1.0, 0.99, 1.01)),
        ScalingRow(2, (0.318, 0.32, 0.315), 100.6, 1.89, (0.946, 0.93, 0.96)),
        ScalingRow(4, (0.335, 0.351, 0.33), 191.0, 3.59, (0.898, 0.86, 0.92)),
    )
    predicted = tuple((2**k, 0.95 - 0.025 * k, 0.93 - 0.035 * k, 0.96 - 0.018 * k) for k in range(2, 10))
    published = (
        ("Goyal et al. 2017, ResNet-50 on P100", ((8, 1.0), (64, 0.94), (352, 0.9))),
        ("Horovod 2018, Inception V3 on P100", ((16, 0.97), (128, 0.9), (512, 0.88))),
    )
    communication = ((1, 0.300, 0.0), (2, 0.302, 0.016), (4, 0.303, 0.032))
    sentence = "On 4 ranks a step takes 11 % longer than on one; 512 ranks would reach 72 % (61 to 80 %)."
    return Scaling("weak", rows, predicted, published, communication, sentence)


def strong() -> Scaling:
    """Two numbers of ranks, nothing else known."""
    rows = (
        ScalingRow(1, (0.301,), 53.2, 1.0, (1.0, 1.0, 1.0)),
        ScalingRow(2, (0.171,), 93.4, 1.76, (0.88, 0.88, 0.88)),
    )
    return Scaling("strong", rows, (), (), (), "Two ranks share the batch: 1.76 times as fast as one.")


def _hostile_run(given: RunReport) -> RunReport:
    checks = (Check(HOSTILE, "broken", HOSTILE),)
    assert given.heat
    return replace(
        given,
        name=HOSTILE,
        folder=HOSTILE,
        verdict=Verdict("bad", HOSTILE, (HOSTILE,), checks, HOSTILE, HOSTILE),
        numbers=((HOSTILE, HOSTILE),),
        waterfall=Waterfall(1.0, (Part(HOSTILE, 1.0, HOSTILE),), None),
        curves=_hostile_curves(given.curves),
        heat=replace(given.heat, rows=(HOSTILE,) * 4, slow={3: HOSTILE}),
        events=tuple(replace(event, kind=HOSTILE, text=HOSTILE) for event in given.events),
        energy=replace(given.energy, rows=(EnergyRow(HOSTILE, 1.0, None, HOSTILE),), note=HOSTILE),
        origin=Origin(
            recipe=HOSTILE,
            is_shipped=True,
            differences=((HOSTILE,) * 3,),
            plan=(HOSTILE,),
            versions={HOSTILE: HOSTILE},
            hosts=(HOSTILE,),
            launcher=HOSTILE,
            engine=HOSTILE,
            framework=HOSTILE,
            ranks=2**70,
            git_commit=HOSTILE,
            job_id=HOSTILE,
            command=HOSTILE,
        ),
        missing=(HOSTILE,),
    )


def _hostile_curves(given: tuple[Curve, ...]) -> tuple[Curve, ...]:
    return tuple(
        replace(
            curve,
            name=HOSTILE,
            x_label=HOSTILE,
            y_label=HOSTILE,
            note=HOSTILE,
            series=tuple(replace(series, label=HOSTILE) for series in curve.series),
        )
        for curve in given
    )
