from __future__ import annotations

import bisect
import random

import pytest

from prefixd_scheduler import IntegrityError, orders
from prefixd_scheduler.orders import SortedKeys


@pytest.mark.parametrize("chunk", [1, 2, 512])
def test_keys_are_those_of_a_sorted_list(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(orders, "_CHUNK", chunk)
    rng = random.Random(7)
    keys: SortedKeys[int] = SortedKeys()
    model: list[int] = []
    for step in range(3000):
        if model and rng.random() < (0.4 if step < 2000 else 0.9):
            keys.remove(model.pop(rng.randrange(len(model))))
        else:
            key = rng.randrange(1 << 30)
            bisect.insort(model, key)
            keys.add(key)
        assert (len(keys), bool(keys)) == (len(model), bool(model))
        if model:
            assert keys.first == model[0]
        if step % 50 == 0:
            assert list(keys) == model
    assert all(1 <= len(part) <= 2 * chunk for part in keys._chunks)
    assert keys._lasts == [part[-1] for part in keys._chunks]


@pytest.mark.parametrize("key", [0, 2, 9])
def test_a_key_that_is_not_there_is_a_defect_of_its_owner(key: int) -> None:
    keys: SortedKeys[int] = SortedKeys()
    for there in (1, 3, 5):
        keys.add(there)
    with pytest.raises(IntegrityError, match=f"the key {key} is not where the order has it"):
        keys.remove(key)
    assert list(keys) == [1, 3, 5]
