"""TRL's GRPO on a real server with a draft.

Each policy is served, and records name the policy that verified them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from real_server import TOKEN, join_segments, running_server
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from waiting import wait_until

from redraft.engine.settings import write_settings
from redraft.files.artifact import publish
from redraft.online.records.record import Record
from redraft.recipes.rl_grpo import GrpoConfig, main

ROOT = Path(__file__).parents[3]
UPDATES = 3


def test_the_servers_refusal_of_a_policy_reaches_the_user(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"detail": "set --targets"}')

    class Session:
        """TRL's client."""

        base_url = ""

        def _post(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("too many 503 error responses")

    generation: Any = ModuleType("trl.generation.vllm_generation")
    generation.VLLMClient = Session

    class Trainer:
        def __init__(self, model: LlamaForCausalLM, **_: Any) -> None:
            self.model = model

        def train(self) -> None:
            client = generation.VLLMClient()
            client.init_communicator()
            client.update_named_params([], self.model.named_parameters())

    trl: Any = ModuleType("trl")
    trl.GRPOConfig, trl.GRPOTrainer = SimpleNamespace, Trainer
    trl.generation = ModuleType("trl.generation")
    trl.generation.vllm_generation = generation
    for module in (trl, trl.generation, generation):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("HTTP_PROXY", "ALL_PROXY"):  # which must not see the token
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    token, questions = tmp_path / "token", tmp_path / "questions.jsonl"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    questions.write_text(
        json.dumps(
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "-"}]}
        )
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        Session.base_url = f"http://127.0.0.1:{server.server_port}"
        config = GrpoConfig(
            target=str(tiny_target),
            token_file=token,
            prompts=str(questions),
            output=tmp_path / "policies",
        )
        with pytest.raises(ValueError, match=r"step-1: .*set --targets\b"):
            main(config)
        server.shutdown()
    saved = load_file(tmp_path / "policies/step-1/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}, "of the target"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99), ("bfloat16", 0.93)])
def test_each_policy_is_served_and_named(
    tiny_target: Path, tmp_path: Path, dtype: str, least: float
) -> None:
    """Policies are pushed in bfloat16, the target's.

    One served in float32 computes what transformers does.
    """
    registry, policies, token = tmp_path / "registry", tmp_path / "policies", tmp_path / "token"
    head = tiny_target.parent / "tiny-eagle3"
    publish(
        registry / "v000001", lambda folder: shutil.copytree(head, folder, dirs_exist_ok=True), {}
    )
    (registry / "current").symlink_to("v000001")
    policies.mkdir()
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    answer = {"role": "assistant", "content": "-"}
    rows = [
        {"messages": [{"role": "user", "content": f"What does f{n} do?"}, answer]}
        for n in range(32)
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--logprobs-mode", "processed_logprobs", "--dtype", dtype]
    environment = write_settings({"targets": [str(policies)]})
    with running_server(
        tiny_target, registry, tmp_path, [], arguments=arguments, environment=environment
    ) as server:
        command = [
            sys.executable,
            "recipes/rl_grpo.py",
            "--target",
            str(tiny_target),
            "--token-file",
            str(token),
        ]
        command += [
            "--prompts",
            str(tmp_path / "questions.jsonl"),
            "--url",
            server.url,
            "--output",
            str(policies),
        ]
        command += ["--updates", str(UPDATES), "--lr", "3e-3", "--max-tokens", "24"]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-3000:]
        # Before each update the policy is pushed, the first time as it was loaded.
        served = server.status()["target_version"]
        assert served.startswith(f"step-{UPDATES}@")
        prompt = list(range(20, 40))
        answered = server.complete(prompt, ignore_eos=True)["choices"][0]["token_ids"]
        wait_until(server.has_shipped)
        records = list(
            join_segments(
                sorted(server.all_records(), key=lambda one: (one.request_id, one.sequence))
            )
        )
    kept = {
        path.name: LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in policies.glob("step-*")
    }
    assert set(kept) == {"step-2", "step-3"}
    text = kept["step-3"].generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert dtype == "bfloat16" or answered == text[0, len(prompt) :].tolist()
    kept[""] = LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    assert {record.target_version.partition("@")[0] for record in records} == set(kept)
    right = [
        hit
        for record in records
        for hit in compare(record, kept[record.target_version.partition("@")[0]])
    ]
    others = [
        hit
        for record in records
        if record.target_version == served
        for hit in compare(record, kept[""])
    ]
    assert sum(right) >= least * len(right) > 0
    assert sum(others) < (least - 0.02) * len(others), (
        "the policies are alike, and no wrong name could be seen"
    )


@torch.no_grad()
def compare(record: Record, policy: LlamaForCausalLM) -> list[bool]:
    """For each row of the text, whether the policy's most probable token is the recorded one."""
    ids = torch.tensor([[*record.context_ids.tolist(), *record.output_ids.tolist()]])
    most_probable = policy(ids).logits[0].argmax(-1)
    is_text = record.branches == 0
    positions = torch.tensor(record.positions[is_text].tolist()) - 1
    return (most_probable[positions] == torch.tensor(record.topk_ids[is_text, 0].tolist())).tolist()
