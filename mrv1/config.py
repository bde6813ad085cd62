"""Configuration: frozen dataclasses, validated on construction."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from mrv1.device import env_flag
from mrv1.errors import ConfigError

DEBUG_VARIABLE = "MRV1_DEBUG"
"""``EngineConfig.debug`` where that is not given: 1, or 0 and unset."""

DEBUG_SYNC_VARIABLE = "MRV1_DEBUG_SYNC"
"""``EngineConfig.debug_sync`` where that is not given."""

MAX_BAD_WORDS_VARIABLE = "MRV1_MAX_BAD_WORDS_NUM"
"""``EngineConfig.max_bad_words_num`` where that is not given; else 16."""

BAD_WORDS_LEN_VARIABLE = "MRV1_BAD_WORDS_MAX_LEN"
"""``EngineConfig.bad_words_max_len`` where that is not given; else 8."""

MAX_STOP_SEQS_VARIABLE = "MRV1_MAX_STOP_SEQS_NUM"
"""``EngineConfig.max_stop_seqs_num`` where that is not given; else 5."""

STOP_SEQS_LEN_VARIABLE = "MRV1_STOP_SEQS_MAX_LEN"
"""``EngineConfig.stop_seqs_max_len`` where that is not given; else 8."""

HEAD_POLICY_VARIABLE = "MRV1_HEAD_POLICY"
"""``EngineConfig.head_policy`` where that is not given."""

INT32_MAX = 2**31 - 1
"""Counts, slots and block ids are int32 on the device."""

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


def env_count(name: str, default: int) -> int:
    """Return an environment variable's number.

    Raises:
        ConfigError: it is not an integer >= 1, or does not fit int32.
    """
    value = os.environ.get(name, str(default))
    digits = value.lstrip("0")
    if not digits.isdecimal() or not digits.isascii():
        raise ConfigError(f"{name}: expected an integer >= 1, got {value!r}")
    if len(digits) > len(str(INT32_MAX)) or int(digits) > INT32_MAX:
        raise ConfigError(f"{name}: expected at most {INT32_MAX}, got {value!r}")
    return int(digits)


VARIABLES: dict[str, Callable[[], Any]] = {
    DEBUG_VARIABLE: partial(env_flag, DEBUG_VARIABLE),
    DEBUG_SYNC_VARIABLE: partial(env_flag, DEBUG_SYNC_VARIABLE),
    MAX_BAD_WORDS_VARIABLE: partial(env_count, MAX_BAD_WORDS_VARIABLE, 16),
    BAD_WORDS_LEN_VARIABLE: partial(env_count, BAD_WORDS_LEN_VARIABLE, 8),
    MAX_STOP_SEQS_VARIABLE: partial(env_count, MAX_STOP_SEQS_VARIABLE, 5),
    STOP_SEQS_LEN_VARIABLE: partial(env_count, STOP_SEQS_LEN_VARIABLE, 8),
    HEAD_POLICY_VARIABLE: partial(os.environ.get, HEAD_POLICY_VARIABLE),
}
"""Every variable of mrv1's own, and how its value is read (``ConfigError`` for a wrong value)."""

FOREIGN_VARIABLES = (
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Variables of other packages that change what mrv1 does."""


def environment() -> dict[str, str]:
    """Return the values of ``VARIABLES`` and ``FOREIGN_VARIABLES`` that are set."""
    names = (*VARIABLES, *FOREIGN_VARIABLES)
    return {name: os.environ[name] for name in names if name in os.environ}


def name_errors() -> list[str]:
    """Return an error for each ``MRV1_*`` name of the environment that is not in ``VARIABLES``.

    It says which variable was probably meant.
    """
    errors = []
    for name in sorted(os.environ):
        if name.startswith("MRV1_") and name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            errors.append(f"{name}: expected one of {', '.join(VARIABLES)}{hint}")
    return errors


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

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    model: str
    """Checkpoint directory, or ``"tiny"``."""
    dtype: DtypeName = "auto"
    """Weights and activations; ``auto``: the checkpoint's on a GPU, float32 on a CPU."""
    device: str = "auto"
    """``auto`` takes the GPU if there is one, else the CPU."""
    kv_cache_dtype: KVCacheDtypeName = "auto"
    """``auto``: ``dtype``."""
    kv_scale: KVScaleName = "token"
    """What has a scale of its own in an fp8 cache; ``head`` reads them from the checkpoint, and
    with ``quarter`` a token's bytes depend on when its neighbours were written."""
    block_size: int = 16
    """Tokens per KV block."""
    max_model_len: int | None = None
    """Longest prompt + output in tokens; None = the model's context."""
    max_num_seqs: int = 256
    """Requests that run at the same time."""
    max_num_batched_tokens: int = 8192
    """Token budget of one step; longer prompts are prefilled in chunks."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, activations and KV cache together."""
    num_kv_blocks: int | None = None
    """KV blocks to allocate for heads that see everything; None = what memory allows, at most what
    can be used. Heads with a window have as many or, if that is less, what they can use."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of the KV cache, where ``num_kv_blocks`` is not given; None = what is left of
    ``gpu_memory_utilization``."""
    head_policy: str | None = field(default_factory=VARIABLES[HEAD_POLICY_VARIABLE])
    """JSON file of a ``HeadPolicy``; None = what the checkpoint says, else every head sees all
    that its layer does."""
    window_recycling: bool = True
    """Give back the blocks that heads with a window no longer see; else they are kept, in one
    table for all heads. FlashInfer has one table."""
    streaming_cache_blocks: int | None = None
    """Blocks, of each group of heads with a window, that the prefix cache may keep beside those of
    running requests; None = what 64 requests hold."""
    attention_backend: AttentionBackendName = "triton"
    """Who attends: mrv1's kernels, or FlashInfer if it is installed."""
    enable_prefix_caching: bool = True
    """Keep the blocks of prompts and outputs for requests that begin alike."""
    overlap: bool = True
    """Launch a step before the result of the one before it is known; with FlashInfer never."""
    cuda_graphs: bool = True
    """Capture steps of a few sizes as CUDA graphs, on a GPU."""
    deterministic: bool = False
    """Compute every row by itself alone: the bits of its result do not depend on the batch."""
    max_bad_words_num: int = field(default_factory=VARIABLES[MAX_BAD_WORDS_VARIABLE])
    """Bad words that a request may have."""
    bad_words_max_len: int = field(default_factory=VARIABLES[BAD_WORDS_LEN_VARIABLE])
    """Tokens that a bad word may have."""
    max_stop_seqs_num: int = field(default_factory=VARIABLES[MAX_STOP_SEQS_VARIABLE])
    """Stop sequences that a request may have."""
    stop_seqs_max_len: int = field(default_factory=VARIABLES[STOP_SEQS_LEN_VARIABLE])
    """Tokens that a stop sequence may have."""
    max_logit_bias: int = 300
    """Tokens that a request may give a bias."""
    max_logprobs: int = 20
    """Most likely tokens, and tokens by id, that a request may ask the log-probabilities of."""
    logprobs_mode: LogprobsModeName = "raw_logprobs"
    """Of the model's logits, or of what a token is drawn from: edited, scaled and filtered."""
    seed: int = 0
    """Seed from which requests without their own draw theirs."""
    debug: bool = field(default_factory=VARIABLES[DEBUG_VARIABLE])
    """Check every block id before a step reads or writes it; waits for the device each step."""

    debug_sync: bool = field(default_factory=VARIABLES[DEBUG_SYNC_VARIABLE])
    """Wait behind every kernel, so that one that fails is named; no CUDA graphs then."""

    def __post_init__(self) -> None:
        """Check the environment's names and every field's range."""
        for error in name_errors():
            raise ConfigError(error)
        for name, choices in (
            ("dtype", get_args(DtypeName)),
            ("kv_cache_dtype", get_args(KVCacheDtypeName)),
            ("kv_scale", get_args(KVScaleName)),
            ("attention_backend", get_args(AttentionBackendName)),
            ("logprobs_mode", get_args(LogprobsModeName)),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name}: expected one of {choices}, got {getattr(self, name)!r}"
                )
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
        if type(self.block_size) is not int or self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size: expected one of {BLOCK_SIZES}, got {self.block_size}")
        for name, least in (
            ("max_model_len", 2),  # a prompt and one token
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("num_kv_blocks", 1),
            ("kv_cache_memory_bytes", 1),
            ("streaming_cache_blocks", 0),
            ("max_bad_words_num", 1),
            ("bad_words_max_len", 1),
            ("max_stop_seqs_num", 1),
            ("stop_seqs_max_len", 1),
            ("max_logit_bias", 1),
            ("max_logprobs", 1),
        ):
            value = getattr(self, name)
            most = None if name.endswith("_bytes") else INT32_MAX
            if value is None or (
                type(value) is int and least <= value and (most is None or value <= most)
            ):
                continue
            limit = "" if most is None else " that fits int32"
            raise ConfigError(f"{name}: expected an integer >= {least}{limit}, got {value!r}")
        share: object = self.gpu_memory_utilization
        if not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ConfigError(f"gpu_memory_utilization: expected (0, 1], got {share!r}")
        policy: object = self.head_policy
        if policy is not None and not isinstance(policy, str):
            raise ConfigError(f"head_policy: expected the name of a JSON file, got {policy!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed: expected an integer, got {self.seed!r}")
        for name in (
            "enable_prefix_caching", "overlap", "cuda_graphs", "deterministic", "debug",
            "debug_sync", "window_recycling",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected True or False, got {getattr(self, name)!r}")

    @property
    def steps_in_flight(self) -> int:
        """Steps that are launched before the first one's result is taken.

        FlashInfer plans a step on the host, which then must know who has stopped.
        """
        return 2 if self.overlap and self.attention_backend == "triton" else 1


def resolve_dtype(
    name: DtypeName, checkpoint_dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the torch dtype that ``name`` means for this checkpoint on this device.

    Raises:
        ConfigError: float64 on a GPU: only the reference path computes in it.
    """
    if name == "auto":
        return checkpoint_dtype if device.type == "cuda" else torch.float32
    if name == "float64" and device.type == "cuda":
        raise ConfigError("dtype: float64 runs on the CPU reference path only, got device cuda")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


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
