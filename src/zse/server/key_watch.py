"""Keys that change while the server runs: the key file is read again when it has changed, and requests whose key has ended end."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from zse.errors import ConfigError
from zse.server.app import App
from zse.server.keys import Key, read_file, weights

log = logging.getLogger("zse.server")

PERIOD_S = 1.0  # a key that was revoked or has expired is used for no longer


class KeyWatch:
    """Looks once a second. A file that is not right changes nothing and is named in the log, once.

    Args:
        path: of the key file; None: only ends of keys are looked for.
        keys: what was read of it.
        tenant_weights: of tenants whose key has none."""

    def __init__(
        self, app: App, path: str | None, keys: tuple[Key, ...] = (), tenant_weights: Mapping[str, float] = {}
    ):
        self._app, self._path, self._keys, self._tenant_weights = app, path, keys, tenant_weights
        self._state: tuple | None = None  # of the file when it was read last
        self._problem = ""  # of what was read last, as it stands in the log
        # Of its own: the other threads may be busy with the prompts of just the client that is to be stopped.
        self._thread = ThreadPoolExecutor(1, "zse-keys")

    async def run(self) -> None:
        """Until it is cancelled."""
        is_file = self._path is not None and os.path.isfile(self._path)
        while True:
            await asyncio.sleep(PERIOD_S)
            if is_file:
                await self.look()
            self._app.end_invalid()

    def read_now(self) -> None:
        """SIGHUP: read the file, and say in the log what came of it."""
        self._keys, self._problem = (), ""
        self._take(self._read())

    async def look(self) -> None:
        """Read the file if it may have changed since it was read."""
        state = await asyncio.get_running_loop().run_in_executor(self._thread, self._file_state)
        # What was written less than a second before it was read may have been written again with the same time.
        if state != self._state or state is not None and state[0] > time.time() - 2 * PERIOD_S:
            self._state = state
            self._take(await asyncio.get_running_loop().run_in_executor(self._thread, self._read))

    def _file_state(self) -> tuple | None:
        assert self._path is not None
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return max(found.st_mtime, found.st_ctime), found.st_size, found.st_mode, found.st_dev, found.st_ino

    def _read(self) -> tuple[Key, ...] | ConfigError:
        assert self._path is not None
        try:
            return read_file(self._path)
        except ConfigError as error:
            return error

    def _take(self, keys: tuple[Key, ...] | ConfigError) -> None:
        """What the file holds now becomes true, or what is wrong with it is told."""
        problem = str(keys) if isinstance(keys, ConfigError) else ""
        if problem and problem != self._problem:
            log.error("the keys stay as they were: %s", problem)
        self._problem = problem
        if isinstance(keys, ConfigError) or keys == self._keys:
            return
        self._keys = keys
        self._app.replace_keys(keys, weights(keys, self._tenant_weights))
        self._app.end_invalid()
        log.warning("read %d keys of %d tenants", len(keys), len({key.tenant for key in keys}))
