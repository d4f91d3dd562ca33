import numpy as np

from simgpu import GlobalTensor, Launch, float32


def stencil(*, n: int = 1024, width: int = 16) -> Launch:  # the host side: parameters in, launch out
    height = 256 // width
    data = np.random.default_rng(0).random((n, n), np.float32)
    x = GlobalTensor("x", float32, (n, n), init=lambda: data)
    y = GlobalTensor("y", float32, (n, n), init=lambda: np.zeros((n, n), np.float32))

    def check(arrays):  # what --mode values compares the result with
        cross = data[1:-1, 1:-1] + data[:-2, 1:-1] + data[2:, 1:-1] + data[1:-1, :-2] + data[1:-1, 2:]
        np.testing.assert_allclose(arrays["y"][1:-1, 1:-1], cross / 5, rtol=1e-5)

    return Launch(body, grid=(n // width, n // height), block=(width, height), args=(x, y), check=check)


def body(cta, x, y):  # the device side, one statement for one statement
    width, height = cta.block[:2]
    n = x.shape[0]
    tile = cta.shared("tile", float32, (height + 2, width + 2))
    column, row = cta.bx * width + cta.tx, cta.by * height + cta.ty
    tx, ty = cta.tx + 1, cta.ty + 1
    cta.store(tile[ty, tx], cta.load(x[row, column], site="x.load"), site="tile.store")
    halo = [
        ("up", (cta.ty == 0) & (row > 0), -1, 0),
        ("down", (cta.ty == height - 1) & (row < n - 1), 1, 0),
        ("left", (cta.tx == 0) & (column > 0), 0, -1),
        ("right", (cta.tx == width - 1) & (column < n - 1), 0, 1),
    ]
    for name, edge, dy, dx in halo:
        with cta.where(edge):
            value = cta.load(x[row + dy, column + dx], site=f"x.{name}")
            cta.store(tile[ty + dy, tx + dx], value, site=f"tile.{name}")
    cta.sync()
    with cta.where((row > 0) & (row < n - 1) & (column > 0) & (column < n - 1)):
        total = sum(cta.load(tile[ty + dy, tx + dx], site=f"read.{name}") for name, _, dy, dx in halo)
        centre = cta.load(tile[ty, tx], site="read.centre")
        cta.store(y[row, column], (total + centre) * 0.2, site="y.store")
