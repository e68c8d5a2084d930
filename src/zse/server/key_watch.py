"""Keys that change while the server runs: the key file and the database are read again when they have changed, and
requests whose key has ended end."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from zse.errors import ConfigError
from zse.server import database as storage
from zse.server.app import App
from zse.server.keys import Key, read_file, weights

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.server.database.connection import Database
    from zse.server.database.keys import Keyring

log = logging.getLogger("zse.server")

PERIOD_S = 1.0  # a key that was revoked or has expired is used for no longer


class KeyWatch:
    """Looks once a second. A file that is not right, and a database that cannot be read, change nothing and are named
    in the log, once.

    Args:
        path: of the key file; None: only ends of keys are looked for.
        keys: what was read of it, or given.
        tenant_weights: of accounts whose key has none.
        database, keyring: and what was read of it; None: there is none."""

    def __init__(
        self,
        app: App,
        path: str | None,
        keys: tuple[Key, ...] = (),
        tenant_weights: Mapping[str, float] = {},
        database: "Database | None" = None,
        keyring: "Keyring | None" = None,
    ):
        self._app, self.database, self._keyring = app, database, keyring
        self._database_problem = ""
        self._set(path, keys, tenant_weights)
        # Of its own: the other threads may be busy with the prompts of just the client that is to be stopped.
        self._thread = ThreadPoolExecutor(1, "zse-keys")

    def _set(self, path: str | None, keys: tuple[Key, ...], tenant_weights: Mapping[str, float]) -> None:
        self._path, self._keys, self._tenant_weights = path, keys, tenant_weights
        self._is_file = path is not None and os.path.isfile(path)
        self._state: tuple | None = None  # of the file when it was read last
        self._problem = ""  # of what was read last, as it stands in the log

    def give(self, path: str | None, keys: tuple[Key, ...], tenant_weights: Mapping[str, float]) -> None:
        """Others in the place of those that __init__ had, beside the database's."""
        self._set(path, keys, tenant_weights)
        self._replace()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            if self._is_file:
                await self.look()
            if self.database is not None:
                await self._look_at_database(self.database)
            self._app.end_invalid()

    def read_now(self) -> None:
        """SIGHUP: read the file, and say in the log what came of it."""
        self._keys, self._problem = (), ""
        self._take(self._read())

    async def _look_at_database(self, database: "Database") -> None:
        """Read the keys if another process has changed something."""
        assert self._keyring is not None
        try:
            if await database.run(database.version, writes=False) != self._keyring.version:
                await self.refresh()
        except storage.connection.StorageError as error:
            if error.reason != self._database_problem:
                log.error("the keys stay as they were: %s: %s", database.path, error.reason)
            self._database_problem = error.reason
        else:
            self._database_problem = ""

    async def refresh(self) -> None:
        """Read the keys of the database. Raises StorageError."""
        database, before = self.database, self._keyring
        assert database is not None and before is not None
        self._keyring = await database.run(lambda connection: storage.keys.read(database, connection), writes=False)
        if self._keyring.valid != before.valid:
            self._replace()

    async def look(self) -> None:
        """Read the file if it may have changed since it was read."""
        state = await asyncio.get_running_loop().run_in_executor(self._thread, self._file_state)
        # What was written less than a second before it was read may have been written again with the same time.
        if state != self._state or state is not None and state[0] > time.time() - 2 * PERIOD_S:
            self._state, path = state, self._path
            keys = await asyncio.get_running_loop().run_in_executor(self._thread, self._read)
            if path == self._path:  # no other was given meanwhile
                self._take(keys)

    def _file_state(self) -> tuple | None:
        if self._path is None:
            return None
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return max(found.st_mtime, found.st_ctime), found.st_size, found.st_mode, found.st_dev, found.st_ino

    def _read(self) -> tuple[Key, ...] | ConfigError:
        if self._path is None:
            return self._keys
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
        self._replace()

    def _replace(self) -> None:
        keys = self._keys + (() if self._keyring is None else self._keyring.valid)
        self._app.replace_keys(keys, weights(keys, self._tenant_weights))
        self._app.end_invalid()
        log.warning("read %d keys of %d tenants", len(keys), len({key.tenant for key in keys}))
