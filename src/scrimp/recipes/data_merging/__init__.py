"""Data ablation by merging: which mixture of domains is best, told by models of one domain each.

Problem  Of n domains there are 2^n - 1 mixtures. To train a model on each of them only to compare them is too much.
Method   One seed model learns from a bit of everything. From it one model goes on for each domain (each unit of data of
         one size), by the same steps. A mixture is then scored without training: by the held-out loss of the uniform
         average of its domains' models,

             theta(mixture) = 1/k sum of theta_i over its k domains

         These losses are not those of models that were trained on the mixtures; their order is. n runs take the place
         of one for each mixture, and a further domain costs one. Domains of several units are averages of averages, by
         their units: a uniform average of all, or one with weights (`merge = {a = 2, b = 1}`, docs/studies.md).
Study    `scrimp study recipe:data-merging`: five packages of the standard library, all mixtures by merges and the ten
         pairs also by models that were truly trained on them, on eight held-out texts: those of the domains, and three
         that nobody trains on. What a variant is made of, its `data.mix` and `merge` say, not its name.
         Said of each text: Spearman's correlation of the two losses over the pairs, with an interval by a bootstrap
         of mixtures and seeds, and Pearson's; how well the mean of the domains' own losses, which needs no merge,
         foretells the order; which rank the mixtures truly have in the order that merges give them; and what merges
         choose greedily, a domain at a time: where its pair lies among the trained ones, and which set on that path has
         the lowest loss.
Limits   Mixtures share domains, so that they are no independent draws: the interval is narrower than it should be.
         On a domain's own text, mixtures with it and without are far apart, and any score tells these: texts of nobody
         are the harder test. Runs must go on from one seed model: averages of models that do not mean nothing.
Source   Na et al., "Scalable Data Ablation Approximations for Language Models through Modular Training and Merging"
         (EMNLP 2024, arXiv 2410.15661)
Checked  tests/recipes/test_data_merging.py
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from scrimp.config.mixture import labels_of, mixed_sources
from scrimp.study.job import SOURCE
from scrimp.study.results import shared_seeds
from scrimp.tasks.curves import pearson, spearman

if TYPE_CHECKING:
    from scrimp.study.definition import Study
    from scrimp.study.results import Results

_ALL: Final = "mean_source_loss"
_DRAWS: Final = 1000
_CONFIDENCE: Final = 0.95
_LEAST: Final = 3
"""Mixtures of which a correlation says something."""
Shares = frozenset[tuple[str, Fraction]]
"""A mixture: domains with their shares of what is trained on, none of them 0."""
Floats = NDArray[np.float64]
Domain = TypeVar("Domain", bound=Hashable)


@dataclass(frozen=True)
class Scores:
    """Losses of mixtures on one text, of the seeds that all have."""

    merged: Mapping[Shares, Sequence[float]]
    """Those of averages of models; for one domain that of its model."""
    trained: Mapping[Shares, Sequence[float]]
    """Those of models that were trained on the mixtures."""

    @property
    def compared(self) -> list[Shares]:
        """Mixtures of several domains that have both losses, the best merge first."""
        found = [one for one in self.merged if len(one) > 1 and one in self.trained]
        return sorted(found, key=lambda one: statistics.fmean(self.merged[one]))

    def true_rank(self, mixture: Shares) -> tuple[int, int]:
        """The place of a mixture, from 1, among the trained ones of as many domains, and how many there are."""
        alike = [statistics.fmean(found) for one, found in self.trained.items() if len(one) == len(mixture)]
        own = statistics.fmean(self.trained[mixture])
        return 1 + sum(loss < own for loss in alike), len(alike)


def findings(results: Results) -> list[str]:
    """What the study's results say of each text, a sentence each; of runs that are missing nothing."""
    mixtures = mixtures_of(results.study)
    said = []
    for text in dict.fromkeys(name for row in results.rows for name in row.figures):
        if text != _ALL and not text.startswith(SOURCE):
            continue
        scores = _scores(results, mixtures, text)
        if len(scores.compared) >= _LEAST:
            said.append(f"{'mean of all' if text == _ALL else text.removeprefix(SOURCE)}: {_of_text(scores)}")
    return said


def mixtures_of(study: Study) -> dict[str, Shares]:
    """What each variant is made of: what its `data.mix` trains on, or what the runs that it merges do together."""
    found: dict[str, Shares] = {}
    for one in study.variants:
        shares: dict[str, Fraction] = {}
        if one.combined is None:
            mix = one.settings.get("data.mix")
            shares = {part.name: Fraction(part.share) for part in mixed_sources(mix)} if mix else {}
        elif one.combined.how == "merge":
            for member, weight in zip(one.combined.members, one.combined.weights, strict=True):
                for name, share in found[member]:
                    shares[name] = shares.get(name, Fraction()) + share * Fraction(str(weight))
        total = sum(shares.values())
        found[one.name] = frozenset((name, share / total) for name, share in shares.items() if share)
    return found


def greedy(losses: Mapping[frozenset[Domain], float]) -> list[frozenset[Domain]]:
    """Forward selection: the best domain alone, then with the one beside which the loss is least, and so on, as long as
    there are losses of larger sets."""
    path: list[frozenset[Domain]] = []
    chosen: frozenset[Domain] = frozenset()
    while larger := [one for one in losses if len(one) == len(chosen) + 1 and chosen < one]:
        path.append(chosen := min(larger, key=losses.__getitem__))
    return path


def interval(merged: Floats, trained: Floats) -> tuple[float, float]:
    """A 95 % interval of Spearman's correlation of mean losses, by draws of mixtures (rows) and seeds (columns) with
    replacement. Draws of one mixture alone have no correlation, and are drawn again; equal losses say nothing."""
    generator, found = np.random.default_rng(0), list[float]()
    mixtures, seeds = merged.shape
    if any(len(set(one.mean(1))) < 2 for one in (merged, trained)):
        return -1.0, 1.0
    while len(found) < _DRAWS:
        rows, columns = generator.integers(0, mixtures, mixtures), generator.integers(0, seeds, seeds)
        x, y = (one[rows][:, columns].mean(1).tolist() for one in (merged, trained))
        if len(set(x)) > 1 and len(set(y)) > 1:
            found.append(spearman(x, y))
    low, high = np.quantile(found, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    return float(low), float(high)


def _scores(results: Results, mixtures: Mapping[str, Shares], text: str) -> Scores:
    by_seed = {name: results.figure_by_seed(name, text) for name, mixture in mixtures.items() if mixture}
    losses = {name: found for name, found in by_seed.items() if found}
    seeds = shared_seeds(losses.values())
    merged: dict[Shares, list[float]] = {}
    trained: dict[Shares, list[float]] = {}
    for one in results.study.variants:
        if not seeds or one.name not in losses:
            continue
        mixture, found = mixtures[one.name], [losses[one.name][seed] for seed in seeds]
        if one.combined is None:
            trained[mixture] = found
        if one.combined is not None or len(mixture) == 1:
            merged[mixture] = found
    return Scores(merged, trained)


def _of_text(scores: Scores) -> str:
    """Correlations, the ranking, and what is chosen greedily."""
    order = scores.compared
    tables = [np.array([one[mixture] for mixture in order]) for one in (scores.merged, scores.trained)]
    x, y = (table.mean(1).tolist() for table in tables)
    low, high = interval(*tables)
    ranks = " ".join(str(scores.true_rank(one)[0]) for one in order)
    seeds = tables[0].shape[1]
    return (
        f"Spearman {spearman(x, y):.2f} ({low:.2f} to {high:.2f}), Pearson {pearson(x, y):.2f} of {len(order)} "
        f"mixtures, {seeds} {'seed' if seeds == 1 else 'seeds'}; {_unmerged(scores, order, y)}true ranks in the order "
        f"of merges {ranks}; chosen greedily {_chosen(scores)}."
    )


def _unmerged(scores: Scores, order: Sequence[Shares], trained: Sequence[float]) -> str:
    """How well the order is foretold without a merge, by the mean of the losses of a mixture's domains."""
    alone = {
        name: statistics.fmean(found)
        for one, found in scores.merged.items()
        if len(one) == 1
        for name, _ in one
    }
    if any(name not in alone for one in order for name, _ in one):
        return ""
    means = [sum(float(share) * alone[name] for name, share in one) for one in order]
    return f"by the mean of the domains' losses, without a merge, {spearman(means, trained):.2f}; "


def _chosen(scores: Scores) -> str:
    uniform = {
        frozenset(name for name, _ in one): one
        for one in scores.merged
        if len({share for _, share in one}) == 1
    }
    losses = {names: statistics.fmean(scores.merged[one]) for names, one in uniform.items()}
    path = greedy(losses)
    trained = [one for one in path if len(one) > 1 and uniform[one] in scores.trained]
    if not trained:
        return "nothing that a run was trained on"
    chosen, best = trained[-1], min(path, key=losses.__getitem__)
    rank, count = scores.true_rank(uniform[chosen])
    return (
        f"{'+'.join(labels_of(sorted(chosen)))}, truly {rank} of {count}; of those chosen for 1 to {len(path)} domains "
        f"{'+'.join(labels_of(sorted(best)))} has the lowest loss, {losses[best]:.3f}"
    )
