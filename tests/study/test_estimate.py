"""Hours, places and probes, without training anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import PROBE, row_for, rows_for, study_of

from scrimp.errors import ConfigError, DataError
from scrimp.study import estimate
from scrimp.study.announce import announcement, visible_text
from scrimp.study.comparisons import visible_difference
from scrimp.study.estimate import (
    Probe,
    done_of,
    places_here,
    probe_all,
    seconds_of,
    steps_left,
    threads_of,
    with_micro_batch,
    within,
)
from scrimp.study.rows import append_row

PROBES = dict.fromkeys("abc", PROBE)  # 2 s until the first step, 0.5 s each of 8 steps


def test_hours_are_those_of_all_runs_in_their_places() -> None:
    study = study_of()
    assert seconds_of(study, PROBES, {}, 1) == 9 * 6.0
    assert seconds_of(study, PROBES, {}, 3) == 3 * 6.0
    assert seconds_of(study, PROBES, {("a", 0): 8, ("b", 0): 8}, 1) == 7 * 6.0
    assert seconds_of(study, PROBES, {}, 100) == 6.0  # no run is faster than itself
    assert steps_left(study, {("a", 0): 8}) == (8, 64)


def test_so_many_hours_have_room_for_so_many_seeds() -> None:
    """Three runs of 6 s for each seed."""
    study = study_of()
    for places, seconds, seeds in ((1, 36.0, 2), (1, 53.9, 2), (1, 54.0, 3), (2, 45.0, 5), (1, 3600.0, 200)):
        found = within(study, PROBES, seconds / 3600, places)
        assert (len(found.seeds), found.seeds[:3]) == (seeds, study.seeds[:seeds]), (places, seconds)
    with pytest.raises(ConfigError, match=r"no room for 2 seeds of .* 36"):
        within(study, PROBES, 35.9 / 3600, 1)


def test_hours_of_halving_are_those_of_rounds() -> None:
    study = study_of("abcde", seeds=1, tail="[halving]\nfactor = 2\nrounds = 2\n")
    # All five to step 2, two of four and the control to 4, one and the control to 8.
    assert steps_left(study, {}) == (5 + 3 + 2, 5 * 2 + 3 * 2 + 2 * 4)
    assert steps_left(study, {("a", 0): 4})[1] == (5 * 2 + 3 * 2 + 2 * 4) - 4


def test_as_many_runs_go_at_once_as_cores_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "cores", lambda: 8)
    monkeypatch.setattr(estimate, "host_memory_available", lambda: 100 << 20)
    study = study_of()
    assert threads_of(study, Path("none")) == 1
    assert len(places_here(study, PROBES, 1, None)[0]) == 8
    assert places_here(study, PROBES, 2, None) == ([{}] * 4, "8 cores, 2 for each")
    large = dict.fromkeys("abc", replace(PROBE, host_bytes=40 << 20))
    assert places_here(study, large, 1, None) == ([{}] * 2, "the host's memory")
    assert places_here(study, PROBES, 1, 3) == ([{}] * 3, "--at-once")
    assert len(places_here(study_of(seeds=1), PROBES, 1, None)[0]) == 3


def test_runs_that_are_timed_go_alone_with_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "cores", lambda: 8)
    study = study_of(head='figure = "tokens_per_second"')
    assert threads_of(study, Path("none")) == 8
    assert len(places_here(study, PROBES, 8, None)[0]) == 1
    assert threads_of(study_of(head="threads = 3"), Path("none")) == 3


def test_gpus_are_shared_as_far_as_their_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "cores", lambda: 64)
    monkeypatch.setattr(estimate, "host_memory_available", lambda: 1 << 40)
    monkeypatch.setattr(estimate, "_gpus", lambda: [("0", 80 << 30), ("1", 30 << 30)])
    probes = dict.fromkeys("abc", replace(PROBE, device_bytes=24 << 30))
    environments, why = places_here(study_of(), probes, 1, None)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments] == ["0", "1", "0", "0"]
    assert why == "the memory of GPUs"


def test_a_gpu_without_room_for_a_run_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "cores", lambda: 64)
    monkeypatch.setattr(estimate, "host_memory_available", lambda: 1 << 40)
    monkeypatch.setattr(estimate, "_gpus", lambda: [("0", 10 << 30), ("1", 30 << 30)])
    probes = dict.fromkeys("abc", replace(PROBE, device_bytes=24 << 30))
    assert places_here(study_of(), probes, 1, None)[0] == [{"CUDA_VISIBLE_DEVICES": "1"}]
    # Where none has room the freest one is tried: plans may be wrong by a little.
    probes = dict.fromkeys("abc", replace(PROBE, device_bytes=40 << 30))
    assert places_here(study_of(), probes, 1, None)[0] == [{"CUDA_VISIBLE_DEVICES": "1"}]


def test_each_cost_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[str] = []

    def probe(study: object, variant: object, settings: object, threads: int, *, trusts: bool) -> Probe:
        probed.append(variant.name)  # type: ignore[attr-defined]
        return replace(PROBE, threads=threads)

    monkeypatch.setattr(estimate, "_probe", probe)
    study = study_of()  # learning rates alone differ: one cost
    said: list[str] = []
    assert probe_all(study, tmp_path, 1, said.append, trusts=False) == PROBES
    assert probed == ["a"]
    assert len(said) == 1
    probe_all(study, tmp_path, 1, said.append, trusts=False)
    assert probed == ["a"]
    probe_all(study, tmp_path, 2, said.append, trusts=False)  # other threads, another cost
    assert probed == ["a", "a"]
    (tmp_path / estimate.PROBES).write_text("damaged")
    probe_all(study, tmp_path, 1, said.append, trusts=False)
    assert probed == ["a", "a", "a"]


@pytest.mark.parametrize("trunk", ["", "[trunk]\ntrain.steps = 4\n"])
def test_a_run_that_goes_on_is_probed_without_what_only_such_a_run_can_have(
    trunk: str,
) -> None:
    base = "" if trunk else 'model.weights = "run:a"\n'
    study = study_of(
        tail=trunk + f'[[variants]]\nname = "on"\n{base}adapter.rank = 4\noptimizer.from_weights = false\n'
    )
    settings = estimate._settings_of_probe(study, study.named("on"))
    assert "train.steps" in settings
    assert not {"model.weights", "adapter.rank", "optimizer.from_weights"} & set(settings)
    of_a_folder = study_of(tail='[[variants]]\nname = "on"\nmodel.weights = "folder"\nadapter.rank = 4\n')
    assert estimate._settings_of_probe(of_a_folder, of_a_folder.named("on"))["adapter.rank"] == 4


def test_variants_that_would_read_other_data_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_of(tail='[[variants]]\nname = "wide"\nmodel.width = 64\n')
    monkeypatch.setattr(
        estimate,
        "_probe",
        lambda study, variant, settings, threads, *, trusts: replace(PROBE, data=variant.name[:1]),
    )
    with pytest.raises(DataError, match="wide and a would read different data"):
        probe_all(study, tmp_path, 1, lambda text: None, trusts=False)


def test_a_trunk_may_read_another_text_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        estimate,
        "_probe",
        lambda study, variant, settings, threads, *, trusts: replace(
            PROBE, data=str(variant.name == "trunk")
        ),
    )
    fine_tuned = study_of(tail='[trunk]\ndata.source = "copy"\n')
    assert set(probe_all(fine_tuned, tmp_path, 1, lambda text: None, trusts=False)) == {
        "trunk",
        "a",
        "b",
        "c",
    }
    (tmp_path / estimate.PROBES).unlink()
    same = study_of(tail='[trunk]\nprecision = "bf16"\n')
    with pytest.raises(DataError, match="trunk and a would read different data"):
        probe_all(same, tmp_path, 1, lambda text: None, trusts=False)


def test_a_micro_batch_that_is_given_stays() -> None:
    assert with_micro_batch({"train.steps": 8}, PROBE) == {"train.steps": 8, "train.micro_batch": 4}
    assert with_micro_batch({"train.micro_batch": 2}, PROBE) == {"train.micro_batch": 2}
    assert with_micro_batch({"memory.split": "fastest"}, PROBE) == {"memory.split": "fastest"}


def test_a_study_tells_its_hours_and_what_it_can_see() -> None:
    study = study_of(head="scatter = 0.1")
    lines = announcement(study, {}, PROBES, places=2, limited_by="2 cores", seconds=7200.0, threads=1)
    assert lines[0] == "mine: 3 variants x 3 seeds = 9 runs of 8 steps, held-out loss, control a"
    assert "a, b, c: 500 ms a step, 6.00 s a run" in lines[1]
    assert "2 at once (2 cores), 1 thread each: about 2h 00m" in lines[2]
    visible = visible_difference(3, 0.1, alpha=0.05, power=0.8)
    assert f"smallest visible difference: {visible:.2f} nats a token (with 3 seeds" in lines[3]
    assert "as its file says" in lines[3]


def test_runs_of_other_seeds_are_not_among_those_that_are_done() -> None:
    rows = rows_for(study_of(seeds=5), {"a": [3.0, 3.0, 3.0, 3.0, 3.0]})
    lines = announcement(study_of(), rows, PROBES, places=2, limited_by="2 cores", seconds=7200.0, threads=1)
    assert lines[1] == "3 of them are done"


def test_what_is_visible_follows_from_pairs_that_are_done() -> None:
    study = study_of(head="scatter = 0.1\nmatters = 0.01")
    rows = rows_for(study, {"a": [3.0, 3.0, 3.0], "b": [3.1, 3.3, 3.2], "c": [2.9, 3.0, 3.1]})
    text = visible_text(study, rows)
    assert "scatter 0.1, of the pairs that are done" in text
    assert "to see 0.01000, which matters, takes" in text
    assert "times the scatter" in visible_text(study_of(), {})
    assert "give two or more" in visible_text(study_of(seeds=1), {})


def test_rows_with_errors_are_still_to_be_done() -> None:
    study = study_of()
    rows = {row.key: row for row in (row_for(study, "a", 0, None), row_for(study, "b", 0, 3.0))}
    assert done_of(rows) == {("b", 0): 8}
    assert steps_left(study, done_of(rows))[0] == 8


def test_threads_stay_those_that_a_folder_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        estimate,
        "_probe",
        lambda study, variant, settings, threads, *, trusts: replace(PROBE, threads=threads),
    )
    monkeypatch.setattr(estimate, "cores", lambda: 24)
    study = study_of()
    assert threads_of(study, tmp_path) == 2
    probe_all(study, tmp_path, 2, lambda text: None, trusts=False)
    assert threads_of(study.with_seeds(8), tmp_path) == 1  # so far nothing but a dry run
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a-seed0.toml").write_text("")
    assert threads_of(study.with_seeds(8), tmp_path) == 2
    (tmp_path / estimate.PROBES).unlink()
    append_row(tmp_path, replace(row_for(study, "a", 0, 3.0), environment={"threads": 2}))
    assert threads_of(study.with_seeds(8), tmp_path) == 2
    with pytest.raises(ConfigError, match="other threads than the study"):
        threads_of(replace(study, threads=4), tmp_path)


def test_hours_begin_with_the_seeds_that_a_bootstrap_needs() -> None:
    study = study_of(seeds=6, head='interval = "bootstrap"')
    assert len(within(study, PROBES, 6 * 18.0 / 3600, 1).seeds) == 6
    with pytest.raises(ConfigError, match="no room for 6 seeds"):
        within(study, PROBES, 100.0 / 3600, 1)


def test_another_vocabulary_of_the_trunk_is_another_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that go on from it read its tokenizer, whose size their own settings do not have."""
    monkeypatch.setattr(
        estimate,
        "_probe",
        lambda study, variant, settings, threads, *, trusts: replace(
            PROBE, data=str(settings["data.vocab_size"])
        ),
    )
    for size in (300, 600):
        study = study_of(tail=f"[trunk]\ndata.vocab_size = {size}\n")
        assert {one.data for one in probe_all(study, tmp_path, 1, print, trusts=False).values()} == {
            str(size)
        }
