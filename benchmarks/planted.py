"""Plant faults into an intact EAGLE-3 head, and check whether `redraft doctor` names each.

Tests and documentation use the same table.

Every fault is planted twice: into a head as redraft publishes it, with provenance and without its
manifest (with the manifest, every changed byte would be reported), and into the same head as
another trainer would publish it, with no information about its training. The engine is not used:
even for a damaged head, it computes the same as the reference, and its counts equal the forecast.
Acceptance therefore comes from the target's answers.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redraft.distill.doctor.check_draft import check_folder
from redraft.distill.doctor.in_engine import Plan, Served, ask_fallback, judge_acceptance
from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.parity.run import EngineRun
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.greedy import forecast_prompt, greedy_continuations
from redraft.eval.forecast.stored import StoredForecast, digest_prompt
from redraft.files.artifact import PROVENANCE
from redraft.files.checkpoint import load_causal_lm
from redraft.files.folder import fingerprint
from redraft.files.progress import Progress
from redraft.files.target_folder import TargetFolder
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.target import Target

Kind = Literal["ours", "theirs"]
KINDS: tuple[Kind, ...] = ("ours", "theirs")

NUM_TOKENS = 3
TARGET, HEAD = Path("tests/assets/tiny-target"), Path("tests/assets/tiny-eagle3")
LAYER = "midlayer."
QUERY, KEY, VALUE = (f"midlayer.self_attn.{name}_proj.weight" for name in "qkv")
GATE, UP = "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"
NORMS = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight")
HEADS_OF_32 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
ROPE_5E5 = {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
MISSED = "the forecast published with the draft is tau"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and the words that name it in the doctor's report.

    If the words are empty, the doctor cannot see the fault, for the reason in `unseen`.
    """

    name: str
    plant: Callable[[Path], None]
    """Function that damages the head in a folder."""
    ours: str
    """Part of the problem reported for a head with provenance."""
    theirs: str
    """Part of the problem reported for a head without provenance."""
    unseen: str = ""


def edit_config(folder: Path, *removed: str, **changed: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changed}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in removed}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Replace the tensors that `change` returns, and keep the others."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors |= change(tensors)
    # Copy them, because safetensors refuses tensors that share memory.
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()},
        path,
        {"format": "pt"},
    )


def change_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return partial(edit_tensors, change=lambda tensors: {name: change(tensors[name])})


def swap_tensors(one: str, other: str) -> Callable[[Path], None]:
    return partial(edit_tensors, change=lambda tensors: {one: tensors[other], other: tensors[one]})


def set_config(*removed: str, **changed: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, *removed, **changed)


def put_value(tensor: Tensor, value: float) -> Tensor:
    tensor.view(-1)[7] = value
    return tensor


def split_blocks(tensor_DN: Tensor) -> list[Tensor]:
    # fc.weight is [D, 3 D]: one block of columns for each aux layer.
    return [*tensor_DN.chunk(3, dim=1)]


def reorder_blocks(order: Sequence[int]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.cat([split_blocks(tensor)[i] for i in order], dim=1)


def transpose_blocks(tensor_DN: Tensor) -> Tensor:
    return torch.cat([block.T for block in split_blocks(tensor_DN)], dim=1)


def swap_halves(folder: Path) -> None:
    # q, k and v read [embedding, hidden state] side by side, so rolling the columns by half swaps
    # the two.
    edit_tensors(
        folder,
        lambda t: {
            name: t[name].roll(t[name].shape[1] // 2, dims=1) for name in (QUERY, KEY, VALUE)
        },
    )


def halve_vocabulary(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        # d2t holds offsets: draft id i stands for the target's id i + d2t[i].
        ids = (tensors["d2t"] + torch.arange(len(tensors["d2t"])))[::2]
        kept = torch.zeros_like(tensors["t2d"])
        kept[ids] = True
        return {
            "d2t": ids - torch.arange(len(ids)),
            "t2d": kept,
            "lm_head.weight": tensors["lm_head.weight"][::2],
        }

    edit_tensors(folder, change)
    edit_config(folder, draft_vocab_size=512)


def shift_region(folder: Path) -> None:
    """Move 1,000 consecutive entries of d2t to the next target ids that the head does not have.

    d2t and t2d still agree afterwards.
    """

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        taken = set(ids.tolist())
        # From the top down, because an id that moved up leaves room for the one below it.
        for i in range(len(ids) - 1, 300, -1):
            if ids[i].item() + 1 not in taken and ids[i] + 1 < len(tensors["t2d"]):
                taken = (taken - {ids[i].item()}) | {ids[i].item() + 1}
                ids[i] += 1
        kept = torch.zeros_like(tensors["t2d"])
        kept[ids] = True
        return {"d2t": ids - torch.arange(len(ids)), "t2d": kept}

    edit_tensors(folder, change)


def noisy(share: float) -> Callable[[Tensor], Tensor]:
    """Return the matrix as a different revision of the target might have it.

    It is the same matrix plus noise of `share` of its size.
    """

    def change(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        return (tensor.float() + share * tensor.float().std() * noise).to(tensor.dtype)

    return change


def age_layer(folder: Path) -> None:
    """Change every matrix of the layer slightly, as in an earlier checkpoint or a different run."""
    edit_tensors(
        folder,
        lambda tensors: {
            name: noisy(0.5)(t)
            for name, t in tensors.items()
            if name.startswith(LAYER) and t.ndim == 2
        },
    )


def claim_other_target(folder: Path) -> None:
    """Claim in the provenance, if any, that the head was trained for a different revision."""
    path = folder / PROVENANCE
    if path.is_file():
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "target_fingerprint": "0" * 64})
        )


LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip


FAULTS: tuple[Fault, ...] = (
    # --- numbers
    Fault(
        name="a NaN in a weight",
        plant=change_tensor("fc.weight", lambda t: put_value(t, float("nan"))),
        ours="fc.weight contains 1 values that are not finite",
        theirs="fc.weight contains 1 values that are not finite",
    ),
    Fault(
        name="an overflow to infinity",
        plant=change_tensor("midlayer.mlp.down_proj.weight", lambda t: put_value(t, float("inf")).half()),
        ours="not finite",
        theirs="not finite",
    ),
    Fault(name="lm_head all zeros", plant=change_tensor("lm_head.weight", torch.zeros_like),
          ours="lm_head.weight is all zeros", theirs="lm_head.weight is all zeros"),
    Fault(name="o_proj all zeros", plant=change_tensor("midlayer.self_attn.o_proj.weight", torch.zeros_like),
          ours="o_proj.weight is all zeros", theirs="o_proj.weight is all zeros"),
    # --- config against tensors
    Fault(name="attention_bias set", plant=set_config(attention_bias=True),
          ours="attention_bias is true, but the checkpoint contains no attention biases",
          theirs="attention_bias is true"),
    Fault(name="two layers claimed", plant=set_config(num_hidden_layers=2),
          ours="config.json states 2 layers, but the checkpoint contains 1", theirs="config.json states 2 layers"),
    Fault(name="activation gelu", plant=set_config(hidden_act="gelu"),
          ours='hidden_act is "gelu"', theirs='hidden_act is "gelu"'),
    Fault(name="rms_norm_eps 1e-2", plant=set_config(rms_norm_eps=1e-2),
          ours="rms_norm_eps is 0.01, but the head was trained with 1e-06",
          theirs="rms_norm_eps is 0.01, but 1e-06 in the target's layers"),
    Fault(name="8 heads of 32 for 4 of 64", plant=set_config(**HEADS_OF_32),
          ours="head_dim is 32, but the head was trained with 64", theirs="head_dim is 32, but "),
    Fault(name="head sizes that do not fit q_proj", plant=set_config(head_dim=32),
          ours="num_attention_heads 4 with head_dim 32 does not match the 256 rows of q_proj",
          theirs="does not match the 256"),
    Fault(name="rope theta", plant=set_config(**ROPE_5E5),
          ours="the draft's rope_theta is 500000.0, but the target's is 10000.0", theirs="the draft's rope_theta is"),
    Fault(name="rope scaling", plant=set_config(rope_parameters=LLAMA3_ROPE),
          ours="the draft's rope_type is llama3, but the target's is default",
          theirs="the draft's rope_type is llama3"),
    Fault(name="norm_before_residual set", plant=set_config(norm_before_residual=True),
          ours="norm_before_residual is true, but the head was trained with false",
          theirs="norm_before_residual is not false, the value with which the head was trained"),
    Fault(name="norm_output set", plant=set_config(norm_output=True),
          ours="norm_output is true, but the head was trained with false",
          theirs="norm_output is not false, the value with which the head was trained"),
    # --- layers of the target
    Fault(name="aux layers off by one", plant=set_config(eagle_aux_hidden_state_layer_ids=[1, 3, 6]),
          ours="the head was trained on [2, 4, 7]: off by one",
          theirs="the head was trained on the aux layers [2, 4, 7], but the engine feeds it [1, 3, 6]"),
    Fault(name="aux layers descending", plant=set_config(eagle_aux_hidden_state_layer_ids=[7, 4, 2]),
          ours="[7, 4, 2] are not distinct ascending layers", theirs="[7, 4, 2] are not distinct ascending layers"),
    Fault(name="aux layers in another order in fc", plant=change_tensor("fc.weight", reorder_blocks((2, 0, 1))),
          ours="fc.weight mixes the aux layers in the order [7, 2, 4]",
          theirs="fc.weight mixes the aux layers in the order [7, 2, 4]"),
    Fault(name="fc transposed", plant=change_tensor("fc.weight", transpose_blocks),
          ours="fc.weight is transposed", theirs="fc.weight is transposed"),
    # --- a converter's mistakes
    Fault(name="embedding and hidden state swapped", plant=swap_halves,
          ours=f"the halves of {QUERY}", theirs=f"the halves of {QUERY}"),
    Fault(name="keys and values swapped", plant=swap_tensors(KEY, VALUE),
          ours=f"{KEY} and {VALUE} are swapped", theirs="are swapped"),
    Fault(name="gate and up swapped", plant=swap_tensors(GATE, UP),
          ours=MISSED, theirs="",
          unseen="it lowers tau by 0.03, too little to detect with 16 prompts and no forecast"),
    Fault(name="norms swapped", plant=swap_tensors(*NORMS),
          ours=MISSED, theirs="",
          unseen="it lowers tau by 0.01, too little to detect with 16 prompts and no forecast"),
    Fault(name="final norm all ones", plant=change_tensor("norm.weight", torch.ones_like), ours=MISSED, theirs="",
          unseen="an untrained norm also consists of ones, and the trained norm cannot be guessed"),
    # --- vocabulary, and another target
    Fault(name="d2t and t2d missing", plant=lambda folder: drop_tensors(folder, "d2t", "t2d"),
          ours="d2t is missing", theirs="d2t is missing"),
    Fault(name="a region of d2t off by one", plant=shift_region, ours=MISSED, theirs="",
          unseen="the map is valid, and the loss is too small to detect without a forecast"),
    Fault(name="vocabulary halved", plant=halve_vocabulary, ours=MISSED, theirs="",
          unseen="a head with 512 ids is valid"),
    Fault(name="a left-over embedding", plant=lambda folder: add_tensor(folder, "embed_tokens.weight", 4096),
          ours="embed_tokens.weight differs from the target's", theirs="embed_tokens.weight differs from the target's"),
    Fault(name="lm_head of another revision", plant=change_tensor("lm_head.weight", noisy(1.0)),
          ours="lm_head is not this target's", theirs="lm_head is not this target's"),
    Fault(name="layer of another run or revision", plant=age_layer, ours=MISSED, theirs="",
          unseen="the head is worse but consistent; only its forecast shows that it was better"),
    Fault(name="trained for a different revision of the target", plant=claim_other_target,
          ours="the draft was trained for another target", theirs="",
          unseen="nothing in the head records its target, and no forecast gives its expected acceptance"),
    Fault(name="tied embeddings claimed", plant=set_config(tie_word_embeddings=True), ours="", theirs="",
          unseen="it has no effect, because engines load the lm_head from the checkpoint"),
)  # fmt: skip


def drop_tensors(folder: Path, *names: str) -> None:
    path = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in names}
    save_file(kept, path, {"format": "pt"})


def add_tensor(folder: Path, name: str, rows: int) -> None:
    random = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0))
    edit_tensors(folder, lambda _: {name: random.bfloat16()})


# --- examining


@dataclass(frozen=True)
class Row:
    """The result of one fault in one kind of head."""

    fault: str
    kind: Kind
    """`ours` is a head with provenance, `theirs` one from another trainer."""
    expected: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_named(self) -> bool:
        """Whether a problem or a doubt contains the expected words and a fix."""
        return bool(self.expected) and any(
            self.expected in each.problem and each.cure for each in self.findings
        )


class Examiner:
    """Plants faults into copies of an intact head, and checks each as `redraft doctor` does."""

    def __init__(self, work: Path, num_prompts: int = 16, max_tokens: int = 64) -> None:
        """Let the target answer the prompts.

        The forecast of the intact head on these answers becomes the published one.
        """
        self.work = work
        self.model = load_causal_lm(TARGET, torch.float32).eval()
        opened = TargetFolder.open(TARGET)
        tokenizer = opened.tokenizer
        self.prompts = ask_fallback(tokenizer, num_prompts)
        ends = opened.end_ids
        self.answers = greedy_continuations(
            self.model,
            [Prompt(token_ids=ids) for ids in self.prompts],
            max_tokens=max_tokens,
            num_speculative_tokens=NUM_TOKENS,
            end_ids=ends,
        )
        self.run = EngineRun(
            target=str(TARGET),
            speculative_config={"num_speculative_tokens": NUM_TOKENS},
            prompts=self.prompts,
            max_tokens=max_tokens,
        )
        counts = self._count(self._load(Pair.read(TargetFolder.open(TARGET), HEAD)))
        self.stored = StoredForecast(
            num_speculative_tokens=NUM_TOKENS,
            max_tokens=max_tokens,
            end_ids=ends,
            dtype=self.run.dtype,
            by_prompt={
                digest_prompt(prompt): (int(c.num_drafts), int(c.num_accepted))
                for prompt, c in zip(self.prompts, counts, strict=True)
            },
        )

    def examine(self, fault: Fault | None, kind: Kind) -> Row:
        """Return the doctor's findings in a head of this kind with the fault.

        Without a fault (None), examine the intact head.
        """
        folder = self.work / f"{kind}-{fault.name if fault else 'sound'}".replace(" ", "-")
        shutil.copytree(HEAD, folder)
        if kind == "ours":
            provenance = {
                "target_fingerprint": fingerprint(TARGET),
                "forecast": self.stored.to_json(),
            }
            (folder / PROVENANCE).write_text(json.dumps(provenance))
        else:
            # Without redraft's section, config.json could be any trainer's.
            edit_config(folder, "redraft")
        if fault is not None:
            fault.plant(folder)
        pair = Pair.read(TargetFolder.open(TARGET), folder)
        checked, _ = check_folder(pair, None, NUM_TOKENS)
        findings = list(checked.findings)
        # Like the doctor, skip the acceptance of a head with broken files: it would say nothing
        # new.
        if not checked.problems:
            findings += self._judge(pair)
        expected = "" if fault is None else getattr(fault, kind)
        return Row(fault.name if fault else "none", kind, expected, findings)

    def _judge(self, pair: Pair) -> list[Finding]:
        head = self._load(pair)
        stored = StoredForecast.from_json(pair.provenance.forecast)
        served = Served(
            outputs=[answer.output_ids for answer in self.answers], counts=self._count(head)
        )
        plan = Plan(run=self.run, stored=stored, are_held_out=False)
        judged = judge_acceptance(
            pair, plan, served, head, InProcessTarget(self.model, head.aux_layer_ids), {}
        )
        return [each for each in judged if isinstance(each, Finding)]

    def _load(self, pair: Pair) -> Any:
        head: Any = pair.family.load(
            pair.draft, lambda: Target.from_model(self.model), torch.float32
        )
        head.config = replace(head.config, num_steps=NUM_TOKENS)
        return head.eval()

    def _count(self, head: Any) -> list[AcceptanceCounts]:
        signal = InProcessTarget(self.model, head.aux_layer_ids)
        return [
            forecast_prompt(head, signal, answer, NUM_TOKENS, "cpu").counts
            for answer in self.answers
        ]


def examine_all(work: Path) -> list[Row]:
    """Examine the intact head of both kinds, then every fault in both kinds of head."""
    examiner = Examiner(work)
    cases: list[tuple[Fault | None, Kind]] = [
        (fault, kind) for fault in (None, *FAULTS) for kind in KINDS
    ]
    return [examiner.examine(*case) for case in Progress(cases, desc="faults planted", unit="head")]


def measure_doctor() -> dict[str, Any]:
    """Return the faults `planted` and `named` over both kinds of head, and the false alarms.

    The faults that were not named are listed too.
    """
    with tempfile.TemporaryDirectory() as work:
        rows = examine_all(Path(work))
    sound, planted = rows[: len(KINDS)], rows[len(KINDS) :]
    unseen = {fault.name: fault.unseen for fault in FAULTS if fault.unseen}
    return {
        "planted": len(planted),
        "named": sum(row.is_named for row in planted),
        "false_alarms": sum(bool(row.findings) for row in sound),
        "not_named": [f"{row.kind}: {row.fault}" for row in planted if not row.is_named],
        "why_not_named": unseen,
    }


def write_table() -> str:
    """Return the documentation's section in Markdown.

    It lists the faults that are named in every head, and has a table of the others.
    """
    verdict = {True: "reported", False: "not detected"}
    seen = "; ".join(fault.name for fault in FAULTS if fault.ours and fault.theirs)
    lines = [*textwrap.wrap(f"Reported for every head: {seen}.", 120), ""]
    lines += [
        "| fault | head with provenance | head from another trainer | why it is not detected |",
        "|---|---|---|---|",
    ]
    for fault in FAULTS:
        if not (fault.ours and fault.theirs):
            ours, theirs = verdict[bool(fault.ours)], verdict[bool(fault.theirs)]
            lines.append(f"| {fault.name} | {ours} | {theirs} | {fault.unseen} |")
    return "\n".join(lines)
