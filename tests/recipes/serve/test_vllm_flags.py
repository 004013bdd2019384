"""Every launch flag and every environment variable of vLLM is decided on.

One that nobody has looked at may make records or drafts wrong.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from local_hub import keep_in_cache

from redraft.files.folder import model_folder
from redraft.recipes.serve.vllm_flags import (
    CLASHES,
    READ,
    list_warnings,
    read_flags,
    require_agreement,
    require_same_weights,
)

DECISIONS = {
    "refused by `redraft serve`: it would contradict draft, target or records": """
        model model_weights speculative_config spec_method spec_model spec_tokens enable_prompt_embeds
        load_format
    """,
    "warned of by `redraft serve`, and in the notes of a status": """
        disable_log_stats
    """,
    "checked by the tap before it records": """
        logprobs_mode max_logprobs generation_config override_generation_config enable_lora lora_modules
        served_model_name return_tokens_as_token_ids watermark_config
    """,
    "refused beside a draft by vLLM itself; a tap cannot see it (docs/online.md)": """
        logits_processors
    """,
    "decided for each request, which is recorded or counted by reason": """
        structured_outputs_config reasoning_config reasoning_parser reasoning_parser_plugin
        enable_trace_replay default_mm_loras trust_request_mm_kwargs enable_mm_embeds
        limit_mm_per_prompt language_model_only tool_strict_level enable_auto_tool_choice
    """,
    "the weights may change later, which the watch on the target notices": """
        weight_transfer_config enable_sleep_mode enable_eplb eplb_config enable_elastic_ep
    """,
    "the target is served so, and records hold what is served": """
        quantization quantization_config allow_deprecated_quantization dtype kv_cache_dtype
        kv_cache_dtype_skip_layers hf_overrides model_class_overrides hf_config_path revision
        code_revision tokenizer tokenizer_mode tokenizer_revision chat_template
        default_chat_template_kwargs use_fp64_gumbel seed swa_bounded_replay kv_sharing_fast_prefill
        enable_mamba_cache_stochastic_rounding mamba_cache_dtype mamba_ssm_cache_dtype max_model_len
        diffusion_config skip_tokenizer_init config_format
    """,
    "Python of the operator, which can do anything": """
        worker_cls worker_extension_cls scheduler_cls middleware tool_parser_plugin io_processor_plugin
    """,
    "where, how fast and for whom it serves": """
        additional_config aggregate_engine_logging all2all_backend allow_credentials allowed_headers
        allowed_local_media_path allowed_media_domains allowed_methods allowed_origins
        anthropic_disabled_thinking_effort api_key async_scheduling attention_backend attention_config
        aux_output_config block_size chat_template_content_format cohere_format cohere_is_reasoning_model
        collect_detailed_traces compilation_config convert cp_kv_cache_interleave_size
        cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params cudagraph_capture_sizes
        cudagraph_metrics custom_histogram_buckets data_parallel_address data_parallel_backend
        data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
        data_parallel_rank data_parallel_rpc_port data_parallel_size data_parallel_size_local
        data_parallel_start_rank data_parallel_supervisor_port dbo_decode_token_threshold
        dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate
        decode_context_parallel_size device_ids disable_access_log_for_endpoints disable_cascade_attn
        disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs
        disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization disable_sliding_window
        disable_uvicorn_access_log distributed_executor_backend distributed_timeout_seconds download_dir
        dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s
        dp_supervisor_probe_timeout_s dp_sync_interval ec_manager_config ec_transfer_config
        elastic_ep_max_dp_size enable_batch_sharded_sampling enable_chunked_prefill
        enable_cumem_allocator enable_dbo enable_ep_weight_filter enable_expert_parallel
        enable_fault_tolerance enable_flash_late_interaction enable_flashinfer_autotune
        enable_force_include_usage enable_hc_sp enable_layerwise_nvtx_tracing enable_log_deltas
        enable_log_outputs enable_log_requests enable_logging_iteration_details
        enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format
        enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend enable_offline_docs
        enable_per_request_metrics enable_prefix_caching enable_prompt_tokens_details
        enable_request_id_headers enable_return_routed_experts enable_scale_out
        enable_server_load_tracking enable_shm_tensor_arena enable_ssl_refresh
        enable_tokenizer_info_endpoint enable_tower_connector_lora enforce_eager engram_config
        exclude_tools_when_tool_choice_none expert_placement_strategy fail_on_environ_validation
        fault_tolerance_config fingerprint_mode fingerprint_value fully_sharded_loras gdn_prefill_backend
        gpu_memory_utilization grpc_port h11_max_header_count h11_max_incomplete_event_size hf_token host
        ignore_patterns interleave_mm_strings ir_op_priority jit_monitor_mode jit_monitor_verbose
        kda_decode_backend kda_prefill_backend kernel_config kv_cache_memory_bytes kv_cache_metrics
        kv_cache_metrics_sample kv_events_config kv_offloading_backend kv_offloading_size
        kv_transfer_config linear_backend log_config_file log_error_stack log_level logging_config
        long_prefill_token_threshold long_prefill_token_threshold_adaptive lora_dtype lora_target_modules
        mamba_backend mamba_block_size mamba_cache_mode mamba_cache_philox_rounds mamba_config
        mamba_ssu_algorithm master_addr master_port max_cpu_loras max_cudagraph_capture_size max_log_len
        max_lora_cls_labels max_lora_rank max_loras max_num_active_seqs max_num_batched_tokens
        max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs
        max_parallel_loading_workers media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
        mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm
        mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
        mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model_impl
        model_loader_extra_config moe_backend nnodes node_rank num_gpu_blocks_override numa_bind
        numa_bind_cpus numa_bind_nodes offload_backend offload_group_size offload_num_in_group
        offload_params offload_prefetch_step optimization_level otlp_traces_endpoint
        per_request_spec_decode_metrics performance_mode pipeline_parallel_size pooler_config port
        prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval
        prefix_caching_hash_algo prefix_match_unit profiler_config pt_load_map_location
        ray_workers_use_nsight renderer_num_workers replayssm_buffer_len response_role
        return_sampling_mask root_path runner safetensors_load_strategy safetensors_prefetch_block_size
        safetensors_prefetch_num_threads scheduler_reserve_full_isl scheduling_policy
        show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling sleep_mode_offload_cudagraph
        sleep_preserve_parameter_names sparse_indexer_topk_backend specialize_active_lora
        sse_keep_alive_interval ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile
        stream_interval tensor_parallel_size tokens_only tool_call_parser tool_server trust_remote_code
        trust_request_chat_template ubatch_size uds use_replayssm use_tqdm_on_load uvicorn_log_level
        video_pruning_method video_pruning_rate watermark
    """,
}
"""The flags of vLLM 0.32, by the reason why records and drafts stay right."""

VARIABLES = {
    "set or read by redraft, or refused or warned of by it": """
        CUDA_VISIBLE_DEVICES FORCE_COLOR VLLM_CPU_OMP_THREADS_BIND VLLM_ENGINE_READY_TIMEOUT_S
        VLLM_LOGGING_COLOR VLLM_LOGGING_PREFIX VLLM_MODEL_REDIRECT_PATH VLLM_PLUGINS
        VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_SERVER_DEV_MODE VLLM_USE_MODELSCOPE
        VLLM_USE_RUST_FRONTEND VLLM_USE_V2_MODEL_RUNNER
    """,
    "how vLLM was built, where its files lie, and how it is debugged": """
        CMAKE_BUILD_TYPE CUDA_HOME LD_LIBRARY_PATH MAX_JOBS NVCC_THREADS VERBOSE
        VLLM_*BUILD* VLLM_*_PRECOMPILED* VLLM_SKIP_*VERSION_SUFFIX VLLM_IMAGE_TAG VLLM_TARGET_DEVICE
        VLLM_MAIN_CUDA_VERSION VLLM_*CACHE VLLM_*_CACHE_PATH VLLM_*_ROOT VLLM_*_DIR VLLM_*_FOLDER
        VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_RPC_BASE_PATH VLLM_RUST_FRONTEND_PATH VLLM_USE_RUST_BENCH
        VLLM_*_SO_PATH VLLM_*_INCLUDE_PATH VLLM_CUDA_COMPATIBILITY_PATH VLLM_ENABLE_CUDA_COMPATIBILITY
        VLLM_*DEBUG* VLLM_TRACE_FUNCTION VLLM_*PROFILING VLLM_TEST_* VLLM_*_CI_ENV
        VLLM_GPU_SYNC_CHECK VLLM_LOG_MODEL_INSPECTION VLLM_USE_LAYERNAME VLLM_HAS_FLASHINFER_CUBIN
    """,
    "what vLLM logs and reports of itself": """
        NO_COLOR VLLM_CONFIGURE_LOGGING VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_LOG_*_INTERVAL
        VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM VLLM_MOONCAKE_STORE_TIER_LOG
        VLLM_NO_USAGE_STATS VLLM_PROCESS_NAME_PREFIX VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_USAGE_*
        VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS
    """,
    "kernels, compilers and devices: the same model, faster or within rounding": """
        VLLM_ROCM_* VLLM_XPU_* VLLM_XLA_* VLLM_TPU_* VLLM_CPU_* VLLM_FLASHINFER_* VLLM_KIMI_* VLLM_HUMMING_*
        VLLM_DEEPEP* VLLM_*TRITON* VLLM_*FLASHINFER* VLLM_*DEEP_GEMM* VLLM_*GEMM* VLLM_*INDUCTOR*
        VLLM_*MOE* VLLM_*NCCL* VLLM_*CUDAGRAPH* VLLM_*SYMM_MEM VLLM_*MARLIN* VLLM_*EMULATION* VLLM_*DCP*
        VLLM_ALLREDUCE_* VLLM_*SHARED_EXPERT* VLLM_WEIGHT_OFFLOADING_* VLLM_ZENTORCH_* VLLM_*_STREAM*
        VLLM_*SPLIT_GROUP VLLM_USE_STANDALONE_COMPILE VLLM_ENABLE_PREGRAD_PASSES VLLM_PATTERN_MATCH_DEBUG
        VLLM_USE_BYTECODE_HOOK VLLM_BATCH_INVARIANT VLLM_REPLICATE_EMBED VLLM_MLA_DISABLE
        VLLM_SPARSE_INDEXER_* VLLM_SKIP_P2P_CHECK VLLM_DISABLED_KERNELS VLLM_USE_HW_AGNOSTIC
        VLLM_ENABLE_FLA_* VLLM_DISABLE_PYNCCL VLLM_USE_OINK_OPS VLLM_ENABLE_HPC_OPS VLLM_DBO_COMM_SMS
        VLLM_*_CHUNKED_LOCAL_ATTN_* VLLM_LORA_DISABLE_PDL VLLM_WSL2_* VLLM_USE_SPINLOOP_EXT
        VLLM_MEMORY_PROFILER_* VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS VLLM_ENABLE_STARTUP_PLAN
        VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_*AOT_* VLLM_FLOAT32_* VLLM_GDN_* VLLM_*_LAYOUT
        VLLM_COMPILE_CACHE_SAVE_FORMAT
    """,
    "where and how processes meet": """
        LOCAL_RANK MOONCAKE_* VLLM_DP_* VLLM_EC_* VLLM_ELASTIC_EP_* VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_MOONCAKE_*
        VLLM_NIXL_* VLLM_P2P_* VLLM_PP_LAYER_PARTITION VLLM_*RAY_* VLLM_RANDOMIZE_DP_DUMMY_INPUTS
        VLLM_*KV_OFFLOAD* VLLM_KV_EVENTS_* VLLM_MQ_* VLLM_MSGPACK_* VLLM_*_TIMEOUT_SECONDS
        VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_KEEP_ALIVE_ON_ENGINE_DEATH
        VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_OBJECT_STORAGE_* VLLM_PORT VLLM_WORKER_MULTIPROC_METHOD
        VLLM_V1_OUTPUT_PROC_CHUNK_SIZE S3_*
    """,
    "what the API takes and how long it waits": """
        VLLM_API_KEY VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_MAX_* VLLM_*MEDIA* VLLM_*_FETCH_TIMEOUT VLLM_VIDEO_*
        VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_XGRAMMAR_CACHE_MB
        VLLM_V1_USE_OUTLINES_CACHE VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_*LORA_* VLLM_SKIP_MODEL_NAME_VALIDATION
        VLLM_ENABLE_*_API* VLLM_*TOOL* VLLM_GPT_OSS_* VLLM_SYSTEM_START_DATE VLLM_USE_FASTOKENS
        VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
    """,
}
"""The environment variables of vLLM 0.32 (patterns), by the reason why `redraft up` needs no more."""

CLASSES = {
    "engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs"),
    "entrypoints/launchers/cli_args.py": ("BaseFrontendArgs", "FrontendArgs"),
}

OF_THE_COMMAND = "entrypoints/launchers/cli_args.py"
"""File with the flags of `vllm serve` that are no setting of an engine or a server."""


def list_flags(package: Path) -> set[str]:
    """The fields of vLLM's argument classes, read without importing them."""
    return {
        field.target.id
        for path, classes in CLASSES.items()
        for node in ast.parse((package / path).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def list_more_flags(package: Path) -> set[str]:
    """Names in calls of `parser.add_argument`, short ones too."""
    calls = ast.walk(ast.parse((package / OF_THE_COMMAND).read_text()))
    return {
        argument.value.lstrip("-").replace("-", "_")
        for call in calls
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }


@pytest.fixture(scope="module")
def vllm_package() -> Path:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("no vLLM is installed")
    return Path(found.submodule_search_locations[0])


def test_every_launch_flag_of_vllm_is_decided_on(vllm_package) -> None:
    flags = {name for name in list_flags(vllm_package) if not name.startswith("_")}
    decided = [name for names in DECISIONS.values() for name in names.split()]
    assert len(decided) == len(set(decided))
    assert flags - set(decided) == set()


def list_variables(package: Path) -> set[str]:
    """The keys of vLLM's table of environment variables."""
    (table,) = (
        node.value
        for node in ast.walk(ast.parse((package / "envs.py").read_text()))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.value, ast.Dict)
        and ast.unparse(node.target) == "environment_variables"
    )
    return {key.value for key in table.keys if isinstance(key, ast.Constant)}


def test_every_variable_of_vllm_is_decided_on(vllm_package) -> None:
    known = list_variables(vllm_package)
    assert len(known) > 250
    decided = [pattern for patterns in VARIABLES.values() for pattern in patterns.split()]
    assert {name for name in known if not any(fnmatchcase(name, one) for one in decided)} == set()
    assert [one for one in decided if not any(fnmatchcase(name, one) for name in known)] == []


def test_variables_that_give_vllm_other_weights_are_refused(tmp_path) -> None:
    def check(target, **environment):
        require_same_weights(target, environment)

    check("owner/model")
    check("owner/model", VLLM_USE_MODELSCOPE="False", VLLM_MODEL_REDIRECT_PATH="")
    check(str(tmp_path), VLLM_USE_MODELSCOPE="True")
    with pytest.raises(ValueError, match=r"VLLM_USE_MODELSCOPE.* owner/model .*folder"):
        check("owner/model", VLLM_USE_MODELSCOPE="True")
    with pytest.raises(ValueError, match=rf"VLLM_MODEL_REDIRECT_PATH.* {tmp_path}: unset"):
        check(str(tmp_path), VLLM_MODEL_REDIRECT_PATH="redirects.json")


def test_every_clash_is_with_a_flag_that_vllm_has(vllm_package) -> None:
    known = list_flags(vllm_package) | list_more_flags(vllm_package)
    assert {"headless", "grpc", "api_server_count", "config"} <= known
    assert {clash.flag for clash in CLASHES} <= known
    assert set(READ) <= known


@pytest.mark.parametrize("clash", CLASHES, ids=lambda clash: f"{clash.flag}-{clash.beside}")
def test_each_clash_is_a_line_with_the_flag_and_a_way_out_and_only_with_its_part(clash):
    values = {"load_format": "dummy", "runner": "pooling", "convert": "embed", "nnodes": "2"}
    values |= dict.fromkeys(("data_parallel_size", "pipeline_parallel_size"), "2")
    flag, value = f"--{clash.flag.replace('_', '-')}", values.get(clash.flag, "2")
    assert re.fullmatch(rf"{flag}\b.*: .+", clash.line)

    def said(parts, value):
        try:
            require_agreement([flag, value], {clash.flag: value}, "x", parts)
        except ValueError as error:
            return str(error)
        warned = list_warnings({clash.flag: value}, "x", None, {})
        return next(warned, "")

    assert said([clash.beside], value) == clash.line
    others = [one for one in CLASHES if one.flag == clash.flag and one is not clash]
    others_say = {one.line for one in others if one.only_warns}
    assert said([], value) in {*others_say, clash.line if clash.beside == "redraft" else ""}
    off = {"load_format": "auto", "runner": "generate", "convert": "none"}.get(clash.flag, "1")
    if clash.counts("1") is False or clash.flag in values:
        assert said([clash.beside], off) == ""


def test_a_variable_that_the_server_does_not_heed_is_warned_of():
    for value, count in (("1", 1), ("0", 0)):
        given = {"VLLM_USE_RUST_FRONTEND": value}
        lines = list(list_warnings({}, "x", None, {}, given))
        assert len(lines) == count
        assert all("VLLM_USE_RUST_FRONTEND" in line for line in lines)


def test_a_word_that_vllm_would_ignore_is_refused():
    with pytest.raises(ValueError, match=r"^other/model "):
        require_agreement(["other/model", "--port", "1"], {"port": "1"}, "x", [])


def test_a_target_that_samples_with_min_p_by_default_is_refused_beside_a_draft(tmp_path):
    def check(min_p, *arguments):
        (tmp_path / "generation_config.json").write_text(json.dumps({"min_p": min_p}))
        require_agreement(arguments, read_flags(arguments), str(tmp_path), [])

    check(0.0)
    check(None)
    with pytest.raises(ValueError, match=r"min_p 0\.1\b.*--override-generation-config\.min_p 0"):
        check(0.1)
    check(0.1, "--generation-config", "vllm")
    check(0.1, "--override-generation-config.min_p", "0")
    check(0.1, "--override-generation-config", '{"min_p": 0}')


def test_the_default_min_p_is_that_of_the_served_revision(tmp_path, monkeypatch):
    (tmp_path / "main").mkdir()
    (tmp_path / "main/config.json").write_text("{}")
    name = keep_in_cache(tmp_path / "main", tmp_path / "cache", monkeypatch)
    other = model_folder(name).parent / ("f" * 40)
    shutil.copytree(model_folder(name), other)
    (other / "generation_config.json").write_text('{"min_p": 0.1}')
    require_agreement([], {}, name, [])
    arguments = ["--revision", other.name]
    with pytest.raises(ValueError, match=r"min_p 0\.1\b"):
        require_agreement(arguments, read_flags(arguments), name, [])


def test_the_beginning_of_a_name_is_the_flag_that_argparse_takes_it_for() -> None:
    names = {*READ, "config", *(name for names in DECISIONS.values() for name in names.split())}
    parser = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}")
    checked = 0
    for given in {name[:length] for name in READ for length in range(1, len(name) + 1)} - {
        "config"
    }:
        flag = f"--{given.rstrip('_').replace('_', '-')}"
        try:
            wanted = vars(parser.parse_args([flag, "2"]))
        except SystemExit:  # several flags begin so, and vLLM refuses it
            continue
        assert read_flags([flag, "2"]) == wanted, flag
        checked += 1
    assert checked > len(READ)
