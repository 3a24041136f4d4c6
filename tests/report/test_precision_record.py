"""Plans and analyses of a run folder: read as far as they go, with a sentence for the rest."""

import json

import pytest
from fake_run import analysis, plan_of, start_plan, write_analysis, write_replanned_run, write_run

from scrimp.precision import GEMMS
from scrimp.report.precision_record import PLANS_READ, PlanAt, read_plans, timeline
from scrimp.report.read_run import read_run

NAME = "step-00000400.precision.json"


@pytest.fixture
def folder(tmp_path):
    run = write_run(tmp_path / "run", 5)
    write_analysis(run, analysis(400))
    return run


def read(folder):
    notes = []
    return read_plans(folder, notes), notes


def test_everything_that_a_replan_left_is_read(folder):
    (plan,), notes = read(folder)
    found, raw = plan.analysis, analysis(400)
    assert notes == []
    assert plan.step == found.step == 400
    assert found.measured_at == 398
    assert (found.policy, found.granularity, found.formats) == ("snip", "gemm", ("fp8", "nvfp4"))
    assert found.budget == {"fp4_flops": 0.75}
    assert found.predicted == {key: value for key, value in raw["predicted"].items() if value is not None}
    assert found.measured == raw["measured"]
    assert (found.certainty, found.solver, found.gap) == (0.91, "HiGHS", 0.0)
    assert found.seconds == raw["seconds"]
    for layer, row in raw["layers"].items():
        assert found.shares[layer] == row["flops_share"]
        assert found.stages[layer] == row["stage"]
        for gemm in GEMMS:
            mine = found.gemms[layer, gemm]
            assert mine.harm == row["gemms"][gemm]["harm"]
            assert mine.loss == row["gemms"][gemm]["loss"]
            assert mine.update == row["gemms"][gemm]["update"]
            assert mine.certainty == row["gemms"][gemm]["certainty"]
            assert plan.recipe(layer, gemm) == row["gemms"][gemm]["choice"]
    assert plan.recipe("head", "wgrad") == "bf16"
    assert plan.recipe("nothing", "wgrad") == ""


def test_a_run_without_plans_has_none_and_no_note(tmp_path):
    assert read(write_run(tmp_path / "run", 5)) == ((), [])


def test_a_plan_without_analysis_is_shown_with_the_one_before_it(folder):
    (folder / "plans" / "step-00000600.json").write_text(json.dumps(start_plan(analysis(400))))
    plans = timeline({}, read(folder)[0])
    assert [plan.step for plan in plans] == [400, 600]
    assert plans[1].analysis is plans[0].analysis
    assert [plan.has_own_analysis for plan in plans] == [True, False]


def test_an_analysis_without_a_plan_has_its_own_choices(folder):
    (folder / "plans" / "step-00000400.json").unlink()
    (plan,), notes = read(folder)
    layer, row = next(iter(analysis(400)["layers"].items()))
    assert plan.recipe(layer, "dgrad") == row["gemms"]["dgrad"]["choice"]
    assert len(notes) == 1
    assert "no plan beside it" in notes[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "damaged"),
        (json.dumps(analysis(400))[:-500], "damaged"),
        ("[" * 100_000, "damaged"),
        (b"\xff\xfe\x00", "damaged"),
        ("[]", "not a JSON object"),
        ("{}", "not an analysis of this version"),
        ('{"scrimp_precision": 2, "layers": {"a": {}}}', "not an analysis of this version"),
        ('{"scrimp_precision": 1, "layers": []}', "not an analysis of this version"),
        ('{"scrimp_precision": 1, "layers": {"a": 7}}', "3 of 3 GEMMs have no figures"),
        (
            '{"scrimp_precision": 1, "layers": {"a": {"gemms": {"fprop": {"harm": {"fp8": NaN}}}}}}',
            "3 of 3 GEMMs",
        ),
    ],
)
def test_a_bad_analysis_is_a_sentence_and_the_plan_stays(folder, content, words):
    path = folder / "plans" / NAME
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (plan,), notes = read(folder)
    assert plan.choices == {layer: tuple(row[gemm] for gemm in GEMMS) for layer, row in plan_json()}
    assert len(notes) == 1
    assert words in notes[0]
    assert NAME in notes[0]


def plan_json():
    return plan_of(analysis(400))["gemms"].items()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"scrimp_plan": 9}', '{"scrimp_plan": 1, "gemms": 3}']
)
def test_a_bad_plan_is_a_sentence_and_the_analysis_stays(folder, content):
    (folder / "plans" / "step-00000400.json").write_text(content)
    (plan,), notes = read(folder)
    assert plan.analysis is not None
    assert len(notes) == 1


def test_values_of_a_wrong_type_are_left_out(folder):
    raw = analysis(400)
    raw |= {
        "policy": 7,
        "formats": "fp8",
        "certainty": 3,
        "solver": [],
        "seconds": {"measure": "x", "solve": 1},
    }
    raw |= {"measured": None, "measured_at": "x", "predicted": [], "budget": {"a": True, "b": 10**400}}
    layer = next(iter(raw["layers"]))
    raw["layers"][layer] |= {"flops_share": -1, "stage": "x"}
    raw["layers"][layer]["gemms"]["fprop"] |= {"certainty": "x", "loss": 3}
    (folder / "plans" / NAME).write_text(json.dumps(raw))
    (plan,), notes = read(folder)
    found = plan.analysis
    assert notes == []
    assert (found.policy, found.formats, found.certainty, found.solver, found.gap) == ("", (), None, "", None)
    assert (found.seconds, found.measured, found.predicted, found.budget) == ({"solve": 1.0}, {}, {}, {})
    assert layer not in found.shares
    assert layer not in found.stages
    assert found.gemms[layer, "fprop"].certainty is None
    assert found.gemms[layer, "fprop"].loss == {}


def test_files_of_others_are_passed_over(folder):
    for name in ("notes.txt", "step-x.json", "step-400.json.partial", "final.precision.json"):
        (folder / "plans" / name).write_text("?")
    plans, notes = read(folder)
    assert [plan.step for plan in plans] == [400]
    assert notes == []


def test_a_folder_in_the_place_of_a_file_is_a_sentence(folder):
    (folder / "plans" / NAME).unlink()
    (folder / "plans" / NAME).mkdir()
    plans, notes = read(folder)
    assert plans[0].analysis is None
    assert "cannot be read" in notes[0]


def test_of_many_plans_the_first_and_the_newest_are_read(folder):
    one = json.dumps(plan_of(analysis(400)))
    for step in range(500, 500 + PLANS_READ):
        (folder / "plans" / f"step-{step:08}.json").write_text(one)
    plans, notes = read(folder)
    assert [plans[0].step, plans[1].step, plans[-1].step] == [400, 501, 499 + PLANS_READ]
    assert len(plans) == PLANS_READ
    assert f"{PLANS_READ + 1} plans" in notes[0]


def test_many_bad_files_are_few_sentences(folder):
    for step in range(40):
        (folder / "plans" / f"step-{step:08}.json").write_text("{")
    notes = read(folder)[1]
    assert len(notes) == 9
    assert "32 more" in notes[-1]


def test_the_first_plan_is_the_start_unless_it_is_the_newest(tmp_path):
    run = read_run(write_replanned_run(tmp_path / "run", 1200, 400))
    assert run.notes == []
    assert [plan.step for plan in timeline(run.plan, run.plans)] == [None, 400, 800, 1000]
    newest = plan_of(analysis(400))
    only = (PlanAt(step=400, choices={layer: tuple(row[g] for g in GEMMS) for layer, row in plan_json()}),)
    assert [plan.step for plan in timeline(newest, only)] == [400]
    assert [plan.step for plan in timeline({}, ())] == []
