"""`scrimp doctor --ranks` on real ranks: a table, JSON, the kept report; and what one process is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import ended, environment, start
from rich.console import Console

from scrimp.cli import main
from scrimp.cli.doctor_ranks import print_links
from scrimp.profiler.links_report import CollectiveRate, RankLinks, RankPlace, known_links


def links(ranks: int) -> RankLinks:
    """Nodes of four ranks."""
    rows = tuple(
        tuple(0.0 if one == other else 2e9 if one // 4 == other // 4 else 2.5e8 for other in range(ranks))
        for one in range(ranks)
    )
    places = tuple(RankPlace(f"node{rank // 4}", "a GPU", rank % 4) for rank in range(ranks))
    found = (CollectiveRate("all-reduce", 2**24, 3e-3, 1e8),)
    waits = tuple(tuple(float(one != other) * 25e-6 for other in range(ranks)) for one in range(ranks))
    return RankLinks("nccl", "2.13", places, ranks > 16, waits, rows, found)


def printed(found: RankLinks) -> str:
    console = Console(width=200, markup=False, highlight=False)
    with console.capture() as capture:
        print_links(found, console)
    return capture.get()


def test_a_matrix_of_few_ranks_and_tiers_of_many() -> None:
    few, many = printed(links(8)), printed(links(24))
    assert few.count("2 GB/s") == 12 + 1  # of each node six pairs; in the sentence on slow links
    assert few.count("250 MB/s") == 16 + 1
    assert few.count("25.0 µs") == 28
    assert "ranks 0, 1, 2 and 3: node0, a GPU" in few
    slow = "between ranks 0, 1, 2 and 3; ranks 4, 5, 6 and 7"
    assert f"slow  {slow}: 250 MB/s, 1/8 of the 2 GB/s within them" in few
    assert "measured at once" not in few
    assert "measured at once" in many
    rows = [" ".join(line.split()) for line in many.splitlines()]
    assert any(row.startswith("36 2 GB/s to 2 GB/s 25.0 µs to 25.0 µs ranks 0, 1, 2 and 3; ") for row in rows)
    assert any(
        row.startswith("240 250 MB/s to 250 MB/s 25.0 µs to 25.0 µs ranks 0, 1, 2, 3, 4,") for row in rows
    )
    assert any("all-reduce" in row and "3.00 ms 100 MB/s 16.0 MiB" in row for row in rows)


def test_one_process_has_no_links(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ranks", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "there are no links between ranks to measure" in error
    assert "scrimp launch --ranks 4 doctor --ranks" in error


@pytest.mark.slow
def test_two_ranks_measure_their_links_and_keep_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["-m", "scrimp", "launch", "--ranks=2", "doctor", "--ranks", "--device=cpu"]
    # An order is for runs: links are those of the launcher's ranks.
    environ = environment(tmp_path, XDG_CACHE_HOME=str(tmp_path), SCRIMP_RANK_ORDER="1,0")
    ((code, output),) = ended([start([*command, "--json"], environ)])
    assert code == 0, output
    found = RankLinks.from_json(output)
    assert known_links(2) == known_links(found.places) == found
    assert [place.local_rank for place in found.places] == [0, 1]
    ((code, output),) = ended([start(command, environ)])
    assert code == 0, output
    assert "2 ranks over " in output
    assert "all-to-all" in output
