"""One command for a server and its learner: `redraft up TARGET -- VLLM_ARGS`.

    redraft up ─┬─► learner: `redraft learner`          registry/current ─┐
                └─► server:  `redraft serve --pace auto` ◄────────────────┘
                              spool ─► learner ─► swaps

Each part is a process with its own log. All settings are checked before the first file is written.
"""

import contextlib
import errno
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import httpx
import psutil

from redraft.engine.machine import ENGINE_IS_CPU, count_cores
from redraft.engine.process import exiting_on_sigterm
from redraft.engine.proxies import is_local
from redraft.eval.forecast.draft_source import DraftSource
from redraft.files.artifact import publish, require_space, write_whole
from redraft.files.folder import (
    fetch_model,
    open_folder,
    read_config,
    tensor_entries,
    text_sections,
    weight_files,
)
from redraft.files.lock import own
from redraft.files.private import make_private, require_own
from redraft.files.settings import render_value
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family
from redraft.heads.families.retrieval import LIVE
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.engine.config import check_pace
from redraft.online.fleet.registry import Registry
from redraft.online.page.config import Page
from redraft.online.page.headline import shorten_version
from redraft.online.tokens import write_token
from redraft.recipes.serve.serve import (
    choose_adaptive,
    list_notes,
    list_parts,
    speculative_config,
)
from redraft.recipes.serve.serve_config import ServeConfig
from redraft.recipes.serve.up_config import UpConfig
from redraft.recipes.serve.up_folder import (
    FLEET,
    LOCK,
    SETTINGS,
    TOKEN,
    describe_records,
    list_server,
    listed,
)
from redraft.recipes.serve.up_parts import Learned, Meter, Part, Restarts, Screen, show_lines
from redraft.recipes.serve.vllm_flags import (
    Beside,
    list_warnings,
    read_flags,
    require_agreement,
    require_private,
    require_same_weights,
)

HEAD = "head"  # Value of --draft for a new head without a lookup before it.
NEW_METHOD = "eagle3"  # vLLM's method for a new head.

COMMAND = (sys.executable, "-m", "redraft.recipes.cli")

# Minimum free disk space for the spool (1 GiB), the buffer and the versions of a small draft.
LEAST_FREE_BYTES = 4 << 30
# Number of ids that a new head proposes, because its output matrix takes the most time on a CPU.
# For a target with 150,000 ids, this matrix would otherwise be larger than the remaining head.
MOST_IDS = 16384 if ENGINE_IS_CPU else 32000
# --gpu-memory-utilization of a server that shares its GPU with the learner; vLLM's default is 0.92.
SHARED = 0.75
# Nice level of a learner on the server's cores; the server runs at 0, and 19 is Linux's maximum.
NICENESS = 19
MICRO_BATCHES = 4  # micro-batches per step on a shared device, between which the learner can pause
# Held-out requests per domain; on a CPU, scoring two drafts on 64 requests takes as long as 5
# steps.
HELD_OUT = 64
LOOK_S = 1.0  # seconds between two checks of the parts
SERVER_STOP_S = 45  # running answers get 30 s to finish, then their records are written
LEARNER_STOP_S = 120  # time for the learner to write a checkpoint


@dataclass(frozen=True, kw_only=True)
class Place:
    """The learner's device."""

    line: str
    """Line for the user about the learner's device."""
    gpu: str = ""
    """The name of the learner's GPU; empty if it uses the CPU."""
    shares: bool = True
    """Whether the server computes on the same device."""
    vllm_args: tuple[str, ...] = ()
    """Further arguments for the server."""

    @property
    def waits(self) -> bool:
        """Whether the learner starts only when the server is ready.

        While vLLM starts on a GPU, it attributes all new use of the GPU's memory to itself, and
        reduces its KV cache. If another process frees memory, vLLM does not start.
        """
        return self.shares and bool(self.gpu)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The validated settings of everything that will be started."""

    cfg: UpConfig
    folder: Path
    target: Path
    draft: DraftSource | None
    """The first draft. None means a new head."""
    url: str
    page_port: int
    flags: Mapping[str, str]
    has_begun: bool
    """Whether the folder already has a version, and settings that the user may have changed."""
    place: Place

    @property
    def name(self) -> str:
        """Return the server's name in printed lines and logs."""
        return f"server-{httpx.URL(self.url).port}" if self.cfg.join else "server"


def main(cfg: UpConfig) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises:
        ValueError, OSError: the settings are wrong, and nothing has started yet.
        AlreadyOwnedError: this command already runs in the folder.
        ChildProcessError: the server exited.
    """
    plan = make_plan(cfg)
    make_private(plan.folder)  # it contains users' text
    with contextlib.ExitStack() as stack:
        if not cfg.join:
            stack.enter_context(own(plan.folder / LOCK, "a redraft up"))
        stack.enter_context(exiting_on_sigterm())
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        learns = bool(cfg.join) or prepare(plan)
        if learns:
            stack.enter_context(listed(plan.folder, plan.url))
        run(plan, learns=learns)


def make_plan(cfg: UpConfig) -> Plan:
    """Check the settings, and plan all parts to start. Raises the same errors as `main`."""
    if cfg.join and (cfg.folder or cfg.draft):
        raise ValueError(
            "--join uses the folder and draft of the running redraft up: remove the other flags"
        )
    require_same_weights(cfg.target, os.environ)
    target = open_folder(cfg.target).absolute()
    read_config(target)
    flags = read_flags(cfg.vllm_args)
    draft = DraftSource.parse(cfg.draft) if cfg.draft and cfg.draft != HEAD else None
    parts: list[Beside] = ["up", "pace", *list_parts(draft, records=True)]
    require_agreement(cfg.vllm_args, flags, str(target), parts)
    require_private(flags, os.environ)
    check_pace(cfg.pace, cfg.num_speculative_tokens)
    if cfg.pace == "adaptive":
        speculative = draft.speculative() if draft else {"method": NEW_METHOD}
        choose_adaptive(cfg.pace, flags, str(target), speculative)
    folder = (cfg.join or cfg.folder or Path(f"redraft-{Path(cfg.target).name}")).absolute()
    require_own(folder)
    if not cfg.join and (folder / LOCK).exists():
        # A running redraft up would also explain ports in use.
        with own(folder / LOCK, "a redraft up"):
            pass
    settings = check_folder(cfg, folder, target, draft)
    if cfg.draft == HEAD and cfg.capture.fraction == 0 and settings is None:
        raise ValueError(
            f"--draft {HEAD} with --capture.fraction 0: {folder} has no head, and none would be "
            "trained; remove one of the two flags"
        )
    page_port = settings.page.port if settings else Page().port
    given = flags.get("port", "8000")
    if not given.isdecimal() or not 0 < (port := int(given)) < 1 << 16:
        raise ValueError(f"--port {given} is not a port: give a number from 1 to 65535")
    if is_taken(port, flags.get("host", "")):
        raise ValueError(
            f"port {port} is in use: choose a different one after the --, e.g. --port 8001"
        )
    if settings and not cfg.join and is_taken(page_port):
        raise ValueError(f"port {page_port} is in use: change [page] port in {folder / SETTINGS}")
    if settings is None:  # otherwise, the learner waits for space, and serving must not
        require_space(folder, LEAST_FREE_BYTES)
    require_memory(target)
    return Plan(
        cfg=cfg,
        folder=folder,
        target=settings.target if settings else target,
        draft=draft,
        url=f"http://{choose_host(flags.get('host', ''))}:{port}",
        page_port=page_port,
        flags=flags,
        has_begun=settings is not None,
        place=place_learner(list_gpus(), flags),
    )


def choose_host(given: str) -> str:
    """Return the URL host for this machine's requests to a server started with this --host."""
    if given in ("", "0.0.0.0", "localhost"):
        return "127.0.0.1"
    if given == "::":
        return "[::1]"
    return f"[{given}]" if ":" in given else given


def check_folder(
    cfg: UpConfig, folder: Path, target: Path, draft: DraftSource | None
) -> LearnerConfig | None:
    """Return the learner's settings, or None if the folder has no version of the draft yet.

    Raises the same errors as `main`.
    """
    if (folder / "registry" / "current").exists() and (folder / SETTINGS).is_file():
        settings = load_config(folder / SETTINGS)
        initial = settings.draft.initial or Path()
        # A folder keeps using the snapshot of a hub repository with which it started.
        is_newer = target.parent.name == "snapshots" and target.parent == settings.target.parent
        if settings.target.resolve() != target.resolve() and not is_newer:
            raise ValueError(
                f"{folder} belongs to the target {settings.target}: choose a different --folder"
            )
        family = find_family(settings.draft.family)
        if cfg.draft == HEAD and not family.is_head:
            raise ValueError(
                f"--draft {HEAD}: {folder} was started with {initial}, which is not a head but "
                f"{family.title}: remove --draft, or choose a different --folder"
            )
        if draft is not None and (draft.folder or Path()).resolve() != initial.resolve():
            raise ValueError(
                f"{folder} was started with {initial}: remove --draft, or choose a different "
                f"--folder"
            )
        return settings
    if cfg.join:
        raise FileNotFoundError(
            f"{folder} has no {SETTINGS}: give --join the folder of a `redraft up` with a learner"
        )
    if folder.is_dir() and any(folder.iterdir()) and not (folder / TOKEN).is_file():
        raise FileExistsError(f"{folder} contains other files: choose a different --folder")
    if draft is not None:
        if draft.lookup is not None:
            raise ValueError(
                f"--draft {draft}: redraft up chooses the lookup itself; set --draft {draft.source}"
            )
        speculative_config(ServeConfig(target=str(target), draft=cfg.draft))
        draft.require_layer(str(target))
    return None


def is_taken(port: int, host: str = "") -> bool:
    """Whether a process listens on this port at the host's addresses (by default, at any address).

    Port 0, which stands for any free port, is never taken.
    """
    passive, stream = socket.AI_PASSIVE, socket.SOCK_STREAM
    try:
        found = socket.getaddrinfo(host or None, port, type=stream, flags=passive)
    except OSError:  # unknown host name, which vLLM will report
        return False
    for family, _, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return False


def require_memory(target: Path) -> None:
    """Raise ValueError if the target does not fit into the memory of this CPU server."""
    try:
        need = sum(file.stat().st_size for file in weight_files(target))
    except (FileNotFoundError, ValueError):  # vLLM will report it
        return
    free = psutil.virtual_memory().available
    if ENGINE_IS_CPU and need > free:
        raise ValueError(
            f"{target} needs {need / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB is free: "
            "stop other programs, or choose a smaller target"
        )


def prepare(plan: Plan) -> bool:
    """Create the files that are missing in the folder. Return whether there is a draft to train.

    If it returns True, the registry has a version.
    """
    folder = plan.folder
    if not (folder / TOKEN).exists():
        write_token(folder / TOKEN)
    make_private(folder / "spool")
    for name in ("registry", "logs"):
        (folder / name).mkdir(exist_ok=True)
    if plan.cfg.capture.fraction == 0:
        print(
            "no learner is started, because nothing is recorded (--capture.fraction 0)", flush=True
        )
        return False
    if plan.has_begun:
        return True
    fetch_model(plan.cfg.target)
    # A separate process, so that this one does not import torch.
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        draft = (
            plan.draft
            or apart.submit(
                make_new_head,
                plan.target,
                folder / "draft",
                plan.cfg.num_speculative_tokens,
                is_required=plan.cfg.draft == HEAD,
            ).result()
        )
        if draft.is_lookup or draft.family.is_in_target or not draft.family.learns_online:
            print(f"no learner is started, because {draft} cannot be trained", flush=True)
            return False
        port = plan.page_port
        while is_taken(port):
            port += 1
        write_whole(folder / SETTINGS, render_settings(plan, draft, port))
        apart.submit(publish_first, folder / SETTINGS).result()
    return True


def publish_first(settings: Path) -> None:
    """Publish the first version, so that the server can start beside the learner.

    Raises the same errors as `provide_first_version`.
    """
    from redraft.online.daemon.opening import provide_first_version

    cfg = load_config(settings)
    registry = Registry(cfg.registry)
    with registry.owned():
        provide_first_version(cfg, registry, TargetFolder.open(cfg.target))


SHORT_ROLLOUT = """[rollout]
# Nothing is trained during a rollout. The server drafts only while that is faster, so a short comparison is enough.
warm_up_s = 10
poll_s = 2
min_drafts = 1000
window_timeout_s = 120
"""


def render_settings(plan: Plan, draft: DraftSource, page_port: int) -> str:
    """Render the learner's settings for this target and machine as TOML."""
    lines = [] if plan.draft else list_training(draft)
    lines += [f"accumulation = {MICRO_BATCHES}"] if plan.place.shares else []
    training = "\n".join(lines)
    judging = "" if plan.place.gpu else f"[judging]\nheld_out_per_domain = {HELD_OUT}\n"
    buffer_bytes = min(8 << 30, shutil.disk_usage(plan.folder).free // 4)
    return f"""# redraft learner --print-config explains every setting. redraft up reads this file when it starts.
target = {render_value(plan.target)}
registry = "registry"
spool = "spool"
[draft]
family = {render_value(draft.family.name)}
initial = {render_value(draft.folder)}
[fleet]
file = "{FLEET}"
token_file = "{TOKEN}"
shares_device = {render_value(plan.place.shares)}
[buffer]
max_bytes = {buffer_bytes}
[page]
port = {page_port}
{SHORT_ROLLOUT if plan.cfg.pace == "auto" else ""}{judging}[training]
{training}
"""


def list_training(head: DraftSource) -> list[str]:
    """The family's settings for training a new head, as lines of TOML."""
    assert head.folder is not None
    assert head.family.training is not None
    width = read_config(head.folder)["hidden_size"]
    settings = head.family.training.learn_new(width)
    return [f"{name} = {render_value(value)}" for name, value in settings.items()]


def make_new_head(
    target: Path, folder: Path, num_tokens: int, *, is_required: bool = False
) -> DraftSource:
    """Create a new EAGLE-3 head from the target's files. If that is impossible, return live counts.

    Raises:
        ValueError: no head can be made, and `is_required` is set.
    """
    if not folder.exists():
        try:
            write_new_head(target, folder, num_tokens)
        except (ValueError, OSError) as error:
            if is_required:
                raise ValueError(f"--draft {HEAD}: no head can be created: {error}") from error
            print(f"the server drafts from live counts, without a head: {error}", flush=True)
            return DraftSource.parse(LIVE)
    return DraftSource(source=str(folder))


def write_new_head(target: Path, folder: Path, num_tokens: int, most_ids: int = MOST_IDS) -> None:
    """Publish a head initialised with the weights of the target's last layer.

    If the target is quantised, the head's layer starts from random weights.

    Raises:
        ValueError, OSError: the target has too few layers, or its layers do not fit such a head.
    """
    import torch

    from redraft.distill.signal.parts import read_final_norm, read_last_layers
    from redraft.heads.families.eagle3 import Config as Options
    from redraft.heads.families.eagle3 import Eagle3
    from redraft.heads.target import Target

    opened, weights = TargetFolder.open(target), Target.from_folder(target)
    size, ids_W = len(weights.head_VD), None
    if size > most_ids:
        # Tokenizers number their merges in order of frequency. Tokens like <tool_call> or <think>
        # are added at the end, although answers contain many of them.
        added = opened.tokenizer.added_tokens_decoder.items()
        words = {id for id, token in added if id < size and not token.special}
        ids_W = torch.tensor(sorted({*range(most_ids), *words, *opened.end_ids}))
        print(
            f"the new head proposes only {len(ids_W):,} of {size:,} ids, the most frequent "
            f"ones; to propose different ones, train a head and set --draft"
        )
    torch.manual_seed(0)
    head = Eagle3(Options(num_steps=num_tokens), weights, ids_W)
    if method := opened.quantization:
        print(
            f"the new head starts from random weights, because {opened.name} is quantised ({method}); "
            "if there is a trained head for this model, e.g. on the hub, start from it with --draft"
        )
        head.init_from_layers([torch.nn.Module()], read_final_norm(opened, torch.float32))
    else:
        head.init_from_layers(*read_last_layers(opened, torch.float32, 1))
    with torch.no_grad():
        # vLLM shares the target's output head if the draft's is equal, and a swap could then not
        # change it.
        head.lm_head.weight.mul_(1 + 0.01 * torch.randn_like(head.lm_head.weight))
    origin = {
        "target": str(target),
        "target_fingerprint": opened.fingerprint,
        "target_lineage": opened.lineage,
    }
    publish(folder, lambda partial: head.export(partial, torch.bfloat16), origin)


def place_learner(gpus: Sequence[str], flags: Mapping[str, str]) -> Place:
    """Choose a GPU that vLLM leaves free, otherwise a share of the last GPU, otherwise the CPU."""
    pauses = "and pauses while requests run"
    # vLLM uses this name for the share of a CPU's memory too.
    is_given = "gpu_memory_utilization" in flags
    arguments = () if is_given else ("--gpu-memory-utilization", str(SHARED))
    if not gpus:
        return Place(line=f"the learner trains on the CPU, {pauses}", vllm_args=arguments)
    gpu = gpus[-1]
    if int(flags.get("tensor_parallel_size") or 1) < len(gpus):
        return Place(line=f"the learner uses GPU {gpu}", gpu=gpu, shares=False)
    memory = (
        "your --gpu-memory-utilization must leave memory for it"
        if is_given
        else f"vLLM uses {SHARED:.0%} of its memory"
    )
    line = f"the learner shares GPU {gpu} {pauses}: {memory}; it starts when the server is ready"
    return Place(line=line, gpu=gpu, vllm_args=arguments)


WEIGHT_BYTES = {"adamw": 16, "muon": 12}
"""Bytes per weight of a draft in training: the weight, its gradient and the optimizer's state."""


def find_shortage(plan: Plan, settings: LearnerConfig, gpu_bytes: int) -> str:
    """Return a warning if the learner's part of the GPU is too small for any step; otherwise "".

    `gpu_bytes` is the memory of the GPU that it shares. Activations are not counted.
    """
    given = plan.flags.get("gpu_memory_utilization", str(SHARED))
    if not re.fullmatch(r"0?\.\d+", given):  # vLLM will report it
        return ""
    left, family = gpu_bytes * (1 - float(given)), find_family(settings.draft.family)
    # The engines' maps, and some heads' copies of the target's embeddings, are not trained.
    num_weights = sum(
        math.prod(entry["shape"])
        for name, entry in tensor_entries(plan.folder / "registry" / "current").items()
        if not name.endswith(("d2t", "t2d")) and not (family.is_head and "embed_tokens" in name)
    )
    need = num_weights * WEIGHT_BYTES[settings.training.optimizer]
    if family.is_head:  # the learner also holds the target's embeddings and output head
        whole, text = text_sections(read_config(plan.target))
        sizes = {**whole, **text}
        num_tables = 1 if sizes.get("tie_word_embeddings") else 2
        need += 2 * num_tables * sizes["vocab_size"] * sizes["hidden_size"]
    if left >= need:
        return ""
    return (
        f"{left / 1e9:.1f} of the {gpu_bytes / 1e9:.1f} GB of GPU {plan.place.gpu} are left for the "
        f"learner, but a training step needs more than {need / 1e9:.1f} GB: lower "
        "--gpu-memory-utilization after the --, or serve without a learner (--capture.fraction 0)"
    )


def read_gpu_bytes(gpu: str) -> int:
    """Return the memory of an NVIDIA GPU in bytes; 0 if it is unknown."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run([*query, f"--id={gpu}"], capture_output=True, text=True, check=False)
    return int(found.stdout) << 20 if found.stdout.strip().isdecimal() else 0


def spare_cores(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a learner that leaves one of the server's cores to the engine core."""
    return {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or str(max(1, count_cores() - 1))}


VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that select a process's GPUs. vLLM for ROCm does not start if they differ."""

LISTS = {"nvidia-smi": ("-L", r"^GPU (\d+):"), "rocm-smi": ("-i", r"^GPU\[(\d+)\]")}
"""Programs that list the GPUs, with the flag and the pattern that matches a GPU in the output."""


def list_gpus(*, on_cpu: bool = ENGINE_IS_CPU) -> list[str]:
    """List the visible GPUs, named as in `VISIBLE`; empty if the engine is for CPUs."""
    visible = next((os.environ[name] for name in VISIBLE if name in os.environ), None)
    program = next(filter(shutil.which, LISTS), None)
    if on_cpu or visible == "" or program is None:
        return []
    if visible:
        return visible.split(",")
    flag, pattern = LISTS[program]
    listed = subprocess.run([program, flag], capture_output=True, text=True, check=False).stdout
    return list(dict.fromkeys(re.findall(pattern, listed, re.MULTILINE)))


def see_only(gpu: str) -> dict[str, str]:
    """Return the variables for a process that uses only this GPU. "" means no GPU."""
    return dict.fromkeys(VISIBLE, gpu)


def choose_draft(plan: Plan, *, learns: bool, on_cpu: bool = ENGINE_IS_CPU) -> str | None:
    """Return the server's --draft; None means the registry's current version."""
    newest = plan.folder / "registry" / "current"
    if not learns:
        return str(plan.draft or (newest if plan.has_begun else LIVE))
    family = find_family(load_config(plan.folder / SETTINGS).draft.family)
    # A lookup disables asynchronous scheduling, which vLLM never uses on CPUs.
    looks_up = on_cpu and family.takes_lookup and plan.cfg.draft != HEAD
    return f"{LIVE}+{newest}" if looks_up else None


def serve_command(plan: Plan, *, learns: bool, on_cpu: bool = ENGINE_IS_CPU) -> list[str]:
    folder = plan.folder
    # These come before the user's arguments, which take precedence.
    given: list[str] = []
    command = [
        *COMMAND,
        "serve",
        str(plan.target),
        "--pace",
        plan.cfg.pace,
        "--token-file",
        str(folder / TOKEN),
    ]
    command += ["--num-speculative-tokens", str(plan.cfg.num_speculative_tokens)]
    # The learner connects to the given address, where the token protects the routes.
    command += [] if is_local(httpx.URL(plan.url).host) else ["--allow-remote"]
    if learns:
        command += [
            "--registry",
            str(folder / "registry"),
            "--capture.spool",
            str(folder / "spool"),
        ]
        settings = load_config(folder / SETTINGS)
        family = find_family(settings.draft.family)
        command += ["--capture.hidden-states"] if family.is_head else []
        # The learner polls the servers' load.
        given += ["--enable-server-load-tracking"] if settings.fleet.shares_device else []
        given += [] if plan.cfg.join else plan.place.vllm_args
    if draft := choose_draft(plan, learns=learns, on_cpu=on_cpu):
        command += ["--draft", draft]
        source = DraftSource.parse(draft)
        keeps = not learns or not load_config(folder / SETTINGS).zero_retention
        if LIVE in (source.source, source.lookup) and keeps:
            command += ["--live.folder", str(folder / "live" / plan.name)]
    for name, value in vars(plan.cfg.capture).items():
        command += [
            f"--capture.{name.replace('_', '-')}",
            *(value if isinstance(value, tuple) else [str(value)]),
        ]
    alias = () if "served_model_name" in plan.flags else ("--served-model-name", plan.cfg.target)
    return [*command, "--", *alias, *given, *plan.cfg.vllm_args]


def run(plan: Plan, *, learns: bool) -> None:
    """Start the parts and watch them until interrupted.

    Raises:
        ChildProcessError: the server exited.
    """
    screen, logs = Screen(), plan.folder / "logs"
    screen.say(f"all files are in {plan.folder}")
    chosen = choose_draft(plan, learns=learns)
    notes = list_notes(DraftSource.parse(chosen) if chosen else None)
    for note in (*list_warnings(plan.flags, str(plan.target), None, {}), *notes):
        screen.say(f"note: {note}")
    if learns:
        settings = load_config(plan.folder / SETTINGS)
        for line in describe_records(settings, plan.cfg.capture):
            screen.say(line)
    learner: Part | None = None
    if learns and not plan.cfg.join:
        gpu = plan.place.gpu
        screen.say(plan.place.line)
        gpu_bytes = read_gpu_bytes(gpu) if plan.place.shares and gpu else 0
        if gpu_bytes and (warning := find_shortage(plan, settings, gpu_bytes)):
            screen.say(f"warning: {warning}")
        command = [*COMMAND, "learner", "--config", str(plan.folder / SETTINGS)]
        learner = Part(
            "learner",
            command,
            logs / "learner.log",
            see_only(gpu) | ({} if gpu else spare_cores(os.environ)),
            niceness=0 if gpu else NICENESS,
        )
    server = Part(plan.name, serve_command(plan, learns=learns), logs / f"{plan.name}.log")
    try:
        if learner is not None:
            page = settings.page
            screen.say(
                f"page: http://{page.host}:{page.port}"
                if page.port
                else "the learner's page is switched off ([page] port = 0)"
            )
            if not plan.place.waits:
                learner.start()
        server.start()
        watch(plan, screen, server, learner, learns=learns)
    finally:
        if server.process is not None:
            screen.say(
                "stopping the server, then the learner" if learner else "stopping the server"
            )
        try:
            server.stop(SERVER_STOP_S)
        finally:
            if learner is not None:
                learner.stop(LEARNER_STOP_S)


def watch(plan: Plan, screen: Screen, server: Part, learner: Part | None, *, learns: bool) -> None:
    """Show errors, restart a learner that exited, and update the status line.

    Raises the same errors as `run`.
    """
    learned, restarts, meter = Learned(), Restarts(), Meter(plan.url)
    while True:
        now_s = time.monotonic()
        if server.has_ended:
            raise ChildProcessError(f"the {server.name} exited: {server.why_ended} ({server.log})")
        server.takes_requests = meter.is_ready
        show_lines(screen, server, server.read_lines())
        if learner is not None:
            lines = learner.read_lines()
            for line in lines:
                if said := learned.read(line, is_served=meter.is_ready):
                    screen.say(f"learner: {said}")
            show_lines(screen, learner, lines)
            restarts.follow(learner, now_s, screen.say)
        with contextlib.suppress(OSError, ValueError):  # someone may be editing the file
            if learns:
                list_server(plan.folder, plan.url)
        was_ready, shown = meter.is_ready, meter.read(now_s)
        if meter.is_ready and not was_ready:
            screen.say(f"ready: {plan.url} | {shown}")
            if learner is not None and learner.process is None:
                learner.start()
        if learner is not None:
            shown += (
                f" | {shorten_version(learned.version or 'no version')} | learner: {learned.phase}"
            )
        screen.update(shown, now_s)
        time.sleep(LOOK_S)
