"""A plan of a layout as a file: `scrimp plan --hardware ... --save`, and `scrimp export-layout`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from scrimp.config import Config
from scrimp.errors import ConfigError, StorageError
from scrimp.files import write_whole
from scrimp.models.shapes import ModelShape
from scrimp.planner.layout.lines import line_of, line_text, read_shape
from scrimp.planner.layout.setting import Setting


def check_saved(out: Path, config: Config, shape: Path | None, given: Collection[str]) -> str | ModelShape:
    """How a line names the model.

    Raises:
        StorageError: the file exists.
        ConfigError: the model is a preset in other sizes, which a line does not say.
    """
    if out.exists():
        raise StorageError(f"{out} exists already", do="choose another name; nothing is overwritten")
    if shape is not None:
        return read_shape(shape)
    changed = sorted(key for key in given if key.startswith("model.") and key != "model.preset")
    if changed:
        raise ConfigError(
            "a saved plan names a preset as it is",
            got=", ".join(changed),
            do="write the sizes into a file, and give it with --shape",
        )
    return config.model.preset


def save_plan(out: Path, setting: Setting, model: str | ModelShape, hardware: str) -> None:
    """Write the line that says a plan."""
    write_whole(out, line_text(line_of(setting, model, hardware)) + "\n")
    print(f"written: {out}")
