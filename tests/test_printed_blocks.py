"""The commands in the documents run as printed, in a clone.

A small target, draft and data have the printed names.

`redraft serve` runs as far as the moment at which it becomes vLLM's server. A command that cannot
run here is listed in `LEFT_OUT` with the reason; any other new command is run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from learner_world import make_records, ship
from make_gguf import write_gguf

ROOT = Path(__file__).parents[1]
WITHOUT_ENGINE = ROOT / "tests/helpers/without_engine"

LEFT_OUT = {
    r"make env|(uv )?pip install|pre-commit": "installs from the network",
    r"make |.venv/bin/python -m pytest": "minutes to an hour; CI runs check, test and docs",
    r"redraft (up|eval|bench|regenerate|adapt|serve-features) ": "starts vLLM",
    r"docs/(fleet|online).md: redraft serve|redraft serve .*\+HEAD": "reads a registry or a head of "
    "another page",
    r"redraft doctor (?!.*--engine).*--draft": "starts vLLM",
    r"redraft train (?!.*--print-config)|accelerate launch|vllm serve": "starts vLLM; most name "
    "GPUs",
    r"python -m sglang|trtllm-serve|llama-server": "starts another engine",
    r"redraft export .*(sglang|llama)": "refused: the draft of the tests reads the last layer",
    r"python -m benchmarks.studies.presets": "trains for four minutes and starts vLLM",
    r"python -m benchmarks.(lookup|long|states)": "measures for minutes to hours",
    r"python recipes/rl_grpo.py": "needs a running server and trl",
    r"for i in 1 2; do|until curl|python ask.py|redraft fleet rollback": "needs the two servers of "
    "the tutorial",
    r"curl ": "needs a running server",
    r"kill %1": "the test ends the jobs",
    r"redraft fleet (watch|probe) ": "names machines",
    r"redraft (tap|data score) ": "needs a server, or what was recorded of one",
    r"docs/(agents|online).md: (redraft learner --config|until)": "reads settings that the reader has "
    "edited",
    r"docker|cd recipes/deploy|for image|kubectl": "needs a registry and a cluster",
}
"""Commands that the test does not run, as the beginning of each, and the reason."""

MADE = {
    "README.md": [],
    "docs/decide.md": [],
    "docs/engines.md": [],
    "docs/doctor.md": [],
    "docs/fine-tune.md": [],
    "docs/online.md": ["token", "learner.toml"],
    "docs/privacy.md": [],
    "docs/start.md": [],
    "docs/rl.md": ["outputs/grpo", "learner.toml", "registry/current"],
    "docs/agents.md": [],
    "docs/lookups.md": ["drafts/answers"],
    "docs/pace.md": [],
    "docs/training.md": ["eagle3.toml", "models/target/model.safetensors"],
    "docs/tutorial.md": ["outputs/tutorial/drafts/current", "outputs/tutorial/ask.py"],
    "recipes/deploy/kubernetes/README.md": ["token", "keys/users.conf", "keys/tls.crt"],
}
"""The documents with commands to run, and the files that their commands make."""

SLOW = [
    "docs/decide.md",
    "docs/start.md",
    "docs/fine-tune.md",
    "README.md",
    "docs/tutorial.md",
    "docs/doctor.md",
    "docs/privacy.md",
    "docs/rl.md",
    "docs/agents.md",
    "docs/lookups.md",
    "docs/pace.md",
    "docs/training.md",
]
"""They start a learner, or several commands that load torch."""

STATEMENT = re.compile(r"(?:.*<<'END'\n(?:.*\n)*?END|for .*\n(?:.*\n)*?done.*|(?:.*\\\n)*.*)\n")


def list_statements(name: str) -> Iterator[str]:
    """The commands in the blocks of a document."""
    for block in re.findall(
        r"^```bash\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL
    ):
        yield from (found for found in STATEMENT.findall(block) if not found.startswith("#"))


def find_reasons(name: str, statement: str) -> list[str]:
    """The entries of `LEFT_OUT` for this command."""
    command = re.sub(r"^(?:[A-Z_]+=\S+ )*", "", statement.replace("\\\n", " "))
    return [
        each for each in LEFT_OUT if re.match(each, command) or re.match(each, f"{name}: {command}")
    ]


def list_runnable(name: str) -> list[str]:
    return [statement for statement in list_statements(name) if not find_reasons(name, statement)]


LISTED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
DOCUMENTS = [name for name in LISTED if name.endswith(".md") and (ROOT / name).is_file()]


def test_every_block_is_decided() -> None:
    languages = {
        each
        for name in DOCUMENTS
        for each in re.findall(r"^```(\w+)", (ROOT / name).read_text(), re.M)
    }
    assert languages == {"bash", "nginx"}, "another language needs a test"
    assert {name for name in DOCUMENTS if list_runnable(name)} == MADE.keys()
    used = {
        each
        for name in DOCUMENTS
        for statement in list_statements(name)
        for each in find_reasons(name, statement)
    }
    assert used == LEFT_OUT.keys()


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_reads_the_settings_in_the_documents(tmp_path: Path) -> None:
    (block,) = re.findall(
        r"^```nginx\n(.*?)^```", (ROOT / "docs/fleet.md").read_text(), re.M | re.S
    )
    settings = tmp_path / "nginx.conf"
    settings.write_text(f"pid {tmp_path}/pid; events {{}} http {{ {block} }}")
    command = ["nginx", "-t", "-q", "-e", str(tmp_path / "log"), "-c", str(settings)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.fixture(scope="module")
def clone(tmp_path_factory, tiny_target, random_target, small_tokenizer) -> Path:
    """A folder like a clone, with what the documents take as given."""
    clone = tmp_path_factory.mktemp("clone")
    for top in {name.partition("/")[0] for name in LISTED}:
        (clone / top).symlink_to(ROOT / top)
    for name in ("TARGET", "Qwen/Qwen3-8B", "models/finetuned"):
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).symlink_to(tiny_target)
    for name in ("DRAFT", "outputs/eagle3/draft", "outputs/adapted/draft"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).symlink_to(ROOT / "tests/assets/tiny-eagle3")
    (clone / "outputs/tutorial/run").mkdir(parents=True)
    shutil.copytree(tiny_target, clone / "outputs/tutorial/run/draft")
    rows = [
        {"prompt": f"{word} {n}?", "completion": f"{word} is {n}."}
        for n in range(9)
        for word in ("a", "bee", "cat")
    ]
    for name in ("prompts.jsonl", "answers.jsonl"):
        (clone / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_gguf(clone / "MODEL.gguf", random_target, small_tokenizer)
    return clone


def write_records(clone: Path, target: Path) -> None:
    """Two records of a tenant, and the learner's settings."""
    ship(clone / "spool", make_records(target, 2, tenant="acme"))
    (clone / "learner.toml").write_text(
        f'target = "{target}"\nregistry = "drafts"\nspool = "spool"\n[draft]\ninitial = "DRAFT"\n'
        '[fleet]\nservers = ["http://127.0.0.1:1"]\ntoken_file = "token"\n'
    )


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in MADE]
)
def test_the_blocks_run_as_printed(name, clone, tmp_path, random_target):
    folder = tmp_path / "redraft"
    shutil.copytree(clone, folder, symlinks=True)
    if name == "docs/privacy.md":
        write_records(folder, random_target)
    made = [str(folder / each) for each in MADE[name]]
    end = [f"until [ -e {each} ]; do sleep 0.2; kill -0 $!; done\n" for each in made]
    script = [
        "set -euo pipefail; trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n",
        *list_runnable(name),
        *end,
    ]
    environment = {key: value for key, value in os.environ.items() if key != "REDRAFT_TOKEN"}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{WITHOUT_ENGINE}:{environment.get('PYTHONPATH', '')}",
    }
    # `timeout` ends the learner as well: it signals the whole process group
    command = ["timeout", "--kill-after=10", "800", "bash", "-c", "".join(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{''.join(script)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
