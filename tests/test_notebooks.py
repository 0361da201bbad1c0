"""Notebooks: twins in sync, sources without outputs, executed pages without debris, and the driver that makes them."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
import yaml
from papermill import cli
from transformers import AutoTokenizer

from scaleop import corpus, pages, paths, reproduce, smollm2, texts
from scaleop.corpus import train_tokenizer
from scaleop.experiment import ExperimentError
from scaleop.paths import BOOK, NOTEBOOKS, ROOT
from scaleop.store import locked
from tests.conftest import neox_config, random_model
from tests.test_progress import FRAME

STEMS = sorted(path.stem for path in [*NOTEBOOKS.glob("*.ipynb"), *NOTEBOOKS.glob("*.py")]) or ["none yet"]
LISTED = re.findall(r"file: *(\S+\.ipynb)", (ROOT / "_toc.yml").read_text())
THIS_MACHINE = re.compile(r"(?<![\w.:/-])/(home|root|work|tmp|Users|mnt|opt|usr|var|private)/|[A-Z]:\\\\")


# Sources

@pytest.fixture(params=sorted(set(STEMS)))
def stem(request):
    if request.param == "none yet":
        pytest.skip("notebooks/ holds no notebook yet")
    return request.param


def cells_of(notebook):
    """What a cell is, without its random id and the blank lines around it."""
    return [(cell.cell_type, cell.source.strip("\n"), cell.metadata.get("tags", [])) for cell in notebook.cells]


def test_the_twins_of_a_notebook_say_the_same(stem):
    """`jupytext --sync notebooks/*.ipynb` repairs this; the .py is what people edit."""
    script, notebook = (NOTEBOOKS / f"{stem}{ending}" for ending in (".py", ".ipynb"))
    assert script.exists() and notebook.exists()
    assert cells_of(jupytext.read(script)) == cells_of(nbformat.read(notebook, 4))


def test_source_notebooks_are_valid_clean_and_run_by_python3(stem):
    notebook = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", 4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "papermill" not in notebook.metadata
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)


def test_the_first_code_cell_holds_annotated_literals_that_papermill_can_set(stem):
    """`name: type = literal` only: papermill shows those with --help-notebook, and nothing derived goes stale."""
    notebook = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [i for i, cell in enumerate(code) if "parameters" in cell.metadata.get("tags", [])] == [0]
    for statement in ast.parse(code[0].source).body:
        assert isinstance(statement, ast.AnnAssign), ast.unparse(statement)
        ast.literal_eval(statement.value)


def test_notebooks_are_thin(stem):
    """No cell outgrows a screen, and whatever is worth a function is in the library."""
    notebook = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", 4)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or len(cell.source.splitlines()) <= 25, cell.source


def test_every_listed_notebook_has_a_source():
    if missing := [name for name in LISTED if not (NOTEBOOKS / name).exists()]:
        pytest.skip(f"_toc.yml lists notebooks that are not written yet: {', '.join(missing)}")
    assert [path.name for path in reproduce.sections()] == LISTED


# Executed pages

@pytest.fixture(params=LISTED)
def page(request):
    if not (BOOK / request.param).exists():
        pytest.skip(f"book/{request.param} has not been executed yet (make notebooks)")
    return nbformat.read(BOOK / request.param, 4), request.param


def outputs_of(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def text_of(output):
    """All text of an output: streams, plain and HTML renderings; images are left out."""
    return output.get("text", "") + "".join(
        str(value) for kind, value in output.get("data", {}).items() if not kind.startswith("image/"))


def test_a_page_is_a_whole_run_without_error_stderr_or_frames(page):
    notebook, _ = page
    outputs = outputs_of(notebook)
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert not [output for output in outputs if output.output_type == "display_data" and not output.data]
    assert not [text for text in map(text_of, outputs) if FRAME.search(text)]
    assert notebook.metadata.papermill.exception is False


def test_a_pages_cells_ran_once_each_from_top_to_bottom(page):
    notebook, _ = page
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_a_page_shows_no_path_of_the_machine_it_ran_on(page):
    notebook, _ = page
    shown = [*map(text_of, outputs_of(notebook)), json.dumps(notebook.metadata),
             *(json.dumps(cell.metadata) for cell in notebook.cells)]
    assert not [text for text in shown if THIS_MACHINE.search(text)]


def test_a_page_was_made_from_the_notebook_that_is_there_now(page):
    notebook, name = page
    executed = [cell for cell in cells_of(notebook) if "injected-parameters" not in cell[2]]
    assert executed == cells_of(nbformat.read(NOTEBOOKS / name, 4)), f"run: python -m scaleop.reproduce --only {name}"


def test_the_search_for_machine_paths_finds_them_and_only_them():
    for text in ("in /home/me/x.py", "'/tmp/out'", "saved to /work/main/store", "C:\\\\Users"):
        assert THIS_MACHINE.search(text), text
    for text in ("models/nano-l", "https://example.org/home/x", "a/tmp/b", "tokens/s", "</tmp>", "train/work/x"):
        assert not THIS_MACHINE.search(text), text


# The driver, on notebooks of its own

def notebook_of(*sources, parameters="seed: int = 0"):
    cells = [nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
             *map(nbformat.v4.new_code_cell, sources)]
    return nbformat.v4.new_notebook(cells=cells, metadata={
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty repository: home(name=notebook, ...) writes notebooks and lists them in that order."""
    for name, folder in (("ROOT", tmp_path), ("NOTEBOOKS", tmp_path / "notebooks"), ("BOOK", tmp_path / "book"),
                         ("STORE", tmp_path / "store")):
        monkeypatch.setattr(paths, name, folder)
        folder.mkdir(exist_ok=True)

    def write(**notebooks):
        for name, notebook in notebooks.items():
            nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")
        toc = {"format": "jb-book", "root": "index", "parts": [{"caption": "x", "chapters": [
            {"file": f"{name}.ipynb", "title": name} for name in notebooks]}, {"chapters": [{"file": "references"}]}]}
        (tmp_path / "_toc.yml").write_text(yaml.safe_dump(toc, sort_keys=False))
        return tmp_path
    return write


NOISY = notebook_of(
    "import os, sys\nfrom scaleop.progress import progress\nprint(seed, os.path.isfile('_toc.yml'))",
    "print('one')\nfor _ in progress(range(3), mininterval=0): pass\nprint('two')\nprint('careful', file=sys.stderr)",
    "from scaleop import store\nfrom pathlib import Path\nstore.STORE = Path('store')\n"
    "_ = store.record('zz_first', seed=seed)",
    "from IPython.display import HTML\nHTML('<b>bold</b>')")


def test_a_page_is_tidy_and_its_results_lie_beside_it(home, capsys):
    root = home(zz_first=NOISY)
    pages.page(root / "notebooks" / "zz_first.ipynb", {"seed": 2})
    assert capsys.readouterr().out == "note: zz_first.ipynb wrote to stderr (left out of the page): careful\n"

    page = nbformat.read(root / "book" / "zz_first.ipynb", 4)
    nbformat.validate(page)
    assert [cell.execution_count for cell in page.cells] == [1, 2, 3, 4, 5, 6]
    tags = [cell.metadata.get("tags") for cell in page.cells]
    assert tags == [["parameters"], ["injected-parameters"], None, None, None, None]
    assert page.cells[2].outputs[0].text == "2 True\n"  # the parameter arrived; it ran in the repository root
    assert [output.text for output in page.cells[3].outputs] == ["one\ntwo\n"]  # no bar, no stderr, one stream
    kept = json.loads((root / "book" / "results" / "zz_first.json").read_text())
    assert kept["seed"] == 2 and "commit" in kept  # what the notebook recorded lies beside its page
    assert page.cells[5].outputs[0].data["text/html"] == "<b>bold</b>"
    assert page.metadata.papermill["parameters"] == {"seed": 2} and page.metadata.papermill.seconds > 0
    assert str(root) not in (root / "book" / "zz_first.ipynb").read_text()
    assert not (root / "store" / "notebooks" / "zz_first.ipynb").exists()


def test_a_failed_section_shows_its_cell_and_keeps_the_last_good_page(home):
    root = home(b=notebook_of("x = 3", "# divides\nx / 0"))
    (root / "book" / "b.ipynb").write_text("the last good one")
    with pytest.raises(pages.SectionFailed) as failure:
        pages.page(root / "notebooks" / "b.ipynb", {})
    assert re.search(r"b\.ipynb failed in In \[3\]:\n\n    # divides\n    x / 0\n\nZeroDivisionError: division by zero",
                     str(failure.value))
    assert "\x1b" not in str(failure.value) and "book/b.ipynb is still the last good one" in str(failure.value)
    assert (root / "book" / "b.ipynb").read_text() == "the last good one"
    partial = nbformat.read(root / "store" / "notebooks" / "b.ipynb", 4)
    assert any(output.output_type == "error" for output in outputs_of(partial))


def test_a_kernel_that_dies_is_reported_and_keeps_the_last_good_page(home):
    root = home(a=notebook_of("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"))
    (root / "book" / "a.ipynb").write_text("the last good one")
    with pytest.raises(pages.SectionFailed, match=r"a\.ipynb: the kernel died"):
        pages.page(root / "notebooks" / "a.ipynb", {})
    assert (root / "book" / "a.ipynb").read_text() == "the last good one"


def test_some_sections_can_be_chosen_and_others_are_refused_by_name(home):
    home(**{"03_setup": notebook_of("1"), "07_race": notebook_of("1"), "04_align": notebook_of("1")})
    assert [path.stem for path in reproduce.sections(["07", "03"])] == ["03_setup", "07_race"]
    with pytest.raises(ExperimentError, match=r"--only 08 names no section; there are: 03_setup, 07_race, 04_align"):
        reproduce.sections(["03", "08"])
    (paths.NOTEBOOKS / "07_race.ipynb").unlink()
    with pytest.raises(ExperimentError, match=r"do not exist: notebooks/07_race\.ipynb"):
        reproduce.sections(["03"])


def test_a_mistyped_parameter_is_refused_before_any_notebook_runs(home):
    root = home(a=notebook_of("1"))
    with pytest.raises(ExperimentError, match=r"unknown key sead = 2; did you mean 'seed'\?"):
        reproduce.reproduce(None, {"sead": 2})
    assert not (root / "book" / "a.ipynb").exists()


@pytest.mark.parametrize("text", ["True", "None", "true", "2", "-3", "1_000", "0123", "3e-4", ".5", "a,b", "[1, 2]",
                                  "nan", "", "1.5.2", "models/nano-l"])
def test_values_are_read_as_papermill_reads_them(text):
    ours, papermills = reproduce.parameter(text), cli._resolve_type(text)
    assert repr(ours) == repr(papermills)


def test_the_command_ends_with_a_sentence_and_exit_code_one_for_what_it_cannot_do():
    run = subprocess.run([sys.executable, "-m", "scaleop.reproduce", "--only", "99"], cwd=ROOT, text=True,
                         capture_output=True, stdin=subprocess.DEVNULL, timeout=120, check=False)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "--only 99 names no section" in run.stderr or "do not exist" in run.stderr


def test_a_second_driver_is_refused_while_one_runs():
    with locked(paths.STORE / "notebooks", timeout=0):
        run = subprocess.run([sys.executable, "-m", "scaleop.reproduce"], cwd=ROOT, text=True, capture_output=True,
                             stdin=subprocess.DEVNULL, timeout=120, check=False)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert f"notebooks is in use by process {os.getpid()} on " in run.stderr
    assert "Wait for it to finish" in run.stderr


# Notebooks as a user runs them

def papermill(name, output, store, *arguments):
    """`papermill notebooks/<name>.ipynb <output> ...` from the repository root, as the README says."""
    if not (NOTEBOOKS / f"{name}.ipynb").exists():
        pytest.skip(f"notebooks/{name}.ipynb is not written yet")
    command = [Path(sys.executable).with_name("papermill"), f"notebooks/{name}.ipynb", output, *arguments]
    return subprocess.run(list(map(str, command)), cwd=ROOT, text=True, capture_output=True, check=False, timeout=900,
                          stdin=subprocess.DEVNULL,  # never a pipe: papermill would take it for a notebook
                          env={**os.environ, "SCALEOP_STORE": str(store), "JUPYTER_PREFER_ENV_PATH": "1"})


@pytest.fixture(scope="module")
def race(tmp_path_factory):
    """Runs the race's notebook on a toy ladder and a little of the real text, in a store of its own."""
    work = tmp_path_factory.mktemp("race")
    documents = texts.training_documents()[:60]
    tokenizer = train_tokenizer(documents[:10], 600, 64)
    for name, width in (("large", 32), ("small", 16)):
        random_model(neox_config(width=width, heads=4, mlp=2 * width, vocab=600), std=0.05).save_pretrained(work / name)
        tokenizer.save_pretrained(work / name)
    with pytest.MonkeyPatch.context() as patch:  # the stream as it would be made, of fewer documents
        patch.setattr(corpus, "STORE", work / "store")
        patch.setattr(texts, "training_documents", lambda: documents)
        assert len(corpus.Corpus(tokenizer, (40, 32), 20_000).train.tokens) > 70_000
    (work / "toy.yaml").write_text(yaml.safe_dump({
        "name": "toy", "title": "a toy",
        "pair": {"donor": str(work / "large"), "target": {"layers": 2, "width": 16, "heads": 4, "mlp": 32},
                 "reference": str(work / "small")},
        "corpus": {"source": "embedded", "seed_stride": 20_000,
                   "frozen": {"sequences": 40, "length": 32, "similarity": 10, "moments": 20}},
        "evaluation": {"window": 64, "stride": 32, "quick_tokens": 500, "limits": {"heldout": 2000, "foreign": 2000}},
        "race": {"tokens": 1_000_000, "batch": 8, "length": 64, "peak_lr": 5e-3, "warmup_steps": 3, "eval_every": 4096,
                 "checkpoint_every": 10, "precision": "bf16", "attention": "eager", "arms": ["random"]},
        "seeds": [0]}))

    def run(name, *parameters):
        done = papermill("07_race", work / f"{name}.ipynb", work / "store", "-p", "experiment", work / "toy.yaml",
                         "-p", "tokens", "16384", "-p", "arms", "random,hybrid_rs", *parameters)
        return done, work / f"{name}.ipynb", work / "store"
    return run


@pytest.mark.slow
def test_section_3_runs_on_the_shipped_ladder(tmp_path):
    """Corpus, ladder and exactness, with the toy's short evaluations."""
    if missing := [name for name in ("nano-l", "nano-m", "nano-s")
                   if not (ROOT / "models" / name / "training.json").exists()]:
        pytest.skip(f"not trained yet: {', '.join(missing)} (make models)")
    done = papermill("03_setup", tmp_path / "03.ipynb", tmp_path / "store", "-p", "experiment", "toy")
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = outputs_of(nbformat.read(tmp_path / "03.ipynb", 4))
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    exact = next(text for text in map(text_of, outputs) if "max |difference|" in text)
    differences = re.findall(r"<td[^>]*col2[^>]*>([^<]+)</td>", exact)
    assert len(differences) == 6 and set(map(float, differences)) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters", "shown"), [
    ("08_hardening", (), "Table 7|guess floor"), ("09_scale", ("-p", "width", "512"), "hybrid_rs_holdout")])
def test_sections_8_and_9_run_alone_on_the_toy_from_a_clean_store(tmp_path, name, parameters, shown):
    done = papermill(name, tmp_path / "page.ipynb", tmp_path / "store", "-p", "experiment", "toy", *parameters)
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = outputs_of(nbformat.read(tmp_path / "page.ipynb", 4))
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any(re.search(shown, text) for text in map(text_of, outputs))
    record = json.loads((tmp_path / "store" / "results" / f"{name}.json").read_text())
    assert record["runs"] and {finding["verdict"] for finding in record["findings"]} >= {"holds", "does not hold"}


@pytest.mark.slow
def test_section_10_runs_alone_on_the_real_donor(tmp_path):
    """SmolLM2 from its package, to three narrow blocks; a little of the text: all of it takes a minute to tokenise."""
    if reason := smollm2.missing():
        pytest.skip(reason)
    folder, store = smollm2.smollm2(), tmp_path / "store"
    shutil.copytree(folder, store / folder.relative_to(paths.STORE), copy_function=os.link)  # half a minute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "STORE", store)
        documents = texts.training_documents()[:20]
        patch.setattr(texts, "training_documents", lambda: documents)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        assert len(corpus.Corpus(tokenizer, (24, 64), 450_000).train.tokens) > 5_000
    done = papermill("10_wiring", tmp_path / "page.ipynb", store, "-p", "experiment", "smollm2_toy")
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = outputs_of(nbformat.read(tmp_path / "page.ipynb", 4))
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    shown = [text_of(output) for output in outputs]
    assert any("target heads=8 is no multiple of 3" in text for text in shown)
    assert not [text for text in shown if THIS_MACHINE.search(text)]
    record = json.loads((store / "results" / "10_wiring.json").read_text())
    verdicts = {finding["id"]: finding["verdict"] for finding in record["findings"]}
    exact = ("rebuild-exact", "compensation-touches-read-outs", "rescale-touches-both", "groups-stay",
             "frequencies-match", "tied-head")
    assert [verdicts[name] for name in exact] == ["holds"] * 6  # of any budget
    assert {len(found) for found in record["runs"].values()} == {7} and len(record["spectra"]) == 3 * 2
    assert len(record["study"]["fits"]) == 6 * 3 * 2 and len(record["tied"]) == 3
    assert {row["moved"] == 0 for row in record["blocks_alone"] if row["arm"].startswith("subclone")} == {True}
    assert record["extended"].keys() == {"random", "subclone", "hybrid", "donor"}
    rates = {"all-beat-scratch-at-its-rate", "stack-at-the-papers-rate"}  # the toy has one rate
    silent = {name for name, verdict in verdicts.items() if verdict == "not run"}
    assert rates <= silent <= rates | {"levers-independent"}  # which says nothing where compensation gains nothing


def numbers_of(store):
    """Every run's curve and final evaluation, by arm and seed."""
    results = [json.loads(path.read_text()) for path in sorted(store.glob("runs/**/result.json"))]
    return {(result["arm"], result["seed"]): (result["curve"], result["final"], result["stream"]["sha256"])
            for result in results}


def shown(path):
    """All that a reader of the page sees above its provenance, figures included; pandas' random table ids are cut."""
    cells = nbformat.read(path, 4).cells
    end = next(i for i, cell in enumerate(cells) if cell.source.startswith("## Provenance"))
    return [re.sub(r"T_[0-9a-f]{5}|at 0x[0-9a-f]+", "", json.dumps([output.get("text"), output.get("data")]))
            for cell in cells[:end] if cell.cell_type == "code" for output in cell.outputs
            if output.get("text") or output.get("data")]  # an emptied progress bar shows nothing


@pytest.mark.slow
def test_the_race_runs_from_the_command_line_and_repeats_to_the_last_digit(race):
    done, path, store = race("once")
    assert done.returncode == 0, done.stderr[-3000:]
    first = numbers_of(store)
    assert first.keys() == {("random", 0), ("hybrid_rs", 0)}
    for curve, final, _ in first.values():
        assert [point["tokens"] for point in curve] == [0, 4096, 8192, 12288, 16384] and final["scored"] == 1999
        assert curve[-1]["ppl"] < 0.9 * curve[0]["ppl"]  # thirty-two steps teach something
    assert len({sha for _, _, sha in first.values()}) == 1  # both arms read the same bytes
    notebook = nbformat.read(path, 4)
    assert not [o for o in outputs_of(notebook) if o.output_type == "error" or o.get("name") == "stderr"]
    assert not [text for text in map(text_of, outputs_of(notebook)) if FRAME.search(text) or THIS_MACHINE.search(text)]
    shutil.rmtree(store / "runs")
    done, again, store = race("twice")
    assert done.returncode == 0, done.stderr[-3000:]
    assert numbers_of(store) == first
    assert shown(path) == shown(again)


@pytest.mark.slow
def test_another_seed_trains_on_other_text(race):
    done, _, store = race("seed2", "-p", "seed", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    found = numbers_of(store)
    assert {seed for _, seed in found} >= {2} and {arm for arm, seed in found if seed == 2} == {"random", "hybrid_rs"}
    if ("random", 0) in found:
        assert found["random", 2][2] != found["random", 0][2]


def test_a_mistyped_parameter_of_the_race_is_refused_by_name(tmp_path):
    done = papermill("07_race", tmp_path / "typo.ipynb", tmp_path / "store", "-p", "sead", "2")
    assert done.returncode != 0
    assert re.search(r"unknown key sead = 2; did you mean 'seed'\?", done.stderr)
    executed = [cell for cell in nbformat.read(tmp_path / "typo.ipynb", 4).cells if cell.get("execution_count")]
    assert len(executed) <= 3 and not (tmp_path / "store").exists()  # refused before any work
