"""vLLM's attention by mrv1's kernels: ``--attention-backend CUSTOM``.

The backend says what it can serve and which pages it wants, the builder prepares what all layers
of a KV cache group share in a step, and each layer's implementation writes keys and values and
attends. Rows of one token, or all rows if all verify as many drafts, are decoded; other rows are
prefilled, and decodes with them where that is faster.

Outside CUDA graphs each layer launches its kernels from Python: the first layer of a kind checks
and chooses, and the others repeat its launches (``RepeatedCall``). Attention itself writes keys
and values (``forward_includes_kv_cache_update``), which saves a call per layer. All kernels are
compiled from the loading of the weights on, and launched before the first batch
(``attention_kernels``).

A step waits for nothing on the device: the host reads shapes, ``max_query_len`` and its copy of
``query_start_loc``. The first layer plans the decoded rows, so that a graph contains the plan.
Full CUDA graphs serve any batch (``ALWAYS``). Where vLLM captures decodes apart, those graphs run
the decode kernel, and mixed batches run between the piecewise graphs. With ``cudagraph_mode=FULL``
one graph serves every batch of its size: which rows are decodes is not known at capture, so all
rows are prefilled, in one launch that follows from the graph's numbers of rows and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVQuantMode

from mrv1.device import MIN_CAPABILITY, device_info, kernel_path
from mrv1.environment import VARIABLES
from mrv1.errors import ConfigError
from mrv1.integrations.vllm.attention_kernels import (
    MAX_QUERY_LEN,
    AttentionKernels,
    Batches,
    Compilation,
    decode_rows,
    launch_all,
)
from mrv1.integrations.vllm.attention_layer import (
    AttentionLayer,
    BoundLayer,
    DecodeRows,
    PrefillRows,
)
from mrv1.integrations.vllm.attention_pages import CODES, content_size
from mrv1.kernels import DecodePlan, HeadRole, PageFormat, PrefillSplits
from mrv1.kernels._base.launches import RepeatedCall
from mrv1.kernels.attention.prefill.choice import prefills_decodes_too
from mrv1.kernels.cache.contracts import MAX_HEAD_DIM, MIN_HEAD_DIM
from mrv1.kernels.cache.kv_layout import BLOCK_SIZES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.kv_cache_interface import AttentionSpec

Buffers = TypeVar("Buffers", DecodePlan, PrefillSplits | None)

_INSTEAD = "choose another attention backend"
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

logger = init_logger("vllm.mrv1.attention")  # below "vllm": vLLM configures no other loggers


def _always(answer: bool) -> Any:  # noqa: ANN401 - a class method
    return classmethod(lambda _: answer)


class Mrv1AttentionBackend(AttentionBackend):  # type: ignore[misc]
    """What mrv1's kernels can serve, and the pages they want from vLLM."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(_DTYPES.values())
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *_DTYPES, *CODES]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """Return the slot's name, by which vLLM looks the backend up."""
        return str(AttentionBackendEnum.CUSTOM.name)

    @staticmethod
    def get_impl_cls() -> type[Mrv1AttentionImpl]:
        """Return the class of a layer's attention."""
        return Mrv1AttentionImpl

    @staticmethod
    def get_builder_cls() -> type[Mrv1AttentionMetadataBuilder]:
        """Return the class that prepares each step."""
        return Mrv1AttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: AttentionSpec | None = None) -> list[int]:
        """Return the kernels' block sizes; vLLM splits its larger blocks into them."""
        return list(BLOCK_SIZES)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the kernels' head sizes: the multiples of 16 up to 256."""
        return list(range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, MIN_HEAD_DIM))

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Return whether the kernels are compiled and checked for such a GPU."""
        return (capability.major, capability.minor) >= MIN_CAPABILITY

    supports_sliding_window = _always(True)  # layers of several windows may share a step
    supports_sink = _always(True)  # logit sinks, one for each query head
    supports_kv_connector = _always(False)  # some copy tokens, and expect K and V side by side
    supports_device_cpu_query_lens_mismatch = _always(False)  # the host's decide what is decoded

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Return what to choose instead of an unsupported ``kv_cache_dtype``."""
        name = kv_cache_dtype or "auto"
        if name.startswith("fp8") and name not in CODES:
            return f"instead of kv_cache_dtype {name} choose {' or '.join(CODES)}"
        if _DTYPES.get(name, dtype) != dtype:
            return f"kv_cache_dtype {name} needs a model of this dtype, got {dtype}"
        return None

    @staticmethod
    def get_required_kv_cache_layout() -> str:
        """Return the layout in which a head's part of a block has no gaps (vLLM 0.26)."""
        return "HND"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache tensor; ``attention_pages`` says what is in it."""
        content = content_size(head_size, CODES.get(cache_dtype_str))
        return num_blocks, num_kv_heads, block_size, content

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order of dimensions in memory: blocks, (layers,) heads, tokens, content."""
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the layouts in which a head's part of a block has no gaps (vLLM 0.33)."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec with room for scales (vLLM 0.33; 0.26 counts them by itself)."""
        codes = _codes(spec)
        if spec.state_content_bytes is not None or codes is None:
            return spec
        return replace(spec, state_content_bytes=content_size(spec.head_size, codes))


def _codes(spec: AttentionSpec) -> PageFormat | None:
    """Return the format of a cache's codes; None = values as they are."""
    return CODES.get(KVQuantMode(spec.kv_quant_mode).name.lower())


@dataclass(kw_only=True)
class Mrv1AttentionMetadata(AttentionMetadata):  # type: ignore[misc]
    """What the layers of one KV cache group share in a step; vLLM may copy the fields."""

    slot_mapping: torch.Tensor
    """[tokens] int64; -1 = padding."""
    decode: DecodeRows | None
    prefill: PrefillRows | None


def _batches(config: VllmConfig, row_width: int) -> Batches:
    return Batches(
        max_model_len=config.model_config.max_model_len,
        max_num_reqs=config.scheduler_config.max_num_seqs,
        max_num_tokens=config.scheduler_config.max_num_batched_tokens,
        row_width=row_width,
        decode_query_len=_decode_query_len(config),
        dtype=config.model_config.dtype,
    )


def _decode_query_len(config: VllmConfig) -> int:
    """Return the tokens of a row with drafts, 1 if there are none or too many to decode them."""
    length = 1 + int(config.num_speculative_tokens)
    return length if length <= MAX_QUERY_LEN else 1


class Mrv1AttentionMetadataBuilder(AttentionMetadataBuilder[Mrv1AttentionMetadata]):  # type: ignore[misc]
    """Prepares each step for the layers of one KV cache group."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    reorder_batch_threshold: int | None = 1  # rows of one token come first

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        """Check what only the spec and the model say, and log what will run.

        ConfigError: sizes of K and V differ, or a window that grows with the prompt (R-SWA).
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        head_size, head_size_v = kv_cache_spec.head_size, kv_cache_spec.head_size_v
        if head_size_v != head_size:
            raise ConfigError(
                f"head_size_v: expected {head_size} like keys, got {head_size_v}; {_INSTEAD}"
            )
        if getattr(vllm_config.model_config, "rswa_window", None) is not None:
            raise ConfigError(
                "rswa_window: expected None, got "
                f"{vllm_config.model_config.rswa_window}; {_INSTEAD}"
            )
        self._dtype = vllm_config.model_config.dtype
        self._decode_query_len = _decode_query_len(vllm_config)
        self._plans: dict[tuple[int, int], Mapping[int, DecodePlan]] = {}  # of captured decodes
        self._splits: dict[tuple[int, int], Mapping[int, PrefillSplits | None]] = {}
        self._states = torch.empty(0, device=device)  # of all captured launches
        self._capturing = False
        self._impls: tuple[Mrv1AttentionImpl, ...] = ()  # one for each layout
        self._repeated: tuple[RepeatedCall, ...] = ()
        self._is_warm = kernel_path(device) != "triton"  # otherwise nothing is compiled
        logger.info_once(
            "mrv1 attention: path %s on %s, head size %d, %d KV heads, blocks of %d tokens, %s",
            kernel_path(device),
            device_info(device).name,
            head_size,
            kv_cache_spec.num_kv_heads,
            kv_cache_spec.block_size,
            f"{kv_cache_spec.dtype} cache"
            if (codes := _codes(kv_cache_spec)) is None
            else f"{codes.name} cache with a scale per token and head",
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Mrv1AttentionMetadata:
        """Return what the layers share in a step; ConfigError for a batch that is not causal."""
        common = common_attn_metadata
        if common.causal is not True:
            raise ConfigError(f"causal: expected True, got {common.causal}; {_INSTEAD}")
        if common.mm_req_doc_ranges is not None:
            raise ConfigError(
                f"mm_req_doc_ranges: expected None, got ranges of bidirectional tokens; {_INSTEAD}"
            )
        if not self._impls:
            self._bind_layers()
        if not self._is_warm and not self._capturing:
            self._warm_up(common.block_table_tensor.shape[1])
        for repeated in self._repeated:
            repeated.forget()  # before this step's buffers are allocated
        num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
        block_table = common.block_table_tensor[:num_reqs]
        seq_lens = common.seq_lens[:num_reqs]
        if self._has_one_graph(num_tokens):
            rows = self._prefill_rows(common, 0, 0, num_tokens, has_one_graph=True)
            return Mrv1AttentionMetadata(
                slot_mapping=common.slot_mapping, decode=None, prefill=rows
            )
        starts = common.query_start_loc_cpu.numpy()[: num_reqs + 1]
        count, query_len = decode_rows(
            num_reqs, num_tokens, common.max_query_len, starts, self._decode_query_len
        )
        is_mixed = 0 < count * query_len < starts[-1]
        if is_mixed and self._prefills_decodes_too(common.max_query_len, num_tokens):
            count = 0
        decode = prefill = None
        if count:
            decode = self._decode_rows(block_table[:count], seq_lens[:count], query_len)
        first_token = count * query_len
        if starts[-1] > first_token:
            prefill = self._prefill_rows(common, count, first_token, common.max_query_len)
        return Mrv1AttentionMetadata(
            slot_mapping=common.slot_mapping, decode=decode, prefill=prefill
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> Mrv1AttentionMetadata:
        """Return what a captured graph reads: its buffers are kept, and ``build`` reuses them."""
        self._capturing = True
        try:
            return self.build(0, common_attn_metadata)
        finally:
            self._capturing = False

    def _bind_layers(self) -> None:
        """Give all layers their pages, before the first step; keep one layer of each window."""
        context = self.vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in self.layer_names]
        for layer in layers:
            layer.impl.bind(layer.kv_cache)
        by_layout = {layer.impl.layout_id: layer.impl for layer in layers}
        self._impls = tuple(by_layout.values())
        repeated: dict[tuple[object, ...], RepeatedCall] = {}
        for layer in layers:
            layer.impl.repeated = repeated.setdefault(layer.impl.kind, layer.impl.repeated)
        self._repeated = tuple(repeated.values())

    def _warm_up(self, row_width: int) -> None:
        """Launch every kernel of attention: no request shall wait for the compiler."""
        batches = _batches(self.vllm_config, row_width)
        for impl in self._impls:
            if impl.compilation is not None:
                impl.compilation.finish()
            launch_all(impl.bound, batches)
        self._is_warm = True

    def _prefills_decodes_too(self, max_query_len: int, num_tokens: int) -> bool:
        """Return whether all rows of a mixed batch have one launch in every layer."""
        return all(
            not impl.logits_soft_cap
            and impl.sinks is None
            and prefills_decodes_too(impl.bound.prefills(self._dtype), max_query_len, num_tokens)
            for impl in self._impls
        )

    def _decode_rows(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int
    ) -> DecodeRows:
        num_reqs = seq_lens.shape[0]
        plans: Mapping[int, DecodePlan] = {}
        if kernel_path(self.device) != "reference":
            width, dtype = block_table.shape[1], self._dtype
            plans = self._buffers(
                self._plans,
                (num_reqs, query_len),
                lambda bound: bound.allocate_plan(num_reqs, query_len, width, dtype),
            )
        return DecodeRows(
            num_tokens=num_reqs * query_len,
            query_len=query_len,
            block_table=block_table,
            seq_lens=seq_lens,
            plans=plans,
        )

    def _buffers(
        self,
        captured: dict[tuple[int, int], Mapping[int, Buffers]],
        key: tuple[int, int],
        allocate: Callable[[BoundLayer], Buffers],
    ) -> Mapping[int, Buffers]:
        """Return each layout's buffers: those that the graph of ``key`` reads, or new ones.

        The step before a capture must launch what is captured, to compile it. Captures keep their
        buffers and share one memory for partial results, as graphs run one after the other: for
        all captured sizes, the largest first, memory of their own would take hundreds of MiB.
        """
        if key in captured:
            return captured[key]
        buffers = {impl.layout_id: allocate(impl.bound) for impl in self._impls}
        if self._capturing:
            buffers = {name: self._sharing(each) for name, each in buffers.items()}
            captured[key] = buffers
        return buffers

    def _sharing(self, buffers: Any) -> Any:  # noqa: ANN401 - ``Buffers``, as mypy cannot narrow it
        """Return buffers whose partial results, if there are any, are in the shared memory."""
        if buffers is None or buffers.states is None:
            return buffers
        shape, size = buffers.states.shape, buffers.states.numel()
        if size > self._states.numel():
            self._states = buffers.states.flatten()
        return replace(buffers, states=self._states[:size].view(shape))

    def _has_one_graph(self, num_tokens: int) -> bool:
        """Return whether vLLM has one graph for all batches of a size, decodes or not."""
        config = self.vllm_config.compilation_config
        mode, most = config.cudagraph_mode, config.max_cudagraph_capture_size
        if mode is None or most is None or num_tokens > most:
            return False
        return bool(mode.mixed_mode() == CUDAGraphMode.FULL)

    def _prefill_rows(
        self,
        common: CommonAttentionMetadata,
        first_row: int,
        first_token: int,
        max_query_len: int,
        *,
        has_one_graph: bool = False,
    ) -> PrefillRows:
        """Return the rows from ``first_row`` on; see ``_has_one_graph``."""
        num_reqs, end_token = common.num_reqs, common.num_actual_tokens
        sizes = num_reqs - first_row, end_token - first_token, max_query_len

        def allocate(bound: BoundLayer) -> PrefillSplits | None:
            return bound.allocate_splits(*sizes, self._dtype)

        splits: Mapping[int, PrefillSplits | None] = {}
        if has_one_graph:
            splits = self._buffers(self._splits, sizes[:2], allocate)
        elif not self._capturing:  # a graph would write to them after this step has freed them
            splits = {impl.layout_id: allocate(impl.bound) for impl in self._impls}
        start_loc = common.query_start_loc[first_row : num_reqs + 1]
        return PrefillRows(
            first_token=first_token,
            end_token=end_token,
            block_table=common.block_table_tensor[first_row:num_reqs],
            seq_lens=common.seq_lens[first_row:num_reqs],
            query_start_loc=start_loc - first_token if first_row else start_loc,
            max_query_len=max_query_len,
            splits=splits,
        )


class _Part(NamedTuple):
    """An op that a layer calls: ``run(of_step, *tensors)``, of all layers and of its own."""

    run: Callable[..., None]
    of_step: object
    tensors: tuple[torch.Tensor, torch.Tensor]


class Mrv1AttentionImpl(AttentionImpl[Mrv1AttentionMetadata]):  # type: ignore[misc]
    """The attention of one layer."""

    supports_dcp = False
    sink: int = 0
    """Leading tokens that stay visible beside a window; a head-wise model sets it."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Keep the layer's shape; ConfigError names what mrv1's kernels lack for the layer."""
        if kv_cache_dtype not in Mrv1AttentionBackend.supported_kv_cache_dtypes:
            raise ConfigError(
                "kv_cache_dtype: expected one of "
                f"{Mrv1AttentionBackend.supported_kv_cache_dtypes}, got {kv_cache_dtype!r}"
            )
        for name, value, expected in (
            ("alibi_slopes", alibi_slopes, None),
            ("attn_type", AttentionType(attn_type).value, AttentionType.DECODER.value),
            ("decode_context_parallel_size", self.dcp_world_size, 1),
            ("prefill_context_parallel_size", self.pcp_world_size, 1),
        ):
            if value != expected:
                raise ConfigError(f"{name}: expected {expected}, got {value}; {_INSTEAD}")
        if sinks is not None and sinks.shape != (num_heads,):
            raise ConfigError(f"sinks: expected shape [{num_heads}], got {list(sinks.shape)}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.sinks = sinks  # the model's own parameter: loading weights fills it later
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.bound: BoundLayer
        """The layer with its cache, from ``bind`` on."""
        self.repeated: RepeatedCall
        """The launches of a step, which layers of one kind share."""
        self.compilation: Compilation | None = None
        self._kv_cache: torch.Tensor | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Begin to compile the kernels of all layers, if this is the first one; return at once.

        vLLM calls this before it compiles the model. There is no cache yet: kernels of unusual
        ones are compiled at launch. ``act_dtype`` is of queries.
        """
        config = get_current_vllm_config_or_none()
        if config is None or self._kv_cache is not None:  # the weights are loaded again
            return
        device = config.device_config.device
        if kernel_path(device) != "triton" or torch.version.hip:  # the child's GPU is NVIDIA's
            return
        layers = config.compilation_config.static_forward_context.values()
        of_layers = [getattr(layer, "impl", None) for layer in layers]
        impls = [impl for impl in of_layers if isinstance(impl, Mrv1AttentionImpl)]
        if self is not impls[0]:
            return
        # vLLM splits its blocks into blocks of this size, and refuses those that it cannot split.
        fitting = [size for size in BLOCK_SIZES if config.cache_config.block_size % size == 0]
        block_size = max(fitting, default=BLOCK_SIZES[0])
        kernels = AttentionKernels.of(
            [impl.with_usual_cache(block_size, act_dtype) for impl in impls],
            _batches(config, -(-config.model_config.max_model_len // block_size)),
            device_info(device),
        )
        compilation = Compilation(kernels, VARIABLES["MRV1_COMPILE_PROCESSES"]())
        for impl in impls:
            impl.compilation = compilation

    def with_usual_cache(self, block_size: int, dtype: torch.dtype) -> BoundLayer:
        """Return the layer with a cache without memory, in the form that most models have."""
        shape = Mrv1AttentionBackend.get_kv_cache_shape(
            2, block_size, self.num_kv_heads, self.head_size, self.kv_cache_dtype
        )
        cache_dtype = dtype if self.layer.codes is None else torch.uint8
        kv_cache = torch.empty(shape, dtype=cache_dtype, device="meta")
        return BoundLayer(self.layer, kv_cache, self.sinks)

    @property
    def layer(self) -> AttentionLayer:
        """What decides on the layer's kernels."""
        return AttentionLayer(
            num_heads=self.num_heads,
            head_size=self.head_size,
            role=HeadRole(window=self.sliding_window or -1, sink=self.sink),
            codes=CODES.get(self.kv_cache_dtype),
            softmax_scale=self.scale,
            logits_soft_cap=self.logits_soft_cap,
        )

    @property
    def layout_id(self) -> int:
        """The ``id`` of the layout of its pages, which layers share."""
        return id(self.bound.pages.layout)

    @property
    def kind(self) -> tuple[object, ...]:
        """All that decides a layer's launches beside a step and the layer's own tensors."""
        shares = self.kv_sharing_target_layer_name is not None
        return self.layout_id, self.num_heads, self.scale, self.logits_soft_cap, shares

    def bind(self, kv_cache: torch.Tensor) -> None:
        """View ``kv_cache`` as pages, if new; before a step, as numbers go to the device."""
        if kv_cache is not self._kv_cache:
            self.bound = BoundLayer(self.layer, kv_cache, self.sinks)
            self.repeated = RepeatedCall()
            self._kv_cache = kv_cache

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Mrv1AttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values to the cache, and attend from its queries to the cache.

        ``query`` and ``output``, which is *written*, are ``[tokens, heads, head_size]``, padding
        last; ``key`` and ``value`` ``[tokens, kv_heads, head_size]``, None or ignored in a layer
        that shares the cache of another. There is no ``attn_metadata`` while vLLM measures memory,
        before there is a cache. ``layer`` is unused: scales are computed from the values.
        ConfigError: a quantized output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise ConfigError(
                "output_scale, output_block_scale: expected None, got a quantized output; turn "
                "off fuse_attn_quant in pass_config"
            )
        if attn_metadata is None:
            return output.zero_()
        self.bind(kv_cache)
        bound, slot_mapping = self.bound, attn_metadata.slot_mapping
        decode, prefill = attn_metadata.decode, attn_metadata.prefill
        parts: list[_Part] = []
        shares = self.kv_sharing_target_layer_name is not None
        if not shares and key is not None and value is not None:
            tokens = slice(slot_mapping.shape[0])
            parts.append(_Part(bound.write, slot_mapping, (key[tokens], value[tokens])))
        if decode is not None:
            bound.plan(decode)
            tokens = slice(decode.num_tokens)
            parts.append(_Part(bound.decode, decode, (query[tokens], output[tokens])))
        if prefill is not None:
            tokens = slice(prefill.first_token, prefill.end_token)
            parts.append(_Part(bound.prefill, prefill, (query[tokens], output[tokens])))

        def launch() -> None:
            for part in parts:
                part.run(part.of_step, *part.tensors)

        tensors = [tensor for part in parts for tensor in part.tensors]
        of_step = [part.of_step for part in parts]
        self.repeated(launch, (*tensors, self.sinks, *bound.pages.tensors), *of_step)
        return output
