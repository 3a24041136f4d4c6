"""Merges against truly trained mixtures: planted orders are said, greedy choices are the best where losses add up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.cli import main
from scrimp.files import write_whole
from scrimp.recipes import file_of
from scrimp.recipes.data_merging import findings, greedy, interval, mixtures_of
from scrimp.study.definition import Study, load_study, parse_study
from scrimp.study.results import results_of
from scrimp.study.rounds import steps_of
from scrimp.study.rows import Row, append_row

DOMAINS = ("encodings", "pydoc_data", "asyncio", "email", "xml")
PAIRS = list(itertools.combinations(DOMAINS, 2))
TEXT = "held_out_loss/stdlib:http"


@pytest.fixture(scope="module")
def study() -> Study:
    return load_study(str(file_of("recipe:data-merging", "study")))


def said(study: Study, losses: Mapping[str, Sequence[float]]) -> list[str]:
    """Findings where variants have these losses on one text, a seed each."""
    rows = [
        Row(
            variant=one.name,
            seed=seed,
            steps=steps_of(one),
            digest="",
            figures={"mean_source_loss": None, "held_out_loss": 9.0, TEXT: loss},
        )
        for one in study.variants
        for seed, loss in enumerate(losses.get(one.name, ()))
    ]
    return findings(results_of(study, {row.key: row for row in rows}))


def test_the_command_shows_names_as_they_are(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal's library would make a picture of :email: and a style of what stands in brackets."""
    write_whole(tmp_path / "study.toml", study.text)
    for name, losses in planted([float(place) for place in range(10)]).items():
        one = study.named(name)
        figures = {"mean_source_loss": losses[0], "held_out_loss/stdlib:email": losses[0]}
        append_row(
            tmp_path,
            Row(variant=name, seed=0, steps=steps_of(one), digest=study.digest(one, 0), figures=figures),
        )
    assert main(["study", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\nstdlib:email: Spearman 1.00 (" in shown
    assert "\nmean of all: Spearman 1.00 (" in shown


def planted(trained: Sequence[float]) -> dict[str, list[float]]:
    """Losses of the domains 1, 2, 4, 8, 16, of merges their means, and of trained pairs as given."""
    alone = dict(zip(DOMAINS, (1.0, 2.0, 4.0, 8.0, 16.0), strict=True))
    losses = {name: [loss] for name, loss in alone.items()}
    losses |= {f"merge-{a}+{b}": [(alone[a] + alone[b]) / 2] for a, b in PAIRS}
    order = sorted(PAIRS, key=lambda pair: alone[pair[0]] + alone[pair[1]])
    return losses | {f"{a}+{b}": [loss] for (a, b), loss in zip(order, trained, strict=True)}


def test_the_study_has_every_mixture_once_by_merge_and_every_pair_trained(study: Study) -> None:
    mixtures = mixtures_of(study)
    expected = {
        frozenset((f"stdlib:{one}", Fraction(1, size)) for one in chosen)
        for size in range(1, 6)
        for chosen in itertools.combinations(DOMAINS, size)
    }
    for is_merge in (False, True):
        found = [mixtures[one.name] for one in study.variants if (one.combined is not None) == is_merge]
        assert len(found) == len(set(found))
        assert set(found) == {one for one in expected if (len(one) > 1 if is_merge else len(one) < 3)}
    assert study.trunk is not None
    for one in study.runs:  # two passes over each domain
        assert one.settings["train.steps"] * 2048 == 2 * 65536 * len(mixtures[one.name])
        assert one.settings["data.tokens"] == 65536


@examples(40)
@given(order=st.permutations(range(10)))
def test_a_planted_order_has_its_correlation(study: Study, order: list[int]) -> None:
    """Spearman's formula for ranks without ties; the first of the merges is what is chosen greedily."""
    [line] = said(study, planted([5.0 + place for place in order]))
    rho = 1 - 6 * sum((rank - place) ** 2 for rank, place in enumerate(order)) / (10 * 99)
    assert line.startswith(f"stdlib:http: Spearman {rho:.2f} (")
    assert "of 10 mixtures, 1 seed" in line
    assert f"in the order of merges {' '.join(str(place + 1) for place in order)};" in line
    assert f"by the mean of the domains' losses, without a merge, {rho:.2f};" in line
    assert line.endswith(
        f"chosen greedily stdlib:encodings+stdlib:pydoc_data, truly {order[0] + 1} of 10; of those chosen for 1 to 2 "
        "domains stdlib:encodings has the lowest loss, 1.000."
    )


def test_what_the_domains_alone_foretell_is_said_beside_merges(study: Study) -> None:
    """Merges are lowest where their domains are worst; of all five the merge is lowest."""
    losses = planted([float(place) for place in range(10, 0, -1)])
    losses |= {name: [20 - one[0]] for name, one in losses.items() if name.startswith("merge-")}
    [all_of_them] = [one.name for one in study.variants if len(one.name.split("+")) == 5]
    losses[all_of_them] = [0.5]
    [line] = said(study, losses)
    assert "Spearman 1.00 (" in line
    assert "without a merge, -1.00;" in line
    losses["merge-encodings+asyncio+xml"] = losses["merge-encodings+email+xml"] = [0.75]
    losses["merge-encodings+asyncio+email+xml"] = [0.7]
    [line] = said(study, losses)
    assert "; of those chosen for 1 to 5 domains" in line
    assert line.endswith("has the lowest loss, 0.500.")


def test_equal_losses_share_their_rank(study: Study) -> None:
    """Ranks 1, 2.5, 2.5, 4 ... 10 against 1 ... 10: both sums of squares are 82.5, less half a unit of the tie."""
    trained = [1.0, 2.0, 2.0, *map(float, range(4, 11))]
    [line] = said(study, planted(trained))
    assert f"Spearman {(82.5 - 0.5) / (82.5 * 82.0) ** 0.5:.2f} (" in line
    assert "merges 1 2 2 4 5 6 7 8 9 10;" in line


def test_seeds_are_averaged_and_those_that_not_all_have_are_left_out(study: Study) -> None:
    losses = planted([float(place) for place in range(10)])
    more = {name: [*one, one[0] + 1, 0.0] for name, one in losses.items()}
    more["email"] = more["email"][:2]
    [line] = said(study, more)
    assert line.startswith("stdlib:http: Spearman 1.00 (1.00 to 1.00)")
    assert "2 seeds" in line


def test_a_further_domain_costs_one_run(study: Study) -> None:
    """Of a text that the mixtures name already: what has run stays as it is."""
    mix = (
        study.named("xml")
        .settings["data.mix"]
        .replace("=1", "=0")
        .replace("multiprocessing=0", "multiprocessing=1")
    )
    more = f'\n[[variants]]\nname = "multiprocessing"\ndata.mix = "{mix}"\n'
    for one in DOMAINS:
        more += (
            f'\n[[variants]]\nname = "merge-{one}+multiprocessing"\nmerge = ["{one}", "multiprocessing"]\n'
        )
    wider = parse_study(study.text + more, name=study.name, where="study.toml")
    for variant in study.variants:
        assert wider.digest(wider.named(variant.name), 0) == study.digest(variant, 0), variant.name
    added = wider.variants[len(study.variants) :]
    assert [one.name for one in added if one.combined is None] == ["multiprocessing"]


@pytest.mark.parametrize("gone", ["encodings", "merge-encodings+xml", "encodings+pydoc_data"])
def test_of_runs_that_are_missing_nothing_is_said(study: Study, gone: str) -> None:
    losses = planted([float(place) for place in range(10)])
    del losses[gone]
    [line] = said(study, losses)
    assert f"of {10 if gone in DOMAINS else 9} mixtures" in line
    if gone == "encodings+pydoc_data":
        assert line.endswith("chosen greedily nothing that a run was trained on.")
    assert said(study, {name: one for name, one in losses.items() if "+" not in name}) == []
    assert said(study, {}) == []


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=6, unique=True), st.integers(1, 6))
def test_where_losses_add_up_greedy_is_the_best_of_all(alone: list[int], largest: int) -> None:
    sizes = range(1, min(largest, len(alone)) + 1)
    losses = {frozenset(one): sum(one) for size in sizes for one in itertools.combinations(alone, size)}
    path = greedy(losses)
    assert path == [
        min((one for one in losses if len(one) == size), key=losses.__getitem__) for size in sizes
    ]


def test_the_interval_is_wide_where_the_order_is_noise_and_a_point_where_it_holds() -> None:
    generator = np.random.default_rng(3)
    x, noise = generator.standard_normal((10, 3)), generator.standard_normal((10, 3))
    low, high = interval(x, noise)
    assert low < 0 < high
    assert high - low > 0.6
    ordered = np.arange(10.0)[:, None].repeat(3, 1)
    assert interval(ordered, ordered**3) == pytest.approx((1.0, 1.0))
    assert interval(ordered[:3], ordered[:3]) == pytest.approx((1.0, 1.0))  # one draw in nine is one mixture
    assert interval(np.ones_like(ordered), ordered) == (-1.0, 1.0)


def test_merges_with_weights_are_the_mixtures_with_these_weights() -> None:
    """An average of averages of two domains, one of two units and one of a single one."""
    text = """
figure = "mean_source_loss"
[settings]
data.tokens = 64
[trunk]
data.mix = "a1=1,a2=1,b=1"
[[variants]]
name = "a1"
data.mix = "a1=1,a2=0,b=0"
[[variants]]
name = "a2"
data.mix = "a1=0,a2=1,b=0"
[[variants]]
name = "b"
data.mix = "a1=0,a2=0,b=1"
[[variants]]
name = "by-domains"
merge = { a1 = 1, a2 = 1, b = 2 }
[[variants]]
name = "by-units"
merge = ["a1", "a2", "b"]
[[variants]]
name = "trained"
data.mix = "a1=1,a2=1,b=2"
"""
    found = mixtures_of(parse_study(text, name="mine", where="mine.toml"))
    assert found["by-domains"] == found["trained"]
    assert dict(found["by-domains"]) == {"a1": Fraction(1, 4), "a2": Fraction(1, 4), "b": Fraction(1, 2)}
    assert dict(found["by-units"]) == dict.fromkeys(("a1", "a2", "b"), Fraction(1, 3))
