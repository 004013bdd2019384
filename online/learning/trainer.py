"""Continual training.

The trainer chooses the records of each step, tracks the progress through them, and keeps
checkpoints to survive a kill.

    buffer.fresh(through) ─┐
    buffer.replay ─────────┴─► Candidate.step ─► ... ─► checkpoint published ─► commit(checkpoint, through)

A checkpoint counts once the buffer has committed it together with the sequence number training had
reached. So every record is trained on as new exactly once, even across kills, either before the
resumed checkpoint or after it.
"""

import math
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from redraft.distill.train.step import StepStats
from redraft.files.artifact import publishing, verify
from redraft.heads.provenance import read_provenance
from redraft.online.fleet.registry import Registry
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.candidate import Candidate, Ranks
from redraft.online.learning.config import Replay, Training
from redraft.online.learning.cursor import SERVED, Commit
from redraft.online.records.record import Record

KEPT_CHECKPOINTS = 2
_NAME = re.compile(r"checkpoint-\d+")


def _number(checkpoint_id: str) -> int:
    return int(checkpoint_id.removeprefix("checkpoint-"))


@dataclass(kw_only=True)
class Progress:
    through: int = 0
    """Records up to this number have been skipped, or used for training as new records."""
    records: int = 0
    """Number of records trained on as new, including records for discarded drafts; 0 if there is no
    checkpoint.
    """
    skipped: int = 0
    """Number of records skipped because training was slower than traffic."""
    until_s: float = 0.0
    """Time of the last step. Records that arrived later have not been trained on."""


class Trainer:
    """Picks the records, drives the candidate on all ranks and keeps checkpoints.

    All methods block, and must be called from one thread.
    """

    def __init__(
        self,
        cfg: Training,
        replay: Replay,
        buffer: Buffer,
        registry: Registry,
        candidate: Candidate,
        folder: Path,
    ) -> None:
        self.cfg, self.replay, self.buffer, self.registry = cfg, replay, buffer, registry
        self.candidate, self.ranks, self.folder = candidate, Ranks(candidate), folder
        self.progress = Progress()
        self.num_steps = self.num_not_finite = 0  # Steps since the last checkpoint or discard.
        self.waited_s = 0.0  # Mean age of the last step's fresh records when it began.
        # Duration of the last step, and the part of it in which the step paused for running
        # requests.
        self.step_s = self.paused_s = 0.0
        self.damage: list[str] = []  # one message for each checkpoint that could not be resumed

    def start(self) -> str:
        """Resume the newest intact checkpoint and return its name.

        If there is none, start at the served version and return SERVED.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        commits = self.buffer.commits() or self._recover_commits()
        for commit in commits:  # newest first
            folder = self.folder / commit.checkpoint_id
            if commit.checkpoint_id == SERVED:
                self.progress = Progress(through=commit.through)
                break
            if self._is_intact(folder):
                self.ranks.do(Candidate.resume, self.registry.current_path(), folder)
                self.progress = msgspec.convert(read_provenance(folder).progress, Progress)
                # A later commit may have assigned the same checkpoint a later position, and a new
                # buffer starts at 0.
                self.progress.through = commit.through
                return commit.checkpoint_id
        else:
            # No checkpoint is left, e.g. because its folder was removed. The records have been
            # trained on nevertheless.
            self.progress = Progress(through=commits[0].through if commits else 0)
        self.ranks.do(Candidate.begin, self.registry.current_path())
        return SERVED

    def _recover_commits(self) -> list[Commit]:
        """Recover commits from the checkpoints, newest first, and then from the registry.

        They are used if the buffer has lost its list or is new.
        """
        # In this case, every run starts at the served version.
        if self.buffer.config.folder is None:
            return []
        ends = filter(math.isfinite, self.registry.list_training_ends().values())
        found = [(SERVED, int(max(ends, default=0)))]
        for folder in filter(self._is_intact, self._checkpoints()):
            found.append(
                (folder.name, msgspec.convert(read_provenance(folder).progress, Progress).through)
            )
        # The position is from a buffer that was removed, so it has no meaning.
        newest = self.buffer.newest()
        return [
            Commit(checkpoint_id=name, through=min(through, newest))
            for name, through in reversed(found)
        ]

    def _is_intact(self, checkpoint: Path) -> bool:
        try:
            verify(checkpoint)
        except (ValueError, OSError) as error:
            self.damage.append(f"training cannot continue from {checkpoint.name}: {error}")
            return False
        return True

    def lag(self) -> int:
        """The number of training records that have not been trained on yet."""
        return self.find_waiting()[1]

    def oldest_untrained(self) -> Record | None:
        return next((stored.record for stored in self.buffer.fresh(self.progress.through, 1)), None)

    def find_waiting(self) -> tuple[int, int]:
        """Return the number of the newest training record, and how many were not trained on yet."""
        return self.buffer.bound_lag(self.progress.through, 0)

    def step(self) -> StepStats | None:
        """Take one optimizer step on the next fresh records and on replayed ones.

        Returns None if too few fresh records are waiting.
        """
        through, num_skipped = self.buffer.bound_lag(
            self.progress.through, self.cfg.max_lag_records
        )
        self.progress.through, self.progress.skipped = through, self.progress.skipped + num_skipped
        fresh = self.buffer.fresh(through, self.cfg.fresh_per_step)
        # If records are large, a step takes fewer of them. In that case, more records are waiting,
        # and the step is run.
        if len(fresh) < self.cfg.fresh_per_step and not (
            fresh and self.lag() >= self.cfg.fresh_per_step
        ):
            return None
        began_s, paused_s = time.monotonic(), self.candidate.paused_s
        ages_s = [time.time() - stored.record.time_s for stored in fresh]
        # A server's clock may be ahead of the learner's.
        self.waited_s = max(0.0, fmean(ages_s))
        # The seed depends only on the position, so a step repeated after a kill draws the same
        # records. The factor keeps seeds apart: two sums are equal only for positions 1,000,003
        # apart.
        seed = self.cfg.seed * 1_000_003 + through
        replayed = self.buffer.replay(
            self.cfg.replay_per_step,
            through=through,
            now_s=time.time(),
            seed=seed,
            policy=self.replay,
        )
        stats = self.ranks.do(
            Candidate.step, [*(stored.record for stored in fresh), *replayed], seed
        )
        self.progress.through, self.progress.until_s = fresh[-1].seq, time.time()
        self.progress.records += len(fresh)
        self.num_steps += 1
        self.num_not_finite += stats.skipped
        self.step_s = time.monotonic() - began_s
        self.paused_s = self.candidate.paused_s - paused_s
        return stats

    @property
    def has_diverged(self) -> bool:
        """Whether more steps were non-finite than is allowed for a candidate."""
        # By default, a candidate has 128 // 4 = 32 steps, so the fourth non-finite step is too
        # many: 4 / 32 > 0.1.
        share = self.num_not_finite / max(
            1, self.cfg.records_per_candidate // self.cfg.fresh_per_step
        )
        return share > self.cfg.max_skipped_share or self.candidate.is_hopeless

    def checkpoint(self) -> str:
        """Write and commit a checkpoint; return its name.

        If this raises an error, the last checkpoint still counts.

        Raises:
            NotFiniteError: the weights are not finite.
            OSError: a disk is full.
        """
        name = f"checkpoint-{self._next_number():06d}"
        # The files are written before the commit: a kill in between leaves a checkpoint that does
        # not count.
        began = {"progress": vars(self.progress), "began_from": self.candidate.version.name}
        with publishing(self.folder / name, began) as new:
            self.ranks.do(Candidate.write, new.path)
        try:
            self.buffer.commit_trained(name, self.progress.through)
        except OSError:
            # The buffer may be on another disk: each new attempt would leave a checkpoint on this one.
            shutil.rmtree(self.folder / name, ignore_errors=True)
            raise
        self.num_steps = self.num_not_finite = 0
        for old in self._checkpoints()[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)
        return name

    def discard(self) -> None:
        """Go back to the last checkpoint.

        The records trained on since then do not become new again, because they may be the cause.
        """
        newest = next(iter(self.buffer.commits()), None)
        through, name = self.progress.through, newest.checkpoint_id if newest else SERVED
        if name != SERVED and self._is_intact(self.folder / name):
            self.ranks.do(Candidate.resume, self.registry.current_path(), self.folder / name)
            # Commit the same checkpoint again at the present position, so that the records in
            # between are not trained on as new.
            self.buffer.commit_trained(name, through)
        else:
            self.begin_again()
        self.num_steps = self.num_not_finite = 0

    def give_up(self) -> None:
        """Ensure that no later start resumes the draft in training.

        May be called from any thread.
        """
        self.buffer.commit_trained(SERVED, self.progress.through)

    def begin_again(self) -> None:
        """Restart training from the served version.

        Records that were already trained on still count as trained.
        """
        self.give_up()
        self.num_steps = self.num_not_finite = 0
        self.ranks.do(Candidate.begin, self.registry.current_path())
        # This comes after the commit: a kill in between leaves folders that the newest commit does
        # not name.
        for (
            checkpoint
            # Never resumed again, e.g. because a user wants this training undone.
        ) in self._checkpoints():
            shutil.rmtree(checkpoint, ignore_errors=True)

    def pass_over(self, through: int) -> None:
        """Leave the records up to this sequence number out of training.

        They can still be replayed.
        """
        self.progress.through = through
        newest = next(iter(self.buffer.commits()), None)
        self.buffer.commit_trained(newest.checkpoint_id if newest else SERVED, through)

    def _checkpoints(self) -> list[Path]:
        found = (path for path in self.folder.glob("checkpoint-*") if _NAME.fullmatch(path.name))
        return sorted(found, key=lambda path: _number(path.name))

    def _next_number(self) -> int:
        # Include the commits, because their folders may have been removed, and a name is never used
        # twice.
        names = [path.name for path in self._checkpoints()]
        names += [
            commit.checkpoint_id
            for commit in self.buffer.commits()
            if _NAME.fullmatch(commit.checkpoint_id)
        ]
        return 1 + max(map(_number, names), default=0)
