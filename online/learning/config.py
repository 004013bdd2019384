"""Settings of the draft, the buffer, training and of judging a candidate.

Loads no torch: every command reads them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    family: str = "standalone"
    """Family of the draft: standalone, eagle1, eagle3, peagle, mtp, dflash or dspark. A head learns
    from the target's hidden states, so for all but a standalone draft the servers must run with

    --capture.hidden-states.
    """
    initial: Path | None = None
    """Folder of the draft to start from. It becomes version v000001, and is needed only while the
    registry is empty. For an MTP layer in the target's weights, the target's folder.
    """
    adapter: str = ""
    """Name of the LoRA adapter whose requests train the draft; by default those without an adapter.
    The records of others are counted as `other_adapter`, and not stored.
    """


@dataclass(frozen=True, kw_only=True)
class Training:
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` moves the matrices of the draft by Muon, and everything else by AdamW. Not for sharded
    ranks.
    """
    lr: float = 1e-4
    """Learning rate; constant after the warm-up."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises from 0, each time the optimizer starts afresh."""
    weight_decay: float = 0.0
    """Weight decay: each step shrinks the weights by the learning rate times this."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm if it is larger."""
    divergence: str = "forward_kl"
    """Training loss: forward_kl, reverse_kl, jensen_shannon, total_variation, neg_log_alpha or
    lk_hybrid.
    """
    mixed_precision: Literal["no", "bf16"] | None = None
    """Precision of the forward and backward pass; by default bf16 on a GPU with bfloat16 units,
    elsewhere as `accelerate launch` says. "no" is float32. Weights and optimizer stay in
    float32.
    """
    fresh_per_step: int = 4
    """New records in each optimizer step, in order of arrival. Every record is new once."""
    replay_per_step: int = 28
    """Older records drawn again for each optimizer step, in addition to the new ones."""
    sequence_length: int = 4096
    """Longest text in tokens; a longer one loses the beginning. Use the served length: a draft
    trained on shorter texts fails beyond them.
    """
    accumulation: int = 1
    """Micro-batches per optimizer step. Raise it if a step does not fit into memory."""
    records_per_candidate: int = 128
    """New records to train on before a candidate is judged."""
    max_lag_records: int = 4096
    """Largest backlog of new records. If more wait, the oldest are never trained as new, but can
    still be replayed.
    """
    max_skipped_share: float = 0.1
    """A candidate is thrown away if more than this share of the steps had a non-finite loss or
    gradient.
    """
    patience: int = 3
    """After this many candidates that were rejected, or did not seem to gain `gate.min_gain`,
    training begins again from the served version, after a sleep if `sleep.enabled`. A promotion
    starts the count afresh.
    """
    save_every_s: float = 600
    """Seconds between checkpoints while a candidate is in training. The end always makes one."""
    seed: int = 0
    """Seed of the replay's draws and of packing."""

    def __post_init__(self) -> None:
        for name in (
            "fresh_per_step",
            "records_per_candidate",
            "accumulation",
            "patience",
            "warmup_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name} is {getattr(self, name)}: it must be at least 1")
        if not (self.lr > 0 and self.max_grad_norm > 0):
            raise ValueError(
                f"training.lr is {self.lr}, max_grad_norm {self.max_grad_norm}: both must be "
                "above 0"
            )


@dataclass(frozen=True, kw_only=True)
class Judging:
    num_speculative_tokens: int = 3
    """Number of tokens drafted per step. Used only while no server says how many it drafts."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """How draft tokens are picked: "greedy" takes the most probable one, "probabilistic" samples.
    Used only while no server says how it drafts.
    """
    held_out_per_domain: int = 200
    """A candidate is judged on this many held-out requests per domain, the newest ones. A prompt
    counts once, however often it was sent.
    """
    domains: tuple[str, ...] = ()
    """Domains to judge by themselves in any case. Clients can
    invent domains, so another one is judged by itself only if at least two tenants send it, or
    if there is just one tenant; the rest counts as one domain, `other`.
    """


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    folder: Path | None = field(default=None, metadata={"listed": False})
    """Folder of the buffer's files. None: records stay in this process's memory and end with it."""
    max_bytes: int = 8 << 30
    """Total size of the buffer's files, in bytes. Beyond it the oldest records go, first those that a
    tenant has beyond `tenant_share` of the bytes.
    """
    max_age_s: float = 7 * 86400
    """Records are deleted at the latest this many seconds after they arrived at the learner."""
    max_read_bytes: int = 192 << 20
    """Size limit of the records that are in memory at once, in bytes: a step's new ones, and as
    much of replayed ones. Only records with hidden states come near it. If they do, a step has
    fewer records than `training` asks for: raise this to `training.replay_per_step` times the
    size of a record, at 2 bytes per number.
    """
    held_out_fraction: float = 0.2
    """Share of all prompts whose records judge candidates and are never trained. A secret key in
    the folder decides which, so that no client can choose. With 0.2, the gate can give its first
    verdict within 200 requests; a fleet of thousands of requests an hour can do with less.
    """
    tenant_share: float = 0.2
    """Largest share of one tenant (X-Redraft-Tenant) among the held-out requests that judge a
    candidate, among replayed records, and of the bytes of a full buffer. All requests without a
    tenant are one tenant's. If there are fewer than 1 / tenant_share tenants, each may have an
    equal part, so a single one has everything. Set this to 1 if you trust all your tenants.
    """

    def __post_init__(self) -> None:
        if not 0 < self.tenant_share <= 1:
            raise ValueError(
                f"tenant_share is {self.tenant_share}: it must be above 0 and at most 1"
            )
        if min(self.max_bytes, self.max_age_s, self.max_read_bytes) <= 0:
            raise ValueError("max_bytes, max_age_s and max_read_bytes must be above 0")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(
                f"held_out_fraction is {self.held_out_fraction}: it must be at least 0 and below 1"
            )


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The weight of a record in `Buffer.replay`.

    The weight is 2^(-age / half_life) * (1 + surprise * r). Here r = (wrong + 1) / (drafted + 2) is
    the smoothed share of verified draft tokens that the target refused; a record without any gets
    1/2. Surprise is a weight rather than a filter, because training only on refused positions
    adapts more slowly.
    """

    half_life_s: float = 3600
    """A record is drawn half as often once it is this many seconds older."""
    surprise: float = 4
    """Preference for records the draft got wrong: one whose draft tokens were all rejected is drawn
    up to (1 + this) times as often as one whose draft tokens were all accepted.
    """
    anchor_share: float = 0.25
    """Share of `anchors` records among the replayed ones, against forgetting."""
