"""Triton kernels of the CIFAR ResNets: a 3x3 convolution with the batch norms on both sides of it in one launch.

Activations lie pixel by pixel, (images, rows, columns, channels), as P pixels of C channels. What a convolution leaves in
memory is its raw output y and the two sums over pixels that batch norm needs (T floats apart, so that those of all layers lie
in one piece); whoever reads y normalises it on the way in:

    bn(y) = scale · y + shift,   scale = gamma · rstd,   shift = beta - mean · scale.

Backwards, g is the gradient of bn(y) and its sums are those of beta and gamma, G1 = sum g and G2 = sum g · (y - mean) · rstd.
The gradient of y is then linear in g and y, with a constant per channel:

    dy = scale · (g - G1/P - (y - mean) · rstd · G2/P).
"""

import triton
import triton.language as tl


@triton.jit
def _statistics(sums, c, T, P, eps):
    """Mean and inverse deviation of the channels c, from the sums of y and of y²."""
    mean = tl.load(sums + c) / P
    variance = tl.load(sums + T + c) / P - mean * mean
    return mean, 1 / tl.sqrt(tl.maximum(variance, 0.0) + eps)


@triton.jit
def _affine(sums, gamma, beta, c, T, P, eps):
    """scale and shift of the channels c."""
    mean, rstd = _statistics(sums, c, T, P, eps)
    scale = tl.load(gamma + c) * rstd
    return scale, tl.load(beta + c) - mean * scale


@triton.jit
def _backward_affine(sums, grads, gamma, c, T, P, eps):
    """dy = of_g · g + of_y · y + constant, per channel."""
    mean, rstd = _statistics(sums, c, T, P, eps)
    scale = tl.load(gamma + c) * rstd
    mean_g, slope = tl.load(grads + c) / P, tl.load(grads + T + c) / P * rstd
    return scale, -scale * slope, scale * (slope * mean - mean_g)


@triton.jit
def _add_sums(sums, c, T, first, second):
    """Add a tile's column sums to the totals."""
    tl.atomic_add(sums + c, tl.sum(first, 0), sem="relaxed")
    tl.atomic_add(sums + T + c, tl.sum(second, 0), sem="relaxed")


@triton.jit
def _where(p, SIDE: tl.constexpr):
    """Image, row and column of the pixels p of square images."""
    return p // (SIDE * SIDE), p // SIDE % SIDE, p % SIDE


@triton.jit
def convolve(
    x, w, y, sums, x_sums, x_gamma, x_beta, P, x_P, T, eps,
    IN: tl.constexpr, OUT: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr,
    BLOCK_IN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = x * w and its sums; with NORM, x is raw, and relu(bn(x)) is what is convolved. SIDE is that of y's images."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ci, co = tl.arange(0, BLOCK_IN), tl.arange(0, OUT)
    image, row, column = _where(p, SIDE)
    if NORM:
        scale, shift = _affine(x_sums, x_gamma, x_beta, ci, T, x_P, eps)
    total = tl.zeros((BLOCK, OUT), tl.float32)
    for tap in range(9):
        r, s = row * STRIDE + tap // 3 - 1, column * STRIDE + tap % 3 - 1
        inside = (p < P) & (r >= 0) & (r < SIDE * STRIDE) & (s >= 0) & (s < SIDE * STRIDE)
        at = ((image * SIDE * STRIDE + r) * SIDE * STRIDE + s) * IN
        a = tl.load(x + at[:, None] + ci[None, :], inside[:, None] & (ci < IN)[None, :], other=0.0)
        if NORM:
            a = tl.maximum(a.to(tl.float32) * scale[None, :] + shift[None, :], 0.0)
            a = tl.where(inside[:, None], a, 0.0).to(x.dtype.element_ty)
        taps = tl.load(w + (co * 9 * IN)[None, :] + tap * IN + ci[:, None], (ci < IN)[:, None], other=0.0)
        total = tl.dot(a, taps.to(x.dtype.element_ty), total, input_precision="ieee")
    rounded = total.to(y.dtype.element_ty)
    tl.store(y + p[:, None] * OUT + co[None, :], rounded, (p < P)[:, None])
    value = rounded.to(tl.float32)
    _add_sums(sums, co, T, value, value * value)


@triton.jit
def join(
    y, sums, gamma, beta, x, out, P, T, eps,
    C: tl.constexpr, X_C: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = relu(bn(y) + shortcut of x); X_C 0 means no shortcut. A strided one takes every
    STRIDE-th pixel, with channels of zeros on both sides."""
    p, c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C)
    scale, shift = _affine(sums, gamma, beta, c, T, P, eps)
    here, mask = p[:, None] * C + c[None, :], (p < P)[:, None]
    value = tl.load(y + here, mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if X_C > 0:
        image, row, column = _where(p, SIDE)
        at = ((image * SIDE + row) * STRIDE * SIDE + column) * STRIDE * X_C
        k = c - (C - X_C) // 2
        value += tl.load(x + at[:, None] + k[None, :], mask & ((k >= 0) & (k < X_C))[None, :], other=0.0).to(tl.float32)
    tl.store(out + here, tl.maximum(value, 0.0).to(out.dtype.element_ty), mask)


@triton.jit
def pooled_grad(
    grad, out, y, sums, g, grads, P, T, eps, C: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """From the gradient of the mean over an image's pixels to g of the last batch norm, and its sums."""
    p, c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C)
    here, mask = p[:, None] * C + c[None, :], (p < P)[:, None]
    mean, rstd = _statistics(sums, c, T, P, eps)
    of_pixel = tl.load(grad + (p // (SIDE * SIDE))[:, None] * C + c[None, :], mask, other=0.0) / (SIDE * SIDE)
    of_pixel = tl.where(tl.load(out + here, mask, other=0.0) > 0, of_pixel, 0.0).to(g.dtype.element_ty)
    tl.store(g + here, of_pixel, mask)
    value = of_pixel.to(tl.float32)
    centred = (tl.load(y + here, mask, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    _add_sums(grads, c, T, value, value * centred)


@triton.jit
def input_grad(
    g, y, sums, grads, gamma, w,
    x_y, x_sums, x_gamma, x_beta, x_out, skip, x_g, x_grads, P, x_P, T, eps,
    IN: tl.constexpr, OUT: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, BLOCK_START: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a convolution's input, through that input's relu, to x_g of the batch norm before it, and its sums.

    (g, y, sums, grads, gamma) belong to the convolution's own batch norm, x_… to the one before it. At the start of a block the
    input is x_out, the sum of a branch and a shortcut, and the gradient `skip` of this block's shortcut is added. SIDE is x's.
    """
    p, ci, co = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, IN), tl.arange(0, OUT)
    image, row, column = _where(p, SIDE)
    of_g, of_y, constant = _backward_affine(sums, grads, gamma, co, T, P, eps)
    total = tl.zeros((BLOCK, IN), tl.float32)
    for tap in range(9):
        r, s = row + 1 - tap // 3, column + 1 - tap % 3
        inside = (p < x_P) & (r >= 0) & (r < SIDE) & (s >= 0) & (s < SIDE)
        if STRIDE > 1:
            inside = inside & (r % STRIDE == 0) & (s % STRIDE == 0)
        at = ((image * SIDE // STRIDE + r // STRIDE) * (SIDE // STRIDE) + s // STRIDE) * OUT
        at, mask = at[:, None] + co[None, :], inside[:, None]
        dy = tl.load(g + at, mask, other=0.0).to(tl.float32) * of_g[None, :] + constant[None, :]
        dy += tl.load(y + at, mask, other=0.0).to(tl.float32) * of_y[None, :]
        dy = tl.where(mask, dy, 0.0).to(g.dtype.element_ty)
        taps = tl.load(w + (co * 9 * IN)[:, None] + tap * IN + ci[None, :])
        total = tl.dot(dy, taps.to(g.dtype.element_ty), total, input_precision="ieee")
    here, mask = p[:, None] * IN + ci[None, :], (p < x_P)[:, None]
    raw = tl.load(x_y + here, mask, other=0.0).to(tl.float32)
    mean, rstd = _statistics(x_sums, ci, T, x_P, eps)
    if BLOCK_START:
        even = (row % STRIDE == 0) & (column % STRIDE == 0) & (p < x_P)
        at = ((image * SIDE // STRIDE + row // STRIDE) * (SIDE // STRIDE) + column // STRIDE) * OUT + (OUT - IN) // 2
        total += tl.load(skip + at[:, None] + ci[None, :], even[:, None], other=0.0).to(tl.float32)
        passes = tl.load(x_out + here, mask, other=0.0) > 0
    else:
        scale, shift = _affine(x_sums, x_gamma, x_beta, ci, T, x_P, eps)
        passes = raw * scale[None, :] + shift[None, :] > 0
    rounded = tl.where(passes & mask, total, 0.0).to(x_g.dtype.element_ty)
    tl.store(x_g + here, rounded, mask)
    value = rounded.to(tl.float32)
    _add_sums(x_grads, ci, T, value, value * (raw - mean[None, :]) * rstd[None, :])


@triton.jit
def weight_grad(
    g, y, sums, grads, gamma, x, x_sums, x_gamma, x_beta, dw, P, x_P, T, eps, pixels,
    IN: tl.constexpr, OUT: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr,
    BLOCK_IN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds to dw what `pixels` pixels of y say of one row of taps; x as in `convolve`, g and y as in `input_grad`."""
    ci, co, tap_row = tl.arange(0, BLOCK_IN), tl.arange(0, OUT), tl.program_id(1)
    of_g, of_y, constant = _backward_affine(sums, grads, gamma, co, T, P, eps)
    if NORM:
        scale, shift = _affine(x_sums, x_gamma, x_beta, ci, T, x_P, eps)
    else:
        scale, shift = tl.zeros((BLOCK_IN,), tl.float32), tl.zeros((BLOCK_IN,), tl.float32)
    left = tl.zeros((OUT, BLOCK_IN), tl.float32)
    middle = tl.zeros((OUT, BLOCK_IN), tl.float32)
    right = tl.zeros((OUT, BLOCK_IN), tl.float32)
    for start in range(tl.program_id(0) * pixels, tl.program_id(0) * pixels + pixels, BLOCK):
        p = start + tl.arange(0, BLOCK)
        image, row, column = _where(p, SIDE)
        at, mask = p[:, None] * OUT + co[None, :], (p < P)[:, None]
        dy = tl.load(g + at, mask, other=0.0).to(tl.float32) * of_g[None, :] + constant[None, :]
        dy += tl.load(y + at, mask, other=0.0).to(tl.float32) * of_y[None, :]
        dy = tl.trans(tl.where(mask, dy, 0.0).to(g.dtype.element_ty))
        r = row * STRIDE + tap_row - 1
        inside = (p < P) & (r >= 0) & (r < SIDE * STRIDE)
        for tap in tl.static_range(3):
            s = column * STRIDE + tap - 1
            there = inside & (s >= 0) & (s < SIDE * STRIDE)
            at_x = ((image * SIDE * STRIDE + r) * SIDE * STRIDE + s) * IN
            a = tl.load(x + at_x[:, None] + ci[None, :], there[:, None] & (ci < IN)[None, :], other=0.0)
            if NORM:
                a = tl.maximum(a.to(tl.float32) * scale[None, :] + shift[None, :], 0.0)
                a = tl.where(there[:, None], a, 0.0).to(x.dtype.element_ty)
            if tap == 0:
                left = tl.dot(dy, a, left, input_precision="ieee")
            elif tap == 1:
                middle = tl.dot(dy, a, middle, input_precision="ieee")
            else:
                right = tl.dot(dy, a, right, input_precision="ieee")
    to = dw + (co * 9 * IN)[:, None] + tap_row * 3 * IN + ci[None, :]
    known = (ci < IN)[None, :] & (co < OUT)[:, None]
    tl.atomic_add(to, left, known, sem="relaxed")
    tl.atomic_add(to + IN, middle, known, sem="relaxed")
    tl.atomic_add(to + 2 * IN, right, known, sem="relaxed")
