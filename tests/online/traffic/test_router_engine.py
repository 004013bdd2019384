"""The router in front of a real vLLM.

Clients notice nothing, and the plugin's records carry the detected domain.
"""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from fake_completions import served
from test_router import CODE, PATH, TALE, clusters

from redraft.online.traffic.router import RouterConfig, build_router

__all__ = ["clusters"]

BODY = {
    "model": "m",
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


async def streamed(http, url, body):
    """Token ids of a streamed answer, and the id of the answer."""
    token_ids, answer_id = [], ""
    async with http.stream("POST", f"{url}{PATH}", json=body | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                answer_id = event["id"]
                token_ids += [
                    token for choice in event["choices"] for token in choice.get("token_ids") or []
                ]
    return {"id": answer_id, "choices": [{"token_ids": token_ids}]}


@pytest.mark.vllm
@pytest.mark.slow
def test_the_plugins_records_carry_the_domain_that_the_router_found(server, clusters, tmp_path):
    server.swap(server.copy)
    (tmp_path / "fleet.toml").write_text(f'[[servers]]\nurl = "{server.url}"\ndomain = "code"\n')

    async def main():
        config = RouterConfig(fleet=tmp_path / "fleet.toml", clusters=clusters)
        async with served(build_router(config)[0]) as front, httpx.AsyncClient(timeout=600) as http:
            url = f"http://127.0.0.1:{front.port}"
            through, direct = [], []
            for prompt in (CODE, TALE):
                answer = await http.post(f"{url}{PATH}", json=BODY | {"prompt": prompt})
                assert answer.headers["x-redraft-pool"] == "code"
                through += [answer.json(), await streamed(http, url, BODY | {"prompt": prompt})]
                direct += [
                    (await http.post(f"{server.url}{PATH}", json=BODY | {"prompt": prompt})).json()
                ] * 2
            return through, direct

    through, direct = asyncio.run(main())
    tokens = [
        [answer["choices"][0]["token_ids"] for answer in answers] for answers in (through, direct)
    ]
    assert tokens[0] == tokens[1]
    domains = {record.request_id: record.domain for record in server.records(through)}
    found = [
        next(domain for name, domain in domains.items() if name.startswith(answer["id"]))
        for answer in through
    ]
    assert found == ["code", "code", "prose", "prose"]
