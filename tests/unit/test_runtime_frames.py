"""Frames: any cut of a stream gives the same frames, and every fault is a typed error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.runtime import frames
from sandbox.runtime.frames import Decoder, Frame, FrameError, decode_packet, encode, pack

TEXT = st.text(max_size=20)
HEADERS = st.dictionaries(
    TEXT,
    st.recursive(
        st.none() | st.booleans() | st.integers(0, frames.MAX_INTEGER) | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=5,
    ).filter(lambda value: str(value).count("[") + str(value).count("{") < 7),
    max_size=5,
).map(lambda header: {**header, "type": "x"})


@given(st.lists(st.tuples(HEADERS, st.binary(max_size=100)), max_size=5), st.integers(1, 64))
def test_a_stream_cut_anywhere_gives_the_same_frames(
    sent: list[tuple[dict[str, object], bytes]], step: int
) -> None:
    stream = b"".join(encode(header, payload) for header, payload in sent)
    decoder = Decoder()
    received = []
    for start in range(0, len(stream), step):
        received += decoder.feed(stream[start : start + step])
    decoder.close()
    assert received == [Frame(header, payload) for header, payload in sent]
    assert decoder.buffered_bytes == 0


@given(st.binary(max_size=300))
def test_any_bytes_give_frames_or_a_typed_error(data: bytes) -> None:
    try:
        Decoder().feed(data)
    except FrameError:
        pass


def raw(header: str | bytes, payload: bytes = b"") -> bytes:
    data = header if isinstance(header, bytes) else header.encode()
    return len(data).to_bytes(4, "big") + len(payload).to_bytes(4, "big") + data + payload


@pytest.mark.parametrize(
    "data",
    [
        raw("[]"),
        raw("{}"),
        raw('{"type":5}'),
        raw('{"type":""}'),
        raw('{"type":"x","type":"y"}'),
        raw('{"type":"x","n":-1}'),
        raw('{"type":"x","n":9223372036854775808}'),
        raw('{"type":"x","n":1.5}'),
        raw('{"type":"x","n":1e2}'),
        raw('{"type":"x","n":NaN}'),
        raw('{"type":"x","n":"\\ud800"}'),
        raw('{"type":"x"}trailing'),
        raw(b'{"type":"\xff"}'),
        raw('{"type":"x","n":' + "[" * 9 + "]" * 9 + "}"),
        raw('{"type":"x","n":' + "[" * 30_000 + "]" * 30_000 + "}"),
        raw('{"type":"x","n":' + "9" * 60_000 + "}"),
        raw("{"),
        (1).to_bytes(4, "big") + bytes(4) + b"{",
        (65_537).to_bytes(4, "big") + bytes(4),
        (2).to_bytes(4, "big") + (262_144).to_bytes(4, "big"),
        b"\xff" * 8,
    ],
)
def test_a_fault_is_a_frame_error_and_the_decoder_is_finished(data: bytes) -> None:
    decoder = Decoder()
    with pytest.raises(FrameError):
        decoder.feed(data)
    with pytest.raises(FrameError, match="already failed"):
        decoder.feed(b"")


def test_sizes_are_exact() -> None:
    header = {"type": "x", "pad": ""}
    room = frames.MAX_FRAME_BYTES - frames.PREFIX_BYTES - len(json.dumps(header)) + 3
    (frame,) = Decoder().feed(encode(header, b"x" * room))
    assert len(frame.payload) == room
    with pytest.raises(FrameError, match="over 262144"):
        encode(header, b"x" * (room + 1))
    pad = frames.MAX_HEADER_BYTES - len('{"type":"x","pad":""}')
    encode({"type": "x", "pad": "y" * pad})
    with pytest.raises(FrameError, match="header of 65537"):
        encode({"type": "x", "pad": "y" * (pad + 1)})
    with pytest.raises(FrameError):
        pack(b"")


def test_a_stream_that_ends_inside_a_frame_is_a_fault() -> None:
    decoder = Decoder()
    decoder.feed(encode({"type": "x"})[:-1])
    with pytest.raises(FrameError, match="ended inside"):
        decoder.close()


def test_a_packet_is_exactly_one_frame() -> None:
    packet = encode({"type": "x"}, b"abc")
    assert decode_packet(packet) == Frame({"type": "x"}, b"abc")
    for wrong in (b"", packet[:-1], packet + b"x", packet + packet):
        with pytest.raises(FrameError):
            decode_packet(wrong)
