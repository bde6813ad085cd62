"""Draft heads: a layer beside a model that predicts the tokens after the newest one."""

from mrv1.models.drafts.config import HeadConfig
from mrv1.models.drafts.loading import head_config, load_head
from mrv1.models.drafts.model import DraftModel

__all__ = ["DraftModel", "HeadConfig", "head_config", "load_head"]
