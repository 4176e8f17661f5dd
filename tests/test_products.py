"""What share of the peak products reach, against values counted by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from gcpass.cost import MATRIX_EFFICIENCY, node_cost
from gcpass.flops import call_of, node_flops
from gcpass.hardware import find_device, this_cpu
from gcpass.products import Product, product_efficiency, products_of
from tests.nodes import node_of

A100 = find_device("A100")  # 108 multiprocessors, 312 TFLOP/s in half precision
PEAK = A100.peak_flops("bfloat16")
aten = torch.ops.aten


def share(product: Product, rate: float = PEAK, item_bytes: int = 2) -> float:
    return product.flops / (rate * product.seconds(rate, item_bytes, A100))


def test_a_full_wave_wastes_nothing():
    # 12 x 9 tiles of 256 x 128, one for each multiprocessor
    assert share(Product(1, 12 * 256, 9 * 128, 1024)) == pytest.approx(1)
    assert share(Product(9, 12 * 256, 128, 1024)) == pytest.approx(1)


def test_tiles_over_the_last_wave_cost_another():
    # 110 tiles of 128 x 128 take two waves. The 220 of 128 x 64 take three of a half,
    # at 128 / 3 of the 43 FLOPs per byte that the cache needs: best, not 110 / 108.
    found = share(Product(1, 110 * 128, 128, 128))
    assert found == pytest.approx((110 / 108) / (3 / 2 * 43 / (128 / 3)))


def test_tiles_over_the_edge_compute_for_nothing():
    # 64 columns are the least: of 16, a quarter counts. 108 x 64 rows fill the device;
    # tiles of 64 x 64 read 128 * 2 bytes for 2 * 64 * 64 FLOPs, 32 per byte of 43
    assert share(Product(1, 108 * 64, 16, 128)) == pytest.approx(0.25 * 32 / 43)


def test_small_tiles_keep_vector_units_busy():
    # 19.5 TFLOP/s in float32 need 16 times fewer bytes of the cache
    found = share(Product(1, 108 * 64, 64, 128), A100.peak_flops("float32"), 4)
    assert found == pytest.approx(1)


def test_deep_products_are_split():
    # A weight's gradient: 4 tiles of 128 x 128 would leave 104 multiprocessors idle.
    # In 16 parts 64 are busy, and each part is written and read in float32.
    product = Product(1, 256, 256, 16384)
    alone = 2 * 128 * 128 * 16384 / (PEAK / 108)
    assert product.seconds(PEAK, 2, A100) < alone / 8
    assert share(product) < 64 / 108


@pytest.mark.parametrize("name", ["A100", "H100", "L4", "MI300X"])
def test_no_product_is_faster_than_the_peak(name):
    device = find_device(name)
    sizes = (1, 7, 64, 100, 1000, 5000)
    for dtype, item_bytes in (("bfloat16", 2), ("float32", 4), ("float64", 8)):
        rate = device.peak_flops(dtype)
        for batch, m, n, k in itertools.product((1, 3), sizes, sizes, sizes):
            product = Product(batch, m, n, k)
            assert product.seconds(rate, item_bytes, device) >= product.flops / rate


def convolution(transposed):
    return lambda x, w: aten.convolution(x, w, None, *PAIR, transposed, [0, 0], 2)


def gradients(transposed, to_input):
    mask = [to_input, True, False]
    return lambda g, x, w: aten.convolution_backward(
        g, x, w, None, *PAIR, transposed, [0, 0], 2, mask
    )


X = torch.empty(2, 6, 9, 10)
W = torch.empty(8, 3, 3, 2)  # two groups
V = torch.empty(6, 4, 3, 2)  # transposed, two groups
OUT = torch.empty(2, 8, 4, 9)  # of X, W with stride (2, 1)
BACK = torch.empty(2, 8, 19, 11)  # of X, V with stride (2, 1)
PAIR = ([2, 1], [0, 0], [1, 1])  # stride, padding, dilation


@pytest.mark.parametrize(
    "node",
    [
        node_of(aten.mm, torch.empty(3, 5), torch.empty(5, 7)),
        node_of(aten.bmm, torch.empty(4, 3, 5), torch.empty(4, 5, 7)),
        node_of(aten.addmm, torch.empty(7), torch.empty(3, 5), torch.empty(5, 7)),
        node_of(
            aten.baddbmm, torch.empty(7), torch.empty(4, 3, 5), torch.empty(4, 5, 7)
        ),
        node_of(convolution(False), X, W),
        node_of(convolution(True), X, V),
        node_of(gradients(False, True), OUT, X, W),
        node_of(gradients(True, False), BACK, X, V),
    ],
    ids=lambda node: f"{node.target}",
)
def test_products_have_the_flops_of_their_call(node):
    found = products_of(call_of(node))
    assert found
    # where a stride leaves windows incomplete their mean is rounded up
    flops = sum(product.flops for product in found)
    assert node_flops(node) <= flops < 1.1 * node_flops(node)


def test_the_gradient_of_an_input_is_as_fast_as_the_forward():
    x, w = torch.empty(8, 16, 56, 56), torch.empty(16, 16, 3, 3)
    same = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    forward = node_of(lambda x, w: aten.convolution(x, w, None, *same), x, w)
    backward = node_of(
        lambda g, x, w: aten.convolution_backward(
            g, x, w, None, *same, [True, False, False]
        ),
        *(x, x, w),
    )
    assert products_of(call_of(forward)) == products_of(call_of(backward))


def test_a_transposed_convolution_is_the_gradient_of_another():
    forward = products_of(call_of(node_of(convolution(True), X, V)))
    # 2 images of 19 x 11 positions, 4 channels a group; of 9 x 10 positions with 3
    # channels a group and 3 x 2 weights each, the share that covers one, rounded up
    assert forward == (Product(2, 2 * 19 * 11, 4, -(-3 * 6 * 90 // 209)),)
    gradient = products_of(call_of(node_of(gradients(True, True), BACK, X, V)))
    assert gradient[0] == Product(2, 2 * 90, 3, 4 * 6)
    assert gradient[1] == Product(2, 3, 4 * 6, 2 * 90)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_few_results_leave_most_of_the_device_idle(dtype):
    thin = node_of(
        aten.mm, torch.empty(64, 4096, dtype=dtype), torch.empty(4096, 3, dtype=dtype)
    )
    rate = A100.peak_flops(str(dtype))
    assert product_efficiency(call_of(thin), rate, A100) < 0.1


def test_a_bias_does_not_decide_the_rate():
    factors = torch.empty(4096, 4096, dtype=torch.bfloat16)
    alone = node_cost(node_of(aten.mm, factors, factors), A100, bytes_moved=0)
    scaled = node_of(
        lambda a, b, c: aten.addmm(c, a, b, out_dtype=torch.float32),
        *(factors, factors, torch.empty(4096)),
    )
    assert node_cost(scaled, A100, bytes_moved=0).seconds == pytest.approx(
        alone.seconds, rel=0.01
    )


def test_convolutions_are_rows_of_positions_and_columns_of_channels():
    forward = node_of(convolution(False), X, W)
    rows = 2 * 4 * 9  # images and positions
    assert products_of(call_of(forward)) == (Product(2, rows, 4, 3 * 3 * 2),)
    backward = node_of(gradients(False, True), OUT, X, W)
    to_input, to_weight = products_of(call_of(backward))
    # 4 channels with 3 x 2 weights, at 36 positions for the 90 of the input, rounded up
    assert to_input == Product(2, 2 * 9 * 10, 3, -(-4 * 3 * 2 * 36 // 90))
    assert to_weight == Product(2, 4, 18, rows)


def test_only_devices_with_multiprocessors_are_tiled():
    thin = node_of(aten.mm, torch.empty(5000, 4096), torch.empty(4096, 3))
    assert product_efficiency(call_of(thin), 1e12, this_cpu()) == 1.0
    assert product_efficiency(call_of(thin), PEAK, A100) < 0.1
    relu = node_of(aten.relu, X)
    assert product_efficiency(call_of(relu), PEAK, A100) == 1.0


def test_scales_are_no_factors():
    a = torch.empty(108 * 64, 256, dtype=torch.float8_e4m3fn)
    b = torch.empty(64, 256, dtype=torch.float8_e4m3fn).t()
    scale = torch.ones(())
    node = node_of(
        lambda a, b, s: aten._scaled_mm(a, b, s, s, out_dtype=torch.bfloat16),
        *(a, b, scale),
    )
    rate = 2 * PEAK  # of a device with float8; tiles of 64 x 64 read 128 bytes
    found = product_efficiency(call_of(node), rate, A100)
    assert found == pytest.approx((2 * 64 * 64 / 128) * 312e12 / 43 / rate)


def test_a_group_for_each_channel_runs_on_the_vector_units():
    images = torch.empty(64, 512, 56, 56, dtype=torch.bfloat16)
    weight = torch.empty(512, 1, 3, 3, dtype=torch.bfloat16)
    node = node_of(
        lambda x, w: aten.convolution(
            x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 512
        ),
        *(images, weight),
    )
    cost = node_cost(node, A100, bytes_moved=0)
    flops = 2 * 64 * 512 * 56 * 56 * 9
    assert cost.flops == flops
    by_vectors = flops / (0.7 * MATRIX_EFFICIENCY * A100.peak_flops("float32"))
    assert cost.seconds == pytest.approx(by_vectors, rel=1e-3)
