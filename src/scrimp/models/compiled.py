"""torch.compile for the blocks of a model.

Blocks whose plans save different things (inputs, codes, nothing), or do different things with their activations, have
graphs of their own. More of them than torch allows would quietly run uncompiled: the limit is raised to what a run can
need, and hitting it is an error.
"""

from __future__ import annotations

from scrimp.models.model import Model

MOST_GRAPHS = 64
"""Most graphs of one block: its layers save inputs, codes or nothing, in training and evaluation, as plans mix them."""


def compile_blocks(model: Model, graphs: int = MOST_GRAPHS) -> None:
    """Compile every block in place: equal blocks share one compiled graph.

    Args:
        graphs: the most that the blocks may need.
    """
    import torch._dynamo  # a second to import, and only needed here

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, graphs)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for block in model.blocks:
        block.compile()


def forget_compiled() -> None:
    """Drop all compiled graphs of this process: those of blocks that were only timed count no more."""
    import torch._dynamo

    torch._dynamo.reset()


def is_compiler_error(error: BaseException) -> bool:
    """Whether the compiler does not work here. By module: importing its exceptions would import the compiler."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
