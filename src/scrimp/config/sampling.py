"""How tokens are drawn when a model writes text."""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.config.values import RANGES, Range, check_range


@dataclass(frozen=True)
class Sampling:
    """How each token is drawn from a model's probabilities."""

    temperature: float = 0.8
    """0 always takes the most likely token (greedy); higher is more random."""
    top_k: int = 0
    """Draw from this many most likely tokens only; 0 from all."""
    top_p: float = 1.0
    """Draw from the most likely tokens that together have this probability; 1 from all."""
    seed: int = 0
    """Decides the draws."""

    def check(self) -> None:
        """Raise ConfigError for a value out of its range."""
        check_range("--temperature", self.temperature, Range(0, 100))
        check_range("--top-k", self.top_k, Range(0, 2**31 - 1))
        check_range("--top-p", self.top_p, Range(0, 1, above=True))
        check_range("--seed", self.seed, RANGES["run.seed"])


GREEDY = Sampling(temperature=0.0)
