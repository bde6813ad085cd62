"""The kernels a step calls, as a type, and the choice between the two that implement it."""

from __future__ import annotations

from typing import Protocol

import torch

from mrv1 import kernels
from mrv1.device import KernelPath
from mrv1.kernels import reference
from mrv1.kernels.attention.decode_plan import DecodePlan
from mrv1.kernels.attention.prefill_attention import PrefillSplits
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.kernels.layers.linear import Activation
from mrv1.kernels.sampling.logprobs import TopLogprobs


class Ops(Protocol):
    """The functions ``mrv1.kernels`` and ``mrv1.kernels.reference`` both have.

    Their docstrings say what shapes and dtypes they take.
    """

    def fetch_upload(
        self, uploads: torch.Tensor, slot: torch.Tensor, staged: torch.Tensor
    ) -> None:
        """Copy the upload that the device counts to next to where the step reads it."""
        ...

    def scatter_segments(
        self,
        state: torch.Tensor,
        staged: torch.Tensor,
        segments: torch.Tensor,
        num_segments: torch.Tensor,
    ) -> None:
        """Copy a step's changes to where they belong in the state."""
        ...

    def gather_tokens(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor | None,
        token_ids: torch.Tensor,
        num_tokens: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        block_tables: torch.Tensor,
        *,
        block_size: int,
        group_table_offset: torch.Tensor,
        group_sink: torch.Tensor,
        group_ring_blocks: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        slot_mapping: torch.Tensor,
        logits_rows: torch.Tensor,
        query_len: int | None = None,
        stopped: torch.Tensor | None = None,
        draft_token_ids: torch.Tensor | None = None,
        num_draft_tokens: torch.Tensor | None = None,
        mrope_positions: torch.Tensor | None = None,
        mrope_delta: torch.Tensor | None = None,
        prompt_len: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
    ) -> None:
        """Collect a step's tokens, their positions, their slots and the rows' block tables."""
        ...

    def embed_tokens(
        self,
        input_ids: torch.Tensor,
        embed: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what tokens start with: their embedding rows, and rope's of their positions."""
        ...

    def post_update(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor | None,
        logits_rows: torch.Tensor,
        tokens: torch.Tensor,
        token_ids: torch.Tensor,
        num_tokens: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        max_total_tokens: torch.Tensor,
        stop_token_ids: torch.Tensor,
        stopped: torch.Tensor,
        *,
        output: torch.Tensor,
        num_output: torch.Tensor,
        ring_slot: torch.Tensor | None = None,
        query_len: int | None = None,
        num_sampled: torch.Tensor | None = None,
        stop_sequences: torch.Tensor | None = None,
        stop_sequence_lens: torch.Tensor | None = None,
        num_stop_sequences: torch.Tensor | None = None,
        prompt_len: torch.Tensor | None = None,
        min_total_tokens: torch.Tensor | None = None,
    ) -> None:
        """Append a step's tokens, advance the lengths, mark the requests that stop."""
        ...

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the RMS norm of ``x``, or of ``residual + x``, which it keeps in ``residual``."""
        ...

    def apply_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        *,
        interleaved: bool = False,
    ) -> None:
        """Rotate ``q`` and ``k`` in place."""
        ...

    def silu_and_mul(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``silu(gate) * up`` of ``x = [gate, up]``."""
        ...

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
        residual: torch.Tensor | None = None,
        activation: Activation | None = None,
        out: torch.Tensor | None = None,
        out_norm_weight: torch.Tensor | None = None,
        normed_out: torch.Tensor | None = None,
        prefetch: torch.Tensor | None = None,
        deterministic: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return ``residual + activation(rms_norm(x) @ weight.T + bias)``, and norm it."""
        ...

    def kv_cache_write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        layout: KVLayout,
        *,
        scales: KVScales | None = None,
    ) -> None:
        """Store this step's keys and values in their pages."""
        ...

    def qkv_cache_write(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        layout: KVLayout,
        *,
        num_q_heads: int,
        cos_sin: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        interleaved: bool = False,
        mrope_section: tuple[int, int, int] | None = None,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 1e-6,
        q_out: torch.Tensor | None = None,
        k_out: torch.Tensor | None = None,
        scales: KVScales | None = None,
    ) -> torch.Tensor:
        """Norm and rotate a fused projection's q and k, store k and v, return q."""
        ...

    def plan_decode_attention(
        self, seq_lens: torch.Tensor, layout: KVLayout, plan: DecodePlan
    ) -> None:
        """Settle which program attends to which keys, for all layers of a step."""
        ...

    def paged_decode_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        layout: KVLayout,
        *,
        softmax_scale: float,
        query_len: int = 1,
        num_kv_splits: int | None = None,
        deterministic: bool = False,
        plan: DecodePlan | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        scales: KVScales | None = None,
        visited: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with the same 1 to 8 queries in every row."""
        ...

    def paged_prefill_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        layout: KVLayout,
        *,
        softmax_scale: float,
        max_query_len: int,
        attn_mask_offsets: torch.Tensor | None = None,
        splits: PrefillSplits | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        scales: KVScales | None = None,
        visited: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with ragged queries."""
        ...

    def apply_bad_words(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        token_ids: torch.Tensor,
        num_tokens: torch.Tensor,
        prompt_len: torch.Tensor,
        bad_words: torch.Tensor,
        bad_word_lens: torch.Tensor,
        num_bad_words: torch.Tensor,
        *,
        match_prompt: torch.Tensor | None = None,
        ahead: torch.Tensor | None = None,
        draft_token_ids: torch.Tensor | None = None,
    ) -> None:
        """Mask the tokens that would complete a banned word, in place."""
        ...

    def edit_logits(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        token_ids: torch.Tensor,
        num_tokens: torch.Tensor,
        prompt_len: torch.Tensor,
        *,
        edits: torch.Tensor,
        allowed_mask: torch.Tensor,
        min_total_tokens: torch.Tensor,
        stop_token_ids: torch.Tensor,
        bias_ids: torch.Tensor,
        bias_values: torch.Tensor,
        num_bias: torch.Tensor,
        repetition_penalty: torch.Tensor,
        frequency_penalty: torch.Tensor,
        presence_penalty: torch.Tensor,
        counts: torch.Tensor,
        counted: torch.Tensor,
        ahead: torch.Tensor | None = None,
        draft_token_ids: torch.Tensor | None = None,
    ) -> None:
        """Mask, bias and penalize what each row's slot asks for, in place."""
        ...

    def apply_token_bitmask(
        self, logits: torch.Tensor, bitmask: torch.Tensor, *, rows: torch.Tensor | None = None
    ) -> None:
        """Mask the tokens that a grammar does not allow, in place."""
        ...

    def sample_tokens(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        *,
        top_k: torch.Tensor | None = None,
        top_p: torch.Tensor | None = None,
        min_p: torch.Tensor | None = None,
        child: torch.Tensor | None = None,
        idx_mapping: torch.Tensor | None = None,
        prompt_len: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw one token a row from what its filters keep."""
        ...

    def top_logprobs(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        num_top: int,
        *,
        idx_mapping: torch.Tensor | None = None,
        temperature: torch.Tensor | None = None,
    ) -> TopLogprobs:
        """Return tokens' log-probabilities and ranks, and each row's best tokens."""
        ...


def select_ops(path: KernelPath) -> Ops:
    """Return the module that implements the ops on ``path`` (see ``mrv1.device.kernel_path``)."""
    if path == "reference":
        return reference
    return kernels
