"""The paper's own zero-shot tasks (section 7.5), as lm-eval asks them: LAMBADA, HellaSwag, ARC-Easy, PIQA.

Prompts, choices and processing are lm-eval's installed configurations. The rows come from the hub, each data set pinned
by its commit; what is asked is kept beside a run's other files, so that the hub is needed once and then no more.
"""

import errno
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from scaleop.corpus import CorpusError
from scaleop.downloads import causes, unwritable
from scaleop.harness import load_task, quiet
from scaleop.progress import progress


class HubTask(NamedTuple):
    """A task of lm-eval: its name and its configuration's file there, the split it asks, its data set's commit."""

    task: str
    file: str
    split: str
    revision: str


TASKS = {measure: HubTask(*task) for measure, task in {
    "last_word": ("lambada_openai", "lambada/lambada_openai.yaml", "test", "900124bf3b8235c6daf21033af9948b3f07346c4"),
    "continuation": ("hellaswag", "hellaswag/hellaswag.yaml", "validation", "218ec52e09a7e7462a5400043bb9a69a41d06b76"),
    "definition": ("arc_easy", "arc/arc_easy.yaml", "test", "210d026faf9955653af8916fad021475a3f00453"),
    "two_choices": ("piqa", "piqa/piqa.yaml", "validation", "142f6d7367fd9877f0fb3b5734ea6a545f54cdd1"),
}.items()}
"""By measure. On the hub: EleutherAI/lambada_openai, Rowan/hellaswag, allenai/ai2_arc, baber/piqa."""

_PLAIN = {"num_fewshot": 0, "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}


def facts() -> dict[str, Any]:
    """What determines the items and how they are asked, JSON-able."""
    return {"lm_eval": version("lm-eval"), "hub": {measure: list(task) for measure, task in TASKS.items()}}


def write(folder: Path) -> dict[str, dict[str, Any]]:
    """Per measure: the asked split's rows as `<measure>.parquet`, `<measure>.yaml` for `harness.load_task`, and the
    items as a reader wants them, `<measure>.jsonl`. Returns facts of each for the manifest.

    CorpusError where the hub does not give a data set.
    """
    said = {}
    for measure, (name, file, split, revision) in progress(TASKS.items(), desc="lm-eval's tasks", unit=" tasks"):
        others = {f"{other}_split": None for other in ("training", "validation", "test") if other != split}
        changes = {"include": file, **others, **_PLAIN}  # other splits would give examples: there are none
        task = _fetched(name, revision, {**changes, "dataset_kwargs": {"revision": revision}})
        with quiet():
            task.dataset[split].to_parquet(folder / f"{measure}.parquet")
        rows = [_item(task, document) for document in task.eval_docs]
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{measure}.jsonl").write_text("".join(lines), encoding="utf-8")
        kept = {"dataset_path": "parquet", "dataset_name": None,
                "dataset_kwargs": {"data_files": {split: f"{measure}.parquet"}}}
        (folder / f"{measure}.yaml").write_text(yaml.safe_dump({**changes, **kept}, sort_keys=False), encoding="utf-8")
        said[measure] = {"items": len(rows), "task": name, "task_version": task.config.metadata["version"],
                         "dataset": task.DATASET_PATH, "revision": revision, "split": split}
    return said


def _fetched(name: str, revision: str, config: dict[str, Any]) -> Any:
    try:
        return load_task(config)
    except (OSError, RuntimeError, ValueError) as error:  # connections, repositories and revisions that are not there
        if any(getattr(each, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or unwritable(each)
               for each in causes(error)):
            raise CorpusError(f"the data set of lm-eval's {name} cannot be kept on this disk ({error}). Free space, or "
                              "set HF_HOME (and HF_DATASETS_CACHE, if it is set) to a folder you may write to, then "
                              "run again: nothing was stored") from error
        raise CorpusError(
            f"the data set of lm-eval's {name} cannot be had at revision {revision[:12]} ({error}). It comes from the "
            "Hugging Face hub, once: connect this machine (and leave HF_HUB_OFFLINE unset), or let HF_HOME name a "
            "cache that holds it. Nothing was stored; run again then") from error


def _item(task: Any, document: dict[str, Any]) -> dict[str, Any]:
    """What is asked of a document: `context`, `choices` and `gold`, the position of the right one."""
    target = task.doc_to_target(document)
    if task.OUTPUT_TYPE == "loglikelihood":
        return {"context": task.doc_to_text(document), "choices": [target.strip()], "gold": 0}
    return {"context": task.doc_to_text(document), "choices": task.doc_to_choice(document), "gold": int(target)}
