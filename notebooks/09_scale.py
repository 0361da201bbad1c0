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
# # 9 · Scale, and the ridge that was suspected
#
# **Asked.** Does the stack of both levers still win where all three axes shrink at once and the donor is large? And if it does not,
# why not?
#
# **The paper's answer** ({cite}`yenugula2026wiring`, section 7.6). From 6.9B to 1.4B the stack *inverts*: rescale alone ends best,
# compensation alone next, both together worst of the three, though all beat training from scratch. The paper suspects the compensation
# solve: at 8,192 inputs the moment matrix is ill conditioned, and a ridge of 1e-3 times its mean diagonal would regularise it too little.
# A ridge that knows the spectrum, or a bound on the norm of the fitted rows, is named as the remedy and left to future work.
#
# **Here.** The same three-axis cut at nano size; the suspicion made a measurement, at the true widths; the proposed remedies as
# further arms; and two rival suspects that a race alone cannot tell apart.

# %% tags=["parameters", "hide-input"]
experiment: str = "nano"  # a file of params/; its companions say which pair shrinks on all axes
seed: int = 0  # which stretch of the text the main race trained on
tokens: int = None  # training tokens per arm of the main race; the companions keep their proportion. None: the experiment's
width: int = 8192  # the widest solve of the conditioning study (512, 1024, ... up to this)

# %% tags=["hide-input"]
given = dict(globals())  # before any import: nothing but parameters may be here
from scaleop.experiment import from_notebook

chosen, seed = from_notebook(given)

# %% tags=["hide-input"]
import time

import pandas as pd
from IPython.display import display

from scaleop import claims, conditioning, plots
from scaleop.arms import ARMS, build
from scaleop.claims import Experiments, Standings, conditioning_evidence, evaluate, tabulate, to_records
from scaleop.committed import kept
from scaleop.donor_moments import measured
from scaleop.experiment import companion, planned
from scaleop.race import Race
from scaleop.store import record
from scaleop.suspects import variance_ratios
from scaleop.wiring import shape_of

plots.notebook()
pd.set_option("display.max_colwidth", None)
began = time.monotonic()

# %% [markdown]
# ## The scale pair

# %%
race = Race(companion(chosen, "scale", required=True))
results = race.runs(planned(race.experiment))
print(f"{race.experiment.title}: {race.recipe.steps} steps of {race.recipe.batch} x {race.recipe.length} = "
      f"{race.recipe.consumed:,} tokens an arm, peak rate {race.recipe.peak_lr:g}")
claims.scale(results).style.hide(axis="index")

# %%
plots.recovery([result for result in results if result["arm"] in ARMS])

# %% [markdown]
# ## Is a wide solve a bad solve?
#
# First, what a donor's moments look like. *Exponent* is that of the power law by which the eigenvalues of Sigma[K, K] fall with their
# rank, *largest* the share of the first of them. *Effective* is how many independent Gaussian positions would overfit as much as the
# given ones (two stretches of them) do: neighbouring positions of a text resemble one another, so 128,000 of them count for fewer. The last
# two columns are the norm ratio of the paper's solve for the donor's own read-out, and for random weights on the same inputs.

# %%
donor, maps = race.donor, race.donor.maps("scored", shape_of(race.target))
spectra = measured(donor, maps)
pd.DataFrame(spectra).style.hide(axis="index").format(precision=3, thousands=",")

# %% [markdown]
# The solve is then run at the paper's widths and with its 128,000 positions, on inputs drawn with *known* moments, so every held-out
# error is exact and so is the least error that any fit could have. Spectra fall with exponents from the range above, once about their
# mean and once uncentred, as Eq. 3 has them, with a mean that holds most of the power (harsher than nano-l's). *Excess* is the
# held-out error over the least possible, less 1; *noise* what overfitting alone costs a fit without any ridge, k / (N - k - 1). The narrowest
# and the widest:

# %%
study = conditioning.study(widths=[each for each in conditioning.WIDTHS if each <= width],
                           sweep=[each for each in conditioning.SWEEP if each[0] <= width])
conditioning.verdict(study).style.hide(axis="index").format(precision=4, thousands=",")

# %%
plots.by_width(study, conditioning.EXPONENTS[-1])

# %%
plots.by_width(study, conditioning.EXPONENTS[-1], mean_share=max(row["mean_share"] for row in study))

# %% [markdown]
# Does the width itself count, or its share in the number of positions (for the paper at most 8,192 of 128,000)?

# %%
plots.by_share(study)

# %% [markdown]
# ## The remedies, on the pair itself
#
# *spectrum* sets lambda to the mean of the eigenvalues beyond the effective rank, which is what probabilistic PCA
# {cite}`tipping1999ppca` would call noise; *holdout* chooses among thirty multiples of the mean diagonal by the error on held-out
# moments; *clamp* keeps the paper's lambda and shortens every fitted row that is longer than the donor's. Same selection, same rescale,
# same training.

# %%
cures = [arm for arm in race.experiment.race.arms if arm.startswith("hybrid_rs_")]
claims.changes(results, [("hybrid_rs", arm) for arm in cures]).style.hide(axis="index")

# %%
plots.solves([result for result in results if result["arm"] in ("hybrid_rs", *cures)])

# %% [markdown]
# ## Two rival suspects
#
# *Double counting*: compensation already restores the variance that a read-out writes, and rescaled read-ins add to it. Measured is the
# variance that each read-out writes before training, over the donor's in the kept features; 1 means the stream grows as the donor's does.
# *Foreign inputs*: Eq. 3 is fitted to the donor's own activations, which the small model never sees. The arm `hybrid_rs_own` is
# fitted block by block to what the small model feeds each read-out, after the rescale.

# %%
sequences = donor.frozen[: donor.moment_sequences]
variances = {arm: variance_ratios(build(ARMS[arm], donor, race.target, 0)[0], donor.model, maps, sequences)
             for arm in ("subclone", "hybrid", "subclone_rs", "hybrid_rs")}
plots.variances(variances)

# %% [markdown]
# ## The claims of sections 7.6 and 9

# %%
roles = ("depth", "convergence", "scale_control")
companions = {role: Race(found) for role in roles if (found := companion(chosen, role)) is not None}
main = Race(chosen)
evidence = {"": main.runs(planned(chosen, seed)), "scale": results}
evidence |= {role: other.runs(planned(other.experiment)) if role == "depth" else kept(other) for role, other in companions.items()}
several = Experiments({role: Standings(found) for role, found in evidence.items() if found})
harsh = [row for row in study if row["exponent"] == conditioning.EXPONENTS[-1] and row["mean_share"] > 0
         and row["positions"] == conditioning.POSITIONS]  # uncentred, as Eq. 3; the kind that is hardest on the paper's ridge
findings = [*evaluate(claims.SCALE_CLAIMS, several),
            *evaluate(claims.CONDITIONING_CLAIMS, conditioning_evidence(harsh, variances))]
tabulate(findings).style.hide(axis="index")

# %% [markdown]
# ## Provenance

# %% tags=["hide-input"]
record("09_scale", experiment=race.experiment.name, seeds=race.experiment.seeds, runs=results, spectra=spectra,
       study=study, variances=variances, findings=to_records(findings))
display(claims.runs_behind(results).style.hide(axis="index").format(precision=1))
print(f"this page took {time.monotonic() - began:.0f} s, finished runs reused")

# %% [markdown]
# ## Try it
#
# ```bash
# papermill notebooks/09_scale.ipynb out.ipynb -p experiment toy -p width 512    # a smoke test
# papermill notebooks/09_scale.ipynb out.ipynb -p tokens 200000                  # half the budget
# python -m scaleop.race --experiment nano_scale --arm hybrid_holdout             # one arm more
# ```
