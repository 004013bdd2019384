"""Text and images for a tiny target that reads both, in a real vLLM inside this process.

Recorded, with a swap between.

    python run_images.py '{"model_type": "qwen3_vl", "dtype": "float32", "folder": ..., "tokenizer": ...}'

Needs torchvision (`model_runners.with_torchvision`). Writes `target`, the heads `first` and
`second`, the spool `records`, and `texts.pt`: for each request what `by_transformers` returns.
Prints one line of JSON: `result` of the swap, `status`, `answers` of both rounds.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}

import numpy as np
import torch
from make_heads import make_random
from PIL import Image
from run_capture import make_params, wait_until_shipped
from run_swaps import load
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.settings import write_settings
from redraft.heads.families import eagle3
from redraft.heads.target import Target
from tests.helpers.served_targets import DELTA, SIZES
from tests.helpers.target_families import MROPE, make_config

LAYERS = (1, 2, 3)
TOKENS = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>",
          "vision_end": "<|vision_end|>"}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "rope_parameters": {**MROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    },
    "qwen3_5": {
        **DELTA,
        "rope_parameters": {
            **MROPE,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    },
}
PIXELS = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}


def make_target(model_type: str, dtype: str, folder: Path, tokenizer: Any) -> Any:
    """The model, with its processor in the folder."""
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS.values())})
    sizes = {**SIZES, **SETTINGS[model_type], "vocab_size": len(tokenizer)}
    config = make_config(model_type, **sizes)
    config.vision_config.out_hidden_size = SIZES["hidden_size"]
    if model_type == "qwen3_5":
        config.vision_config.deepstack_visual_indexes = []
    for name, token in TOKENS.items():
        setattr(config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.lm_head.weight.data[tokenizer.convert_tokens_to_ids(list(TOKENS.values()))] = (
        0  # never answered
    )
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    vision = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": PIXELS}
    images, videos = Qwen2VLImageProcessor(**vision), Qwen3VLVideoProcessor(**vision)
    Qwen3VLProcessor(
        images, tokenizer, videos, chat_template=tokenizer.chat_template
    ).save_pretrained(folder)
    return model


def make_prompts(config: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)

    def text(count: int) -> list[int]:
        return rng.integers(10, 400, count).tolist()

    def image(size: int) -> tuple[list[int], Any]:
        pixels = rng.integers(0, 255, (size, size, 3), np.uint8)
        return [
            config.vision_start_token_id,
            config.image_token_id,
            config.vision_end_token_id,
        ], Image.fromarray(pixels)

    (one, first), (other, second), (alone, third) = image(16), image(24), image(16)
    return [
        {"prompt_token_ids": text(20)},
        {
            "prompt_token_ids": text(5) + one + text(6) + other + text(9),
            "multi_modal_data": {"image": [first, second]},
        },
        {"prompt_token_ids": text(3) + alone, "multi_modal_data": {"image": [third]}},
    ]


def answer(llm: Any, prompts: list[dict[str, Any]], name: str) -> list[tuple[list[int], list[int]]]:
    """(prompt with a token for each piece of an image, answer) of each request."""
    engine, done = llm.llm_engine, {}
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{name}-{i}", prompt, make_params({"max_tokens": 24}))
    while engine.has_unfinished_requests():
        done |= {found.request_id: found for found in engine.step()}
    engine.step()  # the worker learns of the last ends only now
    found = [done[f"{name}-{i}"] for i in range(len(prompts))]
    return [(list(each.prompt_token_ids), list(each.outputs[0].token_ids)) for each in found]


@torch.no_grad()
def by_transformers(
    model: Any, folder: Path, prompt: dict[str, Any], ids: list[int], output: list[int]
) -> Any:
    """Token ids, states and logits of the answered rows in float32.

    The distances of `model`'s own type from them come too: of the states by layer, as a share, and
    of the logits, the largest.
    """
    given: dict[str, Any] = {"input_ids": torch.tensor([ids + output])}
    if images := prompt.get("multi_modal_data", {}).get("image"):
        processor = Qwen2VLImageProcessor.from_pretrained(folder)
        given |= processor(images=images, return_tensors="pt")
        given["mm_token_type_ids"] = (given["input_ids"] == model.config.image_token_id).long()

    def compute(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if images:
            given["pixel_values"] = given["pixel_values"].to(model.dtype)
        source = InProcessTarget(model, LAYERS)
        with source._streams() as streams:
            logits_TV = model(**given, use_cache=False).logits[0].float()
        return torch.stack([streams[k][0] for k in LAYERS], dim=1).float(), logits_TV[
            len(ids) - 1 : -1
        ]

    (states_TLD, rows_NV), rounded = compute(copy.deepcopy(model).float()), compute(model)
    apart_L = (rounded[0] - states_TLD).norm(dim=(0, 2)) / states_TLD.norm(dim=(0, 2))
    behind_N = rows_NV.max(-1).values - rows_NV.gather(1, torch.tensor(output)[:, None])[:, 0]
    return {
        "ids": given["input_ids"][0],
        "states_TLD": states_TLD,
        "behind_N": behind_N,
        "apart_L": apart_L,
        "apart": (rounded[1] - rows_NV).abs().max(),
    }


def main(spec: dict[str, Any]) -> None:
    from vllm import LLM

    folder, dtype = Path(spec["folder"]), spec["dtype"]
    target = folder / "target"
    model = make_target(
        spec["model_type"], dtype, target, AutoTokenizer.from_pretrained(spec["tokenizer"])
    )
    heads = [folder / "first", folder / "second"]
    for head in heads:
        config = eagle3.Config(aux_layer_ids=LAYERS, num_steps=3)
        make_random(eagle3.Eagle3(config, Target.from_model(model))).to(model.dtype).export(head)
    capture = {"spool": str(folder / "records"), "hidden_states": True}
    os.environ |= write_settings({"capture": capture})
    llm = LLM(
        model=str(target),
        dtype=dtype,
        max_model_len=128,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=2,
        enable_prefix_caching=False,  # of recurrent layers it needs a kernel that no CPU has
        limit_mm_per_prompt={"image": 2, "video": 0},
        speculative_config={
            "method": "eagle3",
            "model": str(heads[0]),
            "num_speculative_tokens": 3,
        },
    )
    prompts = make_prompts(model.config)
    before = answer(llm, prompts, "before")
    (result,) = llm.collective_rpc(load, args=(str(heads[1]),))
    after = answer(llm, prompts, "after")
    status = wait_until_shipped(llm)
    pairs = [pair for answers in (before, after) for pair in zip(prompts, answers, strict=True)]
    texts = [by_transformers(model, target, prompt, *answered) for prompt, answered in pairs]
    torch.save(texts, folder / "texts.pt")
    print("REPORT", json.dumps({"result": result, "status": status, "answers": [before, after]}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
