"""Draft heads: a layer beside a model that predicts the tokens after the newest one."""

from mrv1.models.drafts.config import HeadConfig as HeadConfig
from mrv1.models.drafts.loading import head_config as head_config
from mrv1.models.drafts.loading import load_head as load_head
from mrv1.models.drafts.model import DraftModel as DraftModel
