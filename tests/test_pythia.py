"""The experiments of the Pythia suite: the paper's values where it gives any, pins everywhere, training seeds by name.

Numbers are typed in from the paper (its tables, appendix C) and from Pythia's own table of shapes and learning rates.
Nothing here needs a network: whether the named models have these shapes is for whoever opens them (`Race`).
"""

import math
import re

import pytest
import yaml

from scaleop import experiment, strict
from scaleop.experiment import ExperimentError, companion, load_experiment, planned
from scaleop.paths import PARAMS, ROOT
from scaleop.plan import shown

HUB = [name for name in strict.experiments() if load_experiment(name).corpus.source == "hub"]
RATES = {"14m": 1e-3, "31m": 1e-3, "70m": 1e-3, "160m": 6e-4, "410m": 3e-4, "1.4b": 2e-4, "6.9b": 1.2e-4}


def sizes(name):
    """("1.4b", "410m"): the Pythia sizes of an experiment's donor and target."""
    pair = load_experiment(name).pair
    return tuple(None if model is None else re.match(r"EleutherAI/pythia-([\d.]+[mb])@", model)[1]
                 for model in (pair.donor, pair.like))


def test_these_are_all_of_the_suites_experiments():
    assert set(HUB) == {"primary", "primary_long", "primary_convergence", "heldout", "heldout_long", "scale",
                        "scale_control", "mini", "mini_long", "mini_depth", "mini_scale"}
    assert {name: sizes(name) for name in ("primary", "heldout", "scale", "mini", "mini_depth")} == {
        "primary": ("1.4b", "410m"), "heldout": ("410m", "160m"), "scale": ("6.9b", "1.4b"), "mini": ("70m", "31m"),
        "mini_depth": ("31m", "14m")}


# Appendix C, section 7.5 and the authors' configurations: tokens, batch, rate, warmup, quick evaluation, seeds
@pytest.mark.parametrize(("name", "tokens", "batch", "rate", "warmup", "steps", "every", "quick", "seeds"), [
    ("primary", 30_000_000, 32, 3e-4, 100, 916, 2_000_000, 50_000, [0, 1, 2]),
    ("primary_long", 100_000_000, 32, 3e-4, 100, 3_052, 2_000_000, 50_000, [0]),
    ("primary_convergence", 1_000_000_000, 16, 3e-4, 200, 61_036, 20_000_000, 100_000, [0, 1, 2]),
    ("heldout", 30_000_000, 32, 3e-4, 100, 916, 2_000_000, 50_000, [0, 1, 2]),
    ("heldout_long", 100_000_000, 32, 3e-4, 100, 3_052, 2_000_000, 50_000, [0]),
    ("scale", 30_000_000, 16, 2e-4, 100, 1_832, 2_000_000, 50_000, [0])])
def test_the_papers_races_have_the_papers_settings(name, tokens, batch, rate, warmup, steps, every, quick, seeds):
    found = load_experiment(name)
    race, measure, corpus = found.race, found.evaluation, found.corpus
    assert (race.tokens, race.batch, race.peak_lr, race.warmup_steps) == (tokens, batch, rate, warmup)
    assert math.ceil(race.tokens / (race.batch * race.length)) == steps  # as the authors' logs count them
    assert (race.length, race.precision, race.eval_every, found.seeds) == (1024, "bf16", every, seeds)
    assert (measure.window, measure.stride, measure.quick_tokens) == (1024, 512, quick)
    assert measure.limits == {"heldout": None, "foreign": 200_000}
    frozen = corpus.frozen
    assert (frozen.sequences, frozen.length, frozen.similarity, frozen.moments) == (10_000, 128, 500, 1_000)
    assert (corpus.disjoint, corpus.skip, corpus.seed_stride) == ("documents", 10_000, 25_000)
    assert corpus.train.path == "monology/pile-uncopyrighted" and corpus.train.split == "train"
    texts = corpus.evaluations
    assert (texts.heldout.path, texts.heldout.name, texts.heldout.split) == (
        "Salesforce/wikitext", "wikitext-103-raw-v1", "validation")
    assert (texts.foreign.path, texts.foreign.name, texts.foreign.split, texts.foreign.documents) == (
        "allenai/c4", "en", "validation", 500)


def test_arms_are_those_of_the_tables():
    table_2 = {"random", "projection", "subclone", "subclone_iso", "hybrid", "subclone_rs", "hybrid_rs"}
    for name in ("primary", "mini"):
        race = load_experiment(name).race
        assert table_2 | {"random_pythia", "stride"} == set(race.arms)
        assert race.leaders == ["subclone_rs", "hybrid_rs"]  # Table 8
        assert {"subclone_rs_act", "hybrid_rs_act"} < set(race.variants)
    assert load_experiment("primary_long").race.arms == ["subclone", "hybrid"]
    convergence = load_experiment("primary_convergence").race
    assert (convergence.arms, convergence.leaders) == (["random", "subclone_rs", "hybrid_rs"],
                                                      ["subclone_rs", "hybrid_rs"])
    assert load_experiment("heldout").race.leaders == ["random", "subclone", "hybrid", "subclone_rs", "hybrid_rs"]
    assert {"random", "hybrid_rs", "hybrid", "subclone_rs"} < set(load_experiment("scale").race.arms)  # Table 10


def test_50_million_tokens_lie_between_checkpoints_of_the_longest_runs():
    race = load_experiment("primary_convergence").race
    assert race.checkpoint_every * race.batch * race.length == pytest.approx(50e6, rel=1e-3)


@pytest.mark.parametrize("name", HUB)
def test_everything_is_pinned_by_commit(name):
    pair, corpus = load_experiment(name).pair, load_experiment(name).corpus
    models = [model for model in (pair.donor, pair.like, pair.reference) if model is not None]
    assert all(re.fullmatch(r"EleutherAI/pythia-[\d.]+[mb]@[0-9a-f]{40}", model) for model in models)
    assert pair.like is None or pair.reference in (None, pair.like)
    assert all(re.fullmatch("[0-9a-f]{40}", source.revision)
               for source in (corpus.train, corpus.evaluations.heldout, corpus.evaluations.foreign))


def test_one_model_or_data_set_has_one_pin():
    text = "\n".join((PARAMS / f"{name}.yaml").read_text() for name in HUB)
    models = set(re.findall(r"(EleutherAI/pythia-[\d.]+[mb])@([0-9a-f]{40})", text))
    data = set(re.findall(r"path: ([\w/-]+),[^}]*revision: ([0-9a-f]{40})", text))
    for pins in (models, data):
        assert len(dict(pins)) == len(pins)
    assert len(models) == 7 and len(data) == 3


@pytest.mark.parametrize("name", HUB)
def test_the_rate_is_the_targets_own(name):
    target, rate = sizes(name)[1], load_experiment(name).race.peak_lr
    if name.startswith("heldout"):
        assert rate == 3e-4 != RATES[target]  # the authors' exception
    elif target is not None:
        assert rate == RATES[target]


def test_a_step_divides_over_processes_and_over_micro_batches():
    for name in HUB:
        race = load_experiment(name).race
        for processes in (1, 2, 4):
            assert race.batch % processes == 0
            share = race.batch // processes
            assert race.micro_batch is None or share % min(race.micro_batch, share) == 0, name


# Companions

def test_the_pages_find_a_companion_for_every_role_that_they_need():
    roles = {role: companion(load_experiment("primary"), role).name for role in
             ("long", "convergence", "depth", "depth_long", "scale", "scale_control")}
    assert roles == {"long": "primary_long", "convergence": "primary_convergence", "depth": "heldout",
                     "depth_long": "heldout_long", "scale": "scale", "scale_control": "scale_control"}
    assert {role: companion(load_experiment("mini"), role).name for role in ("long", "depth", "scale")} == {
        "long": "mini_long", "depth": "mini_depth", "scale": "mini_scale"}


@pytest.mark.parametrize("name", ["primary", "mini", "heldout"])
def test_companions_use_the_same_text_and_windows(name):
    found = load_experiment(name)
    for role in found.companions:
        other = companion(found, role)
        assert other.corpus.train == found.corpus.train and other.corpus.evaluations == found.corpus.evaluations
        assert other.corpus.frozen == found.corpus.frozen
        assert other.evaluation.limits == found.evaluation.limits
        if role in ("long", "convergence"):
            assert other.pair == found.pair and other.race.peak_lr == found.race.peak_lr
            assert other.race.tokens / found.race.tokens == pytest.approx({"long": 3.33, "convergence": 33.3}[role],
                                                                         rel=0.01)


def test_a_seeds_stretch_of_the_small_pairs_holds_the_budget():
    for name in HUB:
        found = load_experiment(name)
        if found.corpus.disjoint == "tokens":
            assert found.race.tokens <= found.corpus.seed_stride, name


def test_the_small_twin_keeps_the_papers_proportions():
    """Weights: 31M has 30,494,720, 410M 405,334,016 (as their configs give); tokens for each, and the schedule."""
    mini, primary = load_experiment("mini").race, load_experiment("primary").race
    assert mini.tokens / 30_494_720 == pytest.approx(primary.tokens / 405_334_016, rel=0.01)
    steps = [race.tokens / (race.batch * race.length) for race in (mini, primary)]
    assert mini.warmup_steps / steps[0] == pytest.approx(primary.warmup_steps / steps[1], rel=0.01)
    assert mini.eval_every / mini.tokens == pytest.approx(primary.eval_every / primary.tokens, rel=0.1)


# Training seeds

def test_a_training_seed_changes_the_models_and_the_name_and_nothing_else():
    plain, third = load_experiment("mini"), load_experiment("mini@seed3")
    assert third.name == "mini@seed3"
    assert third.pair.donor == "EleutherAI/pythia-70m-seed3@main"
    assert third.pair.reference == "EleutherAI/pythia-31m-seed3@main"
    assert third.pair.like == plain.pair.like  # a shape has no seed
    same = {"name": "", "pair": plain.pair}
    assert third.model_copy(update=same) == plain.model_copy(update=same)


def test_overrides_and_companions_follow_a_training_seed():
    third = load_experiment("mini@seed3", arms="random", seeds="1", tokens=1_126_400)
    assert (third.name, third.race.arms, third.seeds, third.share) == ("mini@seed3", ["random"], [1], 0.5)
    assert third.pair == load_experiment("mini@seed3").pair
    depth = companion(third, "depth")
    assert depth.name == "mini_depth@seed3" and depth.race.tokens == 1_126_400
    assert (depth.pair.donor, depth.pair.reference) == ("EleutherAI/pythia-31m-seed3@main",
                                                        "EleutherAI/pythia-14m-seed3@main")
    scale = companion(third, "scale")
    assert (scale.pair.donor, scale.pair.reference) == ("EleutherAI/pythia-70m-seed3@main", None)
    assert scale.pair.target == load_experiment("mini_scale").pair.target


def test_only_the_sibling_is_of_another_run_where_the_donor_has_no_other():
    plain, third = load_experiment("primary"), load_experiment("primary@seed3")
    assert (third.pair.donor, third.pair.like) == (plain.pair.donor, plain.pair.like)
    assert third.pair.reference == "EleutherAI/pythia-410m-seed3@main"
    assert companion(third, "long").pair == third.pair
    assert companion(third, "depth").pair.donor == "EleutherAI/pythia-410m-seed3@main"
    assert companion(third, "scale") is None and companion(third, "scale_control") is None  # one 6.9B, one 1.4B
    with pytest.raises(ExperimentError, match="experiment scale has no training seeds"):
        companion(third, "scale", required=True)
    assert set(shown(["07_race", "08_hardening", "09_scale"], third)) == {
        "primary@seed3", "primary_long@seed3", "heldout@seed3"}  # what Snakemake plans


def test_a_file_by_its_path_takes_a_training_seed_too():
    assert load_experiment(f"{PARAMS / 'heldout.yaml'}@seed9").pair.donor == "EleutherAI/pythia-410m-seed9@main"


@pytest.mark.parametrize(("name", "sentence"), [
    ("scale@seed1", r"experiment scale has no training seeds.*pair\.training_seeds"),
    ("scale_control@seed1", "experiment scale_control has no training seeds"),
    ("nano@seed1", "experiment nano has no training seeds"),
    ("mini@seed10", r"experiment mini has no training seed 'seed10'; did you mean 'seed1'\?"),
    ("mini@3", "experiment mini has no training seed '3'; there are: seed1, seed2"),
    ("minni@seed3", r"'minni' is not in params/; did you mean 'mini'\?")])
def test_a_training_seed_that_does_not_exist_is_refused_by_name(name, sentence):
    with pytest.raises(ExperimentError, match=sentence):
        load_experiment(name)


def test_a_name_without_the_seeds_place_is_refused(tmp_path, monkeypatch):
    for module in (experiment, strict):
        monkeypatch.setattr(module, "PARAMS", tmp_path)
    values = yaml.safe_load((PARAMS / "mini.yaml").read_text())
    values["pair"]["training_seeds"]["donor"] = "EleutherAI/pythia-70m-seed1"
    (tmp_path / "mini.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ExperimentError, match=r"pythia-70m-seed1 would be the same for every seed: write \{seed\}"):
        load_experiment("mini")
    values["pair"]["training_seeds"] = {"seeds": [1]}
    (tmp_path / "mini.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ExperimentError, match="no model differs between these seeds: give donor or reference"):
        load_experiment("mini")


# The README's own example

def test_the_readmes_experiment_of_local_files_loads(tmp_path):
    text = re.search(r"```yaml\n(extends: mini.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)[1]
    (tmp_path / "my.yaml").write_text(text)
    mine, mini = load_experiment(str(tmp_path / "my.yaml")), load_experiment("mini")
    assert (mine.name, mine.pair.donor, mine.pair.training_seeds) == ("my", "/data/pythia-70m", None)
    assert mine.corpus.train.local and mine.corpus.train.files == "/data/pile/*.jsonl.zst"
    assert mine.race == mini.race and mine.corpus.evaluations == mini.corpus.evaluations
    with pytest.raises(ExperimentError, match="experiment my has no training seeds"):
        load_experiment(f"{tmp_path / 'my.yaml'}@seed1")


def test_the_readmes_table_counts_the_runs_that_are_planned():
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("hours a run")[1].split("\n\n")[0]
    rows = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in table.splitlines()[2:]}
    counted = {name: len(planned(load_experiment(name))) for name in HUB}
    for name in ("primary", "primary_long", "primary_convergence", "scale", "scale_control"):
        assert int(rows[f"`{name}`"]) == counted[name]
    assert rows["`heldout`, `heldout_long`"] == f"{counted['heldout']} + {counted['heldout_long']}"
    assert int(rows["`mini` and its companions"]) == sum(counted[name] for name in HUB if name.startswith("mini"))
