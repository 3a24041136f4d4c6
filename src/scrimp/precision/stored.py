"""Formats that frozen weights lie in, written as one line of text (`adapter.base`).

::

    nvfp4                                every linear layer of the blocks as nvfp4 quantizes weights
    nvfp4,*.mlp.down=fp8,blocks.0.*=bf16 some of them otherwise; bf16 leaves a weight as it is

The first is a recipe; patterns are globs over full names, as in `precision`, of which the last that matches wins. The
head, routers and experts are left as they are.
Checked  tests/precision/test_stored_rules.py
"""

from __future__ import annotations

from functools import lru_cache

from scrimp.errors import ConfigError
from scrimp.precision.recipes import RECIPES
from scrimp.precision.rules import Rule

AS_IT_IS = "bf16"
STORABLE = tuple(
    name
    for name, one in RECIPES.items()
    if one.fprop is not None and not (one.fprop.a.fallback or one.fprop.b.hadamard)
)
"""Recipes that quantize weights; one whose inputs fall back quantizes them as the one without, and a rotated weight is
another one for dgrad than for fprop."""
_EXAMPLE = "nvfp4,*.down=fp8,blocks.0.*=bf16"


@lru_cache
def parse_stored(text: str) -> tuple[Rule, ...]:
    """Read rules: that of all layers, then the others.

    Raises:
        ConfigError: what is wrong with which.
    """
    rules = []
    for index, part in enumerate(one.strip() for one in text.split(",")):
        pattern, _, name = part.rpartition("=") if index else ("*", "", part)
        if not pattern or name not in (*STORABLE, AS_IT_IS):
            raise ConfigError(
                f"adapter.base cannot be read at `{part}`",
                got=repr(text),
                expected=f"a recipe, then patterns with one each, such as {_EXAMPLE}; "
                f"recipes: {', '.join(STORABLE)}, or {AS_IT_IS} for weights as they are",
            )
        rules.append(Rule(pattern, name))
    return tuple(rules)


def stored_in(text: str, layer: str) -> str:
    """The recipe that a layer of a block is stored in, by its full name; empty: it is left as it is."""
    found = [rule.formats for rule in parse_stored(text) if rule.matches(layer)]
    return "" if not found or found[-1] == AS_IT_IS else found[-1]
