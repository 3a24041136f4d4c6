"""What made plans lose."""

from __future__ import annotations

import dataclasses

import pytest
from published_settings import LLAMA_8B, setting

from scrimp.planner.layout.contenders import Misfit, families_of
from scrimp.planner.layout.explained import (
    again_seconds,
    bytes_beside,
    fullest,
    loser,
    losers,
    reason_text,
    seconds_beside,
)
from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.search import Candidate, Found, search
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.stage_memory import peak_bytes


def candidate(one: Setting) -> Candidate:
    return Candidate(one, predict(one), tuple(peak_bytes(one)))


@pytest.fixture(scope="module")
def found() -> Found:
    like = setting(dataclasses.replace(LLAMA_8B, layers=8), "8xh100", global_batch=64)
    return search(
        Question(
            model=like.model,
            cluster=like.cluster,
            sequence=like.sequence,
            global_batch=like.global_batch,
            software=like.software,
        )
    )


def test_every_family_but_the_best_plans_own_lost(found: Found) -> None:
    best, rows = found.best[0], losers(found)
    own = set(families_of(best.setting.layout))
    assert {one.family for one in rows} == set(found.families) - own
    for one in rows:
        if isinstance(one.best, Candidate):
            assert one.slower == pytest.approx(one.best.seconds / best.seconds - 1)
            assert one.slower >= 0
            parts = {each.name: each.more for each in seconds_beside(best, one.best)}
            assert parts[one.part] == max(parts.values()) == one.amount
            assert sum(parts.values()) == pytest.approx(one.best.seconds - best.seconds)
        else:
            assert one.killed_by == "memory"
    assert losers(dataclasses.replace(found, best=())) == []


def test_each_cause_is_told_from_the_others(found: Found) -> None:
    best = candidate(setting(LLAMA_8B, "8xh100"))
    killers = {
        "link": setting(LLAMA_8B, "8xh100", tp=8),
        "bubble": setting(LLAMA_8B, "8xh100", pp=8, zero=1, global_batch=8),
        "recompute": setting(LLAMA_8B, "8xh100", recompute="full"),
    }
    for cause, other in killers.items():
        start = candidate(dataclasses.replace(best.setting, global_batch=other.global_batch))
        row = loser(("tp", 8), candidate(other), start)
        assert row.killed_by == cause
        assert reason_text(row, start).endswith(
            {"link": "nothing hides", "bubble": "other stages", "recompute": "save memory"}[cause]
        )
    again = candidate(killers["recompute"])
    assert again_seconds(again) == pytest.approx(again.seconds - best.seconds, rel=0.2)
    assert again_seconds(best) == 0.0


def test_what_does_not_fit_is_over_by_what_its_fullest_rank_needs() -> None:
    best = candidate(setting(LLAMA_8B, "8xl40s"))
    large = setting(LLAMA_8B, "8xl40s", tp=1, pp=8, zero=1, micro_batch=8)
    misfit = Misfit(large, tuple(peak_bytes(large)))
    row = loser(("pp", 8), misfit, best)
    assert (row.killed_by, row.part, row.slower) == ("memory", "activations", None)
    assert row.amount == max(one.total for one in peak_bytes(large)) - large.device.memory_bytes > 0
    assert "GiB over, most by activations" in reason_text(row, best)
    bytes_ = {one.name: (one.best, one.other) for one in bytes_beside(best, misfit)}
    assert sum(other for _, other in bytes_.values()) == pytest.approx(fullest(misfit.memory).total)
