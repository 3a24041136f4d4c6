"""The passes of a step on one device: what each moves and takes, and what it must at least.

Problem  A step is slower than its products for many small reasons, and a sum of seconds names none of them. What is
         worth a kernel, and how good the kernel may become, has to be known before it is written.
Method   The step is cut into passes: products, attention, what moves numbers between them, the making of operands in 8
         or 4 bits, sums of gradients, the loss, the update. Each has its FLOPs and the bytes that a program moves, as
         its file in `softwares/` says, beside a floor: the same step of ideal fused regions, each of which reads its
         inputs and writes its outputs once. In numbers for each token (D width, F ffn, C rotated, b bytes a code)::

             region                       reads and writes                        forward    backward
             sum and norm                 stream, what is added; stream, normed   4 D        4 D
             gate                                                                 3 F        5 F
             rotation                                                             2 C        2 C
             operand of a norm or gate    codes both ways for one bf16 number     2 b - 2    2 b - 2    (bytes)
             of attention's result, or
             of the stream's gradient     read, written as codes both ways        2 b + 2    2 b + 2
             of the first, with a scale
             of all tokens                written, and read when it is known      + 4        + 4
             operand of a weight          2 b once a step, by the update
             of the final norm's result,
             or of the logits' gradients  codes both ways for one bf16 number     2 b - 2    2 b - 2
             sum of a gradient            by the product, which from the second pass on reads it before it writes
             logits                       read and overwritten by their gradients 2          2
             update                       weight, moments and sum read, weight and moments written, once

         Seconds are those of predictions (`kernels`): a product or attention takes its FLOPs by what the device
         reaches, all else its bytes by the bandwidth; a pass that the host launches more slowly waits for it. The
         products of a floor are the same products, and it waits for nobody.
         Of Scrimp's own step the sum of a gradient is a kernel of its own where no product adds to it
         (`scrimp.gemm.weight_sums`: bf16 to bf16, codes that torch multiplies, the head); predictions let it run
         beside the product.
Limits   Dense models on one device whose states and activations stay there. Sums of the embedding's gradient are left
         out, as in predictions. Scales of groups, sums of a norm's weight
         and the dropping of padding are left out. Launches are those of the file, where it was counted.
Checked  tests/planner/layout/test_step_account.py: the passes of a program add up to its prediction; floors by hand
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from scrimp.errors import PlanError
from scrimp.models import BlockSpec, LinearSpec
from scrimp.models.shapes import value_width
from scrimp.planner.layout.block_times import levels_until
from scrimp.planner.layout.host_times import layer_ops, other_ops
from scrimp.planner.layout.kernels import Kernels, element_bytes
from scrimp.planner.layout.made_operands import again_bytes, inputs_again, layer_operands, made_operands
from scrimp.planner.layout.predict import kernels_of
from scrimp.planner.layout.product_times import output_shares, quantize_bytes
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, Setting
from scrimp.planner.layout.software import OWN
from scrimp.precision import GEMMS, HEAD, HIGH_PRECISION

_STREAM = 3
"""Numbers of the stream's width that a sum of it reads and writes."""
_FUSED_SUM = (2, 0)
"""What such a sum adds to the norm beside it, forward and backward, where both are one kernel: what is added and the
sum; backward the norm's kernel reads and writes the stream's gradient anyway."""
LOSS_BYTES = 6.0
"""For each logit of Scrimp's own kernel (`scrimp.gemm.kernels.loss`), which predictions do not know yet."""
_LOGIT_BYTES = 4.0
_WIDENED_BYTES = 6.0
"""A number in bf16 read and written in float32."""
_LARGEST_LATER = ("fp8_tensor", "fp8_row", "nvfp4")
"""Recipes with a scale of a whole tensor, or of a column of all tokens: known when all of it has been made."""


@dataclass(frozen=True)
class StepPass:
    """One kind of work, all of it in a step."""

    name: str
    launches: float = 0.0
    moved: float = 0.0
    """Bytes read and written; of products and attention those that they read and write at least."""
    flops: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: StepPass) -> StepPass:
        return StepPass(
            self.name,
            self.launches + other.launches,
            self.moved + other.moved,
            self.flops + other.flops,
            self.seconds + other.seconds,
        )

    def times(self, count: float) -> StepPass:
        """So many of them."""
        return StepPass(
            self.name, count * self.launches, count * self.moved, count * self.flops, count * self.seconds
        )


@dataclass(frozen=True)
class Above:
    """One pass of a program beside its floor."""

    taken: StepPass
    floor: StepPass

    @property
    def seconds(self) -> float:
        """Above the floor."""
        return self.taken.seconds - self.floor.seconds


def above_floor(setting: Setting) -> list[Above]:
    """All passes of a step, those first that take most above their floor."""
    taken = {one.name: one for one in passes_of(setting)}
    least = {one.name: one for one in floor_of(setting)}
    names = dict.fromkeys((*taken, *least))
    found = [Above(taken.get(name, StepPass(name)), least.get(name, StepPass(name))) for name in names]
    return sorted(found, key=lambda one: -one.seconds)


def passes_of(setting: Setting) -> list[StepPass]:
    """What the setting's program moves and takes."""
    return _Account(setting).passes()


def floor_of(setting: Setting) -> list[StepPass]:
    """The same step of ideal fused regions."""
    return _Floor(setting).passes()


class _Account:
    """Passes by the figures of a program's file."""

    def __init__(self, setting: Setting) -> None:
        _refuse(setting)
        self.setting, self.kernels, self.software = setting, kernels_of(setting), setting.software
        self.model, self.tokens = setting.model, setting.tokens

    def passes(self) -> list[StepPass]:
        """All of a step, by name."""
        found: dict[str, StepPass] = {}
        for one in self._each():
            found[one.name] = found[one.name] + one if one.name in found else one
        return list(found.values())

    def _each(self) -> Iterator[StepPass]:
        times = self.setting.micro_batches
        for block, count in self.model.equal_blocks.items():
            for one in self._block(block):
                yield one.times(count * times)
        for one in self._ends():
            yield one.times(times)
        yield from self._once()

    def _block(self, block: BlockSpec) -> Iterator[StepPass]:
        forward, backward = list(self._pass(block, GEMMS[:1])), list(self._pass(block, GEMMS[1:]))
        again = [replace(one, name="made again") for one in self._again(block)]
        yield from (*forward, *backward, *again)
        host = self._host_seconds(block)
        made_again = again if self.setting.recompute == FULL and self.software.again_by_level else []
        for work, passes in ((forward, 1.0), (backward, 2.0), (made_again, 1.0)):
            waits = passes * host - sum(one.seconds for one in work)
            if work and waits > 0.0:
                yield StepPass("waits for the host", seconds=waits)

    def _pass(self, block: BlockSpec, gemms: Sequence[str]) -> Iterator[StepPass]:
        is_backward = "fprop" not in gemms
        for linear in block.linears:
            for gemm in gemms:
                yield from self._product(linear, gemm)
        yield self._attention(block, backward=is_backward)
        yield self._bytes("norms, gates, rotation", self._traffic(block, None, backward=is_backward))

    def _host_seconds(self, block: BlockSpec) -> float:
        """In which the host launches a forward pass; a backward pass takes twice as long."""
        setting = self.setting
        ops = sum(layer_ops(one, setting.recipe(one.name, "fprop"), setting) for one in block.linears)
        return setting.place.node.host_op_seconds * (other_ops(block, setting) + ops)

    def _again(self, block: BlockSpec) -> Iterator[StepPass]:
        """What backward makes again."""
        if self.setting.recompute == NONE:
            return
        if not self.software.again_by_level:
            yield from self._again_as_a_whole(block)
            return
        made = levels_until("norms" if self.setting.recompute == SELECTIVE else "block")
        for linear in block.linears:
            if linear.again in made:
                yield from self._product(linear, "fprop")
        if "attention" in made:
            yield self._attention(block, backward=False)
        yield self._bytes(
            "made again", self._traffic(block, made, backward=False) + self._quantized_again(block, made)
        )

    def _quantized_again(self, block: BlockSpec, made: Collection[str]) -> float:
        return self.tokens * again_bytes(block, self.setting, made)

    def _again_as_a_whole(self, block: BlockSpec) -> Iterator[StepPass]:
        """The same where a block has no levels: all of the forward pass, or shares of its parts."""
        software, is_full = self.software, self.setting.recompute == FULL
        products = 1.0 if is_full else software.selective_products
        for linear in block.linears:
            if not (is_full and software.full_leaves_last and linear is block.linears[-1]):
                yield from (one.times(products) for one in self._product(linear, "fprop"))
        if is_full or software.selective_attention:
            yield self._attention(block, backward=False)
        yield self._bytes("made again", self._traffic(block, None, backward=False))

    def _product(self, linear: LinearSpec, gemm: str) -> Iterator[StepPass]:
        """A product, the making of its operands, and the sum of the gradient that it makes."""
        recipe = self.setting.recipe(linear.name, gemm)
        for share in output_shares(linear, self.setting):
            m, n, k = _sizes(linear.inputs, share * linear.outputs, gemm, self.tokens)
            yield self._multiplied("products", m, n, k, recipe)
            if gemm == "wgrad":
                adds = self.software.adds(recipe, self.setting.micro_batches)
                yield self._sum(m, n, k, recipe, adds=adds)
        launches, moved = self._operands(linear, gemm, recipe)
        if moved:
            yield self._bytes("operands in 8 or 4 bits", moved, launches)

    def _multiplied(self, name: str, m: float, n: float, k: float, recipe: str) -> StepPass:
        moved = element_bytes(recipe) * k * (m + n) + 2.0 * m * n
        return StepPass(name, 1.0, moved, 2.0 * m * n * k, self.kernels.product(m, n, k, recipe))

    def _sum(self, m: float, n: float, k: float, recipe: str, *, adds: bool) -> StepPass:
        """Adding a gradient of m x n numbers to its sum, beside the product that makes it or after it."""
        software = self.software
        if software.name not in OWN:
            return self._added(m, n, k, recipe, software.gradient_sum_bytes)
        if adds:
            return self._added(m, n, k, recipe, self._sum_bytes())
        # The first pass has nothing to add to: beside masters it widens its gradient.
        moved = software.gradient_sum_bytes * m * n
        first = _WIDENED_BYTES * m * n if software.master_bytes else 0.0
        return self._bytes("sums of gradients", moved + (first - moved) / self.setting.micro_batches, 1.0)

    def _sum_bytes(self) -> float:
        """For each number, where the product writes the sum instead of its result of 2 bytes; the first reads none."""
        return self.software.held_gradient_bytes * (2.0 - 1.0 / self.setting.micro_batches) - 2.0

    def _added(self, m: float, n: float, k: float, recipe: str, each: float) -> StepPass:
        """The same by the product, which moves so many bytes more for each number."""
        alone = self.kernels.product(m, n, k, recipe)
        more = self.kernels.product(m, n, k, recipe, extra=each * m * n) - alone
        return StepPass("sums of gradients", 0.0, each * m * n, 0.0, more)

    def _operands(self, linear: LinearSpec, gemm: str, recipe: str) -> tuple[float, float]:
        """Launches and bytes of what a product in 8 or 4 bits reads."""
        counted = layer_operands(linear, gemm, recipe, self.setting)
        inputs, outputs, weights = _numbers(linear, self.tokens)
        if counted is not None:
            launches, x, y, w = counted
            w /= self.setting.micro_batches if self.setting.keeps_operands else 1
            return launches, x * inputs + y * outputs + w * weights
        if recipe in HIGH_PRECISION or gemm == "wgrad":
            return 0.0, 0.0
        each = quantize_bytes(self.setting, recipe)
        turned = self.software.transposed_weight_bytes * weights * (gemm == "dgrad")
        return 1.0, each * (inputs if gemm == "fprop" else outputs) + turned

    def _attention(self, block: BlockSpec, *, backward: bool) -> StepPass:
        attends, setting = block.attention, self.setting
        keys, _ = attends.keys(setting.sequence)
        pairs, widths = self.tokens * keys, attends.width + value_width(attends)
        seen = min(setting.sequence, attends.window or setting.sequence)
        seconds = self.kernels.attention(
            pairs,
            widths,
            keys=seen,
            head_size=attends.head_size,
            backward=backward,
            in_parts=seen < setting.sequence,
        )
        numbers = self.tokens * (2 * attends.width + 2 * attends.num_kv_heads * attends.head_size)
        flops = (5.0 if backward else 2.0) * pairs * widths
        return StepPass("attention", 1.0, 2.0 * numbers * (2 if backward else 1), flops, seconds)

    def _traffic(self, block: BlockSpec, levels: Collection[str] | None, *, backward: bool) -> float:
        """Bytes of what multiplies nothing, of these levels or of all."""
        counted = (one for one in block.traffic if levels is None or one.again in levels)
        numbers = sum(one.backward if backward else one.forward for one in counted)
        return self.software.traffic * self.software.activation_bytes * self.tokens * numbers

    def _ends(self) -> Iterator[StepPass]:
        """Embedding, final norm, head and loss, of one micro-batch."""
        tokens, D, V = self.tokens, float(self.model.width), float(self.model.vocab_size)
        yield self._bytes("embedding", tokens * D * (3 * self.software.activation_bytes + 8.0))
        for gemm in GEMMS:
            recipe = self._head_recipe(gemm)
            yield self._multiplied("head", *_sizes(D, V, gemm, tokens), recipe)
            launches, moved = self._head_operands(gemm, recipe)
            if moved:
                yield self._bytes("operands in 8 or 4 bits", moved, launches)
        yield self._sum(V, D, tokens, self._head_recipe("wgrad"), adds=False)
        yield self._bytes("norms, gates, rotation", 6.0 * tokens * D * self.software.activation_bytes)
        yield self._bytes("loss", tokens * V * self._logit_bytes())

    def _head_recipe(self, gemm: str) -> str:
        return self.setting.formats.get(f"{HEAD}.{gemm}", "bf16")

    def _head_operands(self, gemm: str, recipe: str) -> tuple[float, float]:
        """Launches and bytes of what the head's product reads; its weight is quantized in each pass."""
        tokens, D, V = self.tokens, float(self.model.width), float(self.model.vocab_size)
        counted = made_operands(gemm, recipe, self.setting)
        if counted is not None:
            launches, x, y, w = counted
            return launches, x * tokens * D + y * tokens * V + w * V * D
        if recipe in HIGH_PRECISION or gemm == "wgrad":
            return 0.0, 0.0
        return 1.0, quantize_bytes(self.setting, recipe) * tokens * (D if gemm == "fprop" else V)

    def _logit_bytes(self) -> float:
        return self.software.bytes_per_logit

    def _once(self) -> Iterator[StepPass]:
        yield self._bytes("update", self.software.optimizer_bytes * self.model.parameters)

    def _bytes(self, name: str, moved: float, launches: float = 1.0) -> StepPass:
        return StepPass(name, launches if moved else 0.0, moved, 0.0, moved / self.kernels.bandwidth)


class _Floor(_Account):
    """Passes of ideal fused regions."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.kernels = Kernels(setting.device)

    def _host_seconds(self, block: BlockSpec) -> float:
        return 0.0

    def _traffic(self, block: BlockSpec, levels: Collection[str] | None, *, backward: bool) -> float:
        D, numbers = self.model.width, 0
        for one in block.traffic:
            is_sum = one.again in ("block", "") and one.forward == one.backward == _STREAM * D
            if levels is None or one.again in levels:
                own = one.backward if backward else one.forward
                numbers += _FUSED_SUM[backward] * D if is_sum else own
        return 2.0 * self.tokens * numbers

    def _operands(self, linear: LinearSpec, gemm: str, recipe: str) -> tuple[float, float]:
        if recipe in HIGH_PRECISION or gemm == "wgrad":  # written where fprop's and dgrad's are
            return 0.0, 0.0
        inputs, outputs, _ = _numbers(linear, self.tokens)
        # Gradients of what layers make come from a gate or rotation, or are the stream's.
        is_made = linear.origin == "made" if gemm == "fprop" else linear.cut == "outputs"
        each = 2.0 * element_bytes(recipe) + (-2.0 if is_made else 2.0)
        each += 4.0 * (is_made and recipe in _LARGEST_LATER)
        return 0.0, each * (inputs if gemm == "fprop" else outputs)

    def _quantized_again(self, block: BlockSpec, made: Collection[str]) -> float:
        """Codes for wgrad in the place of a bf16 number, which then are not made forward."""
        if self.setting.precision in HIGH_PRECISION:
            return 0.0
        return -2.0 * self.tokens * sum(one.inputs for one in inputs_again(block, made))

    def _head_operands(self, gemm: str, recipe: str) -> tuple[float, float]:
        """Of what the final norm gives and of the logits' gradients, written as codes both ways for bf16 numbers."""
        if recipe in HIGH_PRECISION or gemm == "wgrad":
            return 0.0, 0.0
        each = 2.0 * element_bytes(recipe) - 2.0 + 4.0 * (recipe in _LARGEST_LATER)
        return 0.0, each * self.tokens * float(self.model.width if gemm == "fprop" else self.model.vocab_size)

    def _sum(self, m: float, n: float, k: float, recipe: str, *, adds: bool) -> StepPass:
        """By the product."""
        return self._added(m, n, k, recipe, self._sum_bytes())

    def _logit_bytes(self) -> float:
        return _LOGIT_BYTES

    def _once(self) -> Iterator[StepPass]:
        software, model = self.software, self.model
        masters = software.master_bytes
        each = 2.0 * (software.state_bytes + (0.0 if masters else 2.0)) + software.held_gradient_bytes
        each += 2.0 * (masters > 0)  # the weight in bf16
        codes = sum(
            count * linear.parameters * element_bytes(self.setting.recipe(linear.name, gemm))
            for block, count in model.equal_blocks.items()
            for linear in block.linears
            for gemm in ("fprop", "dgrad")
            if self.setting.recipe(linear.name, gemm) not in HIGH_PRECISION
        )
        codes += sum(
            model.head_parameters * element_bytes(self._head_recipe(gemm))
            for gemm in ("fprop", "dgrad")
            if self._head_recipe(gemm) not in HIGH_PRECISION
        )
        yield self._bytes("update", each * model.parameters + codes)


def _sizes(inputs: float, outputs: float, gemm: str, tokens: float) -> tuple[float, float, float]:
    """M, N and K of a product."""
    found = {
        "fprop": (tokens, outputs, inputs),
        "dgrad": (tokens, inputs, outputs),
        "wgrad": (outputs, inputs, tokens),
    }
    return found[gemm]


def _numbers(linear: LinearSpec, tokens: float) -> tuple[float, float, float]:
    """How many numbers a layer's input, output and weight have."""
    return tokens * linear.inputs, tokens * linear.outputs, float(linear.parameters)


def _refuse(setting: Setting) -> None:
    """Whatever the account has no passes for."""
    has_experts = any(linear.experts > 1 for block in setting.model.blocks for linear in block.linears)
    wrong = {
        "several devices": setting.layout.ranks > 1,
        "a model with experts": has_experts,
        "blocks that are planned one by one": bool(setting.blocks),
        "a number of blocks that are made again": not isinstance(setting.recompute, str),
        "parts that are made again by name": bool(setting.recompute_parts),
        "states or activations on the host": setting.offload != type(setting.offload)(),
    }
    found = [what for what, is_so in wrong.items() if is_so]
    if found:
        raise PlanError(
            "there is no account of the passes of this step",
            got=", ".join(found),
            expected="a dense model on one device, every block alike, nothing on the host",
        )
