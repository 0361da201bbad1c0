"""Tables of any race, against numbers worked out by hand."""

from scaleop.claims.tables import changes, runs_behind


def result(arm, seed, start, end):
    return {"arm": arm, "seed": seed, "zero_shot": start, "final": {"value": end}, "curve": [], "key": f"{arm}{seed}",
            "seconds": {"build": 1.0, "train": 2.0}, "hardware": {"threads": 1}, "commit": "0123456789abcdef",
            "started": "2026-11-30T10:00:00+00:00"}


def test_a_change_is_read_on_the_seeds_that_both_arms_have():
    results = [result("hybrid", 0, 100.0, 50.0), result("hybrid", 1, 100.0, 70.0), result("hybrid", 2, 100.0, 999.0),
               result("hybrid_bias", 0, 50.0, 40.0), result("hybrid_bias", 1, 50.0, 50.0)]
    (row,) = changes(results, [("hybrid", "hybrid_bias"), ("subclone", "subclone_bias")]).to_dict("records")
    assert row == {"arm": "hybrid", "with the change": "hybrid_bias", "seeds": 2, "starts": "100.0 → 50.0",
                   "start x": "0.500", "ends": "60.0 → 45.0", "end x": "0.750"}


def test_every_run_behind_a_page_is_listed_with_where_it_is_from():
    (row,) = runs_behind([result("hybrid", 0, 1.0, 1.0)]).to_dict("records")
    assert row == {"arm": "hybrid", "seed": 0, "run": "hybrid0", "build, s": 1.0, "train, s": 2.0, "threads": 1,
                   "commit": "0123456789ab", "started": "2026-11-30T10:00:00+00:00"}
