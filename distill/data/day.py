"""The date that some chat templates contain. A run has one date, and keeps it when it is resumed."""

import datetime
from pathlib import Path

from redraft.files.artifact import write_whole


def choose_day(date: str | None = None, flag: str = "--date") -> datetime.date:
    """Return the day given as YYYY-MM-DD, or today.

    The clock is read only once, because midnight may pass during a run.

    Raises:
        ValueError
    """
    if date is None:
        return datetime.date.today()
    try:
        return datetime.date.fromisoformat(date)
    except ValueError:
        raise ValueError(f"{flag} is {date!r}: give a date as YYYY-MM-DD") from None


def keep_day(path: Path) -> datetime.date:
    """Return the date stored in a file, which is created with today's date if it is missing.

    A resumed run therefore keeps its first day.
    """
    if not path.exists():
        write_whole(path, choose_day().isoformat())
    return choose_day(path.read_text(), str(path))
