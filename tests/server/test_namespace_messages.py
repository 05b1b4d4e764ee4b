"""A namespace is the same for client and daemon, whatever it says of its parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd import client
from prefixd.base.errors import InvalidArgumentError
from prefixd.base.rules.rules import CrossAttention, SlidingWindow
from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.server.namespace_messages import namespace_message, namespace_spec
from prefixd.v1 import cache_pb2
from prefixd_swap.codecs import part_shape

ORDERS = st.permutations(part_shape.AXES[:-1]).map(lambda outer: (*outer, part_shape.AXES[-1]))
SIZES = st.integers(1, 64)
RULES = st.sampled_from([None, SlidingWindow(9), CrossAttention(2)])
SHAPES = st.tuples(st.sampled_from([*part_shape.DTYPE_BYTES]), SIZES, SIZES, SIZES, SIZES, ORDERS)


@given(st.lists(st.tuples(RULES, st.none() | SHAPES), min_size=1, max_size=4), st.sampled_from(["", "exact", "int8"]))
def test_what_a_client_says_is_what_the_daemon_reads_and_shows(parts: list[tuple], codec: str) -> None:
    theirs, ours = [], []
    for rank, (rule, fields) in enumerate(parts):
        shape = None if fields is None else part_shape.PartShape(*fields)
        nbytes = 64 if shape is None else shape.nbytes
        said = None if fields is None else client.PartShape(*fields)
        theirs.append(client.PartSpec("kv", rank, nbytes, rule, said))
        ours.append(PartSpec("kv", rank, nbytes, rule, shape=shape))
    message = client.NamespaceSpec("m", 16, tuple(theirs), b"salt", "bfloat16", "token", codec).to_proto()
    read = cache_pb2.Namespace.FromString(message.SerializeToString())
    spec = namespace_spec(read, "acme", b"salt")
    assert spec == NamespaceSpec("m", 16, tuple(ours), b"salt", "bfloat16", "token", "acme", codec=codec)
    message.salt = b""
    assert namespace_message(spec) == message


def test_a_client_that_says_no_shape_and_no_codec_sends_what_it_always_sent() -> None:
    spec = client.NamespaceSpec("m", 16, (client.PartSpec("kv", 1, 64),), b"s", "bfloat16", "token")
    assert spec.to_proto().SerializeToString().hex() == (
        "0a016d1201731a0862666c6f617431362205746f6b656e281032080a026b7610011840"
    )


GOOD = {"dtype": "float16", "layers": 1, "tokens": 16, "heads": 2, "channels": 4, "order": [1, 2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "float8"}, "a part of 'float8' is not possible; use one of bfloat16, float16, float32"),
        ({"layers": 0}, "a part has 0 layers"),
        ({"order": []}, "name each of layer, kv, token, head, channel once"),
        ({"order": [1, 2, 3, 5, 4]}, "channel last"),
        ({"order": [1, 1, 3, 4, 5]}, "name each of"),
        ({"order": [1, 2, 3, 4, 5] * 1000}, "name each of"),
        ({"order": [0, 2, 3, 4, 5]}, "a shape with axis number 0; use 1 to 5"),
        ({"order": [9, 2, 3, 4, 5]}, "a shape with axis number 9"),
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_is_refused_by_its_parts_name(fields: dict, message: str) -> None:
    shape = cache_pb2.PartShape(**{**GOOD, **fields})
    wanted = cache_pb2.Namespace(name="m", block_tokens=16, parts=[cache_pb2.Part(group="kv", rank=3, shape=shape)])
    with pytest.raises(InvalidArgumentError) as error:
        namespace_spec(wanted, "acme", b"")
    assert "part 'kv'/3" in str(error.value) and message in str(error.value)
    assert len(str(error.value)) < 400


def test_a_client_names_an_axis_that_does_not_exist() -> None:
    with pytest.raises(client.InvalidArgumentError, match="the axis 'time'; use layer, kv, token, head, channel"):
        client.PartShape("float16", 1, 16, 2, 4, ("layer", "kv", "time", "head", "channel"))  # type: ignore[arg-type]
