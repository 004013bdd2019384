"""When the learner sleeps.

The served draft is compared with its own results at its promotion. The measurement survives a kill.
"""

from dataclasses import asdict, replace
from pathlib import Path

from redraft.files.sealed import read_sealed_as, write_sealed
from redraft.online.daemon.account import Account
from redraft.online.daemon.config import LearnerConfig
from redraft.online.daemon.judging import Judge
from redraft.online.learning.staleness import Row, Sleep, Staleness, compare


class Sleeper:
    def __init__(self, cfg: LearnerConfig, judge: Judge, account: Account) -> None:
        self.cfg, self.judge, self.account = cfg, judge, account
        self._path = cfg.folder / "sleep.json"
        # Being awake is always safe: training that is not worth it only costs time.
        self.sleep = account.load_or_set_aside(
            load_sleep, self._path, Sleep(), "the learner is awake and measures a new reference"
        )
        if self.sleep.through > judge.buffer.newest():
            # The buffer is new, e.g. after a restart without retention, and numbers its records from 1.
            # All of them are newer than the reference.
            self.sleep = replace(self.sleep, through=0)
        self._new_rows: list[Row] = []  # last measurement on the newest held-out requests

    @property
    def num_steps_saved(self) -> int:
        """Optimizer steps not taken because the learner slept."""
        return self.sleep.num_saved // self.cfg.training.fresh_per_step

    def measure(self, version: str) -> Staleness | None:
        """Compare the served version on new held-out requests with its reference measurement.

        If there is no reference, measure one and return None.
        """
        judging = self.judge.judging
        drafting = f"{judging.num_speculative_tokens} {judging.draft_sample_method}"
        has_reference = (self.sleep.version, self.sleep.drafting) == (version, drafting)
        newest, rows = self.judge.score_since(version, self.sleep.through if has_reference else 0)
        if len(rows) < self.cfg.gate.min_requests:
            return None
        self._new_rows = rows
        if has_reference:
            return compare(self.sleep.then, rows, self.cfg.sleep, self.cfg.gate)
        # This runs on the trainer's thread. The cycle waits for it, and nothing else writes
        # `sleep`.
        self.sleep = self.sleep.refer(version, newest, rows, drafting)
        return None

    def find_reason_to_wake(self, staleness: Staleness | None, num_waiting: int) -> str:
        """Return the reason to train on the `num_waiting` untrained records, or an empty string."""
        return self.sleep.find_reason_to_wake(
            staleness, num_waiting, self.cfg.sleep, self.cfg.training.records_per_candidate
        )

    def fall_asleep(self, version: str) -> None:
        """Sleep after several candidates without a gain, if the settings enable it."""
        # Without a reference for this version, a drop in acceptance would go unnoticed.
        if self.cfg.sleep.enabled and self.sleep.version == version:
            reason = (
                f"{self.cfg.training.patience} candidates without a gain: the served "
                "draft is good enough"
            )
            self.save(self.sleep.fall_asleep(self._new_rows), version, None, reason)

    def save(self, sleep: Sleep, version: str, staleness: Staleness | None, reason: str) -> None:
        """Save the sleep state, and record it in the journal with the numbers that led to it."""
        self.sleep = sleep
        try:
            save_sleep(sleep, self._path)
        except OSError as error:  # a restart then loses only this part of the sleep
            self.account.disk_fault(error)
        self.account.staleness(
            version,
            staleness,
            is_asleep=sleep.is_asleep_at(version),
            steps_saved=self.num_steps_saved,
            reason=reason,
        )


def save_sleep(sleep: Sleep, path: Path) -> None:
    write_sealed(path, asdict(sleep))


def load_sleep(path: Path) -> Sleep:
    """Load the last saved sleep state; awake and without a reference if none was saved.

    Raises the same errors as `read_sealed_as`.
    """
    return read_sealed_as(path, Sleep, Sleep())
