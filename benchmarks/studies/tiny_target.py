"""Train the small target of the demos and tests.

Llama architecture, 7.3M parameters, byte-level BPE of 4,096 tokens.

    $ python -m benchmarks.studies.tiny_target --output outputs/tiny-target

The text is the standard library's code and documentation, so the result depends on the Python
version. Takes about an hour on 2 cores. `tests/assets/tiny-target` was made by this command; its
`training.json` holds seed and loss.
"""

from __future__ import annotations

import json
import platform
import random
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from redraft.distill.data.conversations import Conversation, load_conversations, split_held_out
from redraft.files.artifact import write_whole
from redraft.files.checkpoint import load_causal_lm
from redraft.files.progress import Progress
from redraft.recipes.cli.run import run_recipe

SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content "
    "}}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("outputs/tiny-target")
    """Folder for config, weights (bf16), tokenizer and training.json."""
    seed: int = 0
    """Seed of the weights and of the data's order."""
    steps: int = 2400
    """Optimizer steps; one pass over the text takes about 600."""
    batch_size: int = 4
    """Rows of text per step."""
    sequence_length: int = 1024
    """Tokens per row."""
    lr: float = 4e-3
    """AdamW learning rate, for embeddings, head and norms."""
    muon_lr: float = 0.02
    """Muon learning rate, for the matrices of the layers."""
    held_out_fraction: float = 0.05
    """Share of the conversations to hold out from training, from 0 to 1."""
    compile: bool = True
    """Compile the model with torch.compile, which pays off after a few hundred steps."""
    loop_steps: int = 180
    """Steps of the second phase, which teaches the model to leave a loop instead of repeating
    itself.
    """
    loop_lr: float = 1e-4
    """AdamW learning rate of the second phase."""
    loop_answers: int = 24
    """Greedy answers per step of the second phase."""
    start_from: Path | None = None
    """Skip the first phase and take its result from this folder."""


def main(cfg: Config) -> None:
    torch.manual_seed(cfg.seed)
    started = time.perf_counter()
    # 1. text and tokenizer
    train, held_out = split_held_out(load_conversations("stdlib"), cfg.held_out_fraction)
    tokenizer = train_tokenizer(train)
    stream = TokenStream(tokenizer, train, cfg)
    print(
        f"{len(train):,} conversations, {stream.num_tokens:,} tokens a pass; {len(held_out)} held "
        "out"
    )

    # 2. model
    model = (
        LlamaForCausalLM(model_config(cfg))
        if cfg.start_from is None
        else load_causal_lm(cfg.start_from).float()
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    # 3. Train on likelihood first, then against loops.
    losses = [] if cfg.start_from is not None else learn_text(model, stream, cfg)
    repeated = learn_to_leave_loops(model, tokenizer, train, cfg) if cfg.loop_steps else []

    # 4. Save the model with all settings needed to reproduce it. Weights are rounded here. The
    # held-out loss below is computed in float32, with the rounded weights.
    model.to(torch.bfloat16).save_pretrained(cfg.output)
    tokenizer.save_pretrained(cfg.output)
    report = {
        "config": {**asdict(cfg), "output": str(cfg.output)},
        "command": shlex.join(sys.argv),
        "final_train_loss": statistics.mean(losses[-100:]) if losses else None,
        "repeated_tokens": {"before": repeated[0], "after": statistics.mean(repeated[-10:])}
        if repeated
        else None,
        "held_out_loss": {
            domain: held_out_loss(
                model.float(), tokenizer, [c for c in held_out if c["domain"] == domain]
            )
            for domain in ("code", "prose")
        },
        "tokens_per_pass": stream.num_tokens,
        "duration_s": round(time.perf_counter() - started),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    write_whole(cfg.output / "training.json", json.dumps(report, indent=2, default=str) + "\n")
    print(json.dumps(report, indent=2, default=str))


def learn_text(model: LlamaForCausalLM, stream: TokenStream, cfg: Config) -> list[float]:
    """Run the first phase, and return its losses.

    Muon trains the layers' matrices, and AdamW all other weights.
    """
    forward = torch.compile(model) if cfg.compile else model
    matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (".layers." in name and p.ndim == 2)]
    optimizers = [
        torch.optim.Muon(matrices, lr=cfg.muon_lr),
        torch.optim.AdamW(others, lr=cfg.lr, betas=(0.9, 0.95)),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: scale_rate(step, cfg.steps))
        for o in optimizers
    ]
    losses: list[float] = []
    for step in (bar := Progress(range(cfg.steps), desc="text", unit="step")):
        ids_BT = stream.batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{statistics.mean(losses[-50:]):.3f}")
    return losses


def learn_to_leave_loops(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    train: list[Conversation],
    cfg: Config,
) -> list[float]:
    """Run the second phase.

    Returns the share of repeated tokens in the greedy answers of each step. A small model that is
    trained on likelihood alone repeats one line forever. So each step samples greedy answers, and
    trains every token that completes a 4-gram already seen with -log(1 - p) (unlikelihood, arXiv
    1908.04319), together with the true answers to the same questions.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.loop_lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: scale_rate(step, cfg.loop_steps)
    )
    shares: list[float] = []
    for step in (bar := Progress(range(cfg.loop_steps), desc="loops", unit="step")):
        questions = random.Random(cfg.seed + step).sample(train, cfg.loop_answers)
        prompts = tokenizer.apply_chat_template(
            [conversation["messages"][:1] for conversation in questions],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.no_grad():
            ids_BT = model.generate(**prompts, max_new_tokens=128, do_sample=False)
        # Prompts are padded on the left, so that every answer begins in the same column.
        answer_BT = torch.arange(ids_BT.shape[1]) >= prompts["input_ids"].shape[1]
        answer_BT = answer_BT & (ids_BT != tokenizer.pad_token_id)
        repeated_BT = repeats_itself(ids_BT, answer_BT)
        text_BT = tokenizer(
            [tokenizer.apply_chat_template(c["messages"], tokenize=False) for c in questions],
            add_special_tokens=False,
            padding=True,
            truncation=True,
            max_length=256,
            return_tensors="pt",
        )
        labels_BT = text_BT["input_ids"].masked_fill(text_BT["attention_mask"] == 0, -100)
        # The mask consists of the prompt's mask and ones for up to 128 new tokens, cut to the
        # generated length.
        real_BT = torch.nn.functional.pad(prompts["attention_mask"], (0, 128), value=1)[
            :, : ids_BT.shape[1]
        ]
        with torch.autocast("cpu", torch.bfloat16):
            text_loss = model(**text_BT, labels=labels_BT).loss
            logits_BTV = model(input_ids=ids_BT, attention_mask=real_BT).logits[:, :-1]
        # Row t predicts token t + 1: p[b, t] is the probability of ids[b, t + 1], so the mask is
        # shifted by one too.
        p_BT = logits_BTV.float().softmax(-1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
        # The bound keeps log(1 - p) finite at p = 1, which a loop approaches.
        unlikelihood_BT = -torch.log1p(-p_BT.clamp(max=1 - 1e-5)) * repeated_BT[:, 1:]
        (text_loss + unlikelihood_BT.sum() / answer_BT.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        shares.append((repeated_BT.sum() / answer_BT.sum()).item())
        bar.set_postfix(
            text=f"{text_loss.item():.3f}", repeated=f"{statistics.mean(shares[-10:]):.3f}"
        )
    return shares


def repeats_itself(ids_BT: Tensor, answer_BT: Tensor, n: int = 4) -> Tensor:
    """Return the mask of the tokens that complete a repeated n-gram of the answer, bool [B, T]."""
    repeated_BT = torch.zeros_like(answer_BT)
    for b, (ids_T, answer_T) in enumerate(zip(ids_BT.tolist(), answer_BT, strict=True)):
        seen: set[tuple[int, ...]] = set()
        positions = answer_T.nonzero().squeeze(1).tolist()
        for end in positions[n - 1 :]:
            # Only tokens of the answer match: padding lies before the prompt and after the end, so
            # the positions are consecutive.
            gram = tuple(ids_T[end - n + 1 : end + 1])
            repeated_BT[b, end] = gram in seen
            seen.add(gram)
    return repeated_BT


def train_tokenizer(conversations: list[Conversation]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    text = (
        message["content"] for conversation in conversations for message in conversation["messages"]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(text, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL_TOKENS[3:],
        model_max_length=1024,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model_config(cfg: Config) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=cfg.sequence_length,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


class TokenStream:
    """Batches of the concatenated conversations, in a new order on every pass."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation], cfg: Config
    ) -> None:
        texts = [
            tokenizer.apply_chat_template(c["messages"], tokenize=False) for c in conversations
        ]
        self.documents = [
            torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
        ]
        self.num_tokens = sum(map(len, self.documents))
        self.cfg = cfg
        self.batches_per_pass = self.num_tokens // (cfg.batch_size * cfg.sequence_length)
        self.current_pass, self.stream = -1, torch.empty(0, dtype=torch.long)

    def batch(self, step: int) -> Tensor:
        number, index = divmod(step, self.batches_per_pass)
        # The order depends only on seed and pass, so a step always has the same batch.
        if number != self.current_pass:
            order = list(range(len(self.documents)))
            random.Random(self.cfg.seed + number).shuffle(order)
            self.current_pass, self.stream = number, torch.cat([self.documents[i] for i in order])
        size = self.cfg.batch_size * self.cfg.sequence_length
        return self.stream[index * size : (index + 1) * size].view(self.cfg.batch_size, -1)


def scale_rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate.

    It rises over 50 warm-up steps, stays constant, and falls linearly to zero over the last 45% of
    the steps.
    """
    return min((step + 1) / 50, 1.0, (steps - step) / (0.45 * steps))


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]
) -> float:
    """Return the mean cross-entropy in nats per token over the conversations, one at a time."""
    total, count = 0.0, 0
    for conversation in conversations[:200]:
        text = tokenizer.apply_chat_template(conversation["messages"], tokenize=False)
        ids_BT = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"][:1024]])
        # transformers shifts the labels, so the loss is the mean over T - 1 predictions.
        total += model(input_ids=ids_BT, labels=ids_BT).loss.item() * (ids_BT.shape[1] - 1)
        count += ids_BT.shape[1] - 1
    return total / count


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
