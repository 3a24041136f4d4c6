"""Training in stages: much text of other domains, then a mixture, then the small text that matters.

Problem  Of the domain that a model is for there is little text. Alone it is learnt by heart; mixed into much else it is
         only a part of what the model is good at in the end.
Method   Three stages, each from the weights and the optimizer's states of the one before (`[[stages]]`,
         `scrimp.config.stages`): the other domains; a mixture in which the small text is read so often that it is half;
         the small text alone, at a lower rate. Sources and their tokenizer are the same in all, weights differ
         (`data.mix`), so that no stage has seen what another one holds out.
Study    `scrimp study recipe:staged`: the stages as variants that go on from one another, beside the domain alone and
         the mixture alone by the same steps in all, and the domain alone by as many of its tokens as the stages read.
         What is equal is what is spent, 400 steps: only the domain's own text is scarce, and all may read it as often
         as they like. Judged by the held-out loss of the domain; the study's own figure is the mean of all texts.
Limits   One choice of steps and rates for each stage, which nobody tuned; the domain alone may be better by fewer steps
         than 400, of which `in-domain-short` is one choice. The paper trains translation, from a large parallel corpus
         to pairs that were mined from lectures; here it is language modelling of packages of Python.
Source   Song et al., arXiv 2311.03696 (its multistage fine-tuning; mining is `scrimp align`)
Checked  tests/recipes/test_staged_recipe.py
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from scrimp.config.mixture import labels_of, mixed_sources
from scrimp.study.job import SOURCE
from scrimp.study.results import of_seeds, shared_seeds

if TYPE_CHECKING:
    from scrimp.study.definition import Study
    from scrimp.study.results import Results

STAGED: Final = "staged"
"""The variant that is the last stage."""


def findings(results: Results) -> list[str]:
    """The loss of the domain, of each variant, and what the stages gain over each of those that stand alone; nothing of
    a study that has no variant of the stages, or none with a mixture."""
    study = results.study
    if not any(one.name == STAGED and one.settings.get("data.mix") for one in study.variants):
        return []
    label = domain_of(study)
    found = {one.name: results.figure_by_seed(one.name, f"{SOURCE}{label}") for one in study.variants}
    losses = {name: one for name, one in found.items() if one}
    means = [
        f"{one.name} {statistics.fmean(losses[one.name].values()):.3f}"
        for one in study.variants
        if one.name in losses
    ]
    said = [f"held-out loss of {label}: {', '.join(means)}."] if means else []
    alone = [one.name for one in study.variants if one.name in losses and one.name not in stages_of(study)]
    return said + [line for name in alone if (line := _gain(losses.get(STAGED, {}), losses[name], name))]


def domain_of(study: Study) -> str:
    """What the last stage reads, as losses call it."""
    variants = {one.name: one for one in study.variants}
    sources = mixed_sources(variants[STAGED].settings["data.mix"])
    labels = labels_of([one.name for one in sources])
    return next(label for one, label in zip(sources, labels, strict=True) if one.share)


def stages_of(study: Study) -> list[str]:
    """The variants that the last stage goes on from, and itself."""
    found, variants = [STAGED], {one.name: one for one in study.variants}
    while needed := variants[found[-1]].needs:
        found.append(needed[0])
    return found


def _gain(staged: dict[int, float], other: dict[int, float], name: str) -> str:
    """How much lower the loss of the stages is, by seeds that both have."""
    gains = [other[seed] - staged[seed] for seed in shared_seeds([staged, other])]
    if not gains:
        return ""
    better = sum(gain > 0 for gain in gains)
    return (
        f"staged less {name}: {-statistics.fmean(gains):+.3f} ({-max(gains):+.3f} to {-min(gains):+.3f}), "
        f"better in {of_seeds(better, len(gains))}."
    )
