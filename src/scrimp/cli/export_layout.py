"""A plan of a layout as a file: `scrimp plan --hardware ... --save`, and `scrimp export-layout`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from scrimp.config import Config
from scrimp.errors import ConfigError
from scrimp.export.layout_file import LayoutTarget, export_layout
from scrimp.files import read_bounded, refuse_taken, write_whole
from scrimp.json_files import decode_json
from scrimp.models.shapes import ModelShape
from scrimp.planner.layout.lines import Line, line_of, line_text, setting_of
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.shape_files import read_shape

_MAX_BYTES = 2**24


def model_of_line(config: Config, shape: Path | None, given: Collection[str]) -> str | ModelShape:
    """How a line names the model.

    Raises:
        ConfigError: the model is a preset in other sizes, which a line does not say.
    """
    if shape is not None:
        return read_shape(shape)
    changed = sorted(key for key in given if key.startswith("model.") and key != "model.preset")
    if changed:
        raise ConfigError(
            "a saved plan names a preset as it is",
            got=", ".join(changed),
            do="write the sizes into a file, and give it with --model.shape",
        )
    return config.model.preset


def export_layout_to_file(source: Path, out: Path, target: LayoutTarget, *, approximate: bool) -> int:
    """Write the file; returns 0, also where the nearest was asked for and not all could be said: it is listed."""
    refuse_taken(out)
    line = read_line(source)
    found = export_layout(setting_of(line), line.model, target, approximate=approximate)
    write_whole(out, found.text)
    print(f"written: {out}")
    print(f"it is read by {found.how}")
    for note in found.notes:
        print(f"note: {note}")
    for one in found.not_as_planned:
        print(f"not as planned: {one}")
    return 0


def read_line(source: Path) -> Line:
    """The plan of a file that --save wrote.

    Raises:
        ConfigError: it has no line, or several, or one that is no plan.
    """
    do = "give a file that scrimp plan --hardware ... --save wrote"
    text = read_bounded(source, error=ConfigError, do=do, at_most=_MAX_BYTES).decode("utf-8-sig", "replace")
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) != 1:
        raise ConfigError(f"{source} holds no single plan", got=f"{len(lines):,} lines", expected="1", do=do)
    return decode_json(lines[0], Line, origin=str(source), error=ConfigError, do=do)


def save_plan(out: Path, setting: Setting, model: str | ModelShape, hardware: str) -> None:
    """Write the line that says a plan."""
    write_whole(out, line_text(line_of(setting, model, hardware)) + "\n")
