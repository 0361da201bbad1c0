"""Run the paper: every notebook that `_toc.yml` lists, in that order, from raw text to executed page.

    python -m scaleop.reproduce                          # all sections with the notebooks' own parameters
    python -m scaleop.reproduce --only 03,07             # some of them
    python -m scaleop.reproduce --only 07 -p seed 2      # with other parameters, as papermill takes them

A notebook runs from the repository root into a file of the store and reaches `book/` only when all of it succeeded,
so a page of the book is always a whole run; the numbers it kept as data go beside it, to `book/results/`. What a run
stores is found again: running twice costs little.
"""

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import yaml

from scaleop import paths
from scaleop.experiment import ExperimentError, from_notebook
from scaleop.store import StoreError, atomic, locked

QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false",
         "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else every kernel start warns about frozen modules
         "JUPYTER_PREFER_ENV_PATH": "1"}  # this environment's kernel, whatever the user has installed elsewhere


class SectionFailed(RuntimeError):
    """A notebook did not run to its end; the message shows the cell and its error."""


def sections(only: list[str] | None = None) -> list[Path]:
    """The source notebooks in the order of `_toc.yml`, or those whose names start with one of `only`.

    Raises ExperimentError when a listed notebook does not exist or one of `only` names none.
    """
    def files(entry: Any) -> Iterator[str]:
        for key, value in entry.items() if isinstance(entry, dict) else enumerate(entry):
            if key == "file" and Path(value).suffix == ".ipynb":
                yield value
            elif isinstance(value, dict | list):
                yield from files(value)

    found = [paths.NOTEBOOKS / name for name in files(yaml.safe_load((paths.ROOT / "_toc.yml").read_text("utf-8")))]
    if missing := [paths.relative(path) for path in found if not path.exists()]:
        raise ExperimentError(f"_toc.yml lists notebooks that do not exist: {', '.join(missing)}")
    for prefix in only or []:
        if not any(path.stem.startswith(prefix) for path in found):
            raise ExperimentError(f"--only {prefix} names no section; there are: "
                                  + ", ".join(path.stem for path in found))
    return [path for path in found if not only or path.stem.startswith(tuple(only))]


def parameter(text: str) -> Any:
    """A value of the command line as papermill reads it: True, False, None, an int, a float, else the text."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def tidy(notebook: nbformat.NotebookNode) -> list[str]:
    """Take what belongs to the machine out of an executed notebook, in place; returns what was on stderr.

    Gone are paths and timings that papermill and the kernel note, stderr, outputs without content (a progress bar
    that was closed) and the state of widgets. Cells, results, parameters and seconds stay.
    """
    ran = notebook.metadata.get("papermill", {})
    kept = {key: notebook.metadata[key] for key in ("kernelspec", "language_info") if key in notebook.metadata}
    notebook.metadata = nbformat.from_dict({**kept, "papermill": {
        "parameters": ran.get("parameters", {}), "seconds": round(ran.get("duration") or 0, 1),
        "exception": bool(ran.get("exception"))}})
    complaints = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        complaints += [output.text for output in cell.outputs if output.get("name") == "stderr"]
        outputs = []
        for output in cell.outputs:
            if output.get("name") == "stderr" or (output.output_type == "display_data" and not output.data):
                continue
            if output.output_type == "stream" and outputs and outputs[-1].get("name") == output.name:
                outputs[-1].text += output.text  # a bar between them had split one stream in two
            else:
                outputs.append(output)
        cell.outputs = outputs
    return complaints


def execute(source: Path, target: Path, parameters: dict[str, Any]) -> list[str]:
    """Run one notebook from the repository root; `target` is replaced when it has succeeded. Returns its stderr.

    Raises SectionFailed otherwise: `target` is then as it was, and the partial run lies in the store.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError

    partial = paths.STORE / "notebooks" / source.name
    partial.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    outcome = f"\n\nThe partial run is {partial}"
    if target.exists():
        outcome += f"; {paths.relative(target)} is still the last good one"
    try:
        papermill.execute_notebook(source, partial, parameters, kernel_name="python3", cwd=paths.ROOT,
                                   progress_bar=sys.stderr.isatty(), extra_arguments=["--log-level=ERROR"])
    except papermill.PapermillExecutionError as error:
        cell = "\n".join(f"    {line}" for line in error.source.splitlines())
        raise SectionFailed(f"{source.name} failed in In [{error.exec_count}]:\n\n{cell}\n\n"
                            f"{error.ename}: {plain(error.evalue)}{outcome}, with the traceback.") from None
    except DeadKernelError:
        raise SectionFailed(f"{source.name}: the kernel died. A process that dies without an error was most likely "
                            f"stopped for want of memory.{outcome}.") from None
    notebook = nbformat.read(partial, as_version=4)
    complaints = tidy(notebook)
    with atomic(target) as part:
        nbformat.write(notebook, part)
    partial.unlink()
    kept = paths.STORE / "results" / f"{source.stem}.json"
    if kept.exists() and kept.stat().st_mtime >= began:
        with atomic(target.parent / "results" / kept.name) as part:
            shutil.copyfile(kept, part)
    return complaints


def plain(text: str) -> str:
    """`text` without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


def reproduce(only: list[str] | None, parameters: dict[str, Any]) -> bool:
    """Run the sections, print seconds beside each, stop at the first that fails; True when all succeeded."""
    seconds: dict[str, float] = {}
    failure = None
    todo = sections(only)
    from_notebook(parameters)  # a mistyped or impossible parameter is refused before any work
    for source in todo:
        print(f"{source.stem} ...", flush=True)
        began = time.monotonic()
        try:
            complaints = execute(source, paths.BOOK / source.name, parameters)
        except SectionFailed as error:
            failure = error
        seconds[source.stem] = time.monotonic() - began
        if failure:
            print(f"\n{failure}\n", file=sys.stderr, flush=True)
            break
        if complaints:
            first = plain(complaints[0]).strip().splitlines() or [""]
            print(f"  note: {source.name} wrote to stderr (left out of the page): {first[0]}", flush=True)
    width = max([len(name) for name in seconds] + [len("section")])
    print(f"\n{'section':{width}}  seconds")
    for name, value in seconds.items():
        print(f"{name:{width}}  {value:7.1f}{'  FAILED' if failure and name == source.stem else ''}")
    print(f"{'total':{width}}  {sum(seconds.values()):7.1f}", flush=True)
    return failure is None


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m scaleop.reproduce",
                                     description="Run the notebooks that _toc.yml lists into book/.")
    parser.add_argument("--experiment", help="a file of params/ (default: the notebooks' own, nano)")
    parser.add_argument("--only", metavar="03,07", help="sections whose names start with one of these")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), dest="parameters",
                        help="a notebook parameter, as papermill takes it; may be repeated")
    arguments = parser.parse_args()
    parameters = {key: parameter(value) for key, value in arguments.parameters}
    if arguments.experiment is not None:
        parameters["experiment"] = arguments.experiment
    os.environ.update(QUIET)
    os.environ.pop("MPLBACKEND", None)  # notebooks draw inline, whatever the calling shell prefers
    try:
        with locked(paths.STORE / "notebooks", timeout=0):
            done = reproduce(arguments.only.split(",") if arguments.only else None, parameters)
    except (ExperimentError, StoreError) as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        sys.exit("stopped; what was finished is stored and will be found again")
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
