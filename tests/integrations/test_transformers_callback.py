"""SnipCallback in a real Trainer: what it measures, when it switches, and that it changes nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scrimp.cycle import precision_cycle
from scrimp.errors import CheckpointError, ModelError, PlanError, TrainingError
from scrimp.gemm import LinearPrecision, PlannedLayer, swap_in
from scrimp.gemm.backends import ReferenceBackend
from scrimp.gemm.problem import Use
from scrimp.integrations.recent_batches import RecentBatches
from scrimp.planner.precision import PrecisionProfile
from scrimp.precision import GEMMS

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
transformers = pytest.importorskip("transformers", minversion="5.0")

from scrimp.integrations.transformers import BATCHES_FILE, SnipCallback  # noqa: E402

STEPS, CONTEXT = 8, 16
BLOCK = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Note(transformers.TrainerCallback):  # type: ignore[misc]
    """Notes what passes by."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.recipes: dict[int, set[str]] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        layers = [module for module in kwargs["model"].modules() if hasattr(module, "planned")]
        recipes = {layer.planned.precision.gemm(gemm) for layer in layers for gemm in GEMMS}
        self.recipes[state.global_step] = recipes

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.records.append(dict(kwargs["logs"]))


def llama() -> nn.Module:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        attention_dropout=0.1,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def dataset() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(32, (64, CONTEXT), generator=generator)
    # Some labels are masked, so that micro-batches have different numbers of them.
    masked = rows.where(torch.rand(rows.shape, generator=generator) > 0.3, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, masked, strict=True)]


def trainer(folder: Path, *callbacks: Any, model: nn.Module | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "bf16": True,
        "use_cpu": True,
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
    }
    kind = options.pop("kind", transformers.Trainer)
    more = {name: options.pop(name) for name in ("compute_loss_func",) if name in options}
    arguments = transformers.TrainingArguments(str(folder), **{**settings, **options})
    return kind(model or llama(), arguments, train_dataset=dataset(), callbacks=list(callbacks), **more)


def outcome(run: Any) -> tuple[list[float], list[Tensor]]:
    """Losses and gradient norms by step, and the weights at the end."""
    records = [entry for entry in run.state.log_history if "loss" in entry]
    figures = [value for entry in records for value in (entry["loss"], entry["grad_norm"])]
    return figures, [parameter.detach().clone() for parameter in run.model.parameters()]


def assert_same(one: Any, other: Any) -> None:
    assert outcome(one)[0] == outcome(other)[0]
    assert all(map(torch.equal, outcome(one)[1], outcome(other)[1]))


def planned_names() -> list[str]:
    return [f"model.layers.0.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}" for name in BLOCK]


# -- nothing else changes ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_whose_plan_stays_equal_is_bit_equal_to_one_without_the_callback(tmp_path: Path) -> None:
    bare = llama()
    swap_in(bare, dict.fromkeys(planned_names(), LinearPrecision.of("nvfp4")))
    without = trainer(tmp_path, model=bare)
    without.train()
    snip = SnipCallback(0.75, first=2, every=2, switch_after=1, start="nvfp4", policy="nvfp4")
    with_it = trainer(tmp_path, snip)
    with_it.train()
    assert [entry["step"] for entry in snip.history] == [3, 5, 7]
    assert_same(without, with_it)


@pytest.mark.slow
def test_a_model_without_a_start_is_plain_until_its_first_plan(tmp_path: Path) -> None:
    note, without = Note(), trainer(tmp_path)
    without.train()
    with_it = trainer(tmp_path, SnipCallback(1.0, first=3, switch_after=2), note)
    with_it.train()
    assert outcome(without)[0][:10] == outcome(with_it)[0][:10]
    assert [bool(note.recipes[step]) for step in range(STEPS)] == [False] * 5 + [True] * 3


@pytest.mark.slow
def test_the_hook_is_gone_when_training_ends(tmp_path: Path) -> None:
    snip = SnipCallback(0.5, first=2, switch_after=0)
    run = trainer(tmp_path, snip, max_steps=4)
    run.train()
    assert not run.model._forward_hooks
    assert snip.planned is not None
    snip.planned.swap_out()
    assert not any(module._forward_pre_hooks for module in run.model.modules())


# -- what is measured --------------------------------------------------------------------------


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[PrecisionProfile]:
    """Every profile that is planned from."""
    seen: list[PrecisionProfile] = []

    def look(settings: Any, profile: PrecisionProfile, *args: Any) -> Any:
        seen.append(profile)
        return ask(settings, profile, *args)

    ask = precision_cycle.ask
    monkeypatch.setattr(precision_cycle, "ask", look)
    return seen


class WithoutCounts(transformers.Trainer):  # type: ignore[misc]
    """For models that know no num_items_in_batch: the mean of the micro-batches' means."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


@pytest.mark.parametrize("kind", [transformers.Trainer, WithoutCounts])
@pytest.mark.every(2)
def test_statistics_are_of_the_last_steps_with_their_accumulated_micro_batches(
    tmp_path: Path, profiles: list[PrecisionProfile], kind: type
) -> None:
    # At a learning rate of 0 the weights stay, and the Trainer's own losses are those of the statistics.
    snip = SnipCallback(0.5, first=5, batches=3, switch_after=0)
    model = llama()
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    run = trainer(tmp_path, snip, model=model, kind=kind, learning_rate=0.0, max_steps=6, bf16=False)
    run.train()
    (profile,) = profiles
    assert profile.layers == tuple(planned_names())
    assert (profile.step, profile.gains, profile.tokens) == (5, "ratios", 4 * CONTEXT)
    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    np.testing.assert_allclose([batch.loss for batch in profile.batches], logged[2:5], rtol=1e-4)
    assert len({round(loss, 4) for loss in logged[:5]}) == 5


@pytest.mark.slow
def test_a_plan_that_would_begin_after_the_end_is_not_measured(
    tmp_path: Path, profiles: list[PrecisionProfile]
) -> None:
    snip = SnipCallback(0.5, first=2, every=2, switch_after=1)
    trainer(tmp_path, snip, max_steps=5).train()
    assert [entry["step"] for entry in snip.history] == [3]
    assert len(profiles) == 1


def test_a_run_too_short_for_its_first_plan_is_refused_before_its_first_step(tmp_path: Path) -> None:
    run = trainer(tmp_path, SnipCallback(0.5, first=4, switch_after=2), max_steps=6)
    with pytest.raises(
        PlanError, match=r"end before its first plan.*first 4 and switch_after 2 of 6 updates"
    ):
        run.train()
    assert run.state.global_step == 0


# -- records and checkpoints -------------------------------------------------------------------


@pytest.mark.slow
def test_figures_are_in_the_trainers_records(tmp_path: Path) -> None:
    note, snip = Note(), SnipCallback(0.75, first=2, every=3, switch_after=1)
    run = trainer(tmp_path, note, max_steps=7)
    snip.add_to(run)
    run.train()
    steps = [entry["step"] for entry in run.state.log_history if "snip/fp4_flops" in entry]
    assert steps == [3, 6]
    seen = [record for record in note.records if "snip/fp4_flops" in record]
    assert [record["snip/plan_step"] for record in seen] == [3, 6]
    assert all(record["snip/fp4_flops"] >= 0.75 - 1e-9 for record in seen)
    assert {"snip/loss_divergence", "snip/weight_divergence", "snip/certainty"} <= set(seen[0])
    assert seen[0]["snip/changed_gemms"] == 3 * len(planned_names())


def plans_of(run: Any) -> list[dict[str, Any]]:
    """The callback's record, without how long things took; a resumed Trainer may have another callback."""
    (snip,) = (one for one in run.callback_handler.callbacks if isinstance(one, SnipCallback))
    return [
        {name: value for name, value in entry.items() if not name.endswith("_seconds")}
        for entry in snip.history
    ]


def snip_for_resuming() -> SnipCallback:
    return SnipCallback(0.75, first=3, every=4, batches=3, switch_after=2, start="fp8")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Eight steps, a checkpoint after each; plans are measured after 3, and begin after 5."""
    folder = tmp_path_factory.mktemp("whole")
    run = trainer(folder, snip_for_resuming(), save_strategy="steps", save_steps=1, max_steps=10)
    run.train()
    return run, folder


@pytest.mark.slow
@pytest.mark.parametrize(("step", "restores"), [(2, False), (4, True), (5, False), (6, True)])
def test_a_run_that_is_resumed_anywhere_in_the_cycle_ends_the_same(
    whole_run: tuple[Any, Path], step: int, restores: bool
) -> None:
    whole, folder = whole_run
    again = trainer(
        folder, snip_for_resuming(), max_steps=10, restore_callback_states_from_checkpoint=restores
    )
    checkpoint = folder / f"checkpoint-{step}"
    assert (checkpoint / BATCHES_FILE).exists() == (step in (2, 5, 6))
    again.train(resume_from_checkpoint=str(checkpoint))
    assert_same(whole, again)
    assert plans_of(again) == plans_of(whole)
    assert [entry["step"] for entry in plans_of(again)] == [5, 9]


@pytest.mark.slow
def test_a_checkpoint_without_the_callback_can_be_gone_on_from_with_it(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    snip = SnipCallback(0.5, first=4, switch_after=1)
    run = trainer(tmp_path, snip, max_steps=6, save_strategy="steps", save_steps=2)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [entry["step"] for entry in snip.history] == [5]


def test_kept_batches_are_read_back_as_they_were(tmp_path: Path) -> None:
    recent = RecentBatches(2)
    for step in range(3):
        for part in range(2):
            recent.add({"x": torch.arange(4) + step, "part.of": torch.tensor(part), "flag": True, "no": None})
        assert recent.end_step() == 2
    assert recent.write(tmp_path / "kept") == []
    other = RecentBatches(2)
    other.read(tmp_path / "kept", torch.device("cpu"))
    assert len(other.steps) == 2
    for one, two in zip(recent.steps, other.steps, strict=True):
        for a, b in zip(one, two, strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k] for k in a)
    (tmp_path / "kept").write_bytes((tmp_path / "kept").read_bytes()[:40])
    with pytest.raises(CheckpointError, match="damaged"):
        other.read(tmp_path / "kept", torch.device("cpu"))
    other.read(tmp_path / "missing", torch.device("cpu"))
    assert other.steps == []


def test_arguments_that_no_file_holds_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    recent = RecentBatches(2)
    recent.add({"x": torch.zeros(1), "cache": object()})
    recent.end_step()
    assert recent.write(tmp_path / "kept") == ["cache"]
    assert not (tmp_path / "kept").exists()


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every is out of range"),
        ({"batches": 0}, "batches is out of range"),
        ({"every": 10, "switch_after": 10}, "got 10 updates.*0 to 9"),
        ({"formats": ("fp8", "mxfp8")}, "no candidate has 4 bits"),
        ({"start": "fp9"}, "no such recipe"),
        ({"budget": 75}, "share from 0 to 1"),
        ({"budget": {"step_seconds": 1.0}}, "needs measured times"),
        ({"policy": "best"}, "no such policy"),
        ({"policy": "random:"}, "no such policy"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        SnipCallback(**{"budget": 0.75, **options})


class OwnLoss(transformers.Trainer):  # type: ignore[misc]
    """Calls the model twice for one loss."""

    def compute_loss(self, model: nn.Module, inputs: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss + model(**inputs).loss


@pytest.mark.slow
def test_an_optimizer_of_unknown_rule_is_refused_before_training_and_taken_by_its_gradients(
    tmp_path: Path,
) -> None:
    with pytest.raises(PlanError, match=r'Adafactor.*sensitivity="gradient"'):
        trainer(tmp_path, SnipCallback(0.75, first=2, switch_after=0), optim="adafactor").train()
    snip = SnipCallback(0.75, first=2, switch_after=0, sensitivity="gradient")
    trainer(tmp_path, snip, optim="adafactor", max_steps=3).train()
    assert [entry["step"] for entry in snip.history] == [2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor 0.1"),
        (
            {"compute_loss_func": lambda outputs, labels, **kwargs: outputs["logits"].mean()},
            "returns no loss",
        ),
        ({"kind": OwnLoss}, "more forward passes"),
    ],
)
def test_a_trainer_that_makes_its_own_loss_is_refused_early(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    run = trainer(tmp_path, SnipCallback(0.75, first=2, switch_after=0), **options)
    with pytest.raises(PlanError, match=f"outside the model.*{words}"):
        run.train()
    assert run.state.global_step <= 1


@pytest.mark.slow
def test_a_budget_out_of_reach_stops_the_run_and_says_what_can_be_reached(tmp_path: Path) -> None:
    run = trainer(tmp_path, SnipCallback({"divergence": 0.0}, formats=("nvfp4",), first=2, switch_after=1))
    with pytest.raises(PlanError, match="predicted divergence"):
        run.train()


# -- the proof of a plan -----------------------------------------------------------------------


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.every(4)
def test_a_layer_that_lies_after_a_switch_stops_the_trainer_by_name(
    gemm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar, honest = "model.layers.0.mlp.down_proj", PlannedLayer.backend

    class KeepsBf16(ReferenceBackend):
        def prepare(self, x: Tensor, use: Use) -> Any:
            return super().prepare(x, dataclasses.replace(use, operand=None))

        def prepare_and_store(self, x: Tensor, use: Use, saved: Use) -> tuple[Any, Any]:
            return self.prepare(x, use), self.store(x, saved)

    def backend(self: PlannedLayer, recipe: str, asked: str, *site: Any) -> Any:
        is_lie = (self.name, recipe, asked) == (liar, "nvfp4", gemm)
        return KeepsBf16() if is_lie else honest(self, recipe, asked, *site)

    monkeypatch.setattr(PlannedLayer, "backend", backend)
    snip = SnipCallback(1.0, every=4, first=2, batches=1, switch_after=1, start="fp8")
    run = trainer(tmp_path, snip)
    with pytest.raises(TrainingError, match=rf"{liar}\.{gemm} did not run in nvfp4"):
        run.train()
    assert run.state.global_step == 3  # the first step by the plan


@pytest.mark.slow
def test_the_trainers_records_say_how_many_gemms_were_proven(tmp_path: Path) -> None:
    snip = SnipCallback(1.0, every=8, first=2, batches=1, switch_after=1)
    run = trainer(tmp_path, snip)
    run.train()
    found = {
        entry["step"]: entry["snip/proven_gemms"]
        for entry in run.state.log_history
        if "snip/proven_gemms" in entry
    }
    assert found == {4: float(len(BLOCK) * len(GEMMS))}


class Patches(transformers.TrainerCallback):
    """Replaces the forward of a planned layer, as another library would."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        down = kwargs["model"].model.layers[0].mlp.down_proj
        down.forward = lambda x: nn.functional.linear(x, down.weight)


@pytest.mark.slow
def test_layers_that_run_nothing_of_their_plan_are_named_and_not_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snip = SnipCallback(0.0, every=8, first=2, batches=1, switch_after=1, start="fp8")
    refusal = r"do not run their planned GEMMs.*layers\.0\.mlp\.down_proj \(its forward is replaced"
    with caplog.at_level("WARNING", logger="scrimp"), pytest.raises(ModelError, match=refusal):
        trainer(tmp_path, snip, Patches(), max_steps=4).train()
    assert "ran none of their planned GEMMs: model.layers.0.mlp.down_proj" in caplog.text
