"""The OpenAI endpoints: models and chat completions."""

from __future__ import annotations

import json
import secrets
import time
from importlib.resources import files
from typing import Any

from aiohttp import web

from pie_server.api.backend import BACKEND, METRICS, SETTINGS, ModelCard
from pie_server.api.inferlet_api import run_api
from pie_server.api.openai_schema import parse_chat_request, show
from pie_server.api.readiness import require_ready
from pie_server.config import Settings
from pie_server.errors import ApiError

_CHAT = "openai_chat.py"


def builtin_source(file: str) -> str:
    """The source of a built-in inferlet."""
    return (files("inferlet_sdk") / "builtin" / file).read_text(encoding="utf-8")


class _NotJson(Exception):
    """A word that Python's parser takes and JSON does not have."""


def _no_constant(name: str) -> Any:
    raise _NotJson(name)


async def read_json(request: web.Request) -> Any:
    """The body as JSON. Raises ApiError 400; a body over the limit becomes 413."""
    raw = await request.read()
    if not raw:
        raise ApiError(400, "the request body is empty; send a JSON object", code="invalid_json")
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as err:
        raise ApiError(400, f"the request body is not UTF-8 (byte {err.start})", code="invalid_json") from err
    except json.JSONDecodeError as err:
        raise ApiError(
            400, f"the request body is not JSON: {err.msg} at line {err.lineno}, column {err.colno}", code="invalid_json"
        ) from err
    except _NotJson as err:
        raise ApiError(400, f"the request body is not JSON: {err} is no number in JSON", code="invalid_json") from None
    except RecursionError as err:
        raise ApiError(400, "the request body is nested too deeply", code="invalid_json") from err
    except ValueError as err:  # an integer of more digits than Python converts
        raise ApiError(400, "the request body holds a number that is too long", code="invalid_json") from err


def _model_object(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "pie",
        "architecture": card.architecture,
        "context_length": card.context,
    }


def _check_model(card: ModelCard, name: str | None) -> None:
    if name is not None and name != card.name:
        message = f"the model {show(name)} is not served here; this server has {show(card.name)}"
        raise ApiError(404, message, code="model_not_found", param="model")


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    return web.json_response({"object": "list", "data": [_model_object(request.app[BACKEND].card)]})


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    card = request.app[BACKEND].card
    _check_model(card, request.match_info["id"])
    return web.json_response(_model_object(card))


class Slots:
    """Counts the inference requests that run now and refuses one too many."""

    def __init__(self, limit: int, retry_after_s: int) -> None:
        self._limit, self._retry_after_s, self.used = limit, retry_after_s, 0

    def __enter__(self) -> None:
        if self.used >= self._limit:
            message = f"{self.used} requests are running, the limit of this server; try again shortly"
            headers = {"Retry-After": str(self._retry_after_s)}
            raise ApiError(429, message, code="too_many_requests", kind="rate_limit_error", headers=headers)
        self.used += 1

    def __exit__(self, *_: object) -> None:
        self.used -= 1


SLOTS: web.AppKey[Slots] = web.AppKey("slots", Slots)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions, whole or as a stream."""
    backend, settings = request.app[BACKEND], request.app[SETTINGS]
    require_ready(backend, settings.retry_after_s)
    checked = parse_chat_request(await read_json(request))
    _check_model(backend.card, checked["model"])
    payload = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": backend.card.name,
        "request": checked,
    }
    with request.app[SLOTS], request.app[METRICS].active.track_inprogress():
        return await run_api(request, builtin_source(_CHAT), _CHAT, payload, stream=checked["stream"])


def add_routes(app: web.Application, settings: Settings) -> None:
    """Adds the OpenAI endpoints to `app`."""
    app[SLOTS] = Slots(settings.max_concurrent, settings.retry_after_s)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{id:.+}", get_model)
    app.router.add_post("/v1/chat/completions", chat_completions)
