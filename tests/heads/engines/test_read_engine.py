"""`tests/helpers/read_engine.py` on a small tree of sources in TensorRT-LLM's layout.

The tree is written for this test. Its classes have the engine's names and other sizes.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from read_engine import read_engine

MODELS = "_torch/models/modeling_"
TREE = {
    "_torch/attention/attention.py": """
        class Attention:
            def __init__(self):
                self.qkv_proj = Linear(self.width, 3 * self.width, bias=bias)
                self.o_proj = Linear(self.width, self.width, bias=False)
    """,
    "_torch/attention/qk_norm_attention.py": """
        class QKNormRoPEAttention(Attention):
            def __init__(self):
                self.q_norm = RMSNorm(hidden_size=self.head_dim, eps=1e-6)
    """,
    "_torch/modules/gated_mlp.py": """
        class GatedMLP:
            def __init__(self):
                self.down_proj = Linear(self.inner, self.width, bias=bias)
    """,
    f"{MODELS}utils.py": """
        class DecoderModelForCausalLM:
            def __init__(self, vocab_size, hidden_size):
                self.lm_head = LMHead(vocab_size, hidden_size, dtype=dtype)
    """,
    f"{MODELS}qwen3.py": """
        class Qwen3Attention(QKNormRoPEAttention):
            def __init__(self, model_config):
                config = model_config.pretrained_config
                super().__init__(bias=getattr(config, "attention_bias", None))

        class Qwen3DecoderLayer:
            def __init__(self, config):
                self.input_layernorm = RMSNorm(hidden_size=config.hidden_size)

            def forward(self, x, metadata):
                x = self.mlp(x)
                metadata.maybe_capture_hidden_states(self.layer_idx, x)

        class Qwen3Model:
            def __init__(self, config):
                self.norm = RMSNorm(hidden_size=config.pretrained_config.hidden_size)
    """,
    f"{MODELS}speculative.py": r"""
        class VanillaMarkov:
            def __init__(self):
                self.markov_w1 = nn.Embedding(self.vocab_size, self.markov_rank)

        class DSparkConfidenceHead:
            def __init__(self):
                self.proj = nn.Linear(width, 1, bias=False)

        class Eagle3Attention(Attention):
            def __init__(self, config):
                self.qkv_proj = Linear(2 * self.width, 3 * self.width, bias=config.attention_bias)

        class Eagle3DecoderLayer:
            def __init__(self, config):
                eagle_config = config.eagle_config
                self.is_regular = eagle_config.get("next_layer_regular", True)
                self.hidden_norm = RMSNorm(hidden_size=config.hidden_size)

        class Eagle3DraftModel:
            def __init__(self, model_config):
                self.num_layers = model_config.pretrained_config.num_hidden_layers
                self.fc = Linear(self.width * self.num_capture_layers, self.width, bias=False)
                self.fc_norm = nn.ModuleList([RMSNorm(hidden_size=self.width) for _ in range(3)])

        class Eagle3ForCausalLM(DecoderModelForCausalLM):
            def __init__(self, config):
                super().__init__(config=config, vocab_size=config.draft_vocab_size)

            def load_weights(self, weights):
                for name in weights:
                    one = re.sub(r"^layers\.0\.", "midlayer.", name)
                    many = re.sub(r"^layers\.(\d+)\.", r"midlayer.\1.", name)
    """,
    f"{MODELS}dflash.py": """
        _DSPARK_HEAD_KEY_ALIASES = {"use_confidence_head": ("use_confidence_head", "other_name")}

        class DFlashForCausalLM:
            def __init__(self, pretrained_config):
                dflash_config = getattr(pretrained_config, "dflash_config", {})
                self.mask = dflash_config.get("mask_token_id", pretrained_config.vocab_size)
                self.kept = getattr(self.config, name, None)

            def load_weights(self, weights):
                self.hidden_norm = nn.RMSNorm(weights["hidden_norm.weight"].shape[0])
    """,
    f"{MODELS}dspark.py": """
        _DSPARK_HEAD_WEIGHT_ALIASES = {
            "proj.weight": ("confidence_head.proj.weight", "proj.weight"),
            "proj.bias": ("confidence_head.proj.bias", "proj.bias"),
        }

        class _DSparkHeadMixin:
            def __init__(self, cfg):
                self.shifts = resolve_dspark_head_config(cfg, "shift_label")
                self.has_confidence = resolve_dspark_head_config(cfg, "use_confidence_head")
    """,
    "_torch/pyexecutor/config_utils.py": """
        def get_layer_attention_window(config, layer_idx):
            return getattr(config, "sliding_window", None)
    """,
    "_torch/models/checkpoints/hf/weight_mapper.py": """
        class HfWeightMapper:
            def map_weights(self):
                self.mapping.update({"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    """,
    "_torch/speculative/eagle3.py": """
        class Eagle3OneModelSpecMetadata:
            def __post_init__(self):
                if self.num_layers == 1:
                    self.layers_to_capture = (self.num_layers - 1,)
                elif self.layers_to_capture is None:
                    self.layers_to_capture = (0, self.num_layers // 2, self.num_layers - 2)
                else:
                    self.layers_to_capture = sorted(list(self.layers_to_capture))
    """,
}


def write_tree(root: Path, **changed: str) -> Path:
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        for old, new in changed.items():
            text = text.replace(old, new)
        (root / name).write_text(dedent(text))
    return root


def test_the_script_makes_the_table_of_a_tensorrt_tree(tmp_path: Path) -> None:
    table = read_engine("tensorrt_llm", "1.4", write_tree(tmp_path))
    assert table["modules"]["eagle3"] == {
        "layers.{N}.self_attn.qkv_proj": {
            "kind": "Linear", "sizes": ["2*width", "3*width"], "bias": "config",
        },
        "layers.{N}.self_attn.o_proj": {
            "kind": "Linear", "sizes": ["width", "width"], "bias": False,
        },
        "layers.{N}.mlp.down_proj": {
            "kind": "Linear", "sizes": ["inner", "width"], "bias": "config",
        },
        "layers.{N}.hidden_norm": {"kind": "norm", "sizes": ["hidden_size"], "bias": None},
        "fc": {"kind": "Linear", "sizes": ["num_capture_layers*width", "width"], "bias": False},
        "fc_norm.{N}": {"kind": "norm", "sizes": ["width"], "bias": None},
        "lm_head": {
            "kind": "LMHead", "sizes": ["draft_vocab_size", "hidden_size"], "bias": False,
        },
    }  # fmt: skip
    dspark = table["modules"]["dspark"]
    assert dspark["layers.{N}.self_attn.qkv_proj"]["sizes"] == ["width", "3*width"]
    assert dspark["layers.{N}.self_attn.q_norm"]["sizes"] == ["head_dim"]
    assert dspark["hidden_norm"]["sizes"] == ["?"]
    assert dspark["markov_head.markov_w1"]["sizes"] == ["vocab_size", "markov_rank"]
    assert dspark["confidence_head.proj"]["bias"]
    assert table["keys"]["eagle3"] == {
        "": [
            "attention_bias", "draft_vocab_size", "eagle_config", "hidden_size",
            "num_hidden_layers",
        ],
        "eagle_config": ["next_layer_regular"],
    }  # fmt: skip
    assert table["keys"]["dflash"] == {
        "": ["attention_bias", "dflash_config", "hidden_size", "sliding_window", "vocab_size"],
        "dflash_config": ["mask_token_id"],
    }
    heads = ["other_name", "shift_label", "use_confidence_head"]
    assert table["keys"]["dspark"]["dspark_config"] == heads
    assert table["keys"]["dspark"]["dflash_config"] == sorted(["mask_token_id", *heads])
    assert table["stacked"] == dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
    assert table["renamed"] == {"midlayer": "layers.0"}
    assert table["layers"] == {
        "told": [[0, 1, 3], [1, 2, 4]],
        "untold": {"7": [1, 4, 6], "32": [1, 17, 31], "36": [1, 19, 35]},
    }
    assert table["sources"].keys() == TREE.keys()


def test_a_tensorrt_that_saves_a_layers_input_has_the_ids_of_training(tmp_path: Path) -> None:
    tree = write_tree(tmp_path)
    file = tree / f"{MODELS}qwen3.py"
    lines = file.read_text().splitlines()
    (at,) = (n for n, line in enumerate(lines) if "maybe_capture" in line)
    lines[at - 1], lines[at] = lines[at], lines[at - 1]
    file.write_text("\n".join(lines))
    assert read_engine("tensorrt_llm", "1.4", tree)["layers"]["told"] == [[0, 1, 3], [0, 1, 3]]


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"Eagle3DraftModel": "Eagle3Model"}, "speculative.py no longer has Eagle3DraftModel"),
        ({"_DSPARK_HEAD_KEY_ALIASES": "KEYS"}, "no longer has _DSPARK_HEAD_KEY_ALIASES"),
        ({"layers_to_capture": "captured"}, "no longer computes layers_to_capture"),
    ],
)
def test_a_tensorrt_tree_that_moved_is_refused_with_the_missing_name(
    changed: dict[str, str], error: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=error):
        read_engine("tensorrt_llm", "1.4", write_tree(tmp_path, **changed))
