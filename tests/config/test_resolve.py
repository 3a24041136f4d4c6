"""Resolving leaves no choice open, changes nothing that was given, and never yields a contradiction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.config import (
    MAY_CHANGE_ON_RESUME,
    Architecture,
    Config,
    check_values,
    differences,
    flatten,
    leaves,
    load_config,
    may_change,
    replace_values,
    resolve,
    to_toml,
)
from scrimp.config.optimizers import facts_of
from scrimp.errors import ConfigError


def architecture(*, width: int = 64, layers: int = 2, vocab: int = 512, context: int = 1024) -> Architecture:
    return Architecture(
        family="llama",
        vocab_size=vocab,
        num_layers=layers,
        width=width,
        num_heads=4,
        num_kv_heads=2,
        head_size=width // 4,
        ffn_width=2 * width,
        context=context,
        tied_embeddings=True,
    )


SMALL = architecture()
# Sizes between the steps of the tables: 3M, 20M, 100M, 500M and 8B parameters.
BY_SIZE = [
    architecture(width=192, layers=8, vocab=4096),
    architecture(width=384, layers=10, vocab=8192, context=2048),
    architecture(width=768, layers=11, vocab=16_384, context=4096),
    architecture(width=1024, layers=36, vocab=32_000, context=4096),
    architecture(width=4096, layers=40, vocab=128_256, context=8192),
]


def decided(given: dict[str, object], model: Architecture = SMALL, device_type: str = "cpu") -> Config:
    return resolve(replace_values(Config(), given), model, device_type=device_type).config


def refusal(given: dict[str, object], model: Architecture = SMALL) -> str:
    with pytest.raises(ConfigError) as caught:
        decided(given, model)
    return str(caught.value)


def optional(values: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.none() | values


GIVEN = st.fixed_dictionaries(
    {
        "train.sequence": optional(st.sampled_from([1, 64, 100, 256, 1000, 2048])),
        "train.batch_tokens": optional(st.integers(1, 3000) | st.sampled_from([4096, 65_536, 102_400])),
        "train.micro_batch": optional(st.integers(1, 20)),
        "train.steps": st.integers(1, 100_000),
        "checkpoint.keep_every": st.sampled_from([0, 1, 7, 500, 1000]),
        "optimizer.lr": optional(st.just(0.01)),
        "schedule.warmup_steps": optional(st.integers(0, 50)),
        "train.loss_chunk": optional(st.integers(0, 100)),
        "checkpoint.every": optional(st.integers(0, 100)),
        "train.parameters": st.sampled_from(["auto", "fp32", "bf16"]),
        "optimizer.master_weights": st.sampled_from([None, True, False]),
        "precision": st.sampled_from(
            ["auto", "fp32", "bf16", "fp8", "*.wgrad=bf16", "auto,head=fp8", "fp32,*=nvfp4", "fp4/fp8/bf16"]
        ),
    }
)


@examples(400)
@given(GIVEN, st.sampled_from([SMALL, *BY_SIZE]), st.sampled_from(["cpu", "cuda"]))
def test_the_result_is_complete_and_consistent_or_refused(
    given_values: dict[str, object], model: Architecture, device_type: str
) -> None:
    config = replace_values(Config(), given_values)
    try:
        result = resolve(config, model, device_type=device_type)
    except ConfigError:
        event("refused")
        return  # which contradictions are refused: test_contradictions_are_named
    values = flatten(result.config)
    # Of `model` and `budget` what stays open means none, and a rank of optimizers without projectors.
    sections = ("train.", "optimizer.", "schedule.", "evaluation.", "checkpoint.")
    open_keys = [key for key in values if key.startswith(sections) and values[key] in (None, "auto")]
    assert open_keys == ["optimizer.rank"] * (not facts_of(result.config.optimizer.name).low_rank)
    assert result.config.precision_rules.base is not None
    # What was given stays, and what was decided has a reason.
    for key, (before, _) in differences(config, result.config).items():
        is_open = before in (None, "auto") or (key == "precision" and config.precision_rules.base is None)
        assert is_open
        assert result.reasons[key]
    assert set(result.reasons) == set(differences(config, result.config))
    train = result.config.train
    assert 1 <= train.sequence <= model.context
    assert train.batch_tokens % train.sequence == 0
    assert (train.batch_tokens // train.sequence) % train.micro_batch == 0
    assert result.config.schedule.warmup_steps <= train.steps
    assert not (train.parameters == "fp32" and result.config.optimizer.master_weights)
    assert not (train.parameters == "bf16" and result.config.precision.split(",")[0] == "fp32")
    checkpoint = result.config.checkpoint
    assert not checkpoint.keep_every or checkpoint.keep_every % checkpoint.every == 0
    check_values(result.config)


@examples(30)
@given(st.sampled_from([SMALL, *BY_SIZE]), st.sampled_from(["cpu", "cuda"]), st.integers(1, 10_000))
def test_a_saved_resolution_resolves_to_itself(
    tmp_path_factory: pytest.TempPathFactory, model: Architecture, device_type: str, steps: int
) -> None:
    once = resolve(replace_values(Config(), {"train.steps": steps}), model, device_type=device_type)
    file = tmp_path_factory.mktemp("run") / "config.toml"
    file.write_text(to_toml(once.config, once.reasons))
    again = resolve(load_config(file), model, device_type=device_type)
    assert again.config == once.config
    assert again.reasons == {}


@pytest.mark.parametrize(
    ("model", "sequence", "batch_tokens"),
    zip(BY_SIZE, [256, 512, 1024, 2048, 2048], [4096, 16_384, 65_536, 262_144, 524_288], strict=True),
)
def test_sequence_and_batch_follow_the_size_of_the_model(model, sequence, batch_tokens) -> None:
    train = decided({}, model).train
    assert (train.sequence, train.batch_tokens) == (sequence, batch_tokens)


def test_sequence_stays_within_the_context() -> None:
    assert decided({}, architecture(context=100)).train.sequence == 100
    assert decided({}, architecture(context=100)).train.batch_tokens % 100 == 0


@pytest.mark.parametrize(
    ("given_values", "sequence", "batch_tokens", "micro_batch"),
    [
        ({"train.batch_tokens": 1000}, 250, 1000, 4),
        ({"train.batch_tokens": 64}, 64, 64, 1),
        ({"train.sequence": 1000}, 1000, 4000, 4),
        ({"train.sequence": 300, "train.micro_batch": 4}, 300, 3600, 4),
        ({"train.micro_batch": 3}, 256, 3840, 3),
        ({"train.micro_batch": 3, "train.batch_tokens": 600}, 200, 600, 3),
        ({"train.micro_batch": 64}, 256, 16_384, 64),
        ({"train.sequence": 1, "train.batch_tokens": 4099}, 1, 4099, 1),
        ({"train.sequence": 1024, "train.batch_tokens": 8192}, 1024, 8192, 4),
        ({"train.sequence": 256, "train.batch_tokens": 17 * 256}, 256, 17 * 256, 1),
    ],
)
def test_some_sizes_given_the_others_fit(given_values, sequence, batch_tokens, micro_batch) -> None:
    train = decided(given_values).train
    assert (train.sequence, train.batch_tokens, train.micro_batch) == (sequence, batch_tokens, micro_batch)


def test_micro_batch_is_larger_on_cuda() -> None:
    model = BY_SIZE[2]
    assert decided({}, model, "cpu").train.micro_batch * 1024 == 4096
    assert decided({}, model, "cuda").train.micro_batch * 1024 == 16_384


def test_schedule_falls_with_the_width_and_is_a_tenth_from_weights() -> None:
    assert decided({}, SMALL).optimizer.lr == 3e-3
    assert decided({}, BY_SIZE[3]).optimizer.lr == pytest.approx(0.8 / 1024, rel=1e-2)
    fine = decided({"model.weights": Path("folder")}, BY_SIZE[3]).optimizer.lr
    assert fine == pytest.approx(0.08 / 1024, rel=1e-2)


@pytest.mark.parametrize(
    ("steps", "warmup", "evaluate", "checkpoint"),
    [(1, 1, 1, 50), (300, 15, 30, 50), (10_000, 500, 1000, 1000), (10**6, 2000, 10**5, 10**5)],
)
def test_intervals_follow_the_length_of_the_run(steps, warmup, evaluate, checkpoint) -> None:
    config = decided({"train.steps": steps})
    found = (config.schedule.warmup_steps, config.evaluation.every, config.checkpoint.every)
    assert found == (warmup, evaluate, checkpoint)


@given(
    steps=st.integers(1, 5_000),
    batch=st.sampled_from([1024, 4096, 16_384]),
    every=st.one_of(st.none(), st.integers(0, 400)),
    tokens=st.one_of(st.none(), st.integers(1, 10**5)),
)
@example(steps=30, batch=4096, every=None, tokens=None)
@example(steps=1, batch=1024, every=None, tokens=None)
def test_evaluations_left_to_scrimp_take_at_most_3_percent_of_the_flops(steps, batch, every, tokens) -> None:
    given_values = {
        "train.steps": steps,
        "train.batch_tokens": batch,
        "evaluation.every": every,
        "evaluation.tokens": tokens,
    }
    config = decided({key: value for key, value in given_values.items() if value is not None})
    train, evaluation = config.train, config.evaluation
    count = len(
        {step for step in range(1, steps + 1) if evaluation.every and step % evaluation.every == 0} | {steps}
    )
    share = count * evaluation.tokens / 3 / (steps * batch)
    if every is None:
        assert 1 <= evaluation.every <= steps
        assert count <= 10
    if tokens is None:
        assert train.sequence <= evaluation.tokens <= 4 * batch
    is_least = (tokens is None and evaluation.tokens == train.sequence) or (every is None and count == 1)
    if (every is None or tokens is None) and not is_least:
        assert share <= 0.03
    if every is None and tokens is None and steps >= 12:
        assert 0.01 < share <= 0.03 or evaluation.tokens == 4 * batch


def test_checkpoints_fall_on_the_steps_that_are_kept_for_good() -> None:
    assert decided({"checkpoint.keep_every": 70}).checkpoint.every == 35
    assert decided({"checkpoint.keep_every": 100}).checkpoint.every == 50


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("model", BY_SIZE)
def test_logits_of_a_chunk_stay_within_the_limit(model: Architecture, device_type: str) -> None:
    limit = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}[device_type]
    train = decided({}, model, device_type).train
    tokens = train.loss_chunk or train.micro_batch * train.sequence
    assert tokens * model.vocab_size * 4 <= limit
    if train.loss_chunk:
        assert train.loss_chunk.bit_count() == 1
        assert 2 * train.loss_chunk * model.vocab_size * 4 > limit


def test_formats_follow_the_device() -> None:
    on_cpu, on_cuda = decided({}), decided({}, device_type="cuda")
    assert (on_cpu.precision, on_cpu.train.parameters, on_cpu.optimizer.master_weights) == (
        "fp32",
        "fp32",
        False,
    )
    assert (on_cuda.precision, on_cuda.train.parameters, on_cuda.optimizer.master_weights) == (
        "bf16",
        "bf16",
        True,
    )
    assert (on_cpu.train.compile, on_cuda.train.compile) == ("off", "on")
    mixed = decided({"train.parameters": "fp32"}, device_type="cuda")
    assert (mixed.precision, mixed.optimizer.master_weights) == ("bf16", False)


@pytest.mark.parametrize(
    ("text", "on_cpu", "on_cuda"),
    [
        ("auto", "fp32", "bf16"),
        ("*.wgrad=bf16", "fp32,*.wgrad=bf16", "bf16,*.wgrad=bf16"),
        ("auto, *.mlp.* = fp8", "fp32,*.mlp.*=fp8", "bf16,*.mlp.*=fp8"),
        ("fp8 , *.wgrad=bf16", "fp8 , *.wgrad=bf16", "fp8 , *.wgrad=bf16"),
    ],
)
def test_rules_without_a_base_get_the_one_of_the_device(text: str, on_cpu: str, on_cuda: str) -> None:
    for device_type, expected in (("cpu", on_cpu), ("cuda", on_cuda)):
        result = resolve(replace_values(Config(), {"precision": text}), SMALL, device_type=device_type)
        assert result.config.precision == expected
        assert ("precision" in result.reasons) == (text != expected)
        assert resolve(result.config, SMALL, device_type=device_type).config == result.config


@pytest.mark.parametrize(
    ("precision", "parameters"),
    [("fp32", "fp32"), ("fp32,*=fp8", "fp32"), ("bf16", "bf16"), ("fp8", "bf16"), ("fp32/fp32/fp8", "bf16")],
)
def test_parameters_have_the_compute_format(precision: str, parameters: str) -> None:
    for device_type in ("cpu", "cuda"):
        config = decided({"precision": precision}, device_type=device_type)
        assert (config.train.parameters, config.optimizer.master_weights) == (
            parameters,
            parameters == "bf16",
        )


@pytest.mark.parametrize(
    ("given_values", "parts"),
    [
        ({"train.sequence": 2048}, ["train.sequence", "context", "1,024", "2,048"]),
        ({"train.sequence": 256, "train.batch_tokens": 1000}, ["train.batch_tokens", "768 or 1,024"]),
        ({"train.sequence": 256, "train.batch_tokens": 100}, ["train.batch_tokens", "to 256"]),
        (
            {"train.sequence": 256, "train.batch_tokens": 1024, "train.micro_batch": 3},
            ["train.micro_batch", "a divisor of 4", "to 2,"],
        ),
        ({"train.batch_tokens": 1000, "train.micro_batch": 3}, ["train.batch_tokens", "999 or 1,002"]),
        ({"train.batch_tokens": 4099}, ["train.batch_tokens", "4,096 or 4,352"]),
        # 16 times a prime: only a sequence of 16 tokens divides it, which nobody means.
        ({"train.batch_tokens": 16 * 1009}, ["train.batch_tokens", "multiple of 256"]),
        ({"train.steps": 10, "schedule.warmup_steps": 11}, ["schedule.warmup_steps", "at most 10"]),
        ({"optimizer.lr": 0.5, "optimizer.weight_decay": 2.0}, ["decays all", "0.5", "below 1"]),
        ({"precision": "fp32", "train.parameters": "bf16"}, ["train.parameters", "precision"]),
        ({"precision": "fp32,*=fp8", "train.parameters": "bf16"}, ["train.parameters", "precision"]),
        ({"train.parameters": "fp32", "optimizer.master_weights": True}, ["optimizer.master_weights"]),
        ({"optimizer.master_weights": True}, ["optimizer.master_weights", "fp32"]),
        ({"checkpoint.keep_every": 70, "checkpoint.every": 50}, ["checkpoint.keep_every", "multiple of 50"]),
        ({"checkpoint.keep_every": 70, "checkpoint.every": 0}, ["checkpoint.keep_every", "above 0"]),
    ],
)
def test_contradictions_are_named(given_values, parts) -> None:
    message = refusal(given_values)
    for part in parts:
        assert part in message


def test_a_micro_batch_beyond_32_bit_positions_is_refused() -> None:
    model = architecture(context=2**24)
    given_values = {"train.sequence": 2**24, "train.micro_batch": 2**12}
    assert "train.micro_batch holds too many tokens" in refusal(given_values, model)


def test_differences_name_what_changed() -> None:
    now = replace_values(Config(), {"train.steps": 5, "device": "cpu", "run.dir": Path("a")})
    assert differences(Config(), now) == {
        "train.steps": (200, 5),
        "device": ("auto", "cpu"),
        "run.dir": (None, Path("a")),
    }
    assert differences(now, now) == {}


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ("bf16,*.wgrad=fp8", " bf16 , *.wgrad = fp8", True),
        ("bf16,*.wgrad=fp8", "*.wgrad=fp8", True),
        ("bf16,*.wgrad=fp8", "auto,*.wgrad=fp8", True),
        ("fp8", "fp8/fp8/fp8", True),
        ("bf16,*.wgrad=fp8", "fp32,*.wgrad=fp8", False),
        ("bf16,*.wgrad=fp8", "bf16", False),
        ("bf16,*.wgrad=fp8", "auto", False),
        ("auto", "fp32", False),
    ],
)
def test_precisions_differ_by_what_they_mean(before: str, now: str, same: bool) -> None:
    saved, given_now = (replace_values(Config(), {"precision": text}) for text in (before, now))
    assert differences(saved, given_now) == ({} if same else {"precision": (before, now)})


def test_keys_that_may_change_on_resume_exist_and_leave_the_experiment_alone() -> None:
    assert set(leaves(Config)) > MAY_CHANGE_ON_RESUME
    decisive = {
        "run.seed",
        "data.source",
        "optimizer.lr",
        "train.batch_tokens",
        "train.sequence",
        "precision",
    }
    assert not decisive & MAY_CHANGE_ON_RESUME


def test_copies_that_train_alone_keep_the_steps_at_which_they_meet() -> None:
    ends_rounds = {"evaluation.every", "checkpoint.every"}
    assert may_change(Config()) == MAY_CHANGE_ON_RESUME
    assert MAY_CHANGE_ON_RESUME - may_change(replace_values(Config(), {"outer.every": 3})) == ends_rounds


def test_resolution_keeps_the_architecture() -> None:
    model = replace(SMALL, vocab_size=1000)
    assert resolve(Config(), model, device_type="cpu").architecture is model


@pytest.mark.parametrize(("name", "scale", "expected"), [("galore", 0.25, 0.012), ("fira", 1e-4, 1.0)])
def test_matrices_of_low_rank_optimizers_move_as_much_as_those_of_adamw(
    name: str, scale: float, expected: float
) -> None:
    config = decided({"optimizer.name": name, "optimizer.low_rank_scale": scale})
    assert config.optimizer.lr == expected
    assert decided({"optimizer.name": "adamw"}).optimizer.lr == 0.003
