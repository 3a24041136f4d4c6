"""Reading a run folder as far as it goes, and the summary of what was found."""

import json
import math

import numpy as np
import pytest
from fake_run import metrics, write_lines, write_run

from scrimp.errors import CheckpointError
from scrimp.report.read_run import COLUMNS, read_run
from scrimp.report.summary import summarise


def test_a_whole_run_is_read_without_a_note(tmp_path):
    run = read_run(write_run(tmp_path / "run", 50))
    assert run.notes == []
    assert run.num_steps == 50
    assert run.setting("optimizer.lr") == 0.003
    assert set(run.columns) == set(COLUMNS)
    np.testing.assert_array_equal(run.columns["loss"], [record["loss"] for record in metrics(50)])


@pytest.mark.parametrize("name", ["config.toml", "plan.json", "metrics.jsonl"])
def test_a_missing_file_is_noted(tmp_path, name):
    folder = write_run(tmp_path / "run", 5)
    (folder / name).unlink()
    assert any(name in note for note in read_run(folder).notes)


@pytest.mark.parametrize("content", ["", "{", "[]", "\0\0", '{"gemms": NaN}', "[" * 100_000])
def test_a_damaged_plan_is_noted_or_empty(tmp_path, content):
    folder = write_run(tmp_path / "run", 5)
    (folder / "plan.json").write_text(content)
    run = read_run(folder)
    assert not run.plan or run.plan == {"gemms": None}


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not there"):
        read_run(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="not a run"):
        read_run(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not there"):
        read_run(tmp_path / "file")


def test_steps_that_were_run_again_replace_the_first_version(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    again = [{"step": 4, "loss": 40.0}, {"step": 5, "loss": 50.0}, {"step": 6, "loss": 60.0}]
    write_lines(folder / "metrics.jsonl", [*metrics(5), *again])
    run = read_run(folder)
    assert run.columns["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert run.columns["loss"][3:].tolist() == [40, 50, 60]


@pytest.mark.parametrize(("device", "first"), [("cuda:0", 7e9), ("cpu", math.nan)])
def test_the_allocators_peak_of_earlier_versions_goes_on_as_that_of_tensors(tmp_path, device, first):
    folder = write_run(tmp_path / "run", 2)
    (folder / "config.toml").write_text(f'device = "{device}"\n')
    write_lines(
        folder / "metrics.jsonl",
        [
            {"step": 1, "peak_device_bytes": 7e9},
            {"step": 2, "tensor_peak_bytes": 8e9, "peak_device_bytes": 1},
        ],
    )
    np.testing.assert_array_equal(read_run(folder).columns["tensor_peak_bytes"], [first, 8e9])


def test_values_of_a_wrong_type_are_missing(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    bad = [
        {"step": 1, "loss": "x", "lr": [1], "tokens": 10**400, "skipped": True},
        {"step": "2"},
        {"loss": 1},
    ]
    write_lines(folder / "metrics.jsonl", bad)
    run = read_run(folder)
    assert run.num_steps == 1
    assert np.isnan([run.columns[name][0] for name in ("loss", "lr", "tokens")]).all()
    assert run.columns["skipped"][0] == 1
    assert "2 damaged line(s)" in " ".join(run.notes)


def ending(folder, *events):
    write_lines(folder / "events.jsonl", [{"kind": "start", "step": 0}, *events])
    summary = summarise(read_run(folder))
    return summary.state, summary.ending


def test_the_ending_is_read_from_the_events(tmp_path):
    folder = write_run(tmp_path / "run", 8)
    finish = {"kind": "finish", "step": 8, "reason": "all steps done"}
    signal = {"kind": "signal", "step": 8, "reason": "SIGTERM"}
    assert ending(folder, finish) == ("finished", "Finished: all steps done")
    assert ending(folder, signal)[0] == "interrupted"
    assert ending(folder)[0] == "open"
    assert ending(folder, signal, {"kind": "resume", "step": 8})[0] == "open"
    assert ending(folder, signal, {"kind": "resume", "step": 8}, finish)[0] == "finished"
    write_lines(folder / "metrics.jsonl", metrics(8)[:3])
    state, sentence = ending(folder, {"kind": "finish", "step": 3, "reason": "loss was not finite"})
    assert (state, sentence) == ("stopped", "Stopped after step 3: loss was not finite")


def test_the_summary_is_what_the_records_say(tmp_path):
    folder = write_run(tmp_path / "run", 300)
    records = metrics(300)
    summary = summarise(read_run(folder))
    assert summary.loss == records[-1]["loss"]
    assert summary.loss_mean == pytest.approx(np.mean([record["loss"] for record in records[-10:]]))
    assert summary.tokens_per_s == pytest.approx(np.median([record["tokens_per_s"] for record in records]))
    assert summary.tensor_peak_bytes == max(record["tensor_peak_bytes"] for record in records)
    assert summary.num_skipped == 1
    assert summary.eval_step == 300
    assert summary.bits_per_byte == records[-1]["eval_bits_per_byte"]


def test_evaluations_of_events_and_records_are_one_series(tmp_path):
    folder = write_run(tmp_path / "run", 20)
    event = {"kind": "evaluation", "step": 21, "loss": 2.5, "bits_per_byte": 1.25}
    write_lines(folder / "events.jsonl", [event, {"kind": "evaluation", "step": None, "loss": 1}])
    steps, losses = read_run(folder).evaluations("eval_loss", "loss")
    assert steps.tolist() == [*range(2, 21, 2), 21]
    assert losses[-1] == 2.5
    assert summarise(read_run(folder)).bits_per_byte == 1.25


def test_the_full_form_follows_from_the_configuration(tmp_path):
    folder = write_run(tmp_path / "run", 20)
    summary = summarise(read_run(folder))
    assert summary.parameters > 1e6
    assert 1.0 < summary.mfu_full / summary.mfu_causal < 1.3
    noted = {"kind": "start", "step": 0, "flops_per_token_full": 3.0, "flops_per_token_causal": 2.0}
    write_lines(folder / "events.jsonl", [{**noted, "parameters": 77}])
    summary = summarise(read_run(folder))
    assert summary.mfu_full == pytest.approx(1.5 * summary.mfu_causal)
    assert summary.parameters == 77
    (folder / "config.toml").write_text(json.dumps({}))
    (folder / "events.jsonl").unlink()
    assert summarise(read_run(folder)).mfu_full is None
