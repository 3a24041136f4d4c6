"""Reports on links: slow ones by name, and the file that finds them again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from scrimp.errors import DeviceError
from scrimp.profiler.links_report import (
    CollectiveRate,
    RankLinks,
    RankPlace,
    cache_file,
    clusters_of,
    keep_links,
    known_links,
    slow_links_text,
    tiers_of,
)

HERE = tuple(RankPlace(host, "a GPU", local) for host in ("one", "two") for local in (0, 1))


def matrix(ranks: int, usual: float, slow: dict[tuple[int, int], float]) -> tuple[tuple[float, ...], ...]:
    rows = [[0.0 if one == other else usual for other in range(ranks)] for one in range(ranks)]
    for (one, other), rate in slow.items():
        rows[one][other] = rows[other][one] = rate
    return tuple(map(tuple, rows))


def between(groups: Iterable[Iterable[int]], rate: float) -> dict[tuple[int, int], float]:
    lists = [list(group) for group in groups]
    return {
        (min(a, b), max(a, b)): rate
        for one, other in itertools.combinations(lists, 2)
        for a, b in itertools.product(one, other)
    }


def report(bandwidth: tuple[tuple[float, ...], ...], places: tuple[RankPlace, ...] = HERE) -> RankLinks:
    return RankLinks(
        backend="gloo",
        torch="2",
        places=places,
        at_once=False,
        latency=matrix(len(places), 1e-5, {}),
        bandwidth=bandwidth,
        collectives=(CollectiveRate("all-reduce", 64, 1e-4, 1e9),),
    )


def test_links_that_are_about_as_fast_are_not_named() -> None:
    rates = matrix(4, 4e9, {(0, 1): 3e9, (2, 3): 2.2e9, (1, 2): 1.2e9})
    assert len(tiers_of(rates)) == 1
    assert slow_links_text(rates) == []
    assert slow_links_text(matrix(2, 4e3, {})) == []


def test_one_slow_link_is_named() -> None:
    rates = matrix(4, 3.6e9, {(0, 2): 0.9e9})
    assert slow_links_text(rates) == ["rank 0 – rank 2: 900 MB/s, a quarter of the others' 3.6 GB/s"]


def test_slow_links_between_groups_are_named_by_the_groups() -> None:
    rates = matrix(4, 100e9, between([(0, 2), (1, 3)], 1e9))
    assert slow_links_text(rates) == [
        "between ranks 0 and 2; ranks 1 and 3: 1 GB/s, 1/100 of the 100 GB/s within them"
    ]
    rates = matrix(3, 9e8, {(0, 2): 3e8, (1, 2): 3e8})
    assert slow_links_text(rates) == [
        "between ranks 0 and 1; rank 2: 300 MB/s, a third of the 900 MB/s within them"
    ]


def test_tiers_of_nodes_and_pods() -> None:
    slow = (
        between([range(4), range(4, 8)], 1e9)
        | between([range(2), range(2, 4)], 10e9)
        | between([(4, 5), (6, 7)], 10e9)
    )
    rates = matrix(8, 100e9, slow)
    assert [len(tier) for tier in tiers_of(rates)] == [4, 8, 16]
    assert clusters_of(8, tiers_of(rates)[0]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    first, second = slow_links_text(rates)
    assert first.startswith(
        "between ranks 0 and 1; ranks 2 and 3; ranks 4 and 5; ranks 6 and 7: 10 GB/s, 1/10 of"
    )
    assert second.startswith("between ranks 0, 1, 2 and 3; ranks 4, 5, 6 and 7: 1 GB/s")


def test_ranks_find_their_links_whatever_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = report(matrix(4, 4e9, {(0, 3): 1e9}))
    assert known_links(HERE) is None
    assert known_links(4) is None
    keep_links(kept, pytest.fail)
    assert known_links(HERE) == kept
    assert known_links(4) == kept
    assert known_links(2) is None
    found = known_links([HERE[at] for at in (0, 2, 3, 1)])
    assert found is not None
    assert found.bandwidth == matrix(4, 4e9, {(0, 2): 1e9})
    assert known_links([*HERE[:3], RankPlace("three", "a GPU", 1)]) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"format": 1', '"format": 2'),
        ("4000000000.0", "-1.0"),
        ("4000000000.0", "0.0"),
        ('"host": "two"', '"host": "one"'),
        ("1e-05,\n", ""),
        ("{", "["),
    ],
)
def test_another_file_is_refused_and_passed_over(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = report(matrix(4, 4e9, {}))
    keep_links(kept, pytest.fail)
    text = kept.to_json()
    assert RankLinks.from_json(text) == kept
    assert old in text
    with pytest.raises(DeviceError):
        RankLinks.from_json(text.replace(old, new))
    cache_file(HERE).write_text(text.replace(old, new))
    assert known_links(HERE) is None
    assert known_links(4) is None
