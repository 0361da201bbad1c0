"""Section 7.5, Table 7: a model on other text, at twice its context, and on four zero-shot tasks.

The tasks are `scaleop.tasks`, scored by lm-eval itself: zero-shot, plain `acc`, fp32. `extended` measures a model
once and keeps what it found; some three minutes of one busy core for nano-m, most of it perplexity.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from torch import nn

from scaleop.claims.paper import THEIRS, printed
from scaleop.claims.standings import show
from scaleop.evaluate import perplexity
from scaleop.harness import accuracy, language_model, load_task
from scaleop.paths import STORE, relative, resolve
from scaleop.progress import progress
from scaleop.race import Race, model_key
from scaleop.store import StoreError, cached_json, digest, provenance, read_json
from scaleop.tasks import FLOORS, leakage, read_items, readings, task_folder, task_set, unseen_by
from scaleop.weights import load

VERSION = 1  # raise it when a change of code changes what is measured
DOUBLE_CONTEXT_TOKENS = 200_000  # of `heldout`, as in the paper

ROWS = ("random", "projection", "subclone", "hybrid", "subclone_rs", "hybrid_rs", "sibling", "donor")
"""Table 7's models: arms in Table 2's order, and the anchors (the paper has no donor and no rescaled arm there)."""


def extended(race: Race, name: Path | str) -> dict[str, Any]:
    """Everything Table 7 says of one model: a run's `model` folder, or a name such as `models/nano-m`, or of the hub.

    `heldout_ppl` and `foreign_ppl` are strided perplexities by the experiment's settings, `double_context_ppl` that of
    the first 200,000 held-out tokens with window and stride doubled; each task has `acc`, `stderr` (lm-eval's, of a
    mean over items), `items` and `floor`, and a task of lm-eval its name and version there, data set and revision.
    `evaluation.limits` may limit the `items` of a task that are asked, to its first. Measured once, then found in the
    store by weights, text, tasks and settings. StoreError says what to do where a finished run's model is gone.
    """
    folder = resolve(str(name))  # a hub name stays one
    if (run := Path(folder).parent / "result.json").exists() and not (Path(folder) / "config.json").exists():
        raise StoreError(f"{run.parent} has no model: delete {run.parent}, it is trained again")
    tasks, facts = task_folder(race.corpus), {**conditions(race), "model": model_key(folder)}

    def measured() -> dict[str, Any]:
        origin = provenance(model=relative(folder), lm_eval=version("lm-eval"), settings=facts)
        began = time.monotonic()
        model = load(folder).to("cuda" if torch.cuda.is_available() else "cpu")
        lm = language_model(model, race.corpus.tokenizer, task_set(race.corpus).batch)
        limit = race.experiment.evaluation.limits.get("items")
        measures: dict[str, Callable[[], Any]] = {
            "heldout_ppl": lambda: heldout(race, folder, model),
            "foreign_ppl": lambda: race.full(model, "foreign")["value"],
            "double_context_ppl": lambda: double_context(race, model),
            **{task: lambda task=task: zero_shot(lm, tasks, task, limit) for task in FLOORS}}
        found = {measure: measures[measure]() for measure in progress(measures, desc="Table 7", unit=" measures")}
        return {**origin, **found, "seconds": round(time.monotonic() - began, 1)}

    return cached_json(STORE / "extended" / f"{digest(facts)}.json", measured)


def extended_of(race: Race, results: Iterable[Mapping[str, Any]], arms: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{arm: what `extended` says}, for those of `arms` whose result holds it or whose trained model is in the store."""
    found = {}
    for result in results:
        model = race.folder(result["arm"], result["seed"]) / "model"
        if result["arm"] in arms and ("extended" in result or (model / "config.json").exists()):
            found[result["arm"]] = result.get("extended") or extended(race, model)
    return {arm: found[arm] for arm in arms if arm in found}


def conditions(race: Race) -> dict[str, Any]:
    """All that decides what `extended` finds but the model; what was found under other conditions is out of date."""
    return {"version": VERSION, "tasks": task_folder(race.corpus).name, "corpus": race.corpus.key,
            "evaluation": race.experiment.evaluation.model_dump(), "batch": task_set(race.corpus).batch}


def heldout(race: Race, folder: Path | str, model: nn.Module) -> float:
    """Full held-out perplexity: a run's own final value where the model is a run's, else measured."""
    result = Path(folder).parent / "result.json"
    return read_json(result)["final"]["value"] if result.exists() else race.full(model)["value"]


def double_context(race: Race, model: nn.Module) -> float:
    """Strided perplexity of the held-out text at twice the experiment's window and stride."""
    measure = race.experiment.evaluation
    tokens = race.corpus.evaluation("heldout", min(DOUBLE_CONTEXT_TOKENS, measure.limits["heldout"] or np.inf))
    return perplexity(model, tokens, 2 * measure.window, 2 * measure.stride).value


def asked(race: Race, results: Iterable[Mapping[str, Any]]) -> tuple[pd.DataFrame, dict[str, float] | None]:
    """The four tasks as a table, and the share of each one's items that occurs in the training text.

    Printed is whether the runs of `results` have read what a definition is about. Of lm-eval's own tasks the table
    names data set and revision; the shares are then None, and a line says so: a run reads a stretch of the Pile, and
    the donor read all of it.
    """
    corpus, made = race.corpus, task_set(race.corpus)
    folder = task_folder(corpus)
    facts = read_json(folder / "manifest.json")["tasks"]
    if made.read is None:
        print("lm-eval's own tasks; what of them occurs in the training text has not been measured")
        columns = {"task": "lm-eval's name", "dataset": "data set", "revision": "revision", "split": "split",
                   "items": "items", "floor": "floor"}
        return pd.DataFrame([{"task": name, **{title: each[key] for key, title in columns.items()}}
                             for name, each in facts.items()]), None
    unseen = all(unseen_by(corpus, result["seed"], race.recipe.consumed) for result in results)
    print(f"every definition lies behind the text that the runs of the main race read: {unseen}")
    shares = leakage(folder, made.read())
    return pd.DataFrame([{"task": name, **each, "share that occurs in the training split": f"{shares[name]:.1%}"}
                         for name, each in facts.items()]), shares


def zero_shot(lm: Any, folder: Path, task: str, limit: int | None = None) -> dict[str, Any]:
    """Accuracy of a language model (lm-eval's `LM`) on one task of a `task_folder`, or on its first `limit` items, with
    what the folder's manifest says of the task.

    Raises ValueError when an item does not fit the model's context: lm-eval would cut it from the left.
    """
    items = read_items(folder, task)[:limit]
    longest = max(len(lm.tok_encode(text)) for item in items for text in readings(task, item))
    if longest > lm.max_length:
        raise ValueError(f"an item of {task} has {longest} tokens, but the model's context is {lm.max_length}: use a "
                         "model with a longer context")
    config = yaml.safe_load((folder / f"{task}.yaml").read_text(encoding="utf-8"))
    files = {split: str(folder / file) for split, file in config["dataset_kwargs"]["data_files"].items()}
    with tempfile.TemporaryDirectory() as cache:
        config["dataset_kwargs"] = {"data_files": files, "cache_dir": cache}
        found = accuracy(lm, load_task(config), limit)
    return {**found, **read_json(folder / "manifest.json")["tasks"][task], "items": len(items)}


def table7(rows: Mapping[str, Mapping[str, Any]], pair: str = "") -> pd.DataFrame:
    """Table 7 for the eye: the paper's cells as printed beside ours, "-" where there is none; guess floors last.

    `rows` maps `ROWS` (arms, `sibling`, `donor`), as many as were measured, and any other arm to what `extended` found.
    Accuracies of ours come with their standard error. The paper's sibling is Pythia-410M; its held-out column is
    Table 2's finals.

    `pair` "pairB" sets the depth pair's `rows`, and no others, beside what the paper says of its own depth pair (A.6;
    held-out: Table 9's first seed).
    """
    table = []
    for name in rows if pair else [*ROWS, *(name for name in rows if name not in ROWS)]:
        row, theirs = {"model": name}, _depth(name, pair) if pair else _theirs(name)
        for measure in ("heldout_ppl", *THEIRS):
            row[f"{measure}, paper"] = printed(theirs.get(measure, ""))
            row[measure] = _cell(rows.get(name, {}).get(measure))
        table.append(row)
    floors = {"model": "guess floor"} | {f"{task}{column}": f"{floor:.2f}" for task, floor in FLOORS.items()
                                         for column in (", paper", "")}
    return pd.DataFrame([*table, floors]).fillna("-")


def _theirs(name: str) -> dict[str, str]:
    """Where Table 7's row of a model is among the published numbers, by measure."""
    theirs = {"sibling": "real_410m", "donor": "real_1.4b"}.get(name, name)
    final = f"anchor.{theirs}" if theirs != name else f"ladder.{theirs}.final"
    return {"heldout_ppl": final, **{measure: f"ext.{theirs}.{metric}" for measure, metric in THEIRS.items()}}


def _depth(arm: str, pair: str) -> dict[str, str]:
    """`_theirs` for an arm of the depth pair, of which the paper gives these."""
    metrics = {"foreign_ppl": "c4", "double_context_ppl": "ctx2048", "last_word": "lambada"}
    return {"heldout_ppl": f"{pair}.{arm}.s0",
            **{measure: f"{pair}.ext.{arm}.{metric}" for measure, metric in metrics.items()}}


def _cell(value: float | dict[str, float] | None) -> str:
    if isinstance(value, dict):
        return f"{value['acc']:.3f} ± {value['stderr']:.3f}"
    return "-" if value is None else show(value)
