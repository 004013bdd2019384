"""What the tests of several packages share: small models on disk, made once a session."""

from __future__ import annotations

import ast
import functools
import gc
import os
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# The process that only gives tests to the workers needs no more, and would import torch first.
if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from redraft.engine.server import VllmServer

# Importing TRL sets this to ERROR if it is unset, and servers started later would not print their
# INFO lines.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")

# Where this is set (as in many containers), each of hundreds of processes would compile redraft and
# these tests from source again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ASSETS = Path(__file__).parent / "assets"

FORKING = ("run_learner", "recipe_runs", "launches")
"""Helpers whose processes come from one server per pytest worker."""


def read_test_file(path: str) -> str:
    return (Path(__file__).parents[1] / path).read_text()


@functools.cache
def list_engine_tests(path: str) -> frozenset[str]:
    """Names of a file's tests that use a real vLLM.

    `pytest.mark.vllm` decorates them, or is the whole file's.
    """
    source = read_test_file(path)
    if "pytest.mark.vllm" not in source:
        return frozenset()  # most files, which need not be parsed
    nodes = ast.parse(source).body
    is_whole = any(
        isinstance(node, ast.Assign) and "pytest.mark.vllm" in ast.unparse(node) for node in nodes
    )
    return frozenset(
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and (
            is_whole
            or any(
                "pytest.mark.vllm" in ast.unparse(decorator) for decorator in node.decorator_list
            )
        )
    )


def uses_engine(nodeid: str) -> bool:
    path, _, test = nodeid.partition("::")
    return test.partition("[")[0] in list_engine_tests(path)


@functools.cache
def uses_forks(path: str) -> bool:
    """Whether a file starts processes by a server that has imported torch (`run_learner.FORKS`)."""
    return any(f"\nfrom {name} import" in read_test_file(path) for name in FORKING)


def runs_tests(config: pytest.Config) -> bool:
    """False in the process that gives tests to several workers."""
    return hasattr(config, "workerinput") or not config.getoption("numprocesses", None)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not runs_tests(session.config):
        return
    gc.disable()  # What is imported stays: until the tests begin, nothing is worth a search.
    import torch

    # As many threads as a test has cores to itself; more of them slow these small tensors down.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In one of several pytest workers.

    Begin with what takes longest, so that all workers end together.

    That is the engine, and then the folders from last to first: a file of tests/recipes may train
    for a minute.
    """
    if not hasattr(config, "workerinput"):
        return
    places = {path: -place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (not item.get_closest_marker("vllm"), places[item.path]))


def pytest_collection_finish() -> None:
    """Let no garbage collection visit again what was imported.

    Every training ends with one (accelerate's `free_memory`), which takes most of a second then.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests that use an engine or the fork server on one worker, one after the other.

    The others run file by file on any worker.

    A CPU build of vLLM binds its threads to core 0, so that two engines would share one core; and
    these tests share engines by session fixtures, of which each worker has its own, as it has a
    fork server, which imports torch for ten seconds.
    """
    from xdist.scheduler import LoadScopeScheduling

    # the files with most tests first, which are not the longest
    config.option.loadscopereorder = False

    class OneEngineAtATime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "engine" if uses_engine(nodeid) or uses_forks(path) else path

    return OneEngineAtATime(config, log)


@pytest.fixture(scope="session", autouse=True)
def one_model_loads_at_a_time() -> Iterator[None]:
    """Let no two threads load models at once.

    While transformers loads a model, `PreTrainedModel.tie_weights` is replaced. If two threads
    overlap, it may stay replaced, and no later model of this process has tied weights. The thread
    of a learner that a test has ended may still be loading when the next test begins.
    """
    from transformers import PreTrainedModel

    load, lock = PreTrainedModel.from_pretrained.__func__, threading.RLock()

    def load_alone(cls: type[PreTrainedModel], *args: Any, **options: Any) -> Any:
        with lock:
            return load(cls, *args, **options)

    PreTrainedModel.from_pretrained = classmethod(load_alone)
    yield
    PreTrainedModel.from_pretrained = classmethod(load)


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Let `fsync` do nothing: tests kill processes, whose files stay, and not the machine.

    A learner writes its state and its versions often, and each time waits for milliseconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Let the clients of all tests share the machine's certificates.

    Reading them takes 30 ms of CPU time, and httpx reads them for each client.
    """
    import certifi

    read, kept = ssl.create_default_context, dict[tuple[str | None, ...], ssl.SSLContext]()

    def read_once(*args: Any, **options: Any) -> ssl.SSLContext:
        if args or options not in ({}, {"cafile": certifi.where()}):
            return read(*args, **options)
        places = (*options, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        if places not in kept:
            kept[places] = read(**options)
        return kept[places]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", read_once)
        yield


FORKED_ENGINE = Path(__file__).parent / "helpers" / "forked_engine"


@pytest.fixture(scope="session", autouse=True)
def processes_of_engines_fork(pytestconfig: pytest.Config) -> Iterator[None]:
    """In the quick suite, let each vLLM server import vLLM once, not three times.

    Without `-m "not slow"`, servers start as they do for users.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "not slow" in pytestconfig.getoption("markexpr"):
            patch.setenv("PYTHONPATH", str(FORKED_ENGINE), prepend=os.pathsep)
        yield


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """For a test that trains as a process of its own would, whatever was trained before it."""
    from accelerators import reset_accelerator

    reset_accelerator()
    yield
    reset_accelerator()


@pytest.fixture(scope="session")
def tiny_target() -> Path:
    """The trained small target: Llama, 7 layers, vocabulary of 4,096."""
    folder = ASSETS / "tiny-target"
    if not (folder / "model.safetensors").exists():
        pytest.skip(
            f"{folder} is not there: python -m benchmarks.studies.tiny_target --output {folder}"
        )
    return folder


@pytest.fixture(scope="session")
def small_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 tokens with the small target's special tokens and chat template.

    Trained once on ast.py and string.py of Python 3.11.7: another Python's files would give other
    token counts.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from benchmarks.studies.tiny_target import CHAT_TEMPLATE, SPECIAL_TOKENS

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(ASSETS / "small-tokenizer.json")),
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL_TOKENS[3:],
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def random_target(
    tmp_path_factory: pytest.TempPathFactory, small_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A folder with a random Llama of 2 layers, float32, and its tokenizer.

    Its distributions are sharp.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(small_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,  # the usual 0.02 gives nearly uniform distributions, full of ties
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("random-target")
    LlamaForCausalLM(config).save_pretrained(folder)
    small_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def served_pair(
    random_target: Path,
    small_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """A random target whose answers end at different lengths, and a noisy copy of it.

    The target accepts about half of the copy's tokens.
    """
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(random_target)
    model.generation_config.eos_token_id = list(range(2, 16))
    target, draft = (
        tmp_path_factory.mktemp("served-target"),
        tmp_path_factory.mktemp("served-draft"),
    )
    model.save_pretrained(target)
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data += 0.03 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(draft)
    for folder in (target, draft):
        small_tokenizer.save_pretrained(folder)
    return target, draft


@pytest.fixture(scope="session")
def engine_with_draft(
    served_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """One real vLLM for all tests that need one: `served_pair` with 3 draft tokens."""
    from redraft.engine.server import vllm_server

    target, draft = served_pair
    speculative_config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    with vllm_server(
        target,
        log=log,
        speculative_config=speculative_config,
        max_model_len=256,
    ) as server:
        yield server


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    from make_tokenizers import make_byte_tokenizer

    return make_byte_tokenizer()
