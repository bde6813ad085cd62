"""The training form of the embedded model: Qwen3 with dropout, named as in transformers.

Dropout is the one difference from ``Qwen3ForCausalLM``; with it off both compute the same
function, which :mod:`training.train_tiny` checks on the saved checkpoint.

Source: Qwen3 technical report, https://arxiv.org/abs/2505.09388 (GQA, q/k norm, SwiGLU, rope).
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config

INIT_STD = 0.02


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension with a learned scale."""

    def __init__(self, dim: int, eps: float) -> None:
        """Create a unit scale of ``dim`` elements."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x`` [..., dim]."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys."""

    def __init__(self, config: Qwen3Config) -> None:
        """Create the projections of one layer."""
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_kv = config.num_attention_heads // config.num_key_value_heads
        q_dim = config.num_attention_heads * config.head_dim
        kv_dim = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.o_proj = nn.Linear(q_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend within each row of ``x`` [rows, tokens, hidden]; cos, sin [tokens, head_dim]."""
        rows, tokens, _ = x.shape

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(rows, tokens, -1, self.head_dim)

        q = rotate(self.q_norm(heads(self.q_proj(x))).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(heads(self.k_proj(x))).transpose(1, 2), cos, sin)
        v = heads(self.v_proj(x)).transpose(1, 2)
        k = k.to(v.dtype).repeat_interleave(self.queries_per_kv, dim=1)
        v = v.repeat_interleave(self.queries_per_kv, dim=1)
        out = functional.scaled_dot_product_attention(q.to(v.dtype), k, v, is_causal=True)
        attended: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, tokens, -1))
        return attended


class Mlp(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, config: Qwen3Config) -> None:
        """Create the projections of one layer."""
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` [..., hidden] to the same shape."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer with dropout on both residual branches."""

    def __init__(self, config: Qwen3Config, dropout: float) -> None:
        """Create attention, feed-forward and their norms."""
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Map the residual stream ``x`` [rows, tokens, hidden] to the next layer's."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        out: torch.Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class Decoder(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: Qwen3Config, dropout: float) -> None:
        """Create the layers and the rope table for every position of the context."""
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, dropout) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)
        theta = float(config.rope_parameters["rope_theta"])
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions, theta**-exponents).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [rows, tokens, hidden] of ``input_ids``."""
        tokens = input_ids.shape[1]
        cos, sin = self.get_buffer("cos")[:tokens], self.get_buffer("sin")[:tokens]
        x: torch.Tensor = self.dropout(self.embed_tokens(input_ids))
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: torch.Tensor = self.norm(x)
        return normed


class TinyModel(nn.Module):
    """Decoder with tied output embedding; state-dict names equal ``Qwen3ForCausalLM``'s."""

    def __init__(self, config: Qwen3Config, *, dropout: float = 0.0) -> None:
        """Create and initialise the model.

        Args:
            config: the checkpoint's shape.
            dropout: probability on the embedding and on every residual branch while training.
        """
        super().__init__()
        self.model = Decoder(config, dropout)
        branch_std = INIT_STD / math.sqrt(2 * config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_branch_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=branch_std if is_branch_output else INIT_STD)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, tokens, vocab] of ``input_ids`` [rows, tokens]."""
        return functional.linear(self.model(input_ids), self.model.embed_tokens.weight)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rope (pairs ``i``, ``i + head_dim / 2``) to ``x`` [..., tokens, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
