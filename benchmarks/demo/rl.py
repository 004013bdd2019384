"""Measure whether a draft for a target whose weights change should keep learning, or adapt once.

    $ make demo-rl                                   # 100 updates of the small target: outputs/demo-rl/
    $ make demo-rl RL=--resume                       # continue after a kill
    $ python -m benchmarks.demo.rl --overwrite --updates 8

TRL's GRPO trains the small target on answers of a real server with a draft, capture and learner
(recipes/rl_grpo.py). Each update is pushed into the server, whose clients do not notice. Three
drafts are compared on the rollouts of each update: an unchanged draft, a draft trained on answers
of the first policy, and the learner's draft, which starts from the second. No question is asked
twice, so no draft has seen an answer. Each record names its policy, whose weights are kept to check
the names. At the end, targets are pushed into the server alone and with a draft, in turn, and a
fine-tune of the target shows how many labels an old draft saves.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.demo.fleet import (
    TENANT,
    Traffic,
    begin_report,
    distil_on,
    fastest_precision,
    start_learner,
    start_server,
)
from benchmarks.demo.online_config import MAX_MODEL_LEN, SMALL
from benchmarks.demo.online_stage import ByDomain, split_stdlib
from benchmarks.demo.rl_finetune import OPTIM, compare_starts, make_samples
from benchmarks.demo.rl_judge import Judged, Policy, build_charts, decide, judge, summarise
from redraft.distill.data.conversations import Conversation
from redraft.distill.data.day import choose_day
from redraft.distill.data.samples import held_out_prompts
from redraft.engine.hardware import this_machine
from redraft.engine.process import free_port
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import Sampling
from redraft.eval.forecast.greedy import Continuation, generate_answers
from redraft.eval.report.page import write_page
from redraft.files.checkpoint import load_causal_lm
from redraft.files.kept import compute_once
from redraft.files.progress import Progress
from redraft.files.target_folder import TargetFolder
from redraft.heads.families.eagle3 import Eagle3
from redraft.heads.target import Target
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.daemon.opening import open_buffer, provide_first_version
from redraft.online.fleet.registry import Registry, copy_model
from redraft.online.records.spool import spool_files
from redraft.online.tokens import read_token, write_token
from redraft.recipes import rl_grpo
from redraft.recipes.cli.run import run_recipe

QUESTIONS, GENERATIONS, MAX_TOKENS = 8, 4, 64
"""Number of questions per update, number of answers to each, and their maximum length in tokens."""
TEMPLATE = Path(__file__).parent / "templates" / "rl.html.j2"
DRAIN_S = 600.0
"""Deadline for the learner to store the last records."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = SMALL
    """Folder of the target. Its first draft is in the folder tiny-eagle3 next to it."""
    output: Path = Path("outputs/demo-rl")
    """Folder for the report, the policies and the logs."""
    overwrite: bool = False
    """Replace the demo in `output`."""
    resume: bool = False
    """Continue the demo in `output`."""
    updates: int = 100
    """Number of policy updates. With fewer updates, all other training runs are shorter too."""

    def scale(self, count: int, least: int) -> int:
        return max(least, round(count * self.updates / 100))


def main(cfg: Config) -> None:
    began_s = time.perf_counter()
    day = choose_day()
    report = begin_report(cfg, day, resume=cfg.resume)
    play = Play(cfg, day)
    settings = report["config"]

    def once(name: str, kind: Any, compute: Callable[[], Any]) -> Any:
        return compute_once(play.folder / "kept", name, settings, kind, compute)

    play.prepare()
    # This comes first: once TRL has trained in a process, `accelerate` no longer changes the
    # precision.
    report["adapt"] = once("adapt", dict[str, Any], play.adapt)
    moved = once("moved", dict[str, Any], lambda: asyncio.run(play.run()))
    judged = once("judged", list[Judged], play.judge)
    report |= summarise(judged) | moved
    report["sentence"] = decide(report["gain"]["learning"])
    report["curve"] = [
        {
            **play.rows[one.update],
            **{name: 1 + accepted / drafts for name, (drafts, accepted) in one.counts.items()},
        }
        for one in judged
        if one.update in play.rows
    ]
    report |= {"updates": len(play.rows), "machine": asdict(this_machine())}
    report["duration_s"] = round(time.perf_counter() - began_s, 1)
    page = write_page(cfg.output, report, TEMPLATE, build_charts)
    print(report["sentence"])
    print(f"report: {page}")


class Play:
    """The training run with its server and its learner."""

    def __init__(self, cfg: Config, day: datetime.date) -> None:
        self.cfg, self.day, self.folder = cfg, day, cfg.output.absolute()
        self.target = TargetFolder.open(cfg.target.absolute())
        self.head = cfg.target.parent / "tiny-eagle3"
        self.policies, self.weights = self.folder / "policies", self.folder / "weights"

    @cached_property
    def conversations(self) -> tuple[ByDomain, ByDomain]:
        """Return the conversations to ask about, and the held-out ones."""
        return split_stdlib()

    @property
    def rows(self) -> dict[int, dict[str, Any]]:
        """Return the journal's row of each update; after a kill, the later row counts."""
        path = self.folder / "updates.jsonl"
        rows = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        )
        return {row["update"]: row for row in sorted(rows, key=lambda row: row["update"])}

    def prepare(self) -> None:
        """Adapt the draft once, and write the questions. Finished parts are not repeated."""
        for folder in (self.policies, self.weights, self.folder / "spool"):
            folder.mkdir(mode=0o700, exist_ok=True)
        if (self.folder / "token").exists():
            return
        short = [
            one
            for some in self.conversations[0].values()
            for one in some
            if len(one["messages"][0]["content"]) < 160
        ]
        random.Random(0).shuffle(short)
        first = self.cfg.scale(128, 32)
        lines = [
            f"{json.dumps(one)}\n" for one in short[first : first + self.cfg.updates * QUESTIONS]
        ]
        (self.folder / "questions.jsonl").write_text("".join(lines))
        model = load_causal_lm(self.target.folder, torch.float32).eval().requires_grad_(False)
        samples = make_samples(self.answer(model, short[:first], first, Sampling()))
        draft = Eagle3.load(self.head, Target.from_model(model))
        for _ in distil_on(
            samples, draft, model, name="answers", steps=self.cfg.scale(32, 4), optim=OPTIM, rows=2
        ):
            pass
        draft.export(self.folder / "once", torch.bfloat16, like=self.head)
        shutil.copy(self.head / "config.json", self.folder / "once")
        write_token(self.folder / "token")

    def configure(self, servers: list[str]) -> LearnerConfig:
        """Write learner.toml. Settings that are not written have their defaults."""
        settings: dict[str, Any] = {
            "target": str(self.target.folder), "registry": "drafts", "spool": "spool", "folder": "learner",
            "keep_versions": 1000, "draft.family": "eagle3", "draft.initial": "once", "fleet.servers": servers,
            "fleet.token_file": "token", "fleet.poll_s": 2, "buffer.held_out_fraction": 0.3,
            "training.lr": 1e-3, "training.sequence_length": MAX_MODEL_LEN, "training.replay_per_step": 12,
            "training.mixed_precision": fastest_precision(), "rollout.min_drafts": 200, "rollout.poll_s": 0.5,
            "rollout.max_loss": 0.2, "rollout.window_timeout_s": 60, "rollout.warm_up_s": 1, "rollout.watch_s": 2,
        }  # fmt: skip
        path = self.folder / "learner.toml"
        path.write_text(
            "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
        )
        return load_config(path)

    async def run(self) -> dict[str, Any]:
        """Train the policy, then push targets with and without drafts.

        Returns the measurements of the pushes.
        """
        config = self.configure([])
        provide_first_version(config, Registry(config.registry), self.target)
        port = free_port()
        server = start_server(
            self.target.folder, config.registry, spool=self.folder / "spool", token_file=self.folder / "token",
            num_speculative_tokens=3, max_model_len=MAX_MODEL_LEN, core=0, port=port, mode="eager",
            log=self.folder / "logs" / "server.log",
            options=["--capture.hidden-states", "--targets", str(self.policies)],
            arguments=["--logprobs-mode", "processed_logprobs"],
        )  # fmt: skip
        with server as serving:
            await serving.ready()
            # An unrelated client that no push may disturb. It is not recorded.
            prompts = {"code": itertools.cycle(self.ask(self.conversations[1]["code"], 100))}
            traffic = Traffic(
                [serving.url], prompts, clients=1, max_tokens=MAX_TOKENS, pause_s=1, captured=False
            )
            self.configure([serving.url])
            async with traffic.flowing():
                async with start_learner(self.folder):
                    await asyncio.to_thread(self.train, serving.url)
                    async with asyncio.timeout(DRAIN_S):
                        while spool_files(self.folder / "spool"):
                            await asyncio.sleep(0.5)
                push = await self.compare_pushes(serving.url, config)
        return {
            "push": push,
            "failed_requests": len(traffic.failures),
            "failures": traffic.failures[:5],
        }

    def train(self, url: str) -> None:
        """Train the policy from the newest complete checkpoint on, and record each update."""
        from transformers import TrainerCallback

        end_ids, updates = set(self.target.end_ids), self.cfg.updates

        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            """Reward answers that end and do not repeat themselves."""
            return [(ids[-1] in end_ids) - repeated_share(ids) for ids in completion_ids]

        trainer = rl_grpo.make_trainer(
            rl_grpo.GrpoConfig(
                target=str(self.target.folder), token_file=self.folder / "token", url=url, output=self.policies,
                prompts=str(self.folder / "questions.jsonl"), updates=updates, lr=1e-4, max_tokens=MAX_TOKENS,
            ),
            reward, num_generations=GENERATIONS, per_device_train_batch_size=GENERATIONS * QUESTIONS,
            lr_scheduler_type="constant", save_strategy="steps", save_steps=1, save_total_limit=1, logging_steps=1,
            disable_tqdm=True, gradient_checkpointing=False,
        )  # fmt: skip
        checkpoint, done = find_checkpoint(self.policies / "trainer")
        client, seen = trainer.vllm_generation.vllm_client, dict[str, Any]()
        client.session.headers["X-Redraft-Tenant"] = TENANT
        client.num_pushes = done
        push, generate, weights = client.update_named_params, client.generate, self.weights

        def push_and_keep(*args: Any) -> None:
            push(*args)
            version = client.moved["target_version"]
            seen.update(
                version=version,
                draft=client.moved["draft_version"],
                pause_s=client.moved["pause_ms"] / 1e3,
            )
            kept = weights / f"{version}.safetensors"
            kept.unlink(missing_ok=True)
            os.link(self.policies / f"step-{client.num_pushes}" / "model.safetensors", kept)

        def generate_and_time(**asked: Any) -> Any:
            began_s = time.perf_counter()
            found = generate(**asked)
            tokens = sum(map(len, found["completion_ids"]))
            seen.update(tokens=tokens, tokens_per_s=tokens / (time.perf_counter() - began_s))
            return found

        path, bar = (
            self.folder / "updates.jsonl",
            Progress(total=updates, initial=done, desc="RL", unit="update"),
        )

        class Watch(TrainerCallback):  # type: ignore[misc]
            def on_log(
                self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any
            ) -> None:
                if "reward" in logs:
                    row = {
                        "update": state.global_step,
                        "reward": logs["reward"],
                        "time_s": time.time(),
                        **seen,
                    }
                    with path.open("a") as file:
                        file.write(f"{json.dumps(row)}\n")
                    bar.update(state.global_step - bar.n)

        client.update_named_params, client.generate = push_and_keep, generate_and_time
        trainer.add_callback(Watch())
        # The folder may have been half-written at a kill, or `weights` may link to it, so it is
        # never overwritten.
        shutil.rmtree(self.policies / f"step-{done + 1}", ignore_errors=True)
        trainer.train(resume_from_checkpoint=checkpoint)
        bar.close()

    async def compare_pushes(self, url: str, config: LearnerConfig) -> dict[str, Any]:
        """Compare the pause of a push of the target alone with that of both target and draft."""
        registry, times = (
            Registry(config.registry),
            dict[str, list[float]]({"alone": [], "with_draft": []}),
        )
        about = {"target_lineage": self.target.lineage}
        with registry.owned():
            frozen = registry.publish(
                lambda folder: copy_model(self.head, folder), target_fingerprint=self.target.fingerprint,
                provenance=about, evaluation={},
            )  # fmt: skip
        drafts = [frozen, registry.versions()[0]]
        target = str(
            max(self.policies.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
        )
        headers = {"Authorization": f"Bearer {read_token(self.folder / 'token')}"}
        async with httpx.AsyncClient(timeout=600, headers=headers) as http:
            for number in Progress(range(self.cfg.scale(10, 3)), desc="pushes", unit="pair"):
                for kind in sorted(times, reverse=bool(number % 2)):
                    body = {"version": f"{kind}-{number}", "path": target}
                    body |= {"draft": drafts[number % 2]} if kind == "with_draft" else {}
                    answer = await http.post(f"{url}/redraft/target", json=body)
                    answer.raise_for_status()
                    times[kind].append(answer.json()["pause_ms"] / 1e3)
        medians = {kind: statistics.median(some) for kind, some in times.items()}
        return {
            "pause_s": medians["alone"],
            "with_draft_s": medians["with_draft"],
            "pauses_s": times,
        }

    def judge(self) -> list[Judged]:
        config = self.configure([])
        registry = Registry(config.registry)
        drafts = {version: registry.path(version) for version in registry.versions()}
        drafts |= {"frozen": self.head, "once": self.folder / "once"}
        policy, before = (Policy(self.target.folder, self.weights) for _ in range(2))
        updates = {row["version"]: update for update, row in self.rows.items()}
        with open_buffer(config, registry, self.target.fingerprint) as buffer:
            seqs = Progress(range(1, buffer.newest() + 1), desc="judge the records", unit="record")
            return judge((one.record for one in buffer.read(seqs)), policy, before, drafts, updates)

    def adapt(self) -> dict[str, Any]:
        sizes = {
            "tuning": self.cfg.scale(100, 8),
            "steps": self.cfg.scale(32, 4),
            "prompts": self.cfg.scale(32, 8),
        }
        return compare_starts(self.folder / "once", self.target, self.answer, **sizes)

    def answer(
        self, model: Any, conversations: Sequence[Conversation], count: int, sampling: Sampling
    ) -> list[Continuation]:
        prompts, answers = self.ask(conversations, count), list[Continuation]()
        with Progress(total=len(prompts), desc="answers", unit="answer") as bar:
            for first in range(0, len(prompts), 32):
                answers += generate_answers(
                    model, prompts[first : first + 32], max_tokens=MAX_TOKENS, num_speculative_tokens=3,
                    end_ids=self.target.end_ids, sampling=sampling,
                )  # fmt: skip
                bar.update(len(answers) - bar.n)
        return answers

    def ask(self, conversations: Sequence[Conversation], count: int) -> list[Prompt]:
        return held_out_prompts(
            conversations, self.target.tokenizer, num_prompts=count, max_length=160, day=self.day
        )


def find_checkpoint(folder: Path) -> tuple[str | None, int]:
    """Find the newest complete checkpoint of the trainer, and its number of updates."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    if not whole:
        return None, 0
    newest = max(whole, key=lambda path: int(path.name.split("-")[1]))
    return str(newest), int(newest.name.split("-")[1])


def repeated_share(ids: list[int]) -> float:
    """Return the share of 4-grams that occur earlier in the same answer."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
