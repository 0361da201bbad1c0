"""What the README tells people to type exists."""

import re
from pathlib import Path

from scaleop.arms import ARMS
from scaleop.claims import ladder, readable
from scaleop.experiment import NotebookParameters, experiments
from scaleop.paths import BOOK, ROOT
from scaleop.store import read_json

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    named = set(re.findall(r"\bmake ([a-z]+)\b", README)) - {"a", "them"}
    assert {"reproduce", "test", "book"} <= named <= targets


def test_every_papermill_command_names_a_notebook_and_real_parameters():
    commands = re.findall(r"papermill (\S+\.ipynb)(?: \S+\.ipynb)?((?: -p \S+ \S+)*)", README)
    assert len(commands) >= 4
    for notebook, parameters in commands:
        assert (ROOT / notebook).exists()
        for key, value in re.findall(r"-p (\S+) (\S+)", parameters):
            if key == "sead":
                continue  # the README's own example of a typo
            assert key in NotebookParameters.model_fields
            if key == "experiment":
                assert value.partition("@seed")[0] in experiments()
            if key == "arms":
                assert set(value.split(",")) <= ARMS.keys()


def test_every_place_in_the_file_tree_exists():
    table = README.split("## What is where")[1].split("##")[0]
    for cell in re.findall(r"^\| (.*?) \|", table, flags=re.M)[1:]:
        folder = Path("scaleop") if "scaleop/" in cell else Path()
        for name in re.findall(r"`([^`]+)`", cell):
            in_package = "/" not in name or name.startswith(("published", "claims", "plots"))
            path = ROOT / (folder / name if in_package else name)
            assert path.exists() or name == "store/" or path.name in ("models",), name


def test_the_results_table_is_what_the_stored_race_says():
    race = read_json(BOOK / "results" / "07_race.json")
    for row in readable(ladder(race["runs"], race["anchors"])).itertuples(index=False):
        assert "| " + " | ".join(map(str, row)) + " |" in README, row.arm
