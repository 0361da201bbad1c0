"""One page of the book: a notebook run from the repository root, tidied, kept in the store and shown in `book/`.

It reaches `book/` only when all of it succeeded, so a page is always a whole run; the numbers it kept as data go
beside it, to `book/results/`.
"""

import filecmp
import re
import shutil
import time
from pathlib import Path
from typing import Any

import nbformat

from scaleop import paths
from scaleop.store import atomic, locked


class SectionFailed(RuntimeError):
    """A notebook did not run to its end; the message shows the cell and its error."""


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

    What it kept as data goes to `results/` beside `target`. Raises SectionFailed otherwise: `target` is then as it was,
    and the partial run lies in the store.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError

    partial = paths.STORE / "notebooks" / source.name
    partial.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    outcome = f"\n\nThe partial run is {partial}"
    if (shown := paths.BOOK / source.name).exists():
        outcome += f"; {paths.relative(shown)} is still the last good one"
    try:
        papermill.execute_notebook(source, partial, parameters, kernel_name="python3", cwd=paths.ROOT,
                                   progress_bar=False, extra_arguments=["--log-level=ERROR"])
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


def page(source: Path, parameters: dict[str, Any]) -> None:
    """Run a section's notebook into the store's `pages/`, then show it in `book/`. Raises as `execute` does."""
    with locked(paths.STORE / "notebooks" / source.stem):
        complaints = execute(source, paths.STORE / "pages" / source.name, parameters)
        publish(source)
    if complaints:
        first = plain(complaints[0]).strip().splitlines() or [""]
        print(f"note: {source.name} wrote to stderr (left out of the page): {first[0]}", flush=True)


def publish(source: Path) -> None:
    """Make the page of `book/` and its results those of the store, where they differ."""
    for name in (source.name, f"results/{source.stem}.json"):
        made, shown = paths.STORE / "pages" / name, paths.BOOK / name
        if made.exists() and not (shown.exists() and filecmp.cmp(made, shown, shallow=False)):
            with atomic(shown) as part:
                shutil.copyfile(made, part)
