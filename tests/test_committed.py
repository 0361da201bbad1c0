"""Results kept beside the book show under today's key or not at all; a later one takes an earlier one's place."""

import json

import pytest

from scaleop import committed
from scaleop.experiment import load_experiment
from scaleop.race import Race
from scaleop.store import digest


@pytest.fixture
def race(monkeypatch, tmp_path):
    """The toy race, with a place for kept results of its own."""
    monkeypatch.setattr(committed, "BOOK", tmp_path)
    return Race(load_experiment("toy"))


def result(race, arm, seed=0, **more):
    return {"arm": arm, "seed": seed, "key": digest(race.facts(arm, seed)), **more}


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


def test_what_is_left_out_by_default_is_what_is_run(race):
    nano, convergence = (Race(load_experiment(name)) for name in ("nano", "nano_convergence"))
    assert "hybrid_rs_act" in committed.arms_of(nano) and "hybrid_rs" not in committed.arms_of(nano)
    assert committed.arms_of(convergence) == ["random", "subclone_rs", "hybrid_rs"]
