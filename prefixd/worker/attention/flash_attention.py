"""Attention on a GPU by torch's flash attention: one call a layer whatever is in the batch, or a few by a plan.

All sequences lie in one tensor at a fixed stride (vAttention, section 5.2.3). `seqused_k` has the length of each, so
one call computes prompts and decoding requests, and nothing behind the last token is read. Several calls are faster
where a prompt has a long prefix (`pass_plan`).

The kernel computes windows itself. It reads keys in blocks that begin at multiples of at most `READ_BLOCK` tokens, and
none before the block of the first key that the segment's first query sees: memory before that may be unmapped.

`make gpu-check` runs it on a GPU; elsewhere the tests run it with a stand-in for the kernel.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch

from prefixd.worker.attention.attention import FULL_ATTENTION, AttentionKind, FromMemory
from prefixd.worker.attention.choice.pass_plan import PassPlan, Plan, plain
from prefixd.worker.attention.kernels.flash_kernels import AloneKernel, VarlenKernel
from prefixd.worker.attention.split_prefix import SplitPass
from prefixd.worker.graphs.captured import CapturedStep
from prefixd.worker.memory.kv_memory import StepKv
from prefixd.worker.memory.virtual_kv import VirtualStep
from prefixd.worker.spec.kv_groups import READ_BLOCK as READ_BLOCK
from prefixd.worker.to_device import to_device


class FlashAttention:
    """The backend; `calls` counts attention kernels.

    plan: which calls compute a pass; by default one for everything. Layers whose window hides keys of the pass, and
        captured passes of prompts, have one call in any case.
    alone: the kernel for one sequence, if the plan may ask for it.
    """

    def __init__(self, kernel: VarlenKernel, plan: Plan = plain, alone: AloneKernel | None = None) -> None:
        self.calls = 0
        self.plan = plan
        self.alone = alone
        self.kernel = kernel

    def begin(self, step: StepKv) -> FlashStep:
        """Put the lengths of the pass's segments onto the device."""
        return FlashStep(self, step)

    def refuses(self, kind: AttentionKind) -> str | None:
        """Refuses every kind but windows."""
        if kind.expanded:
            return "it reads keys and values from memory alone; set worker.device to cpu"
        if kind.both_ways:
            return "torch's flash attention is causal within an image, too"
        if kind.softcap is not None or kind.sinks is not None:
            return "torch's flash attention has neither softcap nor sinks"
        return None

    def compute(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Call the kernel."""
        self.calls += 1
        result: torch.Tensor = self.kernel(*arguments, **keywords)
        return result


class FlashStep(FromMemory):
    """One pass; see `StepAttention`."""

    def __init__(self, backend: FlashAttention, step: StepKv) -> None:
        self._backend = backend
        self._step = step
        self._tokens = sum(len(segment) for segment in step.segments)
        self._longest = max(len(segment) for segment in step.segments)
        self._split: dict[int, SplitPass] = {}  # by the query heads of a KV head
        self._layer, self._arguments = step.varlen_arguments()
        if isinstance(step, CapturedStep):
            self._starts = step.query_starts
        else:
            starts = [0, *itertools.accumulate(len(segment) for segment in step.segments)]
            self._starts = to_device(starts, torch.int32, self._layer(0)[0].device)
        self._plan = self._planned()

    def _planned(self) -> PassPlan | None:
        """The plan of the pass, if it has more than one call."""
        step = self._step
        if isinstance(step, CapturedStep):
            if step.longest > 1:
                return None
            self._most_keys = cast(int, self._arguments["max_k"])
            count = len(self._starts) - 1
            plan = self._backend.plan([1] * count, [self._most_keys] * count, captured=True)
        elif isinstance(step, VirtualStep):
            self._most_keys = max(segment.stop for segment in step.segments)
            plan = self._backend.plan(
                [len(segment) for segment in step.segments], [segment.stop for segment in step.segments]
            )
        else:
            return None
        return None if plan.one_call else plan

    def attend(
        self, query: torch.Tensor, layer: int, scaling: float, kind: AttentionKind = FULL_ATTENTION
    ) -> torch.Tensor:
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim], by the keys and values in the pass's memory. Causal
        from each sequence's end, so its last query looks at all of it."""
        keys, values = self._layer(layer)
        if self._plan is not None and not self._hides(kind):
            return self._by_plan(self._plan, query, keys, values, scaling)
        keywords = dict(self._arguments)
        result = self._backend.compute(
            query[0, :, : self._tokens].transpose(0, 1).contiguous(),
            keys,
            values,
            self._starts,
            keywords.pop("cu_seq_k"),
            self._longest,
            keywords.pop("max_k"),
            scale=scaling,
            window_size=(-1 if kind.window is None else kind.window - 1, 0),  # the kernel does not count the query
            enable_gqa=True,
            **keywords,
        )
        if query.shape[2] == self._tokens:  # no padding, as in captured passes
            return result.unsqueeze(0)
        output = query.new_zeros((query.shape[2], query.shape[1], query.shape[3]))
        output[: self._tokens] = result
        return output.unsqueeze(0)

    def _by_plan(
        self, plan: PassPlan, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        group = query.shape[1] // keys.shape[1]
        if group not in self._split:
            if isinstance(self._step, VirtualStep):
                self._split[group] = SplitPass(plan, self._step.segments, self._step.starts, group, query.device)
            else:
                starts, lengths = (cast(torch.Tensor, self._arguments[name]) for name in ("cu_seq_k", "seqused_k"))
                self._split[group] = SplitPass.of_decodes(plan.pieces, starts, lengths, self._most_keys, group)
        split = self._split[group]
        output = query.new_zeros((query.shape[2], query.shape[1], query.shape[3]))
        flat = query[0].transpose(0, 1).contiguous()
        split.attend(self._backend.kernel, self._backend.alone, flat, keys, values, scaling, output)
        self._backend.calls += split.calls
        return output.unsqueeze(0)

    def _hides(self, kind: AttentionKind) -> bool:
        """Whether the kind's window hides keys of the pass."""
        return kind.window is not None and kind.window < self._most_keys
