"""Train a policy with TRL's GRPO on answers of `redraft serve`, whose draft keeps learning.

It needs TRL, which `make env` installs. docs/rl.md has the learner's settings for this server:

$ redraft learner --config learner.toml &
$ redraft serve TARGET --registry registry --targets outputs/grpo --token-file token \\
      --capture.spool spool -- --port 8000 --logprobs-mode processed_logprobs &
$ python -m redraft.recipes.rl_grpo --target TARGET --token-file token --prompts questions.jsonl

After each update, the policy is saved in --output, and the server loads it (`POST
/redraft/target`). This works on any device and without vLLM's development mode. Meanwhile, the
learner swaps drafts. Replace `reward` with the reward of your task.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.engine.proxies import load_certificates
from redraft.files.folder import INDEX
from redraft.files.target_folder import TargetFolder
from redraft.online.tokens import read_token
from redraft.recipes.cli.run import run_recipe

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    target: str
    """Folder or hub name of the initial policy, which the server has loaded."""
    token_file: Path
    """The server's --token-file."""
    prompts: str
    """Questions: the first message of each conversation in a file, a folder or a data set of the
    hub.
    """
    url: str = "http://127.0.0.1:8000"
    """Address of the server."""
    output: Path = Path("outputs/grpo")
    """Folder for policies. The server must see it under the same name."""
    updates: int = 100
    """Training length in policy updates."""
    lr: float = 1e-6
    """Learning rate."""
    max_tokens: int = 256
    """Maximum length of an answer, in tokens."""


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the share of distinct tokens in each answer."""
    return [len({*ids}) / max(1, len(ids)) for ids in completion_ids]


def main(cfg: GrpoConfig) -> None:
    """Train the policy.

    Raises the errors of TRL, httpx and the loaders, and ValueError with the server's response if
    the server rejects a policy.
    """
    make_trainer(cfg).train()


def make_client(target: TargetFolder, output: Path, token: str) -> Any:
    """Return a subclass of TRL's client that sends weights as checkpoints instead of over NCCL.

    The checkpoints are written to `output`, with the target's config and tokenizer.
    """
    import httpx
    from safetensors.torch import save_file
    from trl.generation.vllm_generation import VLLMClient

    # The dtype that is served: float32 would double the bytes to write and read.
    dtype = target.text_config.dtype
    headers = {"Authorization": f"Bearer {token}"}
    small = [
        path
        for path in target.folder.iterdir()
        if path.suffix in (".json", ".jinja", ".model", ".txt")
    ]

    class Client(VLLMClient):  # type: ignore[misc]
        def init_communicator(self, device: Any = 0) -> None:
            self.num_pushes = 0

        def reset_prefix_cache(self) -> None: ...  # the server resets its own cache

        def get_server_info(self) -> dict[str, Any]:  # a route that exists only in development mode
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

        def update_named_params(
            self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]
        ) -> None:
            self.num_pushes += 1
            folder = output / f"step-{self.num_pushes}"
            folder.mkdir(parents=True, exist_ok=True)
            for path in small:
                shutil.copy(path, folder)
            (folder / INDEX).unlink(missing_ok=True)  # of the target's shards
            # Copy the weights, because weights that share memory cannot be saved.
            tensors = {
                name: x.detach().to("cpu", dtype, copy=True).contiguous()
                for name, x in named_params
            }
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            body = {"version": folder.name, "path": str(folder)}
            # Do not use TRL's session, which retries a request that the server has rejected.
            answer = httpx.post(
                f"{self.base_url}/redraft/target", json=body, headers=headers, timeout=None,
                trust_env=False, verify=load_certificates(self.base_url),  # no proxy sees the token
            )  # fmt: skip
            if answer.is_error:
                raise ValueError(f"the server could not load {folder}: {answer.text}")
            self.moved = answer.json()
            shutil.rmtree(output / f"step-{self.num_pushes - 2}", ignore_errors=True)

    return Client


def make_trainer(cfg: GrpoConfig, reward: Any = reward, **training: Any) -> Any:
    """Create TRL's trainer.

    `training` contains additional GRPOConfig settings. The server must be ready.
    """
    import torch
    import trl.generation.vllm_generation as vllm_generation
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from redraft.distill.data.conversations import load_conversations

    target, output = TargetFolder.open(cfg.target), cfg.output.absolute()
    vllm_generation.VLLMClient = make_client(target, output, read_token(cfg.token_file))
    questions = [{"prompt": one["messages"][:1]} for one in load_conversations(cfg.prompts)]
    on_gpu = torch.cuda.is_available()
    settings: dict[str, Any] = {"per_device_train_batch_size": 16, "num_generations": 8}
    config = GRPOConfig(
        output_dir=str(output / "trainer"), report_to="none", bf16=on_gpu, use_cpu=not on_gpu,
        use_vllm=True, vllm_mode="server", vllm_server_base_url=cfg.url, max_completion_length=cfg.max_tokens,
        max_steps=cfg.updates, learning_rate=cfg.lr, **settings | training,
    )  # fmt: skip
    # Use float32, because bfloat16 weights would round updates of 1e-6 to zero.
    model = AutoModelForCausalLM.from_pretrained(
        target.folder, dtype=torch.float32, trust_remote_code=False
    )
    data, tokenizer = Dataset.from_list(questions), target.tokenizer
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )


if __name__ == "__main__":
    run_recipe(main, GrpoConfig, __doc__)
