"""Sources that a run mixes, and their shares of its samples.

Problem  A weight such as 0.1 is no binary number. An order of samples that followed rounded weights would depend on how
         they were written, and drift from what was asked for over a long run.
Method   ``data.mix = "web.jsonl=0.7,stdlib=0.3"``: a source, as `data.source` takes it, and behind the last ``=`` of
         each part a decimal number. Weights are read exactly and brought to whole shares without a common divisor, here
         7 and 3: 70 and 30, or 7 and 3, say the same. A share counts samples (sequences), hence tokens, not documents.
         A source of weight 0 is evaluated, and never trained on.
Limits   Shares add up to 100,000 at most, which five digits of a weight keep; 64 sources at most; names without commas.
Checked  tests/config/test_mix_setting.py
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from scrimp.errors import ConfigError

MOST_PARTS = 100_000
"""Largest sum of shares: after so many samples their order begins again, and one such round is held in memory."""
MOST_SOURCES = 64
_FORM = "two sources or more, each once, as web.jsonl=0.7,stdlib=0.3"
_ROUNDED_TO = 1000


@dataclass(frozen=True)
class MixedSource:
    """One source of a mixture."""

    name: str
    """As `data.source` takes it."""
    share: int
    """Samples of it in each round of as many samples as all shares add up to; 0: it is evaluated alone."""


def mixed_sources(text: str) -> tuple[MixedSource, ...]:
    """The sources of a `data.mix`, their shares without a common divisor.

    Raises:
        ConfigError: this is no list of different sources with weights, one above 0, or shares are too fine.
    """
    weights: dict[str, Fraction] = {}
    for part in text.split(","):
        name, equals, weight = (word.strip() for word in part.rpartition("="))
        if not equals or not name:
            raise _refused("a part of data.mix is no source and weight", part, text)
        if name in weights:
            raise _refused(
                "data.mix has a source twice", name, text, do="give it once, with both weights added"
            )
        weights[name] = _weight(weight, name)
    if len(weights) == 1:
        raise _refused(
            "data.mix has one source", text, text, do=f"give it as --data.source {next(iter(weights))}"
        )
    if len(weights) > MOST_SOURCES:
        raise _refused(
            "data.mix has too many sources",
            f"{len(weights)} sources",
            text,
            expected=f"at most {MOST_SOURCES}",
        )
    if not any(weights.values()):
        raise _refused("data.mix trains on nothing", text, text, expected="a weight above 0")
    return tuple(map(MixedSource, weights, _shares(list(weights.values()), text)))


def mix_text(sources: Iterable[MixedSource]) -> str:
    """A `data.mix` of these sources and shares."""
    return ",".join(f"{source.name}={source.share}" for source in sources)


def shares_text(sources: Sequence[MixedSource]) -> str:
    """The shares of sources, for people."""
    total, labels = sum(source.share for source in sources), labels_of([source.name for source in sources])
    found = zip(labels, sources, strict=True)
    return ", ".join(f"{label} {source.share / total:.1%}" for label, source in found)


def labels_of(names: Sequence[str]) -> list[str]:
    """What records call sources: the last part of their names or, where two would be called alike, all of it."""
    short = [Path(name).name or name for name in names]
    return short if len(set(short)) == len(short) else list(names)


def _weight(text: str, name: str) -> Fraction:
    """The exact value of a decimal number that is not negative."""
    with contextlib.suppress(ValueError):
        # First as a float: a fraction writes every digit of 1e-999999 out.
        if float(text) == 0 and not text.strip("0."):
            return Fraction(0)
        if 0 < float(text) < math.inf:
            return Fraction(text)
    raise ConfigError(
        f"the weight of {name} in data.mix is not possible",
        got=repr(text),
        expected="a number as 0.7 or 2; 0 evaluates on the source alone",
    )


def _shares(weights: list[Fraction], text: str) -> list[int]:
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    divisor = math.gcd(*whole)
    shares = [one // divisor for one in whole]
    if sum(shares) > MOST_PARTS:
        rounded = [weight and max(1, round(_ROUNDED_TO * weight / sum(weights))) for weight in weights]
        raise _refused(
            "the weights of data.mix are too fine",
            text,
            text,
            expected=f"whole shares that add up to {MOST_PARTS:,} at most",
            do=f"round them, as to {', '.join(map(str, rounded))}",
        )
    return shares


def _refused(what: str, got: str, text: str, *, expected: str = _FORM, do: str | None = None) -> ConfigError:
    shown = repr(got) if got == text else f"{got.strip()!r} in {text!r}"
    return ConfigError(what, got=shown, expected=expected, do=do)
