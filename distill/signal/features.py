"""Get the hidden states of a target that only a vLLM server loads.

They come through vLLM's `extract_hidden_states` method.

    here                                      the server, or one of several
    document's tokens       ── HTTP ───────►  one pass; residual stream after the layers it was started with
    read in blocks, removed ◄─ storage ─────  [T, L, D], the layer numbers, CRC-32 (`features_store`)
    last stream ─► final norm ─► head         the target's exact distribution, from three of the target's tensors

B = batch, T = tokens, D = hidden, L = auxiliary layers, V = vocabulary.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from redraft.distill.signal.apart import documents
from redraft.distill.signal.endpoint import Endpoint
from redraft.distill.signal.endpoints import Endpoints
from redraft.distill.signal.features_store import (
    Description,
    Storage,
    Use,
)
from redraft.distill.signal.sources import EndpointTarget, say_once
from redraft.distill.signal.storage import DEFAULT_STORAGE, StatesFormat, StatesLostError
from redraft.distill.signal.transfer import host_zeros
from redraft.engine.running_server import find_part, require_part
from redraft.files.checkpoint import new_model
from redraft.files.target_folder import TargetFolder
from redraft.files.tensors import list_tensors, read_tensors
from redraft.heads.draft import Batch, ExactTarget, TargetSignal, label_rows
from redraft.heads.logits import LogitRule
from redraft.heads.nn.causal_lm import final_norm, language_model
from redraft.heads.target import HEAD, short_name

SERVER_COMMAND = "redraft serve-features"
# Maximum number of attempts per document whose states are lost between the server and this process.
ATTEMPTS = 3


def server_args(
    layers: Sequence[int], num_layers: int, storage: str, states_format: StatesFormat = "exact"
) -> list[str]:
    """Return the arguments for a vLLM server that writes hidden states to `storage`.

    The server writes the streams after `layers`, and the last stream.

    Raises:
        ValueError: the target does not have a layer, or the storage cannot be used here.
    """
    if wrong := [layer for layer in layers if not 0 <= layer <= num_layers]:
        raise ValueError(
            f"auxiliary layers {wrong} do not exist: the target has {num_layers} layers"
        )
    # Include the last stream, from which the final norm and the head compute the distribution.
    ids = {"eagle_aux_hidden_state_layer_ids": sorted({*layers, num_layers})}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,  # vLLM accepts only this number with this method
        "draft_model_config": {"hf_config": ids},
    }
    connector = {
        "kv_connector": "Connector",
        "kv_connector_module_path": "redraft.distill.signal.features_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "storage": Storage(storage).root,
            "format": states_format,
            # The folder is unused, but vLLM's connector creates it. Object storage has no folders.
            "shared_storage_path": ".",
            "use_synchronization_lock": False,
        },
    }
    return [
        "--speculative-config",
        json.dumps(speculative),
        "--kv-transfer-config",
        json.dumps(connector),
    ]


def load_skeleton(target: TargetFolder, dtype: torch.dtype | None, device: torch.device) -> Any:
    """Load the target with only its real embeddings, final norm and head.

    The layers' weights stay on `meta`. Raises the same errors as `load_part`.
    """
    return load_part(target, dtype, device, lambda name: ".layers." not in name)


def load_part(
    target: TargetFolder,
    dtype: torch.dtype | None,
    device: torch.device,
    is_wanted: Callable[[str], bool],
) -> Any:
    """Load the target, frozen, with only those tensors whose names satisfy `is_wanted`.

    These tensors are read from the target's files. The others stay on `meta`.

    Raises:
        FileNotFoundError: the folder is missing.
        ValueError: one of these tensors is missing or quantised.
    """
    folder, config = target.folder, target.config
    with torch.device("meta"):
        model = new_model(config, dtype or config.dtype or torch.float32)
    decoder = language_model(model)
    within = next(f"{name}." for name, module in model.named_modules() if module is decoder)
    names = {
        short_name(name): name
        for name in model.state_dict()
        if name.startswith(within) and is_wanted(name)
    }
    # A tied head has no tensor in the file.
    if (
        is_wanted(HEAD)
        and model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    ):
        names[HEAD] = HEAD
    there = {short_name(name): name for name in list_tensors(folder)}
    if missing := sorted(names.keys() - there.keys()):
        raise ValueError(
            f"{folder} has no tensor {names[missing[0]]}: give the folder of the target model"
        )
    stored = {there[short]: name for short, name in names.items()}
    # Use `assign`, because a copy into a tensor on `meta` would be lost. A tied head has no tensor
    # in the file, so `tie_weights` gives it the embeddings.
    read = read_tensors(folder, stored)
    # torch treats FP8 as floating-point, but its numbers are meaningless without scales.
    if packed := sorted(name for name, tensor in read.items() if tensor.element_size() == 1):
        raise ValueError(f"{folder} contains quantised weights, such as {packed[0]}")
    tensors = {stored[name]: tensor.to(device, model.dtype) for name, tensor in read.items()}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    return model.eval().requires_grad_(False)


class EndpointHiddenStates(EndpointTarget):
    """The exact signal from servers that were started with `server_args`.

    There is one request per document.
    """

    def __init__(
        self,
        endpoint: Endpoint | Endpoints,
        target: Any,
        layers: Sequence[int],
        storage: str = DEFAULT_STORAGE,
        opened: TargetFolder | None = None,
        kept: str = "",
    ) -> None:
        """Use only the final norm and the head of `target`, so `load_skeleton` is enough.

        Servers that report a different version of `opened` are refused. Documents whose states were
        `kept` in a storage are not requested.

        Raises:
            ValueError: `storage` is neither a folder nor a URL that fsspec supports, or the
                target's final norm is not found.
        """
        super().__init__(endpoint, opened=opened)
        self._storage = Storage(storage)
        self._kept = Storage(kept) if kept else None
        self.num_kept = self.num_asked = 0
        self.head_VD: Tensor = target.get_output_embeddings().weight.detach()
        self.rule, self.layers = LogitRule.of(target.config), sorted(layers)
        try:
            self._norm = final_norm(target)
        except ValueError as error:
            raise ValueError(
                f"{error}: train with the target in the training process (--signal.kind model)"
            ) from error
        self._last_layer = target.config.get_text_config().num_hidden_layers

    @torch.no_grad()
    async def _require_target(self, endpoint: Endpoint) -> None:
        """Check that log-probabilities computed from the server's hidden states match its own."""
        vocabulary, hidden = self.head_VD.shape
        # Any tokens that are spread over the vocabulary are suitable.
        prompt = [token * 7919 % vocabulary for token in range(1, 17)]
        last_TD = self._host_zeros(len(prompt), hidden)
        aux_TLD = self._host_zeros(len(prompt), len(self.layers), hidden)
        answer, description = await self._read(
            endpoint, last_TD, aux_TLD, prompt=prompt, prompt_logprobs=1
        )
        hidden_TD = self._norm(last_TD.to(self.head_VD.device))
        entries = require_part(endpoint.url, answer, "choices", 0, "prompt_logprobs")[1:]
        # Entry t + 1 is about token t + 1, which row t predicts, so 16 tokens have 15 rows.
        theirs_T = torch.tensor(
            [entry[str(token)]["logprob"] for entry, token in zip(entries, prompt[1:], strict=True)]
        )
        log_p_TV = self.rule.apply_(F.linear(hidden_TD[:-1], self.head_VD)).float().log_softmax(-1)
        ours_T = (
            log_p_TV.gather(1, torch.tensor(prompt[1:], device=log_p_TV.device)[:, None])
            .squeeze(1)
            .cpu()
        )
        difference = float((ours_T - theirs_T).abs().mean())
        if difference > _tolerance(self.head_VD.dtype, description):
            raise ValueError(
                f"{endpoint.url} does not serve this target: its log-probabilities are "
                f"{difference:.2g} nats from "
                "those that the target's norm and head give for its hidden states"
            )

    async def _signal(self, batch: Batch) -> TargetSignal:
        shape, hidden_size = batch.input_ids_BT.shape, self.head_VD.shape[1]
        # Rows that are not requested (padding, last tokens) stay zero, so that they are finite.
        # They are not used for any label.
        last_BTD = self._host_zeros(*shape, hidden_size)
        aux_BTLD = self._host_zeros(*shape, len(self.layers), hidden_size)
        last_ND, aux_NLD = last_BTD.flatten(0, 1), aux_BTLD.flatten(0, 1)
        is_label_row_N, ids_N = label_rows(batch, 0).flatten(), batch.input_ids_BT.flatten()

        async def fill(tokens: Tensor) -> None:
            # The last token is omitted: no label follows it, and a document of the server's maximum
            # length then leaves room for the one token that the server generates.
            rows = slice(int(tokens[0]), int(tokens[-1]))
            prompt, places = ids_N[tokens[:-1]].tolist(), (last_ND[rows], aux_NLD[rows])
            if await asyncio.to_thread(self._read_kept, prompt, *places):
                self.num_kept += 1
                return
            self.num_asked += 1
            await self._read(self.endpoint, *places, prompt=prompt)

        wanted = [tokens for tokens in documents(batch.document_BT) if is_label_row_N[tokens].any()]
        with torch.no_grad():
            # Start with the longest documents, as in `EndpointTarget`.
            await asyncio.gather(
                *(fill(tokens) for tokens in sorted(wanted, key=len, reverse=True))
            )
            device = self.head_VD.device
            hidden_BTD = self._norm(last_BTD.to(device, non_blocking=True))
            aux_BTLD = aux_BTLD.to(device, non_blocking=True)
        distribution = ExactTarget(hidden_BTD=hidden_BTD, head_VD=self.head_VD, rule=self.rule)
        return TargetSignal(distribution=distribution, aux_BTLD=aux_BTLD if self.layers else None)

    def _host_zeros(self, *shape: int) -> Tensor:
        return host_zeros(*shape, dtype=self.head_VD.dtype, device=self.head_VD.device)

    async def _complete(self, **body: Any) -> dict[str, Any]:
        answer = await self.endpoint.post("/v1/completions", **body)
        # This request does not need states, but the server writes them for every request, so remove
        # them.
        await asyncio.to_thread(
            self._storage.take, self._read_url(answer, self.endpoint), lambda *_: None
        )
        return answer

    def _read_kept(self, token_ids: list[int], last_TD: Tensor, aux_TLD: Tensor) -> bool:
        """Write kept states for these tokens into the tensors. Return whether there were any."""
        if self._kept is None:
            return False
        try:
            description = self._kept.read(
                token_ids, self._writer(self._kept.root, last_TD, aux_TLD)
            )
        except StatesLostError as error:
            say_once(f"{error}: the servers compute these states again")
            return False
        if description is None:
            say_once(
                f"{self._kept.root} lacks the states of some texts, e.g. those that were "
                "cut at the row's length: the servers compute them"
            )
            return False
        self._require_version(description, self._kept.root)
        return True

    def _writer(self, url: str, last_TD: Tensor, aux_TLD: Tensor) -> Use:
        """Return a function that writes a few rows of states from `url` into the two tensors."""

        # The sender sets number and width of these rows, so check both before copying.
        def put(first: int, states_tLD: Tensor, held: Sequence[int]) -> None:
            rows = slice(first, first + len(states_tLD))
            if rows.stop > len(last_TD) or states_tLD.shape[2] != last_TD.shape[1]:
                raise StatesLostError(
                    f"the states belong to a different text or target: {list(states_tLD.shape)} "
                    f"from row {first}"
                )
            last, aux = self._find(list(held), url)
            # `copy_` converts the dtype on the way, so there is no second copy in memory.
            last_TD[rows].copy_(states_tLD[:, last])
            for place, layer in enumerate(aux):
                aux_TLD[rows, place].copy_(states_tLD[:, layer])

        return put

    async def _read(
        self, endpoint: Endpoint | Endpoints, last_TD: Tensor, aux_TLD: Tensor, **body: Any
    ) -> tuple[dict[str, Any], Description]:
        """Return the answer to a request, and the description of its states.

        The last stream, before the final norm, and the streams for `self.layers` are written into
        the two tensors in host memory.

        Raises:
            ValueError: a layer is missing, or the states do not arrive, belong to a different
                version, or are not in the storage.
        """
        lost: StatesLostError | None = None
        for _ in range(ATTEMPTS):
            answer = await endpoint.post("/v1/completions", max_tokens=1, **body)
            put = self._writer(endpoint.url, last_TD, aux_TLD)
            try:
                description = await asyncio.to_thread(
                    self._storage.take, self._read_url(answer, endpoint), put
                )
                # Rows that are absent would stay zero, and be trained on.
                if description.shape[0] != len(last_TD):
                    raise StatesLostError(
                        f"the states belong to a different text: {list(description.shape)} for "
                        f"{len(last_TD)} tokens"
                    )
            except StatesLostError as error:
                lost = error
            else:
                self._require_version(description, endpoint.url)
                return answer, description
        raise ValueError(
            f"hidden states from {endpoint.url} do not arrive: {lost}; start it with a "
            "--storage that this machine can read"
        )

    def _read_url(self, answer: dict[str, Any], endpoint: Endpoint | Endpoints) -> str:
        url = find_part(answer, "kv_transfer_params", "hidden_states")
        if not isinstance(url, str):
            raise ValueError(
                f"{endpoint.url} sends no hidden states: start it with `{SERVER_COMMAND}`"
            )
        return url

    def _require_version(self, description: Description, url: str) -> None:
        """Raise ValueError if the states come from weights other than the opened target's.

        A target of a different lineage, e.g. a quantised one, is checked only by its
        log-probabilities.
        """
        lineage, fingerprint, version = description.target
        if version != "":
            raise ValueError(
                f"{url} serves weights that were updated after it started "
                f"({version or 'half-written'!r:.80}): restart it with the weights to train on"
            )
        opened = self._opened
        if (
            opened is None
            or not lineage
            or fingerprint == opened.fingerprint
            or lineage != opened.lineage
        ):
            return
        raise ValueError(
            f"{url} serves a different version of {opened.name} ({fingerprint[:12]!r}, not "
            f"{opened.fingerprint[:12]}): start it with the trainer's --target"
        )

    def _find(self, held: list[int], url: str) -> tuple[int, list[int]]:
        """Return the positions of the last stream and of `self.layers` among a server's layers."""
        if missing := sorted({*self.layers, self._last_layer} - set(held)):
            raise ValueError(
                f"{url} sends target layers {held}, but not {missing}: start it with "
                f"`{SERVER_COMMAND} TARGET --layers {' '.join(map(str, self.layers))}`"
            )
        return held.index(self._last_layer), [held.index(layer) for layer in self.layers]


def _tolerance(dtype: torch.dtype, description: Description) -> float:
    """Return the maximum mean difference of log-probabilities that is accepted, in nats.

    The two sides are a target's own log-probabilities and the log-probabilities computed from its
    states.
    """
    # The states of a different target would differ by whole nats.
    if description.dtype == "float8":
        return 0.5
    # 16-bit dtypes round logits to about 1/16.
    return 1e-2 if dtype == torch.float32 else 0.25
