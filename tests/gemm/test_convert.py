"""Plans come into a model and leave it; the model's objects, names, hooks and numbers stay what they are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from planned_cases import (
    QUANTIZED,
    Block,
    assert_all_equal,
    blocks,
    linear,
    random,
    run,
    run_model,
    same,
    start,
    watching_gemms,
)
from torch import Tensor, nn

from scrimp.errors import ModelError, PlanError
from scrimp.gemm.convert import swap_in
from scrimp.gemm.layer import reference_only
from scrimp.precision import LinearPrecision


def test_parameters_names_types_and_state_dict_stay_the_same_objects() -> None:
    model = blocks(2)
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    state = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    plan = start(model, "nvfp4")
    for _ in range(2):
        assert all(dict(model.named_parameters())[name] is p for name, p in parameters.items())
        assert all(dict(model.named_modules())[name] is m for name, m in modules.items())
        assert list(model.state_dict()) == list(state)
        for name, value in model.state_dict().items():
            assert value.data_ptr() == state[name][0]
            assert torch.equal(value, state[name][1])
        assert isinstance(model[0].up, nn.Linear)
        run_model(model, random(8, 64))
        plan.swap_out()


def test_swap_out_gives_ordinary_layers_of_the_same_numbers() -> None:
    x = random(24, 64)
    expected = run_model(blocks(2), x)
    model = blocks(2)
    plan = start(model, "fp8")
    changed = run_model(model, x)
    assert not torch.equal(changed[0], expected[0])
    plan.swap_out()
    assert type(model[0].up) is nn.Linear
    assert not hasattr(model[0].up, "planned")
    assert not model._forward_pre_hooks
    assert plan.layers == {}
    assert_all_equal(run_model(model, x), expected)
    start(model, "fp8")
    assert_all_equal(run_model(model, x), changed)


def test_swap_out_refuses_to_undo_what_another_library_made_of_a_layer() -> None:
    """FSDP2 makes a subclass of the class of every module that it shards."""
    model = blocks(1)
    plan = start(model, "fp8")
    model[0].down.__class__ = type("Sharded", (type(model[0].down),), {})
    with pytest.raises(ModelError, match=r"0\.down has become another class.*got Sharded"):
        plan.swap_out()
    assert hasattr(model[0].up, "planned")
    assert list(plan.layers) == ["0.up", "0.down"]


def test_hooks_of_layers_and_of_the_model_survive() -> None:
    model, seen = blocks(1), []
    model[0].up.register_forward_hook(lambda module, args, y: seen.append("after"))
    model[0].up.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model[0].up.weight.register_hook(lambda grad: seen.append("gradient"))
    model.register_forward_pre_hook(lambda module, args: seen.append("model"))
    plan = start(model, "fp8")
    run_model(model, random(8, 64))
    assert seen == ["model", "before", "after", "gradient"]
    plan.swap_out()
    run_model(model, random(8, 64))
    assert seen == ["model", "before", "after", "gradient"] * 2


def test_a_subclass_of_linear_keeps_its_class_and_attributes() -> None:
    class Named(nn.Linear):
        label = "mine"

    model = nn.Sequential(Named(100, 37))
    plan = start(model, "fp8")
    assert isinstance(model[0], Named)
    assert model[0].label == "mine"
    plan.swap_out()
    assert type(model[0]) is Named


def test_a_layer_that_multiplies_in_its_own_way_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8), Doubled(8, 8))
    for wanted in ("fp8", {"1": same("fp8")}):
        with pytest.raises(PlanError, match="forward of its own"):
            start(model, wanted)  # type: ignore[arg-type]
        assert not hasattr(model[0], "planned")
    swap_in(model, {"0": same("fp8")}, choose=reference_only)


def test_a_layer_whose_forward_another_library_has_replaced_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].forward = model[1].forward  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="1 has a forward of its own"):
        start(model, "fp8")
    assert not hasattr(model[0], "planned")


def test_a_layer_that_two_names_share_is_planned_once() -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, layer)
    assert list(start(model, "fp8").layers) == ["0"]
    with watching_gemms() as ran:
        model(random(3, 8))
    assert len(ran) == 2


def test_a_lone_layer_is_a_model_too() -> None:
    layer = linear()
    assert list(start(layer, "fp8").layers) == [""]
    assert not torch.equal(layer(random(3, 100)), linear()(random(3, 100)))


def test_only_the_named_layers_change() -> None:
    x = random(24, 64)
    model = blocks(2)
    swap_in(model, {"1.up": same("fp8")}, choose=reference_only)
    with watching_gemms() as ran:
        run_model(model, x)
    assert [(e.layer, e.gemm) for e in ran] == [("1.up", gemm) for gemm in ("fprop", "dgrad", "wgrad")]
    assert type(model[0].up) is nn.Linear


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"0.up": same("fp8"), "0.sideways": same("fp8")}, "0.sideways"),
        ({"0.up": same("fp8"), "0.norm": same("fp8")}, "0.norm"),
        ({"0.up": same("fp8"), "1.up": same("fp9")}, "did you mean fp8"),
        ({"0.up": same("fp8"), "1.up": same("fp8", "fp7")}, "no such recipe"),
        ("fp9", "did you mean fp8"),
        (LinearPrecision("fp8", "fp8", "recompute", "fp8"), "no such recipe"),
    ],
)
def test_a_wrong_plan_changes_nothing(wanted: object, message: str) -> None:
    model = blocks(2)
    with pytest.raises(PlanError, match=message):
        swap_in(model, wanted, choose=reference_only)  # type: ignore[arg-type]
    assert not any(hasattr(module, "planned") for module in model.modules())
    assert all(type(block.up) is nn.Linear for block in model)
    assert not model._forward_pre_hooks


def test_a_second_plan_for_the_same_layer_is_refused_and_changes_nothing() -> None:
    model = blocks(2)
    first = swap_in(model, {"1.down": same("fp8")}, choose=reference_only)
    with pytest.raises(PlanError, match=r"1\.down is planned already"):
        start(model, "nvfp4")
    assert type(model[0].up) is nn.Linear
    assert first.layers["1.down"].precision == same("fp8")


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="no linear layer"):
        start(nn.Sequential(nn.LayerNorm(4)), "fp8")


# ---- copies and optimizers


def test_a_copied_model_has_a_plan_of_its_own() -> None:
    x = random(24, 64)
    model = blocks(2)
    plan = start(model, "nvfp4")
    twin = copy.deepcopy(model)
    assert_all_equal(run_model(twin, x), run_model(model, x))
    layers = [block.up.planned for m in (model, twin) for block in m]
    assert len({int(layer.handle) for layer in layers}) == 4
    plan.replan({"0.up": same("fp8")})
    assert twin[0].up.planned.precision == same("nvfp4")
    plan.swap_out()
    assert twin[0].up.planned.name == "0.up"
    run_model(twin, x)


def test_optimizer_states_and_steps_do_not_notice() -> None:
    model, x = blocks(2), random(24, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run_model(model, x)
    optimizer.step()
    before = {p: optimizer.state[p]["exp_avg"] for p in model.parameters()}
    start(model, "fp8")
    run_model(model, x)
    optimizer.step()
    assert len(optimizer.state) == len(before)
    assert all(optimizer.state[p]["exp_avg"] is state for p, state in before.items())
    assert all(int(optimizer.state[p]["step"]) == 2 for p in before)


# ---- new plans


def test_replan_returns_the_names_that_changed_and_the_next_pass_runs_them() -> None:
    x, model = random(24, 64), blocks(2)
    plan = start(model, "fp8")
    wanted = {
        "0.up": same("fp8"),
        "0.down": same("mxfp4"),
        "1.up": LinearPrecision("fp8", "fp8", "bf16", "bf16"),
    }
    assert plan.replan(wanted) == ["0.down", "1.up"]
    assert plan.replan(wanted) == []
    with watching_gemms() as ran:
        found = run_model(model, x)
    recipes = {(e.layer, e.gemm): e.recipe for e in ran}
    assert recipes[("0.down", "dgrad")] == "mxfp4"
    assert recipes[("1.up", "wgrad")] == "bf16"
    assert recipes[("1.down", "wgrad")] == recipes[("0.up", "fprop")] == "fp8"
    fresh = blocks(2)
    start(fresh, {**dict.fromkeys(plan.layers, same("fp8")), **wanted})  # type: ignore[arg-type]
    assert_all_equal(run_model(fresh, x), found)


@pytest.mark.parametrize(
    "wanted",
    [{"0.up": same("fp4"), "9.up": same("fp4")}, {"0.up": same("fp4"), "1.up": same("fp5")}],
)
def test_a_wrong_new_plan_changes_nothing(wanted: dict[str, LinearPrecision]) -> None:
    plan = start(blocks(2), "fp8")
    with pytest.raises(PlanError):
        plan.replan(wanted)
    assert all(layer.precision == same("fp8") for layer in plan.layers.values())


@pytest.mark.parametrize(("gemm", "changes"), [("fprop", 0), ("dgrad", 1), ("wgrad", 2)])
def test_another_recipe_for_one_gemm_changes_the_result_of_that_gemm_only(gemm: str, changes: int) -> None:
    x = random(40, 100)

    def passed(recipes: dict[str, str]) -> list[Tensor]:
        layer = linear()
        start(
            layer,
            LinearPrecision(**{"fprop": "fp8", "dgrad": "fp8", "wgrad": "fp8", **recipes}, saved="fp32"),
        )
        found = run(layer, x)
        return [found.y, found.x_grad, found.weight_grad]

    base = passed({})
    for other in ("fp32", "bf16", *(name for name in QUANTIZED if name != "fp8")):
        same_as_before = [torch.equal(a, b) for a, b in zip(base, passed({gemm: other}), strict=True)]
        assert same_as_before == [index != changes for index in range(3)]


# ---- models of others


def losses(model: nn.Module, loss: Callable[[Tensor], Tensor], steps: int = 3) -> list[float]:
    """The losses of a few steps on one batch."""
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(steps + 1):
        value = loss(tokens)
        found.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return found


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_a_transformers_llama_trains_under_a_plan(recipe: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    assert len(names) == 14
    keys = list(model.state_dict())
    plan = swap_in(model, dict.fromkeys(names, same(recipe)), choose=reference_only)
    with watching_gemms() as ran:
        found = losses(model, lambda tokens: model(input_ids=tokens, labels=tokens).loss, steps=3)
    assert found[-1] < found[0]
    assert len(ran) == 4 * 14 * 3
    assert list(model.state_dict()) == keys
    plan.swap_out()
    assert all(type(m) is nn.Linear for n, m in model.named_modules() if n in names)


def test_the_layers_of_a_transformers_gpt2_are_planned_though_their_weights_lie_the_other_way() -> None:
    """GPT-2 in transformers multiplies in Conv1D modules; their numbers: tests/export/test_transposed.py."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(PlanError, match=r"no linear layer.*expected transformer.h.0.attn.c_attn"):
        swap_in(model, {"transformer.h.0.ln_1": same("fp8")}, choose=reference_only)
    with pytest.raises(ModelError, match="no linear layer"):
        start(model.transformer.wte, "fp8")
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert list(start(model, "fp8").layers) == [*(f"transformer.h.0.{name}" for name in layers), "lm_head"]
    found = losses(model, lambda tokens: model(input_ids=tokens, labels=tokens).loss)
    assert found[-1] < found[0]


def test_a_block_in_a_list_of_modules_is_found_by_its_full_name() -> None:
    model = nn.ModuleDict({"trunk": nn.ModuleList([Block(), Block()])})
    assert "trunk.1.down" in start(model, "fp8").layers


def test_the_projection_that_attention_reads_itself_is_refused() -> None:
    attention = nn.MultiheadAttention(16, 2)
    with pytest.raises(PlanError, match="never calls it"):
        swap_in(attention, "fp8", choose=reference_only)
    assert type(attention.out_proj).__name__ == "NonDynamicallyQuantizableLinear"
