"""The documents of a data set, streamed through `datasets` in their one fixed order, from any document on.

A connection that drops is opened again and reading goes on with the very next document. A `Mark` says where; it is
JSON-able, so that another process can go on too. `IterableDataset.state_dict()` makes that quick (exact for plain
streams, and these are never shuffled; of a compressed file what lies in front is fetched again), `skip` is the slow
way. Either way the document in front of the mark is read once more and compared, so that no document is lost, repeated
or another data set's.
"""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from scaleop.corpus import CorpusError
from scaleop.paths import ROOT, resolve
from scaleop.settings import TextSource
from scaleop.store import sha256

ATTEMPTS = 6  # in a row without one new document; `datasets` itself retries each read for minutes before that
WAIT = 2.0  # seconds before the second attempt, doubled for each further one
WHOLE = 2**28  # local files up to so many bytes are identified by all of them, larger ones by size and both ends
END = 2**20


class CannotOpen(CorpusError):
    """A data set that is not there, cannot be reached or is none."""


@dataclass(frozen=True)
class Mark:
    """A place in a data set: `document` rows lie before it, the last of them with this text's SHA-256.

    `state` is `IterableDataset.state_dict()` as it was *before* that last row.
    """

    document: int = 0
    last: str = ""
    state: dict[str, Any] | None = None


def described(source: TextSource) -> str:
    """A data set as messages name it: path, configuration, split, commit."""
    where = source.path if source.files is None else f"{source.path} files {source.files}"
    parts = [where, *filter(None, [source.name, source.split, source.revision and source.revision[:12]])]
    return ", ".join(parts)


def identity(source: TextSource) -> dict[str, Any]:
    """What determines a data set's rows: its settings with the commit; for local files their names, sizes, hashes."""
    facts = source.model_dump(exclude_defaults=True)
    if source.local:
        facts["path"] = "" if source.files is None else source.path  # wherever a folder is; but the format counts
        facts["files"] = [[path.name, *_fingerprint(path, path.stat().st_size, path.stat().st_mtime_ns)]
                          for path in local_files(source)]
    return facts


def local_files(source: TextSource) -> list[Path]:
    """The files of a local data set in reading order; CorpusError when there are none."""
    if source.files is None:
        folder = Path(resolve(source.path))
        found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    else:
        patterns = [source.files] if isinstance(source.files, str) else source.files
        found = [path for pattern in patterns for path in _matching(ROOT / pattern)]
    if not found:
        raise CorpusError(f"there are no files at {source.files or source.path}: name files that exist (relative names "
                          "start at the repository)")
    return found


def _matching(pattern: Path) -> list[Path]:
    anchor = Path(pattern.anchor)
    return sorted(path for path in anchor.glob(str(pattern.relative_to(anchor))) if path.is_file())


@lru_cache
def _fingerprint(path: Path, size: int, modified: int) -> tuple[int, str]:
    """(size, SHA-256) of a file; of one above WHOLE bytes, its first and last mebibyte are hashed."""
    if size <= WHOLE:
        return size, sha256(path)
    with open(path, "rb") as file:
        head = file.read(END)
        file.seek(-END, 2)
        return size, hashlib.sha256(head + file.read()).hexdigest()


def open_stream(source: TextSource) -> Any:
    """The data set as an unshuffled `IterableDataset`. Scripts of a data set are never run (`datasets` has no way to).

    CorpusError says what is wrong: no network, no such data set, split or configuration, a loading script.
    """
    import datasets

    datasets.disable_progress_bars()
    files = {} if source.files is None else {"data_files": [str(path) for path in local_files(source)]}
    path = source.path if files else str(resolve(source.path))
    try:
        return datasets.load_dataset(path, source.name, revision=source.revision, split=source.split, streaming=True,
                                     **files)
    except ConnectionError as error:
        raise CannotOpen(
            f"{described(source)} cannot be reached ({_first_line(error)}). It would be read from the Hugging Face "
            "hub, as far as is needed and no further. Connect this machine (and leave HF_HUB_OFFLINE unset); or fetch "
            "the files elsewhere and name them in the experiment in place of the data set: {path: json, files: "
            "folder/*.jsonl.zst} or {path: parquet, files: folder/*.parquet}") from error
    except RuntimeError as error:
        if "script" not in str(error):
            raise
        raise CannotOpen(f"{described(source)} is a loading script, and no code of a data set is run here. Use a copy "
                         "in parquet or JSON files (on the hub, its branch refs/convert/parquet may be one)") from error
    except (OSError, ValueError) as error:  # not found, gated; no such split or configuration
        raise CannotOpen(f"{described(source)} cannot be opened: {_first_line(error)}. Check path, name, revision and "
                         "split") from error


class Documents:
    """The documents of `source` from `mark` on. A null is a blank document."""

    def __init__(self, source: TextSource, mark: Mark | None = None) -> None:
        self.source, self.mark, self.ended = source, mark or Mark(), False
        self._stream: Any = None

    def batches(self, size: int) -> Iterator[list[str]]:
        """Lists of `size` documents, the last one shorter; `self.mark` is then behind the list just yielded.

        What is dropped on the way is opened again at the mark. CorpusError after ATTEMPTS without a new document.
        """
        rows: Iterator[str] | None = None
        failures, furthest = 0, self.mark.document
        while not self.ended:
            texts: list[str] = []
            try:
                rows = rows or self._rows()
                before = None
                while len(texts) < size:
                    if len(texts) == size - 1:
                        before = self._stream.state_dict()
                    text = next(rows, None)
                    if text is None:
                        self.ended = True
                        break
                    texts.append(text)
            except Exception as error:  # whatever a network and a parser have to say; too often is refused below
                if isinstance(error, CorpusError) and not (self._stream is not None and isinstance(error, CannotOpen)):
                    raise
                reached = self.mark.document + len(texts)
                failures, furthest = (1, reached) if reached > furthest else (failures + 1, furthest)
                if failures >= (1 if self.source.local else ATTEMPTS):
                    raise CorpusError(
                        f"{described(self.source)} cannot be read on from document {reached:,} "
                        f"({type(error).__name__}: {_first_line(error)}). What was read is kept: run again, and it "
                        "goes on from there. If it stops at the same document each time, the file is "
                        "damaged") from error
                time.sleep(WAIT * 2 ** (failures - 1))
                rows = None
                continue
            if texts:
                self.mark = Mark(self.mark.document + len(texts), _sha(texts[-1]), before)
                yield texts

    def _rows(self) -> Iterator[str]:
        """The documents behind the mark, on a new stream; CorpusError when the data set is not the one it was."""
        if not self.mark.document:
            self._stream = open_stream(self.source)
            return map(self._text, iter(self._stream))
        for state in filter(None, [self.mark.state, "skip"]):
            stream = open_stream(self.source)
            try:
                if state == "skip":
                    stream = stream.skip(self.mark.document - 1)
                else:
                    stream.load_state_dict(state)
                self._stream, rows = stream, map(self._text, iter(stream))
                if _sha(next(rows, "")) == self.mark.last:
                    return rows
            except (KeyError, IndexError, TypeError, AssertionError):
                if state == "skip":  # a state of another version of `datasets` may be of another form
                    raise
        raise CorpusError(f"document {self.mark.document - 1:,} of {described(self.source)} is not the one that was "
                          "read before: the data set has changed. Restore it, or delete its folder in the store and "
                          "run again")

    def _text(self, row: dict[str, Any]) -> str:
        if self.source.field not in row:
            raise CorpusError(f"{described(self.source)} has no column {self.source.field!r}; there are: "
                              f"{', '.join(row)}. Name one of them as field")
        text = row[self.source.field]
        if text is not None and not isinstance(text, str):
            raise CorpusError(f"column {self.source.field!r} of {described(self.source)} holds "
                              f"{type(text).__name__}, not text; columns: {', '.join(row)}")
        return text or ""


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
