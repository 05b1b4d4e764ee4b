"""Messages and their framing."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from prefixd.base.rules.rules import RecurrentState, SlidingWindow
from prefixd.base.sampling import Sampling
from prefixd.worker_protocol.errors import ConnectionClosedError, ProtocolError, WorkerError
from prefixd.worker_protocol.framing import MAX_MESSAGE_BYTES, Connection, encode, from_worker, to_worker
from prefixd.worker_protocol.protocol import (
    Cancel,
    Done,
    Extend,
    Failed,
    GroupShape,
    Hello,
    Layers,
    Memory,
    Note,
    Ready,
    Shutdown,
    Start,
    Step,
    TokenLogprobs,
    Update,
)
from prefixd.worker_protocol.worker_settings import WorkerSettings, decode_settings, encode_settings

TO_WORKER = [
    Memory(b"\x00meta", 3, bytes(8), bytes(16), 12, 4096),
    Start(
        id=2**40,
        tokens=b"\x01\x00\x00\x00",
        generated=0,
        cached_blocks=1,
        frames=[5, 6],
        sampling=Sampling(max_tokens=3, temperature=0.5, top_k=4, stop_token_ids=[1, 2], stop=[], logprobs=0),
    ),
    Extend(1, [7]),
    Layers(1, 8),
    Cancel(1),
    Shutdown(),
]
FROM_WORKER = [
    Hello(
        groups=(
            GroupShape("full", None, 1, 1),
            GroupShape("window", SlidingWindow(8), 2, 3),
            GroupShape("state", RecurrentState(), 4, 5),
        ),
        frame_bytes=8192,
        dtype="float32",
        block_tokens=16,
        layout="layer",
        chunk_bytes=4096,
        vocab_size=9,
        max_model_tokens=10,
        eos_token_ids=(2,),
        architecture="A",
        parameters=7,
        device="cpu",
    ),
    Ready(),
    Step([Update(1, [3], 2), Update(2, [4], 2, [TokenLogprobs(-0.5, [4, 1], [-0.5, -2.5])])], 17, 0.25),
    Done(1, "error", "why"),
    Failed("why"),
    Note("how far"),
]


@pytest.mark.parametrize(("messages", "decoder"), [(TO_WORKER, to_worker), (FROM_WORKER, from_worker)])
def test_messages_survive_any_cutting_of_the_stream(messages, decoder):
    stream = b"".join(encode(message) for message in messages)
    for size in (1, 3, 7, len(stream)):
        reader = decoder()
        found = []
        for start in range(0, len(stream), size):
            found += reader.feed(stream[start : start + size])
        assert found == messages


def test_messages_of_the_other_direction_are_refused():
    with pytest.raises(ProtocolError, match="same installation"):
        to_worker().feed(encode(Ready()))


def test_garbage_is_refused_without_waiting_for_its_length():
    with pytest.raises(ProtocolError, match=str(MAX_MESSAGE_BYTES)):
        to_worker().feed(b"GET / HTTP/1.1\r\n")
    with pytest.raises(ProtocolError, match="cannot be read"):
        to_worker().feed(struct.pack("<I", 3) + b"abc")


def test_connection_reads_no_further_than_its_message():
    here, there = socket.socketpair()
    with here, there:
        connection = Connection(here, to_worker())
        assert not connection.poll(0.0)
        there.sendall(encode(Memory(b"m", 1, b"", b"", 1, 4096)))
        read, write = os.pipe()
        socket.send_fds(there, [b"!"], [read])
        os.write(write, b"through")
        assert connection.poll(1.0)
        assert connection.receive() == Memory(b"m", 1, b"", b"", 1, 4096)
        data, fds, _, _ = socket.recv_fds(connection.socket, 1, 4)
        assert (data, len(fds)) == (b"!", 1)
        assert os.read(fds[0], 7) == b"through"
        for fd in (read, write, *fds):
            os.close(fd)


def test_connection_says_when_the_other_end_is_gone():
    here, there = socket.socketpair()
    connection = Connection(here, to_worker())
    there.sendall(encode(Shutdown())[:5])
    there.close()
    assert connection.poll(1.0)
    with pytest.raises(ConnectionClosedError):
        connection.receive()
    with pytest.raises(ConnectionClosedError):
        connection.send(Ready())
    connection.close()


def test_settings_survive_and_name_the_field_that_is_wrong():
    settings = WorkerSettings(model="/m", device="cuda:1", layout="layer", threads=2)
    assert decode_settings(encode_settings(settings)) == settings
    with pytest.raises(WorkerError, match="block_tokens"):
        decode_settings('{"model": "m", "block_tokens": 0}')
    with pytest.raises(WorkerError, match="blok"):
        decode_settings('{"model": "m", "blok": 1}')
