"""What is said where a trace takes long."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from test_decide import CONFIG

from scrimp.training.memory import decide as memory_plan
from scrimp.training.memory import notice as said
from scrimp.training.setup import decide


def test_a_slow_trace_is_named_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoke, real = threading.Event(), said._say

    def say(text: str) -> None:
        real(text)
        spoke.set()

    def slow(*arguments: Any) -> Any:
        assert spoke.wait(60)
        return traced(*arguments)

    traced = memory_plan._traced_base
    monkeypatch.setattr(memory_plan, "_traced_base", slow)
    monkeypatch.setattr(said, "_say", say)
    monkeypatch.setattr(said, "PATIENCE", 0.0)
    decide(CONFIG)
    assert "tracing the model ..." in capsys.readouterr().err


def test_what_is_quick_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with said.said_if_slow("nothing"):
        pass
    while threading.active_count() > before:
        time.sleep(0.01)
    assert not capsys.readouterr().err
