"""What the server keeps in SQLite: keys, usage, quotas' windows, the audit log."""
