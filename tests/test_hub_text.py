"""Text through `datasets`: streams against a brute-force reading, reading that is interrupted, seeds that overlap."""

import gzip
import json
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from transformers import AutoTokenizer

from scaleop import corpus as embedded
from scaleop import documents, hub_corpus, race, token_head
from scaleop.corpus import CorpusError, TokenFile, train_tokenizer
from scaleop.documents import Documents, identity
from scaleop.hub_corpus import HubCorpus, open_corpus
from scaleop.race import Race
from scaleop.settings import CorpusSettings, TextSource
from scaleop.store import StoreError, read_json
from scaleop.strict import ExperimentError, validate
from scaleop.token_head import TokenHead
from tests.hub_server import Hub, tiny_pythia

ANY = TextSource(path="owner/set", revision="0" * 40)
TOKENIZER = train_tokenizer(["any text"], 257, 64)  # end-of-text and the 256 bytes, so ids can be written down by hand


def ids_of(text):
    """ASCII letters -> ids, one by one."""
    return [TOKENIZER.backend_tokenizer.token_to_id(character) for character in text]


def some_documents(count=60, seed=0, longest=30):
    """Documents of random letters and lengths; every fifth or so is blank in one way or another."""
    draw = np.random.default_rng(seed)
    blanks = ["", " ", "\n\t ", "\u2003"]
    return [blanks[draw.integers(4)] if draw.random() < 0.2 else
            "".join(draw.choice(list("abcdefgh"), draw.integers(1, longest))) for _ in range(count)]


def brute(texts):
    """(ids of the whole stream, where each document starts) by the protocol, a document and a letter at a time."""
    stream, starts = [], []
    for text in texts:
        starts.append(len(stream))
        if text.strip():
            stream += [*ids_of(text), 0]
    return stream, starts


def write(folder, texts, form="parquet"):
    """The documents as a data set in two files; returns what a settings' `train` says of them."""
    folder.mkdir(parents=True, exist_ok=True)
    half = len(texts) // 2
    for part, rows in enumerate((texts[:half], texts[half:])):
        lines = "".join(json.dumps({"text": text, "meta": {"row": 1}}) + "\n" for text in rows).encode()
        if form == "parquet":
            pq.write_table(pa.table({"text": pa.array(rows, pa.string())}),
                           folder / f"train-{part:05}-of-00002.parquet", row_group_size=7)
        elif form == "jsonl":
            (folder / f"{part:02}.jsonl").write_bytes(lines)
        elif form == "zst":
            (folder / f"{part:02}.jsonl.zst").write_bytes(zstandard.compress(lines))
        else:
            (folder / f"{part:02}.json.gz").write_bytes(gzip.compress(lines))
    return {"path": str(folder)}


def settings(train, evaluation=None, sequences=2, length=10, **changed):
    """A hub corpus's settings."""
    evaluation = evaluation or train or ANY.model_dump()
    return validate({"source": "hub", "train": train, "evaluations": {"heldout": evaluation, "foreign": evaluation},
                     "frozen": {"sequences": sequences, "length": length, "similarity": 1, "moments": 1},
                     "disjoint": "documents", "skip": 8, "seed_stride": 6, **changed}, CorpusSettings, "corpus")


@pytest.fixture
def small(monkeypatch, store):
    """Batches of four documents, a state on disk every fifty tokens, no waiting, a store that only this test sees."""
    monkeypatch.setattr(token_head, "BATCH", 4)
    monkeypatch.setattr(token_head, "CHECKPOINT", 50)
    monkeypatch.setattr(documents, "WAIT", 0.0)
    return store


class Fake:
    """A data set in memory that loses its connection: before each document of `drops` once, or at `always` each time.

    `state` is how well it resumes: "works", "lost" (raises), "off" (one document too late).
    """

    def __init__(self, texts, drops=(), always=None, state="works"):
        self.texts, self.drops, self.always, self.state, self.position = texts, set(drops), always, state, 0
        self.opened, self.read, self.skipped = 0, [], []

    def __call__(self, source):
        self.opened, self.position = self.opened + 1, 0
        return self

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        if self.state == "lost":
            raise KeyError("examples_iterable")
        self.position = state["position"] + (self.state == "off")

    def skip(self, count):
        self.position = count
        self.skipped.append(count)
        return self

    def __iter__(self):
        while self.position < len(self.texts):
            if self.position in self.drops or self.position == self.always:
                self.drops.discard(self.position)
                raise ConnectionResetError("reset by peer")
            self.read.append(self.position)
            self.position += 1
            yield {"text": self.texts[self.position - 1]}



# Streams are what the protocol says

@pytest.mark.parametrize("form", ["parquet", "jsonl", "zst", "gz"])
@pytest.mark.parametrize("rule", ["documents", "tokens"])
def test_frozen_set_and_streams_are_the_protocols(small, tmp_path, form, rule):
    texts = some_documents()
    stream, starts = brute(texts)
    given = {"disjoint": "documents", "skip": 8, "seed_stride": 6} if rule == "documents" else {
        "disjoint": "tokens", "skip": None, "seed_stride": 100}
    corpus = HubCorpus(settings(write(tmp_path / "set", texts, form), **given), TOKENIZER)
    assert corpus.guard == 20
    assert corpus.frozen().tolist() == [stream[:10], stream[10:20]]
    for seed in (2, 0, 1):  # in any order
        start = starts[8 + 6 * seed] if rule == "documents" else min(at for at in starts if at >= 20 + 100 * seed)
        file = corpus.stream(seed, 70)
        assert corpus.start(seed) == file.manifest["offset"] == start
        assert file.tokens.tolist() == stream[start : start + 70]
        assert file.block(1, 2, 10).tolist() == [stream[start + 20 : start + 30], stream[start + 30 : start + 40]]
        assert file.documents.tolist() == [at - start for at, text in zip(starts, texts, strict=True)
                                           if text.strip() and start <= at < start + 70]
        first, last = file.manifest["document_range"]
        assert starts[first] == start and starts[last] < start + 70 <= [*starts, len(stream)][last + 1]
    assert file.tokens.dtype == np.uint16


def test_the_training_text_at_hand_is_what_has_been_read_not_the_frozen_set_alone(small, tmp_path, monkeypatch):
    texts = some_documents()
    stream, starts = brute(texts)
    monkeypatch.setattr(token_head, "BATCH", 8)  # so that a little is not all of it
    corpus = HubCorpus(settings(write(tmp_path / "set", texts), skip=8, seed_stride=6), TOKENIZER)
    first = corpus.train
    assert 20 <= len(first.tokens) < len(stream) and first.tokens.tolist() == stream[: len(first.tokens)]
    end = corpus.start(2) + 70
    corpus.stream(2, 70)
    now = corpus.train  # what page 04 counts: np.bincount takes it as it is
    assert len(now.tokens) >= end > len(first.tokens) and now.tokens.tolist() == stream[: len(now.tokens)]
    assert np.bincount(now.tokens).tolist() == np.bincount(stream[: len(now.tokens)]).tolist()
    filled = [at for at, text in zip(starts, texts, strict=True) if text.strip() and at < len(now.tokens)]
    assert now.documents.tolist() == filled
    monkeypatch.setattr(hub_corpus, "MOST", 30)
    assert corpus.train.tokens.tolist() == stream[:30]  # a billion tokens are not counted
    assert corpus.frozen().ravel().tolist() == stream[:20]


def test_blank_documents_count_where_documents_are_skipped_and_give_no_token(small, tmp_path):
    texts = ["abc", "", "de", " \n", "", "f", "gh", "a" * 30]
    given = settings(write(tmp_path / "set", texts), sequences=1, length=4, skip=4, seed_stride=1)
    corpus = HubCorpus(given, TOKENIZER)
    assert corpus.frozen().tolist() == [[*ids_of("abc"), 0]]
    assert corpus.place(0) == (4, 7)  # abc. de. are seven tokens; the fifth document is blank, f follows
    assert corpus.place(1) == (5, 7)
    assert corpus.stream(0, 5).tokens.tolist() == [*ids_of("f"), 0, *ids_of("gh"), 0]
    assert corpus.head.starts[:6].tolist() == [0, 4, 4, 7, 7, 7]


def test_a_null_is_a_blank_document(small, tmp_path):
    folder = write(tmp_path / "set", ["ab", None, "cd", "e", "fg", "h"])
    corpus = HubCorpus(settings(folder, sequences=1, length=2, skip=2, seed_stride=1), TOKENIZER)
    assert corpus.stream(0, 5).tokens.tolist() == [*ids_of("cd"), 0, *ids_of("e"), 0]


@pytest.mark.parametrize("layout", range(6))
def test_seeds_of_the_token_rule_share_nothing_with_each_other_or_the_frozen_set(small, tmp_path, layout):
    texts = some_documents(120, layout)
    stride = int(np.random.default_rng(layout).integers(60, 200))
    corpus = HubCorpus(settings(write(tmp_path / "set", texts), disjoint="tokens", skip=None, seed_stride=stride),
                       TOKENIZER)
    read = set(range(20))
    for seed in range(3):
        longest = 20 + (seed + 1) * stride - corpus.start(seed)
        file = corpus.stream(seed, longest)
        assert file.manifest["overlap"] == {"tokens": 0, "share": 0.0, "with": {}}
        mine = set(range(file.manifest["offset"], file.manifest["offset"] + longest))
        assert len(mine) == longest and not mine & read
        read |= mine
        with pytest.raises(CorpusError, match=rf"run into seed {seed + 1}'s text: use at most {longest:,} tokens"):
            corpus.stream(seed, longest + 1)


# What seeds share is counted and said

def test_overlap_by_hand(small, tmp_path, capsys):
    ten = ["a" * 9] * 55  # ten tokens each: seed 0 starts at 20, seed 1 at 50, seed 2 at 80
    corpus = HubCorpus(settings(write(tmp_path / "set", ten), skip=2, seed_stride=3), TOKENIZER)
    assert [corpus.start(seed) for seed in range(3)] == [20, 50, 80]
    assert corpus.stream(0, 30).manifest["overlap"] == {"tokens": 0, "share": 0.0, "with": {}}
    assert capsys.readouterr().out == ""
    assert corpus.stream(0, 50).manifest["overlap"] == {"tokens": 20, "share": 0.4, "with": {"1": 20}}
    assert corpus.stream(1, 50).manifest["overlap"] == {"tokens": 40, "share": 0.8, "with": {"0": 20, "2": 20}}
    assert corpus.stream(0, 100).manifest["overlap"] == {"tokens": 70, "share": 0.7,
                                                         "with": {"1": 70, "2": 40, "3": 10}}
    assert corpus.stream(1, 100).manifest["overlap"] == {"tokens": 100, "share": 1.0,
                                                         "with": {"0": 70, "2": 70, "3": 40, "4": 10}}
    capsys.readouterr()
    corpus.stream(1, 50)  # found on disk, and said all the same
    assert capsys.readouterr().out == ("note: 40 of the 50 tokens of seed 1 (80.0%) are read by other seeds too "
                                       "(seed 0: 20, seed 2: 20); corpus.disjoint: tokens keeps seeds apart\n")
    corpus.stream(4, 100)
    assert capsys.readouterr().out.count("(seed 2: 40, seed 3: 70, seed 5: 70, seed 6: 40 and 2 more)") == 1
    assert corpus.places([1], 50) == [{"seed": 1, "first document": 5, "first token": 50, "last token": 99,
                                       "tokens shared with other seeds": 40}]


@pytest.mark.parametrize("layout", range(6))
def test_overlap_is_the_number_of_tokens_that_another_seed_reads(small, tmp_path, layout):
    draw = np.random.default_rng(layout)
    texts, stride, tokens = some_documents(200, layout), int(draw.integers(2, 9)), int(draw.integers(50, 300))
    corpus = HubCorpus(settings(write(tmp_path / "set", texts), skip=20, seed_stride=stride), TOKENIZER)
    starts = brute(texts)[1]
    reads = {seed: set(range(at, at + tokens)) for seed, at in enumerate(starts[20::stride]) if at >= corpus.guard}
    for seed in (5, 2, 0, 3):  # the first of these needs documents that later ones do not
        found = HubCorpus(corpus.settings, TOKENIZER).stream(seed, tokens).manifest["overlap"]
        others = {other: reads[other] for other in reads if other != seed}
        assert found["tokens"] == len(reads[seed] & set().union(*others.values()))
        assert found["with"] == {str(other): len(common) for other, mine in others.items()
                                 if (common := reads[seed] & mine)}


def test_a_stream_that_would_read_the_frozen_set_is_refused(small, tmp_path):
    corpus = HubCorpus(settings(write(tmp_path / "set", ["a" * 9] * 20), skip=1, seed_stride=1), TOKENIZER)
    with pytest.raises(CorpusError, match=r"seed 0 would start at token 10, inside the frozen set's 20: raise corpus"):
        corpus.stream(0, 10)
    assert corpus.start(1) == 20
    with pytest.raises(CorpusError, match="seed=-1 lies outside"):
        corpus.start(-1)
    with pytest.raises(CorpusError, match="repeat is for the embedded text"):
        corpus.stream(1, 10, repeat=True)


def test_a_data_set_that_is_too_small_says_how_much_there_is(small, tmp_path):
    folder = write(tmp_path / "set", ["a" * 9] * 20)  # two hundred tokens
    corpus = HubCorpus(settings(folder, skip=2, seed_stride=3), TOKENIZER)
    with pytest.raises(CorpusError, match=r"tokens=181 needs 201 tokens .* no more than 200 tokens in 20 documents"):
        corpus.stream(0, 181)
    assert len(corpus.stream(0, 180).tokens) == 180
    with pytest.raises(CorpusError, match=r"seed 6 needs 21 documents .* no more than 200 tokens in 20 documents"):
        corpus.start(6)
    with pytest.raises(CorpusError, match="the frozen set needs 300 tokens"):
        HubCorpus(settings(folder, sequences=30), TOKENIZER).frozen()


# Interrupted reading loses and repeats nothing

@pytest.mark.parametrize("state", ["works", "lost", "off"])
def test_a_connection_that_drops_before_every_document_once(small, tmp_path, monkeypatch, state):
    texts = some_documents(40)
    fake = Fake(texts, drops=range(len(texts)), state=state)
    monkeypatch.setattr(documents, "open_stream", fake)
    head = TokenHead(tmp_path / "head", ANY, TOKENIZER)
    head.grow(documents=1000)
    stream, starts = brute(texts)
    assert head.ended and head.read(0, head.tokens).tolist() == stream
    assert head.starts.tolist() == [*starts, len(stream)]
    assert fake.opened > len(texts) and bool(fake.skipped) == (state != "works")


def test_after_too_many_drops_it_gives_up_and_goes_on_later_where_it_was(small, tmp_path, monkeypatch):
    texts = some_documents(40)
    fake = Fake(texts, always=30)
    monkeypatch.setattr(documents, "open_stream", fake)
    head = TokenHead(tmp_path / "head", ANY, TOKENIZER)
    said = (r"owner/set, train, 000000000000 cannot be read on from document 30 \(ConnectionResetError: reset by "
            r"peer\)\. What was read is kept: run again")
    with pytest.raises(CorpusError, match=said):
        head.grow(documents=40)
    assert fake.opened == documents.ATTEMPTS
    assert head.documents == TokenHead(tmp_path / "head", ANY, TOKENIZER).documents == 28
    mended = Fake(texts)
    monkeypatch.setattr(documents, "open_stream", mended)
    again = TokenHead(tmp_path / "head", ANY, TOKENIZER)
    again.grow(documents=40)
    assert mended.read == list(range(27, 40))  # the last known one once more, to compare
    assert again.read(0, again.tokens).tolist() == brute(texts)[0]


def test_a_data_set_that_changed_behind_our_back_is_refused(small, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "open_stream", Fake(["abc"] * 20))
    TokenHead(tmp_path / "head", ANY, TOKENIZER).grow(documents=8)
    monkeypatch.setattr(documents, "open_stream", Fake(["abd"] * 20))
    with pytest.raises(CorpusError, match=r"document 7 of owner/set.* is not the one that was read before"):
        TokenHead(tmp_path / "head", ANY, TOKENIZER).grow(documents=9)


def test_how_far_somebody_read_before_changes_nothing(small, tmp_path):
    texts = some_documents(80)
    source = TextSource(**write(tmp_path / "set", texts, "zst"))
    at_once, in_steps = (TokenHead(tmp_path / name, source, TOKENIZER) for name in ("at once", "in steps"))
    at_once.grow(documents=1000)
    for wanted in (1, 30, 31, 200, 500, 10_000):
        in_steps.grow(tokens=wanted)
        assert in_steps.ended or in_steps.tokens >= wanted
    assert (in_steps.folder / "tokens.bin").read_bytes() == (at_once.folder / "tokens.bin").read_bytes()
    assert (in_steps.folder / "documents.bin").read_bytes() == (at_once.folder / "documents.bin").read_bytes()
    assert at_once.read(0, at_once.tokens).tolist() == brute(texts)[0]
    assert len(at_once.state["segments"]) > 5


KILLED = """
    import os, sys
    from pathlib import Path
    from scaleop import documents, token_head
    from scaleop.corpus import train_tokenizer
    from scaleop.settings import TextSource
    token_head.BATCH, token_head.CHECKPOINT, left = 4, 50, 33
    whole = documents.Documents._text
    def text(self, row):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return whole(self, row)
    documents.Documents._text = text
    tokenizer = train_tokenizer(["any text"], 257, 64)
    token_head.TokenHead(Path(sys.argv[1]), TextSource(path=sys.argv[2]), tokenizer).grow(documents=1000)
"""


def kill_the_reader(head, source, monkeypatch):
    """A process of its own that ends, without any farewell, at its 34th document."""
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(head), source]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert process.returncode == 9, process.stderr


def kill_the_writer(head, source, monkeypatch):
    """The tokens of the third checkpoint are in their files, the state is not."""
    calls, plain = [], token_head.write_json

    def write_json(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        plain(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(token_head, "write_json", write_json)
        TokenHead(head, TextSource(path=source), TOKENIZER).grow(documents=1000)
    assert (head / "tokens.bin").stat().st_size > 2 * read_json(head / "state.json")["tokens"]  # a tail to cut off


@pytest.mark.parametrize("kill", [kill_the_reader, kill_the_writer])
def test_what_a_killed_process_leaves_the_next_one_completes(small, tmp_path, monkeypatch, kill):
    texts = some_documents(60)
    folder = write(tmp_path / "set", texts)
    kill(tmp_path / "head", folder["path"], monkeypatch)
    assert 0 < read_json(tmp_path / "head" / "state.json")["documents"] < 34
    killed, whole = (TokenHead(tmp_path / name, TextSource(**folder), TOKENIZER) for name in ("head", "whole"))
    for head in (killed, whole):
        head.grow(documents=1000)
    for name in ("tokens.bin", "documents.bin"):
        assert (killed.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    assert killed.read(0, killed.tokens).tolist() == brute(texts)[0]


def test_two_that_read_at_once_wait_for_each_other(small, tmp_path):
    texts = some_documents(200)
    source = TextSource(**write(tmp_path / "set", texts))
    heads = [TokenHead(tmp_path / "head", source, TOKENIZER) for _ in range(3)]
    threads = [threading.Thread(target=head.grow, kwargs={"tokens": 400 * (i + 1)}) for i, head in enumerate(heads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream = brute(texts)[0]
    for i, head in enumerate(heads):
        assert head.tokens >= 400 * (i + 1) and head.read(0, head.tokens).tolist() == stream[: head.tokens]


# Damage is found, a full disk is said

@pytest.fixture
def grown(small, tmp_path):
    """A corpus with a frozen set, a stream and an evaluation text on disk."""
    corpus = HubCorpus(settings(write(tmp_path / "set", some_documents())), TOKENIZER)
    corpus.frozen(), corpus.stream(0, 50), corpus.evaluation("heldout")
    return corpus


def damage(path, cut=False, at=40):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content[:-3] if cut else content)


@pytest.mark.parametrize("name, cut, said", [
    ("tokens.bin", False, r"tokens\.bin is not what .*state\.json says\. Delete .*head and run again"),
    ("tokens.bin", True, r"tokens\.bin is truncated\. Delete .*head and run again"),
    ("documents.bin", False, r"documents\.bin is not what"),
    ("documents.bin", True, r"documents\.bin is truncated"),
    ("state.json", True, r"state\.json is damaged")])
def test_a_damaged_head_is_refused(grown, name, cut, said):
    damage(grown.head.folder / name, cut, at=2 * (grown.start(0) + 10) if name == "tokens.bin" else 40)
    with pytest.raises(StoreError, match=said):
        HubCorpus(grown.settings, TOKENIZER).stream(0, 60)


def test_damaged_products_are_refused(grown):
    files = [*grown.folder.glob("streams/*/tokens.bin"), *grown.folder.glob("frozen-*/tokens.bin"),
             *grown.folder.parent.glob("*/text/tokens.bin")]
    assert len(files) == 3
    for file, again in zip(files, (lambda corpus: corpus.stream(0, 50), lambda corpus: corpus.frozen(),
                                   lambda corpus: corpus.evaluation("heldout")), strict=True):
        damage(file, at=30)
        with pytest.raises(StoreError, match=r"tokens\.bin is not what its manifest says\. Delete .* and run again"):
            again(HubCorpus(grown.settings, TOKENIZER))


def test_a_full_disk_is_said_and_reading_goes_on_when_there_is_room(small, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        texts = some_documents(600, longest=150)
        source = TextSource(**write(tmp_path / "set", texts))
        head = TokenHead(disk / "head", source, TOKENIZER)
        with pytest.raises(StoreError, match=r"No space left on device\. Free some disk space or point SCALEOP_STORE"):
            head.grow(documents=600)
        assert 100 < TokenHead(disk / "head", source, TOKENIZER).documents < 600
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        again = TokenHead(disk / "head", source, TOKENIZER)
        again.grow(documents=600)
        assert again.read(0, again.tokens).tolist() == brute(texts)[0]
        del again, head
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# Evaluation texts

def test_an_evaluation_text_is_its_non_blank_rows_joined_by_two_newlines(small, tmp_path):
    rows = [" = abc = \n", "", "de\nfg", "  \n", "h", "a"]
    folder = write(tmp_path / "set", rows)
    corpus = HubCorpus(settings(folder, {**folder, "documents": 5}, sequences=1, length=2), TOKENIZER)
    byte = TOKENIZER.backend_tokenizer.token_to_id
    written = {" ": "Ġ", "\n": "Ċ"}  # how a byte-level vocabulary writes them
    expected = [byte(written.get(character, character)) for character in " = abc = \n\n\nde\nfg\n\nh"]
    assert corpus.evaluation("foreign").tolist() == expected  # the sixth row is beyond `documents`
    assert corpus.evaluation("foreign", 4).tolist() == expected[:4]
    assert corpus.evaluation("foreign").dtype == np.int64
    assert corpus.sources()[2] == {"text": f"{folder['path']}, train", "for": "foreign", "documents": 5,
                                   "tokens": len(expected)}
    with pytest.raises(CorpusError, match=r"has 6 rows: lower documents of corpus\.evaluations\.heldout"):
        HubCorpus(settings(folder, {**folder, "documents": 7}), TOKENIZER).evaluation("heldout")


# What a text is known by

def test_keys_follow_what_the_text_is_made_of(small, tmp_path):
    train, other = write(tmp_path / "a", some_documents()), write(tmp_path / "b", some_documents(seed=1))
    corpus = HubCorpus(settings(train), TOKENIZER)
    moved = HubCorpus(settings(write(tmp_path / "elsewhere" / "a", some_documents())), TOKENIZER)
    measured = HubCorpus(settings(train, other), TOKENIZER)
    trained = HubCorpus(settings(other), TOKENIZER)
    worded = HubCorpus(settings(train), train_tokenizer(["abc abc"] * 5, 260, 64))
    assert (moved.identity, moved.key, moved.folder) == (corpus.identity, corpus.key, corpus.folder)
    assert measured.identity == corpus.identity and measured.key != corpus.key  # the same training text
    assert len({corpus.identity, trained.identity, worded.identity}) == 3
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    read_as = {str(identity(TextSource(path=form, files=str(tmp_path / "a.jsonl")))) for form in ("json", "text")}
    assert len(read_as) == 2
    hub = {"path": "owner/set", "revision": "0" * 40}
    changes = [{}, {"revision": "1" * 40}, {"name": "raw"}, {"split": "validation"}, {"field": "body"}]
    assert len({str(identity(TextSource(**{**hub, **change}))) for change in changes}) == 5
    assert corpus.stream(0, 50).manifest["parent"] == corpus.identity


def test_of_a_large_file_size_and_both_ends_are_its_identity(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "WHOLE", 100)
    monkeypatch.setattr(documents, "END", 10)
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    source = TextSource(path="text", files=str(tmp_path / "*.txt"))
    first = identity(source)
    for place, same in ((50, True), (5, False), (195, False)):
        content = bytearray(range(200))
        content[place] = 255
        (tmp_path / "a.txt").write_bytes(content)
        documents._fingerprint.cache_clear()
        assert (identity(source) == first) == same


# What cannot be read

@pytest.mark.parametrize("change, said", [
    ({"field": "body"}, r"set, train has no column 'body'; there are: text, meta\. Name one of them as field"),
    ({"field": "meta"}, r"column 'meta' of .* holds dict, not text"),
    ({"split": "test"}, r"cannot be opened: Bad split: test\. Available splits: \['train'\]\. Check path, name"),
    ({"path": "json", "files": "nothing/*.jsonl"}, r"there are no files at nothing/\*\.jsonl: name files that exist")])
def test_a_data_set_that_is_not_what_the_experiment_says(small, tmp_path, change, said):
    with pytest.raises(CorpusError, match=said):
        next(Documents(TextSource(**{**write(tmp_path / "set", ["a"] * 9, "jsonl"), **change})).batches(2))


def test_a_truncated_file_is_refused_where_it_ends(small, tmp_path):
    folder = write(tmp_path / "set", some_documents(400), "zst")
    file = tmp_path / "set" / "01.jsonl.zst"
    file.write_bytes(file.read_bytes()[:-400])
    with pytest.raises(CorpusError, match=r"cannot be read on from document .*the file is damaged"):
        TokenHead(tmp_path / "head", TextSource(**folder), TOKENIZER).grow(documents=400)


def test_scripts_are_refused_and_never_run(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "set.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CorpusError, match="is a loading script, and no code of a data set is run here"):
        documents.open_stream(TextSource(path=str(tmp_path / "set")))
    assert not (tmp_path / "ran").exists()


def test_without_a_network_it_says_what_would_be_read_and_what_else_to_do(small):
    corpus = HubCorpus(settings({"path": "monology/pile-uncopyrighted", "revision": "0" * 40}), TOKENIZER)
    said = (r"monology/pile-uncopyrighted, train, 000000000000 cannot be reached .*It would be read from the Hugging "
            r"Face hub.*\{path: json, files: folder/\*\.jsonl\.zst")
    with pytest.raises(CorpusError, match=said):
        corpus.frozen()


def test_where_nobody_listens_it_says_so_too(small, tmp_path, hub):
    hub.__exit__(None, None, None)  # a port where nobody listens any more
    corpus = HubCorpus(settings({"path": "owner/set", "revision": "0" * 40}), TOKENIZER)
    with pytest.raises(CorpusError, match=r"owner/set, train, 000000000000 cannot be reached .*Connect this machine"):
        corpus.frozen()


@pytest.mark.parametrize("change, said", [
    ({"train": None}, "source: hub needs train: add it"),
    ({"disjoint": None, "skip": None}, "source: hub needs disjoint"),
    ({"skip": None}, "skip, the documents before seed 0's first, is needed with disjoint: documents"),
    ({"disjoint": "tokens"}, "skip, the documents before seed 0's first, is needed with disjoint: documents and goes"),
    ({"repeat": True}, "repeat: true is for the embedded text"),
    ({"source": "embedded"}, "train belongs to source: hub; the embedded text has its own"),
    ({"train": {"path": "owner/set"}}, r"revision = None does not pin owner/set \(no folder here.*40 hex digits"),
    ({"train": {"path": "owner/set", "revision": "main"}}, "revision = 'main' does not pin owner/set"),
    ({"train": {"path": "json"}}, "path: json is a format; add files"),
    ({"train": {"path": "owner/set", "files": "a.jsonl"}}, "path must say what they are: json, parquet or text"),
    ({"train": {"path": "json", "files": "a", "split": "test"}}, "files make up one split"),
    ({"train": {"path": "json", "files": "a", "revision": "0" * 40}}, "json is read from disk: leave revision out"),
    ({"train": {"path": "a/b", "revison": "x"}}, "unknown key train.revison = 'x'; did you mean 'revision'"),
    ({"train": {"path": "a/b", "documents": 5}}, "unknown key train.documents = 5")])
def test_settings_that_cannot_be_are_refused(change, said):
    with pytest.raises(ExperimentError, match=said):
        settings(**{"train": {"path": "owner/set", "revision": "0" * 40}, **change})


def test_an_embedded_corpus_is_opened_and_described_as_before():
    given = validate({"source": "embedded", "seed_stride": 7, "frozen": {"sequences": 3, "length": 2, "similarity": 1,
                                                                         "moments": 1}}, CorpusSettings, "corpus")
    assert given.model_dump(exclude_defaults=True) == {
        "source": "embedded", "seed_stride": 7,
        "frozen": {"sequences": 3, "length": 2, "similarity": 1, "moments": 1}}
    corpus = open_corpus(given, TOKENIZER)
    assert type(corpus) is embedded.Corpus and (corpus.frozen_shape, corpus.seed_stride) == ((3, 2), 7)


# Through the stand-in hub

@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub on loopback, this process talking to it; nobody waits before trying again."""
    import datasets
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))
    for name in ("STREAMING_READ_RETRY_INTERVAL", "STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL"):
        monkeypatch.setattr(datasets.config, name, 0)
    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 2)
    with Hub() as server:
        server.here(monkeypatch, tmp_path / "hf")
        yield server


@pytest.mark.parametrize("form, fault", [("zst", None), ("zst", "reset"), ("zst", 503), ("parquet", "close")])
def test_a_data_set_of_the_hub_is_read_through_faults(small, tmp_path, hub, form, fault):
    texts = some_documents(300)
    write(tmp_path / "served" / "train" if form == "zst" else tmp_path / "served", texts, form)
    commit = hub.dataset("owner/set", tmp_path / "served")
    head = TokenHead(tmp_path / "head", TextSource(path="owner/set", revision=commit), TOKENIZER)
    head.grow(documents=10)
    if fault:
        hub.fail("*01.jsonl.zst" if form == "zst" else "*train-00001*", fault, times=3)
    head.grow(documents=1000)
    assert not fault or hub.faults[0]["times"] == 0  # it was met as often as that
    assert head.read(0, head.tokens).tolist() == brute(texts)[0] and head.documents == 300


def test_a_shard_that_arrives_short_is_refused_and_completed_when_it_is_whole(small, tmp_path, hub):
    texts = some_documents(300)
    write(tmp_path / "served", texts, "zst")
    commit = hub.dataset("owner/set", tmp_path / "served")
    hub.fail("*01.jsonl.zst", "short")
    head = TokenHead(tmp_path / "head", TextSource(path="owner/set", revision=commit), TOKENIZER)
    with pytest.raises(CorpusError, match=r"cannot be read on from document 150 .*What was read is kept: run again"):
        head.grow(documents=300)
    assert head.documents == 148  # the first shard's, in whole batches
    hub.heal()
    head.grow(documents=300)
    assert head.read(0, head.tokens).tolist() == brute(texts)[0]


def test_a_data_set_of_the_hub_that_is_not_there(small, tmp_path, hub):
    write(tmp_path / "served", ["a"] * 4)
    commit = hub.dataset("owner/set", tmp_path / "served")
    for name, revision in (("owner/other", commit), ("owner/set", "0" * 40)):
        with pytest.raises(CorpusError, match=f"{name}, train, .* cannot be opened: .*Check path, name, revision"):
            documents.open_stream(TextSource(path=name, revision=revision))
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    commit = hub.dataset("owner/scripted", tmp_path / "scripted")
    with pytest.raises(CorpusError, match=r"owner/scripted.* is a loading script, and no code of a data set is run"):
        documents.open_stream(TextSource(path="owner/scripted", revision=commit))
    assert not (tmp_path / "ran").exists()


# A race on it

def test_a_race_on_such_text_keeps_where_its_stream_comes_from(small, tmp_path, monkeypatch, capsys):
    import yaml

    from scaleop.experiment import load_experiment

    monkeypatch.setattr(race, "STORE", tmp_path / "store")
    donor = tiny_pythia(tmp_path / "donor", heads=2)
    words = [" ".join("abcd"[int(digit) % 4] * 5 for digit in str(7**i)) for i in range(1, 60)]
    train, other = write(tmp_path / "set", words), write(tmp_path / "other", words[:20])
    text = settings(train, other, skip=8, seed_stride=2, sequences=4, length=16).model_dump(exclude_defaults=True)
    text["frozen"] |= {"similarity": 2, "moments": 4}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({
        "name": "tiny", "title": "tiny", "seeds": [0, 1], "corpus": text,
        "pair": {"donor": str(donor), "target": {"layers": 2, "width": 16, "heads": 2, "mlp": 32}},
        "evaluation": {"window": 16, "stride": 8, "quick_tokens": 50, "limits": {"heldout": 100, "foreign": 100}},
        "race": {"tokens": 256, "batch": 4, "length": 16, "peak_lr": 1.0e-3, "warmup_steps": 1, "eval_every": 128,
                 "checkpoint_every": 2, "precision": "no", "attention": "eager", "arms": ["hybrid_rs"]}}))
    opened = Race(load_experiment(str(tmp_path / "tiny.yaml")))
    result = opened.run("hybrid_rs", 1)
    tokenizer = AutoTokenizer.from_pretrained(donor)
    pieces = [[*tokenizer(text, add_special_tokens=False)["input_ids"], 0] for text in words]
    stream = [token for piece in pieces for token in piece]
    starts = np.cumsum([0, *map(len, pieces)])
    assert opened.corpus.frozen().tolist() == np.reshape(stream[:64], (4, 16)).tolist()
    kept = TokenFile(next(opened.corpus.folder.glob("streams/*")))
    assert kept.tokens.tolist() == stream[starts[10] : starts[10] + 256]
    common = {seed: shared for seed in range(20) if seed != 1
              and (shared := 256 - abs(int(starts[10] - starts[8 + 2 * seed]))) > 0}
    union = min(256, common[0] + common[2])
    assert result["stream"]["overlap"] == {"tokens": union, "share": round(union / 256, 6),
                                           "with": {str(seed): shared for seed, shared in common.items()}}
    assert f"note: {union} of the 256 tokens of seed 1" in capsys.readouterr().out
    assert result["stream"]["sha256"] == kept.manifest["sha256"]
    said = result["settings"]["corpus"]
    assert {key: said[key] for key in text if key not in ("train", "evaluations")} == {
        key: value for key, value in text.items() if key not in ("train", "evaluations")}
    assert said["train"] == identity(opened.experiment.corpus.train) and str(tmp_path) not in str(result["settings"])
    assert result["settings"]["tokenizer"] == opened.corpus.key

    # Neither where local text lies nor how many items the tasks ask makes it another run.
    before = opened.folder("hybrid_rs", 1)
    (tmp_path / "set").rename(tmp_path / "moved")
    moved = yaml.safe_load((tmp_path / "tiny.yaml").read_text())
    moved["corpus"]["train"]["path"] = str(tmp_path / "moved")
    moved["evaluation"]["limits"]["items"] = 5
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(moved))
    again = Race(load_experiment(str(tmp_path / "tiny.yaml")))
    assert again.folder("hybrid_rs", 1) == before
