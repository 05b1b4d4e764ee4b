"""Pages that the daemon's disk keeps in fewer bytes: what SGLang's controllers load again, bytes and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.engines.sglang_controller import Controller, Shape
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.sglang.conftest import MakeController
from tests.sglang.served import DAEMON, accounts, flush, new_prompt
from tests.waiting import wait_until

PAGES = 8
TOKENS = PAGES * Shape().page_tokens
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


def fill(pool: Any, indices: torch.Tensor, seed: int) -> None:
    """Gives pages numbers such as keys and values have; all layers alike."""
    generator = torch.Generator().manual_seed(seed)
    for start in indices[:: pool.page_size].tolist():
        page = pool.get_dummy_flat_data_page()
        pool.set_from_flat_data_page(start, torch.randn(page.shape, generator=generator).to(page.dtype))


def numbers(controller: Controller, indices: torch.Tensor) -> torch.Tensor:
    """The numbers of pages, [pages, numbers]."""
    starts = indices[:: controller.page_tokens].tolist()
    return torch.stack([controller.pool.get_data_page(start, flat=True).reshape(-1).float() for start in starts])


@pytest.mark.parametrize("codec", ["lossless", "int8"])
def test_what_comes_back_from_disk(make_controller: MakeController, codec: str) -> None:
    with DaemonProcess({**DAEMON, "disk.codec": codec}) as daemon:
        controllers = {layout: make_controller(daemon, Shape("mha", layout)) for layout in LAYOUTS}
        controllers["latents"] = make_controller(daemon, Shape("mla"))
        prompt, exact = new_prompt(PAGES), {}
        for seed, (name, controller) in enumerate(controllers.items()):
            saved = controller.random_pages(PAGES, seed)
            fill(controller.pool, saved, seed)
            exact[name] = numbers(controller, saved)
            assert controller.backup(prompt, saved) == TOKENS
        flush(daemon)
        daemon.restart()
        for name, controller in controllers.items():
            wait_until(lambda it=controller: it.hits(prompt).storage_hit_count, "no hits after the daemon's restart")
            indices, tokens = controller.prefetch(prompt)
            assert tokens == TOKENS and indices is not None
            with Client(daemon.address) as client:
                on_disk = client.stats().stored
            assert on_disk.stored_bytes < on_disk.exact_bytes
            loaded = numbers(controller, indices)
            shaped = name != "latents" and hasattr(controller.pool, "_buffer_infos")  # 0.5.22 does not tell the shape
            if codec == "lossless" or not shaped:
                assert torch.equal(loaded, exact[name])
                continue
            apart, size = (loaded - exact[name]).abs(), exact[name].square().mean().sqrt()
            largest = max(label.value for label in on_disk.largest_error)
            rms = max(label.value for label in on_disk.rms_error)
            # Stated errors are relative to the RMS of a layer's keys or values in one page; this is the RMS of all.
            assert 0 < apart.max() / size <= 1.1 * largest
            assert apart.square().mean().sqrt() / size <= 1.1 * rms and rms < 0.03
            assert bool((apart.max(1).values > 0).all()), "int8 alters every page"
        assert accounts(daemon) == []
