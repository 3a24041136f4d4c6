"""Values of a checkpoint as strict JSON, floats exactly as they were: a NaN or an infinity, which JSON lacks, too.

Checked  tests/training/test_checkpoint.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

SPECIAL: Final = "$float"


def encoded(value: Any) -> Any:
    """`value` as strict JSON: floats that JSON lacks become ``{"$float": "nan"}``."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value) or SPECIAL in value:
            raise TypeError(f"keys of a checkpoint's state must be strings, not {list(value)}")
        return {key: encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {SPECIAL: repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is no JSON value: {value!r}")


def decoded(value: Any) -> Any:
    """What `encoded` was given; lists for tuples."""
    if isinstance(value, dict):
        if value.keys() == {SPECIAL}:
            return float(value[SPECIAL])
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value
