"""Several ranks share the layers of a model in a training loop of your own (tensor parallelism).

::

    print(scrimp.tensor_plan(model, {"input_ids": ids, "labels": ids}, ranks=2))     what would be cut, and why not more
    shared = scrimp.share_layers(model, {"input_ids": ids, "labels": ids})           on every rank, before the optimizer
    ...                                                                              the loop stays as it is
    shared.clip_grad_norm_(1.0)                                                      instead of torch's
    state = shared.whole_state_dict()                                                the model as it was before

Every rank calls these functions alike, with the same weights and the same batches: ranks that share layers train one
copy of the model. Which layers are shared is found by tracing the model on the shapes of the example, without computing
anything (`scrimp.runtime.parallel.traced`). What cannot be proven right is replicated, and the plan says why.

Checked  tests/api/test_layer_sharing.py; examples/share_layers.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from scrimp.api.modules import unwrap
from scrimp.errors import ConfigError, ModelError
from scrimp.runtime.parallel.traced import SharedLayers, TensorPlan, find

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Example = Mapping[str, Any] | Sequence[Any] | Tensor
"""What a model is called with: keywords, positions, or one tensor."""


def tensor_plan(model: nn.Module, example: Example, ranks: int) -> TensorPlan:
    """How so many ranks would share the layers of a model; print it.

    Args:
        model: on any device, `meta` too; it is left as it is.
        example: a call as the training loop makes it, of any small batch: shapes and types count. No size but that
            of the batch's last part should be 1; caches must be off (`use_cache=False`).

    Raises:
        ModelError: the model cannot be traced.
        ConfigError: less than two ranks.
    """
    if unwrap(model) is not model:
        raise ModelError(
            "layers are shared before a model is compiled or wrapped",
            got=type(model).__name__,
            do="give the model inside, and wrap it afterwards",
        )
    if isinstance(example, Mapping):
        return find(model, (), example, ranks)
    return find(model, (example,) if isinstance(example, Tensor) else tuple(example), {}, ranks)


def share_layers(
    model: nn.Module,
    example: Example,
    *,
    group: ProcessGroup | None = None,
    plan: TensorPlan | None = None,
) -> SharedLayers:
    """Leave this rank its pieces of a model's layers; a collective.

    The model is changed in place: its parameters keep their names, and become smaller. Make the optimizer afterwards.
    On the meta device, give the pieces memory (`allocate`), then values (`load_whole_state_dict`); buffers stay yours.

    Args:
        group: the ranks that share layers; None: all ranks.
        plan: of this model; None: found here.

    Returns:
        What else a loop needs: `clip_grad_norm_`, `whole_state_dict`, `load_whole_state_dict`, `allocate`, `plan`.

    Raises:
        ModelError: the model cannot be traced, or is not the plan's; ranks begin with different plans or weights.
        ConfigError: there is no process group, or one rank.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ConfigError(
            "layers are shared by several ranks",
            got="no process group",
            do="start the script with torchrun, and call torch.distributed.init_process_group first",
        )
    if plan is None:
        plan = tensor_plan(model, example, dist.get_world_size(group))
    return SharedLayers(model, plan, group)
