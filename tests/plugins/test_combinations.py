"""Every subset of the plugins resumes bit-identically: each pair of plugins here, and all combinations in the soak."""

from __future__ import annotations

from pathlib import Path

import pytest
from combinations import PLUGINS, Combination, count, outcome, pairwise, share_of, subsets

SHARES = 64


EACH_PAIR_OF_PLUGINS = pairwise(len(PLUGINS), lambda each: each.ranks == 2 and each.workers == 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "chosen",
    [
        *EACH_PAIR_OF_PLUGINS,
        *(pytest.param(each, marks=pytest.mark.slow) for each in pairwise() if each not in EACH_PAIR_OF_PLUGINS),
    ],
    ids=str,
)
def test_a_killed_training_with_a_subset_of_the_plugins_resumes_bit_identically(
    chosen: Combination, tmp_path: Path
) -> None:
    assert outcome(chosen, tmp_path) == "equal"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("share", range(1, SHARES + 1))
def test_all_subsets_of_the_plugins_resume_bit_identically(share: int) -> None:
    counts = count(share_of(f"{share}/{SHARES}"))
    assert not counts["different"]
    assert counts["equal"] + counts["rejected"] == len(share_of(f"{share}/{SHARES}"))


def test_the_shares_have_each_combination_once() -> None:
    shares = [each for share in range(1, SHARES + 1) for each in share_of(f"{share}/{SHARES}")]
    assert sorted(map(str, shares)) == sorted(map(str, subsets()))
