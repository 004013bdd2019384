"""The shipped log on a real nats-server: who may hear, publish and delete there."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shlex
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import nats
import pytest
import yaml
from real_broker import Broker, running_broker
from run_stream import TARGET, VOCAB, make_record

from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig
from redraft.online.learning.stream import StreamSource
from redraft.online.records.nats_config import Nats, StreamLimits
from redraft.online.records.nats_link import BrokerError, connect, probe
from redraft.online.records.publisher import Publisher
from redraft.online.records.record import encode_frame
from redraft.recipes.operate import log_keys

DEPLOY = Path(__file__).parents[2] / "recipes" / "deploy"
FLEET = "compose"
STREAM = f"redraft-{FLEET}"

numbers = itertools.count()
"""The log takes a record that it has seen already for a duplicate."""


def read_configuration(where: str) -> str:
    if where == "compose":
        return (DEPLOY / "compose" / "nats.conf").read_text()
    first, *_ = yaml.safe_load_all((DEPLOY / "kubernetes" / "log.yaml").read_text())
    return first["data"]["nats.conf"]


def documented_command(file: str) -> str:
    """The command that makes the certificate."""
    on_one_line = re.sub(r"\\\n[# ]*", "", (DEPLOY / file).read_text())
    (found,) = re.findall(r"openssl req .*", on_one_line)
    return found


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner's end of an empty log waits for a record in each `take`."""
    monkeypatch.setattr("redraft.online.learning.stream.WAIT_S", 0.1)


@pytest.fixture(scope="module", params=["compose", "kubernetes"])
def log(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("log")
    log_keys.main(log_keys.KeysConfig(folder=folder))
    command = documented_command("compose/compose.yaml").replace("keys/", f"{folder}/")
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    with running_broker(folder / "store", shipped=read_configuration(request.param)) as broker:
        yield broker


def user(log: Broker, name: str) -> Nats:
    """The settings of `servers` or `learner`, as the shipped files give them."""
    folder = log.folder.parent
    return Nats(fleet=FLEET, credentials=folder / f"{name}.nk", ca=folder / "tls.crt")


def address(log: Broker) -> str:
    return log.url.replace("nats://", "tls://")


def trust(log: Broker) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=log.folder.parent / "tls.crt")
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # Python 3.13's default
    return context


async def publish(log: Broker, num_records: int) -> None:
    publisher = Publisher(address(log), user(log, "servers"))
    publisher.write(
        [encode_frame(make_record(number)) for number in itertools.islice(numbers, num_records)]
    )
    deadline_s = time.monotonic() + 300
    while publisher.counts["published_records"] < num_records:
        assert time.monotonic() < deadline_s, publisher.status()
        await asyncio.sleep(0.02)
    await asyncio.to_thread(publisher.close)


async def open_stream(log: Broker, buffer: Buffer) -> StreamSource:
    source = StreamSource(
        address(log), user(log, "learner"), StreamLimits(max_bytes=64 << 20), buffer, VOCAB
    )
    await source.take()  # makes the stream
    return source


async def take_all(source: StreamSource, log: Broker) -> int:
    """Take until the log is empty, and return the number of records stored in the buffer."""
    num_stored = 0
    while await count_stored(log):
        num_stored += (await source.take()).counts["stored"]
    return num_stored


async def count_stored(log: Broker) -> int:
    client = await connect(address(log), user(log, "learner"), "learner")
    info = await client.jetstream().stream_info(STREAM)
    await client.close()
    return info.state.messages


def test_the_certificate_is_made_the_same_way_everywhere() -> None:
    assert documented_command("compose/compose.yaml") == documented_command("kubernetes/README.md")


def test_records_go_from_the_servers_to_the_learner_and_the_probe_passes(log: Broker) -> None:
    async def run() -> None:
        with Buffer(BufferConfig(held_out_fraction=0), TARGET) as buffer:
            source = await open_stream(log, buffer)
            await probe(address(log), user(log, "servers"))
            await publish(log, 20)
            assert await take_all(source, log) == 20
            assert source.faults == [], "the learner's key may overwrite"
            await source.close()
        assert await count_stored(log) == 0

    asyncio.run(run())


def test_a_renewed_certificate_and_new_keys_need_a_restart_of_the_log_alone(tmp_path: Path) -> None:
    def make_secrets() -> None:
        for old in tmp_path.glob("*.nk"):
            old.unlink()
        (tmp_path / "users.conf").unlink(missing_ok=True)
        log_keys.main(log_keys.KeysConfig(folder=tmp_path))
        command = documented_command("kubernetes/README.md").replace("keys/", f"{tmp_path}/")
        subprocess.run(shlex.split(command), check=True, capture_output=True)

    async def run() -> None:
        configuration = read_configuration("kubernetes")
        with (
            running_broker(tmp_path / "store", shipped=configuration) as broker,
            Buffer(BufferConfig(held_out_fraction=0), TARGET) as buffer,
        ):
            source = await open_stream(broker, buffer)
            publisher = Publisher(address(broker), user(broker, "servers"))
            num_stored = 0
            for round_number in (1, 2):
                publisher.write([encode_frame(make_record(next(numbers))) for _ in range(5)])
                async with asyncio.timeout(300):
                    while num_stored < 5 * round_number:
                        with suppress(BrokerError):
                            num_stored += (await source.take()).counts["stored"]
                if round_number == 1:
                    await asyncio.to_thread(make_secrets)
                    broker.restart()
            await asyncio.to_thread(publisher.close)
            assert publisher.counts["published_records"] == num_stored == 10
            await source.close()

    make_secrets()
    asyncio.run(run())


def test_nobody_connects_without_a_key_or_without_tls(log: Broker) -> None:
    async def run() -> None:
        for tls in (None, trust(log)):
            with pytest.raises((nats.errors.Error, OSError)):
                await nats.connect(
                    log.url, tls=tls, allow_reconnect=False, max_reconnect_attempts=1
                )
        with pytest.raises(BrokerError, match="Authorization"):
            await connect(address(log), Nats(fleet=FLEET, ca=user(log, "servers").ca))

    asyncio.run(run())


def test_a_client_that_asks_before_it_says_who_it_is_hears_nothing(log: Broker) -> None:
    async def run() -> None:
        with Buffer(BufferConfig(held_out_fraction=0), TARGET) as buffer:
            await (await open_stream(log, buffer)).close()
        before = await count_stored(log)
        reader, writer = await asyncio.open_connection("127.0.0.1", log.port)
        await reader.readline()
        await writer.start_tls(trust(log))
        delete = f"PUB $JS.API.STREAM.DELETE.{STREAM} 0\r\n\r\n"
        writer.write(
            f"SUB redraft.> 1\r\n{delete}CONNECT {json.dumps({'verbose': False})}\r\nPING\r\n".encode()
        )
        await publish(log, 3)
        answer = await asyncio.wait_for(reader.read(), 120)  # to the end: the broker hangs up
        assert b"MSG" not in answer
        assert b"Authorization Violation" in answer
        assert await count_stored(log) == before + 3

    asyncio.run(run())


def test_the_servers_key_cannot_read_a_record_or_touch_the_stream(log: Broker) -> None:
    async def run() -> None:
        with Buffer(BufferConfig(held_out_fraction=0), TARGET) as buffer:
            source = await open_stream(log, buffer)
            refused: list[str] = []

            async def note(error: Exception) -> None:
                refused.append(str(error))

            seed = str(log.folder.parent / "servers.nk")
            client = await nats.connect(
                log.url,
                nkeys_seed=seed,
                tls=trust(log),
                error_cb=note,
                inbox_prefix="_INBOX.servers",
            )
            heard: list[bytes] = []

            async def keep(message: nats.aio.msg.Msg) -> None:
                heard.append(message.data)

            ears = [
                ">",
                "redraft.>",
                "_INBOX.>",
                "_INBOX.learner.>",
                "$JS.>",
                "$JS.API.CONSUMER.MSG.NEXT.>",
            ]
            for subject in ears:
                await client.subscribe(subject, cb=keep)
            deadline_s = time.monotonic() + 300
            while len(refused) < len(ears):
                assert time.monotonic() < deadline_s, refused
                await asyncio.sleep(0.02)
            await publish(log, 5)
            assert await take_all(source, log) >= 5, "records went by, to the learner's inbox"
            await source.close()
            await publish(log, 5)
            verbs = [
                "STREAM.DELETE",
                "STREAM.PURGE",
                "STREAM.MSG.GET",
                "STREAM.UPDATE",
                "CONSUMER.CREATE",
                "DIRECT.GET",
            ]
            for verb in [*verbs, "DIRECT.GET", "CONSUMER.NAMES", "STREAM.MSG.DELETE"]:
                with pytest.raises(nats.errors.TimeoutError):
                    await client.request(
                        f"$JS.API.{verb}.{STREAM}", b'{"last_by_subj":"redraft.>"}', timeout=0.2
                    )
            await client.close()
            assert heard == []
            assert await count_stored(log) == 5

    asyncio.run(run())


def test_the_learners_key_forges_no_record(log: Broker) -> None:
    async def run() -> None:
        with Buffer(BufferConfig(held_out_fraction=0), TARGET) as buffer:
            await (await open_stream(log, buffer)).close()
        before = await count_stored(log)
        client = await connect(address(log), user(log, "learner"), "learner")
        with pytest.raises(nats.errors.TimeoutError):
            await client.jetstream(timeout=0.3).publish(f"redraft.{FLEET}.all", b"forged")
        await client.close()
        assert await count_stored(log) == before

    asyncio.run(run())


def test_keys_are_readable_by_their_owner_only_and_are_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    log_keys.main(log_keys.KeysConfig(folder=folder))
    seeds = {name: (folder / f"{name}.nk").read_bytes() for name in ("servers", "learner")}
    for name in seeds:
        assert (folder / f"{name}.nk").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        log_keys.main(log_keys.KeysConfig(folder=folder))
    assert {name: (folder / f"{name}.nk").read_bytes() for name in seeds} == seeds


def test_keys_in_a_folder_of_others_leave_its_mode_and_are_written_all_or_none(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "users.conf").touch()
    with pytest.raises(FileExistsError, match=r"users\.conf exists"):
        log_keys.main(log_keys.KeysConfig(folder=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["users.conf"]
    (tmp_path / "users.conf").unlink()
    log_keys.main(log_keys.KeysConfig(folder=tmp_path))
    assert tmp_path.stat().st_mode & 0o777 == 0o755
