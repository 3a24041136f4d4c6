"""Measures what every GEMM of a layer costs in every recipe on this device: the table for budgets in seconds.

Problem  FLOPs say little: quantizing and transposing cost time, some shapes run badly, and a format that a device
         has no units for is slower than bf16. A plan in seconds needs times of what really runs.
Method   A planned layer of each shape runs `forward` and `backward` of `scrimp.gemm.layer`, with the back ends that
         training would choose, on operands as training has them, one recipe at all three GEMMs. Timed from a
         cold cache, in rounds (stopwatch.py):

             F    forward without codes            S    the codes of X for wgrad alone
             F+S  forward that keeps codes         D    backward of X alone
             W    backward of the weight alone     D+W  both

Shares   A copy that two GEMMs share (one pass over G makes dgrad's and wgrad's operand, one over X fprop's and the
         codes that wgrad will read) is charged once, half to each: a GEMM's time is the mean of what
         it takes alone and of what it adds to the other (Shapley's value)

             fprop = (F + (F+S) - S) / 2     dgrad = (D + (D+W) - W) / 2
             wgrad = (S + (F+S) - F) / 2 + (W + (D+W) - D) / 2

         so the three add up to F+S and D+W, the layer's whole time. A recipe without codes has no S, and its
         fprop is F. Taken within each round (what is added is zero where noise makes it negative); the
         median over rounds counts.
Weights  are quantized by fprop and dgrad apart, in every micro-batch, as the layers do it.
Limits   Where a plan gives the GEMMs of one layer different recipes they may share no copy, and each takes half of the
         saving more than the table says. Measured eagerly: a compiled graph also packs its codes. A layer
         that saves its input plain quantizes it in backward. The head's GEMMs run in the chunks of its
         loss: ask for their tokens apart.
Emulated A recipe that no back end runs in its own units is timed as it is, and named in `emulated`;
         `GemmTimes.candidates` leaves it out where it is not faster than the compute format.
Kept     in the user's cache; a kept time counts while the same back end would run the GEMM now.
Source   specification of SNIP in Scrimp, section 8 ("Time, not FLOPs").
Checked  tests/profiler/test_gemm_times.py, by back ends that advance a clock by known amounts.

Shapes: T tokens, O outputs, I inputs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from scrimp.errors import DeviceError, PlanError
from scrimp.gemm.doctor_report import surroundings_of
from scrimp.gemm.layer import BackendChooser, PlannedLayer, backward, forward
from scrimp.gemm.problem import DTYPES, shape_of
from scrimp.gemm.select import backends_for
from scrimp.precision import GEMMS, LinearPrecision, recipe
from scrimp.profiler.gemm_table import (
    GemmTimes,
    LayerShape,
    cache_file,
    keep_times,
    load_times,
)
from scrimp.profiler.stopwatch import Stopwatch, Work, middle_half

__all__ = ["GemmTimes", "measure_gemm_times"]

Progress = Callable[[str, int, int], None]
"""Hears which layer shape and recipe is timed next, how many are done, and how many there are to time."""
Rounds = dict[str, list[float]]
"""Seconds of each call by its name in the module's text, one entry a round."""
_SCALES = {"x": 1.0, "w": 0.02, "g": 1e-4}


def measure_gemm_times(
    shapes: Sequence[LayerShape],
    formats: Sequence[str],
    *,
    tokens: int,
    device: torch.device,
    compute: str = "bf16",
    parameters: str | None = None,
    choose: BackendChooser | None = None,
    repeats: int = 20,
    limit_s: float = 300.0,
    fresh: bool = False,
    progress: Progress = lambda label, done, total: None,
    tell: Callable[[str], None] = lambda message: None,
    stopwatch: Stopwatch | None = None,
) -> GemmTimes:
    """The times of some shapes and recipes here: kept ones where there are any, else measured and kept.

    Args:
        shapes: (outputs, inputs) of the layers; equal ones are measured once.
        formats: recipes; the compute format is measured with them.
        tokens: of one micro-batch on this device.
        compute, parameters: types of activations and weights, bf16 or fp32; parameters unset: the same.
        choose: back ends, as training will choose them; unset: the best that work here.
        repeats, limit_s: the most rounds of each, and seconds of all; three rounds are always made.
        fresh: measure even what is kept.
        progress: hears label, done and total; never called where everything is kept.
        tell: hears why a kept file cannot be used or written.

    Raises:
        PlanError: an unknown recipe or format, sizes below 1, or a recipe that no back end of `choose` runs.
        DeviceError: the device has not enough memory for a layer of these sizes.
    """
    parameters = parameters or compute
    _check(shapes, formats, tokens, compute, parameters, repeats)
    wanted = tuple(dict.fromkeys((int(outputs), int(inputs)) for outputs, inputs in shapes))
    names = tuple(dict.fromkeys((compute, *formats)))
    choose = backends_for(device) if choose is None else choose
    surroundings = surroundings_of(device)
    empty = GemmTimes(surroundings.device, tokens, {}, compute=compute, parameters=parameters)
    file = cache_file(surroundings, tokens, compute, parameters)
    known = load_times(file, empty, tell)
    cells = [_Cell(shape, name, device, empty, choose) for shape in wanted for name in names]
    missing = [cell for cell in cells if fresh or known.measured(cell.shape, cell.recipe) != cell.backends]
    if missing:
        session = _Session(stopwatch or Stopwatch(device), repeats, limit_s, missing, progress)
        known = session.add_to(known, lambda times: keep_times(file, times, tell))
    emulated = frozenset(cell.recipe for cell in cells if cell.is_emulated)
    return dataclasses.replace(known.select(wanted, names), emulated=emulated)


def _check(
    shapes: Sequence[LayerShape],
    formats: Sequence[str],
    tokens: int,
    compute: str,
    parameters: str,
    repeats: int,
) -> None:
    for kind in (compute, parameters):
        if kind not in DTYPES:
            raise PlanError("layers compute in two formats", got=kind, expected=", ".join(DTYPES))
    for name in formats:
        recipe(name)
    sizes = (tokens, repeats, *(size for shape in shapes for size in shape))
    if min(sizes) < 1:
        raise PlanError(
            "GEMMs to be timed need positive sizes", got=f"{tokens} tokens, {repeats} repeats, {list(shapes)}"
        )


# -- one layer shape in one recipe -------------------------------------------------------------


class _Cell:
    """A planned layer of one shape with one recipe at all GEMMs."""

    def __init__(
        self,
        shape: LayerShape,
        name: str,
        device: torch.device,
        setting: GemmTimes,
        choose: BackendChooser,
    ) -> None:
        """Ask for its back ends.

        Args:
            setting: tokens and formats of the table that it belongs to.
        """
        self.shape, self.recipe, self.device, self.tokens = shape, name, device, setting.tokens
        self.compute, self.parameters = DTYPES[setting.compute], DTYPES[setting.parameters]
        outputs, inputs = shape
        sizes = {gemm: shape_of(gemm, self.tokens, inputs, outputs) for gemm in GEMMS}
        chosen = {gemm: choose(name, gemm, size, device) for gemm, size in sizes.items()}
        self.backends: dict[str, str] = {gemm: backend.name for gemm, backend in chosen.items()}
        self.is_emulated = any(backend.emulates(name) for backend in chosen.values())
        self.keeps_codes = recipe(name).saved == "quantized"
        saved = name if self.keeps_codes else setting.compute
        self.layer = PlannedLayer("gemm times", LinearPrecision(name, name, name, saved), choose=choose)

    def operands(self) -> dict[str, Tensor]:
        """X [T, I], W [O, I] and G [T, O]; of a generator of their own, so that no run notices."""
        outputs, inputs = self.shape
        shapes = {"x": (self.tokens, inputs), "w": (outputs, inputs), "g": (self.tokens, outputs)}
        generator = torch.Generator(self.device).manual_seed(0)
        made = {}
        for name, shape in shapes.items():
            type_ = self.parameters if name == "w" else self.compute
            values = torch.randn(shape, generator=generator, device=self.device, dtype=type_)
            made[name] = values.mul_(_SCALES[name])
        return made

    def works(self, x: Tensor, w: Tensor, g: Tensor) -> dict[str, Work]:
        """What is timed, by the names in the module's text."""
        layer, now = self.layer, self.layer.clock.now
        run_forward = partial(forward, x, w, layer, self.compute, now=now)
        _, codes = run_forward(keep_codes=self.keeps_codes)
        run_backward = partial(backward, g, x if codes is None else codes, w, layer, self.compute, now)
        works: dict[str, Work] = {
            "F": partial(run_forward, keep_codes=False),
            "D": partial(run_backward, needs_x=True, needs_weight=False),
            "W": partial(run_backward, needs_x=False, needs_weight=True),
            "D+W": partial(run_backward, needs_x=True, needs_weight=True),
        }
        if self.keeps_codes:
            store = layer.backend(self.recipe, "wgrad", self.tokens, w).store
            works["S"] = lambda: store(x, layer.uses("wgrad", now)[1])
            works["F+S"] = partial(run_forward, keep_codes=True)
        return works


class _Session:
    """Times cells within a limit of seconds for all."""

    def __init__(
        self, watch: Stopwatch, repeats: int, limit_s: float, cells: list[_Cell], progress: Progress
    ) -> None:
        self.watch, self.repeats, self.cells, self.progress = watch, repeats, cells, progress
        self.done = 0
        self.end = watch.now() + limit_s

    def add_to(self, known: GemmTimes, keep: Callable[[GemmTimes], object]) -> GemmTimes:
        """What is known with all cells measured; kept after each shape, so that little is lost by a stop."""
        for shape in dict.fromkeys(cell.shape for cell in self.cells):
            for cell, rounds in self._measure(shape):
                known = known.merged(_as_times(cell, gemm_seconds(rounds), known))
            keep(known)
        return known

    def _measure(self, shape: LayerShape) -> list[tuple[_Cell, Rounds]]:
        """All cells of a shape, on the same operands."""
        cells = [cell for cell in self.cells if cell.shape == shape]
        try:
            off = torch.autocast(cells[0].device.type, enabled=False)
            with self.watch.at_device(), torch.no_grad(), off:
                operands = cells[0].operands()
                return [(cell, self._time(cell, operands)) for cell in cells]
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                "there is not enough memory to time a layer",
                got=f"{shape[1]} -> {shape[0]} features, {cells[0].tokens} tokens",
                do="use a smaller micro-batch, or free memory of the device",
            ) from error

    def _time(self, cell: _Cell, operands: dict[str, Tensor]) -> Rounds:
        label = f"{cell.shape[1]} -> {cell.shape[0]} in {cell.recipe}"
        self.progress(label, self.done, len(self.cells))
        share = max(0.0, self.end - self.watch.now()) / (len(self.cells) - self.done)
        rounds = self.watch.rounds(cell.works(**operands), self.repeats, share)
        self.done += 1
        if self.done == len(self.cells):
            self.progress(label, self.done, len(self.cells))
        return rounds


# -- from rounds to GEMMs ----------------------------------------------------------------------


def gemm_seconds(rounds: Rounds) -> dict[str, tuple[float, float]]:
    """GEMM to its seconds and their relative spread, of one layer in one recipe; see Shares in the module."""
    together = rounds["D+W"]
    fprop = rounds["F"]
    dgrad = _shares(rounds["D"], together, rounds["W"])
    wgrad = _shares(rounds["W"], together, rounds["D"])
    if "S" in rounds:
        fprop = _shares(rounds["F"], rounds["F+S"], rounds["S"])
        stored = _shares(rounds["S"], rounds["F+S"], rounds["F"])
        wgrad = [product + codes for product, codes in zip(wgrad, stored, strict=True)]
    found = {}
    for gemm, seconds in (("fprop", fprop), ("dgrad", dgrad), ("wgrad", wgrad)):
        median = statistics.median(seconds)
        found[gemm] = median, middle_half(seconds) / median
    return found


def _shares(alone: list[float], together: list[float], other: list[float]) -> list[float]:
    """One of two, round by round: the mean of what it takes alone and of what it adds to the other."""
    return [(a + max(0.0, both - b)) / 2 for a, both, b in zip(alone, together, other, strict=True)]


def _as_times(cell: _Cell, found: dict[str, tuple[float, float]], like: GemmTimes) -> GemmTimes:
    """One cell as a table of its own."""
    return dataclasses.replace(
        like,
        seconds={cell.shape: {gemm: {cell.recipe: found[gemm][0]} for gemm in GEMMS}},
        spread={cell.shape: {gemm: {cell.recipe: found[gemm][1]} for gemm in GEMMS}},
        backends={cell.shape: {gemm: {cell.recipe: cell.backends[gemm]} for gemm in GEMMS}},
        emulated=frozenset([cell.recipe] if cell.is_emulated else []),
    )
