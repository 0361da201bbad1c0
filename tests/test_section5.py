"""Section 5's claims, tables and figures on numbers whose verdicts are known; the study on a tiny pair."""

import io
import math

import numpy as np
import pytest

from scaleop import plots
from scaleop.claims import FAILS, HOLDS, NOT_RUN, evaluate, published, tabulate
from scaleop.claims.measured import Measured
from scaleop.claims.section5 import CLAIMS
from scaleop.claims.section5_tables import factors, race_of_fits, table4, table5, two_way
from scaleop.diagnosis import VARIANTS, shortened
from scaleop.experiment import load_experiment
from scaleop.projection import matrix_types
from scaleop.wiring import GPT_NEOX

AXES = ("residual", "qk", "vo", "mlp")
TYPES = matrix_types(GPT_NEOX)


def fit(error, seconds, steps):
    return {"error": error, "pooled": error, "seconds": seconds, "steps": steps, "rises": 0,
            "curve": [[seconds * i / 4, 1.3 - (1.3 - error) * i / 4] for i in range(5)]}


def papers():
    """The paper's own numbers as if they were ours, with mixed arms as its argument wants them."""
    def best(name):
        record = published(name)
        return record["value"] if record["more_digits"] is None else record["more_digits"]

    fits = {role: {"target_free": best(f"proj.err.{role}"), "start": 1.3, "free_share": 0.2, "als_shuffled": 0.9,
                   "one_block": 1e-6, "adam": fit(best(f"oper.err.{role}"), 10.0, 1500),
                   "als": fit(best(f"oper.err.{role}") - 1e-3, 1.0, 90)} for role in TYPES}
    ids = {"donor": "anchor.real_1.4b", "reference": "anchor.real_410m", "random": "anchor.random_410m",
           "own": "anchor.proj_ln_small", "projected": "anchor.proj_ln_project", "neutral": "anchor.proj_ln_neutral",
           "subclone": "v3.t5.structured_selection"}
    scores = {name: {"ppl": best(id), "sample": f"{name} says", "repeats": True, "salad": 5.0}
              for name, id in ids.items()}
    scores["selected"] = {**scores["own"], "ppl": 50_000.0}
    scores["neutral"]["salad"] = 1e5
    start = {"random": 66_000.0, "subclone": 100.0, "subclone_neutral": 300.0, "projection": 12_000.0}
    start |= {f"subclone_blend_{axis}": 900.0 if axis == "residual" else 200.0 for axis in AXES}
    start |= {f"projection_keep_{axis}": 9_000.0 for axis in AXES}
    return {"fits": fits, "scores": scores, "own": scores["own"], "identity": 0.0, "vocabulary": 50_304,
            "rank": {"up": 2048, "joint": 4096, "target": 4096}, "start": start,
            "mapped": {"subclone_blend_residual": 1e6, "projection": 1e13},
            "end": {name: value if name == "random" else value / 4 for name, value in start.items()}}


def verdicts(values):
    return {finding.claim.id: finding.verdict for finding in evaluate(CLAIMS, Measured(values))}


def test_the_papers_own_numbers_uphold_every_claim_of_the_paper():
    found = verdicts(papers())
    assert len(found) == len(CLAIMS)  # ids are unique
    claimed = {claim.id for claim in CLAIMS if claim.section == "5"}
    assert {id for id in claimed if found[id] != HOLDS} == set()
    assert {id for id, verdict in found.items() if verdict == NOT_RUN} == set()


@pytest.mark.parametrize(("spoil", "fallen"), [
    (lambda v: v.update(identity=1e-7), {"identity"}),
    (lambda v: v["fits"]["V"].update(target_free=0.9), {"misses-target"}),
    (lambda v: v["fits"]["K"].update(free_share=1.1), {"shared-not-degenerate"}),
    (lambda v: v["fits"]["K"].update(als_shuffled=0.5), {"more-than-chance"}),
    (lambda v: v["fits"]["O"]["als"].update(curve=[[0.0, 1.3], [2.1, 0.5]]), {"als-faster"}),
    (lambda v: v["fits"]["O"]["als"].update(rises=1), {"als-falls"}),
    (lambda v: v["fits"]["O"]["als"].update(pooled=0.85), {"als-no-worse"}),
    (lambda v: v["rank"].update(joint=3000), {"joint-basis"}),
    (lambda v: v["scores"]["neutral"].update(repeats=False), {"greedy-deterministic"}),
    (lambda v: v["start"].update(subclone_blend_qk=90.0), {"blend-qk-start"}),
    (lambda v: v["end"].update(projection_keep_mlp=1e6), {"keep-mlp-end"}),
    (lambda v: v["start"].update(subclone_blend_mlp=1e9), {"layernorm-largest", "stream-largest"}),
])
def test_each_claim_can_be_contradicted(spoil, fallen):
    values = papers()
    spoil(values)
    assert {id for id, verdict in verdicts(values).items() if verdict == FAILS} == fallen


def test_without_a_reference_what_needs_one_is_not_run():
    values = {**papers(), "fits": None, "own": None}
    del values["scores"]["own"]
    found = verdicts(values)
    assert found["worse-than-random"] == found["misses-target"] == found["als-faster"] == NOT_RUN
    assert found["neutral-beats-random"] == found["blend-qk-start"] == HOLDS
    assert tabulate(evaluate(CLAIMS, Measured(values)))["verdict"].notna().all()


def test_table_4_sets_the_papers_number_in_the_same_row():
    frame = table4(papers()["fits"]).set_index("type")
    assert list(frame.index) == list(TYPES)
    assert frame.loc["V", "target-free, paper"] == "1.390" and frame.loc["V", "operator, paper"] == "0.804"
    assert frame.loc["V", "target-free, ours"] == pytest.approx(1.39028)


def test_the_race_of_fits_says_when_als_had_passed():
    row = race_of_fits(papers()["fits"]).set_index("type").loc["Q"]
    assert row["of Adam's time"] == "10.0%" and row["ALS at Adam's end after, s"] == "1.00"
    never = papers()["fits"]
    never["Q"]["als"]["curve"] = [[0.0, 1.3], [1.0, 0.9]]
    assert race_of_fits(never).set_index("type").loc["Q", "ALS at Adam's end after, s"] == "never"


def test_table_5_has_the_papers_spelling_and_ours():
    frame = table5(papers()["scores"]).set_index("model")
    assert frame.loc["projected, norms projected", "paper"] == "10^13"
    assert frame.loc["projected, norms projected", "ours"] == "1e+13"
    assert frame.loc["projected, the sibling's norms (diagnostic)", "ours"] == "181,243"
    assert frame.loc["projected, norms selected", "paper"] == "-"


def runs(values):
    return [{"arm": arm, "zero_shot": values["start"][arm], "final": {"value": values["end"][arm]}}
            for arm in VARIANTS]


def test_the_two_way_table_and_its_factors():
    frame = two_way(runs(papers())).set_index("axis")
    assert list(frame.loc["qk"]) == ["200.0", "50.0", "9,000", "2,250"]
    assert list(frame.loc["norms neutral"]) == ["300.0", "75.0", "-", "-"]
    tidy = {(row["axis"], row["direction"], row["stage"]): row["factor"] for row in factors(runs(papers()))}
    assert tidy["residual", "blend", "start"] == 3.0 and tidy["norms", "blend", "end"] == 3.0
    assert tidy["vo", "keep", "start"] == 0.75 and len(tidy) == 18


def drawn(figure):
    figure.savefig(io.BytesIO(), format="svg")
    return figure


def test_the_convergence_figure_has_both_curves_for_every_type():
    fits = papers()["fits"]
    axes = drawn(plots.convergence(fits)).axes
    assert [axis.get_title(loc="left") for axis in axes] == list(TYPES)
    for axis, row in zip(axes, fits.values(), strict=True):
        found = {line.get_label(): line.get_xydata() for line in axis.lines}
        np.testing.assert_allclose(found["Adam"][1:], row["adam"]["curve"][1:])
        np.testing.assert_allclose(found["ALS"][1:], row["als"]["curve"][1:])
        assert found["ALS"][0][0] > 0  # the start has a place on a log axis


def test_the_blending_figure_has_a_point_for_every_factor():
    start, end = drawn(plots.blending(factors(runs(papers())))).axes
    points = {line.get_gid(): line.get_xdata()[0] for line in start.lines if line.get_gid()}
    assert points["blend residual"] == 3.0 and points["keep mlp"] == 0.75 and len(points) == 9
    assert [label.get_text() for label in end.get_yticklabels()] == ["norms", "residual", "Q/K", "V/O", "MLP"]


def test_a_shortened_experiment_keeps_the_schedules_shape():
    whole = load_experiment("toy")
    short = shortened(whole, whole.race.tokens // 2)
    assert short.race.tokens * 2 == whole.race.tokens and short.race.warmup_steps == whole.race.warmup_steps / 2
    assert short.race.peak_lr == whole.race.peak_lr and short.pair == whole.pair
    assert short.evaluation.limits["heldout"] == whole.evaluation.quick_tokens
    assert math.isclose(short.race.eval_every, short.race.tokens / 2)
