"""Numbers for people: bytes, counts, durations, rates and shares, written one way everywhere.

Problem  The step line, the dry run and the page show the same figures. If each rounds in its
         own way, two equal numbers look different.
Method   Three significant digits and a unit. Bytes in binary units (KiB = 1024 bytes), counts
         and rates in decimal ones (k = 1000). A value that rounds up to the next unit is
         shown in that unit (1024 KiB is 1.00 MiB, 999.9k is 1.00M).
Limits   What is not a finite number is shown as a dash, never as 0.
Checked  tests/report/test_units.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, TypeGuard

MISSING: Final = "–"
"""Shown in place of a value that was not recorded or is not finite."""

_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 but newline and tab, DEL, C1, what turns the direction of text, and halves of characters."""
_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_UNITS: Final = ("", "k", "M", "B", "T")
_FLOP_UNITS: Final = ("", "k", "M", "G", "T", "P", "E")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a finite number that can be shown (a bool is not)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of a float
        return False


def format_bytes(count: float | None) -> str:
    """17179869184 -> ``16.0 GiB``."""
    return _scaled(count, 1024, _BYTE_UNITS)


def format_count(count: float | None) -> str:
    """3145728 -> ``3.15M``; whole numbers below 1,000 stay whole."""
    return _scaled(count, 1000, _COUNT_UNITS).replace(" ", "")


def format_flops(count: float | None) -> str:
    """46.6e9 -> ``46.6 GFLOP``."""
    text = _scaled(count, 1000, _FLOP_UNITS)
    if text == MISSING:
        return text
    return f"{text}FLOP" if " " in text else f"{text} FLOP"


def format_rate(per_second: float | None, unit: str = "tok") -> str:
    """19150.0 -> ``19.2k tok/s``."""
    text = format_count(per_second)
    return text if text == MISSING else f"{text} {unit}/s"


def printable(text: str) -> str:
    """Text as a terminal may have it: control characters but newline and tab as Python writes them (``\\x1b``)."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def format_percent(share: float | None, decimals: int = 1) -> str:
    """0.4178 -> ``41.8%``."""
    return f"{share:.{decimals}%}" if is_number(share) else MISSING


def format_duration(seconds: float | None) -> str:
    """125 -> ``2m 05s``; below a minute with three digits: ``4.20 s``, ``12.0 ms``, ``35.0 µs``."""
    if not is_number(seconds):
        return MISSING
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 59.95:
        for factor, unit in ((1e6, "µs"), (1e3, "ms")):
            if seconds * factor < 999.5:
                return f"{_three_digits(seconds * factor)} {unit}"
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}h"
    if hours:
        return f"{hours}h {minute:02}m"
    return f"{minutes}m {second:02}s"


def format_number(value: float | None, digits: int = 4) -> str:
    """A plain number with `digits` significant digits: 3.04173 -> ``3.042``, 0.0003 -> ``3e-4``."""
    if not is_number(value):
        return MISSING
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e15 or size < 1e-3:
        mantissa, power = f"{value:.{digits - 1}e}".split("e")
        short = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{short}e{int(power)}"
    exponent = int(f"{size:.{digits - 1}e}".split("e")[1])  # after rounding: 9.9999 counts as 10
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def format_integer(value: float | None) -> str:
    """1000000 -> ``1,000,000``."""
    return f"{round(value):,}" if is_number(value) else MISSING


def _scaled(value: float | None, base: int, units: Sequence[str]) -> str:
    if not is_number(value):
        return MISSING
    if value < 0:
        return f"-{_scaled(-value, base, units)}"
    if value < base and float(value).is_integer():
        return f"{int(value)} {units[0]}".rstrip()
    index, scaled = 0, float(value)
    # Compared after rounding, so that 1023.99 KiB becomes 1.00 MiB and not 1024 KiB.
    while index + 1 < len(units) and float(_three_digits(scaled)) >= base:
        index, scaled = index + 1, scaled / base
    return f"{_three_digits(scaled)} {units[index]}".rstrip()


def _three_digits(value: float) -> str:
    if value >= 99.95 or value == 0:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
