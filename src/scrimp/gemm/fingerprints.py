"""Proves of every planned GEMM, while a model trains, that its numbers are those of its format.

Problem  A layer that skips its quantizer trains well, and its log still says FP4. What a layer reports of itself does
         not show it, and one layer that was checked does not vouch for the next.
Method   The first run of each GEMM is compared with `scrimp.formats` by random vectors (Freivalds' check). With V of
         signs, 8 columns, and Q what the plan, not the layer, rounds an operand to::

             F = Q(A) (Q(B) V)        Y V: what came out, and its difference from this    R = Y V - F

         1.  |R| is at most the rounding of the working format: 2^-7 of |F| in bf16, 2^-14 in fp32
             (on CUDA 2^-7 too: FP8 tensor cores keep 14 bits of a sum, see `scrimp.gemm.probe`).
         2.  R does not point to a lie. Were an operand left as it is, A in place of Q(A), the result would be
             F + D, with D = A (Q(B) V) - F: the share <R, D> / <D, D> is 1 where that happened and 0 where not.
             It finds an error of quantization that is hidden under the rounding of the result.

         wgrad reads codes that were made in the forward pass. They may lie, so Q(X) V is kept from there, 16 numbers
         a token, and not read from them.
Unproven A GEMM of zeros, of numbers that are not finite or close to underflow, or in which the rounding of the result
         hides what quantization does, shows nothing: the next runs of it are looked at (under tensor parallelism
         none: all ranks must take the same way).
Cost     Each operand is quantized once more and multiplied by 16 vectors: once for each GEMM that a plan changes, then
         nothing. benchmarks/switch_proof.py measures it.
Memory   Operands are read in pieces (`scrimp.formats.grouping.PIECE_ELEMENTS`: 2^18 elements on a CPU, 2^22 on CUDA; 2
         and 32 MiB in float64, some of them at a time). Whole are results by 16 vectors, 128 bytes a row. Those
         of X are kept until wgrad: 128 bytes for each token and layer whose wgrad reads codes. No account of memory
         has them. Where wgrad's recipe is not that of the codes, X exists once more in float32 for a while.
Ranks    Each looks at its own pieces; `join` tells all of them what any has found, so that they stop alike.
Limits   Noise is taken from the stream that the layer says it used. An error that eight random sums of a row's
         numbers cancel goes unseen. None of this has run on a GPU.
Checked  tests/gemm/test_fingerprints.py, tests/runtime/test_proof.py: back ends and layers that lie
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from scrimp.errors import TrainingError
from scrimp.formats import QuantizedTensor, project
from scrimp.gemm.layer import PlannedLayer
from scrimp.gemm.observe import Execution, set_witness
from scrimp.gemm.problem import AXES, COLUMNS, Use, high_precision, operands_of
from scrimp.gemm.recompute import is_running_again
from scrimp.precision import GEMMS, HIGH_PRECISION, OPERANDS, RECOMPUTE, LinearPrecision
from scrimp.world import World

VECTORS = 8
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-14}
"""Largest relative distance from the format's product, by working format: its rounding, and that of the sums."""
MOST_OF_A_LIE = 0.5
"""Halfway between a quantized operand, 0, and one that was left as it is, 1."""
LARGEST_DEVIATION = 0.1
"""Standard deviation up to which a share is told from the other: by five deviations."""
MOST_TRIES = 8
"""Runs of a GEMM that are looked at, where they show nothing; those of zeros cost nothing, and do not count."""
SMALLEST = 2.0**-100
"""Root mean square of a result below which numbers on their way to it may underflow, which float64 does not see."""
MOST_WAITING = 16
"""Forward passes of a layer, before the first backward pass, whose inputs are remembered."""

Gemm = tuple[str, str]
"""Names of a layer and of one of its GEMMs."""


@dataclass(frozen=True)
class Lie:
    """One GEMM that did not do what its plan says."""

    layer: str
    gemm: str
    recipe: str
    backend: str
    found: str
    rank: int | None = None
    """Where it ran; None: in this process, which alone looked."""


@dataclass(frozen=True)
class _Side:
    """An operand times vectors, in its format and as it is."""

    rounded: Tensor
    plain: Tensor


class Fingerprints:
    """Holds the first run of planned GEMMs against their formats; an observer, or a witness of layers.

    Attributes:
        pending: GEMMs that nothing is known of yet.
        proven: GEMMs whose numbers were those of their formats.
        undecided: GEMMs whose numbers told nothing, however often they were looked at.
        lies: what was found.
    """

    def __init__(
        self,
        precisions: Mapping[str, LinearPrecision],
        gemms: Collection[Gemm] | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """Expect formats.

        Args:
            precisions: what the plan says, by layer.
            gemms: those to prove; None: all of these layers.
            at_once: raise at the first lie, where it happens; else at `check`.
        """
        self._precisions, self._at_once = dict(precisions), at_once
        every = [(layer, gemm) for layer in precisions for gemm in GEMMS]
        self.pending = {key for key in every if gemms is None or key in gemms}
        self.proven: set[Gemm] = set()
        self.seen: set[Gemm] = set()
        """GEMMs that ran, whatever was learned."""
        self.undecided: set[Gemm] = set()
        self.lies: list[Lie] = []
        self._tries: Counter[Gemm] = Counter()
        self._inputs: dict[str, list[_Side]] = {}
        """X of forward passes whose codes wait for wgrad, as it must read them."""
        self._layers: dict[str, PlannedLayer] = {}

    def watch(self, layers: Mapping[str, PlannedLayer]) -> None:
        """Witness these layers until all that is pending of them is proven."""
        self._layers = {name: layer for name, layer in layers.items() if self._is_open(name)}
        for layer in self._layers.values():
            set_witness(layer, self)

    def release(self) -> None:
        """Witness nothing more."""
        for layer in self._layers.values():
            set_witness(layer, None)
        self._layers, self._inputs = {}, {}

    def check(self) -> None:
        """Say what was found.

        Raises:
            TrainingError: GEMMs did not run in their formats; names them.
        """
        _signs.cache_clear()  # only a step that proves something needs them
        if not self.lies:
            return
        first, *others = sorted(self.lies, key=lambda lie: (lie.layer, GEMMS.index(lie.gemm)))
        named = [f"{lie.layer}.{lie.gemm}{_of_rank(lie)}: {lie.found}" for lie in (first, *others)]
        raise TrainingError(
            f"{first.layer}.{first.gemm} did not run in {first.recipe} on the {first.backend} back end{_of_rank(first)}"
            + (f", nor did {len(others)} others as planned" if others else ""),
            got="; ".join(named[:6]) + ("; ..." if len(named) > 6 else ""),
            expected="the numbers of the recipe, up to the rounding of the result",
            do="run `scrimp doctor --fresh`, and report this with its table and the plan",
        )

    def join(self) -> bool:
        """Know of the lies on all ranks of the default process group, all of which call this; whether one of them
        still waits for numbers."""
        found = World.current().gathered([list(map(asdict, self.lies)), bool(self.pending)])
        lies = (
            Lie(**lie | {"rank": rank if lie["rank"] is None else lie["rank"]})
            for rank, (of_rank, _) in enumerate(found)
            for lie in of_rank
        )
        self.lies = list(dict.fromkeys(lies))  # known since the last time
        return any(is_open for _, is_open in found)

    def __call__(self, execution: Execution) -> None:
        """Observe one."""
        key = execution.layer, execution.gemm
        if is_running_again() or execution.layer not in self._precisions:
            return
        self.seen.add(key)
        with torch.no_grad(), torch.autocast(execution.a.device.type, enabled=False):
            if execution.kept is not None and (execution.layer, "wgrad") in self.pending:
                self._remember(execution, *execution.kept)
            if key in self.pending and not _is_of_zeros(execution):
                self._judge(execution)
            if execution.gemm == "wgrad":
                self._inputs.pop(execution.layer, None)

    def _is_open(self, layer: str) -> bool:
        return any((layer, gemm) in self.pending for gemm in GEMMS)

    # -- one GEMM ------------------------------------------------------------------------------

    def _judge(self, execution: Execution) -> None:
        key = execution.layer, execution.gemm
        recipe = self._precisions[execution.layer].gemm(execution.gemm)
        if execution.recipe != recipe:
            found: str | None = f"it ran in {execution.recipe}"
        else:
            found = self._compare(execution, recipe)
        if found is None:
            self._tries[key] += 1
            if self._tries[key] < MOST_TRIES and all(use.reduce_amax is None for use in execution.uses):
                return  # nothing was learned: the next one may do
            self.undecided.add(key)
        elif found:
            self.lies.append(Lie(*key, recipe, execution.backend, found))
        else:
            self.proven.add(key)
        self.pending.discard(key)
        if not self._is_open(execution.layer) and (layer := self._layers.pop(execution.layer, None)):
            set_witness(layer, None)
        if self._at_once:
            self.check()

    def _compare(self, execution: Execution, recipe: str) -> str | None:
        """What is wrong with a result, "" if nothing is, None if it shows nothing."""
        compute = _compute(execution)
        uses = _planned_uses(execution, recipe)
        vectors = _signs(execution.result.shape[1], execution.result.device)
        if isinstance(execution.b, QuantizedTensor):
            sides = self._inputs.get(execution.layer, [])
        else:
            sides = [_side(execution.b, uses[1], vectors, high_precision(recipe, compute))]
        if not sides:
            return None  # its forward pass came before
        measured = project(execution.result, None, COLUMNS, vectors)
        first, read_as = execution.a, high_precision(recipe, compute)
        tolerance = _tolerance(compute, read_as, first.device)
        # Several inputs may wait for one wgrad: it is of one of them.
        verdicts = [
            _verdict(measured, first, read_as, uses[0], side, execution.gemm, tolerance) for side in sides
        ]
        return next((v for v in verdicts if v == ""), None if None in verdicts else verdicts[0])

    def _remember(self, execution: Execution, kept: Use, use: Use) -> None:
        """X as wgrad must read it, from X itself."""
        precision = self._precisions[execution.layer]
        recipe, saved, compute = precision.wgrad, precision.saved, _compute(execution)
        is_codes = saved not in (*HIGH_PRECISION, RECOMPUTE)
        stored, wanted = (operands_of("wgrad", name)[1] for name in (saved if is_codes else recipe, recipe))
        x, read_as = execution.a, compute
        if stored is not None and stored != wanted:
            read_as = high_precision(recipe, compute)
            x = replace(kept, operand=stored).codes(x.to(compute)).dequantize(read_as)
        side = _side(x, replace(use, operand=wanted), _signs(x.shape[1], x.device), read_as)
        waiting = self._inputs.setdefault(execution.layer, [])
        waiting.append(side)
        # Backward passes begin with the first one (of a pipeline) or the last one (of a sum).
        del waiting[MOST_WAITING // 2 : -MOST_WAITING // 2]


def _of_rank(lie: Lie) -> str:
    return "" if lie.rank is None else f" of rank {lie.rank}"


def changed_gemms(before: Mapping[str, LinearPrecision], now: Mapping[str, LinearPrecision]) -> set[Gemm]:
    """The GEMMs whose numbers another plan changes; those of new layers are among them."""
    return {
        (layer, gemm)
        for layer, new in now.items()
        for gemm in GEMMS
        if layer not in before or _reads(before[layer], gemm) != _reads(new, gemm)
    }


def _reads(precision: LinearPrecision, gemm: str) -> tuple[str, ...]:
    """What a GEMM's numbers come from."""
    return (precision.wgrad, precision.saved) if gemm == "wgrad" else (precision.gemm(gemm),)


def _compute(execution: Execution) -> torch.dtype:
    """The working format: of Y and of gradients."""
    return execution.a.dtype if execution.gemm == "wgrad" else execution.result.dtype


def _tolerance(compute: torch.dtype, first: torch.dtype, device: torch.device) -> float:
    """Largest relative distance of a result in a working format, from operands of which the first has a type."""
    if device.type == "cuda":
        return ROUNDING[torch.bfloat16]
    return max(ROUNDING[compute], ROUNDING.get(first, 0.0))


def _is_of_zeros(execution: Execution) -> bool:
    """Whether an operand and the result are zeros, as those of a layer whose weight begins there."""
    if any(use.reduce_amax is not None for use in execution.uses):
        return False  # zeros here, and others on another rank
    operands = [x for x in (execution.a, execution.b) if isinstance(x, Tensor)]
    return not all(bool(x.any()) for x in operands) and not bool(execution.result.any())


def _planned_uses(execution: Execution, recipe: str) -> tuple[Use, Use]:
    """How the plan quantizes both operands; noise and reductions as the layer took them."""
    first, second = (
        replace(use, operand=operand, axis=axis)
        for use, operand, axis in zip(
            execution.uses, operands_of(execution.gemm, recipe), AXES[execution.gemm], strict=True
        )
    )
    return first, second


def _side(x: Tensor, use: Use, vectors: Tensor, read_as: torch.dtype) -> _Side:
    """The second operand, transposed where the product transposes it, times vectors."""
    transposed = use.axis == COLUMNS
    plain = project(x, None, use.axis, vectors, transposed=transposed, dtype=read_as)
    if use.operand is None:
        return _Side(plain, plain)
    rounded = _rounded(x, use, vectors, transposed, read_as, padded=True)
    return _Side(rounded, F.pad(plain, (0, 0, 0, len(rounded) - len(plain))))


def _rounded(
    x: Tensor, use: Use, vectors: Tensor, transposed: bool, read_as: torch.dtype, *, padded: bool = False
) -> Tensor:
    return project(
        x,
        use.operand,
        use.axis,
        vectors,
        transposed=transposed,
        dtype=read_as,
        noise=use.noise,
        reduce_amax=use.reduce_amax,
        padded=padded,
    )


def _verdict(
    measured: Tensor,
    a: Tensor,
    read_as: torch.dtype,
    use: Use,
    side: _Side,
    gemm: str,
    tolerance: float,
) -> str | None:
    """What is wrong with Y V, "" if nothing is, None if it shows nothing."""
    transposed = use.axis != COLUMNS
    both = _rounded(a, use, torch.cat([side.rounded, side.plain], 1), transposed, read_as)
    expected, second_plain = both.split(VECTORS, 1)
    first_plain = expected
    if use.operand is not None:
        first_plain = project(a, None, use.axis, side.rounded, transposed=transposed, dtype=read_as)
    difference, norm = measured - expected, float(expected.norm())
    distance = float(difference.norm())
    if not math.isfinite(norm) or norm == distance == 0 or 0 < norm < SMALLEST * math.sqrt(measured.numel()):
        return None
    lies, is_sure = [], True
    for tensor, plain in zip(OPERANDS[gemm], (first_plain, second_plain), strict=True):
        share, deviation = _share(difference, plain - expected)
        is_sure &= deviation <= LARGEST_DEVIATION
        if share > MOST_OF_A_LIE and deviation <= LARGEST_DEVIATION:
            lies.append(f"{tensor.upper()} as if it had not been quantized")
    if lies:
        return " and ".join(lies)
    if not distance <= tolerance * norm:  # so written that a NaN, too, is a difference
        return f"{distance / max(norm, 1e-300):.2g} from the recipe's product (relative), at most {tolerance:.2g}"
    return "" if is_sure else None


def _share(difference: Tensor, lie: Tensor) -> tuple[float, float]:
    """How much of a lie's effect is in a difference, and the standard deviation of that; 0 where it has none."""
    by_row, squares = (difference * lie).sum(1), lie.square().sum(1)
    total = float(squares.sum())
    if not total > 0:
        return 0.0, 0.0
    share = by_row.sum() / total
    # The jackknife over rows, whose roundings are independent: one row that outweighs all others is no evidence.
    without = (by_row.sum() - by_row) / (total - squares)
    return float(share), float((without - share).square().sum().sqrt())


@functools.lru_cache(maxsize=64)
def _signs(length: int, device: torch.device) -> Tensor:
    """[length, VECTORS] of +1 and -1, always the same."""
    generator = torch.Generator().manual_seed(length)
    signs = torch.randint(0, 2, (length, VECTORS), generator=generator, dtype=torch.float64)
    return signs.mul_(2).sub_(1).to(device)
