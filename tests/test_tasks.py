"""The zero-shot tasks: what their items are, that nothing but reading helps, and that no item has leaked."""

import json
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from scaleop import corpus, tasks, texts
from scaleop.corpus import Corpus, write_tokens
from scaleop.experiment import load_experiment
from scaleop.hardening import asked
from scaleop.items import Candidate, Passages, generate, grouped, items, lead, sentences, words
from scaleop.paths import ROOT
from scaleop.store import StoreError, digest, sha256
from scaleop.tasks import FLOORS, first_definition, leakage, read_items, readings, task_folder, unseen_by

PINNED = {"last_word": "65fbd8f50567", "continuation": "45b307ba048b",
          "definition": "65895ae401e4", "two_choices": "726e836a05a1"}
"""Digests of the items. Raise `tasks.VERSION` when they change: scores of other items are other scores."""

FIRST = 1617  # of 3,235 documents


@pytest.fixture(scope="module")
def documents():
    return texts.training_documents()


@pytest.fixture(scope="module")
def made(documents):
    """The items of the nano experiments."""
    return generate(documents, FIRST, texts.addresses()[1])


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "models" / "nano-s")


@pytest.fixture(scope="module")
def small(tokenizer, tmp_path_factory):
    """A corpus of a fraction of the text, in a store of its own."""
    root, (training, held_out), dictionary = tmp_path_factory.mktemp("small"), texts.addresses(), texts.dictionary()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "addresses", lambda: (training[:5], held_out[3:8]))
        patch.setattr(texts, "dictionary", lambda: dictionary[::50])
        for module in (corpus, tasks):
            patch.setattr(module, "STORE", root)
        yield Corpus(tokenizer, (20, 16), 2_000)


# Sentences and passages

def test_titles_and_initials_end_no_sentence_and_paragraphs_do():
    text = "I thank Mr. Speaker and U. S. Grant.  It is done! Is it?\n\nYes. the end"
    assert [(s.text, s.paragraph) for s in sentences(text)] == [
        ("I thank Mr. Speaker and U. S. Grant.", 0), ("It is done!", 0), ("Is it?", 0), ("Yes. the end", 1)]


def test_a_lead_is_whole_sentences_back_to_the_least_number_of_words():
    document = sentences("One two three. Four five.\n\nSix. Seven eight nine.")
    assert lead(document, 3, 3) == (3, "Seven eight nine.")
    assert lead(document, 3, 4) == (2, "Six. Seven eight nine.")
    assert lead(document, 3, 5) == (1, "Four five.\n\nSix. Seven eight nine.")
    assert lead(document, 1, 99) == (0, "One two three. Four five.")


@pytest.mark.parametrize("length", [1, 2, 4])
def test_passages_agree_with_a_set_of_tuples(length):
    draw = random.Random(length)

    def text(count):
        return " ".join(draw.choice("Abc") + draw.choice(",. '") for _ in range(count))

    known = [text(draw.randint(0, 30)) for _ in range(6)]
    there, found = Passages(known, length), {True: 0, False: 0}

    def passages(text):
        split = words(text)
        return {tuple(split[i : i + length]) for i in range(len(split) - length + 1)}

    every = set().union(*map(passages, known))
    for _ in range(200):
        probe = text(draw.randint(0, 6)) + " " + draw.choice(["", "zebra"])
        assert (probe in there) == bool(passages(probe) & every)
        found[probe in there] += 1
    assert min(found.values()) > 5


def test_no_documents_hold_no_passage():
    assert "any text at all" not in Passages([], 2)


# Groups

def test_groups_share_a_kind_differ_in_source_and_match_in_length():
    draw = random.Random(0)
    pool = [Candidate(f"c{i}", "a" * draw.randint(20, 60) + str(i), i % 2, i % 7) for i in range(200)]
    groups = grouped([*pool, pool[0]], 4, random.Random(1))
    assert len(groups) >= 40 and len({member.answer for group in groups for member in group}) == 4 * len(groups)
    for group in groups:
        lengths = [len(member.answer) for member in group]
        assert len({member.kind for member in group}) == 1 and len({member.source for member in group}) == 4
        assert max(lengths) <= 1.1 * min(lengths)


def test_every_choice_of_a_group_is_right_once_and_at_every_position_once():
    group = [Candidate(f"context {i}", f"answer {i}", None, i) for i in range(4)]
    rows = items([group], random.Random(3))
    assert sorted(row["gold"] for row in rows) == [0, 1, 2, 3]
    assert {row["context"][-1]: row["choices"][row["gold"]] for row in rows} == {
        str(i): f"answer {i}" for i in range(4)}
    assert all(sorted(row["choices"]) == [f"answer {i}" for i in range(4)] for row in rows)


# The items of the nano experiments

def test_the_items_are_these(made):
    assert {name: len(rows) for name, rows in made.items()} == {
        "last_word": 396, "continuation": 400, "definition": 400, "two_choices": 400}
    assert {name: digest(rows) for name, rows in made.items()} == PINNED


def test_definitions_come_from_documents_that_the_short_races_do_not_reach(documents):
    assert len(documents) == 3235 and first_definition(3235) == FIRST
    # no token spans two words, so a document starts at least as many tokens into the stream as words precede it
    start = sum(len(text.split()) for text in documents[:FIRST])
    for name in ("nano", "nano_depth", "nano_scale", "nano_long"):
        experiment = load_experiment(name)
        frozen, longest = experiment.corpus.frozen, max(map(len, documents))
        for seed in experiment.seeds if name == "nano_long" else (0, 1, 2):
            nominal = frozen.sequences * frozen.length + seed * experiment.corpus.seed_stride
            assert nominal + longest + experiment.race.tokens < start  # the first document behind, and the budget


def test_a_run_is_told_whether_it_reaches_the_definitions(store, tokenizer):
    twenty = Corpus(tokenizer, (2, 10), 30)
    write_tokens(twenty.folder / "train", np.zeros(200, dtype=np.uint16), np.arange(0, 200, 10))
    # twenty documents of ten tokens: definitions from document 10, token 100; seed 1 starts at token 50
    assert unseen_by(twenty, 1, 50) and not unseen_by(twenty, 1, 51)


def test_items_fit_the_window_with_room_to_spare(made, tokenizer):
    longest = {name: max(len(tokenizer(text)["input_ids"]) for row in rows for text in readings(name, row))
               for name, rows in made.items()}
    assert max(longest.values()) < 200, longest


@pytest.mark.parametrize("name", [name for name, floor in FLOORS.items() if floor])
def test_whoever_sees_the_choices_alone_scores_the_floor_exactly(made, tokenizer, name):
    judges = {"longest": len, "shortest": lambda text: -len(text), "first in the alphabet": lambda text: text,
              "most tokens": lambda text: (len(tokenizer(text)["input_ids"]), text),
              "any taste": lambda text: digest(text)}
    rows = made[name]
    for position in range(len(rows[0]["choices"])):
        assert sum(row["gold"] == position for row in rows) / len(rows) == FLOORS[name]
    for judge, taste in judges.items():
        right = sum(max(row["choices"], key=lambda text: (taste(text), text)) == row["choices"][row["gold"]]
                    for row in rows)
        assert right / len(rows) == FLOORS[name], judge
    assert all(len(set(row["choices"])) == round(1 / FLOORS[name]) for row in rows)
    assert all(max(map(len, row["choices"])) <= 1.1 * min(map(len, row["choices"])) for row in rows)


def test_last_words_were_said_before_and_passages_are_held_out_text(made):
    held_out = [" ".join(text.split()) for text in texts.addresses()[1]]
    for row in made["last_word"]:
        (word,) = row["choices"]
        assert len(word) >= 4 and word.isalpha() and word in words_as_written(row["context"])
        assert any(" ".join(f"{row['context']} {word}".split()) in text for text in held_out)


def words_as_written(text):
    return "".join(character if character.isalnum() else " " for character in text).split()


@pytest.mark.parametrize("name", ["continuation", "two_choices"])
def test_only_the_right_choice_follows_in_the_held_out_text(made, name):
    held_out = "\n".join(" ".join(text.split()) for text in texts.addresses()[1])
    for row in made[name]:
        follows = [" ".join(text.split()) in held_out for text in readings(name, row)]
        assert follows.index(True) == row["gold"] and sum(follows) == 1


def test_definitions_do_not_name_their_word_and_choices_are_of_one_kind(made, documents):
    lines = {}
    for text in documents[FIRST:]:
        for line in text.splitlines():
            lines.setdefault(line.split(",")[0], []).append(line)
    for row in made["definition"]:
        headwords, parts = zip(*(choice.split(", ", 1) for choice in row["choices"]), strict=True)
        assert len(set(parts)) == 1 and headwords[row["gold"]] not in words(row["context"])
        for headword, reading in zip(headwords, readings("definition", row), strict=True):
            defines = any(line.startswith(reading) for line in lines[headword])
            assert defines == (headword == headwords[row["gold"]])


def test_no_item_shares_thirteen_words_with_text_it_must_not_share_with(made, documents):
    def passages(text):
        split = words(text)
        return {tuple(split[i : i + 13]) for i in range(len(split) - 12)}

    asked = {name: set().union(*(passages(text) for row in rows for text in readings(name, row)))
             for name, rows in made.items()}
    assert all(len(found) > 1_000 for found in asked.values())
    held_out = asked["last_word"] | asked["continuation"] | asked["two_choices"]
    for number, text in enumerate(documents):
        split = words(text)
        forbidden = held_out | asked["definition"] if number < FIRST else held_out
        assert not any(passage in forbidden for passage in zip(*(split[i:] for i in range(13)), strict=False))


# The folder in the store

def test_the_folder_is_made_once_and_says_what_it_holds(small, monkeypatch):
    folder = task_folder(small)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["tasks"] == {name: {"items": len(read_items(folder, name)), "floor": FLOORS[name]}
                                 for name in FLOORS}
    assert sorted(manifest["sha256"]) == sorted(f"{name}.{kind}" for name in FLOORS for kind in ("jsonl", "yaml"))
    assert all(sha256(folder / file) == expected for file, expected in manifest["sha256"].items())
    monkeypatch.setattr(tasks, "generate", None)  # a second making would fail
    assert task_folder(small) == folder
    monkeypatch.setattr(tasks, "VERSION", tasks.VERSION + 1)
    with pytest.raises(TypeError):
        task_folder(small)


def test_a_damaged_file_is_named(small, tmp_path):
    folder = shutil.copytree(task_folder(small), tmp_path / "copy")
    (folder / "definition.jsonl").write_text("{}\n")
    with pytest.raises(StoreError, match=r"definition\.jsonl is damaged\. Delete"):
        read_items(folder, "last_word")


def test_the_pages_table_says_what_runs_have_read_and_what_has_leaked(small, capsys):
    first = int(small.train.documents[first_definition(len(small.train.documents))])
    for consumed, unseen in ((first - small.start(1), True), (first - small.start(1) + 1, False)):
        race = SimpleNamespace(corpus=small, recipe=SimpleNamespace(consumed=consumed))
        table, shares = asked(race, [{"seed": 0}, {"seed": 1}])
        assert capsys.readouterr().out == (
            f"every definition lies behind the text that the runs of the main race read: {unseen}\n")
    assert shares == leakage(task_folder(small), texts.training_documents())
    assert list(table.columns) == ["task", "items", "floor", "share that occurs in the training split"]
    assert list(table["task"]) == list(FLOORS) and list(table["floor"]) == [0, 0.25, 0.25, 0.5]
    assert list(table.iloc[:, 3]) == [f"{100 * share:.1f}%" for share in shares.values()]
    assert shares["definition"] > 0 == shares["continuation"]


def test_leakage_is_the_share_of_items_with_a_passage_in_the_documents(small):
    folder = task_folder(small)
    assert leakage(folder, texts.training_documents())["continuation"] == 0
    rows = read_items(folder, "two_choices")
    planted = [" ".join(words(row["context"])[:13]) for row in rows[:3]]

    def has(row):
        return any(f" {text} " in f" {' '.join(words(reading))} " for text in planted
                   for reading in readings("two_choices", row))

    share = sum(map(has, rows))
    assert leakage(folder, planted)["two_choices"] == share / len(rows) >= 3 / len(rows)
