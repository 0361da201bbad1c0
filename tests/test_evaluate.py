"""Perplexity against a loop that asks for one token at a time, and the closed forms it must give."""

import numpy as np
import pytest
import torch

from scaleop.corpus import train_tokenizer
from scaleop.evaluate import greedy, perplexity, windows
from tests.conftest import neox_config, random_ids, random_model


def token_by_token(model, ids, window, stride):
    """Total NLL by definition: token i is predicted by the first window that reaches it, windows every `stride`.

    Window k covers tokens k x stride up to k x stride + window, so the first to reach token i has
    k = ceil((i + 1 - window) / stride), or 0. One forward a token, each on nothing but that token's context.
    """
    total = 0.0
    for i in range(1, len(ids)):
        k = max(0, -((window - i - 1) // stride))
        context = torch.tensor(ids[k * stride : i])[None]
        with torch.no_grad():
            logits = model(input_ids=context).logits[0, -1].double()
        total += float(torch.logsumexp(logits, 0) - logits[ids[i]])
    return total


@pytest.mark.parametrize("window, stride", [(8, 4), (8, 3), (9, 7), (5, 1)])
@pytest.mark.parametrize("length", [2, 3, 5, 8, 9, 12, 13, 31])
def test_perplexity_is_that_of_a_loop_over_single_tokens(model, window, stride, length):
    ids = random_ids(length, seed=length)
    ours = perplexity(model, ids, window, stride)
    assert ours.scored == length - 1  # every token but the very first, once
    assert ours.nll == pytest.approx(token_by_token(model, ids, window, stride), rel=1e-6)
    assert ours.value == pytest.approx(np.exp(token_by_token(model, ids, window, stride) / (length - 1)), rel=1e-5)


@pytest.mark.parametrize("window, stride", [(2, 1), (8, 4), (8, 7), (9, 2)])
def test_windows_score_every_token_but_the_first_exactly_once(window, stride):
    for length in range(2, 60):
        spans = windows(length, window, stride)
        assert [p for begin, end, first in spans for p in range(first, end)] == list(range(1, length))
        for k, (begin, end, first) in enumerate(spans):
            assert begin == k * stride and end == min(begin + window, length) and begin < first < end


def test_windows_by_hand():
    assert windows(10, 6, 3) == [(0, 6, 1), (3, 9, 6), (6, 10, 9)]
    assert windows(9, 6, 3) == [(0, 6, 1), (3, 9, 6)]  # ends flush: no empty window follows
    assert windows(4, 6, 3) == [(0, 4, 1)]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_batch_size_does_not_matter(model, batch):
    ids = random_ids(70)
    assert perplexity(model, ids, 8, 4, batch=batch).nll == pytest.approx(perplexity(model, ids, 8, 4).nll, rel=1e-6)


@pytest.mark.parametrize("vocab", [61, 97])
def test_uniform_logits_give_the_vocabulary_size(vocab):
    model = random_model(neox_config(vocab=vocab))
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    assert perplexity(model, random_ids(40, vocab), 8, 4).value == pytest.approx(vocab, rel=1e-6)


def test_a_model_that_gives_nan_is_refused_rather_than_scored(model):
    model.get_input_embeddings().weight.data[7] = float("nan")
    ids = random_ids(40)
    ids[5] = 7
    with pytest.raises(FloatingPointError, match="not finite"):
        perplexity(model, ids, 8, 4)


def test_a_hopeless_model_has_a_finite_perplexity(model):
    """Zero-shot perplexities overflow easily; a number that JSON can hold is kept."""
    model.get_output_embeddings().weight.data *= 1e5
    result = perplexity(model, random_ids(40), 8, 4)
    assert np.isfinite(result.value) and result.value > 1e100


def test_dropout_is_off_and_the_mode_is_restored():
    model = random_model(neox_config(hidden_dropout=0.5, attention_dropout=0.5))
    ids = random_ids(40)
    quiet = perplexity(model.eval(), ids, 8, 4)
    assert not model.training
    assert perplexity(model.train(), ids, 8, 4) == quiet
    assert model.training


@pytest.mark.parametrize("stride", [0, -1, 8, 9])
def test_a_stride_that_would_leave_tokens_without_context_is_refused(model, stride):
    with pytest.raises(ValueError, match=f"stride={stride} must lie between 1 and window - 1 = 7"):
        perplexity(model, random_ids(40), 8, stride)


def test_one_token_is_too_few(model):
    with pytest.raises(ValueError, match="at least two tokens, got 1"):
        perplexity(model, random_ids(1), 8, 4)


def test_facts_hold_the_protocol_beside_the_number(model):
    facts = perplexity(model, random_ids(40), 8, 4).facts()
    assert facts.keys() == {"value", "nll", "scored", "window", "stride"}
    assert (facts["scored"], facts["window"], facts["stride"]) == (39, 8, 4)


def test_a_greedy_sample_is_the_one_transformers_generates():
    tokenizer = train_tokenizer(["any text"], 257, 64)
    model = random_model(neox_config(vocab=257))
    prompt = tokenizer("The people", return_tensors="pt")["input_ids"]
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=9,
                              min_new_tokens=9, pad_token_id=0, eos_token_id=None)
    assert greedy(model, tokenizer, "The people", 9) == tokenizer.decode(expected[0])
