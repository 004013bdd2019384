from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from redraft.distill.data.packing import collate
from redraft.distill.data.samples import Sample
from redraft.distill.signal.apart import documents
from redraft.distill.signal.endpoint import Endpoint
from redraft.distill.signal.sources import EndpointTarget, InProcessTarget, top_k
from redraft.engine.server import VllmServer
from redraft.files.target_folder import TargetFolder
from redraft.heads.draft import Batch, ExactTarget, TopKTarget, label_rows
from redraft.heads.logits import LogitRule
from redraft.heads.nn import causal_lm
from redraft.heads.nn.causal_lm import PLAIN_ATTENTION
from tests.helpers.target_families import FAMILIES, TINY

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-eager": ("Llama", {"attn_implementation": "eager"}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "sliding-window": ("Mistral", {"sliding_window": 4}),
}


def make_model(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    attention = options.pop("attn_implementation", "sdpa")
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    config._attn_implementation = attention
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def make_batch(
    vocab_size: int = 97,
    rows: tuple[tuple[int, ...], ...] = ((9, 7, 8), (11,), (5, 1, 12)),
    width: int = 26,
) -> Batch:
    """Rows of documents of these lengths, their last two thirds labelled, padded with the id 0."""
    rng = np.random.default_rng(0)
    samples = [
        [
            Sample(
                input_ids=rng.integers(1, vocab_size, length).astype(np.int32),
                loss_mask=np.arange(length) >= length // 3,
                conversation="",
                domain="all",
            )
            for length in row
        ]
        for row in rows
    ]
    return collate(samples, width)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_documents_get_what_the_plain_model_says_of_each_alone(architecture: str) -> None:
    family, options = ARCHITECTURES[architecture]
    model = make_model(family, **options)
    batch = make_batch()
    exact = InProcessTarget(model)(batch).distribution
    assert isinstance(exact, ExactTarget)
    logits_NV = F.linear(exact.hidden_BTD, exact.head_VD).flatten(0, 1)
    assert not logits_NV.requires_grad
    count = 0
    for tokens in documents(batch.document_BT):
        alone_TV = model(input_ids=batch.input_ids_BT.flatten()[tokens][None]).logits[0]
        torch.testing.assert_close(logits_NV[tokens], alone_TV.detach(), atol=2e-5, rtol=1e-5)
        count += 1
    assert count == 7


WITH_WINDOWS = (
    "mistral",
    "mixtral",
    "phi3",
    "starcoder2",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)


@pytest.mark.parametrize(
    ("model_type", "window"),
    [*((name, None) for name in PLAIN_ATTENTION), *((name, 4) for name in WITH_WINDOWS)],
)
def test_ranges_of_keys_give_what_each_document_gets_alone(
    model_type: str, window: int | None
) -> None:
    torch.manual_seed(0)
    windows = {"sliding_window": window}
    if window and model_type.startswith("qwen"):  # in a part of the layers, where it can be
        windows |= {"use_sliding_window": True, "max_window_layers": 1}
    config = AutoConfig.for_model(model_type, **{**TINY, **FAMILIES[model_type][1], **windows})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    batch = make_batch(config.vocab_size)
    source = InProcessTarget(model, aux_layers=(2,))
    # SDPA gets no mask of the packed rows: it is not called at all.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm, "sdpa_attention_forward", None)
        signal = source(batch)
    assert isinstance(signal.distribution, ExactTarget)
    assert signal.aux_BTLD is not None
    hidden_ND, streams_ND = (
        signal.distribution.hidden_BTD.flatten(0, 1),
        signal.aux_BTLD.flatten(0, 2),
    )
    for tokens in documents(batch.document_BT):
        with torch.no_grad():
            alone = model.base_model(
                batch.input_ids_BT.flatten()[tokens][None], output_hidden_states=True
            )
        torch.testing.assert_close(
            hidden_ND[tokens], alone.last_hidden_state[0], atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            streams_ND[tokens], alone.hidden_states[2][0], atol=1e-5, rtol=1e-5
        )


def test_auxiliary_streams_are_those_before_each_layer_and_the_last_one_before_the_norm() -> None:
    model = make_model("Llama")
    batch = make_batch(rows=((12,), (12,)), width=12)
    signal = InProcessTarget(model, aux_layers=(3, 0, 2))(batch)
    with torch.no_grad():
        output = model(input_ids=batch.input_ids_BT, output_hidden_states=True)
    assert signal.aux_BTLD is not None
    assert signal.aux_BTLD.shape == (2, 12, 3, 32)
    torch.testing.assert_close(signal.aux_BTLD[:, :, 0], output.hidden_states[0])
    torch.testing.assert_close(signal.aux_BTLD[:, :, 1], output.hidden_states[2])
    torch.testing.assert_close(model.model.norm(signal.aux_BTLD[:, :, 2]), output.hidden_states[3])
    assert not torch.allclose(signal.aux_BTLD[:, :, 2], output.hidden_states[3])


def test_no_hook_is_left_on_the_model() -> None:
    model = make_model("Llama")
    source = InProcessTarget(model, aux_layers=(0, 3))
    before = [
        len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.model.layers
    ]
    source(make_batch())
    assert [
        len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.model.layers
    ] == before


def test_auxiliary_layers_beyond_the_target_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 4\].*3"):
        InProcessTarget(make_model("Llama"), aux_layers=(4, 2))


@pytest.mark.parametrize(
    ("family", "options", "rule"),
    [
        ("Gemma2", {"final_logit_softcapping": 20.0}, LogitRule(cap=20.0)),
        ("Cohere", {"logit_scale": 0.25}, LogitRule(scale=0.25)),
        ("Granite", {"logits_scaling": 8.0}, LogitRule(scale=1 / 8)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_and_capped_logits_are_those_of_the_class(
    family: str, options: dict[str, Any], rule: LogitRule, dtype: torch.dtype
) -> None:
    model = make_model(family, **options, attn_implementation="eager").to(dtype)
    batch = make_batch(rows=((12,), (12,)), width=12)
    exact = InProcessTarget(model)(batch).distribution
    assert isinstance(exact, ExactTarget)
    assert exact.rule == rule
    exact = replace(exact, hidden_BTD=50 * exact.hidden_BTD)
    with torch.no_grad():
        model.model.register_forward_hook(
            lambda _, __, output: setattr(output, "last_hidden_state", exact.hidden_BTD)
        )
        theirs = model(input_ids=batch.input_ids_BT).logits.flatten(0, 1)
    torch.testing.assert_close(exact.logits(torch.arange(24)), theirs)
    # the top k too
    _, log_probs_NK = top_k(exact, torch.arange(24), 4)
    torch.testing.assert_close(log_probs_NK, theirs.float().log_softmax(-1).topk(4).values)


class Louder(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """With a scale that no config says."""

    def forward(self, *args: Any, **given: Any) -> Any:
        output = super().forward(*args, **given)
        output.logits = output.logits * 1.1
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_unlike_the_config_are_refused(dtype: torch.dtype) -> None:
    louder = Louder(transformers.LlamaConfig(**SIZES)).to(dtype)
    with pytest.raises(ValueError, match=r"Louder.*head @ hidden"):
        InProcessTarget(louder)
    biased = make_model("Phi").to(dtype)
    torch.nn.init.normal_(biased.lm_head.bias)
    with pytest.raises(ValueError, match=r"PhiForCausalLM.*head @ hidden"):
        InProcessTarget(biased)


def test_a_model_that_reads_no_positions_gets_one_document_a_row() -> None:
    config = transformers.BloomConfig(
        vocab_size=97, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3
    )
    model, batch = transformers.BloomForCausalLM(config).eval(), make_batch()
    source = InProcessTarget(model)
    assert not source.packs
    exact = source(batch).distribution
    assert isinstance(exact, ExactTarget)
    for tokens in documents(batch.document_BT):
        alone_TV = model(input_ids=batch.input_ids_BT.flatten()[tokens][None]).logits[0]
        torch.testing.assert_close(exact.logits(tokens), alone_TV.detach(), atol=2e-5, rtol=1e-5)


def test_a_model_that_sees_what_follows_is_refused() -> None:
    model = make_model("Llama")

    def see_all(_: Any, __: Any, output: Any) -> None:
        output.last_hidden_state += output.last_hidden_state.mean(1, keepdim=True)

    model.model.register_forward_hook(see_all)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*--signal\.kind"):
        InProcessTarget(model)


def test_top_k_is_that_of_the_full_softmax() -> None:
    exact = ExactTarget(hidden_BTD=torch.randn(2, 300, 8), head_VD=torch.randn(50, 8))
    rows_N = torch.arange(0, 600, 2)
    ids_NK, log_probs_NK = top_k(exact, rows_N, 5)
    expected_NV = (exact.hidden_BTD.double().flatten(0, 1) @ exact.head_VD.double().T).log_softmax(
        -1
    )[rows_N]
    torch.testing.assert_close(log_probs_NK.double(), expected_NV.topk(5).values, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        expected_NV.gather(1, ids_NK), log_probs_NK.double(), atol=1e-5, rtol=0
    )
    with pytest.raises(ValueError, match=r"51.*50"):
        top_k(exact, rows_N, 51)


@pytest.mark.vllm
def test_a_real_server_gives_the_log_probabilities_of_the_model_that_it_serves(
    engine_with_draft: VllmServer, served_pair: tuple[Path, Path]
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(served_pair[0], dtype=torch.float32)
    batch = make_batch(model.config.vocab_size, rows=((40, 30), (25, 2, 20), (256,)), width=256)
    live = EndpointTarget(Endpoint(engine_with_draft.url), k=20)(batch).distribution
    exact = InProcessTarget(model)(batch).distribution
    assert isinstance(live, TopKTarget)
    assert isinstance(exact, ExactTarget)
    rows_N = label_rows(batch, 0).flatten().nonzero().squeeze(1)
    _, expected_NK = top_k(exact, rows_N, 20)
    ids_NK = live.ids_BTK.flatten(0, 1)[rows_N]
    full_NV = F.linear(exact.hidden_BTD, exact.head_VD).flatten(0, 1)[rows_N].log_softmax(-1)
    # The first token of a document labels no row. The last document has the server's maximum length.
    assert len(rows_N) == 27 + 20 + 17 + 1 + 14 + 171
    torch.testing.assert_close(
        live.log_probs_BTK.flatten(0, 1)[rows_N], expected_NK, atol=1e-4, rtol=0
    )
    torch.testing.assert_close(full_NV.gather(1, ids_NK), expected_NK, atol=1e-4, rtol=0)
    assert all(len(set(row)) == 20 for row in ids_NK.tolist())
    assert (live.ids_BTK[~label_rows(batch, 0)] == -1).all()


@pytest.mark.vllm
def test_a_real_server_is_told_from_one_of_another_vocabulary(
    engine_with_draft: VllmServer, served_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    def require(folder: Path) -> None:
        EndpointTarget(
            Endpoint(engine_with_draft.url), k=3, opened=TargetFolder.open(folder)
        ).require_target()

    require(served_pair[0])
    other = Path(shutil.copytree(served_pair[0], tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary, ids = tokenizer["model"]["vocab"], sorted(tokenizer["model"]["vocab"].values())
    shifted = dict(zip(ids, [*ids[1:], ids[0]], strict=True))
    tokenizer["model"]["vocab"] = {token: shifted[number] for token, number in vocabulary.items()}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=engine_with_draft.url):
        require(other)


@pytest.mark.vllm
def test_more_log_probabilities_than_a_real_server_allows_names_its_flag(
    engine_with_draft: VllmServer,
) -> None:
    with pytest.raises(ValueError, match="--max-logprobs 21") as error:
        EndpointTarget(Endpoint(engine_with_draft.url), k=21)(make_batch())
    assert "\n" not in str(error.value)


@pytest.mark.vllm
def test_a_second_batch_reuses_the_connection_and_one_without_labels_asks_nothing(
    engine_with_draft: VllmServer,
) -> None:
    source = EndpointTarget(Endpoint(engine_with_draft.url), k=3)
    first, second = source(make_batch()), source(make_batch())
    assert isinstance(first.distribution, TopKTarget)
    assert isinstance(second.distribution, TopKTarget)
    assert torch.equal(first.distribution.ids_BTK, second.distribution.ids_BTK)
    silent = make_batch(rows=((1,),), width=4)
    assert (
        EndpointTarget(Endpoint("http://nowhere.invalid"), k=3)(silent).distribution.ids_BTK == -1
    ).all()
