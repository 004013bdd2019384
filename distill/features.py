"""Hidden states of a target that only a vLLM server holds, through its `extract_hidden_states` method.

    here                                     the server
    document's tokens      ── HTTP ───────►  one pass; residual stream after the layers it was started for
    file, read and removed ◄─ shared folder  [T, L, D] and which layers these are
    last stream ─► final norm ─► head        the target's exact distribution, from three of its tensors

B = batch, T = tokens, D = hidden, L = auxiliary layers, V = vocabulary.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from distill.endpoint import Endpoint
from distill.signals import EndpointTarget, documents
from heads.checkpoint import model_folder
from heads.draft import Batch, ExactTarget, TargetSignal, label_rows
from heads.tensors import read_tensors, tensor_files

SERVER_COMMAND = "redraft serve-features"


def server_args(layers: Sequence[int], num_layers: int, storage: Path) -> list[str]:
    """What vLLM's server needs on its command line to send the streams after `layers` and the last one.

    Raises: ValueError for a layer that the target does not have.
    """
    if wrong := [layer for layer in layers if not 0 <= layer <= num_layers]:
        raise ValueError(f"auxiliary layers {wrong} of a target that has {num_layers} layers")
    ids = {"eagle_aux_hidden_state_layer_ids": sorted({*layers, num_layers})}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": ids},
    }
    connector = {
        "kv_connector": "Connector",
        "kv_connector_module_path": "distill.features_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(storage.absolute())},
    }
    return ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(connector)]


def load_skeleton(target: str, dtype: torch.dtype | None, device: torch.device) -> Any:
    """The target without its layers' weights (they stay on `meta`): embeddings, final norm and head are real.

    Raises: FileNotFoundError for a missing folder; ValueError where one of these tensors lacks.
    """
    folder = model_folder(target)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype)
    wanted = {name for name in model.state_dict() if ".layers." not in name}
    if config.get_text_config().tie_word_embeddings:
        wanted.discard("lm_head.weight")
    if lacking := sorted(wanted - tensor_files(folder).keys()):
        raise ValueError(f"{folder} lacks the tensor {lacking[0]}: give the folder of the target model")
    tensors = {name: tensor.to(device, model.dtype) for name, tensor in read_tensors(folder, wanted).items()}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    return model.eval().requires_grad_(False)


class EndpointHiddenStates(EndpointTarget):
    """The exact signal of the target behind a server that was started with `server_args`, one request a document."""

    def __init__(self, endpoint: Endpoint, target: Any, layers: Sequence[int]) -> None:
        """`target` needs its final norm and head alone, as `load_skeleton` gives it."""
        super().__init__(endpoint)
        self.head_VD: Tensor = target.get_output_embeddings().weight.detach()
        self.layers = sorted(layers)
        self._norm = target.base_model.norm
        self._last_layer = target.config.get_text_config().num_hidden_layers

    @torch.no_grad()
    def require_target(self) -> None:
        """Return where the server holds the target and its layers: our log-probabilities of a text are its own.

        Raises: ValueError where they are not, or layers lack; ConnectionError naming the URL.
        """
        vocabulary = len(self.head_VD)
        prompt = [token * 7919 % vocabulary for token in range(1, 17)]
        answer = self._runner.run(self._complete(prompt=prompt, max_tokens=1, prompt_logprobs=1))
        entries = answer["choices"][0]["prompt_logprobs"][1:]
        theirs_T = torch.tensor(
            [entry[str(token)]["logprob"] for entry, token in zip(entries, prompt[1:], strict=True)]
        )
        hidden_TD, _ = self._states(answer["states"])
        log_p_TV = F.linear(hidden_TD[:-1], self.head_VD).float().log_softmax(-1)
        ours_T = log_p_TV.gather(1, torch.tensor(prompt[1:], device=log_p_TV.device)[:, None]).squeeze(1).cpu()
        difference = float((ours_T - theirs_T).abs().mean())
        # 16 bits round logits to 1/16 or so; another target is off by whole nats
        if difference > (1e-2 if self.head_VD.dtype == torch.float32 else 0.25):
            raise ValueError(
                f"{self.endpoint.url} does not serve this target: its log-probabilities are {difference:.2g} nats from "
                "those of its hidden states with the target's norm and head"
            )

    async def _signal(self, batch: Batch) -> TargetSignal:
        shape, hidden_size = batch.input_ids_BT.shape, self.head_VD.shape[1]
        hidden_BTD = self.head_VD.new_zeros(*shape, hidden_size)
        aux_BTLD = self.head_VD.new_zeros(*shape, len(self.layers), hidden_size)
        hidden_ND, aux_NLD = hidden_BTD.flatten(0, 1), aux_BTLD.flatten(0, 1)
        is_label_row_N, ids_N = label_rows(batch, 0).flatten(), batch.input_ids_BT.flatten()

        async def fill(tokens: Tensor) -> None:
            # the last token's row predicts nothing that is known, and left out the rest fits into the server's length
            answer = await self._complete(prompt=ids_N[tokens[:-1]].tolist(), max_tokens=1)
            rows = slice(int(tokens[0]), int(tokens[-1]))
            hidden_ND[rows], aux_NLD[rows] = self._states(answer["states"])

        with torch.no_grad():
            await asyncio.gather(*(fill(tokens) for tokens in documents(batch) if is_label_row_N[tokens].any()))
        distribution = ExactTarget(hidden_BTD=hidden_BTD, head_VD=self.head_VD)
        return TargetSignal(distribution=distribution, aux_BTLD=aux_BTLD if self.layers else None)

    def _states(self, states: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(last hidden state after the final norm [T, D], streams after our layers [T, L, D])."""
        held = states["layers"].tolist()
        if lacking := sorted({*self.layers, self._last_layer} - set(held)):
            raise ValueError(
                f"{self.endpoint.url} sends target layers {held} and not {lacking}: start it with `{SERVER_COMMAND} "
                f"TARGET --layers {' '.join(map(str, self.layers))}`"
            )
        streams_TLD = states["hidden_states"].to(self.head_VD)
        hidden_TD = self._norm(streams_TLD[:, held.index(self._last_layer)])
        return hidden_TD, streams_TLD[:, [held.index(layer) for layer in self.layers]]

    async def _complete(self, **body: Any) -> dict[str, Any]:
        """The server's answer with the `states` that it wrote for it."""
        answer = await self.endpoint.post("/v1/completions", **body)
        path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if path is None:
            raise ValueError(f"{self.endpoint.url} sends no hidden states: start it with `{SERVER_COMMAND}`")
        return {**answer, "states": await asyncio.to_thread(_take, Path(path), self.endpoint.url)}


def _take(path: Path, url: str) -> dict[str, Tensor]:
    """The tensors of a file that the server may still be writing; the file is removed.

    Raises: ValueError where this machine cannot read it, or where another connector wrote it.
    """
    lock = path.with_name(path.name + ".lock")
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # the writer holds it until the file is whole
        tensors: dict[str, Tensor] = load_file(path)
    except OSError as error:
        raise ValueError(f"{url} writes hidden states to {path.parent}, which is not read here: {error}") from error
    for used in (path, lock):
        with suppress(FileNotFoundError):
            used.unlink()
    if "layers" not in tensors:
        raise ValueError(f"{url} does not say which layers it sends: start it with `{SERVER_COMMAND}`")
    return tensors
