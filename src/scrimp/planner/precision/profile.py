"""What was measured of a model's precision: the input of every planner of bits, as plain arrays.

For each statistics batch, of the L planned linear layers, the P candidate formats and the K weight matrices whose
updates are watched (the planned ones, the embedding, the head):

===========  =========  =====================================================================
array        shape      meaning
===========  =========  =====================================================================
loss                    mean loss of the batch
x w y g      [L]        Frobenius norms of X [T, I], W [O, I], Y [T, O] and G = dLoss/dY
gx gw        [L]        of G W, the gradient through this layer alone, and of the weight's gradient
errors       [L,3,P,2]  of Q(A) - A for both operands of each GEMM (fprop, dgrad, wgrad) in each format
results      [L,3,P,2]  change of the GEMM's result by the error of each operand
backward     [2,2,K,L]  gain B per change of gX_l: by errors of tokens (G) and of weights (W), which all tokens
                        share; of gW_k, and of the relative update of weight k
forward      [2,2,K,L]  gain F per change of Y_l, likewise: by errors of X and of W
losses       [L,P,16]   first-order change of the loss by fprop's real error, of each part of the tokens
curvature    [L]        z' H z / |z|^2 of the loss along noise z in Y_l
sensitivity  [2, K]     relative update of weight k per change of its gradient: by rms(h'), and for
                        changes that lie where its GEMM's errors lie
update       [K]        lr |h| / |W|: relative size of the clean update, in the same units
===========  =========  =====================================================================

Of a grouped layer (routed experts) W is all E experts' matrices, one below the other, and X has a row for each pair of
a token and an expert that it met.

Nothing here knows how the gains were found (a pass per point, or ratios of few passes), what model they
are of, or which optimizer ran. Stored as safetensors, never pickled.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from scrimp.errors import PlanError
from scrimp.files import write_whole
from scrimp.json_files import decode_json
from scrimp.precision import GEMMS

VERSION = 2
LOSS_PARTS = 16
"""Parts of a batch's tokens that changes of the loss are summed over apart."""
Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class BatchStatistics:
    """One statistics batch; shapes as in the module."""

    loss: float
    x: Array
    w: Array
    y: Array
    g: Array
    gx: Array
    gw: Array
    errors: Array
    results: Array
    losses: Array
    backward: Array
    forward: Array
    curvature: Array
    sensitivity: Array
    update: Array


@dataclass(frozen=True, eq=False)
class _Facts:
    """What a profile knows beside its batches."""

    model: str
    """Fingerprint of names and shapes."""
    device: str
    step: int
    """Optimizer updates before the statistics were taken."""
    layers: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    """(outputs, inputs) of each layer."""
    tokens: int
    """T, of one statistics batch."""
    formats: tuple[str, ...]
    """Candidate recipes."""
    weights: tuple[str, ...]
    """Names of the K watched parameters."""
    owners: tuple[int, ...]
    """For each layer the index of its own weight among `weights`."""
    optimizer: str
    """Which update rule the sensitivities are of."""
    gains: str
    """How the gains were found: exact, blocks or ratios."""
    experts: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    """E of each layer; empty: 1 of all."""
    met: tuple[float, ...] = dataclasses.field(default=(), kw_only=True)
    """Experts that a token meets in each layer, on average; empty: 1 in all."""


@dataclass(frozen=True, eq=False)
class _Header(_Facts):
    """What a profile's file holds beside tensors."""

    batches: int
    """How many."""


@dataclass(frozen=True, eq=False)
class PrecisionProfile(_Facts):
    """Statistics of a model at one step of its training."""

    batches: tuple[BatchStatistics, ...]

    def __post_init__(self) -> None:
        """Refuse what does not fit together."""
        if not self.layers or not self.batches:
            raise PlanError(
                "a profile needs at least one layer and one batch",
                got=f"{len(self.layers)} layers, {len(self.batches)} batches",
            )
        num_layers, num_weights = len(self.layers), len(self.weights)
        if not self.formats:
            raise PlanError("a profile needs at least one candidate format", got="none")
        if {len(self.shapes), len(self.owners)} != {num_layers}:
            raise PlanError(
                "a profile needs a shape and a weight for each layer",
                got=f"{len(self.shapes)} shapes, {len(self.owners)} weights",
                expected=num_layers,
            )
        if not all(0 <= owner < num_weights for owner in self.owners):
            raise PlanError("the profile names weights that it has not watched", got=self.owners)
        expected = {
            **dict.fromkeys(("x", "w", "y", "g", "gx", "gw", "curvature"), (num_layers,)),
            "errors": (num_layers, len(GEMMS), len(self.formats), 2),
            "results": (num_layers, len(GEMMS), len(self.formats), 2),
            "losses": (num_layers, len(self.formats), LOSS_PARTS),
            "backward": (2, 2, num_weights, num_layers),
            "forward": (2, 2, num_weights, num_layers),
            "sensitivity": (2, num_weights),
            "update": (num_weights,),
        }
        for batch in self.batches:
            for name, shape in expected.items():
                found = getattr(batch, name).shape
                if found != shape:
                    raise PlanError(f"the profile's {name} has a wrong shape", got=found, expected=shape)

    @property
    def flops(self) -> Array:
        """[L], share of the planned layers' FLOPs; its three GEMMs have a third each."""
        sizes = np.array([float(outputs * inputs) for outputs, inputs in self.shapes])
        per_token = sizes * self._by_layer(self.met) / self._by_layer(self.experts)
        shares: Array = per_token / per_token.sum()
        return shares

    @property
    def summed(self) -> tuple[Array, Array, Array]:
        """[L] each, over how many of all numbers of W, of W and of X the three GEMMs spread the energy of a result:
        E I, E O and rows of X."""
        outputs, inputs = (np.array(sizes, dtype=float) for sizes in zip(*self.shapes, strict=True))
        return inputs * self._by_layer(self.experts), outputs, self.rows

    @property
    def rows(self) -> Array:
        """[L], rows of X."""
        return self.tokens * self._by_layer(self.met)

    def _by_layer(self, values: Sequence[float]) -> Array:
        return np.array(values or [1.0] * len(self.layers), dtype=float)

    def unusable(self) -> list[str]:
        """Names of layers whose statistics are not finite in some batch: they get no low format.

        Where a loss or a sensitivity is not, nothing is known of any layer.
        """
        bad = np.zeros(len(self.layers), dtype=bool)
        for batch in self.batches:
            bad |= not (
                np.isfinite(batch.loss) and batch.loss != 0.0 and np.isfinite(batch.sensitivity).all()
            )
            for name in ("x", "w", "y", "g", "gx", "gw", "curvature"):
                bad |= ~np.isfinite(getattr(batch, name))
            bad |= ~np.isfinite(batch.errors + batch.results).all(axis=(1, 2, 3))
            bad |= ~np.isfinite(batch.losses).all(axis=(1, 2))
            bad |= ~np.isfinite(batch.backward).all(axis=(0, 1, 2))
            bad |= ~np.isfinite(batch.forward).all(axis=(0, 1, 2))
        return [layer for layer, is_bad in zip(self.layers, bad, strict=True) if is_bad]

    def select(self, formats: Sequence[str]) -> PrecisionProfile:
        """The same profile of fewer formats, in the given order."""
        missing = [name for name in formats if name not in self.formats]
        if missing:
            raise PlanError(
                "the profile has no statistics of a format",
                got=", ".join(missing),
                expected=", ".join(self.formats),
                do="measure again with these candidates",
            )
        index = [self.formats.index(name) for name in formats]
        batches = tuple(
            dataclasses.replace(
                b, errors=b.errors[:, :, index], results=b.results[:, :, index], losses=b.losses[:, index]
            )
            for b in self.batches
        )
        return dataclasses.replace(self, formats=tuple(formats), batches=batches)

    def write(self, path: Path | str) -> None:
        """Store as one safetensors file."""
        tensors = {
            f"{number}.{field.name}": np.array(getattr(batch, field.name), dtype=np.float64, order="C")
            for number, batch in enumerate(self.batches)
            for field in dataclasses.fields(batch)
        }
        facts = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "batches"
        }
        text = json.dumps({"version": VERSION, "batches": len(self.batches), **facts})
        write_whole(Path(path), save(tensors, metadata={"scrimp_profile": text}))

    @classmethod
    def read(cls, path: Path | str) -> PrecisionProfile:
        """Read what `write` stored.

        Raises:
            PlanError: the file is missing, damaged, or of another version.
        """
        do = "measure again"
        try:
            text = _metadata(path)["scrimp_profile"]
            version = ("version", VERSION)
            facts = decode_json(text, _Header, origin=str(path), error=PlanError, do=do, version=version)
            tensors = load_file(path)
            names = [field.name for field in dataclasses.fields(BatchStatistics)]
            batches = tuple(
                BatchStatistics(
                    **{name: _value(name, tensors[f"{index}.{name}"]) for name in names}  # type: ignore[arg-type]
                )
                for index in range(facts.batches)
            )
            return cls(**{**vars(facts), "batches": batches})
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise PlanError(f"{path} is no precision profile", got=error, do=do) from None


def _value(name: str, tensor: NDArray[np.float64]) -> float | Array:
    return float(tensor) if name == "loss" else tensor


def _metadata(path: Path | str) -> Mapping[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return dict(file.metadata() or {})
