"""A profile is read as it was written, refused where it is damaged, and says which layers it knows nothing of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from profiles import FORMATS, profile, profiles, with_statistics
from property_tests import examples
from safetensors.numpy import load_file, save_file

from scrimp.errors import PlanError
from scrimp.planner.precision.profile import VERSION, PrecisionProfile


def assert_same(one: PrecisionProfile, other: PrecisionProfile) -> None:
    """Every fact, and every number with its sign and its NaN."""
    for field in dataclasses.fields(PrecisionProfile):
        if field.name != "batches":
            value = getattr(other, field.name)
            assert getattr(one, field.name) == value
            assert type(getattr(one, field.name)) is type(value)
    for a, b in zip(one.batches, other.batches, strict=True):
        for name, value in vars(a).items():
            assert np.array_equal(value, getattr(b, name), equal_nan=True), name


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(profiles(batches=3))
def test_what_is_written_is_read(tmp_path: Path, made: PrecisionProfile) -> None:
    path = tmp_path / "profile.safetensors"
    made.write(path)
    assert_same(PrecisionProfile.read(path), made)


def test_numbers_that_are_none_survive(tmp_path: Path) -> None:
    errors = profile().batches[0].errors.copy()
    errors[0, 0, 1] = np.nan, np.inf
    made = with_statistics(profile(), errors=errors, loss=float("nan"))
    made.write(tmp_path / "profile")
    assert_same(PrecisionProfile.read(tmp_path / "profile"), made)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "profile.safetensors"
    profile(batches=2).write(made)
    return made


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 0.999))
def test_a_truncated_file_is_refused(path: Path, share: float) -> None:
    content = path.read_bytes()
    cut = path.with_name("cut")
    cut.write_bytes(content[: int(share * len(content))])
    with pytest.raises(PlanError, match="is no precision profile"):
        PrecisionProfile.read(cut)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 64, b"\xff" * 64, b"\x08\0\0\0\0\0\0\0not json"])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(PlanError, match=r"is no precision profile .* measure again"):
        PrecisionProfile.read(tmp_path / "file")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(PlanError, match="is no precision profile"):
            PrecisionProfile.read(path)


def rewrite(path: Path, change: Any = None, drop: str = "", swap: dict[str, Any] | None = None) -> None:
    """The same file with other facts or tensors."""
    made = PrecisionProfile.read(path)
    facts = {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if f.name != "batches"}
    facts |= {"version": VERSION, "batches": len(made.batches)}
    tensors = {name: value for name, value in load_file(path).items() if name != drop} | (swap or {})
    text = change(facts) if change else json.dumps(facts)
    save_file(tensors, path, metadata={"scrimp_profile": text})


def test_that_rewriting_alone_changes_nothing(path: Path) -> None:
    before = PrecisionProfile.read(path)
    rewrite(path)
    assert_same(PrecisionProfile.read(path), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: "not json", "is not JSON"),
        (lambda facts: "[]", "has the wrong type"),
        (lambda facts: '"text"', "has the wrong type"),
        (lambda facts: json.dumps({**facts, "surplus": 1}), "unknown surplus"),
        (
            lambda facts: json.dumps({name: facts[name] for name in facts if name != "tokens"}),
            "missing tokens",
        ),
        (lambda facts: json.dumps({**facts, "batches": 3}), "is no precision profile"),
        (lambda facts: json.dumps({**facts, "batches": "two"}), r"\$\.batches has the wrong type"),
        (lambda facts: json.dumps({**facts, "shapes": 5}), r"\$\.shapes has the wrong type"),
    ],
)
def test_facts_that_do_not_fit_are_refused(path: Path, change: Any, message: str) -> None:
    rewrite(path, change)
    with pytest.raises(PlanError, match=message):
        PrecisionProfile.read(path)


def test_another_version_is_named(path: Path) -> None:
    rewrite(path, lambda facts: json.dumps({**facts, "version": VERSION + 1}))
    told = f'has another version - got {VERSION + 1}, expected "version": {VERSION} - measure again'
    with pytest.raises(PlanError, match=told):
        PrecisionProfile.read(path)


@pytest.mark.parametrize("name", ["0.errors", "1.loss", "1.forward"])
def test_a_tensor_that_is_missing_or_of_another_shape_is_refused(path: Path, name: str) -> None:
    with_other = path.with_name("other")
    with_other.write_bytes(path.read_bytes())
    rewrite(path, drop=name)
    with pytest.raises(PlanError, match="is no precision profile"):
        PrecisionProfile.read(path)
    rewrite(with_other, swap={name: np.zeros((2, 2))})
    with pytest.raises(PlanError, match=r"wrong shape|is no precision profile"):
        PrecisionProfile.read(with_other)


def test_a_safetensors_file_of_something_else_is_refused(tmp_path: Path) -> None:
    save_file({"weight": np.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match="is no precision profile"):
        PrecisionProfile.read(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ()}, "at least one layer"),
        ({"batches": ()}, "at least one layer and one batch"),
        ({"formats": ()}, "at least one candidate format"),
        ({"shapes": ((8, 8),)}, "a shape and a weight for each layer"),
        ({"owners": (1, 2, 3)}, "a shape and a weight for each layer"),
        ({"owners": (1, 2, 3, 6)}, "weights that it has not watched"),
        ({"formats": ("bf16", "fp8")}, "errors has a wrong shape"),
        ({"weights": ("a",) * 7}, "backward has a wrong shape"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(profile(4), **change)


def test_fewer_formats_in_another_order() -> None:
    made = profile(batches=2)
    found = made.select(("nvfp4", "bf16"))
    assert found.formats == ("nvfp4", "bf16")
    for a, b in zip(found.batches, made.batches, strict=True):
        assert np.array_equal(a.errors, b.errors[:, :, [2, 0]])
        assert np.array_equal(a.results, b.results[:, :, [2, 0]])
        assert np.array_equal(a.losses, b.losses[:, [2, 0]])
        assert np.array_equal(a.forward, b.forward)
    assert_same(made.select(FORMATS), made)


def test_a_format_that_was_not_measured_is_named() -> None:
    with pytest.raises(PlanError, match=r"got mxfp8, expected bf16, fp8, nvfp4 - measure again"):
        profile().select(("fp8", "mxfp8"))


def test_shares_of_flops_are_of_the_weights() -> None:
    made = profile(3, shapes=[(10, 20), (5, 20), (10, 10)])
    assert made.flops == pytest.approx([0.5, 0.25, 0.25])


@pytest.mark.parametrize(
    "name",
    ["x", "w", "y", "g", "gx", "gw", "curvature", "errors", "results", "losses", "forward", "backward"],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_layer_with_a_number_that_is_none_is_named(name: str, value: float) -> None:
    made = profile(3, batches=2)
    assert made.unusable() == []
    array = getattr(made.batches[1], name).copy()
    index = (0, 1, 2, 1) if name in ("forward", "backward") else (1, 2, 1, 0)[: array.ndim]
    array[index] = value
    spoiled = dataclasses.replace(made.batches[1], **{name: array})
    assert dataclasses.replace(made, batches=(made.batches[0], spoiled)).unusable() == [made.layers[1]]


@pytest.mark.parametrize(
    "change", [{"loss": np.nan}, {"loss": 0.0}, {"sensitivity": np.full((2, 5), np.inf)}]
)
def test_without_a_loss_or_an_update_nothing_is_known_of_any_layer(change: dict[str, Any]) -> None:
    made = with_statistics(profile(3), **change)
    assert made.unusable() == list(made.layers)
