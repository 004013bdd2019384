"""Settings for the draft, the buffer, training and the evaluation of candidates.

This module does not load torch, because every command reads the settings.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from redraft.files.setting_error import SettingError, require_least


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    family: str = "standalone"
    """Draft family: standalone, eagle1, eagle3, peagle, mtp, dflash or dspark. Heads learn from the
    target's hidden states, so for all families except standalone the servers must run with
    --capture.hidden-states.
    """
    initial: Path | None = None
    """Folder of the initial draft. It becomes version v000001 and is needed only while the registry
    is empty. For an MTP layer in the target's weights, use the target's folder.
    """
    adapter: str = ""
    """LoRA adapter whose requests train the draft; by default, requests without an adapter. Records
    of other adapters are counted as `other_adapter` and not stored.
    """


@dataclass(frozen=True, kw_only=True)
class Training:
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer. `muon` updates the draft's matrices with Muon and everything else with AdamW. Not
    available for sharded ranks.
    """
    lr: float = 1e-4
    """Learning rate, which is constant after the warm-up."""
    warmup_steps: int = 20
    """Number of steps over which the learning rate rises from 0, each time the optimizer is reset.
    """
    weight_decay: float = 0.0
    """Weight decay, AdamW style: each step shrinks the weights by this value times the learning
    rate.
    """
    max_grad_norm: float = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""
    divergence: str = "forward_kl"
    """Training loss: forward_kl, reverse_kl, jensen_shannon, total_variation, neg_log_alpha or
    lk_hybrid.
    """
    mixed_precision: Literal["no", "bf16"] | None = None
    """Precision of the forward and backward pass. The default is bf16 on a GPU with bfloat16 units,
    and the setting of `accelerate launch` elsewhere. "no" is float32. Weights and optimizer state
    stay in float32.
    """
    fresh_per_step: int = 4
    """Number of new records per optimizer step, in order of arrival. Each record counts as new only
    once.
    """
    replay_per_step: int = 28
    """Number of older records drawn again for each optimizer step, in addition to the new ones."""
    sequence_length: int = 4096
    """Maximum text length in tokens; longer texts lose their beginning. Use the served length: a
    draft trained on shorter texts fails beyond their length.
    """
    accumulation: int = 1
    """Number of micro-batches per optimizer step. Raise it if a step does not fit into memory."""
    records_per_candidate: int = 128
    """Number of new records to train on before a candidate is evaluated."""
    max_lag_records: int = 256
    """Maximum backlog of new records. If more are waiting, the oldest no longer count as new, but
    can still be replayed. After a shift in the traffic, a learner that is slower than its traffic
    trains on at most this many earlier records first.
    """
    max_skipped_share: float = 0.1
    """Discard a candidate if more than this fraction of its steps had a non-finite loss or
    gradient.
    """
    patience: int = 3
    """Number of candidates that are rejected, fail in the canary, or do not seem to gain
    `gate.min_gain`, before training restarts from the served version, after a sleep if
    `sleep.enabled`. A promotion resets the count.
    """
    save_every_s: float = 600
    """Seconds between checkpoints while a candidate is trained. There is always a checkpoint at the
    end.
    """
    seed: int = 0
    """Random seed for replay and packing."""

    def __post_init__(self) -> None:
        require_least(self, fresh_per_step=1, records_per_candidate=1, accumulation=1)
        require_least(self, patience=1, warmup_steps=1)
        if self.max_lag_records < self.fresh_per_step:
            raise SettingError(
                f"{{max_lag_records}} is {self.max_lag_records}: it must be at least "
                f"{{fresh_per_step}}, {self.fresh_per_step}"
            )
        if not (self.lr > 0 and self.max_grad_norm > 0):
            raise SettingError(
                f"{{lr}} is {self.lr} and {{max_grad_norm}} is {self.max_grad_norm}: "
                "both must be above 0"
            )


@dataclass(frozen=True, kw_only=True)
class Judging:
    num_speculative_tokens: int = 3
    """Number of draft tokens per step. Used only until a server reports its own number."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """How draft tokens are chosen: "greedy" chooses the most probable token, "probabilistic"
    samples. Used only until a server reports its own method.
    """
    held_out_per_domain: int = 200
    """Number of held-out requests per domain that a candidate is evaluated on; the newest ones are
    used. A prompt counts once, however often it was sent. The turns of a conversation are summed
    and count as one request.
    """
    domains: tuple[str, ...] = ()
    """Domains that are always evaluated separately. Because clients can invent domains, any domain
    not listed here is evaluated separately only if at least two tenants send it, or if there is
    only one tenant. All remaining domains count as one domain, `other`.
    """


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    folder: Path | None = field(default=None, metadata={"listed": False})
    """Folder for the buffer's files. With None, records are kept in this process's memory and are
    lost when it exits.
    """
    max_bytes: int = 8 << 30
    """Total size of the buffer's files in bytes. If the files exceed it, the oldest records are
    deleted, starting with records of tenants that exceed `tenant_share` of the bytes.
    """
    max_age_s: float = 7 * 86400
    """Maximum age of a record in seconds since it arrived at the learner; older records are
    deleted.
    """
    max_read_bytes: int = 192 << 20
    """Maximum size, in bytes, of new records in memory during a step; replayed records may take the
    same amount again. Only records with hidden states are large enough to reach this limit. A step
    then uses fewer records than `training` specifies; to avoid this, raise the limit to
    `training.replay_per_step` times the size of a record, at 2 bytes per number.
    """
    held_out_fraction: float = 0.2
    """Fraction of all conversations whose records are held out to evaluate candidates; a request
    without earlier or later turns is a conversation. A secret key in the folder selects them, so
    that clients cannot. With 0.2, the gate can give its first verdict within 200 conversations; a
    fleet with thousands of them per hour can use less.
    """
    tenant_share: float = 0.2
    """Maximum share of one tenant (X-Redraft-Tenant) in the held-out conversations that evaluate a
    candidate, in replayed records, and in the bytes of a full buffer. All requests without the
    header count as one tenant. If there are fewer than 1 / tenant_share tenants, each may have an
    equal share, so a single tenant may have everything. Set this to 1 if you trust all tenants.
    """

    def __post_init__(self) -> None:
        if not 0 < self.tenant_share <= 1:
            raise SettingError(
                f"{{tenant_share}} is {self.tenant_share}: it must be above 0 and at most 1"
            )
        if min(self.max_bytes, self.max_age_s, self.max_read_bytes) <= 0:
            raise SettingError("{max_bytes}, {max_age_s} and {max_read_bytes} must be above 0")
        if not 0 <= self.held_out_fraction < 1:
            raise SettingError(
                f"{{held_out_fraction}} is {self.held_out_fraction}: it must be at least 0 and below 1"
            )


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The weight with which `Buffer.replay` draws a record.

    The weight is 2^(-age / half_life) * (1 + surprise * r). Here r = (wrong + 1) / (drafted + 2) is
    the smoothed share of verified draft tokens that the target rejected; for a record without draft
    tokens, it is 1/2. Surprise is a weight rather than a filter, because a draft trained only on
    rejected positions adapts more slowly.
    """

    half_life_s: float = 3600
    """Age difference in seconds that halves the probability of drawing a record."""
    surprise: float = 4
    """Preference for records that the draft predicted poorly: a record whose draft tokens were all
    rejected is drawn up to (1 + this) times as often as one whose tokens were all accepted.
    """
