# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 · Alignment: representations align, parameters do not
#
# **Asked.** Two sizes of one family learned the same text. Is the relation that a conversion needs in what they *compute*, or in
# the numbers they *store*?
#
# **The paper's answer.** In what they compute. Linear CKA puts the blocks of Pythia-1.4B and 410M in the same coarse order, and a
# linear map fitted on one part of the text predicts most of the small model's activations from the large one's on the rest. The
# same kind of map between their embedding matrices explains far less ({cite}`yenugula2026wiring`, section 4).
#
# This page repeats the measurements on a pair of the nano ladder and adds three checks that the paper lacks: last-token
# activations, an *untrained* sibling as a floor, and a random split of the vocabulary.

# %% tags=["parameters", "hide-input"]
experiment: str = "nano"  # a file of params/ whose pair has a reference: the trained sibling to compare the donor with
seed: int = 0  # of the untrained sibling's weights and the random splits

# %% tags=["hide-input"]
given = dict(globals())  # before any import: nothing but parameters may be here
from scaleop.experiment import from_notebook

chosen, seed = from_notebook(given)

# %% tags=["hide-input"]
import time

import numpy as np
import pandas as pd
import torch
from IPython.display import display

from scaleop import plots
from scaleop.alignment import block_scores, embedding_scores, in_order
from scaleop.captures import capture, reference_of, similarity
from scaleop.claims import evaluate, tabulate, to_records
from scaleop.claims.section4 import CLAIMS, alignment_evidence, alignment_table
from scaleop.maps import block_map
from scaleop.paths import resolve
from scaleop.race import Race, model_key
from scaleop.store import digest, record
from scaleop.weights import assemble, pythia_init

plots.notebook()
pd.set_option("display.max_colwidth", None)
began = time.monotonic()

# %% [markdown]
# ## What is compared
#
# The donor and the *reference*, a trained model of the target's shape. Every frozen sequence goes through both; behind each block the
# residual stream is kept averaged over positions and at the last position. The untrained sibling has the reference's shape and
# Pythia's initialisation, and stands for what shape and text give without any learning.

# %%
race = Race(chosen)
frozen = race.corpus.frozen()
donor, reference = race.donor.model, reference_of(chosen)
untrained = assemble(pythia_init(race.target, torch.Generator().manual_seed(seed)), race.target)
keys = {"donor": race.donor_key, "reference": model_key(resolve(chosen.pair.reference)),
        "untrained": digest(["untrained", race.target.to_diff_dict(), seed])}
blocks = block_map(donor.config.num_hidden_layers, reference.config.num_hidden_layers)
names = {"donor": chosen.pair.donor.split("/")[-1], "reference": chosen.pair.reference.split("/")[-1]}
print(f"donor {names['donor']}: {donor.config.num_hidden_layers} blocks of width {donor.config.hidden_size}; "
      f"reference {names['reference']}: {reference.config.num_hidden_layers} of width {reference.config.hidden_size}\n"
      f"frozen set: {frozen.shape[0]:,} sequences of {frozen.shape[1]} tokens, {int(0.8 * len(frozen)):,} to fit on and "
      f"{len(frozen) - int(0.8 * len(frozen)):,} to test on, in order")

# %%
captures = {role: capture(model, keys[role], frozen)
            for role, model in (("donor", donor), ("reference", reference), ("untrained", untrained))}

# %% [markdown]
# ## Which block is which: linear CKA
#
# Linear CKA {cite}`kornblith2019similarity` compares two sets of features on the same positions and ignores rotation and scale:
#
# $$\mathrm{CKA}(X, Y) = \frac{\lVert X^\top Y\rVert_F^2}{\lVert X^\top X\rVert_F\,\lVert Y^\top Y\rVert_F}$$
#
# with centred $X$ and $Y$. All positions of the similarity subset count. The sums behind all pairs of blocks are streamed, so no
# block's activations are ever held whole.

# %%
subset = frozen[: chosen.corpus.frozen.similarity]
cka = similarity(donor, reference, [keys["donor"], keys["reference"]], subset)
print(f"{subset.size:,} positions")
plots.similarity(cka, blocks, **names)

# %% [markdown]
# CKA is a ratio of squared covariances, so a few directions of large variance decide it. Where neighbouring blocks share those, it
# cannot tell the blocks apart: a high diagonal and few sharp matches go together.

# %% [markdown]
# ## How much is a linear image: ridge and Procrustes
#
# For each pair of matched blocks a map from the donor's vector to the reference's is fitted on the first 80 % of the sequences and
# scored on the rest. *Ridge* may be any matrix, *Procrustes* only a rotation with one scale. $R^2$ is pooled over all features: 1
# is perfect, 0 no better than the mean.

# %%
scores = {"act": block_scores(captures["donor"].pooled, captures["reference"].pooled, blocks),
          "last": block_scores(captures["donor"].last, captures["reference"].last, blocks),
          "untrained": block_scores(captures["donor"].pooled, captures["untrained"].pooled, blocks)}
plots.maps({"Mean-pooled activations": scores["act"], "Last-token activations": scores["last"]}, scores["untrained"])

# %% [markdown]
# Pooling over positions averages away what differs from token to token, and what is left is close to a bag of words. The dotted
# lines show how well that alone lets the donor predict a sibling that has learned nothing, and the second panel how much is
# linear when nothing is averaged. Block by block:

# %%
columns = {f"{label}, {name}": scores[row][key] for row, label in (("act", "pooled"), ("last", "last token"),
                                                                   ("untrained", "pooled, untrained"))
           for key, name in (("ridge", "ridge"), ("procrustes", "Procrustes"))}
pd.DataFrame({"CKA": cka[list(blocks)].diagonal().numpy(), **columns}).rename_axis("block").style.format(precision=3)

# %% [markdown]
# ## Raw parameters: the embeddings
#
# The vocabulary is the one axis that both sizes share, so rows can be matched without any activation. The paper fits on the first 80 %
# of the rows and tests on the last 20 %, *in vocabulary order*. A byte-pair vocabulary is ordered by when a merge was made, so
# this asks whether a map learned on frequent tokens holds for rare ones. A random split asks the plainer question.

# %%
embeddings = {row: embedding_scores(*(getattr(model, get)().weight for model in (donor, reference)), seeds=range(seed, seed + 5))
              for row, get in (("emb_in", "get_input_embeddings"), ("emb_out", "get_output_embeddings"))}
measured = alignment_evidence(cka, blocks, scores, embeddings, seed)

# %%
vocabulary = min(model.config.vocab_size for model in (donor, reference))
counts = np.bincount(race.corpus.train.tokens, minlength=vocabulary)[:vocabulary]
rows = []
for part, index in zip(("first 80 %, fitted on", "last 20 %, tested on"), in_order(vocabulary), strict=True):
    inside = counts[index.numpy()]
    rows.append({"rows in vocabulary order": part, "share of the training text": f"{inside.sum() / counts.sum():.1%}",
                 "median occurrences": int(np.median(inside)), "never seen": int((inside == 0).sum()),
                 **{f"mean row norm, {name}": model.get_input_embeddings().weight[index].norm(dim=1).mean().item()
                    for name, model in zip(names.values(), (donor, reference), strict=True)}})
pd.DataFrame(rows).style.hide(axis="index").format(precision=3, thousands=",")

# %% [markdown]
# Rows that occur less often were trained less, so the ordered test rows are not drawn as those the map was fitted on; the random
# split has no such shift. The difference between the two scores in Table 3 is what the order costs (or, if negative, gives), and only
# the score under the random split speaks of the parameters alone.

# %% [markdown]
# ## Table 3
#
# The paper's column is Pythia-1.4B to 410M. For activations CKA is the mean over matched blocks and $R^2$ the mean over blocks; random
# splits are a mean of five with its standard deviation.

# %%
alignment_table(measured).style.hide(axis="index")

# %% [markdown]
# ## The claims of section 4
#
# Each row is a sentence of the paper (or a question of ours) as a predicate over the numbers above. One pair, one frozen set: there
# is no seed to repeat over, so *holds on* counts one.

# %%
findings = evaluate(CLAIMS, measured)
tabulate(findings).style.hide(axis="index")

# %% [markdown]
# ## Provenance

# %% tags=["hide-input"]
record("04_alignment", experiment=chosen.name, seed=seed, models=keys, blocks=list(blocks), cka=cka.tolist(),
       values=measured.values, findings=to_records(findings))
manifests = {role: found.manifest for role, found in captures.items()}
display(pd.DataFrame([{"capture": role, "weights": manifest["model"], "frozen set": manifest["frozen"],
                       "blocks x sequences x width": " x ".join(map(str, manifest["shape"])), "commit": manifest["commit"][:12],
                       "started": manifest["started"]} for role, manifest in manifests.items()]).style.hide(axis="index"))
first = manifests["donor"]
print(", ".join(f"{name} {number}" for name, number in first["versions"].items()))
print(f"{first['hardware']['device']}, {first['hardware']['threads']} threads; this page took {time.monotonic() - began:.0f} s, "
      "captures found in the store reused")

# %% [markdown]
# ## Try it
#
# ```bash
# papermill notebooks/04_alignment.ipynb out.ipynb -p seed 1                     # another untrained sibling, other random splits
# papermill notebooks/04_alignment.ipynb out.ipynb -p experiment my.yaml         # another pair: any YAML with a reference
# ```
#
# The mathematics takes tensors and needs no model:
#
# ```python
# import torch
# from scaleop.alignment import cka, held_out
#
# x = torch.randn(2000, 64)                       # 2,000 samples of 64 features
# y = x @ torch.randn(64, 16) + torch.randn(2000, 16)
# cka(x, y), held_out(x, y)                       # similarity; held-out R^2 of ridge and Procrustes
# ```
