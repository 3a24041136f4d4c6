"""Gains from few passes against exact ones, and the rules by which passes become gains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from models import Bench, bench, decoder, spearman, trained_decoder
from torch import nn

from scrimp.planner.precision.divergence import SNIP, Method, mean_divergence
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.statistics import Structure
from scrimp.statistics.branches import Isolated
from scrimp.statistics.gains import Passes, by_blocks, by_ratios, places
from scrimp.statistics.stream import Changes, Injection
from scrimp.statistics.structure import SubLayer

FORMATS = ("bf16", "fp8", "fp4")


@pytest.fixture(scope="module")
def trained() -> Bench:
    return trained_decoder()


class Profiles(dict[str, PrecisionProfile]):
    """Profiles of one batch, by the way of finding gains, when they are asked for."""

    def __init__(self, bench: Bench, formats: tuple[str, ...] = FORMATS) -> None:
        self.bench, self.formats = bench, formats

    def __missing__(self, gains: str) -> PrecisionProfile:
        self[gains] = self.bench.collect(500, self.formats, gains=gains)
        return self[gains]


@pytest.fixture(scope="module")
def profiles(trained: Bench) -> Mapping[str, PrecisionProfile]:
    return Profiles(trained)


@pytest.fixture(scope="module")
def noise_alone(trained: Bench) -> Mapping[str, PrecisionProfile]:
    """Gains that no format has scaled."""
    return Profiles(trained, ("bf16",))


# -- against the oracle ------------------------------------------------------------------------


@pytest.mark.parametrize("gains", ["ratios", "blocks"])
@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.every(2)
@pytest.mark.slow
def test_cheap_gains_are_of_the_size_of_exact_ones(
    noise_alone: Mapping[str, PrecisionProfile], gains: str, name: str
) -> None:
    found, exact = (getattr(noise_alone[way].batches[0], name) for way in (gains, "exact"))
    assert np.array_equal(found > 0, exact > 1e-9 * exact.max())
    ratios = found[found > 0] / exact[found > 0]
    assert 0.7 < np.median(ratios) < 1.4
    assert np.quantile(ratios, 0.05) > 0.15
    assert ratios.max() < 2.0


@pytest.mark.parametrize("gains", ["ratios", "blocks"])
@pytest.mark.parametrize(
    ("method", "correlation", "factor"),
    [(Method(), 0.95, 2.5), (Method(weight_errors="tokens"), 0.95, 4.0), (SNIP, 0.8, 5.0)],
)
@pytest.mark.slow
def test_they_predict_the_updates_that_exact_gains_predict(
    profiles: Mapping[str, PrecisionProfile], gains: str, method: Method, correlation: float, factor: float
) -> None:
    low = FORMATS.index("fp4")
    found, exact = (mean_divergence(profiles[way], method).update[:, :, low] for way in (gains, "exact"))
    assert spearman(found, exact) >= correlation
    assert (found / exact).max() < factor
    assert (found / exact).min() > 1 / factor


@pytest.mark.parametrize("gains", ["ratios", "blocks"])
@pytest.mark.every(2)
def test_curvatures_of_the_writers_of_the_stream_are_near_exact_ones(
    profiles: Mapping[str, PrecisionProfile], gains: str
) -> None:
    found, exact = (profiles[way].batches[0].curvature for way in (gains, "exact"))
    is_exit = [layer.endswith(("out", "down")) for layer in profiles["exact"].layers]
    assert (exact > 0).all()
    assert spearman(found, exact) > 0.6
    assert np.allclose(found[is_exit], exact[is_exit], rtol=0.6)


def test_noise_that_tokens_share_moves_weights_further(profiles: Mapping[str, PrecisionProfile]) -> None:
    exact = profiles["exact"].batches[0].forward[:, 0]
    assert np.median(exact[1] / exact[0]) > 1.1


@pytest.mark.parametrize("gains", ["ratios", "blocks"])
@pytest.mark.slow
def test_what_is_not_trained_before_the_stream_leaves_gains_finite(gains: str) -> None:
    model = decoder()
    model.embedding.requires_grad_(False)
    made = bench(model, steps=20)
    found, exact = (made.collect(500, FORMATS, gains=way) for way in (gains, "exact"))
    assert not found.unusable()
    assert "embedding.weight" not in found.weights
    ratios = found.batches[0].forward / exact.batches[0].forward
    assert 0.5 < np.median(ratios) < 1.5
    assert ratios.min() > 0.05


@pytest.mark.parametrize("gains", ["ratios", "blocks", "exact"])
@pytest.mark.every(4)
def test_a_model_whose_branches_begin_at_zero_has_finite_statistics(gains: str) -> None:
    model = decoder()
    for name, parameter in model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            nn.init.zeros_(parameter)
    profile = bench(model).collect(500, FORMATS, gains=gains)
    assert profile.gains == gains
    assert not profile.unusable()
    assert np.isfinite(mean_divergence(profile).update).all()


# -- the rules ---------------------------------------------------------------------------------


def stream_of(sublayers: int) -> Structure:
    subs = tuple(SubLayer((f"{s}.in", f"{s}.beside"), f"{s}.out") for s in range(sublayers))
    return Structure(tuple(f"{s}.norm" for s in range(sublayers + 1)), subs)


def test_weights_have_their_place_on_the_stream() -> None:
    weights = ("embed", "positions", "0.in.w", "0.out.w", "0.router", "1.in.w", "1.out.w", "unembed")
    owners = {f"{s}.{kind}.w": f"{s}.{kind}" for s in range(2) for kind in ("in", "out")}
    found = places(stream_of(2), weights, owners)
    assert found.tolist() == [-1, -1, 0, 0, 0, 1, 1, 2]
    first = places(stream_of(2), ("lm_head.w", *weights), owners)
    assert first.tolist() == [2, -1, -1, 0, 0, 0, 1, 1, 2]


class FakePasses:
    """Passes with made-up results, that remember what they were asked for."""

    def __init__(self, nodes: int, weights: int) -> None:
        self.nodes, self.weights = nodes, weights
        self.asked: list[Injection] = []
        self.results: dict[tuple[str, int, str], tuple[Changes, np.ndarray]] = {}

    def stream(self, injection: Injection) -> tuple[Changes, np.ndarray]:
        self.asked.append(injection)
        generator, changes = np.random.default_rng(len(self.asked)), Changes()
        for name in ("activation", "gradient", "product", "injected", "exits"):
            values = generator.uniform(0.5, 2.0, self.nodes)
            getattr(changes, name).update(enumerate(values))
        moved = generator.uniform(0.5, 2.0, (2, self.weights))
        self.results[injection.direction, injection.node, injection.kind] = changes, moved
        return changes, moved

    def isolated(self, kind: str, key: int, turn: int) -> tuple[Isolated, np.ndarray]:
        size = (("tokens", "weights").index(kind) + 1) * (turn + 1)
        injected, arrived = (
            dict.fromkeys(range(self.nodes - 1), (many * size) ** 2.0) for many in (2, 3 + turn)
        )
        return Isolated(injected, arrived), np.full((2, self.weights), 6.0)

    @property
    def doors(self) -> Passes:
        return Passes(self.stream, self.isolated)


WHERE = np.array([-1, 0, 1, 1, 2])


def naive(fake: FakePasses, way: str, row: int, kind: str, k: int, j: int, unit: int) -> tuple[float, float]:
    """Bn and Fn of the specification's section 5, R2 and R3."""
    last = fake.nodes - 1
    is_before = WHERE[k] < j
    if way == "blocks":
        back, forth = fake.results["backward", j, kind], fake.results["forward", j, kind]
        b = back[1][unit, k] / back[0].injected[j] ** 0.5 if is_before else 0.0
        return b, forth[1][unit, k] / forth[0].injected[j] ** 0.5
    back, forth = fake.results["backward", last, kind], fake.results["forward", 0, kind]
    b = back[1][unit, k] / back[0].gradient[j] ** 0.5 if is_before else 0.0
    arriving = forth[0].activation[j] ** 0.5
    f = b * forth[0].gradient[j] ** 0.5 / arriving if is_before else forth[1][unit, k] / arriving
    return b, f


@pytest.mark.parametrize(("way", "count"), [("ratios", 4), ("blocks", 12)])
def test_passes_become_gains_of_nodes_as_the_specification_says(way: str, count: int) -> None:
    fake = FakePasses(3, len(WHERE))
    find: Any = by_ratios if way == "ratios" else by_blocks
    gains = find(stream_of(2), WHERE, fake.doors, 0.05, 7)
    assert len(fake.asked) == count
    assert len({injection.seed for injection in fake.asked}) == count
    for row, kind in enumerate(("tokens", "weights")):
        for k, j, unit in np.ndindex(len(WHERE), 3, 2):
            b, f = naive(fake, way, row, kind, k, j, unit)
            assert gains.backward[row, unit, k, j] == pytest.approx(b)
            assert gains.forward[row, unit, k, j] == pytest.approx(f)
        changes, moved = fake.results["backward", 2, kind]
        for s in range(2):
            assert np.allclose(gains.exits[row, ..., s], moved / changes.exits[s] ** 0.5)
            for turn in range(2):
                assert np.allclose(gains.entries[s, turn][row], 6.0 / (2 * (row + 1) * (turn + 1)))
                assert gains.reach[s, turn][row] == pytest.approx((3 + turn) / 2)
    for j in range(3):
        changes, _ = fake.results["forward", 0 if way == "ratios" else j, "tokens"]
        below = changes.activation[j] if way == "ratios" else changes.injected[j]
        assert gains.curvature[j] == pytest.approx(changes.product[j] / below)
