"""Items of zero-shot tasks from plain text: last words of passages, cut sentences, next sentences, definitions.

The choices of a group of items are each other's answers: every choice is right once, and right at every position
once. Whoever sees the choices alone (their length, how common they are, where they stand) scores exactly the floor.
Text that the training split holds too is left out. `scaleop.tasks` says what the tasks are for and keeps them.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

ITEMS = 400  # a task
SEED = 1913  # of every draw
PASSAGE = 13  # words: text that shares so many in a row with the training split has leaked
SAME_WORD = 6  # items of `last_word` with the same answer, at most


class Candidate(NamedTuple):
    """A context with its right answer; a group's members share `kind` and differ in `source`."""

    context: str
    answer: str
    kind: Any
    source: Any


class Sentence(NamedTuple):
    """A sentence of an address, and the number of its paragraph."""

    text: str
    paragraph: int


def words(text: str) -> list[str]:
    """Lower-case words, apostrophes kept, everything else dropped."""
    return re.findall(r"[a-z0-9']+", text.lower())


class Passages:
    """Every passage of `length` words of some documents, as a set one can ask (64-bit rolling hashes)."""

    def __init__(self, documents: Iterable[str], length: int = PASSAGE) -> None:
        self.length, self.ids = length, {}
        found = [self._hashes([self.ids.setdefault(word, len(self.ids) + 1) for word in words(text)])
                 for text in documents]
        self.hashes = np.unique(np.concatenate([*found, np.array([], dtype=np.uint64)]))

    def _hashes(self, ids: list[int]) -> np.ndarray:
        ids = np.array(ids, dtype=np.uint64)
        count = max(0, len(ids) - self.length + 1)
        total = np.zeros(count, dtype=np.uint64)
        for i in range(self.length):  # modulo 2**64
            total = total * np.uint64(6364136223846793005) + ids[i : i + count]
        return total

    def __contains__(self, text: str) -> bool:
        """Does any passage of `text` occur in the documents? A text shorter than a passage never does."""
        hashes = self._hashes([self.ids.get(word, 0) for word in words(text)])  # no word of theirs has id 0
        places = np.searchsorted(self.hashes, hashes).clip(max=max(0, len(self.hashes) - 1))
        return bool(len(self.hashes)) and bool((self.hashes[places] == hashes).any())


def sentences(document: str) -> list[Sentence]:
    """The sentences of a document, paragraph by paragraph; titles like "Mr." end none."""
    end = r"(?<=[.!?])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMessrs\.)(?<!\bDr\.)(?<!\bNo\.)(?<!\bSt\.)(?<!\b[A-Z]\.) +(?=[A-Z])"
    paragraphs = (" ".join(line.split()) for line in document.splitlines() if line.strip())
    return [Sentence(text, number) for number, paragraph in enumerate(paragraphs)
            for text in re.split(end, paragraph)]


def lead(document: list[Sentence], last: int, least: int) -> tuple[int, str]:
    """(first sentence, text) of the run of whole sentences up to and with `last` that has at least `least` words."""
    first = last
    while first > 0 and sum(len(sentence.text.split()) for sentence in document[first : last + 1]) < least:
        first -= 1
    text = document[first].text
    for before, sentence in zip(document[first:last], document[first + 1 : last + 1], strict=True):
        text += (" " if sentence.paragraph == before.paragraph else "\n\n") + sentence.text
    return first, text


def last_words(addresses: list[list[Sentence]]) -> Iterator[Candidate]:
    """Passages of 35 to 90 words, none overlapping; the last word has four letters or more and was said before."""
    for number, document in enumerate(addresses):
        free = 0  # the first sentence that no passage has used
        for last in range(len(document)):
            first, passage = lead(document, last, 35)
            ends = re.fullmatch(r"(.*) ([A-Za-z]{4,})[.!?]", passage, re.DOTALL)
            if first >= free and ends and 35 <= len(passage.split()) <= 90 and re.search(rf"\b{ends[2]}\b", ends[1]):
                yield Candidate(ends[1], ends[2], None, number)
                free = last + 1


def continuations(addresses: list[list[Sentence]], tail: int = 10) -> Iterator[Candidate]:
    """Sentences cut before their last `tail` words, after at least 25 words of context (at most 75)."""
    for number, document in enumerate(addresses):
        for last, sentence in enumerate(document):
            _, passage = lead(document, last, 25 + tail)
            if len(sentence.text.split()) >= tail + 6 and 25 + tail <= len(passage.split()) <= 75 + tail:
                cut = len(passage) - len(" ".join(passage.split(" ")[-tail:]))
                yield Candidate(passage[: cut - 1], passage[cut:], None, number)


def next_sentences(addresses: list[list[Sentence]]) -> Iterator[Candidate]:
    """Sentences of 8 to 25 words after 15 to 60 words of context in the same paragraph."""
    for number, document in enumerate(addresses):
        for last in range(len(document) - 1):
            following = document[last + 1]
            _, passage = lead(document, last, 15)
            if (following.paragraph == document[last].paragraph and 8 <= len(following.text.split()) <= 25
                    and 15 <= len(passage.split()) <= 60):
                yield Candidate(passage, following.text, number, following.paragraph)


def definitions(documents: Iterable[str]) -> Iterator[Candidate]:
    """First senses of 6 to 30 words that use no word beginning like the headword; the answer is "headword, n."."""
    for number, document in enumerate(documents):
        for line in document.splitlines():
            entry = re.match(r"([a-z]{4,}), (n\.|a\.|v\. t\.|v\. i\.|adv\.) ([A-Z][^.;\"]*[a-z]{4}\.)", line)
            if (entry and 6 <= len(entry[3].split()) <= 30 and not re.match("See |Same as |Pertaining", entry[3])
                    and not any(word.startswith(entry[1][:4]) for word in words(entry[3]))):
                yield Candidate(entry[3], f"{entry[1]}, {entry[2]}", entry[2], number)


def grouped(candidates: Iterable[Candidate], size: int, draw: random.Random) -> list[list[Candidate]]:
    """Groups of `size` candidates of one kind, of different sources, with answers of nearly the same length."""
    pool = list({candidate.answer: candidate for candidate in candidates}.values())  # no answer twice
    draw.shuffle(pool)
    pool.sort(key=lambda candidate: (str(candidate.kind), len(candidate.answer)))
    found = []
    while pool:
        group = [pool.pop(0)]
        for other in pool[: 8 * size]:
            if (len(group) < size and other.kind == group[0].kind and len(other.answer) <= 1.1 * len(group[0].answer)
                    and other.source not in {member.source for member in group}):
                group.append(other)
        if len(group) == size:
            found.append(group)
            for member in group[1:]:
                pool.remove(member)  # near the front
    return found


def items(groups: list[list[Candidate]], draw: random.Random) -> list[dict[str, Any]]:
    """The items of `groups`, mixed: `context`, `choices` and `gold`, the position of the right one."""
    made = []
    for group in groups:
        answers = [member.answer for member in group]
        for member, gold in zip(group, draw.sample(range(len(group)), len(group)), strict=True):
            choices = draw.sample([answer for answer in answers if answer != member.answer], len(group) - 1)
            choices.insert(gold, member.answer)
            made.append({"context": member.context, "choices": choices, "gold": gold})
    draw.shuffle(made)
    return made


def generate(documents: list[str], first: int, addresses: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The items of each task, `ITEMS` or as many as the text gives; the same arguments give the same items.

    `documents` is the training split in order. Definitions come from document `first` on and share no passage with
    those before; all other items come from `addresses` and share no passage with `documents`.
    """
    draw = random.Random(SEED)
    held_out, seen, raced = [sentences(text) for text in addresses], Passages(documents), Passages(documents[:first])

    def unseen(candidates: Iterable[Candidate], there: Passages) -> list[Candidate]:
        return [it for it in candidates if f"{it.context} {it.answer}" not in there and it.context not in there]

    def chosen(candidates: list[Candidate], size: int) -> list[dict[str, Any]]:
        groups = grouped(candidates, size, draw)
        return items(draw.sample(groups, min(ITEMS // size, len(groups))), draw)

    passages, used = [], Counter()
    for candidate in unseen(last_words(held_out), seen):
        used[candidate.answer] += 1
        if used[candidate.answer] <= SAME_WORD:
            passages.append([candidate])
    return {"last_word": items(draw.sample(passages, min(ITEMS, len(passages))), draw),
            "continuation": chosen(unseen(continuations(held_out), seen), 4),
            "definition": chosen(unseen(definitions(documents[first:]), raced), 4),
            "two_choices": chosen(unseen(next_sentences(held_out), seen), 2)}
