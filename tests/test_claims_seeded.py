"""Seeds: paired statistics against scipy and by hand, Tables 8 and 9, and the claims about them both ways."""

import math

import numpy as np
import pytest
from scipy import stats

from scaleop.claims import (
    CONDITIONING_CLAIMS,
    CONSTRUCTION_CLAIMS,
    EXTENDED_CLAIMS,
    FAILS,
    HOLDS,
    NOT_RUN,
    RACE_CLAIMS,
    SEEDED_CLAIMS,
    TABLE_8,
    VARIANT_CLAIMS,
    Claim,
    Experiments,
    Standings,
    depth,
    distilled,
    evaluate,
    in_paper,
    in_print,
    paired,
    seeded,
    seeds_in_paper,
    tabulate,
    versus,
)
from scaleop.claims.paired import relative_gap, seed_noise, spread
from scaleop.claims.section4 import CLAIMS as SECTION_4
from scaleop.claims.section5 import CLAIMS as SECTION_5
from scaleop.claims.section6 import CLAIMS as SECTION_6
from tests.races import ANCHORS, NOT_SO, experiments, flipped, results, run, verdicts


def pair(first: list[float], second: list[float]) -> list[dict]:
    return [run(arm, seed, end=end) for arm, ends in (("a", first), ("b", second)) for seed, end in enumerate(ends)]


def test_paired_statistics_by_hand():
    """Differences 2, 4, 6: mean 4, sd 2, and t(0.975, 2) = 4.3027 gives 4 ± 4.3027 x 2 / sqrt 3."""
    found = paired(pair([12, 14, 16], [10, 10, 10]), "a", "b")
    assert (found.wins, found.mean, found.p, found.overlap, found.seeds) == (3, 4.0, 0.25, False, (0, 1, 2))
    assert (found.low, found.high) == pytest.approx((4 - 4.968275, 4 + 4.968275), abs=1e-5)


def test_paired_statistics_are_scipys():
    drawn = np.random.default_rng(0)
    a, b = drawn.normal(90, 3, 7), drawn.normal(88, 3, 7)
    found = paired(pair(list(a), list(b)), "a", "b")
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.wins == (b < a).sum() and found.p == pytest.approx(stats.binomtest(int((b < a).sum()), 7).pvalue)


@pytest.mark.parametrize(("first", "second", "wins", "p", "overlap"), [
    ([10, 20, 30], [11, 19, 29], 2, 1.0, True),  # two of three: 8 of 8 outcomes are as extreme
    ([10, 20], [10, 19], 1, 1.0, True),  # a tie is no trial
    ([10, 20], [10, 20], 0, 1.0, True),
    ([10, 20, 30, 40], [9, 19, 29, 39], 4, 0.125, True),
    ([9.0, 8.0], [9.0, 10.0], 0, 1.0, True),  # ranges that touch meet
    ([1.0, 2.0], [3.0, 4.0], 0, 0.5, False),
])
def test_wins_sign_test_and_ranges(first, second, wins, p, overlap):
    found = paired(pair(first, second), "a", "b")
    assert (found.wins, found.p, found.overlap) == (wins, p, overlap)


def test_equal_differences_have_a_point_for_an_interval():
    found = paired(pair([12, 22], [10, 20]), "a", "b")
    assert (found.low, found.high) == (2.0, 2.0)


def test_one_seed_and_diverged_runs_have_no_interval():
    one = paired(pair([12], [10]), "a", "b")
    assert one.mean == 2 and math.isnan(one.low) and one.p == 1
    broken = paired(pair([12, math.nan], [10, 10]), "a", "b")
    assert broken.wins == 2 and math.isnan(broken.low) and broken.mean == math.inf
    assert math.isnan(paired(pair([math.nan], [math.nan]), "a", "b").mean)


def test_pairs_are_made_on_shared_seeds_only():
    found = paired([run("a", 0, end=5), run("a", 2, end=9), run("b", 2, end=8), run("b", 1, end=1)], "a", "b")
    assert found.seeds == (2,) and found.mean == 1
    with pytest.raises(ValueError, match="no finished seed in common"):
        paired([run("a", 0), run("b", 1)], "a", "b")


def test_the_papers_margin_is_57_with_an_interval_that_just_excludes_zero():
    found = paired(seeds_in_paper(TABLE_8), "subclone_rs", "hybrid_rs")
    assert found.mean == pytest.approx((86.37 - 83.02 + 93.71 - 86.03 + 88.94 - 82.82) / 3)
    assert 0.2 < found.low < 0.3 and not found.overlap and found.wins == 3


def test_versus_sets_ours_beside_the_papers():
    frame = versus(results()[""], [("subclone_rs", "hybrid_rs"), ("random", "elsewhere")], seeds_in_paper(TABLE_8))
    assert list(frame.columns[:3]) == ["", "second lower, paper", "second lower, ours"]
    row = frame.iloc[0]
    assert row["difference [95 %], paper"] == "5.7 [0.3, 11.2]" and row["sign test p, paper"] == "0.25"
    # ours: 20, 20.4, 19.6, sd 0.4: half width 4.3027 x 0.4 / sqrt 3 = 0.99
    assert row["difference [95 %], ours"] == "20.0 [19.0, 21.0]" and row["ranges, ours"] == "apart"
    assert set(frame.iloc[1].iloc[1:]) == {"-"}
    assert versus([], []).empty


def test_table_8_has_each_seed_and_the_spread():
    frame = seeded([*results()[""], run("other")]).set_index("arm")
    assert list(frame.index) == list(TABLE_8)
    row = frame.loc["hybrid_rs"]
    assert [row[f"seed {seed}, paper"] for seed in range(3)] == ["83.0", "86.0", "82.8"]
    assert [row[f"seed {seed}, ours"] for seed in range(3)] == ["60.0", "61.2", "58.8"]
    assert (row["mean ± sd, paper"], row["mean ± sd, ours"], row["seeds, ours"]) == ("84.0 ± 1.8", "60.0 ± 1.2", "3")
    assert frame.loc["hybrid_rs_act", "mean ± sd, paper"] == "80.2 ± 2.3"


def test_tables_show_the_papers_numbers_where_nothing_was_run():
    frame = depth([run("hybrid", 1, end=50.0)]).set_index("arm")
    assert frame.loc["hybrid", "seed 1, ours"] == "50.0" and frame.loc["hybrid", "seed 0, ours"] == "-"
    assert frame.loc["hybrid", "mean ± sd, ours"] == "50.0" and frame.loc["random", "seeds, ours"] == "-"
    assert frame.loc["random", "mean ± sd, paper"] == "1,505.2 ± 57.9"
    assert frame.loc["hybrid_rs", "seed 0, paper"] == "-" and frame.loc["hybrid_rs", "mean ± sd, paper"] == "109.3"
    taught = distilled([]).set_index("arm")
    assert taught.loc["hybrid_rs_distill", "mean ± sd, paper"] == "80.8 ± 2.1"
    assert taught.loc["random", "seed 0, paper"] == "1,359.4" and taught.loc["random", "mean ± sd, paper"] == "-"


def test_spreads_are_sample_standard_deviations():
    race = Standings(pair([10, 12, 14], [100, 104, math.nan]))
    assert spread(race, "a") == 2.0 and math.isnan(spread(race, "b"))
    assert seed_noise(race.only(["a"]), "a") == pytest.approx(2 / 12)
    assert seed_noise(race.only(["a"], [0]), "a") is None
    assert relative_gap(Standings(pair([11], [9])), "a", "b") == pytest.approx(0.2)


def test_several_races_are_one_body_of_evidence():
    both = Experiments({"": Standings([run("a", 0), run("a", 1), run("b", 1)], ANCHORS),
                        "far": Standings([run("a", 1, end=7.0), run("a", 2), run("c", 1)],
                                         {"donor": ANCHORS["donor"]})})
    assert both.value("end", "a") == 100 and both.values("end", "far.a") == [7.0, 100.0]
    assert set(both.anchors) == {"donor", "reference", "vocabulary", "far.donor"}
    part = both.only(["a", "far.a", "far.donor", "reference"])
    assert part.seeds == [1] and part.seeds_of("a") == [0, 1]  # each race keeps its own, shared ones are counted
    assert part.only(["far.a"], [2]).values("end", "far.a") == [100.0]
    assert both.curve("far.a")[4000] == pytest.approx(53.5)
    for lacking in (["far.b"], ["nowhere.a"], ["a", "far.reference"], ["b", "far.c", "a", "far.d"]):
        assert both.only(lacking) is None
    assert both.only(["a", "far.a"], [0]) is None  # seed 0 isn't among the other race's
    assert both.only(["b"]).races.keys() == {""}


def test_everything_holds_in_the_imagined_world_and_ids_are_unique():
    assert {claim for claim, verdict in verdicts(experiments(results())).items() if verdict != HOLDS} == NOT_SO
    book = [*SECTION_4, *SECTION_5, *SECTION_6, *RACE_CLAIMS, *CONSTRUCTION_CLAIMS, *EXTENDED_CLAIMS,
            *CONDITIONING_CLAIMS]
    assert len(book) == len({claim.id for claim in book})


def test_the_paper_satisfies_its_own_claims():
    found = {finding.claim.id: finding for finding in evaluate(RACE_CLAIMS, in_paper())}
    assert {name for name, finding in found.items() if finding.verdict == FAILS} == NOT_SO
    assert found["levers-independent"].ours == "3.12x without, 1.04x with"
    held = {name for name, finding in found.items() if finding.verdict == HOLDS}
    assert {"seeds-paired-wins", "seeds-apart", "seeds-interval", "act-under-half", "convergence-parity", "depth-tie",
            "depth-tie-longer", "scale-order", "margin-narrows-at-scale"} <= held
    share = found["act-under-half"]
    assert share.ours == "0.40; by seed -0.16, 0.51, 0.57" and share.holds_on == (0,)
    for claim in RACE_CLAIMS:
        in_print(claim.paper)  # every id in a template exists


FLIPS = [
    ({"hybrid_rs": (None, [60, 82, 58.8])}, {"seeds-paired-wins", "seeds-apart", "seeds-interval", "stack-on-both-axes",
                                             "stack-on-both-pairs", "act-not-the-information"}),
    ({"hybrid_rs": (None, [60, 79, 58.8])}, {"seeds-apart", "seeds-interval", "act-not-the-information"}),
    ({"hybrid_rs": (3001, None)}, {"stack-on-both-axes", "levers-stack", "act-start-hybrid_rs"}),
    ({"depth.hybrid_rs": (None, [109, 119, 109])}, {"stack-on-both-pairs", "depth-stack"}),
    ({"subclone_rs_act": (2900, 80.5)}, {"act-start-subclone_rs", "act-end-subclone_rs"}),
    ({"hybrid_rs_act": (1650, 62)}, {"act-start-hybrid_rs", "act-end-hybrid_rs", "act-compensation-grows"}),
    ({"hybrid_rs_act": (None, 76)}, {"act-compensation", "act-compensation-grows", "act-end-hybrid_rs"}),
    ({"subclone_rs_act": (None, 69)}, {"act-under-half", "act-compensation-grows"}),
    ({"subclone_rs_act": (None, 71)}, set()),  # 9 of 20 are still under half, and 21 more than 20
    ({"hybrid_rs_distill": (None, 61)}, {"distill-hybrid_rs"}),
    ({"subclone_rs_distill": (None, 79)}, {"distill-subclone_rs"}),
    ({"random_distill": (None, 901)}, {"distill-random"}),
    ({"subclone_rs_distill": (None, 81), "hybrid_rs_distill": (None, 82)}, {"distill-stack", "distill-hybrid_rs"}),
    ({"subclone_bias": (1201, 201)}, {"bias-start-subclone", "bias-end-subclone"}),
    ({"hybrid_bias": (1001, 101)}, {"bias-start-hybrid", "bias-end-hybrid"}),
    ({"hybrid_rs_bias": (1701, 61)}, {"bias-start-hybrid_rs", "bias-end-hybrid_rs"}),
    ({"subclone_bias": (999, None)}, {"bias-is-not-enough"}),
    ({"subclone_bias": (None, 99)}, {"bias-is-not-enough"}),
]


@pytest.mark.parametrize(("changes", "expected"), FLIPS)
def test_a_changed_number_changes_exactly_the_verdicts_about_it(changes, expected):
    assert flipped(changes) == expected


def test_every_claim_about_seeds_and_variants_can_fail():
    can = set.union(*(expected for _, expected in FLIPS))
    assert {claim.id for claim in (*SEEDED_CLAIMS, *VARIANT_CLAIMS)} - can == {"seeds-mean"}
    assert "seeds-mean" in flipped({"hybrid_rs": (None, 81)})


def test_claims_about_seeds_are_not_run_on_too_few():
    two = [one for one in results()[""] if one["seed"] < 2]
    found = verdicts(Standings(two, ANCHORS))
    assert found["seeds-paired-wins"] == found["stack-on-both-axes"] == NOT_RUN
    assert found["seeds-mean"] == found["seeds-apart"] == HOLDS
    one = verdicts(Standings([one for one in two if one["seed"] == 0], ANCHORS))
    assert {one[claim.id] for claim in SEEDED_CLAIMS} == {NOT_RUN}
    assert one["act-compensation"] == HOLDS and one["depth-tie"] == NOT_RUN


def test_without_a_gap_there_is_no_share_of_it():
    found = verdicts(experiments(results({"hybrid_rs": (None, 80)})))
    assert found["act-under-half"] == NOT_RUN


def test_a_spread_is_not_said_to_hold_on_single_seeds():
    shown = tabulate(evaluate(SEEDED_CLAIMS, experiments(results()))).set_index("claim")
    by_id = {claim.id: shown.loc[claim.statement] for claim in SEEDED_CLAIMS}
    assert by_id["seeds-apart"]["holds on"] == "-" and by_id["seeds-apart"]["seeds"] == 3
    assert by_id["seeds-paired-wins"]["holds on"] == "3/3"
    assert by_id["seeds-paired-wins"]["ours"] == "hybrid_rs 60.0 < 80.0 subclone_rs on 3/3"
    (apart,) = (claim for claim in SEEDED_CLAIMS if claim.id == "seeds-apart")
    record = evaluate([apart], experiments(results()))[0].record()
    assert record["holds_on"] is None and record["seeds"] == [0, 1, 2]


def test_how_many_seeds_a_claim_takes_is_its_own():
    claim = Claim("x", "-", "x", ("a",), lambda race: True, lambda race: "", seeds=2)
    assert evaluate([claim], Standings([run("a", 0)]))[0].verdict == NOT_RUN
    assert evaluate([claim], Standings([run("a", 0), run("a", 1)]))[0].verdict == HOLDS
