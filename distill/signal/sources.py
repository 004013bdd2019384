"""Target signals: the target's distribution and hidden states at the rows of a batch.

`signal = source(batch)`.

                           read from                                distribution   hidden states after
    InProcessTarget        a `transformers` model in this process   exact          any layers
    EndpointTarget         a vLLM server's `prompt_logprobs`        top-k          none
    EndpointHiddenStates   a vLLM server's hidden states            exact          the layers it was started with
    CachedTarget           disk, written from any of these          top-k          none
    CachedHiddenStates     disk, written from one with states       exact          the layers written

The last three are in `distill.signal.features` and `distill.signal.cache`.

B = batch, T = tokens, N = rows, D = hidden, V = vocabulary, K = kept top-k ids, L = auxiliary
layers.
"""

import asyncio
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redraft.distill.launch.compiled import running_compiled
from redraft.distill.signal.apart import documents, positions, put_back, split_documents
from redraft.distill.signal.endpoint import Endpoint, RequestRefusedError
from redraft.distill.signal.endpoints import Endpoints
from redraft.distill.signal.sharded import is_sharded, most_of_ranks
from redraft.engine.running_server import find_part, require_part
from redraft.engine.sampling import GREEDY, PENALTIES
from redraft.files.progress import Progress
from redraft.files.target_folder import TargetFolder
from redraft.heads.draft import Batch, ExactTarget, TargetSignal, TopKTarget, label_rows
from redraft.heads.families.standalone import ATTENTION_TYPES
from redraft.heads.logits import LogitRule
from redraft.heads.nn.causal_lm import (
    decoder_layers,
    find_rule,
    language_model,
    prefix_arguments,
    take_prefixes,
)

CHUNK = 256
"""Number of rows whose logits are in memory at once: 128 MiB in float32 for a vocabulary of 128k.
"""

TOP_K_ONLY = (
    "train a standalone draft on top-k probabilities from its vLLM servers (--signal.kind "
    "endpoint, without --signal.exact)"
)
"""Advice for a target whose exact signal cannot be computed."""

SCORE_BYTES = 2 << 30
"""Memory for the scores of one layer of eager attention, which are [b, H, t, t] in float32."""

LAST = -1
"""Key of the last hidden states in the mapping from layers to streams."""

# Words to compare the ids of two vocabularies. Different vocabularies differ even for plain words.
WORDS = "a draft learns the text of its target"

UNRECORDED = -1e4
"""Log-probability stored with the id -1. Its exponential is 0, and it is finite, so a masked row
cannot turn a sum into NaN.
"""


class InProcessTarget:
    """The exact signal from a causal LM of `transformers`.

    If packed documents would attend to each other in a target, its passes have one document per row
    (`distill.signal.apart`).
    """

    def __init__(
        self, model: Any, aux_layers: Sequence[int] = (), *, has_weights: bool = True
    ) -> None:
        """Prepare a target with or without weights.

        `aux_layers` selects streams: k is the residual stream after k layers, from 0 (the
        embeddings) to the number of layers. Without weights, no values are checked, and only the
        cost of the signal can be counted.

        Raises:
            ValueError: a layer does not exist, or the model's exact signal cannot be computed.
        """
        self.model, self.aux_layers = model.eval(), sorted(aux_layers)
        self._decoder, self._config = language_model(model), model.config.get_text_config()
        self._takes_prefixes = take_prefixes(model)
        self._compiled: list[nn.Module] = []
        num_layers = self._config.num_hidden_layers
        if self.aux_layers and not 0 <= self.aux_layers[0] <= self.aux_layers[-1] <= num_layers:
            raise ValueError(
                f"auxiliary layers {self.aux_layers} do not all exist: the target has {num_layers} layers"
            )
        self.rule, self.packs = LogitRule.of(model.config), True
        if has_weights:
            self.rule = self._find_rule()
            self.packs = not most_of_ranks(model, int(not self._keeps_apart()))

    @torch.no_grad()
    def __call__(self, batch: Batch) -> TargetSignal:
        chunk = getattr(self._config, "attention_chunk_size", None)
        # For Llama 4, transformers counts the attention chunks from the start of the row instead of
        # the document.
        packs = self.packs and not (chunk and chunk < batch.input_ids_BT.shape[1])
        assert batch.shared is None or (packs and self._takes_prefixes), "see require_shared_passes"
        with self._streams() as streams, running_compiled(self._compiled):
            hidden_BTD = self._pass(batch) if packs else self._passes(batch, streams)
        # [B, T, L, D], in the ascending order of `aux_layers`.
        aux_BTLD = (
            torch.stack([streams[k] for k in self.aux_layers], dim=2) if self.aux_layers else None
        )
        exact = ExactTarget(hidden_BTD=hidden_BTD, head_VD=self._head(), rule=self.rule)
        return TargetSignal(distribution=exact, aux_BTLD=aux_BTLD)

    def _pass(self, batch: Batch) -> Tensor:
        """Return the last hidden states for packed rows, [B, T, D]."""
        # Otherwise, no mask is passed, because it would replace the layers' own masks. Restarting
        # positions already separate the documents.
        within = prefix_arguments(batch) if self._takes_prefixes else {}
        return self._hidden(batch.input_ids_BT, batch.position_ids_BT, **within)

    def _passes(self, batch: Batch, streams: dict[int, Tensor]) -> Tensor:
        """Return the last hidden states from passes with one document per row, [B, T, D].

        These states, and those in `streams`, are put back at their positions in the packed rows.
        """
        ids_N = batch.input_ids_BT.flatten()
        passes = split_documents(batch.document_BT, self._most_pairs())
        whole: dict[int, Tensor] = {}
        # With shards, all ranks must take part in a pass. A rank with fewer passes makes additional
        # ones over a single token.
        nothing = torch.full((1, 1), -1, device=ids_N.device)
        passes += [nothing] * (most_of_ranks(self.model, max(len(passes), 1)) - len(passes))
        for at_bt in passes:
            last_btD = self._hidden(
                ids_N[at_bt.clamp(min=0)], positions(at_bt, batch.position_ids_BT)
            )
            for k, states_btD in {LAST: last_btD, **streams}.items():
                whole[k] = put_back(whole.get(k), states_btD, at_bt, len(ids_N))
        shape = batch.input_ids_BT.shape
        streams |= {k: states_ND.view(*shape, -1) for k, states_ND in whole.items()}
        return streams[LAST]

    def _most_pairs(self) -> float:
        if not self._is_eager:
            return float("inf")
        return SCORE_BYTES / (4 * getattr(self._config, "num_attention_heads", 1))

    @property
    def _is_eager(self) -> bool:
        return getattr(self._config, "_attn_implementation", None) == "eager"

    def compile_layers(self) -> None:
        """Compile the model's layers for the calls of this source.

        For other callers, the model is unchanged. Sharded layers are not compiled, because the hook
        that gathers them would split every graph.
        """
        if not is_sharded(self.model):
            self._compiled = list(decoder_layers(self.model))

    def _head(self) -> Tensor:
        weight_VD: Tensor = self.model.get_output_embeddings().weight
        return weight_VD.detach()

    def _hidden(self, ids_BT: Tensor, position_ids_BT: Tensor, **within: Any) -> Tensor:
        output = self._decoder(
            input_ids=ids_BT, position_ids=position_ids_BT, use_cache=False, **within
        )
        hidden_BTD: Tensor | None = getattr(output, "last_hidden_state", None)
        if hidden_BTD is None:
            raise ValueError(
                f"{type(self.model).__name__} does not return the last hidden state: "
                "read the target from a vLLM server instead"
            )
        return hidden_BTD

    @contextmanager
    def _streams(self) -> Iterator[dict[int, Tensor]]:
        """Yield a dict that a pass fills with the residual stream after each of `aux_layers`.

        `output_hidden_states` would keep the streams of all layers, and return the last one after
        the final norm.
        """
        streams: dict[int, Tensor] = {}

        def keep(k: int, hidden: Any) -> None:
            # A pre-hook gets a tuple of arguments, and some layers return a tuple. In both, the
            # stream comes first.
            streams[k] = hidden[0] if isinstance(hidden, tuple) else hidden

        handles = []
        for k in self.aux_layers:
            # Take the first layer's input, because a model may scale the embeddings first.
            if k == 0:
                layer = decoder_layers(self.model)[0]
                handles.append(layer.register_forward_pre_hook(lambda _, args: keep(0, args)))
            else:
                layer = decoder_layers(self.model)[k - 1]
                handles.append(
                    layer.register_forward_hook(lambda _, __, output, k=k: keep(k, output))
                )
        try:
            yield streams
        finally:
            for handle in handles:
                handle.remove()

    def _find_rule(self) -> LogitRule:
        try:
            return find_rule(self.model)
        except ValueError as error:
            raise ValueError(
                f"{error}, so the exact signal would be wrong: {TOP_K_ONLY}"
            ) from error

    @torch.no_grad()
    def _keeps_apart(self) -> bool:
        """Whether documents in one row do not affect each other.

        Layers with a state mix documents, and eager attention would compute all pairs in a row. All
        other models are tested: the same document, packed after two different documents, must get
        exactly the same states.

        Raises:
            ValueError: a token attends to later tokens, so that even padding has an effect.
        """
        half, device = 8, self._head().device
        ids_T = torch.arange(3 * half, device=device) * 7 % self._head().shape[0]
        first, other, last = torch.split(ids_T, half)
        rows = [(first, last), (other, last), (first, other)]
        packed = Batch.packed(
            [[(ids, torch.ones(half)) for ids in row] for row in rows],
            width=2 * half,
            device=device,
        )
        behind_one, behind_other, before_other = self._pass(packed)
        alone, followed = behind_one[:half].float(), before_other[:half].float()
        if (alone - followed).norm() > 1e-2 * alone.norm():
            raise ValueError(
                f"a token of {type(self.model).__name__} attends to later tokens: {TOP_K_ONLY}"
            )
        kinds = set(getattr(self._config, "layer_types", None) or ())
        return (
            kinds <= ATTENTION_TYPES
            and not self._is_eager
            and torch.equal(behind_one[half:], behind_other[half:])
        )


@torch.no_grad()
def top_k(exact: ExactTarget, rows_N: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (ids, float32 log-probabilities) for the given rows, each [N, K], descending.

    The rows are those of the flattened batch.

    Raises:
        ValueError: k exceeds the vocabulary.
    """
    if k > len(exact.head_VD):
        raise ValueError(
            f"k = {k} is larger than the vocabulary, {len(exact.head_VD)}: choose a smaller k"
        )
    ids, log_probs = [], []
    for rows_C in torch.split(rows_N, CHUNK):
        # The product uses the target's dtype, as in serving. Only the softmax uses a wider dtype.
        top = exact.logits(rows_C).float().log_softmax(-1).topk(k)
        ids.append(top.indices)
        log_probs.append(top.values)
    return torch.cat(ids), torch.cat(log_probs)


def recorded(batch: Batch, rows_N: Tensor, ids_NK: Tensor, log_probs_NK: Tensor) -> TargetSignal:
    """Return a top-k signal that is known only for `rows_N` of the flattened batch.

    All other rows contain the id -1.
    """
    shape, k = batch.input_ids_BT.shape, ids_NK.shape[1]
    device = batch.input_ids_BT.device
    ids_BTK = torch.full((*shape, k), -1, device=device)
    log_probs_BTK = torch.full((*shape, k), UNRECORDED, device=device)
    ids_BTK.view(-1, k)[rows_N] = ids_NK.to(device, torch.int64)
    log_probs_BTK.view(-1, k)[rows_N] = log_probs_NK.to(device, torch.float32)
    return TargetSignal(distribution=TopKTarget(ids_BTK=ids_BTK, log_probs_BTK=log_probs_BTK))


say_once = functools.cache(
    Progress.write
)  # printed once, because a run opens its servers for both the forecast and the training


class EndpointTarget:
    """The top-k signal from one or several vLLM servers, with one request per document.

    The servers must be started with `--max-logprobs` of at least k.
    """

    def __init__(
        self, endpoint: Endpoint | Endpoints, k: int = 20, opened: TargetFolder | None = None
    ) -> None:
        """Set up the source with its own endpoint, whose connections belong to its event loop.

        Servers that certainly serve a target other than `opened` are refused.
        """
        self.endpoint, self.k, self._opened = endpoint, k, opened
        # Use one event loop for all calls, because connections stay open between batches and belong
        # to a loop.
        self._runner = asyncio.Runner()

    def require_target(self) -> None:
        """Refuse servers that certainly serve a different target, or do not answer.

        A dead server among several is checked when it comes back, and gets no requests if it fails
        the check.

        Raises:
            ValueError: a server certainly serves a different target.
            ConnectionError: the server, or each of several servers, does not answer; the message
                names the URL.
        """
        if isinstance(self.endpoint, Endpoints):
            self._runner.run(self.endpoint.require(self._require_target))
        else:
            self._runner.run(self._require_target(self.endpoint))

    async def _require_target(self, endpoint: Endpoint) -> None:
        """Require that the server's tokenizer produces the target's ids.

        A different name is only printed, because an alias or a quantised copy also has a different
        name.
        """
        if (target := self._opened) is None:
            return
        asked = {"prompt": WORDS, "add_special_tokens": False, "return_token_ids": True}
        answer = await endpoint.post("/v1/completions", max_tokens=1, **asked)
        theirs = find_part(answer, "choices", 0, "prompt_token_ids")
        ours = target.tokenizer(WORDS, add_special_tokens=False)["input_ids"]
        if theirs not in (None, ours):
            raise ValueError(
                f"{endpoint.url} serves a different target: {WORDS!r} has the ids {theirs}, not "
                f"{ours}"
            )
        if Path(named := await endpoint.model()).name != Path(target.name).name:
            say_once(
                f"{endpoint.url} serves {named}: its answers are assumed to be those of "
                f"{target.name}"
            )

    def _require_known(self, largest: int) -> None:
        if self._opened is not None and largest >= (size := self._opened.text_config.vocab_size):
            raise ValueError(
                f"{self.endpoint.url} serves a different target: it returned id {largest}, but "
                f"the vocabulary has {size} ids"
            )

    def __call__(self, batch: Batch) -> TargetSignal:
        """Return the signal for a batch.

        Raises:
            ValueError: the server refuses k or a document, or answers with ids from a different
                vocabulary.
            ConnectionError: the server does not answer; the message names the URL.
        """
        return self._runner.run(self._signal(batch))

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Return `num_tokens` greedy tokens from the server for each prompt.

        End tokens do not stop the generation, and the penalties in the target's
        generation_config.json do not apply. Raises the same errors as `__call__`.
        """

        async def one(prompt: Sequence[int]) -> list[int]:
            answer = await self._complete(
                prompt=list(prompt),
                max_tokens=num_tokens,
                **asdict(GREEDY),
                **PENALTIES,
                ignore_eos=True,
                return_token_ids=True,
            )
            token_ids: list[int] = require_part(
                self.endpoint.url, answer, "choices", 0, "token_ids"
            )
            self._require_known(max(token_ids, default=0))
            return token_ids

        async def every() -> list[list[int]]:
            return await asyncio.gather(*map(one, prompts))

        return self._runner.run(every())

    async def _complete(self, **body: Any) -> dict[str, Any]:
        return await self.endpoint.post("/v1/completions", **body)

    async def _signal(self, batch: Batch) -> TargetSignal:
        is_label_row = label_rows(batch, 0).flatten()
        wanted = [(tokens, tokens[is_label_row[tokens]]) for tokens in documents(batch.document_BT)]
        # Start with the longest prompts, so that several servers finish at about the same time.
        wanted = sorted(
            ((t, rows) for t, rows in wanted if len(rows)),
            key=lambda pair: len(pair[0]),
            reverse=True,
        )
        ids_T = batch.input_ids_BT.flatten()
        answers = await asyncio.gather(
            *(self._score(ids_T[tokens], rows - tokens[0]) for tokens, rows in wanted)
        )
        ids_NK = torch.cat([ids for ids, _ in answers]) if answers else torch.empty(0, self.k)
        log_probs_NK = (
            torch.cat([log_probs for _, log_probs in answers])
            if answers
            else torch.empty(0, self.k)
        )
        rows_N = (
            torch.cat([rows for _, rows in wanted]) if wanted else torch.empty(0, dtype=torch.int64)
        )
        return recorded(batch, rows_N, ids_NK, log_probs_NK)

    async def _score(self, ids_T: Tensor, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return (ids, log-probabilities), each [N, K], for the given rows of one document."""
        # Row r is read at token r + 1. The last row is read at the one token that the server
        # generates, so that a document of the server's maximum length leaves room for this token.
        *rows, last = rows_N.tolist()
        try:
            answer = await self._complete(
                prompt=ids_T[: last + 1].tolist(),
                prompt_logprobs=self.k,
                logprobs=self.k,
                return_tokens_as_token_ids=True,
                max_tokens=1,
            )
        except RequestRefusedError as error:
            if "logprobs" in error.reason:
                raise ValueError(
                    f"{error}: start the server with --max-logprobs {self.k}"
                ) from error
            raise
        url = self.endpoint.url
        scored = require_part(url, answer, "choices", 0, "prompt_logprobs")
        # Entry t + 1 is the distribution of row t. If token t + 1 is not in the top k, it is entry
        # k + 1.
        try:
            known = [
                [(e["logprob"], int(token)) for token, e in scored[row + 1].items()] for row in rows
            ]
            (generated,) = answer["choices"][0]["logprobs"]["top_logprobs"]
            known.append(
                [(p, int(token.removeprefix("token_id:"))) for token, p in generated.items()]
            )
            largest = [sorted(entry, reverse=True) for entry in known]
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{url} sends log-probabilities in a form that vLLM does not use"
            ) from error
        if (fewest := min(map(len, largest))) < self.k:
            raise ValueError(
                f"{url} sends {fewest} log-probabilities for a token, not {self.k}: set a smaller "
                "--signal.k"
            )
        ids_NK = torch.tensor([[token for _, token in row[: self.k]] for row in largest])
        self._require_known(int(ids_NK.max()))
        return ids_NK, torch.tensor(
            [[log_prob for log_prob, _ in row[: self.k]] for row in largest]
        )
