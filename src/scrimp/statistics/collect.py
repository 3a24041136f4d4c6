"""From a model in training to a `PrecisionProfile`: the passes over each statistics batch.

::

    clean      in the compute type: norms, errors of every candidate format and what they do to the loss, gradients, the
               stream at its nodes
    noise      passes for the gains (six by default, see `gains`), differences to the clean run
    format     a pass for each kind of layer, some of which run in the lowest format (`calibration`)
    update     sensitivity of each weight's update, from the optimizer's state before the step

and everything is put back (`untouched`): a run that is measured goes on as if it had not been.

Equal passes      All passes over a batch start from the same random states and buffers, and run by the same code:
                  without noise, a pass changes nothing, not one bit. So dropout is no noise.
Several batches   Each gives norms, errors and sensitivities of its own, so that a planner can see how sure they are.
                  Gains are of the first `gain_batches` only: their passes cost most, and they vary least.
Limits            Layers under torch.compile run eagerly while they are measured. Measure between two steps: gradients
                  that an optimizer keeps outside the parameters must be none.
Checked           tests/statistics/test_collect.py, test_untouched.py; against real damage in
                  test_damage.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from scrimp.errors import ModelError, PlanError, TrainingError
from scrimp.gemm import Execution, PlannedModel, is_transposed, observing
from scrimp.planner.precision.divergence import lowest_format
from scrimp.planner.precision.profile import BatchStatistics, PrecisionProfile
from scrimp.precision import GEMMS, LinearPrecision, recipe
from scrimp.statistics.branches import BranchTape, Isolated
from scrimp.statistics.calibration import calibrated, kinds_of
from scrimp.statistics.exact import Sites, exact_gains, watching_sites
from scrimp.statistics.gains import CleanRun, Gains, Passes, by_blocks, by_ratios, of_layers, places
from scrimp.statistics.inventory import Inventory
from scrimp.statistics.loss_changes import LossChanges
from scrimp.statistics.norms import NormWatch, WeightKey
from scrimp.statistics.optimizer_view import OptimizerView
from scrimp.statistics.ranks import ALONE, Ranks, in_model_order, local, settle
from scrimp.statistics.stream import Changes, Injection, StreamTape, square
from scrimp.statistics.structure import Structure, SubLayer, find_part, find_structure, joined
from scrimp.statistics.untouched import ForwardState, untouched
from scrimp.statistics.updates import Updates, norms_of

Array = NDArray[np.float64]
GAINS = ("ratios", "blocks", "exact")
NOISE_SHARE = 0.05
_IDLE = "its forward is replaced, or never called"
_CUT_OFF = "no gradient reaches it"


@dataclass(frozen=True)
class Subject:
    """A model in training, as measuring needs it."""

    model: nn.Module
    planned: PlannedModel
    optimizer: OptimizerView
    losses: Callable[[Any], Iterator[Tensor]]
    """From one statistics batch to each micro-batch's share of the batch's mean loss, with its graph."""
    compute: str
    """Format of the clean passes, fp32 or bf16."""
    device_name: str = "cpu"
    step: int = 0


def collect(
    subject: Subject,
    batches: Iterable[Any],
    formats: Sequence[str],
    *,
    layers: Sequence[str] | None = None,
    gains: str = "auto",
    noise: float = NOISE_SHARE,
    gain_batches: int = 1,
    seed: int = 0,
    on_batch: Callable[[int], None] | None = None,
    ranks: Ranks | None = None,
) -> PrecisionProfile:
    """Measure.

    Args:
        batches: statistics batches, each what `subject.losses` takes.
        formats: candidate recipes.
        layers: planned layers to measure; None: all. The others' updates are watched too.
        gains: ratios, blocks, exact; auto: ratios where the model has a residual stream, else exact.
        noise: deviation of injected noise as a share of the local rms.
        gain_batches: batches that gains are measured on; others take those of the last one.
        ranks: that train the model together, `Ranks.of(model)`: all of them call this with their own rows of
            the batches, and get the same profile. None: one process.

    Raises:
        PlanError: an unknown format or layer, an unknown way of finding gains, or one that the model has no
            structure for; no batch; a format whose groups straddle tensor-parallel ranks.
        ModelError: a layer to measure that is not trained, or layers that do not run their planned GEMMs.
        TrainingError: a loss that is not finite, or gradients of an unfinished step.
    """
    names = tuple(layers if layers is not None else subject.planned.layers)
    unknown = [name for name in names if name not in subject.planned.layers]
    if unknown:
        raise PlanError("only planned layers can be measured", got=", ".join(unknown[:8]))
    for name in formats:
        recipe(name)
    statistics, ranks = [], ranks or ALONE
    measurement: _Measurement | None = None
    settle(subject.model)
    with _between_steps(subject):
        for number, batch in enumerate(batches):
            if measurement is None:
                everything = Inventory.of(subject.model, subject.planned, names, ranks)
                structure = _structure(subject, batch, ranks, everything)
                if ranks.size > 1:
                    structure = structure if ranks.world.same(repr(structure)) else None
                    ranks.refuse_straddling(subject.planned.layers, formats)
                way = _way(gains, structure, ranks, everything)
                measurement = _Measurement(subject, everything, tuple(formats), way, structure, noise, ranks)
            measures_gains = number < max(1, gain_batches)
            statistics.append(measurement.measure(batch, seed + 1000 * number, measures_gains=measures_gains))
            if on_batch is not None:
                on_batch(number)
    if measurement is None:
        raise PlanError("no batch was given to measure on", expected="at least one")
    return measurement.profile(statistics)


@contextlib.contextmanager
def _between_steps(subject: Subject) -> Iterator[None]:
    """In training mode and in the compute type; what the passes leave behind is cleared away, come what may."""
    with untouched(subject.model, subject.planned), observing(_nobody, plain=True):
        if subject.optimizer.gradients():
            raise TrainingError(
                "the optimizer holds gradients of an unfinished step", do="measure between two steps"
            )
        subject.planned.replan(LinearPrecision.of(subject.compute))
        subject.model.train()
        try:
            yield
        finally:
            subject.optimizer.zero_grad()


def _nobody(execution: Execution) -> None:
    """Observes nothing: while anyone observes, clean and disturbed passes run by the same code."""


def _structure(subject: Subject, batch: Any, ranks: Ranks, everything: Inventory) -> Structure | None:
    """The structure of all layers that are followed, found with the first micro-batch."""
    before = ForwardState(subject.model, subject.planned)
    here = [name for name in subject.planned.layers if name in everything.owned]

    def forward() -> object:
        return next(iter(subject.losses(batch)), None)

    try:
        if ranks.stages == 1:
            return find_structure(subject.model, here, forward)
        part = find_part(subject.model, here, forward)
        said = {
            node: None if sub is None else [sub.entries, sub.exit, sub.branch] for node, sub in part.items()
        }
        parts = [
            {node: None if sub is None else SubLayer(tuple(sub[0]), *sub[1:]) for node, sub in one.items()}
            for one in ranks.world.gathered(said)
        ]
        return joined(parts, in_model_order, everything.owned)
    finally:
        before.restore()
        settle(subject.model)


def _way(gains: str, structure: Structure | None, ranks: Ranks, everything: Inventory) -> str:
    has_experts = max(everything.experts.values(), default=1) > 1
    # Whose tokens an expert has: those of its own rank, or of several.
    shares_experts = has_experts and (bool(ranks.experts) or ranks.between is not None)
    if (ranks.stages > 1 or shares_experts) and (structure is None or gains == "exact"):
        raise PlanError(
            "gains are not measured exactly "
            + ("of experts on these ranks" if shares_experts else "in a pipeline"),
            got="no residual stream was found in the model" if structure is None else gains,
            expected="auto, ratios or blocks, of pre-norm blocks",
            do="plan in one process, or with layout.dp and layout.fsdp alone",
        )
    if gains == "auto":
        return "exact" if structure is None else "ratios"
    if gains not in GAINS:
        raise PlanError("gains cannot be found that way", got=gains, expected=f"auto, {', '.join(GAINS)}")
    if structure is None and gains != "exact":
        raise PlanError(
            "no residual stream was found in the model, which this way of finding gains follows",
            got=gains,
            expected="pre-norm blocks: norms that read the stream, linear layers whose results are added to it",
            do="use gains=exact, one pass per layer and direction",
        )
    return gains


@dataclass(frozen=True)
class _Stream:
    """The residual stream, the place of each watched weight on it, and what watches it."""

    structure: Structure
    places: NDArray[np.int64]
    tape: StreamTape
    branches: BranchTape


class _Measurement:
    """The passes over batches, and what they share."""

    def __init__(
        self,
        subject: Subject,
        everything: Inventory,
        formats: tuple[str, ...],
        gains: str,
        structure: Structure | None,
        noise: float,
        ranks: Ranks,
    ) -> None:
        self.subject, self.layers, self.formats, self.ranks = subject, everything.layers, formats, ranks
        self.gains, self.noise = gains, noise
        parameters = dict(subject.model.named_parameters())
        modules = dict(subject.model.named_modules())
        layers, self.weights = everything.layers, everything.weights
        missing = [layer for layer in layers if everything.owned[layer] not in self.weights]
        if missing:
            raise ModelError("a layer that is to be planned is not trained", got=", ".join(missing[:8]))
        owned = {layer: weight for layer, weight in everything.owned.items() if weight in self.weights}
        self.owned = {layer: self.weights.index(weight) for layer, weight in owned.items()}
        self.whole, self.experts_of = everything.shapes, everything.experts
        self.shapes = tuple(self.whole[layer] for layer in layers)
        self.planned = {name: one for name, one in subject.planned.layers.items() if name in everything.owned}
        self.transposed = {layer for layer in self.planned if is_transposed(modules[layer])}
        norms = norms_of({name: p for name, p in parameters.items() if name in self.weights}, ranks)
        self.norms_of_weights = [norms[name] for name in self.weights]
        self.stream: _Stream | None = None
        if structure is not None and gains != "exact":
            where = places(structure, self.weights, {weight: layer for layer, weight in owned.items()})
            stream = StreamTape(subject.model, structure, ranks)
            self.stream = _Stream(structure, where, stream, BranchTape(subject.model, structure, ranks))
        self.sites = Sites()
        self.weight_errors: dict[WeightKey, Tensor] = {}
        self.clean: dict[str, Tensor] = {}
        self.gradient_norms: dict[str, float] = {}
        self.updates: Updates | None = None
        self.last_gains: Gains | None = None
        self.experts = tuple(everything.experts[layer] for layer in layers)
        self.met = np.ones(len(layers))
        self.tokens = 0
        self.start = ForwardState(subject.model, subject.planned)

    # -- passes --------------------------------------------------------------------------------

    def measure(self, batch: Any, seed: int, *, measures_gains: bool = True) -> BatchStatistics:
        """All passes over one batch, or all but those of the gains."""
        self.start = ForwardState(self.subject.model, self.subject.planned)
        experts = self.experts_of
        watch = NormWatch(self.planned, self.formats, self.weight_errors, self.layers, self.ranks, experts)
        changes = LossChanges(
            {name: self.planned[name] for name in self.layers if name in self.planned},
            self.formats,
            self.ranks,
        )
        with (
            observing(watch, plain=True, every_run=True),
            observing(changes, plain=True, every_run=True),
            watching_sites(self.subject.model, tuple(experts), self.sites, self.ranks),
            self._recording(),
        ):
            loss = self._pass(batch)
        watch.join(self.whole)
        losses = changes.join(self.layers)
        if not math.isfinite(loss):
            raise TrainingError("the loss of a statistics batch is not finite", got=loss)
        self._count_tokens(watch)
        gradients = self.subject.optimizer.gradients()
        self.clean = {
            name: local(gradients[name]).to("cpu", copy=True) for name in self.weights if name in gradients
        }
        optimizer, layer_of = self.subject.optimizer, {index: layer for layer, index in self.owned.items()}
        self.updates = Updates(optimizer, gradients, self.weights, self.norms_of_weights, self.ranks)
        self.gradient_norms = self.updates.gradient_norms
        sizes = self.updates.sizes(gradients)
        moves = self.updates.sensitivities(
            gradients, lambda index: self._error_shape(watch, layer_of.get(index)), seed
        )
        self.subject.optimizer.zero_grad()
        if measures_gains or self.last_gains is None:
            self._refuse_idle(watch)
            self.last_gains = self._calibrated(self._gains(batch, watch, seed), batch, watch)
        self.clean = {}
        return self._statistics(loss, watch, losses, self.last_gains, moves, sizes)

    def _count_tokens(self, watch: NormWatch) -> None:
        """Tokens of a batch, and how many experts of each layer one of them met."""
        dense = [number for name, number in watch.tokens.items() if self.experts_of[name] == 1]
        self.tokens = max(dense or watch.tokens.values(), default=0)
        rows = np.array([watch.tokens.get(layer, 0) for layer in self.layers])
        self.met = np.where(np.array(self.experts) > 1, rows / max(1, self.tokens), 1.0)

    def _refuse_idle(self, watch: NormWatch) -> None:
        """Layers of which the clean pass shows nothing: zeros would be taken for costs."""
        watched = self.layers if self.stream is None else tuple(self.experts_of)
        reasons = []
        for name in watched:
            fprop, *backward = (watch.runs.get((name, gemm)) for gemm in GEMMS)
            if not fprop or not any(backward):
                reasons.append(f"{name} ({_CUT_OFF if fprop else _IDLE})")
        if not reasons:
            return
        raise ModelError(
            "layers cannot be measured, for they do not run their planned GEMMs",
            got=", ".join(reasons[:8]) + (", ..." if len(reasons) > 8 else ""),
            expected="forward and backward of every planned layer, by its own forward method",
            do="name the others with layers=, and measure with gains='exact'",
        )

    def _error_shape(self, watch: NormWatch, layer: str | None) -> Tensor | None:
        """Where errors of a weight's gradient lie, in the layout of the parameter; None for no planned layer."""
        found = None if layer is None else watch.error_shape(layer)
        return found.t() if found is not None and layer in self.transposed else found

    def _pass(self, batch: Any) -> float:
        """Forward and backward over all micro-batches; gives their loss."""
        self.start.restore()
        total = 0.0
        tapes: list[StreamTape | BranchTape] = []
        if self.stream is not None:
            tapes = [self.stream.tape, self.stream.branches]
        for tape in tapes:
            tape.micro_batch = 0
        for loss in self.subject.losses(batch):
            loss.backward()
            total += float(loss.detach())
            for tape in tapes:
                tape.micro_batch += 1
        return self.ranks.mean(total)

    def _disturbed(self, batch: Any, context: contextlib.AbstractContextManager[object]) -> Array:
        """[2, K] norms of the changes of gradients and of relative updates in a pass inside a context."""
        with context:
            self._pass(batch)
        gradients = self.subject.optimizer.gradients()
        assert self.updates is not None
        moved = np.zeros((2, len(self.weights)))
        for index, name in enumerate(self.weights):
            if name in self.clean:
                noisy = local(gradients[name]).float()
                clean = self.clean[name].to(noisy.device).float()
                moved[0, index] = math.sqrt(square(noisy - clean))
                moved[1, index] = self.updates.change(index, clean, noisy)
        self.subject.optimizer.zero_grad()
        return self.ranks.norms(moved, self.updates.pieces)

    def _gains(self, batch: Any, watch: NormWatch, seed: int) -> Gains:
        if self.stream is None:
            return exact_gains(
                self.subject.model,
                self.layers,
                len(self.weights),
                self.sites,
                lambda context: self._disturbed(batch, context),
                self.noise,
                seed,
                self.ranks,
            )
        structure, where = self.stream.structure, self.stream.places
        tape, branches = self.stream.tape, self.stream.branches

        def stream(injection: Injection) -> tuple[Changes, Array]:
            with tape.comparing(injection) as changes, branches.comparing(changes.exits):
                moved = self._disturbed(batch, contextlib.nullcontext())
            return changes, moved

        def isolated(kind: str, key: int, turn: int) -> tuple[Isolated, Array]:
            with branches.isolated(kind, self.noise, key, turn) as found:
                moved = self._disturbed(batch, contextlib.nullcontext())
            return found, moved

        find = by_ratios if self.gains == "ratios" else by_blocks
        nodes = find(structure, where, Passes(stream, isolated, tape.first), self.noise, seed)
        clean = CleanRun(
            {key: math.sqrt(value) for key, value in watch.squares.items()},
            {layer: math.sqrt(value) for layer, value in self.sites.input_gradients.items()},
            {number: math.sqrt(value) for number, value in branches.added_squares.items()},
        )
        return of_layers(nodes, structure, where, self.layers, self.owned, clean, tape)

    def _calibrated(self, gains: Gains, batch: Any, watch: NormWatch) -> Gains:
        """Gains whose updates by fprop are scaled to what the lowest format does."""
        low = lowest_format(self.formats)
        if low is None:
            return gains
        squares = [
            [watch.results.get((layer, GEMMS[0], low, operand), 0.0) for operand in (0, 1)]
            for layer in self.layers
        ]

        def run(members: list[int]) -> Array:
            return self._disturbed(batch, self._in_format(low, [self.layers[index] for index in members]))

        kinds = kinds_of(self.layers, None if self.stream is None else self.stream.structure)
        return calibrated(gains, np.sqrt(squares), kinds, run)

    @contextlib.contextmanager
    def _in_format(self, recipe_name: str, layers: Sequence[str]) -> Iterator[None]:
        """fprop of these layers in a format."""
        planned, compute = self.subject.planned, LinearPrecision.of(self.subject.compute)
        here = [layer for layer in layers if layer in planned.layers]
        planned.replan({layer: dataclasses.replace(compute, fprop=recipe_name) for layer in here})
        try:
            yield
        finally:
            planned.replan(dict.fromkeys(here, compute))

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Keep the clean run's stream and branches, where there are any."""
        if self.stream is None:
            yield
            return
        with self.stream.tape.recording(), self.stream.branches.recording():
            yield

    # -- results -------------------------------------------------------------------------------

    def _statistics(
        self, loss: float, watch: NormWatch, losses: Array, gains: Gains, moves: Array, sizes: Array
    ) -> BatchStatistics:
        def norms(name: str) -> Array:
            return np.array([math.sqrt(watch.squares[layer, name]) for layer in self.layers])

        weight_gradients = [self.weights[self.owned[layer]] for layer in self.layers]
        shape = (len(self.layers), len(GEMMS), len(self.formats), 2)
        errors, results = np.zeros(shape), np.zeros(shape)
        for i, j, p, operand in np.ndindex(shape):
            key = (self.layers[i], GEMMS[j], self.formats[p], operand)
            errors[i, j, p, operand] = math.sqrt(watch.errors.get(key, 0.0))
            results[i, j, p, operand] = math.sqrt(watch.results.get(key, 0.0))
        return BatchStatistics(
            loss=loss,
            x=norms("x"),
            w=norms("w"),
            y=norms("y"),
            g=norms("g"),
            gx=norms("gx"),
            gw=np.array([self.gradient_norms.get(name, 0.0) for name in weight_gradients]),
            errors=errors,
            results=results,
            losses=losses,
            backward=gains.backward,
            forward=gains.forward,
            curvature=gains.curvature,
            sensitivity=moves,
            update=sizes,
        )

    def profile(self, statistics: Sequence[BatchStatistics]) -> PrecisionProfile:
        """All batches together."""
        return PrecisionProfile(
            model=fingerprint(self.layers, self.shapes),
            device=self.subject.device_name,
            step=self.subject.step,
            layers=self.layers,
            shapes=self.shapes,
            tokens=self.tokens,
            formats=self.formats,
            weights=self.weights,
            owners=tuple(self.owned[layer] for layer in self.layers),
            optimizer=self.subject.optimizer.name,
            gains=self.gains,
            batches=tuple(statistics),
            **self._of_experts(),
        )

    def _of_experts(self) -> dict[str, Any]:
        """Nothing, where there are none."""
        if max(self.experts) == 1:
            return {}
        return {"experts": self.experts, "met": tuple(self.met.tolist())}


def fingerprint(layers: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
    """Twelve hex digits of the planned layers' names and shapes."""
    text = json.dumps([[layer, *shape] for layer, shape in zip(layers, shapes, strict=True)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
