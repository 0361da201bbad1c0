"""Progress bars that never end up in a saved notebook.

In a terminal this is plain tqdm. In a notebook kernel the bar lives in one display that is cleared when the work
is done, so an executed notebook holds no frames and no stderr. `TQDM_DISABLE=1` silences both.
"""

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

    def flush(self) -> None:
        """tqdm calls this after each frame; nothing is buffered."""


class Bar(tqdm):
    """tqdm whose frames vanish on close: `with progress(total=200, desc="hybrid_rs") as bar: bar.update()`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._line = _NotebookLine() if in_notebook() else None
        super().__init__(*arguments, **{"leave": False, "dynamic_ncols": self._line is None,
                                        "mininterval": 0.5 if sys.stderr.isatty() or self._line else 30.0,
                                        "file": self._line or sys.stderr, **options})

    def close(self) -> None:
        super().close()
        if self._line is not None and self._line.handle is not None:
            from IPython.display import clear_output

            clear_output()
            self._line.handle = None


def in_notebook() -> bool:
    """True inside a Jupyter kernel (JupyterLab, papermill), False in a terminal, IPython's included."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def progress(iterable: Any = None, **options: Any) -> Bar:
    """A progress bar over `iterable` (or `total=`), with tqdm's own options."""
    return Bar(iterable, **options)
