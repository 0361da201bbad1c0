"""The matched-budget race (section 7): every arm trains on the same bytes under the same schedule.

One run is (experiment, arm, seed). It lives in its own folder of the store: a rolling checkpoint while it trains,
then `model/` (a checkpoint `from_pretrained` loads) and `result.json` with its curve and provenance. A finished run
is found again by the digest of everything that determines it; a killed one resumes.

    python -m scaleop.race --experiment nano --arm hybrid_rs --seed 2
    accelerate launch --num_processes 8 -m scaleop.race --experiment primary --arm hybrid_rs --seed 2
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from scaleop import hub, smollm2
from scaleop.arms import arm_named, build
from scaleop.corpus import Corpus, CorpusError
from scaleop.distillation import DistilledLoss
from scaleop.donor import Donor
from scaleop.evaluate import perplexity
from scaleop.experiment import Experiment, ExperimentError, load_experiment
from scaleop.hub import HubError
from scaleop.hub_corpus import facts as text_facts
from scaleop.hub_corpus import open_corpus
from scaleop.paths import STORE
from scaleop.processes import processes, told
from scaleop.progress import progress
from scaleop.replacing import recover
from scaleop.settings import RaceSettings
from scaleop.store import (
    StoreError,
    atomic_folder,
    cached_json,
    digest,
    locked,
    provenance,
    read_json,
    sha256,
    write_json,
)
from scaleop.train import NextTokenLoss, Recipe, settings, train
from scaleop.weights import WeightsError, empty_model, load, load_config, target_shape
from scaleop.wiring import WiringError, check_pair, config_like, shape_of

PROTOCOL = 3  # raise it when a change of code changes what a run computes: older results are then not reused


class Race:
    """An experiment opened for work: its donor, corpus and target, each loaded when first needed.

    Opening it checks the pair and the arms (ExperimentError, WiringError) and reads nothing but configs.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        for name in (*experiment.race.arms, *experiment.race.leaders, *experiment.race.variants):
            arm_named(name)
        donor = load_config(experiment.pair.donor)
        self.target_shape = target_shape(experiment.pair)
        self.target = config_like(donor, **self.target_shape.model_dump())
        self.target._attn_implementation = experiment.race.attention
        check_pair(shape_of(donor), shape_of(self.target))
        self.recipe = recipe_of(experiment.race)

    @cached_property
    def corpus(self) -> Corpus:
        """The experiment's text under the donor's tokenizer."""
        folder = hub.tokenizer_folder(self.experiment.pair.donor)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return open_corpus(self.experiment.corpus, tokenizer)

    @cached_property
    def donor_key(self) -> str:
        """Digest of the donor's weight files."""
        return model_key(self.experiment.pair.donor)

    @cached_property
    def donor(self) -> Donor:
        """The donor model and what arms read off it."""
        key = digest([self.donor_key, self.corpus.identity])
        return Donor(load(self.experiment.pair.donor), self.corpus.frozen(),
                     self.experiment.corpus.frozen.moments, key, STORE / "donors" / key)

    def quick(self, model: nn.Module, together: bool = False) -> float:
        """Perplexity on the first `quick_tokens` of the held-out text; `together` as in `perplexity`."""
        measure = self.experiment.evaluation
        tokens = self.corpus.evaluation("heldout", measure.quick_tokens)
        return perplexity(model, tokens, measure.window, measure.stride, together=together).value

    def full(self, model: nn.Module, text: str = "heldout", together: bool = False) -> dict[str, Any]:
        """Full strided perplexity on an evaluation text."""
        measure = self.experiment.evaluation
        tokens = self.corpus.evaluation(text, measure.limits[text])
        return perplexity(model, tokens, measure.window, measure.stride, together=together).facts()

    def facts(self, arm: str, seed: int) -> dict[str, Any]:
        """Everything that determines a run's numbers; its digest is the run's key."""
        experiment = self.experiment
        measured = experiment.evaluation.model_dump(exclude_defaults=True)
        if experiment.corpus.source == "hub":
            measured["limits"].pop("items", None)  # of the tasks, which no run asks
        return settings(self.recipe, protocol=PROTOCOL, arm=arm_named(arm).facts(), seed=seed, donor=self.donor_key,
                        target=self.target_shape.model_dump(exclude_none=True), tokenizer=self.corpus.key,
                        corpus=text_facts(experiment.corpus), evaluation=measured, attention=experiment.race.attention)

    def folder(self, arm: str, seed: int) -> Path:
        """Where the run of an arm and a seed lives."""
        return STORE / "runs" / self.experiment.name / arm / f"seed{seed}-{digest(self.facts(arm, seed))}"

    def loss(self, arm: str) -> Callable[[nn.Module], nn.Module]:
        """What makes an arm's loss of a model: next-token cross-entropy, or with the donor as teacher."""
        distill = arm_named(arm).distill
        return partial(DistilledLoss, teacher=self.donor.model, settings=distill) if distill else NextTokenLoss

    def run(self, arm: str, seed: int, wait: bool = True) -> dict[str, Any]:
        """One arm of one seed: find it finished, resume it, or build, train and score it. Returns its result.

        While another process has the run this one waits, or StoreError where it may not. In a launch of several
        processes all call this: the main one alone locks, builds and writes; they train and score together.
        """
        world = processes()
        if self.recipe.batch % world.num_processes:
            raise ExperimentError(f"race.batch = {self.recipe.batch} sequences do not divide over "
                                  f"{world.num_processes} processes: launch a number that divides it")
        with world.main_process_first():  # it may have text to prepare, of which the others then read
            folder = self.folder(arm, seed)
        with locked(folder, wait) if world.is_main_process else nullcontext():
            if not told((folder / "result.json").exists()):
                self._run(arm, seed, folder)
            world.wait_for_everyone()
        return read_json(folder / "result.json")

    def _run(self, arm: str, seed: int, folder: Path) -> None:
        world, facts = processes(), self.facts(arm, seed)
        key, began = digest(facts), time.monotonic()
        origin = provenance(experiment=self.experiment.name, arm=arm, seed=seed, key=key, settings=facts,
                            **hub_origin(self.experiment.pair.donor),
                            **({"processes": world.num_processes} if world.num_processes > 1 else {}))
        with world.main_process_first():
            recover(folder / "checkpoint")  # one that was being replaced when the process was killed
            stream = self.corpus.stream(seed, self.recipe.consumed, self.experiment.corpus.repeat)
            self.corpus.evaluation("heldout", 1)  # writes that text too, if need be
            if world.is_main_process:
                model, made = build(arm_named(arm), self.donor, self.target, seed)
            else:
                model, made = empty_model(self.target).eval(), {}  # `train` gives it the main one's weights
        built = time.monotonic()
        curve = train(model, stream, self.recipe, key=key, name=arm, folder=folder,
                      evaluate=partial(self.quick, together=True), loss=self.loss(arm))
        trained = time.monotonic()
        final = self.full(model, together=True)
        if not world.is_main_process:
            return
        with atomic_folder(folder / "model") as part:
            model.save_pretrained(part)
            self.corpus.tokenizer.save_pretrained(part)
        seconds = {"build": round(built - began, 2), "train": round(trained - built, 2),
                   "evaluate": round(time.monotonic() - trained, 2)}
        write_json(folder / "result.json", {**origin, "stream": stream.manifest, "made": made, "curve": curve,
                                            "zero_shot": curve[0]["ppl"], "final": final, "seconds": seconds})
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)

    def runs(self, todo: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
        """The results of (arm, seed) pairs (`experiment.planned`), in order; finished ones are reused."""
        return [self.run(arm, seed) for arm, seed in progress(list(todo), desc="race", unit=" runs")]

    def score(self, name: str) -> dict[str, Any]:
        """Quick and full held-out perplexity of a trained model (`models/nano-m`), measured once and stored."""
        facts = [PROTOCOL, model_key(name), self.corpus.key, self.experiment.evaluation.model_dump()]

        def scores() -> dict[str, Any]:
            origin, model = provenance(name=hub.short(name), **hub_origin(name)), load(name)
            return {**origin, "quick_ppl": self.quick(model), "full": self.full(model)}

        found = cached_json(STORE / "anchors" / f"{digest(facts)}.json", scores)
        return {**found, "ppl": found["full"]["value"]}

    def anchors(self) -> dict[str, Any]:
        """What the race is read against: scores of the donor and of the reference, and the vocabulary's size."""
        pair, vocabulary = self.experiment.pair, {"vocabulary": self.target.vocab_size}
        trained = {"donor": pair.donor, "reference": pair.reference}
        return {role: self.score(name) for role, name in trained.items() if name is not None} | vocabulary


def recipe_of(race: RaceSettings) -> Recipe:
    """How an experiment trains."""
    return Recipe(**{field.name: getattr(race, field.name) for field in fields(Recipe)})


def model_key(name: Path | str) -> str:
    """Digest of a model's safetensors and config, of a folder or a hub name: where the files lie does not count."""
    folder = hub.folder(name)
    files = sorted([*hub.weight_files(folder), folder / "config.json"])
    return digest([[file.name, sha256(file)] for file in files])


def hub_origin(name: str) -> dict[str, Any]:
    """For provenance: {"hub": name, revision and commit} of a hub model, {"package": ...} of a packaged one, nothing
    for a folder."""
    if name == smollm2.NAME:
        return {"package": smollm2.origin()}
    found = hub.revision(name)
    return {} if found is None else {"hub": found}


@contextmanager
def refusals() -> Iterator[None]:
    """What a command line may be told ends the process with the sentence, not with a traceback."""
    try:
        yield
    except (ExperimentError, StoreError, CorpusError, WiringError, FloatingPointError, HubError, WeightsError) as error:
        sys.exit(str(error))


def main() -> None:
    """Command line: one arm of one seed, in as many processes as `accelerate launch` started."""
    parser = argparse.ArgumentParser(prog="python -m scaleop.race", description="Run one arm of the race.")
    parser.add_argument("--experiment", default="nano")
    parser.add_argument("--arm", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, help="another budget than the experiment's")
    parser.add_argument("--no-wait", action="store_true", help="stop where another process has the same run")
    arguments = parser.parse_args()
    with refusals():
        with processes().main_process_first():  # it may have a donor to download
            race = Race(load_experiment(arguments.experiment, tokens=arguments.tokens))
        result = race.run(arguments.arm, arguments.seed, wait=not arguments.no_wait)
    if processes().is_main_process:
        print(f"{arguments.arm} seed {arguments.seed}: zero-shot {result['zero_shot']:.2f}, "
              f"final {result['final']['value']:.2f} ({race.folder(arguments.arm, arguments.seed)})")
    processes().destroy_process_group()


if __name__ == "__main__":
    main()
