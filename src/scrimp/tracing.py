"""What code needs that follows a model operator by operator, and code that is followed so."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """torch's mode, whose subclasses see every operator in `__torch_dispatch__`, without torch's compiler.

    torch tells its compiler to leave that method alone, and loads the compiler to tell it: a second in every process
    that traces. A compiler that is there compiles nothing inside a mode anyway.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: asked by torch when a subclass is defined."""
        return False


def made_of_others(types: Iterable[type]) -> bool:
    """Whether an operator is given a tensor without storage of its own, by torch's protocol for such classes. A mode
    that answers NotImplemented then sees the operators on what it is made of."""
    return any(hasattr(one, "__tensor_flatten__") for one in types)


def has_memory(x: Tensor) -> bool:
    """Whether there are numbers to read: a trace's tensors lie on the meta device, whatever device they name."""
    return x.untyped_storage().device.type != "meta"
