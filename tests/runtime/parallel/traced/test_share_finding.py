"""Plans of models: what is cut, and what is left whole, with the reason."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sharing_families import FIVE, VOCABULARY, example, model_of
from torch import Tensor, nn

from scrimp.errors import ConfigError, ModelError
from scrimp.runtime.parallel.traced import TensorPlan, find

WIDTH, HEADS = 32, 4


def plan_of(family: str, ranks: int = 2, **settings: object) -> TensorPlan:
    return find(model_of(family, **settings), (), example(), ranks)


def kinds(plan: TensorPlan, *names: str) -> list[str]:
    return [layer.kind for layer in plan.layers if layer.name.rpartition(".")[2] in names]


@pytest.mark.slow
def test_gpt2_splits_its_fused_layer_three_times() -> None:
    plan = plan_of("gpt2")
    assert kinds(plan, "c_attn", "c_fc") == ["outputs"] * 4
    assert kinds(plan, "c_proj") == ["inputs"] * 4
    assert kinds(plan, "wte", "wpe", "lm_head") == ["words", "replicated", "gathered"]
    cut = plan.cuts["transformer.h.0.attn.c_attn.weight"]
    assert (cut.dimension, cut.ranges) == (1, (range(32), range(32, 64), range(64, 96)))
    assert plan.cuts["transformer.h.0.attn.c_attn.bias"].ranges == cut.ranges
    assert cut.of(1, 2).ranges == (range(16, 32), range(48, 64), range(80, 96))
    # Once for all that reads a norm, and once where the head does: the last norm is returned, too.
    assert [(entry.module, entry.is_output) for entry in plan.entries[:2]] == [
        ("transformer.h.0.ln_1", True),
        ("transformer.h.0.ln_2", True),
    ]
    assert {name: dict(sizes) for name, sizes in plan.sizes.items()} == {
        f"transformer.h.{block}.attn": {"split_size": 16} for block in range(2)
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", FIVE)
def test_every_layer_of_every_block_is_cut(family: str) -> None:
    plan = plan_of(family)
    cut_by_outputs = ("c_attn", "c_fc", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc_in", "fc1")
    cut_by_inputs = ("c_proj", "o_proj", "out_proj", "down_proj", "fc_out", "fc2", "o", "wo")
    of_t5 = ("q", "k", "v", "wi", "relative_attention_bias")
    assert set(kinds(plan, *cut_by_outputs, *of_t5)) == {"outputs"}
    assert set(kinds(plan, *cut_by_inputs)) == {"inputs"}
    assert set(kinds(plan, "lm_head")) == {"gathered"}
    assert [layer.name for layer in plan.layers if layer.kind == "replicated"] == (
        ["transformer.wpe"] if family == "gpt2" else []
    )
    assert plan.share_cut > 0.9


@pytest.mark.slow
def test_a_parallel_residual_has_one_entry_for_both() -> None:
    plan = plan_of("gptj")
    assert sum(entry.module.endswith("ln_1") for entry in plan.entries) == 2
    assert len(plan.entries) == 3


@pytest.mark.slow
def test_key_heads_that_do_not_divide_leave_attention_whole() -> None:
    plan = plan_of("llama", ranks=4)
    assert kinds(plan, "q_proj", "k_proj", "v_proj", "o_proj") == ["replicated"] * 8
    assert kinds(plan, "gate_proj", "up_proj", "down_proj") == ["outputs", "outputs", "inputs"] * 2
    reasons = {layer.why for layer in plan.layers if layer.name.endswith("k_proj")}
    assert reasons == {"2 of them do not divide by 4 ranks"}


@pytest.mark.slow
def test_what_is_unsafe_stays_whole() -> None:
    assert set(kinds(plan_of("llama", num_key_value_heads=1), "q_proj", "k_proj", "o_proj")) == {"replicated"}
    dropout = plan_of("gpt2", attn_pdrop=0.1)
    assert "random" in next(layer.why for layer in dropout.layers if layer.name.endswith("c_attn"))
    assert kinds(dropout, "c_fc") == ["outputs"] * 2
    cached = find(model_of("llama"), (), {"input_ids": example()["input_ids"], "use_cache": True}, 2)
    assert set(kinds(cached, "k_proj", "v_proj", "o_proj")) == {"replicated"}
    assert "DynamicCache" in next(layer.why for layer in cached.layers if layer.name.endswith("k_proj"))


@pytest.mark.slow
def test_a_model_is_left_as_it_is() -> None:
    model = model_of("llama").eval()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    attributes = [{k: v for k, v in vars(m).items() if type(v) is int} for m in model.modules()]
    plan = find(model, (), example(), 2)
    assert not model.training
    assert [{k: v for k, v in vars(m).items() if type(v) is int} for m in model.modules()] == attributes
    assert all(id(p) == before[name][0] for name, p in model.named_parameters())
    assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    again = find(model.to("meta"), (), example(), 2)
    assert again.digest == plan.digest
    text = str(plan)
    assert "x 2   outputs" in text
    assert f"words       {VOCABULARY} rows" in text


class Mlp(nn.Module):
    """Layers one after another, without norms."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(one, other) for one, other in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)  # type: ignore[no-any-return]


class TurnedInPlace(nn.Module):
    """A tensor gets another shape and stays the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.turned = Mlp(8, 16, 8), Mlp(8, 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.plain(x)
        hidden = self.turned.layers[0](x).transpose_(0, 1)
        return x + self.turned.layers[1]((hidden * 2).transpose_(0, 1))  # type: ignore[no-any-return]


def test_only_the_layers_whose_shape_changes_in_place_stay_whole() -> None:
    plan = find(TurnedInPlace(), (torch.zeros(3, 5, 8),), {}, 2)
    assert kinds(plan, "0", "1") == ["outputs", "inputs", "gathered", "replicated"]
    (why,) = (layer.why for layer in plan.layers if layer.kind == "replicated")
    assert why


def test_layers_alternate() -> None:
    plan = find(Mlp(8, 16, 12, 16, 8), (torch.zeros(3, 8),), {}, 2)
    assert [layer.kind for layer in plan.layers] == ["outputs", "inputs"] * 2


class Attention(nn.Module):
    """Attention whose heads its code takes apart as `view` says.

    Args:
        view: from projected tokens [B, T, 3 D] to three of [B, H, T, K].
    """

    def __init__(self, view: Callable[[nn.Module, Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.view, self.heads, self.head_size = nn.LayerNorm(WIDTH), view, HEADS, WIDTH // HEADS
        self.gain = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.view(self, self.qkv(self.norm(x)))
        found = F.scaled_dot_product_attention(q * self.gain, k, v).transpose(1, 2)
        return x + self.out(found.reshape(*x.shape[:2], -1))


def by_sizes(module: nn.Module, qkv: Tensor) -> list[Tensor]:
    return [x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for x in qkv.chunk(3, -1)]


def by_attribute(module: nn.Module, qkv: Tensor) -> list[Tensor]:
    heads = module.heads
    return [x.view(*x.shape[:2], heads, -1).transpose(1, 2) for x in qkv.chunk(3, -1)]


def by_constant(module: nn.Module, qkv: Tensor) -> list[Tensor]:
    return [x.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for x in qkv.chunk(3, -1)]


def from_the_left(module: nn.Module, qkv: Tensor) -> list[Tensor]:
    parts = qkv[..., :WIDTH], qkv[..., WIDTH : 2 * WIDTH], qkv[..., 2 * WIDTH :]
    return [x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for x in parts]


def from_the_right(module: nn.Module, qkv: Tensor) -> list[Tensor]:
    """Slices that, of a share, have the right shapes and the wrong numbers where WIDTH is not what it was."""
    parts = qkv[..., -3 * WIDTH : -2 * WIDTH], qkv[..., -2 * WIDTH : -WIDTH], qkv[..., -WIDTH:]
    return [x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for x in parts]


def interleaved(module: nn.Module, qkv: Tensor) -> list[Tensor]:
    return list(qkv.unflatten(-1, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4).unbind(0))


def across_heads(module: nn.Module, qkv: Tensor) -> list[Tensor]:
    """Each head has every fourth number."""
    return [x.view(*x.shape[:2], -1, HEADS).transpose(1, 3).transpose(2, 3) for x in qkv.chunk(3, -1)]


@pytest.mark.parametrize(
    ("view", "is_cut"),
    [
        (by_sizes, True),
        (by_attribute, True),
        (interleaved, True),
        (by_constant, False),
        (from_the_left, False),
        (from_the_right, False),
        (across_heads, False),
    ],
)
def test_heads_are_cut_where_the_code_can_take_a_share(
    view: Callable[[nn.Module, Tensor], list[Tensor]], is_cut: bool
) -> None:
    plan = find(Attention(view), (torch.zeros(3, 10, WIDTH),), {}, 2)
    assert [layer.kind for layer in plan.layers] == (["outputs", "inputs"] if is_cut else ["replicated"] * 2)
    assert ("gain" in plan.cuts) == is_cut
    sizes = {"": {"heads": HEADS // 2}} if view is by_attribute else {}
    assert {name: dict(found) for name, found in plan.sizes.items()} == sizes


class Uneven(nn.Module):
    """Asks for a number of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Checking(nn.Module):
    """Stops where it dislikes what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[0] == 3, "three rows"
        return x


@pytest.mark.parametrize("module", [Uneven(), Checking()])
def test_what_cannot_be_traced_is_refused(module: nn.Module) -> None:
    with pytest.raises(ModelError, match="cannot be traced"):
        find(module, (torch.zeros(2, 3),), {}, 2)
    with pytest.raises(ConfigError, match="at least 2"):
        find(nn.Linear(2, 2), (torch.zeros(2, 2),), {}, 1)
