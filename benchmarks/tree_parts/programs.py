"""Small Python programs to be written, each with its task; the search is to end with exactly these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Program:
    """A program that is right. task: what a user asks for."""

    name: str
    task: str
    source: str

    @property
    def lines(self) -> list[str]:
        return self.source.splitlines()


PROGRAMS = (
    Program(
        "distance",
        "the largest distance between two of many points, and the pair of points that has it",
        """\
import itertools
import math


def farthest(points):
    best = (0.0, None)
    for first, second in itertools.combinations(points, 2):
        gap = math.dist(first, second)
        if gap > best[0]:
            best = (gap, (first, second))
    return best
""",
    ),
    Program(
        "frequencies",
        "the most frequent words of a text, the most frequent first, words of equal frequency by the alphabet",
        """\
import re


def frequent(text, count):
    seen = {}
    for word in re.findall(r"[a-z]+", text.lower()):
        seen[word] = seen.get(word, 0) + 1
    ranked = sorted(seen, key=lambda word: (-seen[word], word))
    return ranked[:count]
""",
    ),
    Program(
        "settings",
        "settings read from a JSON file over defaults; an unknown name is an error that lists the known ones",
        """\
import json


def load(path, defaults):
    with open(path) as file:
        given = json.load(file)
    for name in given:
        if name not in defaults:
            known = ", ".join(sorted(defaults))
            raise ValueError(f"{name} is unknown; known are {known}")
    return {**defaults, **given}
""",
    ),
    Program(
        "retry",
        "a call that is repeated after an error with growing pauses, up to a number of attempts",
        """\
import time


def retry(call, attempts, pause):
    for attempt in range(attempts):
        try:
            return call()
        except OSError as error:
            last = error
            time.sleep(pause * 2**attempt)
    raise RuntimeError(f"{attempts} attempts failed") from last
""",
    ),
    Program(
        "schedule",
        "the order in which tasks can be done when each waits for others, or an error that names a cycle",
        """\
import collections


def order(waits):
    left = {task: set(others) for task, others in waits.items()}
    ready = collections.deque(sorted(task for task in left if not left[task]))
    done = []
    while ready:
        task = ready.popleft()
        done.append(task)
        for other in sorted(left):
            if task in left[other]:
                left[other].remove(task)
                if not left[other]:
                    ready.append(other)
    if len(done) < len(left):
        raise ValueError(f"a cycle among {sorted(set(left) - set(done))}")
    return done
""",
    ),
    Program(
        "median",
        "a running median of the last values of a stream, with a bound on how many are kept",
        """\
import bisect
import collections


class Median:
    def __init__(self, most):
        self.order = collections.deque()
        self.ranked = []
        self.most = most

    def add(self, value):
        self.order.append(value)
        bisect.insort(self.ranked, value)
        if len(self.order) > self.most:
            oldest = self.order.popleft()
            del self.ranked[bisect.bisect_left(self.ranked, oldest)]
        return self.ranked[len(self.ranked) // 2]
""",
    ),
)
