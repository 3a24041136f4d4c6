"""What choosing formats costs, from made-up seconds."""

from __future__ import annotations

import pytest
from snip_cost import EVERY, FIRST, page, shares


def test_acts_are_laid_out_over_the_default_cadence() -> None:
    acts = {"measure": 9.0, "solve": 2.0, "stall": 0.5, "probe": 1.5}
    events = [{"kind": "start"}, *({"kind": "replan", "seconds": acts} for _ in range(3))]
    plain = {"events": [], "steps": [99.0] + [0.5] * 9}
    planned = {"events": events, "steps": [99.0] * (FIRST + 1) + [2.0] * (3 * EVERY)}
    found = shares(plain, planned)
    every, probes = (
        found["cadence"]["every"],
        1 + found["cadence"]["every"] // found["cadence"]["probe_every"],
    )
    waits = 9.0 + 0.5 + 1.5 * probes
    assert every > found["cadence"]["probe_every"] > 0
    assert found["shares"] == pytest.approx(
        {
            "of bf16 steps": waits / (every * 0.5),
            "of bf16 steps, with solver": (waits + 2.0) / (every * 0.5),
            "of plan steps": waits / (every * 2.0),
            "of plan steps, with solver": (waits + 2.0) / (every * 2.0),
        }
    )
    settings = {"preset": "llama-3m", "batch_tokens": 4096, "formats": "mxfp8,nvfp4"}
    text = page({"command": "x", "commit": "y", "device": "d", "cpu": "c", "settings": settings} | found)
    assert f"| of plan steps | {waits / (every * 2.0):.2%} |" in text
    assert "| step in plan | 2 | 2 | 2 | 30 |" in text
