"""lm-eval without its talk: a model as it sees one, a task of it from a file."""

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from torch import nn


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """lm-eval and datasets talk on stderr (log lines, bars that cannot be switched off): none of it."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def language_model(model: nn.Module, tokenizer: Any, batch: int) -> Any:
    """`model` as lm-eval sees it; its context is the config's, `batch` requests go through it at a time."""
    with quiet():
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=batch,
                    max_length=model.config.max_position_embeddings)


def load_task(config: dict[str, Any]) -> Any:
    """lm-eval's task of a configuration, with its data.

    `include` names a file of lm-eval's own tasks ("hellaswag/hellaswag.yaml") that the configuration changes.
    """
    with tempfile.TemporaryDirectory() as folder, quiet():
        import lm_eval.tasks

        if "include" in config:
            config = {**config, "include": str(Path(lm_eval.tasks.__file__).parent / config["include"])}
        file = Path(folder) / "task.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        (task,) = lm_eval.tasks.TaskManager(include_defaults=False).load(str(file))["tasks"].values()
        return task


def accuracy(lm: Any, task: Any, limit: int | None = None) -> dict[str, float]:
    """Plain accuracy of a language model (lm-eval's `LM`) on a task's first `limit` items (None: all), zero-shot, with
    lm-eval's standard error of a mean over items."""
    with quiet():
        import lm_eval

        found = lm_eval.evaluate(lm=lm, task_dict={task.task_name: task}, limit=limit, log_samples=False)
    (values,) = found["results"].values()
    return {"acc": float(values["acc,none"]), "stderr": float(values["acc_stderr,none"])}
