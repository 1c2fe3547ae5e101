"""The page of a report: one small file without addresses, in which texts of files are never markup.
Figures are as a reader wants them."""

import dataclasses
import os
import pickle
import re
import subprocess
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
import report_folders
import warm
from costs import counted

from hvdtrain.core import wording
from hvdtrain.terminal import Status
from hvdtrain.tools import report
from hvdtrain.tools.report import charts, model, page
from hvdtrain.tools.report.charts import X
from hvdtrain.tools.report.model import Curve, Event, HeatMap, Part, Series, Waterfall

MEGABYTE = 1 << 20
VOID = {"meta", "img", "br", "hr", "input", "link", "line", "rect", "circle", "path", "use"}
SECTIONS = (
    *("Trained to the end", "Key numbers", "Where the time went", "Curves", "Step time by rank", "Events", "Scaling"),
    *("Energy", "What was trained", "What could not be read"),
)
SHOWN = (
    *("Validation accuracy 0.9750, expected 0.978", "Look at node3", "✓ kept Replicas compared", "4 min 5 s", "78 %"),
    *("rule linear", "rank 2 on node3", "Horovod 2018", "Cray pm_counters", "whole nodes", "status.json is not JSON"),
    *(
        "python -m hvdtrain.torch digits",
        "training, log lines: from 2.137 to 0.02615 at step 220; lowest 0.02615 at 220",
    ),
    *("4 ranks: 88 % (85 % to 91 %)", "4 ranks: 3.513 times."),
)
TEXT_CONTRAST, CHART_CONTRAST = 4.5, 3.0
SCRIPT = "<script>alert(1)</script>"
HOSTILE = f'{SCRIPT}"\' onload="x" $\\frac{{1}}{{2}}$ &amp; {{{{ 7 * 7 }}}} \x00\x1b[31m\u202e\ud800' + "long" * 125


def hostile(value):
    """The value with HOSTILE for every text but those that the reader itself chooses."""
    if dataclasses.is_dataclass(value):
        kept = {"level": "bad", "state": "broken", "svg": ""}
        changed = {each.name: hostile(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return replace(value, **{name: kept.get(name, changed[name]) for name in changed})
    if isinstance(value, tuple):
        return tuple(map(hostile, value))
    if isinstance(value, dict):
        return {hostile(key): hostile(each) for key, each in value.items()}
    return HOSTILE if isinstance(value, str) else value


def document_of(*runs, sweep=None):
    return report.document_of(report.Options(runs=runs, sweep=sweep), Status(""))


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """full: a run with a slow rank, beside a sweep; several runs; one of which nothing is known; hostile texts."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("slow", "resumed", "seeds", "bench_scaling", "sweep"):
        report_folders.ALL[name](folder / name)
    (folder / "slow" / "status.json").write_text("{")
    (folder / "empty" / "checkpoints").mkdir(parents=True)
    sweep = document_of(folder / "slow", sweep=folder / "sweep").scaling
    full = document_of(folder / "slow", sweep=folder / "bench_scaling")
    several = document_of(*sorted((folder / "seeds").iterdir()))
    return {
        "full": full,
        "resumed": document_of(folder / "resumed"),
        "several": several,
        "empty": document_of(folder / "empty"),
        "hostile": hostile(replace(full, runs=full.runs * 2, comparison=several.comparison, scaling=sweep)),
    }


@pytest.fixture
def empty(documents):
    """Makes the document of a run of which nothing is known but what is given."""
    only = documents["empty"]
    return lambda **known: replace(only, runs=(replace(only.runs[0], **known),))


class Reader(HTMLParser):
    """What a browser would see: elements, texts, and tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong, self.ids, self.elements, self.texts = [], [], [], [], []
        self.feed(text)
        self.close()
        self.wrong += self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def headings(self):
        return [int(tag[1]) for tag, _ in self.elements if re.fullmatch("h[1-6]", tag)]

    def text(self):
        return " ".join(" ".join(text for tag, text in self.texts if tag not in {"style", "script"}).split())


@pytest.fixture(scope="module")
def pages(documents):
    """Each document's page, rendered once."""
    return {name: page.render(document) for name, document in documents.items()}


@pytest.mark.parametrize("name", ["full", "several", "empty", "hostile"])
def test_a_page_is_small_whole_and_accessible(pages, name):
    assert len(pages[name].encode()) <= MEGABYTE
    assert "http" not in pages[name]
    found = Reader(pages[name])
    tags = [tag for tag, _ in found.elements]
    assert not {*tags} & {"script", "link", "iframe", "object", "embed", "base"}
    assert not found.wrong and len(found.ids) == len(set(found.ids))
    for tag, attributes in found.elements:
        assert not [key for key in attributes if key.startswith("on")]
        for key in ("href", "src"):
            assert (attributes.get(key) or "#").startswith(("#", "data:image/png"))
        if tag == "a":
            assert attributes["href"][1:] in found.ids
        if tag == "th":
            assert "scope" in attributes
        if tag == "img":
            assert len(attributes["alt"]) > 20
        if tag == "svg" and attributes.get("aria-hidden") != "true":
            assert attributes["role"] == "img"
            assert set(attributes["aria-labelledby"].split()) <= set(found.ids)
    assert tags.count("table") == tags.count("caption")
    assert all(text.strip() for tag, text in found.texts if tag in {"title", "desc"})
    levels = found.headings()
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_every_section_is_there_in_order(pages):
    found = Reader(pages["full"])
    text, headings = found.text(), [words.strip() for tag, words in found.texts if tag == "h2" and words.strip()]
    assert [heading.partition(":")[0] for heading in headings] == list(SECTIONS)
    for words in SHOWN:
        assert words in text


@pytest.mark.parametrize(
    ("state", "parts", "words"),
    [
        ("finished", [Part("queue", 1.0), Part("training", 2.0)], "3.0 s of wall time, from submit to end."),
        ("running", [Part("training", 3.0)], "3.0 s of wall time, from launch until now."),
    ],
)
def test_the_wall_time_says_what_it_is_of(state, parts, words, empty):
    known = empty(state=state, waterfall=Waterfall(3.0, tuple(parts), None))
    assert words in Reader(page.render(known)).text()


def test_several_runs_stand_side_by_side(pages):
    text = Reader(pages["several"]).text()
    assert text.index("Verdicts") < text.index("Comparison") < text.index("Key numbers")
    assert "0.9750 ± 0.0028" in text
    assert "seed-1" in text


def test_what_is_not_there_is_said(pages):
    text = Reader(pages["empty"]).text()
    for words in ("recorded no phases", "No metrics were recorded", "Step times by rank were not recorded"):
        assert words in text
    assert "Not measured" in text
    assert "Events" not in text
    assert "nan" not in text.lower().split()


def test_texts_of_files_are_shown_as_they_are(pages):
    found = Reader(pages["hostile"])
    assert SCRIPT in found.text()
    assert "{{ 7 * 7 }}" in found.text()
    assert "\\x1b[31m\\u202e\\ud800" in found.text()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e\ud800]", pages["hostile"])
    assert any(SCRIPT[:10] in text for tag, text in found.texts if tag == "desc")
    assert any(SCRIPT[:10] in text for tag, text in found.texts if tag == "title")
    assert any(SCRIPT[:10] in attributes.get("alt", "") for _, attributes in found.elements)
    assert any(SCRIPT[:10] in attributes.get("aria-label", "") for _, attributes in found.elements)


def test_the_users_own_style_and_a_home_that_is_not_there_change_nothing(documents, pages, tmp_path):
    style, pickled = tmp_path / "matplotlibrc", tmp_path / "document"
    style.write_text("text.usetex: True\nfont.size: 30\nsvg.fonttype: path\naxes.formatter.limits: 0, 0\n")
    pickled.write_bytes(pickle.dumps(documents["full"]))
    code = "import pickle, sys; from hvdtrain.tools.report.page import render; given = pickle.load(sys.stdin.buffer)"
    command = warm.command("hvdtrain", "-c", f"{code}; print(render(given), end='')")
    environ = {**os.environ, "MATPLOTLIBRC": str(style), "MPLCONFIGDIR": "/proc/none", "HOME": "/proc/none"}
    environ["PYTHONIOENCODING"] = "utf-8"
    with pickled.open("rb") as file:
        ended = subprocess.run(command, stdin=file, capture_output=True, text=True, check=True, env=environ)
    assert ended.stderr == ""
    assert ended.stdout == pages["full"]


def test_no_document_is_none_and_a_sweep_needs_no_run(documents):
    assert "There is no run to report on" in page.render(replace(documents["empty"], runs=()))
    found = Reader(page.render(replace(documents["full"], runs=(), title="sweep")))
    assert not found.wrong
    assert "all ranks sharing one batch" in found.text()


def _series(x, y, **bounds):
    return Series("loss", np.array(x, dtype=float), np.array(y, dtype=float), **bounds)


NONE, INF = float("nan"), float("inf")
SERIES = {
    "empty": _series([], []),
    "one point": _series([5], [0.1]),
    "all NaN": _series([1, 2, 3], [NONE] * 3),
    "an infinity": _series([1, 2, 3], [1.0, INF, 2.0]),
    "only infinities": _series([1, 2], [INF, -INF]),
    "constant": _series([1, 2, 3], [7.0] * 3),
    "constant zero": _series([0, 0, 0], [0.0] * 3),
    "huge steps": _series([1e17, 2e17, 1e18], [1, 2, 3]),
    "huge": _series([1, 2, 3], [1e308, -1e308, 1]),
    "tiny": _series([1, 2, 3], [1e-320, 5e-324, 0]),
    "negative on a log axis": _series([1, 2, 3], [-1, 1e-9, 1e9]),
    "no order": _series([3, 1, 2], [1, 2, 3]),
    "step is NaN": _series([NONE, 1], [1, 2]),
    "lengths differ": _series([1, 2, 3], [1, 2]),
    "a band of NaN": _series([1, 2], [1, 2], low=np.full(2, NONE), high=np.array([INF, 3])),
    "integers": Series("loss", np.arange(3), np.array([1, 2, 3])),
    "long": _series(range(10_000), np.linspace(3, 1, 10_000)),
}


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("name", SERIES)
def test_any_series_is_drawn_without_a_warning(name, log, capfd, empty):
    curve = Curve("Loss", "step", "loss", (SERIES[name],), log=log)
    events = tuple(Event(step, "resume", "again", step) for step in (0, 1, 2, 10**18))
    document = empty(curves=(curve,), events=events)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rendered = page.render(document)
    assert not Reader(rendered).wrong
    nothing = name in {"empty", "all NaN", "only infinities"}
    assert ("Nothing to draw" in rendered) == nothing
    drawn = " ".join(re.findall(r' (?:d|x|y)="([^"]*)"', rendered))
    assert not re.search("nan|inf", drawn)
    assert capfd.readouterr().err == ""


def test_a_line_shows_where_it_begins_to_be_no_number(empty):
    lost = replace(_series([1, 2, 3, 4], [1.0, 2.0, NONE, NONE]), note="2 of 4 values are NaN, the first at step 3")
    rendered = page.render(empty(curves=(Curve("Loss", "step", "loss", (lost,)),)))
    assert "2 of 4 values are NaN, the first at step 3" in rendered
    assert f"M{X[0] + (3 - 0.97) / 3.06 * (X[1] - X[0]) - 4:.1f} 20l8 8" in rendered


AXES = {
    "constant": ([0.001] * 4, False),
    "nearly constant": ([0.001, 0.001 + 1e-9], False),
    "one decade": ([0.0004, 0.03], True),
    "two": ([0.9, 21.0], True),
    "six": ([1e-4, 99.0], True),
    "linear": ([0.1, 0.97], False),
    "two round numbers": ([0.15, 2.4], False),
    **{
        f"random {n}": (10 ** np.random.default_rng(n).uniform(-9, 9) * np.array([n / 50, 1]), False) for n in range(50)
    },
}


@pytest.mark.parametrize(("values", "log"), AXES.values(), ids=AXES)
def test_an_axis_has_three_marks_that_differ(values, log):
    axis = charts._y_axis(np.array(values), log)
    labels = [charts.tick(value) for value in axis.ticks()]
    assert 3 <= len(labels) == len(set(labels)) <= 10


HEATS = {
    "nothing": HeatMap(np.empty(0), (), np.empty((0, 0)), {}),
    "all NaN": HeatMap(np.arange(3.0), ("a", "b"), np.full((2, 3), NONE), {}),
    "one sample": HeatMap(np.array([5.0]), ("a", "b"), np.ones((2, 1)), {1: "slow"}),
    "times go back": HeatMap(np.array([5.0, 1.0]), ("a",), np.ones((1, 2)), {}),
    "infinite": HeatMap(np.arange(2.0), ("a",), np.array([[INF, 1.0]]), {}),
}


@pytest.mark.parametrize("name", HEATS)
def test_any_heat_map_is_drawn_without_a_warning(name, empty):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rendered = page.render(empty(heat=HEATS[name]))
    assert ("data:image/png" in rendered) == (name not in {"nothing", "all NaN"})


def heat_of(rows, columns):
    seconds = np.random.default_rng(0).uniform(0.1, 0.101, (rows, columns))
    slow = {rows - 223: "slow in reading"} if rows > 223 else {}
    return HeatMap(np.arange(columns) * 1.0, tuple(f"rank {n}" for n in range(rows)), seconds, slow)


def test_of_many_ranks_the_slow_ones_are_shown(empty):
    rendered = page.render(empty(heat=heat_of(1000, 300)))
    assert "936 quickest of 1000 rows" in " ".join(rendered.split())
    assert re.search(r'class="slow">rank 777', rendered)
    assert len(rendered) < 60_000


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, page.MOST_WHOLE_RUNS, 64])
def test_long_reports_stay_below_a_megabyte(count, documents):
    events = tuple(Event(number, "slow", "rank 3 is slow" * 20, number) for number in range(400))
    run = documents["full"].runs[0]
    line = np.linspace(0, 1, 600)
    curves = tuple(
        replace(curve, series=tuple(Series(each.label, line, np.sin(99 * line), line, line) for each in curve.series))
        for curve in run.curves
    )
    origin = replace(run.origin, recipe="key: 1\n" * 4000)
    run = replace(run, origin=origin, events=events, heat=heat_of(64, 300), curves=curves)
    several = replace(documents["several"], runs=(run,) * count)
    assert len(page.render(several).encode()) <= MEGABYTE


def test_parts_of_the_time_are_steps_that_add_up(pages):
    bars = [
        (float(left), float(left) + float(width))
        for left, width in re.findall(r"margin-left:([\d.]+)%;width:([\d.]+)%", pages["resumed"])
    ]
    assert (bars[0][0], bars[-1][1]) == (0, pytest.approx(100, abs=0.05))
    for before, after in pairwise(bars):
        assert after[0] == pytest.approx(before[1], abs=0.02)


def test_checkpoints_in_a_row_share_a_line_and_have_no_number():
    kinds = ["launch", *["checkpoint"] * 3, "lost", "launch", "checkpoint", "resume"]
    events = [Event(10.0 * number, kind, "", number) for number, kind in enumerate(kinds)]
    assert [(number, len(alike)) for number, alike in page.event_rows(events)] == [
        *((1, 1), (None, 3), (2, 1), (3, 1), (None, 1), (4, 1)),
    ]
    numbered = {number: x for x, number in page.marks(events)}
    assert numbered == {1: 0, 2: 4, 3: 5, 4: 7, None: 6}


def test_colours_of_text_and_charts_stand_out_on_light_and_dark(pages):
    for scheme in re.findall(r":root \{([^}]*--paper[^}]*)\}", pages["empty"]):
        colours = dict(re.findall(r"--(\w+): (#\w+)", scheme))
        for paper in ("paper", "panel"):
            for name in ("ink", "soft", "link", "good", "attention", "bad", "open"):
                assert _contrast(colours[name], colours[paper]) >= TEXT_CONTRAST, name
        for name in ("event", *(f"s{number}" for number in range(6))):
            assert _contrast(colours[name], colours["paper"]) >= CHART_CONTRAST, name


def _contrast(one, other):
    """As WCAG 2 defines it."""
    brightness = sorted(map(_brightness, (one, other)))
    return (brightness[1] + 0.05) / (brightness[0] + 0.05)


def _brightness(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    shares = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_page_is_little_work(documents):
    with counted() as work:
        page.render(documents["full"])
    assert work.lines < 20_000_000


CASES = {
    wording.duration: {
        0.0: "0 s",
        0.0851: "85.1 ms",
        12.34: "12.3 s",
        59.96: "1 min 0 s",
        245.0: "4 min 5 s",
        3599.6: "1 h 0 min",
        4980.0: "1 h 23 min",
        273_600.0: "3 d 4 h",
        -5.0: "-5.0 s",
        float("inf"): "unknown",
        float("nan"): "unknown",
    },
    model.step_time: {1.0432: "1.043 s", 0.31817: "318.2 ms", 0.0: "0 ms"},
    model.number: {0.97781: "0.9778", 12345.6: "12,346", 1e-5: "1e-05", float("inf"): "not finite"},
    charts.tick: {0.05: "0.05", 1e-5: "1e-5", 25_000.0: "25k", 1.5e6: "1.5M", 2000.0: "2000", 1e20: "1e20", 0.0: "0"},
    model.percent: {0.714: "71 %", 0.0123: "1.2 %", float("nan"): "unknown"},
    page.date: {0.0: "1970-01-01 00:00 UTC", 1e300: "unknown", float("nan"): "unknown"},
    page._shown: {
        "a\tb\nc": "a\tb\nc",
        "\x1b[31m": "\\x1b[31m",
        "a\r\nb": "a\nb",
        "\u202e": "\\u202e",
        "é\xa0": "é\xa0",
    },
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_it_reads_well(function):
    assert {value: function(value) for value in CASES[function]} == CASES[function]


def test_a_long_text_is_cut_in_the_middle():
    assert page.cut("a" * 15 + "b" * 15, 10) == "aaaaa\n... 20 characters left out ...\nbbbbb"
    assert page.cut("short", 10) == "short"
