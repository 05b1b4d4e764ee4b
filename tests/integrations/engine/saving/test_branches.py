"""Where prompts leave others."""

from __future__ import annotations

from prefixd.integrations.engine.saving.branches import Branches


def keys(prompt: str) -> list[str]:
    return [prompt[: end + 1] for end in range(len(prompt))]


def test_a_prompt_leaves_the_one_that_it_shares_most_with() -> None:
    branches = Branches()
    assert branches.follow(keys("abcde")) == 0, "nothing before it"
    assert branches.follow(keys("abXY")) == 2
    assert branches.follow(keys("abcdZ")) == 4
    assert branches.follow(keys("Q")) == 0


def test_the_same_prompt_again_and_a_shorter_one_leave_nothing() -> None:
    branches = Branches()
    branches.follow(keys("abcde"))
    assert branches.follow(keys("abcde")) == branches.follow(keys("abc")) == branches.follow([]) == 0


def test_what_is_unused_longest_is_forgotten_first_and_from_its_end() -> None:
    branches = Branches(most_keys=6)
    branches.follow(keys("abcd"))
    branches.follow(keys("wxyz"))
    assert branches.follow(keys("abcX")) == 2
