"""The data of a chart: what was measured, gaps where it is missing, and words for all of it."""

import json
import math
from html.parser import HTMLParser

import numpy as np
import pytest

from scrimp.report.charts import TABLE_ROWS, Chart, Mark, Series, Unit, render
from scrimp.report.curves import BUCKETS
from scrimp.report.units import format_number

EVIL = "</figure></script><script>x</script>\"'&lt;\u2028\u202e"


class Elements(HTMLParser):
    """Elements with their attributes, and all text; every element is closed in order."""

    def __init__(self, markup):
        super().__init__()
        self.found, self.open, self.text = [], [], ""
        self.feed(str(markup))
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag != "input":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def series(values, steps=None, **changes):
    steps = np.arange(1, len(values) + 1) if steps is None else steps
    arrays = {"steps": np.asarray(steps, float), "values": np.asarray(values, float)}
    return Series(**{"name": "loss", **arrays, **changes})


def chart(*curves, **changes):
    known = {"slug": "test", "title": "Title", "subtitle": "Sub", "series": curves, "format": format_number}
    return Chart(**{**known, **changes})


def data(made):
    """As the browser reads it."""
    return json.loads(Elements(render(made)).all("figure")[0]["data-chart"])


def test_a_short_curve_is_there_with_every_value_and_gap():
    steps, values = data(chart(series([1, 2.5, math.nan, 4, math.inf, 1e-9])))["tables"][0]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert values == [1, 2.5, None, 4, None, 1e-9]


def test_curves_over_the_same_steps_share_a_table_and_others_do_not():
    made = chart(
        series([5, 4, 3], name="raw", kind="faint"),
        series([5, 4.5, 4], name="mean", derived=True),
        series([6], [2], name="held out", kind="dots", colour=2),
    )
    found = data(made)
    assert found["tables"] == [[[1, 2, 3], [5, 4, 3], [5, 4.5, 4]], [[2], [6]]]
    assert [(one["name"], one["kind"], one["colour"]) for one in found["series"]] == [
        ("raw", "faint", 1), ("mean", "line", 1), ("held out", "dots", 2),
    ]  # fmt: skip


def test_values_are_in_the_unit_of_the_chart():
    found = data(chart(series([2**30, 3 * 2**29]), unit=Unit(name=" GiB", size=2.0**30)))
    assert found["tables"][0][1] == [1, 1.5]
    assert (found["unit"], found["prefixes"]) == (" GiB", False)


def test_a_logarithmic_axis_has_no_place_for_zero_and_below():
    found = data(chart(series([1, 0, -1, 2]), log=True))
    assert found["tables"][0][1] == [1, None, None, 2]
    assert found["log"]


@pytest.mark.slow
def test_a_million_steps_take_no_more_room_than_pixels_need():
    noise = np.random.default_rng(0).normal(size=1_000_000)
    made = chart(series(noise), series(noise / 2, derived=True), log_steps=True)
    (steps, values, _), figure = data(made)["tables"][0], render(made)
    assert len(steps) <= 4 * BUCKETS + 2
    assert len(figure) < 100_000
    assert max(values) == pytest.approx(noise.max(), rel=1e-5)
    assert sum(step <= 100 for step in steps) == 100  # logarithmic steps need them


@pytest.mark.parametrize("values", [[], [math.nan, math.nan]])
def test_nothing_recorded_is_said(values):
    found = Elements(render(chart(series(values))))
    assert "Nothing was recorded" in found.text
    assert "data-chart" not in found.all("figure")[0]


@pytest.mark.parametrize("values", [[3.0], [2.0, 2.0], [0.0, 0.0], [1e-12], [1e300, 1.0], [-1.0, 4.0]])
@pytest.mark.parametrize("log", [False, True])
def test_any_finite_values_give_json_that_browsers_read(values, log):
    found = Elements(render(chart(series(values), log=log, log_steps=log))).all("figure")[0]["data-chart"]
    assert not {"NaN", "Infinity"} & set(found.replace("-", ",").split(","))


def test_spikes_lie_beyond_the_range_and_are_counted():
    steep = np.linspace(8, 3, 300)
    view = data(chart(series([*steep, 1e9, -1e9]), log_steps=True))["views"]
    assert [one["beyond"] for one in view] == [2, 2]
    assert -10 < view[0]["range"][0] <= 3 < 8 <= view[0]["range"][1] < 20
    assert data(chart(series(steep)))["views"] == [{"range": None, "beyond": 0}]


def test_neither_means_nor_predictions_are_counted_but_both_may_decide():
    values = [*np.linspace(8, 3, 300), 1e9]
    mean = series(np.full(301, 5e8), derived=True)
    assert data(chart(series(values), mean))["views"][0]["beyond"] == 1
    predicted = series([100, 100], [1, 301], derived=True, decides_range=True, kind="dashed")
    assert 100 <= data(chart(series(values), predicted))["views"][0]["range"][1] < 200


def test_an_axis_that_begins_at_zero_hides_nothing_low():
    values = [*np.full(300, 9.0), 0.1, 1000]
    assert data(chart(series(values), zero=True))["views"][0]["range"][0] == 0
    assert data(chart(series(values), zero=True))["views"][0]["beyond"] == 1


def test_screen_readers_get_a_description_and_a_table():
    found = Elements(render(chart(series(np.linspace(9, 3, 50)))))
    frame = next(attributes for attributes in found.all("div") if attributes.get("role") == "group")
    assert frame["aria-label"] == "Title. Sub. loss: 9.000 at step 1, 3.000 at step 50."
    assert len(found.all("tr")) == 1 + TABLE_ROWS


def test_names_and_labels_are_text():
    marks = [Mark(step=1, label=EVIL), Mark(step=2, label=EVIL, kind="skipped")]
    markup = render(chart(series([1, 2, 3], name=EVIL), title=EVIL, subtitle=EVIL, note=EVIL, marks=marks))
    found = Elements(markup)
    assert not found.all("script")
    assert len(found.all("figure")) == 1
    assert not {"\u2028", "\u202e"} & set(markup)
    read = json.loads(found.all("figure")[0]["data-chart"])
    assert [kind for _, kind, _ in read["marks"]] == ["event", "skipped"]
    assert read["series"][0]["name"] == read["marks"][0][2] == EVIL[:-2] + "⟨U+2028⟩⟨U+202E⟩"
