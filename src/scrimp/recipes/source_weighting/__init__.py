"""Sources of unequal share, learnt more evenly: by the average of the model's own weights as its teacher, and by
weights of sources that it is behind with.

Problem  A mixture has a large source and small ones. The model serves each of them, and is judged by the mean of their
         losses, but the small ones have few steps.
Method   Two parts of Momentum-GS, a method for splitting one large scene into blocks that share a decoder.
         Average   an exponential average of the weights teaches the model beside the text
                   (`scrimp.runtime.averaged_weights`). There the decoder's average keeps blocks consistent.
         Weights   targets of a source count from 1 to 2 times, by how far the source is behind the one that is learnt
                   best (`scrimp.training.source_weighting`). There a block's PSNR and SSIM say how well it is learnt;
                   here the excess of a source's loss over one that can be reached.
Study    `scrimp study recipe:source-weighting`: four packages of the standard library with shares of 8, 4, 2 and 1;
         plain, each part, and both. References are held-out losses of models of the same size that were trained on one
         source alone, by as many steps (seed 0).
Limits   One weight of the teacher, one scale, one choice of references. The paper's third part, more blocks than
         devices by swapping a block's parameters, has nothing to do here: sources have no parameters of their own,
         and any rank draws from any of them.
Source   Fan et al., "Momentum-GS: Momentum Gaussian self-distillation for high-quality large scene reconstruction"
         (2024), arXiv 2412.04887
Checked  tests/recipes/test_source_weighting.py
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from scrimp.study.job import SOURCE
from scrimp.study.results import of_seeds, shared_seeds

if TYPE_CHECKING:
    from scrimp.study.results import Results

PLAIN: Final = "plain"
WORDS: Final = {
    "average": "The average of ten updates or so as teacher",
    "slow-average": "That of a hundred",
    "weighted": "Weights of sources",
    "both": "Weights and the average of ten",
}
"""Variant to what it does."""
_MEAN: Final = "mean_source_loss"


def findings(results: Results) -> list[str]:
    """What the study's results say, a sentence each; of runs that are missing nothing."""
    return [text for name, words in WORDS.items() if (text := _beside_plain(results, name, words))]


def _beside_plain(results: Results, name: str, words: str) -> str:
    figures = dict.fromkeys(figure for row in results.rows for figure in row.figures)
    changes = {figure: _changes(results, name, figure) for figure in figures}
    of_mean = changes.get(_MEAN)
    if not of_mean:
        return ""
    each = ", ".join(
        f"{figure.removeprefix(SOURCE)} {statistics.fmean(found):+.4f}"
        for figure, found in changes.items()
        if found and figure.startswith(SOURCE)
    )
    return (
        f"{words}: the mean of the sources' losses changes by {statistics.fmean(of_mean):+.4f}, "
        f"lower on {of_seeds(sum(one < 0 for one in of_mean), len(of_mean))} ({each})."
    )


def _changes(results: Results, name: str, figure: str) -> list[float]:
    """A figure of a variant less that of plain training, seed by seed."""
    plain, other = (results.figure_by_seed(one, figure) for one in (PLAIN, name))
    return [other[seed] - plain[seed] for seed in shared_seeds([plain, other])]
