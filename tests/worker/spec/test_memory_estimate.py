"""The estimate of memory besides the KV covers what a model computes at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prefixd.worker.spec.memory_estimate import encoder_bytes
from tests.worker.images.test_images import Vision, picture
from tests.worker.tiny_models import IMAGES


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that operators have made and that existed at a time, without those of `weights`."""

    def __init__(self, weights: nn.Module) -> None:
        super().__init__()
        self.peak = 0
        self._weights = {each.untyped_storage()._cdata for each in [*weights.parameters(), *weights.buffers()]}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self._weights:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {place: each for place, each in self._live.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return made


@pytest.mark.parametrize("name", IMAGES)
def test_the_largest_image_is_covered(name: str, tmp_path: Path) -> None:
    """And not by far too much: what is set aside is not there for KV."""
    vision = Vision(name, tmp_path)
    spec, encoder = vision.model.spec, vision.model.images
    assert spec.encoder is not None and encoder is not None
    (image,) = vision.prompt(picture(1, 180, 360)).images
    with LiveBytes(encoder._model) as live:
        encoder.encode(image)
    estimate = encoder_bytes(spec.encoder, 4)
    assert live.peak <= estimate <= 8 * live.peak, "pixels, of which a GPU has three copies, are most of these models"
    assert spec.hello().working_bytes >= estimate
