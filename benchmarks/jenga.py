"""Models whose layers keep different things, two models, and a model with a draft, each in one memory.

Chats of several turns with small models in the proportions of large ones:

    window   Gemma 3: five of six layers see a window
    state    Jamba: seven of eight layers are recurrent, and a state is as large as the KV of 1,000 tokens
    vision   Gemma 3 with images: each turn shows one of --images, and is sent with all images of its chat so far
    cross    Llama 3.2 11B Vision: 32 layers attend to the text, eight to images of 6,404 patches. A chat has one turn,
             with 42 tokens and an image of its own, as a request of MMMU-pro has (Jenga, 3.2)
    two      window beside a Llama, --chats with each, in three phases: most turns go to the one, to the other, to both
    draft    a Llama, alone and with its first layer as a draft (worker.draft_model)

    python -m benchmarks.jenga --json jenga.json --plot jenga.png
    python -m benchmarks.jenga --models two draft --rounds 1

A turn sends all that was said before and some new tokens; the turns of all chats come in an order by chance, --at-once
at a time.
Each run has a daemon of its own with an empty cache, a GPU tier of --share of what the baseline would take for all
chats at their end, and no other tier. (two: 1.5 times --share of what the chats of one phase would take.)

    baseline   one page size and one rule for all layers (worker.groups = "one"): layers with windows keep all tokens;
               blocks are as long as the largest layer's state, and a state is kept after each; no embedding of an
               image is kept (worker.keep_embeddings = false). Two models have a daemon each with half of the memory,
               and both run at the same time
    virtual    of each layer what its rule needs, in chunks that serve any group (Jenga) and, in one daemon
               (worker.more_models), any model
    paged      the same through block tables (worker.kv = "paged"): large pages cut into pages of one size (Jenga's
               compatible pages), which are allocated in the order --page-order (worker.page_order)
    halves     of two models: virtual, but a daemon and half of the memory each. What virtual finds more is due to the
               memory that the models share, and not to their rules

waste: bytes of the GPU tier that are allocated and not needed, of all allocated, summed over samples of the daemons'
figures taken through the run. Allocated: what running requests and cached blocks have, but for cached bytes that only
shorter prefixes need and nobody holds (spare_bytes): these go before anything else, and are there while memory is free.
Not needed: what no layer needs by its own rule (unneeded_bytes): what lies behind a window, states but the last of a
prompt and those at ends and branches, padding, blocks beyond the last known token. A block filled in part is needed.
With block tables what is free in a large page in use counts as allocated and not needed (stranded_bytes).
At most 0.05 for virtual (Jenga, figure 16).

hit_ratio: prompt tokens found, against the baseline's, at least 1.5 with window and state (figure 17), 1 with the
others. requests_ratio: the same of requests a second, at least 1 for virtual. What makes the difference is
computed_tokens, the prompt tokens not found: prompts are long, answers short and the ways run in turn, --rounds times,
of which the best counts, so that other load on the machine does not decide. same_tokens: every request got the
baseline's tokens. encoded_images: embeddings computed, at most a quarter of the baseline's: an embedding serves every
prompt with its image, whatever stands before it (Jenga, section 5), until it is evicted. gpu_blocks: of two models,
how many blocks each has in the GPU tier at the end of each of the three phases; in one tier, memory moves to the
second model in the second phase, without a restart.

cross finds nothing, since no chat shares a prefix. Counted is what is cached at the end, of memory for everything:
waste, of used_bytes those that are not needed_bytes, KV of the text in 32 layers and of the images in eight; and
one_size_waste, the same of the one_size_bytes that PagedAttention with one page size takes, KV of text and images in 40
layers: papers_one_size_waste in the paper. memory_ratio: one_size_bytes of used_bytes. These are counts, the same
whatever else runs.

The model with a draft is asked one request at a time, for answers of --answer-tokens, in memory for everything, so that
only the draft makes a difference to passes, the forward passes of the model: fewer than alone, for the same tokens.
accepted: proposed tokens that were right. It is a property of the models, whose weights are made for it; what a draft
does to requests a second is reported, and nothing is demanded of it. used_bytes: of the GPU tier, at the end: with a
draft more, as the blocks have what both keep. integrity_violations: what the daemon finds when it accounts for every
slot of its memory; none. The benchmark fails when one of these does not hold.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import chosen, from_options, option, seed
from benchmarks.common.plots import bars
from benchmarks.jenga_parts.chats import Plan
from benchmarks.jenga_parts.comparison import summary, violations
from benchmarks.jenga_parts.subject_runs import measure
from benchmarks.jenga_parts.subjects import BLOCK_TOKENS, DRAFT_TOKENS, SUBJECTS

TITLES = {
    "waste": "allocated bytes not needed, of all",
    "found": "prompt tokens found, of all",
    "requests_per_s": "requests a second",
    "passes": "passes of a model with a draft",
}
"""Of the plot's panels, by figure."""
TWO_SHARES = 1.5
"""Of two models, in --share: the half of each has to hold a chat with it."""
ENOUGH_SHARE = 1.5
"""Of the memory that all chats take: nothing is evicted."""
QUESTION_TOKENS = 42
"""Of text, beside the image: 43 tokens are the mean of MMMU-pro (Jenga, 3.2)."""


def plans_of(options: argparse.Namespace) -> dict[str, Plan]:
    """The chats of each subject."""
    plan = from_options(Plan, options)
    others = {
        "two": replace(plan, share=TWO_SHARES * plan.share),
        "draft": replace(plan, share=ENOUGH_SHARE, at_once=1, output_tokens=options.answer_tokens),
        "cross": replace(plan, share=ENOUGH_SHARE, turns=1, user_tokens=QUESTION_TOKENS, images=plan.chats, rounds=1),
    }
    return {name: others.get(name, plan) for name in options.models}


@harness.benchmark(
    "jenga",
    __doc__,
    option("--chats", 8, "chats"),
    option("--turns", 4, "turns of each"),
    option("--user-tokens", 256, "tokens that a user says in a turn"),
    option("--output-tokens", 8, "tokens of an answer"),
    option("--answer-tokens", 32, "tokens of an answer of the model with a draft"),
    option("--at-once", 2, "requests at a time"),
    option("--rounds", 2, "runs of each way"),
    option("--images", 4, "images that the chats show, of a model that reads images"),
    option("--page-order", "few_free", "of paged: few_free, or Jenga's own, jenga (worker.page_order)", str),
    option("--share", 1 / 3, "of the memory that the baseline would take", float),
    chosen("--models", SUBJECTS, "what is compared"),
    seed("of the chats"),
    harness.PLOT,
    unrecorded=("models",),
)
def main(options: harness.Options) -> harness.Outcome:
    """The runs, and what must hold of them."""
    plans = plans_of(options)
    requests = sum(
        len(subject.ways) * plan.rounds * len(subject.models) * plan.chats * plan.turns
        for subject, plan in ((SUBJECTS[name], plan) for name, plan in plans.items())
    )
    with harness.progress("requests", requests) as step:
        runs = [run for name, plan in plans.items() for run in measure(name, plan, step)]
    result = {"block_tokens": BLOCK_TOKENS, "draft_tokens": DRAFT_TOKENS, **summary(runs)}

    rows = [{"model": model, "way": way, **of} for model, ways in result["models"].items() for way, of in ways.items()]
    table = harness.Table(rows, ("model", "way", "waste", "found", "requests_per_s", "passes", "accepted"))

    def draw(panels: Sequence[Any]) -> None:
        for axes, (figure, title) in zip(panels, TITLES.items(), strict=True):
            shown = {name: ways for name, ways in result["models"].items() if any(figure in of for of in ways.values())}
            names = dict.fromkeys(way for ways in shown.values() for way in ways)
            values = {way: [ways.get(way, {}).get(figure, math.nan) for ways in shown.values()] for way in names}
            bars(axes, list(shown), values, title, "model")

    return harness.Outcome(result, violations(result), [table], draw, len(TITLES))


if __name__ == "__main__":
    harness.run(main)
