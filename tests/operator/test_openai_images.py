"""OpenAI's client sends images to models that read them; their chat templates put the placeholders."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, Sampling
from prefixd.client.inference import Tokens
from tests.worker.images.test_images import picture
from tests.worker.tiny_models import IMAGE_TOKEN, save_image_model

SPECIAL = ["<image>", "<video>", "<begin>", "<end>"]
"""The tokens from IMAGE_TOKEN on."""
_PARTS = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "llava_onevision": _PARTS.replace("IMAGE", "<image>"),
    "gemma3": _PARTS.replace("IMAGE", "<begin>"),  # as Gemma's own: the image's tokens come from its processor
}


def save_tokenizer(directory: Path, name: str) -> None:
    """A token for each of 90 characters, and the tokens of images."""
    characters = ["\n", *(chr(0x20 + place) for place in range(IMAGE_TOKEN - 1))]
    tokenizer = Tokenizer(models.BPE(vocab={each: place for place, each in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    of_images = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"} if name == "gemma3" else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATES[name], extra_special_tokens=of_images
    )
    fast.save_pretrained(directory)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_with_images_is_the_same_as_its_tokens(name: str, tmp_path: Path) -> None:
    directory = save_image_model(tmp_path / "model", name)
    save_tokenizer(directory, name)
    settings: dict[str, str | int] = {
        "worker.model": str(directory),
        "worker.threads": 1,
        "gpu.device": "cpu",
        "gpu.bytes": "16MiB",
        "cpu.bytes": "16MiB",
        "disk.bytes": 0,
        "server.http": "127.0.0.1:0",
    }
    images = [picture(1, 28, 28), picture(2, 28, 28)]
    codes = {each: place for place, each in enumerate(["\n", *(chr(0x20 + n) for n in range(IMAGE_TOKEN - 1))])}
    codes |= {token: IMAGE_TOKEN + place for place, token in enumerate(SPECIAL)}
    image = ["\n", "\n", "<begin>", "<image>", "<end>", "\n", "\n"] if name == "gemma3" else ["<image>"]
    written = [*"user:", *image, *"is", *image, *"?"]

    def part(file: bytes) -> dict[str, Any]:
        url = "data:image/png;base64," + base64.b64encode(file).decode()
        return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}

    content = [part(images[0]), {"type": "text", "text": "is"}, part(images[1]), {"type": "text", "text": "?"}]
    with (
        DaemonProcess(settings) as daemon,
        Client(daemon.address) as client,
        openai.OpenAI(api_key="none", base_url=f"{daemon.http}/v1", max_retries=0) as http,
    ):
        events = client.generate(
            [codes[each] for each in written], sampling=Sampling(max_tokens=6, ignore_eos=True), images=images
        )
        text = "".join(event.text for event in events if isinstance(event, Tokens))
        messages: Any = [{"role": "user", "content": content}]
        answer = http.chat.completions.create(
            model="model", messages=messages, max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.choices[0].message.content == text
        with pytest.raises(openai.BadRequestError, match=r"images\[1\].* cannot be read"):
            content[2] = part(images[1][:-30])
            http.chat.completions.create(model="model", messages=messages)
        with pytest.raises(openai.BadRequestError, match=r"2 placeholders .* 1 images"):
            content[2] = {"type": "text", "text": "<image>"}
            http.chat.completions.create(model="model", messages=messages)
