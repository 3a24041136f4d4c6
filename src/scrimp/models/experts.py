"""Routed experts: an MLP of which each token meets the few experts that a router chooses for it.

Method   With h the normed residual stream, k experts a token::

             p = softmax(router(h)) over all experts, in float32
             out = sum over the k most probable experts e of w_e * down_e(act(gate_e(h)) * up_e(h))

         w are those k probabilities, in some families divided by their sum. No token is dropped: the S k pairs of
         token and expert are sorted by expert, each run goes through its expert's matrices as grouped products
         (`scrimp.gemm.grouped`), and each token takes its k results back. All sums are in a fixed order.
Balance  Routers left alone soon send every token to the same few experts. What is trained too is, over all blocks and
         tokens of a micro-batch (Switch, as transformers computes it)::

             coefficient * E * sum over e of (share of pairs that chose e) * (mean of p_e)

         A block leaves both sums in `routing`; `scrimp.objectives.load_balance` makes the penalty of them.
Capacity Where an expert takes at most C = ceil(factor * S k / E) tokens of a micro-batch in training, pairs beyond are
         dropped: those of later tokens, a token's less probable choices after all tokens' more probable ones (GShard).
         They add nothing; the weights of a token's other experts stay as they are. Evaluation and generation, like an
         export, drop none.
Memory   What is saved of a token's copies is made again in backward: h is kept, not its k sorted copies.
         At the level `norms` (`scrimp.config.activations`) h is kept all the same, since the router reads it as well;
         from `mlp` on everything runs again, the router too: its choices come out the same.
Source   Shazeer et al., arXiv 1701.06538; GShard, arXiv 2006.16668; Switch, arXiv 2101.03961; Mixtral, arXiv 2401.04088
Ranks    Experts may lie on other ranks: `scrimp.models.expert_ranks`.
Checked  tests/models/test_experts.py: a loop over tokens in float64; tests/models/test_huggingface_parity.py

Letters: B rows, T tokens, S = B T, D width, E experts, k of them for a token, A = S k pairs, F width of an expert.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scrimp.config.activations import Activations
from scrimp.gemm import run_again
from scrimp.gemm.grouped import GroupedLinear, regrouped
from scrimp.models.attention import AttentionLayout, attend
from scrimp.models.blocks import KEEP, Attend, Block, Linear, Place, RMSNorm
from scrimp.models.functions import at_least_float32, swiglu
from scrimp.models.spec import RoutingSpec

if TYPE_CHECKING:
    import torch.distributed as dist

    from scrimp.models.expert_ranks import ExpertRanks


def capacity(routing: RoutingSpec, tokens: int) -> int:
    """Most tokens of one expert, of so many."""
    return math.ceil(routing.capacity_factor * tokens * routing.chosen / routing.experts)


@dataclass(frozen=True)
class Routes:
    """Which token goes to which expert: pairs in the order of experts."""

    weights_Sk: Tensor  # noqa: N815
    """Weight of each chosen expert's result, in float32."""
    ends_E: Tensor  # noqa: N815
    """int32, the pair after each expert's last."""
    token_A: Tensor  # noqa: N815
    """Each pair's token."""
    place_Sk: Tensor  # noqa: N815
    """Where a token's pairs stand."""
    is_dropped_A: Tensor | None = None  # noqa: N815
    """Pairs that no expert takes, which stand at the end; None: there are none."""
    sums_2E: Tensor | None = None  # noqa: N815
    """How many pairs chose each expert, and the sum of its probabilities: what the balance is made of."""


class Choices:
    """Experts that tokens have chosen, and choose again whenever the same batch runs: what is measured of a model by
    small changes of its tensors must not jump.

    Attributes:
        batch: that runs now.
    """

    def __init__(self) -> None:
        self.batch: object = None
        self._kept: dict[tuple[int, int], tuple[object, Tensor]] = {}

    def of(self, module: nn.Module, expert_Sk: Tensor) -> Tensor:
        """What the batch's tokens chose when a module first saw them.

        Args:
            expert_Sk: what they choose now.
        """
        return self._kept.setdefault((id(module), id(self.batch)), (self.batch, expert_Sk))[1]


@contextlib.contextmanager
def keeping_choices(model: nn.Module) -> Iterator[Choices]:
    """Inside, tokens choose experts once: `Choices`, which whoever runs batches tells which one it is."""
    choices, routers = Choices(), [module for module in model.modules() if isinstance(module, RoutedMlp)]
    for router in routers:
        router.choices = choices
    try:
        yield choices
    finally:
        for router in routers:
            router.choices = None


def routes_of(
    logits_SE: Tensor,
    routing: RoutingSpec,
    *,
    drops: bool = False,
    choose: Callable[[Tensor], Tensor] | None = None,
) -> Routes:
    """Choose experts by a router's logits.

    Args:
        drops: whether experts have a capacity now.
        choose: from the experts that are most probable to those that are taken; None: these.
    """
    p_SE = at_least_float32(logits_SE).softmax(-1)
    weights_Sk, expert_Sk = p_SE.topk(routing.chosen, dim=-1)
    if choose is not None:
        expert_Sk = choose(expert_Sk)
        weights_Sk = p_SE.gather(-1, expert_Sk)
    if routing.normalises:
        weights_Sk = weights_Sk / weights_Sk.sum(-1, keepdim=True)
    chosen_A = expert_Sk.flatten()
    sums_2E = torch.stack([_counts(chosen_A, routing.experts).to(p_SE.dtype), p_SE.sum(0)])
    dropped_A = None
    if drops and routing.capacity_factor:
        dropped_A = _beyond(expert_Sk, routing)
        weights_Sk = weights_Sk.masked_fill(dropped_A.view_as(weights_Sk), 0.0)
        chosen_A = chosen_A.masked_fill(dropped_A, routing.experts)
    sorted_A, order_A = chosen_A.sort(stable=True)
    place_A = torch.empty_like(order_A)
    place_A[order_A] = torch.arange(len(order_A), device=order_A.device)
    return Routes(
        weights_Sk,
        _ends(sorted_A, routing.experts),
        order_A // routing.chosen,
        place_A.view_as(expert_Sk),
        None if dropped_A is None else dropped_A[order_A],
        sums_2E,
    )


def _ends(sorted_A: Tensor, experts: int) -> Tensor:
    numbers_E = torch.arange(experts, device=sorted_A.device, dtype=sorted_A.dtype)
    return torch.searchsorted(sorted_A, numbers_E, right=True, out_int32=True)


def _counts(chosen_A: Tensor, experts: int) -> Tensor:
    """How many pairs chose each expert."""
    return _ends(chosen_A.sort().values, experts).diff(prepend=chosen_A.new_zeros(1, dtype=torch.int32))


def _beyond(expert_Sk: Tensor, routing: RoutingSpec) -> Tensor:
    """Which pairs an expert does not take: first choices of all tokens come first, then second ones."""
    tokens, chosen = expert_Sk.shape
    in_turn_A = expert_Sk.t().flatten()
    sorted_A, order_A = in_turn_A.sort(stable=True)
    first_A = torch.searchsorted(sorted_A, sorted_A)  # where the run of each pair's expert begins
    number_A = torch.arange(len(order_A), device=order_A.device) - first_A
    dropped_A = torch.empty_like(in_turn_A, dtype=torch.bool)
    dropped_A[order_A] = number_A >= capacity(routing, tokens)
    return dropped_A.view(chosen, tokens).t().flatten()


class _Spread(torch.autograd.Function):
    """x_AD: each pair's token of x_SD."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, token_A: Tensor, place_Sk: Tensor) -> Tensor:
        ctx.save_for_backward(place_Sk)
        return x_SD[token_A]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_AD: Tensor) -> tuple[Tensor, None, None]:
        (place_Sk,) = ctx.saved_tensors
        total_SD = at_least_float32(g_AD[place_Sk[:, 0]])
        for slot in range(1, place_Sk.shape[1]):
            total_SD = total_SD + g_AD[place_Sk[:, slot]]
        return total_SD.to(g_AD.dtype), None, None


class _Collect(torch.autograd.Function):
    """out_SD: the weighted sum of each token's results y_AD."""

    @staticmethod
    def forward(ctx: Any, y_AD: Tensor, weights_Sk: Tensor, token_A: Tensor, place_Sk: Tensor) -> Tensor:
        ctx.save_for_backward(y_AD, weights_Sk, token_A, place_Sk)
        total_SD = y_AD[place_Sk[:, 0]] * weights_Sk[:, :1]
        for slot in range(1, place_Sk.shape[1]):
            total_SD = torch.addcmul(
                total_SD, at_least_float32(y_AD[place_Sk[:, slot]]), weights_Sk[:, slot : slot + 1]
            )
        return total_SD.to(y_AD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_SD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_AD, weights_Sk, token_A, place_Sk = ctx.saved_tensors
        weight_A = torch.empty_like(weights_Sk).flatten()
        weight_A[place_Sk.flatten()] = weights_Sk.flatten()
        grad_AD = (g_SD[token_A] * weight_A[:, None]).to(y_AD.dtype)
        slots = range(place_Sk.shape[1])
        grad_Sk = torch.stack(
            [(at_least_float32(y_AD[place_Sk[:, slot]]) * g_SD).sum(-1) for slot in slots], dim=1
        )
        return grad_AD, grad_Sk.to(weights_Sk.dtype), None, None


class _AddedUp(torch.autograd.Function):
    """The sum over ranks of what each has of the same rows; each differentiates its own part."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: dist.ProcessGroup) -> Tensor:
        import torch.distributed as dist

        total = sums.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def added_up(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sums of a routing, over ranks that share rows: all take the same penalty of them."""
    return cast(Tensor, _AddedUp.apply(sums, group))  # type: ignore[no-untyped-call]


class Experts(nn.Module):
    """The matrices of all experts, or of those that this rank has.

    Args:
        width: of the residual stream; inner: of an expert.
    """

    def __init__(self, experts: int, width: int, inner: int, place: Place) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": place.device, "dtype": place.dtype}
        self.gate_up = GroupedLinear(experts, width, 2 * inner, **where)
        self.down = GroupedLinear(experts, inner, width, **where)

    def forward(self, x_SD: Tensor, routes: Routes, *, keeps_gated: bool = True) -> Tensor:
        """y_AD: each pair's result.

        Args:
            keeps_gated: keep the gated product for backward.
        """

        def sorted_by_expert(x_SD: Tensor) -> Tensor:
            return _without(spread(x_SD, routes.token_A, routes.place_Sk), routes)

        gate_up_AF = regrouped(self.gate_up, sorted_by_expert, x_SD, ends_E=routes.ends_E)
        y_AD = regrouped(self.down, swiglu, gate_up_AF, ends_E=routes.ends_E, again=not keeps_gated)
        return _without(y_AD, routes)


def spread(x_SD: Tensor, token_A: Tensor, place_Sk: Tensor) -> Tensor:
    """x_AD: each pair's token; arguments as of `Routes`."""
    return cast(Tensor, _Spread.apply(x_SD, token_A, place_Sk))  # type: ignore[no-untyped-call]


def _without(x_AD: Tensor, routes: Routes) -> Tensor:
    """0 in the rows of dropped pairs, and in their gradients."""
    dropped_A = routes.is_dropped_A
    return x_AD if dropped_A is None else x_AD.masked_fill(dropped_A[:, None], 0.0)


class RoutedMlp(nn.Module):
    """A router and its experts.

    Args:
        width: of the residual stream; inner: of an expert.
    """

    def __init__(self, routing: RoutingSpec, width: int, inner: int, place: Place) -> None:
        super().__init__()
        self.routing = routing
        self.router = Linear(width, routing.experts, bias=False, device=place.device, dtype=place.dtype)
        self.experts = Experts(routing.experts, width, inner, place)
        self.ranks: ExpertRanks | None = None
        """Those that share the experts; None: this process has all."""
        self.one_copy: Callable[[Tensor], Tensor] | None = None
        """What adds up the gradients of a router that several ranks have, each for its own tokens."""
        self.choices: Choices | None = None
        """What batches chose that run again; None: every pass chooses anew."""

    def forward(
        self, x_BTD: Tensor, norm: RMSNorm | None, activations: Activations = KEEP
    ) -> tuple[Tensor, Tensor]:
        """What the experts add to the residual stream, and the sums of the routing, sums_2E."""

        def routed(x_BTD: Tensor, keeps_gated: bool = True) -> tuple[Tensor, Tensor]:
            h_SD = (x_BTD if norm is None else norm(x_BTD)).flatten(0, 1)
            choose = None if self.choices is None else partial(self.choices.of, self)
            routes = routes_of(self._logits(h_SD), self.routing, drops=self.training, choose=choose)
            y_AD = self._results(h_SD, routes, keeps_gated)
            out_SD = _Collect.apply(y_AD, routes.weights_Sk, routes.token_A, routes.place_Sk)  # type: ignore[no-untyped-call]
            assert routes.sums_2E is not None
            return out_SD.view_as(x_BTD), routes.sums_2E

        if activations.recomputes("mlp"):
            return run_again(routed, x_BTD, last=None)
        return routed(x_BTD, not activations.recomputes("swiglu"))

    def _logits(self, h_SD: Tensor) -> Tensor:
        if self.one_copy is None:
            return cast(Tensor, self.router(h_SD))
        return F.linear(h_SD, self.one_copy(self.router.weight))

    def _results(self, h_SD: Tensor, routes: Routes, keeps_gated: bool) -> Tensor:
        """y_AD: each pair's result, wherever its expert is."""
        if self.ranks is None:
            return cast(Tensor, self.experts(h_SD, routes, keeps_gated=keeps_gated))
        journey = self.ranks.journey(routes.ends_E)
        x_RD = journey.go(spread(h_SD, routes.token_A, routes.place_Sk))
        here = journey.routes()
        y_RD = self.experts(x_RD, here, keeps_gated=keeps_gated)
        return journey.back(journey.unsorted(y_RD, here), len(routes.token_A))


class RoutedBlock(Block):
    """A block whose MLP is a `RoutedMlp`; arguments as of `Block`."""

    mlp: RoutedMlp  # type: ignore[assignment]
    routing: Tensor | None = None
    """sums_2E of the last forward pass; whoever takes them puts None here."""

    def add(self, x_BTD: Tensor, attend: Attend, activations: Activations = KEEP) -> Tensor:
        """The residual stream after this block, for attention of any kind."""
        return self._added(x_BTD, attend, activations)[0]

    def _added(self, x_BTD: Tensor, attend: Attend, activations: Activations = KEEP) -> tuple[Tensor, Tensor]:
        x_BTD = x_BTD + self.attention(x_BTD, self.attention_norm, attend, activations)
        added_BTD, sums_2E = self.mlp(x_BTD, self.mlp_norm, activations)
        return x_BTD + added_BTD, sums_2E

    def forward(self, x_BTD: Tensor, layout: AttentionLayout) -> Tensor:
        """The residual stream after this block."""
        added = partial(self._added, attend=partial(attend, layout=layout))
        if self.activations.recomputes("block"):
            x_BTD, self.routing = run_again(added, x_BTD, last=None)
        else:
            x_BTD, self.routing = added(x_BTD, activations=self.activations)
        return x_BTD
