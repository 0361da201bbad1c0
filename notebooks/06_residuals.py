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
# # 6 · Residuals: what the best operator misses
#
# **Asked.** Suppose one linear map per weight type, shared by all blocks, takes the large model's weights as near as it can to the
# small model's. Is what is left over a structured correction that could be learned, or noise?
#
# **The paper's answer.** Noise. The residual
#
# $$\Delta(l, \mathrm{type}) = W_\mathrm{small} - A\, W_\mathrm{large}\, B^\top$$
#
# is faintly more concentrated than shuffled entries would be, but it points in no common direction, no predictor learns it from the
# operator's output, and nothing learned carries over to another pair ({cite}`yenugula2026wiring`, section 6). So there is no
# zero-shot fix, and what a conversion is worth must lie in its *initialisation*.
#
# This page repeats the four tests and asks what a null result needs to be asked: **would the tests have found anything?**

# %% tags=["parameters", "hide-input"]
experiment: str = "nano"  # a file of params/ whose pair has a reference: the trained sibling whose weights are explained
seed: int = 0  # of the operators' starts and the random weights
smaller: str = "models/nano-s"  # a still smaller sibling for the transfer test; None: leave that test out

# %% tags=["hide-input"]
given = dict(globals())  # before any import: nothing but parameters may be here
from scaleop.experiment import from_notebook

smaller = given.pop("smaller")
chosen, seed = from_notebook(given)

# %% tags=["hide-input"]
import time

import pandas as pd
from IPython.display import display

from scaleop import plots
from scaleop.claims import evaluate, published, tabulate, to_records
from scaleop.claims.section6 import CLAIMS
from scaleop.claims.section6_tables import power_table, predictor_table, rank_table, stricter_table
from scaleop.race import Race
from scaleop.residual_study import ResidualStudy
from scaleop.store import record

plots.notebook()
pd.set_option("display.max_colwidth", None)
began = time.monotonic()

# %% [markdown]
# ## The operators and what they leave
#
# Operators are fitted by alternating least squares (section 5 compares this with the authors' 1,500 steps of Adam). *Free
# numbers* is how many the two factors have for every weight they explain. Pythia's 24 blocks keep it low, a ladder of few blocks
# does not: **where it reaches 1 an operator reproduces any target whatever**, its residual is rounding, and there is nothing to
# test. Such types are set aside below, and at this size verdicts speak of the others only. Even where it is lower, the fit has
# absorbed that share of any noise, too, so each structural test is repeated on *fits to noise*: operators fitted to the same weights
# with their entries shuffled.

# %%
study = ResidualStudy(Race(chosen), smaller, seed)
measured = study.measured()  # all tests, or what the store has of them
pairs = {"width pair": study.width, **({} if study.depth is None else {"depth pair": study.depth})}
pd.DataFrame([{"pair": name, "type": role, "relative error": fitted.errors[role], "free numbers": fitted.free[role],
               "tested": "yes" if role in fitted.residuals else "no: reproduced"}
              for name, fitted in pairs.items() for role in fitted.errors]).style.hide(axis="index").format(precision=3)

# %% [markdown]
# ## Test 1: the spectrum (Table 6, Figure 3)
#
# The effective rank is $\exp$ of the entropy of the singular values' shares: low when few directions carry the matrix. The *deficit*
# says how far it lies below the shuffled control, and is the number to compare with the paper's. The last two deficits are controls of
# ours. Normal entries with the residual's own row and column norms test the paper's explanation (appendix B.2). The fit to noise
# tests another: an operator takes out what it can express, and what is then left cannot fill all directions evenly.

# %%
rank_table(measured).style.hide(axis="index")

# %%
middle = len(next(iter(study.width.residuals.values()))) // 2
plots.spectra(study.spectra(middle), middle)

# %% [markdown]
# ## Test 2: one direction in all blocks?
#
# The mean cosine between the residuals of different blocks. Chance alone gives it the standard deviation in the third column,
# larger here than at Pythia's size because our matrices are smaller.

# %%
pd.DataFrame([{"type": role, "residual": test["delta"], "shuffled": test["control"], "chance (sd)": test["sd"],
               "fit to noise": test["noise"], "residual / chance": test["delta"] / test["sd"]}
              for role, test in measured["cosine"].items()]).style.hide(axis="index").format(precision=4).format(
                  "{:+.1f}", subset=["residual / chance"])

# %% [markdown]
# ## Tests 3 and 4: can it be learned? (Table 1)
#
# A predictor sees a 16 x 16 patch of the operator's output with its type and place, and predicts the residual's patch: a linear
# map, or an MLP with 512 units. It learns on three blocks in four and is scored on the fourth. The control learns with each type's
# blocks re-paired at random. *Reduction* is 1 − √(SSE/SS): the share by which error falls below that of predicting zero.
# Transfer scores predictors of the width pair on the depth pair. Number of steps and passes are the authors'; one of their batches
# holds more patches than we have, so ours is the same share of the patches.
#
# Reductions below zero are the price of fitting noise with few patches: the fewer there are, the further below. What counts
# is the gap to the control.

# %%
found = measured["learnability"]
print(f"held-out blocks {found['held']}: {found['patches']:,} patches scored, {found['learned']:,} learned from")
predictor_table(measured).style.hide(axis="index")

# %% [markdown]
# The paper's p is the share of resampled gaps at or below zero, so it is near 1 when the real predictor is *worse* than its control:
# the paper's own intervals lie just below zero. And it resamples patches as if they were independent, with both predictors held
# fixed. Three stricter questions:
#
# - **Two-sided**, since a gap of either sign would be a finding.
# - **By block**: patches of one block share a matrix. The paper's split leaves 6 of 24 blocks, which signs alone could take to p = 1/32 two-sided;
#   every fourth of 8 leaves 2, and *two blocks cannot reject anything*: p is 1/2 at best. That is the price of the small ladder, so we
#   also hold out every block once (four splits), where eight gaps of one sign give 1/128.
# - **Among re-pairings**: the control is one random draw, and fitting it is noisy. With nineteen of them the real pairing's rank is a test
#   that takes both into account.

# %%
stricter_table(measured).style.hide(axis="index")

# %% [markdown]
# ## Positive control: what could have been found?
#
# A null result is worth what its tests could have detected. The residual with its entries shuffled is known noise; into it we plant
# a signal that makes up a known share of the variance. A *patch* signal is a fixed rotation of the operator's patch, which is what the
# predictors look for; a *shared* one is the same matrix in all blocks, a *low rank* one a rank-4 matrix in each. The table gives the
# least share from which on each test finds it. False alarms are findings in draws of pure noise.

# %%
display(power_table(measured).style.hide(axis="index"))
plots.power(measured["power"]["rows"])

# %% [markdown]
# ## Does it matter for behaviour? (appendix B.2)
#
# The trained sibling as a shell: its six matrix types give way to the operator's output, all else stays its own. *Corrected* adds what
# the MLP predicts, on all blocks, those it has learned from included; *cross-fitted* adds predictions for unseen blocks only.
# With the residual itself added the sibling must come back. (Quick held-out perplexities; types that the operator reproduces are
# the sibling's own, so where some were set aside the shell is less damaged than the paper's.)

# %%
paper = {"operator": "res.behav.operator", "corrected": "res.behav.operator_plus_R", "reference": "anchor.real_410m",
         "random": "anchor.random_410m"}
pd.DataFrame([{"matrices": name, "paper": published(paper[name])["printed"] if name in paper else "-", "ours": value} for name, value in measured["behaviour"].items()]
             ).style.hide(axis="index").format(precision=1, thousands=",")

# %% [markdown]
# ## The claims of section 6

# %%
findings = evaluate(CLAIMS, measured)
tabulate(findings).style.hide(axis="index")

# %% [markdown]
# ## What holds, and how sure that is

# %%
for verdict in ("holds", "does not hold", "not run"):
    mine = [finding for finding in findings if finding.verdict == verdict]
    print(f"{verdict}: {len(mine)}")
    for finding in mine:
        print(f"  [{finding.claim.section}] {finding.claim.id}: {finding.ours}")

# %% tags=["hide-input"]
record("06_residuals", experiment=chosen.name, models=study.called, keys=study.keys, values=measured.values,
       findings=to_records(findings))
print(f"{', '.join(study.called.values())}; this page took {time.monotonic() - began:.0f} s, finished parts reused")

# %% [markdown]
# ## Try it
#
# ```bash
# papermill notebooks/06_residuals.ipynb out.ipynb -p seed 1          # other starts of the operators
# papermill notebooks/06_residuals.ipynb out.ipynb -p smaller None    # without the transfer test
# ```
#
# ```python
# from scaleop.residuals import effective_rank, mean_cosine, spectrum
# effective_rank(spectrum(stack))      # any stack (blocks, out, in) of your own
# ```
