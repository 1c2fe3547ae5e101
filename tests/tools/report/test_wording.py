"""Figures as a reader wants them."""

import pytest

from hvdtrain.core import wording
from hvdtrain.tools.report import charts, model, page

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
