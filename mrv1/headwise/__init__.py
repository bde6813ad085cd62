"""Which KV heads are full and which stream, and the calibration of that choice."""

from mrv1.headwise.calibrate import rank_heads as rank_heads
from mrv1.headwise.calibrate import rankable_heads as rankable_heads
from mrv1.headwise.groups import HeadGroup as HeadGroup
from mrv1.headwise.groups import HeadGroups as HeadGroups
from mrv1.headwise.policy import FULL as FULL
from mrv1.headwise.policy import HeadPolicy as HeadPolicy
from mrv1.headwise.policy import Visible as Visible
from mrv1.headwise.ranking import HeadRanking as HeadRanking
from mrv1.headwise.recall import RecallLines as RecallLines
from mrv1.headwise.recall import RecallPrompt as RecallPrompt
from mrv1.headwise.recall import recall_prompt as recall_prompt
from mrv1.headwise.sources import PolicySource as PolicySource
from mrv1.headwise.sources import policy_of_ranking as policy_of_ranking
from mrv1.headwise.sources import policy_source as policy_source
