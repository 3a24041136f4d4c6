"""The map as HTML: a cell for every GEMM, marked as the plan and its analysis say."""

import json
import math
import re

import pytest
from fake_run import SPLIT, analysis, plan_of, start_plan, write_analysis, write_replanned_run, write_run
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from test_page import EVIL, Tags

from scrimp.precision import GEMMS, RECIPES
from scrimp.report.precision_cells import CELLS, cell_facts, map_data, num_changed, payload, percent, signed
from scrimp.report.precision_choices import UNSURE
from scrimp.report.precision_map import precision_map, share_bar
from scrimp.report.precision_palette import LETTERS, css_class
from scrimp.report.precision_record import PlanAt, choices_of, timeline
from scrimp.report.read_run import read_run


def drawn(markup):
    """(classes, letter) of every cell of the map, in order."""
    tables = re.findall(r'<table class="pmap.*?</table>', str(markup), re.DOTALL)
    return [
        (set(classes.split()), text)
        for table in tables
        for classes, text in re.findall(r'<td class="(q-[^"]*)">([^<]*)</td>', table)
    ]


def data_of(folder, shares=None):
    run = read_run(folder)
    return map_data(timeline(run.plan, run.plans), shares)


def plan_at(gemms):
    return PlanAt(step=None, choices=choices_of(gemms))


@examples(60)
@given(
    st.dictionaries(
        st.sampled_from([f"blocks.{n}.{name}" for n in range(4) for name in ("a", "b.c")] + ["head", "x"]),
        st.tuples(*[st.sampled_from([*RECIPES, "int4"])] * 3),
        min_size=1,
    )
)
def test_every_gemm_has_a_cell_of_its_format(choices):
    data = map_data([PlanAt(step=None, choices=choices)], None)
    cells = drawn(precision_map(data))
    assert sorted(data.cells) == sorted((layer, gemm) for layer in choices for gemm in GEMMS)
    for (layer, gemm), (classes, text) in zip(data.cells, cells, strict=True):
        name = dict(zip(GEMMS, choices[layer], strict=True))[gemm]
        assert classes == {css_class(name)}
        assert text == LETTERS.get(name, "?")


def test_a_uniform_plan_is_drawn(tmp_path):
    gemms = {f"blocks.{n}.mlp.up": dict.fromkeys(GEMMS, "bf16") for n in range(3)}
    text = str(precision_map(map_data([plan_at(gemms)], None)))
    assert [text for _, text in drawn(text)] == ["b"] * 9
    assert "<b>100.0%</b>" in text
    assert "map-steps" not in text
    assert "harm" not in text


def test_uncertain_and_changed_cells_are_marked(tmp_path):
    run = write_run(tmp_path / "run", 5)
    found = analysis(400)
    (run / "plan.json").write_text(json.dumps(start_plan(found)))
    write_analysis(run, found)
    data = data_of(run)
    marked = dict(zip(data.cells, drawn(precision_map(data)), strict=True))
    unsure = 0
    for layer, row in found["layers"].items():
        for gemm, choice in row["gemms"].items():
            classes = marked[layer, gemm][0]
            assert ("unsure" in classes) == (choice["certainty"] < UNSURE)
            assert ("changed" in classes) == (choice["choice"] != "fp8")
            unsure += choice["certainty"] < UNSURE
    assert 0 < unsure < len(data.cells)
    assert f"{unsure} of 72 choices less than 80% certain" in str(precision_map(data))
    changed = sum("changed" in classes for classes, _ in marked.values())
    assert num_changed(*data.plans) == changed
    assert f"{changed} of 75 GEMMs changed" in str(precision_map(data))


def test_an_eighty_block_model_fits_with_labels_that_do_not_touch(tmp_path):
    found = analysis(400, blocks=80, linears=SPLIT, prefix="model.layers", stages=8)
    run = write_run(tmp_path / "run", 5)
    (run / "plan.json").write_text(json.dumps(start_plan(found)))
    write_analysis(run, found, plan_of(found))
    text = str(precision_map(data_of(run)))
    assert len(drawn(text)) == 80 * 7 * 3 + 3
    assert 'class="pmap dense many"' in text
    labels = re.findall(r'<th scope="row">(\d+)</th>', text)
    assert labels == [*map(str, range(0, 80, 5)), "79"]
    hidden = re.findall(r'<th scope="row"><span class="unseen">(\d+)</span>', text)
    assert len(hidden) + len(labels) == 80
    assert text.count('<tr class="stage">') == 7
    assert len(text) < 300_000


def test_a_model_too_large_to_draw_says_what_is_missing():
    gemms = {f"blocks.{n}.x{k}": dict.fromkeys(GEMMS, "fp8") for n in range(300) for k in range(8)}
    data = map_data([plan_at(gemms)], None)
    assert len(data.cells) == CELLS
    assert data.left_out == 2400 - CELLS // 3
    assert "400 more layers stand in plan.json" in str(precision_map(data))


def test_the_script_gets_every_plan_as_it_was(tmp_path):
    data = data_of(write_replanned_run(tmp_path / "run", 1200, 400))
    found = json.loads(json.dumps(payload(data)))
    assert len(found["plans"]) == len(data.plans) == 4
    for plan, row in zip(data.plans, found["plans"], strict=True):
        names = [found["names"][int(code, 36)] for code in row["formats"]]
        assert names == [plan.recipe(layer, gemm) for layer, gemm in data.cells]
        assert sum(row["shares"]) == pytest.approx(100, abs=0.01)
        if plan.analysis is None:
            assert "facts" not in row
            continue
        texts = [cell.split(";") for cell in row["facts"].split("|")]
        for (layer, gemm), text in zip(data.cells, texts, strict=True):
            facts = cell_facts(plan, layer, gemm)
            if facts is None:
                assert text == [""]
                continue
            assert text[:3] == [facts.harm, facts.loss, facts.update]
            assert found["names"][int(text[3], 36)] == facts.other
            assert text[4:] == [facts.change, facts.certainty]


def test_the_card_tells_of_the_gemm_that_does_most_harm(tmp_path):
    run = write_run(tmp_path / "run", 5)
    found = analysis(400)
    write_analysis(run, found)
    harms = {
        (layer, gemm): row["harm"][row["choice"]]
        for layer, entry in found["layers"].items()
        for gemm, row in entry["gemms"].items()
    }
    layer, gemm = max(harms, key=harms.get)
    data = data_of(run)
    text = str(precision_map(data))
    assert data.cells[data.most_harmful] == (layer, gemm)
    assert f"<b>{layer}</b> <span>{gemm}</span>" in text
    assert f'<dd data-field="harm">{cell_facts(data.plans[-1], layer, gemm).harm}</dd>' in text


@pytest.mark.slow
def test_figures_of_old_plans_are_left_out_before_the_page_gets_heavy(tmp_path):
    run = write_run(tmp_path / "run", 5)
    for step in range(1, 13):
        write_analysis(run, analysis(step, blocks=80, linears=SPLIT, prefix="model.layers"))
    found = payload(data_of(run))
    held = ["facts" in plan for plan in found["plans"]]
    assert held == sorted(held)
    assert 0 < sum(held) < len(held)
    assert all(plan["formats"] for plan in found["plans"])
    assert len(json.dumps(found, ensure_ascii=False)) < 600_000


def test_text_from_outside_stays_text():
    text = " ".join(EVIL)
    data = map_data([plan_at({text: dict.fromkeys(GEMMS, text), "blocks.0.<b>": {"fprop": "<i>"}})], None)
    markup = str(precision_map(data))
    assert {tag for tag, _ in Tags(markup).found} <= {
        "div", "p", "b", "span", "svg", "rect", "ul", "li", "table", "thead", "tbody", "tr", "th", "td",
        "dl", "dt", "dd", "h3", "details", "summary",
    }  # fmt: skip
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", markup)
    names = json.loads(
        next(found["data-precision"] for _, found in Tags(markup).found if "data-precision" in found)
    )
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", json.dumps(names, ensure_ascii=False)
    )
    assert not any(re.search("[\x00-\x08]", name) for name in [*names["layers"], *names["names"]])


@examples(60)
@given(st.dictionaries(st.sampled_from([*RECIPES]), st.floats(0.001, 1), min_size=1))
def test_the_bar_is_full(weights):
    total = sum(weights.values())
    shares = {name: weight / total for name, weight in weights.items()}
    spans = re.findall(r'x="([\d.]+)%" width="([\d.]+)%"', str(share_bar(list(shares), shares, "x", 12)))
    assert sum(float(width) for _, width in spans) == pytest.approx(100, abs=0.01)
    assert [float(x) for x, _ in spans] == sorted(float(x) for x, _ in spans)


def test_numbers_have_signs_and_two_digits():
    assert [signed(value) for value in (0.00312, -2.14e-5, 0.0)] == ["+0.0031", "−2.1e-5", "+0"]
    assert [percent(value) for value in (0.0064, 0.000076, None)] == ["0.64%", "0.0076%", "–"]


def test_certainty_is_never_rounded_up_over_the_limit(tmp_path):
    run = write_run(tmp_path / "run", 5)
    found = analysis(400)
    layer = next(iter(found["layers"]))
    for gemm, certainty in zip(GEMMS, (0.7999, 0.8, 1.0), strict=True):
        found["layers"][layer]["gemms"][gemm]["certainty"] = certainty
    write_analysis(run, found)
    plan = data_of(run).plans[-1]
    assert [cell_facts(plan, layer, gemm).certainty for gemm in GEMMS] == ["79%", "80%", "100%"]
    assert math.isclose(UNSURE, 0.8)
