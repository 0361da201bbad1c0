"""What `make reproduce` runs: the plan, what makes a page stale, and Snakemake at work in a small repository."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import nbformat
import pytest
import yaml
from transformers import AutoTokenizer

from scaleop import committed, corpus, experiment, paths, plan, reproduce, strict, texts
from scaleop.experiment import load_experiment
from scaleop.paths import ROOT
from tests.test_notebooks import notebook_of

# The plan

@pytest.fixture
def small(tmp_path, monkeypatch):
    """params/ of its own: `small` with companions for every role; returns its path."""
    shutil.copy(ROOT / "params" / "toy.yaml", tmp_path / "toy.yaml")
    for module in (experiment, strict):
        monkeypatch.setattr(module, "PARAMS", tmp_path)

    def write(name, extends, seeds, arms, leaders=(), variants=(), **more):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({
            "extends": extends, "name": name, "seeds": seeds, **more,
            "race": {"arms": arms, "leaders": list(leaders), "variants": list(variants)}}))
    write("small", "toy", [0, 3], ["random", "subclone"], ["subclone"], ["hybrid"],
          companions={role: f"small_{role}" for role in ("long", "convergence", "depth", "scale")})
    write("small_long", "small", [0], ["stride"])
    write("small_convergence", "small", [0], ["projection"])
    write("small_depth", "small", [1, 2], ["random"], ["subclone"], ["hybrid_rs"])
    write("small_scale", "small", [0], ["hybrid", "random"])
    return tmp_path


OWN = {("small", "random", 0), ("small", "subclone", 0), ("small", "subclone", 3)}  # a variant (hybrid) is never run
DEPTH = {("small_depth", "random", 1), ("small_depth", "subclone", 1), ("small_depth", "subclone", 2)}
SCALE = {("small_scale", "hybrid", 0), ("small_scale", "random", 0)}


@pytest.mark.parametrize(("section", "runs"), [
    ("03_setup", set()), ("06_residuals", set()), ("07_race", OWN), ("09_scale", OWN | DEPTH | SCALE),
    ("08_hardening", OWN | DEPTH | {("small_long", "stride", 0)})])
def test_a_section_needs_exactly_these_runs_each_once(small, section, runs):
    listed = plan.needed(section, load_experiment("small"))
    assert Counter(listed) == Counter(runs)


def test_the_seed_of_the_notebook_moves_the_arms_but_neither_leaders_nor_companions(small):
    assert set(plan.needed("08_hardening", load_experiment("small"), seed=5)) == DEPTH | {
        ("small", "random", 5), ("small", "subclone", 5), ("small", "subclone", 0), ("small", "subclone", 3),
        ("small_long", "stride", 0)}


def test_the_plan_is_what_the_notebooks_ask_for():
    """Of every notebook that races: the roles in its source are the plan's, and it asks `planned` for them."""
    for path in sorted(paths.NOTEBOOKS.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        assert (path.stem[:2] in plan.TRAINED) == ("race.runs(" in source), path.name
        for role in filter(None, (*plan.TRAINED.get(path.stem[:2], ()), *plan.KEPT.get(path.stem[:2], ()))):
            assert f'"{role}"' in source, (path.name, role)


def test_the_shipped_experiment_never_plans_what_is_committed():
    listed = [run for section in ("03", "04", "05", "06", "07", "08", "09")
              for run in plan.needed(section, load_experiment("nano"))]
    assert {run.experiment for run in listed} == {"nano", "nano_long", "nano_depth", "nano_scale"}
    assert not {run.arm for run in listed if run.experiment == "nano"} & set(load_experiment("nano").race.variants)


def test_a_section_may_have_an_experiment_of_its_own_which_is_left_as_it_is_where_its_donor_is_missing(
        monkeypatch, capsys, tmp_path):
    assert plan.chosen("10_wiring", {}).name == "smollm2" and plan.chosen("07_race", {}).name == "nano"
    assert plan.chosen("10_wiring", {"experiment": "toy", "tokens": 1024}).race.tokens == 1024
    assert plan.needed("10_wiring", load_experiment("smollm2")) == []  # hours: kept results, or by hand
    monkeypatch.setattr(plan, "missing", lambda: "it needs a package: install it")
    assert plan.lacking("10_wiring", {}) and not plan.lacking("07_race", {})
    assert not plan.lacking("10_wiring", {"experiment": "toy"})  # whose donor is there
    sections = [tmp_path / "07_race.ipynb", tmp_path / "10_wiring.ipynb"]
    assert reproduce.possible(sections, {}) == sections[:1]
    assert capsys.readouterr().out == "10_wiring is left as it is. it needs a package: install it\n"
    monkeypatch.setattr(reproduce, "sections", lambda only: sections[1:])
    monkeypatch.setattr(reproduce, "snakemake", None)
    assert reproduce.reproduce(["10"], {})  # nothing to do is no failure
    monkeypatch.setattr(plan, "missing", lambda: None)
    assert reproduce.possible(sections, {}) == sections


def test_a_page_is_made_of_what_it_uses_and_of_nothing_else(small, tmp_path, monkeypatch):
    notebooks = [tmp_path / f"{stem}.ipynb" for stem in ("04_alignment", "08_hardening")]
    monkeypatch.setattr(committed, "BOOK", tmp_path / "book")
    (tmp_path / "book" / "runs").mkdir(parents=True)
    depth = small / "small_depth.yaml"
    text = depth.read_text()
    seen = []
    for path, content, stale in [
            (notebooks[0], "{}", None), (notebooks[1], "{}", None), (notebooks[0], "{}", [set(), set()]),  # its time
            (notebooks[0], "{} ", [{"notebook"}, set()]), (depth, "# a comment\n" + text, [set(), set()]),
            (depth, text.replace("- 2", "- 3"), [set(), {"experiments"}]),
            (tmp_path / "book" / "runs" / "small_convergence.json", "[]", [set(), {"committed"}]),
            (tmp_path / "book" / "runs" / "small.json", "[]", [set(), {"committed"}]),
            (tmp_path / "book" / "runs" / "small_scale.json", "[]", [set(), set()])]:
        path.write_text(content)
        before, seen = seen, [plan.ingredients(path, load_experiment("small")) for path in notebooks if path.exists()]
        if stale is not None:
            assert stale == [{key for key in old if old[key] != new[key]}
                             for old, new in zip(before, seen, strict=True)], path


def test_a_pages_seconds_are_those_of_the_book(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "BOOK", tmp_path)
    assert plan.seconds(tmp_path / "notebooks" / "03_a.ipynb") == 3600
    (tmp_path / "03_a.ipynb").write_text('{"metadata": {"papermill": {"seconds": 12.5}}}')
    assert plan.seconds(tmp_path / "notebooks" / "03_a.ipynb") == 12.5
    (tmp_path / "03_a.ipynb").write_text('{"metadata": {"kernelspec": {}}}')  # saved by hand
    assert plan.seconds(tmp_path / "notebooks" / "03_a.ipynb") == 3600


def test_the_digest_of_code_sees_code_and_data_but_no_comment(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "sub" / "b.json").write_text("[1]")
    seen = []
    for name, text in (("a.py", "x = 1  # one\n\n"), ("plan.py", "y = 2"), ("a.py", "x = 2"), ("sub/b.json", "[2]"),
                       ("sub/c.py", "")):
        plan.code_digest.cache_clear()
        before = plan.code_digest(tmp_path)
        (tmp_path / name).write_text(text)
        plan.code_digest.cache_clear()
        seen.append(plan.code_digest(tmp_path) != before)
    assert seen == [False, False, True, True, True]


# Snakemake, in a repository of two or three small notebooks

class Repository:
    """A repository below `root` with a copy of the library, in which a driver or Snakemake itself can be called."""

    def __init__(self, root):
        self.root, self.store = root, root / "store"
        for name in ("notebooks", "book", "store"):
            (root / name).mkdir()
        for name in ("Snakefile", "models"):
            (root / name).symlink_to(ROOT / name)
        for name in ("params", "scaleop"):
            shutil.copytree(ROOT / name, root / name)
        self.environment = {**os.environ, "SCALEOP_HOME": str(root), "SCALEOP_STORE": str(self.store),
                            "PYTHONPATH": str(root)}

    def write(self, **notebooks):
        """Write notebooks; all there are then stand in the table of contents."""
        for name, notebook in notebooks.items():
            nbformat.write(notebook, self.root / "notebooks" / f"{name}.ipynb")
        listed = sorted(path.name for path in (self.root / "notebooks").glob("*.ipynb"))
        (self.root / "_toc.yml").write_text(yaml.safe_dump(
            {"format": "jb-book", "root": "index", "chapters": [{"file": name} for name in listed]}))

    def call(self, *command):
        return subprocess.run([sys.executable, "-m", *command], cwd=self.root, env=self.environment, text=True,
                              capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=900)

    def reproduce(self, *arguments):
        return self.call("scaleop.reproduce", "--experiment", "toy", *arguments)

    def planned(self, *arguments):
        """Outputs that a dry run would make."""
        said = self.call("snakemake", "-n", "--nolock", "--snakefile", str(self.root / "Snakefile"), "--config",
                         "experiment=toy", *arguments)
        assert said.returncode == 0, said.stderr
        return set(re.findall(r"^    output: (\S+)", said.stdout + said.stderr, flags=re.M))


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


ANSWER = "seed * 21"


def quick(source):
    """A notebook with the parameters that a toy is asked for with."""
    return notebook_of(source, parameters="experiment: str = 'nano'\nseed: int = 0\narms: str = ''\ntokens: int = 0")


def test_on_a_clean_store_everything_is_planned(repository):
    repository.write(**{"03_setup": quick("1"), "07_race": quick("1")})
    toy = yaml.safe_load((ROOT / "params" / "toy.yaml").read_text())
    race = toy["race"]
    runs = {(arm, 0) for arm in race["arms"]} | {
        (arm, seed) for arm in race["leaders"] for seed in toy["seeds"]}
    planned = repository.planned()
    assert {"pages/03_setup.ipynb", "pages/07_race.ipynb"} == {name for name in planned if name.startswith("pages/")}
    found = [re.fullmatch(r"runs/toy/(\w+)/seed(\d+)-[0-9a-f]{12}/result\.json", name).groups()
             for name in planned if not name.startswith("pages/")]
    assert Counter((arm, int(seed)) for arm, seed in found) == Counter(runs)


def test_only_what_is_stale_runs_again_and_a_failure_is_shown(repository):
    repository.write(**{"03_a": quick("print(experiment)"), "04_b": quick(ANSWER)})
    first = repository.reproduce("-p", "seed", "2", "--cores", "2")
    assert first.returncode == 0, first.stdout + first.stderr
    table = first.stdout[first.stdout.index("  seconds"):].splitlines()[1:]
    assert [line.rsplit(maxsplit=1)[0] for line in table] == ["03_a", "04_b", "all jobs", "clock"]
    seconds = [float(line.split()[-1]) for line in table]
    assert seconds[2] == pytest.approx(seconds[0] + seconds[1], abs=0.11) and min(seconds) > 0
    page = repository.root / "book" / "04_b.ipynb"
    assert nbformat.read(page, 4).cells[-1].outputs[0].data["text/plain"] == "42"
    assert not (repository.root / ".snakemake").exists()

    page.unlink()  # as good as an older page that git put back
    again = repository.reproduce("-p", "seed", "2")
    assert again.returncode == 0 and "everything is up to date" in again.stdout and page.exists()
    os.utime(repository.root / "notebooks" / "03_a.ipynb")
    assert repository.planned("seed=2") == set()
    assert repository.planned("seed=3") == {"pages/03_a.ipynb", "pages/04_b.ipynb"}

    repository.write(**{"04_b": quick("# divides\nseed / 0")})
    with open(repository.root / "scaleop" / "shrink.py", "a", encoding="utf-8") as file:
        file.write("# a comment\n")
    assert repository.planned("seed=2") == {"pages/04_b.ipynb"}
    failed = repository.reproduce("-p", "seed", "2")
    assert failed.returncode == 1 and "04_b FAILED" in failed.stdout
    assert "    # divides\n    seed / 0\n\nZeroDivisionError: division by zero" in failed.stdout
    assert "book/04_b.ipynb is still the last good one" in failed.stdout
    assert len((failed.stdout + failed.stderr).splitlines()) < 25 and "Traceback" not in failed.stdout + failed.stderr
    assert nbformat.read(page, 4).cells[-1].outputs[0].data["text/plain"] == "42"
    forced = repository.reproduce("-p", "seed", "2", "--only", "03", "--force")
    assert forced.returncode == 0 and "03_a: " in forced.stdout and "04_b" not in forced.stdout


def test_what_a_killed_driver_left_behind_stops_nobody(repository):
    repository.write(**{"03_a": quick("import time\nopen('started', 'w').close()\ntime.sleep(600)")})
    driver = subprocess.Popen([sys.executable, "-m", "scaleop.reproduce", "--experiment", "toy"],
                              cwd=repository.root, env=repository.environment, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    while not (repository.root / "started").exists():
        assert time.monotonic() < deadline and driver.poll() is None
        time.sleep(0.2)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    repository.write(**{"03_a": quick("1")})
    done = repository.reproduce()
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_cannot_be_planned_is_a_sentence(repository):
    repository.write(**{"07_race": quick("1")})
    done = repository.reproduce("-p", "arms", "random,hybird_rs")
    assert done.returncode == 1 and "unknown arm 'hybird_rs'; did you mean 'hybrid_rs'?" in done.stderr
    assert len(done.stderr.splitlines()) < 25


@pytest.mark.slow
def test_runs_are_made_once_and_found_again(repository, monkeypatch):
    """Two arms of a toy for real: a second plan is empty, and even a run that is forced is not trained again."""
    documents = texts.training_documents()[:60]  # of the whole text, tokens would take most of the time
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "STORE", repository.store)
        patch.setattr(texts, "training_documents", lambda: documents)
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "nano-s")
        assert len(corpus.Corpus(tokenizer, (200, 128), 100_000).train.tokens) > 60_000
    repository.write(**{"07_race": quick("1")})
    budget = ("-p", "arms", "random,subclone", "-p", "tokens", "2048")
    first = repository.reproduce(*budget)
    assert first.returncode == 0, first.stdout + first.stderr
    assert {"toy random seed 0 ...", "toy subclone seed 0 ...", "07_race ..."} <= set(first.stdout.splitlines())
    results = {path: path.read_bytes() for path in repository.store.glob("runs/toy/*/*/result.json")}
    assert len(results) == 2
    config = ("arms=random,subclone", "tokens=2048")
    assert repository.planned(*config) == set()
    everything = repository.call("snakemake", "--nolock", "--cores", "2", "--forceall", "--snakefile",
                                 str(repository.root / "Snakefile"), "--config", "experiment=toy", *config)
    assert everything.returncode == 0, everything.stderr
    assert {path: path.read_bytes() for path in results} == results  # found, not trained again
    lost = next(iter(results))
    shutil.rmtree(lost.parent)
    assert repository.planned(*config) == set()  # the page is still what it would be
    repository.write(**{"07_race": quick("2")})
    assert repository.planned(*config) == {"pages/07_race.ipynb", str(lost.relative_to(repository.store))}


def test_the_library_does_not_import_snakemake():
    assert not [path for path in (ROOT / "scaleop").rglob("*.py")
                if re.search(r"^\s*(import|from) snakemake", path.read_text(encoding="utf-8"), flags=re.M)]
    assert paths.ROOT == ROOT
