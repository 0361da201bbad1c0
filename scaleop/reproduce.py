"""Run the paper: the notebooks that `_toc.yml` lists and the race runs behind them, as far as they are stale.

    python -m scaleop.reproduce                          # all sections with the notebooks' own parameters
    python -m scaleop.reproduce --only 03,07 --cores 2   # some of them, two jobs side by side
    python -m scaleop.reproduce --only 07 -p seed 2      # with other parameters, as papermill takes them

Snakemake decides what is stale and runs it (the Snakefile says how); `--page` is one of its jobs.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from scaleop import paths
from scaleop.experiment import ExperimentError, from_notebook
from scaleop.pages import SectionFailed, page, publish
from scaleop.plan import lacking
from scaleop.store import StoreError, locked

QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false",
         "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else every kernel start warns about frozen modules
         "JUPYTER_PREFER_ENV_PATH": "1"}  # this environment's kernel, whatever the user has installed elsewhere


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


def possible(todo: list[Path], parameters: dict[str, Any]) -> list[Path]:
    """Those of the sections that can be run here; of each other one a line says why, and its page stays as it is."""
    found = []
    for source in todo:
        if (reason := lacking(source.stem, parameters)) is None:
            found.append(source)
        else:
            print(f"{source.stem} is left as it is. {reason}", flush=True)
    return found


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


def reproduce(only: list[str] | None, parameters: dict[str, Any], cores: str = "all", force: bool = False) -> bool:
    """Bring the sections' pages up to date, then print how the seconds split; True when all succeeded."""
    todo = sections(only)
    from_notebook(parameters)  # a mistyped or impossible parameter is refused before any work
    if not (todo := possible(todo, parameters)):
        return True
    pages = [f"pages/{source.name}" for source in todo]
    settings = [f"{key}={value}" for key, value in parameters.items()]
    began, clock = time.time(), time.monotonic()
    done = snakemake(*pages, "--cores", cores, *(["--config", *settings] if settings else []),
                     *(["--forcerun", *pages] if force else []))
    if done:
        for source in todo:
            publish(source)
    table = split(todo, began, time.monotonic() - clock)
    print(table if table or not done else "everything is up to date (--force runs pages all the same)", flush=True)
    return done


def snakemake(*arguments: str) -> bool:
    """Run Snakemake in the store; True when it succeeded. Jobs say on stdout what runs and what failed.

    The caller holds the store's lock, so whatever Snakemake finds locked or half done was left by one that was killed.
    """
    store = paths.STORE.resolve()
    environment = os.environ | {"SCALEOP_STORE": str(store), "SCALEOP_HOME": str(paths.ROOT.resolve())}
    command = [sys.executable, "-P", "-m", "snakemake", "--snakefile", str(paths.ROOT.resolve() / "Snakefile"),
               *arguments, "--nolock", "--rerun-incomplete", "--scheduler", "greedy",
               "--quiet", "progress", "rules", "host"]
    store.mkdir(parents=True, exist_ok=True)
    with open(store / "snakemake.log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=store, env=environment, stdin=subprocess.DEVNULL, stderr=log)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()  # it was interrupted, too, and ends its jobs
            raise
        log.seek(0)
        said = log.read()
    if code and "job execution failed" not in said:  # else the job itself has said what
        print(f"\n{said.strip()}\n", file=sys.stderr, flush=True)
    return code == 0


def split(todo: list[Path], began: float, seconds: float) -> str:
    """A table of the seconds of all jobs that ended since `began` (time.time()), runs by experiment; "" for none."""
    def of(times: list[Path]) -> list[float]:
        return [float(path.read_text("utf-8").splitlines()[1].split("\t")[0])
                for path in times if path.stat().st_mtime >= began]
    rows = {f"{folder.name}: {len(took)} runs": sum(took) for folder in sorted((paths.STORE / "runs").glob("*"))
            if (took := of(list(folder.glob("*/*/job.tsv"))))}
    rows |= {source.stem: sum(took) for source in todo
             if (took := of(list((paths.STORE / "pages").glob(f"{source.stem}.tsv"))))}
    if not rows:
        return ""
    rows |= {"all jobs": sum(rows.values()), "clock": seconds}
    width = max(map(len, rows))
    return "\n".join([f"\n{'':{width}}  seconds", *(f"{name:{width}}  {value:7.1f}" for name, value in rows.items())])


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m scaleop.reproduce",
                                     description="Bring the book's pages, notebooks run into book/, up to date.")
    parser.add_argument("--experiment", help="a file of params/ (default: the notebooks' own, nano)")
    parser.add_argument("--only", metavar="03,07", help="sections whose names start with one of these")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), dest="parameters",
                        help="a notebook parameter, as papermill takes it; may be repeated")
    parser.add_argument("--cores", default="all", help="how many jobs run side by side, one thread each (default: all)")
    parser.add_argument("--force", action="store_true", help="run pages again that are up to date")
    parser.add_argument("--page", metavar="SECTION", help="run this one notebook here and now (a job of the Snakefile)")
    arguments = parser.parse_args()
    parameters = {key: parameter(value) for key, value in arguments.parameters}
    if arguments.experiment is not None:
        parameters["experiment"] = arguments.experiment
    if str(name := parameters.get("experiment")).endswith(".yaml"):
        parameters["experiment"] = str(Path(name).resolve())  # jobs start elsewhere
    os.environ.update(QUIET)
    os.environ.pop("MPLBACKEND", None)  # notebooks draw inline, whatever the calling shell prefers
    try:
        if arguments.page:
            page(*sections([arguments.page]), parameters)
            return
        with locked(paths.STORE / "notebooks", timeout=0):
            done = reproduce(arguments.only.split(",") if arguments.only else None, parameters, arguments.cores,
                             arguments.force)
    except (ExperimentError, StoreError, SectionFailed) as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        sys.exit("stopped; what was finished is stored and will be found again")
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
