"""Errors of the solver layer; `gcpass.errors` builds on them."""


class GcpassError(Exception):
    """Base class of every error that gcpass raises on purpose."""


class InvalidProblemError(GcpassError):
    """The problem or the instance file breaks the problem's own rules."""


class SolverError(GcpassError):
    """A solver failed for a reason other than infeasibility."""
