"""The inputs of a model's last steps, as its forward pass got them: what a run is measured on after the fact.

Kept by reference, on the device where they were. A checkpoint that is written between the first of them and the
measurement holds them too, so that a resumed run measures on the same ones.

File     safetensors; tensors by step, micro-batch and argument, everything else of them as JSON in the header.
Checked  tests/integrations/test_transformers_callback.py
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from scrimp.errors import CheckpointError
from scrimp.files import write_whole
from scrimp.json_files import decode_json

Inputs = dict[str, Any]
"""Keyword arguments of one forward pass."""
_Steps = list[list[dict[str, Any]]]


class RecentBatches:
    """The micro-batches of the last few steps.

    Args:
        most: steps that are kept.
    """

    def __init__(self, most: int) -> None:
        self._steps: deque[list[Inputs]] = deque(maxlen=most)
        self._open: list[Inputs] = []

    def add(self, inputs: Inputs) -> None:
        """One micro-batch of the step that runs."""
        self._open.append(dict(inputs))

    def end_step(self) -> int:
        """The step is over; how many micro-batches it had."""
        count = len(self._open)
        if self._open:
            self._steps.append(self._open)
        self._open = []
        return count

    @property
    def steps(self) -> list[list[Inputs]]:
        """Micro-batches by step, the oldest first."""
        return list(self._steps)

    def clear(self) -> None:
        """Forget them."""
        self._steps.clear()
        self._open = []

    def write(self, path: Path) -> list[str]:
        """Store the steps that are over; gives the arguments that no file of ours holds, and then stores nothing."""
        tensors: dict[str, Tensor] = {}
        others: list[list[Inputs]] = []
        odd: set[str] = set()
        for number, step in enumerate(self._steps):
            others.append([{} for _ in step])
            for place, inputs in enumerate(step):
                for name, value in inputs.items():
                    if isinstance(value, Tensor):
                        tensors[f"{number}.{place}.{name}"] = value.detach().to("cpu", copy=True).contiguous()
                    elif value is None or isinstance(value, bool | int | float | str):
                        others[number][place][name] = value
                    else:
                        odd.add(name)
        if not odd:
            write_whole(path, save(tensors, metadata={"scrimp_batches": json.dumps(others)}))
        return sorted(odd)

    def read(self, path: Path, device: torch.device) -> None:
        """Take what `write` stored; none where there is no file.

        Raises:
            CheckpointError: the file is damaged.
        """
        self.clear()
        if not path.exists():
            return
        do = "delete it: the next plan is made from fewer batches"
        try:
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {})["scrimp_batches"]
                steps = decode_json(text, _Steps, origin=str(path), error=CheckpointError, do=do)
                for key in file.keys():  # noqa: SIM118
                    number, place, name = key.split(".", 2)
                    steps[int(number)][int(place)][name] = file.get_tensor(key).to(device)
        except (OSError, KeyError, IndexError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged", got=error, do=do) from None
        self._steps.extend(steps)
