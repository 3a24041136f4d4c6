"""The program whose step is predicted: what its kernels move besides, and what its exchanges run beside.

Problem  The same layout on the same devices is faster in one trainer than in another: fused kernels, launches in
         graphs, exchanges beside computing.
Method   One file each in `softwares/`, whose figures say what the program's source does, not how fast its published
         runs were. Whatever a file does not say is as in the file that it is `like`, or else as in Scrimp's own
         (`scrimp.toml`).
Checked  tests/planner/layout/test_software.py
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from scrimp.config import nearest_word
from scrimp.config.pipeline import V_SHAPED
from scrimp.errors import ConfigError
from scrimp.planner.hardware import Device
from scrimp.planner.layout.kernels import FLASH_2, TORCH
from scrimp.planner.layout.state_formats import StateFormats
from scrimp.precision import GEMMS, MOST_TO_NEAREST
from scrimp.precision import recipe as recipe_of

_FOLDER = Path(__file__).parent / "softwares"


Shares = tuple[tuple[str, float], ...]
"""Parts of a block's activations with a share of each."""
Made = tuple[tuple[float, float, float, float], ...]
"""For fprop, dgrad and wgrad: launches, and bytes for each number of the layer's input, output and weight."""
EMULATED = "-emulated"


@dataclass(frozen=True)
class Readings:
    """How often the quantizers of a recipe read what they quantize."""

    again_bytes: float
    """For each number of an input that backward makes again, more than where codes of it wait for wgrad."""
    again: float
    """Readings of such an input, for fprop and wgrad."""
    inputs: float
    """Readings of one whose codes wait."""
    dgrad: float
    """Readings of gradients for dgrad, and for wgrad where one kernel quantizes both ways."""
    wgrad: float
    """Those for wgrad besides."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """Figures of one program."""

    name: str
    about: str
    """Which version, and where the figures are from."""
    launch_seconds: float
    """That a kernel adds where launches are not hidden; 0: a graph, or a full queue."""
    host_ops: float
    """Operations that the host launches for one of a plain program; 0: a pass is one graph. The device waits where it
    is faster."""
    attention_reads: float
    """Operations that the host launches until attention runs, after it has waited for the length of a sequence; 0: it
    does not wait."""
    attention_kernel: str
    """best: that of the hardware's own generation; flash-2; torch: what it chooses where sums may come in any order and
    documents are not kept apart (`kernels`); flash-triton; unfused: scores of all tokens in memory."""
    traffic: float
    """Bytes that blocks move for one that must be, where nothing is multiplied."""
    quantize_bytes: float
    """Bytes moved for each number of an operand that is quantized in a pass."""
    quantize_block_bytes: float
    """The same where each 32 or 128 numbers have a scale, so that the largest of a tensor is not looked for."""
    transposed_weight_bytes: float
    """Bytes moved for each number of a quantized weight in a backward pass, which reads it transposed."""
    quantize_seconds: float
    """What each tensor that is quantized takes besides, however small."""
    quantize: tuple[tuple[str, Made], ...]
    """What the operands of a product in a recipe take instead, where it was counted product by product; beside a
    recipe its name with `EMULATED` for devices without units for it."""
    readings: tuple[tuple[str, Readings], ...]
    """How often these operands are read, by the same names."""
    unfused_experts: bool
    """Whether tokens are sorted twice around an all-to-all exchange, and experts' biases added and their gates clamped
    apart, unless the user fuses experts; and what YaRN scales rotated apart."""
    bytes_per_logit: float
    """Moved by the loss and its gradient."""
    gathers_logits: bool
    """Whether each rank of tp works on the logits of all words."""
    gradient_sum_bytes: float
    """For each number of a weight, to add up its gradient in a pass, by the product itself."""
    optimizer_bytes: float
    """For each number, to update it and to clip."""
    states: StateFormats = field(default_factory=StateFormats)
    """In which formats weights and moments are kept; another program's file says what it does."""
    states_by_block: bool
    """Whether of all that lives on the host there is that of blocks alone, of which two at a time visit the device for
    the update; else embedding's and head's too, and nothing visits."""
    activation_bytes: float
    """Bytes of a number between operations, and of what ranks of tp, cp, ep and pp exchange."""
    weight_bytes: float
    """Bytes of a weight's number while it is gathered."""
    gathers_weight_codes: bool
    """Whether those of blocks are gathered, and come from the host, as codes where products multiply codes."""
    hidden_host_weights: float
    """Share of weights that come from the host beside computing; kernels between those of the pass read the others."""
    hidden_host_gradients: float
    """The same of gradients that are added up there: the others are read and written by a kernel of the pass."""
    gradient_bytes: float
    """Bytes of a gradient's number while it is reduced."""
    held_weight_bytes: float
    """Bytes of a weight's number as a rank keeps it."""
    held_gradient_bytes: float
    """Bytes of a gradient's number while micro-batches add it up."""
    held_logit_bytes: float
    """Bytes that the loss holds for each logit at once."""
    held_shared_logit_bytes: float
    """The same where ranks of tp share the words; 0: no other."""
    head_gradient_bytes: float
    """Bytes that it holds for each number of the head's weight, whose gradient it makes itself."""
    weights_are_masters: bool
    """Whether blocks read the master copy itself: where it is in host memory, so are all weights but those of the
    blocks that run."""
    gathers_copies: bool
    """Whether zero 1 gathers weights in every pass, not once a step."""
    adds_copies_in_passes: bool
    """Whether copies beside shards of zero 2 and 3 add up gradients in every backward pass, not once a step."""
    unit_copies: float
    """Bytes that are moved on a device for each that it gathers or reduces: FSDP2 copies what has come into the
    weights' tensors, and gradients into one piece, each of which is a read and a write. 0: there is no copy."""
    keeps_expert_outputs: bool
    """Whether backward reads what experts gave, since it was weighted after them; else their inputs or gates are
    weighted (Megatron-Core's activation_func_with_probs, TorchTitan's score_before_experts)."""
    keeps_gathered: bool
    """Whether a rank of tp keeps the inputs that it gathered whole, or gathers them once more in the backward pass."""
    gathers_codes: bool
    """Whether ranks of tp gather as codes what products read in 8 bits with one scale a tensor."""
    gathers_scaled_codes: bool
    """The same of codes in 8 or 4 bits with scales of their own for each 16 to 128 numbers."""
    exchange_copies: float
    """Bytes moved on a device for each that ranks of tp gather or reduce, unless products and exchanges are one
    operation: PyTorch's collectives work on the first dimension, and tokens are the second."""
    stacks_layers: bool
    """Whether queries, keys and values are made by one product, and so gate and up."""
    repeats_keys: bool
    """Whether each head of queries has keys and values of its own before ranks of cp exchange them."""
    norm_sums: float
    """All-reduces of a block's backward pass that add up the gradients of norms, which all ranks of tp have."""
    held_rotations: float
    """Copies of queries and keys that are kept: as they were made, and as they were rotated."""
    selective: Shares
    """Share of each part of a block's activations (`block_activations`) that selective recomputation keeps; a part
    that is not named is kept."""
    selective_experts: Shares
    """The same of blocks with experts; empty: as of the others."""
    selective_latent: Shares
    """The same of blocks with latent attention."""
    products: tuple[tuple[str, str, float], ...]
    """Shares of the peak that large products of a kind, or attention, reached on a device by the libraries of its time,
    as ("h100", "bf16", 0.728), under the names of `achieved`; of all else the hardware file's."""
    again_by_level: bool
    """Whether blocks know levels of recomputation (`scrimp.config.activations`): what is made again is then what their
    specification says, at the level `norms` where it is selective, else at `block`. Otherwise full recomputation is
    the whole forward pass, and selective as the next two say."""
    selective_products: float
    """Share of a block's products, forward, that it makes again."""
    full_leaves_last: bool
    """Whether full recomputation leaves out the last product, whose result nobody reads again."""
    selective_gathers: float
    """Share of the exchanges of a block's forward pass that it makes again."""
    selective_attention: bool
    """Whether it makes attention again."""
    loss_tokens: int
    """Tokens whose logits exist at once; 0: all of a pass."""
    gradients_stay: bool
    """Whether the memory of gradients is never free for others: one buffer, or the pool of the stream that reduces
    them."""
    kept_gates: float
    """Tensors of a gate's size that its operations keep one by one, beside what a fused kernel keeps."""
    kept_norms: float
    """The same of a norm."""
    gate_gradients: float
    """Bytes that the gradients of gate and up take beside them, for one of theirs."""
    caches_allocations: bool
    """Whether tensors come and go in a caching allocator, of whose memory some is lost (`stage_memory.MARGIN`)."""
    one_end_buffer: bool
    """Whether embedding and head are gathered into the same memory, one after the other."""
    expandable_segments: bool
    """Whether segments of that allocator grow, so that fewer gaps are lost."""
    whole_in_pipelines: bool
    """Whether zero 3 keeps weights whole between the passes of a pipeline, and adds gradients up whole."""
    held_code_bytes: float
    """Bytes of a number of a block's weights that are kept as codes beside masters that ranks share, where products
    are quantized; 0: there are none."""
    update_bytes: float
    """Bytes of a number of states that the update has of its own."""
    state_bytes: float
    """Bytes of master weight and moments for each number."""
    master_bytes: float
    """Bytes of the master weight alone."""
    hidden_exchanges: float
    """Share of the exchanges of tp within a block that can run beside computing."""
    whole_exchanges: tuple[str, ...]
    """Precisions in which none of them do, because their products are not cut in pieces."""
    hidden_rings: float
    """The same of keys and values that ranks of cp pass round, beside attention."""
    hidden_experts: float
    """The same of tokens on their way to experts, where the user lets them overlap."""
    hidden_gathers: float
    """The same of weights that are gathered, and gradients that are reduced."""
    hidden_sends: float
    """The same of what stages hand on."""
    contention: float
    """Seconds that a second of hidden exchange adds to computing: both use the same units and memory."""
    step_share: float
    """Part of a step that is none of these: data, logs, waits for the host."""
    spread: float
    """Standard deviation of the time of one device; all wait for the slowest."""
    ranks_a_core: float
    """Ranks that share a core: while some of them wait, the others run so much faster."""
    cp_methods: tuple[str, ...]
    """How ranks of cp may share attention: zigzag (a ring), ulysses."""
    cuts_shared_rows: bool
    """Whether tp and cp go together."""
    shards_over_copies: bool
    """Whether copies share optimizer states (a distributed optimizer)."""

    def adds(self, recipe: str, micro_batches: int) -> bool:
        """Whether a block's product adds the gradient that it makes to its sum, or is taken to; else a kernel of its
        own does so afterwards. Of Scrimp's those of tiles that Triton multiplies do, and those in high precision, to
        sums in bf16 of a step of few micro-batches (`scrimp.gemm.weight_sums`); torch's kernels of codes store."""
        if self.name not in OWN:
            return True
        made = recipe_of(recipe).wgrad
        if made is None:
            return self.held_gradient_bytes == 4.0 or micro_batches <= MOST_TO_NEAREST
        return made.a.scaling == "tile" and made.a.element in ("e2m1", "int8")

    def made(self, recipe: str, gemm: str, *, units: bool) -> tuple[float, float, float, float] | None:
        """What the operands of a product take, as `quantize` says; None: it does not.

        Args:
            units: whether the device multiplies numbers of the recipe's.
        """
        known = self._quantize
        found = known.get(recipe) if units else known.get(recipe + EMULATED, known.get(recipe))
        return found[GEMMS.index(gemm)] if found else None

    def readings_of(self, recipe: str, *, units: bool) -> Readings | None:
        """How often the operands of a layer's products are read; None: it was not counted."""
        known = self._readings
        return known.get(recipe) if units else known.get(recipe + EMULATED, known.get(recipe))

    @cached_property
    def _readings(self) -> dict[str, Readings]:
        return dict(self.readings)

    @cached_property
    def _quantize(self) -> dict[str, Made]:
        return dict(self.quantize)

    def on(self, device: Device) -> Device:
        """The device as this program's libraries use it."""
        found = {kind: share for name, kind, share in self.products if name == device.name}
        if not found:
            return device
        key = (self.name, id(device))
        if key not in _WITH_LIBRARIES:
            slower = replace(device, achieved=replace(device.achieved, **found))
            _WITH_LIBRARIES[key] = (device, slower)
        return _WITH_LIBRARIES[key][1]


_WITH_LIBRARIES: dict[tuple[str, int], tuple[Device, Device]] = {}
"""Devices beside what they are with a program's libraries; the first is held so that its id stays its own."""

OLDER = {("megatron", "fp16"): "megatron-2021"}
"""Programs of which an older one is meant where they train in this precision: since flash attention came, Megatron's
recipes train in bf16 or below."""


OWN = ("scrimp", "scrimp-eager")
"""Scrimp's own step."""
SPLITTING = {"scrimp": "scrimp-eager", "scrimp-eager": "scrimp-eager", "torchtitan-eager": "torchtitan-eager"}
"""Programs that run zbv and dualpipev, and what they are then: compiled blocks make all gradients at once."""


def software_for(name: str, precision: str, schedule: str = "auto") -> Software:
    """The program of this name that trains in this precision, its pipelines by this schedule.

    Raises:
        ConfigError: there is none of this name, or it does not run the schedule.
    """
    found = software(OLDER.get((name, precision), name))
    if schedule not in V_SHAPED:
        return found
    if name not in SPLITTING:
        raise ConfigError(
            f"layout.schedule {schedule} is not carried out by software {name}",
            got="backward passes that are predicted whole, not in their two halves",
            expected=f"software {', '.join(SPLITTING)}",
            do="name one of these, or choose layout.schedule interleaved",
        )
    return software(SPLITTING[name])


def in_states(found: Software, states: StateFormats) -> Software:
    """A program that keeps weights and moments in these formats.

    Raises:
        ConfigError: a program whose file alone says what it keeps.
    """
    has_them = (found.state_bytes, found.master_bytes) == (states.state_bytes, states.master_bytes)
    if has_them or states == found.states:
        return found
    if found.name not in OWN:
        raise ConfigError(
            f"states are those that software {found.name} has",
            got="states of another format",
            expected=f"software {', '.join(OWN)}",
            do="leave states out, or name one of these",
        )
    return replace(
        found,
        states=states,
        state_bytes=states.state_bytes,
        master_bytes=states.master_bytes,
        held_gradient_bytes=states.gradient_bytes,
        gradient_sum_bytes=states.sum_bytes,
        optimizer_bytes=states.update_bytes + states.clip_bytes,
    )


def with_attention(found: Software, *, deterministic: bool, documents: bool) -> Software:
    """A program with the kernel of attention that a run's settings allow; another's is that of its file.

    torch's kernel for rows of several documents is FlashAttention-2, whatever the order of its sums.

    Args:
        deterministic, documents: `train.deterministic`, `data.mask_documents`.
    """
    if found.name not in OWN:
        return found
    return replace(found, attention_kernel=FLASH_2 if deterministic or documents else TORCH)


@cache
def software(name: str) -> Software:
    """The program of this name.

    Raises:
        ConfigError: there is no file of it.
    """
    names = sorted(path.stem for path in _FOLDER.glob("*.toml"))
    if name not in names:
        near = nearest_word(name, names)
        raise ConfigError(
            f"software {name} is not known",
            expected=f"one of {', '.join(names)}",
            do=f"did you mean {near}?" if near else "leave it out for Scrimp's own step",
        )
    values = _read(name)
    for names_of in ("cp_methods", "whole_exchanges"):
        values[names_of] = tuple(values[names_of])
    values["products"] = tuple(map(tuple, values["products"]))
    values["quantize"] = tuple(
        (name, tuple(map(tuple, figures))) for name, figures in values["quantize"].items()
    )
    values["readings"] = tuple((name, Readings(*map(float, one))) for name, one in values["readings"].items())
    for shares in ("selective", "selective_experts", "selective_latent"):
        values[shares] = tuple(values[shares].items())
    return Software(**{one.name: values[one.name] for one in fields(Software) if one.name != "states"})


def _read(name: str) -> dict[str, Any]:
    """What a file says, and of all else what the one says that it is like; in the end Scrimp's own."""
    own = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return own if name == "scrimp" else _read(own.get("like", "scrimp")) | own
