"""Checkpoints that come back as they went in, are written in the background, and are pruned."""

from __future__ import annotations

import json
import math
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from scrimp.errors import CheckpointError
from scrimp.training import checkpoint as checkpoints
from scrimp.training import checkpoint_manifest as manifests
from scrimp.training import exact_json, snapshot, tensor_files
from scrimp.training.checkpoint import CheckpointStore

FILES = {"config.toml": 'precision = "fp32"  # größer\n', "plan.json": "{}\n"}


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "model.a.weight": random(5, 7),
        "optimizer.a.exp_avg": random(5, 7),
        "model.scalar": random(),
        "model.empty": torch.empty(0, 3),
        "model.transposed": random(4, 6).t(),
        "model.slice": random(10, 10)[2:5, 1:],
        "model.bf16": random(9).bfloat16(),
        "model.f16": random(9).half(),
        "model.f8": random(9).to(torch.float8_e4m3fn),
        "model.f64": random(3).double(),
        "optimizer.updates": torch.tensor(2**53 + 1),
        "optimizer.flags": torch.tensor([True, False]),
        "random.torch": generator.get_state(),
        'model.name with "spaces"/é': random(2),
    }


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}


def assert_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name].double(), tensor.double()), name


def store_in(path: Path, *, keep_last: int = 2, keep_every: int = 0) -> CheckpointStore:
    return CheckpointStore(path, keep_last=keep_last, keep_every=keep_every)


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.complete()]


def newest(store: CheckpointStore) -> checkpoints.Checkpoint:
    checkpoint, errors = store.latest()
    assert checkpoint is not None
    assert errors == []
    return checkpoint


def test_tensors_state_and_files_come_back_as_they_went_in(tmp_path: Path) -> None:
    store, tensors = store_in(tmp_path), some_tensors()
    state = {
        "position": {"step": 7, "samples": 2**60},
        "lr": 0.1 + 0.2,
        "worst": math.inf,
        "list": [1, None, "ü"],
    }
    store.save(7, tensors, state, FILES, wait=True)
    assert store.poll() == [7]
    assert store.poll() == []
    checkpoint = newest(store_in(tmp_path))
    into = blank(tensors)
    checkpoint.load(into)
    assert_equal(into, tensors)
    assert checkpoint.state == state
    assert {name: checkpoint.read_file(name) for name in FILES} == FILES


def test_loading_keeps_the_callers_tensors_and_their_strides(tmp_path: Path) -> None:
    store, tensors = store_in(tmp_path), some_tensors()
    store.save(1, tensors, {}, {}, wait=True)
    parameter = torch.nn.Parameter(torch.zeros(5, 7))
    into = {**blank(tensors), "model.a.weight": parameter}
    into["model.transposed"] = torch.zeros(4, 6).t()
    before = {name: tensor.data_ptr() for name, tensor in into.items()}
    newest(store).load(into)
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == before
    assert torch.equal(parameter, tensors["model.a.weight"])
    assert torch.equal(into["model.transposed"], tensors["model.transposed"])


@pytest.mark.parametrize("wait", [True, False])
def test_other_tools_read_the_weights_and_nothing_is_pickled(tmp_path: Path, wait: bool) -> None:
    store, tensors = store_in(tmp_path), some_tensors()
    store.save(1, tensors, {}, FILES, wait=wait)
    store.wait()
    folder = newest(store).folder
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    assert_equal(found, tensors)
    for file in folder.iterdir():  # JSON, TOML or safetensors: a length and a JSON header
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        elif file.suffix == ".json":
            json.loads(data)
        else:
            assert file.name in FILES
    assert not list(folder.glob(".*"))


def test_tensors_are_streamed_by_prefix_with_their_full_names(tmp_path: Path) -> None:
    store, tensors = store_in(tmp_path), some_tensors()
    store.save(1, tensors, {}, {}, wait=True)
    found = dict(newest(store).tensors("model."))
    assert_equal(found, {name: t for name, t in tensors.items() if name.startswith("model.")})


def test_large_states_are_cut_into_files_between_groups_and_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        f"{group}.{i}": torch.full((64,), float(i)) for i in range(10) for group in ("model", "optimizer")
    }
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 4 * 256)
    store = store_in(tmp_path)
    store.save(1, tensors, {}, {}, wait=True)
    contents = [set(load_file(file)) for file in sorted(newest(store).folder.glob("*.safetensors"))]
    assert [len(names) for names in contents] == [4, 4, 2, 4, 4, 2]
    assert all(len({name.partition(".")[0] for name in names}) == 1 for names in contents)
    into = blank(tensors)
    newest(store).load(into)
    assert_equal(into, tensors)


@given(st.lists(st.integers(0, 300), max_size=30), st.integers(1, 500))
def test_files_hold_at_most_the_limit_or_one_tensor(sizes: list[int], limit: int) -> None:
    named = {f"{'ab'[i % 2]}.{i}": size for i, size in enumerate(sizes)}
    numbers = tensor_files.assign_files(named, limit)
    assert numbers.keys() == named.keys()
    assert set(numbers.values()) == set(range(1, len(set(numbers.values())) + 1))
    for number in set(numbers.values()):
        held = [named[name] for name in named if numbers[name] == number]
        assert sum(held) <= limit or sum(size > 0 for size in held) == 1


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_floats_of_the_state_round_trip_exactly(first: float, second: float) -> None:
    state = {"a": first, "b": [{"c": second}]}
    text = json.dumps(exact_json.encoded(state), allow_nan=False)
    assert exact_json.decoded(json.loads(text)) == state


def test_nan_in_the_state_is_kept_and_other_objects_are_refused(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.save(1, some_tensors(), {"x": math.nan}, {}, wait=True)
    assert math.isnan(newest(store).state["x"])
    bad: list[dict[Any, Any]] = [{"x": {1, 2}}, {"x": torch.ones(1)}, {"x": {3: "integer key"}}]
    for state in bad:
        with pytest.raises(TypeError):
            store.save(2, some_tensors(), state, {})
    assert steps(store) == [1]


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "../x", "a/b", "x.safetensors"])
def test_a_file_name_that_would_do_harm_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        store_in(tmp_path).save(1, some_tensors(), {}, {name: "text"})


def test_a_type_that_would_not_come_back_is_refused_before_writing(tmp_path: Path) -> None:
    scales = torch.ones(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(TypeError, match=r"model\.scales: torch\.float8_e8m0fnu"):
        store_in(tmp_path).save(1, {"model.scales": scales}, {}, {})


# -- the background ----------------------------------------------------------------------------


class Gate:
    """Holds the background thread before it writes tensors, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        write = tensor_files.write_parts

        def held(*args: Any, **kwargs: Any) -> list[str]:
            self.entered.set()
            assert self.opened.wait(20)
            return write(*args, **kwargs)

        monkeypatch.setattr(tensor_files, "write_parts", held)


def test_the_caller_may_change_its_tensors_while_the_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, store, tensors = Gate(monkeypatch), store_in(tmp_path), some_tensors()
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    state = {"list": [1]}
    store.save(1, tensors, state, {})
    assert gate.entered.wait(20)
    assert store.poll() == []
    assert steps(store) == []
    for tensor in tensors.values():
        tensor.zero_()
    state["list"].append(2)
    gate.opened.set()
    store.wait()
    assert store.poll() == [1]
    into = blank(tensors)
    newest(store).load(into)
    assert_equal(into, wanted)
    assert newest(store).state == {"list": [1]}


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, store = Gate(monkeypatch), store_in(tmp_path)
    store.save(1, some_tensors(1), {}, {})
    threading.Timer(0.2, gate.opened.set).start()
    store.save(2, some_tensors(2), {}, {})
    assert 1 in steps(store)
    store.wait()
    assert store.poll() == [1, 2]


def test_a_write_that_must_be_waited_for_makes_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a copy was made")

    monkeypatch.setattr(snapshot.HostCopies, "take", forbidden)
    store, tensors = store_in(tmp_path), some_tensors()
    store.save(1, tensors, {}, {}, wait=True)
    into = blank(tensors)
    newest(store).load(into)
    assert_equal(into, tensors)


def test_without_host_memory_for_a_copy_the_caller_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "host_memory_available", lambda: 100)
    store = store_in(tmp_path)
    store.save(1, some_tensors(), {}, {})
    assert store.poll() == [1]


def test_no_warning_is_shown_and_others_still_are(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        store, tensors = store_in(tmp_path), some_tensors()
        store.save(1, tensors, {}, {}, wait=True)
        newest(store).load(blank(tensors))
        warnings.warn("torch.distributed is disabled by someone else", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["torch.distributed is disabled by someone else"]


# -- which ones stay ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "wanted"),
    [
        (1, 0, [60]),
        (2, 0, [50, 60]),
        (2, 20, [20, 40, 50, 60]),
        (9, 0, [10, 20, 30, 40, 50, 60]),
        (1, 30, [30, 60]),
    ],
)
def test_the_last_ones_and_every_mth_are_kept(
    tmp_path: Path, keep_last: int, keep_every: int, wanted: list[int]
) -> None:
    store = store_in(tmp_path, keep_last=keep_last, keep_every=keep_every)
    for step in range(10, 70, 10):
        store.save(step, {"model.x": torch.tensor(step)}, {}, {})
    store.wait()
    assert steps(store) == wanted
    assert sorted(path.name for path in store.folder.iterdir()) == [f"step-{step:08d}" for step in wanted]


def test_a_checkpoint_of_an_abandoned_future_does_not_push_out_the_new_ones(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep_last=1)
    store.save(100, {"model.x": torch.tensor(1)}, {}, {}, wait=True)
    again = store_in(tmp_path, keep_last=1)
    again.save(50, {"model.x": torch.tensor(2)}, {}, {}, wait=True)
    assert steps(again) == [50, 100]
    again.save(60, {"model.x": torch.tensor(2)}, {}, {}, wait=True)
    assert steps(again) == [60, 100]


def test_a_truncated_checkpoint_does_not_count_as_one_of_those_kept(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep_last=2)
    store.save(1, {"model.x": torch.tensor(1)}, {}, {}, wait=True)
    store.save(2, {"model.x": torch.tensor(2)}, {}, {}, wait=True)
    (store.complete()[-1].folder / "state.json").write_text("")
    store.save(3, {"model.x": torch.tensor(3)}, {}, {}, wait=True)
    assert steps(store) == [1, 2, 3]
    store.save(4, {"model.x": torch.tensor(4)}, {}, {}, wait=True)
    assert steps(store) == [3, 4]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for value in (1.0, 2.0):
        store.save(5, {"model.x": torch.tensor(value)}, {}, {}, wait=True)
        into = {"model.x": torch.tensor(0.0)}
        newest(store).load(into)
        assert into["model.x"] == value
    assert [path.name for path in store.folder.iterdir()] == ["step-00000005"]


def test_a_store_that_only_reads_writes_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert store_in(run_dir).latest() == (None, [])
    assert store_in(run_dir).complete() == []
    assert not run_dir.exists()
    leftover = run_dir / "checkpoints" / ".step-00000001.partial"
    leftover.mkdir(parents=True)
    assert store_in(run_dir).latest() == (None, [])
    assert leftover.exists()


def test_the_first_save_clears_what_a_killed_run_left_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in (
        ".step-00000001.partial",
        ".step-00000001.0a1b2c3d.partial",
        ".step-00000002.removed",
        ".mine",
        "step-by-step",
        ".step-1.partial",
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("x")
    store = store_in(tmp_path)
    store.save(3, {"model.x": torch.tensor(1)}, {}, {}, wait=True)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".mine", ".step-1.partial", "step-00000003", "step-by-step"]


def test_a_checkpoint_that_stepped_aside_is_read_and_comes_back(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.save(5, {"model.x": torch.tensor(5)}, {}, {}, wait=True)
    folder = store.folder / "step-00000005"
    folder.rename(store.folder / ".step-00000005.replaced")
    again = store_in(tmp_path)
    assert newest(again).step == 5
    again.prepare()
    assert folder.is_dir()
    assert newest(again).folder == folder


@pytest.mark.parametrize(("keep_last", "keep_every"), [(0, 0), (1, -1)])
def test_a_store_that_would_keep_nothing_is_a_mistake(
    tmp_path: Path, keep_last: int, keep_every: int
) -> None:
    with pytest.raises(ValueError, match="keep_last"):
        store_in(tmp_path, keep_last=keep_last, keep_every=keep_every)


# -- another model -----------------------------------------------------------------------------


def test_another_model_is_refused_with_every_kind_of_difference_and_nothing_is_copied(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    saved = {f"model.{name}": torch.ones(2, 3) for name in ("same", "shape", "type", "extra")}
    store.save(1, saved, {}, {}, wait=True)
    into = {
        "model.same": torch.zeros(2, 3),
        "model.shape": torch.zeros(3, 2),
        "model.type": torch.zeros(2, 3, dtype=torch.bfloat16),
        "model.missing": torch.zeros(1),
    }
    with pytest.raises(CheckpointError, match="checkpoint of another model") as caught:
        newest(store).load(into)
    text = str(caught.value)
    assert "no model.missing" in text
    assert "unexpected model.extra" in text
    assert "model.shape of shape [2, 3] instead of [3, 2]" in text
    assert "model.type in float32 instead of bfloat16" in text
    assert all((tensor == 0).all() for tensor in into.values())


def test_a_long_list_of_differences_is_cut(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.save(1, {"model.x": torch.ones(1)}, {}, {}, wait=True)
    with pytest.raises(CheckpointError, match="and 96 more"):
        newest(store).load({f"model.{i}": torch.ones(1) for i in range(100)})


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.save(1, some_tensors(), {}, FILES, wait=True)
    folder = newest(store).folder
    listed = set(manifests.read_manifest(folder).files)
    assert listed | {manifests.MANIFEST} == {path.name for path in folder.iterdir()}
