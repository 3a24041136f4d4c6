"""Leave a model as it was: what measuring changes for a while, and puts back.

Gradients, buffers, random states, training mode, the clock of the rounding noise and the precision of every planned
layer are as before when the context ends, whatever happened inside. Weights and the optimizer's state are
never written; gradients that an optimizer keeps elsewhere are its own affair.

Passes that are to be compared must all start from the same place: dropout draws the same masks, and statistics of
batch normalisation are the earlier ones. `ForwardState` holds what a forward pass reads and changes.

Checked  tests/statistics/test_untouched.py: bit by bit, also after an exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from scrimp.gemm import PlannedModel, without_witnesses


class ForwardState:
    """Buffers of a model, torch's random states, and the clock, as they are now."""

    def __init__(self, model: nn.Module, planned: PlannedModel) -> None:
        self._buffers = [
            (module, dict(module._buffers), {name: _copy(buffer) for name, buffer in module._buffers.items()})
            for module in model.modules()
        ]
        self._clock = planned.clock
        self._reading, self._is_set = self._clock.reading, self._clock.is_set
        self._random = torch.get_rng_state()
        self._random_of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        """Put everything back as it was, the buffers in their own memory."""
        with torch.no_grad():
            for module, tensors, values in self._buffers:
                for name, tensor in tensors.items():
                    value = values[name]
                    if tensor is not None and value is not None:
                        tensor.copy_(value)
                module._buffers.clear()
                module._buffers.update(tensors)
        self._clock.reading, self._clock.is_set = self._reading, self._is_set
        torch.set_rng_state(self._random)
        if self._random_of_devices:
            torch.cuda.set_rng_state_all(self._random_of_devices)


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


@contextlib.contextmanager
def untouched(model: nn.Module, planned: PlannedModel) -> Iterator[None]:
    """Restore everything that a forward and a backward pass can change."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    precisions = {name: layer.precision for name, layer in planned.layers.items()}
    before = ForwardState(model, planned)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.compiler.set_stance("force_eager"), without_witnesses():
            yield
    finally:
        planned.replan(precisions)
        before.restore()
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
