"""A model that computes whole prompts under a head policy."""

from __future__ import annotations

import numpy as np
import torch

from mrv1.config import KVCacheDtypeName
from mrv1.errors import ConfigError
from mrv1.headwise import HeadPolicy, Visible
from mrv1.headwise.recall import TokenIds
from mrv1.kernels.cache.formats import PageFormat
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.models import AttentionBatch, DecoderModel, LayerCache
from mrv1.models.batch import check_codes

BLOCK_SIZE = 16  # tokens of a block. The codes of a cache do not depend on it


class PolicyModel:
    """A decoder and a paged cache for one prompt at a time, each under a policy of its own.

    Serving's kernels, but a streaming head keeps all its pages. One thread owns the model.
    ``num_tokens`` is the length of every prompt, ``kv_cache_dtype`` as in ``EngineConfig``;
    codes have scales per token. ConfigError: ``num_tokens`` is more than the model's positions, or
    the codes cannot store its heads.
    """

    def __init__(
        self, model: DecoderModel, num_tokens: int, *, kv_cache_dtype: KVCacheDtypeName = "auto"
    ) -> None:
        config = model.config
        if not 1 <= num_tokens <= config.max_model_len:
            raise ConfigError(
                f"num_tokens: expected 1 to {config.max_model_len}, the model's positions, got "
                f"{num_tokens}"
            )
        check_codes(kv_cache_dtype, config)
        self.model = model
        self.num_tokens = num_tokens
        page_format = PageFormat.named(kv_cache_dtype, "token", model.dtype)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        pages = (
            config.num_layers,
            2,
            num_blocks,
            config.num_kv_heads,
            BLOCK_SIZE,
            page_format.stored_dim(config.head_dim),
        )
        self._pages = torch.empty(pages, dtype=page_format.dtype, device=model.device)
        self._scales: list[KVScales | None] = [None] * config.num_layers
        if page_format.has_scales:
            scales = torch.empty(pages[:-1], dtype=torch.float32, device=model.device)
            self._scales = [KVScales.per_token(k, v, page_format) for k, v in scales]
        self._layouts: dict[tuple[Visible, ...], KVLayout] = {}
        self._positions = torch.arange(num_tokens, device=model.device)
        self._block_table = torch.arange(num_blocks, dtype=torch.int32, device=model.device)[None]
        self._num_tokens = torch.tensor([num_tokens], dtype=torch.int32, device=model.device)
        self._starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=model.device)

    def hidden(self, tokens: TokenIds, policy: HeadPolicy) -> torch.Tensor:
        """Return a prompt's hidden states after the final norm, ``[num_tokens, hidden]``.

        In the model's dtype. ``tokens``: ``[num_tokens]``, copied to the device on the current
        stream. A full head sees all of its layer. ConfigError: another length, or a policy for
        another shape.
        """
        if tokens.shape != (self.num_tokens,):
            raise ConfigError(f"tokens: expected [{self.num_tokens}], got {list(tokens.shape)}")
        batch = AttentionBatch(
            input_ids=torch.from_numpy(tokens.astype(np.int64)).to(self.model.device),
            positions=self._positions
            if self.model.config.rope.mrope_section is None
            else self._positions.expand(3, -1),
            slot_mapping=self._positions[None],
            block_table=self._block_table,
            seq_lens=self._num_tokens,
            query_start_loc=self._starts,
            max_query_len=self.num_tokens,
            query_len=None,
            num_tokens=self.num_tokens,
            num_reqs=1,
        )
        with torch.inference_mode():
            return self.model.forward(batch, self._caches(policy))

    def _caches(self, policy: HeadPolicy) -> list[LayerCache]:
        config = self.model.config
        if policy.num_kv_heads != config.num_kv_heads:
            raise ConfigError(
                f"head policy: expected {config.num_kv_heads} KV heads, got {policy.num_kv_heads}"
            )
        policy = policy.within(config.layer_windows)
        for layer, heads in enumerate(policy.heads):
            if heads not in self._layouts:
                self._layouts[heads] = KVLayout.hnd(
                    config.num_kv_heads,
                    BLOCK_SIZE,
                    config.head_dim,
                    roles=policy.roles(layer),
                    device=self.model.device,
                )
        return [
            LayerCache(k=pages[0], v=pages[1], layout=self._layouts[heads], scales=scales)
            for pages, heads, scales in zip(self._pages, policy.heads, self._scales, strict=True)
        ]
