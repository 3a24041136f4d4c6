"""Weights, gradients and activations on the host, in any mixture: the numbers of a run that keeps everything, and less
memory of the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
import torch
from late_link import LateLink
from losses import next_token_loss
from torch import Tensor

from scrimp.config import Architecture
from scrimp.config.activations import Activations
from scrimp.gemm import swap_in
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.runtime.memory import ActivationOffload, HostArena
from scrimp.runtime.memory.gradients import HostGradients, OwnGradient
from scrimp.runtime.memory.streamed_blocks import BlockMemory
from scrimp.runtime.memory.weights import HostWeights

ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=128,
    num_layers=5,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    ffn_width=128,
    context=64,
)
CPU = torch.device("cpu")
STEPS, MICRO_BATCHES = 3, 2


def batches(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(128, (4, 33), generator=generator) for _ in range(MICRO_BATCHES)]


def make_model(dtype: torch.dtype, recipe: str | None, level: str = "keep") -> Model:
    model = build_model(ARCHITECTURE, dtype=dtype)
    initialise(model, 0)
    if recipe is not None:
        layers = {f"blocks.{i}.mlp.{name}": recipe for i in range(5) for name in ("gate_up", "down")}
        from scrimp.gemm import LinearPrecision

        swap_in(model, {name: LinearPrecision.of(recipe) for name, recipe in layers.items()})
    for block in model.blocks:
        block.activations = Activations(level)
    return model


def run_pass(model: Model, tokens: Tensor, autocasts: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        sums = next_token_loss(model, tokens[:, :-1], tokens[:, 1:])
    (sums.total / tokens[:, 1:].numel()).backward()
    return sums.total.detach()


def train_plainly(model: Model, autocasts: bool) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the last step's gradients, final weights."""
    losses, gradients = [], {}
    for step in range(STEPS):
        losses += [run_pass(model, tokens, autocasts) for tokens in batches(step)]
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad(set_to_none=True)
    return losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclasses.dataclass
class Offloaded:
    """A model whose blocks live on the host as far as the arguments say."""

    model: Model
    weights: Iterable[int]
    gradients: Iterable[int]
    activations: Iterable[int]

    def __post_init__(self) -> None:
        arena = HostArena(8 << 20, CPU, poisons=True)
        link = self.link = LateLink(CPU)
        of = {i: list(block.parameters()) for i, block in enumerate(self.model.blocks)}
        self.host_weights = HostWeights({i: of[i] for i in self.weights}, arena, link)
        self.host_gradients = HostGradients(
            {i: [OwnGradient(p) for p in of[i]] for i in self.gradients}, arena, link
        )
        self.offload = ActivationOffload(arena, link, num_blocks=len(of), min_bytes=1024)
        self.memory = self.model.run_block = BlockMemory(
            len(of),
            offload=self.offload,
            leaving=frozenset(self.activations),
            weights=self.host_weights,
            gradients=self.host_gradients,
        )

    def train(self, autocasts: bool) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
        losses, gradients = [], {}
        for step in range(STEPS):
            for tokens in batches(step):
                losses.append(run_pass(self.model, tokens, autocasts))
                self.memory.end_backward()
            gradients = self._update()
        self.host_weights.leave()
        home = self.host_weights.at_home()
        final = {name: home.get(p, p.detach()).clone() for name, p in self.model.named_parameters()}
        return losses, gradients, final

    @torch.no_grad()
    def _update(self) -> dict[str, Tensor]:
        """Plain gradient descent, block by block."""
        norms = self.host_gradients.norms()
        for i in range(len(self.model.blocks)):
            self.host_gradients.fetch(i)
            self.host_gradients.before_backward(i)
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        for p, norm in norms.items():
            assert torch.equal(norm, p.grad.float().norm())
        for i in range(len(self.model.blocks)):
            for guest in self.host_weights.guests(i):
                guest.ready()
        for p in self.model.parameters():
            p.data -= 0.1 * p.grad
        for i in range(len(self.model.blocks)):
            for guest in self.host_weights.guests(i):
                guest.save().wait()
                guest.leave()
        self.host_gradients.clear()
        self.model.zero_grad(set_to_none=True)
        return gradients


ALL = range(5)
MIXTURES = {
    "weights": (ALL, (), ()),
    "first weights": (range(3), (), ()),
    "one block": ((2,), (2,), (2,)),
    "gradients": ((), ALL, ()),
    "activations": ((), (), ALL),
    "everything": (ALL, ALL, ALL),
    "some of each": ((0, 1, 3), (1, 4), (0, 2, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize(
    ("dtype", "autocasts", "recipe", "level"),
    [
        (torch.float32, False, None, "keep"),
        (torch.float32, True, None, "mlp"),
        (torch.bfloat16, False, "nvfp4", "norms"),
        (torch.float32, True, "fp8", "block"),
        (torch.bfloat16, False, None, "qkv"),
    ],
)
def test_every_mixture_trains_as_if_all_were_resident(
    mixture: str, dtype: torch.dtype, autocasts: bool, recipe: str | None, level: str
) -> None:
    """Copies happen as late as a link may make them; what was given back is overwritten."""
    losses, gradients, final = train_plainly(make_model(dtype, recipe), autocasts)
    offloaded = Offloaded(make_model(dtype, recipe, level), *MIXTURES[mixture])
    found_losses, found_gradients, found_final = offloaded.train(autocasts)
    assert torch.equal(torch.stack(losses), torch.stack(found_losses))
    for name, gradient in gradients.items():
        assert torch.equal(found_gradients[name], gradient), name
        assert torch.equal(found_final[name], final[name]), name


def device_bytes(model: Model) -> int:
    """Bytes of parameters and gradients outside the arena."""
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_at_most_two_blocks_of_weights_and_gradients_are_on_the_device() -> None:
    offloaded = Offloaded(make_model(torch.float32, None), ALL, ALL, ())
    model = offloaded.model
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    ends = sum(p.nbytes for p in model.parameters()) - 5 * block
    seen: list[int] = []
    for inner in model.blocks:
        inner.register_forward_hook(lambda *_: seen.append(device_bytes(model)))
        inner.mlp.register_full_backward_hook(lambda *_: seen.append(device_bytes(model)))
    for tokens in batches(0):
        run_pass(model, tokens, False)
        offloaded.memory.end_backward()
    assert len(seen) == 2 * 2 * 5
    # Two blocks of weights; of gradients one that grows, one that comes, one that leaves; and those of the ends.
    assert max(seen) <= 2 * ends + 2 * block + 2 * block
    assert offloaded.link.bytes_fetched > 0


def test_weights_that_are_read_before_their_copy_was_waited_for_give_other_numbers() -> None:
    """The tests above would notice: a link that is not waited for leaves garbage."""
    losses, _, _ = train_plainly(make_model(torch.float32, None), False)
    offloaded = Offloaded(make_model(torch.float32, None), ALL, (), ())
    for i in ALL:
        for guest in offloaded.host_weights.guests(i):
            guest.ready = guest.start  # type: ignore[method-assign]
    found = run_pass(offloaded.model, batches(0)[0], False)
    assert not torch.equal(found, losses[0])


def test_sums_at_home_are_read_without_a_copy() -> None:
    offloaded = Offloaded(make_model(torch.float32, None), (), (1, 3, 4), ())
    expected = make_model(torch.float32, None)
    for tokens in batches(0):
        run_pass(expected, tokens, False)
        run_pass(offloaded.model, tokens, False)
        offloaded.memory.end_backward()
    offloaded.memory.end_backward()  # again: the last block's have left too
    for block in (1, 3, 4):
        at_home = offloaded.host_gradients.at_home(block)
        for p, found in zip(expected.blocks[block].parameters(), at_home, strict=True):
            assert found is not None
            found[1].finish()
            assert torch.equal(found[0], p.grad)
    offloaded.host_gradients.drop(3)
    assert offloaded.host_gradients.at_home(3) == [None] * len(at_home)


def test_evaluation_leaves_no_weights_behind_and_a_broken_pass_can_be_reset() -> None:
    offloaded = Offloaded(make_model(torch.float32, None), ALL, ALL, ALL)
    model, tokens = offloaded.model, batches(0)[0]
    with torch.no_grad():
        expected = next_token_loss(model, tokens[:, :-1], tokens[:, 1:]).total
    failing = model.blocks[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_pass(model, tokens, False)
    failing.remove()
    offloaded.memory.reset()
    assert not any(guest.is_here for i in ALL for guest in offloaded.host_weights.guests(i))
    assert torch.equal(run_pass(model, tokens, False), expected)
