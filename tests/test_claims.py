"""Claims: the paper's own numbers satisfy them, a changed number changes exactly the verdicts about it."""

import json
import math
from copy import deepcopy

import pytest

from scaleop import published as paper
from scaleop.claims import (
    FAILS,
    HOLDS,
    LADDER_CLAIMS,
    NOT_RUN,
    PAPER_ARMS,
    Claim,
    Standings,
    evaluate,
    in_print,
    ladder,
    published,
    readable,
    show,
    table,
    to_records,
)

# (start, end) of an imagined race in which everything the paper says is so; the size of its gain too.
NUMBERS = {
    "random": (4200.0, 900.0), "random_pythia": (4150.0, 800.0), "projection": (1900.0, 500.0),
    "stride": (1800.0, 300.0), "subclone": (1200.0, 200.0), "subclone_iso": (1500.0, 150.0), "hybrid": (1000.0, 100.0),
    "subclone_rs": (3000.0, 80.0), "hybrid_rs": (1700.0, 60.0)}
ANCHORS = {"donor": {"name": "big", "ppl": 20.0, "quick_ppl": 21.0}, "vocabulary": 4096,
           "reference": {"name": "sibling", "ppl": 25.0, "quick_ppl": 26.0}}


def run(arm: str, seed: int = 0, start: float | None = None, end: float | None = None) -> dict:
    """A result whose curve falls geometrically from start to end in four evaluations."""
    start, end = start or NUMBERS[arm][0], end or NUMBERS[arm][1]
    curve = [{"step": 20 * i, "tokens": 1000 * i, "ppl": start * (end / start) ** (i / 4)} for i in range(5)]
    return {"experiment": "toy", "arm": arm, "seed": seed, "curve": curve, "zero_shot": start, "final": {"value": end}}


def race(**changes: tuple[float | None, float | None]) -> list[dict]:
    """The imagined race with some arms' (start, end) changed; None leaves a number."""
    return [run(arm, 0, *changes.get(arm, (None, None))) for arm in NUMBERS]


def verdicts(results: list[dict], anchors: dict | None = ANCHORS) -> dict[str, str]:
    """Verdict by claim id."""
    return {finding.claim.id: finding.verdict for finding in evaluate(LADDER_CLAIMS, Standings(results, anchors))}


def flipped(results: list[dict]) -> set[str]:
    """The claims that hold in the imagined race and don't in `results`."""
    return {claim for claim, verdict in verdicts(results).items() if verdict == FAILS}


def test_published_numbers_are_the_printed_ones():
    assert published("ladder.hybrid_rs.final")["value"] == 83.0
    assert published("ladder.random.zero_shot")["printed"] == "~66,000"
    assert published("seeds.hybrid_rs.std")["value"] == 1.8
    assert published("anchor.real_410m")["more_digits"] == 15.5695
    assert published("scale.subclone_rs.final")["section"] == "7.6"
    assert in_print("[ladder.random.final] / [ladder.hybrid_rs.final] = [ladder.ratio.hybrid_rs_vs_random]") \
        == "1,519.0 / 83.0 = 18x"


def test_an_unknown_number_is_refused_with_the_nearest_ids():
    with pytest.raises(KeyError, match=r"ladder\.hybrids\.final.*ladder\.hybrid\.final"):
        published("ladder.hybrids.final")
    with pytest.raises(KeyError, match="zebra"):
        published("zebra")


def test_published_printed_and_value_agree():
    for arm in PAPER_ARMS:
        for axis in ("zero_shot", "final"):
            record = published(f"ladder.{arm}.{axis}")
            assert float(record["printed"].strip("~").replace(",", "")) == record["value"]
            assert record["more_digits"] == pytest.approx(record["value"], rel=0.005)


def test_stored_curves_are_whole():
    curves = {curve["run"]: curve for curve in paper.curves()}
    assert len(curves) == 15
    assert curves["1b_hybrid_rs_s0"]["points"][-1] == [1000013824, 37.048]
    assert curves["30m_random_b16_s0"]["batch_size"] == 16
    for curve in curves.values():
        tokens = [point[0] for point in curve["points"]]
        assert tokens[0] == 0 and tokens == sorted(set(tokens))


def test_published_records_cannot_be_changed_by_a_reader():
    published("ladder.hybrid_rs.final")["value"] = 1.0
    assert published("ladder.hybrid_rs.final")["value"] == 83.0


def test_the_paper_satisfies_its_own_claims():
    found = evaluate(LADDER_CLAIMS, Standings(paper.race(), paper.anchors()))
    without_data = {"selection-ahead-at-once", "selection-gap-widens", "fewer-tokens"}  # Table 2 has no curves
    for finding in found:
        if finding.claim.section != "ours":
            assert finding.verdict == (NOT_RUN if finding.claim.id in without_data else HOLDS), finding.claim.id


def test_everything_holds_in_the_imagined_race():
    assert set(verdicts(race()).values()) == {HOLDS}
    assert len(LADDER_CLAIMS) == len({claim.id for claim in LADDER_CLAIMS}) >= 20


@pytest.mark.parametrize(("changes", "claims"), [
    ({"hybrid_rs": (None, 85.0)}, {"endpoint-monotone", "best-end", "levers-stack"}),
    ({"hybrid": (1300.0, None)}, {"best-start", "compensation-start"}),
    ({"subclone_iso": (1100.0, None)}, {"iso-start", "more-rescale-worse-start"}),
    ({"subclone_iso": (None, 210.0)}, {"endpoint-monotone", "iso-end", "more-rescale-better-end"}),
    ({"subclone_rs": (None, 115.0)}, {"endpoint-monotone", "rescale-passes-compensation"}),
    ({"subclone_rs": (1100.0, None)}, {"rescale-collapses-start", "more-rescale-worse-start", "levers-stack"}),
    ({"hybrid_rs": (900.0, None)}, {"best-start", "rescale-on-compensation"}),
    ({"hybrid_rs": (3500.0, None)}, {"levers-stack"}),
    ({"projection": (None, 910.0)}, {"endpoint-monotone", "transfer-beats-scratch", "projection-beats-scratch",
                                    "transfer-beats-better-scratch"}),
    ({"projection": (None, 850.0)}, {"transfer-beats-better-scratch"}),
    ({"random_pythia": (None, 905.0)}, {"scratch-handicapped"}),
    ({"random": (9000.0, None)}, {"scratch-guesses"}),
    ({"stride": (None, 199.0)}, {"scores-matter"}),
    ({"hybrid_rs": (None, 24.0)}, {"short-of-reference", "gain-carries-over"}),
    ({"random": (None, 5000.0)}, {"gain-carries-over"}),
])
def test_a_changed_number_flips_exactly_the_claims_about_it(changes, claims):
    assert flipped(race(**changes)) == claims


def test_ties_prove_nothing():
    assert flipped(race(hybrid_rs=(None, 80.0))) == {"endpoint-monotone", "best-end", "levers-stack"}


def test_the_curve_decides_about_the_gap():
    results = race()
    projection = next(result for result in results if result["arm"] == "projection")["curve"]
    projection[2]["ppl"] *= 0.85  # a dent: still above subclone, but nearer than an evaluation before
    assert flipped(results) == {"selection-gap-widens"}
    projection[1]["ppl"] = 1.0
    assert flipped(results) == {"selection-gap-widens", "selection-ahead-at-once"}


def test_compensation_that_only_draws_level_at_the_end_saves_no_tokens():
    results = race()
    hybrid = next(result for result in results if result["arm"] == "hybrid")["curve"]
    for point in hybrid[1:4]:
        point["ppl"] = 900.0
    assert flipped(results) == {"fewer-tokens"}
    hybrid[4]["ppl"] = 900.0
    row = table(results, ANCHORS).query("section == 'abstract'").iloc[0]
    assert row["verdict"] == FAILS and row["ours"] == "down to subclone's last 200.0 never"


def test_missing_arms_anchors_and_curves_are_not_run():
    some = [run(arm) for arm in ("random", "subclone", "hybrid")]
    found = verdicts(some, {})
    assert {claim for claim, verdict in found.items() if verdict != NOT_RUN} == {
        "selection-beats-scratch", "compensation-start", "compensation-end", "fewer-tokens"}
    assert found["scratch-guesses"] == NOT_RUN
    assert set(verdicts([], None).values()) == {NOT_RUN}
    for result in some:
        result["curve"] = result["curve"][:1]
    assert verdicts(some, {})["fewer-tokens"] == NOT_RUN
    assert verdicts(some, {"reference": None})["short-of-reference"] == NOT_RUN


def test_an_unfinished_run_is_no_run():
    results = race()
    del next(result for result in results if result["arm"] == "stride")["final"]
    assert verdicts(results)["scores-matter"] == NOT_RUN
    assert "stride" not in Standings(results).arms


def test_arms_are_compared_on_the_seeds_they_share():
    results = [run("random", 0, end=900.0), run("subclone", 0, end=1000.0), run("subclone", 1, end=1.5)]
    row = next(f for f in evaluate(LADDER_CLAIMS, Standings(results)) if f.claim.id == "selection-beats-scratch")
    assert row.verdict == FAILS and row.seeds == (0,)  # seed 1 would have turned the mean
    results.append(run("random", 1, end=900.0))
    row = next(f for f in evaluate(LADDER_CLAIMS, Standings(results)) if f.claim.id == "selection-beats-scratch")
    assert row.verdict == HOLDS and row.seeds == (0, 1) and row.holds_on == (1,)
    assert row.ours.startswith("900.0 → 500.8")
    disjoint = [run("random", 0), run("subclone", 1)]
    assert verdicts(disjoint)["selection-beats-scratch"] == NOT_RUN


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_diverged_run_is_worse_than_any_number(bad):
    results = race()
    broken = next(result for result in results if result["arm"] == "hybrid_rs")
    broken["final"] = {"value": bad}
    assert flipped(results) == {"endpoint-monotone", "best-end", "levers-stack", "whole-ladder", "gain-carries-over",
                                "transfer-beats-scratch", "transfer-beats-better-scratch", "rescale-on-compensation"}
    json.dumps(to_records(evaluate(LADDER_CLAIMS, Standings(results, ANCHORS))), allow_nan=False)
    assert "∞" in readable(ladder(results)).query("arm == 'hybrid_rs'")["final, ours"].item()


def test_all_diverged_holds_nothing_about_order():
    results = [{**run(arm), "zero_shot": math.nan, "final": {"value": math.nan}} for arm in NUMBERS]
    held = {claim for claim, verdict in verdicts(results).items() if verdict == HOLDS}
    assert held == {"selection-ahead-at-once", "selection-gap-widens", "fewer-tokens",  # their curves are still there
                    "short-of-reference"}


@pytest.mark.parametrize(("results", "message"), [
    ([run("random"), run("random")], "two results for seed 0"),
    ([run("random"), {**run("subclone"), "experiment": "other"}], "cannot mix experiments"),
    ([run("random"), {**run("subclone"), "curve": [{"tokens": 7, "ppl": 1.0}]}], "cannot mix budgets"),
])
def test_what_is_no_matched_race_is_refused(results, message):
    with pytest.raises(ValueError, match=message):
        Standings(results)


def test_the_table_shows_both_numbers_and_the_verdict():
    shown = table(race(), ANCHORS)
    assert list(shown.columns) == ["claim", "section", "paper", "ours", "seeds", "holds on", "verdict"]
    assert len(shown) == len(LADDER_CLAIMS) and set(shown["verdict"]) <= {HOLDS, FAILS, NOT_RUN}
    stack = shown[shown["claim"].str.startswith("The levers stack")].iloc[0]
    assert stack["paper"] == "start 61,912 → 18,459; end 86.4 → 83.0"
    assert stack["ours"] == "start 3,000 → 1,700.0 (1.76x); end 80.0 → 60.0 (1.33x)"
    assert (stack["seeds"], stack["holds on"]) == (1, "1/1")


def test_records_are_plain_and_complete():
    records = to_records(evaluate(LADDER_CLAIMS, Standings(race(), ANCHORS)))
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    assert records[0] | {"id": "endpoint-monotone", "section": "7.1", "seeds": [0], "holds_on": [0],
                         "verdict": "holds"} == records[0]


def test_another_sections_claims_use_the_same_evaluator():
    class Alignment:
        seeds = (0,)
        cka = 0.9

        def only(self, needs, seeds=None):
            return self if needs == ("cka",) else None

    claims = [Claim("aligned", "4", "CKA is above a half", ("cka",), lambda e: e.cka > 0.5, lambda e: f"{e.cka}",
                    paper="[align.act.cka_diag_mean]"),
              Claim("elsewhere", "4", "Not there", ("maps",), lambda e: True, lambda e: "")]
    found = evaluate(claims, Alignment())
    assert [finding.verdict for finding in found] == [HOLDS, NOT_RUN]
    assert found[0].record()["paper"] == "0.883"


def test_the_ladder_has_the_papers_rows_and_ours():
    results = [*race(), run("hybrid_rs", 1, end=64.0), run("new_arm", 0, 10.0, 5.0)]
    frame = ladder(results, ANCHORS).set_index("arm")
    assert list(frame.index) == [*NUMBERS, "new_arm", "donor: big / Pythia-1.4B", "reference: sibling / Pythia-410M"]
    assert [arm for arm in frame.index[:9] if frame.in_paper[arm]] == list(PAPER_ARMS)
    best = frame.loc["hybrid_rs"]
    assert (best.final, best.seeds, best.paper_final, best.paper_zero_shot) == (62.0, 2, 83.0, 18459)
    assert best.final_sd == pytest.approx(math.sqrt(8))  # sample standard deviation of 60 and 64
    assert math.isnan(frame.final_sd["random"]) and math.isnan(frame.paper_final["stride"])
    assert frame.final["donor: big / Pythia-1.4B"] == 20.0
    assert frame.zero_shot["reference: sibling / Pythia-410M"] == 26.0
    shown = readable(ladder(results, ANCHORS)).set_index("arm")
    assert shown.loc["random", "zero-shot, paper"] == "~66,000"
    assert shown.loc["hybrid_rs", "final, ours"] == "62.0 ± 2.8"
    assert shown.loc["stride (not in the paper)", "final, paper"] == "-"
    assert shown.loc["reference: sibling / Pythia-410M", "final, paper"] == "15.6"


def test_the_ladder_of_nothing_still_shows_the_papers():
    frame = ladder([], None)
    assert list(frame["arm"][:7]) == list(PAPER_ARMS) and frame["final"].isna().all() and (frame["seeds"] == 0).all()


def test_results_are_left_as_they_were():
    results = race()
    before = deepcopy(results)
    table(results, ANCHORS)
    ladder(results, ANCHORS)
    assert results == before


@pytest.mark.parametrize(("value", "text"), [(83.04, "83.0"), (1519.03, "1,519.0"), (61911.7, "61,912"),
                                             (math.inf, "∞"), (math.nan, "-")])
def test_numbers_are_spelled_as_in_table_2(value, text):
    assert show(value) == text
