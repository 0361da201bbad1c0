"""The head of a data set's token stream on disk, as far as anybody has needed it; it only ever grows.

One folder a data set and tokenizer: `tokens.bin`, `documents.bin` (where each document starts, blank ones too) and
`state.json`, which says how much of both is valid, with hashes, and where reading goes on. The state is replaced last,
so a process killed at any moment leaves a head that is whole; what lies beyond it in the files is cut off.
"""

import hashlib
import os
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from scaleop.corpus import CorpusError, corpus_folder, encode, tokenizer_hash
from scaleop.documents import Documents, Mark, described, identity
from scaleop.progress import progress
from scaleop.settings import TextSource
from scaleop.store import StoreError, digest, locked, read_json, refusals_as_sentences, write_json

BATCH = 256  # documents that are tokenised at once, on as many cores as there are
CHECKPOINT = 2**20  # tokens between two states on disk


def text_folder(source: TextSource, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Where in the store everything made of a data set under a tokenizer lies."""
    slug = re.sub(r"[^\w.-]+", "-", source.path.rstrip("/").split("/")[-1])
    return corpus_folder(f"{slug}-{digest([identity(source), tokenizer_hash(tokenizer)])}")


class TokenHead:
    """Documents of `source` under `tokenizer`, whole, in order, each followed by one end-of-text token.

    Blank documents (nothing but whitespace) give no tokens, not even an end of text, but they are counted.
    """

    def __init__(self, folder: Path, source: TextSource, tokenizer: PreTrainedTokenizerFast) -> None:
        self.folder, self.source, self.tokenizer = folder, source, tokenizer
        self.dtype = np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")
        self._sound: set[int] = set()  # segments whose hash has been compared
        self._open()

    @property
    def documents(self) -> int:
        """Documents read so far, blank ones included."""
        return self.state["documents"]

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return self.state["tokens"]

    @property
    def ended(self) -> bool:
        """Has the whole data set been read?"""
        return self.state["ended"]

    def _open(self) -> None:
        """Read the state on disk; StoreError when the files are shorter than it says or starts are not as written."""
        path = self.folder / "state.json"
        if path.exists():
            self.state = read_json(path)
        else:
            self.state = {"source": identity(self.source), "tokenizer": tokenizer_hash(self.tokenizer),
                          "dtype": self.dtype.str, "documents": 0, "tokens": 0, "ended": False, "mark": asdict(Mark()),
                          "segments": [], "starts_sha256": hashlib.sha256().hexdigest()}
        for name, size in (("tokens.bin", self.tokens * self.dtype.itemsize), ("documents.bin", self.documents * 8)):
            if size and (not (file := self.folder / name).exists() or file.stat().st_size < size):
                raise StoreError(f"{file} is truncated. Delete {self.folder} and run again: it will be rebuilt.")
        starts = (np.fromfile(self.folder / "documents.bin", dtype="<i8", count=self.documents) if self.documents
                  else np.empty(0, dtype="<i8"))
        if hashlib.sha256(starts.tobytes()).hexdigest() != self.state["starts_sha256"]:
            raise self._damaged("documents.bin")
        self.starts = np.append(starts, self.tokens)  # (documents + 1,) offset of each document, and of the next one

    def _damaged(self, name: str) -> StoreError:
        return StoreError(f"{self.folder / name} is not what {self.folder / 'state.json'} says. "
                          f"Delete {self.folder} and run again: it will be rebuilt.")

    def grow(self, *, tokens: int = 0, documents: int = 0) -> None:
        """Read on until there are at least so many tokens and documents, or the data set has ended.

        A second process waits for the first, and then finds its work. What was read before an error is kept.
        """
        if self._enough(tokens, documents):
            return
        with locked(self.folder):
            self._open()  # another process may have been here
            if not self._enough(tokens, documents):
                self._read_on(tokens, documents)

    def _enough(self, tokens: int, documents: int) -> bool:
        return self.ended or (self.tokens >= tokens and self.documents >= documents)

    def _read_on(self, tokens: int, documents: int) -> None:
        reader = Documents(self.source, Mark(**self.state["mark"]))
        unit, wanted, have = (("documents", documents, self.documents) if self.documents < documents
                              else ("tokens", tokens, self.tokens))
        pending, size = [], 0
        with progress(total=wanted, initial=have, unit=f" {unit}", unit_scale=True, desc=described(self.source)) as bar:
            try:
                for texts in reader.batches(BATCH):
                    pieces = encode(texts, self.tokenizer)
                    pending += pieces
                    size += (added := sum(map(len, pieces)))
                    bar.update(len(pieces) if unit == "documents" else added)
                    if self.tokens + size >= tokens and self.documents + len(pending) >= documents:
                        break
                    if size >= CHECKPOINT:
                        self._append(pending, reader)
                        pending, size = [], 0
            except CorpusError:  # the connection is lost for good
                self._append(pending, reader)
                raise
            self._append(pending, reader)

    def _append(self, pieces: list[np.ndarray], reader: Documents) -> None:
        """Add documents behind the valid part of both files, then say so in the state; StoreError on a full disk."""
        ids = np.concatenate([np.empty(0, self.dtype), *pieces]).astype(self.dtype)
        starts = self.tokens + np.cumsum([0, *map(len, pieces)], dtype="<i8")
        parts = (("tokens.bin", ids, self.tokens), ("documents.bin", starts[:-1], self.documents))
        with refusals_as_sentences(self.folder):
            for name, array, valid in parts:
                with open(self.folder / name, "ab") as file:
                    file.truncate(valid * array.itemsize)
                    file.write(array.tobytes())
                    file.flush()
                    os.fsync(file.fileno())
        starts = np.append(self.starts[:-1], starts)
        segment = [[len(ids), hashlib.sha256(ids.tobytes()).hexdigest()]] if len(ids) else []
        state = {**self.state, "documents": self.documents + len(pieces), "tokens": self.tokens + len(ids),
                 "ended": reader.ended, "mark": asdict(reader.mark), "segments": self.state["segments"] + segment,
                 "starts_sha256": hashlib.sha256(starts[:-1].tobytes()).hexdigest()}
        write_json(self.folder / "state.json", state)
        self.state, self.starts = state, starts

    def read(self, first: int, last: int) -> np.ndarray:
        """(last - first,) ids, memory-mapped, of tokens already written; StoreError when they are not as written."""
        ids = np.memmap(self.folder / "tokens.bin", dtype=self.dtype, mode="r", shape=(self.tokens,))
        end = 0
        for index, (size, expected) in enumerate(self.state["segments"]):
            start, end = end, end + size
            if start < last and first < end and index not in self._sound:
                if hashlib.sha256(ids[start:end].tobytes()).hexdigest() != expected:
                    raise self._damaged("tokens.bin")
                self._sound.add(index)
        return ids[first:last]
