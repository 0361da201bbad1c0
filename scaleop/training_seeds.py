"""Sections 4 to 6 over training seeds: what one page measured of each pretraining run, as mean and spread.

The paper measures one pair of models; PolyPythias trained the small sizes ten times. Run a page for each, then gather:

    for n in 1 2 3; do papermill notebooks/04_alignment.ipynb out.ipynb -p experiment mini@seed$n; done
    python -m scaleop.training_seeds --experiment mini --section 04

The pages leave `results/<experiment>/<section>.json` in the store; the experiment without `@seed` is one more run.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from scaleop import paths
from scaleop.experiment import ExperimentError
from scaleop.store import read_json


def gather(experiment: str, section: str) -> dict[str, dict[str, Any]]:
    """{"mini@seed1": what a section found of it, ...}; `section` is the beginning of its name ("04").

    ExperimentError when there is none, or when a file is not of the experiment whose folder it lies in.
    """
    folder = paths.STORE / "results"
    found, others = {}, folder.glob(f"{experiment}@seed*/{section}*.json")
    for path in (*folder.glob(f"{experiment}/{section}*.json"),
                 *sorted(others, key=lambda path: int(path.parent.name.split("@seed")[1]))):
        found[path.parent.name] = read_json(path)
        if found[path.parent.name]["experiment"] != path.parent.name:
            raise ExperimentError(f"{path} is of experiment {found[path.parent.name]['experiment']}: move it there, or "
                                  "delete it and run its page again")
    if not found:
        raise ExperimentError(f"{folder} holds nothing of section {section} for {experiment}: run its page first, "
                              f"papermill notebooks/{section}*.ipynb out.ipynb -p experiment {experiment}@seed1")
    return found


def numbers(values: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, number) of every finite number in nested dicts and lists: `emb_in.cka`, `act.cka[0][3]`."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from numbers(value, f"{name}.{key}" if name else key)
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from numbers(value, f"{name}[{index}]")
    elif isinstance(values, int | float) and not isinstance(values, bool) and math.isfinite(values):
        yield name, float(values)


def spread(found: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """A row for each number of the results' `values`: runs that have it, mean, sample standard deviation (n - 1, as the
    paper's spreads; NaN for one run), least and most. Rows are in the order of the first run that has them."""
    rows: dict[str, list[float]] = {}
    for result in found.values():
        for name, value in numbers(result["values"]):
            rows.setdefault(name, []).append(value)
    return pd.DataFrame([{"value": name, "runs": len(all_), "mean": sum(all_) / len(all_),
                          "sd": float(pd.Series(all_).std(ddof=1)), "min": min(all_), "max": max(all_)}
                         for name, all_ in rows.items()])


def verdicts(found: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """A row for each claim that a run's page judged: the paper's number, ours of each run, how many it holds on."""
    rows: dict[str, dict[str, Any]] = {}
    for result in found.values():
        for claim in result["findings"]:
            row = rows.setdefault(claim["id"], {"claim": claim["statement"], "paper": claim["paper"], "ours": [],
                                                "holds": 0, "runs": 0})
            row["ours"].append(claim["ours"])
            row["holds"] += claim["verdict"] == "holds"
            row["runs"] += 1
    return pd.DataFrame([{**row, "ours": "; ".join(map(str, row["ours"])), "holds": f"{row['holds']}/{row['runs']}"}
                         for row in rows.values()]).drop(columns="runs", errors="ignore")


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m scaleop.training_seeds",
                                     description="Mean and spread over training seeds of what a section's page found.")
    parser.add_argument("--experiment", required=True, help="without its @seed: mini")
    parser.add_argument("--section", required=True, choices=["04", "05", "06"])
    parser.add_argument("--lists", action="store_true", help="numbers inside lists and matrices too")
    parser.add_argument("--csv", type=Path, help="write the table of numbers here")
    arguments = parser.parse_args()
    try:
        found = gather(arguments.experiment, arguments.section)
    except ExperimentError as error:
        parser.exit(1, f"{error}\n")
    table = spread(found)
    if not arguments.lists:
        table = table[~table["value"].str.contains("[", regex=False)]
    if arguments.csv:
        table.to_csv(arguments.csv, index=False)
    with pd.option_context("display.max_rows", None, "display.max_colwidth", 100, "display.width", 200):
        print(f"{len(found)} runs: {', '.join(found)}\n")
        print(table.to_string(index=False, float_format="{:.4g}".format), end="\n\n")
        print(verdicts(found).to_string(index=False))


if __name__ == "__main__":
    main()
