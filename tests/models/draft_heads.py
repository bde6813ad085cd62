"""Draft heads on transformers' layers, with dense attention and no cache: written, and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.models.families import fill_randomly, random_model, tiny_config

DRAFT_VOCAB = 48
SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Settings of a head that are its target's unless others are given."""


class PlainHead(nn.Module):
    """What both kinds of heads share: one layer of a family, and drafts one after another."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        model = AutoModel.from_config(config, attn_implementation="eager")
        self.rotary_emb = model.rotary_emb
        self.new_norm = lambda size: type(model.norm)(size, eps=config.rms_norm_eps)
        self.layer_of_family = [model.layers[0]]  # in a list: no module of this one

    def attention_inputs(self, hidden: torch.Tensor) -> dict[str, Any]:
        """Return the causal mask and the rope of a sequence."""
        size = hidden.shape[1]
        mask = torch.full((size, size), -torch.inf, dtype=hidden.dtype).triu(1)
        positions = torch.arange(size)[None]
        return {
            "attention_mask": mask[None, None],
            "position_embeddings": self.rotary_emb(hidden, positions),
            "position_ids": positions,
        }

    @torch.no_grad()
    def drafts(self, token_ids: list[int], features: torch.Tensor, count: int) -> list[int]:
        """Return the drafts after ``token_ids``; ``features`` are of all but the last token."""
        ids, hidden, found = list(token_ids[1:]), self.read(features), []
        for _ in range(count):
            output, following = self(torch.tensor(ids), hidden)
            found.append(self.token(output[-1]))
            ids, hidden = [*ids, found[-1]], torch.cat([hidden, following[-1:]])
        return found


class PlainEagle3(PlainHead):
    """A head in speculators' format; ``options`` are settings of its ``config.json``."""

    def __init__(self, config: PretrainedConfig, target: PreTrainedModel, **options: Any) -> None:
        super().__init__(config)
        size, self.options = config.hidden_size, options
        self.sums = options.get("eagle_aux_hidden_state_layer_ids") or []
        count = len(self.sums) or 3
        (layer,) = self.layer_of_family
        layer.hidden_norm = self.new_norm(size)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(layer.self_attn, name)
            new = nn.Linear(2 * size, old.out_features, bias=old.bias is not None)
            setattr(layer.self_attn, name, new)
        self.layers = nn.ModuleList([layer])
        self.fc = nn.Linear(count * size, size, bias=False)
        self.norm = self.new_norm(size)
        draft_vocab = options.get("draft_vocab_size", DRAFT_VOCAB)
        self.lm_head = nn.Linear(size, draft_vocab, bias=False)
        if options.get("norm_before_fc"):
            self.input_norm = self.new_norm(count * size)
        if options.get("fc_norm"):
            self.fc_norm = nn.ModuleList([self.new_norm(size) for _ in range(count)])
        if options.get("has_embedding"):
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embedding = [getattr(self, "embed_tokens", target.get_input_embeddings())]
        if draft_vocab < config.vocab_size:
            generator = torch.Generator().manual_seed(5)
            kept = torch.randperm(config.vocab_size, generator=generator)[:draft_vocab].sort()[0]
            self.register_buffer("d2t", kept - torch.arange(draft_vocab))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
            self.t2d[kept] = True

    def features(self, target: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
        """Return the sums before layers of ``target``, side by side, ``[tokens, features]``."""
        found: dict[int, torch.Tensor] = {}
        modules = [*target.model.layers, target.model.norm]

        def keep(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[index] = args[0] if args else kwargs["hidden_states"]

        hooks = [
            module.register_forward_pre_hook(
                lambda _, args, kwargs, index=index: keep(index, args, kwargs), with_kwargs=True
            )
            for index, module in enumerate(modules)
        ]
        with torch.no_grad():
            target(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        return torch.cat([found[i][0] for i in self.sums], dim=1)

    def read(self, features: torch.Tensor) -> torch.Tensor:
        if self.options.get("norm_before_fc"):
            features = self.input_norm(features)
        if self.options.get("fc_norm"):
            parts = features.chunk(len(self.fc_norm), dim=1)
            features = torch.cat([n(x) for n, x in zip(self.fc_norm, parts, strict=True)], dim=1)
        return self.fc(features)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (layer,), (embedding,) = self.layers, self.embedding
        normed = layer.hidden_norm(x)
        residual = normed if self.options["norm_before_residual"] else x
        both = torch.cat([layer.input_layernorm(embedding(ids)), normed], dim=1)[None]
        attended, *_ = layer.self_attn(hidden_states=both, **self.attention_inputs(x[None]))
        residual = residual + attended[0]
        residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        output = self.norm(residual)
        return output, output if self.options.get("norm_output") else residual

    def token(self, output: torch.Tensor) -> int:
        draft = int(self.lm_head(output).argmax())
        return draft + int(self.d2t[draft]) if hasattr(self, "d2t") else draft

    def save(self, path: Path, config: PretrainedConfig) -> None:
        """Write the head as speculators does."""
        settings = {k: v for k, v in self.options.items() if k != "has_embedding"}
        raw = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.lm_head.out_features,
            "transformer_layer_config": config.to_diff_dict(),
            **settings,
        }
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(raw))
        save_file(self.state_dict(), path / "model.safetensors")


class PlainMTP(PlainHead):
    """ERNIE-4.5's MTP block, in FastDeploy's order."""

    def __init__(self, config: PretrainedConfig, target: PreTrainedModel) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.mtp_emb_norm = nn.ModuleList([self.new_norm(size)])
        self.mtp_hidden_norm = nn.ModuleList([self.new_norm(size)])
        self.mtp_linear_proj = nn.ModuleList([nn.Linear(2 * size, size, bias=False)])
        self.mtp_block = nn.ModuleList(self.layer_of_family)
        self.target = [target]

    def features(self, target: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return target.model(torch.tensor([token_ids])).last_hidden_state[0]

    def read(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (target,) = self.target
        embedded = self.mtp_emb_norm[0](target.get_input_embeddings()(ids))
        both = torch.cat([embedded, self.mtp_hidden_norm[0](x)], dim=1)
        hidden = self.mtp_linear_proj[0](both)[None]
        hidden = self.mtp_block[0](hidden, **self.attention_inputs(hidden))
        output = target.model.norm(hidden if hidden.dim() == 2 else hidden[0])
        return output, output

    def token(self, output: torch.Tensor) -> int:
        return int(self.target[0].lm_head(output).argmax())

    def save(self, path: Path) -> None:
        """Add the block's tensors to its target's checkpoint."""
        tensors = load_file(path / "model.safetensors")
        tensors |= {f"model.{name}": tensor for name, tensor in self.state_dict().items()}
        save_file(tensors, path / "model.safetensors")


def write_target(path: Path, family: str, **settings: Any) -> PreTrainedModel:
    """Write a tiny random checkpoint; return transformers' model of it, in float64."""
    config = tiny_config(family, **settings)
    random_model(config).save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager"
    )
    if family == "ernie4_5_moe":
        model.set_experts_implementation("eager")
    return model.eval()


def write_eagle3(
    path: Path,
    target: PreTrainedModel,
    family: str = "llama",
    layer: dict[str, Any] | None = None,
    **options: Any,
) -> PlainEagle3:
    """Write a random head of the sizes of ``target``; return it in float64."""
    sizes = {name: getattr(target.config, name) for name in SIZES}
    config = tiny_config(family, **sizes | {"num_hidden_layers": 1} | (layer or {}))
    options = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} | options
    options.setdefault("norm_before_residual", True)
    head = fill_randomly(PlainEagle3(config, target, **options), seed=3)
    head.save(path, config)
    return head.double()


def write_mtp(path: Path, target: PreTrainedModel) -> PlainMTP:
    """Write a random MTP block into its target's checkpoint; return it in float64."""
    own = tiny_config("ernie4_5", num_hidden_layers=1)
    head = fill_randomly(PlainMTP(own, target), seed=4)
    head.save(path)
    return head.double()
