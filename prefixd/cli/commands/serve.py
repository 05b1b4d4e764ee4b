"""`prefixd serve`: runs the daemon."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prefixd.base.errors import ConfigError
from prefixd.base.extras import require
from prefixd.base.setting_sources import find_config_file
from prefixd.cli.commands.config import Assignments, ConfigFile, parse_assignments
from prefixd.cli.failures import examples
from prefixd.cli.output.log_format import log_to_stderr
from prefixd.process.start import ensure_temporary_folder

if TYPE_CHECKING:
    from prefixd.server.daemon import Endpoints

EXAMPLES = examples(
    "prefixd serve --embedded --http 127.0.0.1:8000",
    "prefixd serve --model meta-llama/Llama-3.2-1B --gpu-bytes 8GiB --cpu-bytes 32GiB --disk-bytes 200GiB",
    "prefixd serve --cpu-bytes 64GiB --log-level debug --log-format json",
    "prefixd serve --cpu-bytes 64GiB --tcp 0.0.0.0:7070 --tls-cert host.pem --tls-key host.key --tokens tokens.txt",
)

log = logging.getLogger("prefixd.start")

TCP = "For clients on other hosts"
HTTP = "HTTP"
TIERS = "Tiers (sizes such as 8GiB, 512MiB, 4096)"
WORKER = "Model"
QUEUE = "Queue and eviction"

_SWITCH_S = 0.0005
"""Seconds after which a thread that hashes or writes small blocks releases the interpreter's lock. The event loop
releases the lock at every wait and every larger numpy operation; with Python's default it would wait 5 ms to get it
back."""


def _option(name: str, panel: str | None, help: str, metavar: str | None = None) -> Any:
    return typer.Option(name, metavar=metavar, rich_help_panel=panel, show_default=False, help=help)


def serve_command(
    context: typer.Context,
    config: ConfigFile = None,
    data_dir: Annotated[
        Path | None, _option("--data-dir", None, "Directory for files that must outlive the daemon.", "DIR")
    ] = None,
    socket: Annotated[Path | None, _option("--socket", None, "Unix socket to listen on.", "PATH")] = None,
    tcp: Annotated[
        str | None, _option("--tcp", TCP, "Also listen here; needs TLS or --insecure-tcp.", "HOST:PORT")
    ] = None,
    tls_cert: Annotated[Path | None, _option("--tls-cert", TCP, "Certificate of the TCP port, PEM.", "FILE")] = None,
    tls_key: Annotated[Path | None, _option("--tls-key", TCP, "The certificate's key, PEM.", "FILE")] = None,
    tls_client_ca: Annotated[
        Path | None,
        _option("--tls-client-ca", TCP, "Accept only clients with a certificate from these authorities, PEM.", "FILE"),
    ] = None,
    tokens: Annotated[
        Path | None,
        _option(
            "--tokens", TCP, "Accept only clients with one of these tokens: lines `name role token \\[tenant]`.", "FILE"
        ),
    ] = None,
    insecure_tcp: Annotated[
        bool | None,
        typer.Option("--insecure-tcp", rich_help_panel=TCP, show_default=False, help="Open the TCP port without TLS."),
    ] = None,
    metrics: Annotated[
        str | None,
        _option("--metrics", HTTP, "Metrics, health and a page for operators, such as 127.0.0.1:9470.", "HOST:PORT"),
    ] = None,
    http: Annotated[
        str | None,
        _option("--http", HTTP, "OpenAI's interface for users, and the operators' pages.", "HOST:PORT"),
    ] = None,
    insecure_http: Annotated[
        bool | None,
        typer.Option(
            "--insecure-http",
            rich_help_panel=HTTP,
            show_default=False,
            help="Open them to other hosts without TLS (with it: https://HOST:PORT).",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        _option(
            "--model",
            WORKER,
            "Also serve this Hugging Face model: its directory, or the name of a download.",
            "DIR|NAME",
        ),
    ] = None,
    embedded: Annotated[
        bool | None,
        typer.Option(
            "--embedded",
            rich_help_panel=WORKER,
            show_default=False,
            help="Serve the small random model that comes with prefixd.",
        ),
    ] = None,
    device: Annotated[str | None, _option("--device", WORKER, "auto, cpu, cuda or cuda:N.", "DEVICE")] = None,
    gpu_bytes: Annotated[
        str | None,
        _option(
            "--gpu-bytes",
            TIERS,
            "GPU tier (with a model only); auto: the device's free memory, less a reserve.",
            "SIZE",
        ),
    ] = None,
    cpu_bytes: Annotated[str | None, _option("--cpu-bytes", TIERS, "CPU tier.", "SIZE")] = None,
    disk_bytes: Annotated[str | None, _option("--disk-bytes", TIERS, "Disk tier; 0: none.", "SIZE")] = None,
    policy: Annotated[
        str | None,
        _option(
            "--policy", QUEUE, "Order of the queue: fcfs, fpf, relaxed-fpf, lpm, shortest-ready or deadline.", "POLICY"
        ),
    ] = None,
    eviction: Annotated[
        str | None,
        _option(
            "--eviction",
            QUEUE,
            "Order of eviction: lru, fifo, random, lfu, s3-fifo or weighing.",
            "POLICY",
        ),
    ] = None,
    look_ahead: Annotated[
        str | None,
        _option(
            "--look-ahead",
            QUEUE,
            "Number of waiting requests for which the daemon loads prefixes before their turn, or auto.",
            "COUNT",
        ),
    ] = None,
    assignments: Assignments = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option(show_default=False, help="Least severity of messages on stderr; info. debug: each request, too."),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(show_default=False, help="Messages on stderr: text, or a JSON object a line."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Announce readiness as one line of JSON.")] = False,
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C.

    prefixd.toml and environment variables such as PREFIXD_CPU__BYTES can set the same values; a flag overrides both.
    """
    require("daemon", "prefixd serve")
    from prefixd.settings import Settings
    from prefixd.settings.checks import check_start

    flags = {
        "data_dir": data_dir,
        "server.socket": socket,
        "server.tcp": tcp,
        "server.tls_cert": tls_cert,
        "server.tls_key": tls_key,
        "server.tls_client_ca": tls_client_ca,
        "server.tokens": tokens,
        "server.insecure_tcp": insecure_tcp,
        "server.metrics": metrics,
        "server.http": http,
        "server.insecure_http": insecure_http,
        "worker.model": model,
        "worker.embedded": embedded,
        "gpu.device": device,
        "gpu.bytes": gpu_bytes,
        "cpu.bytes": cpu_bytes,
        "disk.bytes": disk_bytes,
        "scheduler.policy": policy,
        "cache.eviction": eviction,
        "scheduler.look_ahead": look_ahead,
        "server.log_level": log_level,
        "server.log_format": log_format,
    }

    file = (config or find_config_file(os.environ) or Path()).absolute()

    def read_settings() -> Settings:
        # Reads the file of the start again. If it is gone, this fails; another file would remove all quotas.
        return Settings.load(None if file.is_dir() else file, _gather_overrides(flags, assignments))

    settings = read_settings()
    check_start(settings)
    if settings.tracing.endpoint is not None:
        # Other packages bring parts of OpenTelemetry, too.
        modules = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc")
        require("otel", f"tracing.endpoint = {settings.tracing.endpoint}", *modules)
    if settings.worker.enabled:
        model = settings.worker.model
        require("worker", "worker.embedded = true" if model is None else f"worker.model = {model}")
    ensure_temporary_folder(settings.data_dir / "tmp")
    log_to_stderr(settings.server.log_level, settings.server.log_format)

    from prefixd.server.daemon import serve

    def announce(endpoints: Endpoints) -> None:
        log.info("settings: %s", f"{file}, variables and flags" if file.is_file() else "variables and flags, no file")
        typer.echo(_ready_json(endpoints) if as_json else _ready_line(endpoints))

    async def serve_and_leave() -> None:
        code = await serve(settings, ready=announce, ops=context.obj, read_settings=read_settings)
        # The daemon has saved everything. Python would wait for threads, and one may read a model for minutes.
        os._exit(code)

    sys.setswitchinterval(_SWITCH_S)
    asyncio.run(serve_and_leave())


def _gather_overrides(flags: dict[str, Any], assignments: list[str] | None) -> dict[str, Any]:
    given = {name: value for name, value in flags.items() if value is not None}
    others = parse_assignments(assignments)
    twice = sorted(given.keys() & others.keys())
    if twice:
        raise ConfigError(f"{twice[0]} is given by its flag and by --set; keep one")
    return given | others


def _ready_line(endpoints: Endpoints) -> str:
    others = [each for each in (endpoints.tcp, endpoints.http, endpoints.metrics) if each]
    return f"prefixd is ready at {', '.join([f'unix:{endpoints.socket}', *others])} (pid {os.getpid()}; Ctrl-C ends it)"


def _ready_json(endpoints: Endpoints) -> str:
    return json.dumps(
        {
            "socket": str(endpoints.socket),
            "tcp": endpoints.tcp,
            "metrics": endpoints.metrics,
            "http": endpoints.http,
            "pid": os.getpid(),
            "opening_s": round(endpoints.opening_s, 3),
        }
    )
