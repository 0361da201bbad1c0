"""Mean and spread over training seeds, of made-up results whose numbers are worked out by hand."""

import math
import os
import subprocess
import sys

import pandas as pd
import pytest

from scaleop import paths, store, training_seeds
from scaleop.experiment import ExperimentError
from scaleop.store import read_json, write_json


def finding(verdict, ours):
    return {"id": "r2", "section": "4", "statement": "Activations map", "paper": "0.9", "ours": ours, "seeds": [0],
            "holds_on": [0], "verdict": verdict}


RESULTS = {
    "mini": ({"r2": 0.8, "by block": [0.5, 0.25], "count": 3, "yes": True, "name": "x", "none": None},
             finding("holds", "0.80")),
    "mini@seed2": ({"r2": 0.6, "by block": [0.3, 0.05], "count": 3, "late": 2.0, "lost": math.inf},
                   finding("fails", "0.60")),
    "mini@seed10": ({"r2": 0.7, "by block": [0.4], "count": 3}, finding("holds", "0.70")),
    "mini_depth@seed2": ({"r2": 99.0}, finding("fails", "99"))}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A store with RESULTS of section 4, and something of section 5."""
    monkeypatch.setattr(paths, "STORE", tmp_path)
    for name, (values, found) in RESULTS.items():
        values = {key: value for key, value in values.items() if value != math.inf}
        write_json(tmp_path / "results" / name / "04_alignment.json",
                   {"section": "04_alignment", "experiment": name, "values": values, "findings": [found]})
    write_json(tmp_path / "results" / "mini" / "05_projection.json", {"experiment": "mini", "values": {}})
    write_json(tmp_path / "results" / "04_alignment.json", {"experiment": "mini", "values": {"r2": -1.0}})
    return tmp_path


def test_runs_of_one_experiment_are_gathered_in_order(results):
    assert list(training_seeds.gather("mini", "04")) == ["mini", "mini@seed2", "mini@seed10"]
    assert list(training_seeds.gather("mini_depth", "04")) == ["mini_depth@seed2"]


def test_mean_and_sample_deviation_by_hand(results):
    table = training_seeds.spread(training_seeds.gather("mini", "04")).set_index("value")
    assert list(table.index) == ["r2", "by block[0]", "by block[1]", "count", "late"]  # no text, no truth, no None
    r2 = table.loc["r2"]
    assert (r2["runs"], r2["min"], r2["max"]) == (3, 0.6, 0.8)
    assert (r2["mean"], r2["sd"]) == (pytest.approx(0.7), pytest.approx(0.1))  # sqrt((0.01 + 0.01 + 0) / 2)
    second = table.loc["by block[1]"]
    assert second["runs"] == 2 and second["sd"] == pytest.approx(0.2 / math.sqrt(2))
    assert table.loc["count", "sd"] == 0 and math.isnan(table.loc["late", "sd"])


def test_what_is_not_finite_is_no_number():
    found = training_seeds.numbers({"a": math.inf, "b": {"c": [1, math.nan, 2.5]}})
    assert dict(found) == {"b.c[0]": 1.0, "b.c[2]": 2.5}


def test_verdicts_are_counted(results):
    table = training_seeds.verdicts(training_seeds.gather("mini", "04"))
    assert table.to_dict("records") == [
        {"claim": "Activations map", "paper": "0.9", "ours": "0.80; 0.60; 0.70", "holds": "2/3"}]


def test_nothing_there_and_files_in_the_wrong_place_are_refused(results):
    with pytest.raises(ExperimentError, match=r"nothing of section 06 for mini: run its page first, papermill .*seed1"):
        training_seeds.gather("mini", "06")
    path = results / "results" / "mini@seed2" / "04_alignment.json"
    write_json(path, read_json(path) | {"experiment": "mini"})
    with pytest.raises(ExperimentError, match=r"04_alignment\.json is of experiment mini: move it there"):
        training_seeds.gather("mini", "04")


def test_the_command_prints_scalars_and_writes_all_it_is_asked_for(results, tmp_path):
    def call(*arguments):
        environment = {**os.environ, "SCALEOP_STORE": str(results)}
        return subprocess.run([sys.executable, "-m", "scaleop.training_seeds", "--experiment", "mini", *arguments],
                              env=environment, capture_output=True, text=True, check=False)
    done = call("--section", "04", "--csv", str(tmp_path / "all.csv"), "--lists")
    assert done.returncode == 0 and "3 runs: mini, mini@seed2, mini@seed10" in done.stdout
    assert "by block[1]" in done.stdout and "2/3" in done.stdout
    assert list(pd.read_csv(tmp_path / "all.csv")["value"]) == ["r2", "by block[0]", "by block[1]", "count", "late"]
    assert "by block" not in call("--section", "04").stdout
    none = call("--section", "06")
    assert none.returncode == 1 and "run its page first" in none.stderr and "Traceback" not in none.stderr


def test_a_page_keeps_its_results_by_experiment_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "STORE", tmp_path)
    for name, value in (("mini@seed1", 1.0), ("mini@seed2", 3.0)):
        last = store.record("04_alignment", experiment=name, values={"r2": value}, findings=[])
    assert read_json(last)["values"] == {"r2": 3.0} and last == tmp_path / "results" / "04_alignment.json"
    monkeypatch.setattr(paths, "STORE", tmp_path)
    table = training_seeds.spread(training_seeds.gather("mini", "04"))
    assert table[["runs", "mean"]].to_dict("records") == [{"runs": 2, "mean": 2.0}]
