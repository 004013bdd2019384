"""The error for a refused setting, which each source of settings names in its own way.

raise SettingError(f"{{max_run}} is {value}: it must be between 1 and 16")

in Python               max_run is 0: it must be between 1 and 16
redraft data count      --retrieval.max-run is 0: it must be between 1 and 16
"""

import re
from collections.abc import Callable
from typing import Any

_NAME = re.compile(r"\{([a-z][\w.]*)\}")


class SettingError(ValueError):
    """A refused setting. In its message, the names of config fields are in braces.

    A name may begin with the name of its table, e.g. `{nats.fleet}`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_NAME.sub(r"\1", message))
        self.message = message

    def spell(self, name: Callable[[str], str]) -> str:
        """Return the message, with the name that `name` returns for each field."""
        return _NAME.sub(lambda found: name(found[1].rpartition(".")[2]), self.message)


def require_least(config: Any, **least: float) -> None:
    """Raise SettingError if a number in a config is below its minimum.

    A value of None passes.
    """
    for name, number in least.items():
        if (value := getattr(config, name)) is not None and not value >= number:
            raise SettingError(f"{{{name}}} is {value}: it must be at least {number}")
