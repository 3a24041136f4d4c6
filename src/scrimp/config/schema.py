"""Every setting of a run: frozen, typed dataclasses, one docstring under each field.

The same fields make the TOML file, the command line (`--train.batch-tokens`) and the saved
`config.toml`. ``None`` and "auto" mean "Scrimp decides": `scrimp.config.resolve` and the start of a run put a value in
their place and keep the reason. What stays None in a saved configuration means none: no budget,
no change to the preset's sizes, the user's own cache folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from scrimp.config.mixture import MixedSource, mixed_sources
from scrimp.precision import PrecisionRules, parse_rules

GainsName = Literal["auto", "ratios", "blocks", "exact"]
ScheduleName = Literal["auto", "cosine", "linear", "wsd", "constant"]
Switch = Literal["auto", "on", "off"]
ParameterType = Literal["auto", "fp32", "bf16"]
MomentsType = Literal["auto", "fp32", "bf16", "8bit"]
UpdateName = Literal["device", "cpu", "fastest"]
EvaluationPrecision = Literal["plan", "working"]
SplitName = Literal["fixed", "fastest"]
ContextMethod = Literal["zigzag", "striped", "ulysses"]
ExchangeName = Literal["fp32", "fp8"]
PipelineScheduleName = Literal["auto", "gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]
BackendName = Literal["auto", "numba", "reference", "torch", "triton"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives, and the seed that decides it."""

    dir: Path | None = None
    """Run folder. Unset: the next free runs/<preset>-<number>."""
    seed: int = 0
    """Decides initialisation, data order and sampling."""
    rounding_seed: int | None = None
    """Decides the noise of stochastic rounding alone. Unset: seed. Two runs that differ in nothing else
    show how far rounding by itself moves a result."""

    @property
    def seed_of_rounding(self) -> int:
        """`rounding_seed`, or what stands in for it."""
        return self.seed if self.rounding_seed is None else self.rounding_seed


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text in, token sequences out."""

    source: str = "stdlib"
    """stdlib, or a package of it, as stdlib:email; copy or label-maps:KIND, tasks; conversations stdlib-docstrings or
    stdlib-signatures; a text, JSONL or Parquet file (also .gz, .zst); a folder of them; a folder of token shards; a
    saved datasets folder; or hf:OWNER/NAME for the Hugging Face hub."""
    mix: str | None = None
    """Instead of source: several of them with weights, as web.jsonl=0.7,stdlib=0.3. A weight says how much of what is
    trained on comes from there, in tokens; 0 evaluates on it alone. Unset: source alone."""
    tokens: int | None = None
    """Train on the first so many tokens of the source alone, again and again, to see what little data does; of a mix,
    on so many of each source. Each must have them. Unset: on all."""
    text_column: str = "text"
    """Column (JSONL key) that holds the text; of conversations, messages unless another is named."""
    chat_template: Path | None = None
    """sft: Jinja file that writes conversations. Unset: the tokenizer's own template."""
    tokenizer: str = "auto"
    """bytes; bpe (trained on the corpus); or a folder with a tokenizer.json. auto: the one
    of the shards or of model.weights if there is one, else bpe."""
    vocab_size: int | None = None
    """Entries of a bpe tokenizer trained here, and the most of a ready one. Unset: the model's, at most 32,768."""
    held_out: float | Path = 0.02
    """Share of the text kept for evaluation, in documents chosen by a hash of their text; or a file
    (or another source) to evaluate on. Of a saved data set with a validation split: 0, or that split."""
    mask_documents: bool = True
    """Attention never crosses a document boundary inside a packed sequence."""
    cache: Path | None = None
    """Folder for prepared token shards. Unset: scrimp/ in the user's cache folder."""

    @property
    def mixed(self) -> tuple[MixedSource, ...]:
        """The sources of `mix`, read; none where there is one source."""
        return () if self.mix is None else mixed_sources(self.mix)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of all sources."""
        return tuple(source.name for source in self.mixed) or (self.source,)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which decoder: a preset, or the weights to start from, and changes to its sizes."""

    preset: str = "llama-3m"
    """Named architecture, such as llama-60m or qwen2.5-0.5b; an unknown name lists them all."""
    weights: Path | None = None
    """Start from these weights: a Hugging Face folder or a Scrimp run. Replaces the preset."""
    kind: str | None = None
    """A kind of decoder of your own in the preset's sizes: FILE.py:NAME, a ModelSpec. Unset: the preset's kind."""
    vocab_size: int | None = None
    """Rows of the embedding. Unset: the preset's, or for Scrimp's own presets as many as the
    tokenizer needs."""
    context: int | None = None
    """Longest sequence in tokens. Unset: the preset's."""
    num_layers: int | None = None
    """Decoder blocks. Unset: the preset's."""
    width: int | None = None
    """Width of the residual stream. Unset: the preset's."""
    num_heads: int | None = None
    """Query heads. Unset: the preset's."""
    num_kv_heads: int | None = None
    """Key and value heads. Unset: the preset's."""
    ffn_width: int | None = None
    """Inner width of SwiGLU. Unset: the preset's."""
    rank: int | None = None
    """Each linear layer of the blocks is a product W = B A of two factors of this rank, and both are trained. Unset:
    each is one matrix."""
    sparse_share: float | None = None
    """With model.rank: each of these layers has a sparse matrix S beside its product, W = B A + S, with this share of
    W's places, which are drawn once and stay (SLTrain; 0.03 there). Unset: none has."""
    capacity_factor: float | None = None
    """Most tokens of a micro-batch that one routed expert takes in training, by the mean of all; what is beyond is
    dropped. Unset: none is."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """LoRA: weights stay as they are in model.weights, and small matrices beside them are trained."""

    rank: int = 0
    """Rank r of the adapters, x A^T B^T with A of r rows, beside each of the linear layers; 0: none, every weight is
    trained."""
    alpha: float | None = None
    """What they add is multiplied by alpha / rank. Unset: 2 rank."""
    targets: str = "all"
    """Linear layers of the blocks that get one, separated by commas, such as attention.qkv,attention.out. all: every
    one, but never the head."""
    base: str | None = None
    """Formats that the blocks' frozen weights lie in: a recipe, and others for some layers, such as
    nvfp4,*.mlp.down=fp8,blocks.0.*=bf16. Unset: that of train.parameters."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The steps of a run, and what each one trains on."""

    steps: int = 200
    """Optimizer steps."""
    sequence: int | None = None
    """Tokens per sequence. Unset: by the size of the model, at most its context."""
    batch_tokens: int | None = None
    """Tokens per optimizer step, a multiple of the sequence. Unset: by the size of the model."""
    micro_batch: int | None = None
    """Sequences per forward pass, a divisor of the batch's sequences. Unset: as many as keep
    a forward pass efficient without holding more activations than needed."""
    parameters: ParameterType = "auto"
    """Format of the parameters; of adapters, that of the weights that stay as they are: adapters are fp32. auto: the
    precision's own."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at once; 0 computes all at once. Unset: 0 if they fit into 64 MiB
    (512 MiB on CUDA), else the power of two that does."""
    compile: Switch = "auto"
    """torch.compile per block. auto: on for CUDA, off on CPU."""
    deterministic: bool = True
    """Kernels whose sums come in one order: a run repeats itself bit for bit, and one that was interrupted goes on as
    if it had not been. false: on a GPU the fastest kernels of attention; runs agree up to rounding, which grows. On a
    CPU nothing changes."""
    nonfinite_patience: int = 5
    """Skipped steps in a row (non-finite loss or gradients) after which the run stops."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is trained: how a batch becomes a loss."""

    name: str = "next-token"
    """next-token: predict every token of documents from those before it. sft: of conversations, what the
    assistant wrote. distill: next-token, and what teachers say of each token. Or FILE.py:NAME, a class of your own
    (with --trust-code; see examples/own_objective.py)."""
    teachers: str | None = None
    """distill: runs or Hugging Face folders, separated by commas; of several the logits are averaged. Or ema: the
    model's own weights, averaged exponentially."""
    teacher_momentum: float = 0.9
    """ema: what the average keeps of itself in each update, m in T <- m T + (1 - m) W."""
    teacher_weight: float = 0.5
    """distill: share of the loss that is the teachers'. 0: they only write (`written`)."""
    written: float = 0.0
    """distill: share of the samples that the teachers write themselves, before the run begins."""
    written_tokens: int | None = None
    """distill: the most that they write, which is then read again and again. Unset: all that is read, once."""
    reference_losses: str | None = None
    """With data.mix: of each source that is trained on a loss that can be reached, in nats a token, as
    a.txt=3.1,b.txt=2.4 (names as in eval_loss/NAME). Sources count the more, up to twice, the further they are above
    theirs. Unset: all count alike."""
    excess_scale: float = 0.25
    """reference_losses: a source that is so many nats further above its reference than the nearest one counts 1.39."""
    z_loss: float = 0.0
    """Weight of the squared log-partition penalty; 0 switches it off."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients move the weights."""

    name: str = "adamw"
    """adamw; nadamw, AdamW with Nesterov momentum; schedule-free, AdamW whose average of the weights is evaluated; or,
    with AdamW for all but the blocks' matrices, muon: orthogonalised momentum; galore: Adam in a low-rank subspace of
    gradients, with a fraction of its states; fira: and what that leaves out, scaled alike. auto: adamw if it fits in
    budget.device_memory, or in what is free if that is less, else fira with the largest rank that does, of a quarter of
    the width, an eighth and a sixteenth. Or FILE.py:NAME, a torch.optim.Optimizer of your own (with --trust-code)."""
    lr: float | None = None
    """Peak learning rate. Unset: min(3e-3, 0.8 / width), a tenth of that from model.weights, but for those whose
    optimizer's states go over too (from_weights)."""
    embedding_lr_ratio: float | None = None
    """Learning rate of the token embedding as a multiple of lr. Unset: 4 from random weights where it is the head too,
    or with Muon; 1 for GaLore, Fira, optimizers of your own and trained weights."""
    weight_decay: float = 0.1
    """Decoupled decay, on matrices only."""
    beta1: float = 0.9
    """AdamW: decay of the first moment. schedule-free: share of the average in the weights that are trained."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    momentum: float = 0.95
    """Muon: decay of the average of gradients."""
    rank: int | None = None
    """GaLore and Fira: rank of the subspace; a matrix that is no larger is updated in full. Unset: a quarter of the
    model's width."""
    refresh_every: int = 200
    """GaLore and Fira: updates from one subspace to the next."""
    low_rank_scale: float = 0.25
    """GaLore and Fira: factor of the learning rate of the blocks' matrices."""
    refactor_every: int = 0
    """With model.rank: steps from one refactorization of all W = B A by their SVD to the next, each of which clears the
    factors' averages and lets the learning rate rise anew for ten steps; 0: none."""
    eps: float = 1e-8
    """AdamW: added to the root of the second moment."""
    clip: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    master_weights: bool | None = None
    """true or false: keep an fp32 copy of bf16 parameters in the optimizer. Unset: true for
    bf16 parameters."""
    moments: MomentsType = "auto"
    """Format of AdamW's two moving averages; 8bit with a scale per 128. auto: fp32 with fp32 parameters or master
    weights, else bf16."""
    from_weights: bool = False
    """Begin with the optimizer's states of the run that model.weights names: training goes on as it would there, but
    for the settings of this run. Unset: with empty ones."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run."""

    name: ScheduleName = "auto"
    """Shape after warm-up; wsd is constant, then linear over the last fifth. auto: cosine, constant with an optimizer
    that needs no other (schedule-free)."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. Unset: a twentieth of the run, at most 2,000."""
    final_lr_ratio: float = 0.1
    """Last learning rate as a share of the peak (not used by constant)."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluations on the held-out split."""

    every: int | None = None
    """Steps between evaluations, besides the one at the end; 0 for only that one. Unset: a tenth of the run,
    rarer in one of less than a hundred steps or so."""
    tokens: int | None = None
    """Most held-out tokens per evaluation. Unset: as many as four steps train on, fewer where evaluations would take
    more than 3 % of the run's FLOPs."""
    precision: EvaluationPrecision = "plan"
    """plan: GEMMs run as in training; working: in the working format, as `scrimp eval` and `scrimp generate` run the
    weights: what training in low formats made of them, without what the formats themselves do to a loss."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, and which of them are kept."""

    every: int | None = None
    """Steps between checkpoints, besides the one at the end; 0 for only that one. Unset: a
    tenth of the run, at least 50, and a divisor of keep_every."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are kept for good; 0 for none. A multiple of
    checkpoint.every."""


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """How a run is laid over the ranks that train it, as many as the product of all degrees."""

    dp: int | None = None
    """Copies of the model, each on ranks of its own. Unset: as many as fsdp leaves, else one."""
    fsdp: int | None = None
    """Ranks that share one copy, each with its part of weights, gradients and optimizer states (those of cp do too).
    Unset: all that the others leave."""
    cp: int = 1
    """Ranks that share the tokens of every row: for sequences that are too long for one."""
    cp_method: ContextMethod = "zigzag"
    """How they attend: zigzag or striped, a ring that keys and values go round; ulysses, which exchanges tokens for
    heads."""
    tp: int = 1
    """Ranks that compute every layer together, each with its own heads, its part of the MLP and its words. They read
    the same rows, and exchange activations in every block: they belong on the fastest links."""
    ep: int = 1
    """Ranks that share the experts of each block: tokens travel to their experts. They are the same ranks as those
    above, neighbours first, whatever these do for the rest of the model."""
    etp: int = 1
    """Ranks that share each expert, each with its part of the width."""
    pp: int = 1
    """Ranks of a pipeline, each with some of the blocks: a batch passes through them in micro-batches."""
    virtual: int | None = None
    """Stages of each rank of the pipeline. Unset: as many as the schedule needs, 1 or 2."""
    schedule: PipelineScheduleName = "auto"
    """Order of the pipeline's passes. auto: 1f1b, or with several stages on each rank interleaved."""
    stages: str | None = None
    """Blocks of each of the pipeline's stages, as 3,4,4,3. Unset: as even as they divide."""
    backends: str | None = None
    """What carries the messages of an axis, where links are unequal, as dp=gloo,fsdp=nccl:IB: gloo, or NCCL, over one
    of its networks. Unset: gloo between CPUs, NCCL between GPUs, over what it finds."""
    zero: int = 3
    """What each rank of fsdp holds whole for a while: 3: the weights of the block that runs; 2: all weights,
    from their forward to their backward pass; 1: and all gradients, until the last micro-batch. Whole copies (fsdp
    1) add up their gradients once a step, whatever it is."""
    gathered: str | None = None
    """With zero 3: blocks whose gathered weights stay from their forward to their backward pass, as 0-3,7. Unset:
    none."""
    search: bool = True
    """Where neither dp nor fsdp is given: measure the ranks, and search layout, micro-batch and memory together.
    Another layout than shards over all ranks is taken where it is predicted to be faster by a tenth."""
    switch: bool = False
    """Where the first steps, measured, say that another layout is faster by more than a restart takes: stop at a
    checkpoint, to go on in it."""


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """Copies of the model (layout.dp) that train alone for some steps, and then move together: for slow links."""

    every: int = 0
    """Local steps between exchanges; 0: gradients are added up over all copies in every step."""
    lr: float = 0.7
    """Learning rate of the common move. 1 with momentum 0 is the mean of the copies (local SGD)."""
    momentum: float = 0.9
    """Momentum of the common move."""
    overlap: bool = False
    """The exchange runs beside the next round, which then moves by the displacement of the one before (CO2)."""
    clip: float = 1.0
    """With overlap: most that the momentum of a weight may be, in learning rates times `every`."""
    exchange: ExchangeName = "fp32"
    """Format in which displacements are sent; fp8 with a scale per 128 is a quarter of the bytes."""
    copies: int = 1
    """Copies that are jobs of their own and go on where one is lost; set by scrimp launch --copies."""


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """What the plan may spend. Exceeding it is refused before the run starts."""

    device_memory: str | None = None
    """Most device memory, as 16GB or 15.5GiB. Unset: what the device has free."""
    host_memory: str | None = None
    """Most host memory, as 64GB. Unset: what the host has free."""
    fp4_flops: float | None = None
    """snip: least share of the blocks' linear FLOPs in 4 bits. Unset: 0.75, unless another budget is given."""
    step_seconds: float | None = None
    """snip: most seconds of a step, by the measured times of GEMMs on this device."""
    speedup: float | None = None
    """snip: least speed-up of a step over bf16 GEMMs, by the same times."""
    divergence: float | None = None
    """snip: most predicted harm, as a share of that of everything in the lowest format; then the fastest plan."""
    saved_bytes: float | None = None
    """snip: most that planned layers keep of their inputs for the backward pass, as a share of its bytes in bf16."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What is done so that a step fits. None of it changes a number of the run, but for `split`, and `update` beside
    a GPU."""

    activations: str = "auto"
    """What blocks do with what backward reads: keep it, or make it again: swiglu, norms, mlp, qkv, attention, block
    (each more than the one before); with +offload what is still kept waits in host memory. For some blocks:
    norms,0-11=block+offload. auto: as the budget demands."""
    weights: str = "auto"
    """Where blocks' weights live: device, host, or a number of blocks whose weights live on the host. auto: as the
    budget demands, or device where gradients or optimizer is set."""
    gradients: str = "auto"
    """The same of gradients."""
    optimizer: str = "auto"
    """The same of the optimizer's states: moments and master weights."""
    update: UpdateName = "device"
    """Who updates blocks whose optimizer states live on the host: the device, which the states visit; the cpu, from
    gradients in host memory; or the one that is predicted fastest. A CPU rounds otherwise than a GPU."""
    split: SplitName = "fixed"
    """fastest: the plan chooses train.micro_batch too, by timed blocks. Another one is another order of sums."""


@dataclass(frozen=True, kw_only=True)
class SnipConfig:
    """How `precision = snip` chooses formats while training; without effect otherwise."""

    formats: str = "auto"
    """Candidates, separated by commas. auto: fp8,nvfp4."""
    policy: str = "snip"
    """snip (per GEMM); snip-layer; snip-paper (as published); or a baseline: backward-first, first-last, layer-type,
    last-blocks-matched, random:SEED, min-abs-err, min-rel-err (these three per layer, with -gemm per GEMM), or one that
    keeps no budget: last-blocks, or a candidate's name for all GEMMs."""
    start: str = "auto"
    """Recipe of the planned GEMMs before the first plan. auto: the candidate of most bits."""
    first: int | None = None
    """Step before which the first plan is measured. Unset: after the warm-up."""
    every: int | None = None
    """Steps between plans; 0 for only the first. Unset: 2,000, at most half of the run."""
    at: str = ""
    """More steps to plan at, separated by commas, such as 500,4000."""
    delay: int | None = None
    """Steps between measuring and switching, in which the program is solved. Unset: a tenth of `every`,
    at most 10."""
    batches: int = 2
    """Statistics batches of one measurement, each a step's micro-batches, at most four of them. More say better how
    sure a plan is."""
    gains: GainsName = "auto"
    """How errors are followed through the model: ratios (few passes), blocks (per block), exact (per layer).
    auto: ratios where the model has a residual stream."""
    loss_weight: float = 1.0
    """Weight of the loss divergence in a GEMM's cost."""
    update_weight: float = 1.0
    """Weight of the weight divergence in a GEMM's cost."""
    curvature_weight: float = 0.0
    """Weight of the mean second-order change of the loss in a GEMM's cost."""
    final_share: float = 0.0
    """Last share of the run that may have a plan of higher precision, within the budget of the whole; 0 for none."""
    final_weight: float = 4.0
    """How much more harm counts in that last share."""
    probe_every: int | None = None
    """Steps between comparisons with bf16 on a batch; 0 for none. Unset: `every`, at most 1,000."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    snip: SnipConfig = field(default_factory=SnipConfig)
    device: str = "auto"
    """auto, cpu, cuda or cuda:N. auto: CUDA where there is one."""
    precision: str = "auto"
    """Number formats of the linear layers' GEMMs: auto (bf16 on CUDA, fp32 on CPU), a recipe, rules, or snip:
    chosen per GEMM from measurements, under a budget, while training.
    Recipes: fp32, bf16, fp8, fp8_tensor, fp8_row, mxfp8, int8, int8_fallback, int8_hadamard, fp4, nvfp4, mxfp4, or
    three of them as fprop/dgrad/wgrad. Rules follow after commas, the last one wins: blocks.0.*=bf16 (layers by
    pattern), *.wgrad=bf16 (one GEMM), head=fp8 (else it is not quantized), *.mlp.down.saved=bf16
    (what backward keeps of the input: a recipe or recompute). Example: fp8,*.wgrad=bf16,blocks.0.*=bf16"""

    backend: BackendName = "auto"
    """What runs quantized GEMMs: reference (emulates every recipe, everywhere), torch or triton (kernels of the
    device). auto: the fastest that works here. Another one is refused where it cannot run the plan."""

    @property
    def precision_rules(self) -> PrecisionRules:
        """`precision`, read; of snip, what a run begins with."""
        rules = parse_rules(self.precision)
        return rules.with_base(self.snip.start) if rules.is_planned else rules

    @property
    def trained_format(self) -> ParameterType:
        """Format of what is trained: the parameters', or of adapters fp32."""
        return "fp32" if self.adapter.rank else self.train.parameters

    @property
    def is_planned(self) -> bool:
        """Whether formats are chosen by measurement, while training."""
        return parse_rules(self.precision).is_planned

    @property
    def candidates(self) -> tuple[str, ...]:
        """The formats that snip chooses from."""
        return tuple(name.strip() for name in self.snip.formats.split(","))


def decided(value: T | None) -> T:
    """A setting of a resolved configuration: `resolve` has left no None."""
    assert value is not None, "the configuration has not been resolved"
    return value


Decision = tuple[Any, str]
"""The value of a setting that was left open, and the reason for it."""
Decide = Callable[[Config, str, Callable[[], Decision]], Config]
"""Gives a setting that is open a value."""
