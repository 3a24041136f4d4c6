"""Settings of adapters: what is decided, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scrimp.config import (
    Adapter,
    Config,
    Resolution,
    base_architecture,
    check_values,
    load_config,
    preset,
    replace_values,
    resolve,
    to_toml,
)
from scrimp.errors import ConfigError
from scrimp.json_files import as_typed

BASE = preset("llama-3m")


def resolved(**changes: Any) -> Resolution:
    values = {"model.weights": Path("base"), "adapter.rank": 8, **changes}
    config = replace_values(Config(), {key.replace("__", "."): value for key, value in values.items()})
    check_values(config)
    layout = config.layout
    ranks = layout.pp * layout.cp * layout.tp * (layout.fsdp or 1) * (2 if config.outer.every else 1)
    return resolve(config, base_architecture(config, BASE), device_type="cpu", ranks=ranks)


def test_what_is_open_is_decided_for_adapters() -> None:
    found = resolved(precision="bf16")
    assert found.architecture.adapter == Adapter(8, 16.0, "all")
    assert found.config.train.parameters == "bf16"
    assert found.config.optimizer.master_weights is False
    assert found.config.optimizer.moments == "fp32"
    assert "ten times" in found.reasons["optimizer.lr"]
    full = resolved(adapter__rank=0)
    assert full.architecture.adapter is None
    assert found.config.optimizer.lr == pytest.approx(10 * full.config.optimizer.lr, rel=0.01)
    assert found.config.memory.optimizer == "device"


def test_a_resolved_configuration_says_the_same_again(tmp_path: Path) -> None:
    base = "nvfp4,*.mlp.down=bf16"
    config = resolved(
        adapter__alpha=3.0, adapter__targets="attention.qkv, mlp.down", adapter__base=base
    ).config
    (tmp_path / "config.toml").write_text(to_toml(config))
    again = load_config(tmp_path / "config.toml")
    assert again.adapter == config.adapter
    adapter = base_architecture(again, BASE).adapter
    assert adapter == Adapter(8, 3.0, "attention.qkv, mlp.down", base)
    assert adapter.names == ("attention.qkv", "mlp.down")
    assert adapter.scale == 3 / 8
    assert [adapter.has(name) for name in ("attention.qkv", "mlp.down", "mlp.gate_up")] == [True, True, False]


def test_an_architecture_is_written_and_read_with_its_adapter() -> None:
    architecture = resolved().architecture
    saved = json.loads(json.dumps(architecture.to_json()))
    assert as_typed(saved, type(BASE), origin="here", error=ConfigError, do="") == architecture
    assert "adapter" not in BASE.to_json()
    assert architecture.base == BASE


REFUSED: dict[str, dict[str, Any]] = {
    "adapters need a base model": {"model.weights": None},
    "adapter.alpha, adapter.targets and adapter.base are": {"adapter.rank": 0, "adapter.base": "nvfp4"},
    "are not shared among ranks yet": {"layout.fsdp": 2, "adapter.base": "nvfp4"},
    "are not compiled yet": {"train.compile": "on", "adapter.base": "nvfp4"},
    "adapter.base stores nothing": {"adapter.base": "bf16,*.down=bf16"},
    "adapter.rank is out of range": {"adapter.rank": -1},
    "adapter.alpha is out of range": {"adapter.alpha": 0.0},
    "adapter.targets is empty": {"adapter.targets": " "},
    "precision snip is not": {"precision": "snip"},
    "optimizer.name muon is not": {"optimizer.name": "muon"},
    "optimizer.name galore is not": {"optimizer.name": "galore"},
    "optimizer.from_weights true is not": {"optimizer.from_weights": True},
    "optimizer.master_weights true is not": {"optimizer.master_weights": True, "precision": "bf16"},
    "layout.tp 2 is not": {"layout.tp": 2},
    "layout.cp 2 is not": {"layout.cp": 2},
    "layout.pp 2 is not": {"layout.pp": 2},
    "outer.every 4 is not": {"outer.every": 4},
    "memory.weights host is not": {"memory.weights": "host"},
    "memory.optimizer 2 is not": {"memory.optimizer": "2"},
    "memory.update cpu is not": {"memory.update": "cpu"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_carried_out_is_refused_by_name(message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolved(**REFUSED[message])
    assert message in str(refused.value)
