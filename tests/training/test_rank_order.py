"""Orders of ranks in runs: advised by what is known of links, followed, and without a trace in what is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import ended, environment, start
from tiny_run import TINY, flags, losses, write_corpus

from scrimp.cli import main
from scrimp.launchers import RANK_ORDER
from scrimp.profiler.links_report import RankLinks, RankPlace, keep_links

LAYOUT = ["--layout.fsdp=2", "--layout.tp=2", "--model.num-kv-heads=2", "--model.num-heads=4"]


def known(within: float, between: float) -> None:
    """Ranks 0 and 2 on one node, 1 and 3 on another."""
    rows = tuple(
        tuple(0.0 if one == other else within if (one - other) % 2 == 0 else between for other in range(4))
        for one in range(4)
    )
    places = tuple(RankPlace(f"node{rank % 2}", "a CPU", rank // 2) for rank in range(4))
    keep_links(RankLinks("gloo", "2", places, False, rows, rows, ()), pytest.fail)


@pytest.fixture
def shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What scrimp plan prints, in a home of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def of(*layout: str) -> str:
        assert main(["plan", *TINY, *layout]) == 0
        return capsys.readouterr().out

    return of


def test_a_plan_says_which_order_is_better(shown: Callable[..., str]) -> None:
    known(within=1e9, between=1e7)
    assert f"{RANK_ORDER}=0,2,1,3 would take" in shown(*LAYOUT)


@pytest.mark.slow
def test_nothing_is_advised_where_nothing_is_known_or_gained(shown: Callable[..., str]) -> None:
    assert RANK_ORDER not in shown(*LAYOUT)
    known(within=1e9, between=0.98e9)
    assert RANK_ORDER not in shown(*LAYOUT)
    known(within=1e9, between=1e7)
    assert RANK_ORDER not in shown("--layout.fsdp=4")  # whatever the order, the ring crosses the slow link
    assert RANK_ORDER not in shown()


@pytest.mark.slow
def test_a_run_in_another_order_writes_the_same_files(tmp_path: Path) -> None:
    """Measured links, a run as the launcher numbers its ranks, and one in another order."""
    corpus, found = write_corpus(tmp_path), {}
    environ = environment(tmp_path, XDG_CACHE_HOME=str(tmp_path / "home"))
    for name, order in (("given", ""), ("other", "0,2,3,1")):
        run = tmp_path / name
        words = flags(corpus, run, *LAYOUT, "--train.steps=3", "--checkpoint.every=3")
        command = ["-m", "scrimp", "launch", "--ranks=4", *words]
        ((code, output),) = ended([start(command, environ | {RANK_ORDER: order})], 300)
        assert code == 0, output
        assert ("ranks by SCRIMP_RANK_ORDER: 1 is 2, 2 is 3, 3 is 1 of scrimp launch" in output) == bool(
            order
        )
        files = sorted(run.glob("checkpoints/step-*/**/*.safetensors"))
        assert files
        digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        found[name] = losses(run), digests
    assert found["given"] == found["other"]
