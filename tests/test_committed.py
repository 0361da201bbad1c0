"""Results kept beside the book show under today's key or not at all; a later one takes an earlier one's place."""

import json
import sys

import pytest

from scaleop import committed, corpus, hardening, texts
from scaleop.experiment import load_experiment
from scaleop.race import Race
from scaleop.store import digest, write_json


@pytest.fixture
def race(monkeypatch, tmp_path):
    """The toy race on a few words, with a store and a place for kept results of its own."""
    monkeypatch.setattr(committed, "BOOK", tmp_path)
    monkeypatch.setattr(committed, "STORE", tmp_path / "store")
    monkeypatch.setattr(corpus, "STORE", tmp_path / "store")
    monkeypatch.setattr(texts, "training_documents", lambda: ["people and government", "war and peace"])
    return Race(load_experiment("toy"))


def result(race, arm, seed=0, **more):
    return {"arm": arm, "seed": seed, "key": digest(race.facts(arm, seed)),
            "stream": {"parent": race.corpus.train.manifest["sha256"]}, **more}


def test_kept_results_come_back_sorted_and_replaced(race):
    committed.keep(race, [result(race, "subclone", 1), result(race, "hybrid", value=1)])
    committed.keep(race, [result(race, "hybrid", value=2)])
    found = [(r["arm"], r["seed"], r.get("value")) for r in committed.kept(race)]
    assert found == [("hybrid", 0, 2), ("subclone", 1, None)]


def test_a_result_of_other_settings_is_not_shown(race, tmp_path):
    committed.keep(race, [result(race, "subclone"), {"arm": "hybrid", "seed": 0, "key": "of another protocol"}])
    assert [r["arm"] for r in committed.kept(race)] == ["subclone"]
    assert len(json.loads((tmp_path / "runs" / "toy.json").read_text())) == 2  # it is kept all the same


def test_another_budget_shows_nothing_and_no_file_is_no_error(race):
    assert committed.kept(race) == []
    committed.keep(race, [result(race, "subclone")])
    assert committed.kept(Race(load_experiment("toy", tokens=5120))) == []


def test_a_result_of_other_text_or_of_an_arm_that_is_no_more_is_not_shown(race, monkeypatch, tmp_path):
    gone = {**result(race, "subclone"), "arm": "a_lever_of_yesterday"}
    committed.keep(race, [result(race, "subclone"), gone])
    assert [r["arm"] for r in committed.kept(race)] == ["subclone"]
    monkeypatch.setattr(texts, "training_documents", lambda: ["people and government", "war and trade"])
    monkeypatch.setattr(corpus, "STORE", tmp_path / "store of other text")
    assert committed.kept(Race(race.experiment)) == []


def test_what_is_kept_is_shown_and_only_what_is_missing_runs(race, monkeypatch):
    """The toy plans seven arms on seed 0 and two leaders on seeds 0 and 1."""
    ran = []

    def runs(todo):
        ran.extend(todo)
        return [{"arm": arm, "seed": seed, "made": "now"} for arm, seed in ran]
    monkeypatch.setattr(race, "runs", runs)
    committed.keep(race, [result(race, arm, made="before") for arm in race.experiment.race.arms if arm != "hybrid"])
    found = [(each["arm"], each["seed"], each["made"]) for each in committed.kept_or_run(race)]
    assert ran == [("hybrid", 0), ("subclone_rs", 1), ("hybrid_rs", 1)]
    assert found == [*((arm, 0, "now" if arm == "hybrid" else "before") for arm in race.experiment.race.arms),
                     ("subclone_rs", 1, "now"), ("hybrid_rs", 1, "now")]
    ran.clear()
    assert [each["seed"] for each in committed.kept_or_run(race, seed=5)] == [5] * 7 + [0, 0, 1, 1]
    assert ran[:7] == [(arm, 5) for arm in race.experiment.race.arms] and len(ran) == 9  # two are kept


def test_metrics_of_table_7_are_shown_under_todays_conditions_only(race, monkeypatch):
    today = {"version": 2, "tasks": "of today", "evaluation": {"window": 128}}
    monkeypatch.setattr(hardening, "conditions", lambda _: today)

    def extended(**other):
        return {"foreign_ppl": 90.0, "settings": {**today, **other, "model": "some weights"}}

    committed.keep(race, [result(race, "subclone", extended=extended()), result(race, "stride"),
                          result(race, "hybrid", value=1, extended=extended(tasks="of yesterday")),
                          result(race, "random", extended=extended(version=1))])
    found = {r["arm"]: (r.get("extended"), r.get("value")) for r in committed.kept(race)}
    assert found == {"hybrid": (None, 1), "random": (None, None), "stride": (None, None),
                     "subclone": (extended(), None)}


def test_a_second_call_without_metrics_keeps_those_there_are(race, tmp_path):
    committed.keep(race, [result(race, "subclone", extended=1), {**result(race, "hybrid", extended=1), "key": "old"}])
    committed.keep(race, [result(race, "subclone", value=2), result(race, "hybrid", value=2)])
    kept = json.loads((tmp_path / "runs" / "toy.json").read_text())
    assert [(r["arm"], r.get("extended"), r["value"]) for r in kept] == [("hybrid", None, 2), ("subclone", 1, 2)]


@pytest.mark.parametrize(("arguments", "said"), [
    (["--experiment", "toi"], "experiment = 'toi' is not in params/; did you mean 'toy'"),
    (["--experiment", "toy", "--arms", "hybrid_sr"], "unknown arm 'hybrid_sr'; did you mean 'hybrid_rs'"),
])
def test_the_command_line_refuses_in_a_sentence(race, monkeypatch, arguments, said):
    monkeypatch.setattr(sys, "argv", ["committed", *arguments])
    with pytest.raises(SystemExit, match=said):
        committed.main()


def test_what_is_left_out_by_default_is_what_is_run(race):
    nano, convergence = (Race(load_experiment(name)) for name in ("nano", "nano_convergence"))
    assert "hybrid_rs_act" in committed.arms_of(nano) and "hybrid_rs" not in committed.arms_of(nano)
    assert committed.arms_of(convergence) == ["random", "subclone_rs", "hybrid_rs"]


def test_a_result_that_ran_is_not_shown_twice(race):
    committed.keep(race, [result(race, "subclone"), result(race, "subclone", 1), result(race, "hybrid")])
    shown = committed.kept(race, besides=[result(race, "subclone"), result(race, "random")])
    assert [(r["arm"], r["seed"]) for r in shown] == [("hybrid", 0), ("subclone", 1)]


def finished(race, found):
    """Put a result where the race leaves it."""
    where = committed.STORE / "runs" / race.experiment.name / found["arm"] / f"seed{found['seed']}-{found['key']}"
    write_json(where / "result.json", found)


def test_runs_that_lie_finished_in_the_store_are_shown_beside_the_kept_ones(race, monkeypatch):
    committed.keep(race, [result(race, "hybrid", value="kept")])
    for found in (result(race, "hybrid", value="stored"), result(race, "subclone_rs", 1, value="stored"),
                  result(race, "random", value="stored"), result(race, "hybrid", 7, value="no seed of toy's"),
                  {**result(race, "subclone"), "key": "of another protocol"}):
        finished(race, found)
    assert race.folder("hybrid", 0).name == f"seed0-{digest(race.facts('hybrid', 0))}"
    shown = committed.kept(race, besides=[result(race, "random")])
    assert [(r["arm"], r["seed"], r["value"]) for r in shown] == [("hybrid", 0, "kept"), ("subclone_rs", 1, "stored")]


def test_where_no_run_lies_the_store_asks_for_no_key(race, monkeypatch):
    monkeypatch.setattr(Race, "facts", None)  # of the donor's weights, which may have to be fetched
    assert committed.kept(race) == []
