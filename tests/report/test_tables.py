"""Tables for the terminal."""

import io

import pytest
from rich.console import Console

from scrimp.report.tables import account_table, bar, key_value_table


def shown(table, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return console.file.getvalue()


def test_an_account_shows_bytes_shares_and_bars():
    text = shown(
        account_table([("weights", 3 * 2**30), ("optimizer states", 2**30), ("none", 0)], title="predicted")
    )
    assert "predicted" in text
    assert "3.00 GiB" in text
    assert "75.0%" in text
    assert "█" * 18 in text
    assert "0 B" in text


def test_an_empty_account_is_no_division_by_zero():
    assert "0.0%" in shown(account_table([("weights", 0)], title="t"))


@pytest.mark.parametrize(("share", "text"), [(0, ""), (1, "████"), (0.5, "██"), (1e-9, "▏"), (2, "████")])
def test_bars_are_proportional_and_never_hide_a_little(share, text):
    assert bar(share, 4) == text


def test_names_are_not_taken_for_markup_or_escapes():
    text = shown(key_value_table([("[red]x[/]", "a\x1b[31m b"), ("path", "/tmp/[bold]")], title="[t]"))
    assert "[red]x[/]" in text
    assert "\x1b" not in text
    assert "/tmp/[bold]" in text
    assert "[t]" in text
