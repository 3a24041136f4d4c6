"""What every optimizer of a run has in common: gradients are summed, measured, clipped; updates go to targets.

Problem  bf16 keeps 8 bits of mantissa: a weight near 1 cannot move by less than 2^-8 = 0.4 %, and
         an update is about the learning rate, 0.1 % or less. It would round to nothing.
Method   A target is what an update changes: the parameter itself or, with `master_weights`, an fp32 copy of a bf16
         parameter. Each bf16 gradient is added to the master's fp32 gradient as soon as autograd has finished it, and
         freed: sums over micro-batches are exact to fp32, and bf16 gradients never exist all at once.
         After the step the parameter is the master rounded to nearest.
         Without master weights the sums of bf16 gradients are rounded stochastically from the second micro-batch
         on: they are right on average. On a GPU one kernel adds and rounds (`scrimp.gemm.kernels.rounded_sums`), where
         it gave the operators' bits when it was tried. Products that can add to a sum do it themselves, rounding as
         they can, and autograd has no gradient then (`scrimp.gemm.weight_sums`).
Ranks    Of a parameter that several ranks share (a DTensor) each updates the rows that lie there, by gradients that are
         reduced already: an update of elements needs nobody else. The norm is of all of them::

             |g|^2 = sum over ranks of |g_rank|^2            one all-reduce of a scalar in float64

         where of equal copies one counts. Noise has the element's address in the whole parameter, so that numbers
         do not depend on the layout.
State    ``<parameter>.master`` in checkpoints. The count of updates is one integer, and the key of all rounding noise
         with the run's seed and the parameter's name: a resumed run rounds as it would have.
Checked  tests/optim/test_adamw.py, tests/optim/test_summed_products.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scrimp.config import OptimizerConfig
from scrimp.errors import ConfigError
from scrimp.formats import Noise
from scrimp.gemm import kernels
from scrimp.gemm.backends.operands import has_triton
from scrimp.gemm.kernels.launch import INPUT_TYPES, may_run
from scrimp.gemm.weight_sums import Product, WeightSum, set_sum
from scrimp.models import EMBEDDING_WEIGHT
from scrimp.optim.moments import as_matrix
from scrimp.optim.stochastic_rounding import to_bf16
from scrimp.optim.update import Workspace
from scrimp.parts import TensorPart, cut_of, part_of
from scrimp.runtime.memory.gradients import GradientSlot, OwnGradient
from scrimp.statistics import UpdateRule
from scrimp.world import group_device


class SumSlot:
    """Where the sum of one parameter's gradients is found (a `GradientSlot`)."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.sum: Tensor | None = None


class SlotSum(WeightSum):
    """Adds up the gradients of one parameter in a slot.

    Args:
        noise: of the n-th gradient's rounding; None: the sum is in float32.
    """

    def __init__(self, slot: GradientSlot, noise: Callable[[int], Noise] | None) -> None:
        super().__init__(slot.like)
        self._slot, self._noise = slot, noise
        self._count = 0

    def add(self, product: Product, made: Tensor | None = None) -> None:
        """The next gradient, by its product where that can add itself; the first is the sum."""
        if not product.adds(self.dtype, self._count):
            self.add_made(product.made() if made is None else made)
        elif self._slot.sum is None:
            self.add_made(product.made(self.dtype))
        else:
            product.add(self._slot.sum, self._next())

    def add_made(self, gradient: Tensor) -> None:
        """The next gradient; the first is the sum."""
        total = self._slot.sum
        noise = self._next()
        if total is None:
            self._slot.sum = gradient.to(self.dtype)
        elif noise is None:
            total += gradient
        else:
            add_rounded(total, gradient, noise)

    def clear(self) -> None:
        """No gradient is there any more."""
        self._slot.sum, self._count = None, 0

    def _next(self) -> Noise | None:
        """Noise of the next rounding, which each gradient has of its own."""
        self._count += 1
        return None if self._noise is None else self._noise(self._count)


class Targets(ABC):
    """An optimizer without its rule: a subclass says how gradients change targets (`_update_by`).

    Args:
        parameters: float32 or bfloat16, by name.
        settings: with `clip` and `master_weights`, decided.
        seed: of the rounding noise.

    Raises:
        ConfigError: a parameter of another type.
    """

    name: str

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerConfig, *, seed: int = 0
    ) -> None:
        _refuse_types(parameters)
        self._settings = settings
        self._seed = Noise(seed)
        self._whole = dict(parameters)
        """The model's own; those that ranks share are DTensors."""
        self._tensor_parts = {name: part_of(parameter) for name, parameter in self._whole.items()}
        self._parameters = {name: self._local(name) for name in self._whole}
        """What lies here of each."""
        self._targets: dict[str, Tensor] = {}
        """What is updated: parameters, or their masters."""
        self._slots: dict[str, GradientSlot] = {}
        """Where the sums of gradients are found."""
        self._sums: dict[str, SlotSum] = {}
        """What adds them up."""
        self.num_updates = 0
        self.ranks: dist.ProcessGroup | None = None
        """Ranks whose gradients are of one step; None: all."""
        for name, parameter in self._parameters.items():
            self._add(name, parameter)

    def _local(self, name: str) -> nn.Parameter:
        parameter = self._whole[name]
        return nn.Parameter(self._tensor_parts[name].local) if _is_shared(parameter) else parameter

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        """Make the target of a parameter, and collect its gradients where autograd is not to sum them."""
        target: Tensor = parameter
        if self._settings.master_weights:
            target = parameter.detach().float().clone()
        self._targets[name] = target
        self._collect(name, parameter, OwnGradient(target))

    def _collect(self, name: str, parameter: nn.Parameter, slot: GradientSlot) -> None:
        """Sum the gradients of a parameter in a slot: products that can, hooks where autograd is not to, else it."""
        whole = self._whole[name]  # FSDP2 calls its hooks with the reduced gradient of this rank's rows
        has_masters, noise = self._settings.master_weights, None
        if not has_masters and parameter.dtype == torch.bfloat16:
            slot, noise = SumSlot(parameter), functools.partial(self._noise, "sum", name)
        self._slots[name] = slot
        self._sums[name] = total = SlotSum(slot, noise)
        if has_masters or noise is not None:
            whole.register_post_accumulate_grad_hook(_collect_into(total))
        if whole.dim() == 2 and not _is_shared(whole):
            set_sum(whole, total)

    def gradient_norm(self) -> float:
        """Global 2-norm of the gradients, of all ranks where they share any; waits for the device."""
        norms = self._norms()
        if not self._is_shared:
            return float(torch.linalg.vector_norm(torch.stack(list(norms.values()))))
        mine = [norm for name, norm in norms.items() if self._tensor_parts[name].is_writer]
        # Where the group wants it: shards that FSDP2 keeps on the host are none that NCCL can reduce.
        square = torch.zeros((), dtype=torch.float64, device=group_device())
        if mine:
            square += torch.linalg.vector_norm(torch.stack(mine)).double().square().to(square.device)
        dist.all_reduce(square, group=self.ranks)
        return float(square.sqrt())

    def _norms(self) -> dict[str, Tensor]:
        """Parameter name to the norm of its gradient, of what lies here."""
        found = self.gradients()
        norms = torch._foreach_norm(list(found.values()), 2, dtype=torch.float32) if found else []
        return dict(zip(found, norms, strict=True))

    @property
    def _is_shared(self) -> bool:
        """Whether ranks share parameters, or have others."""
        return any(_is_shared(one) or cut_of(one) is not None for one in self._whole.values())

    def clip(self, norm: float, limit: float) -> None:
        """Scale the gradients so that their norm, `norm` now, is at most `limit` (0: no limit)."""
        gradients = list(self.gradients().values())  # none on a rank without rows
        if gradients and limit > 0 and math.isfinite(norm) and norm > limit:
            torch._foreach_mul_(gradients, limit / norm)

    def step(self, lr: float) -> None:
        """One update at learning rate `lr`; the gradients stay until `zero_grad`."""
        self._update_names(list(self._targets), lr)
        self.num_updates += 1

    def close(self) -> None:  # noqa: B027
        """Leave nothing running; the state stays readable."""

    def zero_grad(self) -> None:
        """Free the gradients."""
        for total in self._sums.values():
            total.clear()
        for tensor in (*self._targets.values(), *self._parameters.values(), *self._whole.values()):
            tensor.grad = None

    def parts(self) -> Iterator[tuple[str, TensorPart]]:
        """Name and storage of every state tensor; loading a checkpoint writes into them."""
        for name in self._targets:
            for suffix, tensor in self._state(name):
                yield f"{name}.{suffix}", self.state_part(name, tensor)

    def state_part(self, name: str, tensor: Tensor) -> TensorPart:
        """A state of a parameter lies as the parameter does: with the same rows."""
        part = self._tensor_parts[name]
        if not tensor.ndim:  # a number, of which all ranks that have rows have a copy
            has_first = part.local.numel() > 0 and not any(part.offsets)
            return part_of(tensor, writes_whole=part.is_writer and has_first)
        if part.is_whole:
            return part_of(tensor, writes_whole=part.is_writer)
        if tensor.shape == part.local.shape:
            return dataclasses.replace(part, local=tensor)
        shape, offsets = (part.shape[0], *tensor.shape[1:]), (part.offsets[0], *[0] * (tensor.ndim - 1))
        return TensorPart(tensor, shape, offsets, part.is_writer)

    def targets(self) -> dict[str, Tensor]:
        """Parameter name to what is updated, of what lies here."""
        self._take_over()
        return dict(self._targets)

    def write_targets(self) -> None:
        """Parameters follow their targets, where those were changed from outside."""
        if self._settings.master_weights:
            with torch.no_grad():
                torch._foreach_copy_(list(self._parameters.values()), list(self._targets.values()))

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """The weights that are trained are those to evaluate."""
        return contextlib.nullcontext()

    def prepare(self, num_updates: int) -> None:  # noqa: B027
        """Nothing: states exist from the start."""

    def restore_updates(self, num_updates: int) -> None:
        """Set the count of updates that bias correction and noise use, after loading `parts`."""
        self.num_updates = num_updates

    def relative_rate(self, name: str) -> float:
        """Learning rate of a parameter as a multiple of a step's."""
        return relative_rate(self._settings, name)

    # -- for statistics (`scrimp.statistics.OptimizerView`) ---------------------------

    def gradients(self) -> dict[str, Tensor]:
        """Parameter name to accumulated gradient, of what lies here, where there is one."""
        self._take_over()
        found = {
            name: slot.sum if isinstance(slot := self._slots[name], SumSlot) else target.grad
            for name, target in self._targets.items()
        }
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def _take_over(self) -> None:
        """The rows as FSDP2 has them now (it moves uneven ones before the first pass), and their gradients."""
        for name, whole in self._whole.items():
            if not _is_shared(whole):
                continue
            local = self._parameters[name]
            local.data = part_of(whole).local
            if whole.grad is not None:
                local.grad, whole.grad = part_of(whole.grad).local, None

    @abstractmethod
    def rule(self, name: str) -> UpdateRule | None:
        """How a parameter is updated; None: it is not."""

    def slot(self, name: str) -> GradientSlot:
        """Where the sum of a parameter's gradients is found while it is on the device."""
        return self._slots[name]

    def clip_factor(self, norm: float) -> float:
        """What `clip` multiplies gradients of this norm by."""
        limit = self._settings.clip
        return limit / norm if limit > 0 and norm > limit else 1.0

    # -- parts ---------------------------------------------------------------------------------

    def _state(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """End of its name and storage of every state tensor of one parameter."""
        if self._settings.master_weights:
            yield "master", self._targets[name]

    def _update_names(self, names: Sequence[str], lr: float) -> None:
        """Update some parameters, those that have a gradient, by the step after `num_updates`."""
        gradients = self.gradients()
        # Of a parameter of fewer rows than there are ranks, some have none to update.
        here = [name for name in names if name in gradients and gradients[name].numel()]
        self._update_by({name: gradients[name] for name in here}, lr)
        if self._settings.master_weights and names:
            with torch.no_grad():
                torch._foreach_copy_([self._parameters[n] for n in names], [self._targets[n] for n in names])

    @abstractmethod
    def _update_by(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Update by these gradients what they are named after, masters or parameters."""

    def _noise(self, use: str, name: str, *numbers: int) -> Noise:
        """A stream for each use, parameter and update, whatever else there is and in whatever order."""
        digest = hashlib.sha256(f"{use} {name}".encode()).digest()
        noise = self._seed.derive(int.from_bytes(digest[:8], "little"), self.num_updates, *numbers)
        row, column = (*self._tensor_parts[name].offsets, 0, 0)[:2]
        return dataclasses.replace(noise, first_row=row, first_column=column)


def relative_rate(settings: OptimizerConfig, name: str) -> float:
    """Learning rate of a parameter as a multiple of `optimizer.lr`."""
    return (settings.embedding_lr_ratio or 1.0) if name == EMBEDDING_WEIGHT else 1.0


def _is_shared(parameter: Tensor) -> bool:
    return hasattr(parameter, "device_mesh")


def _collect_into(total: SlotSum) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:  # it is made later, or its product added it (`scrimp.gemm.weight_sums`)
            return
        gradient, parameter.grad = part_of(parameter.grad).local, None
        total.add_made(gradient)

    return hook


@torch.no_grad()
def add_rounded(total: Tensor, gradient: Tensor, noise: Noise) -> None:
    """Add a gradient to a sum in bf16 in place, rounded stochastically: on a GPU by one kernel, which gives the same
    bits."""
    matrix = as_matrix(total)
    added = gradient.reshape(matrix.shape)
    are_plain = matrix.is_contiguous() and added.is_contiguous() and gradient.dtype in INPUT_TYPES
    if total.is_cuda and are_plain and not noise.columns and has_triton() and _may_run(total.device):
        kernels.add_rounded(matrix, added, noise)
    else:
        add_by_operators(total, gradient, noise)


@functools.cache
def _may_run(device: torch.device) -> bool:
    """Whether the kernel gives the operators' bits there, tried once in a process."""

    def trial() -> bool:
        generator = torch.Generator().manual_seed(0)
        total, gradient = (torch.randn(37, 1031, generator=generator).to(device).bfloat16() for _ in range(2))
        expected, noise = total.clone(), Noise(5, 3, 11)
        add_by_operators(expected, gradient, noise)
        kernels.add_rounded(total, gradient, noise)
        return torch.equal(total, expected)

    return may_run("sum of gradients", trial)


@torch.no_grad()
def add_by_operators(total: Tensor, gradient: Tensor, noise: Noise) -> None:
    """The same by torch's operators, piece by piece."""
    work = Workspace(as_matrix(total), noise)
    added = gradient.reshape(work.matrix.shape)
    for place in work.places:
        piece = work.matrix[place]
        exact = work.floats("sum", piece).add_(added[place])
        piece.copy_(to_bf16(exact, next(work.noise(place)), work.scratch))


def _refuse_types(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"the optimizer cannot train {name}",
                got=str(parameter.dtype).removeprefix("torch."),
                expected="float32 or bfloat16",
                do="convert the parameter, or leave it out",
            )
