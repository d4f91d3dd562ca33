"""The one exception type a user's mistake raises; the command line turns it into exit code 2."""


class SimError(Exception):
    """Bad input, or something the device would refuse: one line that names the place and the value."""


class DataDependent(SimError):
    """An address or a branch needs a loaded value, but the run carries addresses only."""
