"""Settings of `precision = snip`: which of them go together, and what is decided for those left open.

The steps at which a run plans are a function of the configuration alone, so that a resumed run plans at the same ones.
"""

from __future__ import annotations

import difflib
import itertools

from scrimp.config.schema import Config, Decision, decided
from scrimp.errors import ConfigError
from scrimp.precision import RECIPES

BUDGETS = ("fp4_flops", "step_seconds", "speedup", "divergence", "saved_bytes")
POLICIES = (
    "snip",
    "snip-layer",
    "snip-paper",
    "random",
    "random-gemm",
    "min-abs-err",
    "min-abs-err-gemm",
    "min-rel-err",
    "min-rel-err-gemm",
    "backward-first",
    "first-last",
    "layer-type",
    "last-blocks",
    "last-blocks-matched",
)
WHOLE_LAYERS = ("snip-layer", "snip-paper", "random", "min-abs-err", "min-rel-err")
"""Policies that solve for one format per layer."""
ORDERED = ("backward-first", "first-last", "layer-type", "last-blocks-matched")
"""Policies that protect layers or GEMMs in an order of their own, while the share that need not be in 4 bits lasts."""
SEEDED = ("random", "random-gemm")
DEFAULT_FORMATS = "fp8,nvfp4"
DEFAULT_SHARE = 0.75


def check_snip(config: Config) -> None:
    """Refuse values of [snip] and of its budgets that cannot be meant.

    Raises:
        ConfigError: naming the key.
    """
    given = {name: getattr(config.budget, name) for name in BUDGETS}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not config.is_planned:
        name, value = next(iter(given.items()))
        raise ConfigError(
            f"budget.{name} has no effect on fixed formats",
            got=f"{value} beside precision {config.precision}",
            do="set --precision snip, or leave the budget out",
        )
    if len(given) > 1:
        raise ConfigError(
            "snip keeps one budget",
            got=", ".join(f"budget.{name} {value}" for name, value in given.items()),
            expected="one of " + ", ".join(f"budget.{name}" for name in BUDGETS),
        )
    for key, text in (("snip.formats", config.snip.formats), ("snip.start", config.snip.start)):
        if text != "auto":
            for name in text.split(",") if key == "snip.formats" else [text]:
                _check_recipe(key, name.strip())
    policy = config.snip.policy.partition(":")[0]
    if not is_policy(config.snip.policy):
        raise ConfigError(
            "snip.policy is not one of its choices",
            got=repr(config.snip.policy),
            expected="one of " + ", ".join(POLICIES) + ", or a candidate for all GEMMs",
            do="random takes a seed, as random:1",
        )
    weights = config.snip.loss_weight, config.snip.update_weight, config.snip.curvature_weight
    if not any(weights):
        raise ConfigError(
            "snip has no cost to choose by",
            got="snip.loss_weight, snip.update_weight and snip.curvature_weight of 0",
            expected="at least one above 0",
        )
    other = next((name for name in given if name != "fp4_flops"), None)
    if policy in ORDERED and other is not None:
        raise ConfigError(
            f"snip.policy {policy} knows only a share of FLOPs in 4 bits",
            got=f"budget.{other} {given[other]}",
            expected="budget.fp4_flops",
        )
    chosen_steps(config.snip.at)


def is_policy(text: str) -> bool:
    """Whether it names a policy: one of `POLICIES`, random with a seed, or a recipe for all GEMMs."""
    name, colon, seed = text.partition(":")
    if colon:
        return name in SEEDED and seed.isascii() and seed.isdecimal()
    return name in (*POLICIES, *RECIPES)


def keeps_budget(policy: str) -> bool:
    """Whether a policy's formats depend on the budget: not those of one format for all, nor NVIDIA's last blocks."""
    return policy != "last-blocks" and policy not in RECIPES


def chosen_steps(text: str) -> tuple[int, ...]:
    """The steps of `snip.at`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise ConfigError(
            "snip.at is not a list of steps",
            got=repr(text),
            expected="whole numbers with commas, such as 500,4000",
        )
    return tuple(sorted({int(part) for part in parts}))


def decide_formats() -> Decision:
    """Candidates where none are named."""
    return DEFAULT_FORMATS, "of four bits the format that loses least, of eight the one that most devices run"


def decide_start(config: Config) -> Decision:
    """What runs before the first plan."""
    best = max(config.candidates, key=lambda name: RECIPES[name].bits)
    return best, f"the candidate of most bits of {config.snip.formats}"


def decide_share() -> Decision:
    """The budget where none is given."""
    return (
        DEFAULT_SHARE,
        "three quarters: speeds GEMMs up 3.2 times over bf16 where FP4 runs at four times its rate",
    )


def decide_first(config: Config) -> Decision:
    """Step of the first plan."""
    warmup = decided(config.schedule.warmup_steps)
    return min(warmup, config.train.steps), f"after the warm-up of {warmup:,} steps"


def decide_every(config: Config) -> Decision:
    """Steps between plans."""
    steps = config.train.steps
    return min(
        2000, max(1, steps // 2)
    ), f"half of {steps:,} steps, at most 2,000: measuring costs several steps"


def decide_delay(config: Config) -> Decision:
    """Steps in which the program is solved."""
    every = decided(config.snip.every)
    return min(10, max(1, every // 10)), f"a tenth of snip.every {every:,}, 1 to 10"


def decide_probe(config: Config) -> Decision:
    """Steps between probes."""
    every = decided(config.snip.every) or config.train.steps
    return min(1000, every), f"snip.every {every:,}, at most 1,000: a probe costs two passes and more"


def check_candidates(config: Config) -> None:
    """Refuse candidates among which a budget has nothing to choose.

    Raises:
        ConfigError: no format of 4 bits for a share of FLOPs in 4 bits, a start that no layer can save in.
    """
    bits = {name: RECIPES[name].bits for name in config.candidates}
    if len(bits) != len(config.candidates):
        raise ConfigError("snip.formats names a format twice", got=config.snip.formats)
    if config.budget.fp4_flops and min(bits.values()) > 4:
        raise ConfigError(
            "no candidate of snip.formats has 4 bits, which budget.fp4_flops asks for",
            got=config.snip.formats,
            expected="one of " + ", ".join(name for name, entry in RECIPES.items() if entry.bits == 4),
            do="add one, as --snip.formats fp8,nvfp4",
        )
    if config.snip.policy in RECIPES and config.snip.policy not in bits:
        raise ConfigError(
            "snip.policy names a format that is no candidate",
            got=config.snip.policy,
            expected=f"one of snip.formats {config.snip.formats}",
        )
    if min(bits.values()) >= 16:
        raise ConfigError(
            "no candidate of snip.formats quantizes anything",
            got=config.snip.formats,
            do="as --snip.formats fp8,nvfp4",
        )
    if config.snip.start == "fp32" or "fp32" in bits:
        raise ConfigError(
            "snip plans beside activations in bf16", got="fp32", expected="bf16 or a format of fewer bits"
        )


def check_cadence(config: Config) -> None:
    """Refuse plans that would not be in force before the next is due.

    Raises:
        ConfigError: naming both settings.
    """
    every, delay = decided(config.snip.every), decided(config.snip.delay)
    if 0 < every < delay:
        raise ConfigError(
            "a plan would not be in force before the next is measured",
            got=f"snip.delay {delay} and snip.every {every}",
            expected=f"a delay of at most {every}",
            do="lower snip.delay, or leave it out",
        )


def check_chosen_steps(config: Config) -> None:
    """Refuse steps of snip.at whose plan would never be measured, or never begin.

    Raises:
        ConfigError: naming the step and what it collides with.
    """
    first, every, delay = (decided(getattr(config.snip, name)) for name in ("first", "every", "delay"))
    steps, chosen = config.train.steps, chosen_steps(config.snip.at)
    late = next((step for step in chosen if step + delay >= steps), None)
    if late is not None:
        raise ConfigError(
            "the run would end before a plan of snip.at begins",
            got=f"snip.at {late:,} and snip.delay {delay:,} of {steps:,} steps",
            expected=f"steps below {steps - delay:,}",
        )
    due = {first, *chosen, *(range(first, steps, every) if every else ())}
    for before, after in itertools.pairwise(sorted(due)):
        if after - before < delay and {before, after} & set(chosen):
            raise ConfigError(
                "a plan of snip.at and another one are nearer than the steps from measuring to switching",
                got=f"plans of steps {before:,} and {after:,} with snip.delay {delay:,}",
                expected=f"at least {delay:,} steps between them",
                do="move the step of snip.at, or lower snip.delay",
            )


def check_first(config: Config) -> None:
    """Refuse a first plan that would come after the run.

    Raises:
        ConfigError: naming the settings.
    """
    first, delay, steps = decided(config.snip.first), decided(config.snip.delay), config.train.steps
    if first + delay >= steps:
        raise ConfigError(
            "the run would end before its first plan",
            got=f"snip.first {first:,} and snip.delay {delay:,} of {steps:,} steps",
            expected=f"together less than {steps:,}",
            do="lower snip.first, or leave it out",
        )


def _check_recipe(key: str, name: str) -> None:
    if name in RECIPES:
        return
    near = difflib.get_close_matches(name.lower(), RECIPES, 1)
    raise ConfigError(
        f"{key} names an unknown recipe",
        got=repr(name),
        expected=", ".join(RECIPES),
        do=f"did you mean {near[0]}?" if near else None,
    )
