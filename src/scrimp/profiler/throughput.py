"""Tokens per second that earlier runs reached on this machine, for `scrimp plan`.

A dry run starts nothing, so it can only tell a speed that was measured before. Each run leaves
its median rate in a small JSON file in the user's cache folder, keyed by what decides the rate most:
model, device, torch, precision, sequence, micro-batch, compile, deterministic kernels, layout. The file is a
convenience: when it cannot be written or read, the rate is simply not known.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from scrimp.config import Config
from scrimp.errors import StorageError
from scrimp.files import replaced_file, user_cache
from scrimp.json_files import read_json
from scrimp.planner import Plan


def _file() -> Path:
    return user_cache() / "throughput.json"


def _key(plan: Plan, config: Config) -> str:
    mark, train = plan.fingerprint, config.train
    parts = [mark.model, mark.device, mark.torch, config.precision, train.parameters, train.compile]
    parts += [f"sequence {train.sequence}", f"micro-batch {train.micro_batch}"]
    if not train.deterministic:
        parts.append("not deterministic")
    if mark.world_size > 1:
        parts.append(plan.layout.text)
    return " | ".join(parts)


def recall_throughput(plan: Plan, config: Config) -> float | None:
    """Median tokens/s of the last run like this one on this machine, or None."""
    return _rates().get(_key(plan, config))


def remember_throughput(plan: Plan, config: Config, tokens_per_s: float) -> None:
    """Keep a measured rate for `recall_throughput`."""
    path = _file()
    with contextlib.suppress(OSError):
        rates = _rates() | {_key(plan, config): round(tokens_per_s, 1)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path, shared=True) as file:
            file.write(json.dumps(rates, indent=1, sort_keys=True).encode())


def _rates() -> dict[str, float]:
    try:
        return read_json(_file(), dict[str, float], error=StorageError, do="delete it", at_most=2**22)
    except StorageError:
        return {}
