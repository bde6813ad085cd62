"""Which KV heads are full and which stream, and the calibration of that choice."""

from mrv1.headwise.calibrate import rank_heads, rankable_heads
from mrv1.headwise.groups import HeadGroup, HeadGroups
from mrv1.headwise.policy import FULL, HeadPolicy, Visible
from mrv1.headwise.ranking import HeadRanking
from mrv1.headwise.recall import RecallLines, RecallPrompt, recall_prompt
from mrv1.headwise.sources import PolicySource, policy_source

__all__ = [
    "FULL",
    "HeadGroup",
    "HeadGroups",
    "HeadPolicy",
    "HeadRanking",
    "PolicySource",
    "RecallLines",
    "RecallPrompt",
    "Visible",
    "policy_source",
    "rank_heads",
    "rankable_heads",
    "recall_prompt",
]
