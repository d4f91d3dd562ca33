"""The one exception type a user's mistake raises; the command line turns it into exit code 2."""


class SimError(Exception):
    """Bad input, or something the device would refuse: one line that names the place and the value."""


class Fault(SimError):
    """What the device would refuse while it runs: some lane's address, barrier or shuffle."""


class DataDependent(SimError):
    """An address or a branch needs a loaded value, but the run carries addresses only."""
