"""Progress bars are seen while work runs and are gone from what is saved."""

import io
import json
import os
import re
import subprocess
import sys

import nbclient
import nbformat
import pytest

from scaleop.paths import ROOT
from scaleop.progress import in_notebook, progress

FRAME = re.compile(r"%\||it/s|s/it|\d+/\d+ \[|█")
CELLS = [
    "from scaleop.progress import progress",
    """print("before")
for _ in progress(range(3), desc="outer", mininterval=0):
    for _ in progress(range(3), desc="inner", mininterval=0):
        print("within")
print("after")""",
    """with progress(total=3, desc="named", disable=None, mininterval=0) as bar:
    for value in (7.5, 6.5, 5.5):
        bar.set_postfix_str(f"ppl {value:.1f}", refresh=False)
        bar.update()
"a result" """,
    """try:
    for _ in progress(range(3), desc="broken off", mininterval=0):
        raise KeyError
except KeyError:
    print("caught")""",
]


@pytest.fixture(scope="module")
def executed():
    """The cells above run by a kernel, as papermill runs them, and every frame that was shown on the way."""
    frames = []

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, index):
            if message["msg_type"] in ("display_data", "update_display_data"):
                frames.append(message["content"]["data"].get("text/plain", ""))
            return super().process_message(message, cell, index)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    Client(notebook, kernel_name="python3", timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    return notebook.cells, frames


def test_frames_were_shown_while_the_cells_ran(executed):
    _, frames = executed
    shown = [frame for frame in frames if frame]
    assert all(FRAME.search(frame) for frame in shown)
    assert {frame.split(":")[0] for frame in shown} == {"outer", "inner", "named", "broken off"}
    assert any("ppl 6.5" in frame for frame in shown)


def test_no_frame_and_no_stderr_is_left_in_an_executed_notebook(executed):
    cells, _ = executed
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.get("name") == "stderr"]
    assert not FRAME.search(json.dumps(outputs))
    assert all(output.output_type in ("stream", "execute_result") or output.data == {} for output in outputs)


def test_what_a_cell_shows_besides_its_bars_is_kept_in_order(executed):
    def printed(cell):
        return "".join(output.text for output in cell.outputs if output.output_type == "stream")
    cells, _ = executed
    assert printed(cells[1]) == "before\n" + "within\n" * 9 + "after\n"
    assert cells[2].outputs[-1].data["text/plain"] == "'a result'"
    assert printed(cells[3]) == "caught\n"


def test_a_terminal_gets_plain_tqdm_that_leaves_nothing_behind():
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    terminal = Terminal()
    assert not in_notebook()
    assert list(progress(range(3), desc="work", file=terminal, mininterval=0)) == [0, 1, 2]
    assert "work:  67%" in terminal.getvalue()
    assert terminal.getvalue().rsplit("\r", 2)[-2].strip() == ""  # the last thing drawn is a blank line


@pytest.mark.parametrize("options", ["", ", disable=None"])
def test_tqdm_disable_silences_every_bar(options):
    script = f"from scaleop.progress import progress\nfor _ in progress(range(3), mininterval=0{options}): pass"
    loud = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True,
                          stdin=subprocess.DEVNULL)
    quiet = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True,
                           stdin=subprocess.DEVNULL, env={**os.environ, "TQDM_DISABLE": "1"})
    assert bool(FRAME.search(loud.stderr)) == (options == "")  # with disable=None tqdm is silent outside terminals
    assert quiet.stderr == quiet.stdout == ""


def test_tqdm_disable_silences_notebooks_too(monkeypatch):
    shown = []

    class Line:
        def write(self, text):
            shown.append(text)

        flush = erase = lambda self: None
    monkeypatch.setattr("scaleop.progress.in_notebook", lambda: True)
    monkeypatch.setattr("scaleop.progress._NotebookLine", Line)
    list(progress(range(3), disable=None, mininterval=0))
    assert shown
    shown.clear()
    monkeypatch.setenv("TQDM_DISABLE", "1")
    list(progress(range(3), disable=None, mininterval=0))
    assert not shown
