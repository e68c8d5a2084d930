"""Which tokens run next. Pure: see scheduler.py, which also says what each file is for."""
