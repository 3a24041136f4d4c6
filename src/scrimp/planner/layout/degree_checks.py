"""What degrees must divide, and what ranks of a program do not run together: of a line, and of what a search is given.

Problem  A line whose degrees no program has is predicted as happily as any other, and trains nowhere.
Method   Of Scrimp's own step is refused what its training refuses (`config.layout`, `config.pipeline`), of other
         programs what their files in `softwares/` say.
Limits   Other programs pad vocabularies, some repeat key heads, and some split the embedding and the head off as if
         each were a block: all that is allowed them. Their models with learned positions may have longer tables.
Checked  tests/planner/layout/test_lines.py; every row of benchmarks/published is predicted
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from scrimp.config.pipeline import V_SHAPED, check_micro_batches, check_sizes
from scrimp.config.resolved import ResolvedLayout
from scrimp.config.schema import ContextMethod
from scrimp.errors import ConfigError
from scrimp.models.shapes import ModelSizes
from scrimp.models.spec import AttentionSpec
from scrimp.planner.layout.setting import Offload, Setting
from scrimp.planner.layout.software import OWN, Software


def check_degrees(setting: Setting) -> None:
    """Refuse degrees that do not divide what they share, and what ranks of the program do not run.

    Raises:
        ConfigError: by the degree.
    """
    for key, degree, count, what in _shared(setting):
        if count % degree:
            raise ConfigError(f"{key} does not divide the {what}", got=f"{count:,} over {degree:,}")
    _check_states(setting.layout)
    _check_rows(setting)
    _check_stages(setting)
    _check_host(setting)
    check_positions(setting.model, setting.sequence, setting.software)


def _check_host(setting: Setting) -> None:
    """Refuse what Scrimp does not have in host memory; what other programs do is theirs to know."""
    if setting.software.name not in OWN:
        return
    offload = setting.offload
    if setting.layout.pp > 1 and (offload != Offload() or any(plan.offload for plan in setting.blocks)):
        raise ConfigError(
            "ranks of a pipeline keep all on their devices",
            got=f"layout.pp {setting.layout.pp} beside offload",
            do="leave offload out, or train without a pipeline",
        )
    if offload.master and not setting.software.master_bytes:
        raise ConfigError(
            "there are no masters that could live on the host",
            got="offload.master beside states.masters false",
            do="leave offload.master out",
        )


def check_positions(model: ModelSizes, sequence: int, software: Software) -> None:
    """Refuse sequences that are longer than a table of positions.

    Raises:
        ConfigError: with both numbers.
    """
    if software.name in OWN and 0 < model.learned_positions < sequence:
        raise ConfigError(
            "a sequence is longer than the model's table of positions",
            got=f"{sequence:,} tokens, {model.learned_positions:,} learned positions",
            do="shorten the sequence, or raise learned_positions",
        )


def shared_by_tp(model: ModelSizes, sequence: int) -> list[tuple[int, str]]:
    """What Scrimp's ranks of tp share evenly, each with its name; of layers of low rank, nothing."""
    attention = model.blocks[-1].attention
    linears = model.blocks[-1].linears
    has_factors = any(one.name.endswith(".A") or one.made_of is not None for one in linears)
    return [
        *([(1, "layer of low rank: none is shared")] if has_factors else []),
        (attention.num_heads, "heads"),
        (attention.num_kv_heads, "key heads"),
        (sequence, "tokens of a sequence"),
    ]


def experts_of(model: ModelSizes) -> int:
    """Experts of a block; 1: it has an ordinary MLP."""
    return max((linear.experts for linear in model.blocks[-1].linears), default=1)


def exchanges_heads(attention: AttentionSpec, tp: int, cp: int) -> bool:
    """Whether ulysses gives each of cp ranks whole heads, of those that a rank of tp has."""
    heads, keys = attention.num_heads // tp, attention.num_kv_heads // tp
    return heads % cp == 0 and (keys % cp == 0 or (keys > 0 and cp % keys == 0))


def _shared(setting: Setting) -> Iterator[tuple[str, int, int, str]]:
    """Each degree, and a number that it must divide."""
    layout, model, experts = setting.layout, setting.model, experts_of(setting.model)
    of_tp = shared_by_tp(model, setting.sequence)
    for count, what in of_tp if setting.software.name in OWN else of_tp[:1]:
        yield "layout.tp", layout.tp, count, what
    # Of zigzag's 2 cp parts each rank has one from either end.
    zigzag = layout.cp > 1 and layout.cp_method == "zigzag"
    key, parts = ("twice layout.cp", 2 * layout.cp) if zigzag else ("layout.cp", layout.cp)
    yield key, parts, setting.sequence, "tokens of a sequence"
    yield "layout.ep", layout.ep, experts, "experts"
    yield "layout.ep x layout.etp", layout.ep * layout.etp, layout.ranks // layout.pp, "ranks of a stage"
    if experts == 1:
        yield "layout.etp", layout.etp, 1, "experts"


def _check_states(layout: ResolvedLayout) -> None:
    if layout.zero == 0 and layout.shards > 1:
        raise ConfigError(
            "layout.zero 0 shares nothing among ranks that share states",
            got=f"layout.fsdp {layout.fsdp:,}, layout.cp {layout.cp:,}",
            expected="1, 2 or 3; layout.dp for ranks that each have all of the states",
        )


def _check_rows(setting: Setting) -> None:
    """Refuse ways to share rows that the program has not."""
    layout, software = setting.layout, setting.software
    if layout.cp == 1:
        return
    if layout.tp > 1 and not software.cuts_shared_rows:
        raise ConfigError(
            f"software {software.name} does not run layout.cp beside layout.tp",
            got=f"layout.tp {layout.tp:,}, layout.cp {layout.cp:,}",
            do="set one of them to 1",
        )
    methods = _methods_of(software)
    if layout.cp_method not in methods:
        raise ConfigError(
            f"software {software.name} does not share rows in this way",
            got=f"layout.cp_method {layout.cp_method}",
            expected=f"one of {', '.join(methods)}",
        )
    attention = setting.model.blocks[-1].attention
    if layout.cp_method == "ulysses" and not exchanges_heads(attention, layout.tp, layout.cp):
        raise ConfigError(
            "layout.cp does not divide the heads that ulysses exchanges",
            got=f"{attention.num_heads:,} heads, {attention.num_kv_heads:,} key heads over {layout.cp:,}",
            do="lower layout.cp, or set layout.cp_method to zigzag",
        )


def _methods_of(software: Software) -> tuple[str, ...]:
    """All of Scrimp's own, of which a search tries some; of another program those of its file."""
    return get_args(ContextMethod) if software.name in OWN else software.cp_methods


def _check_stages(setting: Setting) -> None:
    """Refuse stages that are not those of the model."""
    layout, blocks = setting.layout, len(setting.model.blocks)
    virtual = layout.virtual or 1
    if layout.pp == 1 and virtual > 1:
        raise ConfigError(
            "layout.virtual is of a pipeline, and there is none",
            got=f"layout.virtual {virtual:,} beside layout.pp 1",
            do="set layout.pp, or leave layout.virtual out",
        )
    if layout.pp > blocks:
        raise ConfigError(
            "a pipeline has more ranks than the model has blocks",
            got=f"layout.pp {layout.pp:,}, {blocks:,} blocks",
            do="lower layout.pp",
        )
    ends = 0 if setting.software.name in OWN else 2
    if layout.pp * virtual > blocks + ends:
        what = (
            f"layout.schedule {layout.schedule}"
            if layout.schedule in V_SHAPED
            else f"layout.pp {layout.pp:,}"
        )
        raise ConfigError(
            "a pipeline has more stages than the model has blocks",
            got=f"{what}, layout.virtual {virtual:,}: {layout.pp * virtual:,} stages, {blocks:,} blocks",
            do="lower layout.pp or layout.virtual",
        )
    if layout.schedule in V_SHAPED:
        check_micro_batches(layout, setting.micro_batches)
    if layout.stages is not None:
        check_sizes(layout.stages, layout.pp * virtual, blocks)
