"""Train the small target that the demos and tests use: Llama architecture, 7.3M parameters, byte-level BPE of 4,096.

    python recipes/tiny_target.py --output outputs/tiny-target

The text is the standard library's code and documentation, so the result depends on the Python version. About 40 minutes
on 2 cores. The folder in `tests/assets/tiny-target` was made by this command; its `training.json` holds seed and loss.
"""

from __future__ import annotations

import json
import platform
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from distill.corpus import stdlib_conversations
from distill.data import is_held_out

SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("outputs/tiny-target")
    """Folder that receives config, weights (bf16), tokenizer and training.json."""
    seed: int = 0
    steps: int = 2400
    """Optimizer steps; one pass over the text is about 600."""
    batch_size: int = 4
    sequence_length: int = 1024
    lr: float = 4e-3
    """AdamW's, for embeddings, head and norms."""
    muon_lr: float = 0.02
    """Muon's, for the matrices of the layers."""
    held_out_fraction: float = 0.05
    compile: bool = True


def main(cfg: Config) -> None:
    torch.manual_seed(cfg.seed)
    # 1. text and tokenizer
    conversations = list(stdlib_conversations())
    train = [c for c in conversations if not is_held_out(c["messages"], cfg.held_out_fraction)]
    held_out = [c for c in conversations if is_held_out(c["messages"], cfg.held_out_fraction)]
    tokenizer = train_tokenizer(train)
    train_stream = TokenStream(tokenizer, train, cfg)
    print(f"{len(train):,} conversations, {train_stream.num_tokens:,} tokens a pass; {len(held_out)} held out")

    # 2. model
    model = LlamaForCausalLM(model_config(cfg))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    forward = torch.compile(model) if cfg.compile else model

    # 3. optimizers: Muon for the layers' matrices, AdamW for the rest; constant rate, then down to zero
    matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (".layers." in name and p.ndim == 2)]
    optimizers = [torch.optim.Muon(matrices, lr=cfg.muon_lr), torch.optim.AdamW(others, lr=cfg.lr, betas=(0.9, 0.95))]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate(step, cfg.steps)) for o in optimizers]

    # 4. loop
    started = time.perf_counter()
    losses: list[float] = []
    for step in (bar := tqdm(range(cfg.steps), unit="step")):
        ids_BT = train_stream.batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            bar.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.3f}")

    cfg.output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(cfg.output)
    tokenizer.save_pretrained(cfg.output)
    report = {
        "config": {**asdict(cfg), "output": str(cfg.output)},
        "command": "python recipes/tiny_target.py",
        "final_train_loss": sum(losses[-100:]) / len(losses[-100:]),
        "held_out_loss": {
            domain: held_out_loss(model, tokenizer, [c for c in held_out if c["domain"] == domain])
            for domain in ("code", "prose")
        },
        "tokens_per_pass": train_stream.num_tokens,
        "duration_s": round(time.perf_counter() - started),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    (cfg.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def train_tokenizer(conversations: list[dict]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    text = (message["content"] for conversation in conversations for message in conversation["messages"])
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
    """Batches of the conversations laid end to end, in another order on every pass; batch `step` is a function of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, conversations: list[dict], cfg: Config) -> None:
        texts = [tokenizer.apply_chat_template(c["messages"], tokenize=False) for c in conversations]
        self.documents = [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        self.num_tokens = sum(map(len, self.documents))
        self.cfg = cfg
        self.batches_a_pass = self.num_tokens // (cfg.batch_size * cfg.sequence_length)
        self.current_pass, self.stream = -1, torch.empty(0, dtype=torch.long)

    def batch(self, step: int) -> Tensor:
        a_pass, index = divmod(step, self.batches_a_pass)
        if a_pass != self.current_pass:
            order = list(range(len(self.documents)))
            random.Random(self.cfg.seed + a_pass).shuffle(order)
            self.current_pass, self.stream = a_pass, torch.cat([self.documents[i] for i in order])
        size = self.cfg.batch_size * self.cfg.sequence_length
        return self.stream[index * size : (index + 1) * size].view(self.cfg.batch_size, -1)


def rate(step: int, steps: int) -> float:
    """Warm-up over 50 steps, constant, then linear to zero over the last 45%."""
    return min((step + 1) / 50, 1.0, (steps - step) / (0.45 * steps))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: list[dict]) -> float:
    """Mean cross-entropy in nats per token over the conversations, each on its own."""
    total, count = 0.0, 0
    for conversation in conversations[:200]:
        text = tokenizer.apply_chat_template(conversation["messages"], tokenize=False)
        ids_BT = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"][:1024]])
        total += model(input_ids=ids_BT, labels=ids_BT).loss.item() * (ids_BT.shape[1] - 1)
        count += ids_BT.shape[1] - 1
    return total / count


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
