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
# # 7 · The matched-budget race: two levers
#
# **Asked.** If what transfers between sizes is an *initialisation*, which starting weights recover fastest, when shape,
# data, schedule and budget are the same for all of them?
#
# **The paper's answer.** Selecting coordinates (so that the wiring survives) beats training from scratch and beats dense
# projection. On top of a selection there are two levers: *compensation* re-fits the read-outs by least squares and repairs what
# the small model computes; *rescale* restores the variance that the cut took away and changes how it trains, even though it
# makes the start worse. Stacked ({cite}`yenugula2026wiring`, section 7), they give the best endpoint.
#
# This page runs the seven arms of the paper's Table 2 and sets each number beside the printed one. Two arms of ours stand
# among them: `random_pythia` starts from Pythia's own initialisation rule instead of transformers' default (is the paper's
# from-scratch arm handicapped?), and `stride` selects evenly spaced coordinates (what are the selection scores worth?).
# The two leaders then run on three seeds (section 7.3). Last come arms that the paper's text leaves out: selection by
# activations and distillation, which a later revision added, and biases that take up the mean of what was dropped.

# %% tags=["parameters", "hide-input"]
experiment: str = "nano"  # a file of params/: which pair, text, budget and schedule
seed: int = 0  # which stretch of the text the arms train on (and the random arm's weights)
tokens: int = None  # training tokens per arm; None: the experiment's
arms: str = None  # comma-separated names, and no others run; None: the experiment's
seeds: str = None  # comma-separated: what the leaders run on (section 7.3); None: the experiment's

# %% tags=["hide-input"]
given = dict(globals())  # before any import: nothing but parameters may be here
from scaleop.experiment import from_notebook

chosen, seed = from_notebook(given)

# %% tags=["hide-input"]
import time

import pandas as pd
from IPython.display import display

from scaleop import claims, plots, published
from scaleop.claims import Standings, evaluate, ladder, readable, tabulate, to_records
from scaleop.committed import kept
from scaleop.experiment import planned
from scaleop.race import Race
from scaleop.store import record

plots.notebook()
pd.set_option("display.max_colwidth", None)
began = time.monotonic()

# %% [markdown]
# ## What runs
#
# The pair, the budget and the schedule are data. Every arm reads the same token file, and only the starting weights differ;
# no arm ever sees a trained target: it gets the donor, the frozen probe set and a target *shape*.

# %%
race = Race(chosen)
recipe = race.recipe
print(f"{chosen.title}: {recipe.steps} steps of {recipe.batch} x {recipe.length} = {recipe.consumed:,} tokens an arm, "
      f"peak rate {recipe.peak_lr:g}, seed {seed}")

# %%
everything = race.runs(planned(chosen, seed))  # the arms on this seed, the leaders on every one
results = [result for result in everything if result["seed"] == seed]
further = kept(race, besides=everything)  # arms that the default run leaves out: their results are stored beside this book
anchors = race.anchors()

# %% [markdown]
# ## Table 2: the ladder
#
# *Zero-shot* is the quick perplexity before the first step, *final* the full strided perplexity on held-out text at the budget.
# The two halves are different worlds (Pythia on WikiText-103, a vocabulary of 50,304, 30M tokens; the nano ladder on
# presidential addresses, a vocabulary of 4,096), so compare orders and ratios, not levels.

# %%
readable(ladder(results, anchors)).style.hide(axis="index")

# %% [markdown]
# ## Recovery
#
# Held-out perplexity along the way, on a log axis. The dashed line is the real sibling: a model of the target's
# shape that was trained from scratch on far more text. Below are the recovery curves that the authors stored with their code.

# %%
plots.recovery(results, anchors, published.curves(), published.anchors())

# %% [markdown]
# ## Two levers in one plane
#
# Left is a better start, down is a better end. Compensation should move an arm left *and* down; rescale right and down.

# %%
plots.levers(results, published.race())

# %% [markdown]
# ## What the compensation solves looked like
#
# Each read-out is re-fitted by one ridge regression (Eq. 3, ridge 1e-3 of the mean diagonal). The condition number says how hard the
# solve was, the effective rank over how many directions the inputs spread, the norm ratio how much larger the fitted rows
# are than the selected ones. Section 7.6 comes back to them.

# %%
plots.solves([result for result in results if result["arm"] == "hybrid"])

# %% [markdown]
# ## Section 7.3: three seeds for the two leaders
#
# A seed is another stretch of the text (and other fresh weights for `random`); the converted starts are the same. The table is
# the paper's Table 8. Three seeds are few: the sign test below cannot say less than p = 0.25 whatever the margin, and the paired
# t interval leans on three differences being a normal sample.

# %%
claims.seeded([*everything, *further]).style.hide(axis="index")

# %%
pairs = [("subclone_rs", "hybrid_rs"), ("subclone_rs_act", "hybrid_rs_act"), ("subclone_rs", "subclone_rs_act"),
         ("hybrid_rs", "hybrid_rs_act")]  # (first, second): differences are first minus second
claims.versus([*everything, *further], pairs, claims.seeds_in_paper(claims.TABLE_8)).style.hide(axis="index")

# %%
plots.paired_seeds([*everything, *further], pairs[:2], claims.seeds_in_paper(claims.TABLE_8))

# %% [markdown]
# ## Arms that the text leaves out
#
# Each is one change of a line in the arms table. `*_act` rank V/O dims and MLP units by the root mean square of what the read-out
# reads there, times its column norm, instead of by weight norms alone. `*_distill` train with the donor as teacher: T = 2, and half
# the loss is T² KL(teacher || student), the direction that the authors' code computes (their text writes the other one).
# `*_bias` put the mean of the dropped inputs into the read-outs' biases, as FLAP does; together with compensation that is the
# least-squares fit with an intercept, on centred moments, where Eq. 3 has uncentred ones and leaves the biases alone.
#
# These runs are not part of the default book: they were made once by `python -m scaleop.committed --experiment nano`, with this budget,
# and are shown as long as their settings are today's.

# %%
plots.levers([*results, *(result for result in further if result["seed"] == seed)])

# %%
claims.changes([*everything, *further], [(arm.rpartition("_")[0], arm) for arm in chosen.race.variants]).style.hide(axis="index")

# %%
claims.distilled([*everything, *further]).style.hide(axis="index")

# %% [markdown]
# ## The claims of sections 7.1 to 7.4
#
# Each row is a sentence of the paper (or a question of ours) as a predicate over the numbers above. *Holds on* counts
# the seeds on which it holds alone. One seed is one draw: where two arms are close, run more (below).

# %%
evidence = Standings([*everything, *further], anchors)
findings = evaluate([*claims.LADDER_CLAIMS, *claims.MECHANISM_CLAIMS, *claims.SEEDED_CLAIMS, *claims.VARIANT_CLAIMS,
                     *claims.ACCOUNTING_CLAIMS], evidence)
findings += evaluate(claims.CONSTRUCTION_CLAIMS, claims.construction_evidence(race.donor, race.target))
tabulate(findings).style.hide(axis="index")

# %% [markdown]
# ## Provenance

# %% tags=["hide-input"]
record("07_race", experiment=chosen.name, seeds=chosen.seeds, tokens=recipe.consumed, runs=everything, committed=further,
       anchors=anchors, findings=to_records(findings))
first = results[0]
display(claims.runs_behind([*everything, *further]).style.hide(axis="index").format(precision=1))
print(f"stream {first['stream']['sha256'][:16]}, tokens {first['stream']['offset']:,} to "
      f"{first['stream']['offset'] + first['stream']['tokens']:,} of the corpus, {first['stream']['epochs']} epochs")
print(", ".join(f"{name} {number}" for name, number in first["versions"].items()))
print(f"{first['hardware']['device']}, {first['hardware']['threads']} threads; this page took {time.monotonic() - began:.0f} s, "
      "finished runs reused")

# %% [markdown]
# ## Try it
#
# ```bash
# papermill notebooks/07_race.ipynb out.ipynb -p seed 2                        # another stretch of text
# papermill notebooks/07_race.ipynb out.ipynb -p tokens 200000                 # half the budget
# papermill notebooks/07_race.ipynb out.ipynb -p arms random,hybrid_rs         # two arms
# papermill notebooks/07_race.ipynb out.ipynb -p seeds 0,1,2,3,4               # more seeds for the leaders
# papermill notebooks/07_race.ipynb out.ipynb -p experiment toy                # a smoke test, under a minute
# ```
