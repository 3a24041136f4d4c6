"""In which formats a rank keeps what it trains: weights, masters, moments, and sums of gradients.

Problem  What a parameter takes beside its weight decides what fits: 16 bytes with a master, moments and a sum of
         gradients in float32; 6 with a weight that is rounded stochastically and moments of 8 bits.
Method   `train.parameters = bf16` with m bytes of both moments, w of what is updated (a master 4, a weight 2) and g of
         a gradient as micro-batches add it up (4 beside masters, else 2)::

             states      m, and 4 of a master
             sum         2 + 2 g: a gradient in bf16 is read, the sum read and written
             update      2 m + 2 w + g, and 6 from a master to its weight; g for the norm, 2 g for the clip

         each read and written once, as one fused kernel does: torch's for what is all in float32, else
         `scrimp.gemm.kernels.adamw`, which clips as it reads.
Limits   Scrimp's own step alone: the files of other programs say what they keep. Scales of 8-bit moments are two bytes
         for 128 numbers. Muon and GaLore have other states.
Checked  tests/planner/layout/test_state_formats.py: against the optimizer's own account, and the tensors that its
         kernel is given
"""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.config import OptimizerConfig, TrainConfig, nearest_word
from scrimp.config.resolved import ResolvedOptimizer
from scrimp.errors import ConfigError

MOMENTS = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 * (1 + 2 / 128)}
"""Bytes of both moments of a parameter."""
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class StateFormats:
    """What is chosen, as a line of JSON has it.

    Raises:
        ConfigError: moments that there are not.
    """

    moments: str = AUTO
    """fp32, bf16, 8bit; auto: fp32 beside masters, else bf16."""
    masters: bool = True
    """Whether an fp32 copy of each weight is updated; else the weight itself, rounded stochastically."""

    def __post_init__(self) -> None:
        if self.moments != AUTO and self.moments not in MOMENTS:
            near = nearest_word(self.moments, MOMENTS)
            raise ConfigError(
                "states.moments is not known",
                got=self.moments,
                expected=f"one of {AUTO}, {', '.join(MOMENTS)}",
                do=f"did you mean {near}?" if near else None,
            )

    @property
    def are_usual(self) -> bool:
        """Whether these are masters and moments in fp32."""
        return self.masters and self.name == "fp32"

    @property
    def name(self) -> str:
        """The format of the moments, decided; without masters "-alone" follows."""
        if self.moments == AUTO:
            return "fp32" if self.masters else "bf16-alone"
        return self.moments + ("" if self.masters else "-alone")

    @property
    def moment_bytes(self) -> float:
        """Bytes of both moments of a parameter."""
        return MOMENTS[self.name.removesuffix("-alone")]

    @property
    def master_bytes(self) -> float:
        """Bytes of a master."""
        return 4.0 * self.masters

    @property
    def state_bytes(self) -> float:
        """Bytes of master and moments of a parameter."""
        return self.moment_bytes + self.master_bytes

    @property
    def gradient_bytes(self) -> float:
        """Bytes of a gradient as micro-batches add it up."""
        return 4.0 if self.masters else 2.0

    @property
    def sum_bytes(self) -> float:
        """Bytes moved for each number of a gradient that is added up."""
        return 2.0 + 2.0 * self.gradient_bytes

    @property
    def update_bytes(self) -> float:
        """Bytes moved for each parameter that is updated, less those of the norm and the clip."""
        weight = self.master_bytes or 2.0
        return 2.0 * (self.moment_bytes + weight) + self.gradient_bytes + 6.0 * self.masters

    @property
    def clip_bytes(self) -> float:
        """Bytes moved for each number by the gradients' norm, and by a clip that the update does not do."""
        return self.gradient_bytes * (3.0 if self.are_usual else 1.0)


def run_states(optimizer: ResolvedOptimizer) -> StateFormats:
    """What a run in bf16 keeps."""
    return StateFormats(moments=optimizer.moments, masters=optimizer.master_weights)


def states_of(train: TrainConfig, optimizer: OptimizerConfig) -> StateFormats:
    """What a configuration asks for, on hardware that is not here.

    Raises:
        ConfigError: parameters in fp32, or another optimizer than AdamW.
    """
    wrong = {
        "train.parameters": (train.parameters, (AUTO, "bf16")),
        "optimizer.name": (optimizer.name, ("adamw",)),
    }
    for key, (value, known) in wrong.items():
        if value not in known:
            raise ConfigError(
                f"a search on other hardware does not know {key} {value}",
                expected=f"{key} {' or '.join(known)}",
                do="leave it out, or plan on the machine itself",
            )
    masters = True if optimizer.master_weights is None else optimizer.master_weights
    return StateFormats(moments=optimizer.moments, masters=masters)
