"""The ingest log on a real nats-server: every record a server sends arrives in the buffer, once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import threading
import time
from collections import Counter
from itertools import count

import nats
import nkeys
import numpy as np
import pytest
from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError
from real_broker import running_broker
from run_stream import TARGET, VOCAB, make_record
from waiting import PATIENCE_S, in_event_loop, until

from redraft.online.learning.buffer import Buffer
from redraft.online.learning.buffer_file import BufferFullError
from redraft.online.learning.config import BufferConfig
from redraft.online.learning.stream import StreamSource
from redraft.online.records import publisher as publisher_module
from redraft.online.records.nats_config import Nats, StreamLimits, hide_credentials, parse_addresses
from redraft.online.records.nats_link import BrokerError, connect, probe
from redraft.online.records.publisher import Publisher
from redraft.online.records.record import Frame, decode_record, encode_frame, encode_record

fleets = count()


@pytest.fixture
def nats_config():
    """A separate stream for every test on the one broker."""
    return Nats(fleet=f"fleet-{next(fleets)}")


@pytest.fixture
def buffer():
    with Buffer(BufferConfig(held_out_fraction=0), TARGET) as buffer:
        yield buffer


def make_source(broker, config, buffer, **limits):
    return StreamSource(
        broker.url, config, StreamLimits(**{"max_bytes": 64 << 20} | limits), buffer, VOCAB
    )


async def publish(broker, config, *records):
    """Wait until all of them are acknowledged."""
    publisher = Publisher(broker.url, config)
    publisher.write([encode_frame(record) for record in records])
    await until(
        lambda: publisher.counts["published_records"] == len(records), about=publisher.status
    )
    await asyncio.to_thread(publisher.close)


async def take_all(source, wanted):
    """The fate of the next `wanted` records."""
    counts = Counter()
    async with asyncio.timeout(PATIENCE_S):
        while counts.total() < wanted:
            counts += (await source.take()).counts
    return counts


async def stream_state(broker, config):
    client = await nats.connect(broker.url)
    try:
        return (await client.jetstream().stream_info(config.stream)).state
    finally:
        await client.close()


async def until_left(broker, config, number):
    """Wait for acknowledgements, which are sent and not waited for."""

    async def is_left():
        return (await stream_state(broker, config)).messages == number

    await until(is_left)


@in_event_loop
async def test_records_arrive_in_order_and_leave_the_log_once_they_are_stored(
    broker, nats_config, buffer
):
    records = [make_record(number, rows=4) for number in range(300)]
    source = make_source(broker, nats_config, buffer)
    assert not (await source.take()).counts, "there is a stream now, and nothing in it"
    await publish(broker, nats_config, *records)
    assert await take_all(source, 300) == {"stored": 300}
    await until_left(broker, nats_config, 0)
    await source.close()
    assert [encode_record(s.record) for s in buffer.fresh(0, 1000)] == [
        encode_record(record) for record in records
    ]


@in_event_loop
async def test_a_record_that_is_sent_twice_is_stored_once(broker, nats_config, buffer):
    source = make_source(broker, nats_config, buffer)
    await source.take()
    record = make_record(1)
    await publish(broker, nats_config, record)
    await publish(broker, nats_config, record)
    assert (await stream_state(broker, nats_config)).messages == 1, "the log knows it by its id"
    assert await take_all(source, 1) == {"stored": 1}
    client = await nats.connect(broker.url)
    await client.jetstream().publish(
        nats_config.subject("code"), encode_record(record)
    )  # without a message id
    await client.close()
    assert await take_all(source, 1) == {"duplicate": 1}
    await source.close()


@in_event_loop
async def test_what_was_taken_and_not_stored_comes_again(broker, nats_config, buffer, monkeypatch):
    source = make_source(broker, nats_config, buffer)
    await source.take()
    await publish(broker, nats_config, *(make_record(number) for number in range(20)))
    append, full = buffer.append, [True]

    def fail_first(*args):
        if full:
            full.pop()
            raise BufferFullError(28, "the buffer can not write")
        return append(*args)

    monkeypatch.setattr(buffer, "append", fail_first)
    with pytest.raises(BufferFullError):
        await take_all(source, 1)
    assert await take_all(source, 20) == {"stored": 20}
    await source.close()


@in_event_loop
async def test_after_a_full_disk_no_segment_comes_before_its_text(
    broker, nats_config, buffer, monkeypatch
):
    source = make_source(broker, nats_config, buffer)
    await source.take()
    first = [make_record(number) for number in range(20)]
    end = 8 + 60  # of prompt and text of a first segment
    second = [
        make_record(
            number,
            sequence=1,
            context=b"",
            context_begin=end,
            row_positions=np.arange(end, end + 60, dtype="i4").tobytes(),
        )
        for number in range(20)
    ]
    append, is_full, may_fail = buffer.append, [True], threading.Event()

    def fail(*args):
        if is_full:
            assert may_fail.wait(PATIENCE_S)
            raise BufferFullError(28, "the buffer can not write")
        return append(*args)

    monkeypatch.setattr(buffer, "append", fail)
    taking = asyncio.ensure_future(take_all(source, 1))
    await publish(broker, nats_config, *first)
    await publish(broker, nats_config, *second)
    await until(
        lambda: (
            source._pull._arrived and source._pull._arrived[-1].data == encode_record(second[-1])
        )
    )
    may_fail.set()
    with pytest.raises(BufferFullError):
        await taking
    is_full.clear()
    assert await take_all(source, 40) == {"stored": 40}
    await source.take()
    await until_left(broker, nats_config, 0)
    await source.close()


@in_event_loop
async def test_damaged_and_strange_messages_are_counted_and_do_not_come_again(
    broker, nats_config, buffer
):
    source = make_source(broker, nats_config, buffer)
    await source.take()
    frame = bytearray(encode_record(make_record(1)))
    frame[-5] ^= 1
    client = await nats.connect(broker.url)
    for payload in (
        bytes(frame),
        b"not a record",
        encode_record(make_record(2, target_fingerprint="another")),
        b"",
    ):
        await client.jetstream().publish(nats_config.subject("a.b c*"), payload)
    await client.close()
    assert await take_all(source, 3) == {"corrupt": 2, "foreign": 1}
    await source.take()
    await until_left(broker, nats_config, 0)
    await source.close()


@in_event_loop
async def test_a_server_that_publishes_before_there_is_a_stream_waits_for_it(
    broker, nats_config, buffer
):
    publisher = Publisher(broker.url, nats_config)
    publisher.write([encode_frame(make_record(number)) for number in range(5)])
    await until(
        lambda: "NoStreamResponse" in publisher.last_error or publisher.last_error,
        about=publisher.status,
    )
    assert publisher.counts["published_records"] == 0
    source = make_source(broker, nats_config, buffer)
    assert await take_all(source, 5) == {"stored": 5}
    assert publisher.last_error == ""
    await source.close()
    await asyncio.to_thread(publisher.close)


@in_event_loop
async def test_the_log_is_bounded_and_its_oldest_records_go_first(broker, nats_config, buffer):
    source = make_source(broker, nats_config, buffer, max_bytes=200_000)
    await source.take()
    await source.close()
    await publish(broker, nats_config, *(make_record(number, rows=100) for number in range(30)))
    state = await stream_state(broker, nats_config)
    assert 0 < state.bytes <= 200_000
    source = make_source(broker, nats_config, buffer, max_bytes=200_000)
    await take_all(source, state.messages)
    await source.close()
    numbers = [int(s.record.request_id.removeprefix("cmpl-")) for s in buffer.fresh(0, 100)]
    assert numbers == list(range(30))[-state.messages :]


@in_event_loop
async def test_the_streams_limits_follow_the_configuration(broker, nats_config, buffer):
    for max_age_s in (3600.0, 60.0):
        source = make_source(broker, nats_config, buffer, max_age_s=max_age_s)
        await source.take()
        await source.close()
        client = await nats.connect(broker.url)
        found = (await client.jetstream().stream_info(nats_config.stream)).config
        await client.close()
        assert (found.max_age, found.discard, found.storage) == (max_age_s, "old", "file")


@in_event_loop
async def test_the_subject_says_fleet_and_domain(broker, nats_config, buffer):
    source = make_source(broker, nats_config, buffer)
    await source.take()
    client = await nats.connect(broker.url)
    seen = []
    subscription = await client.subscribe("redraft.>")
    await client.flush()  # the broker knows of the subscription before the first record is sent
    domains = ["code", "", "a.b *>\n"]
    await publish(
        broker, nats_config, *(make_record(i, domain=domain) for i, domain in enumerate(domains))
    )
    for _ in domains:
        message = await subscription.next_msg(timeout=120)
        seen.append((message.subject, decode_record(message.data).domain))
    await client.close()
    await source.close()
    fleet = nats_config.fleet
    assert seen == [
        (f"redraft.{fleet}.code", "code"),
        (f"redraft.{fleet}.all", ""),
        (f"redraft.{fleet}.a_b____-ec878b9b", "a.b *>\n"),
    ]


@in_event_loop
async def test_a_record_above_the_brokers_payload_is_dropped_and_the_others_are_not(
    broker, nats_config, buffer
):
    source = make_source(broker, nats_config, buffer)
    await source.take()
    huge = make_record(1, context=os.urandom(9 << 20), num_prompt_tokens=0)
    publisher = Publisher(broker.url, nats_config)
    publisher.write([encode_frame(record) for record in (make_record(0), huge, make_record(2))])
    assert await take_all(source, 2) == {"stored": 2}
    await until(lambda: publisher.counts["dropped_records_too_large"] == 1)
    await until(lambda: publisher.status()["waiting_bytes"] == 0)
    await asyncio.to_thread(publisher.close)
    await source.close()


class Refusing:
    """A connection to a broker that stores records in order, but refuses one of them once."""

    is_closed, max_payload = False, 1 << 20

    def __init__(self, refused):
        self.refused, self.stored = refused, []

    def jetstream(self):
        return self

    async def publish_async(self, subject, frame, headers):
        answer = asyncio.get_running_loop().create_future()
        if frame.record_id == self.refused:
            self.refused = ""
            answer.set_exception(NatsError("refused"))
        else:
            self.stored.append(frame.record_id)
            answer.set_result(None)
        return answer


@in_event_loop
async def test_the_segments_of_a_request_stay_in_order_when_one_is_refused(monkeypatch):
    monkeypatch.setattr(publisher_module, "RETRY_S", 0.01)
    segments = [make_record(1, rows=1, sequence=number) for number in range(5)]
    others = [make_record(number, rows=1) for number in range(2, 12)]
    frames = [encode_frame(record) for record in (*segments[:3], *others, *segments[3:])]
    for refused in segments[1:]:
        publisher, broker = Publisher("nats://nowhere", Nats()), Refusing(refused.record_id)
        publisher._waiting.extend(frames)
        publisher._closing_at_s = time.monotonic()  # so that it ends when nothing is waiting
        await publisher._publish(broker)
        assert broker.refused == ""
        assert len(broker.stored) == len(frames)
        ids = [segment.record_id for segment in segments]
        assert [one for one in broker.stored if one in ids] == ids


@in_event_loop
async def test_records_around_the_brokers_payload_hold_nobody_up(tmp_path, buffer):
    limit, sizes = 4096, Counter()

    def of_size(size):
        sizes[size] += 1
        frame = Frame(bytes(size))
        frame.record_id, frame.domain = f"{size}-{sizes[size]}", ""
        return frame

    with running_broker(tmp_path / "store", f"max_payload: {limit}") as broker:
        source = make_source(broker, Nats(), buffer)
        await source.take()
        publisher = Publisher(broker.url, Nats())
        publisher.write(
            [of_size(limit + 1) for _ in range(4100)]
        )  # more than nats-py allows to be in flight
        publisher.write(
            [of_size(limit - header) for header in (0, 30, 60)]
        )  # the broker counts a header too
        publisher.write([encode_frame(make_record(2, rows=1))])
        assert await take_all(source, 1) == {"stored": 1}
        await until(lambda: publisher.counts["dropped_records_too_large"] == 4103)
        assert publisher.status()["broker_error"] == ""
        await asyncio.to_thread(publisher.close)
        await source.close()


@in_event_loop
async def test_a_consumer_of_a_former_learner_makes_way_and_a_strangers_is_named(
    broker, nats_config, buffer
):
    client = await nats.connect(broker.url)
    stream = client.jetstream()
    source = make_source(broker, nats_config, buffer)
    await source.take()
    await source.close()
    await stream.delete_consumer(nats_config.stream, "learner")
    for name in ("learner-code", "stranger"):
        filtered = nats_config.subject("code")
        await stream.add_consumer(
            nats_config.stream, durable_name=name, filter_subject=filtered, ack_policy="explicit"
        )
        await publish(broker, nats_config, make_record(len(name), domain="code"))
        if name == "stranger":
            with pytest.raises(BrokerError, match=rf"stranger of {nats_config.stream}\b"):
                await source.take()
            await stream.delete_consumer(nats_config.stream, name)
        assert await take_when_free(source) == {"stored": 1}
        await source.close()
        await stream.delete_consumer(nats_config.stream, "learner")
    await client.close()


@in_event_loop
async def test_learners_of_two_registries_do_not_take_each_others_records(
    broker, nats_config, buffer
):
    def make(registry_id):
        limits = StreamLimits(max_bytes=64 << 20)
        return StreamSource(broker.url, nats_config, limits, buffer, VOCAB, registry_id=registry_id)

    running, restarted, other = make("1" * 32), make("1" * 32), make("2" * 32)
    await running.take()
    with pytest.raises(BrokerError, match=r"registry\b.*\bredraft-"):
        await other.take()
    await publish(broker, nats_config, make_record(1))
    assert await take_all(running, 1) == {"stored": 1}
    await restarted.take()  # at once, although the first one's request still waits
    await publish(broker, nats_config, make_record(2))
    assert await take_all(restarted, 1) == {"stored": 1}
    for source in (running, restarted):
        await source.close()
    await publish(broker, nats_config, make_record(3))
    assert await take_when_free(other) == {"stored": 1}
    await other.close()


async def take_when_free(source):
    async def take():
        with contextlib.suppress(BrokerError):
            return await take_all(source, 1)

    return await until(take)


def count_on_disk(broker, config, texts):
    """The number of texts that stand in the broker's files of the stream."""
    files = [
        path.read_bytes() for path in (broker.folder / "jetstream").rglob(f"{config.stream}/msgs/*")
    ]
    assert files
    return sum(any(text in content for content in files) for text in texts)


HELD = b"not acknowledged: it keeps the broker's file, "


def make_holding_source(broker, config, buffer):
    """A source that acknowledges every message but those that begin with HELD."""
    source = make_source(broker, config, buffer)
    release = source._release

    async def release_others(messages):
        await release([message for message in messages if not message.data.startswith(HELD)])

    source._release = release_others
    return source


async def publish_held(broker, config, number):
    client = await nats.connect(broker.url)
    await client.jetstream().publish(config.subject("code"), HELD + b"%d" % number)
    await client.close()


@in_event_loop
async def test_a_record_that_was_taken_leaves_no_byte_on_the_brokers_disk(
    broker, nats_config, buffer
):
    """Acknowledged messages stayed readable in a file as long as it held an unread one."""
    records = [make_record(number, domain="code", rows=4) for number in range(60)]
    parts = [encode_record(record)[100:200] for record in records]
    source = make_holding_source(broker, nats_config, buffer)
    await source.take()
    await source.close()
    for number, some in enumerate((records[:30], records[30:], [])):
        await publish_held(broker, nats_config, number)
        await publish(broker, nats_config, *some)
    assert count_on_disk(broker, nats_config, parts) == 60
    assert await take_all(source, 63) == {"stored": 60, "corrupt": 3}
    await source.take()
    await until_left(broker, nats_config, 3)
    assert source.faults == []
    assert count_on_disk(broker, nats_config, parts) == 0
    assert count_on_disk(broker, nats_config, [HELD + b"%d" % n for n in range(3)]) == 3
    await source.close()


@in_event_loop
async def test_a_release_of_nats_that_loses_records_is_told(
    broker, nats_config, buffer, monkeypatch
):
    monkeypatch.setattr("redraft.online.learning.stream.SAFE_BROKER", (99, 1))
    source = make_source(broker, nats_config, buffer)
    await source.take()
    ((name, reason),) = source.faults
    assert name == "log_may_lose_records"
    assert reason.endswith("install 99.1 or later")
    await source.close()
    await source.take()
    assert len(source.faults) == 1
    await source.close()
    monkeypatch.setattr("redraft.online.learning.stream.SAFE_BROKER", (0, 1))  # after an upgrade
    await source.take()
    assert source.faults[1:] == [("log_may_lose_records", "")]
    await source.close()


@in_event_loop
async def test_a_broker_that_refuses_to_overwrite_costs_no_record_and_is_told(
    broker, nats_config, buffer, monkeypatch
):
    source = make_source(broker, nats_config, buffer)
    await source.take()
    client = await nats.connect(broker.url)
    stream = client.jetstream()
    config = (await stream.stream_info(nats_config.stream)).config
    await stream.delete_stream(nats_config.stream)
    await source.close()
    await stream.add_stream(config.evolve(deny_delete=True))
    await client.close()
    await source.take()
    await publish(broker, nats_config, *(make_record(number) for number in range(3)))
    assert await take_all(source, 3) == {"stored": 3}
    ((name, reason),) = source.faults
    assert name == "log_not_erased"
    assert "text stays in the broker's files" in reason
    await publish(broker, nats_config, make_record(9))
    assert await take_all(source, 1) == {"stored": 1}
    assert len(source.faults) == 1, "not at once again: a failure may cost the whole deadline"
    await source.take()
    await until_left(broker, nats_config, 0)
    await source.close()


@in_event_loop
async def test_after_one_delete_that_was_not_answered_the_next_records_are_overwritten(
    broker, nats_config, buffer, monkeypatch
):
    monkeypatch.setattr("redraft.online.learning.stream.ERASE_PAUSE_S", 0)
    first, second = (make_record(number, domain="code", rows=4) for number in range(2))
    source = make_holding_source(broker, nats_config, buffer)
    await source.take()
    request = source._client.request

    async def time_out(*args, **kwargs):
        source._client.request = request
        raise nats.errors.TimeoutError

    source._client.request = time_out
    await publish_held(broker, nats_config, 0)
    for record, fates in ((first, 2), (second, 1)):
        await publish(broker, nats_config, record)
        assert (await take_all(source, fates))["stored"] == 1
    await source.take()
    ((name, reason), ended) = source.faults
    assert (name, "$JS.API" in reason) == ("log_not_erased", False), "no right is missing"
    assert ended == ("log_not_erased", ""), "the fault has ended"
    assert count_on_disk(broker, nats_config, [encode_record(first)[100:200]]) == 1
    assert count_on_disk(broker, nats_config, [encode_record(second)[100:200]]) == 0
    await source.close()


@in_event_loop
async def test_without_the_right_to_overwrite_the_deadline_is_waited_for_once(
    tmp_path, nats_config, buffer, monkeypatch
):
    monkeypatch.setattr("redraft.online.learning.stream.ERASE_TIMEOUT_S", 0.5)
    monkeypatch.setattr("redraft.online.learning.stream.ERASE_PAUSE_S", 0)
    rights = 'publish: {allow: ">", deny: "$JS.API.STREAM.MSG.DELETE.>"}'
    settings = (
        f"authorization {{ users: [ {{user: learner, password: secret, permissions: "
        f"{{{rights}}}}} ] }}"
    )
    with running_broker(tmp_path / "store", settings) as broker:
        url = broker.url.replace("nats://", "nats://learner:secret@")
        source = StreamSource(url, nats_config, StreamLimits(max_bytes=1 << 20), buffer, VOCAB)
        await source.take()
        for number in range(3):
            await source._client.jetstream().publish(
                nats_config.subject("code"), encode_record(make_record(number))
            )
            assert await take_all(source, 1) == {"stored": 1}
        ((name, reason),) = source.faults
        assert (name, reason.endswith("the learner needs $JS.API.STREAM.>")) == (
            "log_not_erased",
            True,
        )
        await source.close()


def test_no_two_domains_share_a_subject():
    domains = ["", "all", "a.b", "a_b", "a b", "a*b", "code"]
    assert len({Nats().subject(domain) for domain in domains}) == len(domains)
    assert (Nats().subject(""), Nats().subject("code")) == (
        "redraft.default.all",
        "redraft.default.code",
    )


@in_event_loop
async def test_a_stream_that_is_deleted_under_the_learner_is_made_again(
    broker, nats_config, buffer
):
    source = make_source(broker, nats_config, buffer)
    await source.take()
    client = await nats.connect(broker.url)
    await client.jetstream().delete_stream(nats_config.stream)
    await client.close()
    with pytest.raises(BrokerError):
        await take_all(source, 1)
    await publish_while_taking(broker, nats_config, source)
    await source.close()


async def publish_while_taking(broker, config, source):
    publishing = asyncio.ensure_future(publish(broker, config, make_record(7)))
    assert await take_all(source, 1) == {"stored": 1}
    await publishing


@in_event_loop
async def test_a_broker_that_is_not_there_is_told_in_one_line_without_a_password(
    nats_config, buffer, tmp_path
):
    source = StreamSource(
        "nats://user:secret@127.0.0.1:1", nats_config, StreamLimits(), buffer, VOCAB
    )
    with pytest.raises(BrokerError, match=r"^nats://127\.0\.0\.1:1: ") as raised:
        await source.take()
    assert "secret" not in str(raised.value)
    with pytest.raises(BrokerError):
        await probe("nats://127.0.0.1:1", nats_config)


@pytest.mark.parametrize(
    "ingest", ["http://host:4222", "host:4222", "nats://", "nats://a:4222,ftp://b"]
)
def test_an_address_of_another_kind_is_refused(ingest):
    with pytest.raises(ValueError, match="nats://HOST:4222"):
        parse_addresses(ingest)


def test_an_address_is_shown_without_its_password():
    assert (
        hide_credentials("nats://user:secret@one:4222, tls://two:4222")
        == "nats://one:4222,tls://two:4222"
    )


@pytest.mark.parametrize("fleet", ["", "a.b", "a b", "*"])
def test_a_fleet_is_named_by_what_a_subject_can_hold(fleet):
    with pytest.raises(ValueError, match=r"nats\.fleet"):
        Nats(fleet=fleet)


def test_a_file_of_credentials_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nats\.ca"):
        Nats(ca=tmp_path / "ca.pem")


# -------------------------------------------------------------------------------------------------
# who may connect


def certificate(folder, name, *, ca=None):
    """(certificate, key) of `name`, signed by `ca` or by itself."""
    key, request, signed = (folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(key)]
    if ca is None:
        run("openssl", "req", "-x509", *curve, *subject, "-out", str(signed), "-days", "2")
    else:
        run("openssl", "req", *curve, *subject, "-out", str(request))
        by = [
            "-CA",
            str(ca[0]),
            "-CAkey",
            str(ca[1]),
            "-CAcreateserial",
            "-copy_extensions",
            "copy",
        ]
        run("openssl", "x509", "-req", "-in", str(request), *by, "-out", str(signed), "-days", "2")
    return signed, key


def run(*command):
    subprocess.run(command, check=True, capture_output=True)


@in_event_loop
async def test_the_broker_and_the_client_know_each_other_by_their_certificates(tmp_path, buffer):
    ca = certificate(tmp_path, "ca")
    server, client = certificate(tmp_path, "server", ca=ca), certificate(tmp_path, "client", ca=ca)
    both = tmp_path / "both.pem"
    both.write_text("".join(path.read_text() for path in client))
    settings = (
        f'tls {{ cert_file: "{server[0]}", key_file: "{server[1]}", ca_file: "{ca[0]}", '
        f"verify: true }}"
    )
    with running_broker(tmp_path / "store", settings) as broker:
        url = broker.url.replace("nats://", "tls://")
        for known in (Nats(), Nats(ca=ca[0])):
            with pytest.raises(BrokerError):
                await connect(url, known)
        for plain in (url, broker.url):
            client = await connect(plain, Nats(ca=ca[0], certificate=both))
            await client.close()
        source = StreamSource(url, Nats(ca=ca[0], certificate=both), StreamLimits(), buffer, VOCAB)
        assert not (await source.take()).counts
        await source.close()


@in_event_loop
async def test_where_tls_is_asked_for_nothing_goes_over_a_connection_without(broker, tmp_path):
    ca, _ = certificate(tmp_path, "ca")
    for url, config in (
        (broker.url.replace("nats://", "tls://"), Nats()),
        (broker.url, Nats(ca=ca)),
    ):
        with pytest.raises(BrokerError, match="TLS"):
            await connect(url, config)


@in_event_loop
async def test_users_are_known_by_password_or_by_the_seed_of_an_nkey(tmp_path):
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    file = tmp_path / "seed"
    file.write_bytes(seed)
    file.chmod(0o600)
    settings = (
        f"authorization {{ users: [ {{user: learner, password: secret}}, {{nkey: {public}}} ] }}"
    )
    with running_broker(tmp_path / "store", settings) as broker:
        with pytest.raises(BrokerError, match="Authorization"):
            await connect(broker.url, Nats())
        with_password = broker.url.replace("nats://", "nats://learner:secret@")
        for client in (
            await connect(with_password, Nats()),
            await connect(broker.url, Nats(credentials=file)),
        ):
            assert client.is_connected
            await client.close()


@in_event_loop
async def test_a_file_of_credentials_with_a_signed_token_opens_an_account(tmp_path, buffer):
    operator, system, account, user = (new_key(kind) for kind in (b"O", b"A", b"A", b"U"))
    limits = dict.fromkeys(("subs", "data", "payload", "conn", "leaf", "imports", "exports"), -1)
    stores = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    account_token = sign_token(
        operator, account, {"type": "account", "version": 2, "limits": limits | stores}
    )
    user_token = sign_token(
        account,
        user,
        {"type": "user", "version": 2} | dict.fromkeys(("subs", "data", "payload"), -1),
    )
    operator_token = sign_token(operator, operator, {"type": "operator", "version": 2})
    tokens = {
        account: account_token,
        system: sign_token(operator, system, {"type": "account", "version": 2}),
    }
    preloaded = ", ".join(f"{key.public_key.decode()}: {token}" for key, token in tokens.items())
    settings = (
        f"operator: {operator_token}\nsystem_account: {system.public_key.decode()}\n"
        f"resolver: MEMORY\nresolver_preload: {{ {preloaded} }}"
    )
    file = tmp_path / "learner.creds"
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    file.chmod(0o600)
    with running_broker(tmp_path / "store", settings) as broker:
        with pytest.raises(BrokerError):
            await connect(broker.url, Nats())
        source = StreamSource(
            broker.url, Nats(credentials=file), StreamLimits(max_bytes=1 << 20), buffer, VOCAB
        )
        assert not (await source.take()).counts
        await source.close()


def new_key(kind):
    prefix = {
        b"O": nkeys.PREFIX_BYTE_OPERATOR,
        b"A": nkeys.PREFIX_BYTE_ACCOUNT,
        b"U": nkeys.PREFIX_BYTE_USER,
    }[kind]
    return nkeys.from_seed(bytearray(nkeys.encode_seed(os.urandom(32), prefix)))


def sign_token(issuer, subject, claims):
    """A NATS token with claims about `subject`, signed by `issuer`."""

    def encoded(content):
        return base64.urlsafe_b64encode(content).rstrip(b"=").decode()

    names = {"iss": issuer.public_key.decode(), "sub": subject.public_key.decode(), "name": "t"}
    body = names | {"jti": "1", "iat": int(time.time()), "nats": claims}
    header = {"typ": "JWT", "alg": "ed25519-nkey"}
    content = ".".join(encoded(json.dumps(part).encode()) for part in (header, body))
    return f"{content}.{encoded(issuer.sign(content.encode()))}"


# -------------------------------------------------------------------------------------------------
# the probe


@in_event_loop
async def test_the_probe_publishes_for_real_and_its_message_is_no_record(
    broker, nats_config, buffer
):
    await probe(broker.url, nats_config)  # no stream yet
    client = await nats.connect(broker.url)
    with pytest.raises(NotFoundError):
        await client.jetstream().stream_info(nats_config.stream)
    await client.close()
    source = make_source(broker, nats_config, buffer)
    await source.take()
    await source.close()
    await probe(broker.url, nats_config)
    assert (await stream_state(broker, nats_config)).messages == 1
    source = make_source(broker, nats_config, buffer)
    assert not (await source.take()).counts
    await source.take()
    await until_left(broker, nats_config, 0)
    await source.close()
