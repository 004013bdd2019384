"""Record what an untouched vLLM says, by a proxy in front of it: point the clients at this instead of at vLLM.

    $ redraft tap http://127.0.0.1:8000 --target /models/llama --spool spool --port 8001

vLLM returns at most --max-logprobs (20 unless told otherwise) probabilities a token. Drafts are unknown here, so these
records train a draft but tell nothing of its acceptance. In front of several servers, `redraft router` records too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from heads.artifact import fingerprint
from online.fleet import require_address
from online.pools import Pools
from online.proxy import Proxy, serve
from online.tap import Tap, TapConfig
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(TapConfig):
    upstream: Annotated[str, tyro.conf.Positional]
    """The vLLM server's address."""
    target: Path
    """Folder of the model that it serves: records name it by its fingerprint."""
    host: str = "127.0.0.1"
    port: int = 8001


def main(cfg: Config) -> None:
    require_address(cfg.upstream)
    proxy = Proxy(Pools(lambda: [(cfg.upstream, "")]), tap=Tap(cfg, fingerprint(cfg.target)))
    print(f"tap: http://{cfg.host}:{cfg.port}, in front of {cfg.upstream}", flush=True)
    serve(proxy.app(), cfg.host, cfg.port)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
