"""Runs too long for the default book: made once, their results kept beside the book under their keys.

    python -m scaleop.committed --experiment nano_convergence             # run what is missing, keep all of it
    python -m scaleop.committed --experiment nano --seeds 0,1,2           # nano's variants on three seeds

What is kept is `result.json` as the race wrote it, provenance included, and for `--extended` the metrics of Table 7. A
result is shown again only while its key is the one that today's settings and protocol give: change the budget, the
corpus or the arm, and it is no longer there; nor are Table 7's metrics if their tasks or settings have changed. Shown
beside them are runs that lie finished in the store, whoever made them (`snakemake race`, say).
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scaleop.arms import arm_named
from scaleop.experiment import ExperimentError, load_experiment, planned
from scaleop.paths import BOOK, STORE
from scaleop.race import Race, refusals
from scaleop.store import digest, read_json, write_json


def place(experiment: str) -> Path:
    """The file that keeps an experiment's results."""
    return BOOK / "runs" / f"{experiment}.json"


def arms_of(race: Race) -> list[str]:
    """The arms that the default run leaves out: the experiment's variants, or all of one that is left out whole."""
    settings = race.experiment.race
    return settings.variants or settings.arms


def keep(race: Race, results: list[dict[str, Any]]) -> Path:
    """Write `results` to the experiment's file, each in place of an earlier one of the same arm and seed; what the
    earlier one had besides (Table 7's metrics) stays if its key is the same."""
    path = place(race.experiment.name)
    both: dict[tuple[str, int], dict[str, Any]] = {}
    for result in [*(read_json(path) if path.exists() else []), *results]:
        before = both.get(which := (result["arm"], result["seed"]), {})
        both[which] = {**before, **result} if before.get("key") == result["key"] else result
    write_json(path, [both[which] for which in sorted(both)])
    return path


def kept(race: Race, besides: Iterable[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """The results, kept or in the store, that today's settings, arms and text give, by arm and seed; each
    with `extended` only if its conditions are today's too (`hardening.conditions`). Those of an arm and seed among
    `besides` (they ran) are left out."""
    path, ran = place(race.experiment.name), {(result["arm"], result["seed"]) for result in besides}
    both = {(result["arm"], result["seed"]): result
            for result in [*_stored(race, ran), *(read_json(path) if path.exists() else [])]  # what is kept has more
            if (result["arm"], result["seed"]) not in ran and _current(race, result)}
    found = [both[which] for which in sorted(both)]
    if not any("extended" in result for result in found):
        return found
    from scaleop.hardening import conditions  # takes seconds to import, and most results do without

    today = conditions(race)

    def holds(extended: dict[str, Any]) -> bool:
        return {key: value for key, value in extended["settings"].items() if key != "model"} == today

    return [{key: value for key, value in result.items() if key != "extended" or holds(value)} for result in found]


def kept_or_run(race: Race, seed: int | None = None) -> list[dict[str, Any]]:
    """Everything an experiment plans, on `seed` (None: its first): what is kept as it is, what is not is run now."""
    there = {(result["arm"], result["seed"]): result for result in kept(race)}
    missing = race.runs(run for run in planned(race.experiment, seed) if run not in there)
    there |= {(result["arm"], result["seed"]): result for result in missing}
    return [there[run] for run in planned(race.experiment, seed)]


def _stored(race: Race, ran: set[tuple[str, int]]) -> list[dict[str, Any]]:
    """Finished runs in the store of the experiment's arms and variants on its seeds, but those that `ran`."""
    settings, found = race.experiment.race, []
    runs = STORE / "runs" / race.experiment.name
    for arm in dict.fromkeys([*settings.arms, *settings.leaders, *settings.variants]):
        for seed in race.experiment.seeds:
            if (arm, seed) in ran or not any((runs / arm).glob(f"seed{seed}-*/result.json")):
                continue  # no need of the key, for which the donor may have to be fetched
            if (path := runs / arm / race.folder(arm, seed).name / "result.json").exists():
                found.append(read_json(path))
    return found


def _current(race: Race, result: dict[str, Any]) -> bool:
    """Is a kept result's key what its arm, if there still is one, would have today, and its text today's?"""
    try:
        arm_named(result["arm"])
    except ExperimentError:
        return False
    return (result["key"] == digest(race.facts(result["arm"], result["seed"]))
            and result["stream"]["parent"] == race.corpus.identity)


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m scaleop.committed",
                                     description="Run the arms that the default book leaves out; keep their results.")
    parser.add_argument("--experiment", default="nano_convergence")
    parser.add_argument("--arms", help="comma-separated; default: those that the default run leaves out")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--extended", action="store_true", help="measure Table 7's metrics of each trained model too")
    arguments = parser.parse_args()
    with refusals():
        race = Race(load_experiment(arguments.experiment))
        arms = arguments.arms.split(",") if arguments.arms else arms_of(race)
        results = race.runs((arm, int(seed)) for seed in arguments.seeds.split(",") for arm in arms)
        if arguments.extended:
            from scaleop.hardening import extended  # lm-eval takes seconds to import

            results = [{**result, "extended": extended(race, race.folder(result["arm"], result["seed"]) / "model")}
                       for result in results]
        print(f"{len(results)} results kept in {keep(race, results).relative_to(BOOK.parent)}")


if __name__ == "__main__":
    main()
