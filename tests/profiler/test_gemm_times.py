"""Times of GEMMs: what is charged to which, what is kept, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scrimp.errors import DeviceError, PlanError
from scrimp.formats import QuantizedTensor
from scrimp.gemm import backends_for, reference_only
from scrimp.gemm.backends import Backend
from scrimp.gemm.layer import PlannedLayer, backward, forward
from scrimp.gemm.problem import COLUMNS, ROWS, Shape, Use
from scrimp.precision import GEMMS, RECIPES, LinearPrecision
from scrimp.profiler.gemm_times import gemm_seconds, measure_gemm_times
from scrimp.profiler.stopwatch import Stopwatch

CPU = torch.device("cpu")
TOKENS, OUTPUTS, INPUTS = 32, 48, 16
CALLS = ("F", "S", "F+S", "D", "W", "D+W")
X, W, G = TOKENS * INPUTS, OUTPUTS * INPUTS, TOKENS * OUTPUTS


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "scrimp" / "gemm-times"


class Metered(Backend):
    """Computes nothing and takes known times; an operand along rows costs a transpose."""

    ALONG: ClassVar = {COLUMNS: 1.0, ROWS: 2.0}
    PAIR, STORE, PREPARE_AND_STORE, LOAD, MULTIPLY = 2.2, 3.0, 3.1, 0.5, 7.0

    def __init__(self, *, shares: bool = False, native: tuple[str, ...] = (), name: str = "metered") -> None:
        self.shares, self.native, self.name, self.seconds = shares, native, name, 0.0

    def now(self) -> float:
        return self.seconds

    def choose(self, recipe: str, gemm: str, shape: Shape, device: torch.device) -> Backend:
        return self

    def refusal(self, gemm: str, recipe: str, shape: Shape | None, device: torch.device) -> str | None:
        return None

    def emulates(self, recipe: str) -> bool:
        return recipe not in ("bf16", "fp32", *self.native)

    def prepare(self, x: Tensor, use: Use) -> tuple[int, int]:
        self.seconds += self.ALONG[use.axis] * x.numel()
        return x.shape[::-1] if use.axis == ROWS else x.shape

    def prepare_pair(self, x: Tensor, first: Use, second: Use) -> tuple[Any, Any] | None:
        if not self.shares:
            return None
        self.seconds += self.PAIR * x.numel()
        return x.shape, x.shape[::-1]

    def store(self, x: Tensor, use: Use) -> QuantizedTensor:
        self.seconds += self.STORE * x.numel()
        return super().store(x, use)

    def prepare_and_store(self, x: Tensor, use: Use, saved: Use) -> tuple[Any, QuantizedTensor]:
        if not self.shares:
            return super().prepare_and_store(x, use, saved)
        self.seconds += self.PREPARE_AND_STORE * x.numel()
        return x.shape, super().store(x, saved)

    def load(self, codes: QuantizedTensor) -> tuple[int, int]:
        self.seconds += self.LOAD * codes.shape.numel()
        return codes.shape[::-1]

    def multiply(self, gemm: str, a: Any, b: Any, out: torch.dtype) -> Tensor:
        self.seconds += self.MULTIPLY
        return torch.zeros(a[0], b[0], dtype=out)


def measure(backend: Metered, formats: list[str], shapes=((OUTPUTS, INPUTS),), **more: Any):
    watch = Stopwatch(CPU, flush_bytes=64, now=backend.now)
    return measure_gemm_times(
        shapes, formats, tokens=TOKENS, device=CPU, choose=backend.choose, stopwatch=watch, **more
    )


def seconds_of(backend: Metered, recipe: str) -> list[float]:
    return measure(backend, [recipe]).table([(OUTPUTS, INPUTS)], [recipe])[0, :, 0].tolist()


# -- shares ------------------------------------------------------------------------------------


def test_a_gemm_is_charged_its_operands_its_product_and_the_codes_it_reads() -> None:
    assert seconds_of(Metered(), "fp8") == pytest.approx(
        [X + W + 7, G + 2 * W + 7, 2 * G + 3 * X + 0.5 * X + 7]
    )


def test_a_copy_that_two_gemms_share_is_charged_once_half_to_each() -> None:
    saved_g, saved_x = (1 + 2 - 2.2) * G, (1 + 3 - 3.1) * X
    assert seconds_of(Metered(shares=True), "fp8") == pytest.approx(
        [
            X + W + 7 - saved_x / 2,
            G + 2 * W + 7 - saved_g / 2,
            2 * G + 3 * X + 0.5 * X + 7 - saved_g / 2 - saved_x / 2,
        ]
    )


def test_a_recipe_without_codes_reads_the_input_in_backward() -> None:
    assert seconds_of(Metered(), "bf16") == pytest.approx([X + W + 7, G + 2 * W + 7, 2 * G + 2 * X + 7])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shares", [False, True])
def test_the_three_gemms_add_up_to_the_layer(recipe: str, shares: bool) -> None:
    backend = Metered(shares=shares)
    keeps = RECIPES[recipe].wgrad is not None
    precision = LinearPrecision(recipe, recipe, recipe, recipe if keeps else "bf16")
    layer = PlannedLayer("layer", precision, choose=backend.choose)
    x, w, g = (
        torch.ones(*shape).bfloat16() for shape in ((TOKENS, INPUTS), (OUTPUTS, INPUTS), (TOKENS, OUTPUTS))
    )
    _, codes = forward(x, w, layer, torch.bfloat16, keep_codes=keeps)
    saved = x if codes is None else codes
    backward(g, saved, w, layer, torch.bfloat16, (0, 0), needs_x=True, needs_weight=True)
    whole = backend.seconds
    assert sum(seconds_of(backend, recipe)) == pytest.approx(whole)


durations = st.floats(1e-6, 1e3)


@given(st.lists(st.tuples(*[durations] * 6), min_size=1, max_size=9))
def test_whatever_the_noise_no_gemm_takes_less_than_half_of_itself_alone(rows) -> None:
    rounds = {name: list(column) for name, column in zip(CALLS, zip(*rows, strict=True), strict=True)}
    found = gemm_seconds(rounds)
    low = {"fprop": np.median(rounds["F"]), "dgrad": np.median(rounds["D"])}
    low["wgrad"] = np.median(np.add(rounds["W"], rounds["S"]))
    for gemm, (seconds, spread) in found.items():
        assert seconds >= 0.5 * low[gemm] * (1 - 1e-9)
        assert spread >= 0


def test_a_machine_that_slows_down_in_some_rounds_changes_no_share() -> None:
    once = dict(zip(CALLS, (5.0, 2.0, 6.0, 4.0, 3.0, 6.5), strict=True))
    steady = gemm_seconds({name: [value] * 5 for name, value in once.items()})
    slowed = gemm_seconds({name: [value, 3 * value, value, value, 2 * value] for name, value in once.items()})
    for gemm in GEMMS:
        assert slowed[gemm][0] == steady[gemm][0]
        assert slowed[gemm][1] == pytest.approx(1.0)  # the middle half lies between once and twice the time
        assert steady[gemm][1] == 0


# -- what is kept ------------------------------------------------------------------------------


class Labels(list[tuple[str, int, int]]):
    """Hears the progress."""

    def __call__(self, label: str, done: int, total: int) -> None:
        self.append((label, done, total))


def test_times_are_measured_once_and_what_is_new_is_added() -> None:
    backend, other = Metered(), (8, 24)
    labels = Labels()
    first = measure(backend, ["fp8"], progress=labels)
    assert labels == [
        (f"{INPUTS} -> {OUTPUTS} in bf16", 0, 2),
        (f"{INPUTS} -> {OUTPUTS} in fp8", 1, 2),
        (f"{INPUTS} -> {OUTPUTS} in fp8", 2, 2),
    ]
    labels.clear()
    assert measure(backend, ["fp8"], progress=labels) == first
    assert labels == []
    grown = measure(backend, ["mxfp8", "fp8"], [other, (OUTPUTS, INPUTS), other], progress=labels)
    assert [done for _, done, _ in labels] == [0, 1, 2, 3, 4]
    assert f"{INPUTS} -> {OUTPUTS} in fp8" not in [label for label, _, _ in labels]
    here = [(OUTPUTS, INPUTS)]
    assert (grown.table(here, ["bf16", "fp8"]) == first.table(here, ["bf16", "fp8"])).all()


def test_times_of_another_back_end_are_measured_anew() -> None:
    slow, fast, labels = Metered(), Metered(shares=True, name="fast"), Labels()
    measure(slow, ["fp8"])
    times = measure(fast, ["fp8"], progress=labels)
    assert len(labels) == 3
    assert times.backends[(OUTPUTS, INPUTS)]["wgrad"] == {"bf16": "fast", "fp8": "fast"}
    assert (
        times.table([(OUTPUTS, INPUTS)], ["fp8"]).sum()
        < measure(slow, ["fp8"]).table([(OUTPUTS, INPUTS)], ["fp8"]).sum()
    )


@pytest.mark.parametrize(
    "change",
    [{"compute": "fp32"}, {"parameters": "fp32"}, {"fresh": True}],
    ids=lambda change: next(iter(change)),
)
def test_times_of_other_types_are_their_own_and_fresh_ones_are_measured(change: dict[str, Any]) -> None:
    backend, labels = Metered(), Labels()
    measure(backend, ["fp8", "bf16", "fp32"])
    measure(backend, ["fp8", "bf16", "fp32"], progress=labels, **change)
    assert labels[-1][1:] == (3, 3)


DAMAGES = {
    "nothing": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "bytes": lambda text: "\udcff",
    "another device": lambda text: text.replace('"device": "', '"device": "another '),
    "other tokens": lambda text: text.replace(f'"tokens": {TOKENS}', '"tokens": 1'),
    "another version": lambda text: text.replace('"format": 1', '"format": 2'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_measured_anew_and_repaired(own_cache: Path, damage: str) -> None:
    backend, told, labels = Metered(), [], Labels()
    first = measure(backend, ["fp8"])
    (file,) = own_cache.iterdir()
    whole = file.read_text(encoding="utf-8")
    file.write_text(DAMAGES[damage](whole), encoding="utf-8", errors="surrogateescape")
    assert measure(backend, ["fp8"], tell=told.append, progress=labels) == first
    assert "measuring again" in told[0]
    assert len(labels) == 3
    assert file.read_text(encoding="utf-8") == whole


def test_a_cache_that_cannot_be_written_is_said_and_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    told: list[str] = []
    assert measure(Metered(), ["fp8"], tell=told.append).seconds
    assert any("not kept" in line for line in told)


# -- what is asked for -------------------------------------------------------------------------


def test_recipes_without_units_are_named() -> None:
    times = measure(Metered(native=("fp8",)), ["fp8", "nvfp4"])
    assert times.emulated == {"nvfp4"}
    allowed = times.candidates([(OUTPUTS, INPUTS)], ["bf16", "fp8", "nvfp4"])[0]
    assert allowed.tolist() == [[True, True, False]] * 3


@pytest.mark.parametrize(("limit_s", "num_calls"), [(0.0, 1 + 3), (1e9, 2 + 5)])
def test_a_limit_of_seconds_is_shared_out(limit_s: float, num_calls: int) -> None:
    backend = Metered()
    measure(backend, ["bf16"], limit_s=limit_s)
    one_round = 2 * (G + 2 * W + 7) + 2 * (2 * G + 2 * X + 7) + (X + W + 7)
    assert backend.seconds == pytest.approx(num_calls * one_round + (X + W + 7))


@pytest.mark.parametrize(
    ("formats", "more", "message"),
    [
        (["fp9"], {}, "no such recipe"),
        (["fp8"], {"compute": "fp16"}, "two formats"),
        (["fp8"], {"parameters": "fp8"}, "two formats"),
        (["fp8"], {"shapes": [(0, 16)]}, "positive sizes"),
        (["fp8"], {"repeats": 0}, "positive sizes"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_runs(formats, more, message) -> None:
    backend = Metered()
    with pytest.raises(PlanError, match=message):
        measure(backend, formats, **more)
    assert backend.seconds == 0


def test_a_recipe_that_the_demanded_back_end_does_not_run_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot run in fp8"):
        measure_gemm_times([(16, 16)], ["fp8"], tokens=16, device=CPU, choose=backends_for(CPU, "torch"))


def test_a_layer_that_does_not_fit_is_refused_with_its_sizes() -> None:
    class Full(Metered):
        def multiply(self, gemm: str, a: Any, b: Any, out: torch.dtype) -> Tensor:
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(DeviceError, match=f"{INPUTS} -> {OUTPUTS} features, {TOKENS} tokens"):
        measure(Full(), ["fp8"])


# -- this machine ------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.every(2)
def test_every_recipe_is_timed_here_and_nothing_is_left_behind(compute: str) -> None:
    shapes, watch = [(24, 40), (40, 24), (24, 40)], Stopwatch(CPU, flush_bytes=2**16)
    state = torch.get_rng_state()
    times = measure_gemm_times(
        shapes, list(RECIPES), tokens=48, device=CPU, compute=compute, repeats=3, stopwatch=watch
    )
    table = times.table(shapes, list(RECIPES))
    assert table.shape == (3, 3, len(RECIPES))
    assert ((table > 0) & (table < 60)).all()
    assert (table[0] == table[2]).all()
    assert (torch.get_rng_state() == state).all()
    assert times.emulated == set(RECIPES) - {"bf16", "fp32"}
    assert {
        name for gemms in times.backends.values() for names in gemms.values() for name in names.values()
    } == {"numba", "reference"}


@pytest.mark.slow
def test_eight_times_the_work_takes_longer_here() -> None:
    watch = Stopwatch(CPU, flush_bytes=2**16)
    times = measure_gemm_times(
        [(64, 64), (512, 512)], ["bf16"], tokens=256, device=CPU, choose=reference_only, stopwatch=watch
    )
    small, large = times.table([(64, 64), (512, 512)], ["bf16"]).sum(axis=(1, 2))
    assert large > 2 * small


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_times_every_recipe_within_its_peak() -> None:
    shape, tokens = (4096, 4096), 4096
    times = measure_gemm_times([shape], list(RECIPES), tokens=tokens, device=torch.device("cuda", 0))
    rates = 2.0 * shape[0] * shape[1] * tokens / times.table([shape], list(RECIPES))
    assert (rates > 1e12).all()
    assert (rates < 1e16).all()
    assert not {"bf16", "fp32"} & times.emulated
