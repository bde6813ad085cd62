"""Configuration: frozen dataclasses, validated on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from mrv1.environment import (
    BAD_WORDS_LEN_VARIABLE,
    DEBUG_SYNC_VARIABLE,
    DEBUG_VARIABLE,
    HEAD_POLICY_VARIABLE,
    INT32_MAX,
    MAX_BAD_WORDS_VARIABLE,
    MAX_STOP_SEQS_VARIABLE,
    STOP_SEQS_LEN_VARIABLE,
    VARIABLES,
    name_errors,
)
from mrv1.errors import ConfigError

DtypeName = Literal["auto", "float32", "float16", "bfloat16", "float64"]
KVCacheDtypeName = Literal["auto", "fp8_e4m3"]
KVScaleName = Literal["token", "quarter", "head"]
"""The granularities of ``mrv1.kernels.KVScales``."""
AttentionBackendName = Literal["triton", "flashinfer"]
LogprobsModeName = Literal["raw_logprobs", "processed_logprobs"]

BYTES_BY_CONTENT = ("deterministic", "enable_prefix_caching")
"""Options for which a page's bytes must follow from its tokens alone:
with ``kv_scale="quarter"`` they do not."""

EMBEDDED_MODEL = "tiny"
"""The name under which the checkpoint shipped in the package is found."""

BLOCK_SIZES = (16, 32, 64, 128)
"""Tokens per KV block that the kernels accept."""

LEAST = {"max_model_len": 2, "streaming_cache_blocks": 0}
"""Least values of counts that are not 1; a prompt and one token are two."""


def checkpoint_dir(model: str | Path) -> Path:
    """Return the checkpoint directory for a path, or for ``"tiny"``, the embedded model.

    Raises:
        ConfigError: there is no such directory, it cannot be read, or it has no ``config.json``.
    """
    if model == EMBEDDED_MODEL:
        return Path(str(resources.files("mrv1.models") / EMBEDDED_MODEL))
    if not str(model):
        raise ConfigError("model: expected a checkpoint directory, got an empty name")
    path = Path(model)
    try:
        is_directory, has_config = path.is_dir(), (path / "config.json").is_file()
    except OSError as error:
        raise ConfigError(
            f"model: expected a readable directory, got {str(path)!r}: {error}"
        ) from error
    if not is_directory:
        raise ConfigError(
            f"model: expected a checkpoint directory or {EMBEDDED_MODEL!r}, got {str(model)!r}"
        )
    if not has_config:
        raise ConfigError(f"model: expected a config.json in {str(path)!r}, found none")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine and its runner are built from.

    An option of the engine is a field here, and nothing else: ``LLM`` and the command line take
    its name, type, default and docstring from it.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    model: str
    """Checkpoint directory, or ``tiny``, the embedded model."""
    dtype: DtypeName = "auto"
    """Type of weights and activations; ``auto`` is the checkpoint's own on a GPU and float32 on a
    CPU. float64 runs on a CPU only."""
    device: str = "auto"
    """``auto`` (the GPU if there is one, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``."""
    kv_cache_dtype: KVCacheDtypeName = "auto"
    """Type of keys and values in the cache: ``auto`` is ``dtype``; ``fp8_e4m3`` stores codes of 8
    bits and their scales, whatever ``dtype`` is."""
    kv_scale: KVScaleName = "token"
    """Granularity of the scales of an fp8 cache. ``token``: each head's vector of each token,
    scaled as it is written. ``quarter``: a quarter of each block and head, requantised as its
    largest value grows, so that a token's bytes depend on when its neighbours were written.
    ``head``: each KV head of each layer, by the static ``k_scale`` and ``v_scale`` of the
    checkpoint."""
    block_size: int = 16
    """Tokens per KV block: 16, 32, 64 or 128."""
    max_model_len: int | None = None
    """Longest prompt and output together, in tokens. Default: the model's context."""
    max_num_seqs: int = 256
    """Requests that run at the same time."""
    max_num_batched_tokens: int = 8192
    """Token budget of a step; longer prompts are prefilled in chunks."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, activations and KV cache together."""
    num_kv_blocks: int | None = None
    """KV blocks to allocate for heads that see all tokens. Default: the number that memory allows,
    at most the number that requests can use. Heads with a window have the same number or, if that
    is smaller, the number that they can use."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of the KV cache where ``num_kv_blocks`` is not given. Default: the rest of
    ``gpu_memory_utilization``."""
    head_policy: str | None = field(default_factory=VARIABLES[HEAD_POLICY_VARIABLE])
    """JSON file of the tokens that each KV head sees (a ``HeadPolicy``). Default: the file that
    the environment variable ``MRV1_HEAD_POLICY`` names, else the policy in the checkpoint's
    configuration, else each head sees all that its layer does."""
    window_recycling: bool = True
    """Give back the blocks that heads with a window no longer see; otherwise all heads share one
    table, and the blocks are kept. FlashInfer has one table."""
    streaming_cache_blocks: int | None = None
    """Blocks of each group of heads with a window that the prefix cache may keep, in addition to
    the blocks of running requests. Default: the blocks of 64 requests."""
    attention_backend: AttentionBackendName = "triton"
    """``triton``, mrv1's own kernels, or ``flashinfer``, where that is installed: on a GPU, in
    float16 or bfloat16, without fp8."""
    enable_prefix_caching: bool = True
    """Keep the blocks of prompts and outputs for requests that begin alike; not with the scales
    ``quarter``."""
    overlap: bool = True
    """Launch a step before the result of the previous step is known; never with FlashInfer. It may
    change which requests share a step, hence how products round, but nothing else."""
    cuda_graphs: bool = True
    """Capture steps of a few sizes as CUDA graphs at the start, on a GPU."""
    deterministic: bool = False
    """Compute every row by itself alone, so that the bits of its logits do not depend on the
    batch; slower, and not with the scales ``quarter``."""
    max_bad_words_num: int = field(default_factory=VARIABLES[MAX_BAD_WORDS_VARIABLE])
    """Most bad words of a request. Default: the environment variable ``MRV1_MAX_BAD_WORDS_NUM``,
    else 16."""
    bad_words_max_len: int = field(default_factory=VARIABLES[BAD_WORDS_LEN_VARIABLE])
    """Most tokens of a bad word. Default: ``MRV1_BAD_WORDS_MAX_LEN``, else 8."""
    max_stop_seqs_num: int = field(default_factory=VARIABLES[MAX_STOP_SEQS_VARIABLE])
    """Most stop sequences of tokens of a request. Default: ``MRV1_MAX_STOP_SEQS_NUM``, else 5."""
    stop_seqs_max_len: int = field(default_factory=VARIABLES[STOP_SEQS_LEN_VARIABLE])
    """Most tokens of a stop sequence. Default: ``MRV1_STOP_SEQS_MAX_LEN``, else 8."""
    max_logit_bias: int = 300
    """Most tokens to which a request may give a bias."""
    max_logprobs: int = 20
    """Most tokens, likeliest or by id, of which a request may ask the log-probabilities."""
    logprobs_mode: LogprobsModeName = "raw_logprobs"
    """Log-probabilities of the model's logits (``raw_logprobs``), or of the logits that a token is
    drawn from: edited, scaled and filtered (``processed_logprobs``)."""
    seed: int = 0
    """Seed from which requests without a seed of their own draw theirs."""
    debug: bool = field(default_factory=VARIABLES[DEBUG_VARIABLE])
    """Check every block id before a step reads or writes it; each step waits for the device.
    Default: the environment variable ``MRV1_DEBUG``, else off."""
    debug_sync: bool = field(default_factory=VARIABLES[DEBUG_SYNC_VARIABLE])
    """Wait after every kernel, so that a kernel that fails is named; without CUDA graphs. Default:
    the environment variable ``MRV1_DEBUG_SYNC``, else off."""

    def __post_init__(self) -> None:
        """Check the environment's names and every field's range."""
        for error in name_errors():
            raise ConfigError(error)
        for name, kind in get_type_hints(EngineConfig).items():
            self._check_type(name, kind)
        if self.kv_cache_dtype == "auto" and self.kv_scale != "token":
            raise ConfigError(
                f"kv_scale: expected kv_cache_dtype='fp8_e4m3' beside {self.kv_scale!r}, "
                "got 'auto', a cache without scales"
            )
        for name in BYTES_BY_CONTENT if self.kv_scale == "quarter" else ():
            if getattr(self, name):
                raise ConfigError(
                    f"kv_scale, {name}: expected not both, got {self.kv_scale!r}, whose bytes "
                    f"depend on the order of writes, beside {name}=True"
                )
        share: object = self.gpu_memory_utilization
        if not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ConfigError(f"gpu_memory_utilization: expected (0, 1], got {share!r}")
        policy: object = self.head_policy
        if policy is not None and not isinstance(policy, str):
            raise ConfigError(f"head_policy: expected the name of a JSON file, got {policy!r}")

    def _check_type(self, name: str, kind: object) -> None:
        """Check a flag, a choice or an integer by the type of its field."""
        value: object = getattr(self, name)
        if kind is bool and not isinstance(value, bool):
            raise ConfigError(f"{name}: expected True or False, got {value!r}")
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ConfigError(f"{name}: expected one of {get_args(kind)}, got {value!r}")
        if kind not in (int, int | None) or (value is None and kind is not int):
            return
        if name == "seed":
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"seed: expected an integer, got {value!r}")
        elif name == "block_size":
            if type(value) is not int or value not in BLOCK_SIZES:
                raise ConfigError(f"block_size: expected one of {BLOCK_SIZES}, got {value}")
        else:
            least, most = LEAST.get(name, 1), math.inf if name.endswith("_bytes") else INT32_MAX
            if type(value) is not int or not least <= value <= most:
                limit = " that fits int32" if most == INT32_MAX else ""
                raise ConfigError(f"{name}: expected an integer >= {least}{limit}, got {value!r}")

    @property
    def steps_in_flight(self) -> int:
        """Steps that are launched before the first one's result is taken.

        FlashInfer plans a step on the host, which then must know who has stopped.
        """
        return 2 if self.overlap and self.attention_backend == "triton" else 1


def resolve_max_model_len(requested: int | None, model_max_len: int) -> int:
    """Return the context length to serve.

    Raises:
        ConfigError: more was asked for than the model's positions allow.
    """
    if requested is None:
        return model_max_len
    if requested > model_max_len:
        raise ConfigError(
            f"max_model_len: expected <= {model_max_len} (the model's context), got {requested}"
        )
    return requested
