"""The command that starts vLLM with the plugin: what it would run."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro
from safetensors.torch import load_file, save_file

from redraft.engine import adaptive
from redraft.engine.live_file import LiveConfig
from redraft.engine.lookups import lookup_env
from redraft.engine.machine import ENGINE_IS_CPU
from redraft.engine.server import START_TIMEOUT_S, allow_slow_start, vllm_keys
from redraft.engine.settings import read_settings, write_settings
from redraft.engine.target_dtype import default_target_dtype
from redraft.eval.forecast.draft_source import DraftSource
from redraft.heads.families.retrieval import Config as Counts
from redraft.heads.families.retrieval import Retrieval
from redraft.online.engine.config import CaptureConfig, is_enabled, make_table, read_config
from redraft.online.engine.feed import find_owner
from redraft.online.fleet.registry import Registry
from redraft.online.records.origin import EXTRA_ARGS_KEY, Origin
from redraft.recipes.serve import serve, serve_features
from redraft.recipes.serve.serve import (
    RAY_PREFIXES,
    ServeConfig,
    describe_recording,
    keeps_states,
    list_notes,
    note_template,
    plugin_environment,
    require_block,
    require_target,
    server_command,
    speculative_config,
)
from redraft.recipes.serve.vllm_flags import list_warnings, read_flags, require_private

TENSORS = {
    "draft_model": "model.layers.0.mlp.weight",
    "eagle3": "midlayer.hidden_norm.weight",
    "eagle": "fc.weight",
    "medusa": "blocks.0.weight",
    "mtp": "model.mtp_layers.0.weight",
    "peagle": "mask_hidden",
    "dflash": "hidden_norm.weight",
    "hydra": "hydra_head.0.weight",
}
"""A tensor by which a draft of each kind is recognised."""


def parse(*arguments):
    return tyro.cli(ServeConfig, args=list(arguments))


def write_draft(folder, kind="draft_model", **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({TENSORS[kind]: torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def write_answers(folder):
    folder.mkdir(exist_ok=True)
    Retrieval(Counts(max_run=1), {(5,): (6, 0.9)}, [0.0, 0.1]).write(folder)
    return str(folder)


def test_what_stands_behind_the_dashes_goes_to_vllm_as_it_is(tmp_path):
    write_draft(tmp_path)
    cfg = parse(
        "target",
        "--draft",
        str(tmp_path),
        "--num-speculative-tokens",
        "5",
        "--",
        "--port",
        "81",
        "-tp",
        "2",
    )
    command = server_command(cfg)
    assert command[-4:] == ["--port", "81", "-tp", "2"]
    assert command[command.index("--model") + 1] == "target"
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    assert speculative["model"] == str(tmp_path)
    assert speculative["num_speculative_tokens"] == 5
    assert speculative["method"] == "draft_model"


def test_a_server_that_records_ships_its_records_before_it_ends(tmp_path):
    write_draft(tmp_path)
    given = ("target", "--draft", str(tmp_path))
    assert "--shutdown-timeout" not in server_command(parse(*given))
    command = server_command(
        parse(*given, "--capture.spool", str(tmp_path), "--", "--shutdown-timeout", "5")
    )
    assert [
        value for flag, value in itertools.pairwise(command) if flag == "--shutdown-timeout"
    ] == ["30", "5"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "other"], "--model"),
        (["--model=other"], "--model"),
        (["-sc", "{}"], "--speculative-config"),
        (["--speculative_config.method", "ngram"], "--speculative-config"),
        (["--spec-tokens", "2"], "--spec-tokens"),
        (["--speculative-conf.method", "ngram"], "--speculative-config"),
        (["-s", "{}"], "--speculative-config"),
        (["--enable-prompt-embeds"], "--enable-prompt-embeds"),
        (["--enable_prompt_embeds"], "--enable-prompt-embeds"),
        (["--load-format", "dummy"], "--load-format"),
        (["--config", "vllm.yaml"], "--enable-prompt-embeds"),
    ],
)
def test_a_flag_of_vllm_that_draft_or_records_contradict_is_refused(
    tmp_path, monkeypatch, arguments, named
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vllm.yaml").write_text("port: 8001\nenable-prompt-embeds: true\n")
    draft = write_draft(tmp_path / "draft", "eagle3")
    given = ("target", "--draft", draft, "--capture.spool", "spool", "--")
    assert server_command(parse(*given, "--port", "81"))
    with pytest.raises(ValueError, match=f"^{named} "):
        server_command(parse(*given, *arguments))


@pytest.mark.parametrize(
    ("mode", "arguments", "is_refused"),
    [
        ("1", [], True),
        ("1", ["--host", "0.0.0.0"], True),
        ("1", ["--host=trainer.example"], True),
        ("1", ["--host", "127.0.0.1"], False),
        ("1", ["--host", "::1"], False),
        ("1", ["--uds", "/run/vllm"], False),
        ("0", [], False),
    ],
)
def test_the_development_mode_of_vllm_stays_on_this_machine(mode, arguments, is_refused):
    with pytest.raises(ValueError, match="POST /redraft/target") if is_refused else nullcontext():
        require_private(read_flags(arguments), {"VLLM_SERVER_DEV_MODE": mode})


@pytest.mark.parametrize(
    ("target", "is_refused"),
    [("/nope", True), ("./nope", True), ("nope", True), ("owner/name", False), ("s3://a/b", False)],
)
def test_a_target_that_is_nowhere_is_refused_before_vllm_starts(target, is_refused):
    with pytest.raises(FileNotFoundError, match=target) if is_refused else nullcontext():
        require_target(target)


def test_a_file_is_no_target_unless_it_is_a_gguf(tmp_path):
    for name in ("model.safetensors", "model.gguf"):
        (tmp_path / name).touch()
    require_target(str(tmp_path / "model.gguf"))
    with pytest.raises(NotADirectoryError, match=r"model\.safetensors is a file"):
        require_target(str(tmp_path / "model.safetensors"))


def test_a_server_of_lookups_takes_prompt_embeddings():
    assert server_command(parse("target", "--draft", "ngram", "--", "--enable-prompt-embeds"))


def test_arguments_override_the_file_and_negative_numbers_are_values(tmp_path):
    (tmp_path / "v.yaml").write_text("port: 1\nenforce-eager: false\ndtype: half\n")
    flags = read_flags(
        ["--config", str(tmp_path / "v.yaml"), "--port", "2", "--seed", "-1", "--no-enable-lora"]
    )
    assert flags == {
        "config": str(tmp_path / "v.yaml"),
        "port": "2",
        "dtype": "half",
        "seed": "-1",
        "no_enable_lora": "",
    }
    (tmp_path / "v.yaml").write_text("- a\n")
    with pytest.raises(ValueError, match=r"v\.yaml"):
        read_flags(["--config", str(tmp_path / "v.yaml")])


def test_what_is_probably_not_meant_is_warned_of_before_the_server_starts(random_target, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(random_target, draft)
    speculative = {"num_speculative_tokens": 3, "method": "draft_model"}

    def warnings(**flags):
        return list(list_warnings(flags, str(random_target), draft, speculative))

    before = warnings()
    assert (
        len(warnings(disable_log_stats="", uds="/run/vllm.sock", ssl_cert_reqs="2"))
        == len(before) + 3
    )
    assert warnings(ssl_cert_reqs="0") == before
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    assert any("64" in line for line in warnings())


def test_the_target_is_served_in_the_type_of_training_unless_the_user_names_one(tmp_path):
    """On any CPU.

    One without instructions for bfloat16 computes it a hundred times slower, and vLLM would still
    do so.
    """
    write_draft(tmp_path, dtype="bfloat16")
    asked = default_target_dtype(tmp_path, on_cpu=ENGINE_IS_CPU) or "auto"
    for command in (
        server_command(parse(str(tmp_path), "--draft", str(tmp_path), "--", "--dtype", "half")),
        serve_features.server_command(
            serve_features.FeaturesConfig(target=str(tmp_path), vllm_args=("--dtype", "half")), 4
        ),
    ):
        given = [value for flag, value in itertools.pairwise(command) if flag == "--dtype"]
        assert given == [asked, "half"], "vLLM takes the last one"


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "eagle", "medusa", "mtp"])
@pytest.mark.parametrize(
    "config", [{}, {"architectures": ["LlamaForCausalLMEagle3"]}, {"redraft": {"family": "medusa"}}]
)
def test_the_method_follows_from_the_drafts_tensors(tmp_path, kind, config):
    draft = write_draft(tmp_path / "draft", kind, **config)
    command = server_command(parse("target", "--draft", draft))
    assert json.loads(command[command.index("--speculative-config") + 1])["method"] == kind


def test_the_template_is_served_with_the_arguments_of_the_training(tmp_path):
    write_draft(tmp_path, "medusa")
    command = server_command(parse("target", "--draft", str(tmp_path)))
    assert "--default-chat-template-kwargs" not in command
    arguments = {"enable_thinking": False}
    assert not list(note_template(tmp_path, {}))
    (tmp_path / "provenance.json").write_text(json.dumps({"template_arguments": arguments}))
    command = server_command(parse("target", "--draft", str(tmp_path)))
    assert json.loads(command[command.index("--default-chat-template-kwargs") + 1]) == arguments
    (note,) = note_template(tmp_path, {})
    assert json.dumps(arguments) in note
    given = read_flags(("--default-chat-template-kwargs.enable_thinking", "true"))
    assert not list(note_template(tmp_path, given))
    assert not list(note_template(None, {}))


def test_a_draft_that_vllm_has_no_proposer_for_is_told_before_it_starts(tmp_path):
    write_draft(tmp_path, "hydra")
    with pytest.raises(ValueError, match="Hydra"):
        server_command(parse("target", "--draft", str(tmp_path)))


def test_a_draft_that_only_vllm_reads_is_served_as_a_head(tmp_path):
    """The layers of another trainer, quantised weights, and weights in an old file."""
    write_draft(tmp_path / "latent", "eagle3")
    tensors = load_file(tmp_path / "latent" / "model.safetensors")
    latent = {"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(1)}
    save_file(tensors | latent, tmp_path / "latent" / "model.safetensors", {"format": "pt"})
    write_draft(tmp_path / "fp8", "eagle3", quantization_config={"quant_method": "fp8"})
    write_draft(tmp_path / "old", "eagle3")
    (tmp_path / "old" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "old" / "pytorch_model.bin")
    for name in ("latent", "fp8", "old"):
        given = ("target", "--draft", str(tmp_path / name))
        command = server_command(parse(*given))
        found = json.loads(command[command.index("--speculative-config") + 1])
        assert (found["method"], found["model"]) == ("eagle3", str(tmp_path / name))
        with pytest.raises(ValueError, match="--kv-sharing-fast-prefill"):
            server_command(parse(*given, "--", "--kv-sharing-fast-prefill"))


def test_the_mtp_layer_of_a_target_without_one_is_refused(random_target, tmp_path):
    target = shutil.copytree(random_target, tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    for draft in ("mtp", "ngram+mtp"):
        with pytest.raises(ValueError, match=rf"^{target} contains no MTP layer"):
            server_command(parse(str(target), "--draft", draft))
    # Of Qwen3-Next, of MiMo, and of DeepSeek after its 2 layers.
    for name in ("mtp.fc.weight", "model.mtp_layers.0.x.weight", "model.layers.2.enorm.weight"):
        layer = {name: torch.zeros(1)}
        save_file(tensors | layer, target / "model.safetensors", {"format": "pt"})
        assert '"mtp"' in str(server_command(parse(str(target), "--draft", "mtp")))


def test_what_is_recorded_is_said_before_the_start():
    assert describe_recording(CaptureConfig()) == []
    (line,) = describe_recording(CaptureConfig(spool=Path("records")))
    assert "100% of all requests as text in records" in line
    log = CaptureConfig(ingest="nats://user:secret@log:4222", fraction=0.02, tenants=("a", "b"))
    (line,) = describe_recording(log)
    assert "2% of all requests of the tenants a, b as text in nats://log:4222 " in line
    assert "secret" not in line


def test_an_engine_may_take_half_an_hour_to_start_unless_the_user_says_otherwise():
    name = "VLLM_ENGINE_READY_TIMEOUT_S"
    assert allow_slow_start({}) == {name: str(START_TIMEOUT_S)}
    assert allow_slow_start({name: "60"}) == {name: "60"}


def write_dspark(folder, **changed):
    names = [
        "markov_head.markov_w1.weight",
        *(["confidence_head.proj.weight"] if changed.get("tensors", True) else []),
    ]
    save_file(
        {name: torch.zeros(1, 1) for name in names}, folder / "model.safetensors", {"format": "pt"}
    )
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "enable_confidence_head": changed.get("enabled", True),
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_a_draft_of_v2_is_refused_in_a_line_where_vllm_takes_v1(tmp_path, monkeypatch):
    write_dspark(tmp_path)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match=r"V2.*DSpark.*VLLM_USE_V2_MODEL_RUNNER=0"):
        server_command(parse("target", "--draft", str(tmp_path)))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    command = server_command(parse("target", "--draft", str(tmp_path)))
    assert json.loads(command[command.index("--speculative-config") + 1])["method"] == "dspark"


def test_a_draft_of_v1_is_refused_in_a_line_where_v2_is_asked_for(tmp_path, monkeypatch):
    write_draft(tmp_path, "peagle")
    assert "parallel_drafting" in str(server_command(parse("target", "--draft", str(tmp_path))))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match=r"\bV1\b.*P-EAGLE.*VLLM_USE_V2_MODEL_RUNNER=1\b.*\bV2\b"):
        server_command(parse("target", "--draft", str(tmp_path)))


def test_more_tokens_than_the_draft_proposes_are_refused_in_a_line(tmp_path):
    write_draft(tmp_path, "dflash", block_size=4)
    assert "dflash" in str(
        server_command(parse("target", "--draft", str(tmp_path), "--num-speculative-tokens", "3"))
    )
    with pytest.raises(
        ValueError, match=rf"^4 .*{tmp_path}.*DFlash.* 3\b.*--num-speculative-tokens to at most 3\b"
    ):
        server_command(parse("target", "--draft", str(tmp_path), "--num-speculative-tokens", "4"))


def test_ngrams_go_before_a_head(tmp_path):
    head = write_draft(tmp_path / "head", "eagle3")
    flags = ("--num-speculative-tokens", "4", "--head-requests", "6")
    mixed = parse("target", "--draft", f"ngram+{head}:2", *flags)
    command = server_command(mixed)
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("eagle3", 4)
    assert speculative["model"] == head
    assert not {"prompt_lookup_max", "head_tokens"} & speculative.keys(), (
        "vLLM would refuse them, or set them to 0"
    )
    told = {"prompt_lookup_min": 2, "prompt_lookup_max": 4, "head_tokens": 2, "head_requests": 6}
    environment = lookup_env(speculative_config(mixed))
    assert read_settings(environment) == {"lookup": told}
    model = write_draft(tmp_path / "model")
    with pytest.raises(ValueError, match="draft_model"):
        server_command(parse("target", "--draft", f"ngram+{model}"))


def test_counted_answers_go_before_a_head(tmp_path):
    head, answers = write_draft(tmp_path / "head", "eagle3"), write_answers(tmp_path / "answers")
    flags = ("target", "--draft", f"{answers}+{head}:2", "--num-speculative-tokens", "6")
    mixed = speculative_config(parse(*flags))
    assert vllm_keys(mixed).keys() & {"retrieval", "prompt_lookup_max", "head_tokens"} == set()
    told = {"retrieval": answers, "head_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    environment = lookup_env(mixed)
    assert read_settings(environment) == {"lookup": told}
    dear = read_settings(lookup_env(speculative_config(parse(*flags, "--verify-cost", "0.1"))))
    assert dear["lookup"]["verify_cost"] == 0.1


def test_live_counts_are_ngrams_to_vllm_and_a_name_to_the_plugin(tmp_path):
    head = write_draft(tmp_path / "head", "eagle3")
    alone = speculative_config(parse("target", "--draft", "live", "--verify-cost", "0.1"))
    assert vllm_keys(alone)["method"] == "ngram"
    assert read_settings(lookup_env(alone))["lookup"] == {"retrieval": "live", "verify_cost": 0.1}
    mixed = lookup_env(speculative_config(parse("target", "--draft", f"live+{head}:2")))
    asked = read_settings(mixed)["lookup"]
    assert (asked["retrieval"], asked["head_tokens"]) == ("live", 2)


@pytest.mark.parametrize("draft", ["ngram", "suffix", "mtp"])
def test_a_draft_without_a_folder_is_served_by_its_name(draft):
    config = speculative_config(parse("target", "--draft", draft, "--num-speculative-tokens", "2"))
    assert (config["method"], config["num_speculative_tokens"]) == (draft, 2)
    assert "model" not in config


@pytest.mark.parametrize(
    ("draft", "flags", "said"),
    [
        ("live", ("--method", "eagle3"), "--method"),
        ("HEAD", ("--verify-cost", "0.1"), "--verify-cost"),
        ("ngram+HEAD", ("--verify-cost", "0.1"), "--verify-cost"),
        ("HEAD", ("--head-requests", "2"), "--head-requests"),
        ("ngram", ("--head-requests", "2"), r"ngram\+HEAD, live\+HEAD or"),
        ("ngram+HEAD", ("--head-requests", "-1"), r"--head-requests\b.* -1\b"),
        ("ANSWERS", ("--head-requests", "2"), "--head-requests"),
        ("ANSWERS", ("--method", "eagle3"), "--method"),
    ],
)
def test_a_flag_without_an_effect_on_the_draft_is_refused(tmp_path, draft, flags, said):
    head, answers = write_draft(tmp_path / "head", "eagle3"), write_answers(tmp_path / "answers")
    draft = draft.replace("HEAD", head).replace("ANSWERS", answers)
    with pytest.raises(ValueError, match=said):
        server_command(parse("target", "--draft", draft, *flags))


def test_a_draft_that_is_not_there_is_told_before_vllm_starts(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "none")):
        server_command(parse("target", "--draft", str(tmp_path / "none")))
    monkeypatch.setattr("redraft.files.folder._download", lambda name, *patterns: "no network")
    with pytest.raises(FileNotFoundError, match="owner/name"):
        server_command(parse("target", "--draft", "owner/name"))


def test_a_registry_alone_serves_its_current_version(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} .*--draft"):
        server_command(parse("target", "--registry", str(tmp_path)))
    write_draft(tmp_path / "v000003")
    (tmp_path / "current").symlink_to("v000003")
    command = server_command(parse("target", "--registry", str(tmp_path)))
    assert str(tmp_path / "v000003") in command[command.index("--speculative-config") + 1]
    with pytest.raises(ValueError, match=r"--draft.*--registry"):
        server_command(parse("target"))


def test_a_copy_of_a_registry_without_the_link_serves_its_current_version(tmp_path):
    registry = Registry(tmp_path)

    def served():
        command = server_command(parse("target", "--registry", str(tmp_path)))
        config = json.loads(command[command.index("--speculative-config") + 1])
        return Path(config["model"]).name

    for _ in range(3):
        registry.publish(write_draft, target_fingerprint="t", provenance={}, evaluation={})
    with pytest.raises(ValueError, match=rf"^{tmp_path} has 3 versions.*`current`"):
        served()
    for version in registry.versions()[:2]:
        registry.promote(version)
    (tmp_path / "current").unlink()
    assert served() == "v000002", "the newest version was never current"


def test_the_plugin_reads_back_what_the_command_was_told(tmp_path):
    (tmp_path / "token").write_text("a-secret-for-tests")
    (tmp_path / "token").chmod(0o600)
    cfg = parse(
        *(
            "target",
            "--registry",
            str(tmp_path),
            "--token-file",
            str(tmp_path / "token"),
            "--allow-remote",
        ),
        *("--targets", str(tmp_path), str(tmp_path.parent)),
        *(
            "--capture.spool",
            str(tmp_path / "spool"),
            "--capture.fraction",
            "0.1",
            "--capture.tenants",
            "a",
            "b",
        ),
    )
    environment = plugin_environment(cfg, {})
    config = read_config(environment)
    assert is_enabled(environment)
    assert config.registry == tmp_path
    assert config.token == "a-secret-for-tests"
    assert config.allow_remote
    assert config.targets == (tmp_path, tmp_path.parent)
    assert (config.capture.fraction, config.capture.tenants) == (0.1, ("a", "b"))
    plain = read_config(plugin_environment(parse("target"), {}))
    assert (plain.capture, plain.targets) == (CaptureConfig(), ())


@pytest.mark.parametrize("spool", [(), ("--capture.spool", "spool")])
def test_live_counts_heed_the_tenants_with_and_without_capture(spool):
    cfg = parse("target", "--draft", "live", "--capture.tenants", "a", "b", *spool)
    config = read_config(plugin_environment(cfg, write_settings({"capture": {"tenants": ["c"]}})))
    assert config.capture.is_on == bool(spool)
    counted = []
    for tenant in ("a", "b", "c", ""):
        params = SimpleNamespace(extra_args={EXTRA_ARGS_KEY: Origin(tenant)._asdict()})
        request = SimpleNamespace(sampling_params=params, lora_request=None)
        if find_owner(config.capture, request) is not None:
            counted.append(tenant)
    assert counted == ["a", "b"]


def test_the_plugin_reads_back_what_the_command_was_told_of_the_log(tmp_path):
    seed = tmp_path / "seed"
    seed.write_text("a seed")
    seed.chmod(0o600)
    cfg = parse(
        *(
            "target",
            "--capture.ingest",
            "tls://user:secret@log:4222",
            "--capture.nats.fleet",
            "llama",
        ),
        *("--capture.nats.credentials", str(seed), "--capture.nats.ca", str(seed)),
    )
    capture = read_config(plugin_environment(cfg, {})).capture
    assert (capture.spool, capture.ingest) == (None, "tls://user:secret@log:4222")
    assert (capture.nats.fleet, capture.nats.credentials, capture.nats.ca) == ("llama", seed, seed)
    assert "secret" not in repr(capture)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"capture": {"spool": "s", "ingest": "nats://log:4222"}},
            "spool.*ingest",
        ),
        ({"capture": {"ingest": "log:4222"}}, "nats://HOST:4222"),
        (
            {"capture": {"ingest": "nats://log:4222", "nats": {"fleet": "a b"}}},
            r"nats\.fleet",
        ),
        ({"capture": {"ingest": "nats://log:4222", "nats": {"ca": "absent"}}}, "absent"),
        ({"capture": {"spol": "s"}}, r"did you mean capture\.spool"),
        ({"pace": "fast"}, "fast"),
    ],
)
def test_a_mistake_about_the_log_is_told_before_vllm_starts(settings, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_config(write_settings(settings))


def test_plugins_that_were_allowed_stay_allowed():
    assert (
        plugin_environment(parse("t"), {"VLLM_PLUGINS": "mine"})["VLLM_PLUGINS"] == "mine,redraft"
    )
    # unset allows every installed plugin: naming one would switch the others off
    assert "lora_filesystem_resolver" in plugin_environment(parse("t"), {})["VLLM_PLUGINS"].split(
        ","
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [("", "REDRAFT_"), ("MY_, OTHER_", "MY_,OTHER_,REDRAFT_"), ("REDRAFT_,MY_", "REDRAFT_,MY_")],
)
def test_prefixes_that_ray_workers_got_stay(given, told):
    assert plugin_environment(parse("t"), {RAY_PREFIXES: given})[RAY_PREFIXES] == told


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="asks vLLM, without an engine")
def test_ray_workers_get_the_variables_of_the_plugin(tmp_path):
    cfg = parse("t", "--registry", str(tmp_path), "--capture.spool", str(tmp_path / "spool"))
    plugin = plugin_environment(cfg, {RAY_PREFIXES: "MY_"})
    ask = (
        "from vllm.ray.ray_env import get_env_vars_to_copy; print('COPIED', "
        "*get_env_vars_to_copy())"
    )
    environment = os.environ | plugin | {"MY_VARIABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, env=environment
    )
    copied = next(
        (line for line in done.stdout.splitlines() if line.startswith("COPIED")), done.stderr
    ).split()
    assert {*plugin, "MY_VARIABLE"} <= set(copied)
    assert {"VLLM_PLUGINS", "REDRAFT_SETTINGS"} <= plugin.keys()


@pytest.fixture
def on_gpu(monkeypatch):
    """A server of vLLM for GPUs: of capability 9, which has FlashAttention 3."""
    find = adaptive.find_obstacle
    monkeypatch.setattr(adaptive, "find_obstacle", partial(find, environment={}, on_cpu=False))
    monkeypatch.setattr(adaptive, "read_capability", lambda: "9.0")


def serve_adaptively(tmp_path, *arguments, pace="adaptive", target=None, **config):
    (tmp_path / "target").mkdir(exist_ok=True)
    (tmp_path / "target/config.json").write_text(json.dumps({"model_type": "llama"} | config))
    draft = write_draft(tmp_path / "head", "eagle3")
    command = server_command(
        parse(str(tmp_path / "target"), "--draft", draft, "--pace", pace, "--", *arguments)
    )
    return json.loads(command[command.index("--speculative-config") + 1])


def test_adaptive_verification_is_forced_or_taken_where_it_is_known_to_work(tmp_path, on_gpu):
    table, two = "num_speculative_tokens_per_batch_size", make_table(3, is_adaptive=True)
    for pace in ("adaptive", "auto"):
        config = serve_adaptively(tmp_path, pace=pace)
        assert config[adaptive.KEY]
        assert config[table] == two == [[1, 1, 3], [2, 2, 0], [3, 3, 3]]
        assert "use_local_argmax_reduction" not in config
    eager = serve_adaptively(tmp_path, "--enforce-eager", pace="auto")
    flashinfer = serve_adaptively(tmp_path, "--attention-backend", "FLASHINFER", pace="auto")
    for config in (eager, flashinfer, serve_adaptively(tmp_path, pace="2")):
        assert adaptive.KEY not in config
        assert config[table] == make_table(3)
    forced = serve_adaptively(tmp_path, "--attention-backend", "FLASHINFER")
    assert forced[adaptive.KEY], "vLLM knows its backends"


@pytest.mark.parametrize(
    ("arguments", "config", "condition"),
    [
        (["--enforce-eager"], {}, adaptive.GRAPHS),
        (["-cc.cudagraph_mode=PIECEWISE"], {}, adaptive.GRAPHS),
        (["-O0"], {}, adaptive.GRAPHS),
        (["--enable-lora"], {}, adaptive.LORA),
        (["-pp", "2"], {}, adaptive.STAGES),
        ([], {"mamba_d_conv": 4}, adaptive.HYBRID),
    ],
)
def test_a_forced_adaptive_pace_fails_in_one_line_before_the_start(
    arguments, config, condition, tmp_path, on_gpu
):
    with pytest.raises(ValueError, match=r"^--pace adaptive") as refused:
        serve_adaptively(tmp_path, *arguments, **config)
    assert condition in str(refused.value)
    assert "\n" not in str(refused.value)


def test_adaptive_verification_is_nothing_for_a_cpu():
    with pytest.raises(ValueError, match="full CUDA graphs, which do not exist on a CPU"):
        speculative_config(parse("t", "--draft", "ngram", "--pace", "adaptive"))


def test_block_verification_is_for_sampled_drafts_on_the_second_runner(tmp_path, monkeypatch):
    draft = write_draft(tmp_path, "draft_model")
    block = ("--draft", draft, "--rejection-sample-method", "block")
    sampled = (*block, "--draft-sample-method", "probabilistic")
    with pytest.raises(ValueError, match="--draft-sample-method probabilistic"):
        speculative_config(parse("t", *block))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="V2 model runner"):
        speculative_config(parse("t", *sampled))
    with pytest.raises(ValueError, match="--rejection-sample-method applies only to models"):
        speculative_config(parse("t", *block[2:], "--draft", "ngram"))
    found = {"draft_sample_method": "probabilistic"}
    require_block(found, {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert speculative_config(parse("t", *sampled))["rejection_sample_method"] == "block"


def test_a_pace_gives_vllm_a_table_of_all_numbers_and_the_plugin_the_pace(tmp_path):
    draft = write_draft(tmp_path)
    table = "num_speculative_tokens_per_batch_size"
    plain = parse("target", "--draft", draft)
    assert table not in speculative_config(plain)
    assert "pace" not in read_settings(plugin_environment(plain, {}))
    for pace in ("auto", "5", "0"):
        paced = parse("target", "--draft", draft, "--num-speculative-tokens", "5", "--pace", pace)
        command = server_command(paced)
        assert json.loads(command[command.index("--speculative-config") + 1])[table] == make_table(
            5
        )
        assert read_settings(plugin_environment(paced, {}))["pace"] == pace
    for pace, said in (
        ("6", r"\b6\b.*--num-speculative-tokens\b.*\b5\b"),
        ("fast", "fast"),
        ("-1", r"-1\b"),
    ):
        with pytest.raises(ValueError, match=said):
            server_command(
                parse("target", "--draft", draft, "--num-speculative-tokens", "5", "--pace", pace)
            )


@pytest.mark.parametrize("flag", ["--data-parallel-size", "--pipeline-parallel-size"])
def test_a_pace_is_refused_where_it_cannot_choose_the_number(flag, tmp_path):
    given = ("target", "--draft", write_draft(tmp_path))
    for pace in ("auto", "2"):
        for number, is_refused in (("2", True), ("1", False)):
            cfg = parse(*given, "--pace", pace, "--", flag, number)
            refused = (
                pytest.raises(ValueError, match=rf"^{flag} .*--pace off")
                if is_refused
                else nullcontext()
            )
            with refused:
                server_command(cfg)
    server_command(parse(*given, "--", flag, "2"))


def test_the_guide_for_a_server_of_ones_own_has_the_table_of_its_pace():
    guide = (Path(__file__).parents[3] / "docs" / "online.md").read_text()
    assert f'"num_speculative_tokens_per_batch_size": {make_table(3)}' in guide


@pytest.mark.parametrize(
    ("config", "keeps"),
    [
        ({"model_type": "llama", "hidden_size": 8}, False),
        ({"model_type": "qwen3_next", "linear_conv_kernel_dim": 4}, False),
        ({"model_type": "granitemoehybrid", "mamba_d_conv": 4}, True),
        ({"model_type": "lfm2", "conv_L_cache": 3}, True),
        ({"model_type": "a_wrapper", "text_config": {"ssm_state_size": 128}}, True),
    ],
)
def test_a_target_of_mamba_layers_has_the_first_runner_at_a_pace(config, keeps, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert keeps_states(str(tmp_path)) is keeps


def test_vllm_chooses_its_model_runner():
    assert "VLLM_USE_V2_MODEL_RUNNER" not in plugin_environment(parse("t"), {})


def test_a_lookup_that_cannot_be_served_is_refused_in_a_line_before_the_start(tmp_path):
    answers, many = write_answers(tmp_path / "answers"), ("--", "--pipeline-parallel-size", "2")
    for draft in (answers, "live"):
        server_command(parse("target", "--draft", draft))
        with pytest.raises(ValueError, match=rf"^with --pipeline-parallel-size .*{draft}.*\n?$"):
            server_command(parse("target", "--draft", draft, *many))
    empty = tmp_path / "empty"
    empty.mkdir()
    Retrieval(Counts(), {}, [0.0] * 7).write(empty)
    with pytest.raises(ValueError, match=rf"^{empty} contains no answers: .*--draft live"):
        server_command(parse("target", "--draft", str(empty)))
    (empty / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"^{empty} contains no answers"):
        server_command(parse("target", "--draft", str(empty)))
    head = write_draft(tmp_path / "head", "eagle3")
    with pytest.raises(ValueError, match=r"^--async-scheduling "):
        server_command(parse("target", "--draft", f"ngram+{head}", "--", "--async-scheduling"))


@pytest.mark.parametrize(
    ("draft", "waits", "shares"),
    [
        ("ngram", True, False),
        ("live", True, True),
        ("live+HEAD", True, True),
        ("HEAD", False, False),
    ],
)
def test_a_server_says_what_a_lookup_costs_and_who_shares_live_counts(
    draft, waits, shares, tmp_path
):
    source = DraftSource.parse(draft.replace("HEAD", write_draft(tmp_path / "head", "eagle3")))
    notes = list_notes(source, on_cpu=False)
    assert any("asynchronous scheduling is off" in note for note in notes) is waits
    assert any("--async-scheduling" in note for note in notes) is (waits and draft != "ngram")
    assert len(list_notes(source, is_ahead=True, on_cpu=False)) == 1 + shares
    assert any("X-Redraft-Tenant" in note for note in notes) is shares
    assert not any("asynchronous" in note for note in list_notes(source, on_cpu=True))
    assert len(list_notes(None)) == 1


def test_counted_answers_keep_asynchronous_scheduling_on_a_gpu_with_the_v2_runner(
    tmp_path, monkeypatch
):
    head, ahead = write_draft(tmp_path / "head", "eagle3"), ("--", "--async-scheduling")
    monkeypatch.setattr(serve, "require_v2", lambda: None)
    for draft, method in (("live", "ngram_gpu"), (f"live+{head}", "eagle3")):
        config = serve.speculative_config(parse("target", "--draft", draft, *ahead))
        assert config["method"] == method
        assert "disable_padded_drafter_batch" not in config
        off = ("--", "--no-async-scheduling")
        config = serve.speculative_config(parse("target", "--draft", draft, *off))
        assert config["method"] != "ngram_gpu"
    monkeypatch.undo()
    for environment, on_cpu in (({}, True), ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, False)):
        with pytest.raises(ValueError, match=r"^--async-scheduling .* V2 .*\n?$"):
            serve.require_v2(environment, on_cpu=on_cpu)
    serve.require_v2({}, on_cpu=False)


def test_live_counts_have_settings_of_their_own(tmp_path):
    flags = ("--live.folder", str(tmp_path / "live"), "--live.window", "99", "--live.shared")
    cfg = parse("target", "--draft", "live", *flags)
    told = {"folder": str(tmp_path / "live"), "window": 99, "shared": True}
    assert read_settings(plugin_environment(cfg, {}))["live"] == told
    assert "live" not in read_settings(plugin_environment(parse("target", "--draft", "live"), {}))
    assert any(
        "--live.shared" in note
        for note in list_notes(DraftSource.parse("live"), tenants_share=True)
    )
    with pytest.raises(ValueError, match=r"^--live.* live\b.*not to ngram"):
        server_command(parse("target", "--draft", "ngram", "--live.window", "99"))
    kept = ("target", "--draft", "live", "--live.folder", str(tmp_path / "live"))
    server_command(parse(*kept))
    for many in (("--nnodes", "2"), ("--distributed-executor-backend", "ray")):
        with pytest.raises(ValueError, match=r"^--live\.folder "):
            server_command(parse(*kept, "--", *many))
    with pytest.raises(ValueError, match=r"--live\.window 1 "):
        LiveConfig(window=1)
