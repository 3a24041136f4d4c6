"""What `scrimp plan --hardware` prints: plans, what was tried, why others lost, and what would change the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from scrimp.planner.layout.attention_price import price_text
from scrimp.planner.layout.contenders import Misfit
from scrimp.planner.layout.explained import (
    Beside,
    Loser,
    bytes_beside,
    losers,
    reason_text,
    seconds_beside,
)
from scrimp.planner.layout.objectives import Answer, Goal, Trial, cost_of, days_of, price_of
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.search import Candidate, Found
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.summary import blocks_text, low_share
from scrimp.planner.layout.what_if import Change
from scrimp.precision import RECIPES
from scrimp.report.units import format_bytes, format_count, format_rate

LOSERS_SHOWN = 10
_LOW = 4
_DEGREES = ("pp", "dp", "fsdp", "cp", "tp", "ep")


def layout_text(setting: Setting) -> str:
    """The degrees of a layout that are not 1."""
    layout = setting.layout
    text = [f"{name} {getattr(layout, name)}" for name in _DEGREES if getattr(layout, name) > 1] or [
        "one device"
    ]
    text += ["ulysses"] * (layout.cp > 1 and layout.cp_method == "ulysses")
    text += [f"zero {layout.zero}"] * (layout.fsdp > 1)
    text += [f"virtual {layout.virtual}"] * ((layout.virtual or 1) > 1)
    return " ".join(text)


def formats_text(question: Question) -> str:
    """The format that is given, or what is chosen from."""
    formats = question.formats
    if formats is None:
        return question.precision
    low = ", ".join(name for name in formats.names if RECIPES[name].bits == _LOW)
    others = ", ".join(name for name in formats.names if RECIPES[name].bits > _LOW)
    if formats.statistics is None:
        return " and ".join([others] * bool(others) + [f"at most {formats.share:.0%} in {low}"] * bool(low))
    most = (
        f"that of SNIP's plan with {formats.share:.0%} of FLOPs in 4 bits"
        if formats.divergence is None
        else f"{formats.divergence:.0%} of that of all in the lowest format"
    )
    return f"{', '.join(formats.names)}; harm at most {most}"


def plans_table(found: Found, question: Question) -> Table:
    """The best plans, the fastest first."""
    number = question.model.parameters
    size = f"{number / 1e9:,.1f}B" if number >= 1e9 else format_count(number)
    what = f"{size} parameters on {question.cluster.name}"
    table = _table(
        f"{what}, {formats_text(question)}; predicted",
        "layout",
        "micro",
        "recompute",
        "s/step",
        "tok/s each",
        "split",
        "memory",
    )
    for one in found.best:
        prediction, parts = one.prediction, one.prediction.seconds
        shares = [parts[name] / one.seconds for name in ("compute", "communication_exposed", "bubble")]
        table.add_row(
            layout_text(one.setting),
            str(one.setting.micro_batch),
            _again_cell(one.setting),
            f"{one.seconds:.3g}",
            f"{prediction.tokens_per_second_per_device:,.0f}",
            "/".join(f"{100 * share:.0f}" for share in shares),
            f"{one.fullest:.0%}",
        )
    return table


def _again_cell(setting: Setting) -> str:
    """What all blocks make again, or that they differ."""
    text = blocks_text(setting)
    return "by block" if "," in text else text


def _blocks_lines(best: Candidate, question: Question) -> list[str]:
    """What is not the same in all blocks of a plan, and what is on the host."""
    setting, found = best.setting, []
    host = [
        name for name in ("optimizer", "master", "gradients", "weights") if getattr(setting.offload, name)
    ]
    if host:
        found.append(f"in host memory: {', '.join(host)}")
    if "," in blocks_text(setting):
        found.append(f"blocks: {blocks_text(setting)}")
    if question.formats is not None:
        why = (
            "without statistics of the model all products count as equally sensitive"
            if question.formats.statistics is None
            else "by its statistics"
        )
        found.append(f"{low_share(setting):.0%} of the blocks' FLOPs in 4 bits, where they save most: {why}")
    return found


def summary(answer: Answer, goal: Goal) -> str:
    """What the first plan comes to, in a few lines."""
    question, found = answer.question, answer.found
    tokens, seconds = question.sequence * question.global_batch, found.best[0].seconds
    day = 86_400.0 * tokens / seconds
    lines = [
        f"the first: {format_rate(tokens / seconds)} over all devices, {format_count(day)} tokens a day; "
        f"{tokens:,} tokens a step in sequences of {question.sequence:,}"
    ]
    if price_of(question.cluster):
        price = cost_of(question, seconds, 1e9)
        lines.append(f"${dollars(price)} for a billion tokens, at ${price_of(question.cluster):,.2f} an hour")
    if goal.tokens is not None:
        days = days_of(question, seconds, goal.tokens)
        all_of_it = cost_of(question, seconds, goal.tokens)
        text = f" and ${dollars(all_of_it)}" if price_of(question.cluster) else ""
        lines.append(f"{format_count(goal.tokens)} tokens: {days:,.3g} days{text}")
    order = price_text(found.best[0].setting, seconds)
    lines += ([] if order is None else [order]) + _blocks_lines(found.best[0], question)
    lines.append("split: per cent of a step that is computing, exchanges that nothing hides, and bubble")
    lines.append(f"{found.tried:,} settings tried, of which {found.too_large:,} do not fit")
    return "\n".join(lines)


def dollars(amount: float) -> str:
    """1,885 or 69.75: cents below a hundred."""
    return f"{amount:,.2f}" if amount < 100 else f"{amount:,.0f}"


def trials_table(trials: Sequence[Trial], goal: Goal) -> Table:
    """What an objective tried."""
    by_size = goal.objective in ("cost", "smallest-cluster")
    names = ["tried", "devices" if by_size else "parameters", "s/step", "$/1B tokens"]
    table = _table(f"for {goal.objective}", *names, *(["days"] if goal.tokens else []), "")
    for one in trials:
        question, seconds = one.question, one.best.seconds if one.best else None
        size = question.cluster.devices if by_size else question.model.parameters
        cells = ["", ""] if seconds is None else [f"{seconds:.3g}", dollars(cost_of(question, seconds, 1e9))]
        if goal.tokens:
            cells.append("" if seconds is None else f"{days_of(question, seconds, goal.tokens):,.3g}")
        table.add_row(one.name, f"{size:,}" if by_size else format_count(size), *cells, one.note)
    return table


def losers_table(found: Found) -> tuple[Table, int]:
    """The best plan of each family that the best is not of, the least slow first; and how many are not shown.

    One plan may be the best of several families. Of several stages of a rank (virtual) only the best number is shown.
    """
    rows: dict[int, list[Loser]] = {}
    ordered = sorted(losers(found), key=lambda one: (one.slower is None, one.slower or 0.0, one.amount))
    virtual = [one for one in ordered if one.family[0] == "virtual"]
    for one in ordered:
        if one not in virtual[1:]:
            rows.setdefault(id(one.best), []).append(one)
    table = _table("why not", "with", "at best", "slower", "killed by")
    for same in list(rows.values())[:LOSERS_SHOWN]:
        slower = same[0].slower
        table.add_row(
            ", ".join(f"{name} {value}" for name, value in (one.family for one in same)),
            layout_text(same[0].best.setting),
            "" if slower is None else f"{slower:.0%}",
            f"{same[0].killed_by}: {reason_text(same[0], found.best[0])}",
        )
    return table, max(0, len(rows) - LOSERS_SHOWN)


def beside_tables(asked: str, best: Candidate, other: Candidate | Misfit) -> list[Table]:
    """The best plan beside another one: seconds by cause where both fit, bytes by category."""
    names = (layout_text(best.setting), layout_text(other.setting))
    tables = []
    if isinstance(other, Candidate):
        tables.append(_beside(f"{asked}: seconds of a step", names, seconds_beside(best, other), _seconds))
    rows = bytes_beside(best, other)
    tables.append(_beside(f"{asked}: bytes of the fullest rank", names, rows, format_bytes))
    how = _table(f"{asked}: how", "", *names)
    for name, text in (
        ("micro-batch", [str(one.setting.micro_batch) for one in (best, other)]),
        ("blocks", [blocks_text(one.setting) for one in (best, other)]),
        ("room of a device", [format_bytes(best.setting.memory_bytes)] * 2),
    ):
        how.add_row(name, *text)
    return [how, *tables]


def changes_table(best: Candidate, changes: Sequence[Change]) -> Table:
    """The best plan after each change, beside the one without."""
    table = _table("what if", "change", "s/step", "tok/s", "more", "layout", "micro")
    now = best.setting.global_batch * best.setting.sequence / best.seconds
    _change_row(table, "as asked", best, now)
    for one in changes:
        if one.best is None:
            table.add_row(one.name, "", "", "", "none fits" if one.tried else "none has this size", "")
        else:
            _change_row(table, one.name, one.best, now)
    return table


def _change_row(table: Table, name: str, best: Candidate, now: float) -> None:
    rate = best.setting.global_batch * best.setting.sequence / best.seconds
    table.add_row(
        name,
        f"{best.seconds:.3g}",
        format_rate(rate),
        "" if rate == now else f"{rate / now - 1:+.1%}",
        layout_text(best.setting),
        str(best.setting.micro_batch),
    )


def _beside(title: str, names: tuple[str, str], rows: Sequence[Beside], text: Any) -> Table:
    table = _table(title, "", *names, "more")
    for one in rows:
        table.add_row(one.name.replace("_", " "), text(one.best), text(one.other), _signed(one.more, text))
    table.add_section()
    sums = sum(one.best for one in rows), sum(one.other for one in rows)
    table.add_row("together", *map(text, sums), _signed(sums[1] - sums[0], text))
    return table


def _signed(more: float, text: Any) -> str:
    return f"{'-' if more < 0 else '+'}{text(abs(more))}"


def _seconds(value: float) -> str:
    return f"{value:.4g} s"


def _table(title: str, *names: str) -> Table:
    """Words on the left, which may wrap; numbers on the right."""
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    words = ("layout", "at best", "with", "tried", "change", "killed by")
    for name in names:
        is_text = name in (*words, "")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name not in words)
    return table
