"""The precision map in headless Chromium: it steps through the plans, and answers pointer and keyboard.

Skipped where there is no Chromium (Debian: `apt install chromium`).
"""

import re

import pytest
from fake_run import SPLIT, write_replanned_run
from test_browser import CHROMIUM, drive, visit

from scrimp.report import write_report
from scrimp.report.precision_cells import cell_facts, map_data, num_changed, percent
from scrimp.report.precision_choices import UNSURE, certainty_of, flop_shares, gemm_share
from scrimp.report.precision_palette import css_class, letter
from scrimp.report.precision_record import timeline
from scrimp.report.read_run import read_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="NOT RUN: no Chromium on this machine (apt install chromium)"
    ),
]
DRIVER = """
const find = (selector) => document.querySelector(selector);
const cells = () => [...document.querySelectorAll(".pmap tbody td:not(.none)")];
const card = () => ({
  where: find(".map-where").textContent,
  ...Object.fromEntries([...document.querySelectorAll(".map-card dd")].map((dd) => [dd.dataset.field, dd.textContent])),
});
const state = () => ({
  title: find(".map-title").textContent, summary: find(".map-summary").textContent, card: card(),
  cells: cells().map((cell) => [cell.className, cell.textContent]),
  bar: [...document.querySelectorAll(".map-bar rect")].map((one) => [one.getAttribute("x"), one.getAttribute("width")]),
  shares: [...document.querySelectorAll(".map-legend b")].map((share) => share.textContent),
  slider: find(".map-steps input").value, hidden: find(".map-steps").hidden,
});
const press = (key) => {
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  return { at: cells().indexOf(document.activeElement), label: document.activeElement.ariaLabel, card: card() };
};
Object.assign(seen, { plans: [state()], keys: {} });
while (!find(".earlier").disabled) { find(".earlier").click(); seen.plans.unshift(state()); }
find(".map-steps input").value = seen.plans.length - 1;
find(".map-steps input").dispatchEvent(new Event("input"));
seen.again = state();
cells()[0].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
seen.pointed = card();
cells()[0].focus();
for (const key of ["ArrowRight", "ArrowDown", "End", "Home", "ArrowUp", "ArrowLeft", "ArrowLeft", "x"]) {
  (seen.keys[key] ??= []).push(press(key));
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replanned") / "run"
    return write_replanned_run(folder, 1200, 400, blocks=24, linears=SPLIT, prefix="model.layers")


@pytest.fixture(scope="module")
def page(run):
    return write_report(run)


@pytest.fixture(scope="module")
def seen(page, tmp_path_factory):
    """What the driver saw."""
    return drive(page, tmp_path_factory.mktemp("driven"), DRIVER)


@pytest.fixture(scope="module")
def data(run):
    record = read_run(run)
    plans = timeline(record.plan, record.plans)
    return map_data(plans, plans[-1].analysis.shares)


def words(data, index, layer, gemm):
    """The classes that a cell of a plan has to have."""
    plan, found = data.plans[index], set()
    certainty = certainty_of(plan, layer, gemm)
    if certainty is not None and certainty < UNSURE:
        found.add("unsure")
    if index and data.plans[index - 1].recipe(layer, gemm) != plan.recipe(layer, gemm):
        found.add("changed")
    return found | {css_class(plan.recipe(layer, gemm))}


@pytest.mark.slow
def test_the_page_runs_under_its_policy(page, tmp_path):
    visited = visit(page, tmp_path)
    assert visited.console == []
    assert visited.urls == []
    assert 'class="map-steps">' in visited.dom
    assert visited.dom.count('role="grid"') == 2


@pytest.mark.slow
def test_every_plan_is_shown_as_it_was(seen, data):
    assert len(seen["plans"]) == len(data.plans) == 4
    for index, (state, plan) in enumerate(zip(seen["plans"], data.plans, strict=True)):
        assert not state["hidden"]
        assert state["slider"] == str(index)
        assert f"({index + 1} of 4)" in state["title"]
        for cell, (classes, text) in zip(data.cells, state["cells"], strict=True):
            assert set(classes.split()) - {"selected"} == words(data, index, *cell)
            assert text == letter(plan.recipe(*cell))
        shares = flop_shares(plan, data.shares)
        expected = [100 * shares.get(name, 0.0) for name in data.formats]
        starts, widths = zip(*[[float(place[:-1]) for place in part] for part in state["bar"]], strict=True)
        assert widths == pytest.approx(expected, abs=0.01)
        assert starts == pytest.approx([sum(expected[:place]) for place in range(len(expected))], abs=0.01)
        assert sum(float(text[:-1]) for text in state["shares"]) == pytest.approx(100, abs=0.2)
        if index:
            changed = num_changed(data.plans[index - 1], plan)
            assert f"{changed} of {len(data.cells)} GEMMs changed" in state["summary"]


def test_the_newest_plan_looks_as_it_was_written(seen, data, page):
    written = re.findall(r'<td class="(q-[^"]*)">([^<]*)</td>', page.read_text(encoding="utf-8"))
    newest = [
        (" ".join(word for word in classes.split() if word != "selected"), text)
        for classes, text in seen["again"]["cells"]
    ]
    assert newest == written[: len(data.cells)]
    assert seen["again"] == seen["plans"][-1]


def card_of(data, index):
    """What the card has to say of a cell of the newest plan."""
    plan, (layer, gemm) = data.plans[-1], data.cells[index]
    facts = cell_facts(plan, layer, gemm)
    return {
        "where": f"{layer} {gemm}", "harm": facts.harm, "loss": facts.loss, "update": facts.update,
        "other": f"{facts.other}: {facts.change} harm", "certainty": facts.certainty,
        "flops": percent(gemm_share(plan.analysis, layer)), "reason": plan.reasons[layer],
    }  # fmt: skip


def test_the_card_tells_of_the_cell_under_the_pointer_and_the_keyboard(seen, data):
    assert card_of(data, 0).items() <= seen["pointed"].items()
    for presses in seen["keys"].values():
        for press in presses:
            assert card_of(data, press["at"]).items() <= press["card"].items()
            assert press["label"].startswith(" ".join(data.cells[press["at"]]))


def test_arrows_move_over_the_map(seen):
    row = 7 * 3
    places = {key: [press["at"] for press in presses] for key, presses in seen["keys"].items()}
    assert places == {
        "ArrowRight": [1], "ArrowDown": [row + 1], "End": [2 * row - 1], "Home": [row], "ArrowUp": [0],
        "ArrowLeft": [0, 0], "x": [0],
    }  # fmt: skip


@pytest.mark.slow
def test_nothing_is_wider_than_a_phone(page, tmp_path):
    harness = tmp_path / "harness.html"
    script = (
        "onload = () => { const page = document.querySelector('iframe').contentDocument.documentElement;"
        "document.title = page.scrollWidth }"
    )
    frame = f'<iframe src="{page.as_uri()}" width="380" height="900"></iframe>'
    harness.write_text(f"<!doctype html><body>{frame}<script>{script}</script>")
    dom = visit(harness, tmp_path, "--allow-file-access-from-files").dom
    assert 0 < int(re.search(r"<title>(\d+)</title>", dom)[1]) <= 380


@pytest.mark.slow
def test_without_scripts_the_newest_plan_and_its_values_remain(page, data, tmp_path):
    text = re.sub(r"<script>.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    bare = tmp_path / "bare.html"
    bare.write_text(text, encoding="utf-8")
    dom = visit(bare, tmp_path).dom
    assert 'class="map-steps" hidden' in dom
    assert len(re.findall(r'<td class="q-', dom)) == len(data.cells)
    values = re.search(r"<summary>Values: format, harm.*?</details>", dom, re.DOTALL)[0]
    assert values.count('<th scope="row">') == len(data.layers)
