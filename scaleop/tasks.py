"""Four zero-shot tasks for lm-eval (section 7.5). Which, the corpus decides (`SETS`): with text from the hub the
paper's own, LAMBADA, HellaSwag, ARC-Easy and PIQA (`scaleop.hub_tasks`); with the embedded text four made of it:

* `last_word` (LAMBADA): the last word of a passage of a held-out address, a word that the passage has used before;
* `continuation` (HellaSwag): how a sentence of a held-out address ends, among the ends of three others;
* `definition` (ARC-Easy): which of four words of the same part of speech the dictionary defines in this sentence;
* `two_choices` (PIQA): the next sentence of a held-out address, or another sentence of the same address.

Items from the addresses share no passage of 13 words with the training split. The dictionary *is* training text:
`definition` asks about the second half of the split's documents, which no run of the race has reached that starts at
seeds 0 to 2 and does not go round the corpus (`unseen_by`). But the donors and the siblings of the ladder saw those
documents in pretraining, and the run at 33 times the budget sees them as well.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from scaleop import hub_tasks, texts
from scaleop.corpus import Corpus
from scaleop.items import ITEMS, SEED, Passages, generate
from scaleop.paths import STORE
from scaleop.store import StoreError, atomic_folder, digest, locked, read_json, sha256, write_json

VERSION = 1  # raise it when a change of code changes the items

FLOORS = {"last_word": 0.0, "continuation": 0.25, "definition": 0.25, "two_choices": 0.5}
"""The tasks, and the accuracy of a guess (as good as none for an open vocabulary)."""

_CHOICE = {"output_type": "multiple_choice", "doc_to_choice": "choices"}
_READING = {
    "last_word": {"output_type": "loglikelihood", "doc_to_text": "context", "doc_to_target": "{{' ' ~ choices[gold]}}"},
    "continuation": {**_CHOICE, "doc_to_text": "context", "doc_to_target": "gold"},
    # As in WinoGrande the choices are what goes before and `context` is scored: "commerce, n." + its definition.
    "definition": {**_CHOICE, "doc_to_text": "gold", "doc_to_target": "context"},
    "two_choices": {**_CHOICE, "doc_to_text": "context", "doc_to_target": "gold"}}


class TaskSet(NamedTuple):
    """Where a corpus's tasks come from.

    `facts` is all that determines them; `write` fills a folder with each task's `<task>.jsonl` (items: `context`,
    `choices`, `gold`) and `<task>.yaml` (for `harness.load_task`) and says of each what the manifest shall;
    `asked_from` is the document of the stream from which on `definition` asks about documents (None: about none);
    `batch` is how many requests a model answers at a time: another number rounds differently, and may turn a tie;
    `read` gives the training text that items are looked for in (None: it is not at hand as a whole).
    """

    facts: Callable[[Corpus], dict[str, Any]]
    write: Callable[[Path], dict[str, dict[str, Any]]]
    asked_from: Callable[[int], int] | None
    batch: int
    read: Callable[[], Iterable[str]] | None


def task_set(corpus: Corpus) -> TaskSet:
    """The set of the tasks that models of a corpus are asked."""
    return SETS[corpus.tasks]


def task_folder(corpus: Corpus) -> Path:
    """Folder of the store with `<task>.jsonl`, `<task>.yaml` and a manifest; its name is the digest of what made it.

    From that folder `lm_eval --include_path . --tasks last_word ...` runs the embedded text's tasks, too. Made on first
    use (half a minute, most of it indexing the training split, or a download), the same for every experiment on that
    text. CorpusError when the hub is needed and does not answer; nothing is then stored.
    """
    made = task_set(corpus)
    facts = {"version": VERSION, **made.facts(corpus)}
    folder = STORE / "tasks" / digest(facts)
    with locked(STORE / "tasks"):
        if not (folder / "manifest.json").exists():
            with atomic_folder(folder) as part:
                said = made.write(part)
                write_json(part / "manifest.json", {
                    **facts, "tasks": {name: {"items": each.pop("items"), "floor": FLOORS[name], **each}
                                       for name, each in said.items()},
                    "sha256": {path.name: sha256(path) for path in sorted(part.iterdir())}})
    return folder


def first_definition(documents: int) -> int:
    """The document of the training split, of so many, from which on definitions are asked about."""
    return documents // 2


def unseen_by(corpus: Corpus, seed: int, tokens: int) -> bool:
    """Has a run of `tokens` tokens from a seed's offset seen none of the documents that `definition` asks about?

    False where that cannot be told: the paper's tasks are about no document of the stream, but The Pile may quote them.
    """
    asked_from = task_set(corpus).asked_from
    if asked_from is None:
        return False
    offsets = corpus.train.documents
    return corpus.start(seed) + tokens <= offsets[asked_from(len(offsets))]


def _embedded_facts(corpus: Corpus) -> dict[str, Any]:
    return {"items": ITEMS, "seed": SEED, "training": corpus.train.manifest["sha256"],
            "heldout": digest(texts.addresses()[1])}


def _write_embedded(folder: Path) -> dict[str, dict[str, Any]]:
    documents = [text for text in texts.training_documents() if text.strip()]
    made = generate(documents, first_definition(len(documents)), texts.addresses()[1])
    for name, rows in made.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
                "test_split": "test", **_READING[name], "num_fewshot": 0,
                "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
                "metadata": {"version": VERSION}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task, sort_keys=False), encoding="utf-8")
    return {name: {"items": len(rows)} for name, rows in made.items()}


SETS = {"embedded": TaskSet(_embedded_facts, _write_embedded, first_definition, batch=16,
                            read=lambda: texts.training_documents()),
        "hub": TaskSet(lambda corpus: hub_tasks.facts(), hub_tasks.write, None, batch=32, read=None)}
"""By a corpus's `tasks`; the paper's protocol has 32 requests at a time."""


def read_items(folder: Path, name: str) -> list[dict[str, Any]]:
    """The items of one task; StoreError when a file of the folder is not what its manifest says."""
    for file, expected in read_json(folder / "manifest.json")["sha256"].items():
        if not (folder / file).exists() or sha256(folder / file) != expected:
            raise StoreError(f"{folder / file} is damaged. Delete {folder} and run again: it will be made anew.")
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def leakage(folder: Path, documents: Iterable[str]) -> dict[str, float]:
    """Share of each task's items of which any reading has a passage of `PASSAGE` words in common with `documents`."""
    there, shares = Passages(documents), {}
    for name in FLOORS:
        rows = read_items(folder, name)
        shares[name] = sum(any(text in there for text in readings(name, row)) for row in rows) / len(rows)
    return shares


def readings(name: str, item: dict[str, Any]) -> list[str]:
    """The texts, one a choice, that a model reads to answer an item."""
    if name == "definition":
        return [f"{choice} {item['context']}" for choice in item["choices"]]
    return [f"{item['context']} {choice}" for choice in item["choices"]]
