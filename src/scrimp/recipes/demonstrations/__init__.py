"""Meta-training with retrieved demonstrations: a model learns to answer from the examples that stand before a question.

Problem  A small model is to learn a new task from a few labelled examples. Weights that were trained on questions alone
         know nothing of it, and a few examples are too few to tune them.
Method   It is trained on many tasks with the nearest labelled examples of a bank before each question
         (scrimp.data.demonstrations), the loss on the last answer alone. What it learns is to read answers off them. On
         a new task it is tuned and asked with demonstrations out of the few examples that the task has.
Study    `scrimp study recipe:demonstrations`: label maps (scrimp.data.label_maps), whose answers nobody can know
         without examples. Models are trained with none, with random and with retrieved demonstrations, and each then
         goes on with twelve examples of each held-out task. All are evaluated on the same questions of these tasks with
         each kind of demonstrations, so that variants share one `data.mix` and the figure is `mean_source_loss`. Its
         mean says little: what is said below it are the losses of each model with the kind that it was trained with,
         of all with retrieved ones, and of all after tuning.
Limits   By construction retrieval finds what is needed, and nothing else can. How well BM25 or embeddings find what
         bears on questions of people, and what that is worth to a pretrained model, this study does not say. The paper
         retrieves by a dense retriever; here words decide, or mean hidden states of a language model.
Source   Mueller et al., "Meta-training with Demonstration Retrieval for Efficient Few-shot Learning" (2023, arXiv
         2307.00119)
Checked  tests/recipes/test_recipe_demonstrations.py
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from scrimp.study.job import SOURCE
from scrimp.study.results import of_seeds, shared_seeds

if TYPE_CHECKING:
    from scrimp.study.results import Results

KINDS: Final = ("none", "random", "bm25")
_RETRIEVED: Final = "bm25"
_TUNED: Final = "-tuned"


def findings(results: Results) -> list[str]:
    """What the study's results say of held-out tasks, a sentence each; of runs that are missing nothing."""
    own = {kind: _losses(results, kind, kind) for kind in KINDS}
    retrieved = {kind: _losses(results, kind, _RETRIEVED) for kind in KINDS}
    tuned = {kind: _losses(results, kind + _TUNED, _RETRIEVED) for kind in KINDS}
    return [
        *_said("Each model with the demonstrations that it was trained with", own),
        *_said("All with retrieved demonstrations", retrieved),
        *_said("All with retrieved demonstrations, after few-shot tuning", tuned),
    ]


def _losses(results: Results, variant: str, kind: str) -> dict[int, float]:
    """The held-out losses of a variant with one kind of demonstrations, by seed."""
    return results.figure_by_seed(variant, f"{SOURCE}label-maps:{kind}")


def _said(what: str, losses: dict[str, dict[int, float]]) -> Sequence[str]:
    """Mean losses of the seeds that all kinds have, and on how many of them more is better."""
    seeds = shared_seeds(losses.values())
    if not seeds:
        return ()
    means = ", ".join(
        f"{kind} {statistics.fmean(found[seed] for seed in seeds):.3f}" for kind, found in losses.items()
    )
    in_order = sum(losses["none"][seed] > losses["random"][seed] > losses[_RETRIEVED][seed] for seed in seeds)
    return (
        f"{what}: {means} nats per token of an answer; retrieved below random below none on "
        f"{of_seeds(in_order, len(seeds))}.",
    )
