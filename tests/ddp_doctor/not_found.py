"""Why mutants are not found: which are equivalent, which are reported under another code, and which the doctor misses.

A mutant that is not found and is not here is listed as unexplained.
"""

from __future__ import annotations

from collections.abc import Mapping

# Mutants of which nothing that can be measured changes, by the reason. They are not counted.
EQUIVALENT: Mapping[str, tuple[str, ...]] = {}

# Mutants that another code describes as well, by that code and the reason.
OTHER_CODE: Mapping[tuple[str, str], tuple[str, ...]] = {}

# What the doctor misses, by the reason.
MISSED: Mapping[str, tuple[str, ...]] = {}
