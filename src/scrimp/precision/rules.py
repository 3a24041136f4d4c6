"""Rules: which recipe each GEMM of each linear layer runs in, written as one line of text.

::

    fp8                                  every block in fp8, the head in bf16
    bf16,*.mlp.*=fp8                     only the MLPs
    fp8,*.wgrad=bf16,blocks.0.*=bf16     wgrad and the first block in bf16
    fp8/fp8/bf16                         the same for wgrad: fprop/dgrad/wgrad
    fp8,head=fp8,*.mlp.down.saved=recompute

Grammar  rules separated by commas; for each GEMM the last rule that names it wins::

             rules    [base | "auto"] {"," rule}
             base     formats | "snip"
             rule     pattern "=" formats
             formats  recipe | recipe "/" recipe "/" recipe

         A pattern is a glob (``*``, ``?``, ``[0-3]``; case counts) over the layer's full name. It sets all
         three GEMMs, or one setting where its last part is fprop, dgrad, wgrad or saved: then its
         formats are one name. Without a base (or with auto) the device decides it.
Planned  The base snip leaves the choice to measurements: every GEMM that no rule names is planned while training.
Head     The base and patterns such as ``*`` mean the linear layers of the blocks. The head, the layer that
         quantization hurts most, stays in the compute format unless a pattern that starts with `head` names it.
Routers  of experts stay there as well, unless a pattern names them (``*.router=fp8``): a changed choice is a jump.
Compute  The working format of activations: fp32 if the base is fp32, else bf16.
Saved    What backward keeps of the input X: a high-precision name; a recipe name (X as that recipe's
         wgrad reads it); or recompute, where X is made from tensors that are kept anyway. By
         default the codes that wgrad reads, which changes no number, or the compute format where
         wgrad quantizes nothing, and where what made X keeps it for itself, as attention does.
Checked  tests/precision/test_rules.py, against a second reading of this grammar.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from scrimp.errors import ConfigError
from scrimp.precision.recipes import GEMMS, HIGH_PRECISION, RECIPES, recipe

AUTO = "auto"
PLANNED = "snip"
"""The base of which formats are chosen by measurement."""
HEAD = "head"
ROUTER = "router"
"""Last part of the name of a layer that chooses experts."""
RECOMPUTE = "recompute"
InputOrigin = Literal["alone", "made", "kept"]
"""Where a layer's input comes from: nobody else keeps it; it is made from tensors that are kept anyway (a norm's input,
gate and up), so that it may be recomputed; or what made it keeps it for itself (attention its output)."""
SAVED_CHOICES = (
    *(name for name, entry in RECIPES.items() if entry.wgrad is not None or name in HIGH_PRECISION),
    RECOMPUTE,
)
"""What backward may keep of a layer's input."""

_SAVED = "saved"
_PATTERN = re.compile(r"[A-Za-z0-9_.*?!\[\]-]+")
_EXAMPLE_FORMAT = "bf16"
_EXAMPLE = "fp8,*.wgrad=bf16,blocks.0.*=bf16"
_NAMES_SHOWN = 8


@dataclass(frozen=True)
class LinearPrecision:
    """One linear layer: a recipe for each GEMM, what backward keeps of the input, and why. In rules, plans, `plan.json`
    and layers that run it is the same; layers of equal formats are equal, whatever the reasons."""

    fprop: str
    dgrad: str
    wgrad: str
    saved: str
    """bf16, fp32, a recipe (X as its wgrad operand), or recompute."""
    reason: str = field(default="", compare=False)

    @property
    def recipes(self) -> tuple[str, str, str]:
        """Those of fprop, dgrad and wgrad."""
        return self.fprop, self.dgrad, self.wgrad

    @classmethod
    def of(cls, name: str) -> LinearPrecision:
        """The same name everywhere: a layer that runs and saves in one high precision."""
        return cls(name, name, name, name)

    def gemm(self, name: str) -> str:
        """The recipe of fprop, dgrad or wgrad."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}[name]


@dataclass(frozen=True)
class Rule:
    """One rule with a pattern."""

    pattern: str
    formats: str
    """A recipe, three with slashes, or what is saved."""

    def __str__(self) -> str:
        return f"{self.pattern}={self.formats}"

    @property
    def target(self) -> str | None:
        """fprop, dgrad, wgrad or saved; None for all three GEMMs."""
        last = self.pattern.rpartition(".")[2]
        return last if last in (*GEMMS, _SAVED) else None

    @property
    def layers(self) -> str:
        """The part of the pattern that layers are matched with."""
        return self.pattern if self.target is None else self.pattern.rpartition(".")[0]

    @property
    def settings(self) -> dict[str, str]:
        """What it sets: GEMM (or saved) to name."""
        return (
            {self.target: self.formats}
            if self.target
            else dict(zip(GEMMS, _three(self.formats), strict=True))
        )

    def matches(self, layer: str) -> bool:
        """Whether it means this layer; the head is meant only by patterns that start with its name, a router only by
        those that have its."""
        if layer == HEAD and not self.pattern.startswith(HEAD):
            return False
        if is_router(layer) and ROUTER not in self.pattern:
            return False
        return fnmatchcase(layer, self.layers)


@dataclass(frozen=True)
class PrecisionRules:
    """Rules that have been read; `str` writes them as text that reads back as the same rules."""

    base: str | None
    """A recipe, or three with slashes; None: the device decides."""
    rules: tuple[Rule, ...] = ()

    def __str__(self) -> str:
        return ",".join([self.base or AUTO, *map(str, self.rules)])

    @property
    def compute(self) -> Literal["fp32", "bf16"]:
        """Working format of the activations.

        Raises:
            ConfigError: there is no base yet.
        """
        if self.base is None:
            raise ConfigError(
                "precision is still open",
                got=repr(str(self)),
                expected=f"a base, such as bf16: {_EXAMPLE}",
                do="resolve the configuration first: auto depends on the device",
            )
        return "fp32" if self.base == "fp32" else "bf16"

    @property
    def is_planned(self) -> bool:
        """Whether formats are chosen by measurement, and changed while training."""
        return self.base == PLANNED

    def pinned(self, layers: Sequence[str]) -> dict[str, dict[str, str]]:
        """Layer to GEMM to recipe, where a rule fixes it."""
        found: dict[str, dict[str, str]] = {}
        for layer in layers:
            for rule in self.rules:
                if rule.matches(layer):
                    chosen = {gemm: name for gemm, name in rule.settings.items() if gemm in GEMMS}
                    found[layer] = found.get(layer, {}) | chosen
        return {layer: gemms for layer, gemms in found.items() if gemms}

    def with_base(self, base: str) -> PrecisionRules:
        """The same rules on another base."""
        return replace(self, base=base)

    def assign(self, layers: Mapping[str, InputOrigin]) -> dict[str, LinearPrecision]:
        """What each layer runs in, and why.

        Args:
            layers: full names, such as ``head``, and where their inputs come from.

        Raises:
            ConfigError: no base, a pattern that matches nothing, recompute where nothing can be recomputed.
        """
        for rule in self.rules:
            if not any(rule.matches(layer) for layer in layers):
                raise _matches_nothing(rule, list(layers))
        return {layer: self._choose(layer, layers) for layer in layers}

    def with_recipes(
        self, layer: str, origin: InputOrigin, fprop: str, dgrad: str, wgrad: str
    ) -> LinearPrecision:
        """A layer that runs in these recipes and saves what the rules say, by default what wgrad reads.

        Args:
            origin: where its input comes from.
        """
        saved = self._saved_by_rule(layer) or self._saved(origin, wgrad)[0]
        return LinearPrecision(fprop, dgrad, wgrad, saved)

    def saved_whatever_runs(self, layers: Mapping[str, InputOrigin]) -> dict[str, tuple[str, ...]]:
        """Layer to all that is kept of its input, where its recipes do not decide that: what a rule says, and the
        compute format where what made the input keeps it.

        Args:
            layers: full names, and where their inputs come from.
        """
        found = {}
        for layer, origin in layers.items():
            kept = [self.compute] if origin == "kept" else []
            by_rule = self._saved_by_rule(layer)
            if kept or by_rule is not None:
                found[layer] = tuple(dict.fromkeys([*kept, *([by_rule] if by_rule else [])]))
        return found

    def _saved_by_rule(self, layer: str) -> str | None:
        rules = (rule for rule in reversed(self.rules) if rule.target == _SAVED and rule.matches(layer))
        return next((rule.formats for rule in rules), None)

    def _saved(self, origin: InputOrigin, wgrad: str) -> tuple[str, str]:
        """What backward keeps by default, and why if it is not what wgrad reads."""
        if recipe(wgrad).saved != "quantized":
            return self.compute, ""
        if origin == "kept":
            return self.compute, "attention keeps its output anyway"
        return wgrad, ""

    def _choose(self, layer: str, layers: Mapping[str, InputOrigin]) -> LinearPrecision:
        compute = self.compute
        base, why = self.base or compute, f"precision {self.base}"
        if (layer == HEAD or is_router(layer)) and base != compute:
            base, why = compute, f"the {HEAD if layer == HEAD else ROUTER} stays in {compute}"
        chosen: dict[str, str] = dict(zip(GEMMS, _three(base), strict=True))
        reasons = dict.fromkeys(chosen, why)
        for rule in self.rules:
            if rule.matches(layer):
                chosen |= rule.settings
                reasons |= dict.fromkeys(rule.settings, f"rule `{rule}`")
        if _SAVED not in chosen:
            chosen[_SAVED], why = self._saved(layers[layer], chosen["wgrad"])
            if why:
                reasons[_SAVED] = why
        if chosen[_SAVED] == RECOMPUTE and layers[layer] != "made":
            made = [_ending(name) for name, origin in layers.items() if origin == "made"]
            able = list(dict.fromkeys(made))
            raise ConfigError(
                f"precision: the input of {layer} cannot be recomputed",
                got=reasons[_SAVED],
                expected=f"a pattern for {' or '.join(able)}, whose inputs are made from kept tensors"
                if able
                else "a format: no layer here has an input that is made from kept tensors",
                do=f"write such as *.{able[-1]}.saved={RECOMPUTE}" if able else None,
            )
        return LinearPrecision(**chosen, reason="; ".join(dict.fromkeys(reasons.values())))


def is_router(layer: str) -> bool:
    """Whether a layer chooses experts."""
    return layer.rpartition(".")[2] == ROUTER


def _ending(layer: str) -> str:
    """What follows the number of a block in a layer's name."""
    return re.sub(r"^.*?\.\d+\.", "", layer)


def parse_rules(text: str) -> PrecisionRules:
    """Read the text of `precision`.

    Raises:
        ConfigError: what is wrong with which rule; for an unknown recipe the nearest.
    """
    base: str | None = None
    rules: list[Rule] = []
    for index, part in enumerate(part.strip() for part in text.split(",")):
        if not part:
            raise ConfigError(
                "precision has an empty rule",
                got=repr(text),
                expected=f"rules separated by commas, such as {_EXAMPLE}",
                do="remove the comma that stands alone" if text.strip(" ,") else None,
            )
        if "=" in part:
            rules.append(_read_rule(part))
        elif index:
            raise _half_a_rule(part, text, base)
        elif part != AUTO:
            base = (
                part if part == PLANNED else _read_formats(part, part, () if "/" in part else (AUTO, PLANNED))
            )
    return PrecisionRules(base, tuple(rules))


def _half_a_rule(part: str, text: str, base: str | None) -> ConfigError:
    """The error for a part behind the first that says only what runs, or only in which formats."""
    is_format = part in (AUTO, PLANNED) or all(name.strip() in RECIPES for name in part.split("/"))
    near = None if set(part) & set("*?[.") else next(iter(difflib.get_close_matches(part, RECIPES, 1)), None)
    if part in GEMMS or part == _SAVED:
        do = f"write in what, and for which layers: *.{part}={_EXAMPLE_FORMAT}"
    elif part in (AUTO, PLANNED):
        do = f"write {part} first" if base is None else f"leave {base} or {part} out"
    elif is_format:
        do = f"{'put it first, or ' if base is None else ''}write which layers it is for: *={part}"
    else:
        do = (
            f"did you mean *={near}?" if near else f"write what these layers run in: {part}={_EXAMPLE_FORMAT}"
        )
    lacks = "no pattern" if is_format or near else "no format"
    return ConfigError(
        f"precision: `{part}` has {lacks} and is not the first rule",
        got=repr(text),
        expected=f"at most one base, before all patterns: {_EXAMPLE}",
        do=do,
    )


def _read_rule(part: str) -> Rule:
    pattern, _, formats = (piece.strip() for piece in part.rpartition("="))
    if not _PATTERN.fullmatch(pattern):
        raise ConfigError(
            f"precision: `{part}` has no usable pattern",
            got=repr(pattern),
            expected="a layer's name with letters, digits, dots, _ and the wildcards * ? [0-3]",
            do="write such as blocks.0.*=bf16",
        )
    if pattern in (*GEMMS, _SAVED):
        raise ConfigError(
            f"precision: `{part}` names no layer",
            got=repr(pattern),
            expected="a pattern for layers before it",
            do=f"write *.{pattern}={formats} for all of them",
        )
    target = Rule(pattern, formats).target
    if target is None:
        return Rule(pattern, _read_formats(formats, part))
    if "/" in formats:
        raise ConfigError(
            f"precision: `{part}` gives several formats to one setting",
            got=repr(formats),
            expected=f"one name for {target}",
            do=f"leave .{target} out to set all three GEMMs",
        )
    return Rule(pattern, _read_name(formats, part, SAVED_CHOICES if target == _SAVED else tuple(RECIPES)))


def _read_formats(text: str, part: str, words: tuple[str, ...] = ()) -> str:
    names = [_read_name(name.strip(), part, (*words, *RECIPES)) for name in text.split("/")]
    if len(names) not in (1, len(GEMMS)):
        raise ConfigError(
            f"precision: `{part}` is neither one format nor three",
            got=repr(text),
            expected="one recipe, or three as fprop/dgrad/wgrad",
            do="write such as fp8, or fp8/fp8/bf16",
        )
    return names[0] if len(set(names)) == 1 else "/".join(names)


def _read_name(name: str, part: str, choices: Sequence[str]) -> str:
    if name in choices:
        return name
    near = difflib.get_close_matches(name.lower(), choices, 1)
    raise ConfigError(
        "precision names an unknown recipe" + (f" in `{part}`" if part != name else ""),
        got=repr(name),
        expected=f"one of {', '.join(choices)}",
        do=f"did you mean {near[0]}?" if near else None,
    )


def _three(formats: str) -> tuple[str, ...]:
    names = tuple(formats.split("/"))
    return names * len(GEMMS) if len(names) == 1 else names


def _matches_nothing(rule: Rule, layers: Sequence[str]) -> ConfigError:
    hint = "only patterns that start with `head` mean the head"
    return ConfigError(
        f"precision: the pattern of `{rule}` matches no layer",
        got=repr(rule.layers),
        expected=f"a pattern for {_shorten(layers)}",
        do=hint
        if HEAD in layers and fnmatchcase(HEAD, rule.layers)
        else f"write such as *.{_ending(next(iter(layers), HEAD))} or blocks.0.*",
    )


def _shorten(layers: Sequence[str]) -> str:
    """Names of layers, those that differ in their first number only as one: blocks.0-4.mlp.down."""
    numbers: dict[str, list[int]] = {}
    for layer in layers:
        found = re.search(r"\d+", layer)
        key = layer if found is None else f"{layer[: found.start()]}{{}}{layer[found.end() :]}"
        numbers.setdefault(key, []).extend([] if found is None else [int(found[0])])
    names = [
        key.format(f"{min(seen)}-{max(seen)}" if len(seen) > 1 else seen[0]) if seen else key
        for key, seen in numbers.items()
    ]
    more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
