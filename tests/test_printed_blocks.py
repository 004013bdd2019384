"""The commands in the documents run as printed, in a clone.

A small target, drafts and data have the printed names. `FITTED` and `FLAGS` list what else a reader
replaces: hosts, and numbers that fit a large model or hours of training.

A command that starts vLLM, or becomes its server, runs as far as that moment. `WITH_ENGINE` lists
the documents that run with a real vLLM. A command that cannot run here is listed in `LEFT_OUT` with
the reason; any other new command is run. A block of another language is read by the program that
reads such a file (`READERS`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from learner_world import make_records, ship
from make_gguf import write_gguf

from redraft.distill.data.conversations import load_conversations
from redraft.engine.process import free_port
from redraft.files.checkpoint import load_tokenizer
from redraft.heads.families.eagle3 import Config, Eagle3
from redraft.heads.target import Target
from redraft.online.tokens import write_token

ROOT = Path(__file__).parents[1]
WITHOUT_ENGINE = ROOT / "tests/helpers/without_engine"

LEFT_OUT = {
    r"make env|(uv )?pip install|pre-commit": "installs from the network",
    r"make ": "minutes to an hour; CI runs check, test and docs",
    r"python -m benchmarks\.(lookup|long|states)": "measures for minutes to hours",
    r"redraft bench .*--draft suffix": "needs a package that `make env` does not install",
    r".*--signal\.kind endpoint|redraft (regenerate|doctor) .*--url|python recipes/rl_grpo": "needs "
    "a running server",
    r"for i in 1 2; do|until curl|redraft fleet rollback": "needs the servers of the page",
    r"vllm serve": "names GPUs",
    r"accelerate launch .*--num_machines": "needs two machines",
    r".*s3://": "needs an object store",
    r"python -m sglang|trtllm-serve|llama-server": "starts another engine",
    r"docker": "needs a registry",
    r"kubectl (rollout|exec|port-forward)": "needs a cluster",
    r"kill %1": "the test ends the jobs",
}
"""Commands that the test does not run, as the beginning of each, and the reason."""

if shutil.which("kubectl") is None:
    LEFT_OUT[r"kubectl create"] = "kubectl is not installed"

STEPS = {
    "--loop.steps": "2",
    "--loop.batch-size": "1",
    "--loop.sequence-length": "128",
    "--data.held-out": "0.2",
    "--data.num-prompts": "4",
    "--prove.max-tokens": "8",
}
NEW = "outputs/new-$((n+=1))"
"""A separate output folder for each command."""

FLAGS = {
    r"accelerate launch(?= --config_file)": {
        "--num_processes": "2",
        "--mixed_precision": "no",
        "--main_process_port": "0",
    },
    r"(redraft (train|adapt)|recipes/train\.py) \S+(?!.*--print-config)": {
        **STEPS,
        "--output": NEW,
    },
    r"benchmarks\.studies\.presets \S+": STEPS,
    r"--config_file .*recipes/train\.py \S+": {"--prove.no-engine": ""},  # one of two ranks
    r"recipes/train\.py \S+(?=.*--loop\.context-parallel)": {"--loop.context-parallel": "2"},
    r"(recipes/train\.py|train) eagle3(?!.*--(target|config) )": {"--target": "TARGET"},
    r"recipes/train\.py \S+(?!.*--data\.source)": {"--data.source": "answers.jsonl"},
    r"redraft regenerate": {"--output": f"{NEW}.jsonl"},
    r"redraft serve-features \S+": {"--layers": "2 3 4"},
    r"redraft eval": {"--prompts": "prompts.jsonl", "--num-prompts": "4", "--max-tokens": "8"},
    r"redraft eval(?=.*v1[23]=)": {
        "--no-engine": ""
    },  # the second one reads the first one's report
    r"redraft eval(?=.*v12=)": {"--output": "outputs/eval-v12"},
    r"redraft bench": {"--prompts": "prompts.jsonl", "--output": NEW},
    r"redraft tap": {"--admin-port": "8082"},
    r"docs/start.md: curl": {"--fail": ""},
}
"""Flags that are set after each of these beginnings, in place of the printed values if any."""


def wait_for(ready: str) -> str:
    """Shell text that begins the command before it in the background, and waits for `ready`."""
    return f" &\nuntil {ready}; do sleep 0.2; kill -0 $!; done"


VALIDATE = "kubernetes-validate --strict -k 1.31"
LEARNER = {
    "target": "TARGET",
    "registry": "drafts/NAME",
    "draft.initial": "models/standalone",
    "spool": "spool",
    "fleet.token_file": "token",
}
"""The settings that docs/online.md tells the reader to edit, except the servers."""

FITTED = {
    r"--draft-vocab-size \d+": "--draft-vocab-size 512",
    r"(?<=max-prompt-tokens) \d+": " 256",
    r"--loop\.minutes 27": "--loop.minutes 0.02",
    r"outputs/parts/smollm2-135m-instruct": "TARGET",
    r"recipes/demo/assets/smollm2-answers\.jsonl\.zst": "answers.jsonl",
    r"--prompts DATA": "--prompts prompts.jsonl",
    r"(?<=--storage )/shared": "shared",
    r"(?<=redraft export )DRAFT": "INNER",
    # a log, and commands that run until they are stopped
    r"log:4222": "127.0.0.1:4222",
    r"^(\S+: )(redraft fleet probe)": r"\1nats-server -js -a 127.0.0.1 -p 4222 -sd log > nats.log"
    + wait_for("(: < /dev/tcp/127.0.0.1/4222) 2> /dev/null")
    + "\n"
    + r"\2",
    r"^(docs/start\.md: redraft up .*? -- )": r"\1--enforce-eager --max-model-len 256 "
    "--kv-cache-memory-bytes 134217728 ",
    r"^(docs/start\.md: redraft up .*)": r"\1" + wait_for("curl -sf http://127.0.0.1:8000/health"),
    r"^(?!docs/start\.md)(\S+: )(redraft up [^#]*?) *(#.*)?$": r"\1rm -f redraft-*/logs/server.log"
    "\n"
    r"\2 || grep api_server redraft-*/logs/server.log",
    r"(redraft tap .*)": r"\1"
    + wait_for("curl -sf http://127.0.0.1:8082/redraft/tap")
    + "\nkill $!; wait $! || true",
    r"redraft learner --config learner\.toml": r"\g<0> --set page.port=8400",
    r"^(\S+: )python ask\.py &": r"\1python -m py_compile ask.py",
    # what the reader edits, or has in the root folder of a container
    r"^(docs/online\.md: redraft learner --config learner\.toml)": r"\1"
    + "".join(f""" --set '{name}="{value}"'""" for name, value in LEARNER.items())
    + """ --set 'fleet.servers=["http://127.0.0.1:8001"]'""",
    r'(?<=")/drafts(?=")': "drafts/NAME",
    r'(?<=")/etc/redraft/(?=token")': "",
    r"^(docs/online\.md: +.capture.: .*)": r"\1"
    "\n"
    "python -c 'from redraft.online.engine.config import read_config; print(read_config())'",
    # the manifests, and what a cluster would do first
    r"cd recipes/deploy/kubernetes": "cp -r recipes/deploy/kubernetes manifests; cd manifests",
    r"\$\(docker inspect .*\)": "YOUR-REGISTRY/$image@sha256:$(printf %064d 0)",
    r"(?s)(for image in .*done)": r"\1" "\nif grep registry.example *.yaml; then exit 1; fi",
    r"kubectl apply -f \.": f"{VALIDATE} *.yaml",
    r"kubectl apply -f (\S+)": rf"{VALIDATE} \1",
    r"(kubectl create secret .*)": r"\1 --dry-run=client -o yaml > secret.yaml"
    f"\n{VALIDATE} secret.yaml; rm secret.yaml",
}
"""Patterns in `document: command`, with their replacements in this order."""

PORTS = re.compile(r"\b(4222|8000|8001|8002|8080|8082|8400)\b")
"""Printed ports, and the defaults of other sockets, each of which a free port replaces."""

MADE = {
    "docs/online.md": ["token", "learner.toml"],
    "docs/rl.md": ["outputs/grpo", "learner.toml", "registry/current"],
    "docs/lookups.md": ["drafts/answers"],
    "docs/training.md": ["eagle3.toml", "models/target/model.safetensors"],
    "docs/tutorial.md": ["outputs/tutorial/drafts/current", "outputs/tutorial/ask.py"],
    "docs/evaluation.md": ["outputs/eval-v12/report.json", "outputs/eval-v13/report.html"],
    "docs/engines.md": [
        "INNER-sglang",
        "INNER-tensorrt-llm/spec.yaml",
        "INNER-llama.cpp/draft.gguf",
    ],
    "recipes/deploy/kubernetes/README.md": [
        "manifests/token",
        "manifests/keys/users.conf",
        "manifests/keys/tls.crt",
    ],
}
"""Files that the commands of a document make."""

QUICK = ["recipes/deploy/kubernetes/README.md"]
"""Documents that take seconds. All others start several commands, most of which load torch."""

PUBLIC = "RedHatAI/Qwen3-8B-speculator.eagle3"
"""A published head, which the tests replace with their own."""

WITH_ENGINE = ["docs/start.md"]
"""Documents that run with a real vLLM."""

STATEMENT = re.compile(r"(?:.*<<'END'\n(?:.*\n)*?END|for .*\n(?:.*\n)*?done.*|(?:.*\\\n)*.*)\n")


def list_blocks(name: str) -> list[tuple[str, str]]:
    """The language and the text of each block of a document that names its language."""
    return re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S)


def list_statements(name: str) -> Iterator[str]:
    """The commands in the blocks of a document."""
    for language, block in list_blocks(name):
        if language == "bash":
            yield from (found for found in STATEMENT.findall(block) if not found.startswith("#"))


def find_reasons(statement: str) -> list[str]:
    """The entries of `LEFT_OUT` for this command."""
    command = re.sub(r"^(?:[A-Z_]+=\S+ )*", "", statement.replace("\\\n", " "))
    return [each for each in LEFT_OUT if re.match(each, command)]


def list_runnable(name: str) -> list[str]:
    return [statement for statement in list_statements(name) if not find_reasons(statement)]


def name_statement(name: str, statement: str) -> str:
    """`document: command`, with a continued command in one line."""
    return f"{name}: " + re.sub(r" *\\\n *", " ", statement.removesuffix("\n"))


def set_flags(text: str, pattern: str, flags: dict[str, str]) -> str:
    """The text with these flags after the pattern, or in place of the values that it has."""
    added = ""
    for flag, value in flags.items():
        words = f"{flag} {value}".strip()
        given = re.compile(rf"{re.escape(flag)}(?: \S+){{{len(value.split())}}}(?=\s|$)")
        if given.search(text):
            text = given.sub(words, text)
        else:
            added += f" {words}"
    return re.sub(pattern, rf"\g<0>{added}", text)


def fit(name: str, statement: str, ports: dict[str, int]) -> str:
    """A command with everything that the reader would replace."""
    text = name_statement(name, statement)
    for pattern, flags in FLAGS.items():
        if re.search(pattern, text):
            text = set_flags(text, pattern, flags)
    for pattern, here in FITTED.items():
        text = re.sub(pattern, here, text)
    text = PORTS.sub(lambda port: str(ports[port[0]]), text)
    return f"{text.removeprefix(f'{name}: ')}\n"


LISTED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
DOCUMENTS = [name for name in LISTED if name.endswith(".md") and (ROOT / name).is_file()]
RUN = [name for name in DOCUMENTS if list_runnable(name)]


def test_no_entry_of_a_table_is_left_over() -> None:
    statements = [(name, each) for name in DOCUMENTS for each in list_statements(name)]
    assert {each for _, text in statements for each in find_reasons(text)} == LEFT_OUT.keys()
    texts = [name_statement(name, text) for name, text in statements]
    unused = [each for each in (*FLAGS, *FITTED) if not any(re.search(each, t) for t in texts)]
    assert not unused
    assert {*MADE, *QUICK, *WITH_ENGINE} <= {*RUN}


# ----------------------------------------------------------------------------------------------------------
# files in blocks


def read_nginx(text: str, folder: Path) -> None:
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    settings = folder / "nginx.conf"
    settings.write_text(f"pid {folder}/pid; events {{}} http {{ {text} }}")
    command = ["nginx", "-t", "-q", "-e", str(folder / "log"), "-c", str(settings)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def read_rows(text: str, folder: Path) -> None:
    (folder / "prompts.jsonl").write_text(text)
    assert len(load_conversations(str(folder / "prompts.jsonl"), strict=True)) == text.count("\n")


READERS: dict[str, Callable[[str, Path], None]] = {"nginx": read_nginx, "jsonl": read_rows}
"""The program that reads a file of this kind, by the language of its block."""


@pytest.mark.parametrize(
    ("language", "text"),
    [
        pytest.param(language, text, id=f"{name}-{language}")
        for name in DOCUMENTS
        for language, text in list_blocks(name)
        if language != "bash"
    ],
)
def test_a_printed_file_is_read_by_the_program_that_uses_it(language, text, tmp_path):
    assert language in READERS, "another language needs a reader"
    READERS[language](text, tmp_path)


# ----------------------------------------------------------------------------------------------------------
# commands


@pytest.fixture(scope="module")
def clone(tmp_path_factory, tiny_target, random_target, small_tokenizer) -> Path:
    """A folder like a clone, with what the documents take as given."""
    clone, made = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("made")
    # other engines serve no head that reads the last layer, as that of the tests does
    head = Eagle3(Config(aux_layer_ids=(1, 3, 5)), Target.from_folder(tiny_target))
    head.export(made / "INNER", torch.bfloat16)
    write_gguf(made / "MODEL.gguf", random_target, small_tokenizer)
    write_gguf(made / "TARGET.gguf", tiny_target, load_tokenizer(tiny_target))
    given = {".venv": Path(sys.prefix)}
    given |= {top: ROOT / top for top in {name.partition("/")[0] for name in LISTED}}
    given |= {name: made / name for name in ("INNER", "MODEL.gguf", "TARGET.gguf")}
    given |= dict.fromkeys(
        ("TARGET", "Qwen/Qwen3-8B", "models/finetuned", "models/standalone"), tiny_target
    )
    heads = ("DRAFT", "HEAD", "outputs/eagle3/draft", "outputs/adapted/draft", PUBLIC)
    given |= dict.fromkeys(heads, ROOT / "tests/assets/tiny-eagle3")
    for name, there in given.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).symlink_to(there)
    rows = [
        {"prompt": f"{word} {n}?", "completion": f"{word} is {n}.", "topic": word}
        for n in range(40)
        for word in ("a", "bee", "cat")
    ]
    for name in ("prompts.jsonl", "answers.jsonl", "sessions.jsonl"):
        (clone / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return clone


def add_given(name: str, folder: Path, target: Path) -> None:
    """What only this document takes as given: records, a learner's settings, or a registry."""
    if name == "docs/privacy.md":
        ship(folder / "spool", make_records(target, 2, tenant="acme"))
    if name == "docs/tap.md":
        ship(folder / "ids", make_records(target, 2))
    if name == "docs/fleet.md":
        (folder / "drafts/NAME").mkdir(parents=True)
        (folder / "drafts/NAME/current").symlink_to(folder / "models/standalone")
    if name in ("docs/privacy.md", "docs/agents.md"):
        (folder / "learner.toml").write_text(
            f'target = "{target}"\nregistry = "drafts/NAME"\nspool = "spool"\n'
            '[draft]\nfamily = "eagle3"\ninitial = "DRAFT"\n'
            '[fleet]\nservers = ["http://127.0.0.1:1"]\ntoken_file = "token"\n'
        )
    if name == "docs/agents.md":
        write_token(folder / "token")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name in RUN
        if name not in WITH_ENGINE
    ],
)
def test_the_blocks_run_as_printed(name, clone, tmp_path, tiny_target):
    run_blocks(name, clone, tmp_path, tiny_target, [str(WITHOUT_ENGINE)])


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_ENGINE)
def test_the_blocks_run_as_printed_with_a_real_vllm(name, clone, tmp_path, tiny_target):
    run_blocks(name, clone, tmp_path, tiny_target, [])


def run_blocks(
    name: str, clone: Path, tmp_path: Path, target: Path, python_path: list[str]
) -> None:
    folder = tmp_path / "redraft"
    shutil.copytree(clone, folder, symlinks=True)
    add_given(name, folder, target)
    ports = defaultdict[str, int](free_port)
    made = [str(folder / each) for each in MADE.get(name, [])]
    script = [
        "set -euo pipefail; n=0; trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n",
        *(fit(name, statement, ports) for statement in list_runnable(name)),
        *(f"until [ -e {each} ]; do sleep 0.2; kill -0 $!; done\n" for each in made),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "REDRAFT_TOKEN"}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ":".join([*python_path, environment.get("PYTHONPATH", "")]),
    }
    # `timeout` ends the learner as well: it signals the whole process group
    command = ["timeout", "--kill-after=10", "800", "bash", "-c", "".join(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{''.join(script)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
