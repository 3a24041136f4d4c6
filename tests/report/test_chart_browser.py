"""The charts in headless Chromium: drawn from the run's data, and answering pointer, keyboard and switch.

Skipped where there is no Chromium (Debian: `apt install chromium`).
"""

import math

import numpy as np
import pytest
from fake_run import events, metrics, write_lines, write_run
from test_browser import CHROMIUM, drive, visit

from scrimp.report import write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="NOT RUN: no Chromium on this machine (apt install chromium)"
    ),
]
STEPS = 200
SKIPPED, REPLANNED = STEPS // 3, 120
REASON = "every 120 steps </script><b>\u2028"
DRIVER = """
const settle = () => new Promise((resolve) => setTimeout(resolve, 30));
const figures = [...document.querySelectorAll("figure[data-chart]")];
const chartOf = (slug) => document.getElementById("chart-" + slug).chart;
const loss = () => chartOf("loss");
const legend = (u) => [...u.root.querySelectorAll(".u-series")].map((row) => row.textContent);
const span = (u, key) => [u.scales[key].min, u.scales[key].max];
const pointer = (u, type, step, target) => {
  const box = u.over.getBoundingClientRect();
  (target ?? u.over).dispatchEvent(new MouseEvent(type, {
    clientX: box.left + u.valToPos(step, "x"), clientY: box.top + 20, bubbles: true, movementX: 9,
  }));
};
const point = (u, step) => { pointer(u, "mouseenter", step); pointer(u, "mousemove", step); };
// Share of the values at whose place the canvas has ink of the series' colour.
const inked = (u, index) => {
  const shade = (css) => css.match(/\\w\\w/g).slice(0, 3).map((part) => parseInt(part, 16));
  const wanted = shade(u.series[index].points.fill());
  let found = 0, all = 0;
  u.data[index].forEach((value, place) => {
    if (value == null) return;
    const x = Math.round(u.valToPos(u.data[0][place], "x", true)), y = Math.round(u.valToPos(value, "y", true));
    const pixels = u.ctx.getImageData(x - 2, y - 2, 5, 5).data;
    let near = false;
    for (let at = 0; at < pixels.length; at += 4)
      near ||= pixels[at + 3] > 60 && wanted.every((part, colour) => Math.abs(pixels[at + colour] - part) < 40);
    all += 1;
    found += near;
  });
  return found / all;
};
await settle();
seen.charts = Object.fromEntries(figures.map((figure) => [figure.id.slice(6), {
  counts: figure.chart.data.slice(1).map((column) => column.filter((value) => value != null).length),
  legend: legend(figure.chart), x: span(figure.chart, "x"), y: span(figure.chart, "y"),
  labels: figure.chart.axes[1]._values, log: figure.chart.scales.y.distr === 3,
  alone: figure.chart.series.slice(1).map((one, index) => one.points.filter(figure.chart, index + 1, false)),
  dashed: figure.chart.series.map((one) => Boolean(one.dash)),
  ink: figure.chart.series.slice(1).map((_, index) => inked(figure.chart, index + 1)),
}]));
seen.values = loss().data[1];
point(loss(), 50);
seen.at50 = [legend(loss()), legend(chartOf("lr"))];
point(loss(), SKIPPED);
const mark = () => loss().over.querySelector(".chart-event");
seen.skipped = [legend(loss())[1], mark().textContent, mark().hidden];
point(loss(), REPLANNED);
seen.replanned = mark().textContent;
point(loss(), 90);
seen.nothing = mark().hidden;
loss().over.focus();
loss().over.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
seen.key = legend(loss())[0];
pointer(loss(), "mousemove", 100);
pointer(loss(), "mousedown", 100);
pointer(loss(), "mousemove", 150);
pointer(loss(), "mouseup", 150, document);
await settle();
seen.zoomed = [span(loss(), "x"), span(loss(), "y"), span(chartOf("lr"), "x")];
pointer(loss(), "dblclick", 120);
await settle();
seen.reset = [span(loss(), "x"), span(loss(), "y"), span(chartOf("lr"), "x")];
const name = loss().root.querySelectorAll(".u-series th")[1];
name.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
await settle();
seen.hidden = [loss().series[1].show, inked(loss(), 2)];
name.click();
await settle();
seen.shown = loss().series[1].show;
const box = document.querySelector("#chart-loss .switch input");
seen.switch = box.parentNode.hidden;
box.click();
await settle();
seen.log = [loss().scales.x.distr, span(loss(), "x"), loss().axes[0]._values, inked(loss(), 2)];
seen.texts = document.querySelectorAll(".frame b").length;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("charts") / "run", STEPS)
    replan = {"kind": "replan", "step": REPLANNED, "reason": REASON}
    write_lines(folder / "events.jsonl", [*events(STEPS), replan])
    return write_report(folder)


@pytest.fixture(scope="module")
def seen(page, tmp_path_factory):
    script = DRIVER.replace("SKIPPED", str(SKIPPED)).replace("REPLANNED", str(REPLANNED))
    return drive(page, tmp_path_factory.mktemp("driven"), script)


def recorded(step, name="loss"):
    return metrics(STEPS)[step - 1][name]


def shown(step, name="loss"):
    return f"{float(f'{recorded(step, name):.4g}'):g}"


@pytest.mark.slow
def test_the_charts_run_under_the_policy_and_load_nothing(page, tmp_path):
    visited = visit(page, tmp_path)
    assert visited.console == []
    assert visited.urls == []
    assert visited.dom.count("<canvas") == 7


def test_the_charts_have_the_points_of_the_run(seen):
    counts = {slug: chart["counts"] for slug, chart in seen["charts"].items()}
    # 200 steps, one of them skipped without loss and gradient norm; ten evaluations.
    assert counts == {
        "loss": [199, 199, 10], "lr": [200], "grad-norm": [199, 199], "throughput": [200, 200],
        "utilisation": [200, 200, 200], "memory": [200, 200, 2], "data-wait": [200, 200],
    }  # fmt: skip
    assert seen["values"] == [recorded(step) for step in range(1, STEPS + 1)]


def test_every_value_leaves_ink_of_its_colour(seen):
    """Raw curves are faint, and means of spikes run out of the chart; all else has to be seen."""
    for slug, curve in (
        ("loss", 1),
        ("loss", 2),
        ("lr", 0),
        ("grad-norm", 1),
        ("utilisation", 0),
        ("memory", 2),
    ):
        assert seen["charts"][slug]["ink"][curve] > 0.9, slug


def test_predictions_are_dashed_and_norms_logarithmic(seen):
    charts = seen["charts"]
    assert charts["memory"]["dashed"] == [False, False, False, True]
    assert charts["utilisation"]["dashed"] == [False, False, True, False]
    assert {slug for slug, chart in charts.items() if chart["log"]} == {"grad-norm", "data-wait"}


@pytest.mark.slow
def test_a_value_between_gaps_is_drawn_as_a_point(seen, tmp_path):
    assert {slug: chart["alone"] for slug, chart in seen["charts"].items() if any(chart["alone"])} == {}
    records = metrics(40)
    for record in records:
        record["lr"] = 0.001 if record["step"] in (1, 20) else None
    folder = write_run(tmp_path / "run", 40)
    write_lines(folder / "metrics.jsonl", records)
    found = drive(write_report(folder), tmp_path, DRIVER.split("seen.values")[0])["charts"]["lr"]
    assert found["alone"] == [[0, 19]]
    assert found["ink"] == [1]


def number(label):
    for suffix, factor in (("%", 0.01), (" GiB", 1), ("k", 1e3), (" µs", 1e-6), (" ms", 1e-3), (" s", 1)):
        if label.endswith(suffix):
            return float(label.removesuffix(suffix)) * factor
    return float(label)


def test_labels_of_the_axes_are_round_and_in_the_unit(seen):
    for slug, chart in seen["charts"].items():
        found = [number(label) for label in chart["labels"]]
        assert 2 <= len(found) <= 8
        steps = np.diff(np.log(found) if chart["log"] else found)
        if not chart["log"]:
            np.testing.assert_allclose(steps, steps[0], rtol=1e-6)
        assert (steps > 0).all(), slug
    assert all(label.endswith("%") for label in seen["charts"]["utilisation"]["labels"])
    assert all(label.endswith(" GiB") for label in seen["charts"]["memory"]["labels"])


def test_the_legend_has_the_last_values_and_those_under_the_cursor(seen):
    last = seen["charts"]["loss"]["legend"]
    assert last[0] == f"step{STEPS}"
    assert last[1] == f"training, each step{shown(STEPS)}"
    assert last[3] == f"held out{shown(STEPS, 'eval_loss')}"
    loss, rate = seen["at50"]
    assert loss[:2] == ["step50", f"training, each step{shown(50)}"]
    assert rate == ["step50", f"learning rate{shown(50, 'lr')}"]  # the cursor is shared


def test_events_tell_their_reason_beside_the_cursor(seen):
    assert seen["skipped"] == ["training, each step–", f"step {SKIPPED} was skipped", False]
    assert seen["replanned"] == f"replan at step {REPLANNED}: {REASON[:-1]}⟨U+2028⟩"
    assert seen["nothing"]
    assert seen["texts"] == 0


def test_arrow_keys_move_the_cursor(seen):
    assert seen["key"] == "step91"


def test_dragging_zooms_all_charts_and_a_double_click_resets_them(seen):
    whole = [seen["charts"]["loss"]["x"], seen["charts"]["loss"]["y"], seen["charts"]["lr"]["x"]]
    steps, losses, others = seen["zoomed"]
    for zoomed in (steps, others):
        assert zoomed == pytest.approx([100, 150], abs=1)
    inside = [recorded(step) for step in range(101, 150)]
    assert losses[0] <= min(inside) < max(inside) <= losses[1] < whole[1][1]
    assert seen["reset"] == whole == [[1, STEPS], whole[1], [1, STEPS]]


def test_a_name_hides_its_curve_and_shows_it_again(seen):
    assert seen["hidden"][0] is False
    assert seen["hidden"][1] > 0.9  # the other curve stays
    assert seen["shown"] is True


def test_the_steps_become_logarithmic(seen):
    distribution, steps, labels, ink = seen["log"]
    assert seen["switch"] is False
    assert distribution == 3
    assert steps == [1, STEPS]
    assert [label for label in labels if label][:3] == ["1", "10", "100"]
    assert ink > 0.9


@pytest.mark.slow
def test_dark_pages_have_dark_charts(page, tmp_path):
    script = (
        "seen.c = ['loss'].map((slug) => document.getElementById('chart-' + slug).chart.series[2].stroke())"
    )
    light = drive(page, tmp_path, script)["c"]
    assert light != drive(page, tmp_path, script, "--blink-settings=preferredColorScheme=0")["c"]


@pytest.mark.slow
@pytest.mark.parametrize("values", [[1e300, 1e-300], [-1e12, 3], [0, 0], [math.nan, 7]])
@pytest.mark.every(4)
def test_odd_values_are_drawn_without_an_error(values, tmp_path):
    folder = write_run(tmp_path / "run", 40)
    records = metrics(40)
    for record, value in zip(records, values, strict=False):
        record.update(dict.fromkeys(("loss", "grad_norm", "data_wait_s", "lr", "tokens_per_s"), value))
    write_lines(folder / "metrics.jsonl", records)
    visited = visit(write_report(folder), tmp_path)
    assert visited.console == []
    assert visited.dom.count("<canvas") == 7
