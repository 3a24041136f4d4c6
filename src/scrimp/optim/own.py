"""A torch.optim.Optimizer from the user's own file: ``--optimizer.name my.py:Lion --trust-code``.

Method   The class is made with `lr` and, where its constructor has parameters of these names, `weight_decay`, `betas`,
         `eps` and `momentum` of the settings, and `foreach=False`. Matrices are one group; all else is a second one,
         without decay; the embedding is one of its own where its rate is another (`optimizer.embedding_lr_ratio`).
         Before each step `lr` of all groups is set by the schedule. It updates fp32 parameters, or
         fp32 masters of bf16 ones.
State    Not known before the first step. Planning therefore takes two steps on tensors without memory: what they keep
         is the account's state, the peak of the second its update's. An optimizer that cannot take them (it reads
         numbers from tensors, needs a closure) or keeps more than tensors and numbers is refused then. A checkpoint
         holds the tensors and numbers of each parameter and the numbers of each group. Before one is loaded,
         a step on zero gradients makes their places: all that it changes is then overwritten.
Ranks    Each rank's optimizer has what lies there of every parameter. That is right where elements move alone, which
         the class has to say: ``elementwise = True``. Its states then have their parameter's shape, or are numbers,
         which are the same on all ranks.
Rule     `precision snip` needs a class with a rule: torch's AdamW, Adam, SGD or Muon, or a method
         ``update_rule(parameter) -> UpdateRule``. Others are refused before a run starts.
Limits   No states on the host. State that first appears after the first update makes a checkpoint unreadable, which is
         then said by name. An update that works on all parameters at once takes more than the account says: the trace
         has one block of a kind.
Checked  tests/optim/test_own.py, with examples/own_optimizer.py
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scrimp import user_code
from scrimp.config import Architecture, OptimizerConfig
from scrimp.errors import ConfigError, PlanError
from scrimp.models import EMBEDDING_WEIGHT
from scrimp.optim.adamw_run import AdamWMemory
from scrimp.optim.foreign import has_rule, rule_of
from scrimp.optim.targets import Targets, relative_rate
from scrimp.parts import TensorPart, part_of
from scrimp.profiler.memory_trace import GradientSums, Tracing
from scrimp.profiler.memory_trace.stand_ins import DeviceFunctions
from scrimp.runtime import Executable
from scrimp.statistics import UpdateRule

KEY = "optimizer.name"


def build(executable: Executable, settings: OptimizerConfig, *, seed: int) -> OwnOptimizer:
    """The user's optimizer of a run: all of it on the device."""
    return OwnOptimizer(executable.model.trained(), settings, seed=seed)


def memory(
    architecture: Architecture, settings: OptimizerConfig, parameters: str, *, ranks: int = 1
) -> OwnMemory:
    """What it takes for parameters in this format, fp32 or bf16."""
    class_of(settings)
    if relative_rate(settings, EMBEDDING_WEIGHT) != 1:  # refused here where it makes groups of its own
        small = {name: nn.Parameter(torch.zeros(2, 2)) for name in (EMBEDDING_WEIGHT, "matrix")}
        OwnOptimizer(small, dataclasses.replace(settings, master_weights=False))
    return OwnMemory(settings, parameters, ranks)


def check(settings: OptimizerConfig, *, is_planned: bool, ranks: int = 1) -> None:
    """Refuse a class that is not an optimizer, has no rule where formats are planned by it, or does not say on several
    ranks that elements move alone.

    Raises:
        ConfigError: by name.
    """
    found = class_of(settings)
    if ranks > 1 and not is_elementwise(found):
        raise ConfigError(
            f"{KEY}: {settings.name} does not say that it can be used on several ranks",
            got=f"{ranks:,} ranks, each of which has some rows of a parameter",
            expected="an update in which every element moves by its own gradients and states alone",
            do=f"where that is so, write `elementwise = True` into the class {found.__name__}; "
            "else train in one process",
        )
    if is_planned and not has_rule(found):
        raise ConfigError(
            "precision snip needs to know how noise in a gradient changes the next update",
            got=f"optimizer {found.__name__}, which has no method update_rule",
            do="write one (see examples/own_optimizer.py), or choose another precision",
        )


def class_of(settings: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """The class that the settings name.

    Raises:
        ConfigError: the code is not trusted, cannot be read or run, or is not an optimizer.
    """
    found: Any = user_code.load(KEY, settings.name)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(
            f"{KEY}: {settings.name} is not an optimizer",
            got=repr(found)[:80],
            expected="a class derived from torch.optim.Optimizer",
        )
    return found


def is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a class says that elements move alone."""
    return getattr(kind, "elementwise", False) is True


def made(settings: OptimizerConfig, targets: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """The user's optimizer over some tensors, with the options that its constructor knows."""
    kind = class_of(settings)
    known = inspect.signature(kind).parameters
    options = {
        "lr": 0.0 if settings.lr is None else settings.lr,
        "weight_decay": settings.weight_decay,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "momentum": settings.momentum,
        "foreach": False,
    }
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for name, target in targets.items():
        decayed = target.ndim >= 2
        group = groups.setdefault((decayed, relative_rate(settings, name)), {"params": []})
        group["params"].append(target)
        if "weight_decay" in known and not decayed:
            group["weight_decay"] = 0.0
    given = {name: v for name, v in options.items() if name in known and _fits(v, known[name].default)}
    try:
        # The embedding's last: stages of a pipeline that have none number the others alike.
        order = sorted(groups, key=lambda key: (key[1] != 1, not key[0]))
        return kind([groups[key] for key in order], **given)  # type: ignore[arg-type]
    except Exception as error:
        raise ConfigError(
            f"{KEY}: {settings.name} cannot be made",
            got=f"{type(error).__name__}: {error}",
            expected=f"a constructor that takes parameters and {', '.join(given) or 'nothing else'}",
        ) from error


class OwnOptimizer(Targets):
    """A run's parameters, or their masters, under the user's optimizer.

    Args:
        parameters: float32, or bfloat16 with `master_weights`, by name.
        settings: the file and class, and the options that it is given.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimizerConfig, *, seed: int = 0
    ) -> None:
        super().__init__(parameters, settings, seed=seed)
        self.name = settings.name
        self._inner = made(settings, self._targets)
        self._set_rates(0.0 if settings.lr is None else settings.lr)
        self._numbers: dict[str, Tensor] = {}
        """Numbers of the state by their name in a checkpoint, while it is written or loaded."""

    def rule(self, name: str) -> UpdateRule | None:
        """The optimizer's own, or torch's for its class."""
        found, target = rule_of(self._inner), self._targets[name]
        if found is None:
            raise PlanError("the sensitivities of this optimizer are not known", got=self.name)
        group = next(g for g in self._inner.param_groups if any(p is target for p in g["params"]))
        return found[1](target, group, self._inner.state.get(target, {}))

    def prepare(self, num_updates: int) -> None:
        """Make the places of a state after so many updates, which a checkpoint then fills."""
        if num_updates == 0:
            return
        for target in self._targets.values():
            target.grad = torch.zeros_like(target)
        self._inner.step()
        self.zero_grad()

    def parts(self) -> Iterator[tuple[str, TensorPart]]:
        """Tensors and numbers of the state, none before the first update."""
        yield from super().parts()
        self._numbers = {name: _exact(holder[key]) for name, _, holder, key in self._holders()}
        for name, of, _, _ in self._holders():
            number = self._numbers[name]
            is_first = not dist.is_initialized() or dist.get_rank() == 0
            yield name, part_of(number, writes_whole=is_first) if of is None else self.state_part(of, number)

    def restore_updates(self, num_updates: int) -> None:
        """Set the count of updates, and the numbers that were loaded."""
        super().restore_updates(num_updates)
        for name, _, holder, key in list(self._holders()):
            if name in self._numbers:
                holder[key] = self._numbers[name].item()

    def _state(self, name: str) -> Iterator[tuple[str, Tensor]]:
        state = self._inner.state.get(self._targets[name], {})
        yield from ((key, value) for key, value in state.items() if isinstance(value, Tensor))
        yield from super()._state(name)

    def _holders(self) -> Iterator[tuple[str, str | None, dict[str, Any], str]]:
        """Every number of the state: its name in a checkpoint, the parameter that it is of, the dict that holds it, and
        its key there."""
        for name, target in self._targets.items():
            state = self._inner.state.get(target, {})
            numbers = [key for key, value in state.items() if _is_number(value)]
            yield from ((f"{name}.{key}", name, state, key) for key in numbers)
        for index, group in enumerate(self._inner.param_groups):
            for key, value in group.items():
                if key != "lr" and _is_number(value):
                    yield f"group-{index}.{key}", None, group, key

    def _update_by(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        self._set_rates(lr)
        self._inner.step()

    def _set_rates(self, lr: float) -> None:
        names = {id(target): name for name, target in self._targets.items()}
        for group in self._inner.param_groups:
            rates = {self.relative_rate(names[id(one)]) for one in group["params"] if id(one) in names}
            if len(rates) > 1:
                raise ConfigError(
                    f"{KEY}: {self.name} puts the embedding into a group with other parameters",
                    got=f"optimizer.embedding_lr_ratio {self._settings.embedding_lr_ratio:g}",
                    expected="the groups that its constructor is given",
                    do="leave optimizer.embedding_lr_ratio out, or keep the groups apart",
                )
            group["lr"] = max(rates, default=1.0) * lr


def _fits(value: object, default: object) -> bool:
    """Whether an option means the same in a constructor with this default: Adafactor's eps is a pair."""
    return default in (None, inspect.Parameter.empty) or isinstance(default, tuple) == isinstance(
        value, tuple
    )


def _exact(number: float) -> Tensor:
    """A number as a tensor that gives back its bits: 0.1 in float32 is another number."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class OwnMemory:
    """Bytes of the user's optimizer (a `scrimp.profiler.memory_trace.OptimizerMemory`), from steps on tensors without
    memory."""

    settings: OptimizerConfig
    parameters: str
    ranks: int = 1
    """That share each parameter."""

    def sums(self, device: DeviceFunctions) -> GradientSums:
        """As AdamW's."""
        return AdamWMemory(self.parameters, bool(self.settings.master_weights)).sums(device)

    def state_bytes(self, named: Mapping[str, Tensor]) -> int:
        """What a step keeps of these parameters, and masters."""
        masters = sum(4 * tensor.numel() for tensor in named.values()) * bool(self.settings.master_weights)
        states = self._stepped(named).state.values()
        return masters + sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))

    def update_peak(self, named: Mapping[str, Tensor], device: DeviceFunctions, tracing: Tracing) -> int:
        """The peak of a step whose state exists."""
        if not named:
            return 0
        inner = self._stepped(named)
        with tracing() as tracker:
            inner.step()
        return -(-tracker.peak // self.ranks)

    def _stepped(self, named: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """After a first step.

        Raises:
            ConfigError: it cannot be taken on tensors without memory, or keeps what a checkpoint cannot hold.
        """
        targets = {name: torch.empty(tensor.shape) for name, tensor in named.items()}
        inner = made(self.settings, targets)
        for target in targets.values():
            target.grad = torch.empty_like(target)
        options = [{k: v for k, v in group.items() if not _is_number(v)} for group in inner.param_groups]
        try:
            inner.step()
        except Exception as error:
            raise ConfigError(
                f"{KEY}: the memory of {self.settings.name} cannot be predicted",
                got=f"{type(error).__name__}: {str(error)[:200]}",
                expected="a step without a closure that reads no numbers from tensors (.item(), float, if)",
            ) from error
        for group, before in zip(inner.param_groups, options, strict=True):
            for key, value in group.items():
                if key != "params" and not _is_number(value) and value is not before.get(key):
                    raise self._cannot_hold(
                        f"{key} of its groups, a {type(value).__name__} that a step changes"
                    )
        for target, state in inner.state.items():
            for key, value in state.items():
                if not (isinstance(value, Tensor) or _is_number(value)):
                    raise self._cannot_hold(f"{key}, a {type(value).__name__}")
                is_whole = isinstance(value, Tensor) and value.ndim and value.shape != target.shape
                if is_whole and is_elementwise(type(inner)):
                    raise ConfigError(
                        f"{KEY}: {self.settings.name} says that elements move alone, and keeps something else of them",
                        got=f"{key} of shape {tuple(value.shape)} for a parameter of {tuple(target.shape)}",
                        expected="states of the parameter's shape, and numbers",
                        do="leave `elementwise` out",
                    )
        return inner

    def _cannot_hold(self, what: str) -> ConfigError:
        return ConfigError(
            f"{KEY}: {self.settings.name} keeps what a checkpoint cannot hold",
            got=what,
            expected="tensors and numbers for each parameter, numbers for each group",
        )
