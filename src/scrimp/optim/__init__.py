"""AdamW, the formats that its state is kept in, and its update as a function of tensors."""

from __future__ import annotations

from scrimp.config import OptimizerConfig
from scrimp.optim.adamw import AdamW
from scrimp.optim.moments import MomentFormat, Moments
from scrimp.optim.streaming import Homes, StreamedAdamW
from scrimp.optim.update import Step, update
from scrimp.runtime import Executable

__all__ = [
    "AdamW",
    "Homes",
    "MomentFormat",
    "Moments",
    "Step",
    "StreamedAdamW",
    "make_optimizer",
    "update",
]


def make_optimizer(
    executable: Executable, settings: OptimizerConfig, *, seed: int, speculates: bool = False
) -> AdamW:
    """The optimizer of a run: with states on the host where the plan has them there.

    Args:
        speculates: blocks that the CPU updates begin under the backward pass.
    """
    parameters, host = dict(executable.model.named_parameters()), executable.host
    if host is None:
        return AdamW(parameters, settings, seed=seed)
    homes = Homes(
        host.arena,
        host.link,
        _block_of,
        host.weights,
        host.gradients_on_host,
        host.optimizer_on_host,
        host.optimizer_on_cpu,
        speculates,
    )
    if not homes.away:
        return AdamW(parameters, settings, seed=seed)
    optimizer = StreamedAdamW(parameters, settings, homes, seed=seed)
    host.blocks.gradients = optimizer.host_gradients
    return optimizer


def _block_of(name: str) -> int | None:
    """From a parameter's name to its block."""
    head, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if head == "blocks" else None
