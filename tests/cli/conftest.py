"""Stand-ins for the rooms behind the commands: these tests ask what a command hands over."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest


class Calls(list[tuple[str, tuple[Any, ...], dict[str, Any]]]):
    """What was called, in order, and what each call answers."""

    answers: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.answers = {
            "train": types.SimpleNamespace(exit_code=0),
            "verify_path": ("all is well", True),
            "CorpusSpec": None,
            "prepare": "shards",
            "write_report": "report.html",
        }


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What commands hand their arguments to, replaced by recorders."""
    recorded = Calls()

    def recorder(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            recorded.append((name, args, kwargs))
            answer = recorded.answers.get(name)
            if isinstance(answer, BaseException):
                raise answer
            return types.SimpleNamespace(**kwargs) if name == "CorpusSpec" else answer

        return call

    rooms = {
        "scrimp.training": ["train", "verify_path"],
        "scrimp.cli.dry_run": ["dry_run"],
        "scrimp.cli.trained": ["evaluate_target", "generate_text", "export_run"],
        "scrimp.data": ["prepare", "CorpusSpec"],
        "scrimp.report": ["write_report"],
    }
    for room, names in rooms.items():
        module = types.ModuleType(room)
        for name in names:
            setattr(module, name, recorder(name))
        monkeypatch.setitem(sys.modules, room, module)
    return recorded
