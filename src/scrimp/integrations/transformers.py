"""SNIP in the Trainer of transformers: measured, planned and switched while it trains.

::

    trainer = Trainer(model, args, train_dataset=data, callbacks=[SnipCallback(0.75)])

After `first` updates and then every `every`, at the end of a step: statistics on the last `batches` steps; a thread
solves; `switch_after` updates later, however long that took, the model runs by the new plan.

Batches  A hook on the model keeps the arguments of its training forward passes, of those steps alone that will be
         measured: on the device, after the collator, with the Trainer's own `num_items_in_batch`. A
         statistics batch is a whole step with all its accumulated micro-batches, so gradients are those
         that the optimizer sees. No batch is drawn: data order and random states stay as they were.
Loss     What the model's forward returns, as the Trainer takes it by default. A Trainer that makes its loss itself
         (label smoothing, `compute_loss_func`, an own `compute_loss`) is refused where that can be seen.
Figures  snip/... beside the Trainer's next record: in its log history, on the console, and for the callbacks that come
         after this one; `add_to` puts it before those that report (TensorBoard and others).
Resumed  Plan, plan in waiting, noise and history are in the Trainer's state, and statistics batches beside it where a
         measurement is near: a resumed run continues the same.
Limits   One process. transformers 5; the Trainer itself needs accelerate. fp16 is refused: planned layers compute in
         bf16 or fp32. The model still runs by its last plan when training has ended, `planned.swap_out()` undoes it.
Checked  tests/integrations/test_transformers_callback.py; examples/transformers_trainer.py
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scrimp.api.arguments import FORMATS, budget_from, candidates_from
from scrimp.api.checks import refuse_ranks
from scrimp.api.loop_cycle import LoopCycle
from scrimp.api.modules import unwrap
from scrimp.cycle import CycleSettings
from scrimp.errors import DeviceError, PlanError
from scrimp.gemm import PlannedModel
from scrimp.integrations.recent_batches import Inputs, RecentBatches
from scrimp.planner.precision import Budget, PrecisionPlan

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise DeviceError(
        "transformers is not installed", got=error, do='pip install "transformers>=5.0" accelerate'
    ) from error

BATCHES_FILE = "snip_batches.safetensors"
PREFIX = "snip/"
_ARGUMENTS = ("formats", "every", "first", "batches", "policy", "start", "layers", "gains", "sensitivity")
"""That are settings of the cycle by the same name; so is the seed."""
_log = logging.getLogger("scrimp")


class SnipCallback(TrainerCallback, ExportableState):
    """Plans the precision of a Trainer's model; see the module."""

    def __init__(
        self,
        budget: Budget | Mapping[str, float] | float,
        *,
        formats: Sequence[str] = FORMATS,
        every: int = 2000,
        first: int = 100,
        batches: int = 4,
        switch_after: int = 10,
        policy: str = "snip",
        start: str | None = None,
        layers: Sequence[str] | None = None,
        gains: str = "auto",
        sensitivity: str = "auto",
        seed: int = 0,
    ) -> None:
        """Take settings; nothing happens before training begins.

        Args:
            budget: share of the planned layers' FLOPs in 4 bits, or a budget as `scrimp.plan` takes it.
            formats: candidate recipes.
            every: updates between plans.
            first: updates before the first statistics: after the warm-up.
            batches: steps that statistics are of.
            switch_after: updates between statistics and the switch; 0: the run waits for the solver.
            policy: snip or a baseline.
            start: recipe of all planned layers before the first plan; None: the model as it is.
            layers: names; None: all trained ones but the head.
            gains, sensitivity: as `scrimp.measure` takes them.
            seed: of the rounding noise and of the injected noise.

        Raises:
            PlanError: arguments that do not fit together; what depends on the model or on the number of updates,
                when training begins.
        """
        self.cycle = LoopCycle(
            CycleSettings(
                budget=budget_from(budget),
                formats=candidates_from(formats),
                every=every,
                first=first,
                batches=batches,
                delay=switch_after,
                policy=policy,
                start=start,
                layers=None if layers is None else tuple(layers),
                gains=gains,
                sensitivity=sensitivity,
                seed=seed,
            )
        )
        self.saved: dict[str, Any] = {}
        """Set by a Trainer that makes its callbacks anew from a checkpoint; its state is read from the Trainer's."""
        self._recent = RecentBatches(batches)
        self._is_keeping = self._has_seen_a_loss = False
        self._hook: Any = None

    @property
    def plan(self) -> PrecisionPlan | None:
        """The current plan; None before the first."""
        return self.cycle.plan

    @property
    def planned(self) -> PlannedModel | None:
        """The model's planned layers; None while it has none."""
        return self.cycle.planned

    @property
    def history(self) -> list[dict[str, Any]]:
        """A record of each plan: step, reason, figures."""
        return self.cycle.history

    def add_to(self, trainer: Any) -> SnipCallback:
        """Join a Trainer before the callbacks that report, so that they report these figures too."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def state(self) -> dict[str, Any]:
        """What the Trainer's checkpoints keep; waits for the solver, whose plan is part of it."""
        settings = self.cycle.settings
        arguments = {name: getattr(settings, name) for name in _ARGUMENTS}
        arguments |= {"budget": settings.budget.given, "switch_after": settings.delay, "seed": settings.seed}
        saved = {"cycle": self.cycle.to_state(), "figures": self._figures()}
        return {"args": arguments, "attributes": {"saved": saved}}

    # -- events of the Trainer -----------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the model over, and on resuming the state of the checkpoint."""
        _refuse(args)
        self._refuse_short_run(state.max_steps)
        model, name = unwrap(kwargs["model"]), type(self).__name__
        kept = state.stateful_callbacks.get(name) if state.global_step > 0 else None
        saved = (
            None if kept is None else (kept[-1] if isinstance(kept, list) else kept)["attributes"]["saved"]
        )
        self.cycle.begin(
            kwargs["model"],
            kwargs["optimizer"],
            _losses,
            steps=state.max_steps,
            max_norm=args.max_grad_norm or 0.0,
            saved=None if saved is None else saved["cycle"],
        )
        if saved is not None:
            self.cycle.figures = {k.removeprefix(PREFIX): v for k, v in saved["figures"].items()}
        self._recent.clear()
        if saved is not None:
            self._recent.read(_folder(args, state) / BATCHES_FILE, next(model.parameters()).device)
        # A checkpoint without this callback has no place for its state, which the Trainer would miss at the next.
        state.stateful_callbacks.setdefault(name, self.state())
        self._has_seen_a_loss = self._is_keeping = False
        self._hook = model.register_forward_hook(self._look, with_kwargs=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what this step's forward passes get, if it will be measured."""
        step = state.global_step
        self._is_keeping = self.cycle.measures_within(step + 1, step + self.cycle.settings.batches)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Switch and measure, where this step is the one for it."""
        if self._is_keeping and self._recent.end_step() > args.gradient_accumulation_steps:
            raise _other_loss("more forward passes in a step than it has micro-batches")
        step, self._is_keeping = state.global_step, False
        self.cycle.after_update(step, self._recent.steps)
        if self.cycle.measures_within(step, step):
            self._recent.clear()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the statistics batches of a measurement that is near."""
        folder = _folder(args, state)
        if not self._recent.steps or not folder.is_dir():
            return
        odd = self._recent.write(folder / BATCHES_FILE)
        if odd:
            _log.warning(
                "the checkpoint lacks arguments of the model that are no tensors (%s): a run that resumes from it "
                "makes its next plan from fewer batches",
                ", ".join(odd),
            )

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the figures of the last plan beside the Trainer's."""
        logs = kwargs.get("logs")
        figures = self._figures()
        if not logs or not figures or not {"loss", "train_loss"} & set(logs):
            return
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)
        self.cycle.figures = {}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the model no more."""
        if self._hook is not None:
            self._hook.remove()
        self._recent.clear()
        self.cycle.close()

    def _refuse_short_run(self, max_steps: int) -> None:
        """A run that ends before its first plan begins would never have one: not what a callback was given for."""
        first, delay = self.cycle.settings.first, self.cycle.settings.delay
        if first + delay >= max_steps:
            raise PlanError(
                "the run would end before its first plan",
                got=f"first {first:,} and switch_after {delay:,} of {max_steps:,} updates",
                expected=f"together less than {max_steps:,}",
                do="lower first or switch_after; for one format from beginning to end use scrimp.gemm.swap_in",
            )

    def _figures(self) -> dict[str, float]:
        """Figures of the current plan, by their names in the Trainer's records."""
        return {f"{PREFIX}{name}": value for name, value in self.cycle.figures.items()}

    def _look(self, module: nn.Module, args: tuple[Any, ...], inputs: Inputs, output: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        if not self._has_seen_a_loss:
            _loss_of(output)
            if args:
                raise _other_loss("forward is called with arguments that have no name")
            self._has_seen_a_loss = True
        if self._is_keeping:
            self._recent.add(inputs)


def _losses(model: nn.Module, step: list[Inputs]) -> Iterator[Tensor]:
    """Shares of a step's mean loss, as the Trainer takes them."""
    for inputs in step:
        loss = _loss_of(model(**inputs))
        yield loss if inputs.get("num_items_in_batch") is not None else loss / len(step)


def _folder(args: Any, state: Any) -> Path:
    """Where the Trainer writes the checkpoint of a step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _refuse(args: Any) -> None:
    """What can be seen from the Trainer's arguments to go wrong later."""
    refuse_ranks()
    if args.n_gpu > 1:
        raise PlanError(
            "the Trainer would run the model in nn.DataParallel, which no plan reaches",
            got=f"{args.n_gpu} GPUs in one process",
            do="set CUDA_VISIBLE_DEVICES to one of them",
        )
    if args.fp16:
        raise PlanError("planned layers do not compute in fp16", got="fp16", expected="bf16 or fp32")
    if args.label_smoothing_factor:
        raise _other_loss(f"label_smoothing_factor {args.label_smoothing_factor}")


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise _other_loss("a forward pass that returns no loss")
    return loss


def _other_loss(got: str) -> PlanError:
    return PlanError(
        "the Trainer makes its loss outside the model, where the callback cannot see it",
        got=got,
        expected="a model whose forward pass, given the labels, returns the loss",
        do="put the loss into the model, or use scrimp.measure, plan and apply in a loop of your own",
    )
