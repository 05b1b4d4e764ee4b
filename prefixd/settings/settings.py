"""The configuration: one typed tree with defaults that work.

The first source that has a value decides: a flag of the command line, a `PREFIXD_*` environment variable
(`PREFIXD_CPU__BYTES=8GiB`), `prefixd.toml`, the default below. There is no other way to set one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic import model_validator as check_together

from prefixd.base.codec_names import CodecName
from prefixd.base.errors import ConfigError
from prefixd.base.setting_sources import ANY_NAME, gather_layers, is_known
from prefixd.base.tenancy.tenants import COMMON, Quota, TierQuota, check_guarantees, check_tenant_name
from prefixd.base.tiers import QUOTA_TIERS
from prefixd.settings.field_types import AbsolutePath, Section, default_data_dir
from prefixd.settings.inference import SchedulerSettings, WorkerSettings
from prefixd.settings.server import EventSettings, ServerSettings, TracingSettings, without_authority
from prefixd.settings.tenants import TenantSettings
from prefixd.settings.tiers import (
    CacheSettings,
    CpuSettings,
    DiskSettings,
    GpuSettings,
    RemoteSettings,
    TransferSettings,
)

_COMMON_DIVISOR = 4


class Settings(Section):
    """All settings."""

    data_dir: AbsolutePath = Field(default_factory=default_data_dir)
    """Directory for files that must outlive the daemon."""
    server: ServerSettings = Field(default_factory=ServerSettings)
    gpu: GpuSettings = Field(default_factory=GpuSettings)
    cpu: CpuSettings = Field(default_factory=CpuSettings)
    disk: DiskSettings = Field(default_factory=DiskSettings)
    remote: RemoteSettings = Field(default_factory=RemoteSettings)
    transfers: TransferSettings = Field(default_factory=TransferSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    events: EventSettings = Field(default_factory=EventSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    scheduler: SchedulerSettings = Field(default_factory=SchedulerSettings)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)
    tenants: dict[Annotated[str, AfterValidator(check_tenant_name)], TenantSettings] = Field(default_factory=dict)
    """Tenants by name, each a section [tenants.NAME] of the file; a tenant without a section has no quotas."""

    @check_together(mode="after")
    def _check_common_blocks(self) -> Self:
        if self.cache.share_after > 1 and not self.cpu.bytes:
            raise ValueError(
                f"cache.share_after = {self.cache.share_after}, but blocks become common in the CPU tier, and there is "
                "none (cpu.bytes = 0); raise cpu.bytes, or set cache.share_after to 0 or 1"
            )
        return self

    @check_together(mode="after")
    def _check_encryption(self) -> Self:
        named = sorted(name for name, tenant in self.tenants.items() if tenant.encryption_key_file is not None)
        if named and self.disk.encryption_key_file is None and self.cache.share_after:
            raise ValueError(
                f"tenants.{named[0]}.encryption_key_file is set, but with cache.share_after = {self.cache.share_after} "
                "blocks become common, and those would be on disk in clear; set disk.encryption_key_file, too"
            )
        return self

    @check_together(mode="after")
    def _check_drives(self) -> Self:
        """Before a directory is made: one inside another would be a foreign file in that one at every later start."""
        for (name, path), (other_name, other) in combinations(self.disk_paths.items(), 2):
            if path == other:
                how = "is the same directory as"
            elif path in other.parents:
                how = "is inside"
            elif other in path.parents:
                how = "contains"
            else:
                continue
            raise ValueError(
                f"{other_name} = {other} {how} {name} = {path}; give each drive a directory of its own, none inside "
                "another"
            )
        return self

    def on_device(self, device: str) -> Self:
        """Returns the settings with the defaults of the model's device, such as "cuda:0", for all that are not set."""
        if not device.startswith("cuda"):
            return self
        sections: dict[str, dict[str, object]] = {
            "gpu": {"bytes": "auto"},
            "worker": {"max_running": 64, "max_step_tokens": 4096},
        }
        update = {}
        for name, defaults in sections.items():
            section = getattr(self, name)
            unset = {each: value for each, value in defaults.items() if each not in section.model_fields_set}
            update[name] = section.model_copy(update=unset)
        return self.model_copy(update=update)

    @property
    def quotas(self) -> dict[str, Quota]:
        """Quotas by tenant, with the quota of common blocks."""
        quotas = {name: tenant.quota for name, tenant in self.tenants.items()}
        if self.cache.share_after > 1:
            quotas[COMMON] = Quota(tiers=(TierQuota(), *map(self._common_quota, (self.cpu.bytes, self.disk.bytes))))
        return quotas

    @property
    def codecs(self) -> dict[str, CodecName | None]:
        """Codecs by tenant; None: as the tier's setting says."""
        return {name: tenant.codec for name, tenant in self.tenants.items()}

    def _common_quota(self, tier_bytes: int) -> TierQuota:
        most = self.cache.common_bytes
        return TierQuota(most_bytes=tier_bytes // _COMMON_DIVISOR if most is None else most)

    @check_together(mode="after")
    def _check_gpu_tier(self) -> Self:
        if self.worker.enabled:
            if not self.gpu.bytes:
                raise ValueError("gpu.bytes = 0, but a model needs room for its KV; leave gpu.bytes out or raise it")
            if self.gpu.elastic and self.worker.kv == "paged":
                raise ValueError(
                    "gpu.least_bytes and gpu.most_bytes let the GPU tier grow, and with worker.kv = paged it has a "
                    "fixed size; leave them out, or worker.kv"
                )
            return self
        for name in ("least_bytes", "most_bytes"):
            if getattr(self.gpu, name):
                raise ValueError(
                    f"gpu.{name} = {getattr(self.gpu, name)}, but without a model there is no GPU tier; set "
                    f"worker.model or worker.embedded, or leave gpu.{name} out"
                )
        if "bytes" not in self.gpu.model_fields_set:
            # The settings are frozen, but this check still belongs to their creation.
            object.__setattr__(self, "gpu", self.gpu.model_copy(update={"bytes": 0}))
        elif self.gpu.bytes:
            raise ValueError(
                f"gpu.bytes = {self.gpu.bytes}, but without a model there is no GPU tier; "
                "set worker.model or worker.embedded, or leave gpu.bytes out"
            )
        return self

    @check_together(mode="after")
    def _check_tenants(self) -> Self:  # runs after `_check_gpu_tier`, which sets gpu.bytes to 0 without a model
        for tier in QUOTA_TIERS:
            for name, tenant in self.tenants.items():
                least, most = getattr(tenant, f"{tier}_guaranteed"), getattr(tenant, f"{tier}_most")
                if most is not None and least > most:
                    raise ValueError(
                        f"tenants.{name}.{tier}_guaranteed = {least} is above tenants.{name}.{tier}_most = {most}; "
                        "lower the first or raise the second"
                    )
            size = getattr(self, tier).bytes
            larger = "" if tier != "gpu" or self.worker.enabled else "set worker.model: without it there is no GPU tier"
            if tier == "gpu" and self.gpu.elastic:
                size, larger = self.gpu.least_bytes or 0, "raise gpu.least_bytes"
            if size != "auto":
                check_guarantees(self.quotas, tier, size, larger)
        for name, tenant in self.tenants.items():
            if tenant.certificates and self.server.tls_client_ca is None:
                raise ValueError(without_authority(f"tenants.{name}.certificates"))
            if tenant.map_memory and not tenant.uids:
                raise ValueError(
                    f"tenants.{name}.map_memory = true needs users in tenants.{name}.uids, and there are none; name "
                    "them, or leave map_memory out"
                )
        for kind in ("uids", "certificates"):
            owners: dict[object, str] = {}
            for name, tenant in self.tenants.items():
                for each in getattr(tenant, kind):
                    if owners.setdefault(each, name) != name:
                        raise ValueError(
                            f"tenants.{name}.{kind} has {each!r}, which tenants.{owners[each]} has, too; keep one"
                        )
        return self

    @property
    def disk_path(self) -> Path:
        """The directory of the disk tier, which has its index."""
        return self.disk.path or self.data_dir / "blocks"

    @property
    def disk_paths(self) -> dict[str, Path]:
        """All directories of the disk tier, by the settings that name them."""
        more = self.disk.more_paths
        return {"disk.path": self.disk_path} | {f"disk.more_paths[{at}]": path for at, path in enumerate(more)}

    @classmethod
    def load(
        cls,
        config_file: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """Returns the effective settings.

        Args:
            config_file: the file; by default the one that `find_config_file` finds.
            overrides: values of flags, nested (`{"cpu": {"bytes": "1GiB"}}`) or dotted (`{"cpu.bytes": "1GiB"}`).
            environ: environment variables; by default those of the process.

        Raises:
            ConfigError: a value is invalid; the message has one line.
        """
        return cls.load_with_sources(config_file, overrides, environ)[0]

    @classmethod
    def load_with_sources(
        cls,
        config_file: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> tuple[Self, dict[str, str]]:
        """Returns the settings as `load` does, and the source of each value that is not a default, by dotted name."""
        known = dotted_names()
        values, sources = gather_layers(known, config_file, overrides or {}, os.environ if environ is None else environ)
        try:
            return cls.model_validate(values), sources
        except ValidationError as error:
            raise ConfigError(_one_line(error, known, sources)) from error


_TENANTS = "tenants"


def dotted_names(section: type[BaseModel] = Settings, prefix: str = "") -> dict[str, str]:
    """Returns the description of every setting by dotted name; `tenants.NAME.cpu_most` stands for any tenant's."""
    names: dict[str, str] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names |= dotted_names(field.annotation, f"{prefix}{name}.")
        elif name == _TENANTS:
            names |= dotted_names(TenantSettings, f"{name}.{ANY_NAME}.")
        else:
            names[prefix + name] = field.description or ""
    return names


def dotted_values(section: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Returns the value of every setting by dotted name, in the order of declaration."""
    values: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            values |= dotted_values(value, f"{prefix}{name}.")
        elif name == _TENANTS:
            for tenant, settings in value.items():
                values |= dotted_values(settings, f"{name}.{tenant}.")
        else:
            values[prefix + name] = value
    return values


def _one_line(error: ValidationError, known: Mapping[str, str], sources: Mapping[str, str]) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    name = ".".join(part for part in first["loc"] if isinstance(part, str) and part != "[key]")  # a number: in a list
    source = f" (set by {sources[name]})" if name in sources else ""
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "literal_error":
        line = f"{name} = {first['input']!r}: use {first['ctx']['expected']}{source}"
    elif is_known(name, known) or "[key]" in first["loc"]:
        line = f"{name} = {str(first['input'])!r}: {message}{source}"
    else:
        # The settings contradict each other, and the message names them.
        line = message
    line = re.sub(r"://[^/@\s]*@", "://...@", line)  # a password in a URL is not for the log
    return line if len(problems) == 1 else f"{line} (and {len(problems) - 1} more)"
