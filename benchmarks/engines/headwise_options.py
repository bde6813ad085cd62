"""Options of both head-wise benchmarks: a shape, a head policy, and the caches to compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from benchmarks.measure.options import BenchOptions
from benchmarks.measure.shapes import shape_config
from mrv1.config import Dtype, EngineConfig, KVCacheDtypeName
from mrv1.engine import EngineCore
from mrv1.errors import ConfigError
from mrv1.headwise import HeadPolicy, policy_source
from mrv1.models import DecoderModel, ModelConfig, random_model


class Variant(NamedTuple):
    """A cache to compare, for the same model and of the same bytes."""

    uses_policy: bool
    """Else every head sees, and keeps, everything."""
    recycles: bool
    kv_cache_dtype: KVCacheDtypeName
    per_head_ids: bool = False
    visits_masked: bool = False


VARIANTS = {
    "uniform": Variant(False, True, "auto"),
    "masked": Variant(True, False, "auto", visits_masked=True),
    "kept": Variant(True, False, "auto"),
    "discrete": Variant(True, False, "auto", per_head_ids=True),
    "recycled": Variant(True, True, "auto"),
    "uniform-fp8": Variant(False, True, "fp8_e4m3"),
    "recycled-fp8": Variant(True, True, "fp8_e4m3"),
}
"""``uniform`` reads every page of every head. With the policy, ``masked`` reads every page too,
and masks what heads do not see; ``kept`` reads the pages that heads see, and its one table keeps
all blocks; ``discrete`` has a table for each head instead; ``recycled`` returns blocks outside the
window to the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadwiseOptions(BenchOptions):
    """Which model, with which policy, in which caches.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    shape: str = "llama3-8b"
    """Name in ``SHAPES``, run with random weights."""
    policy: HeadPolicy | str | None = None
    """A policy, or its source as in ``EngineConfig.head_policy``; None = made from
    ``streaming_ratio``, ``window``, ``sink`` and ``full_layers_every``."""
    streaming_ratio: float = 0.75
    window: int = 256
    sink: int = 64
    full_layers_every: int | None = None
    variants: tuple[str, ...] = ("uniform", "recycled", "recycled-fp8")
    context: int = 131_072
    """Tokens of the longest request."""
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 8192
    kv_cache_memory_bytes: int | None = None
    """Bytes of each variant's cache; None = the memory that this GPU has left."""
    block_size: int = 16
    dtype: Dtype = "auto"
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        """Check the fields that the engine does not check."""
        unknown = [name for name in self.variants if name not in VARIANTS]
        if unknown or not self.variants:
            raise ConfigError(
                f"variants: expected some of {', '.join(VARIANTS)}, got {list(self.variants)}"
            )
        self.check_least(context=2)
        self.head_policy()

    @property
    def model_config(self) -> ModelConfig:
        """The shape's configuration, with room for ``context`` tokens."""
        config = shape_config(self.shape)
        return replace(config, max_model_len=max(config.max_model_len, self.context))

    def head_policy(self) -> HeadPolicy:
        """Return the policy of the variants that have one.

        Raises:
            ConfigError: no policy has these options, or it is not for this model.
        """
        config = self.model_config
        policy = self.policy
        if isinstance(policy, str):
            policy = policy_source(policy).of_model(config.num_layers, config.num_kv_heads)
        if policy is None:
            policy = HeadPolicy.of_ratio(
                config.num_layers,
                config.num_kv_heads,
                self.streaming_ratio,
                window=self.window,
                sink=self.sink,
                full_layers_every=self.full_layers_every,
            )
        if policy.num_kv_heads != config.num_kv_heads:
            raise ConfigError(
                f"head_policy: expected {config.num_kv_heads} KV heads, as {self.shape} has, got "
                f"{policy.num_kv_heads}"
            )
        return policy.within(config.layer_windows)

    def conditions(self) -> dict[str, object]:
        """Return the conditions that the figures depend on, for the result."""
        policy = self.head_policy()
        return {
            "context": self.context,
            "full_share": policy.full_share,
            "roles": [list(seen) for seen in policy.groups],
            "block_size": self.block_size,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
            "cuda_graphs": self.cuda_graphs,
            "seed": self.seed,
            "clocks": "as found, not locked",
        }

    def new_model(self, device: torch.device) -> DecoderModel:
        """Return the model, with random weights on the device."""
        return random_model(self.model_config, self.dtype, device, seed=self.seed)

    @contextmanager
    def engine(
        self, name: str, model: DecoderModel, *, enable_prefix_caching: bool = False
    ) -> Iterator[EngineCore]:
        """Build a variant's engine around the model, and close it at the end."""
        variant = VARIANTS[name]
        config = EngineConfig(
            model=self.shape,
            dtype=self.dtype,
            device=str(model.device),
            kv_cache_dtype=variant.kv_cache_dtype,
            block_size=self.block_size,
            max_model_len=self.context,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            window_recycling=variant.recycles,
            per_head_ids=variant.per_head_ids,
            visit_masked_pages=variant.visits_masked,
            cuda_graphs=self.cuda_graphs,
            head_policy=None,  # whatever the environment says
        )
        policy = self.head_policy() if variant.uses_policy else None
        core = EngineCore(config, model=model, head_policy=policy, progress=False)
        try:
            yield core
        finally:
            core.runner.close()
