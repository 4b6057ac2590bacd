"""What the processes of ranks do: asked at the admin socket, over links, of relays that answer or do not."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from faults.fault_helpers import gone
from support import HANDSHAKE, LIMIT, until
from tcpstore_async.client.admin import ask
from tcpstore_async.links.link_client import ClientLink
from tcpstore_async.relay.examining import Examiner
from tcpstore_async.relay.running import relay
from tcpstore_async.server.base import Server
from tcpstore_async.server.examining import Question
from tcpstore_async.serving import serve
from tcpstore_async.stacks.report import Doing, Group, HostReport, fitted
from tcpstore_async.wire.link import REPORT_BYTES

SAYS_WHAT_IT_IS_GIVEN = """# a stand-in
import json, sys, time
given = json.load(sys.stdin)
assert given["until"] < time.monotonic() + 10, "on this very clock"
json.dump({"host": "here", "groups": [{"pids": given["pids"], "doing": {"state": "running"}, "cpu": []}]}, sys.stdout)
"""
NEVER_ENDS = "# a stand-in\nimport signal\nsignal.pause()\n"

Say = Callable[[ClientLink, int], None]


def report(host: str, *pids: int) -> bytes:
    return msgspec.json.encode(HostReport(host, [Group([pid], Doing("running"), [0.5]) for pid in pids]))


def says(data: bytes) -> Say:
    return lambda link, number: link.answer(number, data)


class Holder:
    """The client of a link, without ranks."""

    def __init__(self, port: int, place: str, say: Say | None) -> None:
        self.link = ClientLink(place, {} if say is None else {"examines": "1"})
        self.port = port
        self.say = say
        self.asked = asyncio.Event()

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(self.link.request())
        (size,) = struct.unpack("<Q", await self.reader.readexactly(8))
        self.link.answered(await self.reader.readexactly(size))
        self.answering = asyncio.ensure_future(self._answer())

    async def _answer(self) -> None:
        while data := await self.reader.read(1 << 16):
            self.link.receive(data)
            if self.link.question is not None:
                number, _ = self.link.question
                self.link.question = None
                self.asked.set()
                assert self.say is not None
                self.say(self.link, number)
                self.send()

    def send(self) -> None:
        self.link.seal()
        self.writer.write(b"".join(self.link.out))
        self.link.out.clear()

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()
        await self.answering


@asynccontextmanager
async def holders(server: Server, *answers: Say | None) -> AsyncIterator[list[Holder]]:
    """Relays of the host of the server, with ports from 1 on, that answer so; None if they cannot."""
    async with AsyncExitStack() as stack:
        found = [Holder(server.port, f"network/127.0.0.1:{at + 1}", say) for at, say in enumerate(answers)]
        for holder in found:
            await holder.connect()
            stack.push_async_callback(holder.close)
        yield found


async def lines(path: Path, seconds: float = 10.0) -> list[dict[str, Any]]:
    return await asyncio.to_thread(lambda: [json.loads(line) for line in ask(path, ["stacks"], LIMIT, seconds=seconds)])


# The server


async def test_who_asks_gets_what_all_relays_answer(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    answers = [says(report(f"node-{number}", number)) for number in range(20)]
    async with serve(admin=str(path)) as server, holders(server, *answers, None):
        for _ in range(2):
            first, *found, relays, end = await lines(path)
            assert first["server"]["port"] == server.port
            assert sorted((one["stacks"]["host"], one["stacks"]["groups"][0]["pids"]) for one in found) == sorted(
                (f"node-{number}", [number]) for number in range(20)
            )
            assert relays == {"relays": {"asked": 20, "answered": 20, "silent": [], "older": 1}}
            assert end == {"end": True}


@pytest.mark.parametrize("backend", ["uv", "threaded"])
async def test_nobody_to_ask(tmp_path: Path, backend: str) -> None:
    async with serve(backend=backend, admin=str(tmp_path / "admin")):
        _, relays, _ = await lines(tmp_path / "admin")
        assert relays == {"relays": {"asked": 0, "answered": 0, "silent": [], "older": 0}}


@pytest.mark.needs_proc
async def test_relays_that_do_not_answer_as_they_should(tmp_path: Path) -> None:
    """Each costs its own answer only; no more than 32 are named."""

    def twice(link: ClientLink, number: int) -> None:
        link.answer(number, report("twice"))
        link.answer(number, report("twice"))

    bad = [
        says(b"{"),
        says(b"\xff"),
        says(b'{"host": 1, "groups": []}'),
        says(b'{"more": ' + b"[" * 10_000),
        lambda link, number: link.answer(number ^ 1, report("another question")),
        lambda link, number: None,
    ]
    async with serve() as server, holders(server, twice, *bad, says(report("last"))) as found:
        await found[3].close()
        while server.links.links[found[3].link.identity].connection is not None:
            await asyncio.sleep(0)
        question = Question(server, LIMIT)
        answered = []
        while await question.wait():
            answered += [one["stacks"].host for one in question.answers()]
            if len(question._left) == 2 and not question._answers:
                question.end()
        assert sorted(answered) == ["last", "twice"]
        relays = question.relays()
        assert (relays["asked"], relays["answered"], relays["older"]) == (8, 2, 0)
        assert sorted(relays["silent"]) == [f"127.0.0.1:{port}" for port in range(2, 8)]
        await found[3].connect()
        question = Question(server, LIMIT)
        await asyncio.gather(*(one.asked.wait() for one in found[5:7]))
        question.end()
        question._silent *= 10
        assert len(question.relays()["silent"]) == 32


async def test_a_relay_that_comes_and_goes_while_it_is_asked(tmp_path: Path) -> None:
    async with serve() as server, holders(server, lambda link, number: None) as (holder,):
        question = Question(server, LIMIT)
        await holder.asked.wait()
        question.end()
        assert not await question.wait()
        await holder.close()
        await holder.connect()
        holder.say = says(report("back"))
        question = Question(server, LIMIT)
        assert await question.wait()
        assert [one["stacks"].host for one in question.answers()] == ["back"]


async def test_answers_that_are_too_much_to_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = report("some", *range(100))
    monkeypatch.setattr("tcpstore_async.server.examining._MOST_BYTES", 2 * len(data))
    async with serve() as server, holders(server, *[says(data)] * 5):
        question = Question(server, LIMIT)
        while not question.over:
            await asyncio.sleep(0)
        assert len(list(question.answers())) == 2
        assert len(question.relays()["silent"]) == 3


async def test_one_question_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each of them is in the audit log."""
    caplog.set_level(logging.INFO, "tcpstore_async.audit")
    path, numbers = tmp_path / "admin", []
    async with (
        serve(admin=str(path)) as server,
        holders(server, lambda link, number: numbers.append(number)) as (holder,),
    ):
        first = asyncio.ensure_future(lines(path))
        await holder.asked.wait()
        assert await lines(path) == [{"error": "relays are being asked already"}]
        holder.link.answer(numbers[0], report("late"))
        holder.send()
        assert [one["stacks"]["host"] for one in await first if "stacks" in one] == ["late"]
        assert (await lines(path, 11.0))[0]["error"].startswith("invalid request")
        assert (await lines(path, 0.0))[0]["error"].startswith("invalid request")
    who = f"uid {os.getuid()}, pid {os.getpid()}"
    asked = [record.message for record in caplog.records if record.name == "tcpstore_async.audit"]
    assert asked == [f"admin socket for port {server.port}: {who}: 'asked what ranks do'"] * 4


async def answered_at_last(path: Path) -> list[dict[str, Any]]:
    while "error" in (found := await lines(path))[0]:
        pass
    return found


async def test_who_leaves_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one was refused for as long as the first would have waited."""
    monkeypatch.setattr("tcpstore_async.server.admin._MOST_SECONDS", 10 * LIMIT)
    path = tmp_path / "admin"
    request = b'{"ask": ["stacks"], "seconds": %d}\n' % (10 * LIMIT)
    async with serve(admin=str(path)) as server, holders(server, lambda *_: None) as (holder,):
        for reads in (False, True):
            holder.asked.clear()
            holder.say = lambda *_: None
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(request)
            await holder.asked.wait()
            if reads:
                await reader.readline()
            writer.close()
            await writer.wait_closed()
            holder.say = says(report("next"))
            found = await asyncio.wait_for(answered_at_last(path), LIMIT)
            assert found[1]["stacks"]["host"] == "next"


async def test_who_only_stops_sending_gets_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    async with serve(admin=str(path)) as server, holders(server, lambda *_: None) as (holder,):
        numbers: list[int] = []
        holder.say = lambda link, number: numbers.append(number)
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b'{"ask": ["stacks"], "seconds": 10}\n')
        writer.write_eof()
        await holder.asked.wait()
        holder.link.answer(numbers[0], report("late"))
        holder.send()
        assert b'"late"' in await reader.read()
        writer.close()
        await writer.wait_closed()


async def test_a_server_that_stops_while_relays_are_asked(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(admin=str(path)))
        holder = Holder(server.port, "", lambda link, number: None)
        await holder.connect()
        asking = asyncio.ensure_future(lines(path))
        await holder.asked.wait()
        await stack.aclose()
        assert [list(one) for one in await asking] == [["server"]]
        await holder.close()


async def test_a_server_with_a_journal_is_the_same_when_it_is_back(tmp_path: Path) -> None:
    path, journal = tmp_path / "admin", tmp_path / "journal"
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(admin=str(path), persist=journal))
        holder = Holder(server.port, "network/relay:1", says(report("same")))
        await holder.connect()
        for again in (True, False):
            _, found, relays, _ = await lines(path)
            assert (found["stacks"]["host"], relays["relays"]["answered"]) == ("same", 1)
            if again:
                server.stop(for_good=False)
                await stack.aclose()
                await holder.close()
                holder.link.disconnect()
                server = await stack.enter_async_context(serve(admin=str(path), persist=journal))
                holder.port = server.port
                assert not server.persistence.differs  # type: ignore[union-attr]
                await holder.connect()
                assert holder.link.connected
        await holder.close()


# The relay


async def test_a_relay_examines_the_processes_of_its_ranks(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    async with serve(admin=str(path)) as server, relay([("127.0.0.1", server.port)]) as front:
        front.examiner = Examiner(SAYS_WHAT_IT_IS_GIVEN)
        async with AsyncExitStack() as stack:
            for pid in (7, 3, 7, 5):
                reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
                stack.push_async_callback(writer.wait_closed)
                stack.callback(writer.close)
                writer.write(HANDSHAKE + b"\x0d" + struct.pack("<I", pid))
                assert await reader.readexactly(4) == struct.pack("<I", pid)
            _, found, relays, _ = await lines(path)
            assert found["stacks"] == {
                "host": "here",
                "groups": [{"pids": [3, 5, 7], "doing": {"state": "running"}, "cpu": []}],
            }
            assert relays["relays"]["answered"] == 1


async def answered(program: str, seconds: float = LIMIT) -> tuple[int, bytes] | None:
    """What the examiner of a relay answers, if it does."""
    examiner = Examiner(program)
    answers: list[tuple[int, bytes]] = []
    examiner.examine(1, seconds, [], lambda *answer: answers.append(answer))
    while examiner._number == 1:
        await asyncio.sleep(0.001)
    assert examiner._process is not None
    assert gone(examiner._process.pid)
    return answers[0] if answers else None


@pytest.mark.needs_proc
@pytest.mark.parametrize("program", ["import sys; sys.exit('no')", "print('garbage')", "print(b'\\xff')", "1 / 0", "{"])
async def test_an_examination_that_fails_is_not_answered(program: str) -> None:
    assert await answered(f"# fails\n{program}\n") is None


@pytest.mark.needs_proc
async def test_an_examination_that_takes_too_long_is_ended() -> None:
    assert await answered(NEVER_ENDS, 0.01) is None


async def test_a_new_question_ends_the_examination_before() -> None:
    answers: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    examiner = Examiner(NEVER_ENDS)
    for number in range(3):
        if number == 2:
            examiner.program = "# ends\n" + 'print(\'{"host": "here", "groups": []}\')\n'
        examiner.examine(number, LIMIT, [], lambda *answer: answers.put_nowait(answer))
    assert await asyncio.wait_for(answers.get(), LIMIT) == (2, b'{"host":"here","groups":[]}')
    examiner.close()
    examiner.close()


@pytest.mark.needs_proc
async def test_what_the_process_has_started_ends_with_it(tmp_path: Path) -> None:
    """py-spy went on."""
    said = tmp_path / "pid"
    os.mkfifo(said)
    program = f"""# a stand-in
import signal, subprocess
started = subprocess.Popen(["sleep", "1000"])
with open({str(said)!r}, "w") as file:
    file.write(str(started.pid))
signal.pause()
"""
    examiner = Examiner(program)
    examiner.examine(1, LIMIT, [], lambda *answer: None)
    started = int(await asyncio.to_thread(said.read_text))
    examiner.close()
    await asyncio.to_thread(until, lambda: gone(started))


async def test_no_process_outlives_the_relay() -> None:
    async with serve() as server, relay([("127.0.0.1", server.port)]) as front:
        assert front.examiner is not None
        front.examiner.program = NEVER_ENDS
        question = None
        while front.examiner._process is None:
            if question is None and server.links.links:
                question = Question(server, LIMIT)
            await asyncio.sleep(0.001)
        front.stop()
        process = front.examiner._process
        assert await asyncio.to_thread(process.wait, LIMIT) != 0
        assert question is not None
        question.end()


def test_a_report_that_is_too_long_loses_its_last_groups() -> None:
    doing = [Doing("running", frames=(f"frame {number}",) * 40) for number in range(200)]
    whole = HostReport("here", [Group([number, 1000 + number], one, [0.0, 0.0]) for number, one in enumerate(doing)])
    data = fitted(msgspec.json.decode(msgspec.json.encode(whole), type=HostReport), REPORT_BYTES)
    found = msgspec.json.decode(data, type=HostReport)
    assert REPORT_BYTES - 1000 < len(data) <= REPORT_BYTES
    assert found.groups == whole.groups[: len(found.groups)]
    assert found.more == 2 * (200 - len(found.groups))
    assert fitted(HostReport("x" * REPORT_BYTES, []), REPORT_BYTES) == b""
