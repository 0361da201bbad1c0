"""Progress bars that never end up in a saved notebook.

In a terminal this is plain tqdm. In a notebook kernel the bar lives in one display that is emptied when the work
is done, so an executed notebook holds no frames and no stderr, and whatever else the cell shows stays. `TQDM_DISABLE=1`
silences both.
"""

import os
import sys
from typing import Any

from tqdm import tqdm


class _NotebookLine:
    """A text stream that tqdm writes frames to; each frame replaces the one before it in a single output."""

    def __init__(self) -> None:
        self.handle = None

    def write(self, text: str) -> None:
        from IPython.display import display

        frame = {"text/plain": text.strip("\r\n")}
        if not frame["text/plain"].strip():
            return
        if self.handle is None:
            self.handle = display(frame, raw=True, display_id=True)
        else:
            self.handle.update(frame, raw=True)

    def erase(self) -> None:
        """Empty the display. (Clearing the cell's output instead would take its tables and figures along.)"""
        if self.handle is not None:
            self.handle.update({}, raw=True)
            self.handle = None

    def flush(self) -> None:
        """tqdm calls this after each frame; nothing is buffered."""


class Bar(tqdm):
    """tqdm whose frames vanish on close: `with progress(total=200, desc="hybrid_rs") as bar: bar.update()`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._line = _NotebookLine() if in_notebook() else None
        if os.environ.get("TQDM_DISABLE", "0") not in ("", "0"):
            options["disable"] = True  # tqdm itself would let an explicit `disable=None` win
        super().__init__(*arguments, **{"leave": False, "dynamic_ncols": self._line is None,
                                        "mininterval": 0.5 if sys.stderr.isatty() or self._line else 30.0,
                                        "file": self._line or sys.stderr,
                                        "position": 0 if self._line else None,  # nested bars: a display each
                                        **options})

    def close(self) -> None:
        super().close()
        if self._line is not None:
            self._line.erase()


def in_notebook() -> bool:
    """True inside a Jupyter kernel (JupyterLab, papermill), False in a terminal, IPython's included."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def progress(iterable: Any = None, **options: Any) -> Bar:
    """A progress bar over `iterable` (or `total=`), with tqdm's own options."""
    return Bar(iterable, **options)
