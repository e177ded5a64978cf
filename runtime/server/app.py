"""The FastAPI application: routes, error handlers and middleware, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request

import qtool
from qtool.errors import QtoolError
from qtool.runtime.server.errors import HttpError, from_validation, to_http_error
from qtool.runtime.server.interfaces import EngineClient, JsonObject, TextCodec
from qtool.runtime.server.middleware import ApiKey, BodyLimit, CountErrors
from qtool.runtime.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from qtool.runtime.server.service import Service

# A prompt of a million tokens as JSON; TGI stops at 2 MB.
DEFAULT_MAX_BODY_BYTES = 4 * 2**20


def create_app(
    engine: EngineClient,
    tokenizer: TextCodec,
    *,
    api_key: str | None = None,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    allow_chat_template: bool = False,
) -> FastAPI:
    """The server of one engine, as an ASGI application.

    Args:
        engine: runs on its own thread; the application neither starts nor stops it.
        tokenizer: its model's.
        api_key: asked for under /v1 when given.
        max_body_bytes: larger bodies are answered with 413.
        allow_chat_template: let clients send chat templates (programs, run in a sandbox).
    """
    service = Service(engine, tokenizer, allow_chat_template=allow_chat_template)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="qtool",
        version=qtool.__version__,
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from another host
        redoc_url=None,
    )
    app.state.service = service
    _add_generation_routes(app, service)
    _add_state_routes(app, service)
    _add_error_handlers(app, service)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    if api_key is not None:
        app.add_middleware(ApiKey, api_key=api_key)
    app.add_middleware(CountErrors, metrics=service.metrics)
    return app


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody) -> Response:
        return await service.chat(body)

    @app.post("/v1/completions", response_model=None)
    async def complete(body: CompletionBody) -> Response:
        return await service.complete(body)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> JsonObject:
        return await service.tokenize(body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> JsonObject:
        return await service.detokenize(body)


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> JsonObject:
        return service.models()

    # A served name may hold slashes.
    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JsonObject:
        return service.model(name)

    @app.get("/health")
    async def health() -> JsonObject:
        service.bridge.check_open()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/server_info")
    async def server_info() -> JsonObject:
        return service.server_info()

    @app.get("/version")
    async def version() -> JsonObject:
        return {"version": qtool.__version__}


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    @app.exception_handler(QtoolError)
    async def ours(_: Request, error: QtoolError) -> Response:
        return to_http_error(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return from_validation(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return HttpError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        # Answered outside of the middleware that counts. Uvicorn logs the traceback and closes
        # the connection, which the client must know.
        service.metrics.error(500)
        message = f"Internal error ({type(error).__name__}); see the server's log."
        return HttpError(500, message, headers={"Connection": "close"}).response()
