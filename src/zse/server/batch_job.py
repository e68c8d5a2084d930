"""One batch: validated, its lines run, its files written. Where it stands is in the database; a job that ends early, with
its server, is begun again by the next one."""

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from zse.errors import RequestError
from zse.server import batch_lines as lines
from zse.server import database as storage
from zse.server import errors
from zse.server.api_request import APIRequest
from zse.server.database.batches import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    ENDS,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    StoredBatch,
)
from zse.server.database.connection import StorageError
from zse.server.database.files import StoredFile
from zse.server.errors import APIError
from zse.server.files import FileStore, Written, discard
from zse.server.requests.files import OUTPUT
from zse.server.routes.table import BY_PATH

if TYPE_CHECKING:
    from zse.server.batches import BatchRunner

log = logging.getLogger("zse.server")

# A line that is refused with one of these waits, as no client of it does: seconds, where the refusal says none.
WAITS_S = {
    "overloaded": 0.5,
    "rate_limit_exceeded": 1.0,
    "shutting_down": 1.0,
    "engine_restarting": 1.0,
    "engine_unavailable": 5.0,
    "storage_unavailable": 5.0,
}
LONGEST_WAIT_S = 30.0
MOST_CRASHES = 3  # of the engine under a line, which has failed then
AGAIN_S = 2.0  # until a disk that failed is tried again
RESULTS_AT_ONCE = 32
# Why what has no result has none.
_UNANSWERED = {
    CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was done."),
    EXPIRED: ("batch_expired", "The completion window ended before this request was done."),
}
_NOBODY: Any = SimpleNamespace(client="")  # in the place of a client's connection


class BatchJob:
    """One run of a batch. task: of run(). is_over: no line is to begin. num_running: lines."""

    task: asyncio.Task

    def __init__(self, app: Any, files: FileStore, runner: "BatchRunner", tenant: str, batch: StoredBatch):
        self.batch, self._app, self._files, self._runner, self._tenant = batch, app, files, runner, tenant
        self._database, self._run = app.database, partial(app.threads.run, batch.account)
        self._lines: set[asyncio.Task] = set()
        self._alone = asyncio.Lock()
        self._problem: lines.BatchProblem | None = None  # that ends it
        self.num_running, self.is_over = 0, batch.status not in (VALIDATING, IN_PROGRESS)

    def cancel(self) -> None:
        """No line begins, and those that run end without a result."""
        self.is_over = True
        for task in self._lines:
            task.cancel()
        self._runner.changed()

    def _fail(self, code: str, message: str) -> None:
        self._problem = self._problem or lines.BatchProblem(code, message)
        self.is_over = True
        self._runner.changed()

    async def run(self) -> None:
        """Validate it, or all that comes behind that. Raises StorageError: to be tried again."""
        if self.batch.status == VALIDATING:
            await self._validate()
            if self.batch.status == IN_PROGRESS:
                return  # the tenant's other batches may be first
        if self.batch.status == IN_PROGRESS:
            await self._run_lines()
        if self.batch.status not in ENDS:
            await self._finish()
        while not await self._work(storage.batches.clear):
            pass

    async def _work(self, function: Any, **values: Any) -> Any:
        return await self._database.run(partial(function, tenant=self._tenant, id=self.batch.id, **values))

    async def _move(self, status: str, **changes: Any) -> None:
        """To another status, or whatever it has meanwhile."""
        found = await self._work(storage.batches.move, status=status, now=time.time(), **changes)
        self.batch = found or self.batch._replace(status=CANCELLED)

    # -- before

    async def _validate(self) -> None:
        try:
            with await self._run(partial(self._files.read, self.batch.input_file)) as file:
                check = partial(lines.validate, file, self.batch.endpoint, self._model_problem())
                total, problems = await self._run(check)
        except APIError as error:
            total, problems = 0, [lines.BatchProblem("invalid_input_file", error.message)]
        if problems:
            told = msgspec.json.encode(problems).decode()
            ended = partial(storage.batches.end, status=FAILED, now=time.time(), total=total, errors=told)
            self.batch = await self._work(ended)
        else:
            await self._move(IN_PROGRESS, total=total)

    def _model_problem(self) -> Any:
        """Why a name of a model cannot be asked for, by the names as they are now: it is called in a thread."""
        request = self._request(b"")
        app = self._app

        def problem(name: str | None) -> str | None:
            if request is None:
                return "The key that made the batch is no longer valid."
            try:
                app.find_model(request, name, "model")
            except RequestError as error:
                return error.message
            return None

        return problem

    # -- its lines

    async def _run_lines(self) -> None:
        done = bytearray(self.batch.total + 1)
        for number in await self._work(storage.batches.done_lines):
            done[number if number < len(done) else 0] = 1
        try:
            file = await self._run(partial(self._files.read, self.batch.input_file))
        except APIError as error:
            self._fail("invalid_input_file", error.message)
            file = None
        try:
            async for number, data in _unread(self._run, file):
                if number < len(done) and done[number]:
                    continue
                await self._runner.place(self)
                if not self.may_go_on():
                    self._runner.returned()
                    break
                self.num_running += 1
                task = asyncio.get_running_loop().create_task(self._line(number, data))
                self._lines.add(task)
                task.add_done_callback(self._lines.discard)
            while self._lines:
                await asyncio.wait(self._lines, timeout=None if self.is_over else self._left_s())
                if not self.may_go_on():
                    self.cancel()
        finally:
            for task in self._lines:
                task.cancel()
            await asyncio.gather(*self._lines, return_exceptions=True)
            if file is not None:
                file.close()
        await self._move(FINALIZING)

    def _left_s(self) -> float:
        return max(0.0, self.batch.expires - time.time())

    def may_go_on(self) -> bool:
        """Whether lines may begin. Looks at the window and the key."""
        if self._left_s() <= 0:
            self.is_over = True
        elif not self.is_over and self._app.key_holder(self.batch.identity) is None:
            self._fail("invalid_api_key", "The key that made the batch is no longer valid.")
        return not self.is_over

    async def _line(self, number: int, data: bytes) -> None:
        """One request, with its result in the database at the end."""
        try:
            line = lines.read_line(data)
            failed, result = await self._answered(line)
            while True:
                try:
                    has_room = await self._work(
                        storage.batches.record, line=number, failed=failed, result=result, quota=self._app.file_quota
                    )
                    break
                except StorageError as error:
                    log.error("the result of a batch's line waits: %s", error.reason)
                    await asyncio.sleep(AGAIN_S)
            if not has_room:
                self._fail("quota_exceeded", f"The files of the tenant may have {self._app.file_quota} bytes together.")
        finally:
            self.num_running -= 1
            self._runner.returned()

    async def _answered(self, line: lines.BatchLine) -> tuple[bool, bytes]:
        """(whether it failed, its result). Lines under which the engine has died run one at a time: the one that it dies
        of takes no other with it more than once."""
        crashes = 0
        while True:
            async with self._alone if crashes else nullcontext():
                found, run = await self._once(line, crashes)
            if isinstance(found, tuple):
                return found
            crashes += _is_crash(found, run)
            told = dict(found.headers).get("retry-after-ms")
            wait_s = max(WAITS_S[found.code or ""], int(told) / 1000 if told else 0.0)
            await asyncio.sleep(min(LONGEST_WAIT_S, wait_s))

    async def _once(self, line: lines.BatchLine, crashes: int) -> tuple[tuple[bool, bytes] | RequestError, Any]:
        """The same, or why it is to be tried again; and what it held."""
        request = self._request(bytes(line.body))
        if request is None:
            raise asyncio.CancelledError  # its key has ended: so does the batch
        try:
            response = await self._app.answer_line(request)
            status, body = response.status, response.body
        except Exception as failure:
            error = _told(failure, request)
            if self._app.key_holder(self.batch.identity) is None:
                raise asyncio.CancelledError from None
            if error.code in WAITS_S and crashes + _is_crash(error, request.run) < MOST_CRASHES:
                return error, request.run
            status, body = error.status, msgspec.json.encode(errors.contents(error))
        self._app.finished(request, status)
        return (status != 200, lines.answered(line.custom_id, request.id, status, body)), request.run

    def _request(self, body: bytes) -> APIRequest | None:
        """What a client would have sent; None: its key is no longer valid."""
        batch = self.batch
        holder = self._app.key_holder(batch.identity)
        if holder is None:
            return None
        request = APIRequest("POST", batch.endpoint, "", {}, False, False, _NOBODY, body)
        request.route, request.identity = BY_PATH[batch.endpoint]["POST"], batch.identity
        request.tenant, request.access, request.account, request.key_id = holder
        return request

    # -- its files

    async def _finish(self) -> None:
        """The files of its results, and its last status."""
        batch = self.batch = await self._work(storage.batches.find)
        problems = [] if self._problem is None else [self._problem]
        if batch.status == CANCELLING:
            status = CANCELLED
        elif problems:
            status = FAILED
        else:
            status = COMPLETED if batch.completed + batch.failed >= batch.total else EXPIRED
        made: list[Written] = []
        try:
            found = [await self._write(made, failed, status) for failed in (False, True)]
            self.batch = await self._work(
                storage.batches.end,
                status=status,
                now=time.time(),
                output=found[0],
                rejects=found[1],
                errors=msgspec.json.encode(problems).decode(),
            )
        except BaseException:
            for written in made:
                discard(written)
            raise

    async def _write(self, made: list[Written], failed: bool, status: str) -> StoredFile | None:
        """The file of the results that failed, with what has none, or of the others; None: there are none."""
        batch, after, buffer = self.batch, 0, b""
        written = await self._run(self._files.begin)
        made.append(written)
        while rows := await self._work(storage.batches.results, failed=failed, after=after, limit=RESULTS_AT_ONCE):
            after, buffer = rows[-1][0], b"".join(result + b"\n" for _, result in rows)
            await self._run(partial(written.write, buffer))
        if failed and batch.completed + batch.failed < batch.total:
            await self._write_rest(written, status)
        if not written.size:
            discard(written)
            return None
        digest, now = await self._run(written.keep), time.time()
        expires = math.inf if batch.output_ttl is None else now + batch.output_ttl
        name = f"{batch.id}_{'errors' if failed else 'output'}.jsonl"
        return StoredFile(written.id, now, expires, written.size, name, OUTPUT, digest)

    async def _write_rest(self, written: Written, status: str) -> None:
        """A line for each that has no result."""
        done = set(await self._work(storage.batches.done_lines))
        problem = self._problem or lines.BatchProblem(*_UNANSWERED.get(status, ("", "")))
        with suppress(APIError):  # the input is gone: nobody knows what they were called
            with await self._run(partial(self._files.read, self.batch.input_file)) as file:
                async for number, data in _unread(self._run, file):
                    if number not in done:
                        line = lines.read_line(data)
                        rest = lines.unanswered(line.custom_id, problem.code, problem.message)
                        await self._run(partial(written.write, rest + b"\n"))


def _is_crash(error: RequestError, run: Any) -> bool:
    """Whether the engine died while it had the request; else it was not there."""
    return error.code == "engine_restarting" and run is not None and run.submitted > 0


def _told(failure: Exception, request: APIRequest) -> RequestError:
    """What the client is told of it."""
    if isinstance(failure, RequestError):
        return failure
    log.error("request %s failed", request.id, exc_info=failure)
    return APIError(
        "internal_error", "The server failed to answer this request. Quote its request_id when you report it."
    )


async def _unread(run: Any, file: Any) -> Any:
    """Lines of the input, read in a thread."""
    if file is not None:
        found: Iterator[tuple[int, bytes]] = lines.numbered(file)
        while some := await run(partial(lines.some, found)):
            for entry in some:
                yield entry
