"""Which options of `scrimp eval` go together."""

from __future__ import annotations

import pytest

from scrimp.cli import main


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["--data is missing", "--tasks"]),
        (["--data", "a.txt", "--checkpoints"], ["--checkpoints needs --tasks"]),
        (["--data", "a.txt", "--beside", "other"], ["--beside needs --tasks"]),
        (["--tasks", "copying", "--sequence", "64"], ["--sequence"]),
        (["--tasks", "closing", "--data", "a.txt", "--conversations"], ["--conversations"]),
        (["--tasks", "copying", "--data", "a.txt"], ["--data is read by none of these tasks"]),
        (["--tasks", "copying,closing"], ["--data is missing", "copying,closing"]),
        (["--tasks", "copyin"], ["there is no task 'copyin'", "did you mean copying"]),
        (["--tasks", "copying,"], ["there is no task ''"]),
        (["--tasks", "absent.jsonl"], ["there is no task 'absent.jsonl'", "a JSONL file"]),
        (["--tasks", "copying", "--device", "tpu"], ["--device", "tpu"]),
        (["--tasks", "copying"], ["no-run does not exist"]),
    ],
)
def test_what_does_not_go_together_is_refused(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "no-run", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in parts:
        assert part in shown.err
