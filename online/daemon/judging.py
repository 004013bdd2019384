"""Verdicts on drafts, based on held-out requests.

A candidate is compared with the current version, or the current version with the previous one.

These calls block; use them from the thread that owns the draft in training.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from redraft.engine.counts import AcceptanceCounts
from redraft.files.artifact import sha256, verify
from redraft.files.folder import read_config, weight_files
from redraft.online.daemon.config import LearnerConfig
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.server import Drafting, is_alarming
from redraft.online.learning.buffer import Buffer, Stored
from redraft.online.learning.candidate import Candidate, choose_reads
from redraft.online.learning.config import Judging
from redraft.online.learning.gate import Verdict, find_loss, judge
from redraft.online.learning.intake import count_acceptance
from redraft.online.learning.scoring import (
    Request,
    RequestScore,
    list_rows,
    pair_contexts,
    pair_scores,
    score_segment,
    sum_segments,
)
from redraft.online.learning.staleness import Row, find_past

# Maximum age of the requests used to evaluate an alarm, so that they represent current traffic.
RECENT_S = 86400.0
KEPT_DRAFTS = 2  # Number of drafts whose scores are kept: the current version and the candidate.


class Judge:
    def __init__(
        self, cfg: LearnerConfig, registry: Registry, buffer: Buffer, candidate: Candidate
    ) -> None:
        self.cfg, self.registry, self.buffer, self.candidate = cfg, registry, buffer, candidate
        # Updated with the servers' drafting settings once a server reports them.
        self.judging = cfg.judging
        self._scores: dict[str, dict[int, tuple[Request, RequestScore]]] = {}
        """Scores by draft and drafting settings, then by the record's sequence number. A promoted
        candidate is the current version in the next comparison, which uses some of the same
        records.
        """

    def draft_as(self, servers: Counter[Drafting]) -> str:
        """Use the drafting settings of most servers from now on, and return a description.

        `servers` counts the servers by their drafting settings.
        """
        self.judging, drafting = choose_judging(self.judging, servers)
        return drafting

    def forget(self) -> None:
        """Discard the scores, which contain tenant names."""
        # Replace the dict, because `score` may be using the old one on another thread.
        self._scores = {}

    def judge_draft(self, draft: Path, incumbent: str, look: int) -> Verdict:
        """The gate's verdict on the draft in a folder, compared with the version `incumbent`."""
        seqs, theirs = self._score_served(self.registry.path(incumbent))
        ours = self.score(draft, seqs)
        candidate, served, domains, modes = pair_scores(ours, theirs, self.buffer.refresh_names())
        contexts = pair_contexts(ours, theirs)
        return judge(candidate, served, domains, self.cfg.gate, look, modes, contexts)

    def score_since(self, version: str, after: int) -> tuple[int, list[Row]]:
        """A version's scores on the held-out records after sequence number `after`.

        Returns (newest record, one row per conversation). There are no rows if fewer than
        `gate.min_requests` such records exist, or if the version cannot be read.
        """
        seqs = self.select_requests()
        if sum(seq > after for seq in seqs) < self.cfg.gate.min_requests:
            return after, []
        folder = self.registry.path(version)
        try:
            verify(folder)
        except (OSError, ValueError):  # the watch handles damaged versions
            return after, []
        scores = self.score(folder, seqs, after)
        return max(seqs), list_rows(scores.values(), self.buffer.refresh_names())

    def find_loss(self, current: str, previous: str, look: int) -> tuple[bool, str]:
        """Whether the current version is proven worse than the previous one on today's traffic.

        The reason is also returned. The servers' counters are not used for this, because they
        include the requests of all clients. `look` is 1 for the first comparison after a promotion,
        2 for the next one, and so on.

        Raises:
            OSError, ValueError: a version is missing or damaged.
        """
        folders = [self.registry.path(version) for version in (current, previous)]
        for folder in folders:
            verify(folder)  # loading a damaged draft may raise any exception
        seqs, ours = self._score_served(folders[0], since_s=self.buffer.now_s - RECENT_S)
        theirs = self.score(folders[1], seqs)
        # Each check makes two comparisons, which share the error probability.
        is_worse, numbers = find_loss(*pair_scores(ours, theirs)[:2], self.cfg.gate, 2 * look - 1)
        if is_worse:
            return True, f"on held-out requests it is worse than {previous}: {numbers}"
        is_refused, served_numbers = self._find_refused(current, theirs, seqs, 2 * look)
        if is_refused:
            return (
                True,
                "on held-out requests the engine accepts hardly any of its draft tokens, "
                f"unlike those of {previous}: "
                f"{served_numbers}",
            )
        return False, f"on held-out requests it is not proven worse than {previous}: {numbers}"

    def _find_refused(
        self, current: str, theirs: dict[Request, RequestScore], seqs: Sequence[int], look: int
    ) -> tuple[bool, str]:
        """Whether the engine rejects the tokens of a draft with good weights.

        For example, the engine may run the draft incorrectly. Scores of the draft cannot show that,
        but the records contain the draft tokens that the engine accepted. The supporting numbers
        are returned too.
        """
        served = count_served(self.buffer.read(seqs), current)
        # Measured counts paired with expected ones, over the requests served by this version.
        paired = pair_scores(
            {key: RequestScore("", counts) for key, counts in served.items()}, theirs
        )
        if not is_alarming(sum(paired[0], AcceptanceCounts.zero())):
            return False, ""
        return find_loss(*paired[:2], self.cfg.gate, look)

    def select_requests(self, **limits: float) -> list[int]:
        return self.buffer.select_held_out(
            self.judging.held_out_per_domain,
            at_least=self.cfg.gate.min_requests,
            at_least_of_domain=self.cfg.gate.min_domain_requests,
            **limits,
        )

    def _score_served(
        self, folder: Path, **limits: float
    ) -> tuple[list[int], dict[Request, RequestScore]]:
        """Return the records used for the evaluation, and the served draft's scores on them.

        Records of other target weights are excluded if the draft is proven better or worse on them
        than on records of the current weights.
        """
        # Chosen once, because the scores of two drafts are paired by request.
        seqs = self.select_requests(**limits)
        scores = self.score(folder, seqs)
        names, newest = self.buffer.refresh_names(), list(scores.values())[::-1]
        targets = dict.fromkeys([self.buffer.served_target(), *(one.target for one in newest)])
        rows = {
            target: list_rows([one for one in newest if one.target == target], names)
            for target in targets
        }
        past = find_past(rows, self.cfg.sleep, self.cfg.gate)
        if not past:
            return seqs, scores
        self.buffer.leave_behind(past)
        seqs = self.select_requests(**limits)
        return seqs, self.score(folder, seqs)

    def score(
        self, folder: Path, seqs: Sequence[int], after: int = 0
    ) -> dict[Request, RequestScore]:
        """Return a draft's scores on the records in `seqs` with numbers above `after`.

        Records that were scored in the previous call are not scored again.
        """
        # Another thread may replace both in the meantime.
        judging, scores = self.judging, self._scores
        files = [folder / "config.json", *weight_files(folder)]
        name = " ".join([*map(sha256, files), repr(judging)])
        known = scores.pop(name, {})
        missing = [seq for seq in seqs if seq not in known]
        known |= self._score_segments(folder, missing, judging) if missing else {}
        # Keep only the records of this call, because others may be deleted or no longer among the
        # newest.
        kept = scores[name] = {seq: known[seq] for seq in seqs if seq in known}
        for oldest in [*scores][:-KEPT_DRAFTS]:
            del scores[oldest]
        return sum_segments(segment for seq, segment in kept.items() if seq > after)

    def _score_segments(
        self, folder: Path, seqs: Sequence[int], judging: Judging
    ) -> dict[int, tuple[Request, RequestScore]]:
        draft = self.candidate.load(folder).eval()
        if self.candidate.accelerator.device.type == "cpu":
            draft = draft.float()
        reads = choose_reads(self.candidate.family, draft)
        needed_states = self.candidate.family.needed_states(read_config(folder))
        scores = {}
        for stored in self.buffer.read(seqs):
            self.candidate.pause()
            request, scored = score_segment(
                draft,
                stored.record,
                num_speculative_tokens=judging.num_speculative_tokens,
                method=judging.draft_sample_method,
                sequence_length=self.candidate.cfg.sequence_length,
                reads=reads,
                needed_states=needed_states,
                device=self.candidate.accelerator.device,
            )
            scores[stored.seq] = stored.conversation_key or request, scored
        return scores


def choose_judging(latest: Judging, servers: Counter[Drafting]) -> tuple[Judging, str]:
    """Choose the settings to judge with; return them with a description of their source.

    The settings of most servers are chosen. If no server responds, the latest settings stay in
    effect: the ones that servers reported last, or otherwise the configured ones.
    """
    if not servers:
        stays = Drafting(latest.num_speculative_tokens, latest.draft_sample_method)
        return latest, f"{stays}, unchanged, because no server reports its drafting settings"
    # If several settings are equally common, take those that draft less, so that the verdict does
    # not depend on the order of the servers' responses.
    chosen = min(servers, key=lambda drafting: (-servers[drafting], drafting))
    source = f"{chosen}, the drafting settings of {servers[chosen]} of {servers.total()} servers"
    return replace(latest, **asdict(chosen)), source if len(
        servers
    ) > 1 else f"{chosen}, the servers' drafting settings"


def count_served(records: Iterable[Stored], version: str) -> dict[Request, AcceptanceCounts]:
    """Return the engine's acceptance of this version's drafts, by conversation."""
    counts: dict[Request, AcceptanceCounts] = {}
    for stored in records:
        record = stored.record
        if record.draft_version == version:
            key = stored.conversation_key or (record.server_id, record.request_id)
            counts[key] = counts.get(key, AcceptanceCounts.zero()) + count_acceptance(record)
    return counts
