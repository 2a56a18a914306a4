"""What ends a run and is said in one sentence, since its user can do something about it."""

from __future__ import annotations

from kilter.rl.gate import Disagreement
from kilter.rl.rewards.score import Unavailable
from kilter.train.step import NotFinite

FAILURES = (NotFinite, Disagreement, Unavailable)
# What all ranks of a role raise, or none of them. After anything else (a lost peer, no memory, a
# mistake of ours) a rank leaves at once: others may be in the middle of a collective.
SAID = (ValueError, *FAILURES)
