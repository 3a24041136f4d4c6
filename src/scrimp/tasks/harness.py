"""Tasks of lm-eval (EleutherAI's lm-evaluation-harness) asked of a model in this process.

Problem  lm-eval has hundreds of tasks, and loads models in forms of its own.
Method   lm-eval asks a model three things: the log-probability of a continuation, that of a whole text, and a
         continuation. Here they are answered by Scrimp's own model (`scoring`, `scrimp.models.generation`): nothing is
         exported or loaded a second time, kinds of the user's own work, and numbers are those of Scrimp's own tasks.
         A text longer than the context is scored in the windows that lm-eval makes, each token once.
Trust    A task's own file may name Python code, which runs as it is loaded: it needs --trust-code, as tasks of lm-eval
         that run what a model writes do. Tasks that come with lm-eval need not.
Limits   One process. No chat templates, no images. Of options of generation: until, max_gen_toks,
         do_sample, temperature, top_k, top_p; others are refused. Data of lm-eval's own tasks is downloaded by it.
Source   `lm_eval.api.model.LM`, version 0.4.13, and `lm_eval.models.huggingface`, whose numbers these are
Checked  tests/tasks/test_harness.py: against lm-eval's own model on the exported folder
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scrimp.config import Sampling
from scrimp.data import Tokenizer
from scrimp.errors import ConfigError, ModelError, ScrimpError
from scrimp.models.generation import generate
from scrimp.runtime import Executable
from scrimp.tasks.figures import Figure
from scrimp.tasks.scoring import Row, encode, score_rows

try:
    from lm_eval import simple_evaluate, utils
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ConfigError(
        "lm-eval is not installed, or not whole",
        got=error,
        do="pip install 'scrimp[lm-eval]', or leave its tasks out",
    ) from error

_DEFAULT_TOKENS = 256
"""Most new tokens where a task does not say, as lm-eval has it."""
_RESAMPLED = 1000
"""Times that lm-eval draws items again for errors of metrics that are no means."""


class AskedModel(LM):  # type: ignore[misc]  # lm-eval is not typed
    """A model of Scrimp as lm-eval asks it."""

    def __init__(self, executable: Executable, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._executable, self._tokenizer = executable, tokenizer
        self._context = executable.model.architecture.context

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """The log-probability of each continuation behind its context, and whether it is greedy."""
        rows = [encode(self._tokenizer, *request.args) for request in requests]
        return [(one.log_p, one.is_greedy) for one in score_rows(self._executable, rows)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """The log-probability of each text, behind the delimiter."""
        windows = [self._windows(*request.args) for request in requests]
        scores = iter(score_rows(self._executable, [row for rows in windows for row in rows]))
        return [sum(next(scores).log_p for _ in rows) for rows in windows]

    def _windows(self, text: str) -> list[Row]:
        pairs = utils.get_rolling_token_windows(
            token_list=self._tokenizer.encode_prompt(text) if text else [],
            prefix_token=self._tokenizer.delimiter_id,
            max_seq_len=self._context,
            context_len=1,
        )
        return [Row(*utils.make_disjoint_window(pair)) for pair in pairs]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The continuation of each context, up to the first of the texts that end it."""
        return [self._continued(*request.args) for request in requests]

    def _continued(self, context: str, options: Mapping[str, Any]) -> str:
        left = dict(options)
        until = left.pop("until", None) or []
        ends = [end for end in ([until] if isinstance(until, str) else until) if end]
        most = int(left.pop("max_gen_toks", _DEFAULT_TOKENS))
        sampling = _sampling(left)
        if left:
            raise ConfigError(
                "the task asks for generation in a way that is not supported",
                got=", ".join(sorted(left)),
                expected="until, max_gen_toks, do_sample, temperature, top_k, top_p",
            )
        if most >= self._context:
            raise ModelError(
                "what a task lets a model write does not fit its context",
                got=f"max_gen_toks {most:,}",
                expected=f"less than {self._context:,}",
            )
        prompt = self._tokenizer.encode_prompt(context)[-(self._context - most) :]
        ids: list[int] = []
        text = ""
        for token in generate(
            self._executable.model,
            prompt,
            max_tokens=most,
            sampling=sampling,
            end_ids=self._tokenizer.end_ids,
        ):
            ids.append(token)
            text = self._tokenizer.decode(ids)
            if any(end in text for end in ends):
                break
        return text[: min((text.index(end) for end in ends if end in text), default=len(text))]


def _sampling(options: dict[str, Any]) -> Sampling:
    """How tokens are drawn, by the options that say it, which are taken out. As in lm-eval a temperature above 0 draws,
    unless `do_sample` says otherwise."""
    temperature = options.pop("temperature", None)
    draws = options.pop("do_sample", bool(temperature))
    return Sampling(
        temperature=float(1.0 if temperature is None else temperature) if draws else 0.0,
        top_k=int(options.pop("top_k", None) or 0),
        top_p=float(options.pop("top_p", None) or 1.0),
    )


def refuse_untrusted(names: Sequence[str], *, trusted: bool) -> None:
    """Refuse files of tasks that are not trusted: they may name code, which runs as they are read.

    Raises:
        ConfigError: by the files' names.
    """
    files = [name for name in names if _is_file(name)]
    if files and not trusted:
        raise ConfigError(
            "a task file of lm-eval may name code, which runs only where the command line says so",
            got=", ".join(files),
            expected="--trust-code",
            do="read the file, and add --trust-code if you trust it",
        )


def _is_file(name: str) -> bool:
    """Whether lm-eval takes a name for a file, whatever it ends with."""
    return Path(name).suffix.lower() in (".yaml", ".yml") or Path(name).expanduser().is_file()


def measure(
    executable: Executable, tokenizer: Tokenizer, names: Sequence[str], *, trusted: bool
) -> list[Figure]:
    """The figures of lm-eval's tasks.

    Args:
        names: of tasks or groups, or YAML files of tasks.
        trusted: whether code that task files name may run, and tasks that run what a model writes.

    Raises:
        ConfigError: there is no such task, its data cannot be had, or its file is not trusted.
    """
    refuse_untrusted(names, trusted=trusted)
    try:
        found = simple_evaluate(
            model=AskedModel(executable, tokenizer),
            tasks=list(names),
            task_manager=TaskManager(include_defaults=not all(map(_is_file, names))),
            bootstrap_iters=_RESAMPLED,
            log_samples=False,
            confirm_run_unsafe_code=trusted,
        )
    except ScrimpError:
        raise
    except Exception as error:  # whatever a task's file, its template or its data may bring about
        raise ConfigError(
            f"lm-eval cannot ask {', '.join(names)}",
            got=f"{type(error).__name__}: {error}",
            expected="tasks that `lm-eval ls tasks` lists, or YAML files, and data that can be had",
        ) from error
    assert found is not None, "one process"
    counts = found.get("n-samples", {})
    return [
        figure
        for task, metrics in found["results"].items()
        for figure in _figures(task, metrics, counts.get(task, {}).get("effective"))
    ]


def _figures(task: str, metrics: Mapping[str, Any], items: int | None) -> list[Figure]:
    """The metrics of a task, which lm-eval names as `acc,none`, each beside its `acc_stderr,none`."""
    found = []
    for key, value in metrics.items():
        name, comma, kind = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = metrics.get(f"{name}_stderr,{kind}")
        shown = name if kind == "none" else f"{name} ({kind})"
        found.append(
            Figure(
                task,
                shown,
                float(value),
                float(error) if isinstance(error, int | float) else None,
                items=items,
            )
        )
    return found
