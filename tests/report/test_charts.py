"""The SVG of a chart: points where the data are, gaps where they are missing, words for all of it."""

import json
import re
import xml.etree.ElementTree as ElementTree
from functools import partial

import numpy as np
import pytest

from scrimp.report.charts import BUCKETS, READOUTS, Chart, Mark, Series, render
from scrimp.report.units import format_number


def chart(values, **changes):
    steps = changes.pop("steps", np.arange(1, len(values) + 1))
    style = {key: changes.pop(key) for key in ("kind", "name") if key in changes}
    series = Series(
        **{"name": "loss", **style}, steps=np.asarray(steps, float), values=np.asarray(values, float)
    )
    return Chart(
        **{
            "slug": "test",
            "title": "Title",
            "subtitle": "Sub",
            "series": [series],
            "format": format_number,
            **changes,
        }
    )


def parse(markup):
    """Also shows that the figure is well formed."""
    return ElementTree.fromstring(str(markup).replace("<details>", "<details >"))


def points(markup):
    path = next(e for e in parse(markup).iter("path") if "data-points" in e.attrib)
    return [tuple(map(float, pair)) for pair in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.get("d"))], path


def test_points_stand_where_the_data_are():
    found, path = points(render(chart([0, 5, 10], zero=True, height=108)))
    assert path.get("data-points") == "3"
    assert found == [(0, 108), (500, 58), (1000, 8)]


def test_a_missing_value_is_a_gap_and_a_lone_value_a_dot():
    _, path = points(render(chart([1, 2, np.nan, 4, np.nan, 6, 7])))
    assert [part.count("L") for part in path.get("d").split("M")[1:]] == [1, 0, 1]
    assert "h0" in path.get("d")


def test_a_million_steps_take_no_more_room_than_the_pixels():
    markup = render(chart(np.random.default_rng(0).normal(size=1_000_000)))
    assert len(points(markup)[0]) <= 2 * BUCKETS
    assert len(markup) < 60_000


def test_the_readout_has_one_text_per_place_and_series():
    for count in (1, 7, 5000):
        figure = parse(render(chart(np.linspace(9, 3, count))))
        data = json.loads(figure.get("data-readout"))
        assert len(data["x"]) == len(data["label"]) == len(data["series"][0]) - 1 <= READOUTS
        assert data["x"] == sorted(data["x"])
    assert data["label"][0] == "steps 1 to 32, mean"
    assert data["series"][0][1] == format_number(float(np.linspace(9, 3, 5000)[:32].mean()))


@pytest.mark.parametrize("values", [[], [np.nan, np.nan]])
def test_nothing_recorded_is_said(values):
    assert "Nothing was recorded" in render(chart(values))


@pytest.mark.parametrize("values", [[3.0], [2.0, 2.0], [0.0, 0.0], [1e-12], [1e300, 1.0], [-1.0, 4.0]])
@pytest.mark.parametrize("log", [False, True])
def test_any_finite_values_give_finite_coordinates(values, log):
    markup = render(chart(values, log=log, log_steps=log))
    assert "nan" not in str(markup).lower().replace("loss", "")
    assert "inf" not in re.sub(r"<desc.*?</desc>", "", str(markup))


def test_values_beyond_the_axis_are_counted_and_stay_on_it():
    markup = render(chart([*np.linspace(8, 3, 300), 1e9]))
    assert "1 value lies beyond the axis." in markup
    assert min(level for _, level in points(markup)[0]) == 0


def test_screen_readers_get_a_title_a_description_and_a_table():
    figure = parse(render(chart(np.linspace(9, 3, 50))))
    plot = next(e for e in figure.iter("svg") if e.get("role") == "img")
    ids = {e.get("id"): e.text for e in plot}
    texts = [ids[name] for name in plot.get("aria-labelledby").split()]
    assert texts[0] == "Title"
    assert texts[1] == "Sub. loss: 9.000 at step 1, 3.000 at step 50."
    assert len(list(figure.iter("tr"))) == 13


def test_names_and_labels_are_escaped():
    evil = "</svg><script>x</script>\"'"
    marks = [Mark(step=1, label=evil), Mark(step=2, label=evil, kind="skipped")]
    markup = render(chart([1, 2, 3], name=evil, title=evil, subtitle=evil, note=evil, marks=marks))
    assert "script" not in {e.tag for e in parse(markup).iter()}


def test_axis_labels_carry_no_empty_zeros():
    labels = [e.text for e in parse(render(chart([0, 1], zero=True))).iter("text")]
    assert labels[:3] == ["0", "0.25", "0.5"]


@pytest.mark.parametrize(
    ("low", "high"), [(10.01, 11.1), (0.75, 2.1), (3e-5, 9e-5), (100.0, 101.0), (2.9, 3.4)]
)
@pytest.mark.parametrize("log", [False, True])
def test_tick_labels_are_not_rounded(low, high, log):
    made = chart(
        np.geomspace(low, high, 30), log=log, tick_format=partial(format_number, digits=6), height=300
    )
    figure = parse(render(made))
    labels = [float(e.text) for e in figure.iter("text") if e.get("class") == "tick y"]
    levels = [float(e.get("y")) for e in figure.iter("text") if e.get("class") == "tick y"]
    assert len(labels) >= 2
    found = np.log(labels) if log else np.array(labels)
    slopes = np.diff(found) / np.diff(levels)
    np.testing.assert_allclose(slopes, slopes[0], rtol=0.02)


@pytest.mark.parametrize("log_steps", [False, True])
def test_a_spike_leaves_the_rest_of_a_long_curve_readable(log_steps):
    values = 3 + 7 * np.exp(-np.arange(200_000) / 300)
    values[150_000] = 1e12
    labels = [e.text for e in parse(render(chart(values, log_steps=log_steps))).iter("text")]
    heights = [float(text) for text in labels if "," not in text and "k" not in text]
    assert max(heights[:6]) <= 15
    if log_steps:  # the steep beginning fills half the chart and must be inside
        assert points(render(chart(values, log_steps=True, height=100)))[0][0][1] > 0
