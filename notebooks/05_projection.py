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
# # 5 · Dense projection: why blending fails
#
# **Asked.** Representations of two sizes align (section 4). So why not project the large model's weights into the small shape,
#
# $$\hat W = P_\mathrm{out}\, W\, P_\mathrm{in}^\top,$$
#
# with one dense basis per axis, built from the large model alone, and read off a working small model?
#
# **The paper's answer.** The projected weights miss the small model's by more than predicting zero would, and the assembled model is
# worse than random weights, because a dense basis breaks what is tied to coordinates: rotary pairs, heads, GELU's units, LayerNorm's
# features ({cite}`yenugula2026wiring`, section 5). LayerNorm is said to be the largest factor.
#
# This page rebuilds Tables 4 and 5 and then asks what the paper leaves as an argument: **which blending hurts, and how much?** With
# axes and maps that is one line a variant: blend one axis of the selection, or select one axis of the projection.

# %% tags=["parameters", "hide-input"]
experiment: str = "nano"  # a file of params/: which pair, text and schedule
seed: int = 0  # of the fits' starts, the random weights, and the text that variants train on
tokens: int = None  # training tokens per mixed variant; None: an eighth of the experiment's

# %% tags=["hide-input"]
given = dict(globals())  # before any import: nothing but parameters may be here
from scaleop.experiment import from_notebook

chosen, seed = from_notebook(given)

# %% tags=["hide-input"]
import time

import pandas as pd
from IPython.display import display

from scaleop import plots
from scaleop.claims import evaluate, tabulate, to_records
from scaleop.claims.section5 import CLAIMS
from scaleop.claims.section5_tables import factors, race_of_fits, table4, table5, two_way
from scaleop.diagnosis import PROMPT, TOKENS, Diagnosis, shortened
from scaleop.race import Race

plots.notebook()
pd.set_option("display.max_colwidth", None)
began = time.monotonic()
study = Diagnosis(Race(shortened(chosen, tokens or chosen.race.tokens // 8)), seed)

# %% [markdown]
# ## The control: taking a model apart changes nothing
#
# The donor, rebuilt from its own extracted weights without any projection, must give the same logits to the last bit. Whatever is lost
# below is then the fault of the projection's mathematics and not of the assembly.

# %%
print(f"{chosen.title}\nlargest difference of logits after rebuilding the donor: {study.identity():g}")

# %% [markdown]
# ## The bases
#
# Residual axis: principal components of the pooled activations. Inner axes: leading left singular vectors of what meets there
# ([Q, K]; O's input side; [UP, DOWN']). We take them from Gram matrices, at half the digits of a full SVD but cheaper. *sine* is that of the
# largest angle between the two subspaces over all blocks, *gap* the smallest ratio of the last kept to the first
# dropped singular value, *energy* the share of the squared norm that a basis keeps.

# %%
bases = study.bases()
frame = pd.DataFrame({axis: row for axis, row in bases.items() if axis != "rank"}).T.rename_axis("axis")
display(frame.style.format("{:.3g}", na_rep="-").format("{:.2e}", subset="sine").format("{:.1%}", subset="energy"))
print(f"rank of UP alone {bases['rank']['up']}, of [UP, DOWN'] {bases['rank']['joint']}; the target has {bases['rank']['target']} hidden units")

# %% [markdown]
# The joint rank of UP and DOWN is no larger than the small model's MLP where widths halve: that basis then keeps *all* energy, so nothing linear is lost
# on this axis, and whatever blending it costs is GELU's doing alone.
#
# ## Table 4: how far the weights are from the target's
#
# Relative Frobenius error against the trained sibling's weights, mean over blocks; predicting zero has error 1. *Target-free* is the projection; the
# *operator* is one pair $(A, B)$ per weight type, shared by all blocks and fitted with the target in sight: a bound on what one linear map
# can explain. (The text of the paper points to its Table 5 for these numbers; they stand in Table 4.)
#
# The paper reads 1 - error as "variance explained"; as variance, $1 - \mathrm{error}^2$ is more. Beside it we set two controls. *Free share*: how many
# free numbers the fit has per number it has to explain; at 1 it can reproduce anything. *Shuffled*: the same fit to the sibling's
# weights in random order, where there is nothing to find. Shallow models leave a shared operator little to be shared over, so here both matter.

# %%
fits = study.fits()
table4(fits).style.hide(axis="index").format(precision=3) if fits else print("this experiment has no trained sibling to compare with")

# %% [markdown]
# ## Two ways to fit the operator
#
# Adam as the authors run it (1,500 full-batch steps, rate 5e-3; fewer only where it reproduces its target) and alternating least squares, from the same start. With $B$ fixed the best $A$ is a
# regression in closed form, and the reverse; plain alternation creeps, so $B$'s regression is corrected by how $A$ answered before (L-BFGS).
# A step that would raise the error is refused. Errors here are pooled over blocks: what both minimise.

# %%
if fits:
    display(race_of_fits(fits).style.hide(axis="index").format(precision=3).format("{:.2f}", subset=["Adam, s", "ALS, s"]))
    display(plots.convergence(fits))

# %% [markdown]
# ## Table 5: what the projected model says
#
# Strided perplexity on the head of the held-out text, lower is better, and twelve greedy tokens. The projected matrices stand under four
# treatments of their LayerNorms: the trained sibling's (the one place where a trained target is used: a diagnosis, never an arm),
# projected like everything else, the selection's, and neutral (gain 1, bias 0).
#
# The paper's numbers are Pythia's, on WikiText-103 with a vocabulary of 50,304. Its neutral row and the selection's (from a later
# revision) are quick perplexities, the others full ones; ours are all of one kind.

# %%
print(f"{TOKENS:,} tokens at most; prompt: {PROMPT!r}")
table5(study.scores()).style.hide(axis="index").format(escape="html")

# %% [markdown]
# ## Which blending hurts?
#
# From the full selection, one axis at a time is blended; from the full projection, one axis at a time is selected. Norms are neutral wherever the
# stream is blended, as in the paper's race, so the selection with neutral norms is a corner of its own: it shows what
# giving up the norms costs without any blending.
#
# Each variant then trains briefly, on the same bytes: an eighth of the race's budget unless told otherwise, with the warmup in proportion. That
# says what a start is worth in the first steps, not where it ends; *end* is quick perplexity.

# %%
runs = study.variants()
recipe = study.race.recipe
print(f"{recipe.steps} steps of {recipe.batch} x {recipe.length} = {recipe.consumed:,} tokens a variant, {recipe.warmup_steps} of them warmup, "
      f"peak rate {recipe.peak_lr:g}, seed {seed}")
two_way(runs).style.hide(axis="index")

# %% [markdown]
# The same as factors: what each swap multiplies perplexity by. (The residual axis is blended from the selection with neutral norms. Selecting the
# residual axis of the projection also gives it the selection's norms.)

# %%
plots.blending(factors(runs))

# %% [markdown]
# The paper's argument blends norms along with the stream, since "a rotated stream no longer matches any diagonal gain". Quick
# perplexity of a blended stream before training, its norms blended or neutral:

# %%
starts = {run["arm"]: run["zero_shot"] for run in runs}
pd.DataFrame([{"model": name, "norms blended": value, "norms neutral": starts[name]} for name, value in study.mapped_norms().items()]
             ).style.hide(axis="index").format("{:,.4g}", subset=["norms blended", "norms neutral"])

# %% [markdown]
# ## The claims of section 5
#
# Rows of section "ours" are questions that the paper does not ask. One seed; every number is deterministic but the seconds.

# %%
measured = study.measured()
findings = evaluate(CLAIMS, measured)
tabulate(findings).style.hide(axis="index")

# %% tags=["hide-input"]
from scaleop.store import record

record("05_projection", experiment=chosen.name, seed=seed, keys=study.keys, values=measured.values, bases=bases, findings=to_records(findings))
print(f"{sum(finding.verdict == 'holds' for finding in findings)} of {len(findings)} claims hold; this page took {time.monotonic() - began:.0f} s, "
      "finished parts reused")

# %% [markdown]
# ## Try it
#
# ```bash
# papermill notebooks/05_projection.ipynb out.ipynb -p tokens 409600     # the variants at the race's whole budget
# papermill notebooks/05_projection.ipynb out.ipynb -p seed 1            # another start of the fits, another stretch of text
# papermill notebooks/05_projection.ipynb out.ipynb -p experiment toy    # a smoke test; it has no sibling, so no Table 4
# ```
#
# ```python
# from scaleop.projection import authors_start, fit_als
# fit = fit_als(donor, target, authors_start(donor, m, n, generator))    # your own stacks: (blocks, p, q) and (blocks, m, n)
# ```
