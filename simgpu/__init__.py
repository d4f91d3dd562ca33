"""simgpu: run a kernel's Python twin on an emulated CTA and count what Nsight Compute would count.

>>> import simgpu
>>> x = simgpu.GlobalTensor("x", simgpu.float32, (1024,))
>>> launch = simgpu.Launch(lambda cta, x: cta.load(x[32 * cta.lane], site="x.load"), grid=1, block=32, args=(x,))
>>> simgpu.simulate(launch).table["x.load"].sectors
32
"""

from importlib import import_module

_HOMES = {
    "simgpu.cta": ("CTA",),
    "simgpu.errors": ("SimError",),
    "simgpu.launch": ("Kernel", "Launch", "kernel"),
    "simgpu.run": ("Result", "simulate"),
    "simgpu.tensor": ("GlobalTensor", "bfloat16", "float16", "float32", "float64", "int8", "int32", "int64", "uint8",
                      "uint16", "uint32"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = list(_HOME)


def __getattr__(name: str):
    # Names are imported when first used: numba takes most of a second to load, and `simgpu occupancy` does without.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
