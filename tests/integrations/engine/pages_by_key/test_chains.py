"""Pages that have keys as prompts of prefixd."""

from __future__ import annotations

import hashlib

from prefixd.integrations.engine.pages_by_key.chains import Chains, Starts


def _pages(count: int, name: str = "page") -> list[bytes]:
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count)]


def _path(pages: list[bytes]) -> bytes:
    return b"".join(pages)


def test_prefix_keys_lead_up_to_a_call() -> None:
    pages = _pages(6)
    chain = Chains().chain(_path(pages[4:]), _path(pages[:4]))
    assert (chain.before, len(chain)) == (4, 6)
    assert chain.path == _path(pages)
    assert chain.page(5) == _path(pages[5:])
    assert chain.part(2, 4) == _path(pages[2:4])


def test_what_was_said_before_leads_up_to_a_call() -> None:
    pages = _pages(9)
    chains = Chains()
    chains.chain(_path(pages[:5]))
    chains.chain(_path(pages[5:]), _path(pages[:5]))
    assert chains.chain(_path(pages[7:])).path == _path(pages)
    assert chains.chain(_path(pages[:2])).before == 0
    assert chains.chain(_path(_pages(2, "other"))).before == 0


def test_keys_in_a_circle_lead_nowhere() -> None:
    pages = _pages(2)
    chains = Chains(links=64)
    chains.chain(_path([pages[0], pages[1], pages[0]]))
    assert chains.chain(_path([pages[0]])).before == 0
    assert chains.chain(_path([pages[1], pages[1]])).before <= 64


def test_old_links_are_forgotten() -> None:
    chains = Chains(links=10)
    pages = _pages(100)
    chains.chain(_path(pages))
    assert len(chains._parents) == 10
    assert chains.chain(_path(pages[50:]), _path(pages[:50])).before == 50


def test_paths_that_begin_in_the_middle() -> None:
    pages = _pages(6)
    chain = Chains().chain(_path(pages))
    starts = Starts(limit=2)
    assert starts.of(chain, 5) == [0]
    starts.add(chain.page(2))
    starts.add(chain.page(4))
    assert (starts.of(chain, 5), starts.of(chain, 3), starts.of(chain, 1)) == ([4, 2, 0], [2, 0], [0])
    starts.add(chain.page(5))
    assert starts.of(chain, 5) == [5, 4, 0]
    starts.drop(chain.page(4))
    assert chain.page(4) not in starts
    assert chain.page(5) in starts
