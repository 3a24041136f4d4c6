"""Names of other tools are answered with settings that exist; a guess is only made where it is near."""

from pathlib import Path

import pytest

from scrimp.cli.commands import Train
from scrimp.cli.model_commands import Generate
from scrimp.cli.parse import explain, flags_of
from scrimp.config import Config, leaves, load_config, nearest_key, parse_config
from scrimp.config.elsewhere import _ANSWERS, answer_for
from scrimp.errors import ConfigError

KNOWN = leaves(Config)

USUAL = {
    "parallelism.pipeline_parallel_degree": "layout.pp",
    "gradient_accumulation_steps": "train.batch_tokens",
    "deepspeed": "layout.fsdp",
    "parallelism.tensor_parallel_degree": "layout.tp",
    "tp_size": "layout.tp",
    "deepspeed.zero_stage": "layout.zero",
    "per_device_train_batch_size": "train.micro_batch",
    "num_train_epochs": "train.steps",
    "learning_rate": "optimizer.lr",
    "train.optimizer": "optimizer.name",
    "optim": "optimizer.name",
    "max_steps": "train.steps",
    "lr_scheduler_type": "schedule.name",
    "warmup_ratio": "schedule.warmup_steps",
    "max_grad_norm": "optimizer.clip",
    "adam_beta2": "optimizer.beta2",
    "bf16": "precision",
    "gradient_checkpointing": "memory.activations",
    "output_dir": "run.dir",
    "save_steps": "checkpoint.every",
    "eval_steps": "evaluation.every",
    "save_total_limit": "checkpoint.keep_last",
    "base_model": "model.weights",
    "sequence_len": "train.sequence",
    "micro_batch_size": "train.micro_batch",
    "val_set_size": "data.held_out",
    "training.seq_len": "train.sequence",
    "training.local_batch_size": "train.micro_batch",
    "training.dataset": "data.source",
    "lr_scheduler.num_warmup_steps": "schedule.warmup_steps",
    "checkpoint.interval": "checkpoint.every",
    "model.flavor": "model.preset",
    "device_batch_size": "train.micro_batch",
    "total_batch_size": "train.batch_tokens",
    "depth": "model.num_layers",
    "num_iterations": "train.steps",
    "lora_r": "adapter.rank",
    "full_determinism": "train.deterministic",
    "use_deterministic_algorithms": "train.deterministic",
}
NONE = {
    "ema": "keeps no average",
    "training.ema_decay": "keeps no average",
    "wandb": "metrics.jsonl",
    "wandb_project": "metrics.jsonl",
    "report_to": "metrics.jsonl",
    "optim_args": "optimizer.*",
    "lora_dropout": "adapters have no dropout",
    "wandb.project": "metrics.jsonl",
}


def on_the_command_line(name: str) -> ConfigError:
    found = explain(Train, [f"--{name}", "1"], "scrimp train")
    assert found is not None
    return found


def in_a_file(name: str, value: str = "1") -> ConfigError:
    section, _, last = name.rpartition(".")
    with pytest.raises(ConfigError) as refused:
        parse_config(f"[{section}]\n{last} = {value}\n" if section else f"{last} = {value}\n")
    return refused.value


@pytest.mark.parametrize(("name", "key"), USUAL.items())
def test_a_usual_name_is_answered_with_ours(name: str, key: str) -> None:
    option = "--" + key.replace("_", "-")
    for written in (name, name.replace("_", "-")):
        error = on_the_command_line(written)
        assert f"write {option} instead" in (error.do or "")
    error = in_a_file(name)
    section, _, last = key.rpartition(".")
    assert f"`{last} = ...` {f'under [{section}]' if section else 'at the top'}" in (error.do or "")


@pytest.mark.parametrize(("name", "part"), NONE.items())
def test_what_scrimp_lacks_is_said_with_what_to_do(name: str, part: str) -> None:
    for error in (on_the_command_line(name), in_a_file(name)):
        assert "Scrimp has none" in str(error.expected)
        assert part in (error.do or "")
        assert "instead" not in (error.do or "")


def test_resuming_is_answered_with_the_option_in_a_file_too() -> None:
    assert "write --resume instead" in (on_the_command_line("resume_from_checkpoint").do or "")
    assert "scrimp train --run.dir RUN --resume" in (in_a_file("resume_from_checkpoint", "true").do or "")


def test_every_answer_names_a_setting_and_no_name_is_one_of_ours() -> None:
    options = {**flags_of(Train), **flags_of(Generate)}
    last_names = {key.rpartition(".")[2] for key in KNOWN}
    for name, answer in _ANSWERS.items():
        assert answer.key is None or answer.key in options, name
        assert answer.key is not None or answer.note, name
        for known in (name not in KNOWN, name.rpartition(".")[2] not in last_names or "." in name):
            assert known or name in ("optimizer",), name
    # In `memory` the word means where states live; alone and elsewhere it asks for an optimizer.
    assert parse_config('[memory]\noptimizer = "host"')["memory.optimizer"] == "host"


def test_a_command_without_the_setting_is_not_told_of_it() -> None:
    assert answer_for("learning_rate", flags_of(Generate)) is None
    found = explain(Generate, ["run", "--prompt", "a", "--max_new_tokens", "5"], "scrimp generate")
    assert found is not None
    assert found.do == "write --tokens instead"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("train.update", None),
        ("train.weights", "model.weights"),
        ("eval.every", "evaluation.every"),
        ("train.policy", None),
        ("model.start", None),
        ("budget.formats", None),
        ("memroy.optimzer", "memory.optimizer"),
        ("activations", "memory.activations"),
        ("train.zzz", None),
    ],
)
def test_a_guess_is_near_or_there_is_none(wrong: str, right: str | None) -> None:
    assert nearest_key(wrong, KNOWN) == right


def test_an_assignment_without_dashes_is_answered_too(tmp_path: Path) -> None:
    from scrimp.cli import main

    file = tmp_path / "my.toml"
    file.write_text("wandb = true\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        load_config(file)
    assert main(["train", "learning_rate=5"]) == 2
