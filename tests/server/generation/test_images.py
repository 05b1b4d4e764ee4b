"""Images through a daemon and its worker: transformers' tokens, and no image embedded twice."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.checks.attacks.scenarios.requests import _scanned
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, InvalidArgumentError, Sampling, UnsupportedError
from prefixd.client.inference import Finished, Tokens
from tests.daemons import Remote
from tests.waiting import wait_until
from tests.worker.images import test_images as worker_tests

pytestmark = pytest.mark.slow

BLOCK = 16
NEW = 6
# LLaVA-OneVision: rows in the place of tokens. PREFIXD_IMAGE_MODELS names others.
MODELS = os.environ.get("PREFIXD_IMAGE_MODELS", "llava_onevision").split()


class Conversation:
    """Texts and images, and what they become for the daemon and for transformers."""

    def __init__(self, vision: Any, client: Client) -> None:
        self.parts: list[list[int] | bytes] = []
        self._vision = vision
        self._client = client

    def ask(self, *parts: list[int] | bytes) -> tuple[list[int], Finished]:
        """Adds what is asked and what is answered; the answer is transformers'."""
        self.parts += parts
        tokens: list[int] = []
        images = [part for part in self.parts if isinstance(part, bytes)]
        for part in self.parts:
            if isinstance(part, list):
                tokens += part
            else:
                tokens += [worker_tests.BEGIN, self._vision.token, worker_tests.END]
        found: list[int] = []
        finished = None
        for event in self._client.generate(tokens, sampling=Sampling(max_tokens=NEW, ignore_eos=True), images=images):
            if isinstance(event, Tokens):
                found += event.token_ids
            elif isinstance(event, Finished):
                finished = event
        prompt = self._vision.prompt(*self.parts)
        assert finished is not None
        assert finished.prompt_tokens == len(prompt.tokens)
        assert found == self._vision.greedy(prompt, NEW)
        self.parts.append([token for token in found if token < worker_tests.IMAGE_TOKEN])  # of these, the text
        return found, finished


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_of_ten_turns_over_three_images_embeds_three(name: str, folder: Path, tmp_path: Path) -> None:
    vision = worker_tests.Vision(name, tmp_path / "model")
    settings: dict[str, str | int] = {
        "worker.model": str(vision.directory),
        "worker.block_tokens": BLOCK,
        "worker.threads": 1,
        "gpu.device": "cpu",
        "gpu.bytes": "16MiB",
        "cpu.bytes": "16MiB",
        "disk.bytes": 0,
    }
    picture, text = worker_tests.picture, worker_tests.text
    with (
        DaemonProcess(settings, directory=folder) as daemon,
        Remote(daemon) as remote,
        Client(daemon.address) as client,
    ):
        talk = Conversation(vision, client)
        asked = embedded = 0
        for turn in range(10):
            new: list[list[int] | bytes] = [text(turn, 3)]
            if turn in (0, 3, 7):
                new.append(picture(turn, 28, 28))
            _, finished = talk.ask(*new, text(50 + turn, 2))
            asked += sum(isinstance(part, bytes) for part in talk.parts)
            embedded += finished.encoded_images
            if turn not in (0, 3, 7):
                assert finished.encoded_images == 0
                assert sum(finished.hit_tokens.values()) > 0 or turn == 1, "the block with the image's end was not full"
        assert embedded == 3
        other = Conversation(vision, client)
        _, finished = other.ask(text(99, 3), picture(3, 28, 28), text(98, 5))
        assert finished.encoded_images == 0, "seen before, behind other text"
        assert sum(finished.hit_tokens.values()) == 0
        _, finished = Conversation(vision, client).ask(text(99, 3), picture(8, 28, 28), text(98, 5))
        assert finished.encoded_images == 1
        assert sum(finished.hit_tokens.values()) == 0, "the same tokens with another image"
        images = remote.settled().worker.images
        assert (images.asked_images, images.encoded_images) == (asked + 2, 4)
        missed = images.asked_images - images.encoded_images
        if name == "mllama":
            assert images.found_images == missed
        else:  # of most images all tokens were found
            assert 1 <= images.found_images < missed

        namespaces = {each.namespace.name: each for each in client.stats().namespaces}
        of_images, of_text = sorted(namespaces, key=len, reverse=True)
        assert of_images == f"{of_text}-images" and namespaces[of_images].blocks > 0
        wait_until(lambda: not client.evict(namespace_id=namespaces[of_text].namespace_id).kept_blocks, "blocks stay")
        assert not any(each.blocks for each in client.stats().namespaces)

        with pytest.raises(InvalidArgumentError, match=r"2 placeholders .* and the request has 1 images"):
            list(client.generate([1, vision.token, 2, vision.token], images=[picture(0)]))
        with pytest.raises(InvalidArgumentError, match=r"1 placeholders .* and the request has 0 images"):
            list(client.generate([1, vision.token, 2]))
        with pytest.raises(InvalidArgumentError, match=r"images\[0\] \(\d+ bytes\) cannot be read"):
            list(client.generate([1, vision.token, 2], images=[picture(0)[:-30]]))
        with pytest.raises(InvalidArgumentError, match=r"images\[0\] is a JPEG with more than 64 scans"):
            list(client.generate([1, vision.token, 2], images=[_scanned(3000)]))
        huge = io.BytesIO()
        Image.fromarray(np.zeros((4097, 4097, 3), np.uint8)).save(huge, "PNG")
        with pytest.raises(InvalidArgumentError, match=r"4097 x 4097 pixels, and worker.image_pixels"):
            list(client.generate([1, vision.token, 2], images=[huge.getvalue()]))


def test_a_model_of_text_alone_refuses_images(model_daemon: Remote) -> None:
    with (
        Client(model_daemon.daemon.address) as client,
        pytest.raises(UnsupportedError, match="the request has 1 images, and the model reads text alone; send none"),
    ):
        list(client.generate([1, 2, 3], images=[b"no image"]))
