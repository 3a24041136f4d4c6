"""Linear layers that are products of two factors (`model.rank`), with a sparse matrix beside each product or not
(`model.sparse_share`): what is not carried out beside them.

--optimizer.refactor-every    steps from one refactorization to the next (`scrimp.optim.refactorization`)

Checked  tests/config/test_low_rank_settings.py
"""

from __future__ import annotations

from scrimp.config.architecture import Architecture
from scrimp.config.optimizers import facts_of
from scrimp.config.pipeline import V_SHAPED
from scrimp.config.schema import Config
from scrimp.errors import ConfigError
from scrimp.precision import HIGH_PRECISION
from scrimp.user_code import is_code

_MOST_BETA2 = 0.98
"""With 0.95 a step right after a refactorization is up to 1.1 times the schedule's, with 0.99 2.1, with 0.999 6.5."""


def check_low_rank(config: Config, architecture: Architecture) -> None:
    """Refuse what layers of a low rank cannot share, and a refactorization that has nothing to work on.

    Args:
        config: with layout and formats decided.

    Raises:
        ConfigError: with the setting to change.
    """
    every, name = config.optimizer.refactor_every, config.optimizer.name
    if architecture.rank is None:
        if every:
            raise ConfigError(
                "optimizer.refactor_every is of layers that are products of two factors",
                got=f"{every:,}, and layers of full rank",
                do="set model.rank, or leave optimizer.refactor_every out",
            )
        return
    if config.layout.tp > 1:
        raise ConfigError(
            "layout.tp is not carried out beside model.rank yet",
            got=f"layout.tp {config.layout.tp:,}, model.rank {architecture.rank:,}",
            do="leave layout.tp out: layout.fsdp asks nothing of the model",
        )
    if architecture.sparse_share is not None:
        _check_sparse(config, architecture.sparse_share)
    rounds = config.train.parameters == "bf16" and not config.optimizer.master_weights
    refused = [("optimizer.name", name)] * (facts_of(name).low_rank or is_code(name))
    refused += [("optimizer.master_weights", "false")] * rounds
    # Averages that begin at 0 are corrected as if they had seen all updates: small where they forget fast.
    refused += [("optimizer.beta2", f"{config.optimizer.beta2:g}")] * (config.optimizer.beta2 > _MOST_BETA2)
    refused += [("outer.every", f"{config.outer.every:,}")] * (config.outer.every > 0)
    for key, value in refused if every else []:
        raise ConfigError(
            f"{key} {value} is not carried out beside optimizer.refactor_every",
            got=f"optimizer.refactor_every {every:,}",
            do=f"change {key}, or leave optimizer.refactor_every out",
        )


def _check_sparse(config: Config, share: float) -> None:
    """Refuse what would quantize or keep the matrix that is made for a product, or make its gradient later."""
    refused = [("precision", config.precision)] * (config.precision not in HIGH_PRECISION)
    refused += [("train.compile", config.train.compile)] * (config.train.compile == "on")
    refused += [("layout.schedule", config.layout.schedule)] * (config.layout.schedule in V_SHAPED)
    for key, value in refused:
        raise ConfigError(
            f"{key} {value} is not carried out beside model.sparse_share",
            got=f"model.sparse_share {share:g}",
            do=f"change {key}, or leave model.sparse_share out",
        )
