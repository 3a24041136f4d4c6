"""Names that other tools give to settings, answered with Scrimp's.

Problem  Whoever comes from Hugging Face's Trainer, Axolotl, TorchTitan or nanochat types the name that he knows.
         The nearest spelling among Scrimp's names is then a guess, and often a wrong one.
Method   A table by the last part of a name (`training.seq_len`: `seq_len`), or by the last two where one alone says too
         little. Each entry is Scrimp's setting, with a note where it is measured in something else, or a sentence
         where Scrimp has no such setting.
Limits   The usual names, not all.
Checked  tests/config/test_elsewhere.py: every setting that is named exists
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scrimp.config.renamed import REMOVED, RENAMED


@dataclass(frozen=True)
class Answer:
    """What Scrimp has for a name of another tool."""

    key: str | None
    """Scrimp's setting by its dotted key, or `resume`, the option; None: there is none."""
    note: str = ""
    """What is different, or what to do where there is none; a clause."""


def _named(key: str, names: str, note: str = "") -> dict[str, Answer]:
    return dict.fromkeys(names.split(), Answer(key, note))


def _none(note: str, names: str) -> dict[str, Answer]:
    return dict.fromkeys(names.split(), Answer(None, note))


_LOGS = "leave it out: metrics.jsonl and TensorBoard's files in the run folder have every step"

_ANSWERS: dict[str, Answer] = {
    # -- batches and length
    **_named(
        "train.batch_tokens",
        "gradient_accumulation_steps gradient_accumulation grad_accum_steps grad_accum "
        "accumulation_steps accumulate_grad_batches accumulate",
        note="tokens of a whole step; it is accumulated over micro-batches",
    ),
    **_named(
        "train.batch_tokens",
        "global_batch_size total_batch_size tokens_per_batch batch_size_tokens",
        note="counted in tokens, not in sequences",
    ),
    **_named(
        "train.micro_batch",
        "per_device_train_batch_size train_batch_size micro_batch_size device_batch_size "
        "local_batch_size batch_size mbs",
        note="sequences per forward pass; a step has train.batch_tokens tokens",
    ),
    **_none(
        "leave it out: evaluation takes train.micro_batch sequences at a time",
        "per_device_eval_batch_size eval_batch_size val_batch_size",
    ),
    **_named(
        "train.steps",
        "num_train_epochs num_epochs epochs max_epochs",
        note="steps, not epochs: epochs x tokens of the text / train.batch_tokens",
    ),
    **_named(
        "train.steps",
        "max_steps num_steps num_iterations max_iters train_iters total_steps training_steps",
    ),
    **_named(
        "train.steps",
        "target_flops target_param_data_ratio train_tokens",
        note="steps of train.batch_tokens tokens each",
    ),
    **_named(
        "train.sequence",
        "seq_len seq_length sequence_len sequence_length max_seq_len max_seq_length "
        "max_sequence_length max_length block_size cutoff_len context_length",
    ),
    # -- optimizer and schedule
    **_named("optimizer.lr", "learning_rate max_lr peak_lr"),
    **_named(
        "optimizer.lr",
        "matrix_lr unembedding_lr scalar_lr muon_lr",
        note="one learning rate for all weights but the embedding",
    ),
    **_named("optimizer.embedding_lr_ratio", "embedding_lr embed_lr", note="as a multiple of optimizer.lr"),
    **_named("schedule.name", "lr_scheduler_type lr_scheduler lr_schedule scheduler decay_type lr_decay"),
    **_named(
        "schedule.warmup_steps",
        "warmup_ratio warmup warmup_iters num_warmup_steps lr_warmup_steps",
        note="a number of steps",
    ),
    **_named(
        "schedule.final_lr_ratio",
        "min_lr min_lr_ratio min_lr_factor cosine_min_lr_ratio final_lr_frac eta_min",
        note="as a share of optimizer.lr",
    ),
    **_none(
        "leave it out: schedule.name wsd decays over the last fifth of the run",
        "decay_ratio warmdown_ratio warmdown_iters cooldown_steps",
    ),
    **_named(
        "optimizer.name",
        "optimizer optim optimizer_type optimizer_name",
        note="adamw, nadamw, schedule-free, muon, galore, fira or auto",
    ),
    **_none("leave it out: each option of the optimizer is a setting optimizer.*", "optim_args"),
    **_named("optimizer.beta1", "adam_beta1 adam_beta_1"),
    **_named("optimizer.beta2", "adam_beta2 adam_beta_2"),
    **_named("optimizer.momentum", "muon_momentum"),
    **_named("optimizer.rank", "galore_rank"),
    **_named("optimizer.refresh_every", "update_proj_gap galore_update_interval"),
    **_named("optimizer.low_rank_scale", "galore_scale"),
    **_named("optimizer.eps", "adam_epsilon epsilon"),
    **_named(
        "optimizer.clip",
        "max_grad_norm max_norm grad_clip gradient_clipping gradient_clip_val clip_grad_norm clip_grad",
    ),
    **_named("optimizer.weight_decay", "wd"),
    **_none("leave it out: Scrimp keeps no average of the weights", "ema use_ema ema_decay model_ema"),
    **_none("leave it out: the loss is plain cross-entropy", "label_smoothing label_smoothing_factor"),
    **_none("leave it out: Scrimp drops nothing out", "dropout attention_dropout hidden_dropout"),
    # -- formats, memory, devices
    **_named(
        "precision",
        "bf16 fp16 tf32 fp32 fp8 int8 fp4 nvfp4 mxfp8 dtype torch_dtype mixed_precision "
        "mixed_precision_param amp half float8 quantization",
        note="such as bf16, fp8 or snip",
    ),
    **_named(
        "memory.activations",
        "gradient_checkpointing activation_checkpointing activation_checkpoint recompute "
        "selective_ac_option use_gradient_checkpointing checkpoint_activations",
        note="auto recomputes what does not fit; block recomputes all",
    ),
    **_named(
        "memory.optimizer",
        "cpu_offload offload enable_cpu_offload offload_optimizer optimizer_offload",
        note="host; auto moves there what does not fit",
    ),
    **_named("budget.device_memory", "gpu_memory_limit max_memory gpu_memory_utilization"),
    **_named("train.compile", "torch_compile use_compile", note="on or off"),
    **_named("device", "use_cpu no_cuda device_type accelerator", note="cpu, cuda or cuda:N"),
    **_named(
        "layout.fsdp",
        "deepspeed fsdp_config data_parallel_shard_degree",
        note="without it the model is sharded over all ranks",
    ),
    **_named("layout.dp", "ddp data_parallel_replicate_degree", note="copies of the model"),
    **_named("layout.zero", "zero_stage", note="3, 2 or 1"),
    **_named("layout.tp", "tp_size tensor_parallel_degree tensor_model_parallel_size"),
    **_none(
        "start as many processes: scrimp launch --ranks N train ...",
        "num_gpus gpus nproc_per_node world_size local_rank",
    ),
    **_named("layout.tp", "tp_size tensor_parallel_degree tensor_model_parallel_size"),
    **_named("layout.cp", "context_parallel_degree", note="ranks that share the tokens of every row"),
    **_named(
        "layout.pp",
        "pp_size pipeline_parallel_degree pipeline_model_parallel_size",
        note="ranks of a pipeline",
    ),
    **_named(
        "adapter.rank",
        "adapter lora peft use_peft lora_r lora_rank",
        note="rank of the adapters beside the weights of model.weights",
    ),
    **_named("adapter.alpha", "lora_alpha"),
    **_named("adapter.targets", "lora_target_modules target_modules", note="layers by Scrimp's names"),
    **_none("leave it out: adapters have no dropout", "lora_dropout"),
    **_named("adapter.base", "load_in_4bit load_in_8bit qlora", note="nvfp4 or mxfp8"),
    **_none(
        "leave it out: attention runs in the fastest kernel that there is",
        "flash_attention flash_attn use_flash_attn attn_implementation sdp_attention xformers_attention",
    ),
    # -- model
    **_named(
        "model.weights",
        "model_name_or_path base_model init_from initial_load_path hf_path pretrained",
        note="a folder; model.preset names an architecture to train from scratch",
    ),
    **_named(
        "model.preset",
        "model_name model_type flavor model arch architecture",
        note="model.weights FOLDER starts from weights",
    ),
    **_named("model.num_layers", "depth n_layer n_layers num_hidden_layers"),
    **_named("model.num_heads", "n_head n_heads num_attention_heads"),
    **_named("model.num_kv_heads", "n_kv_head n_kv_heads num_key_value_heads"),
    **_named("model.width", "n_embd hidden_size d_model dim model_dim embed_dim"),
    **_named("model.ffn_width", "intermediate_size ffn_dim ffn_hidden_size d_ff"),
    **_named("model.context", "max_position_embeddings n_ctx"),
    # -- data
    **_named(
        "data.source",
        "dataset datasets dataset_name dataset_path train_file train_data data_path data_dir data text",
    ),
    **_named(
        "data.mix",
        "blend interleave_probs dataset_weights sampling_weights",
        note="sources with weights, as web.jsonl=0.7,stdlib=0.3",
    ),
    **_named("data.text_column", "dataset_text_field text_field text_key content_field"),
    **_named(
        "data.tokenizer",
        "tokenizer_name tokenizer_path tokenizer_config tokenizer_type hf_assets_path",
    ),
    **_named(
        "data.held_out",
        "val_set_size val_size validation_split validation_split_percentage test_size eval_split",
        note="a share of the documents",
    ),
    **_named(
        "data.mask_documents",
        "sample_packing packing pack document_masking",
        note="documents are always packed; this keeps attention within each",
    ),
    **_named("data.cache", "cache_dir dataset_prepared_path"),
    **_named("run.seed", "random_seed data_seed manual_seed"),
    **_none(
        "leave it out: the loader has one thread, which reads ahead",
        "dataloader_num_workers num_workers dataloader_pin_memory dataloader_prefetch_factor",
    ),
    # -- run folder, checkpoints, evaluation, logs
    **_named(
        "run.dir",
        "output_dir out_dir save_dir dump_folder checkpoint_dir logging_dir run_name exp_name "
        "experiment_name save_path log_dir",
    ),
    **_none(
        "leave it out: a run is never written over; name another folder with run.dir",
        "overwrite_output_dir",
    ),
    **_named(
        "checkpoint.every",
        "save_steps save_interval save_every save_strategy save_freq checkpoint_interval saves_per_epoch",
        note="a number of steps",
    ),
    **_named("checkpoint.keep_last", "save_total_limit keep_latest_k max_checkpoints"),
    **_named(
        "resume",
        "resume_from_checkpoint resume_from auto_resume_from_checkpoints auto_resume",
        note="beside run.dir, the folder of the run",
    ),
    **_named(
        "evaluation.every",
        "eval_steps eval_interval eval_freq eval_strategy evaluation_strategy evals_per_epoch "
        "val_interval val_every val_check_interval do_eval",
        note="a number of steps",
    ),
    **_named(
        "evaluation.tokens",
        "eval_iters eval_batches max_eval_samples val_tokens eval_max_steps",
        note="held-out tokens",
    ),
    **_none("leave it out: a sample is generated at the end", "sample_every core_metric_every"),
    **_none(
        "leave it out: the last checkpoint counts, and Scrimp does not stop early",
        "early_stopping_patience load_best_model_at_end metric_for_best_model",
    ),
    **_none(
        _LOGS,
        "wandb use_wandb enable_wandb wandb_project wandb_entity wandb_run_id wandb_name report_to "
        "mlflow_tracking_uri use_mlflow comet_project_name logging_steps logging_strategy "
        "logging_first_step log_interval log_every log_every_n_steps log_freq tensorboard "
        "enable_tensorboard use_tensorboard",
    ),
    **_none(
        "leave it out, and run `scrimp export RUN OUT` when the run is done",
        "push_to_hub hub_model_id export_hf",
    ),
    **_none("leave it out: `scrimp doctor` and the report say where time goes", "enable_profiling profile"),
    **_named("tokens", "max_new_tokens max_tokens num_tokens"),
    **_named("run.dir", "run model_tag"),
    **_named("resume", "resume_from_step", note="beside run.dir, the folder of the run"),
    **_named("model.width", "aspect_ratio"),
    **_none("leave it out: it is model.width / model.num_heads", "head_dim head_size"),
    **_named(
        "train.deterministic",
        "full_determinism use_deterministic_algorithms deterministic_mode",
        note="true unless it is set to false",
    ),
    **_none(
        "leave it out: the loss counts every token",
        "train_on_inputs train_on_prompts completion_only_loss",
    ),
    **_none(
        "leave it out: documents are packed one after another, in an order that run.seed decides",
        "group_by_length dataloader_drop_last remove_unused_columns shuffle pad_to_sequence_len",
    ),
    **_none(
        "leave it out: a micro-batch that does not fit is made smaller by itself where train.micro_batch is left out",
        "auto_find_batch_size",
    ),
    **_none(
        "leave it out: Scrimp has its own kernels",
        "use_liger_kernel liger_kernel use_unsloth",
    ),
    **_none("leave it out: Scrimp adds no noise to embeddings", "neftune_noise_alpha"),
    **_none(
        "leave it out: [layout] says how a run is laid over its ranks",
        "parallelism ddp_find_unused_parameters ddp_backend",
    ),
    # -- where the last part alone says too little
    "model.name": Answer("model.preset", "model.weights FOLDER starts from weights"),
    "model.path": Answer("model.weights", "a folder"),
    "checkpoint.interval": Answer("checkpoint.every"),
    "checkpoint.folder": Answer("run.dir"),
    "activation_checkpoint.mode": Answer("memory.activations", "auto recomputes what does not fit"),
    "lr_scheduler.type": Answer("schedule.name"),
}


def answer_for(name: str, known: Mapping[str, object]) -> Answer | None:
    """What a name of another tool is here; None: it is not in the table, or what it is is not among the known.

    Args:
        name: as written, with dots or without, dashes or underscores.
        known: dotted keys of what can be set where the name was written.
    """
    old = name.lower().replace("-", "_")
    if old in REMOVED:
        return Answer(None, REMOVED[old])
    if RENAMED.get(old) in known:
        return Answer(RENAMED[old], "its name since settings are grouped by component")
    parts = old.removeprefix("no_").split(".")
    return _first((".".join(parts[-2:]), parts[-1]), known)


def answer_for_section(name: str, known: Mapping[str, object]) -> Answer | None:
    """The same by the sections before the last part: `[wandb] project`, `deepspeed.zero_stage`."""
    parts = name.lower().replace("-", "_").split(".")
    return _first(parts[-2::-1], known)


def _first(names: Iterable[str], known: Mapping[str, object]) -> Answer | None:
    for name in names:
        found = _ANSWERS.get(name)
        if found is not None and (found.key is None or found.key in known):
            return found
    return None
