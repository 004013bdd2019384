"""Have the target answer the prompts of a data set, as training data for a draft."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

from redraft.distill.data.conversations import Conversation, load_conversations
from redraft.distill.signal.endpoint import Endpoint
from redraft.distill.signal.features_store import Storage
from redraft.distill.signal.target_answers import (
    Sampling,
    finished_keys,
    previous_answers,
    regenerate,
)
from redraft.engine.server import vllm_server
from redraft.files.artifact import sha256
from redraft.files.checkpoint import load_text_config
from redraft.files.folder import fetch_model, fingerprint
from redraft.files.kept import hash_key
from redraft.files.lock import wait_for
from redraft.files.replaced import find_obstacle
from redraft.recipes.data.regenerate_config import RegenerateConfig
from redraft.recipes.serve.vllm_flags import read_flags

MAX_MODEL_LEN = 8192  # upper limit in tokens, because each running request reserves memory
DEFAULT_URL = "http://127.0.0.1:8000"


def main(cfg: RegenerateConfig) -> None:
    """Have the target answer the prompts of the data set.

    Raises:
        ChildProcessError, ConnectionError: the engine did not start, or did not answer.
        ValueError: the settings contradict each other.
    """
    if cfg.target is not None and cfg.url is not None:
        raise ValueError(
            "set --target to start a server, or --url to use a running one, but not both"
        )
    if cfg.keep_states is not None and cfg.target is not None:
        raise ValueError(
            "--keep-states needs a server started with `redraft serve-features`: start one, and set "
            "--url instead of --target"
        )
    states = (Storage(cfg.storage), Storage(cfg.keep_states)) if cfg.keep_states else None
    if cfg.output.suffix != ".jsonl":
        raise ValueError(
            f"answers are written as uncompressed JSON Lines: give --output a name that ends in "
            f".jsonl, not {cfg.output}"
        )
    if obstacle := find_obstacle([cfg.output, previous_answers(cfg.output)], cfg, lambda _: None):
        raise ValueError(f"{obstacle}: choose a different --output")
    conversations = load_conversations(cfg.prompts, split=cfg.split)[: cfg.num_conversations]
    require_parser(conversations, cfg)
    # Two commands with the same output would answer everything twice, and with --overwrite one of
    # them would remove the answers of the other.
    lock = cfg.output.with_name(f".{cfg.output.name}.lock")
    with wait_for(lock, f"waiting for another redraft regenerate with --output {cfg.output}"):
        answer(conversations, cfg, states)


def answer(
    conversations: Sequence[Conversation],
    cfg: RegenerateConfig,
    states: tuple[Storage, Storage] | None,
) -> None:
    if cfg.overwrite:
        finished_keys(cfg.output, None)  # raises if this command did not write the file
    max_tokens = cfg.max_tokens
    if (
        cfg.target is not None
        and "max_model_len" not in read_flags(cfg.vllm_args)
        and max_tokens >= (length := read_length(cfg.target))
    ):
        max_tokens = length // 2
        print(
            f"{cfg.target} can read {length:,} tokens, so answers have at most {max_tokens:,} "
            f"(--max-tokens is {cfg.max_tokens:,})"
        )
    sampling = Sampling(
        temperature=cfg.temperature,
        max_tokens=max_tokens,
        template_options=cfg.template_options,
    )
    with serve_answers(cfg) as (url, model):
        endpoint = Endpoint(
            url, model=model, concurrency=cfg.concurrency, api_key=os.environ.get("OPENAI_API_KEY")
        )
        stats = regenerate(
            conversations,
            endpoint,
            cfg.output,
            sampling,
            identify(cfg),
            overwrite=cfg.overwrite,
            states=states,
        )
        if stats.already_there and cfg.target is None:
            print(
                "existing answers are attributed to this model by its name: if the model has "
                "changed, pass --overwrite"
            )
        print(f"{stats} -> {cfg.output}")


def require_parser(conversations: Sequence[Conversation], cfg: RegenerateConfig) -> None:
    """Print a warning if a server started here could not parse the target's tool calls.

    Raises:
        ValueError: the server could not parse them, and all conversations have tools.
    """
    num_with_tools = sum("tools" in conversation for conversation in conversations)
    has_parser = any(argument.startswith("--tool-call-parser") for argument in cfg.vllm_args)
    if cfg.target is None or not num_with_tools or has_parser:
        return
    problem = (
        f"{num_with_tools:,} of {len(conversations):,} conversations have tools, which vLLM refuses "
        "without a parser for the target's calls: give e.g. -- --enable-auto-tool-choice "
        "--tool-call-parser=hermes"
    )
    if num_with_tools == len(conversations):
        raise ValueError(problem)
    print(problem)


def identify(cfg: RegenerateConfig) -> str:
    """Return a hash of everything that a target's answers depend on, except the sampling.

    It covers weights, chat template, generation_config.json and vLLM's arguments. It is empty for a
    running server.
    """
    if cfg.target is None:
        return ""
    folder = fetch_model(cfg.target)
    files = [
        sha256(path)
        for pattern in ("*.jinja", "*_config.json")
        for path in sorted(folder.glob(pattern))
    ]
    return hash_key([fingerprint(folder), files, cfg.vllm_args])[:16]


def read_length(target: str) -> int:
    """Return the number of tokens of a prompt and its answer in a server started here."""
    limit: int = load_text_config(target).max_position_embeddings
    return min(limit, MAX_MODEL_LEN)


@contextmanager
def serve_answers(cfg: RegenerateConfig) -> Iterator[tuple[str, str | None]]:
    """Yield (URL, model name) of the server to ask.

    It is either a new vLLM server for the target, which is stopped on exit, or the running server.
    """
    if cfg.target is None:
        yield cfg.url or DEFAULT_URL, cfg.model
        return
    log = cfg.output.with_suffix(".vllm.log")
    print(f"vLLM serves {cfg.target}; its log is {log}")
    with vllm_server(
        cfg.target,
        log=log,
        max_model_len=read_length(cfg.target),
        max_num_seqs=cfg.concurrency,
        # Fraction of a CPU's memory. `vllm_server` ignores it on a GPU, where vLLM's default
        # applies.
        kv_cache_bytes=psutil.virtual_memory().available // 4,
        extra_args=cfg.vllm_args,
    ) as server:
        yield server.url, server.model
