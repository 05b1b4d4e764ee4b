"""How many tokens an image has: as transformers' own processors count."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3Config, LlavaOnevisionConfig, MllamaConfig, Qwen2_5_VLConfig
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from prefixd.base.errors import InvalidArgumentError
from prefixd.images.decoding import Described, from_decoder
from prefixd.images.token_counts import FixedCount, GridCount, ImageProcessor, TileCount

sides = st.integers(1, 3000)
PINPOINTS = [(height, width) for height in (28, 56, 84) for width in (28, 56, 84)]


@given(sides, sides)
def test_tiles_are_those_of_llava_onevision(height: int, width: int) -> None:
    counts = TileCount(side=28, patches=4, most_tiles=3, resolutions=PINPOINTS)
    theirs = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=PINPOINTS),
        num_image_tokens=16,
        vision_aspect_ratio="anyres_max_3",
    )
    theirs._get_unpadded_features = lambda *args: LlavaOnevisionProcessor._get_unpadded_features(theirs, *args)
    expected = LlavaOnevisionProcessor._get_number_of_features(theirs, height, width, 28, 28)
    assert counts.tokens(height, width) == expected


@given(sides, sides)
def test_a_grid_is_that_of_qwen2_5_vl(height: int, width: int) -> None:
    theirs = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, size={"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 300}
    )
    counts = GridCount(side=28, least_pixels=28 * 28 * 4, most_pixels=28 * 28 * 300)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidArgumentError, match=rf"{width} x {height} pixels.*cut it into pieces"):
            counts.tokens(height, width)
    else:
        assert counts.tokens(height, width) == theirs.get_number_of_image_patches(height, width, {}) // 4


def save(folder: Path, config: object, **processor: object) -> Path:
    config.save_pretrained(folder)  # type: ignore[attr-defined]
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def described(folder: Path) -> Described:
    """What a decode process says of a model directory."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "prefixd.images.decode_process", "--parent", str(os.getpid())]
    command += ["--fd", str(theirs.fileno()), "--memory", "0"]
    command += ["--limits", '{"images": 1, "image_bytes": 1, "image_pixels": 1}', str(folder)]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]):
        theirs.close()
        said = from_decoder(ours.makefile("rb").readline())
        ours.shutdown(socket.SHUT_RDWR)
    assert isinstance(said, Described)
    return said


def read_image_processor(folder: Path) -> ImageProcessor:
    found = described(folder).processor
    assert found is not None
    return found


@pytest.mark.slow
def test_a_model_directory_says_all_of_it(tmp_path: Path) -> None:
    folder = save(
        tmp_path / "llava",
        LlavaOnevisionConfig(vision_config={"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 7}),
        image_processor_type="LlavaOnevisionImageProcessor",
        size={"height": 28, "width": 28},
        image_grid_pinpoints=[[28, 28], [28, 56]],
    )
    found = read_image_processor(folder)
    assert found.counts == TileCount(side=28, patches=4, most_tiles=9, resolutions=[(28, 28), (28, 56)])
    assert len(found.digest) == 32
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"do_normalize": False}))
    other = read_image_processor(folder)
    assert other.counts == found.counts
    assert other.digest != found.digest, "another processor makes another image of a file"


@pytest.mark.parametrize(
    ("config", "processor", "counts"),
    [
        (
            Qwen2_5_VLConfig(),
            {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 24},
            GridCount(side=28, least_pixels=28 * 28, most_pixels=28 * 28 * 24),
        ),
        (Gemma3Config(mm_tokens_per_image=16), {"image_processor_type": "Gemma3ImageProcessor"}, FixedCount(16)),
        (MllamaConfig(), {"image_processor_type": "MllamaImageProcessor"}, FixedCount(1)),
    ],
)
@pytest.mark.slow
def test_the_families(tmp_path: Path, config: object, processor: dict[str, object], counts: object) -> None:
    assert read_image_processor(save(tmp_path / "model", config, **processor)).counts == counts


@pytest.mark.slow
def test_a_directory_without_a_processor_is_refused_in_one_line(tmp_path: Path) -> None:
    Gemma3Config().save_pretrained(tmp_path)
    said = described(tmp_path)
    assert said.processor is None
    assert "preprocessor_config.json" in said.error and "\n" not in said.error


@pytest.mark.slow
def test_the_daemons_part_loads_neither_torch_nor_transformers() -> None:
    rooms = "prefixd.images.image_files, prefixd.images.identity, prefixd.serving.images.image_decoder"
    program = f"import sys, {rooms}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "prefixd.images.token_counts" in loaded
    assert not {"torch", "transformers"} & set(loaded)
