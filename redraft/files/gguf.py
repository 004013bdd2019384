"""Read a GGUF file with `transformers`, and write the model as a folder in bfloat16.

Engines and trainers read safetensors folders. A GGUF file stores its weights in blocks with a few
bits per weight. They are converted to bfloat16 once, so that every later run loads the same
numbers.
"""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from redraft.files.artifact import require_space
from redraft.files.checkpoint import first_line, load_tokenizer
from redraft.files.gguf_rope import restore_rope
from redraft.files.target_sizes import size_weights

MAGIC = b"GGUF"

PROBE = "Hello, world!\n\n  def f(x):\n      return x ** 2 + 10  # naïve café, 東京, 🙂\n"
"""Text that a tokenizer must reproduce exactly: indentation, digits, accents, and characters of
three and four bytes.
"""

WIDE_GEMMAS = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and number of layers of the Gemma models with 27B parameters, which scale attention by
the hidden size per head, not by the size of a head. Files do not state it, and llama.cpp recognises
the models in the same way.
"""

WRITE_MARGIN = 1.05
"""Factor on the size of the weights, which leaves space for the tokenizer, the config and the file
system.
"""


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """The metadata of a GGUF file, without the weights."""

    architecture: str
    """llama.cpp's name for the architecture, e.g. `llama` or `qwen2`."""
    name: str
    license: str
    weight_types: tuple[str, ...]
    """Types of the stored tensors, e.g. `Q4_1` and `F32`."""
    end_of_turn: int | None
    """Id of the token that ends a turn of a chat, if it differs from the tokenizer's end token."""


def check_gguf(path: Path) -> None:
    """Check that `path` starts like a GGUF file, and that the package to read it is installed.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not a GGUF file, or the `gguf` package is not installed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: give the path of a .gguf file")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it does not start with {MAGIC.decode()}")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("GGUF files need a separate package: pip install gguf")


def open_gguf(path: Path) -> Any:
    """Open a reader for a GGUF file, with its fields and tensors.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not a GGUF file, or it is truncated or corrupt.
    """
    check_gguf(path)
    from gguf import GGUFReader, GGUFValueType  # an optional dependency

    class Reader(GGUFReader):  # type: ignore[misc]  # gguf has no types
        def _get_field_parts(self, offset: int, raw_type: int) -> Any:
            # Otherwise, gguf would read zeros after the end of the file, for as long as a length in
            # the file demands.
            if raw_type == GGUFValueType.ARRAY:
                length = self._get(offset + 4, np.uint64)
                if not length.size or length[0] > self.data.size:
                    raise ValueError("an array is longer than the file")
            return super()._get_field_parts(offset, raw_type)

    try:
        return Reader(path)
    # Also catches numpy, struct and unicode errors, because the reader checks nothing.
    except Exception as error:
        raise _corrupt(path, error) from error


def _corrupt(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is truncated or corrupt ({first_line(error)}): download it again")


def read_header(path: Path) -> GgufHeader:
    """Read the metadata of a GGUF file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not the GGUF file of a whole model, or it is truncated or corrupt.
    """
    reader = open_gguf(path)
    try:
        fields = {
            key: reader.fields[key].contents()
            for key in (
                "general.architecture",
                "general.name",
                "general.license",
                "general.type",
                "split.count",
                "tokenizer.ggml.eot_token_id",
            )
            if key in reader.fields
        }
        types = {tensor.tensor_type.name for tensor in reader.tensors}
    except Exception as error:  # the text is not UTF-8
        raise _corrupt(path, error) from error
    if (parts := int(fields.get("split.count", 0))) > 1:
        raise ValueError(
            f"{path} is one of {parts} parts (split.count): merge them first, with "
            "llama-gguf-split --merge FIRST_PART OUTPUT"
        )
    if fields.get("general.type", "model") != "model":
        raise ValueError(
            f"{path} contains {fields['general.type']} weights (general.type), not a model: merge an "
            "adapter into its model first, with llama-export-lora"
        )
    if "general.architecture" not in fields:
        raise ValueError(f"{path} has no general.architecture: it is not the GGUF file of a model")
    return GgufHeader(
        architecture=fields["general.architecture"],
        name=fields.get("general.name", ""),
        license=fields.get("general.license", ""),
        weight_types=tuple(sorted(types)),
        end_of_turn=fields.get("tokenizer.ggml.eot_token_id"),
    )


def read_config(path: Path, architecture: str) -> Any:
    """Load the `transformers` config of a GGUF file.

    Raises:
        ValueError: transformers does not support the architecture at all, not as a causal language
            model, or not with the file's rotary scaling.
    """
    try:
        config = AutoConfig.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False
        )
        with torch.device("meta"):  # also refuses encoders
            AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ValueError(
            f"transformers {transformers.__version__} cannot load {path} (architecture "
            f"{architecture!r}) as a causal language model ({first_line(error)}): get the model as "
            "safetensors"
        ) from error
    reader = open_gguf(path)
    try:
        restore_rope(config, reader, architecture)
    except ValueError as error:
        raise ValueError(f"{path}: {error}: get the model as safetensors") from None
    window = reader.fields.get(f"{architecture}.attention.sliding_window")
    # transformers drops Phi 3's.
    if window is not None and getattr(config, "sliding_window", 0) is None:
        config.sliding_window = window.contents()
    if (architecture, config.num_hidden_layers) in WIDE_GEMMAS:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    return config


def require_space_for(config: Any, output: Path) -> None:
    """Raise OSError (ENOSPC) unless the disk of `output` has space for a model with this config.

    The model will be stored in bfloat16.
    """
    require_space(output, int(size_weights(config, torch.bfloat16).whole * WRITE_MARGIN))


def load_gguf(path: Path, header: GgufHeader, config: Any) -> tuple[Any, Any]:
    """Return (model, tokenizer), with the weights converted to bfloat16 under a progress bar.

    Raises:
        ValueError: the file is truncated, a weight is missing, or the tokenizer cannot be read.
    """
    folder, name = str(path.parent), path.name
    options: dict[str, Any] = {}
    # Since transformers 5.19, quantised weights may stay packed, in which case they could not be
    # saved.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            dtype=torch.bfloat16,
            output_loading_info=True,
            trust_remote_code=False,
            **options,
        )
    except Exception as error:
        raise ValueError(f"cannot read {path}: {first_line(error)}") from error
    if wrong := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise ValueError(
            f"{path} lacks {len(wrong)} weights of its architecture; the first is {wrong[0]}"
        )
    return _make_savable(loaded, config, header.end_of_turn), tokenizer


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the model and the tokenizer, and check the written tokenizer.

    Raises:
        ValueError: the written tokenizer does not reproduce a probe text, or the chat template
            fails.
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _drop_added_tokens(folder, model.config.vocab_size)
    check_tokenizer(folder, vocab_size=model.config.vocab_size)


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Check the tokenizer in a folder.

    A probe text must round-trip unchanged, all ids must fit the model, and the chat template must
    render.

    Raises:
        ValueError: one of these checks fails; the message says which.
    """
    tokenizer = load_tokenizer(folder)
    ids = tokenizer(PROBE, add_special_tokens=False).input_ids
    if (text := tokenizer.decode(ids, clean_up_tokenization_spaces=False)) != PROBE:
        raise ValueError(
            f"the tokenizer does not reproduce a probe text: {PROBE!r} became {text!r}; get the model "
            "as safetensors"
        )
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer):,} tokens, but the model has only {vocab_size:,}"
        )
    if tokenizer.chat_template is None:
        return
    messages = [{"role": "user", "content": "ping-redraft"}]
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:
        raise ValueError(f"the chat template cannot be rendered: {first_line(error)}") from error
    if "ping-redraft" not in rendered:
        raise ValueError(f"the chat template drops the question: it renders {rendered!r}")


def _drop_added_tokens(folder: Path, vocab_size: int) -> None:
    """Drop the tokens that transformers adds to a tokenizer although they have no embedding.

    It adds GPT-2's `<|endoftext|>` to every byte-level tokenizer. In a prompt, that id would be out
    of range.
    """
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"] = [
        token for token in tokenizer["added_tokens"] if token["id"] < vocab_size
    ]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))


def _make_savable(loaded: Any, config: Any, end_of_turn: int | None) -> Any:
    """Create a plain model with this `config` that shares the weights of `loaded`.

    `loaded` itself counts as quantised and cannot be saved.
    """
    state: Mapping[str, torch.Tensor] = loaded.state_dict()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # Assign the weights instead of copying, because a meta model has no memory to copy into.
    # Assignment unties tied weights, so tie them again.
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    # A file has one end token. Many chat models end a turn with a different token, without which an
    # answer would never stop.
    ends = [token for token in (config.eos_token_id, end_of_turn) if token is not None]
    # Otherwise, the next load would use the config's end token again.
    model.generation_config._from_model_config = False
    model.generation_config.eos_token_id = (
        ends[0] if len(set(ends)) == 1 else sorted(set(ends)) or None
    )
    return model
