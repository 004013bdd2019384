"""Have the target answer a data set anew, through any OpenAI-compatible server, for a draft to learn from.

    $ vllm serve meta-llama/Llama-3.1-70B-Instruct
    $ redraft regenerate --source HuggingFaceH4/ultrachat_200k --split train_sft --output outputs/answers.jsonl
    $ redraft distill --data.source outputs/answers.jsonl

Interrupt it at any time: the same command goes on where it was.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from distill.data import load_conversations
from distill.endpoint import Endpoint
from distill.regenerate import Sampling, regenerate
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    source: str
    """Hub name, .jsonl, .parquet, or `stdlib`; only what is not the assistant's is used."""
    output: Path
    """JSONL that receives one line a finished conversation."""
    split: str = "train"
    """Of a data set on the hub."""
    limit: int | None = None
    """At most so many conversations, from the beginning."""
    url: str = "http://127.0.0.1:8000"
    """The server. A key in OPENAI_API_KEY is sent along."""
    model: str | None = None
    """Its name for the target; by default the first that it lists."""
    concurrency: int = 64
    """Requests under way at once."""
    sampling: Sampling = field(default_factory=Sampling)


def main(cfg: Config) -> None:
    conversations = load_conversations(cfg.source, split=cfg.split)[: cfg.limit]
    endpoint = Endpoint(cfg.url, model=cfg.model, concurrency=cfg.concurrency, api_key=os.environ.get("OPENAI_API_KEY"))
    print(f"{regenerate(conversations, endpoint, cfg.output, cfg.sampling)} -> {cfg.output}")


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
