"""vLLM's names: which are the same here, which have another name, and which are not here.

``LLM``, ``SamplingParams``, prompts and outputs look their unknown names up here, and
``docs/from-vllm.md`` is written from the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict

from mrv1.errors import short

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from mrv1.config import QuantizationName

QUANTIZATIONS: dict[str, QuantizationName] = {
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    **dict.fromkeys(("gptq", "gptq_marlin"), "gptq"),
    **dict.fromkeys(("awq", "awq_marlin"), "awq"),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), "mxfp4"),
}
"""vLLM's ``quantization``, which it also takes from a checkpoint -> mrv1's."""


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of some of vLLM's names."""

    kind: Literal["same", "other", "no-op", "not here"]
    note: str = ""
    """What differs, or what to do instead; the end of an error."""
    to: str = ""
    """The name here, if it is another."""
    values: Mapping[Any, Any] | Callable[[Any], Any] = field(default_factory=dict)
    """vLLM's value -> the value here, if it is another."""
    accepts: tuple[object, ...] = ()
    """Values that change nothing, beside everything that is false in a row that is not here."""
    settings: tuple[str, ...] = ()
    """Of a no-op whose value has settings: those that may be true."""

    def ignores(self, value: object) -> bool:
        """Whether a value changes nothing here."""
        if any(value is each or (type(value) is type(each) and value == each)
               for each in self.accepts):  # fmt: skip
            return True
        if self.kind == "no-op":
            given = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            others = (given[name] for name in given if name not in self.settings)
            return not self.accepts and not (self.settings and any(others))
        if isinstance(value, Collection) and hasattr(value, "__array__"):
            return False  # an array has no truth: it asks for something
        plain = value is None or isinstance(value, bool | int | float | str | Collection)
        return self.kind == "not here" and plain and not value

    def here(self, value: Any) -> Any:  # noqa: ANN401 - of any option
        """Return vLLM's value as the value here."""
        if callable(self.values):
            return self.values(value)
        try:
            return self.values.get(value, value)
        except TypeError:  # a list or a dict, which no mapping has
            return value


def _drafts(given: object) -> object:
    """Return vLLM's ``speculative_config`` as ``speculative``."""
    if not isinstance(given, Mapping):
        return given
    renamed = {"num_speculative_tokens": "num_tokens"}
    return {renamed.get(key, key): value for key, value in given.items()}


def _named(*rows: tuple[str, Row]) -> dict[str, Row]:
    return {name: row for names, row in rows for name in names.split()}


def _same(note: str = "", **more: Any) -> Row:  # noqa: ANN401 - fields of any type
    return Row("same", note, **more)


def _other(to: str, note: str = "", **more: Any) -> Row:  # noqa: ANN401 - fields of any type
    return Row("other", note, to, **more)


def _no_op(note: str, *accepts: object) -> Row:
    return Row("no-op", note, accepts=accepts)


def _not_here(note: str, *accepts: object) -> Row:
    return Row("not here", note, accepts=accepts)


OPTIONS = _named(
    ("""model dtype max_model_len tensor_parallel_size gpu_memory_utilization max_logprobs
        kv_cache_memory_bytes long_prefill_token_threshold override_generation_config
        use_tqdm_on_load scheduling_policy""", _same()),
    ("block_size enable_prefix_caching max_num_batched_tokens max_num_seqs seed",
     _same("None is mrv1's default", accepts=(None,))),
    ("generation_config", _same("None reads no file, as `vllm` does")),
    ("logprobs_mode", _same("`raw_logprobs` and `processed_logprobs`")),
    ("logits_processors", _same("objects of mrv1's own `LogitsProcessor`")),
    ("kv_cache_dtype", _same(
        "`fp8` is `fp8_e4m3`, with a scale for each token and head unless `kv_scale` says else; "
        "`int4_per_token_head` is `int4`, of other codes",
        values=dict.fromkeys(("fp8", "fp8_per_token_head"), "fp8_e4m3")
        | {"int4_per_token_head": "int4"})),
    ("quantization", _same("read from the checkpoint, too", values=QUANTIZATIONS)),
    ("load_format", _same("`safetensors` and `hf` are `auto`; a `.gguf` file is a model's name",
                          values=dict.fromkeys(("safetensors", "hf", "gguf"), "auto"))),
    ("attention_backend", _same("`triton` or `flashinfer`", accepts=(None,),
                                values={"TRITON_ATTN": "triton", "FLASHINFER": "flashinfer"})),
    ("enforce_eager", _other("cuda_graphs", "its opposite", values={True: False, False: True})),
    ("num_gpu_blocks_override", _other("num_kv_blocks")),
    ("async_scheduling", _other("overlap", accepts=(None,))),
    ("speculative_config", _other(
        "speculative", "`num_speculative_tokens` is `num_tokens`", values=_drafts)),
    ("enable_chunked_prefill",
     _no_op("prompts above `max_num_batched_tokens` are always computed in chunks", True, None)),
    ("disable_log_stats disable_log_requests aggregate_engine_logging "
     "show_hidden_metrics_for_version log_level enable_logging_iteration_details "
     "kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics "
     "enable_mm_processor_stats custom_histogram_buckets per_request_spec_decode_metrics "
     "logging_config log_config_file",
     _no_op("nothing is logged for each step; `LLM.metrics()` counts")),
    ("disable_custom_all_reduce enable_shm_tensor_arena disable_nccl_for_dp_synchronization "
     "max_parallel_loading_workers safetensors_load_strategy safetensors_prefetch_num_threads "
     "safetensors_prefetch_block_size pt_load_map_location distributed_timeout_seconds "
     "cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus "
     "ray_workers_use_nsight", _no_op("how ranks talk and load is not an option")),
    ("compilation_config optimization_level performance_mode cudagraph_capture_sizes "
     "max_cudagraph_capture_size kernel_config ir_op_priority enable_flashinfer_autotune "
     "monokernel moe_backend linear_backend jit_monitor_mode jit_monitor_verbose "
     "disable_cascade_attn use_fp64_gumbel enable_bf16x3_router_gemm",
     _no_op("kernels and graph sizes are chosen from measurements; `cuda_graphs=False` is eager")),
    ("scheduler_reserve_full_isl prefill_schedule_interval watermark prefix_caching_hash_algo "
     "prefix_cache_retention_interval disable_hybrid_kv_cache_manager "
     "long_prefill_token_threshold_adaptive swa_bounded_replay prefix_match_unit "
     "disable_chunked_mm_input", _no_op("tuning of vLLM's scheduler and block manager")),
    ("enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph enable_cumem_allocator "
     "enable_nccl_comm_suspend", _no_op("`sleep` works without it")),
    ("guided_decoding_backend", _no_op("llguidance reads every form")),
    ("structured_outputs_config", Row(
        "no-op", "its `backend` alone: llguidance reads every form, and whitespace and further "
        "properties are fields of StructuredOutputsParams", settings=("backend",))),
    ("limit_mm_per_prompt mm_processor_cache_gb mm_processor_cache_type skip_mm_profiling "
     "mm_shm_cache_max_object_size_mb mm_hasher_algorithm mm_tensor_ipc mm_ipc_gpu_memory_gb "
     "mm_encoder_attn_backend mm_encoder_tp_mode mm_processor_device mm_device_do_normalize "
     "allowed_media_domains renderer_num_workers language_model_only",
     _no_op("`max_mm_items` and `mm_cache_memory_bytes` bound items, no URL is fetched, and the "
            "first image loads the encoder")),
    ("served_model_name shutdown_timeout watchdog_config fail_on_environ_validation tokens_only "
     "stream_interval", _no_op("a server's option")),
    ("swap_space max_seq_len_to_capture use_v2_block_manager num_scheduler_steps "
     "preemption_mode", _no_op("an older vLLM's, without effect there, too")),
    ("model_impl", _no_op("models are mrv1's own", "auto", "vllm")),
    ("mamba_backend mamba_ssu_algorithm mamba_cache_dtype mamba_ssm_cache_dtype "
     "mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint "
     "replayssm_buffer_len use_replayssm enable_mamba_cache_stochastic_rounding "
     "mamba_cache_philox_rounds mamba_config gdn_prefill_backend kda_prefill_backend "
     "kda_decode_backend sparse_indexer_topk_backend engram_config diffusion_config",
     _no_op("for kinds of models that are not here")),
    ("trust_remote_code",
     _not_here("no code of a checkpoint runs; the families of README need none: leave it out")),
    ("revision", _not_here('write model="org/name@revision"')),
    ("code_revision tokenizer_revision hf_config_path config_format model_weights",
     _not_here("a model is one directory, file or org/name@revision", "auto")),
    ("hf_overrides rope_scaling rope_theta model_class_overrides additional_config",
     _not_here("change `config.json` in a copy of the checkpoint")),
    ("tokenizer tokenizer_mode", _not_here(
        "the checkpoint's own is used; for another give prompts of token ids", "auto", "hf")),
    ("skip_tokenizer_init", _not_here("give prompts of token ids and detokenize=False")),
    ("download_dir", _not_here("set HF_HOME")),
    ("hf_token", _not_here("set HF_TOKEN, or run `hf auth login`", True)),
    ("runner task convert pooler_config",
     _not_here("models generate; none embeds or ranks", "auto", "generate", "none")),
    ("""pipeline_parallel_size data_parallel_size decode_context_parallel_size nnodes
        prefill_context_parallel_size data_parallel_rank data_parallel_start_rank
        data_parallel_size_local data_parallel_address node_rank data_parallel_hybrid_lb
        data_parallel_external_lb data_parallel_multi_port_external_lb dcp_q_replicate
        dcp_kv_cache_interleave_size cp_kv_cache_interleave_size enable_hc_sp
        enable_batch_sharded_sampling enable_dbo ubatch_size""",
     _not_here("tensor_parallel_size, on one host, is the only way to use several GPUs", 1)),
    ("data_parallel_rpc_port data_parallel_backend dcp_comm_backend dp_sync_interval master_addr "
     "master_port dbo_decode_token_threshold dbo_prefill_token_threshold",
     _no_op("only for several hosts, or for ways to use GPUs that are not here")),
    ("enable_expert_parallel enable_ep_weight_filter enable_elastic_ep elastic_ep_max_dp_size "
     "eplb_config enable_eplb",
     _not_here("tensor_parallel_size gives each rank a part of every expert")),
    ("all2all_backend expert_placement_strategy", _no_op("only with enable_expert_parallel")),
    ("device_ids", _not_here('set CUDA_VISIBLE_DEVICES, or device="cuda:N" for one GPU')),
    ("distributed_executor_backend worker_cls worker_extension_cls scheduler_cls "
     "enable_fault_tolerance fault_tolerance_config",
     _not_here("ranks are processes that `LLM` starts", "auto", "mp", "uni")),
    ("cpu_offload_gb cpu_offload_params offload_group_size offload_params kv_offloading_size",
     _not_here("all weights and pages are in GPU memory: see quantization, kv_cache_dtype and "
               "head_policy")),
    ("offload_backend offload_num_in_group offload_prefetch_step kv_offloading_backend",
     _no_op("only with memory of the host, which holds no weights and pages")),
    ("quantization_config allow_deprecated_quantization", _not_here("see `quantization`")),
    ("attention_config", _not_here("see `attention_backend`")),
    ("calculate_kv_scales kv_cache_dtype_skip_layers override_attention_dtype "
     "kv_sharing_fast_prefill", _not_here("see `kv_scale`")),
    ("disable_sliding_window", _not_here("layers keep their windows")),
    ("max_num_scheduled_tokens", _not_here("see `max_num_batched_tokens`")),
    ("max_num_partial_prefills max_long_partial_prefills",
     _not_here("see `max_num_seqs` and `long_prefill_token_threshold`", 1)),
    ("max_num_active_seqs", _not_here("see `max_num_seqs`")),
    ("max_num_queued_reqs max_num_queued_tokens",
     _not_here("`AsyncLLM` has max_num_queued_reqs")),
    ("enable_lora max_loras", _same()),
    ("max_lora_rank", _same("any rank up to 512")),
    ("fully_sharded_loras max_cpu_loras specialize_active_lora",
     _no_op("adapters are divided as the weights are, and stay in host memory until removed")),
    ("default_mm_loras lora_dtype lora_target_modules enable_tower_connector_lora "
     "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
     _not_here("an adapter has the model's dtype, and modules of its text alone", "auto")),
    ("spec_method spec_model spec_tokens", _not_here("see `speculative_config`")),
    ("watermark_config", _not_here("write the watermark as a `LogitsProcessor`")),
    ("reasoning_parser reasoning_parser_plugin reasoning_config io_processor_plugin",
     _not_here("texts come as the model writes them: split them yourself")),
    ("chat_template", _not_here("give it to `LLM.chat`")),
    ("mm_processor_kwargs media_io_kwargs interleave_mm_strings video_pruning_rate "
     "enable_mm_embeds mm_encoder_only mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
     "mm_encoder_fp8_scale_save_path",
     _not_here("`mrv1.multimodal.VisionEncoder` makes features; change them there")),
    ("video_pruning_method mm_encoder_fp8_scale_save_margin",
     _no_op("only with options of the encoder that are not here")),
    ("allowed_local_media_path", _not_here("check the paths in messages yourself")),
    ("enable_prompt_embeds", _not_here("prompts are texts or token ids; features of images, "
                                       "audio and video are `multimodal`")),
    ("enable_return_routed_experts return_sampling_mask enable_trace_replay aux_output_config",
     _not_here("outputs have no such field")),
    ("profiler_config otlp_traces_endpoint collect_detailed_traces enable_layerwise_nvtx_tracing",
     _not_here("use torch.profiler or Nsight around the call")),
    ("kv_transfer_config kv_events_config ec_transfer_config ec_manager_config",
     _not_here("see LLM.set_kv_listener, or mrv1 inside vLLM")),
    ("weight_transfer_config sleep_preserve_parameter_names",
     _not_here("see LLM.update_weights")),
    ("ignore_patterns model_loader_extra_config", _not_here("only safetensors and GGUF are read")),
)  # fmt: skip
"""Options of ``LLM``: vLLM's own, those of ``EngineArgs``, and some of older versions."""

METHODS = _named(
    ("generate", _same(
        '`priority` needs `scheduling_policy="priority"`')),
    ("chat", _same("`use_tqdm` and what follows it only by name")),
    ("get_tokenizer get_default_sampling_params wake_up", _same()),
    ("sleep reset_prefix_cache", _same("not while a request runs")),
    ("update_weights", _same("takes tensors by name, on any device")),
    ("get_metrics", _other("metrics", "returns a dict of counters")),
    ("llm_engine", _other("engine", "add_request, step and abort are methods of `LLM`")),
    ("enqueue", _other("add_request", "one prompt a call")),
    ("enqueue_chat", _other("add_request", "takes what `chat_prompt` returns")),
    ("wait_for_completion", _other("step", "call it while has_unfinished_requests()")),
    ("beam_search", _not_here("draw `n` outputs with `logprobs` and choose by "
                              "cumulative_logprob")),
    ("encode embed classify score reward", _not_here("models generate; none embeds or ranks")),
    ("collective_rpc apply_model", _not_here(
        "change weights by update_weights, logits by logits_processors, and see keys and values "
        "by set_kv_listener")),
    ("start_profile stop_profile", _not_here("use torch.profiler around the call")),
    ("get_world_size", _not_here("it is the option tensor_parallel_size")),
    ("reset_mm_cache", _not_here("reset_prefix_cache and sleep drop features, too")),
    ("release_kv_cache_memory", _not_here("sleep gives weights and cache back")),
    ("init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update "
     "start_draft_weight_update finish_weight_update update_weight_version get_weight_version",
     _not_here("call update_weights with the tensors; it is one step, and changes all or none")),
    ("from_engine_args", _not_here("call LLM(model, ...) with the options")),
    ("set_tokenizer", _not_here("give prompts of token ids")),
    ("model_config supported_tasks renderer input_processor engine_class request_counter "
     "runner_type", _not_here("see LLM.describe, LLM.get_tokenizer and LLM.chat_prompt")),
)  # fmt: skip
"""Methods and attributes of ``LLM``."""

ARGUMENTS = _named(
    ("prompt_token_ids", _not_here("write prompts=[TokensPrompt(prompt_token_ids=...)]")),
    ("tokenization_kwargs", _not_here("encode texts yourself, and give token ids")),
    ("mm_processor_kwargs", _not_here("prepare images before the call")),
    ("priority", _not_here("give `generate`, which has it, what `chat_prompt` returns")),
    ("chat_template_content_format", _no_op("parts of a message fit any template")),
)  # fmt: skip
"""Arguments of ``LLM.generate`` and ``LLM.chat`` that one of them, or both, do not have."""


class OtherArguments(TypedDict, total=False):
    """Those of ``LLM.generate``: a value that asks for nothing is taken, another one refused."""

    prompt_token_ids: object
    tokenization_kwargs: object
    mm_processor_kwargs: object


PROMPT = _named(
    ("prompt prompt_token_ids", _same("one of the two")),
    ("multi_modal_data", _not_here(
        'put images into messages of `LLM.chat` ({"type": "image", "image": ...}), or give '
        "`multimodal`, the features of `mrv1.multimodal.VisionEncoder.prompt`")),
    ("multi_modal_uuids", _not_here("equal features are found by their content")),
    ("mm_processor_kwargs media_io_kwargs", _not_here("prepare images before the call")),
    ("cache_salt", _not_here("prefixes are shared among all; enable_prefix_caching=False shares "
                             "none")),
    ("prompt_embeds prompt_is_token_ids", _not_here("give text or token ids")),
    ("token_type_ids prompt_token_offsets encoder_prompt decoder_prompt",
     _not_here("models are decoders alone")),
)  # fmt: skip
"""Keys of a prompt that is a dict, such as ``TokensPrompt``."""

OUTPUT = _named(
    ("request_id prompt finished num_cached_tokens index text cumulative_logprob finish_reason "
     "stop_reason", _same()),
    ("prompt_token_ids prompt_logprobs outputs token_ids logprobs", _same("a tuple")),
    ("metrics", _same("times on the clock of time.perf_counter, and counts")),
    ("spec_decode_metrics", _other("metrics", "num_draft_tokens and num_accepted_tokens")),
    ("lora_request", _not_here("the caller has given it")),
    ("encoder_prompt encoder_prompt_token_ids", _not_here("models are decoders alone")),
    ("num_cache_creation_tokens", _not_here("see num_cached_tokens and LLM.kv_report")),
    ("prompt_token_id_logprobs", _not_here("see prompt_logprobs")),
    ("kv_transfer_params ec_transfer_params", _not_here("see LLM.set_kv_listener")),
    ("routed_experts sampling_mask weight_versions", _not_here("not recorded")),
)  # fmt: skip
"""Fields of ``RequestOutput`` and of its ``CompletionOutput``s."""

PARAMS = _named(
    ("""n presence_penalty frequency_penalty temperature top_p top_k min_p stop stop_token_ids
        ignore_eos max_tokens min_tokens logprob_token_ids detokenize skip_special_tokens
        spaces_between_special_tokens include_stop_str_in_output allowed_token_ids""", _same()),
    ("repetition_penalty", _same("at most 2")),
    ("bad_words", _same("at most `max_bad_words_num`, of `bad_words_max_len` tokens")),
    ("logit_bias", _same("at most `max_logit_bias` tokens")),
    ("seed", _same("draws are mrv1's own: equal in every run, other than vLLM's")),
    ("logprobs prompt_logprobs", _same("-1, the whole vocabulary, needs `max_logprobs=-1`")),
    ("structured_outputs", _same("a `StructuredOutputsParams`, which `mrv1` has")),
    ("stream_interval skip_clone output_text_buffer_length",
     _no_op("a request has a copy, and each step an output")),
    ("output_kind", _not_here("an output holds all tokens so far; `stream` shows them growing")),
    ("flat_logprobs", _not_here("log-probabilities are dicts, one for each position")),
    ("best_of", _not_here("draw `n` outputs with logprobs=0 and choose by cumulative_logprob",
                          1)),
    ("use_beam_search length_penalty early_stopping", _not_here(
        "draw `n` outputs with logprobs=0 and choose by cumulative_logprob", 1.0)),
    ("guided_decoding", _not_here("write structured_outputs=StructuredOutputsParams(...)")),
    ("truncate_prompt_tokens", _not_here("cut the prompt's token ids yourself")),
    ("logits_processors", _not_here("give them to `LLM`, for all requests")),
    ("prompt_logprob_token_ids prompt_logprob_start", _not_here("see prompt_logprobs")),
    ("skip_reading_prefix_cache", _not_here("call LLM.reset_prefix_cache before it")),
    ("thinking_token_budget", _not_here("see max_tokens, or stop the thought by `stop`")),
    ("repetition_detection", _not_here("see repetition_penalty and `LLM.stream`")),
    ("watermarking", _not_here("write it as a `LogitsProcessor`")),
    ("routed_experts_prompt_start trace_decode_token_ids", _not_here("not recorded")),
    ("extra_args", _not_here("a `LogitsProcessor` sees a request's slot, parameters and tokens")),
)  # fmt: skip
"""Fields of ``SamplingParams``, and some of older versions."""

FORM = _named(
    ("json regex choice json_object disable_any_whitespace disable_additional_properties "
     "whitespace_pattern", _same()),
    ("grammar", _same("EBNF or Lark")),
    ("structural_tag", _not_here("write it as a `grammar`, in which a tag's text is a rule")),
    ("disable_fallback", _no_op("llguidance reads every form")),
)  # fmt: skip
"""Fields of ``StructuredOutputsParams``."""

ADAPTER = _named(
    ("lora_name lora_int_id lora_path", _same()),
    ("base_model_name", _same("not read")),
    ("lora_local_path", _other("lora_path")),
    ("load_inplace", _not_here("call LLM.remove_lora, then LLM.add_lora")),
    ("is_3d_lora_weight", _no_op("adapters of experts are refused in any layout")),
    ("tensorizer_config_dict", _not_here("only safetensors and .bin files are read")),
    ("long_lora_max_len", _not_here("an adapter does not change the model's context")),
)  # fmt: skip
"""Fields of ``LoRARequest``, and some of older versions."""


def translated(
    given: Mapping[str, Any], rows: Mapping[str, Row], of: str, error: Callable[[str], Exception]
) -> dict[str, Any]:
    """Return what is given under mrv1's names; names that vLLM does not have stay.

    error: a name has no counterpart, or its counterpart is given, too.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        row = rows.get(name)
        if row is None:
            found[name] = value
        elif row.ignores(value):
            if row.kind == "no-op":
                logger.info("%s: without effect: %s", name, row.note)
        elif row.kind in ("no-op", "not here"):
            raise error(f"{name}: expected {of}, got vLLM's {name}={short(value)}: {row.note}")
        elif row.to in given:
            raise error(f"{name}: expected one of it and {row.to}, got both")
        else:
            found[row.to or name] = row.here(value)
    return found


def refuse_attribute(owner: object, name: str) -> NoReturn:
    """Raise the AttributeError of an object for a name it lacks; says what to do if vLLM's."""
    of = type(owner).__name__
    row = METHODS.get(name) or OUTPUT.get(name)
    message = f"{of!r} object has no attribute {name!r}"
    if row is not None and row.kind != "same":
        what = f"{row.to}; " if row.to else ""
        message = f"{of}.{name}: expected a name of mrv1, got vLLM's: {what}{row.note}"
    raise AttributeError(message, name=name, obj=owner)
