"""The nano ladder: three GPT-NeoX models trained from scratch on identical data in identical order.

    python -m scaleop.pretrain nano-l            # one model: resumes if it was interrupted, skips if it is done
    python -m scaleop.pretrain --all             # the ladder
    python -m scaleop.pretrain nano-l --sweep    # the short learning-rate sweep behind the recipe's peak_lr

Shapes, budget and rates are data (`params/ladder.yaml`). The loop is the race's own.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GPTNeoXConfig

from scaleop import texts
from scaleop.card import card
from scaleop.corpus import Corpus, train_tokenizer
from scaleop.evaluate import greedy, perplexity
from scaleop.experiment import load_ladder
from scaleop.paths import ROOT, STORE
from scaleop.replacing import recover
from scaleop.settings import Ladder, LadderModel
from scaleop.store import atomic_folder, digest, locked, provenance, read_json, write_json
from scaleop.train import Recipe, seed_everything, settings, train
from scaleop.weights import assemble, load, pythia_init


def config_of(ladder: Ladder, model: LadderModel) -> GPTNeoXConfig:
    """The transformers config of a ladder model: Pythia's choices at nano size."""
    return GPTNeoXConfig(
        vocab_size=ladder.vocabulary, hidden_size=model.width, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, intermediate_size=model.mlp, rotary_pct=ladder.rotary_fraction,
        max_position_embeddings=ladder.context, tie_word_embeddings=False, use_parallel_residual=True,
        hidden_act="gelu", bos_token_id=0, eos_token_id=0, use_cache=True)


def ladder_corpus(ladder: Ladder) -> Corpus:
    """The ladder's corpus under its tokenizer, which is trained on first use and kept in the store."""
    folder = STORE / "tokenizer" / digest([ladder.vocabulary, ladder.context])
    with locked(folder.parent):
        if not (folder / "tokenizer.json").exists():
            tokenizer = train_tokenizer(texts.training_documents(), ladder.vocabulary, ladder.context)
            with atomic_folder(folder) as part:
                tokenizer.save_pretrained(part)
    frozen = ladder.frozen
    return Corpus(AutoTokenizer.from_pretrained(folder), (frozen.sequences, frozen.length), ladder.tokens)


def run(ladder: Ladder, model: LadderModel, peak_lr: float, tokens: int, evaluations: int,
        folder: Path) -> dict[str, Any]:
    """Train one model at one peak rate into `folder`/model; a finished run is returned as it was stored."""
    recipe = Recipe(tokens=tokens, batch=ladder.batch, length=ladder.context, peak_lr=peak_lr,
                    warmup_steps=round(ladder.warmup_share * math.ceil(tokens / (ladder.batch * ladder.context))),
                    eval_every=tokens // evaluations, precision=ladder.precision,
                    checkpoint_every=ladder.checkpoint_every)
    facts = settings(recipe, model=model.model_dump(exclude={"peak_lr"}),
                     ladder=ladder.model_dump(exclude={"models", "sweep"}))
    key = digest(facts)
    result = folder / "result.json"
    with locked(folder):
        if result.exists() and read_json(result)["key"] == key:
            return read_json(result)
        recover(folder / "checkpoint")  # one that was being replaced when the process was killed
        origin = provenance()
        corpus = ladder_corpus(ladder)
        stream = corpus.stream(0, recipe.consumed, repeat=True)
        measure = ladder.evaluation
        quick = corpus.evaluation("heldout", measure.quick_tokens)
        seed_everything(ladder.seed)
        config = config_of(ladder, model)
        config._attn_implementation = "eager"  # measured faster than sdpa on CPU at this context
        net = assemble(pythia_init(config, torch.Generator().manual_seed(ladder.seed)), config)
        began = time.monotonic()
        curve = train(net, stream, recipe, key=key, name=model.name, folder=folder,
                      evaluate=lambda net: perplexity(net, quick, measure.window, measure.stride).value)
        seconds = time.monotonic() - began
        net.to(torch.bfloat16).save_pretrained(folder / "model")
        corpus.tokenizer.save_pretrained(folder / "model")
        write_json(result, {"key": key, "settings": facts, "stream": stream.manifest, "curve": curve,
                            "seconds": round(seconds, 1), "parameters": sum(p.numel() for p in net.parameters()),
                            **origin})
        return read_json(result)


def score(ladder: Ladder, folder: Path) -> dict[str, Any]:
    """Full perplexities and a greedy sample of a shipped checkpoint: bf16 on disk, fp32 in memory."""
    corpus, shipped, measure = ladder_corpus(ladder), load(folder), ladder.evaluation
    return {"perplexity": {name: perplexity(shipped, corpus.evaluation(name, limit), measure.window,
                                            measure.stride).facts() for name, limit in measure.limits.items()},
            "sample": greedy(shipped, corpus.tokenizer, "The people of the United States", 40)}


def sweep(ladder: Ladder, model: LadderModel) -> list[dict[str, float]]:
    """The learning-rate sweep of one model: [{peak_lr, ppl}] at `ladder.sweep.tokens`, quick held-out perplexity."""
    table = []
    for rate in ladder.sweep.rates:
        folder = STORE / "pretrain" / f"{model.name}-sweep" / f"{rate:g}"
        result = run(ladder, model, rate, ladder.sweep.tokens, 1, folder)
        table.append({"peak_lr": rate, "ppl": result["curve"][-1]["ppl"]})
        print(f"{model.name}: peak rate {rate:g} -> {table[-1]['ppl']:.2f}", flush=True)
    write_json(STORE / "pretrain" / f"{model.name}-sweep" / "sweep.json", table)
    return table


def publish(ladder: Ladder, model: LadderModel) -> Path:
    """Pretrain (or find) a model and ship it: weights, tokenizer, card and the full result under models/."""
    work, target = STORE / "pretrain" / model.name, ROOT / "models" / model.name
    result = run(ladder, model, model.peak_lr, ladder.tokens, ladder.evaluations, work)
    result |= score(ladder, work / "model")
    rates = STORE / "pretrain" / f"{model.name}-sweep" / "sweep.json"
    table = read_json(rates) if rates.exists() else None
    with atomic_folder(target) as part:
        for file in (work / "model").iterdir():
            (part / file.name).write_bytes(file.read_bytes())
        (part / "README.md").write_text(card(model, ladder, result, table), encoding="utf-8")
        write_json(part / "training.json", {**result, **({"sweep": table} if table else {})})
    return target


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m scaleop.pretrain", description="Train the nano ladder.")
    parser.add_argument("models", nargs="*", help="names in params/ladder.yaml, e.g. nano-l")
    parser.add_argument("--all", action="store_true", help="the whole ladder")
    parser.add_argument("--sweep", action="store_true", help="only the learning-rate sweep")
    parser.add_argument("--threads", type=int, help="torch threads (the shipped ladder used 1 a model)")
    arguments = parser.parse_args()
    ladder = load_ladder()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if not (arguments.all or arguments.models):
        parser.error("name a model or pass --all")
    for model in ladder.models if arguments.all else [ladder.model(name) for name in arguments.models]:
        print(sweep(ladder, model) if arguments.sweep else publish(ladder, model))


if __name__ == "__main__":
    main()
