"""Settings of the server: defaults, then PIE_* environment variables, then command line flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from pie_server.errors import UserError
from pie_server.hosts import host_name, origin_name

DeviceName = Literal["auto", "cpu", "webgpu"]


class Settings(BaseSettings):
    """Every field can be set as PIE_<FIELD> in the environment. Lists are comma separated there."""

    model_config = SettingsConfigDict(env_prefix="PIE_", extra="ignore")

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    model: str | None = Field(None, description="name or path of a checkpoint; None is the store's default model")
    device: DeviceName = "auto"
    poem: Path | None = Field(None, description="a model file that replaces the built-in one of this architecture")
    kv_pool_mb: int = Field(512, ge=1, le=1 << 20, description="MB (2^20 bytes) of KV cache on the device")
    deterministic: bool = Field(False, description="the same request with the same seed gives the same tokens alone and in any batch")
    timeline: bool = Field(False, description="answer GET /debug/timeline with what the last steps held")

    prewarm: Annotated[list[Path], NoDecode] = Field(
        default_factory=list,
        description="JSON files of chat messages, beginnings of conversations that are computed before the server is ready",
    )
    page: Path | None = Field(None, description="folder of the page's files; None is the one built for the present sources")

    max_body_mb: float = Field(8.0, gt=0, le=1024, description="largest request body in MB (2^20 bytes)")
    max_concurrent: int = Field(64, ge=1, le=4096, description="inference requests at one time; more get 429")
    retry_after_s: int = Field(1, ge=1, le=3600, description="seconds told to clients that come too early or too many")
    shutdown_s: float = Field(5.0, ge=0, le=600, description="seconds that running requests get to finish after SIGTERM")
    allowed_hosts: Annotated[list[str], NoDecode] = Field(
        default_factory=list, description='host names that requests may ask for, besides loopback and the bound address; "*" is any'
    )
    cors_origins: Annotated[list[str], NoDecode] = Field(default_factory=list, description='origins of web pages that may call; "*" is any')
    log_format: Literal["json", "text"] = "text"

    @field_validator("allowed_hosts", "cors_origins", "prewarm", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("prewarm", mode="before")
    @classmethod
    def _some_path(cls, value: Any) -> Any:
        if isinstance(value, list) and "" in value:  # which a path would take for the folder one is in
            raise _BadItem("", "the path of a JSON file of chat messages")
        return value

    @field_validator("allowed_hosts", "cors_origins")
    @classmethod
    def _named(cls, value: list[str], info: ValidationInfo) -> list[str]:
        return [_name(host_name if info.field_name == "allowed_hosts" else origin_name, item) for item in value]


class _BadItem(ValueError):
    """An item of a list; `wanted` says what to use instead."""

    def __init__(self, item: str, wanted: str) -> None:
        super().__init__(wanted)
        self.item, self.wanted = item, wanted


def _name(form: Callable[[str], str], item: str) -> str:
    try:
        return form(item)
    except ValueError as error:
        raise _BadItem(item, str(error)) from None


def load_settings(**flags: Any) -> Settings:
    """Settings with `flags` over the environment; a flag that is None was not given. Raises UserError naming the field and value."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as err:
        first = err.errors()[0]
        field = str(first["loc"][0])
        flag = f"--{FLAGS.get(field, field).replace('_', '-')}"
        places = (flag, f"PIE_{field.upper()}") if field in given else (f"PIE_{field.upper()}", flag)
        bad = first.get("ctx", {}).get("error")
        value, wanted = (bad.item, bad.wanted) if isinstance(bad, _BadItem) else (str(first.get("input")), _wanted(field))
        raise UserError(f"{places[0]} (or {places[1]}) is {value!r}; use {wanted}") from None


FLAGS = {"cors_origins": "cors_origin", "allowed_hosts": "allowed_host"}  # a list's flag gives one item
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def _wanted(field: str) -> str:
    """What a field takes, in words."""
    info = Settings.model_fields[field]
    if get_origin(info.annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(info.annotation)))}"
    bounds = {name: getattr(rule, name) for rule in info.metadata for name in ("ge", "gt", "le") if getattr(rule, name, None) is not None}
    low = f" from {bounds['ge']}" if "ge" in bounds else f" above {bounds['gt']} and" if "gt" in bounds else ""
    high = f" {'to' if 'ge' in bounds else 'at most'} {bounds['le']}" if "le" in bounds else ""
    return f"{_KINDS.get(info.annotation, 'another value')}{low}{high}"  # type: ignore[arg-type]
