"""Carries a tensor-parallel plan out: this rank's pieces of a module, and what its ranks exchange around them.

Method   Parameters are replaced by pieces of them (`cutting`), in place, under their old names. Around them::

             entry                 as it is; in backward gradients are added up
             cut by inputs         the product's partial sums are added up, then the bias is added once
             words                 a row that lies elsewhere counts as zeros; rows are added up
             gathered              outputs of all ranks side by side; in backward each takes its own
             norms                 their sums of squares are added up (`AllHeadsNorm`)
             added parameters      their gradients are added up wherever their module runs

         Outside of shared layers all ranks compute the same numbers: gradients of what every rank has are equal on all.
Bytes    A rank of n sends of a block with two entries and two sums, B rows of T tokens of D numbers of e bytes,
         8 B T D e (n - 1) / n, forward and backward.
Limits   Logits are gathered, so that any loss can read them. Optimizers are made afterwards, of the pieces; those that
         look at a parameter as a whole (Muon, Adafactor) see a piece. A norm over all gradients is `clip_grad_norm_`'s.
Source   Megatron-LM, arXiv 1909.08053
Checked  tests/runtime/parallel/traced/test_shared_layers.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scrimp.errors import ConfigError, ModelError
from scrimp.gemm import is_transposed
from scrimp.models.tensor_ranks import AllHeadsNorm, TensorRanks, add_up, gather_tokens
from scrimp.parts import Cut
from scrimp.runtime.parallel.traced.cutting import cut_module, piece_of
from scrimp.runtime.parallel.traced.tensor_plan import TensorPlan


class SharedLayers:
    """A module that several ranks share. It must live as long as the module is used.

    Args:
        module: whole, and equal on all ranks; on the meta device, its pieces get memory and values later. It is changed
            in place.
        plan: of this module, for as many ranks as the group has.
        group: None: all ranks.

    Raises:
        ConfigError: a plan for another number of ranks.
        ModelError: a plan of another module; plans or weights that differ among the ranks.
    """

    def __init__(self, module: nn.Module, plan: TensorPlan, group: dist.ProcessGroup | None = None) -> None:
        self.module, self.plan = module, plan
        self.ranks = TensorRanks(group if group is not None else cast(dist.ProcessGroup, dist.group.WORLD))
        _refuse_other_module(module, plan, self.ranks)
        _refuse_differing_ranks(module, plan, self.ranks)
        self._cuts = cut_module(module, plan.cuts, plan.sizes, self.ranks.rank, self.ranks.size)
        self._names = {
            other: name
            for name, parameter in module.named_parameters()
            for other, same in module.named_parameters(remove_duplicate=False)
            if same is parameter
        }
        self._exchange()

    def _exchange(self) -> None:
        modules, ranks = dict(self.module.named_modules()), self.ranks
        for layer in self.plan.layers:
            found: Any = modules[layer.name]
            if layer.kind == "inputs":
                found.__class__, found.tensor_ranks = _with_partial_sums(found), ranks
            elif layer.kind == "words":
                rows = ranks.share(self.plan.cuts[self._names[f"{layer.name}.weight"]].shape[0])
                found.__class__, found.tensor_ranks, found.words = WordsEmbedding, ranks, rows
            elif layer.kind == "gathered":
                outputs = self.plan.cuts[self._names[f"{layer.name}.weight"]]
                size = outputs.shape[outputs.dimension]
                found.register_forward_hook(lambda _, __, logits, size=size: gathered(logits, size, ranks))
        for name in self.plan.norms:
            norm: Any = modules[name]
            norm.__class__, norm.ranks = AllHeadsNorm, ranks
            norm.size = self.plan.cuts[self._names[f"{name}.weight"]].shape[0]
        for entry in self.plan.entries:
            _enter(modules[entry.module], ranks, is_output=entry.is_output)
        for name in self.plan.added:
            holder, _, attribute = name.rpartition(".")
            _add_up_gradients(modules[holder], attribute, ranks)

    def allocate(self, device: torch.device | str) -> None:
        """Give pieces on the meta device memory, without values; a weight that several layers have stays one."""
        known: dict[int, nn.Parameter] = {}
        for holder in self.module.modules():
            for name, parameter in holder._parameters.items():
                if parameter is not None and parameter.is_meta:
                    if id(parameter) not in known:
                        empty = torch.empty_like(parameter, device=device)
                        known[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    holder._parameters[name] = known[id(parameter)]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is this at most; a collective.

        Returns:
            the norm that they had, of the whole module.
        """
        parameters = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None
        }
        pieces = [p.grad for name, p in parameters.items() if name in self.plan.cuts and p.grad is not None]
        copies = [
            p.grad for name, p in parameters.items() if name not in self.plan.cuts and p.grad is not None
        ]
        square = cast(Tensor, add_up(torch.nn.utils.get_total_norm(pieces).square(), self.ranks.number))
        norm = (square + torch.nn.utils.get_total_norm(copies).square()).sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, norm)
        return norm

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, its gradient, or a state of its shape, from all ranks' pieces of it; a collective."""
        cut = self.plan.cuts.get(self._names.get(name, name))
        if cut is None:
            return tensor
        every = [cut.of(rank, self.ranks.size) for rank in range(self.ranks.size)]
        largest = max((one.local_shape for one in every), key=lambda shape: shape[cut.dimension])
        sent, own = tensor.new_zeros(largest), tensor.shape[cut.dimension]
        sent.narrow(cut.dimension, 0, own).copy_(tensor)
        pieces = [torch.empty_like(sent) for _ in every]
        dist.all_gather(pieces, sent, group=self.ranks.group)
        found = tensor.new_empty(cut.shape)
        for one, piece in zip(every, pieces, strict=True):
            _place(found, one, piece)
        return found

    def whole_state_dict(self) -> dict[str, Tensor]:
        """The state dict of the module as it was before it was shared, on every rank; a collective."""
        return {name: self.whole(name, value.detach()) for name, value in self.module.state_dict().items()}

    def load_whole_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's pieces from the state dict of a whole module.

        Raises:
            ModelError: a tensor is missing, or has another shape.
        """
        for name, value in self.module.state_dict().items():
            cut = self._cuts.get(self._names.get(name, name))
            expected = tuple(value.shape) if cut is None else cut.shape
            got = tuple(state[name].shape) if name in state else "nothing"
            if got != expected:
                raise ModelError(
                    "the state dict is of another model", got=f"{name}: {got}", expected=expected
                )
            value.copy_(state[name] if cut is None else piece_of(state[name], cut).to(value.device))


def _refuse_other_module(module: nn.Module, plan: TensorPlan, ranks: TensorRanks) -> None:
    if ranks.size != plan.ranks:
        raise ConfigError(
            "the plan is for another number of ranks",
            got=f"a group of {ranks.size}",
            expected=plan.ranks,
            do="find a plan for this group",
        )
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if shapes != dict(plan.shapes):
        other = sorted({*shapes.items()} ^ {*plan.shapes.items()})
        raise ModelError(
            "the plan is of another model",
            got=f"{other[0][0]} of shape {list(other[0][1])} in one of them alone",
            do="find a plan for this model, before it is shared",
        )


def _refuse_differing_ranks(module: nn.Module, plan: TensorPlan, ranks: TensorRanks) -> None:
    own = {"the plan": plan.digest, "torch's random state": _random_state() if plan.draws else ""} | {
        name: 0
        if one.is_meta
        else int(one.detach().contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64))
        for name, one in module.named_parameters()
    }
    every: list[Any] = [None] * ranks.size
    dist.all_gather_object(every, own, group=ranks.group)
    for name in own:
        other = [rank for rank, one in enumerate(every) if one[name] != every[0][name]]
        if other:
            raise ModelError(
                "ranks that share layers begin with different models",
                got=f"{name} differs on rank {other[0]} of the group",
                expected="the same plan, the same weights, and the same seed if the model draws random numbers",
                do="seed all ranks alike, or load the same weights",
            )


def _random_state() -> str:
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
    return hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()


def _place(whole: Tensor, cut: Cut, piece: Tensor) -> None:
    passed = 0
    for one in cut.ranges:
        stretch = piece.narrow(cut.dimension, passed, len(one))
        whole.narrow(cut.dimension, one.start, len(one)).copy_(stretch)
        passed += len(one)


class WordsEmbedding(nn.Embedding):
    """An embedding of which each rank has some rows, in `words`."""

    tensor_ranks: TensorRanks
    words: range

    def forward(self, input: Tensor) -> Tensor:
        """Rows of all ranks."""
        index = input - self.words.start
        is_elsewhere = (index < 0) | (index >= len(self.words))
        padding = None if self.padding_idx is None else self.padding_idx - self.words.start
        own = F.embedding(
            index.masked_fill(is_elsewhere, 0),
            self.weight,
            padding if padding in range(len(self.words)) else None,
        )
        return added(own.masked_fill(is_elsewhere[..., None], 0.0), self.tensor_ranks)


class _PartialSums(nn.Module):
    """A linear layer of which each rank has some inputs."""

    tensor_ranks: TensorRanks
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """The sum of all ranks' products."""
        matrix = self.weight.t() if is_transposed(self) else self.weight
        found = added(F.linear(input, matrix), self.tensor_ranks)
        return found if self.bias is None else found + self.bias.to(found.dtype)


def _with_partial_sums(layer: nn.Module) -> type[nn.Module]:
    """A class for a layer, still of its kind."""
    return type(f"Shared{type(layer).__name__}", (_PartialSums, type(layer)), {})


def _enter(module: nn.Module, ranks: TensorRanks, *, is_output: bool) -> None:
    def given(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if arguments:
            return (ranks.one_copy(arguments[0]), *arguments[1:]), keywords
        return arguments, {name: ranks.one_copy(value) for name, value in keywords.items()}

    if is_output:
        module.register_forward_hook(lambda _, __, x: ranks.one_copy(x))
    else:
        module.register_forward_pre_hook(given, with_kwargs=True)


def _add_up_gradients(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """While the module runs, its parameter is one whose gradients are added up: an attribute before the parameter."""

    def before(*_: Any) -> None:
        vars(module)[name] = ranks.one_copy(cast(Tensor, module._parameters[name]))

    def after(*_: Any) -> None:
        vars(module).pop(name, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(cast(Callable[..., None], after), always_call=True)


def added(partial: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum of all ranks' tensors, which go on as one: its gradient is the gradient of each."""
    return cast(Tensor, _Added.apply(partial, ranks.number))  # type: ignore[no-untyped-call]


def gathered(outputs: Tensor, size: int, ranks: TensorRanks) -> Tensor:
    """So many outputs of all ranks, side by side in the last dimension."""
    return cast(Tensor, _Gathered.apply(outputs, size, ranks))  # type: ignore[no-untyped-call]


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, number: int) -> Tensor:
        return cast(Tensor, add_up(partial, number))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, size: int, ranks: TensorRanks) -> Tensor:
        ctx.own = ranks.share(size)
        largest = -(-size // ranks.size)
        own = F.pad(outputs, (0, largest - outputs.shape[-1])).reshape(-1, largest, 1)
        every = gather_tokens(own, ranks.number, ranks.size).view(*outputs.shape[:-1], ranks.size, largest)
        shares = [
            len(range(size * rank // ranks.size, size * (rank + 1) // ranks.size))
            for rank in range(ranks.size)
        ]
        return torch.cat([every[..., rank, :share] for rank, share in enumerate(shares)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[..., ctx.own.start : ctx.own.stop].contiguous(), None, None
