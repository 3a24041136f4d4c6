"""What it would cost or save to decide otherwise: the next best format of every GEMM, and who is nearest.

Problem  A map shows what was chosen, not how close the decision was. With harms additive as variances, moving
         one GEMM from format p to q changes the sum by V[q] - V[p], whatever the others run in.
Method   Next best: the other format whose change is smallest in size. Nearest: under a budget of FLOPs a
         move pays per FLOP that it moves, so moves are ranked by ::

             rate = (V[q] - V[p]) / (share of all linear FLOPs that this GEMM has, in percent)

         Promotions (to more bits) that save most per FLOP would come first with a little more budget;
         demotions (to fewer bits) that cost least would come first with a little less. A layer's three
         GEMMs have equal FLOPs (2 O I T each), so each has a third of its share.
Limits   One move at a time; under per-stage budgets only moves of one stage compete. Where the analysis has no
         shares the change itself ranks.
Source   SNIP specification, equation (8): costs as variances.
Checked  tests/report/test_precision_choices.py, against a search over all moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from scrimp.precision import GEMMS, RECIPES
from scrimp.report.precision_record import Analysis, PlanAt

UNSURE: Final = 0.8
"""A choice that resampled statistics confirm less often is marked."""

Direction = Literal["promotion", "demotion", "swap"]


@dataclass(frozen=True, kw_only=True)
class Move:
    """One GEMM in another format; harms are predicted shares of variance."""

    layer: str
    gemm: str
    now: str
    other: str
    harm_now: float
    harm_other: float
    share: float | None
    """This GEMM's share of the FLOPs of all linear layers; None where unknown."""
    certainty: float | None

    @property
    def change(self) -> float:
        """Above zero: it would add harm."""
        return self.harm_other - self.harm_now

    @property
    def rate(self) -> float:
        """Change of harm per percent of the linear FLOPs moved; without shares the change."""
        return self.change / (100 * self.share) if self.share else self.change

    @property
    def direction(self) -> Direction:
        """By the widths of both formats."""
        before, after = width(self.now), width(self.other)
        return "swap" if before == after else "promotion" if after > before else "demotion"


def width(recipe: str) -> int:
    """Bits of an element; of an unknown recipe 0."""
    return RECIPES[recipe].bits if recipe in RECIPES else 0


def gemm_share(analysis: Analysis, layer: str) -> float | None:
    """Share of the linear FLOPs that each of a layer's GEMMs has."""
    share = analysis.shares.get(layer)
    return None if share is None else share / len(GEMMS)


def moves(plan: PlanAt, layer: str, gemm: str) -> list[Move]:
    """Every other format that the analysis knows for one GEMM; none where it does not know the chosen one."""
    analysis = plan.analysis
    found = analysis.gemms.get((layer, gemm)) if analysis is not None else None
    now = plan.recipe(layer, gemm)
    if analysis is None or found is None or now not in found.harm:
        return []
    return [
        Move(
            layer=layer,
            gemm=gemm,
            now=now,
            other=other,
            harm_now=found.harm[now],
            harm_other=harm,
            share=gemm_share(analysis, layer),
            certainty=found.certainty,
        )
        for other, harm in found.harm.items()
        if other != now
    ]


def next_best(candidates: Iterable[Move]) -> Move | None:
    """The move that changes the harm least; of equals the first."""
    return min(candidates, key=lambda move: abs(move.change), default=None)


def nearest(plan: PlanAt, direction: Direction, count: int) -> list[Move]:
    """The `count` moves of one direction that cost least harm, or save most, per FLOP; one per GEMM."""
    best = []
    for layer in plan.choices:
        for gemm in GEMMS:
            fitting = [move for move in moves(plan, layer, gemm) if move.direction == direction]
            if fitting:
                best.append(min(fitting, key=lambda move: move.rate))
    return sorted(best, key=lambda move: move.rate)[:count]


def total_harm(plan: PlanAt) -> float | None:
    """Predicted harm of all choices together; None where the analysis does not know one of its GEMMs."""
    analysis = plan.analysis
    if analysis is None:
        return None
    total = 0.0
    for (layer, gemm), found in analysis.gemms.items():
        name = plan.recipe(layer, gemm)
        if name not in found.harm:
            return None
        total += found.harm[name]
    return total


def certainty_of(plan: PlanAt, layer: str, gemm: str) -> float | None:
    """How sure the choice is; None where the plan has not what the analysis chose."""
    found = plan.analysis.gemms.get((layer, gemm)) if plan.analysis is not None else None
    return found.certainty if found is not None and found.choice == plan.recipe(layer, gemm) else None


def flop_shares(plan: PlanAt, shares: Mapping[str, float] | None) -> dict[str, float]:
    """Recipe to its share of the FLOPs of the plan's linear layers; of the GEMMs where no share is known.

    Args:
        shares: layer to FLOPs or to any measure proportional to them; layers that are missing count nothing.
    """
    weights = shares if shares else dict.fromkeys(plan.choices, 1.0)
    total = sum(weights.get(layer, 0.0) for layer in plan.choices)
    found: dict[str, float] = {}
    for layer, choice in plan.choices.items():
        for name in choice:
            found[name] = found.get(name, 0.0) + weights.get(layer, 0.0) / len(GEMMS)
    return {name: amount / total for name, amount in found.items()} if total else {}
