"""Experiments are data: what is written is what is meant, and anything else is refused with key, value and remedy."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scaleop import experiment, settings, strict
from scaleop.experiment import (
    Experiment,
    ExperimentError,
    companion,
    experiments,
    from_notebook,
    load_experiment,
    load_ladder,
    nearest,
    planned,
)
from scaleop.paths import PARAMS, ROOT

COMPLETE = {
    "name": "toy", "title": "a toy",
    "pair": {"donor": "models/nano-l", "target": {"layers": 2, "width": 16, "heads": 2, "mlp": 40}},
    "corpus": {"source": "embedded", "frozen": {"sequences": 1000, "length": 8}, "seed_stride": 100},
    "evaluation": {"window": 16, "stride": 8, "quick_tokens": 50, "limits": {"heldout": None, "foreign": 100}},
    "race": {"tokens": 1000, "batch": 2, "length": 8, "peak_lr": 2.0e-3, "warmup_steps": 2, "eval_every": 100,
             "checkpoint_every": 5, "precision": "no", "attention": "eager", "arms": ["random", "hybrid_rs"]},
    "seeds": [0, 1],
}


@pytest.fixture
def write(tmp_path):
    """Writes COMPLETE, changed, as toy.yaml; returns its path as a string."""
    def make(change=lambda values: None):
        values = copy.deepcopy(COMPLETE)
        change(values)
        (tmp_path / "toy.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        return str(tmp_path / "toy.yaml")
    return make


def put(path, value):
    """A change: the dotted key `path` becomes `value`."""
    def change(values):
        *parents, last = path.split(".")
        for parent in parents:
            values = values[parent]
        values[last] = value
    return change


def drop(path):
    """A change: the dotted key `path` goes."""
    def change(values):
        *parents, last = path.split(".")
        for parent in parents:
            values = values[parent]
        del values[last]
    return change


# What is accepted

@pytest.mark.parametrize("name", experiments())
def test_every_experiment_of_params_loads_under_its_own_name(name):
    loaded = load_experiment(name)
    raw = yaml.safe_load((PARAMS / f"{name}.yaml").read_text())
    assert loaded.name == name == raw["name"]

    def holds(values, written):
        return all(holds(values[key], value) for key, value in written.items()) if isinstance(written, dict) \
            else values == written
    for part in ("race", "pair", "corpus", "evaluation"):
        assert holds(getattr(loaded, part).model_dump(), raw.get(part, {})), part


def test_a_file_holds_only_what_differs_from_the_one_it_extends(monkeypatch, tmp_path):
    depth, nano = load_experiment("nano_depth"), load_experiment("nano")
    assert depth.evaluation == nano.evaluation and depth.corpus == nano.corpus
    changed = {key for key, value in depth.race.model_dump().items() if value != nano.race.model_dump()[key]}
    assert changed == {"peak_lr", "arms", "leaders", "variants"}
    assert depth.pair.target.layers == 4 and depth.pair.reference == "models/nano-s"


def test_extending_what_is_not_there_or_oneself_is_refused(monkeypatch, tmp_path):
    for module in (experiment, strict):
        monkeypatch.setattr(module, "PARAMS", tmp_path)
    (tmp_path / "nano.yaml").write_text(yaml.safe_dump(COMPLETE))
    (tmp_path / "lost.yaml").write_text("extends: nanu\nname: lost\n")
    (tmp_path / "ring.yaml").write_text("extends: back\nname: ring\n")
    (tmp_path / "back.yaml").write_text("extends: ring\nname: back\n")
    with pytest.raises(ExperimentError, match=r"extends = 'nanu' is not in params/; did you mean 'nano'\?"):
        load_experiment("lost")
    with pytest.raises(ExperimentError, match="circle: ring -> back -> ring"):
        load_experiment("ring")


def test_the_plan_runs_arms_once_and_leaders_on_every_seed():
    toy = load_experiment("toy", arms="random,hybrid", seeds="0,1,2")
    assert planned(toy) == [("random", 0), ("hybrid", 0)]  # who names arms gets these and no others
    assert toy.seeds == [0, 1, 2] and load_experiment("toy", seeds=4).seeds == [4]
    nano = planned(load_experiment("nano"))
    assert len(nano) == len(set(nano)) == 9 + 4
    assert {(arm, seed) for arm, seed in nano if seed} == {(arm, seed) for arm in ("subclone_rs", "hybrid_rs")
                                                           for seed in (1, 2)}
    assert len(planned(load_experiment("nano_depth"))) == 15
    assert planned(load_experiment("nano"), 2)[0] == ("random", 2)
    with pytest.raises(ExperimentError, match="seeds"):
        load_experiment("toy", seeds="0,x")


def test_a_companion_keeps_its_share_of_the_budget():
    assert companion(load_experiment("nano"), "long").race.tokens == 1_351_680
    assert companion(load_experiment("nano", tokens=204_800), "long").race.tokens == 675_840
    assert companion(load_experiment("toy"), "convergence") is None
    for name in experiments():
        for role in load_experiment(name).companions:
            assert companion(load_experiment(name), role).name != name


def test_a_companion_follows_an_experiment_from_anywhere(tmp_path):
    """The share is of the budget in the experiment's own file, wherever that lies."""
    text = (PARAMS / "nano.yaml").read_text().replace("tokens: 409_600", "tokens: 800_000")
    (tmp_path / "mine.yaml").write_text(text.replace("name: nano\n", "name: mine\n"))
    mine = str(tmp_path / "mine.yaml")
    assert companion(load_experiment(mine), "long").race.tokens == 1_351_680
    halved = load_experiment(mine, tokens=400_000, arms="random")
    assert halved.name == "mine" and companion(halved, "long").race.tokens == 675_840
    assert companion(load_experiment(mine, seeds=1), "long").race.tokens == 1_351_680


def test_a_companion_that_a_page_cannot_do_without_is_asked_for_by_name():
    assert companion(load_experiment("nano"), "scale", required=True).name == "nano_scale"
    with pytest.raises(ExperimentError, match=r"experiment nano_long names no companion for 'scale'; add companions: "
                                              r"\{scale: nano_scale\}"):
        companion(load_experiment("nano_long"), "scale", required=True)
    with pytest.raises(ExperimentError, match=r"experiment heldout names no companion .*: \{scale: mini_scale\}"):
        companion(load_experiment("heldout"), "scale", required=True)  # of the same world


def test_nano_runs_the_papers_seven_arms_in_its_order_for_two_hundred_steps():
    race = load_experiment("nano").race
    seven = ["random", "projection", "subclone", "subclone_iso", "hybrid", "subclone_rs", "hybrid_rs"]
    assert [arm for arm in race.arms if arm in seven] == seven
    assert race.tokens / (race.batch * race.length) >= 200


def test_the_ladder_has_three_rungs_and_refuses_a_fourth_by_name():
    ladder = load_ladder()
    assert [(m.layers, m.width, m.heads, m.mlp) for m in ladder.models] \
        == [(8, 256, 8, 1024), (8, 128, 8, 512), (4, 96, 6, 384)]
    assert ladder.model("nano-m").width == 128
    with pytest.raises(ExperimentError, match=r"model 'nano-xl' is not in params/ladder\.yaml; there are: nano-l, "):
        ladder.model("nano-xl")


def test_values_arrive_as_written_and_defaults_are_the_papers(write):
    loaded = load_experiment(write())
    assert loaded.race.peak_lr == 0.002 and loaded.seeds == [0, 1]
    assert loaded.corpus.repeat is False and loaded.pair.reference is None
    assert (loaded.corpus.frozen.similarity, loaded.corpus.frozen.moments) == (500, 1000)
    assert loaded.evaluation.limits == {"heldout": None, "foreign": 100}


def test_an_experiment_cannot_be_changed_by_accident(write):
    with pytest.raises(ValueError, match="frozen"):
        load_experiment(write()).race.tokens = 5


# Overrides

def test_overrides_replace_what_the_file_says_and_none_leaves_it(write):
    path = write()
    plain = load_experiment(path)
    assert load_experiment(path, tokens=None, arms=None) == plain
    changed = load_experiment(path, tokens=160, arms="random, hybrid_rs ,stride")
    assert changed.race.tokens == 160 and changed.race.arms == ["random", "hybrid_rs", "stride"]
    assert load_experiment(path, arms=["hybrid"]).race.arms == ["hybrid"]
    rest = {"race": {"tokens", "arms"}, "share": True}
    assert changed.model_dump(exclude=rest) == plain.model_dump(exclude=rest)
    assert changed.model_dump()["race"].keys() == plain.model_dump()["race"].keys()


@pytest.mark.parametrize("overrides, said", [
    ({"tokens": 0}, r"race\.tokens = 0 will not do: .*greater than 0"),
    ({"tokens": "many"}, r"race\.tokens = 'many' will not do: .*integer"),
    ({"tokens": 1.5}, r"race\.tokens = 1\.5 will not do: .*integer"),
    ({"tokens": True}, r"race\.tokens = True will not do: .*integer"),
    ({"arms": []}, r"race\.arms = \[\] will not do: .*at least 1"),
    ({"arms": ["random", 3]}, r"race\.arms\.1 = 3 will not do: .*string"),
])
def test_overrides_are_checked_like_the_file(write, overrides, said):
    with pytest.raises(ExperimentError, match="parameters: " + said):
        load_experiment(write(), **overrides)


# What is refused, and the sentence that says so

@pytest.mark.parametrize("change, said", [
    (put("race.tokns", 5), r"params/toy\.yaml: unknown key race\.tokns = 5; did you mean 'tokens'\?"),
    (put("seed", [0]), r"unknown key seed = \[0\]; did you mean 'seeds'\?"),
    (put("pair.target.widht", 16), r"unknown key pair\.target\.widht = 16; did you mean 'width'\?"),
    (put("corpus.frozen.sequence", 3), r"unknown key corpus\.frozen\.sequence = 3; did you mean 'sequences'\?"),
    (put("pair.zzz", None), r"unknown key pair\.zzz = None; there are: donor, like, reference, target"),
    (drop("race.batch"), r"params/toy\.yaml: the key race\.batch is missing; add it \(params/nano\.yaml shows"),
    (drop("pair"), r"the key pair is missing; add it"),
    (drop("pair.target.mlp"), r"the key pair\.target\.mlp is missing"),
    (put("race.tokens", "3e5"), r"race\.tokens = '3e5' will not do: .*valid integer"),
    (put("race.tokens", 1000.0), r"race\.tokens = 1000\.0 will not do: .*valid integer"),
    (put("race.batch", 0), r"race\.batch = 0 will not do: .*greater than 0"),
    (put("race.warmup_steps", -1), r"race\.warmup_steps = -1 will not do: .*greater than or equal to 0"),
    (put("race.peak_lr", 0), r"race\.peak_lr = 0 will not do: .*greater than 0"),
    (put("race.precision", "fp16"), r"race\.precision = 'fp16' will not do: .*'bf16' or 'no'"),
    (put("race.arms", "random"), r"race\.arms = 'random' will not do: .*valid list"),
    (put("corpus.source", "pile"), r"corpus\.source = 'pile' will not do: .*'embedded'"),
    (put("corpus.repeat", "no"), r"corpus\.repeat = 'no' will not do: .*valid boolean"),
    (put("corpus.frozen.moments", 1001), r"moments = 1001 is more than the sequences = 1000 that are frozen; lower"),
    (put("corpus.frozen.sequences", 499), r"corpus\.frozen = .* will not do: .*similarity = 500 is more than .* = 499"),
    (put("seeds", []), r"seeds = \[\] will not do: .*at least 1 item"),
    (put("pair", None), r"pair = None will not do: "),
])
def test_a_wrong_file_is_refused_with_key_value_and_remedy(write, change, said):
    with pytest.raises(ExperimentError, match=said):
        load_experiment(write(change))


def test_all_that_is_wrong_is_said_at_once(write):
    def change(values):
        put("race.tokns", 5)(values)
        drop("race.batch")(values)
        put("seeds", ["0"])(values)
    with pytest.raises(ExperimentError) as refusal:
        load_experiment(write(change))
    assert len(str(refusal.value).splitlines()) == 3
    assert all(key in str(refusal.value) for key in ("race.tokns", "race.batch", "seeds.0 = '0'"))


def test_a_rate_that_yaml_reads_as_text_is_refused_with_the_spelling_that_works(tmp_path, write):
    text = Path(write()).read_text()
    (tmp_path / "toy.yaml").write_text(text.replace("peak_lr: 0.002", "peak_lr: 2e-3"))
    with pytest.raises(ExperimentError, match=r"race\.peak_lr = '2e-3' will not do: .*in YAML write 3\.0e-4, not 3e-4"):
        load_experiment(str(tmp_path / "toy.yaml"))


@pytest.mark.parametrize("content, said", [("a: [1, 2\nb: c", r"toy\.yaml is not valid YAML"),
                                           ("", "the file = None will not do"), ("- 1\n- 2", "the file = ")])
def test_a_file_that_is_no_experiment_at_all_is_refused(tmp_path, content, said):
    (tmp_path / "toy.yaml").write_text(content)
    with pytest.raises(ExperimentError, match=said):
        load_experiment(str(tmp_path / "toy.yaml"))


def test_an_unknown_experiment_suggests_the_nearest():
    with pytest.raises(ExperimentError, match=r"experiment = 'nanno' is not in params/; did you mean 'nano'\?"):
        load_experiment("nanno")
    with pytest.raises(ExperimentError, match=r"experiment = 'zzz' is not in params/; there are: .*nano"):
        load_experiment("zzz")
    with pytest.raises(ExperimentError, match=r"params/ladder\.yaml: unknown key vocabulary"):
        load_experiment("ladder")  # a file of params/ that is no experiment


def test_experiments_can_be_named_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_experiment("nano") == load_experiment(str(ROOT / "params" / "nano.yaml"))


def test_a_mistyped_name_brings_the_nearest_or_all():
    assert nearest("hybrid_sr", ["hybrid_rs", "random"]) == "did you mean 'hybrid_rs'?"
    assert nearest("q", ["b", "a"]) == "there are: a, b"


# What a notebook may be given

FRESH = {"__name__": "__main__", "In": [""], "Out": {}, "get_ipython": print, "exit": print, "quit": print,
         "open": print, "_i1": "seed = 0", "_oh": {}}


def test_a_notebooks_parameters_become_an_experiment_and_a_seed():
    loaded, seed = from_notebook({**FRESH, "experiment": "nano", "seed": 2, "tokens": 16_384,
                                  "arms": "random,hybrid_rs"})
    assert seed == 2 and isinstance(loaded, Experiment)
    assert loaded == load_experiment("nano", tokens=16_384, arms=["random", "hybrid_rs"])
    assert from_notebook({**FRESH, "experiment": "nano", "seed": 0, "tokens": None, "arms": None}) \
        == (load_experiment("nano"), 0)


@pytest.mark.parametrize("given, said", [
    ({"sead": 2}, r"unknown key sead = 2; did you mean 'seed'\?"),
    ({"token": 5}, r"unknown key token = 5; did you mean 'tokens'\?"),
    ({"seed": "two"}, r"seed = 'two' will not do: .*integer"),
    ({"seed": -1}, r"seed = -1 will not do: .*greater than or equal to 0"),
    ({"seed": 1.5}, r"seed = 1\.5 will not do: .*integer"),
    ({"tokens": 0}, r"tokens = 0 will not do: .*greater than 0"),
    ({"tokens": "false"}, r"tokens = 'false' will not do: .*integer"),
    ({"experiment": "nanno"}, r"experiment = 'nanno' is not in params/; did you mean 'nano'\?"),
    ({"arms": 3}, r"arms.* = 3 will not do"),
    ({"width": 256}, r"width = 256 will not do: .*greater than or equal to 512"),
])
def test_a_parameter_that_cannot_be_is_refused_by_name(given, said):
    with pytest.raises(ExperimentError, match=said):
        from_notebook({**FRESH, "experiment": "nano", "seed": 0, **given})


def test_a_parameter_that_the_notebook_does_not_list_is_taken_but_not_in_silence(capsys):
    namespace = dict(FRESH)
    exec("experiment: str = 'nano'\ntokens: int = None", namespace)  # the notebook's own cell
    exec("# Parameters\ntokens = 16384", namespace)  # papermill's
    assert from_notebook(namespace)[0].race.tokens == 16_384 and capsys.readouterr().out == ""
    exec("# Parameters\nwidth = 512", namespace)
    from_notebook(namespace)
    assert capsys.readouterr().out == \
        "note: width = 512 is no parameter of this notebook's own; it may change nothing here\n"


GUARD = "from scaleop.experiment import from_notebook\nimport scaleop\nloaded, seed = from_notebook(globals())"


def test_the_guard_sees_strangers_although_it_had_to_be_imported_itself():
    namespace = {**FRESH, "experiment": "nano", "seed": 0, "sead": 2}
    for _ in range(2):  # refusing once does not open the door
        with pytest.raises(ExperimentError, match=r"unknown key sead = 2; did you mean 'seed'\?"):
            exec(GUARD, namespace)
    del namespace["sead"]
    exec(GUARD, namespace)
    assert namespace["seed"] == 0 and namespace["loaded"] == load_experiment("nano")


@pytest.mark.parametrize("cell", [
    "from scaleop.experiment import from_notebook\nloaded, n = from_notebook(globals())\n",
    "given = dict(globals())\nfrom scaleop.experiment import from_notebook\nloaded, n = from_notebook(given)\n",
])
def test_the_guards_cell_may_be_run_again_by_hand_and_takes_a_copy_as_well(cell):
    def run(parameters):
        script = f"{parameters}\n{cell}results = [1]\n{cell}print(n)"
        return subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, timeout=60,
                              stdin=subprocess.DEVNULL, check=False)
    assert run("experiment, seed = 'nano', 3").stdout == "3\n"
    assert "unknown key sead = 1; did you mean 'seed'?" in run("experiment, seed, sead = 'nano', 3, 1").stderr


def test_a_key_mistyped_below_a_list_is_compared_with_its_siblings():
    ladder = load_ladder().model_dump()
    ladder["models"] = [{**ladder["models"][0], "widht": 3}]
    with pytest.raises(ExperimentError, match=r"unknown key models\.0\.widht = 3; did you mean 'width'\?"):
        experiment.validate(ladder, experiment.Ladder, "params/ladder.yaml")


def test_strict_objects_share_one_policy():
    """Every class of the file's form refuses strangers, converts nothing and cannot be changed."""
    kinds = [kind for room in (experiment, settings) for kind in vars(room).values()
             if isinstance(kind, type) and issubclass(kind, experiment.Strict)]
    assert len(kinds) > 8
    assert all((kind.model_config["extra"], kind.model_config["strict"], kind.model_config["frozen"])
               == ("forbid", True, True) for kind in kinds)
