"""Generation, scoring and training in one process, under one policy for the allocator's cache: for `phases.py`.

An iteration is one of reward-ranked fine-tuning: two samples of every prompt are generated, a frozen reference model
scores them by their probability, the model takes one step of AdamW on the better of each pair.

generation  `scrimp.models.generation.generate`, all sequences at once, a token of each in turn: caches of keys and
            values of as many lengths live beside each other, grow in pieces of 256 tokens, and end one by one
scoring     one forward pass per sequence, each of another length
training    micro-batches padded to their longest, forward, backward, update

The two samples of a prompt are equally long, so that which is better changes no size: sizes are a function of the seed.

Policies, at every edge between two phases:

default, expandable  nothing is done; expandable: the process was started with expandable_segments:True
always               the cache is given back
measured             `PhaseEdges`: given back where the next phase needs it by what it took the last time
pools                generation and scoring allocate in pools of their own, which are kept; training in the general
                     one, as the threads of the backward pass do not follow into a pool
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from scrimp.config import Config, ModelConfig, Sampling, TrainConfig, preset, resolve
from scrimp.data import Batch
from scrimp.data.loader import IGNORED
from scrimp.models.generation import generate
from scrimp.models.initialise import initialise
from scrimp.optim import build
from scrimp.planner import Figures, build_plan
from scrimp.planner.memory.placement import Placement
from scrimp.runtime import Executable, realise
from scrimp.runtime.memory import CudaCache, PhaseEdges

POLICIES = ("default", "always", "measured", "expandable", "pools")
PHASES = ("generation", "scoring", "training")
POOLED = PHASES[:2]
LEARNING_RATE = 1e-4

Text = tuple[list[int], int]
"""Token ids, and how many of them are the prompt."""


@dataclass(frozen=True)
class Load:
    """What a process does."""

    device: str
    preset: str
    prompts: int
    """Prompts of an iteration; two samples of each are generated."""
    prompt_tokens: tuple[int, int]
    """Fewest and most."""
    new_tokens: tuple[int, int]
    micro_batch: int
    iterations: int
    seed: int = 0


class Account:
    """Figures of torch's allocator between edges; on a CPU all of them stay empty."""

    def __init__(self, cache: CudaCache | None) -> None:
        self._cache = cache
        self.peak_reserved = self.peak_allocated = 0
        self.slack: dict[str, list[int]] = {phase: [] for phase in PHASES}
        """Reserved but not allocated at the edge into a phase, before the policy does anything."""

    def note(self, phase: str | None) -> None:
        """At an edge: the peaks since the last one, and what is kept for reuse."""
        if self._cache is None:
            return
        reading = self._cache.read()
        self.peak_reserved = max(self.peak_reserved, torch.cuda.max_memory_reserved())
        self.peak_allocated = max(self.peak_allocated, reading.peak)
        if phase is not None:
            self.slack[phase].append(reading.reserved - reading.allocated)

    def begin(self) -> None:
        """A phase begins: new peaks."""
        if self._cache is not None:
            torch.cuda.reset_peak_memory_stats()


class Policy:
    """What is done at edges."""

    def __init__(self, name: str, device: torch.device) -> None:
        cache = CudaCache(device) if device.type == "cuda" else None
        self.account = Account(cache)
        self.phase: str | None = None
        self._emptied = cache if name == "always" else None
        self._times_emptied = 0
        self._edges = PhaseEdges(cache if name == "measured" else None, report=lambda sentence: None)
        self._pools: dict[str, torch.cuda.MemPool] = {}
        if name == "pools" and cache is not None:
            self._pools = {phase: torch.cuda.MemPool() for phase in POOLED}

    @property
    def releases(self) -> int:
        """How often the cache was given back."""
        return self._times_emptied + len(self._edges.released)

    @contextlib.contextmanager
    def enter(self, phase: str) -> Iterator[None]:
        """Around the work of a phase."""
        self.phase = phase
        self.account.note(phase)
        if self._emptied is not None:
            self._emptied.release()
            self._times_emptied += 1
        self._edges.switch(phase)
        self.account.begin()
        pool = self._pools.get(phase)
        with contextlib.nullcontext() if pool is None else torch.cuda.use_mem_pool(pool):
            yield


class Work:
    """The models, and one iteration after another."""

    def __init__(self, load: Load) -> None:
        self.load = load
        config = Config(
            precision="bf16" if load.device == "cuda" else "fp32",
            model=ModelConfig(preset=load.preset),
            train=TrainConfig(
                sequence=load.prompt_tokens[1] + load.new_tokens[1], micro_batch=load.micro_batch
            ),
        )
        self._architecture = preset(load.preset)
        self._config = resolve(config, self._architecture, device_type=load.device).config
        self.trained, self.reference = self._model(seed=0), self._model(seed=1)
        self.reference.model.requires_grad_(False)
        self._optimizer = build(self._config.optimizer, self.trained, seed=0)

    def _model(self, seed: int) -> Executable:
        config = self._config
        plan = build_plan(
            config,
            self._architecture,
            device_name=self.load.device,
            device_is_host=self.load.device == "cpu",
            torch_version=torch.__version__,
            reasons={},
            placement=Placement.resident(self._architecture.num_layers),
            why="everything resident",
            predicted=Figures(),
        )
        return realise(
            plan,
            self._architecture,
            lambda model: initialise(model, seed),
            device=torch.device(self.load.device),
            parameters=config.train.parameters,
            compute=config.precision_rules.compute,
            loss_chunk=config.train.loss_chunk or 0,
        )

    def iteration(self, number: int, policy: Policy) -> float:
        """Generate, score, train: the loss per generated token."""
        with policy.enter("generation"):
            texts = self._generate(number)
        with policy.enter("scoring"):
            scores = [self._score(text) for text in texts]
        kept = [texts[i + int(scores[i + 1] > scores[i])] for i in range(0, len(texts), 2)]
        with policy.enter("training"):
            return self._train(number, kept)

    def _generate(self, number: int) -> list[Text]:
        load, model = self.load, self.trained.model
        draws = torch.Generator().manual_seed(1000 * load.seed + number)
        texts, streams = [], []
        for index in range(load.prompts):
            prompt = _draw(load.prompt_tokens, draws)
            ids = torch.randint(0, self._architecture.vocab_size, (prompt,), generator=draws).tolist()
            most = _draw(load.new_tokens, draws)
            for sample in range(2):
                texts.append((list(ids), prompt))
                streams.append(
                    generate(model, ids, max_tokens=most, sampling=Sampling(1.0, seed=2 * index + sample))
                )
        running = list(zip(texts, streams, strict=True))
        model.eval()
        with self.trained.autocast():
            while running:
                going = []
                for (ids, prompt), stream in running:
                    token = next(stream, None)
                    if token is not None:
                        ids.append(token)
                        going.append(((ids, prompt), stream))
                running = going
        model.train()
        return texts

    @torch.no_grad()
    def _score(self, text: Text) -> float:
        """Log-probability of what was generated, by the reference model."""
        tokens_BT, targets_BT = batch_of([text])
        return -float(self.reference.loss(Batch.of(tokens_BT, targets_BT)).loss)

    def _train(self, step: int, kept: list[Text]) -> float:
        size, executable = self.load.micro_batch, self.trained
        num_targets = sum(len(ids) - prompt for ids, prompt in kept)
        total, first_row = torch.zeros((), device=executable.device), 0
        for start in range(0, len(kept), size):
            tokens_BT, targets_BT = batch_of(kept[start : start + size])
            executable.begin(step, first_row)
            sums = executable.loss(Batch.of(tokens_BT, targets_BT))
            (sums.total / num_targets).backward()
            executable.end_backward()
            total += sums.loss.detach()
            del sums
            first_row += tokens_BT.numel()
        self._optimizer.clip(self._optimizer.gradient_norm(), self._config.optimizer.clip)
        self._optimizer.step(LEARNING_RATE)
        self._optimizer.zero_grad()
        return float(total) / num_targets


def _draw(limits: tuple[int, int], draws: torch.Generator) -> int:
    return int(torch.randint(limits[0], limits[1] + 1, (), generator=draws))


def batch_of(texts: list[Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (B, T), padded to the longest; only what was generated has targets."""
    T = max(len(ids) for ids, _ in texts) - 1
    tokens_BT = torch.zeros(len(texts), T, dtype=torch.int64)
    targets_BT = torch.full_like(tokens_BT, IGNORED)
    for row, (ids, prompt) in enumerate(texts):
        tokens_BT[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets_BT[row, prompt - 1 : len(ids) - 1] = torch.tensor(ids[prompt:])
    return tokens_BT, targets_BT


def run(policy_name: str, load: Load, limit: int = 0) -> dict[str, Any]:
    """All iterations under a policy: what was measured.

    Args:
        limit: bytes that the allocator may reserve; 0: what the device has.
    """
    device = torch.device(load.device)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.init()  # pools and figures need the allocator
    if limit:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
    seconds, losses, ended = [], [], None
    policy = Policy(policy_name, device)
    try:
        work = Work(load)
        for number in range(load.iterations):
            start = time.perf_counter()
            losses.append(work.iteration(number, policy))
            if on_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        ended = f"out of memory in {policy.phase or 'building'}, iteration {len(seconds)}"
    account = policy.account
    account.note(None)
    stats = torch.cuda.memory_stats() if on_cuda else {}
    return {
        "policy": policy_name,
        "limit": limit,
        "load": asdict(load),
        "seconds": seconds,
        "losses": losses,
        "ended": ended,
        "peak_reserved": account.peak_reserved,
        "peak_allocated": account.peak_allocated,
        "slack": account.slack,
        "releases": policy.releases,
        "retries": stats.get("num_alloc_retries", 0),
        "failures": stats.get("num_ooms", 0),
        "expandable": expandable_segments() if on_cuda else False,
    }


def expandable_segments() -> bool:
    """Whether the allocator really has them: some versions of torch ignore one of the setting's names."""
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return bool(settings.get("expandable_segments", False))
