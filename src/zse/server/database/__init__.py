"""What the server keeps in SQLite: keys, usage, quotas' windows, the audit log, and what tenants had
stored: responses, sessions, chats, files, batches, answers of Idempotency-Keys. Nothing of it is imported by a start without a database."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
