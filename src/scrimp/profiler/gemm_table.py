"""The table of measured GEMM times, as typed data, and the file that keeps it.

What a budget in seconds is solved with: the seconds of fprop, dgrad and wgrad of every layer shape in every candidate
recipe on this device, quantization included. How they are measured says `gemm_times.py`.

A step is more than its planned GEMMs (attention, norms, the loss, the optimizer, recomputed blocks)::

    t_other = measured step - sum of the table's GEMMs under the plan that ran

so a plan with a step time of tau has tau - t_other seconds for its GEMMs.

File     In the user's cache, one per device (a CPU's name tells its threads), driver, versions, number of tokens,
         compute format and parameters' format. It grows by the shapes and recipes that are asked for.
Checked  tests/profiler/test_gemm_table.py
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scrimp.errors import PlanError, StorageError
from scrimp.files import make_folder, read_bounded, user_cache, write_whole
from scrimp.gemm.doctor_report import Surroundings
from scrimp.json_files import NotNegative, Positive, decode_json
from scrimp.precision import GEMMS

Array = NDArray[np.float64]
LayerShape = tuple[int, int]
"""(outputs, inputs)."""
ByGemm = Mapping[LayerShape, Mapping[str, Mapping[str, float]]]
"""Layer shape to GEMM to recipe to a number."""
Names = Mapping[LayerShape, Mapping[str, Mapping[str, str]]]
"""Layer shape to GEMM to recipe to a name."""
_FORMAT = 1
"""Raised whenever the meaning of the file changes."""
MAX_FILE_BYTES = 2**24


@dataclass(frozen=True)
class _File:
    """`GemmTimes` as JSON: shapes are texts (outputs x inputs), GEMM to recipe to figure below each."""

    device: str
    tokens: int
    seconds: dict[str, dict[str, dict[str, Positive]]]
    spread: dict[str, dict[str, dict[str, NotNegative]]]
    backends: dict[str, dict[str, dict[str, str]]]
    emulated: list[str]
    compute: str
    parameters: str


@dataclass(frozen=True)
class GemmTimes:
    """Seconds of every GEMM of a layer shape in every recipe, as this device runs it, quantization included."""

    device: str
    tokens: int
    """Tokens of one micro-batch on this device."""
    seconds: ByGemm
    """Seconds for one micro-batch."""
    spread: ByGemm = field(default_factory=dict)
    """Width of the middle half of the repeats over the time."""
    backends: Names = field(default_factory=dict)
    """Which back end ran it."""
    emulated: frozenset[str] = frozenset()
    """Recipes of which some GEMM ran in other units than the format's own."""
    compute: str = "bf16"
    """What a GEMM runs in that no plan quantizes; always measured."""
    parameters: str = "bf16"
    """Format of the weights that GEMMs are given."""

    def table(
        self, shapes: Sequence[LayerShape], formats: Sequence[str], micro_batches: int = 1
    ) -> NDArray[np.float64]:
        """[L, 3, P], seconds per step of each GEMM (fprop, dgrad, wgrad) of L layers in P recipes.

        Args:
            shapes: (outputs, inputs) of each layer.
            formats: recipes.
            micro_batches: how many of `tokens` tokens a step has.

        Raises:
            PlanError: a shape or a recipe that was not measured, or no micro-batch.
        """
        if micro_batches < 1:
            raise PlanError("a step has at least one micro-batch", got=micro_batches)
        known = {shape: np.array(self._rows(shape, formats)) for shape in dict.fromkeys(map(_pair, shapes))}
        if not known:
            return np.zeros((0, len(GEMMS), len(formats)))
        return micro_batches * np.stack([known[_pair(shape)] for shape in shapes])

    def candidates(self, shapes: Sequence[LayerShape], formats: Sequence[str]) -> NDArray[np.bool_]:
        """[L, 3, P], which recipes a plan in seconds may give a GEMM: all but emulated ones that gain no time.

        An emulation stays where it is faster than the compute format: FP4 numbers on FP8 units, say. What a
        user has pinned is not asked here.
        """
        plain = self.table(shapes, [self.compute])
        is_emulated = np.array([name in self.emulated for name in formats], dtype=bool)
        return ~is_emulated | (self.table(shapes, formats) < plain)

    def measured(self, shape: LayerShape, recipe: str) -> Mapping[str, str] | None:
        """GEMM to the back end that ran it, of a layer shape in a recipe; None where it was not measured."""
        names = self.backends.get(shape, {})
        found: dict[str, str] = {g: names[g][recipe] for g in GEMMS if recipe in names.get(g, {})}
        return found if len(found) == len(GEMMS) else None

    def select(self, shapes: Sequence[LayerShape], formats: Sequence[str]) -> GemmTimes:
        """The same times of fewer shapes and recipes."""

        def only(values: Mapping[LayerShape, Mapping[str, Mapping[str, Any]]]) -> Any:
            return {
                shape: {gemm: {name: values[shape][gemm][name] for name in formats} for gemm in GEMMS}
                for shape in shapes
            }

        return dataclasses.replace(
            self,
            seconds=only(self.seconds),
            spread=only(self.spread),
            backends=only(self.backends),
            emulated=self.emulated & set(formats),
        )

    def merged(self, newer: GemmTimes) -> GemmTimes:
        """The times of both; of what both have the newer."""

        def union(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> Any:
            return {
                shape: {
                    gemm: {**old.get(shape, {}).get(gemm, {}), **new.get(shape, {}).get(gemm, {})}
                    for gemm in GEMMS
                }
                for shape in (*old, *(other for other in new if other not in old))
            }

        return dataclasses.replace(
            newer,
            seconds=union(self.seconds, newer.seconds),
            spread=union(self.spread, newer.spread),
            backends=union(self.backends, newer.backends),
            emulated=self.emulated | newer.emulated,
        )

    def to_json(self) -> str:
        """A text that `from_json` reads back."""
        data = {"format": _FORMAT, **vars(self), "emulated": sorted(self.emulated)}
        for name in ("seconds", "spread", "backends"):
            data[name] = {f"{shape[0]}x{shape[1]}": gemms for shape, gemms in data[name].items()}
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, *, origin: str = "the table of times") -> GemmTimes:
        """Read `to_json` back; `origin` names the file in errors.

        Raises:
            PlanError: not such a text.
        """
        do = "delete it: times are measured again"
        version = ("format", _FORMAT)
        kept = decode_json(text, _File, origin=origin, error=PlanError, do=do, version=version)
        try:
            by_gemm = {name: _by_shape(getattr(kept, name)) for name in ("seconds", "spread", "backends")}
        except ValueError as error:
            raise PlanError(f"{origin} names a layer shape that is none", got=error, do=do) from None
        if len({_structure(values) for values in by_gemm.values()}) > 1:
            raise PlanError(f"{origin} has times without their spread or back end", do=do)
        return cls(**{**vars(kept), **by_gemm, "emulated": frozenset(kept.emulated)})

    def _rows(self, shape: LayerShape, formats: Sequence[str]) -> list[list[float]]:
        if shape not in self.seconds:
            raise PlanError(
                "the GEMMs of a layer shape were not timed",
                got=f"{shape[1]} -> {shape[0]} features",
                expected=", ".join(f"{inputs} -> {outputs}" for outputs, inputs in self.seconds) or "none",
                do="measure the times again with all shapes of the model",
            )
        gemms = self.seconds[shape]
        missing = [name for name in formats if any(name not in gemms.get(gemm, {}) for gemm in GEMMS)]
        if missing:
            raise PlanError(
                "a recipe was not timed",
                got=", ".join(missing),
                expected=", ".join(gemms.get(GEMMS[0], {})),
                do="measure the times again with all candidates",
            )
        return [[gemms[gemm][name] for name in formats] for gemm in GEMMS]


# -- the file ----------------------------------------------------------------------------------


def cache_file(surroundings: Surroundings, tokens: int, compute: str, parameters: str) -> Path:
    """Where the times of these surroundings lie."""
    key = json.dumps([asdict(surroundings), tokens, compute, parameters], sort_keys=True).encode()
    return user_cache() / "gemm-times" / f"{hashlib.sha256(key).hexdigest()[:16]}.json"


def load_times(file: Path, expected: GemmTimes, tell: Callable[[str], None]) -> GemmTimes:
    """The kept times; where there are none, or none that can be read (`tell` hears why), the empty `expected`."""
    if not file.exists():
        return expected
    try:
        content = read_bounded(file, error=PlanError, do="delete it", at_most=MAX_FILE_BYTES)
        times = GemmTimes.from_json(content, origin=str(file))
        for name in ("device", "tokens", "compute", "parameters"):
            if getattr(times, name) != getattr(expected, name):
                raise PlanError(f"{file} has times of another {name}")
    except PlanError as error:
        tell(f"{error}: measuring again")
        return expected
    return times


def keep_times(file: Path, times: GemmTimes, tell: Callable[[str], None]) -> bool:
    """Write the times to the cache; where that is not possible, say so: False."""
    try:
        make_folder(file.parent)
        write_whole(file, times.to_json(), shared=True)
    except StorageError as error:
        tell(f"the times of GEMMs are not kept: {error}")
        return False
    return True


def _pair(shape: Sequence[int]) -> LayerShape:
    return int(shape[0]), int(shape[1])


def _by_shape(data: dict[str, dict[str, dict[str, Any]]]) -> dict[LayerShape, dict[str, dict[str, Any]]]:
    """The file's ``"OxI"`` as shapes; ValueError where one is none, or a GEMM is missing."""
    found = {}
    for text, gemms in data.items():
        sizes = text.split("x")
        if len(sizes) != 2 or not all(re.fullmatch("[1-9][0-9]{0,17}", size, re.ASCII) for size in sizes):
            raise ValueError(repr(text[:60]))
        if set(gemms) != set(GEMMS):
            raise ValueError(f"{text} with {', '.join(gemms) or 'nothing'} instead of {', '.join(GEMMS)}")
        found[int(sizes[0]), int(sizes[1])] = gemms
    return found


def _structure(values: Mapping[LayerShape, Mapping[str, Mapping[str, Any]]]) -> Hashable:
    return frozenset(
        (shape, gemm, name) for shape, gemms in values.items() for gemm in gemms for name in gemms[gemm]
    )
