"""The HTTP application: OpenAI's completions, chat and models calls over one engine.

``/v1/...`` asks for the API key where one is set; ``/health`` and ``/version`` are open. Every
error, from a misspelt parameter to an unknown address, has OpenAI's shape (`serving.errors`).
"""

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import quantforge
from quantforge.errors import QuantForgeError
from quantforge.models.tokenizer import Tokenizer
from quantforge.serving.errors import SERVER_ERROR, ApiError, from_validation
from quantforge.serving.replies import ChatReply, CompletionReply, Reply
from quantforge.serving.sampling import chat_jobs, completion_jobs
from quantforge.serving.schemas import ChatBody, CompletionBody, GenerationBody
from quantforge.serving.stream import ClientGoneError, EventStream, unless_disconnected
from quantforge.serving.worker import EngineStoppedError, EngineWorker, Job, ServedEngine

B = TypeVar("B", bound=GenerationBody)
JobsOf = Callable[[B, Tokenizer, int, str], list[Job]]

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; nobody reads it but the log."""


def create_app(
    engine: ServedEngine,
    tokenizer: Tokenizer,
    model_name: str,
    *,
    api_key: str | None = None,
    on_engine_failure: Callable[[], None] | None = None,
) -> FastAPI:
    """The application that serves `engine` as `model_name`.

    The engine's thread lives as long as the application's lifespan; `app.state.worker` is the
    `EngineWorker`. `on_engine_failure` is called on the event loop when the engine breaks.
    """
    worker = EngineWorker(engine, on_engine_failure)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await worker.stop()

    app = FastAPI(
        title="QuantForge",
        version=quantforge.__version__,
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.worker = worker
    service = _Service(worker, tokenizer, model_name)
    app.include_router(_operation(worker))
    app.include_router(_openai(service), dependencies=[Depends(_key_check(api_key))])
    _answer_errors(app)
    return app


class _Service:
    """Turns a parsed request into jobs, and the jobs' outputs into a response."""

    def __init__(self, worker: EngineWorker, tokenizer: Tokenizer, model_name: str) -> None:
        self.worker = worker
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.created = int(time.time())

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "quantforge",
            "max_model_len": self.worker.engine.max_model_len,
        }

    def check_model(self, name: str) -> None:
        if name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def answer(
        self, request: Request, body: B, jobs_of: JobsOf[B], reply_class: type[Reply]
    ) -> Response:
        """Generates what `body` asks for. Tokenizing happens off the event loop."""
        self.check_model(body.model)
        request_id = f"{reply_class.id_prefix}-{uuid.uuid4().hex}"
        limit = self.worker.engine.max_model_len
        jobs = await asyncio.to_thread(jobs_of, body, self.tokenizer, limit, request_id)
        reply = reply_class(
            request_id,
            self.model_name,
            self.tokenizer,
            num_choices=len(jobs),
            num_prompt_tokens=sum(len(job.prompt_ids) for job in jobs) // body.n,
        )
        generation = await self.worker.submit(jobs)
        if body.stream:
            events = reply.events(generation.outputs(), include_usage=body.include_usage)
            return EventStream(events, generation.close)
        try:
            whole = reply.document(generation.outputs())
            return JSONResponse(await unless_disconnected(request.receive, whole))
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            generation.close()


def _operation(worker: EngineWorker) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 while requests can be served, 503 once the engine has failed."""
        if worker.failure is not None:
            return JSONResponse({"status": "failed"}, status_code=503)
        return JSONResponse({"status": "ok"})

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": quantforge.__version__}

    return router


def _openai(service: _Service) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card()]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.model_card()

    @router.post("/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await service.answer(request, body, completion_jobs, CompletionReply)

    @router.post("/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await service.answer(request, body, chat_jobs, ChatReply)

    return router


def _key_check(api_key: str | None) -> Callable[..., Awaitable[None]]:
    """A dependency that refuses requests without ``Authorization: Bearer <api_key>``."""

    async def check(authorization: Annotated[str | None, Header()] = None) -> None:
        if api_key is None:
            return
        kind, _, sent = (authorization or "").partition(" ")
        same = hmac.compare_digest(sent.encode("latin-1"), api_key.encode())
        if kind.lower() != "bearer" or not same:
            raise ApiError(
                401,
                "the API key is missing or wrong",
                kind="authentication_error",
                code="invalid_api_key",
            )

    return check


def _answer_errors(app: FastAPI) -> None:
    """Gives every error the shape of OpenAI's, whoever raises it."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        return _response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _response(from_validation(error.errors()))

    @app.exception_handler(QuantForgeError)
    async def unusable(request: Request, error: QuantForgeError) -> JSONResponse:
        return _response(ApiError(400, str(error)))

    @app.exception_handler(EngineStoppedError)
    async def stopped(request: Request, error: EngineStoppedError) -> JSONResponse:
        return _response(ApiError(503, str(error), kind=SERVER_ERROR))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}: {request.method} {request.url.path}"
        return _response(ApiError(error.status_code, message), error.headers)

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> JSONResponse:
        return _response(ApiError(500, "internal error; see the server's log", kind=SERVER_ERROR))


def _response(error: ApiError, headers: Any = None) -> JSONResponse:
    return JSONResponse(error.document(), status_code=error.status, headers=headers)
