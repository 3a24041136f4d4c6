"""The section around the map: its place on the page, figures, nearest choices, history, bad input."""

import json
import re

import pytest
from fake_run import analysis, plan, start_plan, write_analysis, write_lines, write_replanned_run, write_run
from test_page import EVIL, Tags

from scrimp.report import write_report
from scrimp.report.precision_choices import nearest
from scrimp.report.precision_record import timeline
from scrimp.report.precision_section import precision_section
from scrimp.report.read_run import read_run


def headings(text):
    return re.findall(r"<h2[^>]*>([^<]*)</h2>", text)


def plain(markup):
    return re.sub(r"\s+", " ", Tags(str(markup)).text)


def rows_of(markup, title):
    """The cells of the table that follows a heading."""
    part = str(markup).split(f">{title}", 1)[1]
    table = re.search(r"<table.*?</table>", part, re.DOTALL)[0]
    return [
        [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)
    ]


@pytest.fixture(scope="module")
def replanned(tmp_path_factory):
    return write_replanned_run(tmp_path_factory.mktemp("replanned") / "run", 1600, 400)


def test_the_page_opens_with_what_was_learned_and_then_the_map(replanned):
    text = write_report(replanned).read_text(encoding="utf-8")
    assert headings(text)[:4] == ["Training", "Samples", "Precision map", "Plan"]
    ids = [found["id"] for _, found in Tags(text).found if "id" in found]
    assert len(ids) == len(set(ids))
    assert len(text) < 600_000


def test_without_a_plan_there_is_no_map(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    (folder / "plan.json").unlink()
    assert "Precision map" not in headings(write_report(folder).read_text(encoding="utf-8"))


def test_predicted_and_measured_stand_beside_the_budget(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    found = analysis(400)
    write_analysis(folder, found)
    rows = {row[0]: row[1:] for row in rows_of(precision_section(read_run(folder)), "Predicted and measured")}
    assert rows["linear FLOPs in 4 bit"][:2] == ["75.0%", f"{found['predicted']['fp4_flops']:.1%}"]
    guess, fact = (found[key]["loss_divergence"] for key in ("predicted", "measured"))
    assert [float(cell) for cell in rows["loss divergence"][1:3]] == pytest.approx([guess, fact], rel=0.005)
    assert rows["loss divergence"][3] == f"{fact / guess - 1:+.1%}"
    assert "time per step" not in rows
    text = plain(precision_section(read_run(folder)))
    for words in ("snip, per GEMM", "fp8, nvfp4", "HiGHS, gap 0.00%", "2.10 s measuring", "91.0%"):
        assert words in text
    assert "Not measured yet" not in text


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (
            {
                "batches": 2,
                "intervals": {"loss_divergence": [0.0009, 0.0013], "weight_divergence": [0.02, 0.03]},
            },
            "loss divergence 9e-4 to 0.0013, weight divergence 0.020 to 0.030, from 2 batches",
        ),
        ({"batches": 1, "intervals": {}}, "none: one batch was measured"),
        ({"intervals": {"loss_divergence": [2, 1], "step": ["a", "b"], "more": 3}}, None),
        ({"intervals": [1, 2], "batches": "two"}, None),
        ({}, None),
    ],
)
def test_how_far_predictions_may_be_off_is_shown_where_it_is_known(tmp_path, facts, says):
    folder = write_run(tmp_path / "run", 5)
    write_analysis(folder, analysis(400) | facts)
    text = plain(precision_section(read_run(folder)))
    assert ("95% interval" in text) == (says is not None)
    assert says is None or says in text


def test_what_is_not_measured_says_so(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    found = analysis(400, measured=False)
    found["solver"]["note"] = "HiGHS stopped after 9 nodes"
    write_analysis(folder, found)
    text = plain(precision_section(read_run(folder)))
    assert "Not measured yet" in text
    assert "HiGHS stopped after 9 nodes" in text


def test_the_nearest_choices_are_a_table(replanned):
    run = read_run(replanned)
    newest = timeline(run.plan, run.plans)[-1]
    rows = rows_of(precision_section(run), "Nearest choices")
    found = [(row[0], row[1], row[2], row[3]) for row in rows if len(row) == 8][1:]
    expected = [move for way in ("promotion", "demotion") for move in nearest(newest, way, 8)]
    assert found == [(move.layer, move.gemm, move.now, move.other) for move in expected]
    assert [row[0] for row in rows if len(row) == 1] == [
        "Promotions that would save most harm for their FLOPs",
        "Demotions that would cost least harm for their FLOPs",
    ]


def test_all_plans_and_their_history_are_told(replanned):
    section = precision_section(read_run(replanned))
    plans = rows_of(section, "All analysed plans")
    assert [row[0] for row in plans[1:]] == ["400", "800", "1,200"]
    assert plans[3][5].endswith("/ –")
    history = rows_of(section, "History of re-plans")
    kinds = [(row[0], row[1]) for row in history[1:]]
    assert kinds == [
        ("400", "replan"), ("500", "probe"), ("800", "replan"), ("900", "probe"), ("1,200", "replan"),
        ("1,300", "probe"), ("1,400", "promotion"),
    ]  # fmt: skip
    promotion = history[-1]
    assert "promoted to fp8" in promotion[2]
    assert "3.4 times its median" in promotion[3]
    assert int(promotion[4]) > 0
    assert "loss_gap 0.004100" in history[2][2]


def test_a_plan_without_an_event_is_in_the_history(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    found = analysis(400)
    (folder / "plan.json").write_text(json.dumps(start_plan(found)))
    write_analysis(folder, found)
    (row,) = rows_of(precision_section(read_run(folder)), "History of re-plans")[1:]
    assert row[:2] == ["400", "plan"]
    assert int(row[4]) == sum(
        choice["choice"] != "fp8" for layer in found["layers"].values() for choice in layer["gemms"].values()
    )


def test_the_formats_that_a_run_begins_with_are_no_plan_without_an_event(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    found = analysis(400)
    (folder / "plans").mkdir()
    for path in (folder / "plan.json", folder / "plans" / "step-00000000.json"):
        path.write_text(json.dumps(start_plan(found)))
    write_analysis(folder, found)
    rows = rows_of(precision_section(read_run(folder)), "History of re-plans")[1:]
    assert [(row[0], row[2].strip()) for row in rows] == [
        ("0", "the formats before the first plan"),
        ("400", "a plan was left in plans/, without an event"),
    ]


def test_a_move_to_another_device_is_in_the_history(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    found = analysis(400)
    write_analysis(folder, found)
    why = "the plan was made on an A; this is a B: measured anew at step 500"
    told = [
        {"kind": "replan", "step": 400, "reason": "first plan", "changed": 3},
        {"kind": "device", "step": 401, "reason": why},
    ]
    write_lines(folder / "events.jsonl", told)
    rows = rows_of(precision_section(read_run(folder)), "History of re-plans")[1:]
    assert [(row[0], row[1], row[2].strip()) for row in rows] == [
        ("400", "replan", "first plan"),
        ("401", "device", why),
    ]


def test_many_events_are_cut_and_say_so(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    write_lines(folder / "events.jsonl", [{"kind": "probe", "step": step} for step in range(500)])
    section = precision_section(read_run(folder))
    assert len(rows_of(section, "History of re-plans")) == 1 + 30
    assert "470 more events" in plain(section)


def test_without_an_analysis_flops_are_counted_from_the_configuration(tmp_path):
    text = plain(precision_section(read_run(write_run(tmp_path / "run", 5))))
    assert "of the planned layers' linear FLOPs (counted)" in text
    folder = write_run(tmp_path / "other", 5)
    (folder / "config.toml").write_text("[model]\npreset = 7\n")
    assert "of the GEMMs (counted)" in plain(precision_section(read_run(folder)))


@pytest.mark.parametrize(
    "content", ["", '{"scrimp_precision": 1', "[]", "{}", '{"layers": {"a": 1}}', "\0" * 99]
)
def test_a_bad_analysis_gives_a_page_with_a_sentence(tmp_path, content):
    folder = write_run(tmp_path / "run", 5)
    write_analysis(folder, analysis(400))
    (folder / "plans" / "step-00000400.precision.json").write_text(content)
    text = write_report(folder).read_text(encoding="utf-8")
    assert "Precision map" in headings(text)
    assert "step-00000400.precision.json is" in Tags(text).text


def test_hostile_texts_in_analysis_and_events_stay_text(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    text = " ".join(EVIL)
    found = analysis(400)
    rows = found["layers"].pop("blocks.0.mlp.down")
    for row in rows["gemms"].values():
        row["harm"][text] = 1e-9
        row["choice"] = text
    found["layers"][text] = rows
    found |= {"policy": text, "formats": [text] * 3, "granularity": text, "budget": {text: 1}}
    found["predicted"][text] = found["measured"][text] = 2.0
    found["solver"] |= {"name": text, "note": text}
    write_analysis(folder, found, {"scrimp_plan": 1, "gemms": {text: {"fprop": text, "reason": text}}})
    kinds = ("replan", "promotion", "probe")
    events = [{"kind": kind, "step": 5, "sentence": text, "reason": text, "changed": text} for kind in kinds]
    write_lines(folder / "events.jsonl", events)
    page = write_report(folder).read_text(encoding="utf-8")
    assert [tag for tag, _ in Tags(page).found if tag in ("script", "style", "img")] == ["style", "script"]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", page)
    assert len(page) < 1_000_000


def test_an_analysis_of_other_layers_than_the_plan_breaks_nothing(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    write_analysis(folder, analysis(400, prefix="elsewhere"), plan())
    text = plain(precision_section(read_run(folder)))
    assert "the sum over all GEMMs" not in text
    assert "Predicted and measured" in text


@pytest.mark.parametrize(
    ("policy", "budget"), [("last-blocks", {}), ("nvfp4", {}), ("snip", {"divergence": 0.1})]
)
def test_a_budget_that_no_policy_keeps_is_not_shown_as_one(tmp_path, policy, budget):
    folder = write_run(tmp_path / "run", 5)
    write_analysis(folder, analysis(400) | {"policy": policy, "budget": budget})
    section = precision_section(read_run(folder))
    assert (f"{policy}, per GEMM, which keeps no budget" in plain(section)) == (not budget)
    rows = {row[0]: row[1] for row in rows_of(section, "Predicted and measured")}
    assert rows["linear FLOPs in 4 bit"] == "–"
    assert rows.get("divergence, share of the lowest format&#x27;s") == ("0.100" if budget else None)
