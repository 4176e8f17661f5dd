"""Rematerialization: a problem goes in, a solution comes out. Knows no torch."""

if __name__ != "gcpass.solvers":  # a second copy would have classes of its own
    raise ImportError("import this package as gcpass.solvers, not as " + __name__)
