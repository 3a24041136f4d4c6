"""The proof sees what really ran: it passes a plan that tells the truth and stops one that lies."""

import dataclasses
from typing import Any

import pytest
import torch
from adapters import adapted_model
from torch import Tensor

from scrimp.config import Adapter, Architecture, Config, TrainConfig, resolve
from scrimp.data import Batch
from scrimp.errors import TrainingError
from scrimp.formats import QuantizedTensor
from scrimp.gemm import BackendChooser, observing, reference_only
from scrimp.gemm.backends import ReferenceBackend
from scrimp.gemm.problem import Use
from scrimp.models.initialise import initialise
from scrimp.planner import Figures, Plan, build_plan
from scrimp.planner.memory.placement import Placement
from scrimp.precision import GEMMS
from scrimp.runtime import Executable, StepCount, prove, realise

ARCHITECTURE = Architecture(
    family="qwen2",
    vocab_size=64,
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    ffn_width=64,
    context=256,
    qkv_bias=True,
    tied_embeddings=True,
)


def realised(
    precision: str,
    parameters: str,
    architecture: Architecture,
    choose: BackendChooser = reference_only,
    *,
    loss_chunk: int = 0,
) -> tuple[Plan, Executable]:
    config = Config(precision=precision, train=TrainConfig(parameters=parameters))
    resolution = resolve(config, architecture, device_type="cpu")
    plan = build_plan(
        resolution.config,
        architecture,
        device_name="test CPU",
        device_is_host=True,
        torch_version="2.13.0",
        reasons={},
        placement=Placement.resident(architecture.num_layers),
        why="everything resident",
        predicted=Figures(),
    )
    executable = realise(
        plan,
        architecture,
        lambda model: initialise(model, 0),
        device=torch.device("cpu"),
        parameters=parameters,
        compute=config.precision_rules.compute,
        loss_chunk=loss_chunk,
        choose=choose,
    )
    return plan, executable


FORMATS = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")]
QUANTIZED = [
    (precision, parameters)
    for parameters in ("fp32", "bf16")
    for precision in (
        "fp8",
        "nvfp4",
        "mxfp4",
        "fp4,*.wgrad=bf16,blocks.0.*=bf16",
        "mxfp8/fp8_row/fp8_tensor,head=fp8,*.mlp.down.saved=recompute,*.gate_up.saved=bf16",
        "fp4,*.mlp.down.saved=fp8,*.qkv.saved=nvfp4",
        "bf16,*.saved=fp8",
    )
]
UNTIED = dataclasses.replace(ARCHITECTURE, family="llama", qkv_bias=False, tied_embeddings=False)


@pytest.mark.parametrize("architecture", [ARCHITECTURE, UNTIED], ids=["tied-bias", "untied"])
@pytest.mark.parametrize(("precision", "parameters"), FORMATS + QUANTIZED)
@pytest.mark.every(9)
def test_a_true_plan_passes_and_leaves_no_trace(
    precision: str, parameters: str, architecture: Architecture
) -> None:
    plan, executable = realised(precision, parameters, architecture)
    before = {name: p.clone() for name, p in executable.model.named_parameters()}
    state = torch.get_rng_state()
    prove(executable, plan)
    assert torch.equal(state, torch.get_rng_state())
    for name, parameter in executable.model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize(("precision", "parameters"), FORMATS)
def test_a_plan_that_lies_about_one_gemm_is_stopped(precision: str, parameters: str) -> None:
    plan, executable = realised(precision, parameters, ARCHITECTURE)
    other = {"fp32": "bf16", "bf16": "fp32"}[precision]
    choice = dataclasses.replace(plan.gemms["blocks.1.mlp.down"], wgrad=other)
    lying = dataclasses.replace(plan, gemms=plan.gemms | {"blocks.1.mlp.down": choice})
    with pytest.raises(TrainingError, match=f"wgrad in {other}"):
        prove(executable, lying)


def test_quantized_gemms_in_fp32_working_format_are_held_to_its_rounding() -> None:
    plan, executable = realised("fp32,*.mlp.*=nvfp4,head=fp8", "fp32", UNTIED)
    prove(executable, plan)
    plan, executable = realised("fp32,*.mlp.*=fp8", "fp32", UNTIED, lying(Jittery(2.0**-11)))
    with pytest.raises(TrainingError, match="did not run in fp8"):
        prove(executable, plan)


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("layer", ["blocks.1.mlp.down", "head"])
@pytest.mark.parametrize("base", ["fp8,head=fp8", "fp4,*.wgrad=bf16,head=fp8"])
@pytest.mark.every(5)
def test_a_plan_that_lies_about_one_recipe_is_stopped(base: str, layer: str, gemm: str) -> None:
    plan, executable = realised(base, "fp32", UNTIED)
    choice = dataclasses.replace(plan.gemms[layer], **{gemm: "mxfp8"})
    with pytest.raises(TrainingError, match=f"{layer}.{gemm} in mxfp8"):
        prove(executable, dataclasses.replace(plan, gemms=plan.gemms | {layer: choice}))


def test_a_model_that_was_never_planned_is_stopped() -> None:
    plan, _ = realised("fp8", "fp32", ARCHITECTURE)
    _, plain = realised("bf16", "fp32", ARCHITECTURE)
    with pytest.raises(TrainingError, match="are not those of the plan"):
        prove(plain, plan)


# ---- back ends that lie


class Unquantized(ReferenceBackend):
    """Says that it rounds, and multiplies operands as they are."""

    def prepare(self, x: Tensor, use: Use) -> Any:
        return super().prepare(x, dataclasses.replace(use, operand=None))

    def prepare_and_store(self, x: Tensor, use: Use, saved: Use) -> tuple[Any, QuantizedTensor]:
        return self.prepare(x, use), self.store(x, saved)


class OneOperand(Unquantized):
    """Rounds the weight and what is saved alone."""

    def prepare(self, x: Tensor, use: Use) -> Any:
        is_weight = x.shape[0] % 128 != 0
        return ReferenceBackend.prepare(self, x, use) if is_weight else super().prepare(x, use)


class OtherFormat(ReferenceBackend):
    """Rounds to the format of another recipe."""

    def prepare(self, x: Tensor, use: Use) -> Any:
        if use.operand is None:
            return super().prepare(x, use)
        operand = dataclasses.replace(
            use.operand, element="e5m2" if use.operand.element == "e4m3" else "e4m3"
        )
        return super().prepare(x, dataclasses.replace(use, operand=operand))


class WrongScale(ReferenceBackend):
    """The first rows come out twice as large."""

    def prepare(self, x: Tensor, use: Use) -> Any:
        if use.operand is not None:
            x = x.clone()
            x[:4] *= 2
        return super().prepare(x, use)


class WrongCodes(ReferenceBackend):
    """Loses a scale of what it saves for the backward pass."""

    def store(self, x: Tensor, use: Use) -> QuantizedTensor:
        codes = super().store(x, use)
        scales = codes.scales.clone()
        scales.view(-1)[: scales.numel() // 4] = 0
        return codes.with_tensors(codes.payload, scales, codes.tensor_scale)


class OtherAxis(ReferenceBackend):
    """Rounds in groups along the wrong axis."""

    def prepare(self, x: Tensor, use: Use) -> Any:
        return super().prepare(x, dataclasses.replace(use, axis=-3 - use.axis))


class NoNoise(ReferenceBackend):
    """Takes the same noise in every layer and step."""

    def prepare(self, x: Tensor, use: Use) -> Any:
        return super().prepare(x, dataclasses.replace(use, noise=dataclasses.replace(use.noise, key=1)))


class Jittery(ReferenceBackend):
    """Sums worse than its format allows."""

    def __init__(self, relative: float) -> None:
        self._relative = relative

    def multiply(self, gemm: str, a: Any, b: Any, out: torch.dtype) -> Tensor:
        y = super().multiply(gemm, a, b, out)
        sign = torch.ones_like(y)
        sign[::2] = -1
        return y * (1 + self._relative * sign)


class NotANumber(ReferenceBackend):
    """One overflow."""

    def multiply(self, gemm: str, a: Any, b: Any, out: torch.dtype) -> Tensor:
        y = super().multiply(gemm, a, b, out)
        y.view(-1)[3] = float("nan")
        return y


def lying(backend: ReferenceBackend, only: str = "") -> BackendChooser:
    """The back end for one GEMM, or for all that are quantized."""

    def choose(recipe: str, gemm: str, *site: object) -> ReferenceBackend:
        return backend if recipe not in ("bf16", "fp32") and only in ("", gemm) else ReferenceBackend()

    return choose


LIES = [
    (Unquantized(), "fp8"),
    (Unquantized(), "mxfp8"),
    (OneOperand(), "fp4"),
    (OtherFormat(), "fp8"),
    (WrongScale(), "nvfp4"),
    (OtherAxis(), "fp8"),
    (NoNoise(), "mxfp4"),
    (Jittery(0.02), "fp8"),
    (NotANumber(), "fp8_tensor"),
]


LIED_GEMMS = [
    (backend, recipe, gemm)
    for backend, recipe in LIES
    for gemm in GEMMS
    # Nothing is rounded stochastically in the forward pass.
    if not (isinstance(backend, NoNoise) and gemm == "fprop")
]


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("backend", "recipe", "gemm"), LIED_GEMMS, ids=lambda x: x if isinstance(x, str) else type(x).__name__
)
@pytest.mark.every(23)
def test_a_back_end_that_does_not_do_what_it_says_is_stopped(
    backend: ReferenceBackend, recipe: str, gemm: str, parameters: str
) -> None:
    plan, executable = realised(recipe, parameters, UNTIED, lying(backend, gemm))
    with pytest.raises(TrainingError, match=f"{gemm} did not run in {recipe} on the reference back end"):
        prove(executable, plan)


@pytest.mark.parametrize("precision", ["fp8", "nvfp4", "fp4,*.saved=fp8"])
def test_codes_that_were_saved_wrongly_are_seen_in_wgrad(precision: str) -> None:
    plan, executable = realised(precision, "fp32", UNTIED, lying(WrongCodes()))
    with pytest.raises(TrainingError, match="wgrad did not run in"):
        prove(executable, plan)


def test_a_lie_about_a_single_saved_format_is_seen() -> None:
    """The layers whose backward pass comes first tell the truth."""
    plan, executable = realised("fp8,blocks.0.mlp.down.saved=mxfp8", "fp32", UNTIED, lying(WrongMx()))
    with pytest.raises(TrainingError, match=r"blocks.0.mlp.down.wgrad did not run in fp8"):
        prove(executable, plan)


class WrongMx(WrongCodes):
    """Loses scales of MX codes alone."""

    def store(self, x: Tensor, use: Use) -> QuantizedTensor:
        assert use.operand is not None
        return super().store(x, use) if use.operand.scaling == "mx" else ReferenceBackend.store(self, x, use)


# ---- the first step


def step(executable: Executable, micro_batches: int = 1) -> StepCount:
    """What is counted in some passes over 96 tokens each."""
    count = StepCount()
    tokens = (torch.arange(96) % 64).unsqueeze(0)
    with observing(count):
        for _ in range(micro_batches):
            executable.loss(Batch.of(tokens, tokens)).total.backward()
    return count


STEPS = ["fp8", "nvfp4,head=fp8", "fp4,*.wgrad=bf16,blocks.0.*=bf16,*.mlp.down.saved=recompute"]


@pytest.mark.parametrize("precision", STEPS)
def test_a_true_step_is_counted_as_the_plan_says(precision: str) -> None:
    plan, executable = realised(precision, "fp32", UNTIED, loss_chunk=32)
    step(executable, 2).check(plan, "bf16", executable.model.spec, micro_batches=2, head_passes=6)


@pytest.mark.parametrize("precision", STEPS)
def test_a_missing_or_an_extra_gemm_of_a_step_is_named(precision: str) -> None:
    plan, executable = realised(precision, "fp32", UNTIED, loss_chunk=32)
    for more, word in ((-1, "fewer"), (1, "blocks.1.attention.out.dgrad in")):
        count = step(executable)
        recipe = plan.gemms["blocks.1.attention.out"].dgrad
        count.counts["blocks.1.attention.out", "dgrad", recipe] += more
        with pytest.raises(
            TrainingError, match="of the first step that ran are not those of the plan"
        ) as caught:
            count.check(plan, "bf16", executable.model.spec, micro_batches=1, head_passes=3)
        got = str(caught.value).partition("expected")[0]
        assert word in got


def test_a_step_in_another_recipe_or_cut_otherwise_is_stopped() -> None:
    plan, executable = realised("fp8,head=fp8", "fp32", UNTIED, loss_chunk=32)
    count = step(executable)
    choice = dataclasses.replace(plan.gemms["head"], wgrad="mxfp8")
    with pytest.raises(TrainingError, match=r"3 head\.wgrad in mxfp8"):
        count.check(
            dataclasses.replace(plan, gemms=plan.gemms | {"head": choice}),
            "bf16",
            executable.model.spec,
            micro_batches=1,
            head_passes=3,
        )
    with pytest.raises(TrainingError, match="head"):
        count.check(plan, "bf16", executable.model.spec, micro_batches=1, head_passes=4)
    with pytest.raises(TrainingError, match=r"blocks\.0"):
        count.check(plan, "bf16", executable.model.spec, micro_batches=2, head_passes=3)


ADAPTED = {
    targets: dataclasses.replace(UNTIED, adapter=Adapter(4, 8.0, targets))
    for targets in ("all", "mlp.gate_up,mlp.down")
}


def with_adapters(precision: str, targets: str, parameters: str = "bf16") -> tuple[Plan, Executable]:
    """A model with adapters on the weights of a base."""
    plan, executable = realised(precision, parameters, ADAPTED[targets], loss_chunk=32)
    values = dict(adapted_model(ADAPTED[targets]).named_parameters())
    with torch.no_grad():
        for name, parameter in executable.model.named_parameters():
            parameter.copy_(values[name])
    return plan, executable


@pytest.mark.parametrize("targets", ADAPTED)
@pytest.mark.parametrize("precision", ["bf16", "fp8", "nvfp4,head=fp8,blocks.0.*=bf16"])
@pytest.mark.every(4)
def test_beside_adapters_frozen_weights_have_no_wgrad(precision: str, targets: str) -> None:
    plan, executable = with_adapters(precision, targets)
    prove(executable, plan)
    step(executable, 2).check(plan, "bf16", executable.model.spec, micro_batches=2, head_passes=6)
    assert all(one.grad is None for one in executable.model.of_base().values())


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_weight_that_trains_beside_adapters_is_found(precision: str) -> None:
    plan, executable = with_adapters(precision, "all")
    executable.model.of_base()["blocks.1.mlp.down.weight"].requires_grad_(True)
    with pytest.raises(TrainingError, match="that ran are not those of the plan") as caught:
        prove(executable, plan)
    found = "1 plain in bf16" if precision == "bf16" else "1 blocks.1.mlp.down.wgrad in fp8"
    assert found in str(caught.value)


def test_a_short_context_is_probed_by_several_rows() -> None:
    short = dataclasses.replace(UNTIED, context=48)
    plan, executable = realised("fp8", "fp32", short)
    tokens: list[int] = []
    with observing(lambda execution: tokens.append(execution.a.shape[0])):
        prove(executable, plan)
    assert set(tokens) == {128}


def test_a_gemm_of_zeros_does_not_vouch_for_the_others_of_its_kind() -> None:
    plan, executable = realised("fp8", "fp32", UNTIED, lying(Unquantized(), "fprop"))
    with torch.no_grad():
        executable.model.blocks[0].attention.qkv.weight.zero_()
    with pytest.raises(TrainingError, match="fprop did not run in fp8"):
        prove(executable, plan)
