"""The tables, as the steps that made them. A step that was released is never changed; new ones are added at the end."""


def _counted(table: str) -> tuple[str, ...]:
    """Bytes of each tenant's rows, kept by triggers: to add them up took 7 ms of 33,000 rows."""
    return (
        f"INSERT INTO stored SELECT tenant, '{table}', sum(size) FROM {table} GROUP BY tenant",
        f"""CREATE TRIGGER {table}_in AFTER INSERT ON {table} BEGIN
            INSERT INTO stored VALUES (new.tenant, '{table}', new.size)
            ON CONFLICT DO UPDATE SET bytes = bytes + new.size;
        END""",
        f"""CREATE TRIGGER {table}_out AFTER DELETE ON {table} BEGIN
            UPDATE stored SET bytes = bytes - old.size WHERE tenant = old.tenant AND kind = '{table}';
        END""",
    )


# Of each step the statements, which run in one transaction with its number, PRAGMA user_version.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE keys (
            id INTEGER PRIMARY KEY,
            name TEXT NOT NULL UNIQUE,
            tenant TEXT NOT NULL,        -- who owns what its requests leave
            prefix TEXT NOT NULL,        -- of the key, which is shown
            digest BLOB NOT NULL UNIQUE, -- HMAC-SHA-256 of the key with the secret 'keys'
            created REAL NOT NULL,       -- seconds since 1970, as all times
            expires REAL,
            revoked REAL,
            admin INTEGER NOT NULL DEFAULT 0,
            models TEXT,                 -- JSON: names that it may use; NULL: all
            routes TEXT,                 -- JSON: paths that it may use; NULL: all
            weight REAL,
            rpm INTEGER NOT NULL DEFAULT 0,
            tpm INTEGER NOT NULL DEFAULT 0,
            concurrency INTEGER NOT NULL DEFAULT 0,
            input_price REAL NOT NULL DEFAULT 0, -- of a million tokens, as all prices
            cached_price REAL,           -- NULL: as input_price
            output_price REAL NOT NULL DEFAULT 0
        ) STRICT""",
        """CREATE TABLE usage (
            tenant TEXT NOT NULL,
            key INTEGER NOT NULL,        -- keys.id; 0: of a key that is not in the database
            model TEXT NOT NULL,
            hour INTEGER NOT NULL,       -- since 1970
            requests INTEGER NOT NULL,
            failed INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL,
            computed_tokens INTEGER NOT NULL,
            first_token_ms REAL NOT NULL, -- sum, of the `answered`, that had one
            answered INTEGER NOT NULL,
            total_ms REAL NOT NULL,
            cost REAL NOT NULL,
            PRIMARY KEY (tenant, key, model, hour)
        ) STRICT, WITHOUT ROWID""",
        """CREATE TABLE audit (
            id INTEGER PRIMARY KEY,
            at REAL NOT NULL,
            actor TEXT NOT NULL,         -- tenant/name of a key; cli; server
            action TEXT NOT NULL,
            subject TEXT NOT NULL,
            detail TEXT NOT NULL         -- JSON
        ) STRICT""",
        """CREATE TABLE windows (          -- of quotas, so that a restart forgives nothing
            account TEXT NOT NULL,
            kind TEXT NOT NULL,
            level REAL NOT NULL,
            at REAL NOT NULL,
            PRIMARY KEY (account, kind)
        ) STRICT, WITHOUT ROWID""",
        "CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID",
    ),
    (
        """CREATE TABLE responses (        -- of the Responses API, with store: true
            tenant TEXT NOT NULL,
            id TEXT NOT NULL,
            previous TEXT NOT NULL,      -- the id of the one that it goes on from, or empty
            created REAL NOT NULL,
            expires REAL NOT NULL,
            size INTEGER NOT NULL,       -- bytes of body and items
            body BLOB NOT NULL,          -- JSON: the answer
            items BLOB NOT NULL,         -- JSON: what its request brought
            PRIMARY KEY (tenant, id)
        ) STRICT""",
        "CREATE INDEX responses_age ON responses (tenant, expires, created, id, size)",
        "CREATE INDEX responses_end ON responses (expires)",
    ),
    (
        """CREATE TABLE answers (          -- of requests with an Idempotency-Key
            tenant TEXT NOT NULL,
            key TEXT NOT NULL,
            expires REAL NOT NULL,
            size INTEGER NOT NULL,       -- bytes of body
            digest BLOB NOT NULL,        -- SHA-256 of the route and the request's body
            media_type TEXT NOT NULL,
            body BLOB NOT NULL,
            PRIMARY KEY (tenant, key)
        ) STRICT""",
        "CREATE INDEX answers_age ON answers (tenant, expires, key, size)",
        "CREATE INDEX answers_end ON answers (expires)",
    ),
    (
        """CREATE TABLE stored (
            tenant TEXT NOT NULL,
            kind TEXT NOT NULL,          -- the table
            bytes INTEGER NOT NULL,      -- of the tenant's rows in it
            PRIMARY KEY (tenant, kind)
        ) STRICT, WITHOUT ROWID""",
        *_counted("responses"),
        *_counted("answers"),
    ),
    (
        """CREATE TABLE sessions (         -- conversations of requests with a session_id
            tenant TEXT NOT NULL,
            id TEXT NOT NULL,
            turns INTEGER NOT NULL,      -- requests that it has answered
            created REAL NOT NULL,
            used REAL NOT NULL,
            expires REAL NOT NULL,
            size INTEGER NOT NULL,       -- bytes of body
            body BLOB NOT NULL,          -- JSON: messages, or the text of completions
            PRIMARY KEY (tenant, id)
        ) STRICT""",
        "CREATE INDEX sessions_age ON sessions (tenant, used, id, size)",
        "CREATE INDEX sessions_end ON sessions (expires)",
        *_counted("sessions"),
        """CREATE TABLE chats (            -- of the web page
            tenant TEXT NOT NULL,
            id TEXT NOT NULL,
            version INTEGER NOT NULL,    -- one more with each change
            title TEXT NOT NULL,
            folded TEXT NOT NULL,        -- the title, for searches
            created REAL NOT NULL,
            changed REAL NOT NULL,
            size INTEGER NOT NULL,       -- bytes of body
            body BLOB NOT NULL,          -- JSON: its messages
            PRIMARY KEY (tenant, id)
        ) STRICT""",
        "CREATE INDEX chats_age ON chats (tenant, changed, id, size)",
        *_counted("chats"),
    ),
    (
        """CREATE TABLE files (            -- whose contents stand in a folder beside this file
            tenant TEXT NOT NULL,
            id TEXT NOT NULL,
            created REAL NOT NULL,
            expires REAL NOT NULL,       -- infinite: never
            size INTEGER NOT NULL,       -- bytes
            filename TEXT NOT NULL,
            purpose TEXT NOT NULL,
            digest BLOB NOT NULL,        -- SHA-256
            PRIMARY KEY (tenant, id)
        ) STRICT""",
        "CREATE INDEX files_age ON files (tenant, created, id)",
        "CREATE INDEX files_end ON files (expires)",
        *_counted("files"),
    ),
    (
        """CREATE TABLE batches (
            tenant TEXT NOT NULL,
            id TEXT NOT NULL,
            account TEXT NOT NULL,       -- who pays
            identity TEXT NOT NULL,      -- of the key that made it, of KeyCheck
            created REAL NOT NULL,
            expires REAL NOT NULL,       -- what has no result by then gets none
            output_ttl REAL,             -- seconds for which its files are kept; NULL: until they are deleted
            input_file TEXT NOT NULL,
            endpoint TEXT NOT NULL,
            metadata TEXT NOT NULL,      -- JSON
            status TEXT NOT NULL,
            ended INTEGER NOT NULL DEFAULT 0, -- the status is one of the last
            times TEXT NOT NULL DEFAULT '{}', -- JSON: when it came to which status
            total INTEGER NOT NULL DEFAULT 0, -- lines
            completed INTEGER NOT NULL DEFAULT 0,
            failed INTEGER NOT NULL DEFAULT 0,
            bytes INTEGER NOT NULL DEFAULT 0, -- of the results
            errors TEXT NOT NULL DEFAULT '[]', -- JSON: why it failed
            output_file TEXT,
            error_file TEXT,
            PRIMARY KEY (tenant, id)
        ) STRICT""",
        "CREATE INDEX batches_age ON batches (tenant, created, id)",
        "CREATE INDEX batches_input ON batches (tenant, input_file)",
        "CREATE INDEX batches_open ON batches (created) WHERE ended = 0",
        """CREATE TABLE batch_lines (      -- results of batches that have not ended
            tenant TEXT NOT NULL,
            batch TEXT NOT NULL,
            line INTEGER NOT NULL,       -- of the input, from 1
            failed INTEGER NOT NULL,
            result BLOB NOT NULL,        -- JSON: the line of the output
            PRIMARY KEY (tenant, batch, line)
        ) STRICT""",
    ),
)
