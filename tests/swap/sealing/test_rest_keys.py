"""Key files, and which tenant's blocks their keys encrypt."""

from __future__ import annotations

import pytest

from prefixd_swap.errors import KeyFileError, MissingKeyError
from prefixd_swap.sealing.rest_keys import RestKey, RestKeys, key_name, parse_keys

ONE, TWO, THREE = (RestKey.derive(each * 16) for each in (b"1", b"2", b"3"))


def test_a_key_file_has_a_key_on_each_line() -> None:
    assert parse_keys(b"1111111111111111") == (ONE,)
    assert parse_keys(b"\n 2222222222222222 \r\n\n1111111111111111\n") == (TWO, ONE)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no key"),
        (b" \n\n", "no key"),
        (b"1111111111111111\nshort\n", "line 2 has 5 bytes, and a key needs 16"),
        (b"1111111111111111\n2222222222222222\n1111111111111111", "line 3 has the key of line 1 again"),
        (b"\x80" * 32, "line 1 is not text"),
        (b"1111111111\x001111111", "line 1 is not text"),
    ],
)
def test_what_is_no_key_file_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(KeyFileError, match=why):
        parse_keys(content)


def test_keys_say_their_id_and_not_themselves() -> None:
    assert len(ONE.name) == 8 and ONE.name == key_name(ONE.id)
    assert 0 < ONE.id < 1 << 30
    assert len({ONE.id, TWO.id, THREE.id, *(key.objects for key in (ONE, TWO)), ONE.records, TWO.records}) == 7
    shown = repr(ONE) + repr(RestKeys((ONE,)))
    assert repr(ONE.objects) not in shown and repr(ONE.records) not in shown and "1111" not in shown


def test_the_first_key_encrypts_and_all_decrypt() -> None:
    keys = RestKeys((TWO, ONE), {"acme": (THREE,)})
    assert keys.key_for("acme") == THREE
    assert keys.key_for("other") == TWO
    assert [keys.find(key.id) for key in (ONE, TWO, THREE)] == [ONE, TWO, THREE]


def test_without_keys_nothing_is_encrypted_and_what_is_missing_is_named() -> None:
    assert RestKeys().key_for("acme") is None
    assert RestKeys((), {"acme": (ONE,)}).key_for("other") is None
    assert RestKeys((ONE,)).missing([TWO.id, ONE.id, TWO.id]) == [TWO.id]
    with pytest.raises(MissingKeyError, match=f"the key {ONE.name} is missing"):
        RestKeys().find(ONE.id)


def test_keys_are_replaced_where_they_are_used() -> None:
    keys = RestKeys((ONE,))
    keys.replace(RestKeys((TWO, ONE), {"acme": (THREE,)}))
    assert [keys.key_for(tenant) for tenant in ("acme", "other")] == [THREE, TWO]
    assert keys.find(ONE.id) == ONE and not keys.missing([ONE.id, TWO.id, THREE.id])


def test_who_has_a_key_in_a_file_is_known() -> None:
    keys = RestKeys((ONE, TWO), {"acme": (TWO,)})
    assert [keys.holders(key.id) for key in (ONE, TWO, THREE)] == [[None], [None, "acme"], ()]
    keys.replace(RestKeys((THREE,), {"acme": (TWO,)}))
    assert [keys.holders(key.id) for key in (ONE, TWO, THREE)] == [(), ["acme"], [None]]


def test_two_keys_with_one_id_are_refused() -> None:
    twin = RestKey(ONE.id, TWO.objects, TWO.records)
    with pytest.raises(KeyFileError, match=ONE.name):
        RestKeys((ONE,), {"acme": (twin,)})
    assert RestKeys((ONE,), {"acme": (ONE,)}).key_for("acme") == ONE


def test_a_key_that_has_encrypted_decrypts_after_it_was_replaced() -> None:
    keys = RestKeys((ONE, TWO))
    keys.replace(RestKeys((THREE,)))
    assert keys.key_for("acme") == THREE and keys.find(ONE.id) == ONE
    assert keys.missing([TWO.id]) == [TWO.id]
