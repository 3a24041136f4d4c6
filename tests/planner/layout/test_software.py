"""Files of programs, and names that there are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from published_settings import setting

import scrimp.planner.layout.software as room
from scrimp.errors import ConfigError
from scrimp.planner.hardware import load_device
from scrimp.planner.layout.software import software, software_for

NAMES = sorted(path.stem for path in (Path(room.__file__).parent / "softwares").glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_complete_and_possible(name: str) -> None:
    found = software(name)
    assert found.name == name
    assert found.about
    for share in ("hidden_exchanges", "hidden_gathers", "hidden_sends", "step_share"):
        assert 0 <= getattr(found, share) <= 1, share
    assert found.traffic > 0.8
    assert found.master_bytes <= found.state_bytes


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean megatron"):
        software("megatrn")


def test_megatron_in_fp16_is_that_of_its_time() -> None:
    """The papers of 2021 and 2022 trained in fp16, with scores in memory and nothing beside computing."""
    assert software_for("megatron", "fp16") == software("megatron-2021")
    assert software_for("megatron", "bf16") == software("megatron")
    assert software_for("fsdp", "fp16") == software("fsdp")
    old = software("megatron-2021")
    assert old.attention_kernel == "unfused"
    assert old.hidden_exchanges == old.hidden_gathers == old.hidden_sends == 0


def test_copies_of_2021_share_states_where_zero_is_1() -> None:
    """Megatron-DeepSpeed's ZeRO 1, and Megatron's distributed optimizer since May 2022."""
    shared, whole = (setting(dp=8, of="megatron-2021", precision="fp16", zero=zero) for zero in (1, 0))
    assert (shared.state_shards, whole.state_shards) == ((8, 8), (1, 1))


def test_a_program_of_2024_multiplies_by_the_libraries_of_its_time() -> None:
    h100, a100 = load_device("h100"), load_device("a100-80")
    old = software("fsdp")
    assert old.on(h100).rate("bf16") == pytest.approx(720e12, rel=1e-3)
    assert old.on(h100) is old.on(h100)
    assert old.on(a100) is a100
    assert software("scrimp").on(h100) is h100
