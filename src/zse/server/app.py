"""What a request meets before its route: names, keys, methods, media types; and what the routes share."""

import asyncio
import time

from zse.engine.client import EngineClient, shutting_down_error
from zse.errors import ZSEError
from zse.server.admission import Admission
from zse.server.auth import HostCheck, KeyCheck
from zse.server.errors import APIError
from zse.server.exchange import Request, Response
from zse.server.routes import table


class App:
    """model_names: what `model` may say; the first is the one that is listed. text_model: a future of the ServedModel
    (tokenizer and chat template), which loads beside the engine."""

    def __init__(self, engine: EngineClient, text_model: asyncio.Future, model_names: tuple[str, ...], *,
                 admission: Admission, key: KeyCheck, hosts: HostCheck):
        self.engine, self.model_names, self.admission = engine, model_names, admission
        self.created = int(time.time())
        self.draining = False
        self._text_model, self._key, self._hosts = text_model, key, hosts

    @property
    def needs_key(self) -> bool:
        return self._key.needed

    def check_head(self, request: Request) -> None:
        """Everything that can be decided before the body is read. Raises APIError."""
        self._hosts.check(request.headers.get("host"), request.http_10)
        found = table.find(request.path)
        if found is None:
            raise APIError("not_found", "There is no such route; the API's paths begin with /v1/.")
        methods, request.parameters = found
        if any(route.scope != table.PUBLIC for route in methods.values()):
            self._key.check(request.headers.get("authorization"))
            request.connection.authenticated = True
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            allow = table.allowed(methods)
            raise APIError("method_not_allowed", f"This route takes {allow}.", headers=(("allow", allow),))
        request.route = route
        if route.method == "POST":
            self._check_body_headers(request)

    def _check_body_headers(self, request: Request) -> None:
        kind, _, parameters = request.headers.get("content-type", "").partition(";")
        charset = parameters.replace(" ", "").replace('"', "").lower()
        if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
            raise APIError("unsupported_media_type", "Send the body as 'Content-Type: application/json' in UTF-8.")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise APIError("unsupported_media_type", "Compressed request bodies are not supported.")
        if "content-length" not in request.headers and "transfer-encoding" not in request.headers:
            raise APIError("length_required", "Give the body's length in Content-Length.")

    async def handle(self, request: Request) -> Response | None:
        return await request.route.handler(self, request)

    def check_accepting(self) -> None:
        if self.draining:
            raise shutting_down_error()

    def check_model(self, name: str, param: str | None) -> None:
        if name not in self.model_names:
            raise APIError("model_not_found", "This model is not served here; GET /v1/models lists what is.", param)

    async def text_model(self):
        """The tokenizer and chat template, once they are loaded. Raises APIError when that failed: the server ends."""
        try:
            return self._text_model.result() if self._text_model.done() else await asyncio.shield(self._text_model)
        except ZSEError:
            raise APIError("engine_unavailable", "The model could not be loaded.") from None

    def health(self) -> tuple[bool, str]:
        if not self._text_model.done():
            return False, "the tokenizer is loading"
        return self.engine.health()
