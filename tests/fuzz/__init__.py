"""Random training programs, compared with eager; see `tests.fuzz.__main__`."""
