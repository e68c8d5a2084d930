"""The tables of documents.db, as the steps that made them. A step that was released is never changed; new ones are added at
the end.

Of each step the statements, which run in one transaction with its number, PRAGMA user_version."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE owners (
            number INTEGER PRIMARY KEY AUTOINCREMENT, -- stands before each of the tenant's words in `words`
            tenant TEXT NOT NULL UNIQUE,
            bytes INTEGER NOT NULL,      -- documents.size of all
            changes INTEGER NOT NULL     -- one more with each change of chunks or vectors: memory is compared with it
        ) STRICT""",
        """CREATE TABLE documents (
            row INTEGER PRIMARY KEY AUTOINCREMENT, -- of this version; a new version has a new row
            tenant TEXT NOT NULL,
            id TEXT NOT NULL,
            version INTEGER NOT NULL,
            name TEXT NOT NULL,
            kind TEXT NOT NULL,
            title TEXT NOT NULL,
            digest BLOB NOT NULL,        -- SHA-256 of the file
            options TEXT NOT NULL,       -- how it was cut: the same bytes cut otherwise are another version
            size INTEGER NOT NULL,       -- bytes of its chunks' text, names and metadata
            file_bytes INTEGER NOT NULL,
            num_pages INTEGER NOT NULL,
            num_chunks INTEGER NOT NULL,
            num_tokens INTEGER NOT NULL,
            created REAL NOT NULL,       -- seconds since 1970, of its first version
            updated REAL NOT NULL,       -- of this one
            metadata TEXT NOT NULL,      -- JSON: name → string, number or boolean
            warnings TEXT NOT NULL,      -- JSON: lines for its sender
            vector_model TEXT NOT NULL,  -- whose vectors it has, or empty
            num_embedded INTEGER NOT NULL, -- chunks, from the first, that have a vector
            UNIQUE (tenant, id)
        ) STRICT""",
        "CREATE INDEX documents_content ON documents (tenant, digest)",
        """CREATE TABLE chunks (
            id INTEGER PRIMARY KEY AUTOINCREMENT, -- never given twice: memory asks for those after its last
            tenant TEXT NOT NULL,
            document INTEGER NOT NULL,   -- documents.row
            position INTEGER NOT NULL,
            text TEXT NOT NULL,
            headings TEXT NOT NULL,      -- JSON
            first_page INTEGER NOT NULL,
            last_page INTEGER NOT NULL,
            num_tokens INTEGER NOT NULL,
            num_words INTEGER NOT NULL,  -- as `words` has them
            norm REAL NOT NULL           -- length of the vector of 1 + ln(frequency) over its words
        ) STRICT""",
        "CREATE UNIQUE INDEX chunks_place ON chunks (tenant, document, position)",
        "CREATE INDEX chunks_order ON chunks (tenant, id, document, num_words, norm)",
        """CREATE TABLE labels (          -- documents.metadata, to find by
            tenant TEXT NOT NULL,
            name TEXT NOT NULL,
            value TEXT NOT NULL,         -- JSON
            document INTEGER NOT NULL,
            PRIMARY KEY (tenant, name, value, document)
        ) STRICT, WITHOUT ROWID""",
        "CREATE INDEX labels_document ON labels (tenant, document)",
        """CREATE TABLE vectors (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            tenant TEXT NOT NULL,
            document INTEGER NOT NULL,
            model TEXT NOT NULL,
            first INTEGER NOT NULL,      -- chunks.position of the first; the others follow
            num INTEGER NOT NULL,
            data BLOB NOT NULL           -- f16 [num, width], little-endian
        ) STRICT""",
        "CREATE INDEX vectors_order ON vectors (tenant, model, id)",
        "CREATE INDEX vectors_document ON vectors (tenant, document)",
        # rowid: chunks.id. The words come cut (rag/words.py), each as NUMBER·WORD with its owner's number, so that the postings
        # and the statistics of one tenant hold nothing of another's.
        "CREATE VIRTUAL TABLE words USING fts5(text, tokenize = 'ascii')",
        "CREATE VIRTUAL TABLE postings USING fts5vocab(words, instance)",
    ),
)
