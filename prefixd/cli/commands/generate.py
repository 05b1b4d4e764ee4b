"""`prefixd generate`: sends a prompt and prints the answer as it arrives."""

from __future__ import annotations

import math
import re
import sys
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixd.base.sampling import BeamSearch, Sampling
from prefixd.cli.completions import complete_models
from prefixd.cli.connect import Address, connected, run
from prefixd.cli.failures import WrongUsage, examples
from prefixd.cli.named_prefix import parse_token_ids
from prefixd.cli.output.transcript import Transcript

if TYPE_CHECKING:
    from prefixd.client import GenerateEvent

EXAMPLES = examples(
    'prefixd generate "Once upon a time" --max-tokens 64',
    "prefixd generate - < prompt.txt",
    'prefixd generate --token-ids "1,2,3,4" --json',
    'prefixd generate "The cat" --temperature 0.8 --top-k 40 --min-p 0.05 --n 4 --best-of 8',
    'prefixd generate "Once upon a time" --stop "." --stop "!" --logprobs 5 --json',
    'prefixd generate "Once upon a time" --priority -1 --deadline 2',
    'prefixd generate "<image>What is this?" --image photo.jpg',
    "prefixd generate - --retain 0:1024=50/1h --retain 1024:=-10 < prompt.txt",
    'prefixd generate "Once upon a time" --read-only',
    'prefixd generate "Once upon a time" --beams 4 --n 2 --length-penalty 0.8',
)

_UINT32 = (1 << 32) - 1
_SEARCH_OPTIONS = ("beams", "length_penalty", "early_stopping")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_RETENTION = re.compile(r"(?:(\d*):(\d*)=)?([+-]?\d+)(?:/(\d+(?:\.\d+)?)([smhd]))?", re.ASCII)


def _number(help: str, least: float, most: float = math.inf, *names: str) -> Any:
    """Returns an option for a number in a range of proto/prefixd/v1/inference.proto.

    It does not use typer's own ranges, since their error takes five lines and does not name the value.
    """
    possible = f"{least} or more" if most == math.inf else f"{least} to {most}"

    def check(option: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and not (least <= value <= most and value != math.inf):  # NaN is in no range
            raise WrongUsage(f"{option.opts[0]} is {value}; it must be {possible}")
        return value

    return typer.Option(*names, callback=check, help=f"{help}. {possible}.")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen, and when the output ends."""

    max_tokens: Annotated[int, _number("Most tokens to generate", 1, _UINT32)] = 64
    temperature: Annotated[float, _number("0: always the likeliest token", 0)] = 0.0
    top_k: Annotated[int, _number("Sample among this many likeliest tokens; 0: among all", 0, _UINT32)] = 0
    top_p: Annotated[
        float, _number("Sample among the likeliest tokens with this total probability; 0 or 1: among all", 0, 1)
    ] = 1.0
    min_p: Annotated[
        float, _number("Sample among tokens with at least this share of the likeliest one's probability", 0, 1)
    ] = 0.0
    repetition_penalty: Annotated[
        float, _number("Above 1: tokens of prompt and output become less likely", 0.01, 100)
    ] = 1.0
    presence_penalty: Annotated[float, _number("Above 0: tokens of the output become less likely", -2, 2)] = 0.0
    frequency_penalty: Annotated[
        float, _number("Above 0: tokens become less likely each time that the output has them", -2, 2)
    ] = 0.0
    seed: Annotated[int | None, _number("Makes sampling repeatable", 0, (1 << 64) - 1)] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", show_default=False, help="End before this text; may be given several times."),
    ] = None
    logprobs: Annotated[
        int | None,
        _number(
            "Show the sum of logprobs; with --json that of each token and of this many likeliest ones",
            0,
            20,
        ),
    ] = None
    beams: Annotated[int | None, _number("Search with this many beams and show the n best sequences", 1, 16)] = None
    length_penalty: Annotated[
        float | None, _number("For a beam search: above 0 favours long sequences; 1 by default", -10, 10)
    ] = None
    early_stopping: Annotated[
        bool,
        typer.Option("--early-stopping", help="End a beam search once as many sequences have ended as it has beams."),
    ] = False

    def to_sampling(self) -> Sampling:
        """Raises WrongUsage if an option of a beam search is given without --beams."""
        values = asdict(self)
        beams, length_penalty, early_stopping = (values.pop(name) for name in _SEARCH_OPTIONS)
        if beams is None and (length_penalty is not None or early_stopping):
            option = "--early-stopping" if length_penalty is None else "--length-penalty"
            raise WrongUsage(f"{option} is for a beam search; give --beams too, or leave it out")
        search = None
        if beams is not None:
            penalty = 1.0 if length_penalty is None else length_penalty
            search = BeamSearch(width=beams, length_penalty=penalty, early_stopping=early_stopping)
        return Sampling(**{**values, "stop": self.stop or ()}, beam_search=search)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A request's place in the queue, its model, and how its blocks are cached."""

    priority: Annotated[
        int, typer.Option(min=-(1 << 31), max=(1 << 31) - 1, help="Requests with lower numbers run first.")
    ] = 0
    deadline: Annotated[
        float | None,
        _number("Seconds until the first token is due, for a daemon with scheduler.policy = deadline", 1e-3),
    ] = None
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            show_default=False,
            autocompletion=complete_models,
            help="One of the daemon's models; by default its first.",
        ),
    ] = ""
    retain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[START:END=]PRIORITY[/TIME]",
            show_default=False,
            help="Cache the prompt, or its tokens from START to before END, with a priority from -100 (evicted first) "
            "to 100, for a time such as 90s, 30m, 12h or 7d; may be given several times, the last one counts.",
        ),
    ] = None
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Use cached blocks, but cache no block of this request.")
    ] = False


def generate_command(
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", show_default=False, help="The prompt; - reads standard input."),
    ] = None,
    token_ids: Annotated[
        str | None,
        typer.Option("--token-ids", metavar="IDS", show_default=False, help="The prompt as ids: 1,2,3 or '1 2 3'."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="An image (PNG, JPEG, WebP) for a placeholder in the prompt; may be given several times.",
        ),
    ] = None,
    sampling: SamplingOptions = SamplingOptions(),
    n: Annotated[int, _number("Number of sequences; more than 1 needs a temperature or beams", 1, 32, "--n")] = 1,
    best_of: Annotated[int | None, _number("Compute this many sequences and show the n likeliest", 1, 32)] = None,
    request: RequestOptions = RequestOptions(),
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object an event.")] = False,
) -> None:
    """Generate text with the daemon's model and print it as it arrives. Ctrl-C cancels the request.

    Several sequences are printed one below the other at the end.
    """
    prompt = _parse_prompt(text, token_ids)
    images = [_read_image(path) for path in image or ()]
    retentions = [_parse_retention(word) for word in request.retain or ()]
    asked = sampling.to_sampling()

    async def ask() -> None:
        from prefixd.client import Retention

        show = _print_json_event
        if not as_json:
            # Only a model with a tokenizer accepts text as a prompt or as a stop string.
            has_text = isinstance(prompt, str) or bool(asked.stop)
            show = Transcript(n, has_text=has_text, searched=asked.beam_search is not None).show
        async with connected(address) as client:
            events = client.generate(
                prompt,
                images=images,
                sampling=asked,
                n=n,
                best_of=best_of,
                priority=request.priority,
                deadline_s=request.deadline,
                model=request.model,
                retention=[Retention(*each) for each in retentions],
                read_only=request.read_only,
            )
            async with aclosing(events):
                async for event in events:
                    show(event)

    run(ask())


def _parse_retention(word: str) -> tuple[int, int, int | None, float | None]:
    """Returns priority, first token, end (exclusive) and seconds of `[START:END=]PRIORITY[/TIME]`.

    Examples: "50", "50/1h", "0:1024=50/30m", "1024:=-10".
    """
    found = _RETENTION.fullmatch(word)
    if found is None:
        raise WrongUsage(
            f"--retain {word!r} is not valid; write [START:END=]PRIORITY[/TIME]: 50/1h, 0:1024=50/30m or 1024:=-10"
        )
    start, end, priority, time, unit = found.groups()
    return int(priority), int(start or 0), int(end) if end else None, float(time) * _SECONDS[unit] if time else None


def _print_json_event(event: GenerateEvent) -> None:
    from prefixd.cli.output import json_values as plain
    from prefixd.client import Finished

    fields = asdict(event)
    if isinstance(event, Finished):
        fields["hit_tokens"] = {tier.name.lower(): tokens for tier, tokens in event.hit_tokens.items()}
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()
    plain.print_json_line({"event": name, **fields})


def _read_image(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise WrongUsage(f"--image {path} cannot be read ({error.strerror}); give a file") from error


def _parse_prompt(text: str | None, token_ids: str | None) -> str | list[int]:
    if (text is None) == (token_ids is None):
        raise typer.BadParameter("give the prompt either as text or with --token-ids")
    if token_ids is None:
        return sys.stdin.read() if text == "-" else text or ""
    return parse_token_ids(token_ids)
