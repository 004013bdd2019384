"""Load Hugging Face models and tokenizers completely, or fail with a one-line error."""

import copy
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2Config,
)

from redraft.files.folder import (
    CONFIG,
    GENERATION_CONFIG,
    read_json,
    text_sections,
)
from redraft.files.target_folder import TargetFolder

TEKKEN = "tekken.json"  # mistral-common's tokenizer, the only one in some repositories
TEMPLATE = "chat_template.jinja"
# Template of a processor for text and images; vLLM reads it too.
PROCESSOR_TEMPLATE = "chat_template.json"


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    """Config of MiMo, which `transformers` does not have.

    Without its MTP layer, MiMo is a Qwen2 model.
    """

    model_type = "mimo"


# This raises a ValueError at import once transformers adds a model type with this name.
AutoConfig.register("mimo", MiMoConfig)


@functools.cache
def register_models() -> None:
    """Register MiMo with `AutoModelForCausalLM`, once.

    This is not done at import, because Qwen2's module takes most of a second to load.
    """
    from transformers import Qwen2ForCausalLM

    class MiMoForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
        config_class = MiMoConfig

    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


def model_class(config: Any) -> Any:
    """Return the auto class for a config's causal LM, with or without images.

    Raises:
        ValueError: there is none.
    """
    register_models()
    if encoder := next((name for name in config.architectures or () if "MaskedLM" in name), None):
        raise ValueError(f"{encoder} is an encoder: choose a causal language model")
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    raise ValueError(
        f"transformers has no language model for a {type(config).__name__} ({config.model_type})"
    )


def attention_of(config: Any) -> str | None:
    """Return the attention implementation for loading a causal LM.

    None means the default. transformers' default is SDPA, or eager for layers with sinks.
    """
    # SDPA silently ignores attention logit soft-capping.
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def new_model(config: Any, dtype: torch.dtype | None) -> Any:
    """Create an untrained causal LM; `attention_of` sets its attention.

    Its weights have the dtypes that `load_causal_lm` gives them. Raises the same errors as
    `model_class`.
    """
    config = copy.deepcopy(config)  # copied, because the model modifies the config
    model = model_class(config).from_config(
        config, dtype=dtype, attn_implementation=attention_of(config)
    )
    usual = model.dtype
    for name, weight in itertools.chain(model.named_parameters(), model.named_buffers()):
        if weight.dtype == usual:
            weight.data = weight.data.to(weight_dtype(model, name, usual))
    return model


def weight_dtype(model: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a weight in a causal LM whose weights usually have `dtype`.

    transformers keeps a few weights in float32. In bfloat16, for example, the biases that choose
    among DeepSeek's experts would choose others.
    """
    kept = model._get_dtype_plan(dtype).items()  # by patterns like those of `glob`
    found = (wide for part, wide in kept if re.search(part.replace("*", ".*"), name))
    return next(found, dtype)


Model = str | Path | TargetFolder
"""A model, given by its folder, its hub name, or its opened files."""


def _open(model: Model) -> TargetFolder:
    return model if isinstance(model, TargetFolder) else TargetFolder.open(model)


def load_causal_lm(model: Model, dtype: torch.dtype | None = None, *, cure: str = "") -> Any:
    """Load the causal LM of a model, in `dtype` (None: as stored).

    All weights come from the files, and `attention_of` chooses the attention. `cure` is appended to
    the error for a model that transformers cannot load.

    Raises:
        FileNotFoundError: the folder is missing, or is not a model folder.
        ValueError: a file is corrupt, or a weight is missing; the message names it.
    """
    opened = _open(model)
    folder = opened.fetch_and_check()
    kind = model_class(opened.config)
    try:
        loaded, report = kind.from_pretrained(
            str(folder),
            dtype=dtype or "auto",
            attn_implementation=attention_of(opened.config),
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as error:  # transformers raises a dozen types here, many with several lines
        reason = f"cannot load the model {opened.name}: {_reason(error, folder)}"
        raise ValueError("; ".join(filter(None, [reason, cure]))) from error
    # transformers fills missing weights with random numbers, and only warns.
    if wrong := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise ValueError(f"{opened.name} has {len(wrong)} missing weights; the first is {wrong[0]}")
    return loaded


def require_finite(model: torch.nn.Module, name: str) -> None:
    """Raise ValueError, with the weight's name, if any weight of a model is NaN or infinite."""
    for weight, values in model.named_parameters():
        if values.is_meta or not values.is_floating_point():
            continue
        # Check in parts, because the comparison makes a boolean tensor.
        flat = values.detach().flatten()
        if not all(bool(part.isfinite().all()) for part in torch.split(flat, 1 << 26)):
            raise ValueError(f"{name} has non-finite values in {weight}: download it again")


CONFIG_ERRORS = (
    OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, StrictDataclassError,
)  # fmt: skip
"""Errors that transformers raises for a config.json that it cannot read: text that is not JSON, an
unknown model type or dtype, a missing key, zero heads, or a value of the wrong type. If there is no
file, it raises OSError.
"""


def load_config(model: Model) -> Any:
    """Load the `transformers` config of a model, which may also be given as a JSON file.

    Raises:
        FileNotFoundError: the model is missing.
        ValueError: the name is a GGUF file, or the config is unreadable.
    """
    path = model.folder if isinstance(model, TargetFolder) else Path(model)
    if path.suffix == ".json" and path.is_file():  # a config.json under any name
        read_json(path)
        what = str(path)
    else:
        opened = _open(model)
        _ = opened.stored_config  # refuses a folder without a config
        path, what = opened.folder, f"the {CONFIG} of {opened.folder}"
    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except CONFIG_ERRORS as error:
        field = ""
        # transformers looks up `torch.bfloat16` as a name in torch.
        if "torch.torch" in str(error) or "no attribute 'torch." in str(error):
            field = ': write "dtype": "bfloat16" instead of "torch.bfloat16"'
        raise ValueError(f"cannot read {what}: {_reason(error, path)}{field}") from error


def load_text_config(model: Model) -> Any:
    """Load the config of the text model within a model. Raises the same errors as `load_config`."""
    return load_config(model).get_text_config()


def refuse_quantised(target: TargetFolder, what: str, cure: str) -> None:
    """Refuse a target with quantised weights: FP8, AWQ, GPTQ or the like.

    Raises:
        ValueError: the message begins with `what` and ends with `cure`.
    """
    if method := target.quantization:
        raise ValueError(f"{what}: it is quantised ({method}), which is not supported; {cure}")


def end_ids(model: Model, tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids that end an engine's answer.

    They are the tokenizer's end token and the ids in generation_config.json, or in config.json if
    the former has none.
    """
    opened = _open(model)
    if (path := opened.folder / GENERATION_CONFIG).is_file():
        sections = text_sections(read_json(path))
    else:
        has_config = (opened.folder / CONFIG).is_file()
        sections = text_sections(opened.stored_config if has_config else {})
    ends = next(
        (
            section["eos_token_id"]
            for section in sections
            if section.get("eos_token_id") is not None
        ),
        None,
    )
    # A chat model has several end tokens, but the tokenizer has only one: Llama 3.1 ends at 128001,
    # 128008 and 128009.
    listed = ends if isinstance(ends, list) else [ends]
    return tuple(
        sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None})
    )


def load_tokenizer(model: Model) -> Any:
    """Load the tokenizer of a model.

    Raises:
        FileNotFoundError: there is no such folder, or it has no tokenizer.
        ValueError: the tokenizer is unreadable, or two files contain different chat templates.
    """
    folder = _open(model).folder
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder {folder} does not exist")
    if (folder / TEKKEN).is_file() and not (folder / "tokenizer.json").is_file():
        return _load_tekken(folder / TEKKEN)
    if not any(folder.glob("*token*")) and not (folder / "vocab.json").exists():
        raise FileNotFoundError(
            f"{folder} contains no tokenizer (tokenizer.json): it is not a model folder"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        raise ValueError(
            f"cannot load the tokenizer of {folder}: {_reason(error, folder)}"
        ) from error
    _read_processor_template(folder, tokenizer)
    return tokenizer


def _read_processor_template(folder: Path, tokenizer: Any) -> None:
    """Give a tokenizer without a chat template the processor's template.

    Raises:
        ValueError: the tokenizer has a different template. For a model of text and images, vLLM
            uses the processor's.
    """
    path, found = folder / PROCESSOR_TEMPLATE, tokenizer.chat_template
    if not path.is_file() or not (template := read_json(path).get("chat_template")):
        return
    default = found.get("default") if isinstance(found, dict) else found
    if default is not None and default.strip() != template.strip():
        other = TEMPLATE if (folder / TEMPLATE).is_file() else "tokenizer_config.json"
        raise ValueError(
            f"{folder / other} and {path} contain different chat templates, and engines do not all use "
            "the same one: remove the outdated one"
        )
    tokenizer.chat_template = found or template


def _load_tekken(path: Path) -> Any:
    """Load a tokenizer in Mistral's format, with transformers' chat template for it.

    Raises:
        ValueError: the tokenizer is unreadable, or mistral-common is not installed.
    """
    from transformers.integrations.mistral import convert_tekken_tokenizer

    try:
        return convert_tekken_tokenizer(str(path))
    except Exception as error:
        raise ValueError(f"cannot load the tokenizer {path}: {first_line(error)}") from error


def _reason(error: Exception, folder: Path) -> str:
    """Return the first line of a transformers error, or our explanation if the model needs code."""
    if "trust_remote_code" in str(error):
        return (
            "it needs Python code from its own folder (auto_map), which redraft does not run: save "
            "the tokenizer as tokenizer.json, or choose a model type that transformers supports"
        )
    try:
        for path in sorted(folder.glob("*.json")):
            read_json(path)
    except ValueError as corrupt:
        return str(corrupt)
    return first_line(error)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
