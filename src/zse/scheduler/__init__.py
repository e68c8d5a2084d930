"""Which tokens run next. Pure: see scheduler.py."""
