"""Shapes of models: what no model has is refused by its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scrimp.errors import ConfigError
from scrimp.models.shapes import LatentAttention, ModelShape
from scrimp.planner.layout.lines import Line, setting_of
from scrimp.planner.layout.shape_files import check_shape, read_shape

GOOD: dict[str, Any] = {
    "layers": 4,
    "width": 512,
    "heads": 8,
    "kv_heads": 2,
    "head_size": 64,
    "ffn_width": 1024,
    "vocab_size": 32000,
}
EXPERTS = {"count": 16, "chosen": 2, "width": 256}
TEXT = "".join(f"{key} = {value}\n" for key, value in GOOD.items())
LATENT = {"kv_rank": 64, "nope_size": 64, "rope_size": 32, "value_size": 64}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers = ", "no TOML"),
        ("layers = 2", "width"),
        ("layers = 'two'", "layers"),
        ("leyers = 2", "layers"),
        (TEXT + "source = 2024-07-23", "source .*2024-07-23"),
        ("layers = " + 20_000 * "[", "no TOML"),
    ],
)
def test_a_bad_shape_is_refused_by_its_key(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "shape.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        read_shape(file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 0}, "layers in .* is out of range"),
        ({"layers": 10**9}, "layers in .* is out of range"),
        ({"head_size": -64}, "head_size in .* is out of range"),
        ({"kv_heads": 3}, "kv_heads in .* does not divide its heads"),
        ({"heads": 10, "head_size": 0}, "heads in .* does not divide its width"),
        ({"ffn_width": 0}, "ffn_width in .* is 0"),
        ({"window": 128, "window_every": 0}, "window_every in .* is out of range"),
        (
            {"ffn_width": 0, "experts": {**EXPERTS, "first_dense_layers": 1}},
            "ffn_width in .* is 0, and 1 of its layers",
        ),
        (
            {"experts": {**EXPERTS, "first_dense_layers": 9}},
            "experts.first_dense_layers in .* leaves no layer",
        ),
        ({"experts": {**EXPERTS, "count": 0}}, "experts.count in .* is out of range"),
        ({"experts": {**EXPERTS, "chosen": 17}}, "experts.chosen in .* is more than there are"),
        ({"window_every": 2}, "window_every in .* has no effect"),
        ({"experts": {**EXPERTS, "shared_width": 512}}, "experts.shared_width in .* has no effect"),
        ({"latent_attention": {**LATENT, "kv_rank": 0}}, "latent_attention.kv_rank in .* is out of range"),
    ],
)
def test_numbers_that_no_model_has_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    file = tmp_path / "shape.toml"
    parts = {**GOOD, **change}
    lines = [f"{key} = {value}" for key, value in parts.items() if not isinstance(value, dict)]
    for key, value in parts.items():
        if isinstance(value, dict):
            lines += [f"[{key}]", *(f"{name} = {number}" for name, number in value.items())]
    file.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        read_shape(file)


def test_key_heads_and_their_size_have_defaults() -> None:
    plain = {name: value for name, value in GOOD.items() if name not in ("kv_heads", "head_size")}
    attention = ModelShape(**plain).sizes.blocks[0].attention
    assert (attention.num_kv_heads, attention.head_size) == (8, 64)
    latent = plain | {"latent_attention": LatentAttention(**LATENT)}
    for others in ({}, {"kv_heads": 7}, {"head_size": 999}):
        shape = ModelShape(**latent, **others)
        check_shape(shape)
        assert shape.sizes == ModelShape(**latent).sizes


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "shape.toml"
    file.write_bytes(TEXT.encode() + b"# \xff")
    with pytest.raises(ConfigError, match=r"not in UTF-8 - got byte \d+ is 0xff"):
        read_shape(file)


def test_a_shape_in_a_line_is_checked_too() -> None:
    line = Line(
        model=ModelShape(**GOOD | {"kv_heads": 3}),
        hardware="h100",
        sequence=128,
        global_batch=1,
        micro_batch=1,
    )
    with pytest.raises(ConfigError, match="kv_heads of the model does not divide its heads"):
        setting_of(line)
