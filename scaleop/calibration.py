"""The text that a conversion measures its donor on: the embedded one, the Pile, or a file of the user's."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from scaleop.corpus import Corpus, CorpusError
from scaleop.documents import described
from scaleop.experiment import load_experiment
from scaleop.settings import TextSource
from scaleop.strict import validate
from scaleop.token_head import TokenHead, text_folder

FORMATS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}
SEED_STRIDE = 450_000  # of the embedded corpus; only its head is read here


def source_of(text: str) -> TextSource | None:
    """The data set that `text` names: "pile", or a .txt (a document a line), .jsonl or .parquet file (column "text").

    None for "embedded". Raises CorpusError for anything else.
    """
    if text == "embedded":
        return None
    if text == "pile":
        return load_experiment("primary").corpus.train
    path = Path(text)
    if path.suffix not in FORMATS:
        raise CorpusError(f"calibration = {text!r} is no text: say embedded, pile, or a file that ends in "
                          f"{', '.join(FORMATS)}")
    if not path.is_file():
        raise CorpusError(f"calibration = {text!r}: there is no such file")
    return validate({"path": FORMATS[path.suffix], "files": str(path.resolve())}, TextSource, "calibration")


def calibration(text: str, tokenizer: PreTrainedTokenizerFast, sequences: int,
                length: int) -> tuple[np.ndarray, dict[str, Any]]:
    """(sequences, length) int64 token ids from the head of a text, and what they are: its name and their SHA-256.

    Documents whole, an end of text after each, cut into blocks, as the frozen set of an experiment is. Raises
    CorpusError when the text is too short or cannot be had.
    """
    source, wanted = source_of(text), sequences * length
    if source is None:
        corpus = Corpus(tokenizer, (sequences, length), SEED_STRIDE)
        name, ids = "embedded", np.asarray(corpus.train.tokens[:wanted])
    else:
        head = TokenHead(text_folder(source, tokenizer) / "head", source, tokenizer)
        head.grow(tokens=wanted)
        name = Path(text).name if source.local else described(source)
        ids = np.asarray(head.read(0, min(wanted, head.tokens)))
    if len(ids) < wanted:
        raise CorpusError(f"calibration = {text!r} has {len(ids):,} tokens, and {sequences:,} sequences of {length} "
                          f"need {wanted:,}: ask for at most {len(ids) // length:,}, or give a longer text")
    ids = ids.astype("<i8").reshape(sequences, length)
    return ids, {"text": name, "sequences": sequences, "length": length,
                 "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
