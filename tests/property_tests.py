"""How many examples a property is tried on: all in `make test-all`, every fifth in `make test`.

The profile says which (`--hypothesis-profile=all`); a test that needs another number than hypothesis's 100 asks for it
here, so that it follows.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings

USUAL = 100
"""Examples of a property that asks for no number of its own, where all are tried."""


def register_profiles() -> None:
    """`scrimp`, in force from now on, and `all`.

    How long an example takes says how busy the machine is, not whether the code is right: there is no deadline.
    """
    settings.register_profile("scrimp", deadline=None, max_examples=USUAL // 5)
    settings.register_profile("all", deadline=None, max_examples=USUAL)
    settings.load_profile("scrimp")


def examples(number: int, **more: Any) -> settings:
    """So many examples where all are tried, at least five."""
    return settings(max_examples=max(5, number * settings().max_examples // USUAL), **more)
