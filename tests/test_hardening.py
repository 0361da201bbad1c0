"""Table 7's measures: lm-eval's scores where the answer is known, perplexities by brute force, and the store."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import yaml
from lm_eval.api.model import LM
from transformers import AutoTokenizer

from scaleop import corpus, hardening, items, race, tasks, texts
from scaleop.experiment import load_experiment
from scaleop.hardening import conditions, double_context, extended, table7, zero_shot
from scaleop.harness import language_model
from scaleop.paths import ROOT
from scaleop.race import Race
from scaleop.store import StoreError, digest, write_json
from scaleop.tasks import FLOORS, read_items, readings, task_folder
from tests.conftest import neox_config, random_model

CHOOSING = [name for name, floor in FLOORS.items() if floor]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A race over a fraction of the text, 80 items a task at most, a donor with the nano tokenizer, its own store."""
    root = tmp_path_factory.mktemp("hardening")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "nano-s")
    config = neox_config(layers=2, width=32, heads=2, mlp=48, vocab=len(tokenizer), max_position_embeddings=256)
    random_model(config, std=0.1).save_pretrained(root / "donor")
    tokenizer.save_pretrained(root / "donor")
    experiment = {
        "name": "tiny", "title": "tiny", "seeds": [0],
        "pair": {"donor": str(root / "donor"), "reference": None,
                 "target": {"layers": 2, "width": 16, "heads": 2, "mlp": 24}},
        "corpus": {"source": "embedded", "seed_stride": 2000, "repeat": False,
                   "frozen": {"sequences": 20, "length": 16, "similarity": 5, "moments": 10}},
        "evaluation": {"window": 16, "stride": 8, "quick_tokens": 100, "limits": {"heldout": 150, "foreign": 90}},
        "race": {"tokens": 640, "batch": 4, "length": 16, "peak_lr": 1.0e-3, "warmup_steps": 2, "eval_every": 192,
                 "checkpoint_every": 2, "precision": "bf16", "attention": "eager", "arms": ["random"]}}
    (root / "tiny.yaml").write_text(yaml.safe_dump(experiment))
    training, held_out = texts.addresses()
    dictionary = texts.dictionary()[::50]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "addresses", lambda: (training[:5], held_out[3:8]))
        patch.setitem(texts.EVALUATIONS, "foreign", lambda: held_out[:1])
        patch.setattr(texts, "dictionary", lambda: dictionary)
        patch.setattr(items, "ITEMS", 80)
        for module in (race, corpus, tasks, hardening):
            patch.setattr(module, "STORE", root / "store")
        yield Race(load_experiment(str(root / "tiny.yaml")))


@pytest.fixture(scope="module")
def folder(opened):
    return task_folder(opened.corpus)


class Judge(LM):
    """A language model whose log-likelihood of (context, continuation) is whatever a function says."""

    max_length = 10**6

    def __init__(self, taste):
        super().__init__()
        self.taste = taste

    def tok_encode(self, text):
        return text.split()

    def loglikelihood(self, requests):
        return [(self.taste(*request.args), self.taste(*request.args) > 0.5) for request in requests]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def generate_until(self, requests):
        raise NotImplementedError


# lm-eval's scores where the answer is known

@pytest.mark.parametrize("task", FLOORS)
def test_all_right_is_one_and_all_wrong_is_zero(folder, task):
    rows = read_items(folder, task)
    right = {readings(task, row)[row["gold"]] for row in rows}
    assert 40 <= len(rows) <= 80
    knows = zero_shot(Judge(lambda context, text: float(context + text in right)), folder, task)
    assert knows == {"acc": 1.0, "stderr": 0.0, "items": len(rows), "floor": FLOORS[task]}
    errs = zero_shot(Judge(lambda context, text: -float(context + text in right)), folder, task)
    assert errs["acc"] == 0.0


def test_accuracy_and_its_standard_error_are_those_of_the_items_answered(folder):
    rows = read_items(folder, "two_choices")
    right = {readings("two_choices", row)[row["gold"]] for row in rows[:30]}
    found = zero_shot(Judge(lambda context, text: float(context + text in right)), folder, "two_choices")
    # the other items are ties, which go to the first choice
    hits = 30 + sum(row["gold"] == 0 for row in rows[30:])
    share = hits / len(rows)
    assert found["acc"] == pytest.approx(share)
    assert found["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (len(rows) - 1)))


@pytest.mark.parametrize("task", CHOOSING)
def test_a_model_that_reads_choices_only_or_likes_all_alike_scores_the_floor(folder, task):
    def taste(context, text):  # of `definition` the choice is the context
        return int(digest(context if task == "definition" else text), 16) / 16**12
    assert zero_shot(Judge(taste), folder, task)["acc"] == FLOORS[task]
    assert zero_shot(Judge(lambda context, text: -1.0), folder, task)["acc"] == FLOORS[task]


@pytest.mark.parametrize("task", FLOORS)
def test_a_model_scores_what_one_forward_pass_a_choice_says(opened, folder, task):
    model, tokenizer = opened.donor.model, opened.corpus.tokenizer

    def loglikelihood(context, text):
        ids = tokenizer(context + text)["input_ids"]
        before = len(tokenizer(context)["input_ids"])
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        target = torch.tensor(ids[before:])
        scores = logits[before - 1 : -1]
        return -F.cross_entropy(scores, target, reduction="sum").item(), bool((scores.argmax(-1) == target).all())

    rows, right = read_items(folder, task), 0
    for row in rows:
        if task == "last_word":
            right += loglikelihood(row["context"], " " + row["choices"][0])[1]
        elif task == "definition":
            scores = [loglikelihood(choice, " " + row["context"])[0] for choice in row["choices"]]
            right += int(np.argmax(scores)) == row["gold"]
        else:
            scores = [loglikelihood(row["context"], " " + choice)[0] for choice in row["choices"]]
            right += int(np.argmax(scores)) == row["gold"]
    for batch in (16, 1):
        found = zero_shot(language_model(model, tokenizer, batch), folder, task)
        assert found["acc"] == pytest.approx(right / len(rows))


def test_an_item_that_does_not_fit_is_refused_rather_than_cut(opened, folder):
    model = random_model(neox_config(vocab=len(opened.corpus.tokenizer), max_position_embeddings=64))
    with pytest.raises(ValueError, match=r"an item of last_word has \d+ tokens, but the model's context is 64"):
        zero_shot(language_model(model, opened.corpus.tokenizer, 16), folder, "last_word")


def test_scoring_leaves_nothing_on_the_terminal(opened, folder, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # outside any git repository
    zero_shot(language_model(opened.donor.model, opened.corpus.tokenizer, 16), folder, "last_word")
    out, err = capfd.readouterr()
    assert out == err == ""


# Perplexities, and the store

def test_double_context_is_the_perplexity_token_by_token(opened):
    model, total = opened.donor.model, 0.0
    ids = torch.as_tensor(opened.corpus.evaluation("heldout", 150))
    assert len(ids) == 150
    for position in range(1, len(ids)):  # windows of 32 every 16: the first that reaches a token scores it
        begin = 0 if position < 32 else (position - 32) // 16 * 16 + 16
        with torch.no_grad():
            logits = model(ids[None, begin:position]).logits[0, -1].double()
        total += F.cross_entropy(logits, ids[position]).item()
    assert double_context(opened, model) == pytest.approx(math.exp(total / 149), rel=1e-5)


def test_extended_is_measured_once_and_found_again(opened, folder, monkeypatch):
    donor = opened.experiment.pair.donor
    found = extended(opened, donor)
    model = opened.donor.model
    assert found["heldout_ppl"] == opened.full(model)["value"] != opened.full(model, "foreign")["value"]
    assert found["foreign_ppl"] == opened.full(model, "foreign")["value"]
    assert found["double_context_ppl"] == double_context(opened, model)
    for task in FLOORS:
        assert found[task] == zero_shot(language_model(model, opened.corpus.tokenizer, 16), folder, task)
    assert found["settings"]["tasks"] == folder.name and found["commit"] and found["seconds"] > 0
    assert str(ROOT) not in str(found) and str(folder.parent) not in str(found)
    monkeypatch.setattr(hardening, "load", None)  # a second measurement would fail
    assert extended(opened, donor) == found
    monkeypatch.setattr(hardening, "VERSION", hardening.VERSION + 1)
    with pytest.raises(TypeError):
        extended(opened, donor)


def test_other_weights_are_measured_anew(opened, tmp_path):
    first = extended(opened, opened.experiment.pair.donor)
    random_model(opened.donor.model.config, seed=1, std=0.1).save_pretrained(tmp_path / "model")
    other = extended(opened, tmp_path / "model")
    assert other["heldout_ppl"] != first["heldout_ppl"] and other["model"] == "model"


def test_a_run_whose_model_is_gone_says_what_to_do(opened, tmp_path):
    write_json(tmp_path / "seed0-abc" / "result.json", {"final": {"value": 1.0}})
    with pytest.raises(StoreError, match=r"seed0-abc has no model: delete .*seed0-abc, it is trained again"):
        extended(opened, tmp_path / "seed0-abc" / "model")


def test_arms_are_measured_that_are_kept_or_have_their_model(opened, monkeypatch):
    monkeypatch.setattr(hardening, "extended", lambda race, model: {"of": model.parent.parent.name})
    trained = opened.folder("subclone", 0) / "model"
    trained.mkdir(parents=True)
    (trained / "config.json").write_text("{}")
    runs = [{"arm": arm, "seed": 0, **more} for arm, more in {
        "hybrid": {"extended": {"of": "a kept one"}}, "subclone": {}, "random": {}, "stride": {}}.items()]
    found = hardening.extended_of(opened, runs, ("random", "subclone", "hybrid"))
    assert list(found.items()) == [("subclone", {"of": "subclone"}), ("hybrid", {"of": "a kept one"})]


def test_conditions_are_all_of_the_key_but_the_model(opened, folder, monkeypatch):
    found = extended(opened, opened.experiment.pair.donor)["settings"]
    key = race.model_key(opened.experiment.pair.donor)
    assert {**conditions(opened), "model": key} == found
    assert (hardening.STORE / "extended" / f"{digest(found)}.json").exists()
    monkeypatch.setattr(hardening, "VERSION", hardening.VERSION + 1)
    assert {name for name, value in conditions(opened).items() if value != found[name]} == {"version"}


# The table

def test_table7_sets_the_papers_cells_beside_ours():
    chosen = {"acc": 0.4425, "stderr": 0.0249, "items": 400, "floor": 0.25}
    table = table7({"hybrid": {"heldout_ppl": 85.44, "foreign_ppl": 2345.6, "continuation": chosen},
                    "stride": {"last_word": {**chosen, "acc": 0.0}}}).set_index("model")
    assert list(table.index) == ["random", "projection", "subclone", "hybrid", "subclone_rs", "hybrid_rs", "sibling",
                                 "donor", "stride", "guess floor"]
    hybrid = table.loc["hybrid"]
    assert dict(hybrid) == {
        "heldout_ppl, paper": "114.1", "heldout_ppl": "85.4", "foreign_ppl, paper": "90.7", "foreign_ppl": "2,346",
        "double_context_ppl, paper": "109.8", "double_context_ppl": "-", "last_word, paper": "0.076", "last_word": "-",
        "continuation, paper": "0.266", "continuation": "0.443 ± 0.025", "definition, paper": "0.313",
        "definition": "-", "two_choices, paper": "0.555", "two_choices": "-"}
    assert table.loc["sibling", "heldout_ppl, paper"] == "15.6" and table.loc["sibling", "last_word, paper"] == "0.516"
    assert table.loc["donor", "heldout_ppl, paper"] == "11.5" and table.loc["donor", "last_word, paper"] == "-"
    assert table.loc["hybrid_rs", "foreign_ppl, paper"] == "-" and table.loc["stride", "last_word"] == "0.000 ± 0.025"
    assert table.loc["guess floor", "two_choices"] == "0.50" and table.loc["guess floor", "heldout_ppl"] == "-"
    assert not pd.isna(table).any().any()


def test_the_depth_pairs_table_has_the_papers_depth_pair_and_only_what_was_measured():
    table = table7({"subclone": {"heldout_ppl": 81.25, "last_word": {"acc": 0.01, "stderr": 0.005}},
                    "random": {"foreign_ppl": 1200.0}}, pair="pairB").set_index("model")
    assert list(table.index) == ["subclone", "random", "guess floor"]
    assert dict(table.loc["subclone"]) == {
        "heldout_ppl, paper": "115.0", "heldout_ppl": "81.2", "foreign_ppl, paper": "94.2", "foreign_ppl": "-",
        "double_context_ppl, paper": "110.2", "double_context_ppl": "-", "last_word, paper": "10.7%",
        "last_word": "0.010 ± 0.005", "continuation, paper": "-", "continuation": "-", "definition, paper": "-",
        "definition": "-", "two_choices, paper": "-", "two_choices": "-"}
    random = table.loc["random"]
    assert (random["heldout_ppl, paper"], random["foreign_ppl, paper"]) == ("1,464.4", "514")
    assert (random["double_context_ppl, paper"], random["last_word, paper"]) == ("-", "0")
    assert list(table.columns) == list(table7({}).columns[1:])
    assert table.loc["guess floor", "continuation, paper"] == "0.25" and not pd.isna(table).any().any()
