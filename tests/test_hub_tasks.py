"""The paper's own tasks, from a stand-in hub: what is asked, scores by brute force, pins, refusals."""

import json
import random
import time

import datasets
import huggingface_hub
import pytest
import torch
import torch.nn.functional as F
import yaml

from scaleop import corpus, hardening, hub_tasks, race, tasks
from scaleop.claims import EXTENDED_CLAIMS, FAILS, NOT_RUN, Measured, evaluate
from scaleop.claims.hardening import ORDER
from scaleop.corpus import CorpusError
from scaleop.experiment import load_experiment
from scaleop.hardening import extended, table7, zero_shot
from scaleop.harness import language_model
from scaleop.race import Race
from scaleop.store import digest, sha256
from scaleop.tasks import FLOORS, leakage, read_items, task_folder, unseen_by
from scaleop.weights import load
from tests.hub_server import Hub, parquet, tiny_pythia

COUNT = 12  # items a task
WORDS = ["sea", "man", "old", "arms", "text", "race", "wiring", "many", "same", "blend"]


def sentence(draw, count):
    return " ".join(draw.choice(WORDS) for _ in range(count))


def made_up():
    """Rows of the four data sets with the columns that they have on the hub."""
    draw = random.Random(0)
    lambada = {"text": [f"The {sentence(draw, 9)}. He saw the {draw.choice(WORDS)}" for _ in range(COUNT)]}
    hellaswag = {"ind": list(range(COUNT)), "activity_label": ["Sailing a boat"] * COUNT,
                 "ctx_a": [f"A man [step] {sentence(draw, 4)}." for _ in range(COUNT)],
                 "ctx_b": [sentence(draw, 2) for _ in range(COUNT)], "ctx": ["unused"] * COUNT,
                 "endings": [[f"{sentence(draw, 5)} [title] {sentence(draw, 2)}." for _ in range(4)]
                             for _ in range(COUNT)],
                 "source_id": ["x"] * COUNT, "split": ["val"] * COUNT, "split_type": ["indomain"] * COUNT,
                 "label": [str(draw.randrange(4)) for _ in range(COUNT)]}
    labels = [list("ABCD") if i % 3 else list("1234") for i in range(COUNT)]
    arc = {"id": [f"q{i}" for i in range(COUNT)], "question": [f"Which {sentence(draw, 4)}?" for _ in range(COUNT)],
           "choices": [{"text": [sentence(draw, 2) for _ in range(4)], "label": label} for label in labels],
           "answerKey": [draw.choice(label) for label in labels]}
    piqa = {"goal": [sentence(draw, 5) for _ in range(COUNT)], "sol1": [sentence(draw, 6) for _ in range(COUNT)],
            "sol2": [sentence(draw, 6) for _ in range(COUNT)], "label": [draw.randrange(2) for _ in range(COUNT)]}
    return {"last_word": lambada, "continuation": hellaswag, "definition": arc, "two_choices": piqa}


ROWS = made_up()
PLACES = {"last_word": ("EleutherAI/lambada_openai", "default/test"),
          "continuation": ("Rowan/hellaswag", "data/validation"), "definition": ("allenai/ai2_arc", "ARC-Easy/test"),
          "two_choices": ("baber/piqa", "data/validation")}
CARD = "---\nconfigs:\n- config_name: {name}\n  data_files:\n  - {{split: {split}, path: '{path}-*'}}\n---\n"


def expected(measure):
    """(context, choices, right one) of each row, written out by hand from the tasks' published prompts."""
    rows = [dict(zip(ROWS[measure], values, strict=True)) for values in zip(*ROWS[measure].values(), strict=True)]
    if measure == "last_word":
        return [(row["text"].rsplit(" ", 1)[0], [row["text"].rsplit(" ", 1)[1]], 0) for row in rows]
    if measure == "continuation":
        def clean(text):
            return text.replace(" [title]", ". ").replace("[step]", "").replace("  ", " ")
        return [(clean(f"Sailing a boat: {row['ctx_a']} {row['ctx_b'].capitalize()}"),
                 [clean(ending) for ending in row["endings"]], int(row["label"])) for row in rows]
    if measure == "definition":
        return [(f"Question: {row['question']}\nAnswer:", row["choices"]["text"],
                 row["choices"]["label"].index(row["answerKey"])) for row in rows]
    return [(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]) for row in rows]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The stand-in hub with the four data sets, pinned to its commits, for this process; and a store of its own."""
    root = tmp_path_factory.mktemp("hub-tasks")
    with Hub() as hub, pytest.MonkeyPatch.context() as patch:
        pinned = {}
        for measure, (name, path) in PLACES.items():
            parquet(root / measure / f"{path}-00000-of-00001.parquet", ROWS[measure])
            (root / measure / "README.md").write_text(CARD.format(
                name={"definition": "ARC-Easy"}.get(measure, "default"), split=path.split("/")[1], path=path))
            commit = hub.dataset(name, root / measure)
            parquet(root / measure / f"{path}-00000-of-00001.parquet", {"moved": [1]})  # what `main` holds by now
            hub.dataset(name, root / measure)
            parquet(root / measure / f"{path}-00000-of-00001.parquet", ROWS[measure])
            pinned[measure] = hub_tasks.TASKS[measure]._replace(revision=commit)
        hub.here(patch, root / "hf")
        patch.setattr(hub_tasks, "TASKS", pinned)
        for module in (race, corpus, tasks, hardening):
            patch.setattr(module, "STORE", root / "store")
        yield hub


@pytest.fixture(scope="module")
def opened(served, tmp_path_factory):
    """A race whose text is two local files, in the hub's world; the donor reads 160 tokens."""
    root = tmp_path_factory.mktemp("hub-race")
    tiny_pythia(root / "donor", context=160)
    draw = random.Random(1)
    for name, count in (("train", 60), ("test", 20)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"text": sentence(draw, 30)}) + "\n"
                                                    for _ in range(count)))
    local = {"path": "json", "files": str(root / "test.jsonl")}
    experiment = {
        "name": "tiny", "title": "tiny", "seeds": [0],
        "pair": {"donor": str(root / "donor"), "target": {"layers": 2, "width": 16, "heads": 4, "mlp": 24}},
        "corpus": {"source": "hub", "train": {**local, "files": str(root / "train.jsonl")}, "disjoint": "tokens",
                   "evaluations": {"heldout": local, "foreign": local}, "seed_stride": 500,
                   "frozen": {"sequences": 20, "length": 16, "similarity": 5, "moments": 10}},
        "evaluation": {"window": 16, "stride": 8, "quick_tokens": 50, "limits": {"heldout": 90, "foreign": 60}},
        "race": {"tokens": 256, "batch": 4, "length": 16, "peak_lr": 1.0e-3, "warmup_steps": 2, "eval_every": 192,
                 "checkpoint_every": 0, "precision": "no", "attention": "eager", "arms": ["random"]}}
    (root / "tiny.yaml").write_text(yaml.safe_dump(experiment))
    return Race(load_experiment(str(root / "tiny.yaml")))


@pytest.fixture(scope="module")
def folder(opened):
    return task_folder(opened.corpus)


@pytest.mark.parametrize("measure", FLOORS)
def test_what_is_asked_is_what_the_published_prompts_say(folder, measure):
    found = [(item["context"], item["choices"], item["gold"]) for item in read_items(folder, measure)]
    assert found == expected(measure)


def test_the_pages_table_names_data_sets_and_claims_no_overlap_that_was_not_measured(opened, folder, capsys):
    table, shares = hardening.asked(opened, [{"seed": 0}])
    assert shares is None
    assert capsys.readouterr().out == (
        "lm-eval's own tasks; what of them occurs in the training text has not been measured\n")
    assert list(table["task"]) == list(FLOORS)  # by measure, as the tables below; lm-eval's name stands beside it
    assert list(table["lm-eval's name"]) == ["lambada_openai", "hellaswag", "arc_easy", "piqa"]
    assert list(table["data set"]) == [place for place, _ in PLACES.values()]
    assert list(table["revision"]) == [task.revision for task in hub_tasks.TASKS.values()]
    assert list(table["items"]) == [COUNT] * 4 and "share" not in " ".join(table.columns)


def test_the_folder_says_what_was_asked_and_needs_no_hub_again(served, opened, folder, monkeypatch):
    manifest = json.loads((folder / "manifest.json").read_text())
    names = {"last_word": "lambada_openai", "continuation": "hellaswag", "definition": "arc_easy",
             "two_choices": "piqa"}
    for measure, facts in manifest["tasks"].items():
        assert facts == {"items": COUNT, "floor": FLOORS[measure], "task": names[measure], "task_version": 1.0,
                         "dataset": PLACES[measure][0], "revision": hub_tasks.TASKS[measure].revision,
                         "split": PLACES[measure][1].split("/")[1]}
    assert set(manifest["sha256"]) == {f"{name}.{kind}" for name in FLOORS for kind in ("jsonl", "parquet", "yaml")}
    assert all(sha256(folder / file) == expected for file, expected in manifest["sha256"].items())
    asked = len(served.requests)
    monkeypatch.setattr(hub_tasks, "load_task", None)
    assert task_folder(opened.corpus) == folder
    zero_shot(language_model(opened.donor.model, opened.corpus.tokenizer, 32), folder, "two_choices")
    assert len(served.requests) == asked


@pytest.mark.parametrize("measure", FLOORS)
def test_a_model_scores_what_one_forward_pass_a_choice_says(opened, folder, measure):
    model, tokenizer = opened.donor.model, opened.corpus.tokenizer

    def loglikelihood(context, text):
        ids, before = tokenizer(context + text)["input_ids"], len(tokenizer(context)["input_ids"])
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, before - 1 : -1].double()
        target = torch.tensor(ids[before:])
        return -F.cross_entropy(scores, target, reduction="sum").item(), bool((scores.argmax(-1) == target).all())

    right = []
    for context, choices, gold in expected(measure):
        scores = [loglikelihood(context, f" {choice}") for choice in choices]
        values = [score for score, _ in scores]
        right.append(scores[0][1] if measure == "last_word" else values.index(max(values)) == gold)
    lm = language_model(model, tokenizer, 32)
    found = zero_shot(lm, folder, measure)
    assert found["acc"] == pytest.approx(sum(right) / COUNT)
    assert zero_shot(lm, folder, measure, limit=5)["acc"] == pytest.approx(sum(right[:5]) / 5)
    assert found["floor"] == FLOORS[measure] and (found["items"], found["task"]) == (
        COUNT, hub_tasks.TASKS[measure].task)


def test_table_7_measures_a_model_of_the_hubs_world_and_keeps_it(opened, folder, monkeypatch):
    found = extended(opened, opened.experiment.pair.donor)
    lm = language_model(opened.donor.model, opened.corpus.tokenizer, 32)
    for measure in FLOORS:
        assert found[measure] == zero_shot(lm, folder, measure)
    assert found["foreign_ppl"] == opened.full(opened.donor.model, "foreign")["value"]
    assert found["settings"]["batch"] == 32 and found["settings"]["tasks"] == folder.name
    row = table7({"donor": found}).set_index("model").loc["donor"]
    assert row["definition"] == f"{found['definition']['acc']:.3f} ± {found['definition']['stderr']:.3f}"
    verdicts = {it.claim.id: it.verdict for it in evaluate(EXTENDED_CLAIMS, Measured(dict.fromkeys(ORDER, found)))}
    assert verdicts["order-foreign"] == FAILS  # four equal arms have no order
    assert {name for name, verdict in verdicts.items() if verdict == NOT_RUN} == {
        "depth-tie-every-metric", "depth-random-behind-every-metric", "double-context-tracks-late"}
    monkeypatch.setattr(hardening, "load", None)  # a second measurement would fail
    assert extended(opened, opened.experiment.pair.donor) == found
    limits = opened.experiment.evaluation.limits
    monkeypatch.setitem(limits, "items", 3)
    with pytest.raises(TypeError):  # other conditions
        extended(opened, opened.experiment.pair.donor)


def test_a_model_of_the_hub_is_measured_by_its_name(served, opened, tmp_path, monkeypatch):
    monkeypatch.setitem(opened.experiment.evaluation.limits, "items", 2)
    commit = served.model("EleutherAI/tiny", tiny_pythia(tmp_path / "other", context=160, seed=3))
    found = extended(opened, f"EleutherAI/tiny@{commit}")
    assert found["heldout_ppl"] == opened.full(load(tmp_path / "other"))["value"]
    assert commit in found["model"] and found["two_choices"]["items"] == 2


def test_fewer_items_are_asked_where_the_experiment_limits_them(opened, monkeypatch):
    monkeypatch.setitem(opened.experiment.evaluation.limits, "items", 3)
    found = extended(opened, opened.experiment.pair.donor)
    assert all(found[measure]["items"] == 3 for measure in FLOORS)


def test_whether_the_stream_has_the_papers_items_is_not_claimed_but_can_be_asked(opened, folder):
    assert not unseen_by(opened.corpus, 0, 10)
    context, choices, gold = expected("last_word")[0]
    shares = leakage(folder, [f"so it goes: {context.upper()} {choices[gold]}"])
    assert shares == {"last_word": 1 / COUNT, "continuation": 0.0, "definition": 0.0, "two_choices": 0.0}


def test_without_a_hub_a_sentence_says_what_is_missing_and_nothing_is_stored(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "STORE", tmp_path)
    with Hub() as gone:
        pass  # a port where nobody listens any more
    gone.here(monkeypatch, tmp_path / "hf")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between attempts
    with pytest.raises(CorpusError, match=r"the data set of lm-eval's lambada_openai cannot be had at revision "
                                          r"[0-9a-f]{12} .* connect this machine .*Nothing was stored"):
        task_folder(opened.corpus)
    assert [path.name for path in (tmp_path / "tasks").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"),
                                   PermissionError(13, "Permission denied", "/hf/datasets")])
def test_a_disk_that_takes_nothing_is_not_a_missing_connection(monkeypatch, error):
    def load_task(_):
        raise RuntimeError("while fetching") from error

    monkeypatch.setattr(hub_tasks, "load_task", load_task)
    with pytest.raises(CorpusError, match=r"cannot be kept on this disk .*Free space, or set HF_HOME") as caught:
        hub_tasks._fetched("piqa", "0" * 40, {})
    assert "connect this machine" not in str(caught.value)


def test_a_cache_that_holds_the_data_sets_does_without_a_hub(served, opened, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "STORE", tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    asked = len(served.requests)
    again = task_folder(opened.corpus)
    assert len(served.requests) == asked and again.name == folder.name
    assert all((again / path.name).read_bytes() == path.read_bytes() for path in folder.glob("*.jsonl"))


def test_a_commit_that_is_not_there_is_named(served, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "STORE", tmp_path)
    wrong = hub_tasks.TASKS["definition"]._replace(revision="0" * 40)
    monkeypatch.setattr(hub_tasks, "TASKS", {**hub_tasks.TASKS, "definition": wrong})
    with pytest.raises(CorpusError, match="the data set of lm-eval's arc_easy cannot be had at revision 000000000000"):
        task_folder(opened.corpus)
    assert not list((tmp_path / "tasks").glob("*/manifest.json"))


def test_the_papers_four_tasks_are_pinned_by_whole_commits():
    names = {measure: task.task for measure, task in hub_tasks.TASKS.items()}
    assert names == {"last_word": "lambada_openai", "continuation": "hellaswag", "definition": "arc_easy",
                     "two_choices": "piqa"}
    assert all(len(task.revision) == 40 and int(task.revision, 16) for task in hub_tasks.TASKS.values())
    assert digest(hub_tasks.facts()) != digest({**hub_tasks.facts(), "lm_eval": "0"})


