"""Degrees of a layout against the number of ranks: filled up, or refused with the nearest number."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.config import Config, decided_anew, for_ranks, preset, ranks_of, replace_values, resolve
from scrimp.config.resolved import ResolvedConfig
from scrimp.errors import ConfigError


def resolved(ranks: int, **settings: Any) -> ResolvedConfig:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    config = replace_values(Config(), keys)
    return resolve(config, preset("llama-3m"), device_type="cpu", ranks=ranks).config


@pytest.mark.parametrize(
    ("ranks", "settings", "degrees"),
    [
        (1, {}, (1, 1)),
        (4, {}, (1, 4)),
        (4, {"layout__dp": 2}, (2, 2)),
        (4, {"layout__fsdp": 1}, (4, 1)),
        (6, {"layout__dp": 3, "layout__fsdp": 2}, (3, 2)),
    ],
)
def test_what_is_left_out_is_filled_up(ranks: int, settings: Any, degrees: tuple[int, int]) -> None:
    layout = resolved(ranks, train__batch_tokens=256 * 12, train__sequence=256, **settings).layout
    assert (layout.dp, layout.fsdp) == degrees


@pytest.mark.parametrize(
    ("settings", "degrees"),
    [
        ({"layout__tp": 2}, (1, 4, 2)),
        ({"layout__tp": 2, "layout__dp": 2}, (2, 2, 2)),
        ({"layout__tp": 2, "layout__fsdp": 1}, (4, 1, 2)),
    ],
)
def test_ranks_that_cut_layers_leave_the_others_to_be_filled_up(settings: Any, degrees: Any) -> None:
    config = resolved(8, **settings)
    assert (config.layout.dp, config.layout.fsdp, config.layout.tp) == degrees
    assert (config.layout.ranks, config.layout.data_ranks) == (8, 8 // config.layout.tp)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"layout__tp": 4}, "layout.tp does not divide attention heads - got 6 on 4 ranks"),
        ({"layout__tp": 2, "train__sequence": 31}, "tokens of a sequence"),
        (
            {"layout__tp": 2, "precision": "snip", "budget__speedup": 1.2},
            "budget.speedup 1.2 is not carried out",
        ),
        (
            {"layout__tp": 2, "precision": "snip", "budget__saved_bytes": 0.5},
            "budget.saved_bytes 0.5 is not carried out",
        ),
        ({"layout__tp": 2, "optimizer__moments": "8bit"}, "optimizer.moments 8bit"),
        (
            {"layout__tp": 2, "precision": "bf16", "optimizer__master_weights": False},
            "moments bf16|master_weights",
        ),
        ({"layout__tp": 2, "budget__device_memory": 2**30}, "budget.device_memory"),
    ],
)
def test_what_ranks_cannot_cut_is_refused_by_name(settings: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolved(settings["layout__tp"], **settings)


def test_key_heads_that_ranks_cannot_share_are_refused_by_name() -> None:
    config = replace_values(Config(), {"layout.tp": 2})
    shared = dataclasses.replace(preset("llama-3m"), num_kv_heads=1)
    with pytest.raises(ConfigError, match=r"layout.tp does not divide key heads - got 1 on 2 ranks"):
        resolve(config, shared, device_type="cpu", ranks=2)


@given(
    ranks=st.integers(1, 64),
    dp=st.none() | st.integers(1, 64),
    fsdp=st.none() | st.integers(1, 64),
)
def test_a_product_is_all_ranks_or_is_refused(ranks: int, dp: int | None, fsdp: int | None) -> None:
    degrees = [degree for degree in (dp, fsdp) if degree is not None]
    product = (dp or 1) * (fsdp or 1)
    possible = product == ranks if len(degrees) == 2 else ranks % product == 0
    if possible:
        layout = resolved(ranks, layout__dp=dp, layout__fsdp=fsdp).layout
        assert layout.dp * layout.fsdp == ranks
        return
    with pytest.raises(ConfigError, match="scrimp launch --ranks"):
        resolved(ranks, layout__dp=dp, layout__fsdp=fsdp)


def test_the_nearest_number_of_ranks_is_said() -> None:
    with pytest.raises(ConfigError, match=r"expected a multiple of 3 ranks .*--ranks 6"):
        resolved(5, layout__dp=3)
    with pytest.raises(ConfigError, match=r"expected 6 ranks"):
        resolved(4, layout__dp=3, layout__fsdp=2)


def test_each_rank_reads_its_share_of_a_batch() -> None:
    config = resolved(4, train__sequence=64, train__batch_tokens=64 * 24)
    assert (config.rank_sequences, config.train.micro_batch, config.micro_batches) == (6, 6, 1)
    with pytest.raises(ConfigError, match="cannot be shared by the ranks"):
        resolved(5, train__sequence=64, train__batch_tokens=64 * 24)
    with pytest.raises(ConfigError, match=r"4 of 6 sequences"):
        resolved(4, train__sequence=64, train__batch_tokens=64 * 24, train__micro_batch=4)


def test_a_batch_left_to_scrimp_can_be_shared() -> None:
    for ranks in range(1, 40):
        assert resolved(ranks).train.sequences_per_step % ranks == 0


@pytest.mark.parametrize(
    ("key", "value", "beside"),
    [
        ("precision", "snip", {"optimizer.name": "muon"}),
        ("memory.weights", "host", {}),
        ("memory.gradients", "1", {}),
        ("memory.update", "cpu", {}),
    ],
)
def test_what_ranks_do_not_carry_out_is_refused_by_name(key: str, value: str, beside: dict[str, Any]) -> None:
    config = replace_values(Config(), {key: value, **beside})
    with pytest.raises(ConfigError, match=rf"{key} .*not carried out on several ranks"):
        resolve(config, preset("llama-3m"), device_type="cpu", ranks=2)


def test_copies_that_train_alone_are_one_a_rank_unless_said_otherwise() -> None:
    alone = replace_values(Config(), {"outer.every": 8})

    def layout(ranks: int, device_type: str = "cpu", **more: object) -> tuple[int, int]:
        config = replace_values(alone, {key.replace("__", "."): value for key, value in more.items()})
        found = resolve(config, preset("llama-3m"), device_type=device_type, ranks=ranks).config.layout
        return found.dp, found.fsdp

    assert layout(4) == (4, 1)
    assert layout(4, layout__fsdp=2) == (2, 2)
    assert layout(1) == (1, 1)
    with pytest.raises(ConfigError, match="there is one copy"):
        layout(4, layout__fsdp=4)
    with pytest.raises(ConfigError, match=r"outer\.overlap on CUDA is not carried out"):
        layout(4, "cuda", outer__overlap=True)


def test_a_saved_layout_is_open_again_on_another_number_of_ranks() -> None:
    saved = resolved(4, layout__dp=2, layout__zero=2)
    assert for_ranks(saved, 4, ()) == saved
    opened = for_ranks(saved, 6, ())
    assert (opened.layout.dp, opened.layout.fsdp, opened.layout.zero) == (None, None, 2)
    given_too = for_ranks(saved, 6, {"layout.dp"})
    assert (given_too.layout.dp, given_too.layout.fsdp, ranks_of(given_too.layout)) == (2, None, 2)


def test_a_saved_micro_batch_is_open_again_where_it_no_longer_divides() -> None:
    saved = resolved(1, train__sequence=64, train__batch_tokens=64 * 16)
    assert saved.train.micro_batch == 16
    assert for_ranks(saved, 1, ()) == saved
    two = for_ranks(saved, 2, ())
    assert (two.train.micro_batch, two.train.loss_chunk) == (None, None)
    assert resolve(two, preset("llama-3m"), device_type="cpu", ranks=2).config.train.micro_batch == 8
    assert for_ranks(saved, 2, {"train.micro_batch"}).train.micro_batch == 16
    sharing = for_ranks(replace_values(saved, {"layout.cp": 2}), 2, {"layout.cp"})
    assert sharing.train.micro_batch == 16


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (
            {
                "memory.activations",
                "memory.optimizer",
                "layout.gathered",
                "train.compile",
                "train.micro_batch",
            },
            ("auto", "auto", None, "auto"),
        ),
        ({"train.micro_batch"}, ("keep", "host", "0-1", "off")),
    ],
    ids=["by Scrimp", "by the user"],
)
def test_what_was_decided_for_another_layout_is_open_again(
    chosen: set[str], expected: tuple[str | None, ...]
) -> None:
    saved: Config = resolved(4, layout__fsdp=4)
    found = {"memory.activations": "keep", "memory.optimizer": "host", "layout.gathered": "0-1"}
    saved = replace_values(saved, found | {"train.compile": "off"})
    assert decided_anew(for_ranks(saved, 4, ()), saved, chosen) == saved
    other = decided_anew(for_ranks(saved, 2, {"layout.gathered"}), saved, chosen)
    states = (other.memory.activations, other.memory.optimizer, other.layout.gathered)
    assert (*states, other.train.compile) == expected
    assert other.train.micro_batch == for_ranks(saved, 2, ()).train.micro_batch
